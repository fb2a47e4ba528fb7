"""Means on the pages of the studies, computed again from the committed rows by code of its own.

It shares nothing with the studies: rows are read by json, means are taken by statistics, and pages are read as text.
"""

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "research/reports"


def rows_of(file):
    with gzip.open(ROOT / "research" / "results" / file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def tables_of(page):
    """All tables of a page, each with the heading that it stands under: (heading, header, rows)."""
    tables, heading, table = [], "", []
    for line in [*(PAGES / page).read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        if table:
            tables.append((heading, table[0], table[2:]))
            table = []
        if line.startswith("## "):
            heading = line[3:]
    return tables


@pytest.mark.parametrize(
    ("file", "page", "setting", "reward"),
    [
        ("staleness/runs.jsonl.gz", "staleness/report.md", "cell", "reward"),
        ("smollm2/runs.jsonl.gz", "smollm2/report.md", "part", "right"),
    ],
)
def test_rate_curves_of_runs_are_plain_means_of_their_rows(file, page, setting, reward):
    rows = rows_of(file)
    assert all({"commit", "time", "machine"} <= row.keys() for row in rows) or setting == "cell"
    by_run = {(row[setting], row["arm"], row["rate"], row["seed"]): row for row in rows}
    compared = 0
    for heading, header, lines in tables_of(page):
        rates = [float(name.removeprefix("AUC at ")) for name in header if name.startswith("AUC at ")]
        of_setting = {key for key in by_run if key[0] == heading}
        if not rates or not of_setting:
            continue  # a group of settings or of base models
        arms = [line[0] for line in lines]
        # The page has the seeds for which every arm has a run at every rate.
        seeds = {key[3] for key in of_setting}
        whole = {s for s in seeds if all((heading, a, r, s) in by_run for a in arms for r in rates)}
        for line in lines:
            for column, rate in enumerate(rates, 1):
                values = [mean(by_run[heading, line[0], rate, seed][reward]) for seed in whole]
                assert float(line[column]) == pytest.approx(mean(values), abs=6e-4), (heading, line[0], rate)
                compared += 1
    assert compared > 50


def test_entropies_of_the_map_are_plain_means_of_its_rows():
    files = sorted((ROOT / "research/results/optimizers").iterdir())
    rows = [row for file in files for row in rows_of(file) if "arm" in row]
    assert all({"commit", "time", "machine"} <= row.keys() for row in rows)
    entropies = defaultdict(dict)
    for row in rows:
        setting = row["place"]
        if setting["world"] == "random rewards":
            shape = (setting["epochs"], setting["minibatches"], setting["lag"])
            for index in (2, 4, 6):
                cell = (row["arm"], row["optimizer"], f"{row['rates'][index]:.2g}")
                entropies[shape][cell] = mean(row["entropy_at_end"][index]) / 1000
    page = (PAGES / "optimizers/map.md").read_text(encoding="utf-8")
    tables = [table for table in tables_of("optimizers/map.md") if table[0].startswith("Entropy")]
    shapes = re.findall(r"^random rewards, 128 samples, (\d+) × (\d+) updates, lag (\d+):$", page, re.M)
    compared = 0
    for shape, (_, header, lines) in zip(shapes, tables, strict=True):
        for line in lines:
            for name, cell in zip(header[1:], line[1:], strict=True):
                optimizer, rate = name.rsplit(" ", 1)
                expected = entropies[tuple(map(int, shape))][line[0], optimizer, rate]
                assert float(cell.split(" ± ")[0]) == pytest.approx(expected, abs=6e-3)
                compared += 1
    assert compared == 2 * 15 * 12
