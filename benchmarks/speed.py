"""Measure the time of bounds and losses as ratios within one run, and append it to a CSV.

    python benchmarks/speed.py [--tokens 65536 1048576] [--device cpu] [--output benchmarks/speed.csv]
    python benchmarks/speed.py --table [--tokens 131072]     # the tables of research/reports/benchmarks.md

Contestants run in turn, so that a drift of the machine's speed affects all of them alike. On a CPU, the processor time
of one thread is measured, so that other processes do not count. Quote the ratios of medians.

- bounds: `ratio_bounds` for each divergence, both sides, eager and for two under torch.compile, beside a plain
  bisection of 50 steps on each side, eager, and the code of the paper's authors, if a clone called BandPO is in
  $BANDPO_CLONES.
- loss: forward and backward of `policy_loss` for each divergence and method, beside PPO's clip as textbooks write it
  (exp, clamp, min, masked mean, differentiated by autograd); for five methods also compiled, by `compile_loss`.
- In both, a copy of as many bytes as a computation has to move at least.
- packed: the loss of a packed batch beside that of the padded one, with 30, 60 and 90 % of padding.
"""

import argparse
import csv
import importlib.util
import os
import sys
from functools import cache, partial
from pathlib import Path

import torch

from bandpo import (
    KL,
    Band,
    FDivergence,
    Packed,
    Rows,
    compile_loss,
    parse,
    policy_loss,
    ratio_bounds,
)
from bandpo.core.divergences import Divergence, JensenShannon
from bandpo.core.methods import METHODS
from bandpo.core.text import as_method
from measuring import compete, stamp

RADIUS = 0.05
DIVERGENCES = {
    name: parse(name, Divergence)
    for name in (
        "KL()",
        "TotalVariation()",
        "PearsonChi2()",
        "NeymanChi2()",
        "SquaredHellinger()",
        "ReverseKL()",
        "JensenShannon()",
        "AlphaDivergence(0.5)",
        "AlphaDivergence(3.0)",
        "AlphaDivergence(-0.5)",
    )
}
DIVERGENCES["a function of one's own"] = FDivergence(lambda u: (u - 1) ** 2 / (u + 1))


def bisection(logp):
    """Compute KL bounds by 50 bisection steps on each side, without a data-dependent stop."""
    p = logp.exp()

    def root(inside, outside):
        for _ in range(50):
            middle = (inside + outside) / 2
            divergence = -p * middle.log() - (1 - p) * ((1 - middle * p) / (1 - p)).log()
            feasible = divergence <= RADIUS
            inside = torch.where(feasible, middle, inside)
            outside = torch.where(feasible, outside, middle)
        return inside

    one = torch.ones_like(p)
    return root(one, torch.zeros_like(p)), root(one, 1 / p)


def both_bounds(logp, divergence):
    bounds = ratio_bounds(logp, divergence, RADIUS)
    return bounds.log_lower, bounds.log_upper


@cache
def authors_bounds():
    """Return the bounds of the authors' code by their names, for the radius; none without a clone of it."""
    folder = Path(os.environ.get("BANDPO_CLONES", "unset")) / "BandPO/RLtraining/verl/verl/bandpo/band"
    if not folder.is_dir():
        return {}
    # Their solver is imported by this name. The packages above it import all of verl, and are left out.
    for name in ("solver", "band"):
        spec = importlib.util.spec_from_file_location(f"verl.bandpo.band.{name}", folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    settings = {"delta": RADIUS, "does_relax_high_p_bound": False, "upper_bound_max": 10.0}
    return {
        f"the authors' {name}": partial(module.band, method=name, **settings)
        for name in ("bandkl", "bandtv", "bandchi2")
    }


def textbook_clip(logp, logp_old, advantages, mask):
    ratio = torch.exp(logp - logp_old)
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (-(surrogate * mask).sum() / mask.sum(),)


def method_loss(method):
    """Return the loss of a method, with metrics, which a compiled loss then has to compute too."""
    return partial(policy_loss, method=as_method(method), layout=Rows())


# Bytes in float32 if each tensor is moved once. Bounds: read logp_old, write two bounds. Loss: the forward pass reads
# logp, logp_old, advantages and mask, and writes the derivative; the backward pass reads it and writes the gradient.
BYTES_PER_TOKEN = {"bounds": 4 * 3, "loss": 4 * 7}


def batch(tokens, device, width=1024):
    g = torch.Generator().manual_seed(0)
    logp_old = -torch.empty(tokens // width, width).exponential_(0.5, generator=g)
    logp = (logp_old + 0.3 * torch.randn(logp_old.shape, generator=g)).clamp(max=-1e-6)
    advantages = torch.randn(logp_old.shape, generator=g)
    mask = (torch.rand(logp_old.shape, generator=g) > 0.1).float()
    return [x.to(device) for x in (logp, logp_old, advantages, mask)]


def forward_backward(loss, tensors):
    logp = tensors[0].detach().requires_grad_()

    def run():
        logp.grad = None
        loss(logp, *tensors[1:])[0].backward()

    return run


COMPILED = ("FixedClip(0.2)", "GRPO()", "Band(KL(), 0.05)", "BandPO()", "Band(TotalVariation(), 0.05)")
LOSSES = {"textbook clip 0.2": textbook_clip, **{name: method_loss(name) for name in COMPILED}}


@cache
def compiled(run, backend):
    """Compile a function once for all sizes, because dynamo limits the recompilations of a function."""
    return torch.compile(run, dynamic=True, backend=backend)


@cache
def compiled_method(name, backend, dynamic=True):
    return partial(compile_loss(name, dynamic=dynamic, backend=backend), layout=Rows())


def bounds_contest(tokens, device, backend="inductor"):
    logp = batch(tokens, device)[1]
    run = compiled(both_bounds, backend)
    return "bisection, 50 steps", {
        "bisection, 50 steps": lambda: bisection(logp),
        **plain_bounds(logp),
        "KL, compiled": lambda: run(logp, KL()),
        "JensenShannon, compiled": lambda: run(logp, JensenShannon()),
    }


def plain_bounds(logp):
    """Return what computes the bounds of each divergence without a compiler, and the copy that moves as many bytes."""
    both = torch.empty(2, *logp.shape, device=logp.device)
    runs = {"copy": lambda: both.copy_(logp)}
    runs |= {
        name: partial(ratio_bounds, logp, divergence, RADIUS) for name, divergence in DIVERGENCES.items()
    }
    return runs | {name: partial(bounds, logp) for name, bounds in authors_bounds().items()}


def plain_losses(tensors):
    """Return the loss of each divergence and method without a compiler, and the copy that moves as many bytes."""
    written = torch.empty(7, *tensors[0].shape, device=tensors[0].device)
    halves = written.view(-1).chunk(2)
    runs = {
        "copy": lambda: halves[0][: halves[1].numel()].copy_(halves[1]),
        "textbook clip 0.2": forward_backward(textbook_clip, tensors),
    }
    methods = {f"Band({name})": Band(divergence, RADIUS) for name, divergence in DIVERGENCES.items()}
    methods |= {f"{name}()": as_method(f"{name}()") for name in METHODS}
    for name, method in methods.items():
        runs[name] = forward_backward(partial(policy_loss, method=method, layout=Rows()), tensors)
    return runs


def loss_contest(tokens, device, backend="inductor"):
    tensors = batch(tokens, device)
    runs = {name: forward_backward(loss, tensors) for name, loss in LOSSES.items()}
    runs["textbook clip 0.2, compiled"] = forward_backward(compiled(textbook_clip, backend), tensors)
    for name in COMPILED:
        runs[f"{name}, compiled"] = forward_backward(compiled_method(name, backend), tensors)
    return "textbook clip 0.2", runs


def packed_contest(tokens, device, backend="inductor"):
    """Return the losses of the same sequences padded and packed. About ``tokens`` tokens are not padding."""
    runs = {}
    for padding in PADDING:
        width = 1024
        rows = max(1, round(tokens / (width * (1 - padding))))
        random = torch.Generator().manual_seed(0)
        lengths = (2 * (1 - padding) * width * torch.rand(rows, generator=random)).long().clamp(1, width)
        lengths[0] = width
        inside = torch.arange(width) < lengths[:, None]
        padded = [x.to(device) for x in batch(rows * width, "cpu")[:2]]
        advantages = torch.randn(rows, generator=random).to(device)
        mask = inside.float().to(device)
        ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(device)
        packed = [x[inside.to(device)][None] for x in padded]
        for name in ("GRPO()", "GSPO()"):
            loss = partial(policy_loss, method=as_method(name))
            runs[f"{name} padded by {padding:.0%}"] = forward_backward(loss, [*padded, advantages, mask])
            runs[f"{name} packed from {padding:.0%}"] = forward_backward(
                partial(loss, layout=Packed(cu_seqlens=ends)), [*packed, advantages]
            )
    return f"GRPO() padded by {PADDING[0]:.0%}", runs


PADDING = (0.3, 0.6, 0.9)
CONTESTS = {"loss": loss_contest, "bounds": bounds_contest, "packed": packed_contest}


def race(what, tokens, device, rounds, backend="inductor"):
    """Yield for each contestant its row, its median seconds, and their ratio to the baseline's."""
    baseline, contestants = CONTESTS[what](tokens, device, backend)
    seconds = compete(contestants, device, rounds)
    for name, value in seconds.items():
        yield {"what": what, "tokens": tokens, "contestant": name}, value, value / seconds[baseline]


def print_table(tokens, rounds):
    """Print the tables of the page: what each computation takes, for a token and in copies of the least bytes."""
    tensors = batch(tokens, "cpu")
    with torch.no_grad():
        seconds = {
            "bounds": compete(
                {"bisection, 50 steps": lambda: bisection(tensors[1]), **plain_bounds(tensors[1])},
                "cpu",
                rounds,
            )
        }
    seconds["loss"] = compete(plain_losses(tensors), "cpu", rounds)
    for what, of_each in seconds.items():
        print(
            f"\n| {what}, at least {BYTES_PER_TOKEN[what]} bytes a token | ns a token | copies |\n|---|---:|---:|"
        )
        for name, value in of_each.items():
            print(f"| {name} | {value / tokens * 1e9:.3g} | {value / of_each['copy']:.3g} |")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**16, 2**20])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=list(CONTESTS), nargs="+", default=list(CONTESTS))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("speed.csv"))
    parser.add_argument("--table", action="store_true", help="print the tables of the page, and nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table:
        for tokens in options.tokens:
            print_table(tokens, options.rounds)
        return
    metadata = stamp(options.device)
    rows = []
    for tokens in options.tokens:
        for what in options.only:
            for row, seconds, ratio in race(what, tokens, options.device, options.rounds):
                milliseconds = f"{seconds * 1e3:.3f}"
                rows.append({**metadata, **row, "milliseconds": milliseconds, "ratio": f"{ratio:.4f}"})
                print(f"{what:6} {tokens:8} {row['contestant']:30} {milliseconds:>10} ms   {ratio:8.3f}")
    is_new = not options.output.exists()
    with options.output.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
