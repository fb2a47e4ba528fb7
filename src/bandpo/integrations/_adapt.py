"""What the adapters share: settings read, PPO's epsilons per token, and a loss that the framework has averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bandpo.errors import InvalidValue
from bandpo.loss import LossOutputs, policy_loss
from bandpo.methods import Method
from bandpo.objectives import DualClip, Objective, Surrogate
from bandpo.radius import Radius
from bandpo.rule_check import check
from bandpo.rules import ClipRule, bands
from bandpo.text import as_method, parse

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def read_parts(prefix: str = "", **settings: Any) -> Method:
    """What the settings of a framework ask for, refused where it cannot be had there.

    Args:
        prefix: Where the settings stand, for the error: ``trainer.algorithm.``.
        settings: ``method``, ``clip``, ``objective``, ``level`` and ``dual_clip`` as for `bandpo.policy_loss`, None
            where not given. By default PPO's surrogate under ``Band(KL(), 0.05)``.

    Raises:
        ValueError: a setting cannot be read, `bandpo.check` refuses it, or a radius depends on what a framework does
            not tell its loss; the message starts with the setting's name.

    >>> read_parts(method="DAPO()").clip
    FixedClip(low=0.2, high=0.28)
    """
    given = {name: value for name, value in settings.items() if value is not None}
    for name, value in given.items():
        with _naming(prefix + name):
            (_check_text if isinstance(value, str) else _check)(name, value)
    with _naming(f"{prefix}method"):
        return composed(**given)


def composed(
    method: Any = None, clip: Any = None, objective: Any = None, level: Any = None, dual_clip: Any = None
) -> Method:
    """A method, or a clip rule with what stands beside it."""
    beside = {"clip": clip, "objective": objective, "level": level}
    beside = {name: value for name, value in beside.items() if value is not None}
    if method is not None and beside:
        raise InvalidValue(f"method={method!r} already says what {' and '.join(beside)} would; leave one out")
    made = as_method(method, clip)
    if objective is not None:
        made = replace(
            made, objective=parse(objective, Objective) if isinstance(objective, str) else objective
        )
    if level is not None:
        made = replace(made, level=level)
    return made if dual_clip is None else replace(made, objective=DualClip(dual_clip, made.objective))


def read_rule(prefix: str = "", **settings: Any) -> ClipRule:
    """`read_parts` for a framework that can be given bounds alone, since the rest of the loss is its own.

    Raises:
        ValueError: see `read_parts`; or the method is not PPO's surrogate on one ratio per token.

    >>> read_rule(method="DAPO()"), read_rule()
    (FixedClip(low=0.2, high=0.28), Band(divergence=KL(), radius=0.05, max_ratio=10.0))
    """
    parts = read_parts(prefix, **settings)
    if (parts.objective, parts.level) != (Surrogate(), "token"):
        raise InvalidValue(
            f"{prefix}method: {settings['method']!r} is {parts.objective!r} per {parts.level}, but this framework's "
            "loss can only be given bounds per token; name a clip rule such as 'FixedClip(0.2, 0.28)'"
        )
    return parts.clip


@contextmanager
def _naming(setting: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"{setting}: {error}") from error


def _check(name: str, value: Any) -> None:
    parts = composed(**{name: value})
    _refuse_moving_radii(parts.clip)
    check(parts.clip)
    check(parts.objective)


_check_text = lru_cache(_check)  # verl reads its settings for each loss


def _refuse_moving_radii(rule: ClipRule) -> None:
    for radius in (band.radius for band in bands(rule).values()):
        if isinstance(radius, Radius) and radius.needs:
            raise InvalidValue(
                f"{radius!r} depends on {radius.needs}, which this framework does not tell its loss; give "
                "a number or BySurprisal(...), or train with `bandpo train` or BandGRPOTrainer, which know it"
            )


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
    parts: Method,
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
) -> LossOutputs:
    """`bandpo.policy_loss` summed over the counted tokens, for a framework that averages before or after.

    Without a counted token (rejected or truncated samples) it is 0 and has a gradient, and the same metrics: other
    processes may wait for both.
    """
    if not mask.any():
        metrics = policy_loss(*torch.zeros(3, 1, 1, device=logp.device)).metrics
        return LossOutputs(logp.masked_fill(mask == 0, 0.0).sum(), metrics)
    return policy_loss(logp, logp_old, advantages, mask, method=parts, weights=weights, aggregation="sum")


def reduced_loss(
    parts: Method,
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    reduce: Callable[[Tensor], Tensor],
    weights: Tensor | None = None,
) -> LossOutputs:
    """`sum_loss` averaged by a framework's own reduction of per-token losses, which knows of the global batch."""
    counts = token_weights(reduce, mask)
    return sum_loss(parts, logp, logp_old, advantages, mask, counts if weights is None else counts * weights)


def token_weights(reduce: Callable[[Tensor], Tensor], mask: Tensor) -> Tensor:
    """What each token counts for in a reduction of per-token losses: its derivative, since a reduction is linear."""
    with torch.enable_grad():
        probe = torch.zeros_like(mask, dtype=torch.float32, requires_grad=True)
        return torch.autograd.grad(reduce(probe), probe)[0]


def numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics as numbers, read from the device at once."""
    return dict(zip(metrics, torch.stack([*metrics.values()]).tolist(), strict=True))
