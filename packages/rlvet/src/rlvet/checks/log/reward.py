"""Check the course of the reward: whether it is constant, falls or is flat."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import fmean, median

from rlvet._numbers import format_number, format_share, format_step
from rlvet.checks.course import (
    ROUNDING,
    Case,
    Course,
    Dip,
    Series,
    begins_in_the_middle,
    blocks,
    deviation,
    end_means,
    find_change_point,
    find_dip,
    find_hump,
    fit_slope,
    largest_mean,
    lasting_row,
    noise_of_differences,
    rises,
    standard_error,
    tenths,
)
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.results import (
    FEW_STEPS,
    THIRDS,
    THIRDS_OF_STEPS,
    change_text,
    lacks_rows,
    later_half,
    near_limit,
    passed_check,
    undecided_check,
)
from rlvet.checks.registry import LOGS
from rlvet.runs.quantities import QUANTITIES

SOLVED = 0.95
"""Mean of rewards between 0 and 1 from which their prompts are as good as solved."""


def is_solved(case: Case) -> bool:
    """Check whether nearly every answer has the best reward, so that groups have no spread."""
    course = case.course
    reward = course.series("reward")
    if len(reward.values) < FEW_STEPS:
        return False
    if _is_nearly_one(reward):
        return True

    # The largest reward is not known. The prompts are solved if the reward has risen to its best, and more and more
    # groups have equal rewards.
    dead = course.series("dead")
    if len(dead.values) < 2 * FEW_STEPS or len(reward.values) < 2 * FEW_STEPS:
        return False
    noise = noise_of_differences(reward.values)
    rose = reward.last - reward.first > max(2 * noise, 0.2 * abs(reward.last))
    value_range = max(reward.values) - min(reward.values)
    is_at_best = reward.last > max(reward.values) - 0.1 * value_range - noise
    return rose and is_at_best and dead.last > 0.5 and dead.last > dead.first


def _is_nearly_one(reward: Series) -> bool:
    """Check whether rewards between 0 and 1 are nearly 1 in the later half."""
    is_share = min(reward.values) >= 0 and max(reward.values) <= 1.0
    return is_share and fmean(reward.later_half) >= SOLVED


def describe_solved(reward: Series) -> str:
    """Return what is known of prompts whose groups have no spread, of a reward for which `is_solved` holds."""
    if _is_nearly_one(reward):
        return f"these prompts are solved (reward {format_number(reward.last)})"
    return f"the reward is {format_number(reward.last)} at the end, near its best, so these prompts may be solved"


CONSTANT_ROWS = 20
"""Number of rows with equal rewards from which this is a fault, if they are also `CONSTANT_SHARE` of all rows."""

CONSTANT_SHARE = 0.25
"""Share of a log's rows with equal rewards from which this is a fault."""

ROWS_PER_EXCEPTION = 20
"""Number of rows with equal rewards among which one may have another, so that one row does not hide the others."""

REWARD_FLAT = Kind(
    code="reward-flat",
    severity="stop",
    meaning="every answer gets the same reward",
    condition=(
        f"the reward has exactly the same value in the last {CONSTANT_ROWS} or more log steps; one in "
        f"{ROWS_PER_EXCEPTION} may have another"
    ),
    remedy="read some answers with their rewards; check the verifier and the difficulty of the prompts",
    evidence=("reward",),
    source="logs of Rithwik-Ravi/OpenEnv-Dynamic-Guardrails and toolanzyhhh1234/FIM-RLVR-LEAN4",
    scenarios=("every reward is the same", "constant reward"),
)


@LOGS.check(
    "a reward that never changes",
    after="answers cut off",
    tested="rewards differ",
    explained="the mean reward differs between log steps",
    reports=(REWARD_FLAT,),
)
def check_constant_reward(case: Case) -> Finding:
    """Check that the mean reward is not the same in many log steps up to the end."""
    course = case.course
    reward = course.series("reward")
    if len(reward.values) < FEW_STEPS:
        return lacks_rows(course, FEW_STEPS, "reward")
    equal_rows, others = _equal_rows_at_the_end(reward.values)
    last = reward.values[-equal_rows]
    finding = passed_check(reward, equal_rows - others, "log steps at the end with equal rewards")
    spreads = course.series("reward_std").values[-equal_rows:]
    is_best = last >= SOLVED and max(reward.values) <= 1
    is_short = equal_rows - others < CONSTANT_ROWS or equal_rows < CONSTANT_SHARE * len(reward.values)
    if is_short or is_best or any(spreads):
        # The mean reward has not changed for some log steps, but that is no fault yet.
        if equal_rows >= min(FEW_STEPS, len(reward.values)):
            if is_short:
                few = f"in {equal_rows - others} of the last {equal_rows} log steps"
                return undecided_check(f"the mean is {format_number(last)} {few}, which are few")
            rows = f"in {equal_rows - others} of the last {equal_rows} log steps"
            if any(spreads):
                return undecided_check(f"the mean is {format_number(last)} {rows}, where some rewards differ")
            return undecided_check(f"it is {format_number(last)} {rows}, which is the best")
        return finding
    start = reward.steps[-equal_rows]
    value = format_number(last)
    cause = f"the reward is {value} in every one of the last {equal_rows} log steps, from step {start:.0f} on"
    if others:
        rows = f"all {equal_rows}" if equal_rows == len(reward.values) else f"the last {equal_rows}"
        cause = (
            f"the reward is {value} in {equal_rows - others} of {rows} log steps, from step {start:.0f} on"
        )
    return finding.failed(REWARD_FLAT, cause, onset=start, quantities=["reward"])


def _equal_rows_at_the_end(values: Sequence[float]) -> tuple[int, int]:
    """Return the number of rows at the end that have the same value, and how many of these have another one.

    One row in `ROWS_PER_EXCEPTION` may have another value, so that a single one does not hide a constant reward. Of the
    first `FEW_STEPS` of these rows only one may, so that the part does not begin before the reward became constant.
    """
    usual = Counter(values[-FEW_STEPS:]).most_common(1)[0][0]
    is_other = [value != usual for value in reversed(values)]
    others = 0
    best = (0, 0)
    for count, differs in enumerate(is_other, 1):
        others += differs
        is_exception = others * ROWS_PER_EXCEPTION <= max(count, ROWS_PER_EXCEPTION)
        if not differs and is_exception and sum(is_other[max(0, count - FEW_STEPS) : count]) <= 1:
            best = (count, others)
    return best


STANDARD_ERRORS = 4.0
"""Standard errors above which a change of a mean is significant."""

PLATEAU_STEPS = 30
"""Number of log steps below which a plateau is not looked for."""

WANDERING = 3.0
"""A fall of the reward must be this many times its median change from tenth to tenth."""

COMPARED_AT_A_FALL = (
    r"(^|/)(kl|ppo_kl|kl_loss|entropy|grad_norm|(mean_|completion_|response_)?length|\w*length/mean"
    r"|clip(ped)?_ratio)$"
)
"""A pattern for the names of the metrics that are compared before and after a fall of the reward."""

PASSING = 3.0
"""Ratio of the mean of a metric as a fall begins to those before and at the end, from which it is told."""

CHANGED = 1.2
"""Ratio of the means of a metric before and after a fall from which a sure change is named."""

MOST_CHANGED = 3
"""Number of metrics that are named beside a fall of the reward."""

ROUNDING_ERROR = 1e-9
"""Relative difference of two means that rounding may give to equal rewards."""

FEWEST_STEPS_OF_FALL = 12
"""Number of log steps below which a fall of the reward is not looked for."""

FEWEST_STEPS_OF_BLOCK = 3
"""Number of log steps in a block of a log that is too short for tenths."""

ERRORS_IN_FEW_STEPS = 6.0
"""Standard errors above which a fall of such a log is significant, as its noise is known from few steps."""

NORMAL_MEDIAN = 0.6745
"""Median of the absolute value of normal noise, in standard deviations."""

LARGE_LOSS = 0.3
"""Share of the reward of the best tenth whose loss is worth a look."""

NEARLY = 0.1
"""What another split into parts may add to a share that is lost."""

STEADY_LOSS = 0.1
"""The same for a steady fall."""

FLAT_SHARE = 0.5
"""Share of a run that must be flat to be a plateau, or in which the reward must fall for the fall to be steady."""

COLLAPSE = Kind(
    code="collapse",
    severity="stop",
    meaning="the run lost the reward that it had reached",
    condition=(
        f"the last tenth of a run has lost half of the reward of its best tenth; or, as `look`, {LARGE_LOSS:.0%} of "
        f"it, or a tenth of it in a steady fall over half of the run; below {PLATEAU_STEPS} log steps, blocks of "
        f"{FEWEST_STEPS_OF_BLOCK} take the place of tenths. The loss must be {STANDARD_ERRORS:g} standard errors of "
        "the difference of two tenths' means, or the check is undecided. The finding begins where the fall does. Of "
        "entropy, KL divergence, gradient norm, length and the share of cut answers, it names up to "
        f"{MOST_CHANGED} that doubled or halved, or surely changed by a fifth"
    ),
    remedy=(
        "read answers from before and after the fall with their rewards, and check what else changed at that "
        "step; if neither shows a cause, try a lower learning rate"
    ),
    resume=";",
    is_in_the_weights=True,
    is_effect_of_large_steps=True,
    evidence=("reward", "quantities that changed with it"),
    source="a log of Rithwik-Ravi/OpenEnv-Dynamic-Guardrails",
    scenarios=("reward falls",),
)


@LOGS.check(
    "a fall of the reward",
    after="whether the policy moves",
    tested="the reward does not collapse",
    explained="the end of the run keeps half of its best reward, and the reward does not fall steadily",
    reports=(COLLAPSE,),
)
def check_fall(case: Case) -> Finding:
    """Check that the last tenth of a run keeps most of the reward of the best tenth, and that there is no steady fall.

    The finding names the metrics that changed most with it. A log does not show whether they are the cause.
    """
    course = case.course
    reward = course.series("reward")
    if len(reward.values) < FEWEST_STEPS_OF_FALL:
        return undecided_check(f"needs at least {FEWEST_STEPS_OF_FALL} log steps with a reward")
    count = min(10, len(reward.values) // FEWEST_STEPS_OF_BLOCK)
    rows_of_blocks = blocks(reward.values, count)
    means = [fmean(block) for block in rows_of_blocks]
    best = max(range(count), key=lambda block: means[block])
    size = len(rows_of_blocks[-1])
    is_short = count < 10
    step_noise = _usual_change(reward.values) if is_short else noise_of_differences(reward.values)
    noise = step_noise / math.sqrt(len(reward.values) / count)
    finding = passed_check(
        reward, means[-1], f"mean reward of the last {_block_name(count)}", slice(-size, None)
    )
    # The height of the best block is measured from 0, or from the lowest block if rewards are negative.
    lowest = min(0.0, *means)
    height = means[best] - lowest
    loss = means[best] - means[-1]
    errors = ERRORS_IN_FEW_STEPS if is_short else STANDARD_ERRORS
    # If the reward wanders, neighbouring blocks differ by more than the noise of single steps explains.
    differences = sorted(abs(after - before) for before, after in pairwise(means))
    wandering = median(differences) if is_short else differences[count // 2]
    first_row = sum(len(block) for block in rows_of_blocks[:best])
    after_best = Series(reward.steps[first_row:], reward.values[first_row:])
    # Of a constant reward only rounding errors are left.
    rounding = ROUNDING_ERROR * max(1.0, abs(means[best]))
    least_loss = max(errors * noise, WANDERING * wandering, rounding)
    is_lost = loss > max(height / 2, least_loss)
    is_large = loss > max(LARGE_LOSS * height, least_loss)
    is_steady = loss > max(STEADY_LOSS * height, errors * noise) and _falls_steadily(
        after_best.values, len(reward.values)
    )
    if not is_large and not is_steady:
        fallen = _check_thirds(finding, course, step_noise)
        if fallen is not None:
            return fallen
        # The best and the last part by other splits, so that the limits between blocks do not decide.
        tenth = max(1, len(reward.values) // 10)
        last_mean = min(means[-1], reward.last, fmean(reward.values[-size - 1 :]))
        largest_loss = largest_mean(reward.values, tenth) - last_mean
        if max(loss, largest_loss - NEARLY * height) > LARGE_LOSS * height:
            limit = format_number(max(LARGE_LOSS * height, least_loss))
            reason = (
                f"the reward went {change_text(means[best], means[-1])} from the best {_block_name(count)} to the "
                f"last, where a fall of {limit} would be sure in its noise"
            )
            return (
                near_limit(reason)
                if largest_loss > (LARGE_LOSS + NEARLY) * height
                else undecided_check(reason)
            )
        return finding

    start = start_of_fall(after_best, means[best], loss, max(2 * noise, wandering / 2))
    # A fall to a constant reward begins with it at the latest.
    floor = case.of(check_constant_reward)
    if floor.onset is not None and floor.onset > after_best.steps[0]:
        start = min(start, floor.onset)
    start_row = reward.steps.index(start)
    rows_before = slice(first_row, first_row + len(rows_of_blocks[best]))
    where = ""
    if first_row < start_row < rows_before.stop and not is_steady:
        # Rows of the fall itself are none of what was before.
        rows_before = _best_rows_before(reward.values[:start_row], len(rows_of_blocks[best]))
        where = f" before step {format_step(start)}"
    top = fmean(reward.values[rows_before])
    changed = _changed_metrics(course, rows_before, slice(-size, None))
    changes = _describe_changes({"reward": (top, means[-1]), **changed})
    cause = f"{changes}, from the best {_block_name(count)}{where} to the last"
    if not is_lost:
        manner = ", in a steady fall" if is_steady else ""
        cause = f"{cause}: {format_share((top - means[-1]) / (top - lowest))} of it is lost{manner}"
    cause = f"{cause}{_changed_for_a_while(course, rows_before, start_row, size)}"
    quantities = ["reward", *(name for name in changed if name in QUANTITIES)]
    severity = "stop" if is_lost else "look"
    first, last = (format_step(reward.steps[row]) for row in (rows_before.start, rows_before.stop - 1))
    finding = finding._replace(measure=f"{finding.measure}, where the best has the steps {first} to {last}")
    return finding.failed(COLLAPSE, cause, severity=severity, onset=start, quantities=quantities)


def _best_rows_before(values: Sequence[float], count: int) -> slice:
    """Return the rows with the largest mean among as many consecutive ones; all rows if there are not more.

    >>> _best_rows_before([1.0, 5.0, 6.0, 2.0], 2), _best_rows_before([1.0], 2)
    (slice(1, 3, None), slice(0, 1, None))
    """
    firsts = range(max(1, len(values) - count + 1))
    first = max(firsts, key=lambda row: fmean(values[row : row + count]))
    return slice(first, min(first + count, len(values)))


def _check_thirds(finding: Finding, course: Course, step_noise: float) -> Finding | None:
    """Return the finding on a reward whose last third is far below the first, though its end is not; else None.

    Args:
        finding: The check, with its figure.
        course: The metrics of the run.
        step_noise: The noise of the reward of a step.
    """
    reward = course.series("reward")
    before, after = end_means(reward.values, 3)
    height = before - min(0.0, *tenths(reward.values))
    loss = before - after
    if loss <= LARGE_LOSS * height:
        return None
    errors = STANDARD_ERRORS if len(reward.values) >= PLATEAU_STEPS else ERRORS_IN_FEW_STEPS
    if loss < errors * step_noise / math.sqrt(len(reward.values) / 3):
        return None
    third = max(1, len(reward.values) // 3)
    changed = _changed_metrics(course, slice(third), slice(-third, None))
    changes = _describe_changes({"reward": (before, after), **changed})
    cause = f"{changes}, {THIRDS}: {format_share(loss / height)} of it is lost"
    quantities = ["reward", *(name for name in changed if name in QUANTITIES)]
    start = reward.steps[_first_row_of_lower_level(reward.values)]
    return finding.failed(COLLAPSE, cause, severity="look", onset=start, quantities=quantities)


def _first_row_of_lower_level(values: Sequence[float]) -> int:
    """Return the row from which on the values have another mean, by least squares over all rows.

    >>> _first_row_of_lower_level([5, 6, 5, 6, 1, 2, 1, 3])
    4
    """
    total = sum(values)
    explained = []
    for row, before in enumerate(accumulate(values[:-1]), 1):
        after = total - before
        explained.append(before**2 / row + after**2 / (len(values) - row))
    return explained.index(max(explained)) + 1


def _describe_changes(means: Mapping[str, tuple[float, float]]) -> str:
    """Return the means of metrics before and after a fall of the reward, as text."""
    return ", ".join(f"{name} {change_text(before, after)}" for name, (before, after) in means.items())


def _compared_metrics(course: Course) -> dict[str, Sequence[float]]:
    """Return the values of the metrics that are compared at a fall of the reward, those with a value in each row."""
    rows = len(course.series("reward").values)
    names = (name for name in course.names if re.search(COMPARED_AT_A_FALL, name))
    metrics = {name: course.series(name).values for name in names}
    return {name: values for name, values in metrics.items() if len(values) == rows}


def _ratio(mean: float, other: float) -> float:
    """Return the ratio of the larger of two means to the smaller; near 1 if both are near 0."""
    smaller, larger = sorted((abs(mean), abs(other)))
    return (larger + 0.01) / (smaller + 0.01)


def _changed_metrics(course: Course, rows_before: slice, rows_after: slice) -> dict[str, tuple[float, float]]:
    """Return the metrics that changed most with a fall of the reward, with their means before and after it.

    They have doubled or halved, or surely changed by a part, and may explain the fall.

    Args:
        course: The metrics of the run.
        rows_before: The rows of the best part of the run, before the fall.
        rows_after: Those of its end.
    """
    means: dict[str, tuple[float, float]] = {}
    ratios: dict[str, float] = {}
    for name, values in _compared_metrics(course).items():
        # A mean of a few steps with a gradient among others without one says little.
        if name.endswith("grad_norm") and values.count(0) > len(values) / 2:
            continue
        parts = values[rows_before], values[rows_after]
        before, after = map(fmean, parts)
        ratio = _ratio(before, after)
        error = math.hypot(*map(standard_error, parts))
        has_surely_changed = ratio > CHANGED and abs(after - before) > STANDARD_ERRORS * error
        # Two names of one metric have the same values.
        if (ratio > 2 or has_surely_changed) and (before, after) not in means.values():
            means[name] = (before, after)
            ratios[name] = ratio
    most = sorted(means, key=lambda name: ratios[name], reverse=True)[:MOST_CHANGED]
    return {name: means[name] for name in most}


def _changed_for_a_while(course: Course, best: slice, row: int, count: int) -> str:
    """Return a clause on a metric that changed most as a fall of the reward began, and came back; empty without one.

    Args:
        course: The metrics of the run.
        best: The rows of the best part, before the fall.
        row: The row at which the fall begins.
        count: The number of rows from there on, and at the end, of which the mean is taken.
    """
    largest = PASSING
    clause = ""
    for name, values in _compared_metrics(course).items():
        if row + count > len(values) - count:
            continue
        if name.endswith("grad_norm") and values.count(0) > len(values) / 2:
            continue
        before = fmean(values[best])
        within = fmean(values[row : row + count])
        after = fmean(values[-count:])
        ratio = min(_ratio(within, before), _ratio(within, after))
        has_come_back = (within - before) * (within - after) > 0
        if has_come_back and min(within, before, after) >= 0 and ratio > largest:
            largest = ratio
            clause = (
                f"; as it began, {name} was {format_number(within)}, where it was {format_number(before)} in that "
                f"best part and is {format_number(after)} at the end"
            )
    return clause


def _usual_change(values: Sequence[float]) -> float:
    """Return the standard deviation of the changes from step to step, of which those in a fall count little.

    >>> round(_usual_change([0.5, 0.6, 0.5, 0.6, 0.5, 0.0, 0.1, 0.0]), 3)
    0.148
    """
    return median(abs(after - before) for before, after in pairwise(values)) / NORMAL_MEDIAN


def _block_name(count: int) -> str:
    """Return the name of one of ``count`` blocks of a run.

    >>> _block_name(10), _block_name(7)
    ('tenth of the run', 'of 7 parts of the run')
    """
    return "tenth of the run" if count == 10 else f"of {count} parts of the run"


def _falls_steadily(values: Sequence[float], rows: int) -> bool:
    """Return whether values fall from tenth to tenth along a line, in a large part of a run.

    Args:
        values: The rewards from the best tenth on.
        rows: Number of rewards in the whole run.
    """
    if len(values) < max(PLATEAU_STEPS, FLAT_SHARE * rows):
        return False
    slope = fit_slope(values)
    falls = sum(after < before for before, after in pairwise(tenths(values)))
    return -slope.rise > STANDARD_ERRORS * slope.error and falls >= FEWEST_FALLS


FEWEST_FALLS = 7
"""Number of the nine changes from tenth to tenth that must be falls in a steady fall."""

BEGUN = 0.2
"""Share of its loss by which the reward is lower at a step that certainly is in the fall."""


CLEARLY_LOWER = 4.0
"""Median changes from row to row by which a single row is below the level before a fall."""

FEW_ROWS = 5
"""Number of rows right before a fall that may be in it."""


def start_of_fall(reward: Series, level: float, loss: float, noise: float) -> float:
    """Return the step from which on the reward never comes back to a level.

    It is where the line through the steps at which a fifth and a half of the loss are lost begins. Of a sudden fall,
    these are one step.

    Args:
        reward: The reward from its best part on.
        level: Its mean there.
        loss: The difference of this and its mean at the end.
        noise: A difference from the level that does not count.
    """
    lower = [-value for value in reward.values]
    begun = min(max(BEGUN * loss, noise), loss / 2)
    row = lasting_row(lower, begun - level)
    half_row = lasting_row(lower, loss / 2 - level)
    if begun < loss / 2:
        row = max(0, row - int((half_row - row) * begun / (loss / 2 - begun)))
    # Single rows right before that are clearly lower are in the fall.
    usual_row = level - CLEARLY_LOWER * median(abs(after - before) for before, after in pairwise(lower))
    for _ in range(FEW_ROWS):
        if row > 0 and reward.values[row - 1] < usual_row:
            row -= 1
    # The best row is not in the fall, nor are those before it if the rows beside it have that level too.
    best_row = lower.index(min(lower))
    is_at_level = fmean(lower[max(0, best_row - 1) : best_row + 2]) <= -level
    if row < best_row <= half_row and is_at_level:
        row = best_row
    while reward.values[row] == max(reward.values):
        row += 1
    return reward.steps[row]


DIP_ERRORS = 4.4
"""Standard errors above which a loss that came back is sure. One in thirty healthy simulated runs has such a part."""


SHORT_DIP = 3
"""Number of rows of the parts of a short loss that came back."""

SHORT_DIP_ERRORS = 7.0
"""Standard errors above which such a loss is sure, of which a run has many parts."""


def dip_of(reward: Series) -> Dip | None:
    """Return where a run had surely lost much of its reward and got it back; None if it did not.

    >>> dip_of(Series(range(100), [0.9, 0.8] * 15 + [0.1] * 10 + [0.6, 0.5] * 30)).rows
    slice(30, 40, None)
    >>> dip_of(Series(range(100), [0.9, 0.8] * 50)) is None
    True
    """
    if len(reward.values) < PLATEAU_STEPS:
        return None
    # A short one may be right after the first rows.
    for size, errors in ((0, DIP_ERRORS), (SHORT_DIP, SHORT_DIP_ERRORS)):
        dip = find_dip(reward.values, size)
        if dip is not None and dip.errors >= errors:
            loss = min(dip.before, dip.after) - dip.within
            return dip if loss > LARGE_LOSS * (dip.before - min(0.0, dip.within)) else None
    return None


def describe_dip(reward: Series, dip: Dip) -> str:
    """Return the means of a loss that came back, with its steps."""
    return _describe_part(reward, dip, "lowest", "best")


def _describe_part(reward: Series, dip: Dip, within: str, beside: str) -> str:
    """Return the means of a part of a run and of those beside it, with its steps.

    Args:
        reward: The reward.
        dip: The part.
        within: What its mean is.
        beside: What the means before and after it are.
    """
    steps = reward.steps[dip.rows]
    mean, before, after = (format_number(mean) for mean in (dip.within, dip.before, dip.after))
    return (
        f"it was {mean} from step {format_step(steps[0])} to {format_step(steps[-1])}, after {before} and before "
        f"{after} (means of {len(steps)} log steps each: the {within}, and the {beside} before and after it)"
    )


def hump_of(reward: Series) -> Dip | None:
    """Return where a run surely had much more reward than before and after; None if it did not.

    >>> hump_of(Series(range(100), [0.3, 0.2] * 15 + [0.9] * 10 + [0.3, 0.2] * 30)).rows
    slice(30, 40, None)
    >>> hump_of(Series(range(100), [0.9, 0.8] * 50)) is None
    True
    """
    if len(reward.values) < PLATEAU_STEPS:
        return None
    hump = find_hump(reward.values)
    if hump is None or hump.errors < DIP_ERRORS:
        return None
    gain = hump.within - max(hump.before, hump.after)
    return hump if gain > LARGE_LOSS * (hump.within - min(0.0, hump.before, hump.after)) else None


SPENT = 0.1
"""Share of the largest learning rate below which a schedule hardly moves the policy any more."""

PLATEAU = Kind(
    code="plateau",
    severity="look",
    meaning="the reward no longer rises",
    condition=(
        f"the reward is flat for half of the run, over {PLATEAU_STEPS} or more log steps. It is reported with "
        "the rise of a line through the means of ten blocks of these steps, and two standard errors. If these are "
        "larger than the reward itself and its rise before, the check is undecided, unless the reward may have "
        "fallen; so it is where no part is flat, but no rise of the later half is sure and above 1 % of the reward"
    ),
    remedy=(
        "read late answers with a low reward first: if they deserve more, mend the reward; if not, a longer run, or "
        "other prompts, show whether the reward can still rise"
    ),
    evidence=("reward",),
    source="logs of Prem01-cyber/AxiomForgeAI and aaravarora01/agent-memory-redteam",
    scenarios=("levels off",),
)

REMEDY_OF_FALL = (
    "compare answers from the best part of the run and from its end with their rewards, to see what was lost; a longer "
    "run alone is no remedy"
)
"""The remedy if the reward falls there."""


def find_flat_part(case: Case) -> tuple[Series, int] | None:
    """Return the reward, and the row from which it is flat; None if it is not flat, or if there are few log steps."""
    reward = case.course.series("reward")
    n = len(reward.values)
    if n < PLATEAU_STEPS:
        return None
    turn, rise, noise = find_change_point(reward.values)
    if rise < STANDARD_ERRORS * noise / math.sqrt(max(turn, 1)):
        turn = 0  # the rise is not significant, so all of the run is flat
    late_rewards = reward.values[turn:]
    if len(late_rewards) < FLAT_SHARE * n or rises(late_rewards):
        return None
    return reward, turn


def _other_level(reward: Series, turn: int) -> str:
    """Return a clause on a part of a plateau that is surely far below or above those before and after it; else empty.

    Args:
        reward: The reward.
        turn: The row at which the plateau begins.
    """
    dip = dip_of(reward)
    if dip is not None and dip.rows.start >= turn:
        return describe_dip(reward, dip)
    late = Series(reward.steps[turn:], reward.values[turn:])
    hump = hump_of(late)
    return "" if hump is None else _describe_part(late, hump, "best", "lowest")


@LOGS.check(
    "a plateau of the reward",
    after="the last tenth of the run",
    tested="the reward is not flat for half of the run",
    explained="the reward is not flat for half of the run",
    reports=(PLATEAU,),
)
def check_plateau(case: Case) -> Finding:
    """Report the steps in which the reward is flat. This is no fault by itself."""
    course = case.course
    fall = case.of(check_fall)
    reward = course.series("reward")
    if len(reward.values) < PLATEAU_STEPS:
        return lacks_rows(course, PLATEAU_STEPS, "reward")
    if fall.cause or case.of(check_constant_reward).cause:
        return undecided_check("reported by another finding")
    finding = passed_check(
        reward, fmean(reward.later_half), "mean reward of the later half", later_half(reward)
    )
    flat = case.of(find_flat_part)
    if flat is None:
        is_constant = min(reward.later_half) == max(reward.later_half)
        if is_constant:
            return undecided_check("the reward is constant in the later half")
        # A change point within a steep rise leaves the rest of it to the part that is looked at.
        if rises(reward.later_half):
            return finding
        line = fit_slope(reward.later_half).text
        return undecided_check(
            f"no rise of the later half is sure and above {10 * ROUNDING:.0%} of the reward: {line}"
        )

    _, turn = flat
    late_rewards = reward.values[turn:]
    slope = fit_slope(late_rewards)
    upper_limit = max(0.0, slope.rise) + 2 * slope.error
    largest_rise = max(0.0, slope.rise + 2 * slope.error)
    start = reward.steps[turn]
    end = reward.steps[-1]
    share = len(late_rewards) / len(reward.values)
    mean = fmean(late_rewards)
    # Of a constant reward only rounding errors are left.
    is_constant = upper_limit <= ROUNDING_ERROR * max(1.0, abs(mean))
    before, after = end_means(late_rewards, 3)
    falls_surely = slope.rise < -STANDARD_ERRORS * slope.error or before - after > deviation(late_rewards)
    falls = falls_surely or slope.rise < -2 * slope.error
    most = format_number(largest_rise, 2)
    # A rise as large as the reward, or as its rise before, is not excluded.
    scale = fmean(abs(part) for part in tenths(late_rewards))
    if turn:
        scale = max(scale, abs(mean - reward.first))
    is_coarse = not is_constant and upper_limit > scale
    # If it may have fallen, that is worth a look at any noise.
    if is_coarse and not fall.is_near and not falls:
        return undecided_check(
            f"too short or too noisy to tell: {slope.text}, beside a mean of {format_number(mean)}"
        )
    run = "log" if begins_in_the_middle(course) else "run"
    part_of_run = f"the whole {run}" if not turn else f"{format_share(share)} of the {run}"
    cause = f"mean reward {format_number(mean)} from step {start:.0f} to {end:.0f}, {part_of_run}"
    other_level = _other_level(reward, turn)
    if other_level:
        cause = f"{cause}, but not level: {other_level}"
    where = "; " if other_level else ", where "
    change = f"({change_text(before, after)}, {THIRDS_OF_STEPS})"
    is_lower = after < before and format_number(after) != format_number(before)
    if falls:
        cause = f"{cause}{where}it falls {change}"
    elif is_lower and not is_constant:
        cause = f"{cause}{where}a fall is not sure {change}"
    if is_coarse and not falls_surely:
        cause = f"{cause}; too short or too noisy to tell whether it rises: {slope.text}"
    elif (falls or is_lower) and not falls_surely:
        of_more = f" of more than {most}" if largest_rise else ""
        cause = f"{cause}; a rise{of_more} is excluded (two standard errors)"
    elif not is_constant and not falls_surely:
        rise = format_number(slope.rise, 2)
        estimate = f"a line through it rises by {rise}, " if slope.rise > 0 else "it rises "
        cause = f"{cause}; {estimate}by at most {most} (two standard errors)"
    if case.of(is_solved):
        cause = f"{cause}; {describe_solved(course.series('reward'))}"
    rates = course.series("learning_rate")
    is_spent = bool(rates.values) and 0 < rates.values[-1] < SPENT * max(rates.values)
    if is_spent:
        rate, largest = (format_number(value) for value in (rates.values[-1], max(rates.values)))
        cause = f"{cause}; the learning rate has fallen to {rate} at the end, from {largest}"
    finding = finding.failed(PLATEAU, cause, onset=start, quantities=["reward"])
    if falls:
        return finding._replace(advice=REMEDY_OF_FALL)
    if is_spent:
        advice = f"{finding.advice}; a longer run needs a learning rate that falls later"
        return finding._replace(advice=advice)
    return finding
