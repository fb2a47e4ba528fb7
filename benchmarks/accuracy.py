"""Worst relative error of the margins ``upper − 1`` and ``1 − lower``, per divergence, dtype and number of tokens.

The reference is tests/oracle.py, over p from 1e−30 to 1 − 1e−7 and radii from 1e−12 to 1e3. Few tokens are solved for;
many, of which each is repeated, take their bounds from a table where the divergence has one:

    PYTHONPATH=packages/bandpo/src:tests python benchmarks/accuracy.py [points per divergence, dtype and radius]
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable

import mpmath as mp
import torch

import oracle
from bandpo import Divergence, FDivergence, RatioBounds, parse, ratio_bounds


def worst_error(
    name: str,
    dtype: torch.dtype,
    points: int,
    device: str = "cpu",
    solve: Callable[..., RatioBounds] = ratio_bounds,
    radii: tuple[float, float] = (1e-4, 1.0),
) -> tuple[float, float, float]:
    """Return the largest relative margin error, and the log-probability and radius at which it occurs.

    Points are rounded to ``dtype`` before they are passed to the solver and to the oracle.
    """
    triangular = FDivergence(lambda u: (u - 1) ** 2 / (u + 1))
    divergence = triangular if name == "triangular" else parse(name, Divergence)
    draw = random.Random(0)
    rare = [draw.uniform(-69, -0.01) for _ in range(points // 2)]
    common = [math.log1p(-(10 ** draw.uniform(-6.9, -0.1))) for _ in range(points - points // 2)]
    logp = torch.tensor(rare + common, dtype=dtype)
    exponents = [math.log10(radius) for radius in radii]
    # Half precision would round the radius to few digits, or to 0.
    wide = torch.promote_types(dtype, torch.float32)
    radius = torch.tensor([10 ** draw.uniform(*exponents) for _ in range(points)], dtype=wide)
    bounds = solve(logp.to(device), divergence, radius.to(device))
    worst = (0.0, 0.0, 0.0)
    columns = (logp, radius, bounds.log_lower, bounds.log_upper)
    for lp, r, lower, upper in zip(*(column.tolist() for column in columns), strict=True):
        margins = (-mp.expm1(lower), mp.expm1(upper))
        for margin, exact in zip(margins, oracle.margins(name, lp, r), strict=True):
            worst = max(worst, (float(abs(margin / exact - 1)), lp, r))
    return worst


RADII = (1e-12, 1e-9, 1e-6, 1e-4, 0.01, 0.05, 0.3, 1.0, 10.0, 1e3)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MANY = 4096
"""The number of tokens from which on a table is used."""


def repeated(logp: torch.Tensor, divergence: Divergence, radius: torch.Tensor) -> RatioBounds:
    """Compute the bounds of few tokens as those of many, with the one radius of a tensor as a number."""
    bounds = ratio_bounds(logp.repeat(-(-MANY // len(logp))), divergence, radius[0].item())
    return RatioBounds(bounds.log_lower[: len(logp)], bounds.log_upper[: len(logp)])


def main() -> None:
    """Print the worst errors of each divergence over all radii."""
    points = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print("| divergence | dtype | few tokens | at logp, radius | many tokens | at logp, radius |")
    print("|---|---|---|---|---|---|")
    for name in oracle.F:
        for dtype in DTYPES:
            cells = []
            for solve in (ratio_bounds, repeated):
                error, logp, radius = max(
                    worst_error(name, dtype, points, solve=solve, radii=(r, r)) for r in RADII
                )
                cells += [f"{error:.1e}", f"{logp:.4g}, {radius:.3g}"]
            print(f"| {name} | {str(dtype)[6:]} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
