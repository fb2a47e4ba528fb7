"""Worst relative error of the margins ``upper − 1`` and ``1 − lower``, per divergence and dtype.

The reference is tests/oracle.py, over p from 1e−30 to 1 − 1e−7 and radii from 1e−4 to 1:

    PYTHONPATH=packages/bandpo/src:tests python benchmarks/accuracy.py [points per divergence and dtype]
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
    radius = torch.tensor([10 ** draw.uniform(-4, 0) for _ in range(points)], dtype=dtype)
    bounds = solve(logp.to(device), divergence, radius.to(device))
    worst = (0.0, 0.0, 0.0)
    columns = (logp, radius, bounds.log_lower, bounds.log_upper)
    for lp, r, lower, upper in zip(*(column.tolist() for column in columns), strict=True):
        margins = (-mp.expm1(lower), mp.expm1(upper))
        for margin, exact in zip(margins, oracle.margins(name, lp, r), strict=True):
            worst = max(worst, (float(abs(margin / exact - 1)), lp, r))
    return worst


if __name__ == "__main__":
    points = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    print("| divergence | dtype | worst error | at logp | at radius |\n|---|---|---|---|---|", flush=True)
    for name in oracle.F:
        for dtype in (torch.float32, torch.float64):
            error, lp, r = worst_error(name, dtype, points)
            print(f"| {name} | {str(dtype)[6:]} | {error:.1e} | {lp:.4g} | {r:.3g} |", flush=True)
