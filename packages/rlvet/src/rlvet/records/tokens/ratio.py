"""Check that the ratio is 1 before the first update on a batch."""

from __future__ import annotations

import numpy as np

from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.engine import ENGINE_MISMATCH, STALE_WEIGHTS, WEIGHT_SYNC
from rlvet.records.ages import ROUNDING_DISTANCE
from rlvet.records.first_pass import FirstPass
from rlvet.records.recorded_advantages import Flags, Floats, Integers
from rlvet.records.registry import TOKENS
from rlvet.records.tokens.sampling import (
    TEMPERATURE,
    TOP_P,
    fit_temperature_ratio,
    is_engine_above,
    undetectable_kinds,
)
from rlvet.records.tokens.trend import (
    FEWEST_TOKENS,
    LOG_WEIGHT_LIMIT,
    MAJORITY,
    NEGLIGIBLE,
    REMAINDER,
    Trend,
    find_trend,
)

SHIFT = Kind(
    code="shift",
    severity="fix",
    meaning="log-probabilities are shifted by one or two tokens",
    condition="with a shift by one or two tokens, the columns agree",
    remedy="align log-probabilities with their tokens: those of logits[:, :-1] belong to ids[:, 1:]",
    evidence=("logp", "logp_old", "logp_rollout"),
    source="modelscope/ms-swift pull request 8196; simulated shifts of `benchmarks/doctor`",
    scenarios=("old log-probabilities shifted", "both log-probabilities shifted"),
)

PERMUTED = Kind(
    code="permuted",
    severity="fix",
    meaning="old log-probabilities belong to tokens of other rows or positions",
    condition=(
        "values of logp_old occur in logp at other tokens, have no correlation with it, or are lower than "
        "any policy gives"
    ),
    remedy=(
        "trace one sequence from the pass that computes logp_old to the loss: shuffle, sort and pad "
        "log-probabilities together with their tokens"
    ),
    evidence=("logp", "logp_old"),
    source="simulated permutations of `benchmarks/doctor`",
    scenarios=("old rows permuted", "old positions permuted"),
)

REFERENCE_AS_OLD = Kind(
    code="reference-as-old",
    severity="fix",
    meaning="the old log-probabilities come from other weights, such as the reference's",
    condition=(
        "logp_old is far from logp and from the engine, which agree, and no shift, temperature or rounding "
        "explains it"
    ),
    remedy=(
        "compute logp_old with the policy in training, before its first update on the batch; check that it "
        "does not hold the log-probabilities of the reference, or of an earlier batch"
    ),
    evidence=("logp", "logp_old", "logp_rollout"),
    source="simulated references of `benchmarks/doctor`",
    scenarios=("reference as old",),
)

PRECISION_DISTANCE = 0.05
"""Mean abs log-ratio (nats) up to which a constant distance may be due to half precision."""

PRECISION = Kind(
    code="precision",
    severity="fix",
    meaning="two forward passes of the trainer differ by rounding",
    condition=(
        "the ratio is not 1 before the first update, by a constant distance of at most "
        f"{PRECISION_DISTANCE:g} nats"
    ),
    remedy=(
        "compute logp and logp_old in the same precision and with the same kernels: the same autocast, "
        "padding and attention, without dropout"
    ),
    evidence=("logp", "logp_old"),
    source="passes in bfloat16 of `benchmarks/doctor`",
    scenarios=("old in half precision",),
)

DROPOUT = Kind(
    code="dropout",
    severity="fix",
    meaning="forward passes with the same weights differ at random",
    condition=(
        "the ratio is not 1 before the first update, and no shift, temperature or other weights explain it"
    ),
    remedy=(
        "set dropout to 0, or put the policy into eval mode, in every pass that computes log-probabilities"
    ),
    evidence=("logp", "logp_old"),
    source="huggingface/trl pull request 3234; passes with dropout of `benchmarks/doctor`",
    scenarios=("dropout on", "dropout"),
)

EXACT_DISTANCE = 1e-3
"""Largest mean abs log-ratio (nats) between two passes of one policy in the same precision. `ROUNDING_DISTANCE` is the
limit for different kernels."""


@TOKENS.check(
    "the ratio before the first update",
    after="impossible values of tokens",
    tested="the ratio is 1 before the first update",
    explained="in a record, it is 1",
    reports=(
        SHIFT,
        PERMUTED,
        REFERENCE_AS_OLD,
        PRECISION,
        DROPOUT,
        TEMPERATURE,
        TOP_P,
        ENGINE_MISMATCH,
        STALE_WEIGHTS,
    ),
)
def check_ratio(first_pass: FirstPass) -> Finding:
    """Check that the policy in training equals the old policy before any update."""
    tokens = first_pass.tokens_before_updates
    # Stale data may have another ratio, although the log-probabilities are right. The engine's are always those of the
    # weights that sampled, so only tokens that are known to be fresh show a fault of these.
    fresh = tokens & (first_pass.lag == 0 if first_pass.logp_old_is_rollout else ~(first_pass.lag > 0))
    # Without such tokens, those of unknown age are tested.
    tokens = fresh if fresh.any() else tokens & np.isnan(first_pass.lag)
    tokens = tokens & ~np.isnan(first_pass.logp)
    if not tokens.any():
        is_old = bool((first_pass.lag > 0).any())
        advice = "record fresh data too: older weights sampled all of this"
        return Finding("ok", None, "", advice=advice if is_old else "record update= with each loss")

    limit = ROUNDING_DISTANCE if first_pass.anchored_at_rollout else EXACT_DISTANCE
    distance = np.abs(first_pass.logp - first_pass.logp_old)
    trend = find_trend(first_pass, distance, tokens, limit)
    measure = "mean abs(log π − log π_old) before the first update (nats)"
    passed = Finding.of("", trend.values, int(tokens.sum()), measure)
    if trend.figure <= limit or float(trend.values.max()) <= limit:
        return passed
    # A few wrong batches among correct ones are no fault of the passes.
    wrong_share = float((trend.values[trend.start :] > limit).mean())
    is_only_last = trend.start and len(trend.values) - trend.start < 2
    if wrong_share < MAJORITY or (is_only_last and not first_pass.logp_old_is_rollout):
        return passed
    passed = passed._replace(figure=trend.figure, onset=trend.step)
    return _find_cause_of_ratio(first_pass, passed, trend)._replace(onset=trend.step)


def _find_cause_of_ratio(first_pass: FirstPass, passed: Finding, trend: Trend) -> Finding:
    """Return the finding for a ratio that is not 1 before updates.

    Args:
        first_pass: The first pass.
        passed: The finding if the check had passed.
        trend: The mean abs log-ratio by batch.
    """
    outlier = _find_outlier(first_pass, trend.tokens)
    witness = ""
    if outlier == "old":
        witness = ", though the policy in training agrees with the engine"
    elif outlier == "new":
        witness = ", though the old policy agrees with the engine"

    finding = _find_moved_values(first_pass, passed, trend, outlier, witness)
    if finding is not None:
        return finding

    since = trend.since
    ratio, r_squared = fit_temperature_ratio(first_pass, first_pass.logp, first_pass.logp_old, trend.tokens)
    if ratio:
        cause = f"logp_old is at {ratio:.2f} times the temperature of logp (R² {r_squared:.2f}){since}"
        return passed.failed(TEMPERATURE, cause)

    if outlier == "old":
        if not trend.grows and trend.figure <= PRECISION_DISTANCE:
            cause = (
                f"logp_old has another precision or kernel, or comes from a pass with dropout{witness}{since}"
            )
            return passed.failed(PRECISION, cause)
        growth = "; the distance is smaller in the first batch than later" if trend.grows else ""
        cause = f"logp_old comes from other weights{witness}{growth}{since}"
        return passed.failed(REFERENCE_AS_OLD, cause)

    finding = _find_engine_as_old(first_pass, passed, trend)
    if finding is not None:
        return finding

    undetectable = undetectable_kinds(first_pass)
    has_engine = bool((~np.isnan(first_pass.logp_rollout[trend.tokens])).any())
    if trend.grows and not has_engine:
        cause = (
            "logp_old comes from other weights: the distance begins near 0 and grows; record logp_rollout="
        )
        return passed.failed(REFERENCE_AS_OLD, cause, DROPOUT, *undetectable)
    if not first_pass.logp_old_is_rollout and trend.figure <= ROUNDING_DISTANCE:
        cause = f"two passes of the trainer differ by rounding, due to precision or kernels{witness}{since}"
        return passed.failed(PRECISION, cause, DROPOUT)
    untested = (*_untested_shift(first_pass, trend.tokens), *undetectable)
    excluded = [kind.code for kind in (SHIFT, TEMPERATURE) if kind not in untested]
    unexplained = f", and no {' or '.join(excluded)} explains it" if excluded else ""
    cause = f"two passes over the same tokens differ{unexplained}{witness}{since}"
    alternatives = (ENGINE_MISMATCH,) if first_pass.logp_old_is_rollout else (PRECISION,)
    return passed.failed(DROPOUT, cause, *alternatives, *untested)


def _untested_shift(first_pass: FirstPass, tokens: Flags) -> tuple[Kind, ...]:
    """Return the kind `SHIFT` if too few tokens have neighbours to find a shift by one token."""
    return () if first_pass.can_find_shifts(tokens) else (SHIFT,)


GREATEST_SURPRISAL = 12.5
"""Surprisal (nats per token) of the uniform distribution over a vocabulary of 268,000 tokens. Tokens that one policy
sampled are hardly ever less probable under another."""


def _find_moved_values(
    first_pass: FirstPass, passed: Finding, trend: Trend, outlier: str, witness: str
) -> Finding | None:
    """Find old log-probabilities that belong to other tokens, by a shift, a permutation or padding.

    Args:
        first_pass: The first pass.
        passed: The finding if the check had passed.
        trend: The mean abs log-ratio by batch.
        outlier: The result of `_find_outlier`.
        witness: A clause on the agreement of the other two columns; empty if there is no outlier.
    """
    tokens = trend.tokens
    since = trend.since
    new = first_pass.logp
    old = first_pass.logp_old
    shift, shifted_distance, unshifted_distance = first_pass.best_shift(new, old, tokens)
    if shift and shifted_distance < REMAINDER * unshifted_distance:
        cause = (
            f"logp_old is shifted by {shift:+d} tokens against logp: with this shift the ratio is 1{since}"
        )
        return passed.failed(SHIFT, cause)

    permutation = _describe_permutation(first_pass, new, old, tokens, outlier)
    if permutation:
        cause = f"logp_old has the values of other tokens: {permutation}{witness}{since}"
        return passed.failed(PERMUTED, cause)
    if outlier == "old" and float(-np.median(old[tokens])) > GREATEST_SURPRISAL:
        median = float(np.median(old[tokens]))
        cause = (
            f"the median of logp_old is {median:.0f} nats, lower than any policy gives: it has the values of other "
            f"tokens, such as padding{witness}{since}"
        )
        return passed.failed(PERMUTED, cause, *_untested_shift(first_pass, tokens))

    return None


def _find_engine_as_old(first_pass: FirstPass, passed: Finding, trend: Trend) -> Finding | None:
    """Find the difference between engine and trainer that explains the ratio if ``logp_old`` comes from the engine.

    Args:
        first_pass: The first pass.
        passed: The finding if the check had passed.
        trend: The mean abs log-ratio by batch.
    """
    if not first_pass.logp_old_is_rollout:
        return None
    since = trend.since
    if trend.figure <= ROUNDING_DISTANCE:
        cause = f"logp_old comes from the engine, which has other kernels or another precision{since}"
        return passed.failed(ENGINE_MISMATCH, cause)
    if is_engine_above(first_pass.logp - first_pass.logp_old, trend.tokens):
        cause = (
            "the engine's probabilities are above the trainer's nearly everywhere: it samples from a part of the "
            f"vocabulary{since}"
        )
        return passed.failed(TOP_P, cause)
    if trend.grows or bool((first_pass.lag[trend.tokens] > 0).any()):
        cause = f"logp_old comes from the engine, which has other weights than the trainer{since}"
        return passed.failed(STALE_WEIGHTS, cause, WEIGHT_SYNC)
    return None


def _find_outlier(first_pass: FirstPass, tokens: Flags) -> str:
    """Find the log-probabilities that differ from the other two, which agree.

    Returns:
        ``new`` for those of the policy in training, ``old`` or ``engine``; empty if there is no outlier.
    """
    tokens = tokens & ~np.isnan(first_pass.logp + first_pass.logp_rollout)
    if first_pass.logp_old_is_rollout or not tokens.any():
        return ""
    new = first_pass.logp[tokens]
    old = first_pass.logp_old[tokens]
    engine = first_pass.logp_rollout[tokens]
    # The distance between the two others.
    distances = {
        "engine": float(np.abs(new - old).mean()),
        "old": float(np.abs(new - engine).mean()),
        "new": float(np.abs(old - engine).mean()),
    }
    nearest, second, _ = sorted(distances, key=lambda name: distances[name])
    return nearest if distances[nearest] < 2 * REMAINDER * distances[second] else ""


def _describe_permutation(
    first_pass: FirstPass, first: Floats, second: Floats, tokens: Flags, outlier: str
) -> str:
    """Return whether rows or positions of a column are permuted, as a text; empty if there is no sign of it.

    Args:
        first_pass: The first pass.
        first: Log-probabilities (nats), (tokens,).
        second: Log-probabilities (nats) that should belong to the same tokens, (tokens,). It is permuted if many of its
            values occur in ``first`` at another token of the same sequence, or of the same position in the batch.
        tokens: True for tokens to compare, (tokens,).
        outlier: The result of `_find_outlier`.
    """
    batch_and_position = np.stack(
        [first_pass.batch[first_pass.sequence[tokens]], first_pass.position[tokens]]
    )
    _, same_position = np.unique(batch_and_position, axis=1, return_inverse=True)
    groups = {
        "positions are permuted": first_pass.sequence[tokens],
        "rows are permuted": same_position.ravel(),
    }
    shares = {}
    for description, group in groups.items():
        shares[description] = _share_of_moved_values(first[tokens], second[tokens], group)
    likeliest = max(shares, key=lambda description: shares[description])
    if shares[likeliest] > REMAINDER:
        return likeliest
    # Only a part of a long record is kept, so the token that a value belongs to may be missing.
    is_old_wrong = outlier == "old" and not first_pass.logp_old_is_rollout
    if is_old_wrong and _are_unrelated(first[tokens], second[tokens]):
        return "rows or positions are permuted"
    return ""


SAME_VALUE = 1e-5
"""Largest difference (nats) of two log-probabilities of the same token from the same pass."""


def _share_of_moved_values(first: Floats, second: Floats, group: Integers) -> float:
    """Compute the share of values of the second column that the first has at another token of the same group.

    Only tokens at which the columns differ count. The share that is expected by chance is subtracted.

    Args:
        first: Log-probabilities (nats), (n,).
        second: Log-probabilities (nats), (n,).
        group: Number of each token's group, (n,).
    """
    # Values below all of the first column are padding.
    differs = (np.abs(first - second) > 10 * SAME_VALUE) & (second > first.min() - SAME_VALUE)
    if int(differs.sum()) < FEWEST_TOKENS:
        return 0.0
    # Groups are separated by more than the range of the values, so that one sorted array holds all groups.
    spacing = 2 * (LOG_WEIGHT_LIMIT + float(np.abs(np.concatenate([first, second])).max()))
    keys = np.sort(group * spacing + first)

    def share_with_equal(values: Floats) -> float:
        """Compute the share of values that the first column has in their group."""
        queries = (group * spacing + values)[differs]
        index = np.searchsorted(keys, queries).clip(1, len(keys) - 1)
        nearest = np.minimum(np.abs(keys[index] - queries), np.abs(keys[index - 1] - queries))
        return float((nearest < SAME_VALUE).mean())

    share_by_chance = share_with_equal(second + 20 * SAME_VALUE)
    return share_with_equal(second) - share_by_chance


RELATED = 0.5
"""Rank correlation of two columns of log-probabilities below which they belong to different tokens. Other weights,
another precision or another temperature leave a higher correlation."""


def _are_unrelated(first: Floats, second: Floats) -> bool:
    """Return whether two columns have about the same distribution of values, but no correlation.

    Args:
        first: Log-probabilities (nats), (n,).
        second: Log-probabilities (nats) that should belong to the same tokens, (n,).
    """
    if len(first) < FEWEST_TOKENS or min(first.var(), second.var()) <= NEGLIGIBLE**2:
        return False
    # A rank correlation, since a few tokens of padding would dominate a correlation of values.
    first_ranks = np.argsort(np.argsort(first)).astype(np.float64)
    second_ranks = np.argsort(np.argsort(second)).astype(np.float64)
    correlation = float(np.corrcoef(first_ranks, second_ranks)[0, 1])
    quartiles = np.quantile(first, (0.25, 0.75))
    interquartile_range = float(quartiles[1] - quartiles[0])
    distance_of_medians = abs(float(np.median(first)) - float(np.median(second)))
    return correlation < RELATED and distance_of_medians < interquartile_range + ROUNDING_DISTANCE
