r"""How far one token may move within an f-divergence trust region around the whole distribution.

A token has old probability ``p`` and new probability ``p·r``. The cheapest way to give it that is to rescale
all other tokens by one factor ``c = (1 − p·r) / (1 − p)``. The divergence this spends is the scalar

    g(p, r) = p·f(r) + (1 − p)·f(c),

and the ratios with ``g(p, r) ≤ radius`` are an interval around 1.

Source: arXiv 2603.04918, which shows by Jensen's inequality that this rescaling is the cheapest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from bandpo.divergences import _solver
from bandpo.divergences._exact import expm1, log1mexp, one_minus_exp

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = ["Divergence"]


@dataclass(frozen=True)
class Divergence(ABC):
    """One f-divergence ``D_f(π ‖ π_old) = Σ π_old·f(π/π_old)``, ``f`` convex, ``f(1) = f'(1) = 0``.

    A new divergence is one subclass with its `f` and `df` (docs/write-your-own.md shows each step);
    `bandpo.ratio_bounds` then works through the generic solver. Where a closed form exists, override `log_bounds`;
    where g is cheaper than from ``f``, override `divergence_of_ratio`.

    Everything is done on logarithms, ``log_ratio = log r`` and ``logp = log p``, so that neither rare (p = 1e−30) nor
    near-certain tokens (1 − p = 1e−7) lose digits.
    """

    closed: ClassVar[bool] = False
    """Whether `log_bounds` is a closed form, as cheap as `divergence_of_ratio`."""

    @property
    def curvature(self) -> float:
        """``f''(1)``: for small radii the bounds are ``1 ± √(2·radius·(1 − p) / (f''(1)·p))``."""
        return 1.0

    @property
    def default_radius(self) -> float:
        """The radius that `bandpo.Band` uses when none is given.

        Radii of different divergences do not compare: this one is as wide as KL at the paper's 0.05 is, to first
        order, wherever bounds are narrow.
        """
        return 0.05 * self.curvature

    @abstractmethod
    def f(self, log_u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """``f(u)`` at ``u = exp(log_u)``, ≥ 0; at ``±inf`` its limit."""

    @abstractmethod
    def df(self, log_u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Derivative of `f` with respect to ``log_u``, that is ``u·f'(u)``."""

    def divergence_of_ratio(
        self, log_ratio: Float[Tensor, "*shape"], logp: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape"]:
        """``g(p, r) = p·f(r) + (1 − p)·f(c)``: the divergence, in nats for KL, that moving a token to ``r`` costs.

        Ratios beyond the simplex, ``r > 1/p``, cost no less than its edge.
        """
        p, rest = torch.exp(logp), one_minus_exp(logp)
        log_c = torch.log1p((-p * expm1(log_ratio) / rest).clamp(min=-1.0))
        return p * self.f(log_ratio) + rest * self.f(log_c)

    def log_bounds(
        self, logp: Float[Tensor, "*shape"], radius: Float[Tensor, "*#shape"]
    ) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        """Lowest and highest log-ratio with ``g ≤ radius``."""
        rarer = _solver.rarer_event(logp, log1mexp(logp))
        down, up = (rarer.log_ratio(_solver.tilt_root(self, rarer, radius, sign)) for sign in (-1, 1))
        # Tilting the rarer event up moves the token up if it is that event, down if it is the other.
        return torch.minimum(down, up), torch.maximum(down, up)
