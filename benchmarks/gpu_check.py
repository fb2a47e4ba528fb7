"""Run the measurements that need a GPU, in at most 18 minutes; write JSON and update research/reports/benchmarks.md.

    make gpu-check                                                  # needs CUDA
    make gpu-check GPU_CHECK='--only losses'                        # one section, at most 2 minutes
    make gpu-check GPU_CHECK='--small --output FILE'

Needs torch. A section whose packages are missing is skipped, and the output says so. Each section runs in its own
process with its own time limit. A section that fails or exceeds the limit leaves its traceback and its rows so far, and
the other sections still run. The exit status is 1 if any section failed. ``--small`` runs the same code with tiny
sizes, on CUDA or on the CPU.
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

import device_time
import gpu_check_docs
import gpu_check_sections as sections
from measuring import stamp

LIMIT = 120
"""Seconds that a section may take, which is also what a card lent for a few minutes allows."""
PACKAGES = ("triton", "transformers", "trl", "liger-kernel", "verl")


class Section(NamedTuple):
    """A section of the measurement."""

    name: str
    seconds: float
    """The time limit in seconds, which includes the start of the process."""
    needs: tuple[str, ...]
    """The modules that the section needs. It is skipped if one is missing."""
    rows: Callable[[sections.Allowance, str], Iterator[dict[str, Any]]]
    """A function of the time allowance and the device that yields the rows."""


def plan(small: bool) -> list[Section]:
    """Return all sections. Each can run alone, in at most two minutes."""
    if small:
        shapes, backend = device_time.SMALL_SHAPES, "eager"  # all stages of torch.compile but the last
        points, tokens = 4, 1024
        names = {"eager": ("KL()", "TotalVariation()"), "compiled": ("TotalVariation()",)}
        models = {"tiny": {"sequences": 2, "completion": 4, "rounds": 1}}
        head = {"vocabulary": 300, "tokens": 32, "width": 8, "rounds": 2, "compiled": False}
    else:
        shapes, backend = device_time.SHAPES, "inductor"
        points, tokens = 60, 2**22
        names = {"eager": None, "compiled": None}
        models = {
            "135M": {"sequences": 16, "completion": 128, "rounds": 20},
            "1.5B": {"sequences": 8, "completion": 128, "rounds": 20},
        }
        head = {"vocabulary": 152_000, "tokens": 8192, "width": 1536, "rounds": 5, "compiled": True}
    return [
        Section("losses", LIMIT, (), partial(sections.losses, shapes=shapes, backend=backend)),
        Section("bounds", LIMIT, (), partial(sections.bounds, shapes=shapes, backend=backend)),
        Section("habits", LIMIT, (), partial(sections.habits, tokens=tokens, backend=backend)),
        *(
            Section(
                f"trl {model}", LIMIT, ("trl", "datasets"), partial(sections.trl_step, model=model, **options)
            )
            for model, options in models.items()
        ),
        Section("head", LIMIT, (), partial(sections.head, **head)),
        # Last, because compilation may exceed the limit. Cases without time left are listed as skipped.
        *(
            Section(
                f"accuracy {mode}",
                LIMIT,
                ("mpmath",),
                partial(sections.accuracy, points=points, backend=backend, mode=mode, names=names[mode]),
            )
            for mode in ("eager", "compiled")
        ),
    ]


def measure_section(section: Section, device: str) -> dict[str, Any]:
    """Run a section, and return its rows and its status: done, skipped with a reason, or failed with a traceback."""
    missing = [module for module in section.needs if find_spec(module) is None]
    if missing:
        return {"status": "skipped", "reason": f"{', '.join(missing)} not installed", "rows": []}
    rows = []
    begin = time.monotonic()
    end = begin + section.seconds
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=work, args=(section, device, end, sender))
    child.start()
    sender.close()
    status, error = "failed", f"stopped after its {section.seconds:g} s"
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            row, row_error = receiver.recv()
            if row is None:
                status = "failed" if row_error else "done"
                error = row_error
                break
            rows.append(row)
            print(f"{section.name:10}", *(f"{k}={v}" for k, v in row.items()), flush=True)
    except EOFError:
        child.join()
        error = f"its process ended with exit code {child.exitcode}"
    child.join(5 if status == "done" else 0)
    child.kill()
    child.join()
    result = {"status": status, "seconds": round(time.monotonic() - begin, 1), "rows": rows}
    if error:
        result["error"] = error
    return result


def work(section: Section, device: str, end: float, sender: Any) -> None:
    """Run a section in its own process, and send pairs of a row and an error.

    Each row is sent with None. The last pair has no row, and the traceback if the section failed.
    """
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
    """Return `stamp` with the versions of CUDA and of the relevant packages, and the size."""
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
        "--only",
        nargs="+",
        metavar="SECTION",
        help="measure these sections, and keep the other sections of the output",
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
    # Each section has its own stamp, because sections may be measured on different machines.
    stamp_of_run = full_stamp(device, options.small)
    results = {}
    if options.only and options.output.exists():
        results = json.loads(options.output.read_text())
    options.output.parent.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    failed = []
    for name in options.only or planned:
        result = measure_section(planned[name], device)
        results[name] = {"stamp": stamp_of_run} | result
        print(f"{name}: {result['status']} {result.get('reason', '')}{result.get('error', '')}", flush=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
        if result["status"] == "failed":
            failed.append(name)
    if publishes:
        gpu_check_docs.update_page()
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}; see {options.output}")


if __name__ == "__main__":
    main()
