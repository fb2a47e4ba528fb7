"""A recorded run: the tokens of its losses, from a record or from batches that a framework saved."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

from rlvet.errors import InvalidValue
from rlvet.records.dumps import check_dumps, dump_files, read_dumps
from rlvet.records.progress import with_progress
from rlvet.records.record import LossBatch, read_record, record_files
from rlvet.runs import gate
from rlvet.runs.files import OutsideLink, check_link, reading_in
from rlvet.runs.setup import Setup, framework_of

BATCH_TYPES = (LossBatch, OutsideLink)
"""The classes of what is read of a record, or of batches that a framework saved."""


def is_recorded(path: Path) -> bool:
    """Return True if a path is a record or holds batches that a framework saved, and not a log.

    Raises:
        ValueError: if the batches are larger than the limit.
    """
    return bool(record_files(path) or saved_batches(path))


def saved_batches(path: Path) -> Sequence[Path]:
    """Return the files of batches that a framework saved; empty if there are none, or a record.

    Raises:
        ValueError: if one is larger than the limit, or a link to a file outside of the run's folder.
    """
    files = [] if record_files(path) else dump_files(path)
    if files:
        gate.answer_of(_check_dumps_of, path, files, types=(OutsideLink,))
    return files


def find_record(path: Path) -> Path | None:
    """Return the path of a record: the path itself, or the first folder in it that is one; None without one."""
    if record_files(path):
        return path
    folders = sorted({file.parent for file in path.glob("*/tokens-*.arrow")})
    return folders[0] if folders else None


def _check_dumps_of(path: Path, files: Sequence[Path]) -> None:
    """Check the sizes and links of a run's batches.

    Raises:
        ValueError: if one is larger than the limit, or a link to a file outside of the run's folder.
    """
    with reading_in(path):
        check_dumps(files)


def _read_record_of(path: Path, record: Path) -> Iterator[LossBatch]:
    """Yield the loss batches of a record in a run's folder."""
    with reading_in(path):
        for file in record_files(record):
            check_link(file)
    yield from read_record(record)


class Collector(Protocol):
    """An object that accumulates statistics over the loss batches of a run."""

    def add(self, batch: LossBatch) -> None:
        """Add one loss batch."""


class TolerantCollector:
    """A collector that passes loss batches to other collectors until one of them raises an error, and saves the error.

    Args:
        collectors: The other collectors.
    """

    def __init__(self, collectors: Iterable[Collector]):
        self._collectors = list(collectors)
        self.error: ValueError | None = None
        """The error of a collector; None if none raised one."""

    def add(self, batch: LossBatch) -> None:
        """Add one loss batch."""
        if self.error is not None:
            return
        try:
            for collector in self._collectors:
                collector.add(batch)
        except ValueError as error:  # a collector of another package raises errors of its own
            self.error = error


class RecordedRun:
    """A run whose tokens were recorded. Its files are read when they are needed.

    Args:
        path: A record of `bandpo.audit.Recorder`, a folder that contains one, or batches that a framework saved.
        method: The text of the run's method, used if no file names one.
    """

    def __init__(self, path: str | Path, method: str | None = None):
        self.path = Path(path)
        self.method = method

    @property
    def title(self) -> str:
        """The path."""
        return str(self.path)

    @cached_property
    def record(self) -> Path | None:
        """The path of the record, which is the run's path or a folder in it; None for a framework's own batches."""
        return find_record(self.path)

    @cached_property
    def dumps(self) -> Sequence[Path]:
        """The files of batches that the framework saved; empty for a record.

        Raises:
            ValueError: if one is larger than the limit.
        """
        return saved_batches(self.path)

    @cached_property
    def setup(self) -> Setup:
        """The framework and the method of the run.

        Raises:
            ValueError: if the run cannot be read.
        """
        batch = self._first_batch
        return Setup(framework_of(batch.framework), batch.method or self.method)

    @cached_property
    def _first_batch(self) -> LossBatch:
        """The first loss batch."""
        # Warnings about the record are for the caller who reads all of it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = next(self.batches(), None)
        if batch is None:
            raise InvalidValue(
                f"{self.path} holds no tokens: nothing was added before it was closed or killed"
            )
        return batch

    @property
    def has_losses(self) -> bool:
        """True if the losses have the policy in training, as in a record, so that rules can be replayed.

        Raises:
            ValueError: if it cannot be read.
        """
        return self._first_batch.has_logp

    def batches(self) -> Iterator[LossBatch]:
        """Yield the loss batches of the record, or those that the framework saved.

        Raises:
            ValueError: if there are none, or a file cannot be read.
        """
        if self.dumps:
            return gate.answers_of(read_dumps, self.dumps, types=BATCH_TYPES)
        record = self.path if self.record is None else self.record
        return gate.answers_of(_read_record_of, self.path, record, types=BATCH_TYPES)

    def scan(self, collectors: Iterable[Collector]) -> None:
        """Read the loss batches once, and add each to all collectors.

        Raises:
            ValueError: if there is no loss batch, or a file cannot be read.
        """
        collectors = list(collectors)
        count = 0
        for batch in with_progress(self.batches()):
            count += 1
            # Fill the cached property, so that `setup` does not decode the first batch again.
            self.__dict__.setdefault("_first_batch", batch)
            for collector in collectors:
                collector.add(batch)
        if not count:
            raise InvalidValue(
                f"{self.path} holds no tokens: nothing was added before it was closed or killed"
            )
