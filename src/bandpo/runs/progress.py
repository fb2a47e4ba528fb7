"""A line on the terminal while a long record is read."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from bandpo.runs.record import LossBatch

PATIENCE = 5.0
"""Seconds after which reading is shown."""


def with_progress(batches: Iterable[LossBatch]) -> Iterator[LossBatch]:
    """Yield loss batches, and show how many tokens were read if that takes long and a person looks on.

    Nothing is shown where standard error is no terminal.

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
            if progress is None and time.monotonic() - start > PATIENCE and _is_watched():
                progress = _progress()
                task = progress.add_task("reading the record", total=None, tokens="")
            if progress is not None:
                progress.update(task, tokens=f"{tokens:,} tokens")
    finally:
        if progress is not None:
            progress.stop()


def _is_watched() -> bool:
    return sys.stderr.isatty() and importlib.util.find_spec("rich") is not None


def _progress() -> Any:
    """Return a started bar on standard error, which is wiped out at its end."""
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
