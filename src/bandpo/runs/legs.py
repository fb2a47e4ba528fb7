"""Legs of a run: the parts from each start or resume to the next, each with a folder of its own in that of the run.

No leg overwrites what another has logged. ``RUN/legs/0001`` holds

- ``metrics.jsonl``, of the framework's file logger, and ``console.log``, all that was printed;
- ``wandb``, where W&B is among the loggers;
- ``config.yaml``, all settings, and ``run.json``, what the run is, with the versions of packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

LEGS = "legs"
"""The folder of the legs in the folder of a run."""

METRICS = "metrics.jsonl"
"""The file of a leg that the framework's file logger writes."""

CONSOLE = "console.log"
"""The file of a leg with all that was printed."""


def new_leg(run: Path) -> Path:
    """Make the folder of a run's next leg; two processes that ask at once get one each.

    >>> import tempfile
    >>> run = Path(tempfile.mkdtemp())
    >>> new_leg(run).name, new_leg(run).name
    ('0001', '0002')
    """
    legs = run / LEGS
    legs.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(leg.name) for leg in legs_of(run)), default=0)
    while True:
        leg = legs / f"{number:04}"
        try:
            leg.mkdir()
        except FileExistsError:
            number += 1
        else:
            return leg


def legs_of(run: Path) -> Sequence[Path]:
    """Return the folders of a run's legs, the first leg first; none where there is no such folder."""
    legs = [leg for leg in (run / LEGS).glob("*") if leg.name.isdecimal() and leg.is_dir()]
    return sorted(legs, key=lambda leg: int(leg.name))


def run_folder(log: Path) -> Path:
    """Return the folder of the run of which a log is: the log's folder, or for a log of a leg the one above the legs.

    >>> run_folder(Path("runs/mine/legs/0002/metrics.jsonl"))
    PosixPath('runs/mine')
    >>> run_folder(Path("runs/mine/metrics.jsonl"))
    PosixPath('runs/mine')
    """
    folder = log.parent
    return folder.parents[1] if folder.parent.name == LEGS and folder.name.isdecimal() else folder
