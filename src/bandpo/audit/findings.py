"""Answers to what people ask about a run's clip, each with a setting to try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bandpo.audit.published import FAR, WIDE_FOR_SEQUENCES, Reported, closest, kind, reported
from bandpo.audit.runs import Run
from bandpo.audit.settings import setting
from bandpo.audit.summary import RunSummary
from bandpo.audit.watch import ENTROPY_LEFT, ENTROPY_RISE
from bandpo.rules import ClipRule, FixedClip

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


def all_findings(d: RunSummary, run: Run | None = None) -> list[Finding]:
    """The answers: does the clip act, as often as is usual, on rare tokens; is entropy lost; is the step right.

    Args:
        d: The run's log, summed up.
        run: What is known of the run besides, which lets an answer compare it with others and name its settings.
    """
    return [check(d, run or Run()) for check in CHECKS]


def _acts(d: RunSummary, run: Run) -> Finding:
    question = "Does the clip act?"
    if d.clipped is None:
        return Finding(question, None, "no clip rate was logged")
    if d.on_policy == 1:
        return Finding(
            question,
            False,
            "never: every ratio was exactly 1, the old policy is the current one",
            "several optimiser steps on each batch"
            f"{setting('several updates', run.framework)}; until then no rule makes a difference",
        )
    if d.clipped == 0 and d.inert is not None and d.inert < 1:
        answer = f"it drops no token, and weights tokens anew in {1 - d.inert:.0%} of losses"
        return Finding(question, True, answer)
    if d.clipped == 0:
        return Finding(
            question,
            False,
            "never: no token was clipped",
            f"several updates on each batch{setting('several updates', run.framework)}, a larger learning rate"
            f"{setting('learning rate', run.framework)}, or a tighter rule{setting('clip', run.framework)}",
        )
    idle = "" if d.inert is None else f"; {d.inert:.0%} of losses had no clipped token"
    return Finding(question, True, f"yes, on {percent(d.clipped)} of tokens{idle}")


def _usual(d: RunSummary, run: Run) -> Finding:
    question = "Is the clip rate usual?"
    if d.clipped is None:
        return Finding(question, None, "no clip rate was logged")
    rate = f"{percent(d.clipped)} of tokens"
    if run.method and run.method.level == "sequence" and _wide(run.method.clip):
        return Finding(
            question,
            False,
            f"{rate}, under a width for single tokens: the ratio of a sequence is a mean over its tokens and hardly "
            "ever leaves it",
            f"GSPO's widths, 3e-4 below and 4e-4 above{setting('clip', run.framework)}",
        )
    if not d.clipped:
        return Finding(question, None, "no token was clipped")
    if run.method is None:
        token, sequence = (closest(d.clipped, reported("fixed", x, d.updates)) for x in ("token", "sequence"))
        return Finding(
            question,
            None,
            f"{rate}; the nearest report at token level is {_said(token)}, at sequence level {_said(sequence)}",
            "--run-method 'GSPO()', or whatever the run was trained with",
        )
    known = reported(kind(run.method), run.method.level, d.updates)
    if not known:
        return Finding(question, None, f"{rate}; we know of no report on this method")
    highest = max(known, key=lambda entry: entry.high)
    if d.clipped > FAR * highest.high:
        return Finding(
            question,
            None,
            f"{rate}, far above what was reported: at most {_said(highest)}",
            "to sample at the temperature of the trainer and from the whole vocabulary"
            f"{setting('sampling', run.framework)}; if that is so, {_smaller(run)}",
        )
    nearest = closest(d.clipped, known)
    within = 0.95 * nearest.low <= d.clipped <= 1.05 * nearest.high  # reports are rounded to two digits
    return Finding(
        question, True, f"{rate}{', as reported:' if within else '; the nearest report is'} {_said(nearest)}"
    )


def _wide(rule: ClipRule) -> bool:
    return isinstance(rule, FixedClip) and rule.high >= WIDE_FOR_SEQUENCES


def _said(entry: Reported) -> str:
    rates = [percent(share) for share in (entry.low, entry.high)]
    return f"{' to '.join(dict.fromkeys(rates))} ({entry.of}; {entry.source})"


def percent(share: float) -> str:
    """A share in per cent, with as many digits as a small one needs.

    >>> percent(0.4), percent(0.0088), percent(2.5e-6)
    ('40%', '0.88%', '0.00025%')
    """
    return f"{float(f'{100 * share:.2g}'):.10f}".rstrip("0").rstrip(".") + "%"


def _rare(d: RunSummary, run: Run) -> Finding:
    question = "Does it suppress rare tokens?"
    if not d.audited:
        return Finding(
            question,
            None,
            "the log does not say",
            f"an audit of the run{setting('audit', run.framework)}, which changes nothing else",
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
        band_here = f"Band(KL(), 0.05){setting('band', run.framework)}"
        return Finding(
            question, False, answer, band_here if wider else f"{_smaller(run)} before a wider rule"
        )
    if interval[1] > STARVED:
        return Finding(question, None, f"{answer}: too few to tell whether it is more than {STARVED:.0%}")
    return Finding(question, True, answer)


def _entropy(d: RunSummary, run: Run) -> Finding:
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
            f"a smaller radius or max_ratio, or a smaller learning rate{setting('learning rate', run.framework)}",
        )
    if last < ENTROPY_LEFT * first:
        if earned:
            return Finding(
                question,
                True,
                answer + ": nearly all spent, but it was earned; little exploration is left",
                f"a tighter lower bound, or an entropy bonus{setting('entropy bonus', run.framework)}, if the reward "
                "should still rise",
            )
        return Finding(
            question,
            False,
            answer + ": collapsed, and nothing was earned",
            f"a wider upper bound for rare tokens{setting('band', run.framework)}, a tighter lower bound, a smaller "
            f"learning rate{setting('learning rate', run.framework)}",
        )
    return Finding(question, True, answer)


def _movement(d: RunSummary, run: Run) -> Finding:
    question = "Is the step the right size?"
    if d.radius_used is None:
        return Finding(question, None, "the log does not say")
    answer = f"a token spends on average {d.radius_used:.1%} of the radius"
    if d.radius_used > 1:
        return Finding(
            question,
            False,
            answer,
            f"{_smaller(run)}: the updates leave the trust region before the clip acts",
        )
    if d.radius_used < 1e-3:
        return Finding(
            question,
            False,
            answer,
            f"a larger learning rate{setting('learning rate', run.framework)} or a smaller radius: the rule hardly "
            "matters here",
        )
    return Finding(question, True, answer)


def _smaller(run: Run) -> str:
    return (
        f"smaller steps{setting('learning rate', run.framework)} or fewer updates per batch"
        f"{setting('updates', run.framework)}"
    )


CHECKS: tuple[Callable[[RunSummary, Run], Finding], ...] = (_acts, _usual, _rare, _entropy, _movement)
