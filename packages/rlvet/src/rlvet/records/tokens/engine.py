"""Check that engine and trainer compute the same probabilities for the recorded tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np

from rlvet._numbers import format_number
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.engine import ENGINE_MISMATCH, STALE_WEIGHTS, WEIGHT_SYNC
from rlvet.records.advantages.masks import MASK
from rlvet.records.ages import ROUNDING_DISTANCE
from rlvet.records.first_pass import FirstPass
from rlvet.records.recorded_advantages import Flags, Floats
from rlvet.records.registry import TOKENS
from rlvet.records.tokens.ratio import SHIFT
from rlvet.records.tokens.sampling import (
    EDGE_TOKENS,
    EDITED_LOGITS,
    TEMPERATURE,
    TOP_P,
    describe_unsampled_edge,
    fit_temperature_ratio,
    is_engine_above,
    is_engine_mostly_above,
    undetectable_kinds,
)
from rlvet.records.tokens.trend import (
    FEWEST_FAR_TOKENS,
    FEWEST_TOKENS,
    LATE_Z_LIMIT,
    LOG_WEIGHT_LIMIT,
    MAJORITY,
    MODERATE_KL,
    NEGLIGIBLE,
    REMAINDER,
    UNSURE,
    Z_LIMIT,
    Trend,
    find_trend,
    mean_or_zero,
    untested,
)

PROMPT = Kind(
    code="prompt",
    severity="fix",
    meaning="the engine used a different prompt than the trainer",
    condition=(
        "engine and trainer differ most at the first tokens of answers, in every batch; or by more than "
        "rounding gives"
    ),
    remedy=(
        "compare the token ids of one prompt in the engine with those in the trainer: BOS, chat template, "
        "system prompt"
    ),
    evidence=("logp_old", "logp_rollout"),
    source="simulated prompts of `benchmarks/doctor`",
    scenarios=("another prompt at the sampler", "doubled BOS at the sampler"),
)

ROUTING = Kind(
    code="routing",
    severity="fix",
    meaning="the engine routes some tokens to other experts",
    condition="a few tokens differ widely, in both directions, and the tokens after them agree",
    remedy=(
        "record the experts that the engine chose and replay them in the trainer (R3), or mask tokens whose "
        "importance weight is far from 1"
    ),
    evidence=("logp_old", "logp_rollout"),
    source="arXiv:2510.11370; a simulated mixture of experts of `benchmarks/doctor`",
    scenarios=("routing",),
)

RETOKENISED = Kind(
    code="retokenised",
    severity="fix",
    meaning="some tokens are not those that the engine sampled",
    condition="a few tokens differ widely, the tokens after them too, and sequences without them agree",
    remedy="train on the token ids that the engine sampled, never on text that was tokenised again",
    evidence=("logp_old", "logp_rollout"),
    source="huggingface/trl issue 5224; text of `benchmarks/doctor` that was tokenised again",
    scenarios=("retokenised", "retokenised, 3 %"),
)

KL_LIMIT = 2e-3
"""Largest KL divergence (nats per token) between engine and trainer. Rounding to bfloat16 gives at most a tenth."""


@TOKENS.check(
    "probabilities of the engine",
    after="the ratio before the first update",
    tested="engine and trainer agree",
    explained="in a record, they are those of the trainer",
    reports=(
        ENGINE_MISMATCH,
        SHIFT,
        MASK,
        TEMPERATURE,
        TOP_P,
        EDITED_LOGITS,
        RETOKENISED,
        ROUTING,
        PROMPT,
        STALE_WEIGHTS,
        WEIGHT_SYNC,
    ),
)
def check_engine(first_pass: FirstPass) -> Finding:
    """Check that the engine's log-probabilities equal the trainer's, except for rounding."""
    tokens = ~np.isnan(first_pass.logp_rollout)
    if first_pass.logp_old_is_rollout or not tokens.any():
        return Finding("ok", None, "", advice="record logp_rollout=, and a logp_old of the trainer's own")

    # With w = π_old/π_rollout, the mean of w − 1 − log w over tokens from the engine estimates the KL divergence.
    log_weight = np.where(tokens, first_pass.logp_old - first_pass.logp_rollout, 0.0)
    clamped = np.clip(log_weight, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
    surplus = np.expm1(clamped)
    divergence = surplus - clamped
    trend = find_trend(first_pass, divergence, tokens, KL_LIMIT)
    measure = "KL between engine and trainer (nats per token)"
    passed = Finding.of(" (KL, nats per token)", trend.values, int(tokens.sum()), measure)

    # A temperature is always tested: if the policy is nearly sure of its tokens, the divergence hardly shows it.
    temperature_ratio, _ = fit_temperature_ratio(
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


def _find_truncated_batches(first_pass: FirstPass, surplus: Floats, tokens: Flags) -> Trend | None:
    """Find the first batch that the engine sampled from a part of the vocabulary, like all later ones; None if none.

    The mean of π_old/π_rollout is then below 1, while the divergence may hardly change.

    Args:
        first_pass: The first pass.
        surplus: π_old/π_rollout − 1, (tokens,).
        tokens: True for tokens to use, (tokens,).
    """
    trend = find_trend(first_pass, -surplus, tokens, NEGLIGIBLE)
    mean, z = first_pass.mean_and_z(surplus, trend.tokens)
    if trend.start > 1 and mean < -NEGLIGIBLE and -z > LATE_Z_LIMIT:
        return trend
    return None


LARGEST_ROUNDING_KL = 0.1
"""KL divergence (nats per token) above which the cause is not rounding, not even of weights to 8 or 4 bits. Another
prompt exceeds it."""

FAR_PART = 0.1
"""Share of tokens that differ by a nat, among those that differ by more than rounding, above which words were tokenised
again. Other experts give at most 0.05, words that were tokenised again at least 0.2."""

UNSAMPLED_WEIGHT = 0.6
"""Mean of π_old/π_rollout over widely different tokens below which the engine did not sample them. The mean over
sampled tokens is near 1, whatever the trainer's probabilities are."""

MOST_FOLLOWERS = 0.5
"""Of the tokens that follow a widely different one, the share that differs too and above which the text before them was
changed."""

LEAST_TRUNCATION_WEIGHT = 0.05
"""π_old/π_rollout below which the cause is not sampling from a part of the vocabulary. Without some tokens, the
probabilities of the others grow, but not by a factor of 20."""

OTHER_PROMPT = 0.3
"""Mean abs log-weight (nats) of the first tokens above which the cause is another prompt, not rounding."""

LARGER_AT_START = 1.25
"""Smallest ratio of the distance at the first tokens to that at later ones, if the engine saw another prompt."""


class _Mismatch:
    """A difference between the log-probabilities of the engine and the trainer, whose cause is to be found.

    Args:
        first_pass: The first pass.
        passed: The finding if the check had passed.
        trend: The KL divergence by batch.
        log_weight: The trainer's log-probability of each token minus the engine's, log(π_old/π_rollout), (tokens,).
    """

    def __init__(self, first_pass: FirstPass, passed: Finding, trend: Trend, log_weight: Floats):
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
        """The result of `fit_temperature_ratio` for the trainer and the engine."""
        old = self.first_pass.logp_old
        engine = self.first_pass.logp_rollout
        return fit_temperature_ratio(self.first_pass, old, engine, self.tokens)

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
        return self.passed.failed(SHIFT, cause)

    def _find_unsampled_edge(self) -> Finding | None:
        """Find a prompt or padding that the mask counts."""
        cause = describe_unsampled_edge(self.first_pass)
        return self.passed.failed(MASK, cause) if cause else None

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
            return untested(
                self.passed,
                f"{far_count} of {len(distance)} tokens differ by a nat and the rest agree, too few to distinguish "
                "other experts from answers that were tokenised again; record more batches",
            )
        cause = (
            f"{far_share:.1%} of tokens differ widely, and so do the tokens after them; sequences without them "
            f"agree{self.since}"
        )
        return self.passed.failed(RETOKENISED, cause)

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
        return self.passed.failed(ROUTING, cause, ENGINE_MISMATCH)

    def _find_truncated_sampling(self) -> Finding | None:
        """Find sampling from a part of the vocabulary, or edited logits, by a mean of π_old/π_rollout below 1."""
        temperature_ratio, _ = self.temperature_ratio
        mean_surplus, z = self.first_pass.mean_and_z(self.surplus, self.tokens)
        is_below_one = mean_surplus < 0 and -z > Z_LIMIT
        if not is_below_one:
            return None

        if not is_engine_above(self.log_weight, self.tokens):
            # Rounding hides the sign of the difference at single tokens. Their mean weight is below 1 only if the
            # engine cannot sample some tokens.
            is_small = mean_surplus < -NEGLIGIBLE and self.trend.figure <= MODERATE_KL
            if temperature_ratio or not is_small or not is_engine_mostly_above(self.log_weight, self.tokens):
                return None
            cause = (
                f"π_old/π_rollout is {1 + mean_surplus:.3f} on average (z {z:.1f}), which rounding does not explain: "
                f"the engine samples from a part of the vocabulary{self.since}"
            )
            return self.passed.failed(TOP_P, cause)

        if self._agrees_at_the_end():
            place = (
                "the engine's probabilities are above the trainer's only at the first tokens of "
                f"answers{self.since}"
            )
            if self._agrees_at_late_unsure_tokens():
                return self.passed.failed(
                    EDITED_LOGITS, f"{place}: it edits their logits, as min_tokens does"
                )
            cause = (
                f"{place}: it samples from a part of the vocabulary, or edits their logits as min_tokens does; the "
                "policy is sure of later tokens, so that these do not show which"
            )
            return self.passed.failed(TOP_P, cause, EDITED_LOGITS)
        if temperature_ratio:
            return None
        cause = (
            f"π_old/π_rollout is {1 + mean_surplus:.3f} on average and hardly ever above 1: the engine samples from a "
            f"part of the vocabulary{self.since}"
        )
        return self.passed.failed(TOP_P, cause)

    def _find_temperature(self) -> Finding | None:
        """Find a difference of temperatures."""
        temperature_ratio, r_squared = self.temperature_ratio
        if not temperature_ratio:
            return None
        cause = (
            f"the trainer is at {1 / temperature_ratio:.2f} times the temperature of the engine's log-probabilities "
            f"(R² {r_squared:.2f}){self.since}"
        )
        return self.passed.failed(TEMPERATURE, cause)

    def _find_lag(self) -> Finding | None:
        """Find a difference that only data from old weights has."""
        clamped = np.clip(self.log_weight, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
        divergence = self.surplus - clamped
        lagged = self.tokens & (self.first_pass.lag > 0)
        fresh_divergence = mean_or_zero(divergence[self.fresh])
        lagged_divergence = mean_or_zero(divergence[lagged])
        only_lagged_differ = lagged.any() and fresh_divergence < REMAINDER * lagged_divergence
        if not only_lagged_differ:
            return None
        max_lag = int(self.first_pass.lag[lagged].max())
        fresh = format_number(fresh_divergence, 2)
        cause = f"KL {fresh} at a lag of 0, {format_number(lagged_divergence, 2)} at lags up to {max_lag}"
        return self.passed.failed(STALE_WEIGHTS, cause)

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
        return self.passed.failed(ROUTING, cause, ENGINE_MISMATCH, severity=severity)

    def _find_growth(self) -> Finding | None:
        """Find a difference that begins near 0 and grows, as the trainer moves away from the engine's weights."""
        if not self.trend.grows:
            return None
        if self.fresh.any():
            cause = (
                f"the record marks weights as fresh, but the distance grows from batch to batch{self.since}"
            )
            return self.passed.failed(WEIGHT_SYNC, cause)
        cause = f"the distance begins at 0 and grows with training; record version={self.since}"
        return self.passed.failed(STALE_WEIGHTS, cause, WEIGHT_SYNC)

    def _find_other_prompt(self) -> Finding | None:
        """Find a difference that is largest at the first tokens of answers."""
        if self.trend.figure <= MODERATE_KL or not self._is_largest_at_the_start():
            return None
        cause = (
            "engine and trainer differ most at the first tokens of answers, in every batch: the engine saw another "
            f"prompt, such as one with a second BOS or another template{self.since}"
        )
        return self.passed.failed(PROMPT, cause, ENGINE_MISMATCH, *undetectable_kinds(self.first_pass))

    def _unexplained(self) -> Finding:
        """Return the finding if no single cause explains the difference, with all codes that may."""
        undetectable = undetectable_kinds(self.first_pass)
        # At the first step of a run no weights are old.
        begins_with_run = min(self.first_pass.first_step.values(), default=math.inf) <= 1
        is_wrong_at_once = begins_with_run and float(self.trend.values[0]) > self.trend.limit
        age_unknown = () if self.fresh.any() or is_wrong_at_once else (STALE_WEIGHTS,)

        agrees_at_first_tokens = self._agrees_at_first_tokens()
        place = "at later tokens of answers" if agrees_at_first_tokens else "over whole answers"
        from_first = " from the first batch on" if self.trend.step is None else ""
        cause = f"engine and trainer differ{from_first}, in both directions and {place}{self.since}"
        if self.trend.step is not None and self._is_within_movement():
            cause = f"{cause}, by no more than updates have moved the policy since: weights may no longer be pushed"
            return self.passed.failed(WEIGHT_SYNC, cause, ENGINE_MISMATCH, *age_unknown, *undetectable)
        if agrees_at_first_tokens:
            return self.passed.failed(ENGINE_MISMATCH, cause, *age_unknown, *undetectable)
        if self.trend.figure > LARGEST_ROUNDING_KL:
            cause = (
                f"{cause}, by more than rounding gives: compare the prompt's ids, then the weights' version"
            )
            return self.passed.failed(PROMPT, cause, ENGINE_MISMATCH, *age_unknown, *undetectable)
        return self.passed.failed(ENGINE_MISMATCH, cause, *age_unknown, PROMPT, *undetectable)

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
        return mean_or_zero(np.abs(self.log_weight[in_batch])) < 2 * movement[trend.start - 1]

    def _agrees_at_first_tokens(self) -> bool:
        """Return whether the first token of answers agrees while later ones do not, which excludes another prompt."""
        unsure = self.tokens & (self.first_pass.logp_rollout < math.log(UNSURE))
        early = unsure & (self.first_pass.position == 0)
        late = unsure & (self.first_pass.position > 0)
        if min(int(early.sum()), int(late.sum())) < FEWEST_TOKENS:
            return False
        distance = np.abs(self.log_weight)
        return mean_or_zero(distance[early]) < min(
            ROUNDING_DISTANCE, NEGLIGIBLE * 10 * mean_or_zero(distance[late])
        )

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
        return mean_or_zero(distance[early]) > max(
            OTHER_PROMPT, LARGER_AT_START * mean_or_zero(distance[late])
        )

    def _agrees_at_the_end(self) -> bool:
        """Return whether the last third of answers agrees, beside a difference at the first tokens."""
        distance = np.abs(self.log_weight)
        early = self._early_tokens()
        late = self.tokens & (self.first_pass.position > (2 * self._longest) // 3)
        if not late.any() or not early.any():
            return False
        early_distance = mean_or_zero(distance[early])
        # The larger limit allows for rounding in half precision beside a large difference at the start.
        limit = min(ROUNDING_DISTANCE / 2, MAJORITY * early_distance)
        half_precision_limit = min(2 * ROUNDING_DISTANCE, NEGLIGIBLE * 10 * early_distance)
        return mean_or_zero(distance[late]) < max(limit, half_precision_limit)

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


FEW_TOKENS_SHARE = 0.15
"""Share of tokens that differ widely above which the cause is not one of few tokens, such as other experts, or words
that were tokenised again."""


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
