"""Clip rules in miles, which grew out of slime: the same flag, arguments and limits as `bandpo_slime`.

    --loss-type custom_loss --custom-loss-function-path bandpo_miles.policy_loss
    --custom-config-path band.yaml

where ``band.yaml`` holds ``clip: Band(KL(), 0.05)``, or ``method: DAPO()``. miles' KL term, truncated importance
sampling, sequence masks, entropy bonus and metrics stay as they are.

Anchor: ``batch["log_probs"]``, the trainer's own, or under ``--use-rollout-logprobs`` the sampler's. Under
``--skip-actor-forward-only`` without that flag every ratio is 1, and no clip does anything.

Written for miles of 2026-08-21 (commit 31f1ca9). miles needs Megatron, so it was tested with its
``policy_loss_function`` and its inputs stood in for.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bandpo_slime import with_bounds

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def policy_loss(
    args: Namespace,
    batch: dict[str, Any],
    logits: Float[Tensor, "1 tokens vocabulary"],
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """miles' custom-loss interface.

    Args:
        args: miles' arguments; not changed. ``clip`` is a clip rule in its text form, or ``method`` a method;
            ``Band(KL(), 0.05)`` without both.
        batch: miles' micro-batch; not changed.
        logits: The model's output.
        sum_of_sample_mean: miles' reduction.

    Raises:
        ValueError: see `bandpo_slime.policy_loss`.
    """
    from miles.backends.training_utils.loss_hub.losses import policy_loss_function

    return policy_loss_function(*with_bounds(args, batch), logits, sum_of_sample_mean)
