"""What a study of networks says: rate curves, cross-fitted comparisons, and a verdict on each prediction.

Predictions stand in a Markdown table that is committed before the first run; `studies.network_report` makes a page.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from bandpo.audit.interval import Interval, bootstrap
from bandpo.errors import InvalidValue
from bandpo_lab.study.collect import WINDOW, RunResult
from bandpo_lab.study.statistics import Curve, Results, random_halves
from bandpo_lab.study.tables import signed

SMALLEST = 0.05
"""The smallest effect of interest, in AUC; for entropy, in nats."""
COLLAPSED = 0.02
"""Mean reward of the last three batches below which a run counts as collapsed; the base models start at about 0.05."""

CLIP, BAND = "clip 0.2", "Band"
ABOVE, BELOW = "Band above, clip below", "clip above, Band below"
LEARNING = ("paper", "plenty", "active")
"""The worlds in which a rare strategy is rewarded from start to end, as in the rare-arm tables of the map."""


class Prediction(NamedTuple):
    """One arm against another in one world."""

    world: str
    arm: str
    minus: str
    metric: str
    expects: str
    """``greater`` or ``less`` by at least `SMALLEST`, or ``equal`` to within it."""

    def __str__(self) -> str:
        expected = (
            f"equal to within {SMALLEST}"
            if self.expects == "equal"
            else f"{self.expects} by at least {SMALLEST}"
        )
        return f"in “{self.world}”, {self.metric} of “{self.arm}” against “{self.minus}” is {expected}"


def read_predictions(file: Path) -> list[Prediction]:
    """The rows of a page's table of predictions: world, arm, against, metric, expected, why.

    Raises:
        ValueError: there is none, or one expects something else than ``greater``, ``less`` or ``equal``.
    """
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", file.read_text(), re.M)]
    found = [Prediction(*row[:5]) for row in rows if len(row) == 6 and row[0] != "world"]
    if not found or {p.expects for p in found} - {"greater", "less", "equal"}:
        raise InvalidValue(f"{file} has no table of predictions: greater, less or equal")
    return found


class Effect(NamedTuple):
    """A difference between two arms of one world, of interquartile means."""

    interval: Interval
    improved: float
    """Probability that a run of the first arm beats a run of the second."""

    def __str__(self) -> str:
        return signed(self.interval)


def verdict(difference: Interval, expects: str) -> str:
    """``held``, ``failed`` or ``undecided``: what a difference says of a prediction.

    >>> verdict(Interval(0.1, 0.02, 0.2), "greater"), verdict(Interval(0.01, -0.03, 0.04), "greater")
    ('held', 'failed')
    >>> verdict(Interval(0.1, -0.02, 0.2), "greater"), verdict(Interval(0.1, 0.06, 0.2), "equal")
    ('undecided', 'failed')
    """
    inside = difference.low > -SMALLEST and difference.high < SMALLEST
    if expects == "equal":
        beyond = difference.low > SMALLEST or difference.high < -SMALLEST
        return "held" if inside else "failed" if beyond else "undecided"
    sign = 1 if expects == "greater" else -1
    nearest, farthest = sorted((sign * difference.low, sign * difference.high))
    if nearest > 0 and sign * difference.value >= SMALLEST:
        return "held"
    return "failed" if inside or farthest < 0 else "undecided"


def progress(found: Results) -> dict[str, tuple[int, int]]:
    """For each world with a rate curve: how many of its runs have ended, and how many there are to be."""
    experiments = found.study.experiments
    planned = Counter(e.world for run in found.study.reported({}) if (e := experiments[run.experiment]).point)
    ended = Counter(experiments[run.experiment].world for run in found.runs)
    return {world: (ended[world], count) for world, count in planned.items()}


class OnCurve(NamedTuple):
    """A run of one world's rate curve."""

    world: str
    rate: float
    run: RunResult


def on_curves(*studies: Results) -> list[OnCurve]:
    """The runs of rate curves, of worlds of which every run has ended: the others are not looked at before.

    Further seeds of a study are a study of their own.
    """
    runs: list[OnCurve] = []
    for found in studies:
        whole = {world for world, (ended, planned) in progress(found).items() if ended == planned}
        for run in found.runs:
            e = found.study.experiments[run.experiment]
            if e.world in whole:
                runs.append(OnCurve(e.world, e.point["learning_rate"], run))
    return runs


def curves(runs: Sequence[OnCurve], world: str, metric: str) -> dict[str, Curve]:
    """Each arm of a world, over learning rates."""
    found: dict[str, dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for there, rate, run in runs:
        if there == world:
            found[run.arm][rate][run.seed] = run.metric(metric)
    return {
        arm: Curve(
            sorted(by_rate), np.array([[by_rate[r][s] for s in sorted(by_rate[r])] for r in sorted(by_rate)])
        )
        for arm, by_rate in found.items()
    }


def interquartile_mean(values: np.ndarray, axis: int = -1) -> Any:
    """The mean of the middle half."""
    return stats.trim_mean(values, 0.25, axis=axis)


def effect(ours: np.ndarray, theirs: np.ndarray) -> Effect:
    """Interquartile means apart, with a percentile bootstrap over seeds; seeds are drawn in pairs."""

    def apart(x: np.ndarray, y: np.ndarray, axis: int = -1) -> Any:
        return interquartile_mean(x, axis) - interquartile_mean(y, axis)

    wins = stats.mannwhitneyu(ours, theirs).statistic / (len(ours) * len(theirs))
    return Effect(bootstrap([ours, theirs], apart, paired=True), float(wins))


def at_best_rates(runs: Sequence[OnCurve], world: str, metric: str) -> dict[str, np.ndarray]:
    """For each arm of a world its metric, one score a seed, cross-fitted at the rate that is best for the arm's AUC."""
    auc = curves(runs, world, "AUC")
    return {
        arm: curve.cross_fitted(random_halves(curve.scores.shape[1]), by=auc[arm])
        for arm, curve in curves(runs, world, metric).items()
    }


def effects(runs: Sequence[OnCurve], predictions: Sequence[Prediction]) -> dict[Prediction, Effect]:
    """Every prediction about a world of which all runs have ended, with the effect that was measured."""
    worlds = {run.world for run in runs}
    scores = {(p.world, p.metric): at_best_rates(runs, p.world, p.metric) for p in predictions}
    return {
        p: effect(scores[p.world, p.metric][p.arm], scores[p.world, p.metric][p.minus])
        for p in predictions
        if p.world in worlds
    }


SIDES = {
    "upper, over clip": ([ABOVE], [CLIP]),
    "upper, over Band": ([BAND], [BELOW]),
    "upper, mean": ([ABOVE, BAND], [CLIP, BELOW]),
    "lower, under clip": ([BELOW], [CLIP]),
    "lower, under Band": ([BAND], [ABOVE]),
    "lower, mean": ([BELOW, BAND], [CLIP, ABOVE]),
}
"""The sides of Band in place of clip 0.2's, with each kind of other side and over both: arms minus other arms."""


def sides(runs: Sequence[OnCurve], world: str, metric: str = "AUC") -> dict[str, Effect]:
    """What each side of Band does in a world, each arm at the rate that is best for its AUC; empty without the arms."""
    scores = at_best_rates(runs, world, metric)

    def mean(arms: Sequence[str]) -> np.ndarray:
        return np.mean([scores[arm] for arm in arms], axis=0)

    if not {CLIP, BAND, ABOVE, BELOW} <= scores.keys():
        return {}
    return {name: effect(mean(ours), mean(theirs)) for name, (ours, theirs) in SIDES.items()}


def collapsed(run: RunResult) -> bool:
    """Whether a run ended below what it began with; counted, never dropped."""
    rewards = [reward or 0.0 for reward in run.curves["reward"]]
    return sum(rewards[-WINDOW:]) / WINDOW < COLLAPSED


def entropy_at_half(run: RunResult) -> float | None:
    """Entropy in the batch in which reward first reached a half: compared at matched reward. None if it never did."""
    half = int(run.metric("batches to half"))
    return run.curves["entropy"][half - 1] if half <= len(run.curves["reward"]) else None


def metric_of(world: str, predictions: Sequence[Prediction]) -> str:
    """What a world is about: what is predicted of it, else AUC."""
    return next((p.metric for p in predictions if p.world == world), "AUC")
