"""Rows in columns are the rows that were given, and every reading of them is that of a list of dictionaries."""

import random

import pytest

from helpers.random_logs import random_rows
from rlvet.checks.log_checks import log_findings
from rlvet.errors import InvalidValue
from rlvet.runs import logs, quantities
from rlvet.runs.compact_rows import CompactRows, Layout, compact, layouts_of
from rlvet.runs.logs import Log
from rlvet.runs.plain import from_plain, to_plain

VALUES = (0.5, -1.0, float("inf"), 3, True, None, "text", "text", ["a"], {"b": 1})


def rows_of(seed: int) -> list[dict[str, object]]:
    """Return rows with a few layouts, of floats alone or of other values too."""
    chance = random.Random(seed)
    values = VALUES[: chance.choice((2, 3, len(VALUES)))]
    rows = []
    for number in range(chance.choice((1, 2, 40, 7000))):
        keys = chance.choice(("abcd", "ab", "dc", "a", "")) if seed % 3 else "abcd"
        rows.append({key: chance.choice(values) for key in keys} | ({"n": float(number)} if seed % 2 else {}))
    return rows


@pytest.mark.parametrize("seed", range(30))
def test_it_is_a_sequence_of_the_rows(seed):
    rows = rows_of(seed)
    compacted = CompactRows(rows)
    assert len(compacted) == len(rows)
    assert list(compacted) == rows
    assert compacted == rows
    assert [list(row) for row in compacted] == [list(row) for row in rows]
    assert [list(map(type, row.values())) for row in compacted] == [
        list(map(type, row.values())) for row in rows
    ]
    chance = random.Random(seed)
    for place in (0, -1, len(rows) - 1, chance.randrange(len(rows))):
        assert compacted[place] == rows[place]
    with pytest.raises(IndexError):
        compacted[len(rows)]
    for _ in range(3):
        first, end = chance.randrange(len(rows)), chance.randrange(len(rows) + 1)
        assert compacted[first:end] == rows[first:end]
        assert compacted[first:end].layouts == layouts_of(rows[first:end])
    assert compacted[::-1] == rows[::-1]
    assert compact(compacted) is compacted
    assert from_plain(to_plain(compacted)) == rows


@pytest.mark.parametrize("seed", range(30))
def test_columns_are_those_of_the_rows(seed):
    rows = rows_of(seed)
    compacted = CompactRows(rows)
    assert compacted.layouts == layouts_of(rows) == list(dict.fromkeys(map(tuple, rows)))
    for key in "abcdn?":
        with_key = [row for row in rows if key in row]
        assert list(compacted.column(key)) == [row[key] for row in with_key]
        assert list(compacted.column(key, "a")) == [row[key] for row in with_key if "a" in row]
        assert list(compacted.values(key, "none")) == [row.get(key, "none") for row in rows]
        assert list(compacted.numbers_of_rows(key)) == [
            number for number, row in enumerate(rows) if key in row
        ]
    for kind in (str, dict, type(None)):
        assert compacted.has_values_of(kind) == any(
            type(value) is kind for row in rows for value in row.values()
        )
    names = {"a": "z", "b": "b", "n": "step"}
    assert compacted.renamed(names) == [{names[key]: row[key] for key in row if key in names} for row in rows]
    different = list(compacted.different_rows())
    kept = {}
    for number, row in enumerate(rows):
        kept.setdefault(tuple(row) if set(map(type, row.values())) <= {float} else number, row)
    assert different == list(kept.values())


def test_rows_can_be_added_later():
    rows = CompactRows([{"a": 1.0}])
    rows.append({"a": 2.0})
    rows.append({"a": None})
    rows.extend([{"b": 3.0}, {"a": 4.0}])
    assert rows == [{"a": 1.0}, {"a": 2.0}, {"a": None}, {"b": 3.0}, {"a": 4.0}]
    assert [rows[number]["a"] for number in (0, 2, 4)] == [1.0, None, 4.0]


@pytest.mark.parametrize(
    ("columns", "part_of_row"), [([[1.0]], [0, 0]), ([[1.0, 2.0]], [0]), ([[1.0]], [1]), ([], [0])]
)
def test_columns_of_another_length_are_refused(columns, part_of_row):
    parts = [Layout(("a",), [column]) for column in columns]
    with pytest.raises(InvalidValue, match=r"number of values|no layout"):
        CompactRows.of_parts(parts, part_of_row)


SEEDS = [0, 1, 2, 3, 4, 5]


def logged(seed: int) -> list[dict[str, object]]:
    """Return a random log, of some with values that are not finite, evaluations, and steps that were logged twice."""
    chance = random.Random(seed)
    rows = [dict(row) for row in random_rows(seed)]
    if seed % 2:
        for row in chance.sample(rows, min(3, len(rows))):
            row["reward"] = chance.choice((float("nan"), None, "NaN", 1))
    if seed % 3 == 1:
        rows += [{"step": row["step"], "eval/reward@8": 0.5} for row in rows[::5]]
        rows.sort(key=lambda row: row["step"])
    if seed % 3 == 2:
        rows += [row | {"reward": 0.25} for row in rows[len(rows) // 2 :]]
    return rows


@pytest.mark.parametrize("seed", SEEDS)
def test_columns_get_the_names_that_rows_get(seed, monkeypatch):
    """Columns are named as a whole where no row needs a look; else row by row."""
    rows = logged(seed)
    log = Log.of(rows)
    monkeypatch.setattr(quantities._Naming, "columns", lambda self, part: None)
    one_by_one = Log.of(rows)
    assert log == one_by_one
    assert [list(row) for row in log.rows] == [list(row) for row in one_by_one.rows]
    assert log_findings(log.rows) == log_findings(list(log.rows))


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_that_do_not_go_back_are_merged_in_one_pass(seed, monkeypatch):
    """The result is that of the way that also takes steps which go back."""
    chance = random.Random(seed)
    rows = CompactRows(
        {"step": float(step), "a": chance.random()}
        for step in range(30)
        for _ in range(chance.choice((1, 1, 3)))
    )
    in_one_pass, notes = logs._merge_steps(rows)
    # The last row is of step 0, so that steps go back.
    by_step, notes_of_others = logs._merge_steps(CompactRows([*rows, {"step": 0.0, "b": 1.0}]))
    assert list(in_one_pass)[1:] == list(by_step)[1:]
    assert notes == notes_of_others == []
