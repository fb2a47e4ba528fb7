"""Clip rules in slime, and in miles, which grew out of it: their own policy loss, with the bounds of the batch in place
of ``eps_clip``.

    --loss-type custom_loss --custom-loss-function-path bandpo_slime.policy_loss
    --custom-config-path band.yaml

where ``band.yaml`` holds ``method: Band(KL(), 0.05)`` or ``method: DAPO()``. A whole method wants
``--calculate-per-token-loss`` for a mean over tokens, or one line says that it gets slime's average; every key in the
file becomes an argument of slime. In miles it is ``bandpo_slime.miles_policy_loss``. Of the methods only those that are
PPO's surrogate on other bounds are possible, as the loss stays theirs. ``record: /runs/mine/tokens`` writes the tokens
of every loss there, see `bandpo.Recorder`.

KL term, importance-sampling correction, masks, entropy bonus, context parallelism and metrics (``pg_clipfrac``,
``ppo_kl``) stay as they are: ``policy_loss_function`` does the work and takes tensors where it expects two numbers.

Anchor: the trainer's own log-probabilities (``batch["log_probs"]``), or under ``--use-rollout-logprobs`` the sampler's.
With a custom loss slime always makes the extra forward pass for the former, also with one update per rollout. Under
miles' ``--skip-actor-forward-only`` every ratio is 1, and no clip does anything.

Written for slime 0.3.1 and miles of 2026-08-21 (commit 31f1ca9). Both need Megatron, so they were tested with that one
function and its inputs stood in for.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from bandpo.errors import InvalidValue
from bandpo.integrations._adapt import epsilons, read_rule, record
from bandpo.methods import Method
from bandpo.rules import ClipRule

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Reduction = Callable[[torch.Tensor], torch.Tensor]


def policy_loss(
    args: Namespace, batch: dict[str, Any], logits: Float[Tensor, "1 tokens vocabulary"], reduction: Reduction
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """slime's custom-loss interface.

    Args:
        args: slime's arguments; not changed. ``method`` is a clip rule or a method in its text form;
            ``Band(KL(), 0.05)`` if not given.
        batch: slime's micro-batch; not changed.
        logits: The model's output.
        reduction: slime's ``sum_of_sample_mean``.

    Raises:
        ValueError: ``method`` cannot be read, a method that is more than bounds, sequence-level ratios
            (``--advantage-estimator gspo``), a counted old log-probability that is NaN or above 0, or a record under
            context parallelism.
    """
    from slime.backends.megatron_utils import loss

    return _bounded("slime", loss, args, batch, logits, reduction)


def miles_policy_loss(
    args: Namespace, batch: dict[str, Any], logits: Float[Tensor, "1 tokens vocabulary"], reduction: Reduction
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """The same in miles."""
    from miles.backends.training_utils.loss_hub import losses

    return _bounded("miles", losses, args, batch, logits, reduction)


def _bounded(
    framework: str, home: Any, args: Namespace, batch: dict[str, Any], logits: Tensor, reduction: Reduction
) -> tuple[Tensor, dict[str, Tensor]]:
    rule, bounded_args, bounded = with_bounds(args, batch)
    folder, compute = getattr(args, "record", None), getattr(home, "get_log_probs_and_entropy", None)

    def compute_and_record(*arguments: Any, **named: Any) -> Any:
        found = compute(*arguments, **named)
        _record(folder, framework, rule, args, batch, found[-1] if isinstance(found, tuple) else found)
        return found

    if not folder:
        return home.policy_loss_function(bounded_args, bounded, logits, reduction)
    home.get_log_probs_and_entropy = compute_and_record  # the loss's log-probabilities, on their way into it
    try:
        return home.policy_loss_function(bounded_args, bounded, logits, reduction)
    finally:
        home.get_log_probs_and_entropy = compute


def _record(
    folder: str, framework: str, rule: ClipRule, args: Namespace, batch: dict[str, Any], found: dict[str, Any]
) -> None:
    logp, masks = found["log_probs"], batch["loss_masks"]
    if [len(x) for x in logp] != [len(x) for x in masks]:
        raise InvalidValue(
            f"record={folder}: under context parallelism a rank has parts of sequences; leave it out"
        )
    old = batch.get("rollout_log_probs" if args.use_rollout_logprobs else "log_probs") or logp
    ids = batch.get("unconcat_tokens")
    tensors = [pad_sequence(list(x), batch_first=True) for x in (logp, old, batch["advantages"], masks)]
    columns = {
        "logp_rollout": batch.get("rollout_log_probs"),
        "entropy": found.get("entropy"),
        "tokens": ids and [x[-len(m) :] for x, m in zip(ids, masks, strict=True)],
    }
    more = {name: pad_sequence(list(x), batch_first=True) for name, x in columns.items() if x}
    record(folder, framework, Method(rule), *tensors, sampler=args.use_rollout_logprobs, **more)


def with_bounds(args: Namespace, batch: dict[str, Any]) -> tuple[ClipRule, Namespace, dict[str, Any]]:
    """The rule, and copies of arguments and micro-batch in which ``eps_clip`` and ``eps_clip_high`` are its bounds.

    Raises:
        ValueError: see `policy_loss`.
    """
    per_token = getattr(args, "calculate_per_token_loss", False)
    average = "token-mean" if per_token else "seq-mean-token-mean"
    rule = read_rule("", getattr(args, "method", None), average=average)
    if args.advantage_estimator == "gspo":
        raise InvalidValue(
            "--advantage-estimator gspo makes one ratio of a sequence, but the bounds are per token; choose another"
        )
    args, batch = copy.copy(args), dict(batch)
    source = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
    if batch.get(source):  # else the framework takes the current ones: the ratio is 1
        per_sample = batch[source]
        logp_old, mask = torch.cat(per_sample), torch.cat(batch["loss_masks"])
        # Under context parallelism the masks are whole and the log-probabilities this rank's part, without padding.
        whole = mask.shape == logp_old.shape
        logp_old, args.eps_clip, args.eps_clip_high = epsilons(rule, logp_old, mask if whole else None)
        batch[source] = list(logp_old.split([len(sample) for sample in per_sample]))
    return rule, args, batch
