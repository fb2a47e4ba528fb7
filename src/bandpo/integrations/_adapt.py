"""What the adapters share: rules from text, PPO's epsilons per token, and the loss of packed tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from bandpo.clipping import ClipRule, bands
from bandpo.losses import LossOutputs, policy_loss
from bandpo.notation import parse_rule
from bandpo.radius import Radius

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

DEFAULT_CLIP = "Band(KL(), 0.05)"
"""The rule where a framework's settings name none."""


@functools.lru_cache
def as_rule(clip: ClipRule | str) -> ClipRule:
    """A clip rule from its text form or as it is; text is parsed once per process, not once per batch.

    Raises:
        ValueError: the text names no rule, or its radius depends on what a framework does not tell its loss.
    """
    rule = clip if isinstance(clip, ClipRule) else parse_rule(clip)
    for radius in (band.radius for band in bands(rule).values()):
        if isinstance(radius, Radius) and radius.needs:
            raise ValueError(
                f"{radius!r} depends on the moment's {radius.needs}, which this framework does not tell its loss; give "
                "a number or BySurprisal(...), or train with `bandpo train` or BandGRPOTrainer, which know it"
            )
    return rule


class Epsilons(NamedTuple):
    """A clip rule in the form of PPO's hyperparameters, one pair per token."""

    logp_old: Float[Tensor, "*shape"]
    """The old log-probabilities, 0 where the mask is: frameworks mask by multiplying, and 0·NaN is NaN."""
    low: Float[Tensor, "*shape"]
    """``1 − lower``, so that ``1 − low`` is the lower bound."""
    high: Float[Tensor, "*shape"]
    """``upper − 1``."""


def epsilons(
    clip: ClipRule, logp_old: Float[Tensor, "*shape"], mask: Float[Tensor, "*shape"] | None = None
) -> Epsilons:
    """The pair to hand a framework that clamps at ``1 − low`` and ``1 + high``; float32 or wider, detached.

    Args:
        clip: The clip rule.
        logp_old: Log-probabilities (nats) that the bounds are anchored at, in the shape of the framework's ratio.
        mask: 0 (or False) for tokens that do not count, which may hold anything.

    Raises:
        ValueError: a counted log-probability is NaN or above 0.

    >>> from bandpo import FixedClip
    >>> epsilons(FixedClip(0.2, 0.28), torch.tensor([[-1.0, -2.0]])).high
    tensor([[0.2800, 0.2800]])
    """
    if mask is not None:
        logp_old = logp_old.masked_fill(mask == 0, 0.0)
    bounds = clip.bounds(logp_old)
    # expm1 keeps the digits that 1 − exp() would lose for the tight bounds of a likely token.
    return Epsilons(logp_old, -torch.expm1(bounds.log_lower), torch.expm1(bounds.log_upper))


def sum_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    *,
    clip: ClipRule,
    dual_clip: float | None = None,
) -> LossOutputs:
    """`bandpo.policy_loss` summed over the counted tokens, 0 if there are none (rejected or truncated samples).

    ``weights ≥ 0`` multiply each token's loss: it is proportional to the advantage's size, so they go there.
    """
    if not mask.any():
        metrics = policy_loss(*torch.zeros(3, 1, 1, device=logp.device)).metrics
        return LossOutputs(logp.masked_fill(mask == 0, 0.0).sum(), metrics)
    if weights is not None:
        advantages = advantages * weights
    return policy_loss(logp, logp_old, advantages, mask, clip=clip, dual_clip=dual_clip, aggregation="sum")


def token_weights(reduce: Callable[[Tensor], Tensor], mask: Tensor) -> Tensor:
    """What each token's loss counts for in a framework's own reduction, by differentiating the latter: it is linear."""
    with torch.enable_grad():
        probe = torch.zeros_like(mask, dtype=torch.float32, requires_grad=True)
        return torch.autograd.grad(reduce(probe), probe)[0]
