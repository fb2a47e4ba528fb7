"""Measures on a GPU what a CPU cannot tell, in at most 20 minutes; writes JSON and renews docs/measured/benchmarks.md.

    PYTHONPATH=src:tests python benchmarks/gpu_check.py                 # `make gpu-check`; needs CUDA
    PYTHONPATH=src:tests python benchmarks/gpu_check.py --small --output FILE

Needs torch; a section whose packages are missing is skipped, and says so. Each section runs in a process of its own
with a time of its own: what breaks or outlasts it leaves its traceback and its rows so far, and the others go on. The
exit status is 1 if any section failed. ``--small`` is the same code on tiny sizes, on CUDA or on the CPU.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gpu_check_docs
import gpu_check_sections as sections
from measuring import stamp

PACKAGES = ("triton", "transformers", "trl", "liger-kernel", "verl")


class Section(NamedTuple):
    """A part of the measurement."""

    name: str
    seconds: float
    """It is stopped after these, its process's start included."""
    needs: tuple[str, ...]
    """Modules without which it is skipped."""
    rows: Callable[[sections.Allowance, str], Iterator[dict[str, Any]]]


def plan(small: bool) -> list[Section]:
    """All sections, whose seconds add up to less than 20 minutes."""
    if small:
        sizes = {"accuracy": 4, "tokens": (1024, 2048), "copied": 2**16, "rounds": 2, "habits": 1024}
        names = {"eager": ("KL()", "TotalVariation()"), "compiled": ("TotalVariation()",)}
        backend = "eager"  # the whole of torch.compile but its last stage
        models = {"tiny": {"sequences": 2, "completion": 4, "rounds": 1}}
        head = {"vocabulary": 300, "tokens": 32, "width": 8, "rounds": 2, "compiled": False}
    else:
        # 1 GiB does not fit into any cache.
        sizes = {
            "accuracy": 60,
            "tokens": (2**16, 2**20, 2**24),
            "copied": 2**30,
            "rounds": 15,
            "habits": 2**22,
        }
        names, backend = {}, "inductor"
        models = {
            "135M": {"sequences": 16, "completion": 128, "rounds": 20},
            "1.5B": {"sequences": 8, "completion": 128, "rounds": 20},
        }
        head = {"vocabulary": 152_000, "tokens": 8192, "width": 1536, "rounds": 5, "compiled": True}
    rounds = sizes["rounds"]
    return [
        Section(
            "speed",
            200,
            (),
            partial(
                sections.speed, tokens=sizes["tokens"], copied=sizes["copied"], rounds=rounds, backend=backend
            ),
        ),
        Section("habits", 120, (), partial(sections.habits, tokens=sizes["habits"], backend=backend)),
        *(
            Section(
                f"trl {model}", 240, ("trl", "datasets"), partial(sections.trl_step, model=model, **options)
            )
            for model, options in models.items()
        ),
        Section("head", 120, (), partial(sections.head, **head)),
        # Last: the compiler may take longer than there is, and what it did not get to is listed.
        Section(
            "accuracy",
            240,
            ("mpmath",),
            partial(sections.accuracy, points=sizes["accuracy"], backend=backend, **names),
        ),
    ]


def measured(section: Section, device: str) -> dict[str, Any]:
    """The section's rows, and how it ended: done, skipped (with the reason) or failed (with the traceback)."""
    missing = [module for module in section.needs if find_spec(module) is None]
    if missing:
        return {"status": "skipped", "reason": f"{', '.join(missing)} not installed", "rows": []}
    begin, rows = time.monotonic(), []
    end = begin + section.seconds
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=work, args=(section, device, end, sender))
    child.start()
    sender.close()
    status, error = "failed", f"stopped after its {section.seconds:g} s"
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            row, broken = receiver.recv()
            if row is None:
                status, error = ("failed", broken) if broken else ("done", None)
                break
            rows.append(row)
            print(f"{section.name:10}", *(f"{k}={v}" for k, v in row.items()), flush=True)
    except EOFError:
        child.join()
        error = f"its process ended with exit code {child.exitcode}"
    child.join(5 if status == "done" else 0)
    child.kill()
    child.join()
    found = {"status": status, "seconds": round(time.monotonic() - begin, 1), "rows": rows}
    return found | ({"error": error} if error else {})


def work(section: Section, device: str, end: float, sender: Any) -> None:
    """In the section's process: sends pairs of row and None, then of None and the traceback or None."""
    warnings.simplefilter("ignore")
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        for row in section.rows(sections.Allowance(end), device):
            sender.send((row, None))
        sender.send((None, None))
    except Exception:
        sender.send((None, traceback.format_exc()))


def full_stamp(device: str, small: bool) -> dict[str, Any]:
    """`stamp`, the size, and the packages that matter."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {**stamp(device), "cuda": torch.version.cuda, "small": small, **versions}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny sizes, on CUDA if there is one, else on the CPU"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="SECTION", help="measure these, keep the output's others"
    )
    parser.add_argument("--output", type=Path, default=gpu_check_docs.RESULTS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    planned = {section.name: section for section in plan(options.small)}
    if unknown := set(options.only or ()) - planned.keys():
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(planned)}")
    if device == "cpu" and not options.small:
        parser.error("torch sees no CUDA device; --small runs on the CPU")
    publishes = options.output == gpu_check_docs.RESULTS
    if publishes and options.small:
        parser.error("--small measures nothing to publish; give another --output")
    results = {"stamp": full_stamp(device, options.small), "sections": {}}
    if options.only and options.output.exists():
        before = json.loads(options.output.read_text())
        if before["stamp"] | {"date": ""} != results["stamp"] | {"date": ""}:
            parser.error(
                f"{options.output} holds another machine's or revision's results; give another --output"
            )
        results["sections"] = before["sections"]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    failed = []
    for name in options.only or planned:
        found = results["sections"][name] = measured(planned[name], device)
        print(f"{name}: {found['status']} {found.get('reason', '')}{found.get('error', '')}", flush=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
        failed += [name] * (found["status"] == "failed")
    if publishes:
        gpu_check_docs.renew()
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}; see {options.output}")


if __name__ == "__main__":
    main()
