"""Fuzz test of the ratio bounds: check invariants on random (logp, radius, divergence, dtype) cases.

    python scripts/fuzz.py [--cases 100000000] [--seed 0] [--output fuzz.json]

A case is one token, for which both bounds are computed. A batch has cases of one divergence and dtype, and its own seed
(`--batch N` repeats one batch). Odd batches have one radius per token, even ones a single radius. The output is written
every minute and at the end. If the script is stopped and started again with the same seed, it continues.

The invariants: no NaN; 0 ≤ lower ≤ 1 ≤ upper ≤ 1/p; both margins are within the documented error of the root of
`constraint`, which is evaluated in float64 from its definition and shares no code with bandpo; a radius that is 1 %
larger gives no narrower bounds; the complementary event has the mirrored interval; `Band.clip_mask` agrees with the
bounds except close to them; results are bit for bit the same in a second run, in another shape, at another position and
for a single token.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bandpo import Band, Divergence, FDivergence, parse, ratio_bounds

BATCH = 2**15
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
"""The documented relative error of the margins."""

DTYPES = [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float32, torch.float16]
RAREST = {
    torch.float32: 1e-30,
    torch.float64: 1e-290,
}
"""The smallest p and 1 − p for which the tolerance is checked."""

# f(1 + t), and f''(u) if f(1 + t) suffers from cancellation around t = 0.
F: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]] = {
    "KL()": (lambda t: t - torch.log1p(t), lambda u: u**-2),
    "ReverseKL()": (lambda t: torch.xlogy(1 + t, 1 + t) - t, lambda u: 1 / u),
    "TotalVariation()": (lambda t: t.abs() / 2, None),
    "PearsonChi2()": (lambda t: t * t, None),
    "NeymanChi2()": (lambda t: t / (1 + t) * t, None),
    "SquaredHellinger()": (lambda t: (t / (torch.sqrt(1 + t) + 1)) ** 2 / 2, None),
    "JensenShannon()": (
        lambda t: (torch.xlogy(1 + t, 1 + t) - (2 + t) * torch.log1p(t / 2)) / 2,
        lambda u: 1 / (2 * u * (1 + u)),
    ),
    "triangular": (lambda t: t / (2 + t) * t, None),
    "own ReverseKL": (lambda t: torch.xlogy(1 + t, 1 + t) - t, lambda u: 1 / u),
}
CUSTOM = {
    "triangular": FDivergence(lambda u: (u - 1) ** 2 / (u + 1)),
    "own ReverseKL": FDivergence(lambda u: u * torch.log(u), lambda u: torch.log(u) + 1),
}
ALPHAS = [-8.0, -3.0, -1.0, -0.5, 0.5, 1.5, 3.0, 8.0]


def cressie_read(alpha: float):
    return (
        lambda t: ((1 + t) ** alpha - alpha * t - 1) / (alpha * (alpha - 1)),
        lambda u: u ** (alpha - 2),
    )


F |= {f"AlphaDivergence(alpha={a})": cressie_read(a) for a in ALPHAS}
CLOSED = [name for name in F if name not in CUSTOM and parse(name, Divergence).one_pass]
# The generic solver takes thirty times as long as KL's, so it gets fewer cases.
SHARE = dict.fromkeys(F, 1) | dict.fromkeys(CLOSED, 10) | {"KL()": 50}


def gauss_legendre(points: int) -> list[tuple[float, float]]:
    """Return nodes and weights on [0, 1], by the eigenvalues of the Jacobi matrix (Golub and Welsch)."""
    k = torch.arange(1, points, dtype=torch.float64)
    off = k / (4 * k * k - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    weights = vectors[0].square()
    return list(zip(((nodes + 1) / 2).tolist(), weights.tolist(), strict=True))


QUADRATURE = gauss_legendre(12)


def f(name: str, t: Tensor) -> Tensor:
    """Compute ``f(1 + t)`` in float64; around 0 as ``t²·∫(1 − s)·f''(1 + s·t) ds``, which avoids cancellation."""
    direct, curvature = F[name]
    if curvature is None:
        return direct(t)
    near = t.clamp(-0.25, 0.25)
    integral = sum(w * (1 - s) * curvature(1 + s * near) for s, w in QUADRATURE)
    return torch.where(t.abs() <= 0.25, near * near * integral, direct(t))


def constraint(name: str, logp: Tensor, change: Tensor) -> Tensor:
    """Compute ``p·f(r) + (1 − p)·f((1 − p·r)/(1 − p))`` at ``r = 1 + change``; infinite beyond the simplex."""
    p = logp.exp()
    complement = -torch.expm1(logp)
    complement_change = -p * change / complement
    beyond = (change < -1) | (complement_change < -1)
    divergence = p * f(name, change.clamp(min=-1))
    divergence = divergence + complement * f(name, complement_change.clamp(min=-1))
    return torch.where(beyond, math.inf, divergence)


def margin_error(name: str, logp: Tensor, radius: Tensor, change: Tensor, tolerance: float) -> Tensor:
    """Estimate the relative error of a margin.

    The constraint is evaluated at the margin, and at margins that are smaller and larger by ``tolerance``. The error is
    interpolated. It is at most ``tolerance`` if and only if the radius lies between the two outer values.
    """
    target = radius.log()
    inside = constraint(name, logp, change * (1 - tolerance)).log()
    at_margin = constraint(name, logp, change).log()
    outside = constraint(name, logp, change * (1 + tolerance)).log()
    error = (target - at_margin) / torch.where(at_margin > target, at_margin - inside, outside - at_margin)
    bracketed = (inside <= target) & (target <= outside)
    # Beyond the simplex the constraint is infinite, and an error within the bracket may be NaN.
    within = error.nan_to_num(0.0).abs().clamp(max=1)
    return torch.where(bracketed, within, error.abs().clamp(min=1.001)) * tolerance


def draw(name: str, dtype: torch.dtype, index: int, seed: int) -> tuple[Tensor, Tensor | float]:
    """Draw log-probabilities from several distributions, and radii from 1e-6 to 1e3 (or the divergence's maximum)."""
    g = torch.Generator().manual_seed(seed * 2**32 + index)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(BATCH, dtype=torch.float64, generator=g)

    corners = torch.tensor([0.0, -0.0, -math.inf, 0.04, 1e-3, 1e-8, -1e-8, -1e-45, -90, -1e4, -math.log(2)])
    kinds = [
        -uniform(0, 1).log() * -2,  # like tokens that a language model samples
        uniform(-69, 0),
        torch.log1p(-(10 ** uniform(-17, -0.01))),  # near-certain
        -math.log(2) + 10 ** uniform(-17, -2) * uniform(-1, 1).sign(),  # the rarer event changes
        -(10 ** uniform(-46, -37)),  # float32's denormals
        -(10 ** uniform(0, 308 if dtype == torch.float64 else 38)),
        corners.double()[torch.randint(len(corners), (BATCH,), generator=g)],
    ]
    frequencies = torch.tensor([6.0, 6.0, 4.0, 1.0, 0.3, 0.5, 0.3])
    kind = torch.multinomial(frequencies, BATCH, replacement=True, generator=g)
    logp = torch.stack(kinds).gather(0, kind[None])[0].to(dtype)
    largest = {"SquaredHellinger()": 0.0, "JensenShannon()": math.log10(math.log(2))}.get(name, 3.0)
    radius = (10 ** uniform(-6, largest)).to(torch.promote_types(dtype, torch.float32))
    # A tenth of the radii put the upper bound within 1e-6 of the simplex edge.
    clamped = logp.double().clamp(-69, -1e-12)
    edge = constraint(name, clamped, torch.expm1(-clamped) * (1 - 1e-15)) * (1 + 1e-6 * uniform(-1, 1))
    at_edge = (uniform(0, 1) < 0.1) & (edge > 1e-6) & (edge < 10**largest)
    radius = torch.where(at_edge, edge.to(radius), radius)
    return logp, radius if index % 2 else radius[0].item()


def failures(name: str, divergence: Divergence, logp: Tensor, radius: Tensor | float) -> tuple[dict, dict]:
    """Return a mask of the tokens that violate each invariant, and the relative errors of both margins."""
    bounds = ratio_bounds(logp, divergence, radius)
    lower, upper = bounds.log_lower, bounds.log_upper
    x = logp.to(lower.dtype).clamp(max=0)
    lo = lower.double()
    up = upper.double()
    tolerance = TOLERANCES[lower.dtype]
    wide = x.double()
    delta = torch.as_tensor(radius, dtype=lower.dtype).double().expand_as(wide)
    least = RAREST[lower.dtype]
    inside = (wide > math.log(least)) & (wide < -least)
    broken = {"NaN": lower.isnan() | upper.isnan(), "order": ~((lower <= 0) & (upper >= 0) & (upper <= -x))}

    errors = {
        "lower": margin_error(name, wide, delta, torch.expm1(lo), tolerance),
        "upper": margin_error(name, wide, delta, torch.expm1(up), tolerance),
    }
    errors = {side: torch.where(inside, error, 0.0) for side, error in errors.items()}
    broken |= {f"{side} not tight": ~(error <= tolerance) for side, error in errors.items()}

    wider = ratio_bounds(logp, divergence, radius * 1.01)
    tiny = torch.finfo(lower.dtype).tiny
    broken["monotone"] = wider.log_upper < upper * (1 - tolerance) - tiny
    broken["monotone"] |= wider.log_lower > lower * (1 - tolerance) + tiny

    # p·(1 − lower(p)) = (1 − p)·(upper(1 − p) − 1), up to the rounding of 1 − p.
    mirrored = torch.where(wide > -0.6931, (-torch.expm1(wide)).log(), torch.log1p(-wide.exp())).to(lower)
    mirrored_bounds = ratio_bounds(mirrored, divergence, radius)
    log_lost = wide + (-torch.expm1(lo)).log()
    log_gained = mirrored.double() + torch.expm1(mirrored_bounds.log_upper.double()).log()
    both = inside & (mirrored.double() > math.log(least)) & (mirrored < -least)
    rounding = torch.finfo(lower.dtype).eps * (2 + wide.abs() + mirrored.double().abs())
    broken["complement"] = both & ~((log_lost - log_gained).abs() <= 2 * tolerance + rounding)

    if not isinstance(radius, Tensor):
        band = Band(divergence, radius, max_ratio=math.inf)
        for factor in (0.5, 0.98, 1.02, 2.0):  # multiples of the margin
            for side, log_bound in (("clipped_low", lo), ("clipped_high", up)):
                change = torch.expm1(log_bound) * factor
                moved = torch.log1p(change.clamp(min=-1)).to(lower)
                legal = inside & (change > -1) & (moved < -x) & (moved.isfinite()) & (change.abs() > 1e-4)
                verdict = getattr(band.clip_mask(moved, logp), side)
                broken[f"apply {side}"] = broken.get(f"apply {side}", False) | (
                    legal & (verdict != (factor > 1))
                )

    def stacked_bounds(tokens: Tensor, radii: Tensor | float, shape: tuple[int, ...]) -> Tensor:
        radii = radii.reshape(shape) if isinstance(radii, Tensor) else radii
        repeated = ratio_bounds(tokens.reshape(shape), divergence, radii)
        return torch.stack([repeated.log_lower.flatten(), repeated.log_upper.flatten()])

    def radii_of(index: Any) -> Tensor | float:
        return radius[index] if isinstance(radius, Tensor) else radius

    first = torch.stack([lower, upper])
    tail = 37
    same = (stacked_bounds(logp, radius, (-1, 64, 2)) == first).all(0)
    same[tail:] &= (stacked_bounds(logp[tail:], radii_of(slice(tail, None)), (-1, 1)) == first[:, tail:]).all(
        0
    )
    for i in range(0, BATCH, BATCH // 4):
        same[i] &= stacked_bounds(logp[i], radii_of(i), ()).flatten().equal(first[:, i])
    broken["same bits"] = ~same & ~broken["NaN"]
    return broken, errors


def run_batch(index: int, seed: int, result: dict) -> None:
    """Check a batch, and add its counts, worst errors and violations to ``result``."""
    choice = random.Random(f"{seed} {index}")
    name = choice.choices(list(SHARE), SHARE.values())[0]
    dtype = choice.choice(DTYPES)
    divergence = CUSTOM.get(name) or parse(name, Divergence)
    logp, radius = draw(name, dtype, index, seed)
    broken, errors = failures(name, divergence, logp, radius)
    row = result["table"].setdefault(f"{name} {str(dtype)[6:]}", {"cases": 0, "worst": 0.0})
    row["cases"] += logp.numel()
    radii = torch.as_tensor(radius).expand_as(logp)
    for side, error in errors.items():
        i = int(error.nan_to_num(math.inf).argmax())
        if not error[i] <= row["worst"]:
            row |= {"worst": error[i].item(), "side": side, "logp": logp[i].item(), "radius": radii[i].item()}
    for invariant, violated in broken.items():
        if violated.any():
            i = int(violated.nonzero()[0])
            case = {"what": invariant, "tokens": int(violated.sum()), "batch": index, "divergence": name}
            case |= {"dtype": str(dtype)[6:], "logp": logp[i].item(), "radius": radii[i].item()}
            result["failures"] += int(violated.sum())
            result["broken"] = [*result["broken"], case][:200]
            print(json.dumps(case), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=float, default=1e8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, help="run this batch alone and write nothing")
    parser.add_argument("--output", type=Path, default=Path("fuzz.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {"seed": options.seed, "torch": torch.__version__, "batches": 0, "cases": 0, "failures": 0}
    result |= {"seconds": 0.0, "table": {}, "broken": []}
    if options.batch is not None:
        run_batch(options.batch, options.seed, result)
        print(json.dumps(result, indent=1))
        return
    if options.output.exists():
        result = json.loads(options.output.read_text())
        if result["seed"] != options.seed:
            parser.error(
                f"{options.output} has results of seed {result['seed']}; give that --seed, or another --output"
            )
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: stop.append(n))
    written = time.monotonic()
    while result["cases"] < options.cases and not stop:
        begin = time.process_time()
        run_batch(result["batches"], options.seed, result)
        result["batches"] += 1
        result["cases"] = result["batches"] * BATCH
        result["seconds"] += time.process_time() - begin
        if time.monotonic() - written > 60 or stop or result["cases"] >= options.cases:
            written = time.monotonic()
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(result, indent=1))
            print(
                f"{result['cases']:.3g} cases, {result['failures']} failures, {result['seconds']:.0f} s",
                flush=True,
            )
    raise SystemExit(1 if result["failures"] else 0)


if __name__ == "__main__":
    main()
