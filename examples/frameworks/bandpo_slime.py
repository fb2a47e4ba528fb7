"""Clip rules in slime, and in miles, which grew out of it: their own policy loss, with the bounds of the batch in place
of ``eps_clip``.

    --loss-type custom_loss --custom-loss-function-path bandpo_slime.policy_loss
    --custom-megatron-init-path bandpo_slime.start --custom-config-path band.yaml

where ``band.yaml`` holds ``method: Band(KL(), 0.05)`` or ``method: DAPO()``. A whole method wants
``--calculate-per-token-loss`` for a mean over tokens, or one line says that it gets slime's average; every key in the
file becomes an argument of slime. In miles the functions are ``miles_policy_loss`` and ``miles_start`` of this module.
Of the methods only those that are PPO's surrogate on other bounds, with or without a dual clip, are possible, as the
loss stays theirs. ``record: /runs/mine/tokens`` writes the tokens of every loss there, see `bandpo.Recorder`.

KL term, importance-sampling correction, masks, entropy bonus, context parallelism and metrics (``pg_clipfrac``,
``ppo_kl``) stay as they are: ``policy_loss_function`` does the work and takes tensors where it expects two numbers.
Settings under which it would compute another loss are refused.

Anchor: the trainer's own log-probabilities (``batch["log_probs"]``), or under ``--use-rollout-logprobs`` the sampler's.
With a custom loss slime always makes the extra forward pass for the former, also with one update per rollout. Under
miles' ``--skip-actor-forward-only`` every ratio is 1, and no clip does anything. Neither tells its loss with which
weights a token was sampled, its reward, or whether it was cut off. The number of the rollout and of the update are in
the record under ``--custom-megatron-before-train-step-hook-path bandpo_slime.before_train_step``.

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
from bandpo.errors import InvalidValue
from bandpo.integrations import check_settings, dual_clip_of, epsilons, read_bounds, record
from bandpo.objectives import DualClip

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Reduction = Callable[[torch.Tensor], torch.Tensor]


def start(args: Namespace) -> None:
    """Check slime's arguments, before anything is generated.

    Raises:
        ValueError: ``method`` cannot be read, it is more than bounds, or an argument makes slime's loss another one.
    """
    read_settings("slime", args)


PLACE: dict[str, Any] = {}
"""The rollout that is trained on, and the updates on it so far, if `before_train_step` is told them."""


def before_train_step(args: Namespace, rollout_id: int, step_id: int, *_: Any) -> None:
    """Note for the record which update on which rollout follows, as slime and miles tell their hook."""
    PLACE.update(step=rollout_id, generation=rollout_id, update=step_id)


def miles_start(args: Namespace) -> None:
    """Check miles' arguments in the same way."""
    read_settings("miles", args)


def policy_loss(
    args: Namespace, batch: dict[str, Any], logits: Float[Tensor, "1 tokens vocabulary"], reduction: Reduction
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Compute slime's policy loss under the method's bounds, in the signature of its custom losses.

    Args:
        args: slime's arguments; not changed. ``method`` is a clip rule or a method in its text form;
            ``Band(KL(), 0.05)`` if it is left out.
        batch: slime's micro-batch; not changed.
        logits: The model's output.
        reduction: slime's ``sum_of_sample_mean``.

    Raises:
        ValueError: as for `start`; a counted old log-probability is NaN or above 0; or a record under context
            parallelism.
    """
    from slime.backends.megatron_utils import loss

    return _bounded("slime", loss, args, batch, logits, reduction)


def miles_policy_loss(
    args: Namespace, batch: dict[str, Any], logits: Float[Tensor, "1 tokens vocabulary"], reduction: Reduction
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Compute miles' policy loss in the same way."""
    from miles.backends.training_utils.loss_hub import losses

    return _bounded("miles", losses, args, batch, logits, reduction)


def _bounded(
    framework: str, module: Any, args: Namespace, batch: dict[str, Any], logits: Tensor, reduction: Reduction
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call a module's ``policy_loss_function`` with the bounds of the batch, and record its tokens."""
    method = read_settings(framework, args)
    bounded_args, bounded_batch = with_bounds(method, args, batch)
    folder = getattr(args, "record", None)
    # --recompute-loss-function computes each loss a second time, within the backward pass.
    recomputed = torch._C._current_graph_task_id() != -1
    if not folder or recomputed:
        return module.policy_loss_function(bounded_args, bounded_batch, logits, reduction)

    compute = module.get_log_probs_and_entropy

    def compute_and_record(*arguments: Any, **named: Any) -> Any:
        result = compute(*arguments, **named)
        # slime returns a pair, miles what is the second of it.
        outputs = result[-1] if isinstance(result, tuple) else result
        _record(folder, framework, method, args, batch, outputs)
        return result

    # The loss looks this function up in its module, and its result is all that a record lacks.
    module.get_log_probs_and_entropy = compute_and_record
    try:
        return module.policy_loss_function(bounded_args, bounded_batch, logits, reduction)
    finally:
        module.get_log_probs_and_entropy = compute


def read_settings(framework: str, args: Namespace) -> Method:
    """Return the method that the arguments name, with slime's own dual clip beside a rule alone.

    Raises:
        ValueError: as for `start`.
    """
    per_token = getattr(args, "calculate_per_token_loss", False)
    average = "token-mean" if per_token else "seq-mean-token-mean"
    method = read_bounds("", getattr(args, "method", None), aggregation=average, dual_clip=True)
    check_settings(framework, args, method)
    dual_clip = getattr(args, "eps_clip_c", None)
    if method.only_rule and dual_clip is not None:
        return Method(method.clip, DualClip(dual_clip))
    return method


def with_bounds(method: Method, args: Namespace, batch: dict[str, Any]) -> tuple[Namespace, dict[str, Any]]:
    """Return copies of arguments and micro-batch in which ``eps_clip``, ``eps_clip_high`` and ``eps_clip_c`` are the
    method's.

    Raises:
        ValueError: a counted old log-probability is NaN or above 0.
    """
    args, batch = copy.copy(args), dict(batch)
    args.eps_clip_c = dual_clip_of(method)
    source = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
    if not batch.get(source):
        # The framework takes the current log-probabilities: every ratio is 1.
        return args, batch
    per_sample = batch[source]
    logp_old = torch.cat(per_sample)
    mask = torch.cat(batch["loss_masks"])
    # Under context parallelism the masks are whole and the log-probabilities this rank's part, without padding.
    whole = mask.shape == logp_old.shape
    logp_old, args.eps_clip, args.eps_clip_high = epsilons(method.clip, logp_old, mask if whole else None)
    batch[source] = list(logp_old.split([len(sample) for sample in per_sample]))
    return args, batch


def _record(
    folder: str,
    framework: str,
    method: Method,
    args: Namespace,
    batch: dict[str, Any],
    outputs: dict[str, Any],
) -> None:
    """Write a micro-batch, and what the model gave for its tokens, to the record."""
    logp, masks = outputs["log_probs"], batch["loss_masks"]
    if [len(x) for x in logp] != [len(x) for x in masks]:
        raise InvalidValue(
            f"record={folder}: under context parallelism a rank has parts of sequences; leave it out"
        )
    old = batch.get("rollout_log_probs" if args.use_rollout_logprobs else "log_probs") or logp
    samples = batch.get("unconcat_tokens")
    columns = {
        "logp_rollout": batch.get("rollout_log_probs"),
        "entropy": outputs.get("entropy"),
        # A sample's tokens begin with its prompt's.
        "tokens": samples and [x[-len(mask) :] for x, mask in zip(samples, masks, strict=True)],
    }
    tensors = [pad_sequence(list(x), batch_first=True) for x in (logp, old, batch["advantages"], masks)]
    padded: dict[str, Any] = {
        name: pad_sequence(list(x), batch_first=True) for name, x in columns.items() if x
    }
    if samples:
        padded["prompts"] = [x[: -len(mask)] for x, mask in zip(samples, masks, strict=True)]
    names = ("temperature", "top_p", "top_k")
    sampling = {name: getattr(args, f"rollout_{name}", None) for name in names}
    record(
        folder,
        framework,
        method,
        *tensors,
        old_is_rollout=args.use_rollout_logprobs,
        sampling=sampling,
        **padded,
        **PLACE,
    )
