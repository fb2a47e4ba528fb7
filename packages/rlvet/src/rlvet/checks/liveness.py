"""Until which step each metric of a run lived: where it is missing, repeats one value, or has values of a dead run.

A run of dead rows is judged by how often and how long the metric was dead before, and not by its share of the run: five
dead rows after 2,000 live ones are as clear as five after 300. What is said of a row depends only on the rows before
it, so that more rows never take back a death. Only the standard library is needed.
"""

from __future__ import annotations

import bisect
import math
import operator
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby, islice, pairwise
from statistics import median
from typing import NamedTuple

from rlvet.checks.course import Course
from rlvet.runs.quantities import OTHER_MODEL_KEY, QUANTITIES, is_of_evaluation

FEWEST_LIVE = 12
"""Number of values of a metric that are taken as alive: a region of dead values is relative to these."""

HISTORY = 500
"""Number of the newest live values from which the region of dead values is computed."""

SHORTEST = 3
"""Number of dead rows below which nothing is said of a metric."""

SHORTEST_FROZEN = 5
"""The same for rows that repeat one value."""

EVIDENCE = math.log(10)
"""Logarithm of the number of courses, of which one has as many dead rows by chance, from which a streak counts."""

LOSS_KEY = re.compile(r"(^|/)(loss|(policy|pg|actor)_loss|(policy|actor)/loss|loss/mean)$")
"""Keys of the loss of the policy, which is no quantity."""

LOSS = "loss"
"""The name of the loss of the policy, whatever its key."""


class Streak(NamedTuple):
    """Consecutive rows in which a metric is dead."""

    name: str
    """The quantity, or `LOSS`."""
    state: str
    """``missing``, ``frozen``, ``low`` or ``high``."""
    first: int
    """The first dead row."""
    last: int
    """The last dead row."""
    rows: int
    """Number of rows that have the metric, or that lack it. Of a frozen one, also the row before the first repeated."""
    before: float
    """Median of the live values before."""
    value: float
    """Median of the dead values; NaN if they are missing."""
    evidence: float
    """Logarithm of the number of courses of which one has such a streak by chance."""
    lasts: bool
    """True if the metric is dead up to the last row."""


def loss_key(course: Course) -> str | None:
    """Return the key of the policy's loss; None if no row has one."""
    for name in course.names:
        if LOSS_KEY.search(name) and not OTHER_MODEL_KEY.search(name) and not is_of_evaluation(name):
            return name
    return None


# --- Dead values ---


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


LOST_REWARD = 0.15
"""Share of the usual reward up to which the reward is lost."""

ALL_GROUPS = 0.95
"""Share of groups with equal rewards, or of answers cut off, from which nothing can be learned."""

LARGEST_KL = 0.5
"""KL to the reference (nats per token) up to which the policy is not lost."""


def _dead_reward(ordered: Sequence[float]) -> tuple[float, float]:
    usual = median(ordered)
    if usual <= ordered[0]:
        return -math.inf, math.inf
    # The lowest reward that is possible is only known if it is 0; else the lowest so far takes its place.
    floor = min(0.0, ordered[0])
    return floor + LOST_REWARD * (usual - floor), math.inf


def _nearly_all(most_before: float) -> Callable[[Sequence[float]], tuple[float, float]]:
    def region(ordered: Sequence[float]) -> tuple[float, float]:
        usual = median(ordered)
        return -math.inf, max(ALL_GROUPS, usual + 0.6 * (1 - usual)) if usual <= most_before else math.inf

    return region


def _below(share: float) -> Callable[[Sequence[float]], tuple[float, float]]:
    def region(ordered: Sequence[float]) -> tuple[float, float]:
        usual = median(ordered)
        return (share * usual if usual > 0 else -math.inf), math.inf

    return region


def _above(factor: float, smallest: float) -> Callable[[Sequence[float]], tuple[float, float]]:
    def region(ordered: Sequence[float]) -> tuple[float, float]:
        return -math.inf, max(factor * abs(_quantile(ordered, 0.8)), smallest)

    return region


def _dead_gradient(ordered: Sequence[float]) -> tuple[float, float]:
    usual = median(ordered)
    if usual <= 0:
        return -math.inf, math.inf
    return 0.01 * usual, max(10 * usual, 3 * _quantile(ordered, 0.8))


REGIONS: dict[str, Callable[[Sequence[float]], tuple[float, float]]] = {
    "reward": _dead_reward,
    "dead": _nearly_all(0.85),
    "reward_std": _below(0.02),
    "cut": _nearly_all(0.5),
    "kl": _above(5.0, LARGEST_KL),
    "grad_norm": _dead_gradient,
    "entropy": _below(0.1),
    "length": _below(0.1),
    "mismatch_kl": _above(10.0, 0.05),
    "mismatch": _above(10.0, 0.1),
    "mismatch_probs": _above(10.0, 0.05),
}
"""For each quantity, a function that returns the largest value that is dead below, and the smallest that is dead above,
from its live values in order."""


def _states(values: Sequence[float], region: Callable[[Sequence[float]], tuple[float, float]]) -> list[int]:
    """Return −1 for each value that is dead below, 1 for one that is dead above, and 0 for one that is alive.

    The region is computed anew from the newest live values, after four rows at first and after 64 of a long log.
    """
    states = [0] * min(len(values), FEWEST_LIVE)
    live = NewestValues(values[:FEWEST_LIVE])
    start = FEWEST_LIVE
    while start < len(values):
        low, high = region(live.ordered())
        block = values[start : start + max(4, min(64, start // 16))]
        if low < min(block) and max(block) < high:
            states += [0] * len(block)
            live.add(block)
        else:
            block_states = [-1 if value <= low else 1 if value >= high else 0 for value in block]
            states += block_states
            live.add([value for value, state in zip(block, block_states, strict=True) if not state])
        start += len(block)
    return states


class NewestValues:
    """The newest `HISTORY` values.

    Args:
        values: The first values.

    >>> newest = NewestValues([0.3, 0.1])
    >>> newest.add([0.2])
    >>> newest.ordered()
    [0.1, 0.2, 0.3]
    """

    def __init__(self, values: Sequence[float]):
        # Blocks in their order, each with its values as they came and sorted. Python merges sorted parts in half the
        # time that it takes to sort them anew, which is most of what a long log takes.
        self._blocks: deque[tuple[Sequence[float], list[float]]] = deque()
        self._count = 0
        self.add(values)

    def add(self, values: Sequence[float]) -> None:
        """Add values."""
        self._blocks.append((values, sorted(values)))
        self._count += len(values)
        while self._count - len(self._blocks[0][0]) >= HISTORY:
            self._count -= len(self._blocks.popleft()[0])

    def ordered(self) -> list[float]:
        """Return the newest values in order."""
        oldest, oldest_sorted = self._blocks[0]
        surplus = max(0, self._count - HISTORY)
        newest = [*oldest[surplus:]] if surplus else [*oldest_sorted]
        for _, block in islice(self._blocks, 1, None):
            newest += block
        newest.sort()
        return newest


# --- Streaks ---


def _spans(flags: Sequence[bool | int]) -> list[tuple[int, int]]:
    """Return the first and the last row of each part in which flags are set; one row between two parts may lack it."""
    spans: list[tuple[int, int]] = []
    start = 0
    for is_set, group in groupby(flags, key=bool):
        end = start + sum(1 for _ in group)
        if is_set:
            if spans and start - spans[-1][1] == 2 and spans[-1][1] - spans[-1][0] >= SHORTEST:
                spans[-1] = (spans[-1][0], end - 1)
            else:
                spans.append((start, end - 1))
        start = end
    return spans


def _judged_spans(flags: Sequence[bool | int], shortest: int) -> list[tuple[int, int, float]]:
    """Return the spans that were longer than every one before, each with the logarithm of its evidence.

    The flags of earlier rows are taken for those of a chain with two states. By its rates, about
    ``(n + 1)·ρ^(rows − 1)`` spans as long are expected by chance, where n rows were flagged before and ρ is the rate at
    which a flagged row follows another.
    """
    spans = _spans(flags)
    if not any(last - first + 1 >= shortest for first, last in spans):
        return []
    counts = [0, *accumulate(map(bool, flags))]
    pairs = [0, 0, *accumulate(bool(a and b) for a, b in pairwise(flags))]
    judged = []
    longest = 0
    for first, last in spans:
        rows = last - first + 1
        if rows >= shortest and rows > longest:
            flagged = counts[first]
            rate = max((flagged + 1) / (first + 2), (pairs[first] + 1) / (flagged + 4))
            evidence = -math.log(flagged + 1) - (rows - 1) * math.log(rate)
            if evidence >= EVIDENCE:
                judged.append((first, last, evidence))
        longest = max(longest, rows)
    return judged


def _missing(name: str, rows: Sequence[int], values: Sequence[float], total: int) -> list[Streak]:
    """Return the streaks of rows without a metric that are more than twice as long as all before.

    Args:
        name: The quantity.
        rows: The rows that have it.
        values: Its values.
        total: Number of rows of the log.
    """
    streaks = []
    longest = 0
    for number, (before, after) in enumerate(pairwise([*rows, total]), 1):
        gap = after - before - 1
        if number >= SHORTEST and gap >= SHORTEST and gap > 2 * longest:
            live = median(values[max(0, number - HISTORY) : number])
            streaks.append(
                Streak(name, "missing", before + 1, after - 1, gap, live, math.nan, math.inf, after == total)
            )
        longest = max(longest, gap)
    return streaks


STOPPED_RATE = 0.05
"""Share of the largest learning rate from which a fall to 0 is none of a schedule."""

CONSTANT_BY_NATURE = (
    "learning_rate",
    "memory",
    "step_time",
    "length_max",
    "length_finished",
    "staleness",
    "staleness_max",
    "reward_max",
    "reward_min",
    "advantage_max",
    "advantage_min",
    "effective_samples",
)
"""Quantities that may have one value for a long time in a healthy run."""

FINE_AT_ANY_ZERO = ("staleness", "staleness_max", "reward_max", "reward_min", "advantage_min")
"""Quantities among them that may become 0 in a healthy run."""

FINE_AT_ZERO = (
    "dead",
    "cut",
    "clip",
    "clip_high",
    "clip_low",
    "kl_old",
    "mismatch",
    "mismatch_kl",
    "mismatch_probs",
)
"""Quantities that may stay 0 in a healthy run."""


OF_REAL_NUMBERS = ("kl", "kl_old", "entropy", "grad_norm", "mismatch", "mismatch_kl", "mismatch_probs", LOSS)
"""Quantities that repeat a value by chance only where they are logged with few digits."""

COARSE = 30
"""Number of units of the last digit up to which a rounded value repeats while what is rounded changes."""

MOST_DECIMALS = 4
"""The most digits after the point with which metrics are logged rounded."""


def _is_rounded(name: str, values: Sequence[float], value: float) -> bool:
    """Return whether a value repeats as its metric is logged with few digits, such as 0.008 with three decimals.

    Args:
        name: The quantity.
        values: All of its values.
        value: The value that repeats.
    """
    if name not in OF_REAL_NUMBERS or not value:
        return False
    decimals = range(MOST_DECIMALS + 1)
    digits = next((n for n in decimals if all(one == round(one, n) for one in values)), None)
    return digits is not None and abs(value) * 10**digits <= COARSE


def _frozen(name: str, rows: Sequence[int], values: Sequence[float]) -> list[Streak]:
    """Return the streaks of rows that repeat one value, of a metric that did not do so before."""
    is_rate = name == "learning_rate"
    is_constant = name in CONSTANT_BY_NATURE and not is_rate
    if len(values) < FEWEST_LIVE or (is_constant and (name in FINE_AT_ANY_ZERO or values[-1])):
        return []
    flags = [False, *map(operator.eq, values, values[1:])]
    if not any(flags):
        return []
    streaks = []
    for first, last, evidence in _judged_spans(flags, SHORTEST_FROZEN - 1):
        value = values[last]
        if first < SHORTEST_FROZEN or (not value and name in FINE_AT_ZERO):
            continue
        if _is_rounded(name, values, value):
            continue
        # A constant rate is usual, and so is one that falls to 0 by and by.
        if is_rate and (value or values[first - 2] <= STOPPED_RATE * max(values)):
            continue
        live = values[max(0, first - 1 - HISTORY) : first]
        lasts = last == len(values) - 1
        count = last - first + 2
        streaks.append(
            Streak(name, "frozen", rows[first], rows[last], count, median(live), value, evidence, lasts)
        )
    return streaks


def _out_of_range(name: str, rows: Sequence[int], values: Sequence[float]) -> list[Streak]:
    """Return the streaks of rows whose values are those of a dead run."""
    if name not in REGIONS or len(values) < FEWEST_LIVE + SHORTEST:
        return []
    states = _states(values, REGIONS[name])
    if not any(states):
        return []
    streaks = []
    for sign, state in ((-1, "low"), (1, "high")):
        for first, last, evidence in _judged_spans([one == sign for one in states], SHORTEST):
            live = [value for value, dead in zip(values[:first], states, strict=False) if not dead][-HISTORY:]
            value = median(values[first : last + 1])
            lasts = last == len(values) - 1
            count = last - first + 1
            streaks.append(
                Streak(name, state, rows[first], rows[last], count, median(live), value, evidence, lasts)
            )
    return streaks


def streaks_of(course: Course, name: str) -> list[Streak]:
    """Return the streaks in which a metric is dead, in the order of their kinds and rows.

    Args:
        course: The metrics.
        name: A quantity, or `LOSS`.

    >>> rows = [{"step": step, "reward": 0.5 + step % 7 / 100} for step in range(40)]
    >>> rows += [{"step": step, "reward": 0.0} for step in range(40, 46)]
    >>> [(streak.state, streak.first, streak.rows) for streak in streaks_of(Course(rows), "reward")]
    [('frozen', 41, 6), ('low', 40, 6)]
    """
    key = (loss_key(course) or LOSS) if name == LOSS else name
    values = course.series(key).values
    if not values:
        return []
    total = len(course.rows)
    rows = course.rows.numbers_of_rows(key)
    is_complete = len(values) == total or not course.has_a_row_for_each_step
    missing = [] if is_complete else _missing(name, rows, values, total)
    return [*missing, *_frozen(name, rows, values), *_out_of_range(name, rows, values)]


def streaks_by_name(course: Course) -> dict[str, list[Streak]]:
    """Return the streaks of each quantity of a course, and of its loss."""
    names = [*(name for name in QUANTITIES if name in course.names), LOSS]
    return {name: streaks_of(course, name) for name in names}


# --- The death of a run ---

FAMILIES = {
    "reward": "reward",
    "dead": "groups",
    "reward_std": "groups",
    "cut": "answers",
    "length": "answers",
    "kl": "policy",
    "entropy": "entropy",
    "grad_norm": "gradient",
    LOSS: "loss",
    "mismatch_kl": "engine",
    "mismatch": "engine",
    "mismatch_probs": "engine",
}
"""The metrics without which a run is dead, each with what it measures. Two of one family show one thing."""

TOGETHER = 5
"""Number of rows by which the streaks of two metrics may begin apart, and number of rows that both must have."""

ALONE = 10
"""Number of dead rows of the reward alone that are surely the death of a run. From `TOGETHER` on, they may be."""

CLEAR = math.log(3000)
"""Logarithm of the evidence that two metrics must have together."""

CLEAR_OF_ONE = math.log(200)
"""The same for one metric."""

LOW_REWARDS = 0.1
"""Share of the last rewards before a streak of another metric among which all of its own are if they are low."""

REWARDS_BEFORE = 100
"""Number of rewards before a streak with which those of its rows are compared."""

BEST_REWARD = 0.95
"""Mean of rewards between 0 and 1 from which a run cannot become better."""


class Death(NamedTuple):
    """Rows in which a run is dead: two metrics at once, or the reward alone for long."""

    streaks: Sequence[Streak]
    """The streaks, that of the reward first and then the clearest; one for each family."""
    first: int
    """The first dead row."""
    last: int
    """The last dead row."""
    lasts: bool
    """True if the run is dead up to its last row."""

    @property
    def rows(self) -> int:
        """Number of dead rows."""
        return self.last - self.first + 1

    @property
    def is_sure(self) -> bool:
        """True unless only the reward shows it, for a few rows."""
        return len(self.streaks) > 1 or self.streaks[0].rows >= ALONE


def deaths_of(course: Course, streaks: Mapping[str, Sequence[Streak]] | None = None) -> list[Death]:
    """Return the parts of a run in which it is dead, in their order.

    Args:
        course: The metrics.
        streaks: The value of `streaks_by_name`, if it is known.

    >>> rows = [{"step": step, "reward": 0.5 + step % 7 / 100, "grad_norm": 1 + step % 5} for step in range(40)]
    >>> rows += [{"step": step, "reward": 0.0, "grad_norm": 0.0} for step in range(40, 46)]
    >>> [(death.first, death.rows, death.lasts) for death in deaths_of(Course(rows))]
    [(40, 6, True)]
    """
    streaks = streaks_by_name(course) if streaks is None else streaks
    found = [streak for name in FAMILIES for streak in streaks.get(name, ())]
    found = [
        streak
        for streak in found
        if not _is_at_its_best(streak, course) and not is_usual_loss(streak, course, streaks)
    ]
    found += [low for streak in found for low in _low_reward(streak, course)]
    found.sort(key=lambda one: one.first)
    deaths: list[Death] = []
    while found:
        group = [one for one in found if one.first <= found[0].first + TOGETHER]
        death = _death_of(group, len(course.rows))
        if death is None:
            found = found[1:]
            continue
        if not deaths or death.first > deaths[-1].last:
            deaths.append(death)
        found = [one for one in found if one not in group]
    return deaths


def _death_of(streaks: Sequence[Streak], total: int) -> Death | None:
    """Return the death that streaks of one onset show; None if they show none."""
    by_family: dict[str, Streak] = {}
    # A metric may be low and repeat one value; the longer streak counts.
    for streak in sorted(streaks, key=lambda one: (-one.rows, one.first)):
        by_family.setdefault(FAMILIES[streak.name], streak)
    long = {family: one for family, one in by_family.items() if one.last - one.first + 1 >= TOGETHER}
    reward = long.get("reward")
    others = sorted((one for one in long.values() if one is not reward), key=lambda one: -one.evidence)
    ordered = [reward, *others] if reward is not None else others
    if len(ordered) >= 2 and sum(one.evidence for one in ordered) >= CLEAR:
        ends = sorted((one.last for one in ordered), reverse=True)
        # The run is dead as long as two of the metrics are.
        last = ends[1]
        first = reward.first if reward is not None else min(one.first for one in ordered[:2])
        lasts = sum(one.lasts for one in ordered) >= 2
        if last - first + 1 >= TOGETHER:
            return Death(ordered, first, total - 1 if lasts else last, lasts)
    return _death_of_reward([one for one in streaks if one.name == "reward"])


def _death_of_reward(streaks: Sequence[Streak]) -> Death | None:
    """Return the death that streaks of the reward show alone; None if they show none."""
    for streak in streaks:
        if streak.evidence < CLEAR_OF_ONE:
            continue
        if streak.state == "missing":
            is_lost = streak.rows >= TOGETHER
        elif streak.state == "low":
            is_lost = streak.rows >= TOGETHER and streak.before > 0 <= streak.value
        else:
            # The smallest reward of a run with negative rewards is not known, so it must repeat one value for long.
            is_lost = streak.rows >= ALONE
        if is_lost:
            return Death([streak], min(one.first for one in streaks), streak.last, streak.lasts)
    return None


def _low_reward(streak: Streak, course: Course) -> list[Streak]:
    """Return the rewards in the rows of another metric's streak as one of their own, if all of them are low."""
    reward = course.series("reward").values
    is_clear = streak.rows >= TOGETHER and streak.evidence >= CLEAR_OF_ONE
    if FAMILIES[streak.name] == "reward" or not is_clear or len(reward) < len(course.rows):
        return []
    before = sorted(reward[max(0, streak.first - HISTORY) : streak.first])
    during = reward[streak.first : streak.last + 1]
    if len(before) < FEWEST_LIVE or min(during) == before[-1]:
        return []
    # Of a run that has learned, the rewards of long ago were low too.
    recent = sorted(reward[max(0, streak.first - REWARDS_BEFORE) : streak.first])
    share = (bisect.bisect_right(recent, max(during)) + 1) / (len(recent) + 1)
    if max(during) <= _quantile(before, LOW_REWARDS):
        share = min(share, LOW_REWARDS)
    if share > LOW_REWARDS:
        return []
    middle = median(before)
    return [
        streak._replace(
            name="reward", state="low", before=middle, value=median(during), evidence=-math.log(share)
        )
    ]


def _is_at_its_best(streak: Streak, course: Course) -> bool:
    """Return whether a metric is dead because most answers are right, as the reward shows."""
    if streak.state == "missing" or (streak.state == "high" and streak.name != "dead"):
        return False
    if streak.name in ("cut", "kl", LOSS):
        return False
    rewards = _rewards(streak, course)
    if rewards is None:
        return False
    before, during = rewards
    if streak.name == "reward":
        return streak.state == "frozen" and during >= max(before)
    return _is_nearly_one(before, during) or during > _quantile(sorted(before), 0.9)


def is_usual_loss(streak: Streak, course: Course, streaks: Mapping[str, Sequence[Streak]]) -> bool:
    """Return whether a streak is a loss of 0 beside a gradient that lives, as the loss is 0 where every ratio is 1."""
    if (
        streak.name != LOSS
        or streak.state != "frozen"
        or streak.value
        or not course.series("grad_norm").values
    ):
        return False
    return not any(
        one.first <= streak.last and one.last >= streak.first for one in streaks.get("grad_norm", ())
    )


def is_solved(streak: Streak, course: Course) -> bool:
    """Return whether a metric repeats one value because all answers are right: the reward, or 0 of what follows."""
    if streak.state != "frozen" or (streak.name != "reward" and streak.value):
        return False
    rewards = _rewards(streak, course)
    if rewards is None:
        return False
    before, during = rewards
    if _is_nearly_one(before, during):
        return True
    rows = course.rows[streak.first : streak.last + 1]
    groups = [row.get("dead", 1.0 if row.get("reward_std") == 0 else 0.0) for row in rows]
    return during >= max(before) and median(groups) >= ALL_GROUPS


def _is_nearly_one(before: Sequence[float], during: float) -> bool:
    return during >= BEST_REWARD and max(before) <= 1


def _rewards(streak: Streak, course: Course) -> tuple[Sequence[float], float] | None:
    """Return the rewards before a streak, and their median in its rows; None if some rows have none."""
    reward = course.series("reward").values
    if len(reward) < len(course.rows) or not streak.first:
        return None
    before = reward[max(0, streak.first - REWARDS_BEFORE) : streak.first]
    return before, median(reward[streak.first : streak.last + 1])
