"""rlvet: what is wrong with a run of RL post-training, or with its configuration.

It reads the logs, records and configurations of many frameworks with the standard library, and executes nothing of
them. The commands are ``rlvet diagnose``, ``rlvet lint`` and ``rlvet report``. ``rlvet skill`` prints the path of
the text for agents.
"""

# Before all other imports.
from rlvet import _current_folder  # noqa: F401

# isort: split
from importlib import metadata as _metadata

from rlvet.checks.diagnosis import Diagnosis
from rlvet.dispatch import diagnose, open_run
from rlvet.records import RecordedRun
from rlvet.runs import Run

__all__ = ["Diagnosis", "RecordedRun", "Run", "diagnose", "open_run"]

try:
    # The newest tag, and the commits since then.
    __version__ = _metadata.version("rlvet")
except _metadata.PackageNotFoundError:
    # The package is on the path, and not installed.
    __version__ = "0+unknown"
