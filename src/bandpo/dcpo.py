"""Other methods' clip rules, as their papers define them. What differs in form, not in bounds: `bandpo.objectives`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import softplus

from bandpo import _checks
from bandpo.bounds import RatioBounds
from bandpo.clipping import ClipRule

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DCPO"]


@dataclass(frozen=True)
class DCPO(ClipRule):
    """DCPO's dynamic clip: the ratios with ``|r − 1|·r·p`` within ``low`` below 1 and ``high`` above.

        ½ + ½·√max(1 − 4·low/p, 0)  ≤  r  ≤  min(½ + ½·√(1 + 4·high/p), max_ratio)

    The lower bound is ½ for every token with ``p ≤ 4·low``. The upper exceeds ``1/p``, the simplex, for common
    tokens (p > 1 − high), and so never binds on them.

    Args:
        low: ≥ 0.
        high: ≥ 0.
        max_ratio: Cap on the upper bound, > 1; ``inf`` for none.

    Source: arXiv 2509.02333.

    >>> DCPO().bounds(torch.tensor([0.001, 0.08, 0.9]).log()).upper
    tensor([10.0000,  2.1583,  1.1872])
    """

    low: float = 0.16
    high: float = 0.2
    max_ratio: float = 10.0

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number of at least 0, got {getattr(self, name)!r}")
        if not self.max_ratio > 1:
            raise ValueError(f"max_ratio must be above 1 (inf for no cap), got {self.max_ratio!r}")

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        logp = _checks.as_logp("logp_old", logp_old)
        lower = 0.5 + 0.5 * (1 - torch.exp(_log_ratio(4 * self.low, logp))).clamp(min=0.0).sqrt()
        # √(1 + e^x) = exp(½·softplus(x)) holds where e^x overflows.
        log_root = softplus(_log_ratio(4 * self.high, logp)) / 2
        log_upper = torch.logaddexp(torch.zeros_like(logp), log_root) - math.log(2)
        return RatioBounds(lower.log(), log_upper.clamp(min=0.0, max=math.log(self.max_ratio)))


def _log_ratio(x: float, logp: Tensor) -> Tensor:
    """``log(x/p)``; −inf at x = 0, whatever p."""
    return math.log(x) - logp if x else torch.full_like(logp, -math.inf)
