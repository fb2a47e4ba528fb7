"""The product of the ratios of a sequence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from ..batch import Tokens


def log_product(tokens: Tokens, log_ratio: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """Compute the logarithm of the product of a sequence's ratios and importance weights, at each of its tokens.

    Args:
        tokens: The tokens, with their importance weights if there are any.
        log_ratio: The log-ratio of each token, (batch, time).
    """
    log_w = tokens.sequence_sum(log_ratio)
    if tokens.weights is None:
        return log_w
    log_c = tokens.weights.log().clamp(math.log(1e-8), 20.0)
    if log_c.shape == log_w.shape:
        return log_w + tokens.sequence_sum(log_c)
    # one weight per sequence
    return log_w + tokens.sequences.at_tokens(log_c)
