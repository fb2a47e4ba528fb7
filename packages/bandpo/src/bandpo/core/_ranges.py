"""The ranges of radii, ratios and weights in which bounds and losses are finite."""

from __future__ import annotations

import torch

RADII = (torch.finfo(torch.float32).tiny, 1e6)
"""The smallest and the largest radius. Between them every divergence has finite bounds, in every dtype."""

LARGEST_SUM = 2.0**24
"""The largest sum of the advantages of all tokens for which a loss with the largest ratio at each token is finite."""

LARGEST_ADVANTAGE = 2.0**8
"""The largest product of a token's advantage and importance weight for which its gradient is finite at any weight."""


def largest(dtype: torch.dtype) -> float:
    """Return the largest ratio, and the largest value of a token's loss: 2^104 = e^72.1 in float32, e^693 in float64.

    Tokens' losses are summed.
    """
    return torch.finfo(dtype).max / LARGEST_SUM


def largest_weight(dtype: torch.dtype) -> float:
    """Return the largest absolute weight of a token in the gradient: 2^120 in float32."""
    return torch.finfo(dtype).max / LARGEST_ADVANTAGE
