"""Read log files of every format into rows as they were logged, with a list of rows for each run in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvet.errors import InvalidValue, RlvetError
from rlvet.runs.compact_rows import CompactRows, compact
from rlvet.runs.files import check_regular
from rlvet.runs.formats import ACCEPTED_FILES, FORMATS, Format, NoLog, RawLog, RawRows
from rlvet.runs.formats.console import read_text
from rlvet.runs.limits import DEEPEST_ROW, LONGEST_KEY
from rlvet.runs.quantities import DETAIL, STEP_KEYS, is_of_evaluation, step_rank


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
