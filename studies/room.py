"""Which tokens should have room to rise, the rare ones or the common ones? Band's upper side, taken apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bandpo import Band, FixedClip
from bandpo.bounds import RatioBounds
from bandpo.rules import ClipRule

EDGE = 0.03
"""Probability that parts rare tokens from common ones: between the answer to be found and the others, with 0.063."""


@dataclass(frozen=True)
class RoomFor(ClipRule):
    """Band's upper bound for rare tokens, or for common ones; clip 0.2 for all else.

    >>> rule = RoomFor(rare=True)
    >>> [round(x, 2) for x in rule.bounds(torch.tensor([0.01, 0.06]).log()).upper.tolist()]
    [7.81, 1.2]
    """

    rare: bool

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        clip, band = (rule.bounds(logp_old) for rule in (FixedClip(0.2), Band()))
        here = (logp_old < math.log(EDGE)) == self.rare
        return RatioBounds(clip.log_lower, torch.where(here, band.log_upper, clip.log_upper))
