"""Run the checks of a record's tokens, for properties of every correct run.

The ratio is 1 before the first update on a batch, engine and trainer compute the same probabilities, tokens are sampled
from the policy, and updates move it. Each check takes a `FirstPass`, the tokens of every sequence when it was first
recorded, and returns a `Finding`. If any of these checks fails, clip, radius and learning rate are not judged.
research/reports/rlvet/how-right.md has the rate of false alarms.

Notation: π is the policy in training, π_old the old policy, π_rollout the inference engine that sampled, and H the
entropy of the policy at a token.
"""

from __future__ import annotations

import math

import numpy as np

from rlvet.checks.findings import Finding
from rlvet.checks.log.engine import ENGINE_MISMATCH
from rlvet.records.advantages.masks import MASK
from rlvet.records.first_pass import FirstPass
from rlvet.records.registry import TOKENS
from rlvet.records.tokens.engine import check_engine
from rlvet.records.tokens.numbers import check_numbers
from rlvet.records.tokens.ratio import check_ratio
from rlvet.records.tokens.sampling import TOP_P
from rlvet.records.tokens.trend import LATE_Z_LIMIT, MODERATE_KL, mean_or_zero, untested
from rlvet.records.tokens.updates import check_updates

ALWAYS_JUDGED = (check_numbers, check_updates)
"""The checks that are made whatever another one found."""


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
    findings: list[Finding] = []
    has_failed = False
    for check in TOKENS.checks():
        is_of_probabilities = check.function not in ALWAYS_JUDGED
        if is_of_probabilities and has_failed:
            continue
        finding = check.function(first_pass)
        # Tokens that were not sampled are no evidence of the engine or the sampler.
        concerns_sampler = (
            is_of_probabilities and check.function is not check_ratio and finding.code != MASK.code
        )
        if concerns_sampler and finding.ok is False and not counts_drawn_tokens:
            finding = untested(finding, "correct the mask first")
        if (
            check.function is check_engine
            and finding.ok is False
            and _is_effect_of_sampling(first_pass, finding)
        ):
            finding = untested(finding)
        has_failed = has_failed or (is_of_probabilities and finding.ok is False)
        findings.append(finding)
    return findings


def _is_effect_of_sampling(first_pass: FirstPass, finding: Finding) -> bool:
    """Return whether a mismatch of the engine is an effect of sampling that the engine does not report.

    Such a sampler draws improbable tokens, for which rounding is larger. The mismatch is then much smaller than the
    excess of surprisal over entropy.

    Args:
        first_pass: The first pass.
        finding: The failed check of the engine.
    """
    tokens = first_pass.tokens_before_updates & ~np.isnan(first_pass.entropy + first_pass.logp_rollout)
    if finding.code not in (ENGINE_MISMATCH.code, TOP_P.code) or (finding.figure or math.inf) > MODERATE_KL:
        return False
    mean, z = first_pass.mean_and_z(first_pass.excess_surprisal, tokens)
    distance = mean_or_zero(np.abs(first_pass.logp_old - first_pass.logp_rollout)[tokens])
    # Sampling from a part of the vocabulary gives more probable tokens, never less probable ones.
    is_possible = finding.code != TOP_P.code or mean > 0
    return is_possible and abs(z) > LATE_Z_LIMIT and abs(mean) > 10 * distance
