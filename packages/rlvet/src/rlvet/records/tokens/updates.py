"""Check that updates move the policy, and that no gradient is lost."""

from __future__ import annotations

import math

import numpy as np

from rlvet._numbers import format_number
from rlvet.checks.findings import Finding
from rlvet.checks.log.movement import HARDLY_MOVES, NO_STEP
from rlvet.records.advantages.masks import MICRO_BATCH_LOST
from rlvet.records.first_pass import FirstPass
from rlvet.records.registry import TOKENS
from rlvet.records.tokens.trend import FEWEST_BATCHES, REMAINDER

UNMOVED = 2e-6
"""Mean abs log-ratio (nats) up to which two passes in float32 have the same weights."""

HARDLY_MOVED = 1e-4
"""Mean abs log-ratio (nats) after all updates on a batch up to which they hardly have an effect."""

NEAR_LIMIT = 10.0
"""Factor by which the largest batch may exceed `HARDLY_MOVED`."""


@TOKENS.check(
    "movement by updates",
    after="the distribution of the sampler",
    tested="updates move the policy",
    explained="in a record, updates move the policy, and no part of a batch is lost",
    reports=(NO_STEP, HARDLY_MOVES, MICRO_BATCH_LOST),
)
def check_updates(first_pass: FirstPass) -> Finding:
    """Check that updates move the policy, and that the gradient of each loss has an effect."""
    before = []
    after = []
    for movement in first_pass.movement.values():
        if max(movement) > 0:
            after.append(movement[max(movement)])
            before.append(movement.get(0, math.nan))
    if not after:
        return Finding("ok", None, "", advice="record update= with each of several updates")
    measure = "mean abs log-ratio after the last update on a batch (nats)"
    passed = Finding.of(" (mean abs log-ratio)", after, len(after), measure)

    advantages = first_pass.advantage[~np.isnan(first_pass.advantage)]
    has_signal = not len(advantages) or bool((advantages != 0).any())
    updates = max(max(movement) for movement in first_pass.movement.values())
    if has_signal and max(after) <= UNMOVED:
        precision = f"{format_number(max(after), 1)} nats"
        if first_pass.repeats_sequences:
            cause = (
                f"the same tokens are repeated after updates (up to {updates} on a batch), yet their log-probabilities "
                f"stay the same to {precision}: optimizer.step is not reached, or its learning rate is 0 or "
                "too small for the weights' precision"
            )
        else:
            cause = (
                f"the record counts up to {updates} updates on a batch, yet every ratio is 1 to {precision}: "
                "optimizer.step is not reached, its learning rate is too small for the weights' precision, or logp_old "
                "is computed again before each update"
            )
        return passed.failed(NO_STEP, cause)

    distance_before = float(np.nanmedian(before)) if not np.isnan(before).all() else 0.0
    # A policy that has collapsed hardly moves either, but only after batches with large updates.
    hardly_moves = float(np.median(after)) <= HARDLY_MOVED and max(after) <= NEAR_LIMIT * HARDLY_MOVED
    if has_signal and hardly_moves and distance_before <= HARDLY_MOVED:
        movement = format_number(float(np.median(after)), 1)
        cause = (
            f"all {updates} updates on a batch move log-probabilities by {movement} nats together: the learning rate "
            "is too small to move the policy"
        )
        return passed.failed(HARDLY_MOVES, cause)

    cause = _describe_lost_gradient(first_pass)
    if cause and has_signal:
        return passed.failed(MICRO_BATCH_LOST, cause)
    return passed


LOST_P = 1e-3
"""Significance level of the test that the gradient of the last loss of updates is lost."""


def _describe_lost_gradient(first_pass: FirstPass) -> str:
    """Describe that the last micro-batch of updates has no effect; return an empty text if it has.

    If all losses of an update have the same effect, each is equally likely to have the lowest slope.

    Args:
        first_pass: The first pass.
    """
    slopes = first_pass.advantage_slopes
    if len(slopes) < FEWEST_BATCHES:
        return ""
    last_slope = float(np.median([batch_slopes.last_loss for batch_slopes in slopes]))
    other_slope = float(np.median([batch_slopes.other_losses for batch_slopes in slopes]))
    lowest = sum(batch_slopes.is_lowest for batch_slopes in slopes)
    # The probability of each number of batches in which the last loss is the lowest by chance.
    probabilities = np.ones(1)
    for batch_slopes in slopes:
        probability = 1 / batch_slopes.losses
        probabilities = np.convolve(probabilities, [1 - probability, probability])
    if float(probabilities[lowest:].sum()) > LOST_P or last_slope > 2 * REMAINDER * other_slope:
        return ""
    return (
        f"log-probabilities of the last of {slopes[0].losses} micro-batches move with their advantages by "
        f"{format_number(last_slope, 2)} nats per unit of advantage, those of the others "
        f"by {format_number(other_slope, 2)}, and in {lowest} of {len(slopes)} batches they move least: its gradient "
        "is lost"
    )
