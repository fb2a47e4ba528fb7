"""Ratio bounds under fire: random (logp, radius, divergence, dtype) cases, and what must hold of every one.

    python scripts/fuzz.py [--cases 100000000] [--seed 0] [--output fuzz.json]

A case is one token whose two bounds are computed. Cases come in batches of one divergence and dtype, each drawn from
its own seed (`--batch N` runs one batch again); odd batches have a radius per token, even ones a number for all. The
output is written every minute and at the end; stop and start again with the same seed, and it goes on from there.

What must hold: no NaN; 0 ≤ lower ≤ 1 ≤ upper ≤ 1/p; both margins within the documented error of the root, by the
constraint evaluated here from its definition in float64 (`constraint`, which shares no code with bandpo); no narrower
at a radius 1 % larger; the complementary event sees the mirrored interval; `Band.clip_mask` agrees with the bounds away
from them; the same bits when run again, in another shape, at another position, and alone.
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

import torch
from torch import Tensor

from bandpo import Band, Divergence, FDivergence, parse, ratio_bounds

BATCH = 2**15
BARS = {torch.float32: 1e-5, torch.float64: 1e-12}
DTYPES = [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float32, torch.float16]
RAREST = {
    torch.float32: 1e-30,
    torch.float64: 1e-290,
}  # least p, and 1 − p, whose margins are held to their bar
# f(1 + t) away from t = 0, and f'' where that would cancel around it.
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
OWN = {
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
CLOSED = [name for name in F if name not in OWN and parse(name, Divergence).closed]
# The generic solver costs thirty times KL's: it gets a tenth of the cases, KL half.
SHARE = {name: 50 if name == "KL()" else 10 if name in CLOSED else 1 for name in F}


def gauss_legendre(points: int) -> list[tuple[float, float]]:
    """Nodes and weights on [0, 1] by the eigenvalues of the Jacobi matrix (Golub and Welsch)."""
    k = torch.arange(1, points, dtype=torch.float64)
    off = k / (4 * k * k - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return list(zip(((nodes + 1) / 2).tolist(), vectors[0].square().tolist(), strict=True))


QUADRATURE = gauss_legendre(12)


def f(name: str, t: Tensor) -> Tensor:
    """``f(1 + t)`` in float64; around 0 as ``t²·∫(1 − s)·f''(1 + s·t) ds``, which does not cancel."""
    direct, curvature = F[name]
    if curvature is None:
        return direct(t)
    near = t.clamp(-0.25, 0.25)
    integral = sum(w * (1 - s) * curvature(1 + s * near) for s, w in QUADRATURE)
    return torch.where(t.abs() <= 0.25, near * near * integral, direct(t))


def constraint(name: str, logp: Tensor, change: Tensor) -> Tensor:
    """``p·f(r) + (1 − p)·f((1 − p·r)/(1 − p))`` at ``r = 1 + change``; infinite beyond the simplex."""
    p, rest = logp.exp(), -torch.expm1(logp)
    others = -p * change / rest
    beyond = (change < -1) | (others < -1)
    spent = p * f(name, change.clamp(min=-1)) + rest * f(name, others.clamp(min=-1))
    return torch.where(beyond, math.inf, spent)


def margin_error(name: str, logp: Tensor, radius: Tensor, change: Tensor, bar: float) -> Tensor:
    """Relative error of a margin, from the constraint at ``bar`` less and more; ≤ bar exactly if they bracket."""
    inside, here, outside = (constraint(name, logp, change * (1 + side * bar)).log() for side in (-1, 0, 1))
    off = (radius.log() - here) / torch.where(here > radius.log(), here - inside, outside - here)
    held = (inside <= radius.log()) & (radius.log() <= outside)
    # Beyond the simplex all is infinite: there the bracket holds, but says no more.
    return torch.where(held, off.nan_to_num(0.0).abs().clamp(max=1), off.abs().clamp(min=1.001)) * bar


def draw(name: str, dtype: torch.dtype, index: int, seed: int) -> tuple[Tensor, Tensor | float]:
    """Log-probabilities of every kind, and a radius of 1e-6 to 1e3 (or the divergence's own maximum)."""
    g = torch.Generator().manual_seed(seed * 2**32 + index)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(BATCH, dtype=torch.float64, generator=g)

    corners = torch.tensor([0.0, -0.0, -math.inf, 0.04, 1e-3, 1e-8, -1e-8, -1e-45, -90, -1e4, -math.log(2)])
    kinds = [
        -uniform(0, 1).log() * -2,  # as a language model draws them
        uniform(-69, 0),
        torch.log1p(-(10 ** uniform(-17, -0.01))),  # near-certain
        -math.log(2) + 10 ** uniform(-17, -2) * uniform(-1, 1).sign(),  # the rarer event changes
        -(10 ** uniform(-46, -37)),  # float32's denormals
        -(10 ** uniform(0, 308 if dtype == torch.float64 else 38)),
        corners.double()[torch.randint(len(corners), (BATCH,), generator=g)],
    ]
    likely = torch.tensor([6.0, 6.0, 4.0, 1.0, 0.3, 0.5, 0.3])
    which = torch.multinomial(likely, BATCH, replacement=True, generator=g)
    logp = torch.stack(kinds).gather(0, which[None])[0].to(dtype)
    largest = {"SquaredHellinger()": 0.0, "JensenShannon()": math.log10(math.log(2))}.get(name, 3.0)
    radius = (10 ** uniform(-6, largest)).to(torch.promote_types(dtype, torch.float32))
    # A tenth of the radii put the upper bound within 1e-6 of the simplex edge.
    work = logp.double().clamp(-69, -1e-12)
    edge = constraint(name, work, torch.expm1(-work) * (1 - 1e-15)) * (1 + 1e-6 * uniform(-1, 1))
    at_edge = (uniform(0, 1) < 0.1) & (edge > 1e-6) & (edge < 10**largest)
    radius = torch.where(at_edge, edge.to(radius), radius)
    return logp, radius if index % 2 else radius[0].item()


def failures(name: str, divergence: Divergence, logp: Tensor, radius: Tensor | float) -> tuple[dict, dict]:
    """For each invariant the tokens that break it, and the relative errors of the margins."""
    bounds = ratio_bounds(logp, divergence, radius)
    lower, upper = bounds.log_lower, bounds.log_upper
    x, (lo, up) = logp.to(lower.dtype).clamp(max=0), (lower.double(), upper.double())
    bar, wide = BARS[lower.dtype], x.double()
    delta = torch.as_tensor(radius, dtype=lower.dtype).double().expand_as(wide)
    least = RAREST[lower.dtype]
    inside = (wide > math.log(least)) & (wide < -least)
    broken = {"NaN": lower.isnan() | upper.isnan(), "order": ~((lower <= 0) & (upper >= 0) & (upper <= -x))}

    errors = {
        "lower": margin_error(name, wide, delta, torch.expm1(lo), bar),
        "upper": margin_error(name, wide, delta, torch.expm1(up), bar),
    }
    errors = {side: torch.where(inside, error, 0.0) for side, error in errors.items()}
    broken |= {f"{side} not tight": ~(error <= bar) for side, error in errors.items()}

    more = ratio_bounds(logp, divergence, radius * 1.01)
    tiny = torch.finfo(lower.dtype).tiny
    broken["monotone"] = more.log_upper < upper * (1 - bar) - tiny
    broken["monotone"] |= more.log_lower > lower * (1 - bar) + tiny

    # p·(1 − lower(p)) = (1 − p)·(upper(1 − p) − 1), as far as 1 − p can be written down
    mirrored = torch.where(wide > -0.6931, (-torch.expm1(wide)).log(), torch.log1p(-wide.exp())).to(lower)
    other = ratio_bounds(mirrored, divergence, radius)
    log_lost = wide + (-torch.expm1(lo)).log()
    log_won = mirrored.double() + torch.expm1(other.log_upper.double()).log()
    both = inside & (mirrored.double() > math.log(least)) & (mirrored < -least)
    rounding = torch.finfo(lower.dtype).eps * (2 + wide.abs() + mirrored.double().abs())
    broken["complement"] = both & ~((log_lost - log_won).abs() <= 2 * bar + rounding)

    if not isinstance(radius, Tensor):
        band = Band(divergence, radius, max_ratio=math.inf)
        for factor in (0.5, 0.98, 1.02, 2.0):  # of the bound, by margin
            for side, log_bound in (("clipped_low", lo), ("clipped_high", up)):
                change = torch.expm1(log_bound) * factor
                moved = torch.log1p(change.clamp(min=-1)).to(lower)
                legal = inside & (change > -1) & (moved < -x) & (moved.isfinite()) & (change.abs() > 1e-4)
                verdict = getattr(band.clip_mask(moved, logp), side)
                broken[f"apply {side}"] = broken.get(f"apply {side}", False) | (
                    legal & (verdict != (factor > 1))
                )

    def bits(tokens: Tensor, radii: Tensor | float, shape: tuple[int, ...]) -> Tensor:
        radii = radii.reshape(shape) if isinstance(radii, Tensor) else radii
        again = ratio_bounds(tokens.reshape(shape), divergence, radii)
        return torch.stack([again.log_lower.flatten(), again.log_upper.flatten()])

    first, tail = torch.stack([lower, upper]), 37
    of = lambda part: radius[part] if isinstance(radius, Tensor) else radius  # noqa: E731
    same = (bits(logp, radius, (-1, 64, 2)) == first).all(0)
    same[tail:] &= (bits(logp[tail:], of(slice(tail, None)), (-1, 1)) == first[:, tail:]).all(0)
    for i in range(0, BATCH, BATCH // 4):
        same[i] &= bits(logp[i], of(i), ()).flatten().equal(first[:, i])
    broken["same bits"] = ~same & ~broken["NaN"]
    return broken, errors


def run_batch(index: int, seed: int, result: dict) -> None:
    choice = random.Random(f"{seed} {index}")
    name, dtype = choice.choices(list(SHARE), SHARE.values())[0], choice.choice(DTYPES)
    divergence = OWN.get(name) or parse(name, Divergence)
    logp, radius = draw(name, dtype, index, seed)
    broken, errors = failures(name, divergence, logp, radius)
    row = result["table"].setdefault(f"{name} {str(dtype)[6:]}", {"cases": 0, "worst": 0.0})
    row["cases"] += logp.numel()
    radii = torch.as_tensor(radius).expand_as(logp)
    for side, error in errors.items():
        i = int(error.nan_to_num(math.inf).argmax())
        if not error[i] <= row["worst"]:
            row |= {"worst": error[i].item(), "side": side, "logp": logp[i].item(), "radius": radii[i].item()}
    for what, where in broken.items():
        if where.any():
            i = int(where.nonzero()[0])
            case = {"what": what, "tokens": int(where.sum()), "batch": index, "divergence": name}
            case |= {"dtype": str(dtype)[6:], "logp": logp[i].item(), "radius": radii[i].item()}
            result["failures"] += int(where.sum())
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
            parser.error(f"{options.output} holds seed {result['seed']}; give that, or another --output")
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
            options.output.write_text(json.dumps(result, indent=1))
            print(
                f"{result['cases']:.3g} cases, {result['failures']} failures, {result['seconds']:.0f} s",
                flush=True,
            )
    raise SystemExit(1 if result["failures"] else 0)


if __name__ == "__main__":
    main()
