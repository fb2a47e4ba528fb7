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


# --- Logs ---

LARGEST_LOG = 2**29
"""The largest size of a log in bytes, after decompression."""

LONGEST_LINE = 2**24
"""The largest number of bytes in a line."""

MOST_ROWS = 2**21
"""The largest number of lines in a log."""

LONGEST_READING = 120.0
"""The largest number of seconds for reading a log."""

LARGEST_TEXT = 2**28
"""The largest size in bytes of a file that must be in memory as a whole."""

MOST_COLUMNS = 2**16
"""The largest number of columns of a table."""

MOST_CELLS = 2**26
"""The largest number of cells of all runs of a table. The columns of steps count for each run."""

LONGEST_KEY = 1000
"""The largest number of characters of a key. Longer ones are left out."""

LARGEST_NAMES = 2**20
"""The largest size in bytes of a file of the user's own keys."""

MOST_FILES = 2000
"""The largest number of files of a folder that are read."""

LONGEST_ROW = 20_000
"""The largest number of characters in a printed dictionary of metrics."""

DEEPEST_ROW = 10
"""The largest number of dictionaries within each other. Those of metrics have one or two."""


# --- Configurations ---

DEEPEST_CONFIG = 50
"""The largest depth of a nested configuration."""

MOST_NODES = 2**16
"""The largest number of scalars, lists and mappings in a file. An alias counts as all that it refers to."""

LONGEST_NUMBER = 1000
"""The largest number of characters in a number of YAML. One in base 60, such as ``1:30:00``, takes quadratic time."""

LARGEST_CONFIG = 2**24
"""The largest size in bytes of a configuration file. Those of all frameworks are smaller than 2**16."""


# --- Batches and records ---

MOST_PICKLED = 2**24
"""The largest number of objects of a pickle, if each one that stands in several places is counted in each of them."""

DEEPEST_PICKLE = 100
"""The largest number of lists, tuples, dictionaries, sets and objects within each other in a pickle."""

LARGEST_DUMP = 2**32
"""The largest size of a batch in bytes, after decompression."""

MOST_TOKENS = 2**27
"""The largest number of tokens of a batch with its padding: 4,096 completions of 32,768 tokens."""

LONGEST_DIGEST = 128
"""The largest number of bytes in a line of the digests."""

LARGEST_DIGESTS = 2**27
"""The largest size in bytes of a file of digests, enough for more than a million losses."""

LARGEST_PART = 2**30
"""The largest size in bytes of a part. A loss of 1,024 completions of 32,768 tokens takes less than 2**29."""

LARGEST_BATCH = 2**31
"""The largest size in bytes of a decompressed batch."""


# --- Files that are linted ---

LARGEST_LINTED = 2**19
"""The largest size of a linted file, in bytes."""

LARGEST_NOTEBOOK = 2**23
"""The largest size of a linted notebook, in bytes. It contains the output of its cells, such as images."""

MOST_SETTINGS = 20_000
"""The largest number of settings in a file, with YAML aliases expanded."""

MOST_EXPANDED = 20_000
"""The largest number of settings that are read from the dictionaries ``**NAME`` of all calls."""

DEEPEST_SCRIPT = 20
"""The largest depth of an expression that is evaluated."""

DEEPEST_SHELL = 20
"""The largest depth of nested substitutions in a shell script."""

MOST_WORDS = 100_000
"""The largest number of words of a shell script, and of characters of a variable."""

LONGEST_ARRAY = 1000
"""The largest number of words of an array in a shell script."""

LONGEST_UNCERTAIN_ARRAY = 400
"""The largest number of words of an array that is assigned in a branch, where each assignment may add to the array."""

MOST_SUBSTITUTED = 2**22
"""The largest number of characters that the substitutions of a script may add."""
