"""A placebo for Band: a rule that is as wide as Band, for the wrong tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bandpo import Band
from bandpo.bounds import RatioBounds
from bandpo.rules import ClipRule


@dataclass(frozen=True)
class Mirror(ClipRule):
    """Band's bounds of 1 − p for a token of probability p: tight for rare tokens, wide for common ones.

    A rule that does as well as Band, and is its mirror image, shows that Band's width does not matter where it is.

    >>> rule = Mirror(0.05)
    >>> [round(x, 2) for x in rule.bounds(torch.tensor([0.01, 0.5, 0.99]).log()).upper.tolist()]
    [1.01, 1.31, 7.81]
    """

    radius: float = 0.05

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        smallest = torch.finfo(logp_old.dtype).eps
        mirrored = torch.log((-torch.expm1(logp_old)).clamp(min=smallest))
        return Band(radius=self.radius).bounds(mirrored)
