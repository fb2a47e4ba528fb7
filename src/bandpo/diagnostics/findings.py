"""Answers to what people ask about a run's clip, each with a setting to try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bandpo.diagnostics.summary import RunSummary
from bandpo.diagnostics.watch import ENTROPY_LEFT, ENTROPY_RISE

STARVED = 0.05
"""Share of the gradient on rare tokens from which blocking it is called a fault: a rule of thumb."""


@dataclass(frozen=True)
class Finding:
    """One answer: a question, whether all is in order, and what to try."""

    question: str
    ok: bool | None
    """None where the log cannot tell."""
    answer: str
    try_next: str = ""


def all_findings(d: RunSummary) -> list[Finding]:
    """The answers to: does the clip act, does it suppress rare tokens, is entropy lost, is the step the right size."""
    return [check(d) for check in CHECKS]


def _acts(d: RunSummary) -> Finding:
    question = "Does the clip act?"
    clipped = None if d.clip_high is None else d.clip_high + (d.clip_low or 0.0)
    if clipped is None:
        return Finding(question, None, "no clip rate was logged")
    if d.on_policy == 1:
        return Finding(
            question,
            False,
            "never: every ratio was exactly 1, the old policy is the current one",
            "use each batch for more than one optimiser step; until then no rule makes a difference",
        )
    if clipped == 0:
        return Finding(
            question,
            False,
            "never: no token was clipped",
            "more updates per batch (TRL's default is one), a larger learning rate, or a tighter rule",
        )
    idle = "" if d.inert is None else f"; {d.inert:.0%} of losses had no clipped token"
    return Finding(question, True, f"yes, on {clipped:.2%} of tokens{idle}")


def _rare(d: RunSummary) -> Finding:
    question = "Does it suppress rare tokens?"
    if not d.audited:
        return Finding(
            question,
            None,
            "the log does not say",
            "train with AuditedGRPOTrainer in place of GRPOTrainer, which logs it and changes nothing else",
        )
    own = d.blocked_mass[""].get("below_0.1")
    if own is None:
        return Finding(question, None, "no token below p = 0.1 had a positive advantage")
    band = d.blocked_mass.get("Band", {}).get("below_0.1")
    beside = "" if band is None else f"; Band, on the same tensors, {band:.1%}"
    interval = d.rare.interval()
    within = f" [{interval[0]:.1%}, {interval[1]:.1%}]" if interval else ""
    answer = f"it blocks {own:.1%}{within} of the gradient that would raise tokens below p = 0.1{beside}"
    answer += f" ({d.rare.blocked:.0f} of {d.rare.tokens:.0f} such tokens)"
    if interval is None:
        return Finding(question, None, f"{answer}, in {len(d.rare.steps)} log steps: too few to tell")
    if interval[0] > STARVED:
        wider = band is not None and band < 0.5 * own
        smaller = "smaller steps (learning rate, fewer updates per batch) before a wider rule"
        return Finding(question, False, answer, "clip='Band(KL(), 0.05)'" if wider else smaller)
    if interval[1] > STARVED:
        return Finding(question, None, f"{answer}: too few to tell whether it is more than {STARVED:.0%}")
    return Finding(question, True, answer)


def _entropy(d: RunSummary) -> Finding:
    question = "Is it losing entropy?"
    if d.entropy is None:
        return Finding(question, None, "no entropy was logged")
    first, last = d.entropy
    answer = f"{first:.3g} → {last:.3g} nats per token"
    earned = d.reward is not None and d.reward[1] > d.reward[0] + 0.1 * abs(d.reward[0])
    if d.reward is not None:
        answer += f", while the reward went {d.reward[0]:.3g} → {d.reward[1]:.3g}"
    if last > max(ENTROPY_RISE * first, first + 1):
        return Finding(
            question,
            False,
            answer + ": it drifts towards noise",
            "a smaller radius, max_ratio, or learning rate",
        )
    if last < ENTROPY_LEFT * first:
        if earned:
            return Finding(
                question,
                True,
                answer + ": nearly all spent, but it was earned; little exploration is left",
                "if the reward should still rise: a tighter lower bound, or an entropy bonus",
            )
        return Finding(
            question,
            False,
            answer + ": collapsed, and nothing was earned",
            "a wider upper bound for rare tokens (Band), a tighter lower bound, a smaller learning rate",
        )
    return Finding(question, True, answer)


def _movement(d: RunSummary) -> Finding:
    question = "Is the step the right size?"
    if d.radius_used is None:
        return Finding(question, None, "the log does not say")
    answer = f"a token spends on average {d.radius_used:.1%} of the radius"
    if d.radius_used > 1:
        return Finding(
            question, False, answer, "smaller steps: the updates leave the trust region before the clip acts"
        )
    if d.radius_used < 1e-3:
        return Finding(
            question, False, answer, "larger steps or a smaller radius: the rule hardly matters here"
        )
    return Finding(question, True, answer)


CHECKS: tuple[Callable[[RunSummary], Finding], ...] = (_acts, _rare, _entropy, _movement)
