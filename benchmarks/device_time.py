"""Measure what losses cost on a GPU: the time of the device and the time of the host apart, as JSON rows.

    PYTHONPATH=packages/bandpo/src python benchmarks/device_time.py --output FILE [--seconds 95]

- Device: a CUDA graph of the forward and backward passes of several batches is replayed, so no call waits for the host.
  The batches together do not fit into the device's cache. ``of_copy`` is the time of a copy of the same number of
  bytes, measured in the same way, divided by that of the loss.
- Host: the time until a call returns, with an idle device.
- Launches: the kernels that one pass starts, each with its microseconds, as the profiler reports them.
- Decisions: the tokens that are dropped by the kernels of ``kernels=True`` and not by `policy_loss`, or the reverse,
  and those of them that are not at a bound up to rounding.

The losses with kernels are measured on the same tensors as the others, and, as ``21 bytes``, with a mask of bools and
an advantage per sequence.

Contestants that are not reached within ``--seconds`` are listed as skipped. On a CPU (``--small``) the same code runs
with tiny sizes, and the device's time is the processor's.
"""

import argparse
import itertools
import json
import math
import time
import warnings
from functools import partial
from pathlib import Path

import torch

import speed
from bandpo import KL, TotalVariation, compile_loss, policy_loss, ratio_bounds
from bandpo.core.divergences import JensenShannon
from bandpo.core.errors import BandWarning
from bandpo.core.kernels import _token_loss as token_loss
from bandpo.core.kernels._trial import is_interpreted
from bandpo.core.text import as_method
from measuring import stamp
from speed import BYTES_PER_TOKEN

SHAPES = ((16384, 1024), (8, 32768), (16, 8192), (512, 1024))
SMALL_SHAPES = ((4, 256), (2, 1024))
CACHE = 2**28
"""Bytes of input that no cache of a device holds."""
REPETITIONS = 7
COMPACT = "21 bytes"
COMPACT_BYTES = 21
KERNEL_METHODS = (
    "Band(KL(), 0.05)",
    "FixedClip(0.2)",
    "BandPO()",
    "BandAbove()",
    "Band(TotalVariation(), 0.15)",
    "Band(PearsonChi2(), 0.1)",
)
"""The methods whose decisions are compared, with each kind of bound of the kernels."""


def textbook_with_metrics(logp, logp_old, advantages, mask):
    """Compute the textbook's loss, and the five metrics of `bandpo.policy_loss`."""
    (loss,) = speed.textbook_clip(logp, logp_old, advantages, mask)
    with torch.no_grad():
        ratio = torch.exp(logp - logp_old)
        tokens = mask.sum()
        dropped = {
            "clip_high": (ratio > 1.2) & (advantages > 0),
            "clip_low": (ratio < 0.8) & (advantages < 0),
            "dual_clip": (ratio > 10) & (advantages < 0),
        }
        metrics = {name: (x * mask).sum() / tokens for name, x in dropped.items()}
        metrics["ratio_mean"] = (ratio * mask).sum() / tokens
        metrics["approx_kl"] = ((ratio - 1 - (logp - logp_old)) * mask).sum() / tokens
    return loss, metrics


def has_kernels():
    """Return True if the kernels can run: on CUDA, or in Triton's interpreter."""
    return torch.cuda.is_available() or is_interpreted()


def loss_with_kernels(method):
    """Return the loss of a method by the kernels. If they do not run, their warning is an error and the row fails."""
    loss = compile_loss(method, kernels=True)

    def run(*tensors, **settings):
        with warnings.catch_warnings():
            warnings.simplefilter("error", BandWarning)
            return loss(*tensors, **settings)

    return run


def loss_contestants(backend):
    """Return the losses by name, the most important first.

    A compiled loss is compiled for its first shape, and once more, with symbols, for all further shapes.
    """
    compile_for_all = partial(torch.compile, backend=backend)
    losses = {"textbook clip 0.2, compiled": compile_for_all(speed.textbook_clip)}
    if has_kernels():
        for method in ("Band(KL(), 0.05)", "FixedClip(0.2)"):
            losses[f"{method}, kernels"] = loss_with_kernels(method)
            losses[f"{method}, kernels, {COMPACT}"] = loss_with_kernels(method)
    for method in ("Band(KL(), 0.05)", "FixedClip(0.2)"):
        losses[f"{method}, compiled"] = speed.compiled_method(method, backend, dynamic=None)
    losses["textbook with metrics, compiled"] = compile_for_all(textbook_with_metrics)
    losses["textbook clip 0.2"] = speed.textbook_clip
    losses["textbook with metrics"] = textbook_with_metrics
    losses["Band(KL(), 0.05)"] = speed.LOSSES["Band(KL(), 0.05)"]
    losses["FixedClip(0.2)"] = speed.LOSSES["FixedClip(0.2)"]
    losses["BandPO(), compiled"] = speed.compiled_method("BandPO()", backend, dynamic=None)
    losses["BandPO()"] = speed.LOSSES["BandPO()"]
    return losses


def bounds_contestants(backend):
    """Return the functions that compute both bounds, by name, the most important first."""
    compiled = speed.compiled(speed.both_bounds, backend)
    divergences = {"KL": KL(), "TotalVariation": TotalVariation(), "JensenShannon": JensenShannon()}
    runs = {}
    for name, divergence in divergences.items():
        runs[f"{name}, compiled"] = partial(compiled, divergence=divergence)
        runs[name] = partial(ratio_bounds, divergence=divergence, radius=speed.RADIUS)
    return {**runs, "bisection, 50 steps": speed.bisection}


def one_pass(what, function, tensors):
    """Return a function that runs a loss forward and backward and drops the gradient, or that computes bounds."""
    if what == "bounds":
        return partial(function, tensors[1])
    logp = tensors[0].detach().requires_grad_()
    rest = tensors[1:]

    def run():
        torch.autograd.grad(function(logp, *rest)[0], logp)

    return run


def device_seconds(runs, device):
    """Return the seconds of the device for one of the runs, the median of several replays of all of them."""
    if device == "cpu":
        return processor_seconds(runs)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # where torch wants the warm-up before a capture
        runs[0]()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    graph.replay()
    seconds = []
    for _ in range(REPETITIONS):
        start.record()
        graph.replay()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / 2 / len(runs))
    return sorted(seconds)[len(seconds) // 2]


def processor_seconds(runs):
    """Return the seconds of the processor for one of the runs."""
    seconds = []
    for run in [*runs, *runs]:
        begin = time.process_time()
        run()
        seconds.append(time.process_time() - begin)
    return sorted(seconds)[len(seconds) // 2]


def host_seconds(run, device):
    """Return the median seconds until a call returns, while the device has nothing else to do."""
    seconds = []
    for _ in range(30):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]


def launches(run):
    """Return the kernels that a run starts: pairs of a name and microseconds."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    kernels = [x for x in profile.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    return [(x.name[:80], x.time_range.elapsed_us()) for x in kernels]


def batches(shape, device):
    """Return batches of a shape that together are larger than a cache."""
    rows, columns = shape
    tensors = speed.batch(rows * columns, device, columns)
    size = sum(x.numel() * x.element_size() for x in tensors)
    number = max(2, math.ceil(CACHE / size)) if device == "cuda" else 2
    return [tensors] + [[x.clone() for x in tensors] for _ in range(number - 1)]


def copies(size, number, device):
    """Return copies that read and write ``size`` bytes together."""
    pairs = [
        [torch.empty(size // 2, dtype=torch.uint8, device=device) for _ in range(2)] for _ in range(number)
    ]
    return [partial(target.copy_, source) for source, target in pairs]


def compact(tensors):
    """Return the tensors of a batch with one advantage per sequence, and a mask of bools."""
    logp, logp_old, advantages, mask = tensors
    return [logp, logp_old, advantages[:, 0].contiguous(), mask.bool()]


def decision_rows(shape, device, another):
    """Yield, for each method with kernels, the decisions and the gradient of the kernels against `policy_loss`."""
    if not has_kernels():
        return
    rows, columns = shape
    tensors = compact(speed.batch(rows * columns, device, columns))
    for method in KERNEL_METHODS:
        row = {"what": "decisions", "contestant": method, "tokens": rows * columns}
        if not another():
            yield row | {"skipped": "no time left"}
            continue
        try:
            found = gradient_of(loss_with_kernels(method), tensors)
        except Exception as error:
            yield row | {"failed": f"{type(error).__name__}: {error}"}
            continue
        expected = gradient_of(partial(policy_loss, method=method), tensors)
        differs = (found == 0) != (expected == 0)
        undecided = token_loss._undecided(as_method(method), tensors)
        largest = (found - expected).masked_fill(differs, 0.0).abs().max() / expected.abs().max()
        yield row | {
            "differ": int(differs.sum()),
            "beyond_rounding": int((differs & ~undecided).sum()),
            "at_a_bound": int(undecided.sum()),
            "gradient": float(largest),
        }


def gradient_of(loss, tensors):
    """Return the gradient of a loss, times the number of tokens."""
    logp = tensors[0].detach().requires_grad_()
    return torch.autograd.grad(loss(logp, *tensors[1:])[0], logp)[0] * logp.numel()


def measure(runs, device):
    """Return the seconds of the first call, of the host and of the device, and on CUDA the launches."""
    first = runs[0]
    started = time.perf_counter()
    first()
    measured = {"first_call": time.perf_counter() - started}
    first()
    measured["host"] = host_seconds(first, device)
    if device == "cuda":
        measured["launches"] = launches(first)
    return measured | {"device": device_seconds(runs, device)}


def rows(what, contestants, shapes, device, another):
    """Yield a row for each shape and contestant.

    Args:
        what: ``loss`` or ``bounds``.
        contestants: Losses, or functions that compute bounds, by name.
        shapes: Rows and columns of each batch.
        device: ``cuda`` or ``cpu``.
        another: A function that returns False if there is no time for another contestant.
    """
    for shape in shapes:
        held = batches(shape, device)
        where = {"what": what, "shape": list(shape), "tokens": math.prod(shape)}
        size = BYTES_PER_TOKEN[what] * math.prod(shape)
        copy = device_seconds(copies(size, len(held), device), device)
        yield where | {"contestant": "copy", "device": copy, "bytes_per_second": size / copy}
        held_compact = [compact(tensors) for tensors in held] if what == "loss" else []
        for name, function in contestants.items():
            row = where | {"contestant": name}
            if not another():
                yield row | {"skipped": "no time left"}
                continue
            is_compact = name.endswith(COMPACT)
            batches_of_row = held_compact if is_compact else held
            try:
                row |= measure([one_pass(what, function, tensors) for tensors in batches_of_row], device)
            except Exception as error:
                yield row | {"failed": f"{type(error).__name__}: {error}"}
                continue
            share = COMPACT_BYTES / BYTES_PER_TOKEN[what] if is_compact else 1.0
            yield row | {"of_copy": share * copy / row["device"]}


def table(found):
    """Return the Markdown table of kept rows: the device's microseconds, those of the host, and launches.

    Args:
        found: The content of the output file, with the number of launches in place of the launches.
    """
    lines = ["| tokens | loss | device, µs | times the textbook with metrics | host, µs | launches |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    measured = [row for row in found["rows"] if "host" in row]
    reference = {
        tuple(row["shape"]): row["device"] for row in measured if row["contestant"] == "textbook with metrics"
    }
    for row in measured:
        ratio = row["device"] / reference[tuple(row["shape"])]
        tokens = " × ".join(map(str, row["shape"]))
        lines.append(
            f"| {tokens} | {row['contestant']} | {1e6 * row['device']:,.0f} | {ratio:.2f} | {1e6 * row['host']:,.0f} | "
            f"{row['launches']} |"
        )
    return lines


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=95)
    parser.add_argument(
        "--small", action="store_true", help="tiny sizes, on CUDA if there is one, else on the CPU"
    )
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.small:
        parser.error("torch sees no CUDA device; --small runs on the CPU")
    end = time.monotonic() + options.seconds
    found = {"stamp": stamp(device), "rows": []}
    shapes = SMALL_SHAPES if options.small else SHAPES
    backend = "eager" if options.small else "inductor"

    def another():
        return time.monotonic() < end

    for row in itertools.chain(
        decision_rows(shapes[0], device, another),
        rows("loss", loss_contestants(backend), shapes, device, another),
    ):
        found["rows"].append(row)
        options.output.write_text(json.dumps(found, indent=1) + "\n")
        print(*(f"{k}={len(v) if k == 'launches' else v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
