"""Check what the clip drops: too much, nothing, or the gradient of rare tokens."""

from __future__ import annotations

from statistics import fmean

from rlvet._numbers import format_number, format_share
from rlvet.checks.course import Case, Course, Series, onset
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.results import (
    FEW_STEPS,
    MOST,
    TENTHS,
    last_tenth,
    later_half,
    passed_check,
    undecided_check,
)
from rlvet.checks.registry import LOGS
from rlvet.runs.summary import summarize

MUCH_CLIPPED = 0.3
"""Share of clipped tokens at the end above which a fault is reported, since much of the gradient is lost."""

SOME_CLIPPED = 0.2
"""Share of clipped tokens at the end above which the clip is worth a look."""

MUCH_CLIPPED_SEQUENCES = 0.6
"""The same for sequence-level ratios. Methods such as GSPO clip many sequences by design."""

UNMOVED = 1e-6
"""KL to the sampling policy (nats per token) below which no ratio can be beyond a clip of more than 0.2 %."""

CLIP_HEAVY = Kind(
    code="clip-heavy",
    severity="fix",
    meaning="the clip drops most of the gradient",
    condition=(
        f"more than {SOME_CLIPPED:.0%} of tokens are clipped; above {MUCH_CLIPPED:.0%} this is a fault. For "
        f"sequence-level ratios the limit is {MUCH_CLIPPED_SEQUENCES:.0%}"
    ),
    remedy=(
        "[fewer updates|make fewer updates on each batch{updates}, or ]lower the learning rate{learning rate}"
    ),
    is_effect_of_large_steps=True,
    evidence=("clip", "clip_high", "clip_low"),
    source=(
        "verl-project/verl issue 7356, with ratios of sequences; simulated runs of `benchmarks/doctor` and of "
        "`rldoctor`"
    ),
    scenarios=("clip fraction of 0.4",),
)


def _clip_shares(course: Course) -> Series:
    """Return the share of clipped tokens at each step; the sum of both sides, if the log has one share for each."""
    if "clip" in course.names:
        return course.series("clip")
    names = [name for name in ("clip_high", "clip_low") if name in course.names]
    steps = []
    shares = []
    for row in course.rows if names else ():
        values = [row[name] for name in names if name in row]
        if values:
            steps.append(row["step"])
            shares.append(sum(values))
    return Series(steps, shares)


@LOGS.check(
    "share of clipped tokens",
    after="spikes of the gradient norm",
    tested="the clip keeps most of the gradient",
    explained="the clip keeps most of the gradient",
    reports=(CLIP_HEAVY,),
)
def check_clip_share(case: Case) -> Finding:
    """Check that most tokens, or sequences, are not clipped."""
    course, setup = case.course, case.setup
    shares = _clip_shares(course)
    if len(shares.values) < FEW_STEPS:
        return undecided_check(f"needs the share of clipped tokens in at least {FEW_STEPS} log steps")
    finding = passed_check(
        shares, shares.last, "share of tokens clipped in the last tenth", last_tenth(shares)
    )
    look_limit = SOME_CLIPPED
    fix_limit = MUCH_CLIPPED
    if setup.level == "sequence" or (setup.method or "").startswith("GSPO"):
        look_limit = MUCH_CLIPPED_SEQUENCES
        fix_limit = MUCH_CLIPPED_SEQUENCES
    share = max(shares.last, fmean(shares.later_half))
    if share <= look_limit:
        if share <= MOST:
            return finding
        return undecided_check(f"{format_share(share)} of sequences are clipped")
    rewards = course.series("reward").values
    distance = course.series("kl_old")
    is_unmoved = len(distance.values) >= FEW_STEPS and max(map(abs, distance.later_half)) < UNMOVED
    # With one reward in all rows no token has a gradient to lose. Of a policy that has not moved no token is clipped.
    if is_unmoved or (rewards and min(rewards) == max(rewards)):
        return undecided_check("there is no gradient to lose")
    part = ""
    if share > shares.last:
        part = " in the later half"
        finding = passed_check(shares, share, f"share of tokens clipped{part}", later_half(shares))
    change = f"{shares.first:.1%} → {shares.last:.1%}"
    cause = (
        f"{format_share(share)} of tokens are clipped{part} ({change}, {TENTHS}): their gradient is lost, and updates "
        "go far from the sampling policy"
    )
    if setup.level is None and setup.method is None and share <= MUCH_CLIPPED_SEQUENCES:
        cause = f"{cause}; unless ratios are per sequence, where this is usual"
    severity = "fix" if share > fix_limit else "look"
    start = onset(shares, lambda mean: mean > look_limit)
    quantities = [name for name in ("clip", "clip_high", "clip_low") if name in course.names]
    return finding.failed(CLIP_HEAVY, cause, severity=severity, onset=start, quantities=quantities)


SAME_POLICY = 1e-4
"""KL to the policy before the update (nats per token) up to which it is rounding."""

HARMLESS_BLOCKED_SHARE = 0.11
"""Share of the gradient on rare winners up to which blocking it had no effect in our study of small networks."""

ON_POLICY = Kind(
    code="on-policy",
    severity="note",
    meaning="a note: every ratio is 1",
    condition=("each batch gets one update, or no token was clipped and the number of updates is not known"),
    remedy="nothing to change in the clip, which has no effect with ratios of 1",
    evidence=("clip", "kl_old"),
    source="the definition of the ratio",
    scenarios=("one update per batch",),
)

CLIP_IDLE = Kind(
    code="clip-idle",
    severity="note",
    meaning="a note: no token was clipped",
    condition="no token was clipped although batches get several updates, which are smaller than the rule allows",
    remedy="nothing to change, unless learning is slow",
    evidence=("clip",),
    source="the definition of the clip",
    no_scenario="is a remark; healthy runs make it",
)

RARE_TOKENS_BLOCKED = Kind(
    code="rare-tokens-blocked",
    severity="note",
    meaning="a note: the clip blocks gradient that would increase the probability of rare tokens",
    condition=(
        f"the clip blocks more than {HARMLESS_BLOCKED_SHARE:.0%} of the gradient that would raise tokens "
        "below p = 0.1"
    ),
    remedy=(
        "nothing to change, unless learning is slow. If the data is some batches old, compare a higher "
        "upper bound{band}: it learned sooner, in a small network also at each rule's best learning rate. "
        "On fresh data it gained up to 2% of the reward there if each sample is used once, and up to 6% if four times"
    ),
    evidence=("tokens of a record",),
    source="[studies](when.md) of small networks",
    no_scenario="is a remark; healthy runs make it",
)


MOST_NEW = 0.6
"""Share of the log steps with new answers up to which a batch gets several updates."""


@LOGS.check(
    "the effect of the clip",
    after="a plateau of the reward",
    tested="the effect of the clip",
    explained="what the clip drops; only in a run without a fault",
    reports=(ON_POLICY, CLIP_IDLE, RARE_TOKENS_BLOCKED),
)
def check_clip(case: Case) -> Finding:
    """Describe the effect of the clip, for a run without a fault."""
    if any(finding.ok is False for finding in case.findings):
        return undecided_check("judged only in a run without a fault")
    course, updates = case.course, case.setup.updates
    summary = summarize(course.rows)
    on_policy = summary.metrics.get("on_policy")
    one_update = on_policy == 1 or (updates is not None and updates <= 1 and not summary.clipped)
    if summary.clipped is None and not one_update:
        return undecided_check("needs the share of clipped tokens")
    tokens = int(summary.metrics.get("tokens", 0))
    finding = Finding("ok", True, "", summary.clipped, None, tokens, measure="share of tokens clipped")

    distances = course.series("kl_old").values
    if one_update and updates is not None and updates > 1:
        cause = (
            f"every ratio is 1, though the settings make {format_number(updates, 6)} updates on each batch"
        )
        return finding.failed(ON_POLICY, cause, severity="look")
    if one_update and any(abs(distance) > SAME_POLICY for distance in distances):
        return undecided_check("a batch has one update, and yet the policy differs from that before it")
    if one_update:
        return finding.failed(ON_POLICY, "each batch gets one update, so every ratio is 1")
    is_same = len(distances) >= FEW_STEPS and not any(distances)
    if summary.clipped == 0 and updates is not None and updates > 1 and is_same:
        cause = (
            "no token was clipped, and the KL to the policy before the update is 0 in every log step, though the "
            f"settings make {format_number(updates, 6)} updates on each batch: logp_old may be computed before each"
        )
        return finding.failed(ON_POLICY, cause, severity="look")
    # TRL logs a reward with new answers alone.
    is_reused = 0 < len(course.series("dead", "reward").values) <= MOST_NEW * len(course.rows)
    if summary.clipped == 0 and updates is None and on_policy is None and is_reused:
        cause = (
            "no token was clipped: few log steps have new answers, so that a batch gets several updates, and these are "
            "smaller than the rule allows"
        )
        return finding.failed(CLIP_IDLE, cause)
    if summary.clipped == 0 and updates is None and on_policy is None:
        cause = "no token was clipped, as with one update on each batch"
        return finding.failed(ON_POLICY, cause, CLIP_IDLE)
    if summary.clipped == 0 and summary.metrics.get("inert", 1) == 1:
        cause = "no token was clipped: steps are smaller than the rule allows"
        return finding.failed(CLIP_IDLE, cause)

    interval = summary.blocked_interval()
    if interval is not None and interval[0] > HARMLESS_BLOCKED_SHARE:
        share = summary.metrics["blocked_mass_below_0.1"]
        cause = (
            f"the clip blocks {format_share(share)} [{format_share(interval[0])}, {format_share(interval[1])}] of the "
            "gradient that would raise tokens below p = 0.1"
        )
        return finding.failed(RARE_TOKENS_BLOCKED, cause)
    return finding
