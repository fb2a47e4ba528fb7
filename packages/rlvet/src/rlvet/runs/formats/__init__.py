"""Formats of logs, a file for each: the names of its files, its reader, and its row in the documentation.

A file ends with ``FORMAT``, and nothing lists it: `FORMATS`, the files that are searched in a folder or downloaded, the
message that lists what can be read, and the table of docs/diagnose.md are made from the files of this folder.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from rlvet.runs.formats._format import Format, HeldSettings, NoLog, RawLog, RawRows

__all__ = ["ACCEPTED_FILES", "FORMATS", "IN_FOLDERS", "Format", "HeldSettings", "NoLog", "RawLog", "RawRows"]

FORMATS: Mapping[str, Format] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").FORMAT
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_")
}
"""The formats by the names of their files."""

IN_FOLDERS: tuple[str, ...] = tuple(
    sorted(
        (pattern for known in FORMATS.values() for pattern in known.patterns),
        key=lambda pattern: (-len(pattern), pattern),
    )
)
"""Patterns of the logs in the folder of a run; the longest, which say most about a file, come first."""

ACCEPTED_FILES = (
    f"give the folder of the run, or one of: {', '.join(known.example for known in FORMATS.values())}"
)
"""The end of a message about a file that is no log."""
