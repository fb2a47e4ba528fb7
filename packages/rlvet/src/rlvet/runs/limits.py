"""All limits on the reading of files that a stranger may have written: bytes, values, seconds and memory.

The readers name a limit when it is met. Those of `Limits` hold for the process that reads, see `rlvet.runs.gate`, and
are raised by the environment variable `VARIABLE`, for commands and for Python alike.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from rlvet.errors import InvalidValue

VARIABLE = "RLVET_LIMITS"
"""The environment variable with limits that differ from the defaults: ``memory=8GB,time=600``, or ``off``."""

UNITS = {"GB": 10**9, "MB": 10**6}
"""The units of memory in bytes."""


@dataclass(frozen=True)
class Limits:
    """The limits on the process that reads the files of a run."""

    seconds: int = 12
    """Processor time to the first answer, and from one answer to the next. A file adds a second for each
    `BYTES_PER_SECOND`."""
    memory: int = 2 * 10**9
    """Bytes of memory."""
    open_files: int = 64
    """Files that are open at the same time."""

    @classmethod
    def from_environment(cls) -> Limits | None:
        """Return the limits with those of the environment variable `VARIABLE`; None if it is ``off``.

        Raises:
            ValueError: if the variable has another form.
        """
        text = os.environ.get(VARIABLE, "").strip()
        if text.lower() == "off":
            return None
        limits = cls()
        for item in filter(None, text.split(",")):
            name, _, value = item.strip().partition("=")
            if name == "time" and value.isdecimal() and int(value):
                limits = replace(limits, seconds=int(value))
            elif name == "memory" and value[:-2].isdecimal() and int(value[:-2]) and value[-2:] in UNITS:
                limits = replace(limits, memory=int(value[:-2]) * UNITS[value[-2:]])
            else:
                raise InvalidValue(
                    f"{VARIABLE} is a list such as memory=8GB,time=600 (MB or GB, and whole seconds), or off; got "
                    f"{text!r}"
                )
        return limits


BYTES_PER_SECOND = 2**23
"""The number of bytes of a file for which a reader has a further second of processor time."""

MOST_VALUES = 2**20
"""The largest number of values in an answer of the process that reads, without arrays of numbers."""
