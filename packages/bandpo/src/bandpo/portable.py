"""Band's decision in any array library: NumPy, JAX, torch, or one with their names. Copy it into your own code.

Whether a token is outside of the trust region of its old probability p needs no bounds: the divergence at its ratio r
is compared with the radius. The formulas lose no digits for rare tokens (p = 1e−30) and for almost certain ones. The
file imports no array library. `bandpo.Band` makes the same decisions with every divergence, and computes bounds, too.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["outside"]

SMALLEST = 1.1754943508222875e-38
"""The smallest normal number of float32. 1 − p is at least this, so that quotients by it are finite for p = 1."""


def outside(
    xp: Any, log_ratio: Any, logp_old: Any, radius: Any, divergence: str = "KL", max_ratio: float = 10.0
) -> tuple[Any, Any]:
    """Decide which tokens have a ratio ``r = π/π_old`` outside of Band's bounds.

    With the old probability p and ``c = (1 − p·r)/(1 − p)``, a token is outside if ``p·f(r) + (1 − p)·f(c) > radius``,
    and above also if ``r > max_ratio``. A clipped loss has no gradient for the tokens below with A < 0, and for those
    above with A > 0.

    Args:
        xp: The array library: ``numpy``, ``jax.numpy`` or ``torch``.
        log_ratio: ``logp − logp_old`` (nats), an array of that library, of any shape.
        logp_old: Log-probabilities (nats, ≤ 0) of the tokens under the old policy, in float32 or float64.
        radius: The size of the trust region: a number, or an array that broadcasts to the tokens.
        divergence: ``KL`` (the paper's), ``ReverseKL``, ``TotalVariation`` or ``PearsonChi2``.
        max_ratio: Cap on the upper bound, > 1 and at most 1e30.

    Returns:
        Two boolean arrays: the tokens below their lower bound, and those above their upper bound.

    Raises:
        ValueError: if the divergence is unknown.

    Source: arXiv 2603.04918.

    >>> import numpy as np
    >>> old, new = np.log([0.08, 0.08, 0.9]), np.log([0.02, 0.16, 0.99])
    >>> below, above = outside(np, new - old, old, radius=0.05)
    >>> below.tolist(), above.tolist()
    ([True, False, False], [False, False, True])
    """
    p = xp.exp(logp_old)
    change = p * xp.expm1(log_ratio)  # of the token's probability
    others = xp.where(logp_old < -SMALLEST, -xp.expm1(logp_old), SMALLEST)  # 1 − p
    share = change / others  # of the other tokens' probability, from 1 on at the edge of the simplex
    is_inside = share < 1
    log_c = xp.log1p(-xp.where(is_inside, share, 0.0))
    if divergence == "KL":
        value = xp.where(is_inside, -(p * log_ratio + others * log_c), math.inf)
    elif divergence == "ReverseKL":
        value = (p + change) * log_ratio + xp.where(is_inside, (others - change) * log_c, 0.0)
    elif divergence == "TotalVariation":
        value = abs(change)
    elif divergence == "PearsonChi2":
        value = change * xp.expm1(log_ratio) / others
    else:
        names = "KL, ReverseKL, TotalVariation or PearsonChi2"
        raise ValueError(f"divergence must be {names}, got {divergence!r}; for others use bandpo.Band")
    is_far = value > radius
    return is_far & (log_ratio < 0), (is_far & (log_ratio > 0)) | (log_ratio > math.log(max_ratio))
