"""What the network study says: rate curves, cross-fitted comparisons, and a verdict on each prediction.

The predictions stand in network-predictions.md and, for the machine, in `PREDICTIONS`; `studies.network_report` makes
a page of it all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

from bandpo_lab.study.collect import WINDOW, Record, read_records
from bandpo_lab.study.plan import parse_study
from bandpo_lab.study.statistics import Interval
from bandpo_lab.study.tables import signed

SMALLEST = 0.05
"""The smallest effect of interest, in AUC; for entropy, in nats."""
SPLITS = 200
"""Random halves of the seeds by which learning rates are chosen and scored."""
COLLAPSED = 0.02
"""Mean reward of the last three batches below which a run counts as collapsed; the base models start at about 0.05."""

CLIP, BAND = "clip 0.2", "Band"
ABOVE, BELOW, ROOM = "Band above, clip below", "clip above, Band below", "no bound above, clip below"
MATCHED, MIRROR = "as wide as Band", "mirror above, clip below"

LEARNING = ("paper", "plenty", "active")
"""The worlds in which a rare strategy is rewarded from start to end, as in the rare-arm tables of the map."""


@dataclass(frozen=True)
class Prediction:
    """One arm against another in one world."""

    name: str
    world: str
    arm: str
    minus: str
    expects: Literal["greater", "less", "equal"]
    """``greater`` and ``less`` by at least `SMALLEST`; ``equal`` to within it."""
    metric: str = "AUC"


PREDICTIONS = (
    Prediction("the upper side helps where it can act", "active", ABOVE, CLIP, "greater"),
    Prediction("it does nothing in the paper's geometry", "paper", ABOVE, CLIP, "equal"),
    Prediction("Band's lower side hurts where the tail is scarce", "active", BAND, ABOVE, "less"),
    Prediction("what helps is room, not Band's shape", "active", ABOVE, ROOM, "equal"),
    Prediction("Band's place matters more than its width", "active", ABOVE, MIRROR, "greater"),
    Prediction("a clip that blocks as much does not do as well", "active", BAND, MATCHED, "greater"),
    Prediction("with more draws the upper side does nothing", "plenty", ABOVE, CLIP, "equal"),
    Prediction("the upper side helps after a switch", "two stages", ABOVE, CLIP, "greater"),
    Prediction("Band's lower side loses what the switch needs", "two stages", BAND, ABOVE, "less"),
    Prediction(
        "by itself the lower side spends entropy", "coin flips", BELOW, CLIP, "less", "entropy at end"
    ),
)

METRICS = {prediction.world: prediction.metric for prediction in PREDICTIONS}
"""What each world is about: entropy where nothing can be learned, else AUC."""


@dataclass(frozen=True)
class Effect(Interval):
    """A difference between two arms of one world, of interquartile means."""

    improved: float
    """Probability that a run of the first arm beats a run of the second."""

    def __str__(self) -> str:
        return signed(self)


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
    if nearest > 0 and sign * difference.mean >= SMALLEST:
        return "held"
    return "failed" if inside or farthest < 0 else "undecided"


@dataclass(frozen=True)
class Scored:
    """A run of one point of a world's rate curve."""

    world: str
    rate: float
    record: Record


def progress(results: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """For each world with a rate curve: how many of its runs have ended, and how many there are to be."""
    study = parse_study(results["study"])
    planned = Counter(e.world for run in study.reported({}) if (e := study.experiments[run.experiment]).point)
    ended = Counter(study.experiments[record.experiment].world for record in read_records(results))
    return {world: (ended[world], count) for world, count in planned.items()}


def scored(results: Mapping[str, Any], *more: Mapping[str, Any]) -> list[Scored]:
    """The runs of rate curves, of worlds of which every run has ended: the others are not looked at before.

    Args:
        results: Of the study.
        more: Of further seeds of it, each a study of its own.
    """
    if more:
        return [run for one in (results, *more) for run in scored(one)]
    experiments = parse_study(results["study"]).experiments
    whole = {world for world, (ended, planned) in progress(results).items() if ended == planned}
    return [
        Scored(e.world, e.point["learning_rate"], record)
        for record in read_records(results)
        if (e := experiments[record.experiment]).world in whole
    ]


@dataclass(frozen=True)
class Curve:
    """One arm of one world, over learning rates."""

    rates: Sequence[float]
    scores: np.ndarray
    """(rates, seeds)."""

    @property
    def best(self) -> int:
        """Place of the best rate."""
        return int(self.scores.mean(1).argmax())

    @property
    def interior(self) -> bool:
        """Whether a lower and a higher rate were tried than the best; if not, the grid must be extended."""
        return 0 < self.best < len(self.rates) - 1

    def cross_fitted(self, by: Curve | None = None) -> np.ndarray:
        """For each seed its mean score over the splits that score it, at the rate that is best on the other half.

        Args:
            by: The curve that chooses, if not this one: AUC chooses the rate at which entropy is read.
        """
        seeds, rng = self.scores.shape[1], np.random.default_rng(0)
        chooser = self if by is None else by
        sums, counts = np.zeros(seeds), np.zeros(seeds)
        for _ in range(SPLITS):
            shuffled = rng.permutation(seeds)
            choosing, scored = shuffled[: seeds // 2], shuffled[seeds // 2 :]
            sums[scored] += self.scores[chooser.scores[:, choosing].mean(1).argmax(), scored]
            counts[scored] += 1
        return sums / counts


def curves(runs: Sequence[Scored], metric: str) -> dict[tuple[str, str], Curve]:
    """For each world and arm its scores."""
    found: dict[tuple[str, str], dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        found[run.world, run.record.arm][run.rate][run.record.seed] = run.record.metric(metric)
    return {
        place: Curve(
            sorted(by_rate), np.array([[by_rate[r][s] for s in sorted(by_rate[r])] for r in sorted(by_rate)])
        )
        for place, by_rate in found.items()
    }


def interquartile_mean(values: np.ndarray, axis: int = -1) -> Any:
    """The mean of the middle half."""
    return stats.trim_mean(values, 0.25, axis=axis)


def effect(ours: np.ndarray, theirs: np.ndarray) -> Effect:
    """Interquartile means apart, with a percentile bootstrap over seeds; seeds are drawn in pairs."""

    def apart(x: np.ndarray, y: np.ndarray, axis: int = -1) -> Any:
        return interquartile_mean(x, axis) - interquartile_mean(y, axis)

    estimate = float(apart(ours, theirs))
    wins = stats.mannwhitneyu(ours, theirs).statistic / (len(ours) * len(theirs))
    if not np.ptp(ours - theirs):
        return Effect(estimate, estimate, estimate, float(wins))
    drawn: Any = stats.bootstrap(
        (ours, theirs), apart, paired=True, method="percentile", rng=np.random.default_rng(0)
    )
    low, high = map(float, drawn.confidence_interval)
    return Effect(estimate, low, high, float(wins))


def at_best_rates(runs: Sequence[Scored], world: str) -> dict[str, np.ndarray]:
    """For each arm of a world its metric, one score a seed, cross-fitted at the rate that is best for the arm's AUC."""
    auc, measured = curves(runs, "AUC"), curves(runs, METRICS[world])
    return {
        arm: curve.cross_fitted(by=auc[world, arm])
        for (place, arm), curve in measured.items()
        if place == world
    }


def effects(
    runs: Sequence[Scored], predictions: Sequence[Prediction] = PREDICTIONS
) -> list[tuple[Prediction, Effect]]:
    """Every prediction about a world of which all runs have ended, with the effect that was measured."""
    scores = {world: at_best_rates(runs, world) for world in {run.world for run in runs}}
    return [
        (p, effect(scores[p.world][p.arm], scores[p.world][p.minus]))
        for p in predictions
        if p.world in scores
    ]


SIDES = {
    "upper, over clip": ([ABOVE], [CLIP]),
    "upper, over Band": ([BAND], [BELOW]),
    "upper, mean": ([ABOVE, BAND], [CLIP, BELOW]),
    "lower, under clip": ([BELOW], [CLIP]),
    "lower, under Band": ([BAND], [ABOVE]),
    "lower, mean": ([BELOW, BAND], [CLIP, ABOVE]),
}
"""The sides of Band in place of clip 0.2's, with each kind of other side and over both: arms minus other arms."""


def sides(runs: Sequence[Scored], world: str) -> dict[str, Effect]:
    """What each side of Band does to the metric of one world, each arm at the rate that is best for its AUC."""
    scores = at_best_rates(runs, world)

    def mean(arms: Sequence[str]) -> np.ndarray:
        return np.mean([scores[arm] for arm in arms], axis=0)

    return {name: effect(mean(ours), mean(theirs)) for name, (ours, theirs) in SIDES.items()}


def summary(results: Mapping[str, Any], *more: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The worlds that have ended, in short: what `bandpo where` looks up.

    Each side's effect is a difference in AUC with its interval, the mean over both kinds of other side.
    """
    study, runs = parse_study(results["study"]), scored(results, *more)
    found = []
    for world in dict.fromkeys(run.world for run in runs if run.world in LEARNING):
        first = next(e for e in study.experiments.values() if e.world == world)
        options = {**study.options, **first.options}
        by_side = sides(runs, world)
        effects = {side: by_side[f"{side}, mean"] for side in ("upper", "lower")}
        found.append(
            {
                "world": world,
                "tail": float(options["model_name_or_path"].rpartition("-")[2]),
                "samples": options["per_device_train_batch_size"] * options["steps_per_generation"],
                "updates": options["num_iterations"] * options["steps_per_generation"],
                "seeds": len({run.record.seed for run in runs if run.world == world}),
            }
            | {side: [round(x, 3) for x in (e.mean, e.low, e.high)] for side, e in effects.items()}
        )
    return found


def profile(curve: Curve, thresholds: Sequence[float]) -> list[float]:
    """Performance profile: the share of runs, over rates and seeds, with a score above each threshold."""
    return [float((curve.scores > threshold).mean()) for threshold in thresholds]


def collapsed(record: Record) -> bool:
    """Whether a run ended below what it began with; counted, never dropped."""
    rewards = [reward or 0.0 for reward in record.curves["reward"]]
    return sum(rewards[-WINDOW:]) / WINDOW < COLLAPSED


def entropy_at_half(record: Record) -> float | None:
    """Entropy in the batch in which reward first reached a half: compared at matched reward. None if it never did."""
    half = int(record.metric("batches to half"))
    return record.curves["entropy"][half - 1] if half <= len(record.curves["reward"]) else None


def factorial(runs: Sequence[Scored], world: str) -> Any:
    """A world's metric on upper side × lower side × rate, by ordinary least squares with errors clustered by seed.

    Returns:
        The fit of statsmodels, of the four arms of the 2 × 2, with the rate in factors of 2 from the middle one, so
        that ``upper`` and ``lower`` are the effects there. Seeds are 4 or 8, and so are the clusters: few for these
        errors, which are then too small.
    """
    import pandas as pd
    import statsmodels.formula.api as smf

    sides = {CLIP: (0, 0), ABOVE: (1, 0), BELOW: (0, 1), BAND: (1, 1)}
    rows = [
        {
            "score": run.record.metric(METRICS[world]),
            "upper": sides[run.record.arm][0],
            "lower": sides[run.record.arm][1],
            "rate": np.log2(run.rate),
            "seed": run.record.seed,
        }
        for run in runs
        if run.world == world and run.record.arm in sides
    ]
    table = pd.DataFrame(rows)
    table["rate"] -= table["rate"].median()
    model = smf.ols("score ~ upper * lower * rate", data=table)
    return model.fit(cov_type="cluster", cov_kwds={"groups": table["seed"]})
