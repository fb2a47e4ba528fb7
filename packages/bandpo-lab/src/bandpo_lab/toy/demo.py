"""The five methods that `make demo` compares, and what eight seeds of the same comparison say.

The demo itself trains one seed, which decides nothing. The metrics of eight seeds, on old and on fresh data, are a file
of the package, which ``research/studies/demo_seeds.py`` makes. Each sentence of `conclusions` is computed from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bandpo_lab.study.interval import Interval, signed
from bandpo_lab.toy.comparison import Outcomes, aligned, verdict
from bandpo_lab.toy.fast_loop import Settings

METHODS = ("FixedClip(0.2)", "BandAbove()", "FixedClip(0.2, 0.28)", "BandPO()", "FixedClip(0.2, 1.0)")
"""GRPO's clip, Band's upper bound with the clip's lower one, Clip-Higher, Band, and a constant clip of [0.8, 2]."""
RECOMMENDED = "BandAbove()"
"""The rule that README recommends on old data, which is compared with each of the others."""
OTHERS = tuple(method for method in METHODS if method != RECOMMENDED)
LAGS = (4, 0)
"""The ages of the data, in batches, of which there are eight seeds."""
SEEDS = 8
FILE = Path(__file__).parent / "demo_seeds.json"
"""The metrics of the eight seeds."""


class Metric(NamedTuple):
    """A metric of `bandpo_lab.toy.comparison.METRICS` that the conclusions name."""

    name: str
    column: str
    phrase: str
    """The metric as the subject of a sentence."""
    digits: int = 3


COMPARED = (
    Metric("reward", "mean reward", "The mean reward over the run"),
    Metric("batches", "batches to 0.5", "The number of batches until the reward is 0.5", 1),
    Metric("entropy", "entropy at 0.5", "The entropy at a reward of 0.5"),
    Metric("end", "end", "The share of right answers at the end"),
)


@dataclass(frozen=True)
class Difference:
    """A metric of `RECOMMENDED` minus that of another method, over the seeds.

    Attributes:
        metric: The metric.
        other: The other method.
        interval: The difference with its interval; None if a seed has no value, such as a level never reached.
        higher: The number of seeds in which the value of `RECOMMENDED` is the higher one.
    """

    metric: Metric
    other: str
    interval: Interval | None
    higher: int

    @property
    def text(self) -> str:
        """The difference with its interval."""
        if self.interval is None:
            return "–"
        return signed(self.interval, self.metric.digits)

    @property
    def conclusion(self) -> str:
        """The conclusion: ``higher``, ``lower``, ``equal`` within 0.02 of reward, or ``not distinguished``."""
        if self.interval is None:
            return "not distinguished"
        word = verdict(self.interval)
        if word in ("gains", "loses"):
            return "higher" if word == "gains" else "lower"
        if word.startswith("equals") and self.metric.name in ("reward", "end"):
            return "equal"
        return "not distinguished"


def eight_seeds() -> dict[int, Outcomes]:
    """Return the metrics of the eight seeds of each method by the age of the data."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    outcomes: dict[int, Outcomes] = {}
    for lag, by_method in content["metrics"].items():
        metrics: dict[str, list[dict[str, float]]] = {}
        for method, runs in by_method.items():
            # A level that was never reached is null, which is NaN here.
            metrics[method] = [
                {name: math.nan if value is None else value for name, value in run.items()} for run in runs
            ]
        outcomes[int(lag)] = Outcomes(METHODS[0], metrics)
    return outcomes


def differences(outcomes: Outcomes) -> list[list[Difference]]:
    """Return `RECOMMENDED` minus each other method: a row for each, with one entry for each metric of `COMPARED`.

    The intervals of one metric contain all true differences with a probability of 95 %, as in `Comparison`.
    """
    rows: list[list[Difference]] = []
    for other in OTHERS:
        row: list[Difference] = []
        for metric in COMPARED:
            ours, theirs = outcomes.values(RECOMMENDED, metric.name), outcomes.values(other, metric.name)
            higher = sum(one > another for one, another in zip(ours, theirs, strict=True))
            row.append(
                Difference(metric, other, outcomes.difference(RECOMMENDED, metric.name, other), higher)
            )
        rows.append(row)
    return rows


def data_age(lag: int) -> str:
    """Return the age of the data in words.

    >>> data_age(4), data_age(0)
    ('data 4 batches old', 'fresh data')
    """
    return f"data {lag} batches old" if lag else "fresh data"


def conclusions(outcomes: Outcomes) -> list[str]:
    """Return a sentence for each metric, which says against which methods its interval excludes 0."""
    sentences: list[str] = []
    for column in zip(*differences(outcomes), strict=True):
        clauses: list[str] = []
        for conclusion, words in {
            "higher": f"higher under {RECOMMENDED} than under",
            "lower": f"lower under {RECOMMENDED} than under",
            "equal": "within 0.02 of that under",
            "not distinguished": "not distinguished from that under",
        }.items():
            names = [difference.other for difference in column if difference.conclusion == conclusion]
            if names:
                clauses.append(f"{words} {_listed(names)}")
        sentences.append(f"{column[0].metric.phrase} is {'; it is '.join(clauses)}.")
    return sentences


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def report() -> str:
    """Return the tables of the eight seeds, and the sentences that follow from them."""
    settings = Settings(METHODS[0])
    parts: list[str] = []
    by_lag = eight_seeds()
    for lag, outcomes in by_lag.items():
        rows = [
            [f"{RECOMMENDED} minus {row[0].other}", *(cell.text for cell in row)]
            for row in differences(outcomes)
        ]
        table = aligned([f"{SEEDS} seeds, {data_age(lag)}", *(metric.column for metric in COMPARED)], rows)
        sentences = "\n".join(f"- {sentence}" for sentence in conclusions(outcomes))
        parts.append(f"{table}\n{sentences}")
    parts.append(
        f"These are differences over {SEEDS} seeds, with {by_lag[LAGS[0]].intervals}, at one learning rate "
        f"({settings.rate:g}), in a network of 335,000 parameters on one task. Other settings and a larger model: "
        "docs/when.md."
    )
    return "\n\n".join(parts)
