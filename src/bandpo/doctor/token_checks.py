"""Checks of what every correct run satisfies: a ratio of 1 before updates, tokens that are drawn from the policy.

Each check is a function from `FirstPass`, the tokens of every sequence when it was first recorded, to a `Finding`. If
any of these checks fails, clip, radius and learning rate are not judged. docs/diagnose.md has the rate of false alarms.
"""

from __future__ import annotations

import numpy as np

from bandpo.doctor.findings import Finding
from bandpo.doctor.first_pass import ROUNDING_DISTANCE, FirstPass, Flags, Floats

Z_LIMIT = 4.0
"""Standard errors above which a mean is significant: six checks of skewed sums then give under 1 false alarm in 20."""

EXACT_DISTANCE = 1e-3
"""Mean abs log-ratio (nats) between two passes of one policy in the same precision; `ROUNDING_DISTANCE` is the bound
for different kernels."""

KL_LIMIT = 2e-3
"""KL divergence (nats per token) of an engine from its trainer; bfloat16 gives a tenth of it at most."""

TEMPERATURE_R2 = 0.75
"""R² above which a difference is one of temperature: two temperatures give 0.9 and more, all other faults but top-p
give less than 0.1."""

REMAINDER = 0.2
"""Share of a distance that is left at most when its cause is removed, as by the right shift; rounding leaves
hundredths."""

EDGE_TOKENS = 2
"""Tokens at either end of a sequence in which prompts and padding are looked for; each has more."""

UNSAMPLED_EXCESS = 0.5
"""Surprisal above the entropy (nats per token) of tokens that nobody sampled, where the engine gave them no
log-probability. The last tokens of a sequence reach it with stale weights too."""

IMPOSSIBLE_EXCESS = 2.0
"""The same where the engine gave a log-probability, or where there is no engine's: more than a policy can have."""

NEGLIGIBLE = 0.01
"""Distance of a mean weight from 1, and share of tokens, up to which a difference does not matter."""

MAJORITY = 0.5
"""Share of the tokens at an end above which they are called unsampled."""

LOG_WEIGHT_LIMIT = 20.0
"""Absolute log-weight (nats) at which weights are clamped, so that none overflows."""


def token_findings(first_pass: FirstPass) -> list[Finding]:
    """Run all checks of tokens, causes before their effects.

    The first failure among the ratio, the engine and the surprisal makes the later of these fail as well, so these are
    then left out.

    Returns:
        One finding per check.
    """
    findings = [check_numbers(first_pass)]
    for check in (check_ratio, check_engine, check_surprisal):
        finding = check(first_pass)
        findings.append(finding)
        if finding.ok is False:
            break
    return findings


def check_numbers(first_pass: FirstPass) -> Finding:
    """Check that no sequence has a value that cannot be right."""
    bad = first_pass.bad_sequences
    count = bad + len(first_pass.batch)
    passed = Finding("ok", True, "values are numbers", bad / max(1, count), None, count)
    if not bad:
        return passed
    cause = f"{bad} of {count} sequences hold NaN, an infinite value or a log-probability above 0"
    return passed.failed("nan", cause)


def check_ratio(first_pass: FirstPass) -> Finding:
    """Check that the policy in training is the old policy before any update."""
    tested = "the ratio is 1 at the first look"
    where = first_pass.tokens_before_updates
    if not first_pass.logp_old_is_rollout:
        # Data that is known to be stale moves the ratio; the trainer's log-probabilities are no less right for it.
        where = where & ~(first_pass.lag > 0)
    count = int(where.sum())
    if np.isnan(first_pass.logp[where]).all():
        return Finding("ok", None, tested, advice="record update= with each loss")

    distances = first_pass.batch_means(np.abs(first_pass.logp - first_pass.logp_old), where)
    passed = Finding.of(tested, distances, count)
    distance = float(distances.mean())
    limit = ROUNDING_DISTANCE if first_pass.anchored_at_rollout else EXACT_DISTANCE
    if distance <= limit:
        return passed
    # Faults of this kind are in every batch, except for stale weights.
    if not first_pass.logp_old_is_rollout and float(distances.min()) <= ROUNDING_DISTANCE:
        return passed

    shift, shifted_distance, unshifted_distance = first_pass.best_shift(first_pass.logp, first_pass.logp_old)
    if shift and shifted_distance < REMAINDER * unshifted_distance:
        return passed.failed("shift", f"logp_old is {shift:+d} tokens from logp: there the ratio is 1")

    slope, r_squared = first_pass.fit_temperature(first_pass.logp, first_pass.logp_old, where)
    if r_squared > TEMPERATURE_R2:
        cause = f"logp_old is at {1 + slope:.2f} times the temperature of logp (R² {r_squared:.2f})"
        return passed.failed("temperature", cause)

    log_weight = first_pass.logp - first_pass.logp_old
    if (
        first_pass.logp_old_is_rollout
        and distance > ROUNDING_DISTANCE
        and _drawn_from_a_part(log_weight, where)
    ):
        cause = (
            "the engine is surer than the trainer nearly everywhere: it drew from a part of the vocabulary"
        )
        return passed.failed("top-p", cause)

    is_stale = _grows(distances) or bool((first_pass.lag[where] > 0).any())
    if first_pass.logp_old_is_rollout and is_stale:
        cause = "logp_old is the engine's, of other weights than the trainer's"
        return passed.failed("stale", cause, "weight-sync")

    if distance > ROUNDING_DISTANCE:
        cause = "two passes over the same tokens differ, and no shift or temperature explains it"
        alternatives = ("engine-mismatch", *_undetectable_codes(first_pass))
        return passed.failed("dropout", cause, *alternatives)
    cause = "logp_old is the engine's, of other kernels or another precision"
    return passed.failed("engine-mismatch", cause)


def check_engine(first_pass: FirstPass) -> Finding:
    """Check that the engine's log-probabilities are the trainer's, but for rounding."""
    tested = "engine and trainer agree"
    where = ~np.isnan(first_pass.logp_rollout)
    if first_pass.logp_old_is_rollout or not where.any():
        return Finding("ok", None, tested, advice="record logp_rollout=, and a logp_old of the trainer's own")

    # log(π_old/π_rollout), and E[w − 1 − log w], which is the KL divergence of tokens drawn by the engine.
    log_weight = np.where(where, first_pass.logp_old - first_pass.logp_rollout, 0.0)
    clamped = np.clip(log_weight, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
    surplus = np.expm1(clamped)
    divergence = surplus - clamped
    divergences = first_pass.batch_means(divergence, where)
    mean_surplus, z = first_pass.mean_and_z(surplus, where)
    passed = Finding.of(f"{tested} (KL, nats per token)", divergences, int(where.sum()))

    # A temperature is looked for in any case: if the policy is nearly sure of its tokens, the divergence hides it.
    slope, r_squared = first_pass.fit_temperature(first_pass.logp_old, first_pass.logp_rollout, where)
    temperatures_differ = r_squared > TEMPERATURE_R2 and abs(slope) > NEGLIGIBLE
    weights_are_one = abs(mean_surplus) < NEGLIGIBLE or abs(z) < Z_LIMIT
    if float(divergences.mean()) <= KL_LIMIT and weights_are_one and not temperatures_differ:
        return passed

    shift, shifted_distance, unshifted_distance = first_pass.best_shift(
        first_pass.logp_old, first_pass.logp_rollout
    )
    if shift and shifted_distance < REMAINDER * unshifted_distance:
        return passed.failed("shift", f"the trainer's tokens stand {-shift:+d} from the engine's")

    cause = _unsampled_edge(first_pass)
    if cause:
        return passed.failed("mask", cause)

    far_share = _retokenised_share(first_pass, log_weight)
    if far_share > NEGLIGIBLE:
        cause = f"{far_share:.1%} of tokens are far off; sequences without them agree"
        return passed.failed("retokenised", cause)

    if mean_surplus < 0 and -z > Z_LIMIT and _drawn_from_a_part(log_weight, where):
        cause = (
            f"π_old/π_rollout is {1 + mean_surplus:.3f} on average and hardly ever above 1: "
            "the engine drew from a part of the vocabulary"
        )
        return passed.failed("top-p", cause)

    if temperatures_differ:
        cause = (
            f"the trainer is at {1 / (1 + slope):.2f} times the temperature of the engine's log-probabilities "
            f"(R² {r_squared:.2f}, slope {slope:+.3f})"
        )
        return passed.failed("temperature", cause)

    # Old weights explain a distance that fresh data does not have.
    fresh = where & (first_pass.lag == 0)
    lagged = where & (first_pass.lag > 0)
    fresh_divergence = _mean(divergence[fresh])
    lagged_divergence = _mean(divergence[lagged])
    if lagged.any() and fresh_divergence < REMAINDER * lagged_divergence:
        max_lag = int(first_pass.lag[lagged].max())
        cause = f"KL {fresh_divergence:.2g} at a lag of 0, {lagged_divergence:.2g} at {max_lag} and less"
        return passed.failed("stale", cause)

    if _grows(divergences) and fresh.any():
        return passed.failed("weight-sync", "weights are called fresh, but the distance grows batch by batch")
    if _grows(divergences):
        cause = "the distance begins at 0 and grows with training"
        return passed.failed("stale", cause, "weight-sync")
    cause = "they are far apart from the first batch on"
    return passed.failed("engine-mismatch", cause, "stale", *_undetectable_codes(first_pass))


def _drawn_from_a_part(log_weight: Floats, where: Flags) -> bool:
    """Return whether the engine's probabilities are hardly anywhere below the trainer's, and often above.

    A truncated vocabulary gives its tokens the probability of the rest.

    Args:
        log_weight: The trainer's log-probability of each token, less the engine's.
        where: The tokens that count.
    """
    share_above = float((log_weight[where] > ROUNDING_DISTANCE).mean())
    share_below = float((-log_weight[where] > ROUNDING_DISTANCE).mean())
    return share_above < max(NEGLIGIBLE, REMAINDER * share_below)


def check_surprisal(first_pass: FirstPass) -> Finding:
    """Check that tokens were drawn from the policy: the mean of −log π is then its entropy."""
    tested = "surprisal equals entropy"
    where = first_pass.tokens_before_updates & ~np.isnan(first_pass.entropy)
    if not where.any():
        return Finding("ok", None, tested, advice="record entropy= and update=")

    excesses = first_pass.batch_means(first_pass.excess_surprisal, where)
    passed = Finding.of(tested, excesses, int(where.sum()))
    mean, z = first_pass.mean_and_z(first_pass.excess_surprisal, where)
    if abs(z) < Z_LIMIT or abs(mean) < ROUNDING_DISTANCE:
        return passed

    cause = _unsampled_edge(first_pass)
    if cause:
        return passed.failed("mask", cause, "shift")
    if z < 0:
        cause = f"tokens are surer than the policy by {-mean:.3f} nats (z {z:.1f}): rare ones are missing"
        return passed.failed("top-p", cause, "temperature")
    cause = f"tokens are rarer than the policy says by {mean:.3f} nats (z {z:.1f})"
    return passed.failed("stale", cause, "weight-sync", "retokenised", "temperature")


def _unsampled_edge(first_pass: FirstPass) -> str:
    """Return the end of the sequences at which tokens that nobody sampled are counted, as a cause; "" if neither."""
    known = first_pass.tokens_before_updates & ~np.isnan(first_pass.entropy)
    at_start = known & (first_pass.position < EDGE_TOKENS)
    at_end = known & (first_pass.remaining < EDGE_TOKENS)

    # Engines give 0 or nothing for tokens that they did not sample.
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
                f"tokens at the {name} of sequences are {mean:.1f} nats rarer than they should be: "
                f"{content} is counted"
            )
    return ""


def _retokenised_share(first_pass: FirstPass, log_weight: Floats) -> float:
    """Return the share of tokens that are far off, if the sequences without them agree; else 0.

    Args:
        first_pass: The first pass.
        log_weight: log(π_old/π_rollout), nats, 0 where the engine gave none, (tokens,).
    """
    distance = np.abs(log_weight)
    largest = np.zeros(len(first_pass.batch))
    np.maximum.at(largest, first_pass.sequence, distance)
    without_far_tokens = largest[first_pass.sequence] < 1
    if not without_far_tokens.any():
        return 0.0
    if float(distance[without_far_tokens].mean()) >= ROUNDING_DISTANCE:
        return 0.0
    return float((distance >= 1).mean())


def _undetectable_codes(first_pass: FirstPass) -> tuple[str, ...]:
    """Return the code of a temperature if there are no entropies to recognise it by."""
    return ("temperature",) if np.isnan(first_pass.entropy).all() else ()


def _grows(distances: Floats) -> bool:
    """Return whether a distance begins near 0 and is larger later, as between weights that drift apart.

    Args:
        distances: The distance in each batch, (batches,).
    """
    return len(distances) > 1 and float(distances[0]) < REMAINDER * float(distances.max())


def _mean(values: Floats | Flags) -> float:
    """Return the mean of values, 0 if there are none."""
    return float(values.mean()) if len(values) else 0.0
