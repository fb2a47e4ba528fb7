"""Signs of how tokens were sampled: a temperature, a part of the vocabulary, edited logits, or not at all."""

from __future__ import annotations

import numpy as np

from rlvet.checks.findings import Kind
from rlvet.records.ages import ROUNDING_DISTANCE
from rlvet.records.first_pass import FirstPass
from rlvet.records.recorded_advantages import Flags, Floats
from rlvet.records.tokens.trend import MAJORITY, NEGLIGIBLE, REMAINDER, Z_LIMIT, mean_or_zero

TEMPERATURE_R2 = 0.75
"""R² of the fit of a temperature above which it explains a difference. Two temperatures give at least 0.9; other faults
give less than 0.1, except top-p."""

TEMPERATURES = (0.25, 4.0)
"""Smallest and largest plausible ratio of two temperatures. A fit beyond them is not due to a temperature."""

TEMPERATURE = Kind(
    code="temperature",
    severity="fix",
    meaning="engine and trainer divide logits by different temperatures",
    condition=(
        "the difference of log-probabilities follows from a ratio of temperatures, with an R² above "
        f"{TEMPERATURE_R2:g}"
    ),
    remedy=(
        "divide the trainer's logits by the sampling temperature{sampling}, and request the engine's "
        "log-probabilities after temperature (vLLM: logprobs_mode=processed_logprobs)"
    ),
    evidence=("logp_old", "logp_rollout", "entropy"),
    source="huggingface/trl issue 4159; simulated temperatures of `benchmarks/doctor`",
    scenarios=("trainer forgot the temperature", "engine temperature"),
)


def fit_temperature_ratio(
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


def undetectable_kinds(first_pass: FirstPass) -> tuple[Kind, ...]:
    """Return the kind `TEMPERATURE` if there are no entropies, without which it cannot be detected."""
    return (TEMPERATURE,) if np.isnan(first_pass.entropy).all() else ()


TOP_P = Kind(
    code="top-p",
    severity="fix",
    meaning="the engine samples from a part of the vocabulary only",
    condition=(
        "the engine's probabilities are above the trainer's nearly everywhere; or sampled tokens are more "
        "probable than the entropy implies, and rare ones are missing"
    ),
    remedy="sample from the whole vocabulary: top-p 1, no top-k or min-p{sampling}",
    evidence=("logp_old", "logp_rollout", "entropy"),
    source="modelscope/ms-swift pull request 8442; simulated samplers of `benchmarks/doctor`",
    scenarios=("top-p", "min-p", "top-k, raw"),
)


def _shares_beyond_rounding(log_weight: Floats, tokens: Flags) -> tuple[float, float]:
    """Return the share of tokens whose π_old/π_rollout is above 1 by more than rounding, and the share below.

    Args:
        log_weight: The trainer's log-probability of each token minus the engine's, (tokens,).
        tokens: True for tokens to use, (tokens,).
    """
    above = float((log_weight[tokens] > ROUNDING_DISTANCE).mean())
    below = float((-log_weight[tokens] > ROUNDING_DISTANCE).mean())
    return above, below


def is_engine_mostly_above(log_weight: Floats, tokens: Flags) -> bool:
    """Return whether the engine's probabilities are above the trainer's twice as often as below them."""
    above, below = _shares_beyond_rounding(log_weight, tokens)
    return below > 2 * above


def is_engine_above(log_weight: Floats, tokens: Flags) -> bool:
    """Return whether the engine's probabilities are often above the trainer's, and hardly ever below them.

    An engine that samples from a part of the vocabulary gives its tokens the probability of the tokens left out.
    """
    above, below = _shares_beyond_rounding(log_weight, tokens)
    return above < max(NEGLIGIBLE, REMAINDER * below) and below > 2 * NEGLIGIBLE


EDITED_LOGITS = Kind(
    code="edited-logits",
    severity="fix",
    meaning="the sampler edits logits: min_tokens, a penalty, banned words",
    condition=(
        "engine and trainer agree, but sampled tokens are less probable than the entropy implies, or only "
        "at one end of answers"
    ),
    remedy=(
        "sample without min_tokens, a repetition, presence or frequency penalty, logit_bias or banned "
        "words{sampling}: the trainer does not apply them"
    ),
    evidence=("logp", "logp_rollout", "entropy"),
    source="simulated samplers of `benchmarks/doctor`",
    scenarios=("min_tokens", "repetition penalty, raw"),
)

EDGE_TOKENS = 2
"""Number of tokens at either end of a sequence in which prompts and padding are looked for."""

UNSAMPLED_EXCESS = 0.5
"""Excess of surprisal over entropy (nats per token) above which tokens at an end were not sampled, if the engine
reported no log-probability for them. With stale weights, the last tokens of a sequence may reach it too."""

IMPOSSIBLE_EXCESS = 2.0
"""The same limit if the engine reported a log-probability, or if none was recorded. Tokens sampled from a policy do not
reach it."""


def describe_unsampled_edge(first_pass: FirstPass) -> str:
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
        limit = UNSAMPLED_EXCESS if mean_or_zero(unsampled[edge]) > MAJORITY else IMPOSSIBLE_EXCESS
        if mean > limit and z > Z_LIMIT and opposite_mean < REMAINDER * mean:
            return (
                f"tokens at the {name} of sequences are {mean:.1f} nats less probable than sampled ones: the mask "
                f"counts {content}"
            )
    return ""
