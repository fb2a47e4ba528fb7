"""Objectives that depend on the later tokens of the sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..batch import Tokens
from ..objectives._around import Wrapper
from ..objectives.base import Objective, check_positive
from ..objectives.clipped import Surrogate

__all__ = ["FutureKL"]


@dataclass(frozen=True)
class FutureKL(Wrapper):
    """FIPO's objective: another objective whose weights are raised if the later tokens have gained probability.

    The weight is multiplied by ``e^F``, clamped to [1, 1 + boost]. F is the sum of ``2^(−d/decay)·log r`` over the
    token and those after it in the sequence, and d is the distance in tokens. Tokens with ``r > max_ratio`` and padding
    add nothing.

    Args:
        decay: Distance, in tokens, at which a later token counts half, > 0.
        boost: Largest relative increase of a weight, > 0.
        max_ratio: Ratio above which a token adds nothing to F, > 0.
        objective: The objective whose weights are raised.
        safety_ratio: Ratio above which the weight of a token with A < 0 is not raised, > 0; ``inf`` for none.
            ms-swift's ``fipo_safety_threshold``, 4 there by default. The authors' script for 32B has 10, which is also
            its dual clip, so it has no effect there.

    Source: arXiv 2603.19835. The authors' code also drops sequences with several tokens above ``max_ratio``.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.ones(1, 2)
    >>> tokens = Batch.read(torch.tensor([[0.08, 0.084]]).log(), old, advantages).tokens(Unclipped())
    >>> FutureKL(decay=1.0).weight(tokens)  # √1.05 and 1.05·1.05
    tensor([[1.0247, 1.1025]])
    """

    decay: float = 32.0
    boost: float = 0.2
    max_ratio: float = 10.0
    objective: Objective = Surrogate()
    safety_ratio: float = math.inf

    def __post_init__(self) -> None:
        check_positive(
            decay=self.decay, boost=self.boost, max_ratio=self.max_ratio, safety_ratio=self.safety_ratio
        )
        super().__post_init__()

    @property
    def whole_sequence(self) -> bool:
        return True

    @property
    def one_pass(self) -> bool:
        return False

    def _factor(self, tokens: Tokens) -> Tensor:
        """Compute the factor ``e^F``, within [1, 1 + boost], of each token's weight."""
        excluded = (tokens.ratio > self.max_ratio) | (tokens.mask == 0)
        gain = tokens.log_ratio.masked_fill(excluded, 0.0)
        # Each round doubles the number of tokens in the sums. They end at the distance of 64 half-lives, at which a
        # token counts 2^−64, below the rounding of float64.
        for doubling in range(math.ceil(math.log2(64 * self.decay))):
            distance = 2**doubling
            gain = gain + 2 ** (-distance / self.decay) * tokens.sequences.ahead(gain, distance)
        factor = gain.clamp(0.0, math.log1p(self.boost)).exp()
        unsafe = (tokens.ratio > self.safety_ratio) & (tokens.advantages < 0)
        return factor.masked_fill(unsafe, 1.0)

    def weight(self, tokens: Tokens) -> Tensor:
        return self._factor(tokens) * super().weight(tokens)

    def surrogate(self, tokens: Tokens) -> Tensor:
        return self._factor(tokens) * super().surrogate(tokens)
