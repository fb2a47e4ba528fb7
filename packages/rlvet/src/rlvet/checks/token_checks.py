"""Checks of a record's tokens, for properties of every correct run.

The ratio is 1 before the first update on a batch, engine and trainer compute the same probabilities, tokens are sampled
from the policy, and updates move it. Each check takes a `FirstPass`, the tokens of every sequence when it was first
recorded, and returns a `Finding`. If any of these checks fails, clip, radius and learning rate are not judged.
docs/diagnose.md has the rate of false alarms.

Notation: π is the policy in training, π_old the old policy, π_rollout the inference engine that sampled, and H the
entropy of the policy at a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rlvet._numbers import format_number, format_step
from rlvet.checks.findings import Finding
from rlvet.checks.first_pass import ROUNDING_DISTANCE, FirstPass, Flags, Floats, Integers

Z_LIMIT = 4.0
"""Standard errors above which a mean is significant. With six checks of skewed sums, fewer than 1 run in 20 then gets a
false alarm."""

EXACT_DISTANCE = 1e-3
"""Largest mean abs log-ratio (nats) between two passes of one policy in the same precision. `ROUNDING_DISTANCE` is the
limit for different kernels."""

KL_LIMIT = 2e-3
"""Largest KL divergence (nats per token) between engine and trainer. Rounding to bfloat16 gives at most a tenth."""

TEMPERATURE_R2 = 0.75
"""R² of the fit of a temperature above which it explains a difference. Two temperatures give at least 0.9; other faults
give less than 0.1, except top-p."""

REMAINDER = 0.2
"""Largest share of a distance that may be left when its cause is removed, as by the right shift. Rounding leaves a few
hundredths."""

EDGE_TOKENS = 2
"""Number of tokens at either end of a sequence in which prompts and padding are looked for."""

UNSAMPLED_EXCESS = 0.5
"""Excess of surprisal over entropy (nats per token) above which tokens at an end were not sampled, if the engine
reported no log-probability for them. With stale weights, the last tokens of a sequence may reach it too."""

IMPOSSIBLE_EXCESS = 2.0
"""The same limit if the engine reported a log-probability, or if none was recorded. Tokens sampled from a policy do not
reach it."""

NEGLIGIBLE = 0.01
"""Distance of a mean weight from 1, and share of tokens, up to which a difference does not matter."""

MAJORITY = 0.5
"""Share above which a property counts as that of most tokens, or of most batches."""

FEWEST_TOKENS = 20
"""Number of tokens below which two groups of them are not compared."""

TEMPERATURES = (0.25, 4.0)
"""Smallest and largest plausible ratio of two temperatures. A fit beyond them is not due to a temperature."""

SAME_VALUE = 1e-5
"""Largest difference (nats) of two log-probabilities of the same token from the same pass."""

RELATED = 0.5
"""Rank correlation of two columns of log-probabilities below which they belong to different tokens. Other weights,
another precision or another temperature leave a higher correlation."""

GREATEST_SURPRISAL = 12.5
"""Surprisal (nats per token) of the uniform distribution over a vocabulary of 268,000 tokens. Tokens that one policy
sampled are hardly ever less probable under another."""

LARGEST_ROUNDING_KL = 0.1
"""KL divergence (nats per token) above which the cause is not rounding, not even of weights to 8 or 4 bits. Another
prompt exceeds it."""

UNSURE = 0.9
"""Probability below which a token shows whether its logits differ."""

RARE_EXCESS = 3.0
"""Excess of surprisal over entropy (nats) of rare tokens, which are missing if the engine samples from a part of the
vocabulary. Among tokens that are sampled from the policy, between 1 in 1000 and 1 in 10 exceed it."""

PRECISION_DISTANCE = 0.05
"""Mean abs log-ratio (nats) up to which a constant distance may be due to half precision."""

LATE_Z_LIMIT = 5.0
"""Standard errors above which the mean of a part of the tokens is significant, if several parts are tested."""

FAR_PART = 0.1
"""Share of tokens that differ by a nat, among those that differ by more than rounding, above which words were tokenised
again. Other experts give at most 0.05, words that were tokenised again at least 0.2."""

FEWEST_FAR_TOKENS = 3
"""Number of tokens that differ by a nat below which no cause is named."""

FEW_TOKENS_SHARE = 0.15
"""Share of tokens that differ widely above which the cause is not one of few tokens, such as other experts, or words
that were tokenised again."""

UNSAMPLED_WEIGHT = 0.6
"""Mean of π_old/π_rollout over widely different tokens below which the engine did not sample them. The mean over
sampled tokens is near 1, whatever the trainer's probabilities are."""

MOST_FOLLOWERS = 0.5
"""Of the tokens that follow a widely different one, the share that differs too and above which the text before them was
changed."""

LEAST_TRUNCATION_WEIGHT = 0.05
"""π_old/π_rollout below which the cause is not sampling from a part of the vocabulary. Without some tokens, the
probabilities of the others grow, but not by a factor of 20."""

MODERATE_KL = 0.01
"""KL divergence (nats per token) up to which an engine that sometimes routes to other experts is only worth a look."""

UNMOVED = 2e-6
"""Mean abs log-ratio (nats) up to which two passes in float32 have the same weights."""

HARDLY_MOVED = 1e-4
"""Mean abs log-ratio (nats) after all updates on a batch up to which they hardly have an effect."""

NEAR_LIMIT = 10.0
"""Factor by which the largest batch may exceed `HARDLY_MOVED`."""

OTHER_PROMPT = 0.3
"""Mean abs log-weight (nats) of the first tokens above which the cause is another prompt, not rounding."""

LARGER_AT_START = 1.25
"""Smallest ratio of the distance at the first tokens to that at later ones, if the engine saw another prompt."""

LOST_P = 1e-3
"""Significance level of the test that the gradient of the last loss of updates is lost."""

FEWEST_BATCHES = 3
"""Number of batches from which a trend over batches is judged."""

LOG_WEIGHT_LIMIT = 20.0
"""Absolute log-weight (nats) at which weights are clamped, to avoid overflow."""


def token_findings(first_pass: FirstPass, *, counts_drawn_tokens: bool = True) -> list[Finding]:
    """Run all checks of tokens, causes before their effects.

    If the check of the ratio, the engine or the surprisal fails, the later ones of these would fail as an effect, so
    they are left out.

    Args:
        first_pass: The tokens of every sequence when it was first recorded.
        counts_drawn_tokens: True if the masks count exactly the sampled tokens, as far as is known. If not, neither the
            engine nor the surprisal is judged.

    Returns:
        One finding per check.
    """
    findings = [check_numbers(first_pass)]
    for check in (check_ratio, check_engine, check_surprisal):
        finding = check(first_pass)
        # Tokens that were not sampled are no evidence of the engine or the sampler.
        concerns_sampler = check is not check_ratio and finding.ok is False and finding.code != "mask"
        if concerns_sampler and not counts_drawn_tokens:
            finding = _untested(finding, "correct the mask first")
        if check is check_engine and finding.ok is False and _is_effect_of_sampling(first_pass, finding):
            finding = _untested(finding)
        findings.append(finding)
        if finding.ok is False:
            break
    findings.append(check_updates(first_pass))
    return findings


def _untested(finding: Finding, advice: str = "") -> Finding:
    """Return a finding as that of a check that could not run, for an effect of another fault.

    Args:
        finding: The effect.
        advice: The change that would let the check run.
    """
    return finding._replace(code="ok", ok=None, cause="", or_else=(), severity="", onset=None, advice=advice)


def _is_effect_of_sampling(first_pass: FirstPass, finding: Finding) -> bool:
    """Return whether a mismatch of the engine is an effect of sampling that the engine does not report.

    Such a sampler draws improbable tokens, for which rounding is larger. The mismatch is then much smaller than the
    excess of surprisal over entropy.

    Args:
        first_pass: The first pass.
        finding: The failed check of the engine.
    """
    tokens = first_pass.tokens_before_updates & ~np.isnan(first_pass.entropy + first_pass.logp_rollout)
    if finding.code not in ("engine-mismatch", "top-p") or (finding.figure or math.inf) > MODERATE_KL:
        return False
    mean, z = first_pass.mean_and_z(first_pass.excess_surprisal, tokens)
    distance = _mean(np.abs(first_pass.logp_old - first_pass.logp_rollout)[tokens])
    # Sampling from a part of the vocabulary gives more probable tokens, never less probable ones.
    is_possible = finding.code != "top-p" or mean > 0
    return is_possible and abs(z) > LATE_Z_LIMIT and abs(mean) > 10 * distance


def check_numbers(first_pass: FirstPass) -> Finding:
    """Check that no sequence has NaN, an infinite value or a log-probability above 0."""
    bad = first_pass.bad_sequences
    count = bad + len(first_pass.batch)
    measure = "share of sequences with values that cannot be"
    passed = Finding("ok", True, "values are numbers", bad / max(1, count), None, count, measure=measure)
    if not bad:
        return passed
    cause = f"{bad} of {count} sequences hold NaN, an infinite value or a log-probability above 0"
    return passed.failed("nan", cause)


@dataclass(frozen=True, eq=False)
class _Trend:
    """A figure per batch, and the batch at which it becomes wrong and stays wrong."""

    values: Floats
    """The figure of each batch, in the order of the batches, (batches,)."""
    start: int
    """Index of the first batch whose figure is wrong; 0 if it always is."""
    tokens: Flags
    """True for the tokens of this batch and the later ones, (tokens,)."""
    step: float | None
    """The step of that batch; None if the figure is always wrong."""
    limit: float = math.inf
    """The largest figure of a correct batch."""

    @property
    def figure(self) -> float:
        """The mean figure of the batches from `start` on."""
        return float(self.values[self.start :].mean())

    @property
    def since(self) -> str:
        """The onset, as the end of a sentence; empty without one."""
        return "" if self.step is None else f"; before step {format_step(self.step)} they agree"

    @property
    def grows_from_the_start(self) -> bool:
        """True if the figure grows from the first batch on, even while it is below the limit."""
        # The correct batches but the first one, in which weights have not drifted apart yet.
        before = self.values[1 : self.start]
        if not len(before):
            return False
        mean = float(before.mean())
        # A figure far below the limit is due to rounding.
        return mean > REMAINDER * self.limit and float(self.values[0]) < REMAINDER * mean

    @property
    def grows(self) -> bool:
        """True if the figure begins near 0 and grows, like the distance of weights that drift apart."""
        # The last correct batch, if any, and all wrong ones.
        values = self.values[max(0, self.start - 1) :]
        if len(values) < 2:
            return False
        begins_low = float(values[0]) < min(REMAINDER * float(values.max()), self.limit)
        # A fault that begins within the run has its full size in the first wrong batch, unlike weights that drift
        # apart. If that is the second batch of the run, both look alike: a large first update may move the weights as
        # far.
        is_sudden = self.start > 1 and float(values[1]) > MAJORITY * float(np.median(values[1:]))
        return begins_low and not (is_sudden and len(values) > FEWEST_BATCHES)


def _find_trend(first_pass: FirstPass, values: Floats, tokens: Flags, limit: float) -> _Trend:
    """Compute a figure per batch, and find the batch after which it stays above a limit.

    Args:
        first_pass: The first pass.
        values: The quantity whose mean is the figure, (tokens,).
        tokens: True for tokens to average, (tokens,).
        limit: The largest figure of a correct batch.
    """
    numbers, batch_index = np.unique(first_pass.batch, return_inverse=True)
    token_batches = batch_index[first_pass.sequence]
    counts = np.bincount(token_batches[tokens], minlength=len(numbers))
    sums = np.bincount(token_batches[tokens], weights=values[tokens], minlength=len(numbers))
    recorded = np.flatnonzero(counts)
    means = sums[recorded] / counts[recorded]
    numbers = numbers[recorded]

    # Split the batches so that the fewest are on the wrong side: correct ones before the start, wrong ones after it. Of
    # several such splits, take the earliest.
    wrong = means > limit
    correct_before = np.concatenate([[0], (~wrong).cumsum()])
    wrong_after = wrong.sum() - np.concatenate([[0], wrong.cumsum()])
    start = int((correct_before + wrong_after)[:-1].argmax()) if len(means) else 0
    # There is no onset if the figure is also high, though lower, before it.
    if not wrong[start:].any() or (start and means[:start].mean() > REMAINDER * means[start:].mean()):
        start = 0
    from_start = tokens & np.isin(first_pass.batch, numbers[start:])[first_pass.sequence]
    # If weights drift apart from the start, the second batch is the first wrong one. This is no onset within the run.
    step = first_pass.first_step.get(int(numbers[start])) if start > 1 else None
    return _Trend(means, start, from_start, step, limit)


def check_ratio(first_pass: FirstPass) -> Finding:
    """Check that the policy in training equals the old policy before any update."""
    tested = "the ratio is 1 before the first update"
    tokens = first_pass.tokens_before_updates
    if not first_pass.logp_old_is_rollout:
        # Stale data may have another ratio, although the trainer's log-probabilities are right.
        fresh = tokens & ~(first_pass.lag > 0)
        tokens = fresh if fresh.any() else tokens
    tokens = tokens & ~np.isnan(first_pass.logp)
    if not tokens.any():
        return Finding("ok", None, tested, advice="record update= with each loss")

    limit = ROUNDING_DISTANCE if first_pass.anchored_at_rollout else EXACT_DISTANCE
    distance = np.abs(first_pass.logp - first_pass.logp_old)
    trend = _find_trend(first_pass, distance, tokens, limit)
    measure = "mean abs(log π − log π_old) before the first update (nats)"
    passed = Finding.of(tested, trend.values, int(tokens.sum()), measure)
    if trend.figure <= limit or float(trend.values.max()) <= limit:
        return passed
    # A few wrong batches among correct ones are no fault of the passes.
    wrong_share = float((trend.values[trend.start :] > limit).mean())
    is_only_last = trend.start and len(trend.values) - trend.start < 2
    if wrong_share < MAJORITY or (is_only_last and not first_pass.logp_old_is_rollout):
        return passed
    passed = passed._replace(figure=trend.figure, onset=trend.step)
    return _find_cause_of_ratio(first_pass, passed, trend)._replace(onset=trend.step)


def _find_cause_of_ratio(first_pass: FirstPass, passed: Finding, trend: _Trend) -> Finding:
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
    ratio, r_squared = _fit_temperature_ratio(first_pass, first_pass.logp, first_pass.logp_old, trend.tokens)
    if ratio:
        cause = f"logp_old is at {ratio:.2f} times the temperature of logp (R² {r_squared:.2f}){since}"
        return passed.failed("temperature", cause)

    if outlier == "old":
        if not trend.grows and trend.figure <= PRECISION_DISTANCE:
            cause = (
                f"logp_old has another precision or kernel, or comes from a pass with dropout{witness}{since}"
            )
            return passed.failed("precision", cause)
        growth = "; the distance is smaller in the first batch than later" if trend.grows else ""
        cause = f"logp_old comes from other weights{witness}{growth}{since}"
        return passed.failed("reference-as-old", cause)

    finding = _find_engine_as_old(first_pass, passed, trend)
    if finding is not None:
        return finding

    undetectable = _undetectable_codes(first_pass)
    has_engine = bool((~np.isnan(first_pass.logp_rollout[trend.tokens])).any())
    if trend.grows and not has_engine:
        cause = (
            "logp_old comes from other weights: the distance begins near 0 and grows; record logp_rollout="
        )
        return passed.failed("reference-as-old", cause, "dropout", *undetectable)
    if not first_pass.logp_old_is_rollout and trend.figure <= ROUNDING_DISTANCE:
        cause = f"two passes of the trainer differ by rounding, due to precision or kernels{witness}{since}"
        return passed.failed("precision", cause, "dropout")
    cause = f"two passes over the same tokens differ, and no shift or temperature explains it{witness}{since}"
    alternatives = ("engine-mismatch",) if first_pass.logp_old_is_rollout else ("precision",)
    return passed.failed("dropout", cause, *alternatives, *undetectable)


def _find_moved_values(
    first_pass: FirstPass, passed: Finding, trend: _Trend, outlier: str, witness: str
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
        return passed.failed("shift", cause)

    permutation = _describe_permutation(first_pass, new, old, tokens, outlier)
    if permutation:
        cause = f"logp_old has the values of other tokens: {permutation}{witness}{since}"
        return passed.failed("permuted", cause)
    if outlier == "old" and float(-np.median(old[tokens])) > GREATEST_SURPRISAL:
        median = float(np.median(old[tokens]))
        cause = (
            f"the median of logp_old is {median:.0f} nats, lower than any policy gives: it has the values of other "
            f"tokens, such as padding{witness}{since}"
        )
        alternatives = () if first_pass.can_find_shifts(tokens) else ("shift",)
        return passed.failed("permuted", cause, *alternatives)

    return None


def _find_engine_as_old(first_pass: FirstPass, passed: Finding, trend: _Trend) -> Finding | None:
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
        return passed.failed("engine-mismatch", cause)
    if _is_engine_above(first_pass.logp - first_pass.logp_old, trend.tokens):
        cause = (
            "the engine's probabilities are above the trainer's nearly everywhere: it samples from a part of the "
            f"vocabulary{since}"
        )
        return passed.failed("top-p", cause)
    if trend.grows or bool((first_pass.lag[trend.tokens] > 0).any()):
        cause = f"logp_old comes from the engine, which has other weights than the trainer{since}"
        return passed.failed("stale", cause, "weight-sync")
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


def _fit_temperature_ratio(
    first_pass: FirstPass, first: Floats, second: Floats, tokens: Flags
) -> tuple[float, float]:
    """Fit the ratio of the temperatures of two columns.

    Args:
        first_pass: The first pass.
        first: Log-probabilities (nats), (tokens,).
        second: Log-probabilities (nats) that should be at the same temperature, (tokens,).
        tokens: True for tokens to use, (tokens,).

    Returns:
        The ratio, 0 if no temperature explains the difference; and R² of the fit.
    """
    slope, r_squared = first_pass.fit_temperature(first, second, tokens)
    ratio = 1 + slope
    is_plausible = r_squared > TEMPERATURE_R2 and TEMPERATURES[0] < ratio < TEMPERATURES[1]
    if is_plausible and abs(slope) > NEGLIGIBLE:
        return ratio, r_squared
    return 0.0, r_squared


def check_engine(first_pass: FirstPass) -> Finding:
    """Check that the engine's log-probabilities equal the trainer's, except for rounding."""
    tested = "engine and trainer agree"
    tokens = ~np.isnan(first_pass.logp_rollout)
    if first_pass.logp_old_is_rollout or not tokens.any():
        return Finding("ok", None, tested, advice="record logp_rollout=, and a logp_old of the trainer's own")

    # With w = π_old/π_rollout, the mean of w − 1 − log w over tokens from the engine estimates the KL divergence.
    log_weight = np.where(tokens, first_pass.logp_old - first_pass.logp_rollout, 0.0)
    clamped = np.clip(log_weight, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
    surplus = np.expm1(clamped)
    divergence = surplus - clamped
    trend = _find_trend(first_pass, divergence, tokens, KL_LIMIT)
    measure = "KL between engine and trainer (nats per token)"
    passed = Finding.of(f"{tested} (KL, nats per token)", trend.values, int(tokens.sum()), measure)

    # A temperature is always tested: if the policy is nearly sure of its tokens, the divergence hardly shows it.
    temperature_ratio, _ = _fit_temperature_ratio(
        first_pass, first_pass.logp_old, first_pass.logp_rollout, tokens
    )
    mean_surplus, z = first_pass.mean_and_z(surplus, tokens)
    weights_are_one = abs(mean_surplus) < NEGLIGIBLE or abs(z) < Z_LIMIT
    mean_divergence = float(trend.values.mean())
    begins_late = trend.start > 1 and trend.figure > KL_LIMIT
    if trend.grows_from_the_start:
        trend = replace(trend, start=0, tokens=tokens, step=None)
    # Weights that drift apart slowly exceed the limit only at the end, and have no onset.
    last_third = trend.values[-(len(trend.values) // 3) :]
    ends_wrong = len(last_third) > 1 and float(last_third.mean()) > KL_LIMIT and trend.grows
    if not temperature_ratio and not begins_late:
        truncated_trend = _find_truncated_batches(first_pass, surplus, tokens)
        if truncated_trend is not None:
            trend = replace(
                trend, start=truncated_trend.start, tokens=truncated_trend.tokens, step=truncated_trend.step
            )
            weights_are_one = False

    has_fault = begins_late or ends_wrong or bool(temperature_ratio)
    if mean_divergence <= KL_LIMIT and weights_are_one and not has_fault:
        return passed
    if trend.figure > KL_LIMIT:
        passed = passed._replace(figure=trend.figure)
    elif ends_wrong:
        passed = passed._replace(figure=float(last_third.mean()))
    finding = _Mismatch(first_pass, passed, trend, log_weight).find_cause()
    return finding._replace(onset=trend.step)


def _find_truncated_batches(first_pass: FirstPass, surplus: Floats, tokens: Flags) -> _Trend | None:
    """Find the first batch that the engine sampled from a part of the vocabulary, like all later ones; None if none.

    The mean of π_old/π_rollout is then below 1, while the divergence may hardly change.

    Args:
        first_pass: The first pass.
        surplus: π_old/π_rollout − 1, (tokens,).
        tokens: True for tokens to use, (tokens,).
    """
    trend = _find_trend(first_pass, -surplus, tokens, NEGLIGIBLE)
    mean, z = first_pass.mean_and_z(surplus, trend.tokens)
    if trend.start > 1 and mean < -NEGLIGIBLE and -z > LATE_Z_LIMIT:
        return trend
    return None


class _Mismatch:
    """A difference between the log-probabilities of the engine and the trainer, whose cause is to be found.

    Args:
        first_pass: The first pass.
        passed: The finding if the check had passed.
        trend: The KL divergence by batch.
        log_weight: The trainer's log-probability of each token minus the engine's, log(π_old/π_rollout), (tokens,).
    """

    def __init__(self, first_pass: FirstPass, passed: Finding, trend: _Trend, log_weight: Floats):
        self.first_pass = first_pass
        self.passed = passed
        self.trend = trend
        self.log_weight = log_weight
        self.tokens = trend.tokens
        self.since = trend.since

    def find_cause(self) -> Finding:
        """Return the finding of the first cause that explains the difference.

        The finding is that of a check that could not run if the tokens do not suffice to distinguish two causes.
        """
        searches: tuple[Callable[[], Finding | None], ...] = (
            self._find_shift,
            self._find_unsampled_edge,
            self._find_retokenised_words,
            self._find_single_other_experts,
            self._find_truncated_sampling,
            self._find_temperature,
            self._find_lag,
            self._find_other_experts,
            self._find_growth,
            self._find_other_prompt,
        )
        for search in searches:
            finding = search()
            if finding is not None:
                return finding
        return self._unexplained()

    @cached_property
    def surplus(self) -> Floats:
        """π_old/π_rollout − 1, with clamped logarithms, (tokens,)."""
        return np.expm1(np.clip(self.log_weight, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT))

    @cached_property
    def temperature_ratio(self) -> tuple[float, float]:
        """The result of `_fit_temperature_ratio` for the trainer and the engine."""
        old = self.first_pass.logp_old
        engine = self.first_pass.logp_rollout
        return _fit_temperature_ratio(self.first_pass, old, engine, self.tokens)

    @cached_property
    def fresh(self) -> Flags:
        """True for tokens that were sampled from the current weights, (tokens,)."""
        return self.tokens & (self.first_pass.lag == 0)

    @cached_property
    def follower_share(self) -> float | None:
        """The result of `_share_of_differing_followers` for the trainer and the engine."""
        return _share_of_differing_followers(self.first_pass, self.log_weight, self.tokens)

    def _find_shift(self) -> Finding | None:
        """Find a shift of the engine's column by some tokens."""
        shift, shifted_distance, unshifted_distance = self.first_pass.best_shift(
            self.first_pass.logp_old, self.first_pass.logp_rollout, self.tokens
        )
        is_shifted = shift != 0 and shifted_distance < REMAINDER * unshifted_distance
        if not is_shifted:
            return None
        cause = f"the trainer's tokens are shifted by {-shift:+d} against the engine's{self.since}"
        return self.passed.failed("shift", cause)

    def _find_unsampled_edge(self) -> Finding | None:
        """Find a prompt or padding that the mask counts."""
        cause = _describe_unsampled_edge(self.first_pass)
        return self.passed.failed("mask", cause) if cause else None

    def _find_retokenised_words(self) -> Finding | None:
        """Find a few tokens that the engine did not sample, in sequences that otherwise agree."""
        log_weight = self.log_weight[self.tokens]
        distance = np.abs(log_weight)
        far_share, far_weight = _few_far_tokens(log_weight)
        if not far_share or not self._is_unsampled(far_weight):
            # Rounding in half precision may be as large as the first limit. Tokens that the engine did not sample still
            # differ by at least a nat. If there are many smaller differences too, the cause is other experts.
            far_share, far_weight = _few_far_tokens(log_weight, farther_than=1.0)
            beyond_rounding = float((distance > _largest_rounding(distance)).mean())
            are_enough = int((distance > 1.0).sum()) >= FEWEST_FAR_TOKENS
            if far_share <= FAR_PART * beyond_rounding or not are_enough:
                return None
        if not self._is_unsampled(far_weight):
            return None
        if not _retokenised_share(self.first_pass, self.log_weight, self.tokens):
            return None

        far_count = int((distance > 1.0).sum())
        if far_count < FEWEST_FAR_TOKENS or self.follower_share is None:
            return _untested(
                self.passed,
                f"{far_count} of {len(distance)} tokens differ by a nat and the rest agree, too few to distinguish "
                "other experts from answers that were tokenised again; record more batches",
            )
        cause = (
            f"{far_share:.1%} of tokens differ widely, and so do the tokens after them; sequences without them "
            f"agree{self.since}"
        )
        return self.passed.failed("retokenised", cause)

    def _is_unsampled(self, far_weight: float) -> bool:
        """Return True if the engine did not sample the tokens that differ widely, but other tokens of the same text.

        Then the token after each of them differs too, since the trainer computes its probability after another token
        than the engine. If only other experts were used at a token, the next token agrees.

        Args:
            far_weight: The mean of π_old/π_rollout over the tokens that differ widely. It decides if too few tokens
                follow them.
        """
        if self.follower_share is None:
            return far_weight < UNSAMPLED_WEIGHT
        return self.follower_share >= MOST_FOLLOWERS

    def _find_single_other_experts(self) -> Finding | None:
        """Find a few tokens that are far less probable for the trainer, before tokens that agree."""
        log_weight = self.log_weight[self.tokens]
        far_share, _ = _few_far_tokens(log_weight)
        far_log_weights = log_weight[np.abs(log_weight) > 1.0]
        if not far_share or not len(far_log_weights):
            return None
        if self.follower_share is None or self.follower_share >= MOST_FOLLOWERS:
            return None
        if float(np.median(far_log_weights)) >= math.log(LEAST_TRUNCATION_WEIGHT):
            return None
        cause = (
            f"{far_share:.1%} of tokens differ widely, and the rest agree, also the tokens after them: the engine "
            f"chooses other experts{self.since}"
        )
        return self.passed.failed("routing", cause, "engine-mismatch")

    def _find_truncated_sampling(self) -> Finding | None:
        """Find sampling from a part of the vocabulary, or edited logits, by a mean of π_old/π_rollout below 1."""
        temperature_ratio, _ = self.temperature_ratio
        mean_surplus, z = self.first_pass.mean_and_z(self.surplus, self.tokens)
        is_below_one = mean_surplus < 0 and -z > Z_LIMIT
        if not is_below_one:
            return None

        if not _is_engine_above(self.log_weight, self.tokens):
            # Rounding hides the sign of the difference at single tokens. Their mean weight is below 1 only if the
            # engine cannot sample some tokens.
            is_small = mean_surplus < -NEGLIGIBLE and self.trend.figure <= MODERATE_KL
            if temperature_ratio or not is_small or not _is_engine_mostly_above(self.log_weight, self.tokens):
                return None
            cause = (
                f"π_old/π_rollout is {1 + mean_surplus:.3f} on average (z {z:.1f}), which rounding does not explain: "
                f"the engine samples from a part of the vocabulary{self.since}"
            )
            return self.passed.failed("top-p", cause)

        if self._agrees_at_the_end():
            place = (
                "the engine's probabilities are above the trainer's only at the first tokens of "
                f"answers{self.since}"
            )
            if self._agrees_at_late_unsure_tokens():
                return self.passed.failed(
                    "edited-logits", f"{place}: it edits their logits, as min_tokens does"
                )
            cause = (
                f"{place}: it samples from a part of the vocabulary, or edits their logits as min_tokens does; the "
                "policy is sure of later tokens, so that these do not show which"
            )
            return self.passed.failed("top-p", cause, "edited-logits")
        if temperature_ratio:
            return None
        cause = (
            f"π_old/π_rollout is {1 + mean_surplus:.3f} on average and hardly ever above 1: the engine samples from a "
            f"part of the vocabulary{self.since}"
        )
        return self.passed.failed("top-p", cause)

    def _find_temperature(self) -> Finding | None:
        """Find a difference of temperatures."""
        temperature_ratio, r_squared = self.temperature_ratio
        if not temperature_ratio:
            return None
        cause = (
            f"the trainer is at {1 / temperature_ratio:.2f} times the temperature of the engine's log-probabilities "
            f"(R² {r_squared:.2f}){self.since}"
        )
        return self.passed.failed("temperature", cause)

    def _find_lag(self) -> Finding | None:
        """Find a difference that only data from old weights has."""
        clamped = np.clip(self.log_weight, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
        divergence = self.surplus - clamped
        lagged = self.tokens & (self.first_pass.lag > 0)
        fresh_divergence = _mean(divergence[self.fresh])
        lagged_divergence = _mean(divergence[lagged])
        only_lagged_differ = lagged.any() and fresh_divergence < REMAINDER * lagged_divergence
        if not only_lagged_differ:
            return None
        max_lag = int(self.first_pass.lag[lagged].max())
        fresh = format_number(fresh_divergence, 2)
        cause = f"KL {fresh} at a lag of 0, {format_number(lagged_divergence, 2)} at lags up to {max_lag}"
        return self.passed.failed("stale", cause)

    def _find_other_experts(self) -> Finding | None:
        """Find a few tokens that differ widely while the others agree, as with a mixture of experts."""
        log_weight = self.log_weight[self.tokens]
        engine = self.first_pass.logp_rollout[self.tokens]
        unit = "tokens"
        share, _ = _few_far_tokens(log_weight)
        # Tokens of which the engine is sure agree under any weights, so they are left out if there are enough others.
        if int((engine < math.log(UNSURE)).sum()) >= FEWEST_TOKENS:
            unit = "tokens that the engine is not sure of"
            share = _few_far_unsure_tokens(log_weight, engine)
        if not share:
            return None
        cause = (
            f"{share:.1%} of {unit} differ widely, in both directions, and the rest agree: the engine chooses other "
            f"experts{self.since}"
        )
        severity = "look" if self.trend.figure <= MODERATE_KL else None
        return self.passed.failed("routing", cause, "engine-mismatch", severity=severity)

    def _find_growth(self) -> Finding | None:
        """Find a difference that begins near 0 and grows, as the trainer moves away from the engine's weights."""
        if not self.trend.grows:
            return None
        if self.fresh.any():
            cause = (
                f"the record marks weights as fresh, but the distance grows from batch to batch{self.since}"
            )
            return self.passed.failed("weight-sync", cause)
        cause = f"the distance begins at 0 and grows with training; record version={self.since}"
        return self.passed.failed("stale", cause, "weight-sync")

    def _find_other_prompt(self) -> Finding | None:
        """Find a difference that is largest at the first tokens of answers."""
        if self.trend.figure <= MODERATE_KL or not self._is_largest_at_the_start():
            return None
        cause = (
            "engine and trainer differ most at the first tokens of answers, in every batch: the engine saw another "
            f"prompt, such as one with a second BOS or another template{self.since}"
        )
        return self.passed.failed("prompt", cause, "engine-mismatch", *_undetectable_codes(self.first_pass))

    def _unexplained(self) -> Finding:
        """Return the finding if no single cause explains the difference, with all codes that may."""
        undetectable = _undetectable_codes(self.first_pass)
        # At the first step of a run no weights are old.
        begins_with_run = min(self.first_pass.first_step.values(), default=math.inf) <= 1
        is_wrong_at_once = begins_with_run and float(self.trend.values[0]) > self.trend.limit
        age_unknown = () if self.fresh.any() or is_wrong_at_once else ("stale",)

        agrees_at_first_tokens = self._agrees_at_first_tokens()
        place = "at later tokens of answers" if agrees_at_first_tokens else "over whole answers"
        from_first = " from the first batch on" if self.trend.step is None else ""
        cause = f"engine and trainer differ{from_first}, in both directions and {place}{self.since}"
        if self.trend.step is not None and self._is_within_movement():
            cause = f"{cause}, by no more than updates have moved the policy since: weights may no longer be pushed"
            return self.passed.failed("weight-sync", cause, "engine-mismatch", *age_unknown, *undetectable)
        if agrees_at_first_tokens:
            return self.passed.failed("engine-mismatch", cause, *age_unknown, *undetectable)
        if self.trend.figure > LARGEST_ROUNDING_KL:
            cause = (
                f"{cause}, by more than rounding gives: compare the prompt's ids, then the weights' version"
            )
            return self.passed.failed("prompt", cause, "engine-mismatch", *age_unknown, *undetectable)
        return self.passed.failed("engine-mismatch", cause, *age_unknown, "prompt", *undetectable)

    def _is_within_movement(self) -> bool:
        """Return whether the policy's updates since the onset explain the distance.

        If the engine gets no new weights, its distance in the first wrong batch is that of the last updates, and grows
        from there.
        """
        trend = self.trend
        first_pass = self.first_pass
        numbers = np.unique(first_pass.batch)
        movement = [first_pass.last_distance.get(int(number), math.nan) for number in numbers]
        if len(numbers) != len(trend.values) or not trend.start or not movement[trend.start - 1] > 0:
            return False
        later = trend.values[trend.start + 1 :]
        if len(later) and float(later.mean()) < float(trend.values[trend.start]):
            return False
        in_batch = (first_pass.batch == numbers[trend.start])[first_pass.sequence] & self.tokens
        return _mean(np.abs(self.log_weight[in_batch])) < 2 * movement[trend.start - 1]

    def _agrees_at_first_tokens(self) -> bool:
        """Return whether the first token of answers agrees while later ones do not, which excludes another prompt."""
        unsure = self.tokens & (self.first_pass.logp_rollout < math.log(UNSURE))
        early = unsure & (self.first_pass.position == 0)
        late = unsure & (self.first_pass.position > 0)
        if min(int(early.sum()), int(late.sum())) < FEWEST_TOKENS:
            return False
        distance = np.abs(self.log_weight)
        return _mean(distance[early]) < min(ROUNDING_DISTANCE, NEGLIGIBLE * 10 * _mean(distance[late]))

    def _early_tokens(self) -> Flags:
        """Return True for the first tokens of answers: two, or an eighth of the longest answer, (tokens,)."""
        position = self.first_pass.position
        return self.tokens & (position < max(EDGE_TOKENS, self._longest // 8))

    @cached_property
    def _longest(self) -> int:
        """The position of the last token of the longest answer."""
        return int(self.first_pass.position[self.tokens].max(initial=0))

    def _is_largest_at_the_start(self) -> bool:
        """Return whether the distance is larger at the first tokens of answers than in their second half."""
        distance = np.abs(self.log_weight)
        early = self._early_tokens()
        late = self.tokens & (self.first_pass.position >= self._longest // 2)
        if not late.any() or not early.any():
            return False
        return _mean(distance[early]) > max(OTHER_PROMPT, LARGER_AT_START * _mean(distance[late]))

    def _agrees_at_the_end(self) -> bool:
        """Return whether the last third of answers agrees, beside a difference at the first tokens."""
        distance = np.abs(self.log_weight)
        early = self._early_tokens()
        late = self.tokens & (self.first_pass.position > (2 * self._longest) // 3)
        if not late.any() or not early.any():
            return False
        early_distance = _mean(distance[early])
        # The larger limit allows for rounding in half precision beside a large difference at the start.
        limit = min(ROUNDING_DISTANCE / 2, MAJORITY * early_distance)
        half_precision_limit = min(2 * ROUNDING_DISTANCE, NEGLIGIBLE * 10 * early_distance)
        return _mean(distance[late]) < max(limit, half_precision_limit)

    def _agrees_at_late_unsure_tokens(self) -> bool:
        """Return whether late tokens agree although the policy is as unsure of them as of early ones that differ.

        Sampling from a part of the vocabulary shows wherever the policy is unsure, min_tokens only at the first tokens.
        """
        position = self.first_pass.position
        entropy = self.first_pass.entropy
        has_entropy = self.tokens & ~np.isnan(entropy)
        is_above = -self.log_weight > ROUNDING_DISTANCE
        early_above = has_entropy & (position <= self._longest // 2) & is_above
        if not early_above.any():
            return False
        unsure = has_entropy & (entropy >= float(np.median(entropy[early_above])))
        early = unsure & (position <= self._longest // 3)
        late = unsure & (position > (2 * self._longest) // 3)
        if int(late.sum()) < FEWEST_TOKENS:
            return False
        return float(is_above[late].mean()) < MAJORITY * float(is_above[early].mean())


def _largest_rounding(distance: Floats, at_least: float = ROUNDING_DISTANCE) -> float:
    """Return the distance (nats) up to which a token may differ by rounding: ten times the median, or more.

    Args:
        distance: The abs difference of the trainer's and the engine's log-probabilities (nats), (n,).
        at_least: The smallest result, in nats.
    """
    return max(at_least, 10 * float(np.median(distance)))


def _few_far_tokens(log_weight: Floats, farther_than: float = ROUNDING_DISTANCE) -> tuple[float, float]:
    """Find a few tokens that differ widely while nearly all others agree.

    Args:
        log_weight: The trainer's log-probability of each token minus the engine's, (n,).
        farther_than: Distance (nats) above which a token differs widely.

    Returns:
        The share of these tokens, and the mean of π_old/π_rollout over them; 0 and 1 if there are none, or too many.
    """
    distance = np.abs(log_weight)
    if not len(distance):
        return 0.0, 1.0
    far = distance > _largest_rounding(distance, farther_than)
    share = float(far.mean())
    far_part = float(distance[far].sum()) / max(float(distance.sum()), 1e-30)
    most_agree = float(np.median(distance)) <= ROUNDING_DISTANCE
    if not 0 < share < FEW_TOKENS_SHARE or far_part < 1 - 2 * REMAINDER or not most_agree:
        return 0.0, 1.0
    weights = np.exp(log_weight[far].clip(max=LOG_WEIGHT_LIMIT))
    return share, float(weights.mean())


def _few_far_unsure_tokens(log_weight: Floats, engine: Floats) -> float:
    """Return the share of tokens that differ widely, among those of which the engine is not sure.

    Other weights, another precision and another prompt change all of these tokens. Tokens of which the engine is sure
    agree in any case.

    Args:
        log_weight: The trainer's log-probability of each token minus the engine's, (n,).
        engine: The engine's log-probabilities (nats), (n,).

    Returns:
        The share; 0 if the other tokens do not agree, or if tokens are too few.
    """
    distance = np.abs(log_weight[engine < math.log(UNSURE)])
    if len(distance) < FEWEST_TOKENS:
        return 0.0
    far = distance > _largest_rounding(distance)
    far_part = float(distance[far].sum()) / max(float(distance.sum()), 1e-30)
    is_few = int(far.sum()) >= FEWEST_FAR_TOKENS and float(far.mean()) < FEW_TOKENS_SHARE
    return float(far.mean()) if is_few and far_part >= 1 - 2 * REMAINDER else 0.0


def _shares_beyond_rounding(log_weight: Floats, tokens: Flags) -> tuple[float, float]:
    """Return the share of tokens whose π_old/π_rollout is above 1 by more than rounding, and the share below.

    Args:
        log_weight: The trainer's log-probability of each token minus the engine's, (tokens,).
        tokens: True for tokens to use, (tokens,).
    """
    above = float((log_weight[tokens] > ROUNDING_DISTANCE).mean())
    below = float((-log_weight[tokens] > ROUNDING_DISTANCE).mean())
    return above, below


def _is_engine_mostly_above(log_weight: Floats, tokens: Flags) -> bool:
    """Return whether the engine's probabilities are above the trainer's twice as often as below them."""
    above, below = _shares_beyond_rounding(log_weight, tokens)
    return below > 2 * above


def _is_engine_above(log_weight: Floats, tokens: Flags) -> bool:
    """Return whether the engine's probabilities are often above the trainer's, and hardly ever below them.

    An engine that samples from a part of the vocabulary gives its tokens the probability of the tokens left out.
    """
    above, below = _shares_beyond_rounding(log_weight, tokens)
    return above < max(NEGLIGIBLE, REMAINDER * below) and below > 2 * NEGLIGIBLE


def check_surprisal(first_pass: FirstPass) -> Finding:
    """Check that tokens were sampled from the policy: the mean of −log π is then its entropy."""
    tested = "surprisal equals entropy"
    tokens = first_pass.tokens_before_updates & ~np.isnan(first_pass.entropy)
    if not tokens.any():
        return Finding("ok", None, tested, advice="record entropy= and update=")

    excesses = first_pass.batch_means(first_pass.excess_surprisal, tokens)
    measure = "mean of surprisal minus entropy (nats per token)"
    passed = Finding.of(tested, excesses, int(tokens.sum()), measure)
    trend, z = _find_surprising_batches(first_pass, tokens)
    mean, _ = first_pass.mean_and_z(first_pass.excess_surprisal, trend.tokens)
    z_limit = Z_LIMIT if trend.step is None else LATE_Z_LIMIT
    is_significant = abs(z) >= z_limit and abs(mean) >= ROUNDING_DISTANCE
    place = _find_surprising_place(first_pass, trend.tokens)
    if not is_significant and not place:
        return passed

    passed = passed._replace(figure=mean)
    cause = _describe_unsampled_edge(first_pass)
    if cause:
        finding = passed.failed("mask", cause, "shift")
    else:
        finding = _find_cause_of_surprisal(first_pass, passed, trend, z, is_significant, place)
    return finding._replace(onset=trend.step)


def _find_cause_of_surprisal(
    first_pass: FirstPass, passed: Finding, trend: _Trend, z: float, is_significant: bool, place: str
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
            return passed.failed("top-p", cause, "edited-logits")
        direction = "more or less"
        if is_significant:
            direction = "more" if z < 0 else "less"
        cause = (
            f"only {place} of answers, sampled tokens are {direction} probable than the policy's entropy "
            f"implies{witness}: the sampler edits logits{since}"
        )
        alternatives = () if engine_agrees else ("stale",)
        return passed.failed("edited-logits", cause, *alternatives)

    if z < 0:
        cause = (
            f"sampled tokens are more probable than the policy's entropy implies, {size}{witness}: rare tokens are "
            f"missing{since}"
        )
        return passed.failed("top-p", cause, "temperature")
    if engine_agrees:
        cause = (
            f"sampled tokens are less probable than the policy's entropy implies, {size}{witness}: the sampler edits "
            f"logits, as a repetition penalty does, or uses a higher temperature than it reports{since}"
        )
        return passed.failed("edited-logits", cause, "temperature")
    cause = (
        f"sampled tokens are less probable than the policy's entropy implies, {size}{since}; record logp_rollout= to "
        "distinguish the sampler from its weights"
    )
    return passed.failed("stale", cause, "weight-sync", "retokenised", "temperature", "edited-logits")


def _find_surprising_batches(first_pass: FirstPass, tokens: Flags) -> tuple[_Trend, float]:
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
    return _Trend(totals.astype(np.float64), start, from_start, step), float(z[start])


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


def check_updates(first_pass: FirstPass) -> Finding:
    """Check that updates move the policy, and that the gradient of each loss has an effect."""
    tested = "updates move the policy"
    before = []
    after = []
    for movement in first_pass.movement.values():
        if max(movement) > 0:
            after.append(movement[max(movement)])
            before.append(movement.get(0, math.nan))
    if not after:
        return Finding("ok", None, tested, advice="record update= with each of several updates")
    measure = "mean abs log-ratio after the last update on a batch (nats)"
    passed = Finding.of(f"{tested} (mean abs log-ratio)", after, len(after), measure)

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
        return passed.failed("no-step", cause)

    distance_before = float(np.nanmedian(before)) if not np.isnan(before).all() else 0.0
    # A policy that has collapsed hardly moves either, but only after batches with large updates.
    hardly_moves = float(np.median(after)) <= HARDLY_MOVED and max(after) <= NEAR_LIMIT * HARDLY_MOVED
    if has_signal and hardly_moves and distance_before <= HARDLY_MOVED:
        movement = format_number(float(np.median(after)), 1)
        cause = (
            f"all {updates} updates on a batch move log-probabilities by {movement} nats together: the learning rate "
            "is too small to move the policy"
        )
        return passed.failed("hardly-moves", cause)

    cause = _describe_lost_gradient(first_pass)
    if cause and has_signal:
        return passed.failed("micro-batch-lost", cause)
    return passed


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


def _describe_unsampled_edge(first_pass: FirstPass) -> str:
    """Describe the end of sequences at which the mask counts tokens that were not sampled; empty if there is none."""
    has_entropy = first_pass.tokens_before_updates & ~np.isnan(first_pass.entropy)
    at_start = has_entropy & (first_pass.position < EDGE_TOKENS)
    at_end = has_entropy & (first_pass.remaining < EDGE_TOKENS)

    # Engines report 0 or nothing for tokens that they did not sample.
    missing = np.isnan(first_pass.logp_rollout)
    if missing.all():
        missing = np.zeros_like(missing)
    unsampled = missing | (first_pass.logp_rollout == 0)

    edges = (
        ("start", "the prompt", at_start, at_end),
        ("end", "padding", at_end, at_start),
    )
    for name, content, edge, opposite_edge in edges:
        mean, z = first_pass.mean_and_z(first_pass.excess_surprisal, edge)
        opposite_mean, _ = first_pass.mean_and_z(first_pass.excess_surprisal, opposite_edge)
        limit = UNSAMPLED_EXCESS if _mean(unsampled[edge]) > MAJORITY else IMPOSSIBLE_EXCESS
        if mean > limit and z > Z_LIMIT and opposite_mean < REMAINDER * mean:
            return (
                f"tokens at the {name} of sequences are {mean:.1f} nats less probable than sampled ones: the mask "
                f"counts {content}"
            )
    return ""


def _retokenised_share(first_pass: FirstPass, log_weight: Floats, tokens: Flags) -> float:
    """Return the share of tokens that differ by a nat, if the sequences without such tokens agree; else 0.

    Args:
        first_pass: The first pass.
        log_weight: log(π_old/π_rollout) (nats), 0 if the engine reported none, (tokens,).
        tokens: True for tokens to use, (tokens,).
    """
    distance = np.where(tokens, np.abs(log_weight), 0.0)
    largest = np.zeros(len(first_pass.batch))
    np.maximum.at(largest, first_pass.sequence, distance)
    without_far_tokens = tokens & (largest[first_pass.sequence] < 1)
    if not without_far_tokens.any():
        return 0.0
    if float(distance[without_far_tokens].mean()) >= 2 * ROUNDING_DISTANCE:
        return 0.0
    return float((distance[tokens] >= 1).mean())


def _share_of_differing_followers(first_pass: FirstPass, log_weight: Floats, tokens: Flags) -> float | None:
    """Return the share of tokens that differ, among the tokens that follow one that differs by a nat.

    Tokens that agree and of which the engine is sure are left out, because they agree under any cause.

    Args:
        first_pass: The first pass.
        log_weight: log(π_old/π_rollout) (nats), 0 if the engine reported none, (tokens,).
        tokens: Tokens to use, (tokens,).

    Returns:
        The share; None if there are too few such tokens.
    """
    distance = np.where(tokens, np.abs(log_weight), 0.0)
    differs = distance > _largest_rounding(distance[tokens])
    is_sure = first_pass.logp_rollout >= math.log(UNSURE)
    follows_far_token = np.roll(first_pass.has_shifted_token(1, tokens & (distance > 1.0)), 1)
    followers = tokens & follows_far_token & (differs | ~is_sure)
    if int(followers.sum()) < FEWEST_FAR_TOKENS:
        return None
    return float(differs[followers].mean())


def _undetectable_codes(first_pass: FirstPass) -> tuple[str, ...]:
    """Return the code ``temperature`` if there are no entropies, without which it cannot be detected."""
    return ("temperature",) if np.isnan(first_pass.entropy).all() else ()


def _mean(values: Floats | Flags) -> float:
    """Compute the mean of values; 0 if there are none."""
    return float(values.mean()) if len(values) else 0.0
