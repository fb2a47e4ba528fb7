r"""The base class of f-divergences, and the constraint that a trust region puts on the ratio of one token.

A token has the old probability ``p`` and the new probability ``p·r``. Of all new distributions with that property, the
one that multiplies the probabilities of all other tokens by the same factor ``c = (1 − p·r) / (1 − p)`` has the
smallest divergence from the old distribution:

    g(p, r) = p·f(r) + (1 − p)·f(c)

The ratios with ``g(p, r) ≤ radius`` are an interval around 1.

Source: arXiv 2603.04918, which proves with Jensen's inequality that this distribution has the smallest divergence.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..divergences import _solver
from ..divergences._exact import expm1, log1mexp, one_minus_exp

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

__all__ = ["Divergence"]


@dataclass(frozen=True)
class Divergence(ABC):
    """An f-divergence ``D_f(π ‖ π_old) = Σ π_old·f(π/π_old)`` with a convex ``f`` and ``f(1) = f'(1) = 0``.

    A subclass implements `f` and `df` (docs/write-your-own.md shows each step); `bandpo.ratio_bounds` then uses the
    generic solver. Override `log_bounds` if the bounds have a closed form, and `divergence_of_ratio` if there is a
    cheaper formula than that with ``f``.

    All methods take logarithms, ``log_ratio = log r`` and ``logp = log p``, so that neither rare tokens (p = 1e−30) nor
    almost certain ones (1 − p = 1e−7) lose precision.
    """

    one_pass: ClassVar[bool] = False
    """True if `log_bounds` is a formula of a few steps, False for a root search.

    A compiler may then recompute intermediate tensors instead of storing them. With a root search each step would be
    recomputed for each use in the next, and many tokens in float32 take their bounds from a table instead.
    """

    @property
    def curvature(self) -> float:
        """The second derivative ``f''(1)``. For small radii the bounds are ``1 ± √(2·radius·(1 − p) / (f''(1)·p))``."""
        return 1.0

    @property
    def default_radius(self) -> float:
        """The radius of `bandpo.Band` if none is given.

        Radii of different divergences are not comparable. To first order this radius gives the bounds of KL at the
        paper's 0.05, for tokens with narrow bounds.
        """
        return 0.05 * self.curvature

    @abstractmethod
    def f(self, log_u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Compute ``f(u)`` at ``u = exp(log_u)``, which is ≥ 0; at ``±inf`` its limit."""

    @abstractmethod
    def df(self, log_u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Compute the derivative of `f` with respect to ``log_u``, which is ``u·f'(u)``."""

    def divergence_of_ratio(
        self, log_ratio: Float[Tensor, "*shape"], logp: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape"]:
        """Compute ``g(p, r) = p·f(r) + (1 − p)·f(c)``, the smallest divergence with the ratio r (in nats for KL).

        Ratios beyond the simplex, ``r > 1/p``, have a divergence that is not smaller than that at ``1/p``. Here p is at
        least the smallest probability that the solver has bounds for, see `bandpo.ratio_bounds`.
        """
        floor = _solver.floor(logp.dtype)
        logp = logp.clamp(min=floor)
        p = torch.exp(logp)
        one_minus_p = one_minus_exp(logp)
        log_c = torch.log1p((-p * expm1(log_ratio) / one_minus_p).clamp(min=-1.0))
        divergence = p * self.f(log_ratio) + one_minus_p * self.f(log_c)
        # Beyond the simplex of the smallest probability, f may overflow. A log-ratio of 1 is more than rounding.
        return torch.where(log_ratio > 1 - floor, math.inf, divergence)

    def divergence_of_moderate_ratio(
        self, log_ratio: Float[Tensor, "*shape"], logp: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape"]:
        """Compute `divergence_of_ratio` at ratios up to 1e30; above, the result has no meaning.

        Override it if that formula takes fewer operations.
        """
        return self.divergence_of_ratio(log_ratio, logp)

    def log_bounds(
        self, logp: Float[Tensor, "*shape"], radius: Float[Tensor, "*#shape"]
    ) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        """Compute the smallest and the largest log-ratio with ``g ≤ radius``."""
        rarer = _solver.rarer_event(logp, log1mexp(logp))
        down = rarer.log_ratio(_solver.tilt_root(self, rarer, radius, torch.full_like(logp, -1.0)))
        up = rarer.log_ratio(_solver.tilt_root(self, rarer, radius, torch.full_like(logp, 1.0)))
        # A positive tilt of the rarer event increases the token's ratio if the token is that event, else decreases it.
        return torch.minimum(down, up), torch.maximum(down, up)

    def log_bound(
        self,
        logp: Float[Tensor, "*shape"],
        radius: float | Float[Tensor, "*#shape"],
        above: Bool[Tensor, "*shape"],
    ) -> Float[Tensor, "*shape"]:
        """Compute one root of each token: the largest log-ratio with ``g ≤ radius`` where ``above``, else the smallest.

        A subclass with its own `log_bounds` computes both.
        """
        radius = _solver.as_tensor(radius, logp)
        if type(self).log_bounds is not Divergence.log_bounds:
            log_lower, log_upper = self.log_bounds(logp, radius)
            return torch.where(above, log_upper, log_lower)
        rarer = _solver.rarer_event(logp, log1mexp(logp))
        return rarer.log_ratio(_solver.tilt_root(self, rarer, radius, rarer.sign(above)))
