"""Helpers of the benchmarks: clocks, comparisons, peak memory and the description of the machine."""

import platform
import statistics
import subprocess
import time
from datetime import date
from pathlib import Path

import torch

import bandpo


def now(device):
    """Return seconds: the processor time of this process on the CPU; on CUDA the wall clock after synchronising."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def time_of(run, device):
    """Return the seconds of one call. On CUDA they are measured between two events and include waits for the host.

    `device_time.py` measures the device alone.
    """
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = now(device)
    run()
    return now(device) - begin


def compete(contestants, device, rounds):
    """Return the median seconds of each contestant. The contestants run in turn, after two warm-up calls each."""
    for run in contestants.values():
        run()
        run()
    times = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            times[name].append(time_of(run, device))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def paired(seconds, stock):
    """Return the median and the quartiles of the pairwise ratios of ``seconds`` to ``stock``."""
    ratios = sorted(a / b for a, b in zip(seconds, stock, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    return {"ratio": statistics.median(ratios), "low": low, "high": high, "pairs": len(ratios)}


def peak_growth(run):
    """Return the peak growth of CUDA's allocated memory during a call, in bytes."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def stamp(device):
    """Return the date, the revision, the version of torch and the device of a measurement."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "date": date.today().isoformat(),
        "revision": git.stdout.strip() or bandpo.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, 1 thread",
    }
