"""The gradient that methods block on the rare tokens of winning answers, by the age of the tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from bandpo.audit.metric_names import RARE
from bandpo.audit.metrics import EDGES, gradient_size, lost_share
from bandpo.core.batch import Batch, Tokens
from bandpo.core.methods import Method
from rlvet.runs.ages import CLASSES, age_classes
from rlvet.runs.record import LossBatch

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

RARE_PROBABILITY = EDGES[RARE["below_0.1"] - 1]
"""Old probability below which a token is rare, as in the metrics ``…_below_0.1`` of the audit."""


def is_rare_winner(tokens: Tokens) -> Bool[Tensor, "batch time"]:
    """Return True for each counted token with a positive advantage and a probability below `RARE_PROBABILITY`."""
    is_rare = tokens.logp_anchor < math.log(RARE_PROBABILITY)
    return is_rare & (tokens.advantages > 0) & (tokens.mask > 0)


class BlockedByAge:
    """The gradient of rare winners, and the part of it that each method takes away, by the age of the tokens.

    A rare winner is a token with a positive advantage and an old probability below `RARE_PROBABILITY`.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, method: Method, tokens: Tokens, batch: Batch, recorded: LossBatch) -> None:
        """Add one loss under one method. A loss whose record has no versions is left out.

        Args:
            name: The name of the method.
            method: The method.
            tokens: ``method.tokens(batch)``.
            batch: The batch of the loss.
            recorded: The same loss as it was recorded.
        """
        if recorded.lag is None:
            return
        size = gradient_size(tokens, batch) * is_rare_winner(tokens)
        blocked = size * lost_share(method.weight(tokens) / tokens.ratio)

        # One sum for each class of ages, (2, classes).
        classes = torch.from_numpy(age_classes(recorded.lag)).flatten()
        sums = torch.zeros(2, len(CLASSES), dtype=torch.float64)
        for row, values in zip(sums, (size, blocked), strict=True):
            row.index_add_(0, classes, values.flatten().double())
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def shares(self) -> dict[str, dict[str, float]]:
        """Return the share that each method blocks, by the name of the method and then by the class of ages.

        Classes in which no rare winner has a gradient are left out.
        """
        result: dict[str, dict[str, float]] = {}
        for name, (sizes, blocked) in self._sums.items():
            shares = (blocked / sizes).tolist()
            result[name] = {
                label: share for label, share in zip(CLASSES, shares, strict=True) if math.isfinite(share)
            }
        return result
