"""The provenance of a result: commit, machine and time."""

from __future__ import annotations

import datetime
import platform
import subprocess
from functools import cache
from pathlib import Path


@cache
def commit() -> str | None:
    """Return the commit of bandpo's own checkout, or None if bandpo does not run from one.

    A checkout with changes that are not committed has ``-dirty`` after the commit.
    """
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def machine() -> str:
    """Return the name of the processor, as the system reports it.

    >>> bool(machine())
    True
    """
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def now() -> str:
    """Return the time in UTC, to the second.

    >>> now().endswith("+00:00")
    True
    """
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
