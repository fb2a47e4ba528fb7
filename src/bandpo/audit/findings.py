"""Answers to what people ask about a run's clip and its rollout engine, each with a setting to try.

`all_findings` answers from a log; `record_findings` adds what a record of tokens allows beyond that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from bandpo.audit.logs import Summary
from bandpo.audit.mismatch import LAGS, Mismatch
from bandpo.audit.published import FAR, WIDE_FOR_SEQUENCES, Reported, closest, kind, reported
from bandpo.audit.replay import Replay
from bandpo.audit.settings import Setup
from bandpo.rules import FixedClip

ENTROPY_LEFT = 0.1
"""Share of its start below which entropy has collapsed."""
ENTROPY_RISE = 2.0
"""Times its start, and at least a nat more, from which entropy drifts away."""
STARVED = 0.05
"""Share of the gradient on rare tokens from which blocking it is called a fault: a rule of thumb."""
FAR_APART = 0.01
"""KL (nats per token) from which engine and trainer are called far apart: verl's threshold for rejecting a sequence."""
NEAR = 1e-3
"""KL below which nothing is looked for: a tenth of that."""
TEMPERATURE_FIT = 0.3
"""Share of the variance of log(π_old/μ) that a line over log μ explains, from which a temperature is suspected. Random
logits give 0.6 for two temperatures and below 0.05 for noise on the logits."""
STALE = 2.0
"""Factor by which the KL of the oldest weights exceeds that of the newest, from which staleness is the cause."""
SURE = 5.0
"""Standard errors from 1 beyond which a mean weight is no accident; many, as tokens of a sequence are no independent
draws."""
OFF = 0.05
"""How far from 1 a mean weight must be to matter, half of what the widest usual clip allows a token."""
TOO_WIDE = 6.3
"""Times the mean move, from which an interval cannot act: 5 standard deviations, if moves are normal."""
SEQUENCE_SCALE = 0.01
"""Intervals narrower than this are made for ratios of sequences: GSPO's is 3e-4 to 4e-4, a token's 0.2."""
MANY = 0.1
"""Share of blocked tokens that is no fine-tuning any more. GSPO's usual 10 to 30 % are of sequences."""
ENOUGH = 30
"""Blocked tokens below which their mean movement says little."""
STOPPED = 0.1
"""Share of its movement before the block below which a token counts as stopped. In the runs of docs/theory.md the
shares were 0.2 and 0.6 with Adam's usual momentum, and below 0 without."""


class Finding(NamedTuple):
    """One answer: whether all is in order, what was seen, and what to try."""

    ok: bool | None
    """None where what was looked at cannot tell."""
    answer: str
    try_next: str = ""


def all_findings(d: Summary, setup: Setup | None = None) -> dict[str, Finding]:
    """For each question its answer: does the clip act, as often as is usual, on rare tokens; is entropy lost; is the
    step right.

    Args:
        d: The run's log, summed up.
        setup: What is known of the run besides, which lets an answer compare it with others and name its settings.
    """
    return {question: look(d, setup or Setup()) for question, look in QUESTIONS.items()}


def record_findings(seen: Replay) -> dict[str, Finding]:
    """The answers that a log cannot give: on an interval's scale, blocked tokens, and the rollout engine."""
    found = {"Is its interval made for its level?": _scale(seen)} if seen.by_step else {}
    if seen.moves:
        found["Do blocked tokens stop?"] = _stops(seen)
    return found if seen.mismatch is None else found | mismatch_findings(seen.mismatch, seen.anchor)


def mismatch_findings(m: Mismatch, anchor: str = "trainer") -> dict[str, Finding]:
    """The answers on the rollout engine.

    Args:
        m: What was seen of it.
        anchor: Whose log-probabilities the run's bounds surround: ``trainer`` or ``rollout``.
    """
    d, same = m.figures(), "Is the engine the trainer's policy?"
    if not d["tokens"]:
        return {same: Finding(None, "it gave no log-probability of any token")}
    if d["kl_k3"] == 0:
        return {
            same: Finding(
                None,
                "logp_old and logp_rollout are the same numbers, so mismatch and movement cannot be told apart",
                "record the trainer's own log-probabilities, from a pass before the first update, as logp_old",
            )
        }
    return {
        same: _distance(d),
        "Are the engine's log-probabilities those of what it sampled?": _sampled(d),
        "Is it at the trainer's temperature?": _temperature(m),
        "Are its weights fresh?": _stale(m),
        "Is the clip spent before the first update?": _spent(d, anchor),
    }


def percent(share: float) -> str:
    """A share in per cent, with as many digits as a small one needs.

    >>> percent(0.4), percent(0.0088), percent(2.5e-6)
    ('40%', '0.88%', '0.00025%')
    """
    return f"{float(f'{100 * share:.2g}'):.10f}".rstrip("0").rstrip(".") + "%"


def _acts(d: Summary, setup: Setup) -> Finding:
    if d.clipped is None:
        return Finding(None, "no clip rate was logged")
    inert = d.metrics.get("inert")
    if d.metrics.get("on_policy") == 1:
        return Finding(
            False,
            "never: every ratio was exactly 1, the old policy is the current one",
            f"several optimiser steps on each batch{setup.named('several updates')}; until then no rule makes a "
            "difference",
        )
    if d.clipped == 0 and inert is not None and inert < 1:
        return Finding(True, f"it drops no token, and weights tokens anew in {1 - inert:.0%} of losses")
    if d.clipped == 0:
        return Finding(
            False,
            "never: no token was clipped",
            f"several updates on each batch{setup.named('several updates')}, a larger learning rate"
            f"{setup.named('learning rate')}, or a tighter rule{setup.named('clip')}",
        )
    idle = "" if inert is None else f"; {inert:.0%} of losses had no clipped token"
    return Finding(True, f"yes, on {percent(d.clipped)} of tokens{idle}")


def _usual(d: Summary, setup: Setup) -> Finding:
    if d.clipped is None:
        return Finding(None, "no clip rate was logged")
    rate, method = f"{percent(d.clipped)} of tokens", setup.method
    clip = method.clip if method and method.level == "sequence" else None
    if isinstance(clip, FixedClip) and clip.high >= WIDE_FOR_SEQUENCES:
        return Finding(
            False,
            f"{rate}, under a width for single tokens: the ratio of a sequence is a mean over its tokens and hardly "
            "ever leaves it",
            f"GSPO's widths, 3e-4 below and 4e-4 above{setup.named('clip')}",
        )
    if not d.clipped:
        return Finding(None, "no token was clipped")
    if method is None:
        token, sequence = (closest(d.clipped, reported("fixed", x, d.updates)) for x in ("token", "sequence"))
        return Finding(
            None,
            f"{rate}; the nearest report at token level is {_said(token)}, at sequence level {_said(sequence)}",
            "--run-method 'GSPO()', or whatever the run was trained with",
        )
    known = reported(kind(method), method.level, d.updates)
    if not known:
        return Finding(None, f"{rate}; we know of no report on this method")
    highest = max(known, key=lambda entry: entry.high)
    if d.clipped > FAR * highest.high:
        return Finding(
            None,
            f"{rate}, far above what was reported: at most {_said(highest)}",
            f"to sample at the temperature of the trainer and from the whole vocabulary{setup.named('sampling')}; if "
            f"that is so, {_smaller(setup)}",
        )
    nearest = closest(d.clipped, known)
    within = 0.95 * nearest.low <= d.clipped <= 1.05 * nearest.high  # reports are rounded to two digits
    return Finding(
        True, f"{rate}{', as reported:' if within else '; the nearest report is'} {_said(nearest)}"
    )


def _said(entry: Reported) -> str:
    rates = [percent(share) for share in (entry.low, entry.high)]
    return f"{' to '.join(dict.fromkeys(rates))} ({entry.of}; {entry.source})"


def _rare(d: Summary, setup: Setup) -> Finding:
    if "tokens" not in d.metrics:
        advice = f"an audit of the run{setup.named('audit')}, which changes nothing else"
        return Finding(None, "the log does not say", advice)
    own, band = (d.metrics.get(f"{of}blocked_mass_below_0.1") for of in ("", "if/Band/"))
    interval, (tokens, clipped) = d.blocked_interval(), d.rare
    if own is None:
        return Finding(None, "no token below p = 0.1 had a positive advantage")
    beside = "" if band is None else f"; Band, on the same tensors, {band:.1%}"
    within = f" [{interval[0]:.1%}, {interval[1]:.1%}]" if interval else ""
    answer = f"it blocks {own:.1%}{within} of the gradient that would raise tokens below p = 0.1{beside}"
    answer += f" ({clipped:.0f} of {tokens:.0f} such tokens)"
    if interval is None:
        return Finding(None, f"{answer}, in {len(d.blocked)} log steps: too few to tell")
    low, high = interval
    if low > STARVED:
        wider = band is not None and band < 0.5 * own
        band_here = f"Band(KL(), 0.05){setup.named('band')}"
        return Finding(False, answer, band_here if wider else f"{_smaller(setup)} before a wider rule")
    if high > STARVED:
        return Finding(None, f"{answer}: too few to tell whether it is more than {STARVED:.0%}")
    return Finding(True, answer)


def _entropy(d: Summary, setup: Setup) -> Finding:
    if d.entropy is None:
        return Finding(None, "no entropy was logged")
    return entropy_finding(d.entropy, d.reward, setup)


def entropy_finding(
    entropy: tuple[float, float], reward: tuple[float, float] | None, setup: Setup
) -> Finding:
    """Whether entropy is lost, or drifts away. A policy that becomes sure of what earns reward loses it too, rightly.

    Args:
        entropy: At the start, and now.
        reward: Likewise, if it is known.
        setup: Whose settings the advice names.
    """
    (first, last), slower = entropy, setup.named("learning rate")
    answer, earned = f"{first:.3g} → {last:.3g} nats per token", "no reward is known"
    if reward is not None:
        answer += f", while the reward went {reward[0]:.3g} → {reward[1]:.3g}"
        earned = "nothing was earned"
    if last > max(ENTROPY_RISE * first, first + 1):
        advice = f"a smaller radius or max_ratio, or a smaller learning rate{slower}"
        return Finding(False, f"{answer}: it drifts towards noise", advice)
    if last >= ENTROPY_LEFT * first:
        return Finding(True, answer)
    if reward is not None and reward[1] > reward[0] + 0.1 * abs(reward[0]):
        return Finding(
            True,
            f"{answer}: nearly all spent, but it was earned; little exploration is left",
            f"a tighter lower bound, or an entropy bonus{setup.named('entropy bonus')}, if the reward should still "
            "rise",
        )
    return Finding(
        False,
        f"{answer}: the policy has stopped exploring, and {earned}",
        f"a wider upper bound for rare tokens{setup.named('band')}, a tighter lower bound, a smaller learning rate"
        f"{slower} or an entropy bonus{setup.named('entropy bonus')}",
    )


def _movement(d: Summary, setup: Setup) -> Finding:
    used = d.metrics.get("radius_used")
    if used is None:
        return Finding(None, "the log does not say")
    answer = f"a token spends on average {used:.1%} of the radius"
    if used > 1:
        advice = f"{_smaller(setup)}: the updates leave the trust region before the clip acts"
        return Finding(False, answer, advice)
    if used < 1e-3:
        advice = f"a larger learning rate{setup.named('learning rate')} or a smaller radius: the rule hardly matters"
        return Finding(False, answer, f"{advice} here")
    return Finding(True, answer)


def _smaller(setup: Setup) -> str:
    return f"smaller steps{setup.named('learning rate')} or fewer updates per batch{setup.named('updates')}"


QUESTIONS: Mapping[str, Callable[[Summary, Setup], Finding]] = {
    "Does the clip act?": _acts,
    "Is the clip rate usual?": _usual,
    "Does it suppress rare tokens?": _rare,
    "Is it losing entropy?": _entropy,
    "Is the step the right size?": _movement,
}


def _scale(seen: Replay) -> Finding:
    d, level = seen.audits[seen.judged].metrics(), seen.levels[seen.judged]
    clipped, width, moved = d["clip_high"] + d["clip_low"], d.get("upper", math.inf) - 1, d["log_ratio_abs"]
    answer = f"ratios of {level}s move by {moved:.2g} on average, the upper bound is {width:.2g} above 1"
    if not moved or not math.isfinite(width):
        return Finding(None, "nothing moved" if not moved else "it has no upper bound")
    if level == "sequence" and not clipped and width > TOO_WIDE * moved:
        advice = "a sequence's ratio is a geometric mean; GSPO's interval is FixedClip(3e-4, 4e-4)"
        return Finding(False, f"{answer}: it cannot act", advice)
    if level == "token" and width < SEQUENCE_SCALE and clipped > MANY:
        return Finding(
            False,
            f"{answer}, and {clipped:.0%} of tokens are blocked: this is an interval for sequences",
            "importance_sampling_level: sequence (TRL), method GSPO(); or FixedClip(0.2, 0.28) for tokens",
        )
    return Finding(True, answer)


def _stops(seen: Replay) -> Finding:
    said = "; ".join(
        f"{side}, {m.tokens:,} tokens moved by {m.before:.2g} nats until blocked, then by {m.after:+.2g} until the "
        "next look"
        for side, m in seen.moves.items()
    )
    known = [m for m in seen.moves.values() if m.tokens >= ENOUGH]
    if not known:
        return Finding(None, f"too few to say: {said}")
    if all(m.after <= STOPPED * m.before for m in known):
        return Finding(True, f"yes: {said}")
    return Finding(
        None,  # no fault of the run: with Adam's usual momentum it is the rule
        f"no: {said}",
        "to count on the bound less: it ends a token's own gradient alone; a lower β1 (TRL: adam_beta1; verl: "
        "optim.betas) stops tokens, but needs a learning rate of its own",
    )


def _distance(d: Mapping[str, float]) -> Finding:
    answer = (
        f"KL {d['kl_k3']:.2g} nats per token (k3; k1 {d['kl_k1']:.2g}), {d['extreme']:.2%} of tokens off by more than "
        f"a factor of 2, effective sample size {d['ess']:.1%}"
    )
    if d["kl_k3"] < FAR_APART:
        return Finding(True, answer)
    advice = "remove the cause, see below; until then weight the loss by a truncated π_old/π_rollout (TIS)"
    return Finding(False, answer, advice)


def _sampled(d: Mapping[str, float]) -> Finding:
    """Under the policy that sampled, E[π_old/μ] is 1 whatever π_old is."""
    mean = d["mean_weight"]
    spread = mean * math.sqrt(max(1 / d["ess"] - 1, 0.0) / d["tokens"])
    answer = f"the mean of π_old/π_rollout is {mean:.3f} ± {spread:.2g}; it would be 1"
    if abs(mean - 1) <= max(OFF, SURE * spread):
        return Finding(True, answer)
    return Finding(
        False,
        answer,
        "take log-probabilities after temperature and over the whole vocabulary (vLLM: "
        "logprobs_mode=processed_logprobs; no top-p, top-k, min-p)",
    )


def _temperature(m: Mismatch) -> Finding:
    lag = next((lag for lag in m.lags if lag != LAGS[-1]), LAGS[-1])  # the freshest
    d = m.figures(lag=lag)
    if d["kl_k3"] < NEAR or d["fit"] < TEMPERATURE_FIT:
        return Finding(True, f"no sign of another: log μ explains {d['fit']:.0%} of the gap")
    side = "sharper (colder)" if d["slope"] < 0 else "flatter (hotter)"
    answer = f"the engine is {side}: its log-probability explains {d['fit']:.0%} of the gap, slope {d['slope']:+.2f}"
    if lag not in ("0", LAGS[-1]):
        return Finding(None, f"{answer}; its weights are old too, which can look alike")
    return Finding(
        False,
        answer,
        "divide the trainer's logits by the sampling temperature, or ask the engine for log-probabilities after it "
        "(TRL: temperature; verl: actor_rollout_ref.rollout.temperature; vLLM: logprobs_mode=processed_logprobs)",
    )


def _stale(m: Mismatch) -> Finding:
    known = [lag for lag in m.lags if lag != LAGS[-1]]
    if not known:
        return Finding(None, "the record has no versions", "Recorder.add(step=…, version=…)")
    newest, oldest = known[0], known[-1]
    if newest == oldest:
        return Finding(newest == "0" or None, f"all tokens were sampled {newest} versions before")
    fresh, old = m.figures(lag=newest)["kl_k3"], m.figures(lag=oldest)["kl_k3"]
    answer = f"KL {fresh:.2g} at a lag of {newest}, {old:.2g} at {oldest}"
    if old <= max(FAR_APART, STALE * fresh):
        return Finding(True, f"{answer}: lag does not drive them far apart")
    return Finding(
        False,
        f"{answer}: staleness is the cause",
        "push weights more often, or allow less lag (verl: async_training.staleness_threshold; AReaL: "
        "max_head_offpolicyness; prime-rl: max_async_level)",
    )


def _spent(d: Mapping[str, float], anchor: str) -> Finding:
    before, moved = d["blocked_before"], d["blocked_moved"]
    answer = (
        f"around the engine, it blocks {before:.2%} of tokens before any update and {d['blocked_total']:.2%} after; "
        f"around the trainer {moved:.2%}"
    )
    if anchor == "trainer":
        return Finding(True, f"no, its bounds surround the trainer's old policy; {answer}")
    if before <= max(moved, NEAR):
        return Finding(True, answer)
    return Finding(
        False,
        f"most of it: {answer}",
        "anchor at the trainer's own log-probabilities (anchor: trainer), and weight the loss by a truncated "
        "π_old/π_rollout",
    )
