"""Band's bounds with KL for one token in Python's own floats, without torch, which takes seconds to import.

No formula is here: a bound is the ratio at which `bandpo.portable.outside` changes its answer, found by bisection. The
bounds of `bandpo.ratio_bounds` are the reference, to which a test compares these. KL's bounds never saturate. Where
those of another divergence reach the edge of the simplex, the digits would differ from the reference by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

from bandpo.portable import outside

DEFAULT_RADIUS = 0.05
"""KL's default radius, which a test compares to that of the core."""
SMALLEST_P = 1e-290
"""The smallest p for which the bounds are tested."""
RADII = (1e-12, 1e3)
"""The range of radii for which the bounds are tested."""

_FLOATS = SimpleNamespace(
    exp=math.exp,
    expm1=math.expm1,
    log1p=math.log1p,
    where=lambda condition, x, y: x if condition else y,
)
"""The functions of an array library that `bandpo.portable.outside` calls, for single floats."""

_LOWEST = -1e300
"""A log-ratio whose ratio is 0."""


def scalar_bounds(p: float, radius: float, max_ratio: float) -> tuple[float, float]:
    """Return the smallest and the largest ratio that Band with KL allows to a token.

    Args:
        p: The token's old probability, from `SMALLEST_P` to 1.
        radius: The radius, within `RADII`.
        max_ratio: The cap on the upper bound, > 1; ``inf`` for none.

    >>> lower, upper = scalar_bounds(0.08, radius=0.05, max_ratio=10.0)
    >>> print(f"{lower:.4g} {upper:.4g}")
    0.2617 2.411
    """
    logp = math.log(p)

    def is_outside(log_ratio: float) -> bool:
        below, above = outside(_FLOATS, log_ratio, logp, radius, max_ratio=math.inf)
        return below or above

    # No ratio is above 1/p.
    highest = min(-logp, math.log(max_ratio))
    return math.exp(_last_inside(is_outside, _LOWEST)), math.exp(_last_inside(is_outside, highest))


def _last_inside(is_outside: Callable[[float], bool], edge: float) -> float:
    """Return the log-ratio between 0 and an edge at which ``is_outside`` turns true; the edge if it stays false."""
    if not is_outside(edge):
        return edge
    # The edge may be far away, so a log-ratio of which half is inside is found first.
    inside = 0.0
    size = min(abs(edge), 1.0)
    while not is_outside(math.copysign(size, edge)):
        inside = math.copysign(size, edge)
        size = min(2 * size, abs(edge))
    far = math.copysign(size, edge)
    while (middle := (inside + far) / 2) not in (inside, far):
        if is_outside(middle):
            far = middle
        else:
            inside = middle
    return inside
