"""The direction of the gradient under each method, and how many tokens it is effectively a mean of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bandpo.core.batch import Tokens
from bandpo.core.methods import Method

if TYPE_CHECKING:
    from torch import Tensor

COSINE = "gradient_cosine"
"""The cosine between the gradients of the method and of the run's, both with respect to the tokens' log-probabilities:
``Σ g·g_run / √(Σ g²·Σ g_run²)`` over all counted tokens, where ``g = w·A``. Gradients with respect to parameters, to
which a token of one answer adds to those of others, are not recorded."""
EFFECTIVE = "effective_sample_size"
"""The effective number of tokens, ``(Σ|w|)² / Σw²`` over the counted tokens with an advantage, as a share of them. A
token that the method drops has ``w = 0``."""


class Directions:
    """Sums of the gradients of methods over all counted tokens, of which the first is that of the run."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._reference = ""
        self._gradient: Tensor | None = None
        """The gradient of the first method in the present loss."""

    def add(self, name: str, method: Method, tokens: Tokens) -> None:
        """Add one loss under one method.

        Args:
            name: The name of the method. The first method comes first in each loss.
            method: The method.
            tokens: The tokens of the loss with the method.
        """
        has_advantage = (tokens.mask > 0) & (tokens.advantages != 0)
        weight = (method.weight(tokens).double() * has_advantage).expand_as(tokens.mask)
        gradient = weight * tokens.advantages
        if not self._reference or name == self._reference:
            self._reference = name
            self._gradient = gradient
        reference = self._gradient
        if reference is None or reference.shape != gradient.shape:
            return
        values = (gradient * reference, gradient**2, reference**2, weight.abs(), weight**2, has_advantage)
        sums = torch.stack([value.sum().double() for value in values])
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def result(self) -> dict[str, dict[str, float]]:
        """Return `COSINE` and `EFFECTIVE` of each method, as far as they are defined: not of a gradient of 0."""
        result: dict[str, dict[str, float]] = {}
        for name, sums in self._sums.items():
            product, own, reference, weights, squares, count = sums.tolist()
            result[name] = {}
            if own > 0 and reference > 0:
                result[name][COSINE] = product / (own * reference) ** 0.5
            if squares > 0:
                result[name][EFFECTIVE] = weights**2 / (squares * count)
        return result
