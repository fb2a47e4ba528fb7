"""Read the log of a run, of any framework or tracker, with one name per quantity, and what lies beside it."""

from __future__ import annotations

import json
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from rlvet.errors import InvalidValue
from rlvet.runs.compact_rows import CompactRows, compact
from rlvet.runs.configs import Saved, newest_configuration, read_setup
from rlvet.runs.endings import NO_ENDING, Ending
from rlvet.runs.files import OutsideLink, check_file, check_regular, is_leaf, reading_in
from rlvet.runs.formats import ACCEPTED_FILES, IN_FOLDERS, RawRows
from rlvet.runs.keys import framework_of
from rlvet.runs.legs import CONSOLE, METRICS, legs_of, run_folder
from rlvet.runs.limits import LARGEST_NAMES, MOST_FILES
from rlvet.runs.log_files import RawRun, Runs, format_of, kind_of, read_raw, runs_of_file
from rlvet.runs.quantities import (
    BOOKKEEPING,
    DETAIL,
    EVALUATION,
    NOT_FINITE,
    OF_AUDIT,
    QUANTITIES,
    RUN_KEYS,
    STEP_KEYS,
    SUMMARY,
    Row,
    component_name,
    is_of_evaluation,
    keys_of,
    named_rows,
    sources,
    step_rank,
    unmeasured,
)
from rlvet.runs.setup import Setup
from rlvet.runs.unread import STEPS_COUNTED, Unread

NAMES_FILE = "bandpo-names.json"
"""The name of the file with the user's own keys for quantities, beside the log or in the current folder."""

MOST_STEPS = 1e15
"""A larger number under a name of steps is no step."""

MOST_LOST = 0.1
"""The share of rows of metrics that were not read from which nothing is judged. Checks compare tenths of a run, so that
a whole one of them may be missing."""

FEWEST_QUANTITIES = 3
"""The smallest number of quantities in a log of RL, if it has none that only RL logs."""


class UnreadableLog(InvalidValue):
    """The error for a path that is not the log of a single RL run, with the reason as a code.

    Args:
        code: ``no-log``, ``several-runs``, ``not-rl`` or ``no-quantity``.
        message: The problem and the remedy.
        choices: The values among which the user may choose: names of runs, or keys that may be the reward.
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
    """A description of the file and its kind."""
    read: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The keys of each quantity that was read. A component of the reward is named ``rewards/NAME``."""
    unread: tuple[str, ...] = ()
    """Keys with an unknown meaning, or without a number. Counters and times are not among them."""
    counters: tuple[str, ...] = ()
    """Keys of counters, times, steps and names of runs, and those of bandpo's audit, which are known."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Keys whose quantity was read from a better key, each with that key, such as ``entropy`` beside
    ``audit/entropy``."""
    unread_rows: int = 0
    """The number of rows of the file that were not read. Sentences in `notes` name them."""
    unread_values: Mapping[str, int] = field(default_factory=dict)
    """The number of values that are no numbers, for each key that also has numbers or is read."""
    notes: tuple[str, ...] = ()
    """Sentences about the rows, such as those that were not read, and steps that were logged twice."""
    unjudged: str = ""
    """The reason why nothing is judged: more rows than `MOST_LOST` were not read. Empty for other logs."""
    files: tuple[str, ...] = ()
    """The paths of its files, in the order of their steps."""
    ending: Ending = NO_ENDING
    """How the console output ends."""
    saved: tuple[int, ...] = ()
    """The steps of the checkpoints that the console output names as saved."""

    @classmethod
    def of(
        cls,
        raw: Iterable[Mapping[str, Any]],
        source: str = "",
        names: Mapping[str, str] | None = None,
    ) -> Log:
        """Return the log with rows as they were logged.

        Args:
            raw: The rows.
            source: A description of the file.
            names: The user's own keys for quantities.
        """
        raw = compact(raw)
        is_without_steps = all(set(STEP_KEYS).isdisjoint(layout) for layout in raw.layouts)
        if is_without_steps:
            raw = CompactRows({**row, "step": number} for number, row in enumerate(raw, 1))
        framework = framework_of(keys_of(raw))
        read_rows = named_rows(raw, names, framework)
        summaries = CompactRows(row for row in raw if SUMMARY in row) if _has_summary(raw) else raw[:0]
        unread_summaries = len(summaries) - len(named_rows(summaries, names, framework))
        unread_rows = len(raw) - len(read_rows) - unread_summaries
        rows, notes = _merge_steps(read_rows)
        rows, of_copies = _without_copies(rows)
        notes += of_copies
        coverage = _coverage(raw, names, framework)
        for key, missing in unmeasured(raw, names, framework).items():
            coverage.drop(missing.quantity, key)
            notes.append(
                f"{key} is {missing.placeholder:g} in every row, as it is logged if there is no value, and is not read"
            )
        notes += _notes_on_other_quantities(coverage.read, framework)
        if is_without_steps:
            notes.append(STEPS_COUNTED)
        unread_values = _values_without_number(raw, coverage)
        notes += _unread_notes(len(raw) - unread_summaries, unread_rows, unread_values)
        return cls(
            rows,
            source,
            coverage.read,
            tuple(coverage.unread),
            tuple(key for key in coverage.counters if key != "step" or not is_without_steps),
            coverage.replaced,
            unread_rows,
            {key: count for key, (count, _) in unread_values.items()},
            tuple(notes),
        )

    @property
    def are_steps_counted(self) -> bool:
        """True if a step is the number of a row, as the log has no steps."""
        return STEPS_COUNTED in self.notes

    @property
    def keys(self) -> frozenset[str]:
        """The keys of its file, without the names that quantities have here."""
        return frozenset().union(*self.read.values(), self.unread, self.counters, self.replaced)

    @property
    def keys_of_learning(self) -> int:
        """The number of logged keys, without counters and times."""
        known: set[str] = set().union(*self.read.values(), self.replaced)
        return len(self.unread) + len(known)


@dataclass
class _Coverage:
    """The logged keys by what was made of them."""

    read: dict[str, tuple[str, ...]]
    """The keys of each quantity."""
    unread: list[str] = field(default_factory=list)
    """Keys with an unknown meaning, or without a number."""
    counters: list[str] = field(default_factory=list)
    """Keys of counters, times and other steps."""
    replaced: dict[str, str] = field(default_factory=dict)
    """Keys whose quantity was read from a better key, each with that key."""

    def drop(self, quantity: str, key: str) -> None:
        """Make a key that was read for a quantity one that was not."""
        others = tuple(other for other in self.read[quantity] if other != key)
        if others:
            self.read[quantity] = others
        else:
            del self.read[quantity]
        self.unread.append(key)


def _coverage(raw: CompactRows, names: Mapping[str, str] | None, framework: str) -> _Coverage:
    """Return the keys of each quantity that was read, and all other keys."""
    # Dictionaries without values serve as ordered sets.
    keys: dict[str, None] = {}
    layouts: dict[tuple[str, ...], None] = {}
    for row in raw.different_rows():
        numeric = _numeric_layout(row)
        layouts[numeric] = None
        if len(numeric) < len(row):
            keys.update(dict.fromkeys(key for key in row if key != DETAIL))

    numbers: dict[str, None] = {}
    read: dict[str, dict[str, None]] = {}
    user_names = tuple((names or {}).items())
    for layout in layouts:
        numbers.update(dict.fromkeys(layout))
        for source in sources(layout, user_names, framework):
            read.setdefault(source.quantity, {})[source.key] = None
        for key in layout:
            name = component_name(key)
            if name is not None:
                read.setdefault(f"rewards/{name}", {})[key] = None

    coverage = _Coverage({quantity: tuple(keys_read) for quantity, keys_read in read.items()})
    known: set[str] = set().union(*read.values())
    for key in numbers | keys:
        if key in known:
            continue
        is_other = step_rank(key) is not None or key in RUN_KEYS or key.startswith(OF_AUDIT)
        if is_other or BOOKKEEPING.search(key):
            coverage.counters.append(key)
            continue
        better = None
        if key in numbers:
            # Scores on several sets of prompts are different quantities.
            quantities = [
                source.quantity for source in sources((key,), (), framework) if source.quantity != EVALUATION
            ]
            better = next((quantity for quantity in quantities if quantity in coverage.read), None)
        if better is None:
            coverage.unread.append(key)
        else:
            coverage.replaced[key] = coverage.read[better][0]
    return coverage


def _numeric_layout(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of a row that have numbers, those of `DETAIL` included."""
    if set(map(type, row.values())) <= {float, int}:
        return tuple(row)
    detail = row.get(DETAIL)
    metrics = {**row, **detail} if isinstance(detail, dict) else row
    return tuple(key for key, value in metrics.items() if isinstance(value, (int, float)))


def _values_without_number(raw: CompactRows, coverage: _Coverage) -> dict[str, tuple[int, str]]:
    """Return, for each key that is not named as unread, the number of values that are no numbers, and the first.

    NaN and infinity are numbers, and a missing value is none that could be read.
    """
    values: dict[str, tuple[int, str]] = {}
    named = {*coverage.unread, *coverage.counters, *STEP_KEYS, *RUN_KEYS, DETAIL}
    for row in raw.different_rows():
        if set(map(type, row.values())) <= {float, int}:
            continue
        for key, value in row.items():
            is_value = (
                not isinstance(value, (int, float)) and value is not None and value not in ("", *NOT_FINITE)
            )
            if is_value and key not in named:
                count, first = values.get(key, (0, str(value)[:40]))
                values[key] = (count + 1, first)
    return values


def _notes_on_other_quantities(read: Mapping[str, tuple[str, ...]], framework: str) -> list[str]:
    """Return a sentence on each key that has the name of one quantity and is read as another one."""
    notes = []
    for quantity, keys in read.items():
        for key in keys:
            name = key.rpartition("/")[2].lower()
            if name in QUANTITIES and name != quantity and quantity in QUANTITIES and name not in read:
                notes.append(
                    f"the key {key} is read as {quantity}, as frameworks with these keys log it ({framework}), and not "
                    f"as {name}; if it is that: --map {name}={key}"
                )
    return notes


def _has_summary(raw: CompactRows) -> bool:
    """Return whether a row is the summary of a training that has ended, which has no metric of a step."""
    return any(SUMMARY in layout for layout in raw.layouts)


def _unread_notes(
    logged_rows: int, unread_rows: int, unread_values: Mapping[str, tuple[int, str]]
) -> list[str]:
    """Return sentences about rows without a known metric, and about values that are no numbers."""
    notes = []
    if unread_rows:
        rows = "1 row" if unread_rows == 1 else f"{unread_rows} rows"
        verb = "has" if unread_rows == 1 else "have"
        notes.append(
            f"{rows} of {logged_rows} {verb} no known metric and {'is' if unread_rows == 1 else 'are'} not read"
        )
    if unread_values:
        total = sum(count for count, _ in unread_values.values())
        counts = [f"{count} of {key}" for key, (count, _) in unread_values.items()]
        first = next(iter(unread_values.values()))[1]
        subject = "1 value that is no number is" if total == 1 else f"{total} values that are no numbers are"
        notes.append(f"{subject} not read: {shorten(counts)}, such as {first!r}")
    return notes


def _merge_steps(rows: CompactRows) -> tuple[CompactRows, list[str]]:
    """Return one row per step in the order of steps, and sentences about replaced rows.

    Consecutive rows of a step become one row with the mean of each metric. Rows that were logged again after a restart
    replace the earlier ones.
    """
    steps = rows.column("step")
    if all(map(operator.lt, steps, islice(steps, 1, None))):
        return rows, []
    if all(map(operator.le, steps, islice(steps, 1, None))):
        groups = groupby(rows, key=operator.itemgetter("step"))
        return CompactRows(_mean_of_rows(group) for _, group in groups), []
    times = Counter(steps)
    # The rows of steps that were logged several times. As dictionaries, all rows would take much memory.
    by_step: dict[float, dict[str, float]] = {}
    # For each of these steps, the number of values in the mean of a metric.
    counts: dict[float, dict[str, int]] = {}
    first_rows: dict[float, int] = {}
    repeated: set[float] = set()
    last_step = None
    for number, step in enumerate(steps):
        first_rows.setdefault(step, number)
        if times[step] > 1:
            row = rows[number]
            merged = by_step.get(step)
            if merged is None:
                by_step[step] = row
            elif last_step == step:
                _add_to_means(merged, row, counts.setdefault(step, {}))
            else:
                if "reward" in row and "reward" in merged:
                    repeated.add(step)
                merged.update(row)
        last_step = step

    notes = []
    if repeated:
        notes.append(
            f"steps {min(repeated):g} to {max(repeated):g} were logged again after a restart: the later rows replace "
            "the earlier"
        )
    in_order = sorted(first_rows)
    return CompactRows(by_step.get(step) or rows[first_rows[step]] for step in in_order), notes


FEWEST_BLOCKS = 10
"""Number of blocks of equal rows from which these are copies of one."""


def _without_copies(rows: CompactRows) -> tuple[CompactRows, list[str]]:
    """Return the first row of each block of rows with equal values, and a sentence on those that were left out.

    A program may write, at each step, what its trainer last logged. Its blocks have one length, but for the first and
    the last. Other rows are returned as they are: a run may stand still for a while.
    """
    starts: list[int] = []
    length = 0
    before: dict[str, float] = {}
    for number, row in enumerate(rows):
        values = {key: value for key, value in row.items() if not BOOKKEEPING.search(key)}
        if not starts or values != before:
            if len(starts) > 1:
                length = length or number - starts[-1]
                if number - starts[-1] != length or length == 1:
                    return rows, []
            starts.append(number)
        before = values
    if len(starts) < FEWEST_BLOCKS:
        return rows, []
    note = (
        f"{len(rows) - len(starts)} of {len(rows)} rows are copies of the one before, as values that are logged every "
        f"{length} rows and written in each: one row of each {length} is read"
    )
    return CompactRows(rows[start] for start in starts), [note]


def _mean_of_rows(rows: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return one row with the mean of each metric of rows of one step."""
    rows = iter(rows)
    merged = next(rows)
    counts: dict[str, int] = {}
    for row in rows:
        _add_to_means(merged, row, counts)
    return merged


def _add_to_means(means: dict[str, float], row: Mapping[str, float], counts: dict[str, int]) -> None:
    """Add a row to the means of the rows of its step.

    Args:
        means: The means so far, which are modified.
        row: The row.
        counts: The number of values in each mean, if it is not 1, which are modified.
    """
    for key, value in row.items():
        if key in means and key != "step":
            n = counts.get(key, 1)
            means[key] += (value - means[key]) / (n + 1)
            counts[key] = n + 1
        else:
            means[key] = value


def read_run(
    path: Path, names: Mapping[str, str] | None, run_name: str | None, method: str | None
) -> tuple[Log, Saved, Setup]:
    """Read the log of a run, what the configuration beside it says, and the setup that follows from both.

    Args:
        path: The run's folder, or its log.
        names: The log's keys for quantities, see `rlvet.runs.Run`.
        run_name: The name of the run in a log of several.
        method: The text of the method, used if no file names one.

    Raises:
        ValueError: if there is no log, it cannot be read, or it contains several runs.
    """
    with reading_in(path):
        log = read_log(path, names, run_name)
        saved = newest_configuration(path, log.files, run_name)
        return log, saved, read_setup(path, log.keys, method, saved)


def read_log(path: str | Path, names: Mapping[str, str] | None = None, run_name: str | None = None) -> Log:
    """Read the log of one run.

    An incomplete last line, from a run that was killed or is still writing, is left out with a warning.

    Args:
        path: A run folder, or a log of one of `rlvet.runs.formats.FORMATS`.
        names: The user's own keys for quantities, such as ``{"reward": "iteration_reward"}``. If not given, they are
            read from a file `NAMES_FILE` beside the log or in the current folder.
        run_name: The name of the run, if there are several. The error without it lists the names.

    Raises:
        ValueError: if there is no such log, it has no metrics of RL, there are several runs, or a line cannot be read.
            The message names the file.
    """
    path = Path(path)
    names = _read_names_file(path) if names is None else names
    if path.is_dir() and legs_of(path):
        return _log_of_legs(path, names)
    runs = _runs_at(path, names)
    if run_name is not None:
        if run_name not in runs:
            raise UnreadableLog(
                "several-runs", f"{path} holds no run {run_name!r}; it holds {_list_runs(runs)}", runs
            )
        return _log_of(runs[run_name], names, path)
    if len(runs) > 1:
        raise UnreadableLog("several-runs", _several_runs_message(path, runs), runs)
    return _log_of(next(iter(runs.values())), names, path)


def _log_of(run: RawRun, names: Mapping[str, str], path: Path, source: str | None = None) -> Log:
    """Return the log of a run.

    Args:
        run: The rows of the run, with their file.
        names: The user's own keys for quantities.
        path: The path that the user gave.
        source: A description of the file; its kind and name if not given.

    Raises:
        ValueError: the rows are not of RL, or none of their keys is known.
    """
    file = run.file
    raw = run.rows
    log = Log.of(raw, source or f"{kind_of(file)}, {_relative(file, path)}", names)
    unknown = _unknown_rows(log, raw)
    log = replace(
        log,
        counters=tuple(key for key in log.counters if key != "step" or not run.unread.remarks),
        notes=(*run.replaced, *run.unread.notes(), *log.notes, *run.left_out),
        unread_rows=log.unread_rows + run.unread.count,
        unjudged=_reason_not_to_judge(run.unread.lost + unknown, len(raw) - unknown),
        files=tuple(map(str, run.files)),
        ending=run.ending,
    )
    if not log.are_steps_counted:
        log = replace(log, saved=run.saved)
    kind = kind_of_training(log, raw)
    if kind is not None and run.trainer:
        raise UnreadableLog(
            "no-quantity",
            f"{file} gets no verdict: it is of a run of {run.trainer}, of which only {shorten(_numeric_keys(raw))} was "
            "printed; log the reward too, as with report_to or a trainer_state.json",
            _numeric_keys(raw),
        )
    if kind is not None:
        raise UnreadableLog(
            "not-rl",
            f"{file} is no log of RL: it is thought to be of {kind}, as it holds no reward but "
            f"{shorten(_numeric_keys(raw))}; to have it read as one, say which key is the reward: --map reward=KEY",
            _numeric_keys(raw),
        )
    if not log.rows or not log.read:
        keys = _numeric_keys(raw)
        others = f"but {shorten(keys)}" if keys else "and no other number"
        raise UnreadableLog(
            "no-quantity",
            f"{file} logs none of {', '.join(QUANTITIES)} under a name that is known, {others}; say which key is the "
            "reward: --map reward=KEY; or set logging_steps (TRL) or the file logger (verl)",
            keys,
        )
    return log


def _unknown_rows(log: Log, raw: RawRows) -> int:
    """Return the number of rows with a key like one of a reward, and without one that is known."""
    if not log.unread_rows or not log.read:
        return 0
    known: set[str] = set().union(*log.read.values(), log.replaced)
    # The time that a reward function took is no reward.
    times = set(log.counters)
    others = (row for row in raw if known.isdisjoint(row) and DETAIL not in row)
    return sum(
        any(REWARD_KEY.search(key) and key not in times and not is_of_evaluation(key) for key in row)
        for row in others
    )


def _reason_not_to_judge(lost: int, read: int) -> str:
    """Return a sentence if too many rows of metrics were not read; else an empty text.

    >>> _reason_not_to_judge(99, 201), _reason_not_to_judge(1, 200)
    ('99 of 300 rows of metrics were not read, and from 10% on nothing is judged', '')
    """
    if lost < MOST_LOST * (lost + read):
        return ""
    return f"{lost} of {lost + read} rows of metrics were not read, and from {MOST_LOST:.0%} on nothing is judged"


def _numeric_keys(raw: RawRows) -> list[str]:
    """Return the keys of the first rows that have numbers, without counters and times."""
    keys = {}
    for row in raw[:1000]:
        keys.update({key: None for key, value in row.items() if isinstance(value, (int, float))})
    return [key for key in keys if not BOOKKEEPING.search(key) and key not in STEP_KEYS]


def shorten(names: Sequence[str]) -> str:
    """Return names as a text, the first twelve of many: ``a, b, … and 3 more``."""
    if not names:
        return "nothing"
    text = ", ".join(names[:12])
    return f"{text} and {len(names) - 12} more" if len(names) > 12 else text


# --- Legs ---


def _log_of_legs(run: Path, names: Mapping[str, str]) -> Log:
    """Return the log of a run with a folder for each leg.

    Raises:
        ValueError: no leg has logged a step yet, or the rows are not of RL.
    """
    legs = legs_of(run)
    logged: dict[Path, RawRun] = {}
    for leg in legs:
        run_of_leg = _run_of_leg(leg)
        if run_of_leg is not None:
            logged[leg] = run_of_leg
    if not logged:
        raise UnreadableLog(
            "no-log",
            f"{run} is no log of a run yet: none of its {len(legs)} legs has logged a step yet; {legs[-1] / CONSOLE} "
            "has what was printed",
        )
    rows, replaced = _join_legs({leg: run_of_leg.rows for leg, run_of_leg in logged.items()})
    last = next(reversed(logged))
    source = f"{len(logged)} legs, {run.name}" if len(logged) > 1 else f"one leg, {run.name}"
    unread = Unread()
    saved: set[int] = set()
    for run_of_leg in logged.values():
        unread.add_all(run_of_leg.unread)
        saved.update(run_of_leg.saved)
    return _log_of(
        RawRun(
            last,
            rows,
            tuple(replaced),
            logged[last].left_out,
            unread,
            ending=logged[last].ending,
            saved=tuple(sorted(saved)),
        ),
        names,
        run,
        source,
    )


def _run_of_leg(leg: Path) -> RawRun | None:
    """Return the rows with metrics of a leg, from its file logger or else its console output; None if it has none."""
    for file in (leg / METRICS, leg / CONSOLE):
        if not is_leaf(file):
            continue
        check_regular(file)
        # Console output without rows raises an error, but here it may be of a leg before its first step.
        try:
            log = read_raw(file)
        except InvalidValue:
            if file.name == METRICS:
                raise
            continue
        rows = CompactRows(row for row in chain.from_iterable(log.runs.values()) if _has_number(row))
        if rows:
            return RawRun(
                file, rows, left_out=log.notes, unread=log.unread, ending=log.ending, saved=log.saved
            )
    return None


def _has_number(row: Mapping[str, Any]) -> bool:
    """Return True if a row has a metric. The first line of a leg, a description of the run, has none."""
    return any(isinstance(value, (int, float)) for key, value in row.items() if key not in STEP_KEYS)


def _join_legs(logged: Mapping[Path, RawRows]) -> tuple[RawRows, list[str]]:
    """Return the rows of all legs, and sentences about replaced rows.

    A leg resumes from a checkpoint. Rows of earlier legs after that checkpoint are removed, even if the leg has not
    reached their steps yet, because their weights were lost.
    """
    rows = CompactRows()
    notes: list[str] = []
    previous_leg = ""
    for leg, raw in logged.items():
        first = min(_training_steps(raw) or _steps(raw))
        replaced: list[Mapping[str, Any]] = []
        remaining = CompactRows()
        for row in rows:
            step = _step(row)
            if step is not None and step >= first:
                replaced.append(row)
            else:
                remaining.append(row)
        if replaced:
            steps = _steps(replaced)
            notes.append(
                f"steps {min(steps):g} to {max(steps):g} of leg {previous_leg} were replaced: leg {leg.name} went on "
                "from an earlier checkpoint"
            )
        rows = CompactRows(chain(remaining, raw)) if remaining else compact(raw)
        previous_leg = leg.name
    return rows, notes


def _training_steps(raw: RawRows) -> list[float]:
    """Return the steps of rows with other metrics than those of an evaluation.

    verl evaluates before the first step of a leg, under the step of the checkpoint.
    """
    return _steps(row for row in raw if _has_training_metric(row))


def _has_training_metric(row: Mapping[str, Any]) -> bool:
    """Return True if a row has a key other than steps and verl's metrics of an evaluation."""
    return any(key not in STEP_KEYS and not key.startswith("val-") for key in row)


# --- Detection of logs that are not of RL ---

RL_QUANTITIES = {
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
"""Quantities that only logs of RL have."""

OTHER_TRAININGS = {
    r"(^|/)(rewards/(chosen|rejected|margins)|logps/chosen)$": "preference training, such as DPO",
    r"(^|/)(eval_)?margin$": "a reward model",
    r"(^|/)(eval_)?accuracy$": "a classifier or a reward model",
    r"(^|/|_)(mean_token_accuracy|loss|train_loss|eval_loss|perplexity|ppl)$": "supervised training",
}
"""The kind of training for patterns of keys, in logs without a reward."""

REWARD_MODEL_KEYS = {"accuracy", "margin"}
"""Keys that trainers of reward models log beside the mean of the rewards."""

REWARD_KEY = re.compile(r"(^|[/_ -])reward([/_ -]|$)", re.I)
"""A key that may be the reward of a custom training loop."""


def kind_of_training(log: Log, raw: RawRows) -> str | None:
    """Return the kind of training of a log that is not of RL; None if it is of RL or unknown."""
    keys = set().union(*raw[:1000])
    if keys >= REWARD_MODEL_KEYS:
        return "a reward model"
    if RL_QUANTITIES & log.read.keys() or any(REWARD_KEY.search(key) for key in keys):
        return None
    for pattern, kind in OTHER_TRAININGS.items():
        if any(re.search(pattern, key) for key in keys):
            return kind
    return None


# --- Search for the log ---


def _runs_at(path: Path, names: Mapping[str, str]) -> Runs:
    """Return the runs of a file or folder.

    Args:
        path: The file or folder.
        names: The user's own keys for quantities, by which logs in a folder are recognised.

    Raises:
        ValueError: if there is no log, or the folder contains the folders of several runs.
    """
    if is_leaf(path):
        return _runs_of_file(path)
    if not path.is_dir():
        raise UnreadableLog(
            "no-log", f"{path} is no log of a run: there is nothing of that name; {ACCEPTED_FILES}"
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
        if file is not None and is_leaf(file):
            return _runs_of_file(file)
    return _runs_of_folder(path, names)


def _newest_state(path: Path) -> Path | None:
    """Return the newest trainer_state.json in a run's folder or its checkpoints; None if there is none."""
    if is_leaf(path / "trainer_state.json"):
        return path / "trainer_state.json"
    states = sorted(path.glob("checkpoint-*/trainer_state.json"), key=_checkpoint_step)
    return states[-1] if states else None


def _checkpoint_step(state: Path) -> int:
    """Return the step of the checkpoint that contains a file; −1 if its name has none."""
    step = state.parent.name.rpartition("-")[2]
    return int(step) if step.isdigit() else -1


def _runs_of_file(file: Path) -> Runs:
    """Return the runs in one file.

    Raises:
        ValueError: if it has none.
    """
    runs = runs_of_file(file)
    if not runs:
        raise UnreadableLog("no-log", f"{file} holds no rows; {ACCEPTED_FILES}")
    return runs


def _runs_of_folder(folder: Path, names: Mapping[str, str]) -> Runs:
    """Return the runs of the logs in a folder.

    If there are logs of several kinds of file, those of the kind with the most values are returned.
    """
    by_kind: dict[str, Runs] = {}
    errors: list[str] = []
    links: list[str] = []
    other_training = ""
    files = _log_files(folder)
    for file in files:
        try:
            runs = _runs_of_file(file)
        except InvalidValue as error:
            if isinstance(error, OutsideLink):
                links.append(str(error))
            errors.append(str(error))
            continue
        for name, run in runs.items():
            if not _is_of_rl(run, names):
                other_training = other_training or _describe_other_training(run)
            else:
                label = f"{file.relative_to(folder)} {name}".strip()
                by_kind.setdefault(kind_of(file), {})[label] = run

    if not by_kind:
        if len(errors) == 1:
            raise InvalidValue(errors[0])
        reason = other_training or f"none of its {len(files)} files with a log's name holds one"
        raise UnreadableLog(
            "not-rl" if other_training else "no-log",
            f"{folder} is no log of a run: {reason}; {ACCEPTED_FILES}",
        )
    runs = max(map(_join_files, by_kind.values()), key=_count_values)
    return {name: replace(run, left_out=(*run.left_out, *links)) for name, run in runs.items()}


def _log_files(folder: Path) -> list[Path]:
    """Return the files in a folder whose names may be those of logs, up to `MOST_FILES`."""
    files: dict[Path, None] = {}
    for pattern in IN_FOLDERS:
        files.update(dict.fromkeys(sorted(folder.rglob(pattern))))
    return [file for file in files if is_leaf(file) and file.name != NAMES_FILE][:MOST_FILES]


def _is_of_rl(run: RawRun, names: Mapping[str, str]) -> bool:
    """Return True if the first rows of a run have quantities of RL."""
    log = Log.of(run.rows[:500], names=names)
    if RL_QUANTITIES & log.read.keys():
        return True
    return len(log.read) >= FEWEST_QUANTITIES and not kind_of_training(log, run.rows)


def _describe_other_training(run: RawRun) -> str:
    """Return a sentence about the log of another training than RL; empty if it is of RL or unknown."""
    kind = kind_of_training(Log.of(run.rows[:1000]), run.rows)
    return "" if kind is None else f"{run.file.name} is thought to be of {kind}, as it holds no reward"


def _count_values(runs: Runs) -> int:
    """Return the number of values in all rows of runs."""
    rows = chain.from_iterable(run.rows for run in runs.values())
    return sum(map(len, rows))


def _join_files(runs: Runs) -> Runs:
    """Join the files of a tracker that belong to one run; each continues the steps of the one before."""
    groups: dict[object, Runs] = {}
    for name, run in runs.items():
        known = format_of(run.file)
        share = None if known is None else known.parts_share
        group = groups.setdefault(name if share is None else share(run.file), {})
        last_name = next(reversed(group), None)
        if last_name is not None and _continues(run, group[last_name]):
            last = group[last_name]
            unread = Unread()
            unread.add_all(last.unread)
            unread.add_all(run.unread)
            notes = tuple(dict.fromkeys((*last.left_out, *run.left_out)))
            group[last_name] = RawRun(
                last.file,
                CompactRows(chain(last.rows, run.rows)),
                left_out=notes,
                unread=unread,
                later_files=(*last.later_files, run.file),
            )
        else:
            group[name] = run

    joined: Runs = {}
    for group in groups.values():
        joined |= group
    return joined


def _continues(run: RawRun, previous: RawRun) -> bool:
    """Return True if the first step of a run is after that of another one."""
    steps = _steps(run.rows)
    previous_steps = _steps(previous.rows)
    return bool(steps) and bool(previous_steps) and min(steps) > min(previous_steps)


def _steps(raw: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the steps of the rows that have one."""
    steps = [_step(row) for row in raw]
    return [step for step in steps if step is not None]


def _step(row: Mapping[str, Any]) -> float | None:
    """Return the step of a row; None if it has none, or one that no run reaches, such as infinity."""
    step = next((row[key] for key in STEP_KEYS if key in row), None)
    return step if isinstance(step, (int, float)) and abs(step) < MOST_STEPS else None


def _list_runs(runs: Runs) -> str:
    """Return the names of runs with their steps, the first twelve of many."""
    texts = []
    for name, run in list(runs.items())[:12]:
        steps = _steps(run.rows)
        span = f"steps {min(steps):g} to {max(steps):g}" if steps else f"{len(run.rows)} rows"
        texts.append(f"{name!r} ({span})")
    more = f" and {len(runs) - 12} more" if len(runs) > 12 else ""
    return ", ".join(texts) + more


def _several_runs_message(path: Path, runs: Runs) -> str:
    """Return the error message for a log of several runs."""
    return (
        f"{path} holds {len(runs)} runs, which are not read as one: name the one that you mean, by its file or by "
        f"--run-name: {_list_runs(runs)}"
    )


def _relative(file: Path, path: Path) -> str:
    """Return the path of a file relative to the folder that the user gave; its name if the user gave a file."""
    return str(file.relative_to(path)) if path.is_dir() else file.name


def _read_names_file(path: Path) -> Mapping[str, str]:
    """Return the user's own keys for quantities, from a `NAMES_FILE`; empty if there is none.

    Raises:
        ValueError: if the file is not a JSON object of strings, or larger than the limit.
    """
    folder = path if path.is_dir() else path.parent
    for file in (folder / NAMES_FILE, Path(NAMES_FILE)):
        if is_leaf(file):
            check_file(file, LARGEST_NAMES)
            try:
                names = json.loads(file.read_bytes())
            except (ValueError, RecursionError) as error:
                raise InvalidValue(f"{file} is no JSON ({error})") from error
            if not isinstance(names, dict) or not all(isinstance(key, str) for key in names.values()):
                raise InvalidValue(
                    f'{file} must be an object such as {{"reward": "iteration_reward"}}, got {names!r}'
                )
            return names
    return {}
