"""Open a path as a log or as a record of tokens, and diagnose it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.log_checks import log_findings
from rlvet.errors import InvalidValue
from rlvet.lint.checks import lint_run_configuration
from rlvet.plugins import COLLECTORS, load_plugin, require_plugin
from rlvet.records.run import Collector, RecordedRun, find_record, is_recorded
from rlvet.runs import Run


def open_run(
    path: str | Path,
    *,
    method: str | None = None,
    names: Mapping[str, str] | None = None,
    run_name: str | None = None,
) -> Run | RecordedRun:
    """Return the run of a path. Its files are read when they are needed.

    Args:
        path: A run folder, a log, a record of tokens, or batches that a framework saved.
        method: The text of the method, used if no file names one, such as ``"GSPO()"``.
        names: The log's keys for quantities, see `rlvet.runs.Run`.
        run_name: The name of the run, if the log contains several. The error without it lists the names.

    Returns:
        A `rlvet.records.RecordedRun` if tokens are all that the path has, else a `rlvet.runs.Run`.

    Raises:
        ValueError: if batches that a framework saved are larger than the limit.

    >>> import tempfile
    >>> log = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> _ = log.write_text('{"step": 1, "reward": 0.5, "actor/pg_loss": 0.1}')
    >>> run = open_run(log)
    >>> run.rows[0]["reward"], run.setup.framework
    (0.5, 'verl')
    """
    path = Path(path)
    if is_recorded(path):
        return RecordedRun(path, method)
    return Run(path, method, names, run_name)


def diagnose(
    run: str | Path | Run | RecordedRun,
    *,
    method: object | None = None,
    names: Mapping[str, str] | None = None,
    run_name: str | None = None,
    collectors: Sequence[Collector] = (),
) -> Diagnosis:
    """Diagnose a run from its log, its record of tokens, or the batches that its framework wrote.

    A log needs only the standard library. The effect of the clip on a record's tokens is checked only if bandpo is
    installed.

    Args:
        run: An open run, or a path that `open_run` accepts.
        method: The method that the run was trained with, if no file of the run names one: its text, or an object of
            bandpo with this text.
        names: The log's keys for quantities, see `rlvet.runs.Run`. Only for a path.
        run_name: The name of the run, if the log contains several. Only for a path.
        collectors: Further collectors to feed during the pass over a record, so that it is read only once.

    Returns:
        The findings, with the part of the run that they are based on.

    Raises:
        ValueError: if the run cannot be read, if its files name another method, or if names are given for an open run.
        ImportError: if a method is given for a record, and bandpo is not installed.
    """
    if isinstance(run, str | Path):
        text = None if method is None else str(method)
        run = open_run(run, method=text, names=names, run_name=run_name)
    elif names is not None or run_name is not None:
        raise InvalidValue(
            f"{run.title} is open already, so names and run_name have no effect: give them to open_run"
        )
    if method is not None:
        _check_method(method, run)
    if isinstance(run, Run):
        return _diagnose_log(run)
    from rlvet.records.diagnosis import diagnose_recorded_run

    return diagnose_recorded_run(run, method=method, collectors=collectors)


def _diagnose_log(run: Run) -> Diagnosis:
    """Diagnose a run from its log, and from the configuration beside it. Here its files are read."""
    log = run.log
    findings = []
    if not log.unjudged:
        findings = log_findings(log.rows, run.setup, are_steps_counted=log.are_steps_counted, saved=log.saved)
    configuration = run.configuration
    if configuration is not None and configuration.framework != run.setup.framework:
        # A configuration of a framework that did not write the log belongs to another run.
        configuration = None
    diagnosis = Diagnosis(
        findings,
        run.setup,
        log.rows,
        log=log,
        configuration=None if configuration is None else lint_run_configuration(configuration),
        notes=run.unread,
    )
    record = find_record(run.path) if diagnosis.no_verdict else None
    if record is None:
        return diagnosis
    note = (
        f"the run has a record of its tokens, which gets a verdict from fewer steps: rlvet diagnose {record}"
    )
    return replace(diagnosis, notes=[*diagnosis.notes, note])


def _check_method(method: object, run: Run | RecordedRun) -> None:
    """Check the method that the user names for a run. Of a log, it is checked only if bandpo is installed.

    Raises:
        ValueError: if its text cannot be read, or the files of the run name another.
        ImportError: if the run is a record, and bandpo is not installed.
    """
    if isinstance(run, RecordedRun):
        # Before numpy, which the package of the checks needs: without either, bandpo is what to install.
        check = require_plugin(COLLECTORS, "method", "the method of a record")
    else:
        check = load_plugin(COLLECTORS, "method")
    if check is not None:
        check(method, run)
