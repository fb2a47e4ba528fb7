"""Clip rules in slime, and in its fork miles: their own policy loss, with bounds per token in place of ``eps_clip``.

    --loss-type custom_loss --custom-loss-function-path bandpo_slime.policy_loss
    --custom-megatron-init-path bandpo_slime.start --custom-config-path band.yaml

In miles the functions are ``bandpo_slime.miles_policy_loss`` and ``bandpo_slime.miles_start``. The keys of
``band.yaml`` become arguments of slime:

- ``method: Band(KL(), 0.05)``: a clip rule, or a method that is PPO's surrogate with other bounds, with or without a
  dual clip. If a method has a mean over tokens, set ``--calculate-per-token-loss``; otherwise slime's loss aggregation
  replaces it, with a warning in the log.
- ``record: /runs/mine/tokens``: a folder to which the tokens of every loss are written, see `bandpo.audit.Recorder`.
  slime and miles do not pass rewards, truncation flags or the version of the weights to their loss. With
  ``--custom-megatron-before-train-step-hook-path bandpo_slime.before_train_step`` the record has the numbers of rollout
  and update.

KL term, importance-sampling correction, masks, entropy bonus, context parallelism and metrics (``pg_clipfrac``,
``ppo_kl``) are unchanged, as slime's ``policy_loss_function`` accepts tensors for its two epsilons. Settings under
which it would compute another loss raise an error.

The old log-probabilities are the trainer's own (``batch["log_probs"]``) before the first update on a rollout; with
``--use-rollout-logprobs`` the sampler's; and with ``--keep-old-actor`` those of the weights that sampled, as the
trainer computes them. With the trainer's own and one update for each rollout, every ratio is 1, and no clip acts:
`start` raises an error.

Written for slime 0.3.1 (commit 624b824) and miles of 2026-08-21 (commit 31f1ca9).
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from bandpo import Method
from bandpo.core.errors import InvalidValue
from bandpo.core.objectives import DualClip
from bandpo.integrations import check_anchor, check_settings, dual_clip_of, epsilons, read_bounds, record

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

TO_SAMPLER = "use --use-rollout-logprobs"
"""The argument that makes the ratio refer to the sampler's log-probabilities."""
Reduction = Callable[[torch.Tensor], torch.Tensor]


def start(args: Namespace) -> None:
    """Check slime's arguments at the start of training.

    Raises:
        ValueError: ``method`` cannot be read, it is not PPO's surrogate, every ratio would be 1, or an argument of
            slime would change the loss.
    """
    _check_anchor(read_settings("slime", args), args)


def miles_start(args: Namespace) -> None:
    """Check miles' arguments at the start of training; see `start`."""
    _check_anchor(read_settings("miles", args), args)


def _check_anchor(method: Method, args: Namespace) -> None:
    """Check that ratios can differ from 1, and print the log-probabilities that they refer to."""
    keeps_old_actor = getattr(args, "keep_old_actor", False)
    if args.use_rollout_logprobs:
        setting = "--use-rollout-logprobs"
    else:
        setting = "--keep-old-actor, as the trainer computes them" if keeps_old_actor else "the default"
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    lines = check_anchor(
        method,
        samples // (args.global_batch_size or samples),
        sampler=args.use_rollout_logprobs or keeps_old_actor,
        setting=setting,
        # Which of slime's two programs runs is not among its arguments.
        asynchronous=None,
        to_sampler=TO_SAMPLER,
        more_updates="use --num-steps-per-rollout 2",
        accepted=getattr(args, "accept_idle_clip", False),
        accept="accept_idle_clip: true",
    )
    print(*[f"bandpo: {line}" for line in lines], sep="\n", flush=True)


PROGRESS: dict[str, Any] = {}
"""The numbers of the current rollout and update, if `before_train_step` is called."""


def before_train_step(args: Namespace, rollout_id: int, step_id: int, *_: Any) -> None:
    """Save the numbers of rollout and update for the record; the hook of slime and miles before a training step."""
    PROGRESS.update(step=rollout_id, generation=rollout_id, update=step_id)


def policy_loss(
    args: Namespace, batch: dict[str, Any], logits: Float[Tensor, "1 tokens vocabulary"], reduction: Reduction
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Compute slime's policy loss with the method's bounds, in the signature of slime's custom losses.

    Args:
        args: slime's arguments, which are not modified.
        batch: slime's micro-batch, which is not modified.
        logits: The model's output.
        reduction: slime's ``sum_of_sample_mean``.

    Raises:
        ValueError: as for `start`; an old log-probability is NaN or above 0; or ``record`` is set under context
            parallelism.
    """
    from slime.backends.megatron_utils import loss

    return _loss_with_bounds("slime", loss, args, batch, logits, reduction)


def miles_policy_loss(
    args: Namespace, batch: dict[str, Any], logits: Float[Tensor, "1 tokens vocabulary"], reduction: Reduction
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Compute miles' policy loss with the method's bounds; see `policy_loss`."""
    from miles.backends.training_utils.loss_hub import losses

    return _loss_with_bounds("miles", losses, args, batch, logits, reduction)


def _loss_with_bounds(
    framework: str, module: Any, args: Namespace, batch: dict[str, Any], logits: Tensor, reduction: Reduction
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call the framework's loss with the bounds of the batch, and record its tokens.

    Args:
        framework: ``slime`` or ``miles``.
        module: The framework's module with ``policy_loss_function``.
        args: As for `policy_loss`.
        batch: As for `policy_loss`.
        logits: As for `policy_loss`.
        reduction: As for `policy_loss`.
    """
    method = read_settings(framework, args)
    args_with_bounds, batch_with_bounds = with_bounds(method, args, batch)
    folder = getattr(args, "record", None)
    # With --recompute-loss-function each loss is computed a second time, in the backward pass.
    is_recomputed = torch._C._current_graph_task_id() != -1
    if not folder or is_recomputed:
        return module.policy_loss_function(args_with_bounds, batch_with_bounds, logits, reduction)

    compute = module.get_log_probs_and_entropy

    def compute_and_record(*function_args: Any, **kwargs: Any) -> Any:
        result = compute(*function_args, **kwargs)
        # slime returns a pair, miles only its second element.
        outputs = result[-1] if isinstance(result, tuple) else result
        _record(folder, framework, method, args, batch, outputs)
        return result

    # The loss calls this function of its module for log-probabilities and entropies, which the record needs.
    module.get_log_probs_and_entropy = compute_and_record
    try:
        return module.policy_loss_function(args_with_bounds, batch_with_bounds, logits, reduction)
    finally:
        module.get_log_probs_and_entropy = compute


def read_settings(framework: str, args: Namespace) -> Method:
    """Return the method of the arguments, with slime's own dual clip if the method is a clip rule alone.

    Raises:
        ValueError: as for `start`.
    """
    per_token = getattr(args, "calculate_per_token_loss", False)
    aggregation = "token-mean" if per_token else "seq-mean-token-mean"
    to_sampler = "" if args.use_rollout_logprobs else TO_SAMPLER
    method = read_bounds(
        "", getattr(args, "method", None), aggregation=aggregation, dual_clip=True, to_sampler=to_sampler
    )
    check_settings(framework, args, method)
    dual_clip = getattr(args, "eps_clip_c", None)
    if method.only_rule and dual_clip is not None:
        return Method(method.clip, DualClip(dual_clip))
    return method


def with_bounds(method: Method, args: Namespace, batch: dict[str, Any]) -> tuple[Namespace, dict[str, Any]]:
    """Return copies of arguments and micro-batch with the method's ``eps_clip``, ``eps_clip_high`` and ``eps_clip_c``.

    Raises:
        ValueError: an old log-probability is NaN or above 0.
    """
    args = copy.copy(args)
    batch = dict(batch)
    args.eps_clip_c = dual_clip_of(method)
    old_key = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
    if not batch.get(old_key):
        # The framework uses the current log-probabilities as the old ones, so every ratio is 1.
        return args, batch

    logp_per_sample = batch[old_key]
    logp_old = torch.cat(logp_per_sample)
    mask = torch.cat(batch["loss_masks"])
    # Under context parallelism a rank has the masks of whole samples, but log-probabilities of its parts only. Those
    # have no padding.
    is_whole = mask.shape == logp_old.shape
    bounds = epsilons(method.clip, logp_old, mask if is_whole else None)
    args.eps_clip = bounds.low
    args.eps_clip_high = bounds.high
    batch[old_key] = list(bounds.logp_old.split([len(sample) for sample in logp_per_sample]))
    return args, batch


def _record(
    folder: str,
    framework: str,
    method: Method,
    args: Namespace,
    batch: dict[str, Any],
    outputs: dict[str, Any],
) -> None:
    """Write a micro-batch to the record.

    Args:
        folder: The folder of the record.
        framework: ``slime`` or ``miles``.
        method: The method of the run.
        args: The framework's arguments.
        batch: The micro-batch, with lists of one tensor per sample.
        outputs: The log-probabilities and entropies of the model, lists as well.
    """
    logp = outputs["log_probs"]
    masks = batch["loss_masks"]
    if [len(x) for x in logp] != [len(x) for x in masks]:
        raise InvalidValue(
            f"record={folder}: under context parallelism a rank has parts of sequences; leave it out"
        )
    logp_old = batch.get("rollout_log_probs" if args.use_rollout_logprobs else "log_probs") or logp
    columns = {"logp_rollout": batch.get("rollout_log_probs"), "entropy": outputs.get("entropy")}
    samples = batch.get("unconcat_tokens")
    prompts = None
    if samples:
        # A sample has the tokens of its prompt and then those of its response.
        columns["tokens"] = [x[-len(mask) :] for x, mask in zip(samples, masks, strict=True)]
        prompts = [x[: -len(mask)] for x, mask in zip(samples, masks, strict=True)]

    names = ("temperature", "top_p", "top_k")
    record(
        folder,
        framework,
        method,
        _pad(logp),
        _pad(logp_old),
        _pad(batch["advantages"]),
        _pad(masks),
        old_is_rollout=args.use_rollout_logprobs,
        prompts=prompts,
        sampling={name: getattr(args, f"rollout_{name}", None) for name in names},
        **{name: _pad(tensors) for name, tensors in columns.items() if tensors},
        **PROGRESS,
    )


def _pad(tensors: Any) -> Tensor:
    """Return tensors of samples as one tensor of shape (samples, time), padded with 0."""
    return pad_sequence(list(tensors), batch_first=True)
