"""Eight seeds of what `make demo` compares, on data four batches old and on fresh data: the rows, and the demo's file.

    PYTHONPATH=research python -m studies.demo_seeds runs/demo-seeds    # 64 runs, half a core-hour

Each run is one of `bandpo_lab.compare`, with the defaults of `make demo`; the same command goes on with what is there.
A row has the curves from which its metrics are computed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bandpo_lab.files.writing import replacing
from bandpo_lab.output.console import echo
from bandpo_lab.toy import demo
from bandpo_lab.toy.comparison import compare, metrics
from bandpo_lab.toy.fast_loop import Run, Settings

ROWS = Path(__file__).parents[1] / "results" / "comparison" / "rows.jsonl.gz"
CURVES = ("reward", "entropy", "audit/mass_positive_below_0.1", "audit/blocked_mass_below_0.1")
"""The metrics of each batch that a row keeps."""


def row_of(method: str, run: Run) -> dict[str, Any]:
    """Return the row of a run, with the text of its method in `bandpo_lab.toy.demo.METHODS`."""
    settings = run.settings
    return {
        "method": method,
        "seed": settings.seed,
        "lag": settings.lag,
        "rate": settings.rate,
        "curves": {name: [_rounded(line.get(name)) for line in run.log] for name in CURVES},
        "scores": dict(run.scores),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def run_of(row: dict[str, Any]) -> Run:
    """Return the run of a row, with the curves that the row has."""
    log: list[dict[str, float]] = []
    for index in range(len(row["curves"]["reward"])):
        values = {name: curve[index] for name, curve in row["curves"].items()}
        log.append(
            {"step": index + 1, **{name: value for name, value in values.items() if value is not None}}
        )
    return Run(Settings(row["method"], seed=row["seed"], lag=row["lag"]), log, row["scores"])


def read_rows(file: Path = ROWS) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines()]


def demo_file(rows: Sequence[dict[str, Any]]) -> str:
    """Return the text of the demo's file: metrics by age of the data, method and seed; null for a level not reached."""
    by_lag: dict[str, dict[str, list[dict[str, float | None]]]] = {}
    for lag in demo.LAGS:
        by_method: dict[str, list[dict[str, float | None]]] = {}
        for method in demo.METHODS:
            chosen = [row for row in rows if (row["lag"], row["method"]) == (lag, method)]
            chosen.sort(key=lambda row: row["seed"])
            by_method[method] = [
                {name: round(x, 4) if math.isfinite(x) else None for name, x in metrics(run_of(row)).items()}
                for row in chosen
            ]
        by_lag[str(lag)] = by_method
    return json.dumps({"metrics": by_lag}, indent=1) + "\n"


def trained_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Train what a folder does not have, and yield all rows."""
    for lag in demo.LAGS:
        comparison = compare(demo.METHODS, seeds=demo.SEEDS, lag=lag, folder=folder / f"lag-{lag}", say=echo)
        for method, runs in comparison.runs.items():
            for run in runs:
                yield row_of(method, run)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write both files."""
    parser = argparse.ArgumentParser(prog="python -m studies.demo_seeds")
    parser.add_argument("folder", type=Path, help="the folder of the runs")
    options = parser.parse_args(arguments)
    rows = list(trained_rows(options.folder))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    ROWS.parent.mkdir(exist_ok=True)
    with replacing(ROWS) as unfinished:
        unfinished.write_bytes(gzip.compress(lines.encode(), mtime=0))
    with replacing(demo.FILE) as unfinished:
        unfinished.write_text(demo_file(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
