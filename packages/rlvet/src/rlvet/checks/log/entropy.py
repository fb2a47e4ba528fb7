"""Check the entropy of the policy."""

from __future__ import annotations

import math
from statistics import fmean, median

from rlvet._numbers import format_number, format_share, format_step
from rlvet.checks.course import (
    Case,
    Course,
    Series,
    clearly_rises,
    end_means,
    ends_higher,
    lasting_row_below,
    onset,
    rise_in_errors,
    tenths,
)
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.data import check_data
from rlvet.checks.log.results import (
    FEW_STEPS,
    TENTHS,
    before_the_limit,
    change_text,
    first_tenth,
    last_tenth,
    passed_check,
    undecided_check,
)
from rlvet.checks.log.reward import find_flat_part, is_solved
from rlvet.checks.registry import LOGS
from rlvet.runs.compact_rows import CompactRows

ENTROPY_LEFT = 0.25
"""Share of the entropy at the start below which it has collapsed, unless the reward rose."""

NEARLY_NO_ENTROPY = 0.1
"""Share of the entropy at the start up to which its collapse is a fault even if the reward has risen before."""

LEAST_ENTROPY = 0.04
"""Share of the entropy at the start below which next to nothing is left of it."""

NO_ENTROPY = 0.15
"""Entropy (nats per token) above which it has not collapsed, whatever it was at the start."""

END_ROWS = 3
"""Smallest number of rows at the end whose median must have fallen too. One prompt may have next to no entropy: the log
of wallacexuhanxiao/FinQA-tool-calling-GRPO-GSPO has one prompt a row, and goes from 0.15 to 0.002 in one of them."""

FALLEN = 0.5
"""Share of the entropy at the start below which this median has fallen. A record of five batches that collapses in the
last one has 0.44 of it in the two before."""

NEARLY_SOLVED = 0.9
"""Mean of late rewards between 0 and 1 from which a policy may keep no entropy: little is left to explore."""

ENTROPY_COLLAPSE = Kind(
    code="entropy-collapse",
    severity="fix",
    meaning="the policy stopped exploring without a higher reward",
    condition=(
        f"entropy falls below {ENTROPY_LEFT:.0%} of its start and below {NO_ENTROPY:g} nats per token, "
        "without a higher reward; judged up to a change of the prompts in the later half"
    ),
    remedy="add an entropy bonus{entropy bonus} or lower the learning rate{learning rate}",
    resume=", or",
    is_in_the_weights=True,
    is_effect_of_large_steps=True,
    evidence=("entropy",),
    source="a log of JuncyLu/trl_DAPO, arXiv:2505.22617",
    scenarios=("entropy collapses", "entropy collapse"),
)

AFTER_A_RISE = "lower the learning rate{learning rate}, as the entropy rose before it was lost"
"""The remedy if it did, for which a bonus is none."""

ENTROPY_RISE = 2.0
"""Growth of the entropy above which this is a fault, if it is also more than one nat per token."""

ENTROPY_RISES = Kind(
    code="entropy-rise",
    severity="fix",
    meaning="entropy rises, and the policy becomes random",
    condition=(
        f"entropy is {ENTROPY_RISE:g} times its start and at least one nat higher; it begins as {ENTROPY_RISE:g} times "
        "the start is passed"
    ),
    remedy=(
        "lower the learning rate{learning rate}[smaller entropy bonus|, or the entropy bonus{entropy bonus} if the "
        "loss has one]"
    ),
    resume=", and",
    is_in_the_weights=True,
    is_effect_of_large_steps=True,
    evidence=("entropy",),
    source="verl-project/verl issue 2738, rllm-org/rllm issue 116; simulated runs of `benchmarks/doctor`",
    scenarios=("entropy rises without end",),
)

LOW_ENTROPY = 0.1
"""Entropy (nats per token) below which a policy hardly explores from the start."""

LOW_ENTROPY_OF_AN_ANSWER = 5.0
"""Entropy of a whole answer (nats) up to which there is little to explore. In the log of
wallacexuhanxiao/FinQA-tool-calling-GRPO-GSPO an answer of 40 tokens has 3. Answers of agents, of 2,000 and more tokens,
have 20 to 330 in logs of HappynessI/verl-for-AgentGym at no more per token, and the reward rises in nearly all."""

LOW_ENTROPY_AT_START = Kind(
    code="low-entropy",
    severity="look",
    meaning="the policy had almost no entropy from the start",
    condition=(
        f"entropy is below {LOW_ENTROPY:g} nats per token from the start, and at most "
        f"{LOW_ENTROPY_OF_AN_ANSWER:g} nats in an answer of the mean length, where that is known; the reward does not "
        "clearly rise"
    ),
    remedy=(
        "[higher temperature|raise the sampling temperature{sampling}, or ]start from an earlier checkpoint of "
        "supervised fine-tuning"
    ),
    evidence=("entropy",),
    source="the log of wallacexuhanxiao/FinQA-tool-calling-GRPO-GSPO",
    no_scenario="is a remark on the model that training begins with",
)


def _before_change_of_data(case: Case) -> Case:
    """Return the run up to a change of the prompts in its later half; all of it if there is none.

    Rewards before and after such a change are of different tasks. Whether the reward rose while the entropy fell is
    only known before it.
    """
    change = case.of(check_data).onset
    if change is None:
        return case
    before = CompactRows(row for row in case.course.rows if row["step"] < change)
    if len(before) < len(case.course.rows) / 2:
        return case
    return Case(Course(before), case.setup)


def _window(case: Case, part: Case) -> str:
    """Return the rows whose means are compared, in words.

    Args:
        case: The run.
        part: The value of `_before_change_of_data`.
    """
    change = case.of(check_data).onset
    if part is case or change is None:
        return TENTHS
    return f"from the first tenth of the log steps before step {format_step(change)} to the last"


def _describe_no_rise(part: Series, reward: Series) -> str:
    """Return a clause on rewards that do not clearly rise, with their steps and their mean if they are not all.

    Args:
        part: The rewards of which this is said.
        reward: All rewards.
    """
    before, after = end_means(part.values, 3)
    is_all = len(part.values) == len(reward.values)
    is_higher = after > before or (is_all and reward.last > reward.first)
    words = "did not clearly rise" if is_higher else "did not rise"
    if is_all:
        return f"the reward {words}"
    mean = format_number(fmean(part.values))
    return f"from step {format_step(part.steps[0])} on the reward {words} (mean {mean})"


def _flat_since(case: Case) -> float:
    """Return the step from which the reward is flat; minus infinity if it is not."""
    flat = case.of(find_flat_part)
    if flat is None:
        return -math.inf
    reward, turn = flat
    return reward.steps[turn]


@LOGS.check(
    "entropy of the policy",
    after="shorter answers",
    tested="entropy is not lost without a higher reward, nor ends both twofold and a nat higher",
    explained="entropy does not fall to near 0 without a higher reward, and does not grow far above its start",
    reports=(ENTROPY_COLLAPSE, ENTROPY_RISES, LOW_ENTROPY_AT_START),
)
def check_entropy(case: Case) -> Finding:
    """Check that entropy does not collapse, or rise without bound.

    A policy rightly loses entropy as it learns which answers are rewarded. A collapse is therefore a fault only if the
    reward does not rise. If the reward becomes flat, only the steps after that count. If the prompts are solved, a
    policy of low entropy is right.
    """
    solved = case.of(is_solved)
    part = _before_change_of_data(case)
    flat_since = _flat_since(part)
    course = part.course
    entropy = course.series("entropy")
    if len(entropy.values) < 2:
        return undecided_check("log the entropy")
    if min(entropy.values) < 0:
        return undecided_check("the logged values are below 0, so they are no entropies")
    first = entropy.first
    last = entropy.last
    change = f"entropy {change_text(first, last)} nats per token"

    reward = course.series("reward")
    late_reward = reward.since(flat_since)
    reason = "no reward is known"
    rose = False
    if len(late_reward.values) > 1:
        change += f", while the reward went {change_text(reward.first, reward.last)}"
        reason = _describe_no_rise(late_reward, reward)
        rose = clearly_rises(late_reward.values)
    change += f", {_window(case, part)}"

    measure = "entropy of the last tenth, divided by that of the first"
    ends = (first_tenth(entropy), last_tenth(entropy))
    finding = passed_check(entropy, last / first if first else 1.0, measure, *ends)
    if last > max(ENTROPY_RISE * first, first + 1):
        # It begins as twice the entropy at the start is passed, which may be far below the nat that makes it a fault.
        begun = ENTROPY_RISE * first or 1.0
        start = onset(entropy, lambda mean: mean > begun)
        cause = f"{change}: the policy becomes random"
        return finding.failed(ENTROPY_RISES, cause, onset=start, quantities=["entropy"])

    # In a log of a few rows the last tenth is one row, which may be far from the others.
    end = median(entropy.values[-max(END_ROWS, len(entropy.values) // 10) :])
    collapsed = last < min(ENTROPY_LEFT * first, NO_ENTROPY) and end < FALLEN * first
    if collapsed and rose and last < LEAST_ENTROPY * first:
        # Next to nothing is left of the entropy, so the reward must have risen after it was lost.
        collapse_step = onset(entropy, lambda mean: mean < LEAST_ENTROPY * 3 * first)
        reward_after = Series((), ())
        if collapse_step is not None:
            reward_after = reward.since(collapse_step)
        if len(reward_after.values) >= 3 * FEW_STEPS and not clearly_rises(reward_after.values):
            rose = False
            reason = _describe_no_rise(reward_after, reward)
    if collapsed and not rose and not solved:
        # A single row above the limit does not begin it anew.
        start = entropy.steps[lasting_row_below(entropy.values, ENTROPY_LEFT * first)]
        rise = _rise_between(entropy)
        cause = f"{change}{rise}: the policy has stopped exploring, and {reason}"
        cause += before_the_limit("entropy", entropy, start)
        # If the reward rose earlier, and some entropy is left or the reward is nearly at its largest, the collapse may
        # be the price of learning.
        rose_earlier = len(reward.values) >= 30 and rise_in_errors(reward) > 3
        learned = rose_earlier and (last > NEARLY_NO_ENTROPY * first or _is_nearly_solved(reward))
        severity = "look" if learned else "fix"
        finding = finding.failed(
            ENTROPY_COLLAPSE, cause, severity=severity, onset=start, quantities=["entropy"]
        )
        return finding._replace(advice=AFTER_A_RISE) if rise else finding

    is_low = first < LOW_ENTROPY and fmean(entropy.values) < LOW_ENTROPY
    length = course.series("length")
    of_answer = first * length.first if length.values else 0.0
    has_few_choices = is_low and of_answer <= LOW_ENTROPY_OF_AN_ANSWER and not clearly_rises(reward.values)
    if len(entropy.values) >= 4 * FEW_STEPS and has_few_choices and not solved:
        cause = f"entropy is {format_number(first, 2)} nats per token at the start"
        if length.values:
            cause += f", {format_number(of_answer, 2)} in an answer of {format_number(length.first)} tokens"
        cause += ": there is little to explore"
        measure = "entropy of the first tenth (nats per token)"
        finding = passed_check(entropy, first, measure, first_tenth(entropy))
        start = next(step for step, value in entropy.points if value < LOW_ENTROPY)
        return finding.failed(LOW_ENTROPY_AT_START, cause, onset=start, quantities=["entropy"])
    if last < FALLEN * first and not rose and not ends_higher(reward):
        return undecided_check(
            f"it has kept {format_share(last / first)} of its start while the reward did not rise"
        )
    return finding


def _rise_between(entropy: Series) -> str:
    """Return a clause on a tenth of the run in which the entropy was far above its start; empty without one."""
    highest = max(tenths(entropy.values), default=0.0) if len(entropy.values) >= 10 else 0.0
    if highest <= max(ENTROPY_RISE * entropy.first, entropy.first + 1):
        return ""
    return f", after the entropy had risen to {format_number(highest)} (mean of a tenth of the run)"


def expected_fall(course: Course) -> str:
    """Return a sentence about entropy that fell to half or less while the reward rose; empty if it did not.

    It is no finding: a policy rightly loses entropy as it learns which answers are rewarded.

    Args:
        course: The metrics of a run without findings.
    """
    entropy = course.series("entropy")
    reward = course.series("reward")
    if len(entropy.values) < FEW_STEPS or min(entropy.values) < 0 or not clearly_rises(reward.values):
        return ""
    if entropy.last > FALLEN * entropy.first or not entropy.first:
        return ""
    fall = format_share(1 - entropy.last / entropy.first)
    before, after = (format_number(value, 2) for value in (reward.first, reward.last))
    return f"entropy fell by {fall} while the reward rose from {before} to {after}, as it does in learning"


def _is_nearly_solved(reward: Series) -> bool:
    """Check whether rewards between 0 and 1 are near 1 in the last third of the log."""
    is_share = min(reward.values) >= 0 and max(reward.values) <= 1
    return is_share and fmean(reward.values[-max(1, len(reward.values) // 3) :]) >= NEARLY_SOLVED
