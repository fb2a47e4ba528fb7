"""Folders for the legs of a run. A leg is the part of a run from one start, or resume, of its process to the next.

Each leg has its own folder, such as ``RUN/legs/0001``, so that none overwrites the log of another. It contains

- ``metrics.jsonl``, the output of the framework's file logger,
- ``console.log``, the output of the process,
- ``wandb``, if W&B is among the loggers,
- ``config.yaml``, all settings, and
- ``run.json``, a description of the run with the versions of packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

LEGS = "legs"
"""The name of the folder that contains the legs, in the folder of a run."""

METRICS = "metrics.jsonl"
"""The name of the output of the framework's file logger, in the folder of a leg."""

CONSOLE = "console.log"
"""The name of the output of the process, in the folder of a leg."""


def legs_of(run: Path) -> Sequence[Path]:
    """Return the folders of a run's legs in the order of their numbers; empty if the run has none."""
    legs = [leg for leg in (run / LEGS).glob("*") if leg.name.isdecimal() and leg.is_dir()]
    return sorted(legs, key=lambda leg: int(leg.name))


def run_folder(log: Path) -> Path:
    """Return the folder of the run that a log belongs to: the log's own folder, unless it is the folder of a leg.

    >>> run_folder(Path("runs/mine/legs/0002/metrics.jsonl"))
    PosixPath('runs/mine')
    >>> run_folder(Path("runs/mine/metrics.jsonl"))
    PosixPath('runs/mine')
    """
    folder = log.parent
    is_leg = folder.parent.name == LEGS and folder.name.isdecimal()
    return folder.parents[1] if is_leg else folder
