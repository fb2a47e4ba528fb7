"""Verdicts that a record of tokens allows beyond those of a log: on an interval's scale, blocked tokens, and
the rollout engine."""

from __future__ import annotations

import math

from bandpo.audit.findings import Finding
from bandpo.audit.mismatch import LAGS, Mismatch
from bandpo.audit.replay import Replay

FAR = 0.01
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


def all_record_findings(seen: Replay) -> list[Finding]:
    """The answers that `bandpo.audit.findings` cannot give from a log."""
    found = [_scale(seen)] if seen.by_step else []
    found += [_stops(seen)] if seen.moves else []
    return found + ([] if seen.mismatch is None else mismatch_findings(seen.mismatch, seen.anchor))


def _stops(seen: Replay) -> Finding:
    question = "Do blocked tokens stop?"
    said = "; ".join(
        f"{side}, {m.tokens:,} tokens moved by {m.before:.2g} nats until blocked, then by {m.after:+.2g} until the "
        "next look"
        for side, m in seen.moves.items()
    )
    known = [m for m in seen.moves.values() if m.tokens >= ENOUGH]
    if not known:
        return Finding(question, None, f"too few to say: {said}")
    if all(m.after <= STOPPED * m.before for m in known):
        return Finding(question, True, f"yes: {said}")
    return Finding(
        question,
        None,  # no fault of the run: with Adam's usual momentum it is the rule
        f"no: {said}",
        "to count on the bound less: it ends a token's own gradient alone; a lower β1 (TRL: adam_beta1; verl: "
        "optim.betas) stops tokens, but needs a learning rate of its own",
    )


def mismatch_findings(m: Mismatch, anchor: str = "trainer") -> list[Finding]:
    """The answers on the rollout engine.

    Args:
        m: What was seen of it.
        anchor: Whose log-probabilities the run's bounds surround: ``trainer`` or ``rollout``.
    """
    total = m.figures()
    if not total["tokens"]:
        return [
            Finding("Is the engine the trainer's policy?", None, "it gave no log-probability of any token")
        ]
    if total["kl_k3"] == 0:
        return [
            Finding(
                "Is the engine the trainer's policy?",
                None,
                "logp_old and logp_rollout are the same numbers, so mismatch and movement cannot be told apart",
                "record the trainer's own log-probabilities, from a pass before the first update, as logp_old",
            )
        ]
    return [_distance(m), _sampled(m), _temperature(m), _stale(m), _spent(m, anchor)]


def _distance(m: Mismatch) -> Finding:
    d = m.figures()
    answer = (
        f"KL {d['kl_k3']:.2g} nats per token (k3; k1 {d['kl_k1']:.2g}), {d['extreme']:.2%} of tokens off by more than "
        f"a factor of 2, effective sample size {d['ess']:.1%}"
    )
    if d["kl_k3"] < FAR:
        return Finding("Is the engine the trainer's policy?", True, answer)
    return Finding(
        "Is the engine the trainer's policy?",
        False,
        answer,
        "remove the cause, see below; until then weight the loss by a truncated π_old/π_rollout (TIS)",
    )


def _sampled(m: Mismatch) -> Finding:
    """Under the policy that sampled, E[π_old/μ] is 1 whatever π_old is."""
    question = "Are the engine's log-probabilities those of what it sampled?"
    d = m.figures()
    mean, n = d["mean_weight"], d["tokens"]
    spread = mean * math.sqrt(max(1 / d["ess"] - 1, 0.0) / n)
    answer = f"the mean of π_old/π_rollout is {mean:.3f} ± {spread:.2g}; it would be 1"
    if abs(mean - 1) > max(OFF, SURE * spread):
        return Finding(
            question,
            False,
            answer,
            "take log-probabilities after temperature and over the whole vocabulary (vLLM: "
            "logprobs_mode=processed_logprobs; no top-p, top-k, min-p)",
        )
    return Finding(question, True, answer)


def _freshest(m: Mismatch) -> str:
    return next((lag for lag in m.lags if lag != LAGS[-1]), LAGS[-1])


def _temperature(m: Mismatch) -> Finding:
    question = "Is it at the trainer's temperature?"
    lag = _freshest(m)
    d = m.figures(lag=lag)
    if d["kl_k3"] < NEAR or d["fit"] < TEMPERATURE_FIT:
        return Finding(question, True, f"no sign of another: log μ explains {d['fit']:.0%} of the gap")
    side = "sharper (colder)" if d["slope"] < 0 else "flatter (hotter)"
    answer = f"the engine is {side}: its log-probability explains {d['fit']:.0%} of the gap, slope {d['slope']:+.2f}"
    if lag not in ("0", LAGS[-1]):
        return Finding(question, None, f"{answer}; its weights are old too, which can look alike")
    return Finding(
        question,
        False,
        answer,
        "divide the trainer's logits by the sampling temperature, or ask the engine for log-probabilities after it "
        "(TRL: temperature; verl: actor_rollout_ref.rollout.temperature; vLLM: logprobs_mode=processed_logprobs)",
    )


def _stale(m: Mismatch) -> Finding:
    question = "Are its weights fresh?"
    known = [lag for lag in m.lags if lag != LAGS[-1]]
    if not known:
        return Finding(question, None, "the record has no versions", "Recorder.add(step=…, version=…)")
    newest, oldest = known[0], known[-1]
    fresh, old = m.figures(lag=newest), m.figures(lag=oldest)
    if newest == oldest:
        return Finding(question, newest == "0" or None, f"all tokens were sampled {newest} versions before")
    answer = f"KL {fresh['kl_k3']:.2g} at a lag of {newest}, {old['kl_k3']:.2g} at {oldest}"
    if old["kl_k3"] > max(FAR, STALE * fresh["kl_k3"]):
        return Finding(
            question,
            False,
            f"{answer}: staleness is the cause",
            "push weights more often, or allow less lag (verl: async_training.staleness_threshold; AReaL: "
            "max_head_offpolicyness; prime-rl: max_async_level)",
        )
    return Finding(question, True, f"{answer}: lag does not drive them far apart")


def _spent(m: Mismatch, anchor: str) -> Finding:
    question = "Is the clip spent before the first update?"
    d = m.figures()
    before, moved = d["blocked_before"], d["blocked_moved"]
    answer = (
        f"around the engine, it blocks {before:.2%} of tokens before any update and {d['blocked_total']:.2%} after; "
        f"around the trainer {moved:.2%}"
    )
    if anchor == "trainer":
        return Finding(question, True, f"no, its bounds surround the trainer's old policy; {answer}")
    if before > moved and before > NEAR:
        return Finding(
            question,
            False,
            f"most of it: {answer}",
            "anchor at the trainer's own log-probabilities (anchor: trainer), and weight the loss by a truncated "
            "π_old/π_rollout",
        )
    return Finding(question, True, answer)


def _scale(seen: Replay) -> Finding:
    question = "Is its interval made for its level?"
    name = next(iter(seen.by_step))
    d, level = seen.audits[name].metrics(), seen.levels[name]
    clipped, width, moved = d["clip_high"] + d["clip_low"], d.get("upper", math.inf) - 1, d["log_ratio_abs"]
    answer = f"ratios of {level}s move by {moved:.2g} on average, the upper bound is {width:.2g} above 1"
    if not moved or not math.isfinite(width):
        return Finding(question, None, "nothing moved" if not moved else "it has no upper bound")
    if level == "sequence" and not clipped and width > TOO_WIDE * moved:
        return Finding(
            question,
            False,
            f"{answer}: it cannot act",
            "a sequence's ratio is a geometric mean; GSPO's interval is FixedClip(3e-4, 4e-4)",
        )
    if level == "token" and width < SEQUENCE_SCALE and clipped > MANY:
        return Finding(
            question,
            False,
            f"{answer}, and {clipped:.0%} of tokens are blocked: this is an interval for sequences",
            "importance_sampling_level: sequence (TRL), method GSPO(); or FixedClip(0.2, 0.28) for tokens",
        )
    return Finding(question, True, answer)
