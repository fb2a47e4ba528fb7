"""What bounds and losses cost, as ratios within one run; appends to a CSV.

    python benchmarks/speed.py [--tokens 65536 1048576] [--device cpu] [--output benchmarks/speed.csv]

Contestants take turns, so that a machine whose speed drifts slows all of them; on a CPU one thread's processor time
is read, so that other processes do not count. The ratio of medians is what to quote.

- bounds: `ratio_bounds` for each divergence, both sides, eager and under torch.compile, beside a plain bisection of 50
  steps on each side, eager.
- loss: forward and backward of `policy_loss` for each rule, beside PPO's clip as every textbook writes it (exp, clamp,
  min, masked mean, differentiated by autograd), each eager and under torch.compile.
"""

import argparse
import csv
import platform
import statistics
import subprocess
import time
from datetime import date
from pathlib import Path

import torch

import bandpo
from bandpo import KL, Band, FixedClip, JensenShannon, PearsonChi2, TotalVariation, policy_loss, ratio_bounds

RADIUS = 0.05


def bisection(logp):
    """KL bounds by 50 halvings on each side, without a data-dependent stop."""
    p = logp.exp()

    def root(inside, outside):
        for _ in range(50):
            middle = (inside + outside) / 2
            spent = -p * middle.log() - (1 - p) * ((1 - middle * p) / (1 - p)).log()
            feasible = spent <= RADIUS
            inside, outside = torch.where(feasible, middle, inside), torch.where(feasible, outside, middle)
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


def rule_loss(clip):
    """Loss and metrics: what is returned, a compiled loss has to compute."""
    return lambda logp, logp_old, advantages, mask: policy_loss(logp, logp_old, advantages, mask, clip=clip)


def batch(tokens, device):
    g = torch.Generator().manual_seed(0)
    logp_old = -torch.empty(tokens // 1024, 1024).exponential_(0.5, generator=g)
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


def time_of(run, device):
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.process_time()
    run()
    return time.process_time() - begin


def compete(contestants, device, rounds):
    """Median seconds of each, taking turns."""
    for run in contestants.values():
        run(), run()
    times = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            times[name].append(time_of(run, device))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def bounds_contest(tokens, device):
    logp = batch(tokens, device)[1]
    compiled = torch.compile(both_bounds, dynamic=True)
    return "bisection, 50 steps", {
        "bisection, 50 steps": lambda: bisection(logp),
        "KL": lambda: ratio_bounds(logp, KL(), RADIUS),
        "TotalVariation": lambda: ratio_bounds(logp, TotalVariation(), RADIUS),
        "PearsonChi2": lambda: ratio_bounds(logp, PearsonChi2(), RADIUS),
        "KL, compiled": lambda: compiled(logp, KL()),
        "JensenShannon": lambda: ratio_bounds(logp, JensenShannon(), RADIUS),
        "JensenShannon, compiled": lambda: compiled(logp, JensenShannon()),
    }


def loss_contest(tokens, device):
    tensors = batch(tokens, device)
    losses = {
        "textbook clip 0.2": textbook_clip,
        "FixedClip(0.2)": rule_loss(FixedClip(0.2)),
        "Band(KL)": rule_loss(Band(KL(), RADIUS)),
        "Band(TotalVariation)": rule_loss(Band(TotalVariation(), RADIUS)),
    }
    runs = {name: forward_backward(loss, tensors) for name, loss in losses.items()}
    for name, loss in losses.items():
        runs[f"{name}, compiled"] = forward_backward(torch.compile(loss, dynamic=True), tensors)
    return "textbook clip 0.2", runs


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**16, 2**20])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("speed.csv"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    stamp = {
        "date": date.today().isoformat(),
        "revision": git.stdout.strip() or bandpo.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name()
        if options.device == "cuda"
        else platform.machine() + " CPU, 1 thread",
    }
    rows = []
    for tokens in options.tokens:
        for what, contest in (("bounds", bounds_contest), ("loss", loss_contest)):
            baseline, contestants = contest(tokens, options.device)
            seconds = compete(contestants, options.device, options.rounds)
            for name, value in seconds.items():
                ratio = value / seconds[baseline]
                rows.append({**stamp, "what": what, "tokens": tokens, "contestant": name})
                rows[-1] |= {"milliseconds": f"{value * 1e3:.3f}", "ratio": f"{ratio:.4f}"}
                print(f"{what:6} {tokens:8} {name:30} {value * 1e3:10.3f} ms   {ratio:8.3f} × {baseline}")
    new = not options.output.exists()
    with options.output.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
