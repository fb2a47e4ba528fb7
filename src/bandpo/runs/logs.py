"""Read the log of a run, of any framework or tracker, with one name for each quantity."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bandpo.errors import InvalidValue
from bandpo.runs.legs import CONSOLE, METRICS, legs_of, run_folder
from bandpo.runs.log_files import KINDS, WHAT_TO_GIVE, RawLog, RawRows, kind_of, read_raw
from bandpo.runs.quantities import (
    BOOKKEEPING,
    DETAIL,
    QUANTITIES,
    STEP_KEYS,
    Row,
    component_name,
    named_rows,
    sources,
)

NAMES_FILE = "bandpo-names.json"
"""The file in which a user keeps names of his own, beside the log or in the current folder."""

SHORT_ATTEMPT = 10
"""Rows below which an attempt that began again from the start is left out, instead of being a run of its own."""

FEWEST_QUANTITIES = 3
"""Quantities that a file in a folder must hold to count as a log of RL, if it holds no reward."""

MOST_FILES = 2000
"""Files of a folder that are looked at."""


class UnreadableLog(InvalidValue):
    """A log that gives no rows of one RL run, with the reason as a code.

    Args:
        code: ``no-log``, ``several-runs``, ``not-rl`` or ``no-quantity``.
        message: What is wrong, and what to do.
        choices: What the user may choose from: the names of the runs, or the keys of which one may be the reward.
    """

    def __init__(self, code: str, message: str, choices: Iterable[str] = ()):
        super().__init__(message)
        self.code = code
        self.choices = tuple(choices)


@dataclass(frozen=True)
class Log:
    """The log of one run.

    >>> log = Log.of([{"step": 1, "train/reward": 0.5, "my/score": 0.25}])
    >>> log.rows[0]["reward"], log.read, log.unread
    (0.5, {'reward': ('train/reward',)}, ('my/score',))
    """

    rows: Sequence[Row]
    """One row per log step with its ``step``, in the order of steps."""
    source: str = ""
    """What was read, in words: the file and its kind."""
    read: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each quantity that was read the keys that log it. A component of the reward is named ``rewards/NAME``."""
    unread: tuple[str, ...] = ()
    """Keys whose meaning is not known. Counters and times are not among them."""
    notes: tuple[str, ...] = ()
    """What was done to the rows: attempts that were left out, steps that were logged twice."""

    @classmethod
    def of(
        cls,
        raw: Iterable[Mapping[str, Any]],
        source: str = "",
        names: Mapping[str, str] | None = None,
    ) -> Log:
        """Return the log that rows make.

        Args:
            raw: The rows as they were logged.
            source: What was read, in words.
            names: For quantities the keys under which the user logs them.
        """
        raw = list(raw)
        if raw and not any(key in row for row in raw for key in STEP_KEYS):
            raw = [{**row, "step": number} for number, row in enumerate(raw, 1)]
        rows, notes = _in_order(named_rows(raw, names))
        read, unread = _coverage(raw, names)
        return cls(rows, source, read, unread, tuple(notes))

    @property
    def keys_of_learning(self) -> int:
        """Number of logged keys but for counters and times."""
        return len(self.unread) + len({key for keys in self.read.values() for key in keys})


def _coverage(
    raw: Sequence[Mapping[str, Any]], names: Mapping[str, str] | None
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return the keys of each quantity that was read, and the keys that were not."""
    layouts: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for row in raw:
        layouts.setdefault(tuple(row), row)
    numeric: dict[str, None] = {}
    read: dict[str, dict[str, None]] = {}
    own_names = tuple((names or {}).items())
    for keys, row in layouts.items():
        detail = row.get(DETAIL)
        everything = {**row, **detail} if isinstance(detail, dict) else row
        numbers = [key for key in everything if isinstance(everything[key], (int, float, str))]
        numeric.update(dict.fromkeys(key for key in numbers if not isinstance(everything[key], str)))
        for source in sources(tuple(everything), own_names):
            read.setdefault(source.quantity, {})[source.key] = None
        for key in keys:
            name = component_name(key)
            if name is not None:
                read.setdefault(f"rewards/{name}", {})[key] = None
    known = {key for keys in read.values() for key in keys}
    unread = [
        key
        for key in numeric
        if key not in known
        and key not in STEP_KEYS
        and not BOOKKEEPING.search(key)
        and not key.startswith("audit/")
    ]
    return {quantity: tuple(keys) for quantity, keys in read.items()}, tuple(unread)


def _in_order(rows: Sequence[dict[str, float]]) -> tuple[list[Row], list[str]]:
    """Return one row per step in the order of steps, and what was done for it.

    Rows of one step that follow each other are put together: a metric that several of them hold is averaged. What is
    logged again after a restart replaces what was logged before.

    Args:
        rows: The rows, of which some are changed.
    """
    by_step: dict[float, dict[str, float]] = {}
    counts: dict[tuple[float, str], int] = {}
    repeated: set[float] = set()
    last_step = None
    for row in rows:
        step = row["step"]
        present = by_step.get(step)
        if present is None:
            by_step[step] = row
        elif last_step == step:
            for key, value in row.items():
                if key in present and key != "step":
                    n = counts.get((step, key), 1)
                    present[key] += (value - present[key]) / (n + 1)
                    counts[step, key] = n + 1
                else:
                    present[key] = value
        else:
            if "reward" in row and "reward" in present:
                repeated.add(step)
            present.update(row)
        last_step = step
    steps = sorted(by_step)
    notes = []
    if repeated:
        first, last = min(repeated), max(repeated)
        notes.append(
            f"steps {first:g} to {last:g} were logged again after a restart: the later rows replace the earlier"
        )
    return [by_step[step] for step in steps], notes


def _split_attempts(raw: RawRows) -> Sequence[RawRows]:
    """Split rows where the step goes back to the start or before it: there another run begins."""
    key = next((key for key in STEP_KEYS if any(key in row for row in raw)), None)
    if key is None:
        return [raw]
    attempts: list[list[Mapping[str, Any]]] = [[]]
    first = None
    last = None
    for row in raw:
        step = row.get(key)
        if not isinstance(step, (int, float)):
            attempts[-1].append(row)
            continue
        if first is None:
            first = step
        elif step <= first and last is not None and last > step:
            attempts.append([])
            first = step
        attempts[-1].append(row)
        last = step
    return attempts


def read_log(path: str | Path, names: Mapping[str, str] | None = None, run_name: str | None = None) -> Log:
    """Read the log of one run.

    A last line that is cut off, as a kill or a run still at work leaves it, is left out with a warning.

    Args:
        path: A run folder or a log: TRL's ``trainer_state.json``, JSON lines, a CSV, console output, wandb's
            ``run-….wandb``, trackio's ``PROJECT.db``, TensorBoard's events.
        names: For quantities the keys under which the user logs them, such as ``{"reward": "iteration_reward"}``.
            Without it, those in a file `NAMES_FILE` beside the log or in the current folder.
        run_name: Which run to read where there are several, as the error without it names them.

    Raises:
        ValueError: if there is no such log, it holds no metrics of RL, there are several runs, or a line cannot be
            read; the message names it.
    """
    path = Path(path)
    names = _remembered_names(path) if names is None else names
    if path.is_dir() and legs_of(path):
        return _log_of_legs(path, names)
    runs = _runs_at(path, names)
    if run_name is not None:
        if run_name not in runs:
            raise UnreadableLog(
                "several-runs", f"{path} holds no run {run_name!r}; it holds {_listed(runs)}", runs
            )
        return _log_of(runs[run_name], names, path)
    if len(runs) > 1:
        raise UnreadableLog("several-runs", _several_message(path, runs), runs)
    return _log_of(next(iter(runs.values())), names, path)


def _log_of(run: RawRun, names: Mapping[str, str], path: Path, source: str | None = None) -> Log:
    """Return the log that a run's rows make.

    Args:
        run: The rows, with their file, to name it in errors.
        names: For quantities the keys under which the user logs them.
        path: What the user named.
        source: What was read, in words; the file and its kind if None.

    Raises:
        ValueError: the rows are not of RL, or none of their keys is known.
    """
    file, raw = run.file, run.rows
    log = Log.of(raw, source or f"{kind_of(file)}, {_relative(file, path)}", names)
    log = replace(log, notes=(*run.replaced, *log.notes, *run.left_out))
    kind = kind_of_training(log, raw)
    if kind is not None:
        raise UnreadableLog(
            "not-rl",
            f"{file} is no log of RL: it is thought to be of {kind}, as it holds no reward but "
            f"{some_of(_numeric_keys(raw))}; to have it read as one, say which key is the reward: --map reward=KEY",
            _numeric_keys(raw),
        )
    if not log.rows or not log.read:
        raise UnreadableLog(
            "no-quantity",
            f"{file} logs none of {', '.join(QUANTITIES)} under a name that is known, but "
            f"{some_of(_numeric_keys(raw))}; say which of them is the reward: --map reward=KEY; or set logging_steps "
            "(TRL) or the file logger (verl)",
            _numeric_keys(raw),
        )
    return log


def _numeric_keys(raw: RawRows) -> list[str]:
    keys = {}
    for row in raw[:1000]:
        keys.update({key: None for key, value in row.items() if isinstance(value, (int, float))})
    return [key for key in keys if not BOOKKEEPING.search(key) and key not in STEP_KEYS]


def some_of(names: Sequence[str]) -> str:
    """Return names in a line, the first of many."""
    shown = ", ".join(names[:12])
    if not names:
        return "nothing"
    return f"{shown} and {len(names) - 12} more" if len(names) > 12 else shown


# --- Legs ---


def _log_of_legs(run: Path, names: Mapping[str, str]) -> Log:
    """Return the log of a run whose legs lie in a folder each.

    Raises:
        ValueError: no leg has logged a step yet, or what they logged is no log of RL.
    """
    legs = legs_of(run)
    logged = {leg: of_leg for leg in legs if (of_leg := _run_of_leg(leg)) is not None}
    if not logged:
        raise UnreadableLog(
            "no-log",
            f"{run} is no log of a run yet: none of its {len(legs)} legs has logged a step yet; {legs[-1] / CONSOLE} "
            "has what was printed",
        )
    rows, replaced = _legs_joined({leg: of_leg.rows for leg, of_leg in logged.items()})
    last = next(reversed(logged))
    source = f"{len(logged)} legs, {run.name}" if len(logged) > 1 else f"one leg, {run.name}"
    return _log_of(RawRun(last, rows, tuple(replaced), logged[last].left_out), names, run, source)


def _run_of_leg(leg: Path) -> RawRun | None:
    """Return the rows of a leg with a number in them, of its file logger or else of its console; None without a log."""
    for file in (leg / METRICS, leg / CONSOLE):
        # The console of a leg that has not made a step holds no row, which is an error elsewhere.
        try:
            log = read_raw(file) if file.is_file() else RawLog({})
        except InvalidValue:
            if file.name == METRICS:
                raise
            continue
        rows = [row for raw in log.runs.values() for row in raw if _has_number(row)]
        if rows:
            return RawRun(file, rows, left_out=log.notes)
    return None


def _has_number(row: Mapping[str, Any]) -> bool:
    """Return whether a row holds a metric: the first line of a leg holds what the run is."""
    return any(isinstance(value, (int, float)) for key, value in row.items() if key not in STEP_KEYS)


def _legs_joined(logged: Mapping[Path, RawRows]) -> tuple[RawRows, list[str]]:
    """Return the rows of all legs, and what was replaced.

    A leg goes on from a checkpoint. What an earlier leg logged after that checkpoint was lost with its weights, also
    where the later leg has not come so far yet.
    """
    rows: list[Mapping[str, Any]] = []
    notes: list[str] = []
    before = ""
    for leg, raw in logged.items():
        first = min(_training_steps(raw) or _steps(raw))
        lost = [row for row in rows if (step := _step(row)) is not None and step >= first]
        if lost:
            steps = _steps(lost)
            notes.append(
                f"steps {min(steps):g} to {max(steps):g} of leg {before} were replaced: leg {leg.name} went on from an "
                "earlier checkpoint"
            )
        rows = [row for row in rows if (step := _step(row)) is None or step < first]
        rows += raw
        before = leg.name
    return rows, notes


def _training_steps(raw: RawRows) -> list[float]:
    """Return the steps of rows that are not of an evaluation alone, such as verl's before the first step of a leg."""
    return _steps(
        row for row in raw if any(not key.startswith("val-") for key in row if key not in STEP_KEYS)
    )


# --- What kind of training ---

OF_RL_ALONE = {
    "reward",
    "clip_high",
    "clip_low",
    "clip",
    "dead",
    "cut",
    "mismatch",
    "mismatch_kl",
    "mismatch_probs",
    "kl_old",
    "importance_weight",
    "staleness",
}
"""Quantities that only a log of RL holds."""

OTHER_TRAININGS = {
    r"(^|/)(rewards/(chosen|rejected|margins)|logps/chosen)$": "preference training, such as DPO",
    r"(^|/)(eval_)?margin$": "a reward model",
    r"(^|/)(eval_)?accuracy$": "a classifier or a reward model",
    r"(^|/|_)(mean_token_accuracy|loss|train_loss|eval_loss|perplexity|ppl)$": "supervised training",
}
"""Ends of keys, and what is trained where there is no reward."""

OF_REWARD_MODEL = {"accuracy", "margin"}
"""Keys that a trainer of reward models logs beside the mean of its rewards."""

SPEAKS_OF_A_REWARD = re.compile(r"(^|[/_ -])reward([/_ -]|$)", re.I)
"""Keys that may be a reward under a name of the user's own."""


def kind_of_training(log: Log, raw: RawRows) -> str | None:
    """Return what else than RL a log is of; None if it is of RL, or of something unknown."""
    keys = {key for row in raw[:1000] for key in row}
    if keys >= OF_REWARD_MODEL:
        return "a reward model"
    if OF_RL_ALONE & log.read.keys() or any(SPEAKS_OF_A_REWARD.search(key) for key in keys):
        return None
    for pattern, kind in OTHER_TRAININGS.items():
        if any(re.search(pattern, key) for key in keys):
            return kind
    return None


# --- Where the log is ---


@dataclass(frozen=True)
class RawRun:
    """The rows of one run, as they were logged."""

    file: Path
    """Where they are from; of several files the first, of legs the folder of the last."""
    rows: RawRows
    replaced: tuple[str, ...] = ()
    """Which rows were replaced by later ones, in sentences."""
    left_out: tuple[str, ...] = ()
    """What of the file was left out, in sentences."""


Runs = dict[str, RawRun]
"""Each run by its name."""


def _runs_at(path: Path, names: Mapping[str, str]) -> Runs:
    """Return the runs of a file or folder.

    Args:
        path: The file or folder.
        names: For quantities the keys under which the user logs them, by which a log in a folder is told from other
            files.

    Raises:
        ValueError: if there is no log, or the folder holds the folders of several runs.
    """
    if path.is_file():
        return _runs_of_file(path)
    if not path.is_dir():
        raise UnreadableLog(
            "no-log", f"{path} is no log of a run: there is nothing of that name; {WHAT_TO_GIVE}"
        )
    folders = {run_folder(file) for file in path.rglob(METRICS)}
    if len(folders) > 1 and path not in folders:
        raise UnreadableLog(
            "several-runs",
            f"{path} holds {len(folders)} runs: name those that you mean, such as {min(folders)}, or if it is a study, "
            f"bandpo-lab study page {path}",
        )
    state = _newest_state(path)
    for file in (path / METRICS, state):
        if file is not None and file.is_file():
            return _runs_of_file(file)
    return _runs_of_folder(path, names)


def _newest_state(path: Path) -> Path | None:
    """Return the newest trainer_state.json in a run's folder or in its checkpoints; None if there is none."""
    if (path / "trainer_state.json").is_file():
        return path / "trainer_state.json"
    states = sorted(path.glob("checkpoint-*/trainer_state.json"), key=_checkpoint_step)
    return states[-1] if states else None


def _checkpoint_step(state: Path) -> int:
    step = state.parent.name.rpartition("-")[2]
    return int(step) if step.isdigit() else -1


def _runs_of_file(file: Path) -> Runs:
    """Return the runs in one file. Attempts that are short and began again are left out."""
    runs: Runs = {}
    log = read_raw(file)
    for name, raw in log.runs.items():
        attempts = _split_attempts(raw)
        long_attempts = [
            *(attempt for attempt in attempts[:-1] if len(attempt) >= SHORT_ATTEMPT),
            attempts[-1],
        ]
        if len(long_attempts) == 1:
            runs[name] = RawRun(file, long_attempts[0], left_out=log.notes)
            continue
        for number, attempt in enumerate(long_attempts, 1):
            runs[f"{name} {number}".strip()] = RawRun(file, attempt, left_out=log.notes)
    if not runs:
        raise UnreadableLog("no-log", f"{file} holds no rows; {WHAT_TO_GIVE}")
    return runs


def _runs_of_folder(folder: Path, names: Mapping[str, str]) -> Runs:
    """Return the runs whose logs lie in a folder, of the kind of file that tells most.

    Event files of one folder are one run where each goes on at the step at which the one before ended.
    """
    by_kind: dict[str, Runs] = {}
    failures: dict[Path, str] = {}
    files = [file for pattern in KINDS for file in sorted(folder.rglob(pattern))]
    files = [file for file in dict.fromkeys(files) if file.is_file() and file.name != NAMES_FILE][:MOST_FILES]
    for file in files:
        try:
            runs = _runs_of_file(file)
        except InvalidValue as error:
            failures[file] = str(error)
            continue
        for name, run in runs.items():
            beginning = Log.of(run.rows[:500], names=names)
            if OF_RL_ALONE & beginning.read.keys() or (
                len(beginning.read) >= FEWEST_QUANTITIES and not kind_of_training(beginning, run.rows)
            ):
                label = " ".join(part for part in (str(file.relative_to(folder)), name) if part)
                by_kind.setdefault(kind_of(file), {})[label] = run
    if not by_kind:
        if len(failures) == 1:
            raise InvalidValue(next(iter(failures.values())))
        others = _other_trainings(files)
        raise UnreadableLog(
            "not-rl" if others else "no-log",
            f"{folder} is no log of a run: "
            + (f"{others}; " if others else f"none of its {len(files)} files with a log's name holds one; ")
            + WHAT_TO_GIVE,
        )
    joined = {kind: _joined(runs, kind) for kind, runs in by_kind.items()}
    return max(joined.values(), key=_amount)


def _other_trainings(files: Sequence[Path]) -> str:
    """Return what the logs of a folder are of where none is of RL; empty if that is not known."""
    for file in files:
        try:
            for run in _runs_of_file(file).values():
                kind = kind_of_training(Log.of(run.rows), run.rows)
                if kind is not None:
                    return f"{file.name} is thought to be of {kind}, as it holds no reward"
        except InvalidValue:
            continue
    return ""


def _amount(runs: Runs) -> int:
    return sum(len(row) for run in runs.values() for row in run.rows)


def _joined(runs: Runs, kind: str) -> Runs:
    """Return runs with the files of one run put together that were written one after the other."""
    if kind not in ("TensorBoard's events", "wandb's history"):
        return runs
    groups: dict[str, list[tuple[str, Path, list[Mapping[str, Any]]]]] = {}
    for name, run in runs.items():
        # wandb writes a file for each start of a run, all with its name; TensorBoard writes them beside each other.
        group = run.file.name if kind == "wandb's history" else str(run.file.parent)
        parts = groups.setdefault(group, [])
        steps = _steps(run.rows)
        if parts and steps and _steps(parts[-1][2]) and min(steps) > min(_steps(parts[-1][2])):
            parts[-1][2].extend(run.rows)
        else:
            parts.append((name, run.file, list(run.rows)))
    return {name: RawRun(file, rows) for parts in groups.values() for name, file, rows in parts}


def _steps(raw: Iterable[Mapping[str, Any]]) -> list[float]:
    return [step for row in raw if (step := _step(row)) is not None]


def _step(row: Mapping[str, Any]) -> float | None:
    """Return the step of a row; None if it has none."""
    step = next((row[key] for key in STEP_KEYS if key in row), None)
    return step if isinstance(step, (int, float)) else None


def _listed(runs: Runs) -> str:
    """Return names of runs with their steps."""
    lines = []
    for name, run in list(runs.items())[:12]:
        steps = _steps(run.rows)
        span = f" (steps {min(steps):g} to {max(steps):g})" if steps else f" ({len(run.rows)} rows)"
        lines.append(f"{name!r}{span}")
    more = f" and {len(runs) - 12} more" if len(runs) > 12 else ""
    return ", ".join(lines) + more


def _several_message(path: Path, runs: Runs) -> str:
    return (
        f"{path} holds {len(runs)} runs, which are not read as one: name the one that you mean, by its file or by "
        f"--run-name: {_listed(runs)}"
    )


def _relative(file: Path, path: Path) -> str:
    return str(file.relative_to(path)) if path.is_dir() else file.name


def _remembered_names(path: Path) -> Mapping[str, str]:
    """Return the names in a file of the user's beside the log or in the current folder; empty without one.

    Raises:
        ValueError: if the file is no object of texts.
    """
    folder = path if path.is_dir() else path.parent
    for file in (folder / NAMES_FILE, Path(NAMES_FILE)):
        if file.is_file():
            try:
                names = json.loads(file.read_bytes())
            except ValueError as error:
                raise InvalidValue(f"{file} is no JSON ({error})") from error
            if not isinstance(names, dict) or not all(isinstance(key, str) for key in names.values()):
                raise InvalidValue(
                    f'{file} must be an object such as {{"reward": "iteration_reward"}}, got {names!r}'
                )
            return names
    return {}
