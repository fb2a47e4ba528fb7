"""How often `rlvet diff` says that a metric parts: of two runs of the same settings, and of two learning rates.

The runs are those of the studies of staleness, of SmolLM2 and of the comparison, with their rewards, entropies and
other metrics. A hash of the settings divides them into two halves. The limits of `rlvet.compare.logs` were chosen with
the first one.

    PYTHONPATH=research python -m studies.log_noise
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlvet.checks.log_checks import log_findings
from rlvet.compare.logs import first_difference

RESULTS = Path(__file__).parents[1] / "results"
FILES: Mapping[str, tuple[str, ...]] = {
    "staleness/runs.jsonl.gz": ("cell", "arm"),
    "smollm2/runs.jsonl.gz": ("part", "arm"),
    "comparison/rows.jsonl.gz": ("method", "lag"),
}
"""Files of runs, and the settings of a run beside its learning rate and its seed."""
QUANTITIES = {"reward": "reward", "right": "reward", "entropy": "entropy"}
"""The metrics of the studies that `rlvet diagnose` knows."""
FEWEST_STEPS = 40
PAIRS = 2
"""Number of pairs of each setting."""

Metrics = Mapping[str, Sequence[float]]


class Settings(NamedTuple):
    """The settings of a run."""

    file: str
    others: tuple[str, ...]
    rate: float

    @property
    def half(self) -> int:
        """0 for settings with which the limits were chosen, else 1."""
        return hashlib.sha256(str(self).encode()).digest()[0] % 2


class Counts(NamedTuple):
    """The number of pairs, and of those of which at least one metric parts."""

    parted: int
    pairs: int

    def __str__(self) -> str:
        return f"{self.parted} of {self.pairs}"


def read_runs() -> dict[Settings, list[Metrics]]:
    """Return the metrics of the runs of each setting."""
    runs: dict[Settings, list[Metrics]] = defaultdict(list)
    for name, keys in FILES.items():
        with gzip.open(RESULTS / name, "rt") as lines:
            for line in lines:
                run = json.loads(line)
                curves = run.get("curves", run)
                metrics = {key: value for key, value in curves.items() if _is_metric(key, value)}
                if metrics:
                    others = tuple(str(run[key]) for key in keys)
                    runs[Settings(name, others, run["rate"])].append(metrics)
    return dict(sorted(runs.items()))


def _is_metric(name: str, value: object) -> bool:
    # The sums of an audit are no metrics that `rlvet diff` compares.
    if name.startswith("audit/") or not isinstance(value, list) or len(value) < FEWEST_STEPS:
        return False
    return all(isinstance(item, int | float) for item in value)


def is_healthy(metrics: Metrics) -> bool:
    """Return whether `rlvet diagnose` finds no fault in a run."""
    steps = min(map(len, metrics.values()))
    rows = []
    for step in range(steps):
        row = {"step": float(step + 1)}
        row.update({QUANTITIES[key]: values[step] for key, values in metrics.items() if key in QUANTITIES})
        rows.append(row)
    return all(finding.ok is not False for finding in log_findings(rows))


def parts(a: Metrics, b: Metrics) -> bool:
    """Return whether a metric of two runs parts."""
    for name in a.keys() & b.keys():
        n = min(len(a[name]), len(b[name]))
        if first_difference(name, list(range(n)), a[name][:n], b[name][:n]) is not None:
            return True
    return False


def count_of_seeds(runs: Mapping[Settings, Sequence[Metrics]], half: int) -> Counts:
    """Return the counts of pairs of healthy runs with the same settings and other seeds."""
    draw = random.Random(half)
    parted = 0
    pairs = 0
    for settings, metrics in runs.items():
        healthy = [one for one in metrics if is_healthy(one)] if settings.half == half else []
        for _ in range(PAIRS if len(healthy) > 1 else 0):
            pairs += 1
            parted += parts(*draw.sample(healthy, 2))
    return Counts(parted, pairs)


def count_of_rates(runs: Mapping[Settings, Sequence[Metrics]], least: float, most: float) -> Counts:
    """Return the counts of pairs of runs that differ in the learning rate, by a factor above one and up to another."""
    parted = 0
    pairs = 0
    for a, runs_a in runs.items():
        for b, runs_b in runs.items():
            if a[:2] == b[:2] and least < b.rate / a.rate <= most:
                pairs += 1
                parted += parts(runs_a[0], runs_b[0])
    return Counts(parted, pairs)


def rows() -> list[str]:
    """Return the rows of the page's table."""
    runs = read_runs()
    table = [
        ("same settings, other seed: building", count_of_seeds(runs, 0)),
        ("same settings, other seed: held out", count_of_seeds(runs, 1)),
        ("learning rate up to 2 times", count_of_rates(runs, 1.0, 2.01)),
        ("learning rate 2 to 5 times", count_of_rates(runs, 2.01, 5.01)),
        ("learning rate above 5 times", count_of_rates(runs, 5.01, 1e9)),
    ]
    return [f"| {name} | {counts} |" for name, counts in table]


if __name__ == "__main__":
    print("\n".join(rows()))
