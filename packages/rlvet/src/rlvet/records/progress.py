"""A progress bar on the terminal for reading a long record."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from rlvet.records.record import LossBatch

PATIENCE = 5.0
"""Number of seconds after which the progress bar appears."""


def with_progress(batches: Iterable[LossBatch]) -> Iterator[LossBatch]:
    """Yield loss batches, and show the number of tokens on the terminal if that takes more than `PATIENCE` seconds.

    Nothing is shown if standard error is not a terminal, or rich is not installed.

    Args:
        batches: The loss batches.
    """
    start = time.monotonic()
    tokens = 0
    progress: Any = None
    task: Any = None
    try:
        for batch in batches:
            yield batch
            tokens += int(batch.mask.sum())
            if progress is None and time.monotonic() - start > PATIENCE and _can_show():
                progress = _start_progress()
                task = progress.add_task("reading the record", total=None, tokens="")
            if progress is not None:
                progress.update(task, tokens=f"{tokens:,} tokens")
    finally:
        if progress is not None:
            progress.stop()


def _can_show() -> bool:
    """Return True if standard error is a terminal and rich is installed."""
    return sys.stderr.isatty() and importlib.util.find_spec("rich") is not None


def _start_progress() -> Any:
    """Start a progress bar on standard error, which is erased when it stops."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.start()
    return progress
