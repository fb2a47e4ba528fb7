"""The generic solver for the bounds of any f-divergence, from its ``f`` and ``df``.

The bounds are computed as values of one variable, the *tilt* ``y``. Consider the events "this token" and "any other
token", and let the rarer one have the probability ``m ≤ ½``. Tilting it by ``y`` multiplies its odds by ``e^y``:

    log-ratio of the rarer event  = y − log(1 + m·(e^y − 1)),
    log-ratio of the other event  =   − log(1 + m·(e^y − 1)).

Each pair of ratios within the simplex corresponds to one ``y``, and neither formula has cancellation for small ``m``.
As a function of ``y`` the divergence decreases up to its minimum of 0 at ``y = 0`` and increases from there, so there
is one root on each side. If the token is the more common event, its bounds follow from the same two roots.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch

from ..divergences._exact import expm1

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@runtime_checkable
class Generator(Protocol):
    """The methods of an f-divergence that the solver uses."""

    @property
    def curvature(self) -> float: ...
    def f(self, log_u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]: ...
    def df(self, log_u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]: ...


class Rarer(NamedTuple):
    """The rarer of the two events "this token" and "any other token"."""

    log_m: Float[Tensor, "*shape"]  # log of its probability, ≤ log ½
    log_n: Float[Tensor, "*shape"]  # log of the other event's probability
    is_token: Bool[Tensor, "*shape"]  # True if the rarer event is the token

    def sign(self, above: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the sign of the tilt, 1 or −1, that increases the *token's* ratio; not ``above``, decreases it."""
        return torch.where(above == self.is_token, 1.0, -1.0).to(self.log_m.dtype)

    def log_ratio(self, y: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Compute the log-ratio of the *token* if the rarer event is tilted by ``y``, which may be ``±inf``."""
        finite = torch.where(self.is_token, y, 0.0) - torch.log1p(self.log_m.exp() * expm1(y))
        edge = torch.where(self.is_token, -self.log_m, -math.inf)
        return torch.where(y == math.inf, edge, finite)


def floor(dtype: torch.dtype) -> float:
    """Return the smallest log-probability that is solved for.

    For smaller probabilities, m·e^y would overflow before the event has all probability, up to rounding.
    """
    info = torch.finfo(dtype)
    return math.log(info.tiny / info.eps) + 1


def as_tensor(radius: float | Tensor, logp: Tensor) -> Tensor:
    """Return a radius as a tensor of the dtype and on the device of ``logp``."""
    if isinstance(radius, torch.Tensor):
        return radius
    return torch.full((), radius, dtype=logp.dtype, device=logp.device)


def rarer_event(logp: Float[Tensor, "*shape"], log1mp: Float[Tensor, "*shape"]) -> Rarer:
    """Return the rarer event of each token, from ``log p`` and ``log(1 − p)``."""
    log_m = torch.minimum(logp, log1mp).clamp(min=floor(logp.dtype))
    return Rarer(log_m, torch.maximum(logp, log1mp), logp < log1mp)


def divergence_at_edge(
    divergence: Generator, rarer: Rarer, sign: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Compute the divergence where the rarer event has all probability (sign 1) or none (sign −1)."""
    edge_rare = torch.where(sign > 0, -rarer.log_m, -math.inf)
    edge_common = torch.where(sign > 0, -math.inf, -rarer.log_n)
    return rarer.log_m.exp() * divergence.f(edge_rare) + rarer.log_n.exp() * divergence.f(edge_common)


def tilt_root(
    divergence: Generator, rarer: Rarer, radius: Float[Tensor, "*#shape"], sign: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Compute the tilt ``y`` of the given sign at which the divergence equals ``radius``; ``sign·inf`` if none does.

    The sign of each token is 1 or −1.

    The method is Newton's on the logarithm of the divergence as a function of ``log |y|``, which is a line of slope 2
    for small radii. It has a fixed number of steps, and each stays within a bracket of the root.
    """
    log_m, log_n, _ = rarer
    m = log_m.exp()
    n = log_n.exp()

    def divergence_at(size: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the divergence at ``|y| = size``, and the derivative of its logarithm by ``log size``."""
        y = sign * size
        tilted = m * expm1(y)
        log_ratio_common = -torch.log1p(tilted)
        log_ratio_rare = y + log_ratio_common
        new_m = (m + tilted) / (1 + tilted)  # the rarer event's new probability
        value = m * divergence.f(log_ratio_rare) + n * divergence.f(log_ratio_common)
        derivative = (
            m * divergence.df(log_ratio_rare) * (1 - new_m) - n * divergence.df(log_ratio_common) * new_m
        )
        return value, derivative * y / value

    # If the constraint holds at the edge of the simplex, where one event has all probability, there is no root.
    saturated = divergence_at_edge(divergence, rarer, sign) <= radius

    # Start at the root of the quadratic approximation, but at most at −log m. There the rarer event has about half of
    # the probability, or a share m of its old one. Beyond, some divergences are flat and others overflow. For the same
    # reasons, a step reduces |y| by at most the factor e³, and by that factor if the divergence has overflowed.
    size = torch.minimum((2 * radius / (m * n * divergence.curvature)).sqrt(), -log_m)
    low = torch.zeros_like(m)
    high = torch.where(sign > 0, -log_m - math.log(torch.finfo(m.dtype).eps), math.inf)
    for _ in range(32 if m.dtype == torch.float64 else 16):
        value, slope = divergence_at(size)
        is_below = value <= radius
        low = torch.where(is_below, size, low)
        high = torch.where(is_below, high, size)
        step = torch.where(value < math.inf, (radius.log() - value.log()) / slope, -math.inf)
        newton = size * torch.exp(step.clamp(min=-3.0))
        usable = (newton >= low) & (newton <= high) & ((slope < math.inf) | (value == math.inf))
        size = torch.where(usable, newton, (low + high) / 2)
    return torch.where(saturated, sign * math.inf, sign * size)
