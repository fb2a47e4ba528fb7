"""Check that advantages can teach something: rewards of a group differ, and a baseline is subtracted."""

from __future__ import annotations

import math
import re
from collections import Counter
from statistics import fmean, median

from rlvet._numbers import format_number, format_share
from rlvet.checks.course import (
    Case,
    Course,
    Series,
    begins_in_the_middle,
    blocks,
    end_means,
    falls,
    fit_slope,
    onset,
    rise_in_errors,
    rises,
    standard_error,
)
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.length import has_one_length
from rlvet.checks.log.movement import check_movement, rows_at_0
from rlvet.checks.log.results import (
    FEW_STEPS,
    MOST,
    TENTHS,
    THIRDS,
    THIRDS_OF_STEPS,
    change_text,
    lacks_rows,
    last_tenth,
    later_half,
    near_limit,
    passed_check,
    undecided_check,
)
from rlvet.checks.log.reward import SOLVED, check_constant_reward, describe_solved, is_solved
from rlvet.checks.registry import LOGS
from rlvet.runs.keys import KEYS
from rlvet.runs.setup import Setup

SPREAD_LEFT = 0.1
"""Share of the spread of rewards at the start below which nearly all rewards are equal. A reward of 0 or 1 whose mean
rises from 0.5 to 0.99 keeps 0.2 of its standard deviation."""

NO_SIGNAL = Kind(
    code="no-signal",
    severity="fix",
    meaning="advantages are 0",
    condition=(
        "most groups have equal rewards in the second half of the run, by their share or, of two answers of 0 or "
        "1 each, by the values of `reward_std`; or no right answer; if no share is logged, the "
        f"standard deviation of rewards falls below {SPREAD_LEFT:.0%} of its start, or is 0 in most of these log "
        "steps, or all advantages are. If answers or entropy collapsed before, that comes first; or in that half, of "
        f"{FEW_STEPS} or more log steps, the gradient is 0 and the mean reward always the same (`look` at the best)"
    ),
    remedy=(
        "read one such group: if better answers get no higher reward, fix the reward; if rewards differ but "
        "advantages are 0, fix the computation of advantages; else drop such prompts, sample others, or more "
        "answers to each"
    ),
    settings=("group size",),
    evidence=("dead", "reward_std", "advantage_max", "advantage_min", "grad_norm", "reward"),
    source=(
        "the log of wallacexuhanxiao/FinQA-tool-calling-GRPO-GSPO, zhaochenyang20/Awesome-ML-SYS-Tutorial "
        "issue 106, arXiv:2503.14476"
    ),
    scenarios=("prompts too hard", "prompts solved", "advantages all 0"),
)


EASY = 0.9
"""Mean of rewards between 0 and 1 from which groups have equal rewards because nearly all answers are right."""

TOO_EASY = "the prompts are probably too easy"
"""The reason why groups have equal rewards if nearly all answers are right."""

DROP_PROMPTS = "drop such prompts, sample harder ones, or more answers to each"
"""The remedy for prompts that are too easy."""

EQUAL_REWARDS = (
    "read one such group: if better answers get no higher reward, fix the reward; else drop such prompts, sample "
    "others, or more answers to each"
)
"""The remedy for groups of which it is known that their rewards are equal, and not only their advantages 0."""

IF_RIGHT = f"read one such group: if its answers are right, {DROP_PROMPTS}"
"""The remedy for prompts that may be too easy."""

MOSTLY_RIGHT = 0.75
"""The same from which most answers are right. Of four answers to a prompt, all are then right in a third of the groups,
if they are independent."""

HARD = 0.1
"""Mean of rewards between 0 and 1 up to which groups have equal rewards because nearly no answer is right."""

ONCE_RIGHT = 0.2
"""Mean of such rewards in the best tenth of a run above which the prompts are not too hard."""

PART_OF_DEAD = re.compile(
    r"(group|reward|prompt)\w*all_?(zero|wrong)|all_?(wrong|incorrect)_?(group|prompt)|solved?_?none",
    re.IGNORECASE,
)
"""Keys of shares of groups without a right answer, such as ``group_reward_all_zero_rate``. Groups whose answers are all
right have equal rewards too, so that such a share shows lost signal and never that there is some."""

FEWEST_REWARDS = 20
"""Number of rewards below which it is not said whether they rise."""


@LOGS.check(
    "groups with equal rewards",
    after="a reward that never changes",
    tested="half of the groups or more carry signal",
    explained="in most groups, the answers to one prompt get different rewards",
    reports=(NO_SIGNAL,),
)
def check_signal(case: Case) -> Finding:
    """Check that the rewards of most groups differ, so that their advantages are not all 0."""
    finding = _check_groups(case)
    if finding.cause or case.of(check_movement).ok is False or case.of(check_constant_reward).ok is False:
        return finding
    return _check_gradient(case) or finding


def is_of_batches(setup: Setup) -> bool:
    """Return whether the spread of rewards is that of whole batches, of which groups with equal rewards are a part.

    TRL then logs the share of equal rewards and their standard deviation of the batch, and not of groups.
    """
    return "reward scale" in setup.values and setup.values["reward scale"].value == "batch"


def _check_groups(case: Case) -> Finding:
    """Check that in most groups rewards differ, by their share or by the spread of rewards."""
    course, setup = case.course, case.setup
    solved = case.of(is_solved)
    shares = course.series("dead")
    quantity, by_spread = "dead", ""
    if not shares.values:
        shares = _equal_pairs(course)
        quantity = "reward_std"
        by_spread = " (of two answers each, by the values of reward_std)"
    if not shares.values:
        return _check_part_of_groups(case) or _check_spread(case)
    if len(shares.values) < FEW_STEPS:
        return undecided_check(f"needs at least {FEW_STEPS} log steps")
    of_batches = is_of_batches(setup)
    # A log step of one batch then has a share of 0 or 1, as has one of a single group. Settings without one are of a
    # version that compares groups.
    is_unknown = setup.framework == "trl" and not setup.values
    may_be_of_batches = is_unknown and set(shares.values) <= {0.0, 1.0}
    late = shares.later_half
    mean = fmean(late)
    error = standard_error(late)
    measure = "share of groups with equal rewards in the later half"
    part = f"in the later half of the {_run(course)}"
    finding = passed_check(shares, mean, measure, later_half(shares))._replace(error=error)
    last_rows = late[-max(FEW_STEPS, len(late) // 5) :]
    end = fmean(last_rows)
    if mean - 2 * error <= MOST and not (solved and end > MOST):
        if of_batches:
            return undecided_check("with scale_rewards='batch', the share is that of whole batches")
        if max(mean, end, shares.last) > MOST:
            return near_limit("about half of the groups have equal rewards")
        if may_be_of_batches:
            return undecided_check(
                "the share is 0 or 1 in each log step, as it is of one group in each, or of whole batches with "
                "scale_rewards='batch'; put the configuration beside the log"
            )
        return finding
    if end > mean and format_share(end) != format_share(mean):
        rows = slice(-len(last_rows), None)
        part = f"in the last {len(last_rows)} log steps, and {format_share(mean)} in the later half"
        measure = "share of groups with equal rewards in the last log steps"
        finding = passed_check(shares, end, measure, rows)._replace(error=standard_error(last_rows))
    groups = "groups"
    group_size = setup.number("group size")
    if of_batches:
        groups = "batches"
    elif group_size:
        unit = "answers" if group_size > 1 else "answer"
        groups = f"groups of {format_number(group_size, 6)} {unit}"
    unit = "batch" if of_batches else "group"
    cause = f"{format_share(max(mean, end))} of {groups}{by_spread} teach nothing {part}"
    reward = course.series("reward")
    if solved:
        cause = f"{cause}; {describe_solved(reward)}"
        finding = finding.failed(
            NO_SIGNAL, cause, severity="look", onset=_since_most(shares), quantities=[quantity]
        )
        return finding._replace(advice=IF_RIGHT)
    alike = f"all answers of such a {unit} get the same reward{_why_alike(setup)}"
    cause = f"{cause}: {alike}{_reward_without_spread(course)}"
    return _lost_signal(finding, cause, shares, course, quantity)


def _run(course: Course) -> str:
    """Return what the rows are of, in a word."""
    return "log" if begins_in_the_middle(course) else "run"


def _check_part_of_groups(case: Case) -> Finding | None:
    """Check that not most groups are without a right answer; None if their share is not known, or not that large.

    It shows lost signal, and never that there is some.
    """
    course = case.course
    if course.series("reward_std").values:
        return None
    for key in filter(PART_OF_DEAD.search, course.names):
        shares = course.series(key)
        if len(shares.values) < FEW_STEPS or min(shares.values) < 0 or max(shares.values) > 1:
            continue
        late = shares.later_half
        mean = fmean(late)
        error = standard_error(late)
        if mean - 2 * error <= MOST:
            continue
        measure = f"{key} in the later half"
        at_least = "at least " if mean < 1 else ""
        finding = passed_check(shares, mean, measure, later_half(shares))._replace(error=error)
        cause = (
            f"{at_least}{format_share(mean)} of groups teach nothing in the later half of the {_run(course)}, by "
            f"{key}: no answer of such a group is right"
        )
        return _lost_signal(finding, cause, shares, course, "reward")
    return None


def _since_most(shares: Series) -> float | None:
    """Return the step from which on most groups have equal rewards.

    Args:
        shares: The share of these groups.
    """
    # The shares of single steps are noisy, so the means in which the onset is searched may be below the limit by
    # chance.
    window = max(1, len(shares.values) // 20)
    noise = standard_error(shares.later_half) * math.sqrt(len(shares.later_half) / window)
    return onset(shares, lambda share: share > MOST - 2 * noise, lambda share: share > MOST)


def _lost_signal(finding: Finding, cause: str, shares: Series, course: Course, quantity: str) -> Finding:
    """Return the finding on groups that teach nothing, as graver if the reward does not rise.

    Args:
        finding: The check, with its figure.
        cause: The sentence on the groups.
        shares: The share of these groups.
        course: The metrics of the run.
        quantity: The quantity that shows the groups.
    """
    reward = course.series("reward")
    start = _since_most(shares)
    later_rewards = reward.values[len(reward.values) // 3 :]
    severity = "fix"
    if len(later_rewards) >= FEWEST_REWARDS:
        # A run that still learns wastes a part of its answers. One that does not may do so because of this.
        before, after = end_means(later_rewards, 3)
        change = f" ({change_text(before, after)}, {THIRDS_OF_STEPS})" if after != before else ""
        cause = f"{cause}; in the last two thirds of the {_run(course)}, the reward"
        if rises(later_rewards):
            severity = "look"
            cause = f"{cause} still rises{change}"
        elif falls(later_rewards) and before > HARD:
            cause = f"{cause} falls{change}"
        else:
            does_not = "does not rise" if after < before else "does not surely rise"
            cause = f"{cause} {does_not}{change}: {fit_slope(later_rewards).text}"
            if begins_in_the_middle(course):
                # It may have risen to its best before.
                severity = "look"
    cause = f"{cause}{_why_equal(reward, course)}"
    lost_from = _since_lost(shares, reward)
    if start is not None and lost_from is not None:
        before = [value for step, value in reward.points if start <= step < lost_from]
        if before and fmean(before) > MOST:
            mean = format_number(fmean(before))
            cause = f"{cause}; most groups had equal rewards before too, with a mean reward of {mean}"
            start = lost_from
    finding = finding.failed(NO_SIGNAL, cause, severity=severity, onset=start, quantities=[quantity])
    advice = EQUAL_REWARDS
    if cause.endswith(TOO_EASY):
        advice = DROP_PROMPTS
    elif LARGEST_REWARD in cause:
        advice = IF_RIGHT
    return finding._replace(advice=advice)


def _since_lost(shares: Series, reward: Series) -> float | None:
    """Return the first step at which most groups have equal rewards because right answers were lost; else None.

    Before it, most of them may have had equal rewards because most answers were right.
    """
    if not _is_lost(reward):
        return None
    low_from = onset(reward, lambda mean: mean <= ONCE_RIGHT)
    if low_from is None:
        return None
    return next((step for step, share in shares.points if step >= low_from and share > MOST), None)


def _is_lost(reward: Series) -> bool:
    """Return whether nearly no answer is right in the later half, and some were before.

    Only of rewards between 0 and 1 is it known how many answers are right.
    """
    if not reward.values or min(reward.values) < 0 or max(reward.values) > 1:
        return False
    return fmean(reward.later_half) <= HARD and _best_mean(reward) > ONCE_RIGHT


def _best_mean(reward: Series) -> float:
    """Return the mean reward of the best tenth of the run."""
    return max(fmean(block) for block in blocks(reward.values, min(10, len(reward.values))))


def _reward_without_spread(course: Course) -> str:
    """Return a clause on the log steps in which no group has any spread, if they have one mean reward."""
    shares = course.series("dead", beside="reward").values
    means = course.series("reward", beside="dead").values
    rewards = [reward for share, reward in zip(shares, means, strict=True) if share == 1]
    if len(rewards) < FEW_STEPS:
        return ""
    reward, count = Counter(rewards).most_common(1)[0]
    if count < NEARLY_ALL * len(rewards):
        return ""
    steps = len(course.series("dead").values)
    text = f"; in {len(rewards)} of {steps} log steps no group has any spread,"
    of_these = "" if count == len(rewards) else f" in {count} of these"
    text = f"{text}{of_these} with a mean reward of {format_number(reward)}"
    return f"{text}{LARGEST_REWARD}" if reward == max(course.series("reward").values) > 0 else text


LARGEST_REWARD = ", the largest of the log, so that these prompts may be solved"
"""What is known of groups without spread whose mean reward is the largest."""


NO_ANSWER_IS_RIGHT = "nearly no answer is right"
"""The clause on a mean reward near 0, of rewards between 0 and 1."""


def _why_equal(reward: Series, course: Course) -> str:
    """Return a clause on the difficulty of the prompts, if the mean reward shows it; else an empty text."""
    # Only for rewards between 0 and 1 is it known how many answers are right.
    if not reward.values or min(reward.values) < 0 or max(reward.values) > 1:
        return ""
    mean = fmean(reward.later_half)
    given = f". With a mean reward of {format_number(mean)} in the later half"
    if mean >= EASY:
        return f"{given}, nearly all answers are right: {TOO_EASY}"
    if mean >= MOSTLY_RIGHT:
        return f"{given}, most answers are right, and a group of few answers is often all right"
    if mean > HARD:
        return ""
    text = f"{given}, {NO_ANSWER_IS_RIGHT}"
    if _is_lost(reward):
        return f"{text} any more: it was {format_number(_best_mean(reward))} in the best tenth of the run"
    cut = course.series("cut")
    is_cut = has_one_length(course) or (bool(cut.values) and fmean(cut.later_half) > MOST)
    return f"{text}: the prompts are probably too hard" + (
        ", or answers are cut off before their result" if is_cut else ""
    )


SPREAD_OF_PAIR = math.sqrt(0.5)
"""Standard deviation of two rewards of 0 and 1, with n − 1 in its denominator."""

FEWEST_PAIR_ROWS = 30
"""Number of log steps from which values show that they are of groups of two answers."""

MOST_PAIRS = 64
"""Largest number of groups in a log step for which its values are looked at. Printed values have four digits."""


NEARLY_WHOLE = 0.05
"""Distance from a whole number that rounding to four digits may give."""


def _equal_pairs(course: Course) -> Series:
    """Return the share of groups with equal rewards if they are of two answers of 0 or 1; else a series without values.

    Each of G groups has a spread of 0 or √0.5, so that their mean is k·√0.5 / G with k unequal groups. These have one
    right answer each, and the others none or two: the number of right answers is even if k is.

    >>> rows = [{"reward": (k + 2) / 8, "reward_std": k * 0.1768, "step": step} for step in range(10) for k in range(3)]
    >>> _equal_pairs(Course(rows)).values[:3]
    [1.0, 0.75, 0.5]
    """
    spread = course.series("reward_std", "reward")
    spreads = spread.values
    none = Series((), ())
    rewards = course.series("reward", "reward_std").values
    positive = [value for value in spreads if value > 0]
    if len(spreads) < FEWEST_PAIR_ROWS or not positive:
        return none
    groups = round(SPREAD_OF_PAIR / min(positive))
    if not 1 <= groups <= MOST_PAIRS:
        return none
    shares = []
    for value, reward in zip(spreads, rewards, strict=True):
        unequal, right = value / SPREAD_OF_PAIR * groups, reward * 2 * groups
        is_whole = abs(unequal - round(unequal)) < NEARLY_WHOLE and abs(right - round(right)) < NEARLY_WHOLE
        if not is_whole or (round(unequal) - round(right)) % 2 or not 0 <= right <= 2 * groups:
            return none
        shares.append(1 - round(unequal) / groups)
    return Series(spread.steps, shares)


def _check_spread(case: Case) -> Finding:
    """Check that the spread of rewards is not lost, if the log has no share of groups with equal rewards."""
    course, setup = case.course, case.setup
    spread = course.series("reward_std")
    if len(spread.values) < FEW_STEPS:
        if spread.values:
            return undecided_check(f"needs at least {FEW_STEPS} log steps")
        return _check_advantages(case) or undecided_check(
            "log the share of groups whose rewards are all equal"
        )
    limit = SPREAD_LEFT * spread.first
    quarter = spread.values[-max(3, len(spread.values) // 4) :]
    zeros = sum(value == 0 for value in spread.later_half)
    if zeros > MOST * len(spread.later_half):
        measure = "share of log steps in which the standard deviation of rewards is 0"
        share = zeros / len(spread.later_half)
        finding = passed_check(spread, share, measure, later_half(spread))
        cause = (
            f"the standard deviation of rewards is 0 in {zeros} of {len(spread.later_half)} log steps of the later "
            f"half: all answers to a prompt get the same reward there{_why_alike(setup)}"
        )
        start = next(step for step, value in spread.points if value == 0)
    elif spread.last < limit and median(quarter) < limit:
        measure = "standard deviation of rewards, last tenth"
        finding = passed_check(spread, spread.last, measure, last_tenth(spread))
        cause = (
            f"the standard deviation of rewards went {change_text(spread.first, spread.last)}, {TENTHS}: the answers "
            f"to a prompt get nearly the same reward{_why_alike(setup)}"
        )
        start = onset(spread, lambda mean: mean < limit)
    else:
        return undecided_check("log the share of groups whose rewards are all equal")
    reward = course.series("reward")
    rose = False
    if len(reward.values) >= FEW_STEPS:
        rose = rise_in_errors(reward) > 3
        before, after = end_means(reward.values, 3)
        change = f"({change_text(before, after)}, {THIRDS})"
        words = "did not clearly rise"
        if rose:
            words = f"rose {change}"
        elif len(reward.values) >= FEWEST_REWARDS and falls(reward.values):
            words = f"fell {change}"
        cause = f"{cause}; the reward {words}"
    cause = f"{cause}{_why_equal(reward, course)}"
    severity = "look" if case.of(is_solved) or rose else "fix"
    return finding.failed(NO_SIGNAL, cause, severity=severity, onset=start, quantities=["reward_std"])


def _check_advantages(case: Case) -> Finding | None:
    """Check that not most batches have advantages that are all 0; None if they do not, or it is not known."""
    course = case.course
    largest, smallest = (course.series(name, other) for name, other in (EXTREMES, EXTREMES[::-1]))
    # Of a run without any, they may not be measured.
    if len(largest.values) < FEW_STEPS or not any(largest.values):
        return None
    dead = [float(high == low == 0) for high, low in zip(largest.values, smallest.values, strict=True)]
    shares = Series(largest.steps, dead)
    late = shares.later_half
    mean = fmean(late)
    error = standard_error(late)
    if mean - error <= MOST:
        return None
    measure = "share of log steps in which all advantages are 0, in the later half"
    finding = passed_check(shares, mean, measure, later_half(shares))._replace(error=error)
    cause = (
        f"all advantages are 0 in {sum(map(int, late))} of {len(late)} log steps of the later half: all answers of a "
        f"group get the same reward there{_why_alike(case.setup)}{_why_equal(course.series('reward'), course)}"
    )
    return _lost_signal(finding, cause, shares, course, "advantage_max")


EXTREMES = ("advantage_max", "advantage_min")
"""The quantities that are both 0 where no group of a batch has a signal."""


def _check_gradient(case: Case) -> Finding | None:
    """Check that no gradient of 0 shows that rewards are equal; return None if it is not 0, or rewards differ.

    Many logs have neither the share of groups with equal rewards nor the spread of rewards.
    """
    norm = case.course.series("grad_norm")
    is_always = not any(norm.values)
    rows = len(norm.values) if is_always else rows_at_0(norm)
    if rows < max(FEW_STEPS, len(norm.values) // 2):
        return None
    start = norm.steps[-rows]
    reward = case.course.series("reward")
    rewards = reward.since(start)
    if len(rewards.values) < FEW_STEPS or min(rewards.values) != max(rewards.values):
        return None
    finding = passed_check(norm, rows, "last log steps with a gradient norm of 0", slice(-rows, None))
    value = rewards.values[-1]
    part = f"all {rows} log steps" if is_always else f"the last {rows} log steps"
    cause = (
        f"the gradient is 0 in {part}, and the mean reward is {format_number(value)} in each: nothing is learned, as "
        "when all answers to a prompt get the same reward"
    )
    # Only of rewards between 0 and 1, or of one that has risen, is the best reward known.
    has_risen = min(reward.values) < value == max(reward.values)
    is_best = has_risen or (value >= SOLVED and max(reward.values) <= 1)
    severity = "look" if is_best else "fix"
    return finding.failed(
        NO_SIGNAL,
        f"{cause}{_why_equal(rewards, case.course)}",
        severity=severity,
        onset=start,
        quantities=["grad_norm", "reward"],
    )


LOW_TEMPERATURE = 0.1
"""Sampling temperature up to which the answers of a group are nearly identical."""


def _why_alike(setup: Setup) -> str:
    """Return a clause with the sampling temperature, if it explains that answers are alike."""
    temperature = setup.number("temperature")
    if temperature is None or temperature > LOW_TEMPERATURE:
        return ""
    return f", as answers sampled at temperature {format_number(temperature)} are nearly identical"


BASELINE_ROWS = 3
"""Number of log steps with rewards other than 0 from which advantages are compared with them."""

NEARLY_ALL = 0.9
"""Share of these log steps in which advantages must equal rewards for a finding."""

RELATIVE_DIFFERENCE = 1e-4
"""Relative difference up to which a largest advantage equals a largest reward. GRPO divides the reward of a group of
one by 1 + 1e-6, and verl computes in float32."""

NO_BASELINE = Kind(
    code="no-baseline",
    severity="fix",
    meaning="advantages are the rewards themselves",
    condition=(
        f"the largest and the smallest advantage equal those of the rewards, to {RELATIVE_DIFFERENCE:g} of them, in "
        f"{NEARLY_ALL:.0%} of log steps, as with one answer to each prompt"
    ),
    remedy=(
        "[larger groups|sample several answers to each prompt{group size}, or ]use an estimator that has a baseline "
        "of its own"
    ),
    evidence=("advantage_max", "advantage_min", "reward_max", "reward_min"),
    source="four logs of verl with groups of one answer",
    scenarios=("one answer to each prompt",),
)


LENGTH_OF_PROMPTS, TOKENS = "length_prompt", "tokens"
"""The names, in the table of keys, of the mean length of a step's prompts, and of its number of tokens."""

NEAR_AN_INTEGER = 0.02
"""Distance from an integer up to which a computed number of answers is one, as logs round the lengths."""


def answers_of_steps(course: Course) -> tuple[int, int] | None:
    """Return the smallest and the largest number of answers of a step, which few frameworks log; None if not known.

    The tokens of a step are as many as its answers times the mean length of a prompt and an answer.

    >>> row = {"step": 1, "perf/total_num_tokens": 1785, "prompt_length/mean": 874.5, "length": 18}
    >>> answers_of_steps(Course([row])), answers_of_steps(Course([row | {"length": 40}]))
    ((2, 2), None)
    """
    names: dict[str, str] = {}
    for entry in KEYS:
        if entry.quantity in (LENGTH_OF_PROMPTS, TOKENS) and entry.use == "yes" and entry.key in course.names:
            names.setdefault(entry.quantity, entry.key)
    if len(names) < 2:
        return None
    keys = (names[TOKENS], names[LENGTH_OF_PROMPTS], "length")
    counts = set()
    for row in course.rows:
        if any(key not in row for key in keys):
            continue
        tokens, prompt, answer = (row[key] for key in keys)
        count = tokens / (prompt + answer) if prompt + answer > 0 else 0.0
        if count < 1 - NEAR_AN_INTEGER or abs(count - round(count)) > NEAR_AN_INTEGER:
            return None
        counts.add(round(count))
    return (min(counts), max(counts)) if counts else None


def _answers_text(course: Course) -> str:
    """Return what is known of the number of answers, if no setting names that of a prompt."""
    answers = answers_of_steps(course)
    if answers is None:
        return (
            ". How many answers a prompt has is not known: put the configuration beside the log, or log the tokens "
            "of a step and the mean length of its prompts"
        )
    fewest, most = answers
    count = (
        f"{fewest} to {most} answers" if fewest < most else f"{fewest} answers" if fewest > 1 else "1 answer"
    )
    return f"; a step has {count} (its tokens, divided by the mean length of a prompt and its answer)"


@LOGS.check(
    "baseline of the advantages",
    after="KL to the reference",
    tested="a baseline is subtracted from rewards",
    explained="advantages are not the rewards themselves",
    reports=(NO_BASELINE,),
)
def check_baseline(case: Case) -> Finding:
    """Check that the largest and smallest advantages are not those of the rewards, as without a baseline."""
    course, setup = case.course, case.setup
    steps = []
    equal_steps = []
    names = ("reward_max", "reward_min", "advantage_max", "advantage_min")
    for row in course.rows if set(course.names).issuperset(names) else ():
        if any(name not in row for name in names):
            continue
        # Rewards of ±1 have the mean 0 in a group of one of each. Rewards of 0 show nothing.
        if row["reward_min"] == -row["reward_max"]:
            continue
        steps.append(row["step"])
        largest_is_equal = math.isclose(row["advantage_max"], row["reward_max"], rel_tol=RELATIVE_DIFFERENCE)
        smallest_is_equal = math.isclose(row["advantage_min"], row["reward_min"], rel_tol=RELATIVE_DIFFERENCE)
        if largest_is_equal and smallest_is_equal:
            equal_steps.append(row["step"])
    if len(steps) < BASELINE_ROWS:
        undecided = lacks_rows(course, BASELINE_ROWS, *names)
        if len(course.rows) < BASELINE_ROWS or not set(course.names).issuperset(names):
            return undecided
        return undecided_check(f"needs at least {BASELINE_ROWS} log steps whose rewards are not all 0")
    share = len(equal_steps) / len(steps)
    finding = Finding(
        "ok",
        True,
        "",
        share,
        None,
        len(steps),
        steps=(steps[0], steps[-1]),
        measure="share of log steps in which the largest and the smallest advantage equal those of the rewards",
    )
    if share < NEARLY_ALL:
        return undecided_check("they are equal in some log steps") if equal_steps else finding
    cause = (
        f"the largest and the smallest advantage equal the largest and the smallest reward in {len(equal_steps)} of "
        f"{len(steps)} log steps: no baseline is subtracted"
    )
    group_size = setup.number("group size")
    if group_size == 1:
        cause = f"{cause}, as each prompt has one answer"
    elif group_size:
        cause = f"{cause}, though the settings name {format_number(group_size, 6)} answers to each prompt"
    else:
        cause = f"{cause}{_answers_text(course)}"
    reward = course.series("reward").values
    if len(reward) >= FEWEST_REWARDS and rises(reward):
        cause = f"{cause}. The reward rises all the same"
    quantities = ["advantage_max", "advantage_min", "reward_max", "reward_min"]
    return finding.failed(NO_BASELINE, cause, onset=equal_steps[0], quantities=quantities)
