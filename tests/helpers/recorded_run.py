"""A program that records losses and writes a checkpoint after every second one, from which it goes on."""

import json
import sys
from pathlib import Path

import torch

from bandpo._atomic import write_whole
from bandpo.audit import Recorder

STEPS = 6


def main() -> None:
    """Record the losses that are missing in the folder that the command line names."""
    folder = Path(sys.argv[1])
    try:
        _record(folder)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _record(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    checkpoint = folder / "checkpoint.json"
    begin = json.loads(checkpoint.read_text(encoding="utf-8"))["step"] if checkpoint.exists() else 0
    if begin == STEPS:
        return
    with Recorder(folder / "record", method="FixedClip(0.2)") as recorder:
        for step in range(begin, STEPS):
            chance = torch.Generator().manual_seed(step)
            logp = -torch.rand(4, 8, generator=chance) - 0.01
            recorder.add(logp=logp, logp_old=logp, advantages=torch.ones(4), step=step)
            if step % 2:
                recorder.flush()
                write_whole(checkpoint, json.dumps({"step": step + 1}))
