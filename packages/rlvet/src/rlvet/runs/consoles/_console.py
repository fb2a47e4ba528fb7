"""A console: how a trainer prints its metrics, and the reader of what it prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlvet.runs.consoles._printed import is_number
from rlvet.runs.unread import Unread

Rows = list[dict[str, Any]]
"""Rows with the keys of the framework's trackers and a ``step``."""

StepMetrics = Iterator[tuple[int, dict[str, Any]]]
"""Pairs of a step and its metrics, several per step if the framework prints several lines."""


@dataclass(frozen=True)
class Console:
    """The metrics that a trainer prints."""

    written_by: str
    """The trainers, for the table of docs/diagnose.md."""
    example: str
    """What is printed in one step, with a reward."""
    trainings: Callable[[str, Unread], list[Rows]]
    """The reader: the rows of each training in a text, without a row if it is of another trainer. It adds to the
    `Unread` the lines that it has recognised and not read."""
    before: tuple[str, ...] = ()
    """The names of the files of consoles whose readers take this one's lines for their own. They are asked later."""
    may_be_settings: bool = False
    """True if rows without a metric of training may be settings, and give way to what later readers find."""


def by_step(reader: Callable[[str, Unread], StepMetrics]) -> Callable[[str, Unread], list[Rows]]:
    """Return a reader of one training from one of steps.

    All lines of a step, which several processes may have printed, become one row. Values that are no numbers are texts
    in it.
    """

    def read(text: str, unread: Unread) -> Rows:
        rows: dict[int, dict[str, Any]] = {}
        for step, metrics in reader(text, unread):
            row = rows.setdefault(step, {"step": step})
            if not metrics:
                unread.add("line of a step", "its metrics cannot be parsed", f"step {step}", is_lost=True)
            elif metrics.keys() <= row.keys() and any(row[key] != value for key, value in metrics.items()):
                unread.add("line of a step", "a later line has the same metrics", f"step {step}")
            row.update(metrics)
        return [row for row in rows.values() if _has_metric(row)]

    return as_one_training(read)


def as_one_training(reader: Callable[[str, Unread], Rows]) -> Callable[[str, Unread], list[Rows]]:
    """Return a reader of trainings from one whose rows are all of one training."""

    def read(text: str, unread: Unread) -> list[Rows]:
        rows = reader(text, unread)
        return [rows] if rows else []

    return read


def _has_metric(row: dict[str, Any]) -> bool:
    """Return True if a row has a number besides its step, or a value that is not finite."""
    return any(key != "step" and is_number(value) for key, value in row.items())
