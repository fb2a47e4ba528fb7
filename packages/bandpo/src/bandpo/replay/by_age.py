"""The gradient that methods block on the tokens of winning answers, by the age and the probability of the tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from bandpo.audit.closing_lines import FEWEST_RARE_WINNERS
from bandpo.audit.metric_names import BINS, RARE
from bandpo.audit.metrics import EDGES, gradient_size, lost_share
from bandpo.core.batch import Batch, Tokens
from bandpo.core.methods import Method
from rlvet.records.ages import CLASSES, age_classes
from rlvet.records.record import LossBatch

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
    """The gradient of winners, and the part of it that each method takes away, by age and probability of the tokens.

    A winner is a token with a positive advantage. It is rare if its old probability is below `RARE_PROBABILITY`.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        """By method the number of winners, the sizes of their gradient and of the blocked part, (3, bins, classes)."""

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
        winners = (tokens.advantages > 0) * batch.mask
        size = gradient_size(tokens, batch) * winners
        blocked = size * lost_share(method.weight(tokens) / tokens.ratio)

        bins = torch.stack([tokens.logp_anchor >= math.log(edge) for edge in EDGES]).sum(0)
        cells = (bins * len(CLASSES) + torch.from_numpy(age_classes(recorded.lag))).flatten()
        count = len(BINS) * len(CLASSES)
        sums = torch.stack(
            [
                torch.bincount(cells, values.flatten().double(), minlength=count).view(
                    len(BINS), len(CLASSES)
                )
                for values in (winners, size, blocked)
            ]
        )
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def shares(self) -> dict[str, dict[str, float]]:
        """Return the share that each method blocks on rare winners, by the name of the method and the class of ages.

        Classes with fewer rare winners than `FEWEST_RARE_WINNERS` are left out.
        """
        rare = slice(RARE["below_0.1"])
        return {name: _shares(sums[:, rare].sum(1)) for name, sums in self._sums.items()}

    def rare_winners(self) -> dict[str, int]:
        """Return the number of rare winners of each class of ages that has one."""
        rare = slice(RARE["below_0.1"])
        counts = next(iter(self._sums.values()))[0, rare].sum(0).tolist() if self._sums else []
        return {label: int(count) for label, count in zip(CLASSES, counts, strict=False) if count}

    def shares_by_bin(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return the share that each method blocks on winners, by its name, the bin and the class of ages.

        Bins and classes with fewer winners than `FEWEST_RARE_WINNERS` are left out.
        """
        result: dict[str, dict[str, dict[str, float]]] = {}
        for name, sums in self._sums.items():
            by_bin = {label: _shares(sums[:, index]) for index, label in enumerate(BINS)}
            result[name] = {label: shares for label, shares in by_bin.items() if shares}
        return result


def _shares(sums: Tensor) -> dict[str, float]:
    """Return the blocked share of each class of ages that has enough winners, from sums of shape (3, classes)."""
    shares: dict[str, float] = {}
    for label, count, size, part in zip(CLASSES, *sums.tolist(), strict=True):
        if count >= FEWEST_RARE_WINNERS and size > 0:
            shares[label] = part / size
    return shares
