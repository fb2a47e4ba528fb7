"""Peak memory and time of `rlvet diagnose`, `audit` and `report` on a long record.

    python benchmarks/doctor/long_record.py build/long --tokens 60000000

Writes the record unless it exists, runs each command in a separate process, and prints its peak memory and time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from bandpo.audit import Recorder

SEQUENCES, LENGTH, UPDATES, GROUP = 256, 240, 4, 8


def write_record(folder: Path, tokens: int) -> None:
    """Write the record of a run with random tokens and four updates on each batch."""
    generator = torch.Generator().manual_seed(0)
    shape = (SEQUENCES, LENGTH)
    with Recorder(folder, method="FixedClip(0.2)", framework="bench") as recorder:
        for batch in range(-(-tokens // (SEQUENCES * LENGTH * UPDATES))):
            scale = torch.rand(SEQUENCES, 1, generator=generator) + 0.2
            logp_old = scale * torch.log(torch.rand(shape, generator=generator).clamp(min=1e-6))
            reward = torch.rand(SEQUENCES, generator=generator)
            advantages = (reward.view(-1, GROUP) - reward.view(-1, GROUP).mean(1, keepdim=True)).flatten()
            ids = torch.randint(0, 50_000, shape, generator=generator)
            for update in range(UPDATES):
                recorder.add(
                    logp=(logp_old + 0.02 * update * torch.randn(shape, generator=generator)).clamp(max=0),
                    logp_old=logp_old,
                    logp_rollout=logp_old,
                    entropy=scale.expand(shape),
                    advantages=advantages,
                    reward=reward,
                    group=torch.arange(SEQUENCES // GROUP).repeat_interleave(GROUP),
                    tokens=ids,
                    step=batch,
                    version=batch,
                    generation=batch,
                    update=update,
                )


def measure(*arguments: str) -> tuple[float, float]:
    """Run a command of bandpo, and return its peak memory (MB) and its time (s)."""
    start = time.monotonic()
    code = "import sys; from bandpo.cli.app import app; app()"
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    return usage.ru_maxrss / 1024, time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=60_000_000)
    parser.add_argument("--commands", nargs="*", default=["diagnose", "audit", "report"])
    options = parser.parse_args()
    if not any(options.folder.glob("*.arrow")):
        write_record(options.folder, options.tokens)
    for command in options.commands:
        output = ["--output", str(options.folder / "report.html")] if command == "report" else []
        memory, seconds = measure(command, str(options.folder), *output)
        print(f"{command}: {memory:,.0f} MB at most, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
