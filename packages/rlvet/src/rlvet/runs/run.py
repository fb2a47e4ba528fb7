"""A run that wrote a log: its rows, its configuration and its setup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from rlvet.runs import gate
from rlvet.runs.configs import Saved, read_configuration_of
from rlvet.runs.configuration import Configuration, Setting, Unresolved
from rlvet.runs.endings import Ending
from rlvet.runs.files import OutsideLink
from rlvet.runs.logs import Log, UnreadableLog, read_run
from rlvet.runs.quantities import Row
from rlvet.runs.setup import Setup, Value

LOG_TYPES = (Log, Ending, Saved, Configuration, Setting, Unresolved, Setup, Value, UnreadableLog, OutsideLink)
"""The classes of what is read of a run."""


class Run:
    """A run that wrote a log. Its files are read when they are needed.

    `rlvet.open_run` returns one for the path of a log, and a `rlvet.records.RecordedRun` for recorded tokens.

    Args:
        path: A run folder, or a log.
        method: The text of the run's method, used if no file names one, such as ``"GSPO()"``.
        names: The log's keys for quantities, such as ``{"reward": "iteration_reward"}``. If not given, they are read
            from a file ``bandpo-names.json`` beside the log or in the current folder.
        run_name: The name of the run, if the log contains several. The error without it lists the names.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> log = folder / "metrics.jsonl"
    >>> _ = log.write_text('{"step": 1, "reward": 0.5, "actor/pg_loss": 0.1}')
    >>> run = Run(folder)
    >>> run.rows[0]["reward"], run.setup.framework
    (0.5, 'verl')
    """

    def __init__(
        self,
        path: str | Path,
        method: str | None = None,
        names: Mapping[str, str] | None = None,
        run_name: str | None = None,
    ):
        self.path = Path(path)
        self.method = method
        self.names = names
        self.run_name = run_name

    @property
    def title(self) -> str:
        """The path, with the name of the run if one was chosen."""
        return str(self.path) if self.run_name is None else f"{self.path}, run {self.run_name}"

    @property
    def log(self) -> Log:
        """The log.

        Raises:
            ValueError: if there is no log, it cannot be read, or it contains several runs.
        """
        return self._log_and_setup[0]

    @cached_property
    def _log_and_setup(self) -> tuple[Log, Saved, Setup]:
        """The log, what the configuration says, and the setup, which one process reads."""
        return gate.answer_of(read_run, self.path, self.names, self.run_name, self.method, types=LOG_TYPES)

    @property
    def rows(self) -> Sequence[Row]:
        """The log, one row per log step.

        Raises:
            ValueError: if there is no log, or it cannot be read.
        """
        return self.log.rows

    @property
    def configuration(self) -> Configuration | None:
        """The newest configuration of a known framework in the run's folder, or beside its log; None without one."""
        return self._saved.configuration

    @property
    def unread(self) -> Sequence[str]:
        """For each configuration file that cannot be read, a sentence with the reason."""
        return self._saved.unread

    @cached_property
    def _saved(self) -> Saved:
        """The settings of the run, which can be read without a log."""
        if "_log_and_setup" in self.__dict__:
            return self._log_and_setup[1]
        return gate.answer_of(read_configuration_of, self.path, types=LOG_TYPES)

    @property
    def setup(self) -> Setup:
        """The framework, method and settings of the run.

        Raises:
            ValueError: if the run cannot be read.
        """
        return self._log_and_setup[2]
