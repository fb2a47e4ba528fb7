"""Check that the prompts, the reward and the settings stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rlvet._numbers import format_step
from rlvet.checks.course import Case, Jump, find_jump
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.results import change_text, lacks_rows, undecided_check
from rlvet.checks.log.reward import check_fall
from rlvet.checks.registry import LOGS

JUMP_ERRORS = 6.0
"""Standard errors above which a change of level is significant."""

NEAR_ROWS = 3
"""Largest distance, in rows, of jumps of two metrics that count as one event."""

DATA_CHANGE = Kind(
    code="data-change",
    severity="look",
    meaning="prompts, reward or settings seem to have changed at one step",
    condition=f"reward and length both jump, within {NEAR_ROWS} log steps of each other",
    remedy=(
        "check what changed at that step: the order of prompts, a curriculum, the reward, a resume; judge "
        "the rewards before and after it separately"
    ),
    evidence=("length", "reward", "reward_std"),
    source="a simulated curriculum of `benchmarks/doctor`",
    scenarios=("harder prompts from one step on",),
)


MOST_BEFORE = 0.2
"""Share of the rows before a jump that may be on the other side of it."""


def _comes_back(rewards: Sequence[float], jump: Jump) -> bool:
    """Return whether a reward that jumps up had that level before, and had lost it."""
    middle = (jump.before + jump.after) / 2
    above = sum(reward > middle for reward in rewards[: jump.row])
    return jump.after > jump.before and above > MOST_BEFORE * jump.row


def _goes_back(rewards: Sequence[float], jump: Jump) -> bool:
    """Return whether a reward that jumps up is nearer to its level before in the later half of what follows."""
    late = fmean(rewards[(jump.row + len(rewards)) // 2 :])
    return jump.before < jump.after and late < (jump.before + jump.after) / 2


@LOGS.check(
    "a change of the prompts",
    after="groups with equal rewards",
    tested="the largest changes of reward and length are not one jump",
    explained="reward and length do not jump at one step",
    reports=(DATA_CHANGE,),
)
def check_data(case: Case) -> Finding:
    """Check that reward and length do not jump at the same step, as they do when the prompts change."""
    course = case.course
    jumps = {}
    if min(len(course.series(name).values) for name in ("reward", "length")) < 40:
        return lacks_rows(course, 40, "reward", "length")
    for name in ("reward", "length", "reward_std"):
        metric = course.series(name)
        jump = find_jump(metric.values) if len(metric.values) >= 40 else None
        if jump is not None and jump.errors > JUMP_ERRORS:
            jumps[name] = jump
    finding = Finding(
        "ok",
        True,
        "",
        len(jumps),
        None,
        len(course.rows),
        measure="of reward, spread and length, those that jump",
    )
    fall = case.of(check_fall)
    if "reward" not in jumps or "length" not in jumps:
        # A level that is lost and comes back is no jump, but none that stays either.
        return undecided_check("the reward falls") if fall.cause else finding
    if _comes_back(course.series("reward").values, jumps["reward"]):
        return undecided_check("the reward comes back to a level that it had before")
    if _goes_back(course.series("reward").values, jumps["reward"]):
        return undecided_check("the reward jumps, and goes back to its level before")
    row = jumps["length"].row
    simultaneous = {name: jump for name, jump in jumps.items() if abs(jump.row - row) <= NEAR_ROWS}
    if "reward" not in simultaneous:
        return undecided_check("the reward falls") if fall.cause else finding
    changes: dict[float, list[str]] = {}
    for name, jump in simultaneous.items():
        change = f"{name} {change_text(jump.before, jump.after)}"
        changes.setdefault(course.series(name).steps[jump.row], []).append(change)
    events = "; ".join(
        f"at step {format_step(at)}, {', '.join(texts)}" for at, texts in sorted(changes.items())
    )
    manner = "all at once" if len(changes) == 1 else "nearly at once"
    cause = f"{events}, {manner}, as when the prompts, the reward or a setting change, or the policy breaks"
    step = min(changes)
    if fall.cause and fall.onset is not None and fall.onset <= step:
        if sum(fall.onset <= row["step"] < step for row in course.rows) > NEAR_ROWS:
            return undecided_check("they jump in a fall of the reward that began before")
        cause = f"{cause}: the reward falls from step {format_step(fall.onset)} on"
    return finding.failed(DATA_CHANGE, cause, onset=step, quantities=[*simultaneous])
