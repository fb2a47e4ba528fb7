"""A format of logs, and what its reader returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rlvet.errors import InvalidValue
from rlvet.runs.endings import NO_ENDING, Ending
from rlvet.runs.unread import Unread

RawRows = Sequence[Mapping[str, Any]]
"""Rows with their keys and values as they were logged."""


@dataclass(frozen=True)
class RawLog:
    """The rows in a file, as they were logged."""

    runs: Mapping[str, RawRows]
    """The rows of each run, by its name; the name is empty if the file has none."""
    notes: tuple[str, ...] = ()
    """Sentences about the file, such as one about its incomplete last line."""
    unread: Unread = field(default_factory=Unread)
    """The rows that were not read."""
    trainer: str = ""
    """The trainer of RL that the file itself names, such as a notebook's code; empty if it names none."""
    ending: Ending = NO_ENDING
    """How console output ends."""
    saved: tuple[int, ...] = ()
    """The steps of the checkpoints that console output names as saved."""


class HeldSettings(NamedTuple):
    """Settings of a run that a file of its log holds beside the metrics."""

    name: str
    """The name under which the file holds them, such as ``args/text_summary``."""
    content: str | Mapping[str, Any]
    """Their text in JSON, or their values by name."""
    run: str = ""
    """The name of the run in a file of several."""
    is_of_model: bool = False
    """True if they are those of the model, of which only its name is a setting of the run."""
    is_of_folder: bool = False
    """True if they are of the log in the folder above, for which the tracker writes a file of its own."""
    problem: str = ""
    """The reason why they cannot be read; empty if they can."""


class NoLog(InvalidValue):
    """The error of a reader for a file that is no log; the message to the user goes on with what can be read."""


@dataclass(frozen=True)
class Format:
    """A kind of file with a reader of its own."""

    kind: str
    """Its description in the output, such as ``JSON lines``."""
    patterns: tuple[str, ...]
    """Patterns of the names of its files. Of several formats that match a name, the one of the longest is used."""
    read: Callable[[Path], RawLog]
    """The reader. It raises a `NoLog` for a file of another kind, and any error for a damaged one."""
    example: str
    """A name or a description of such a file, for the message that lists what can be read."""
    described: str
    """Its row in the table of docs/diagnose.md: the files,"""
    written_by: str
    """and the programs that write them."""
    settings: Callable[[Path], Iterable[HeldSettings]] | None = None
    """The reader of the settings that its files hold, the newest last; None if they hold none."""
    settings_beside: str = ""
    """Pattern of the files that hold the settings of a log, beside it; empty if there are none."""
    if_named: tuple[str, ...] = ()
    """Patterns of files that are read if they are named. In the folder of a run they are mostly its description."""
    parts_share: Callable[[Path], object] | None = None
    """What the files of one run have in common, such as their folder, if a tracker begins a new file at each start of
    the run; None if each file is a run."""

    def matches(self, file: Path) -> int:
        """Return the length of the longest pattern that matches the name of a file; 0 if none does."""
        return max(
            (len(pattern) for pattern in (*self.patterns, *self.if_named) if file.match(pattern)), default=0
        )
