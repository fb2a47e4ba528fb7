"""Check that tokens are as probable as the policy's entropy implies."""

from __future__ import annotations

import math

import numpy as np

from rlvet._numbers import format_number, format_step
from rlvet.checks.findings import Finding
from rlvet.checks.log.engine import STALE_WEIGHTS, WEIGHT_SYNC
from rlvet.records.advantages.masks import MASK
from rlvet.records.first_pass import ROUNDING_DISTANCE, FirstPass
from rlvet.records.recorded_advantages import Flags
from rlvet.records.registry import TOKENS
from rlvet.records.tokens.engine import RETOKENISED
from rlvet.records.tokens.ratio import SHIFT
from rlvet.records.tokens.sampling import EDITED_LOGITS, TEMPERATURE, TOP_P, describe_unsampled_edge
from rlvet.records.tokens.trend import FEWEST_FAR_TOKENS, LATE_Z_LIMIT, REMAINDER, Z_LIMIT, Trend


@TOKENS.check(
    "the distribution of the sampler",
    after="probabilities of the engine",
    tested="surprisal equals entropy",
    explained="in a record, tokens are as probable as the policy predicts",
    reports=(TEMPERATURE, TOP_P, EDITED_LOGITS, MASK, STALE_WEIGHTS),
)
def check_surprisal(first_pass: FirstPass) -> Finding:
    """Check that tokens were sampled from the policy: the mean of −log π is then its entropy."""
    tokens = first_pass.tokens_before_updates & ~np.isnan(first_pass.entropy)
    if not tokens.any():
        return Finding("ok", None, "", advice="record entropy= and update=")
    # The entropy is that of the policy in training, which did not sample old tokens.
    tokens = tokens & ~(first_pass.lag > 0)
    if not tokens.any():
        return Finding("ok", None, "", advice="record fresh data too: older weights sampled all of this")

    excesses = first_pass.batch_means(first_pass.excess_surprisal, tokens)
    measure = "mean of surprisal minus entropy (nats per token)"
    passed = Finding.of("", excesses, int(tokens.sum()), measure)
    trend, z = _find_surprising_batches(first_pass, tokens)
    mean, _ = first_pass.mean_and_z(first_pass.excess_surprisal, trend.tokens)
    z_limit = Z_LIMIT if trend.step is None else LATE_Z_LIMIT
    is_significant = abs(z) >= z_limit and abs(mean) >= ROUNDING_DISTANCE
    place = _find_surprising_place(first_pass, trend.tokens)
    if not is_significant and not place:
        return passed

    passed = passed._replace(figure=mean)
    cause = describe_unsampled_edge(first_pass)
    if cause:
        finding = passed.failed(MASK, cause, SHIFT)
    else:
        finding = _find_cause_of_surprisal(first_pass, passed, trend, z, is_significant, place)
    return finding._replace(onset=trend.step)


RARE_EXCESS = 3.0
"""Excess of surprisal over entropy (nats) of rare tokens, which are missing if the engine samples from a part of the
vocabulary. Among tokens that are sampled from the policy, between 1 in 1000 and 1 in 10 exceed it."""


def _find_cause_of_surprisal(
    first_pass: FirstPass, passed: Finding, trend: Trend, z: float, is_significant: bool, place: str
) -> Finding:
    """Return the finding for a surprisal that differs from the entropy.

    Args:
        first_pass: The first pass.
        passed: The finding if the check had passed, with the mean excess of surprisal over entropy as its figure.
        trend: The batches with the difference.
        z: The mean excess in standard errors.
        is_significant: True if the mean excess over whole answers is significant.
        place: The result of `_find_surprising_place`.
    """
    mean = passed.figure or 0.0
    engine_distance = np.abs(first_pass.logp - first_pass.logp_rollout)[trend.tokens]
    has_engine = bool((~np.isnan(engine_distance)).any())
    # Rounding is larger for less probable tokens.
    limit = max(ROUNDING_DISTANCE, 0.1 * abs(mean))
    engine_agrees = has_engine and float(np.nanmean(engine_distance)) <= limit
    witness = ", though engine and trainer agree" if engine_agrees else ""
    since = "" if trend.step is None else f"; before step {format_step(trend.step)} surprisal equals entropy"
    size = f"by {abs(mean):.3f} nats (z {z:.1f})"

    if place:
        # Sampling from a part of the vocabulary also shows at one place only, if the policy is unsure only there.
        rare_tokens = int((first_pass.excess_surprisal[trend.tokens] > RARE_EXCESS).sum())
        if engine_agrees and is_significant and z < 0 and rare_tokens < FEWEST_FAR_TOKENS:
            cause = (
                f"{place} of answers, sampled tokens are more probable than the policy's entropy implies, and only "
                f"{rare_tokens} of all tokens are {format_number(RARE_EXCESS, 6)} nats less probable than that"
                f"{witness}: rare tokens are missing, or the sampler edits logits{since}"
            )
            return passed.failed(TOP_P, cause, EDITED_LOGITS)
        direction = "more or less"
        if is_significant:
            direction = "more" if z < 0 else "less"
        cause = (
            f"only {place} of answers, sampled tokens are {direction} probable than the policy's entropy "
            f"implies{witness}: the sampler edits logits{since}"
        )
        alternatives = () if engine_agrees else (STALE_WEIGHTS,)
        return passed.failed(EDITED_LOGITS, cause, *alternatives)

    if z < 0:
        cause = (
            f"sampled tokens are more probable than the policy's entropy implies, {size}{witness}: rare tokens are "
            f"missing{since}"
        )
        return passed.failed(TOP_P, cause, TEMPERATURE)
    if engine_agrees:
        cause = (
            f"sampled tokens are less probable than the policy's entropy implies, {size}{witness}: the sampler edits "
            f"logits, as a repetition penalty does, or uses a higher temperature than it reports{since}"
        )
        return passed.failed(EDITED_LOGITS, cause, TEMPERATURE)
    cause = (
        f"sampled tokens are less probable than the policy's entropy implies, {size}{since}; record logp_rollout= to "
        "distinguish the sampler from its weights"
    )
    return passed.failed(STALE_WEIGHTS, cause, WEIGHT_SYNC, RETOKENISED, TEMPERATURE, EDITED_LOGITS)


def _find_surprising_batches(first_pass: FirstPass, tokens: Flags) -> tuple[Trend, float]:
    """Find the batch after which the excess of surprisal over entropy is most significant.

    Args:
        first_pass: The first pass.
        tokens: True for tokens to use, (tokens,).

    Returns:
        The batches, and their mean excess in standard errors.
    """
    numbers, batch_index = np.unique(first_pass.batch, return_inverse=True)
    sums = np.bincount(
        first_pass.sequence[tokens],
        weights=first_pass.excess_surprisal[tokens],
        minlength=len(first_pass.batch),
    )
    totals = np.bincount(batch_index, weights=sums, minlength=len(numbers))
    squares = np.bincount(batch_index, weights=np.square(sums), minlength=len(numbers))

    # For each batch, the excess of this batch and all later ones, in standard errors.
    totals_from = totals[::-1].cumsum()[::-1]
    spreads_from = np.sqrt(squares[::-1].cumsum()[::-1])
    z = np.divide(totals_from, spreads_from, out=np.zeros(len(totals_from)), where=spreads_from > 0)
    candidates = z[: max(1, len(z) - 1)]
    start = int(np.abs(candidates).argmax())

    # The excess began within the run only if there is none before.
    total_before = float(totals[:start].sum())
    spread_before = math.sqrt(float(squares[:start].sum()))
    z_before = total_before / spread_before if spread_before else 0.0
    is_clear = abs(z[start]) >= LATE_Z_LIMIT and abs(z[start]) >= abs(z[0]) + 1
    if start < 2 or not is_clear or abs(z_before) > 2:
        start = 0
    from_start = tokens & np.isin(first_pass.batch, numbers[start:])[first_pass.sequence]
    step = first_pass.first_step.get(int(numbers[start])) if start else None
    return Trend(totals.astype(np.float64), start, from_start, step), float(z[start])


def _find_surprising_place(first_pass: FirstPass, tokens: Flags) -> str:
    """Find the one end of answers at which surprisal differs from entropy.

    Args:
        first_pass: The first pass.
        tokens: True for tokens to use, (tokens,).

    Returns:
        ``at the start`` or ``at the end``; empty if neither, or if it differs everywhere.
    """
    longest = int(first_pass.position[tokens].max(initial=0))
    for parts in (2, 3, 4):
        edge = (longest + 1) // parts
        early = tokens & (first_pass.position < edge)
        late = tokens & (first_pass.position >= edge)
        if edge < 2 or not late.any():
            continue
        early_mean, early_z = first_pass.mean_and_z(first_pass.excess_surprisal, early)
        late_mean, late_z = first_pass.mean_and_z(first_pass.excess_surprisal, late)
        smaller = min(abs(early_mean), abs(late_mean))
        larger = max(abs(early_mean), abs(late_mean))
        if smaller > 2 * REMAINDER * larger:
            continue
        if abs(early_z) > LATE_Z_LIMIT and abs(late_z) < 2 and abs(early_mean) > ROUNDING_DISTANCE:
            return "at the start"
        if abs(late_z) > LATE_Z_LIMIT and abs(early_z) < 2 and abs(late_mean) > ROUNDING_DISTANCE:
            return "at the end"
    return ""
