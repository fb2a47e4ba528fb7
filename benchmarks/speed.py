"""Measure the time of bounds and losses as ratios within one run, and append it to a CSV.

    python benchmarks/speed.py [--tokens 65536 1048576] [--device cpu] [--output benchmarks/speed.csv]

Contestants run in turn, so that a drift of the machine's speed affects all of them alike. On a CPU, the processor time
of one thread is measured, so that other processes do not count. Quote the ratios of medians.

- bounds: `ratio_bounds` for each divergence, both sides, eager and under torch.compile, beside a plain bisection of 50
  steps on each side, eager.
- loss: forward and backward of `policy_loss` for each method, beside PPO's clip as textbooks write it (exp, clamp,
  min, masked mean, differentiated by autograd), each eager and compiled: bandpo's by `compile_loss`.
- packed: the loss of a packed batch beside that of the padded one, with 30, 60 and 90 % of padding.
"""

import argparse
import csv
from functools import cache, partial
from pathlib import Path

import torch

from bandpo import KL, Packed, Rows, TotalVariation, compile_loss, policy_loss, ratio_bounds
from bandpo.core.divergences import JensenShannon, PearsonChi2
from bandpo.core.text import as_method
from measuring import compete, stamp

RADIUS = 0.05


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


METHODS = ("FixedClip(0.2)", "GRPO()", "Band(KL(), 0.05)", "BandPO()", "Band(TotalVariation(), 0.05)")
LOSSES = {"textbook clip 0.2": textbook_clip, **{name: method_loss(name) for name in METHODS}}


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
        "KL": lambda: ratio_bounds(logp, KL(), RADIUS),
        "TotalVariation": lambda: ratio_bounds(logp, TotalVariation(), RADIUS),
        "PearsonChi2": lambda: ratio_bounds(logp, PearsonChi2(), RADIUS),
        "KL, compiled": lambda: run(logp, KL()),
        "JensenShannon": lambda: ratio_bounds(logp, JensenShannon(), RADIUS),
        "JensenShannon, compiled": lambda: run(logp, JensenShannon()),
    }


def loss_contest(tokens, device, backend="inductor"):
    tensors = batch(tokens, device)
    runs = {name: forward_backward(loss, tensors) for name, loss in LOSSES.items()}
    runs["textbook clip 0.2, compiled"] = forward_backward(compiled(textbook_clip, backend), tensors)
    for name in METHODS:
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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**16, 2**20])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=list(CONTESTS), nargs="+", default=list(CONTESTS))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("speed.csv"))
    options = parser.parse_args()
    torch.set_num_threads(1)
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
