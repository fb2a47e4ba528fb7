"""Find the first step at which the metrics of two logs part by more than runs of the same settings do.

Runs with other seeds draw other answers, and learn earlier or later. So each metric is smoothed over a window of a
tenth of the steps, and a curve is compared with all values that the other one has at most 35 % of the steps before or
after. A metric has parted if, for a whole window of steps,

- each of the two curves is outside of these values of the other one, or
- one curve is on the wrong side of the other one: below all of these values although the other curve does not fall from
  its first to its last third, or above them although it does not rise;

in either case by more than LIMIT · noise / √window. The noise is the standard deviation of the difference of the two
runs at one step. It is computed from the changes from step to step of both runs up to this step: the root of half of
their mean square.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest, nsmallest
from itertools import pairwise
from operator import attrgetter
from statistics import fmean, stdev
from typing import Any

from rlvet._numbers import format_number, format_step
from rlvet.checks.course import Course, Series, end_means, noise_of_differences, running_means
from rlvet.checks.registry import LOGS
from rlvet.errors import InvalidValue
from rlvet.runs.quantities import EVALUATION, QUANTITIES, Row, component_name, plain_key
from rlvet.runs.summary import student_quantile

LIMIT = 10.0
"""Standard errors of the distance of two smoothed curves from which they part. It was chosen on half of the settings of
the runs in ``research/results``, see research/reports/rlvet/how-right.md."""
SHIFT = 0.35
"""Share of the steps by which one run may be ahead of the other."""
FEWEST_APART = 8
"""Number of common steps from which it is told that all values of one log are above all of the other: by chance, one of
6,435 pairs of logs without a trend has them so."""

FEWEST_STEPS = 20
"""Number of common steps of a metric below which it is not compared."""

RESULTS = ("reward", EVALUATION)
"""Metrics that are effects of all others, which come last."""
SPEED = ("memory", "step_time")
"""Metrics of memory and time, which are not compared."""


@dataclass(frozen=True)
class MetricDifference:
    """A metric that parts in two runs."""

    name: str
    """A quantity of `rlvet.runs.quantities.QUANTITIES`, or the key of a reward component."""
    step: float
    """The first step at which it has parted."""
    a: float
    """The mean of the first run over the window from there on."""
    b: float
    """The mean of the second run."""
    noise: float
    """The standard deviation of the difference of the two runs at one step."""
    largest: tuple[float, float] | None = None
    """The largest values of the two runs, of a learning rate, which parts while it is warmed up."""
    ends: tuple[float, float] | None = None
    """The means of the two runs over the last window of the common steps, where they need not be apart any more."""
    disjoint_from: float | None = None
    """The step from which on no value is in common, if that is before the step at which it has parted."""

    def __str__(self) -> str:
        text = (
            f"{self.name} from step {format_step(self.step)}: {pair_text(self.a, self.b)} "
            f"(noise of a step {format_number(self.noise, 2)})"
        )
        if self.ends is not None:
            text = f"{text}, at the end {pair_text(*self.ends)}"
        if self.disjoint_from is not None:
            text = f"{text}, no value in common from step {format_step(self.disjoint_from)} on"
        if self.largest is None:
            return text
        return f"{text}, largest {pair_text(*self.largest)}"

    def as_json(self) -> dict[str, Any]:
        """Return the difference as a dictionary for JSON."""
        return {"name": self.name, "step": self.step, "a": self.a, "b": self.b, "noise": self.noise}


FAR_APART = 10.0
"""Ratio of the means at the end from which a metric that does not part by the rule is listed apart from the others."""


def pair_text(a: float, b: float) -> str:
    """Return a number of each of two runs.

    >>> pair_text(0.5, 0.25)
    '0.5 | 0.25'
    """
    return f"{format_number(a)} | {format_number(b)}"


def courses_text(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return the change of a metric from the start to the end of each of two runs.

    >>> courses_text((0.5, 0.5), (0.25, 0.75))
    '0.5 → 0.25 | 0.5 → 0.75'
    """
    changes = [
        f"{format_number(before)} → {format_number(after)}" for before, after in zip(start, end, strict=True)
    ]
    return " | ".join(changes)


BLOCKS = 10
"""Number of blocks of consecutive steps whose means tell the error of a mean. Values of neighbouring steps are alike,
so that single steps would make it too small."""


@dataclass(frozen=True)
class MeanDifference:
    """The means of a metric of two logs over their common steps, with a 95 % interval of the difference."""

    name: str
    """A quantity of `rlvet.runs.quantities.QUANTITIES`, or a logged key."""
    a: float
    """The mean of the first run."""
    b: float
    """The mean of the second run over the same steps."""
    low: float
    """The lower end of the interval of A − B."""
    high: float
    """The upper end."""
    first: float
    """The first common step."""
    last: float
    """The last common step."""
    steps: int
    """The number of common steps."""
    starts: tuple[float, float]
    """The means of the two runs over the first window."""
    ends: tuple[float, float]
    """The means over the last window."""

    @classmethod
    def of(cls, name: str, steps: Sequence[float], a: Sequence[float], b: Sequence[float]) -> MeanDifference:
        """Compute the difference, and its error from the means of `BLOCKS` blocks of consecutive steps.

        Args:
            name: The metric.
            steps: The common steps, (n,) with n of at least `FEWEST_STEPS`.
            a: The values of the first run, (n,).
            b: The values of the second run, (n,).

        >>> reward = MeanDifference.of("reward", range(20), [0.5, 0.7] * 10, [0.4, 0.2] * 10)
        >>> round(reward.low, 3), round(reward.high, 3), reward.higher
        (0.3, 0.3, 'A')
        """
        n = len(steps)
        differences = [first - second for first, second in zip(a, b, strict=True)]
        ends = [n * block // BLOCKS for block in range(BLOCKS + 1)]
        means = [fmean(differences[start:end]) for start, end in pairwise(ends)]
        half_width = student_quantile(BLOCKS - 1) * stdev(means) / math.sqrt(BLOCKS)
        mean = fmean(differences)
        window = window_of(n)
        return cls(
            name,
            a=fmean(a),
            b=fmean(b),
            low=mean - half_width,
            high=mean + half_width,
            first=steps[0],
            last=steps[-1],
            steps=n,
            starts=(fmean(a[:window]), fmean(b[:window])),
            ends=(fmean(a[-window:]), fmean(b[-window:])),
        )

    @property
    def higher(self) -> str:
        """``A`` or ``B``, the run whose mean is surely higher; empty if the interval has 0 in it."""
        # Means of equal values differ by rounding.
        rounding = 1e-9 * max(abs(self.a), abs(self.b))
        if self.low > rounding:
            return "A"
        return "B" if self.high < -rounding else ""

    def __str__(self) -> str:
        low, high = (format_number(end, 2) for end in (self.low, self.high))
        steps = f"{self.steps} of them, {format_step(self.first)} to {format_step(self.last)}"
        verdict = (
            f"surely higher in {self.higher} of these two runs, though another seed may change it"
            if self.higher
            else "not sure which is higher"
        )
        if self.a == self.b and self.low == self.high:
            verdict = "equal at each step"
        courses = courses_text(self.starts, self.ends)
        means = pair_text(self.a, self.b)
        window = window_of(self.steps)
        return (
            f"{self.name} {courses} (A | B, means of the first {window} → of the last {window} common log steps), and "
            f"over all {steps}, {means}: "
            f"A − B is {format_number(self.a - self.b)}, 95 % interval {low} to {high}, {verdict}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the difference as a dictionary for JSON."""
        return {
            "a": self.a,
            "b": self.b,
            "interval": [self.low, self.high],
            "first": self.first,
            "last": self.last,
            "steps": self.steps,
        }


@dataclass(frozen=True)
class FarthestSteps:
    """The steps in which a metric of two logs is farthest apart, in means over as many log steps as a window has."""

    first: float
    """The first of these steps."""
    last: float
    """The last one."""
    a: float
    """The mean of the first run over them."""
    b: float
    """The mean of the second run."""

    def __str__(self) -> str:
        steps = f"from step {format_step(self.first)} to {format_step(self.last)}"
        return f"farthest apart {steps}, beyond the noise ({pair_text(self.a, self.b)})"


@dataclass(frozen=True)
class DisjointEnd:
    """The last common steps of a metric of two logs, from the first one on from which no value is in common."""

    first: float
    """The first of these steps."""
    a: float
    """The mean of the first run over them."""
    b: float
    """The mean of the second run."""

    def __str__(self) -> str:
        return f"no value in common from step {format_step(self.first)} on ({pair_text(self.a, self.b)})"


def disjoint_end(steps: Sequence[float], a: Sequence[float], b: Sequence[float]) -> DisjointEnd | None:
    """Return the longest end of two curves without a value in common; None if it has fewer than `FEWEST_APART` steps.

    Args:
        steps: The common steps, (n,).
        a: The values of the first run, (n,).
        b: The values of the second run, (n,).

    >>> str(disjoint_end(range(20), [0.5] * 20, [0.9] + [0.4, 0.6] * 5 + [0.2] * 9))
    'no value in common from step 11 on (0.5 | 0.2)'
    """
    start = len(steps)
    lows, highs = [math.inf, math.inf], [-math.inf, -math.inf]
    for row in reversed(range(len(steps))):
        for run, values in enumerate((a, b)):
            lows[run] = min(lows[run], values[row])
            highs[run] = max(highs[run], values[row])
        if not (lows[0] > highs[1] or lows[1] > highs[0]):
            break
        start = row
    if len(steps) - start < FEWEST_APART:
        return None
    return DisjointEnd(steps[start], fmean(a[start:]), fmean(b[start:]))


FARTHEST_ERRORS = 4.0
"""Standard errors of the difference of two such means above which it is told. It is the largest of all windows."""


def farthest_steps(steps: Sequence[float], a: Sequence[float], b: Sequence[float]) -> FarthestSteps | None:
    """Return the steps in which two curves are farthest apart; None if that is not beyond the noise of single steps.

    Args:
        steps: The common steps, (n,).
        a: The values of the first run, (n,).
        b: The values of the second run, (n,).

    >>> str(farthest_steps(range(100), [0.5, 0.6] * 50, [0.5, 0.6] * 25 + [0.1] * 10 + [0.5, 0.6] * 20))
    'farthest apart from step 50 to 59, beyond the noise (0.55 | 0.1)'
    """
    window = window_of(len(steps))
    curves = [running_means(values, window) for values in (a, b)]
    distances = [abs(first - second) for first, second in zip(*curves, strict=True)]
    start = distances.index(max(distances))
    noise = _noises(a, b, window)[-1] / math.sqrt(window)
    # Means of equal values differ by rounding.
    if distances[start] <= FARTHEST_ERRORS * noise + 1e-9 * max(map(abs, (*a, *b))):
        return None
    return FarthestSteps(steps[start], steps[start + window - 1], curves[0][start], curves[1][start])


@dataclass(frozen=True)
class MetricMeans:
    """The means of a metric at the end of the common steps of two logs."""

    name: str
    """A quantity of `rlvet.runs.quantities.QUANTITIES`, or a logged key."""
    a: float
    """The mean of the first run over the last window."""
    b: float
    """The mean of the second run."""
    overlaps: bool = False
    """True if a few values of one run are not above all of the other."""
    whole: MeanDifference | None = None
    """The means over all common steps with the interval of their difference; None if they are not told."""
    starts: tuple[float, float] | None = None
    """The means of the two runs over the first of few common steps; None if they are not told, or in ``whole``."""
    farthest: FarthestSteps | None = None
    """The steps in which the two runs are farthest apart; None if that is within the noise, or not told."""
    disjoint_end: DisjointEnd | None = None
    """The last steps without a value in common; None if they are fewer than `FEWEST_APART`, or not told."""

    @property
    def zero_at_end(self) -> str:
        """``A`` or ``B``, the run whose mean is 0 at the end, if the other one's is not; else empty."""
        if bool(self.a) == bool(self.b):
            return ""
        return "B" if self.a else "A"

    @property
    def is_far(self) -> bool:
        """True if one mean is `FAR_APART` times the other, or more, and neither is 0, which has no ratio.

        >>> [MetricMeans("grad_norm", *ends).is_far for ends in ((7e-5, 1.03), (2.3, 1.4), (0, 0.01))]
        [True, False, False]
        """
        small, large = sorted((abs(self.a), abs(self.b)))
        return small > 0 and large >= FAR_APART * small

    @property
    def is_sure(self) -> bool:
        """True if the means over all common steps surely differ."""
        return self.whole is not None and bool(self.whole.higher)

    def __str__(self) -> str:
        starts = self.starts if self.whole is None else self.whole.starts
        if starts is None:
            return f"{self.name} {pair_text(self.a, self.b)}"
        return f"{self.name} {courses_text(starts, (self.a, self.b))}"

    def differences(self, *, has_means: bool = True) -> list[str]:
        """Return clauses on what differs of a metric that is not told apart, the most telling first.

        Args:
            has_means: False to leave out the means over all common steps, where they are told elsewhere.
        """
        clauses = []
        if self.disjoint_end is not None:
            clauses.append(str(self.disjoint_end))
        if self.farthest is not None:
            clauses.append(str(self.farthest))
        if self.whole is not None and self.is_sure and has_means:
            means = pair_text(self.whole.a, self.whole.b)
            clauses.append(f"means over the {self.whole.steps} common log steps surely differ ({means})")
        if self.is_far:
            clauses.append(f"{FAR_APART:g} times apart or more at the end")
        if self.zero_at_end and clauses:
            clauses.append(f"0 at the end of {self.zero_at_end}")
        return clauses

    def as_json(self) -> dict[str, Any]:
        """Return the means as a dictionary for JSON."""
        return {"name": self.name, "a": self.a, "b": self.b}


@dataclass(frozen=True)
class LogComparison:
    """The metrics of two logs that part, those that are apart at all steps, and those that are not told apart."""

    parted: Sequence[MetricDifference] = ()
    """The metrics that part, the earliest first; those of one step with causes before their effects."""
    apart: Sequence[MetricMeans] = ()
    """Other metrics of which all values of one run are above all of the other, results first."""
    not_told_apart: Sequence[MetricMeans] = ()
    """The metrics that do neither."""
    short: Sequence[str] = ()
    """The metrics with fewer common steps than `FEWEST_STEPS`."""
    last_values: Mapping[str, str] = field(default_factory=dict)
    """The values of the shortest of these at their last common step, each with the step."""
    is_equal: bool = False
    """True if all metrics that both logs have are equal in all common steps."""
    few: Sequence[MetricMeans] = ()
    """The short metrics with `FEWEST_APART` common steps or more, with means of the first and of the last of them."""
    of_ends: Sequence[MetricMeans] = ()
    """The metrics of logs whose steps are not compared, with means of the first and the last tenth of their rows."""
    ends: str = ""
    """What these rows are of."""
    reason: str = ""
    """Why the steps of the logs are not compared; empty if they are."""
    only_a: Sequence[str] = ()
    """The metrics that only the first log has."""
    only_b: Sequence[str] = ()
    """The metrics that only the second log has."""
    window: int = 0
    """The largest number of steps over which a mean is taken; 0 if no metric has `FEWEST_STEPS` common steps."""
    notes: Sequence[str] = ()
    """Sentences about what was compared."""
    reward: MeanDifference | None = None
    """The difference of the reward; None if the reward parts, or is short."""
    components: str = ""
    """A sentence on components of the reward that one run alone has; empty if both have the same, or a log has none."""
    from_start: Sequence[str] = ()
    """The metrics that part at their first common step, of two logs that begin at the same step."""
    before_updates: Sequence[str] = ()
    """The metrics that differ at the first step of both runs, before any update of the weights."""
    alike_but_for_reward: Sequence[str] = ()
    """The metrics of answers that are equal at the first step of both runs, if the reward is not."""
    steps_an_epoch: tuple[float | None, float | None] = (None, None)
    """The number of steps in an epoch of each run; None for one whose log does not tell it."""

    @property
    def differs(self) -> bool:
        """True if a metric parts, or has no value in common."""
        return bool(self.parted or self.apart)

    @property
    def surely_higher(self) -> str:
        """``A`` or ``B``, the run whose reward does not part but is surely higher; empty without one."""
        return "" if self.reward is None else self.reward.higher

    @property
    def disjoint_at_end(self) -> list[MetricMeans]:
        """The metrics that are not told apart, but have no value in common from a step on."""
        return [one for one in self.not_told_apart if one.disjoint_end is not None]

    @property
    def text_of_ends(self) -> str:
        """The means of the ends of each log, if its steps are not compared; else empty."""
        if not self.of_ends:
            return ""
        metrics = ", ".join(map(str, self.of_ends))
        return f"means of the first tenth → of the last tenth of {self.ends} (A | B): {metrics}"

    @property
    def earliest(self) -> list[MetricDifference]:
        """The metrics that part first, all from one step; empty if none parts."""
        return [one for one in self.parted if one.step == self.parted[0].step]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as a dictionary for JSON."""
        return {
            "parted": [one.as_json() for one in self.parted],
            "apart": [one.as_json() for one in self.apart],
            "not_told_apart": [one.as_json() for one in self.not_told_apart],
            "short": list(self.short),
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "window": self.window,
            "notes": [*filter(None, [self.components, self.text_of_ends]), *self.notes],
            "reward": None if self.reward is None else self.reward.as_json(),
        }


OF_UPDATES = ("learning_rate", "kl_old", "clip", "clip_high", "clip_low")
"""Quantities of a step's updates, which also differ at the first step if the loss or the learning rate does."""

OF_ANSWERS = ("length", "length_max", "length_finished", "entropy")
"""Metrics of the answers of a step. If several are equal in all digits, so are the answers."""

FEWEST_ALIKE = 2
"""The number of these from which it is said."""


def metric_order() -> list[str]:
    """Return the quantities of a log, causes before effects: in the order of the findings of `rlvet diagnose`.

    >>> order = metric_order()
    >>> order.index("mismatch_kl") < order.index("cut") < order.index("reward")
    True
    """
    names: dict[str, None] = {}
    for kind in LOGS.kinds():
        names.update(dict.fromkeys(kind.evidence))
    names.update(dict.fromkeys(QUANTITIES))
    known = [name for name in names if name in QUANTITIES and name not in (*RESULTS, *SPEED)]
    return [*known, *RESULTS]


def compare_logs(
    a: Sequence[Row], b: Sequence[Row], *, left_out: Collection[str] = (), are_steps_counted: bool = False
) -> LogComparison:
    """Compare the metrics of two logs.

    Args:
        a: The rows of the first log, with the names of `QUANTITIES`.
        b: The rows of the second log.
        left_out: Quantities that are not compared, as they are of other things in the two logs.
        are_steps_counted: Whether a step is the number of a row, so that the first one may come after updates.

    Raises:
        ValueError: if no metric has enough common steps.

    >>> rows = [{"step": step, "reward": step % 2 / 10} for step in range(100)]
    >>> late = [{**row, "reward": row["reward"] + (row["step"] >= 50)} for row in rows]
    >>> [parted.step for parted in compare_logs(rows, late).parted]
    [50]
    """
    courses = (Course(a), Course(b))
    parted: list[MetricDifference] = []
    apart: list[MetricMeans] = []
    not_told_apart: list[MetricMeans] = []
    short: list[str] = []
    few: list[MetricMeans] = []
    last_values: dict[str, str] = {}
    are_equal: list[bool] = []
    only: tuple[list[str], list[str]] = ([], [])
    longest = 0
    numbers: dict[str, int] = {}
    reward = None
    from_start = []
    before_updates = []
    alike: list[str] = []
    has_other_reward = False
    has_other_answers = False
    first_step = a[0]["step"] if a[0]["step"] == b[0]["step"] else None
    components = (components_of(courses[0]), components_of(courses[1]))
    for name in [*metric_order(), *_shared_components(*components)]:
        if name in left_out:
            continue
        first, second = (course.series(name) for course in courses)
        if not first.values or not second.values:
            for names, series in zip(only, (first, second), strict=True):
                if series.values:
                    names.append(name)
            continue
        steps, values_a, values_b = aligned(first, second)
        are_equal.append(values_a == values_b)
        if len(steps) < FEWEST_STEPS:
            if len(steps) >= FEWEST_APART and have_no_value_in_common(values_a, values_b):
                apart.append(means_at_the_end(name, values_a, values_b))
                continue
            short.append(name)
            if len(steps) >= FEWEST_APART:
                few.append(means_of_few_steps(name, values_a, values_b))
            else:
                of_a, of_b = dict(first.points), dict(second.points)
                last = max(of_a.keys() & of_b.keys(), default=None)
                if last is not None:
                    last_values[name] = f"{pair_text(of_a[last], of_b[last])} at step {format_step(last)}"
            continue
        longest = max(longest, window_of(len(steps)))
        numbers[name] = len(steps)
        is_first = first_step is not None and first_step <= 1 and not are_steps_counted
        is_before_updates = is_first and name not in OF_UPDATES
        if is_before_updates and differ_at_first(values_a, values_b):
            before_updates.append(name)
        if is_before_updates and name in OF_ANSWERS:
            if values_a[0] != values_b[0]:
                has_other_answers = True
            elif len({*values_a}) > 1:
                alike.append(name)
        if is_before_updates and name == "reward" and values_a[0] != values_b[0]:
            has_other_reward = True
        difference = parting(name, steps, values_a, values_b)
        if difference is not None:
            parted.append(difference)
            if first_step is not None and difference.step == steps[0]:
                from_start.append(name)
        elif have_no_value_in_common(values_a, values_b, but_for=FEW_VALUES):
            overlaps = not have_no_value_in_common(values_a, values_b)
            end = disjoint_end(steps, values_a, values_b) if overlaps else None
            means_at_end = means_at_the_end(name, values_a, values_b)
            apart.append(replace(means_at_end, overlaps=overlaps, disjoint_end=end))
            if name == "reward":
                reward = MeanDifference.of(name, steps, values_a, values_b)
        else:
            means = MeanDifference.of(name, steps, values_a, values_b)
            not_told_apart.append(
                MetricMeans(
                    name,
                    *means.ends,
                    whole=means,
                    farthest=farthest_steps(steps, values_a, values_b),
                    disjoint_end=disjoint_end(steps, values_a, values_b),
                )
            )
            if name == "reward":
                reward = means
    if not (parted or apart or not_told_apart or few):
        spans = [f"{format_step(rows[0]['step'])} to {format_step(rows[-1]['step'])}" for rows in (a, b)]
        reason = f"A has the steps {spans[0]}, B {spans[1]}, and no metric has {FEWEST_APART} common ones"
        common = {row["step"] for row in a} & {row["step"] for row in b}
        if len(common) < FEWEST_AT_ENDS:
            return compare_ends(a, b, reason, left_out=left_out)
        first, second = ([row for row in rows if row["step"] in common] for rows in (a, b))
        return compare_ends(first, second, reason, of=f"the {len(common)} common steps", left_out=left_out)
    is_other_reward = has_other_reward and not has_other_answers
    # A sort keeps the order of causes and effects among metrics of one step.
    parted.sort(key=attrgetter("step"))
    apart.sort(key=lambda one: one.name not in RESULTS)
    steps_an_epoch = (steps_of_epoch(courses[0]), steps_of_epoch(courses[1]))
    return LogComparison(
        parted,
        apart,
        not_told_apart,
        short,
        last_values,
        all(are_equal),
        few,
        only_a=only[0],
        only_b=only[1],
        window=longest,
        notes=[*_notes_on_steps(numbers), *_notes_on_ends(a, b), *_notes_on_epochs(*steps_an_epoch)],
        reward=reward,
        components=_other_components(*components),
        from_start=from_start,
        before_updates=before_updates,
        alike_but_for_reward=alike if is_other_reward and len(alike) >= FEWEST_ALIKE else (),
        steps_an_epoch=steps_an_epoch,
    )


FEWEST_AT_ENDS = 3
"""Number of common steps from which the ends of these are compared, and not those of the logs."""


def compare_ends(
    a: Sequence[Row], b: Sequence[Row], reason: str, *, of: str = "each log", left_out: Collection[str] = ()
) -> LogComparison:
    """Compare two logs whose steps have too little in common by the first and the last tenth of their rows.

    Args:
        a: The rows of the first log.
        b: The rows of the second log.
        reason: Why their steps are not compared, in a clause.
        of: What the rows are of.
        left_out: Quantities that are not compared.

    Raises:
        ValueError: if no metric is in both.

    >>> rows = [{"step": step, "reward": step / 100} for step in range(100)]
    >>> later = [{"step": step, "reward": 1.0} for step in range(500, 600)]
    >>> [str(metric) for metric in compare_ends(rows, later, "no step is common").of_ends]
    ['reward 0.045 → 0.945 | 1 → 1']
    """
    courses = (Course(a), Course(b))
    components = (components_of(courses[0]), components_of(courses[1]))
    of_ends: list[MetricMeans] = []
    only: tuple[list[str], list[str]] = ([], [])
    for name in [*metric_order(), *_shared_components(*components)]:
        first, second = (course.series(name) for course in courses)
        if first.values and second.values and name not in left_out:
            starts = (first.first, second.first)
            of_ends.append(MetricMeans(name, first.last, second.last, starts=starts))
        for names, series, other in zip(only, (first, second), (second, first), strict=True):
            if series.values and not other.values:
                names.append(name)
    if not of_ends:
        raise InvalidValue(
            f"{reason}, and no metric is in both; `rlvet report A B` draws the two on one page"
        )
    return LogComparison(
        of_ends=of_ends,
        ends=of,
        only_a=only[0],
        only_b=only[1],
        reason=reason,
        components=_other_components(*components),
    )


def components_of(course: Course) -> dict[str, str]:
    """Return the key of each component of the reward, by its name.

    >>> components_of(Course([{"step": 1, "reward": 0.5, "rewards/format/mean": 0.2, "kl": 0.1}]))
    {'format': 'rewards/format/mean'}
    """
    names = {key: component_name(key) for key in course.names}
    return {name: key for key, name in names.items() if name is not None}


def _shared_components(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """Return the keys of the components that both runs have; none if it is one, which is the reward itself."""
    if len(a) == len(b) == 1:
        return []
    return [key for name, key in a.items() if b.get(name) == key]


def _other_components(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    """Return a sentence on components of the reward that one run alone has; empty if both log the same."""
    only = {"A": [name for name in a if name not in b], "B": [name for name in b if name not in a]}
    # A log without any component does not tell of which its reward is.
    if not a or not b or not any(only.values()):
        return ""
    clauses = [f"only {run} has {', '.join(names)}" for run, names in only.items() if names]
    return f"the rewards are of other components, and not comparable: {'; '.join(clauses)}"


FEW_VALUES = 0.05
"""Share of the values of each run that may be among those of the other, such as its first, or a spike."""


def have_no_value_in_common(a: Sequence[float], b: Sequence[float], *, but_for: float = 0.0) -> bool:
    """Return whether all values of one run are above all values of the other.

    Args:
        a: The values of the first run, (n,).
        b: The values of the second run, (n,).
        but_for: The share of the values of each run that may not be.

    >>> values = ([0.0] + [5.0] * 39, [0.0] + [1.0] * 39)
    >>> have_no_value_in_common(*values), have_no_value_in_common(*values, but_for=FEW_VALUES)
    (False, True)
    """
    place = 1 + int(but_for * len(a))
    low_a, low_b = (nsmallest(place, values)[-1] for values in (a, b))
    high_a, high_b = (nlargest(place, values)[-1] for values in (a, b))
    return low_a > high_b or low_b > high_a


FIRST_ERRORS = 4.0
"""Standard deviations of a difference by which two runs differ at their first step."""


def differ_at_first(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether the first values of two runs differ by more than the noise of a step.

    >>> differ_at_first([1.0] * 20, [0.25, 0.3] * 10), differ_at_first([0.2, 0.3] * 10, [0.25, 0.3] * 10)
    (True, False)
    """
    noise = math.hypot(noise_of_differences(a), noise_of_differences(b)) / math.sqrt(2)
    return abs(a[0] - b[0]) > FIRST_ERRORS * noise + 1e-9 * max(abs(a[0]), abs(b[0]))


def means_at_the_end(name: str, a: Sequence[float], b: Sequence[float]) -> MetricMeans:
    """Return the means of a metric of two runs over the last window of its common steps."""
    window = window_of(len(a))
    return MetricMeans(name, fmean(a[-window:]), fmean(b[-window:]))


FEW_AT_AN_END = 4
"""Number of steps at each end of a metric with few common steps of which the mean is told."""


def means_of_few_steps(name: str, a: Sequence[float], b: Sequence[float]) -> MetricMeans:
    """Return the means of a metric of two runs over the first and the last `FEW_AT_AN_END` of its common steps."""
    starts = (fmean(a[:FEW_AT_AN_END]), fmean(b[:FEW_AT_AN_END]))
    ends = (fmean(a[-FEW_AT_AN_END:]), fmean(b[-FEW_AT_AN_END:]))
    return MetricMeans(name, *ends, starts=starts)


def _notes_on_steps(numbers: Mapping[str, int]) -> list[str]:
    """Return a sentence on metrics with fewer common steps than others; none without any.

    Args:
        numbers: The number of steps at which both logs have a value of each metric.
    """
    most = max(numbers.values(), default=0)
    fewer = [f"{name} in {number}" for name, number in numbers.items() if number < most]
    if not fewer:
        return []
    text = f"of the {most} common log steps, both logs have a value in fewer: {', '.join(fewer)}"
    if numbers.get("length_finished", most) < most:
        text = f"{text}; a mean length of 0, where no answer is finished, is none"
    return [text]


def _notes_on_ends(a: Sequence[Row], b: Sequence[Row]) -> list[str]:
    """Return a sentence on the steps that only the longer of two logs has; none if they end alike."""
    ends = (a[-1]["step"], b[-1]["step"])
    if ends[0] == ends[1]:
        return []
    longer = "A" if ends[0] > ends[1] else "B"
    shared = {row["step"] for row in a} & {row["step"] for row in b}
    last, common = (format_step(end) for end in (max(ends), max(shared, default=min(ends))))
    return [f"the common steps end at {common}; {longer} goes on to {last}, and its end is not compared"]


EPOCH = re.compile(r"(^|/)epoch$|^training[_.]epoch$")
"""Keys of the number of passes over the data."""
SHORTEST_RANGE = 0.25
"""Epochs that a log has to go through. An epoch may be logged with two decimals."""
SAME_EPOCH = 0.05
"""Relative difference of two numbers of steps up to which they are taken for one, for the same reason."""


def steps_of_epoch(course: Course) -> float | None:
    """Return the number of steps in an epoch; None if the log does not tell it, or it changes.

    >>> steps_of_epoch(Course([{"step": step, "train/epoch": step / 30} for step in range(1, 100)]))
    30.0
    >>> steps_of_epoch(Course([{"step": step, "training/epoch": step // 30} for step in range(1, 100)]))
    30.0
    """
    for key in (key for key in course.names if EPOCH.search(plain_key(key))):
        points = list(course.series(key).points)
        if all(epoch == int(epoch) for _, epoch in points):
            # Of whole epochs only the steps at which one begins are known.
            points = [after for before, after in pairwise(points) if after[1] != before[1]]
        if len(points) < 2:
            continue
        (first, start), (last, end) = points[0], points[-1]
        if last <= first or end - start < SHORTEST_RANGE:
            continue
        of_epoch = (last - first) / (end - start)
        farthest = max(abs(start + (step - first) / of_epoch - epoch) for step, epoch in points)
        if farthest <= SAME_EPOCH * (end - start):
            return round(_within_rounding(points, of_epoch), 6)
    return None


ROUNDING_OF_EPOCH = 0.005
"""The largest error of an epoch that is logged with two decimals."""


def _within_rounding(points: Sequence[tuple[float, float]], of_epoch: float) -> float:
    """Return the number of steps in an epoch that all epochs with two decimals allow, or the given one.

    Args:
        points: Each step with its epoch.
        of_epoch: The number by the first and the last of them, which is kept if they allow it, or have other decimals.

    >>> round(_within_rounding([(step, round(step / 1255, 2)) for step in range(5, 400, 5)], 1234.0))
    1255
    """
    low = max(step / (epoch + ROUNDING_OF_EPOCH) for step, epoch in points)
    high = min(
        (step / (epoch - ROUNDING_OF_EPOCH) for step, epoch in points if epoch > ROUNDING_OF_EPOCH),
        default=math.inf,
    )
    is_rounded = all(round(epoch, 2) == epoch for _, epoch in points)
    if not is_rounded or low <= of_epoch <= high or not low <= high < math.inf:
        return of_epoch
    return (low + high) / 2


def _notes_on_epochs(a: float | None, b: float | None) -> list[str]:
    """Return a sentence on the numbers of steps in an epoch; none if they are equal or one is not known."""
    if a is None or b is None or math.isclose(a, b, rel_tol=SAME_EPOCH):
        return []
    why = "data sets or batches of other sizes, or other numbers of passes over a batch"
    return [f"steps an epoch {pair_text(a, b)} (A | B): {why}"]


def aligned(first: Series, second: Series) -> tuple[list[float], list[float], list[float]]:
    """Return the steps at which two series are compared, and the values of both series at these steps.

    They are the steps at which both have a value. If these are less than half of the steps of the series that has fewer
    of them where both have any, they are its steps, and the other series has there its value of the last step before.

    >>> first = Course([{"step": step, "reward": step} for step in (1, 2, 3, 5, 6)]).series("reward")
    >>> aligned(first, Course([{"step": step, "reward": 10 * step} for step in (1, 3, 4, 5, 6)]).series("reward"))
    ([1, 3, 5, 6], [1, 3, 5, 6], [10, 30, 50, 60])
    >>> aligned(first, Course([{"step": step, "reward": 10 * step} for step in (1.5, 3.5, 5.5)]).series("reward"))
    ([1.5, 3.5, 5.5], [1, 3, 5], [15.0, 35.0, 55.0])
    >>> aligned(first, Course([{"step": step, "reward": 10 * step} for step in range(3, 90, 3)]).series("reward"))
    ([3, 6], [3, 6], [30, 60])
    """
    start = max(first.steps[0], second.steps[0])
    end = min(first.steps[-1], second.steps[-1])
    numbers = [(_count_between(one.steps, start, end), len(one.steps)) for one in (first, second)]
    if numbers[1] < numbers[0]:
        steps, values_b, values_a = aligned(second, first)
        return steps, values_a, values_b
    of_first, of_second = dict(first.points), dict(second.points)
    common = [step for step in first.steps if step in of_second]
    if 2 * len(common) >= numbers[0][0]:
        return common, [of_first[step] for step in common], [of_second[step] for step in common]
    steps: list[float] = []
    values: tuple[list[float], list[float]] = ([], [])
    for step, value in zip(first.steps, first.values, strict=True):
        position = bisect_right(second.steps, step) - 1
        if position < 0 or step > second.steps[-1]:
            continue
        steps.append(step)
        values[0].append(value)
        values[1].append(second.values[position])
    return steps, *values


def _count_between(steps: Sequence[float], start: float, end: float) -> int:
    """Return the number of steps, which are in order, from a start to an end."""
    return bisect_right(steps, end) - bisect_left(steps, start)


def parting(
    name: str, steps: Sequence[float], a: Sequence[float], b: Sequence[float]
) -> MetricDifference | None:
    """Return where a metric of two runs parts, which is the first step if no value is in common; None if nowhere.

    Args:
        name: The name of the metric.
        steps: The steps, (n,).
        a: The values of the first run, (n,).
        b: The values of the second run, (n,).
    """
    difference = first_difference(name, steps, a, b)
    if difference is None:
        return None
    if have_no_value_in_common(a, b):
        # They are apart before their distance is above the noise.
        window = window_of(len(steps))
        difference = replace(difference, step=steps[0], a=fmean(a[:window]), b=fmean(b[:window]))
    end = disjoint_end(steps, a, b)
    if end is not None and end.first < difference.step:
        difference = replace(difference, disjoint_from=end.first)
    if name == "learning_rate":
        difference = replace(difference, largest=(max(a), max(b)))
    return difference


def _first_apart(a: Sequence[float], b: Sequence[float], start: int, end: int) -> int:
    """Return the first row of a window in which one run is above the other one as in its mean."""
    difference = fmean(a[start:end]) - fmean(b[start:end])
    return next((row for row in range(start, end) if (a[row] - b[row]) * difference > 0), start)


def first_difference(
    name: str, steps: Sequence[float], a: Sequence[float], b: Sequence[float]
) -> MetricDifference | None:
    """Return the first step at which a metric of two runs has parted; None if it does not part.

    Args:
        name: The name of the metric.
        steps: The steps, (n,).
        a: The values of the first run, (n,).
        b: The values of the second run, (n,).
    """
    n = len(steps)
    window = window_of(n)
    distances = _distances(a, b, window)
    noises = _noises(a, b, window)
    scale = max(map(abs, (*a, *b)))
    length = 0
    for start, (distance, noise) in enumerate(zip(distances, noises, strict=True)):
        # Of two constants, the sums of a window differ by rounding.
        is_apart = distance > LIMIT * noise / math.sqrt(window) + 1e-9 * scale
        length = length + 1 if is_apart else 0
        if length == min(window, len(distances)):
            row = _row_of_change(a, b, start - length + 1, window)
            end = min(n, row + window)
            row = _first_apart(a, b, row, end)
            ends = (fmean(a[-window:]), fmean(b[-window:]))
            return MetricDifference(name, steps[row], fmean(a[row:end]), fmean(b[row:end]), noise, ends=ends)
    return None


def window_of(n: int) -> int:
    """Return the number of steps over which curves of n steps are smoothed: a tenth of them, and at least 5."""
    return max(5, n // 10)


def _noises(a: Sequence[float], b: Sequence[float], window: int) -> list[float]:
    """Return the noise of two runs up to the end of each window; the first one is that of two windows."""
    squares = [0.0]
    for row in range(1, len(a)):
        squares.append(squares[-1] + (a[row] - a[row - 1]) ** 2 + (b[row] - b[row - 1]) ** 2)
    noises = []
    for start in range(len(a) - window + 1):
        last = min(len(a) - 1, max(start + window - 1, 2 * window - 1))
        noises.append(math.sqrt(squares[last] / last / 2))
    return noises


def _distances(a: Sequence[float], b: Sequence[float], window: int) -> list[float]:
    """Return for each window by how much the smoothed curves of two runs are outside of each other's values."""
    curves = (running_means(a, window), running_means(b, window))
    reach = max(1, int(SHIFT * len(a)))
    limits = [_limits_around(curve, reach) for curve in curves]
    trends = [_trend(values) for values in (a, b)]
    distances = []
    for start in range(len(curves[0])):
        outside = []
        wrong = []
        for own, other in ((0, 1), (1, 0)):
            value = curves[own][start]
            least, most = limits[other][start]
            below = least - value
            above = value - most
            outside.append(max(below, above, 0.0))
            wrong += [below] if trends[other] >= 0 else []
            wrong += [above] if trends[other] <= 0 else []
        distances.append(max(min(outside), *wrong))
    return distances


CLEAR_TREND = 3.0
"""Standard errors of the rise of a curve from which it has a trend."""


def _trend(values: Sequence[float]) -> int:
    """Return 1 for a curve that rises from its first to its last third, -1 for one that falls, and else 0."""
    before, after = end_means(values, 3)
    # The changes from step to step have twice the variance of a step, and so has the difference of two means.
    error = noise_of_differences(values) / math.sqrt(max(1, len(values) // 3))
    if abs(after - before) <= CLEAR_TREND * error:
        return 0
    return 1 if after > before else -1


def _limits_around(curve: Sequence[float], reach: int) -> list[tuple[float, float]]:
    """Return the smallest and the largest value of a curve around each of its points.

    Args:
        curve: The curve, (n,).
        reach: Number of points before and after that count.

    >>> _limits_around([0.0, 3.0, 1.0, 2.0], 1)
    [(0.0, 3.0), (0.0, 3.0), (1.0, 3.0), (1.0, 2.0)]
    """
    largest = _largest_around(curve, reach)
    smallest = _largest_around([-value for value in curve], reach)
    return [(-low, high) for low, high in zip(smallest, largest, strict=True)]


def _largest_around(curve: Sequence[float], reach: int) -> list[float]:
    """Return the largest value of a curve around each of its points, in linear time."""
    # The points that may still be the largest one of a later stretch, with falling values.
    candidates: deque[int] = deque()
    result = []
    end = 0
    for middle in range(len(curve)):
        while end < min(len(curve), middle + reach + 1):
            while candidates and curve[candidates[-1]] <= curve[end]:
                candidates.pop()
            candidates.append(end)
            end += 1
        if candidates[0] < middle - reach:
            candidates.popleft()
        result.append(curve[candidates[0]])
    return result


def _row_of_change(a: Sequence[float], b: Sequence[float], start: int, window: int) -> int:
    """Return the row within a window from which on the two curves are apart.

    It is the first row of the window at which their distance is more than half of that at its end.
    """
    sign = 1 if fmean(a[start : start + window]) > fmean(b[start : start + window]) else -1
    distances = [sign * (a[row] - b[row]) for row in range(start, start + window)]
    level = distances[-1] / 2 if start else -math.inf
    return next((start + offset for offset, distance in enumerate(distances) if distance > level), start)
