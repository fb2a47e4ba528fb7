"""Clocks, turns, peaks and stamps: what the benchmarks share."""

import platform
import statistics
import subprocess
import time
from datetime import date
from pathlib import Path

import torch

import bandpo


def now(device):
    """Seconds: this process's own processor time on the CPU; on CUDA the wall clock, once all work is done."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def time_of(run, device):
    """Seconds of one call. On CUDA between two events, so a wait for the host counts."""
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
    """Median seconds of each, taking turns."""
    for run in contestants.values():
        run(), run()
    times = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            times[name].append(time_of(run, device))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def paired(seconds, stock):
    """Median and quartiles of the ratios, pair by pair."""
    ratios = sorted(a / b for a, b in zip(seconds, stock, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    return {"ratio": statistics.median(ratios), "low": low, "high": high, "pairs": len(ratios)}


def peak_growth(run):
    """Bytes by which CUDA's allocator rose, at the most, above what it held before the call."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def stamp(device):
    """When, of what, on what."""
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
