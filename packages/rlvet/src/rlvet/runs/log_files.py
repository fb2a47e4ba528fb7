"""Read the runs in a log file of any format: their rows as they were logged, one list of rows for each run.

A file may hold a run that was started several times, a run that is printed twice, as by ``df.head()`` beside the whole
table, a stage of supervised training before RL, or a run whose steps are counted anew in each epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isclose
from pathlib import Path
from typing import Any

from rlvet.errors import InvalidValue, RlvetError
from rlvet.runs.compact_rows import CompactRows, compact
from rlvet.runs.endings import NO_ENDING, Ending
from rlvet.runs.files import check_regular
from rlvet.runs.formats import ACCEPTED_FILES, FORMATS, Format, NoLog, RawLog, RawRows
from rlvet.runs.formats.console import read_text
from rlvet.runs.limits import DEEPEST_ROW, LONGEST_KEY
from rlvet.runs.quantities import (
    BOOKKEEPING,
    DETAIL,
    EVALUATION,
    STEP_KEYS,
    component_name,
    is_of_evaluation,
    keys_of,
    sources,
    step_rank,
)
from rlvet.runs.unread import Unread


@dataclass(frozen=True)
class RawRun:
    """The rows of one run, as they were logged."""

    file: Path
    """The file of the rows; the first of several files, or the folder of the last leg."""
    rows: RawRows
    """The rows."""
    replaced: tuple[str, ...] = ()
    """Sentences about rows that were replaced by later ones."""
    left_out: tuple[str, ...] = ()
    """Sentences about the file, such as one about its incomplete last line."""
    unread: Unread = field(default_factory=Unread)
    """The rows of the file that were not read."""
    trainer: str = ""
    """The trainer of RL that the file names."""
    ending: Ending = NO_ENDING
    """How its console output ends."""
    saved: tuple[int, ...] = ()
    """The steps of the checkpoints that the file names as saved; none if it has several runs."""
    later_files: tuple[Path, ...] = ()
    """The files whose rows follow those of the first, of a run that went on in others."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All files, in the order of their rows."""
        return (self.file, *self.later_files)


Runs = dict[str, RawRun]
"""The runs of a file or folder, by name."""


def runs_of_file(file: Path) -> Runs:
    """Return the runs in one file by their names, without short attempts that were restarted from the first step.

    Raises:
        ValueError: if the file is no log, or no regular file; the message has its likely kind.
    """
    log = read_raw(file)
    notes = list(log.notes)
    attempts = {name: split_attempts(raw, notes) for name, raw in log.runs.items()}
    if all(name.isdecimal() for name in attempts):
        # These trainings follow each other in a text.
        attempts = {"": [attempt for of_name in attempts.values() for attempt in of_name]}
    runs: Runs = {}
    for name, of_name in attempts.items():
        unread = Unread()
        unread.add_all(log.unread)
        found = [without_first_stage(rows, unread) for rows in runs_of_attempts(of_name, unread)]
        is_last = name == list(attempts)[-1]
        trainer = log.trainer if len(found) == 1 else ""
        saved = log.saved if len(attempts) == len(found) == 1 else ()
        for number, rows in enumerate(found, 1):
            label = name if len(found) == 1 else f"{name} {number}".strip()
            runs[label] = RawRun(
                file,
                rows,
                left_out=tuple(notes),
                unread=unread,
                trainer=trainer,
                ending=log.ending if is_last and number == len(found) else NO_ENDING,
                saved=saved,
            )
    return runs


# --- The format of a file, and its keys ---


def format_of(file: Path) -> Format | None:
    """Return the format of a log file by its name; None for another name, which may be that of a text."""
    best = max(FORMATS.values(), key=lambda known: known.matches(file))
    return best if best.matches(file) else None


def kind_of(file: Path) -> str:
    """Return a description of the kind of a log file, by its name."""
    known = format_of(file)
    return "text" if known is None else known.kind


def read_raw(file: Path) -> RawLog:
    """Read the rows of each run in a file.

    Raises:
        ValueError: if the file is no log, or no regular file; the message has its likely kind.
    """
    check_regular(file)
    try:
        known = format_of(file)
        log = read_text(file) if known is None else known.read(file)
        notes = list(log.notes)
        return replace(
            log,
            runs={name: _with_plain_keys(rows, notes) for name, rows in log.runs.items()},
            notes=tuple(dict.fromkeys(notes)),
        )
    except NoLog as error:
        raise InvalidValue(f"{error}; {ACCEPTED_FILES}") from error
    except (RlvetError, OSError, MemoryError):
        raise
    except Exception as error:  # damaged or other files can raise errors of any type
        raise InvalidValue(f"{file} is no log of its kind, or a damaged one ({error!r:.300})") from error


def _with_plain_keys(rows: RawRows, notes: list[str]) -> CompactRows:
    """Return rows of values without dictionaries, under keys that may be names of metrics.

    The values in a dictionary get keys such as ``train/reward``. A step under a name in other letters, such as
    ``STEP``, becomes ``step``. Keys that are too long are left out, with a note.

    Args:
        rows: The rows.
        notes: The list to which a sentence about long keys is added.
    """
    rows = compact(rows)
    if any(not set(KIND_KEYS).isdisjoint(layout) for layout in rows.layouts):
        rows = CompactRows(map(_of_evaluation, rows))
    if rows.has_values_of(dict):
        rows = CompactRows(map(_flattened, rows))
    keys: set[Any] = set().union(*rows.layouts)
    long_keys = {key for key in keys if isinstance(key, str) and len(key) > LONGEST_KEY}
    if long_keys:
        number = f"{len(long_keys)} keys" if len(long_keys) > 1 else "1 key"
        notes.append(f"{number} of more than {LONGEST_KEY:,} characters are not read")
    is_step_known = any(key in keys for key in STEP_KEYS)
    ranks = {key: step_rank(key) for key in keys if isinstance(key, str)}
    step_keys = [key for key, rank in ranks.items() if rank is not None]
    step_key = min(step_keys, key=lambda key: ranks[key] or 0, default=None)
    step_key = None if is_step_known else step_key
    if step_key is None and not long_keys:
        return rows
    names = {key: "step" if key == step_key else key for key in keys - long_keys if isinstance(key, str)}
    return rows.renamed(names)


KIND_KEYS = ("type", "split", "phase", "mode")
"""Keys under which a row says what it is of."""


def _is_of_evaluation(row: Mapping[str, Any]) -> bool:
    """Return True if a row says that it is of an evaluation.

    >>> _is_of_evaluation({"type": "eval", "reward": 0.5}), _is_of_evaluation({"type": "train", "reward": 0.5})
    (True, False)
    """
    return any(isinstance(kind := row.get(key), str) and is_of_evaluation(kind) for key in KIND_KEYS)


def _of_evaluation(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row of an evaluation with its keys as those of one, other rows as they are."""
    if not _is_of_evaluation(row):
        return row
    return {
        key if key in KIND_KEYS or step_rank(key) is not None else f"eval/{key}": value
        for key, value in row.items()
    }


def _flattened(row: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Return a row with the values of its dictionaries under keys such as ``train/reward``.

    >>> _flattened({"step": 1, "train": {"reward": 0.5, "by": {"a": 1}}})
    {'step': 1, 'train/reward': 0.5, 'train/by/a': 1}
    """
    result: dict[str, Any] = {}
    for key, value in row.items():
        if not isinstance(value, dict) or key == DETAIL or depth >= DEEPEST_ROW:
            result.setdefault(key, value)
        else:
            for inner_key, inner_value in _flattened(value, depth + 1).items():
                result.setdefault(f"{key}/{inner_key}", inner_value)
    return result


# --- The attempts of a run ---

SHORT_ATTEMPT = 10
"""The number of rows from which an attempt that was restarted from the first step counts as a run. Shorter ones are
left out."""

MOST_COMPARED = 50
"""The largest number of attempts that are compared with each other."""

PRINTED_PLACES = 5e-3
"""Relative difference up to which two numbers may be one that was printed with other places."""

COUNTER = re.compile(
    r"(^|/)(epoch|num_tokens|num_input_tokens_seen|total_tokens|episodes?|total_episodes|consumed_samples|samples_seen)$"
)
"""Keys of counters that go on if the steps of a run are counted anew."""

OF_ANY_TRAINING = frozenset(("learning_rate", "grad_norm", "entropy", "memory", "step_time", EVALUATION))
"""Quantities that supervised training logs too."""

LOSS_KEY = re.compile(r"(^|[/_])loss$")
"""A key of a loss."""

REWARD_WORD = re.compile(r"reward|score|return|advantage|(^|[/_])kl([/_]|$)", re.I)
"""A part of keys that supervised training does not log."""

FEWEST_OF_STAGE = 5
"""The smallest number of rows at the start of a log that are taken for a stage of another training."""


def split_attempts(raw: RawRows, notes: list[str]) -> Sequence[RawRows]:
    """Split rows into attempts. A new one begins where the step goes back to the first step or before it.

    If a counter, such as the epoch, goes on over all attempts, they are one run whose steps are counted anew, and get
    steps that go on too.

    Args:
        raw: The rows.
        notes: The list to which a sentence about steps that were counted anew is added.

    >>> notes = []
    >>> rows = [{"step": step, "epoch": epoch, "reward": 0.5} for epoch in (1, 2) for step in (1, 2)]
    >>> [[row["step"] for row in attempt] for attempt in split_attempts(rows, notes)], notes
    ([[1.0, 2.0, 3.0, 4.0]], ['steps are counted anew 1 time while epoch goes on, and are read as those of one run'])
    """
    raw = compact(raw)
    key = next((key for key in STEP_KEYS if any(key in layout for layout in raw.layouts)), None)
    if key is None:
        return [raw]
    starts = [0]
    first = None
    last = None
    for number, step in enumerate(raw.values(key)):
        if not isinstance(step, (int, float)):
            continue
        if first is None:
            first = step
        elif step <= first and last is not None and last > step:
            starts.append(number)
            first = step
        last = step
    if len(starts) == 1:
        return [raw]
    attempts = [raw[start:end] for start, end in pairwise([*starts, len(raw)])]
    counter = _counter_that_goes_on(attempts)
    if counter is None:
        return attempts
    times = len(attempts) - 1
    notes.append(
        f"steps are counted anew {times} time{'s' if times > 1 else ''} while {counter} goes on, and are read as those "
        "of one run"
    )
    return [_with_steps_that_go_on(attempts, key)]


def _counter_that_goes_on(attempts: Sequence[RawRows]) -> str | None:
    """Return the key of a counter that is larger in each attempt than in the one before; None if there is none."""
    for key in attempts[0][0]:
        if not COUNTER.search(key):
            continue
        values = [
            [row[key] for row in attempt if isinstance(row.get(key), (int, float))] for attempt in attempts
        ]
        if all(values) and all(max(before) < min(after) for before, after in pairwise(values)):
            return key
    return None


def _with_steps_that_go_on(attempts: Sequence[RawRows], key: str) -> RawRows:
    """Return the rows of attempts as those of one run: each begins after the last step of the one before."""
    rows = CompactRows()
    offset = 0.0
    for attempt in attempts:
        steps = [row[key] for row in attempt if isinstance(row.get(key), (int, float))]
        # The first step may be 0.
        start = offset if not rows or min(steps) > 0 else offset + 1
        for row in attempt:
            step = row.get(key)
            rows.append({**row, key: step + start} if isinstance(step, (int, float)) else row)
        offset = max(steps) + start
    return rows


def runs_of_attempts(attempts: Sequence[RawRows], unread: Unread) -> list[RawRows]:
    """Return the attempts that are runs.

    Left out are those of another training, if one is of RL; short ones before the last; and those that another one
    contains, as if a part of a table is printed beside it.

    Args:
        attempts: The attempts in their order.
        unread: The object to which the rows that are left out are added.
    """
    runs = list(attempts)
    if len(runs) > 1:
        of_rl = [not is_of_other_training(rows) for rows in runs]
        if any(of_rl):
            for rows, is_of_rl in zip(runs, of_rl, strict=True):
                if not is_of_rl:
                    _add_stage(rows, unread)
            runs = [rows for rows, is_of_rl in zip(runs, of_rl, strict=True) if is_of_rl]
    *earlier, last = runs
    runs = []
    short = 0
    for rows in earlier:
        if len(rows) >= SHORT_ATTEMPT:
            runs.append(rows)
        else:
            short += len(rows)
    # Between several runs it is another run, and no part of one of them.
    if short and not runs:
        unread.add("row of a short attempt", "the run was restarted from the first step", "", short)
    return _without_repetitions([*runs, last], unread)


def _without_repetitions(runs: Sequence[RawRows], unread: Unread) -> list[RawRows]:
    """Return the runs whose rows are not all in another one."""
    if not 1 < len(runs) <= MOST_COMPARED:
        return list(runs)
    by_step = [_numbers_by_step(rows) for rows in runs]
    different = []
    for number, rows in enumerate(runs):
        # Of two runs that contain each other, the later one is kept.
        is_repeated = any(
            len(numbers) + (another > number) > len(by_step[number])
            for another, numbers in enumerate(by_step)
            if another != number and _contains(numbers, by_step[number])
        )
        if is_repeated:
            unread.add("row", "it is printed a second time", "", len(rows))
        else:
            different.append(rows)
    return different


def _numbers_by_step(rows: RawRows) -> dict[float, dict[str, float]]:
    """Return the numbers of each step, the first one under each key."""
    by_step: dict[float, dict[str, float]] = {}
    for row in rows:
        step = _step(row)
        if step is None:
            continue
        numbers = by_step.setdefault(step, {})
        for key, value in row.items():
            if isinstance(value, (int, float)) and key not in STEP_KEYS:
                numbers.setdefault(key, value)
    return by_step


def _contains(rows: Mapping[float, Mapping[str, float]], others: Mapping[float, Mapping[str, float]]) -> bool:
    """Return whether each of the others has a row of its step, with the same numbers under the keys of both."""
    if not others:
        return False
    return all(step in rows and _are_same(rows[step], other) for step, other in others.items())


def _are_same(row: Mapping[str, float], other: Mapping[str, float]) -> bool:
    common = row.keys() & other.keys()
    return bool(common) and all(
        isclose(row[key], other[key], rel_tol=PRINTED_PLACES, abs_tol=1e-6) for key in common
    )


def _step(row: Mapping[str, Any]) -> float | None:
    step = next((row[key] for key in STEP_KEYS if key in row), None)
    return step if isinstance(step, (int, float)) else None


def _add_stage(rows: RawRows, unread: Unread) -> None:
    """Count the rows of a stage of another training."""
    unread.add("row", "it is of a stage of supervised training, without a reward", "", len(rows))


def is_of_other_training(rows: RawRows) -> bool:
    """Return whether rows have a loss, and nothing that only RL logs.

    >>> is_of_other_training([{"step": 1, "loss": 0.5, "grad_norm": 0.1}])
    True
    >>> is_of_other_training([{"step": 1, "loss": 0.5, "kl": 0.1}]), is_of_other_training([{"loss": 1, "reward": None}])
    (False, False)
    """
    keys = keys_of(rows)
    if not any(LOSS_KEY.search(key) for key in keys):
        return False
    if any(REWARD_WORD.search(key) or component_name(key) is not None for key in keys):
        return False
    return all(source.quantity in OF_ANY_TRAINING for source in sources(tuple(sorted(keys))))


def without_first_stage(rows: RawRows, unread: Unread) -> RawRows:
    """Return the rows without those at the start that are of a stage of another training.

    These are rows before the first one with a key that only RL logs, if they are more than twice as many as are ever
    without such a key after it.

    Args:
        rows: The rows of a run.
        unread: The object to which the rows that are left out are added.
    """
    rows = compact(rows)
    flags = []
    for part in rows.parts:
        row = dict(zip(part.keys, (column[0] for column in part.columns), strict=True))
        flags.append(not is_of_other_training([row]) and not _is_bookkeeping(part.keys))
    first = next((number for number, part in enumerate(rows.part_of_row) if flags[part]), None)
    if first is None or first < FEWEST_OF_STAGE or not is_of_other_training(rows[:first]):
        return rows
    if first <= 2 * _longest_gap(map(flags.__getitem__, rows.part_of_row[first:])):
        return rows
    _add_stage(rows[:first], unread)
    return rows[first:]


def _is_bookkeeping(keys: Iterable[str]) -> bool:
    return all(BOOKKEEPING.search(key) or key in STEP_KEYS for key in keys)


def _longest_gap(flags: Iterable[bool]) -> int:
    """Return the largest number of flags in a row that are not set."""
    longest = 0
    gap = 0
    for is_set in flags:
        gap = 0 if is_set else gap + 1
        longest = max(longest, gap)
    return longest
