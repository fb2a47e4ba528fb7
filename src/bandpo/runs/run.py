"""One run as it lies on a disk: its log, its record of tokens, and what it was trained with."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

from bandpo.errors import InvalidValue
from bandpo.runs.configs import RunConfiguration, newest_configuration, read_setup
from bandpo.runs.dumps import check_dumps, dump_files, read_dumps
from bandpo.runs.logs import Log, read_log
from bandpo.runs.progress import with_progress
from bandpo.runs.quantities import Row
from bandpo.runs.record import LossBatch, read_record, record_files
from bandpo.runs.setup import Setup, framework_of


class Collector(Protocol):
    """Something that is computed from all loss batches of a run, one after the other."""

    def add(self, batch: LossBatch) -> None:
        """Take one loss batch."""


class TolerantCollector:
    """Hands loss batches to other collectors until one of them refuses a batch, and keeps that error.

    Args:
        collectors: The other collectors.
    """

    def __init__(self, collectors: Iterable[Collector]):
        self._collectors = list(collectors)
        self.error: InvalidValue | None = None
        """The error by which a collector refused a batch; None if none did."""

    def add(self, batch: LossBatch) -> None:
        """Take one loss batch."""
        if self.error is not None:
            return
        try:
            for collector in self._collectors:
                collector.add(batch)
        except InvalidValue as error:
            self.error = error


class Run:
    """A run on the disk. Each part is read when it is first asked for, and log and setup are read once.

    Use `open_run` to make one.

    Args:
        path: A record of `bandpo.Recorder`, a run folder, a log, or batches that a framework wrote.
        method: The text of the run's method, used where nothing on the disk names one.
        names: For quantities the keys under which the log has them, see `open_run`.
        run_name: Which run of the log is meant, see `open_run`.
    """

    def __init__(
        self,
        path: Path,
        method: str | None = None,
        names: Mapping[str, str] | None = None,
        run_name: str | None = None,
    ):
        self.path = path
        self.method = method
        self.names = names
        self.run_name = run_name

    @cached_property
    def record(self) -> Path | None:
        """The folder or file of the record of tokens: the path itself, or a folder in it; None without a record."""
        if record_files(self.path):
            return self.path
        folders = sorted({file.parent for file in self.path.glob("*/tokens-*.arrow")})
        return folders[0] if folders else None

    @cached_property
    def dumps(self) -> Sequence[Path]:
        """Files of batches that the framework wrote by itself.

        Raises:
            ValueError: if one is larger than what is read.
        """
        files = [] if record_files(self.path) else dump_files(self.path)
        check_dumps(files)
        return files

    @property
    def is_record(self) -> bool:
        """Whether the path is a record or a dump of batches, and not a folder with a log."""
        return bool(record_files(self.path) or self.dumps)

    @cached_property
    def log(self) -> Log | None:
        """The log; None where the path is a record or a dump.

        Raises:
            ValueError: if there is no log, it cannot be read, or it is of several runs.
        """
        return None if self.is_record else read_log(self.path, self.names, self.run_name)

    @property
    def rows(self) -> Sequence[Row]:
        """The log, one row per log step; empty where the path is a record or a dump.

        Raises:
            ValueError: if there is no log, or it cannot be read.
        """
        return () if self.log is None else self.log.rows

    @cached_property
    def configuration(self) -> RunConfiguration:
        """The configuration in the run's folder, or beside its log."""
        return newest_configuration(self.path)

    @cached_property
    def setup(self) -> Setup:
        """Framework and method that the run was trained with.

        Raises:
            ValueError: if the run cannot be read.
        """
        if not self.is_record:
            return read_setup(self.path, self.rows, self.method, self.configuration)
        batch = self._first_batch
        return Setup(framework_of(batch.framework), batch.method or self.method)

    @cached_property
    def _first_batch(self) -> LossBatch:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = next(self.batches(), None)
        if batch is None:
            raise InvalidValue(
                f"{self.path} holds no tokens: nothing was added before it was closed or killed"
            )
        return batch

    def batches(self) -> Iterator[LossBatch]:
        """Read the losses of the record, or the framework's own batches, one after the other.

        Raises:
            ValueError: if there are none, or a file cannot be read.
        """
        if self.dumps:
            return read_dumps(self.dumps)
        return read_record(self.path if self.record is None else self.record)

    def scan(self, collectors: Iterable[Collector]) -> None:
        """Read the loss batches once, and hand each to all collectors.

        Raises:
            ValueError: if there is no loss batch, or a file cannot be read.
        """
        collectors = list(collectors)
        count = 0
        for batch in with_progress(self.batches()):
            count += 1
            # The setup is read from the first batch, which need not be decoded again.
            self.__dict__.setdefault("_first_batch", batch)
            for collector in collectors:
                collector.add(batch)
        if not count:
            raise InvalidValue(
                f"{self.path} holds no tokens: nothing was added before it was closed or killed"
            )


def open_run(
    path: str | Path,
    *,
    method: str | None = None,
    names: Mapping[str, str] | None = None,
    run_name: str | None = None,
) -> Run:
    """Open a run: a record of tokens, a run folder, a log, or batches that a framework wrote.

    Nothing is read until it is asked for.

    Args:
        path: What the run left on the disk.
        method: The text of its method, used where nothing on the disk names one, such as ``"GSPO()"``.
        names: For quantities the keys under which the log has them, such as ``{"reward": "iteration_reward"}``. Without
            it, those in a file ``bandpo-names.json`` beside the log or in the current folder.
        run_name: Which run to read where the log is of several. The error without it names them.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> log = folder / "metrics.jsonl"
    >>> _ = log.write_text('{"step": 1, "reward": 0.5, "actor/pg_loss": 0.1}')
    >>> run = open_run(folder)
    >>> run.rows[0]["reward"], run.setup.framework
    (0.5, 'verl')
    """
    return Run(Path(path), method, names, run_name)
