"""The figures of the report on configurations that were read before the tool read them."""

import csv
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "research/reports/rlvet/how-right.md").read_text(encoding="utf-8")


def readings():
    with (ROOT / "research/results/lint_readings.tsv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def count(rows, column):
    return sum(len((row[column] or "").split()) for row in rows)


def test_the_table_of_the_page_is_counted_from_the_readings():
    rows = readings()
    for name in ("building", "held out", "unseen"):
        half = [row for row in rows if row["set"] == name]
        faults = count(half, "faults")
        found = faults - count(half, "missed at first")
        line = re.search(rf"^\| {name} \| (\d+) \| (\d+), 0 \| (\d+) \| \d+ \| (\d+) \|$", PAGE, re.MULTILINE)
        assert [int(number) for number in line.groups()] == [
            len(half),
            count(half, "false before"),
            faults,
            found,
        ]


def test_the_sentences_of_the_page_are_counted_from_the_readings():
    rows = readings()
    held_out = [row for row in rows if row["set"] == "held out"]
    refused = [row for row in rows if row["refused as"]]
    repositories = {row["repository"] for row in rows}
    text = " ".join(PAGE.split())
    assert f"We read {len(rows)} configurations of {len(repositories)} public repositories" in text
    assert f"configurations, {len(refused)} are of frameworks that are not read" in text
    faults = count(held_out, "faults")
    assert f"after which {faults - count(held_out, 'missed now')} of its {faults} faults are found" in text
    assert count(rows, "missed now") == 4
    assert "The four that are still missed" in text


def test_each_reading_names_its_source():
    for row in readings():
        assert row["path"]
        assert row["commit"] or row["path"].startswith("issue ")
