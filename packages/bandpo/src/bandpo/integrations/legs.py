"""Folders for the legs of a run. A leg is the part of a run from one start, or resume, of its process to the next.

rlvet reads all legs as one run. Each leg has its own folder, such as ``RUN/legs/0001``, so that none overwrites the
log of another. It contains

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


def new_leg(run: Path) -> Path:
    """Create the folder of a run's next leg. Processes that call this at the same time get different folders.

    >>> import tempfile
    >>> run = Path(tempfile.mkdtemp())
    >>> new_leg(run).name, new_leg(run).name
    ('0001', '0002')
    """
    legs = run / LEGS
    legs.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(leg.name) for leg in _legs_of(run)), default=0)
    while True:
        leg = legs / f"{number:04}"
        try:
            leg.mkdir()
        except FileExistsError:
            number += 1
        else:
            return leg


def _legs_of(run: Path) -> Sequence[Path]:
    """Return the folders of a run's legs in the order of their numbers; empty if the run has none."""
    legs = [leg for leg in (run / LEGS).glob("*") if leg.name.isdecimal() and leg.is_dir()]
    return sorted(legs, key=lambda leg: int(leg.name))
