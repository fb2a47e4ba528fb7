"""Clip rules in slime: its own policy loss, with the bounds of the batch in place of ``eps_clip``.

    --loss-type custom_loss --custom-loss-function-path bandpo_slime.policy_loss
    --custom-config-path band.yaml

where ``band.yaml`` holds ``clip: Band(KL(), 0.05)``, or ``method: DAPO()``, which wants ``--calculate-per-token-loss``
for its average, or one line says that it gets slime's; every key in it becomes an argument of
slime. Of the methods only those that are PPO's surrogate on other bounds are possible, since the loss stays slime's.

slime's KL term, importance-sampling correction, entropy bonus, context parallelism and metrics (``pg_clipfrac``,
``ppo_kl``) stay as they are: its ``policy_loss_function`` does the work and takes tensors where it expects two numbers.

Anchor: the trainer's own log-probabilities (``batch["log_probs"]``), or under ``--use-rollout-logprobs`` the sampler's.
With a custom loss slime always makes the extra forward pass for the former, also with one update per rollout.

Written for slime 0.3.1. slime needs Megatron, so it was tested with that one function and its inputs stood in for.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from bandpo.errors import InvalidValue
from bandpo.integrations._adapt import epsilons, read_rule

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def policy_loss(
    args: Namespace,
    batch: dict[str, Any],
    logits: Float[Tensor, "1 tokens vocabulary"],
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """slime's custom-loss interface.

    Args:
        args: slime's arguments; not changed. ``clip`` is a clip rule in its text form, or ``method`` a method;
            ``Band(KL(), 0.05)`` without both.
        batch: slime's micro-batch; not changed.
        logits: The model's output.
        sum_of_sample_mean: slime's reduction.

    Raises:
        ValueError: ``clip`` or ``method`` cannot be read, a method that is more than bounds, sequence-level ratios
            (``--advantage-estimator gspo``), or a counted old log-probability that is NaN or above 0.
    """
    from slime.backends.megatron_utils.loss import policy_loss_function

    return policy_loss_function(*with_bounds(args, batch), logits, sum_of_sample_mean)


def with_bounds(args: Namespace, batch: dict[str, Any]) -> tuple[Namespace, dict[str, Any]]:
    """Copies of slime's arguments and micro-batch in which ``eps_clip`` and ``eps_clip_high`` are the bounds' tensors.

    Raises:
        ValueError: see `policy_loss`.
    """
    per_token = getattr(args, "calculate_per_token_loss", False)
    average = "token-mean" if per_token else "seq-mean-token-mean"
    named = (getattr(args, name, None) for name in ("method", "clip"))
    rule = read_rule("", *named, average=average)
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
    return args, batch
