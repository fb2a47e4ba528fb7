"""Check the length of answers: at the cap, longer or shorter without a better reward."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from statistics import fmean, median

from rlvet._numbers import format_number, format_share, format_step
from rlvet.checks.course import (
    Case,
    Course,
    Series,
    blocks,
    clearly_rises,
    end_means,
    ends_higher,
    falls,
    largest_mean,
    lasting_row,
    onset,
    rise_in_errors,
    standard_error,
    tenth_blocks,
    tenths,
)
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.results import (
    FEW_STEPS,
    MOST,
    TENTHS,
    THIRDS,
    before_the_limit,
    change_text,
    first_tenth,
    higher_between,
    lacks_rows,
    last_tenth,
    later_half,
    near_limit,
    passed_check,
    undecided_check,
)
from rlvet.checks.registry import LOGS
from rlvet.runs.quantities import EVALUATION

CUT_FOR_A_WHILE = "share of answers cut off in these log steps"
"""The measure of answers that were cut off in a part of the run, and no more at its end."""

MANY_CUT = 0.3
"""Share of answers cut off in the last tenth above which this is a fault, if it has tripled since the first half."""

SOME_CUT = 0.25
"""Share of answers cut off in the later half above which it is worth a look."""

AT_THE_CAP = 0.9
"""Mean length, as a share of the cap, from which most answers are cut off."""

SHORTEST_CAP = 100
"""Length of the longest answer from which one that is the same in every log step is the cap. All answers to a prompt
may have one length of a few tokens."""

ALWAYS = 0.95
"""Share of log steps in which the longest answer has the length of the cap, if it is the cap."""

TRUNCATED = Kind(
    code="truncated",
    severity="fix",
    meaning="most answers are truncated",
    condition=(
        f"surely most answers are truncated in the second half of the run; or {MANY_CUT:.0%} in the last tenth, if "
        f"the share was a third of that before; or {SOME_CUT:.0%} in the later half, which is `look` if it was a third "
        "of that in the first half, or in a log of a few rows; or, as `look`, most in a tenth of the run. If this "
        "share is not logged: lengths stay at their maximum without the largest rewards, or at "
        f"{AT_THE_CAP:.0%} of the cap in the configuration, or of the longest answer, if that is the same in every log "
        "step"
    ),
    remedy=(
        "allow longer answers{length cap}, or ask for shorter ones; the reward of an answer that is cut off "
        "may be for something else than its result"
    ),
    settings=("length cap",),
    evidence=("cut", "length", "length_max"),
    source=(
        "logs of Rusheel86/Chaos-Economy and alexchilton/CAS_NLP_MODULE4_GRPO, gensyn-ai/rl-swarm issue 312, "
        "huggingface/trl issue 5697"
    ),
    scenarios=(
        "cut off from the start",
        "cut off more and more",
        "cut off in the last tenth",
        "all answers cut off",
    ),
)


ALL_CUT = 0.999
"""Share of answers cut off in each log step from which none ever ended."""

OF_NOISE = 2.0
"""Mean entropy (nats per token) of the first tenth above which answers of which none ends may be noise."""

MAY_BE_NOISE = (
    "read some answers: none ever ended, and at this entropy they may be noise, as of a start model that is damaged; "
    "if they make sense, allow longer ones{length cap}, or ask for shorter ones"
)
"""The remedy for answers of a high entropy of which none ever ended."""


@LOGS.check(
    "answers cut off",
    after="fit of the critic",
    tested="most answers are finished",
    explained="most answers end before the cap on their length",
    reports=(TRUNCATED,),
)
def check_truncation(case: Case) -> Finding:
    """Check that few answers are cut off at the cap on length."""
    course, setup = case.course, case.setup
    cap = setup.number("length cap")
    at_cap = f" at the cap of {format_number(cap, 6)} tokens" if cap else ""
    quantities = ["cut", "length"]
    shares = course.series("cut")
    if not shares.values:
        return _check_length_at_cap(course, cap)

    # Most answers are cut off in the later half.
    late = shares.later_half
    mean = fmean(late)
    measure = "share of answers cut off in the later half"
    finding = passed_check(shares, mean, measure, later_half(shares))
    if len(late) > 1:
        finding = finding._replace(error=standard_error(late))
    if mean - 2 * standard_error(late) > MOST:
        start, since = _since(shares, MOST, mean)
        cause = f"{format_share(mean)} of answers are cut off{at_cap}{since}{_rise_all_the_same(course)}"
        finding = finding.failed(TRUNCATED, cause, onset=start, quantities=quantities)
        entropy = course.series("entropy")
        if min(shares.values) >= ALL_CUT and entropy.values and entropy.first > OF_NOISE:
            nats = f"an entropy of {format_number(entropy.first)} nats per token"
            return finding._replace(advice=MAY_BE_NOISE.replace("this entropy", nats))
        return finding
    if len(shares.values) < 2 * FEW_STEPS:
        if mean <= SOME_CUT:
            if max(shares.values) > MOST:
                return undecided_check("most are cut off in a log step")
            return finding
        part = " in the later half" if len(late) > 1 else ""
        cause = f"{format_share(mean)} of answers are cut off{at_cap}{part}"
        start, _ = _since(shares, SOME_CUT, mean)
        return finding.failed(TRUNCATED, cause, severity="look", onset=start, quantities=quantities)

    # The share has grown towards the end.
    end = shares.values[-max(3, len(shares.values) // 10) :]
    last = fmean(end)
    before = fmean(shares.values[: len(shares.values) // 2])
    if last - 2 * standard_error(end) > MANY_CUT and last > 3 * before:
        rewards = [row["reward"] for row in course.rows if "reward" in row]
        late_reward = early_reward = ""
        if len(rewards) >= 2 * FEW_STEPS:
            late_reward = f" (mean reward {format_number(fmean(rewards[-max(3, len(rewards) // 10) :]))})"
            early_reward = f" ({format_number(fmean(rewards[: len(rewards) // 2]))})"
        cause = (
            f"{format_share(last)} of answers are cut off{at_cap} in the last tenth{late_reward}, "
            f"{format_share(before)} in the first half{early_reward}"
        )
        start = onset(shares, lambda share: share > MANY_CUT / 2, lambda share: share > MANY_CUT)
        finding = passed_check(
            shares, last, "share of answers cut off in the last tenth", slice(-len(end), None)
        )
        finding = finding._replace(error=standard_error(end))
        return finding.failed(TRUNCATED, cause, onset=start, quantities=quantities)

    # Many answers are cut off in the later half.
    if mean > SOME_CUT:
        start, since = _since(shares, SOME_CUT, mean)
        cause = f"{format_share(mean)} of answers are cut off{at_cap} in the later half{since}"
        severity = "fix" if mean > 3 * before else "look"
        return finding.failed(TRUNCATED, cause, severity=severity, onset=start, quantities=quantities)

    # Most answers were cut off in some tenth of the run.
    means = tenths(shares.values)
    if max(means) <= MOST < largest_mean(shares.values, max(1, len(shares.values) // 10)):
        return undecided_check("most are cut off in some log steps")
    if max(means) > MOST:
        worst = means.index(max(means))
        lengths = [len(block) for block in tenth_blocks(shares.steps)]
        first_row = sum(lengths[:worst])
        rows = _rows_above(shares.values, MOST, first_row, first_row + lengths[worst])
        share = fmean(shares.values[rows])
        start, end = shares.steps[rows.start], shares.steps[rows.stop - 1]
        finding = passed_check(shares, share, CUT_FOR_A_WHILE, rows)
        steps = f"from step {format_step(start)} to {format_step(end)}"
        cause = f"{format_share(share)} of answers were cut off{at_cap} {steps}"
        finding = finding.failed(TRUNCATED, cause, severity="look", onset=start, quantities=quantities)
        is_new = _was_seldom(shares.values[: rows.start])
        return finding._replace(advice=NO_LONGER_ENDED) if is_new else finding
    return finding


def _rise_all_the_same(course: Course) -> str:
    """Return a clause on a reward that rises though most answers are cut off; empty if it does not."""
    reward = course.series("reward")
    if len(reward.values) < 2 * FEW_STEPS or not clearly_rises(reward.values):
        return ""
    change = change_text(reward.first, reward.last)
    return f"; the reward went {change} all the same, {TENTHS}: check what it pays for"


FALLEN = 1.25
"""Factor above the later share from which that of the first tenth has fallen."""

RARELY_CUT = 0.05
"""Share of answers cut off before another fault below which most are cut off since then as its effect."""


def with_cut_answers_after_cause(findings: Sequence[Finding], course: Course) -> list[Finding]:
    """Return the findings of a run, with cut answers as the effect of an earlier fault, and after it, if they are that.

    Args:
        findings: The results of all checks.
        course: The metrics.
    """
    cut = next((finding for finding in findings if finding.kind is TRUNCATED), None)
    shares = course.series("cut")
    if cut is None or cut.onset is None or not shares.values:
        return [*findings]
    causes = []
    for finding in findings:
        kind = finding.kind
        is_broken = finding.ok is False and kind is not None and kind.is_effect_of_large_steps
        # The death of a run may be that of the share itself.
        is_other = "cut" not in finding.quantities
        if is_broken and is_other and finding.onset is not None and finding.onset <= cut.onset:
            causes.append(finding)
    if not causes:
        told = _no_longer_ended(cut, shares) or _with_growth(cut, course)
        return [told if finding is cut else finding for finding in findings]
    cause = min(causes, key=lambda finding: finding.onset or 0.0)
    began = cause.onset or 0.0
    before = [share for step, share in shares.points if step < began]
    is_rare = before and max(fmean(before), fmean(before[-FEW_STEPS:])) < RARELY_CUT
    if not is_rare or max(shares.last, fmean(shares.later_half)) <= MOST:
        told = _no_longer_ended(cut, shares) or _with_growth(cut, course)
        return [told if finding is cut else finding for finding in findings]

    share = format_share(fmean(before))
    effect = cut._replace(
        cause=f"{cut.cause}; it was {share} before step {format_step(began)}: probably an effect of {cause.code}",
        advice=f"follow the advice on {cause.code} first; if answers are still cut off then, {cut.advice}",
    )
    ordered = [effect if finding is cut else finding for finding in findings]
    if ordered.index(effect) < ordered.index(cause):
        ordered.remove(effect)
        ordered.insert(ordered.index(cause) + 1, effect)
    return ordered


def _since(shares: Series, limit: float, mean: float) -> tuple[float, str]:
    """Return the step from which on more answers are cut off than a limit, and a clause if that is the run's start.

    Args:
        shares: The shares of answers cut off, which end above the limit.
        limit: The share above which they are too many.
        mean: The share that the sentence names.
    """
    values = shares.values
    if shares.first <= limit or len(values) < 2 * FEW_STEPS:
        return shares.steps[lasting_row(values, limit)], ""
    row = next(row for row, value in enumerate(values) if value > limit)
    before = fmean(values[:row]) if row else limit
    if before < RARELY_CUT:
        return shares.steps[row], ""
    first = format_share(shares.first)
    if before <= limit / 2 and shares.first <= mean:
        was = format_share(before)
        rows = "in the first log step" if row == 1 else f"in the first {row} log steps"
        return shares.steps[row], f"; it was {was} {rows}, and {first} in the first tenth"
    if shares.first > FALLEN * mean:
        return shares.steps[row], f", down from {first} in the first tenth"
    other = "" if first == format_share(mean) else f" ({first} in the first tenth)"
    return shares.steps[row], f", as from the start{other}"


SELDOM_CUT = 0.1
"""Mean share of answers cut off before most are, below which the cap was long enough until then."""


def _was_seldom(shares: Sequence[float]) -> bool:
    """Return whether nearly no answer was cut off in some first log steps, which are not few."""
    return len(shares) >= FEW_STEPS and fmean(shares) < SELDOM_CUT


NO_LONGER_ENDED = (
    "see what an answer gains by ending: one that is cut off should get no reward, or less; longer ones{length cap} "
    "help only if answers would end then"
)
"""The remedy for answers that no longer end, of which nearly none was cut off before."""

THEY_NO_LONGER_END = "they no longer end"
"""The end of the cause of such a finding."""


def _no_longer_ended(cut: Finding, shares: Series) -> Finding | None:
    """Return a finding on cut answers as one on answers that no longer end; None if they were cut off before too.

    Args:
        cut: The finding.
        shares: The shares of answers cut off.
    """
    row = bisect_left(shares.steps, cut.onset or 0.0)
    # The first row of the damage may have fewer, as it may be the mean of steps from before and after.
    while row and shares.values[row - 1] > SOME_CUT:
        row -= 1
    start = shares.steps[row]
    before, since = shares.values[:row], shares.values[row:]
    if cut.ok is not False or not _was_seldom(before) or fmean(since) <= MOST:
        return None
    was = f"it was {format_share(fmean(before))} before step {format_step(start)}"
    return cut._replace(
        cause=f"{cut.cause}; {was}: {THEY_NO_LONGER_END}", onset=start, advice=NO_LONGER_ENDED
    )


GROWN = 1.15
"""Growth of the mean length from its lowest third of the run to the last, from which it is told beside cut answers."""

LOWER = 0.9
"""Share of the best third's reward below which the last third has lost some."""


def _with_growth(cut: Finding, course: Course) -> Finding:
    """Return a finding on cut answers, with a word on a length that grows while the reward falls, if it does."""
    metrics = [course.series(name).values for name in ("cut", "length", "reward")]
    if min(map(len, metrics)) < FEW_STEPS:
        return cut
    shares, lengths, rewards = ([fmean(part) for part in blocks(values, 3)] for values in metrics)
    grows = shares[-1] > 2 * min(shares) and lengths[-1] > GROWN * min(lengths)
    if not grows or min(rewards) < 0 or rewards[-1] > LOWER * max(rewards):
        return cut
    return cut._replace(
        cause=f"{cut.cause}; answers grow at the end, while the reward falls",
        advice=f"see whether the reward pays for long answers; {cut.advice}",
    )


def _rows_above(values: Sequence[float], limit: float, first: int, end: int) -> slice:
    """Return the rows of a part whose mean is above a limit, without those at its ends that are not.

    Rows above the limit before it and after it belong to it too.

    >>> _rows_above([0.0, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9, 0.0], 0.5, 2, 6)
    slice(1, 7, None)
    >>> _rows_above([0.0, 0.4, 0.9, 0.9, 0.1, 0.0], 0.5, 1, 5)
    slice(2, 4, None)
    """
    while values[first] <= limit:
        first += 1
    while values[end - 1] <= limit:
        end -= 1
    while first and values[first - 1] > limit:
        first -= 1
    while end < len(values) and values[end] > limit:
        end += 1
    return slice(first, end)


def has_one_length(course: Course) -> bool:
    """Return whether nearly all log steps have one mean length, as if every answer is cut off.

    >>> [has_one_length(Course([{"step": 1, "length": length}] * 20)) for length in (128.0, 9.5)]
    [True, False]
    """
    lengths = course.series("length").values
    if not lengths:
        return False
    longest = max(lengths)
    is_cap = longest >= SHORTEST_CAP and longest == int(longest)
    return is_cap and lengths.count(longest) >= ALWAYS * len(lengths)


def _check_length_at_cap(course: Course, known_cap: float | None) -> Finding:
    """Check that answers are not cut off, by their mean length, if the log has no share of truncated answers.

    Args:
        course: The metrics of the run.
        known_cap: The cap in the run's configuration; None if it is not known.
    """
    length = course.series("length")
    if len(length.values) < (FEW_STEPS if has_one_length(course) else 2 * FEW_STEPS):
        return undecided_check("log the share of answers cut off")
    if known_cap:
        return _compare_length_with_cap(course, known_cap)

    longest = course.series("length_max")
    if len(longest.values) >= FEW_STEPS * 2:
        largest = max(longest.values)
        rows_at_largest = sum(value == largest for value in longest.values)
        late = fmean(length.later_half)
        is_cap = largest >= SHORTEST_CAP and rows_at_largest >= ALWAYS * len(longest.values)
        if is_cap and AT_THE_CAP * largest <= late <= largest:
            measure = "mean length in the later half, as a share of the longest answer"
            finding = passed_check(length, late / largest, measure, later_half(length))
            cause = (
                f"the mean length is {late:.0f} tokens in the later half, {format_share(late / largest)} of the "
                f"longest answer, which has {largest:.0f} in {rows_at_largest} of {len(longest.values)} log steps: "
                "that is the cap, and most answers are cut off"
            )
            start = onset(length, lambda mean: mean >= AT_THE_CAP * largest)
            return finding.failed(TRUNCATED, cause, onset=start, quantities=["length", "length_max"])

    # The cap is not known. If the largest mean length is a whole number and occurs in several steps, it is the length
    # of every answer in these steps: the cap.
    cap = max(length.values)
    rows_at_cap = sum(value == cap for value in length.values)
    mean = fmean(length.values)
    measure = "mean length, as a share of the largest"
    finding = passed_check(length, mean / cap if cap else 0.0, measure)
    if rows_at_cap < 3 or cap != int(cap) or mean < AT_THE_CAP * cap:
        share = rows_at_cap / len(length.values)
        if share < 0.1 or cap != int(cap) or mean < 0.75 * cap:
            # Mean lengths below a cap that is not known show nothing.
            advice = "log the share of answers cut off"
            if rows_at_cap >= 3 and cap == int(cap) and cap >= SHORTEST_CAP:
                rows = f"{rows_at_cap} of {len(length.values)} log steps"
                advice = f"the mean length is exactly {cap:.0f} in {rows}, which may be the cap: {advice}"
            return undecided_check(advice)
    if _earns_the_most(course.series("reward"), length, cap):
        return undecided_check("log the share of answers cut off")
    cause = (
        f"the mean length is {mean:.0f} tokens, and exactly {cap:.0f} in {rows_at_cap} of {len(length.values)} log "
        f"steps: that is the cap, and every answer of these steps was cut off{_rewards_at_cap(course, cap)}"
        f"{_longest_part_below(length, cap)}"
    )
    start = length.steps[length.values.index(cap)]
    return finding.failed(TRUNCATED, cause, onset=start, quantities=["length"])


LONG_PART = 0.25
"""Share of the log steps from which a part without a length at the cap is told."""


def _longest_part_below(length: Series, cap: float) -> str:
    """Return a clause on the longest part of a run in which no mean length is at the cap; empty without a long one."""
    parts = [
        [*points] for is_below, points in groupby(length.points, lambda point: point[1] < cap) if is_below
    ]
    longest = max(parts, key=len, default=[])
    if len(longest) < LONG_PART * len(length.values):
        return ""
    return f"; none of them is from step {format_step(longest[0][0])} to {format_step(longest[-1][0])}"


def _rewards_at_cap(course: Course, cap: float) -> str:
    """Return a clause on the mean reward of the steps whose length is the cap and of the others; empty if few are."""
    length = course.series("length", beside="reward").values
    rewards = course.series("reward", beside="length").values
    at_cap = [reward for reward, value in zip(rewards, length, strict=True) if value == cap]
    others = [reward for reward, value in zip(rewards, length, strict=True) if value != cap]
    if min(len(at_cap), len(others)) < FEW_STEPS:
        return ""
    return f", with a mean reward of {format_number(fmean(at_cap))}, and {format_number(fmean(others))} in the others"


MOST_OF_THE_REWARD = 0.9
"""Share of the largest reward from which answers of one length are taken for right ones, which are not cut off."""


def _earns_the_most(reward: Series, length: Series, cap: float) -> bool:
    """Check whether the steps in which every answer has one length have the largest rewards of the run.

    Right answers can all be of one length, such as five tokens. An answer that is cut off is rarely right.
    """
    steps = {step for step, value in length.points if value == cap}
    at_cap = [value for step, value in reward.points if step in steps]
    others = [value for step, value in reward.points if step not in steps]
    if not at_cap or not others:
        return False
    mean = fmean(at_cap)
    return mean > fmean(others) and mean > MOST_OF_THE_REWARD * max(reward.values) > 0


def _compare_length_with_cap(course: Course, cap: float) -> Finding:
    """Check that answers are not cut off, by their length and the cap in the run's configuration."""
    length = course.series("length")
    late = fmean(length.later_half)
    measure = "share of the cap that is the mean length in the later half"
    finding = passed_check(length, late / cap, measure, later_half(length))
    if late >= AT_THE_CAP * cap:
        cause = (
            f"the mean length is {late:.0f} tokens in the later half, {format_share(late / cap)} of the cap of "
            f"{format_number(cap, 6)} tokens, so that many answers are cut off"
        )
        start = onset(length, lambda mean: mean >= AT_THE_CAP * cap)
        return finding.failed(TRUNCATED, cause, onset=start, quantities=["length"])
    longest = course.series("length_max")
    if longest.values and max(longest.values) < cap:
        return finding
    # An answer has at most as many tokens as the cap, so that the share that is cut off is at most mean / cap.
    if max(length.values) <= MOST * cap:
        return finding
    return undecided_check("log the share of answers cut off")


NO_LENGTH = "answers have no length at the start"
"""The reason why a change of the length is not judged."""

LITTLE_LONGER = 1.25
"""Growth of the length up to which answers have kept it."""

LONGER = 1.8
"""Growth of the length from which it is reported, if the score on other prompts does not rise with the reward."""

MUCH_BETTER = 0.15
"""Relative rise of the score on other prompts above which the growth of the length is not reported."""

MUCH_LONGER = 3.0
"""Growth of the length from which it is reported without a score on other prompts, if the reward does not rise."""

LENGTH_GROWTH = Kind(
    code="length-growth",
    severity="fix",
    meaning="answers become longer but not better",
    condition=(
        f"answers become {LONGER:g} times as long while the score on other prompts does not increase, which is "
        f"`look` if a reward is below 0; without such a score, {MUCH_LONGER:g} times as long while the reward does "
        "not increase, which is `look`"
    ),
    remedy=(
        "add a penalty on length, or a normalisation that does not reward it, and read some long answers"
    ),
    is_in_the_weights=True,
    evidence=("length", "evaluation", "reward"),
    source="agentscope-ai/Trinity-RFT issue 176; simulated runs of `benchmarks/doctor` and of `rldoctor`",
    scenarios=("length pays, evaluation does not",),
)


@LOGS.check(
    "longer answers",
    after="reward components that outweigh the others",
    tested="answers are less than a quarter longer at the end, or better too",
    explained="answers grow longer only as they grow better",
    reports=(LENGTH_GROWTH,),
)
def check_length(case: Case) -> Finding:
    """Check that answers become much longer only if the score on other prompts, or else the reward, rises."""
    course = case.course
    length = course.series("length")
    if len(length.values) < 4 * FEW_STEPS:
        return lacks_rows(course, 4 * FEW_STEPS, "length")
    if length.first <= 0:
        return undecided_check(NO_LENGTH)
    growth = length.last / length.first
    measure = "mean length of the last tenth, divided by that of the first"
    finding = passed_check(length, growth, measure, first_tenth(length), last_tenth(length))
    reward = course.series("reward")
    score = course.series(EVALUATION)
    change = f"mean length {change_text(length.first, length.last)} tokens, {TENTHS}"
    start = onset(length, lambda mean: mean >= LONGER * length.first)

    if len(score.values) >= 6 and len(reward.values) >= 6:
        if growth < LITTLE_LONGER or _score_follows_reward(reward, score):
            return finding
        if growth < LONGER:
            return undecided_check(
                "they are longer, and the score on other prompts did not rise as the reward"
            )
        if rise_in_errors(reward) < 3:
            if ends_higher(reward):
                return finding
            return undecided_check("they are longer, and neither the score nor the reward rose")
        before, after = end_means(score.values, 3)
        cause = f"{change}, while the score on other prompts went {change_text(before, after)}, {THIRDS}"
        # The relative rise of a reward that may be negative is not comparable.
        severity = "look" if min(reward.values) < 0 else "fix"
        quantities = ["length", EVALUATION]
        return finding.failed(LENGTH_GROWTH, cause, severity=severity, onset=start, quantities=quantities)

    if growth < MUCH_LONGER or len(reward.values) < 30 or rise_in_errors(reward) > 2:
        if growth < LITTLE_LONGER or ends_higher(reward):
            return finding
        of_reward = "the reward did not rise" if reward.values else "no reward is known"
        return near_limit(f"answers are {format_number(growth, 2)} times as long, and {of_reward}")
    cause = f"{change}, and the reward {'falls' if falls(reward.values) else 'does not rise'}"
    start = onset(length, lambda mean: mean >= MUCH_LONGER * length.first)
    return finding.failed(LENGTH_GROWTH, cause, severity="look", onset=start, quantities=["length", "reward"])


def _score_follows_reward(reward: Series, score: Series) -> bool:
    """Check whether the score on other prompts rises by 15 %, or by a third of the relative rise of the reward."""
    reward_before, reward_after = end_means(reward.values, 3)
    score_before, score_after = end_means(score.values, 3)
    score_rise = (score_after - score_before) / max(abs(score_after), abs(score_before), 1e-12)
    reward_rise = (reward_after - reward_before) / max(abs(reward_after), abs(reward_before), 1e-12)
    return score_rise > MUCH_BETTER or score_rise > max(0.0, reward_rise / 3)


LENGTH_LEFT = 0.2
"""Share of the mean length at the start below which answers have collapsed, unless the reward rose. Runs that learn
shorter answers keep a third or more, and their reward rises."""

LENGTH_KEPT = 0.8
"""Share of the mean length at the start from which answers have kept their length."""

LENGTH_COLLAPSE = Kind(
    code="length-collapse",
    severity="fix",
    meaning="answers shrink to a small part of their length but do not become better",
    condition=f"answers shrink to {LENGTH_LEFT:.0%} of their length or less without a higher reward",
    remedy=(
        "read some answers from before and after the fall; a reward that short answers can get, or a length "
        "penalty that is too strong, are common causes"
    ),
    is_in_the_weights=True,
    evidence=("length", "reward"),
    source="a log of JuncyLu/trl_DAPO",
    scenarios=("answers collapse",),
)


@LOGS.check(
    "shorter answers",
    after="longer answers",
    tested="answers are not much shorter at the end, or the reward is higher",
    explained="answers shrink to a small part of their length only as they grow better",
    reports=(LENGTH_COLLAPSE,),
)
def check_short_answers(case: Case) -> Finding:
    """Check that answers do not shrink to a small part of their length without a higher reward."""
    course = case.course
    length = course.series("length")
    reward = course.series("reward")
    if len(length.values) < 2 * FEW_STEPS or len(reward.values) < 2 * FEW_STEPS:
        return lacks_rows(course, 2 * FEW_STEPS, "length", "reward")
    if length.first <= 0:
        return undecided_check(NO_LENGTH)
    left = length.last / length.first
    measure = "mean length of the last tenth, divided by that of the first"
    finding = passed_check(length, left, measure, first_tenth(length), last_tenth(length))
    end = median(length.values[-max(3, len(length.values) // 10) :])
    if left >= LENGTH_KEPT and end >= LENGTH_KEPT * length.first:
        return finding
    rose = rise_in_errors(reward) > 3 and clearly_rises(reward.values)
    if left >= LENGTH_LEFT or end >= LENGTH_LEFT * length.first or rose:
        if ends_higher(reward):
            return finding
        share = format_share(left)
        undecided = near_limit if left < 2 * LENGTH_LEFT else undecided_check
        return undecided(
            f"the length has fallen to {share} while the reward did not rise, but not to {LENGTH_LEFT:.0%}"
        )
    start = onset(length, lambda mean: mean < LENGTH_LEFT * length.first)
    cause = (
        f"mean length {change_text(length.first, length.last)} tokens, while the reward went "
        f"{change_text(reward.first, reward.last)}, {TENTHS}{before_the_limit('length', length, start)}"
        f"{higher_between(reward)}"
    )
    return finding.failed(LENGTH_COLLAPSE, cause, onset=start, quantities=["length", "reward"])
