"""The bounds of any f-divergence, from its ``f`` alone.

Both bounds are found on one scale, the *tilt*. Of the two events "this token" and "any other", let the rarer have
probability ``m ≤ ½``. Tilting it by ``y`` multiplies its odds by ``e^y``:

    log-ratio of the rarer event  = y − log(1 + m·(e^y − 1)),
    log-ratio of the other        =   − log(1 + m·(e^y − 1)).

Every simplex-feasible pair of ratios is one ``y``, nothing cancels however small ``m`` is, and the divergence spent
is convex-shaped in ``y`` with its minimum 0 at ``y = 0``: one root on each side. A common token sees the same two
roots from the other end, so one solver serves all tokens and both bounds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch

from bandpo.divergences._exact import expm1

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@runtime_checkable
class Generator(Protocol):
    """What is needed of an f-divergence."""

    @property
    def curvature(self) -> float: ...
    def f(self, log_u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]: ...
    def df(self, log_u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]: ...


class Rarer(NamedTuple):
    """The rarer of the two events "this token" and "any other token"."""

    log_m: Float[Tensor, "*shape"]  # log of its probability, ≤ log ½
    log_n: Float[Tensor, "*shape"]  # log of the other's
    is_token: Bool[Tensor, "*shape"]  # whether it is the token itself

    def log_ratio(self, y: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Log-ratio of the *token* when the rarer event is tilted by ``y``, which may be ``±inf``."""
        finite = torch.where(self.is_token, y, 0.0) - torch.log1p(self.log_m.exp() * expm1(y))
        edge = torch.where(self.is_token, -self.log_m, -math.inf)
        return torch.where(y == math.inf, edge, finite)


def floor(dtype: torch.dtype) -> float:
    """The least log-probability solved for: rarer, m·e^y would overflow before holding all mass to rounding."""
    info = torch.finfo(dtype)
    return math.log(info.tiny / info.eps) + 1


def rarer_event(logp: Float[Tensor, "*shape"], log1mp: Float[Tensor, "*shape"]) -> Rarer:
    log_m = torch.minimum(logp, log1mp).clamp(min=floor(logp.dtype))
    return Rarer(log_m, torch.maximum(logp, log1mp), logp < log1mp)


def tilt_root(
    divergence: Generator, rarer: Rarer, radius: Float[Tensor, "*#shape"], sign: int
) -> Float[Tensor, "*shape"]:
    """The tilt ``y`` of the given sign at which the divergence spends ``radius``; ``sign·inf`` if none does.

    Newton's method on ``log spent`` against ``log |y|`` (a straight line of slope 2 for small radii), kept inside a
    bracket, for a fixed number of steps.
    """
    log_m, log_n, _ = rarer
    m, n = log_m.exp(), log_n.exp()

    def spent(size: Tensor) -> tuple[Tensor, Tensor]:
        """The divergence at ``|y| = size``, and its derivative by ``log size`` relative to it."""
        y = sign * size
        tilted = m * expm1(y)
        other = -torch.log1p(tilted)
        rare = y + other
        share = (m + tilted) / (1 + tilted)  # the rarer event's new probability
        value = m * divergence.f(rare) + n * divergence.f(other)
        slope = m * divergence.df(rare) * (1 - share) - n * divergence.df(other) * share
        return value, slope * y / value

    edge = torch.full_like(m, math.inf)
    rare_edge, other_edge = (-log_m, -edge) if sign > 0 else (-edge, -log_n)
    saturated = m * divergence.f(rare_edge) + n * divergence.f(other_edge) <= radius

    # The quadratic's root, but no further than −log m: there the rarer event has about half of the mass, or keeps a
    # share m of its own. Beyond, some divergences are flat and others overflow. For the same reasons one step may not
    # shrink |y| by more than e³, and shrinks it by that where the divergence did overflow.
    size = torch.minimum((2 * radius / (m * n * divergence.curvature)).sqrt(), -log_m)
    largest = -log_m - math.log(torch.finfo(m.dtype).eps) if sign > 0 else edge
    low, high = torch.zeros_like(m), largest
    for _ in range(32 if m.dtype == torch.float64 else 16):
        value, slope = spent(size)
        low, high = torch.where(value <= radius, size, low), torch.where(value <= radius, high, size)
        step = torch.where(value < math.inf, (radius.log() - value.log()) / slope, -math.inf)
        newton = size * torch.exp(step.clamp(min=-3.0))
        usable = (newton >= low) & (newton <= high) & ((slope < math.inf) | (value == math.inf))
        size = torch.where(usable, newton, (low + high) / 2)
    return torch.where(saturated, sign * math.inf, sign * size)
