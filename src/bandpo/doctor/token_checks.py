"""Checks of what every correct run satisfies: a ratio of 1 before updates, tokens that are drawn from the policy.

Each check is a function from `FirstPass`, the tokens of every sequence when it was first recorded, to a `Finding`. If
any of these checks fails, clip, radius and learning rate are not judged. docs/diagnose.md has the rate of false alarms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from bandpo.doctor.findings import Finding
from bandpo.doctor.first_pass import ROUNDING_DISTANCE, FirstPass, Flags, Floats, Integers

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
"""Share of the tokens at an end above which they are called unsampled, and of batches above which a run is off."""

FEWEST_TOKENS = 20
"""Tokens below which nothing is said of whether a column is permuted."""

TEMPERATURES = (0.25, 4.0)
"""Quotients of temperatures that occur. A fit beyond them is none of a temperature."""

SAME_VALUE = 1e-5
"""Distance (nats) of two log-probabilities up to which they are of the same token and the same pass."""

RELATED = 0.5
"""Rank correlation of two columns of log-probabilities of the same tokens: other weights, precision or temperature
leave more; those of other tokens have less."""

GREATEST_SURPRISAL = 12.5
"""Surprisal (nats per token) of a policy that knows nothing, with a vocabulary of 268,000 tokens. No policy finds the
tokens of another rarer than that, as a rule."""

LARGEST_ROUNDING_KL = 0.1
"""KL divergence (nats per token) that rounding of weights to 8 or 4 bits does not reach. Another prompt does."""

UNSURE = 0.9
"""Probability below which a token shows whether its logits differ."""

RARE_EXCESS = 3.0
"""Surprisal above the entropy (nats) of tokens that are missing where the engine draws from a part of the vocabulary.
Of tokens that are drawn from the policy between 1 in 1000 and 1 in 10 are rarer."""

PRECISION_DISTANCE = 0.05
"""Mean abs log-ratio (nats) up to which a constant distance may be one of half precision."""

LATE_Z_LIMIT = 5.0
"""Standard errors above which the mean of a part of the tokens is significant, when several parts are looked at."""

FAR_PART = 0.1
"""Part of the tokens beyond rounding that are a nat away, above which words were retokenised. Flipped experts leave
0.05 and less, retokenised words 0.2 and more."""

FEWEST_FAR_TOKENS = 3
"""Tokens that are a nat away below which nothing is said of what they are."""

FEW_TOKENS_SHARE = 0.15
"""Share of tokens above which a difference is none of few tokens, as flipped experts or retokenised words are."""

UNSAMPLED_WEIGHT = 0.6
"""Mean of π_old/π_rollout over far tokens, below which the engine did not sample them; of those that it did the mean is
near 1, whatever the trainer's probabilities are."""

FOLLOWERS_OFF = 0.5
"""Part of the tokens after those a nat away that are off as well, from which on the words before them were changed."""

MODERATE_KL = 0.01
"""KL divergence (nats per token) of an engine whose experts flip now and then, up to which it is worth a look alone."""

UNMOVED = 2e-6
"""Mean abs log-ratio (nats) up to which two passes in float32 are of the same weights."""

HARDLY_MOVED = 1e-4
"""Mean abs log-ratio (nats) after all updates on a batch up to which they hardly matter."""

NEAR_LIMIT = 10.0
"""Times its limit up to which the figure of a batch is near 0."""

OTHER_PROMPT = 0.3
"""Mean abs log-weight (nats) of first tokens that another prompt gives, and rounding does not."""

LARGER_AT_START = 1.25
"""Times the distance at later tokens that another prompt gives at the first ones, at least."""

LOST_P = 1e-3
"""Probability up to which the last loss of updates does not follow its advantages least by chance."""

FEWEST_BATCHES = 3
"""Batches from which something is said of how figures follow each other."""

LOG_WEIGHT_LIMIT = 20.0
"""Absolute log-weight (nats) at which weights are clamped, so that none overflows."""


def token_findings(first_pass: FirstPass, *, counts_drawn_tokens: bool = True) -> list[Finding]:
    """Run all checks of tokens, causes before their effects.

    The first failure among the ratio, the engine and the surprisal makes the later of these fail as well, so these are
    then left out.

    Args:
        first_pass: The tokens of every sequence when it was first recorded.
        counts_drawn_tokens: Whether the masks count all tokens that were drawn and no others, as far as is known. If
            not, neither the engine nor the surprisal is judged.

    Returns:
        One finding per check.
    """
    findings = [check_numbers(first_pass)]
    for check in (check_ratio, check_engine, check_surprisal):
        finding = check(first_pass)
        # Of tokens that nobody drew, an engine's log-probabilities and the surprisal say nothing of the sampler.
        is_of_sampler = check is not check_ratio and finding.ok is False and finding.code != "mask"
        if is_of_sampler and not counts_drawn_tokens:
            finding = _untested(finding, "mend the mask first")
        if check is check_engine and finding.ok is False and _is_effect_of_sampling(first_pass, finding):
            finding = _untested(finding)
        findings.append(finding)
        if finding.ok is False:
            break
    findings.append(check_updates(first_pass))
    return findings


def _untested(finding: Finding, advice: str = "") -> Finding:
    """Return a finding that is the effect of another as that of a check that could not run.

    Args:
        finding: The effect.
        advice: What would let the check run.
    """
    return finding._replace(code="ok", ok=None, cause="", or_else=(), severity="", onset=None, advice=advice)


def _is_effect_of_sampling(first_pass: FirstPass, finding: Finding) -> bool:
    """Return whether a distance of an engine is small beside that of its tokens from those that it would draw.

    Rounding is larger where tokens are rare. If the sampler draws rare ones, it does not draw as the engine reports.

    Args:
        first_pass: The first pass.
        finding: That the engine is not the trainer.
    """
    where = first_pass.tokens_before_updates & ~np.isnan(first_pass.entropy + first_pass.logp_rollout)
    if finding.code not in ("engine-mismatch", "top-p") or (finding.figure or math.inf) > MODERATE_KL:
        return False
    mean, z = first_pass.mean_and_z(first_pass.excess_surprisal, where)
    distance = _mean(np.abs(first_pass.logp_old - first_pass.logp_rollout)[where])
    # A part of the vocabulary gives tokens that are surer, never rarer ones.
    is_rarer = finding.code != "top-p" or mean > 0
    return is_rarer and abs(z) > LATE_Z_LIMIT and abs(mean) > 10 * distance


def check_numbers(first_pass: FirstPass) -> Finding:
    """Check that no sequence has a value that cannot be right."""
    bad = first_pass.bad_sequences
    count = bad + len(first_pass.batch)
    passed = Finding("ok", True, "values are numbers", bad / max(1, count), None, count)
    if not bad:
        return passed
    cause = f"{bad} of {count} sequences hold NaN, an infinite value or a log-probability above 0"
    return passed.failed("nan", cause)


@dataclass(frozen=True, eq=False)
class _Course:
    """A figure by batch, and the batches from which it is off."""

    values: Floats
    """The figure in each batch, in the order of the batches, (batches,)."""
    start: int
    """Index of the first batch from which it is off; 0 if it always is."""
    where: Flags
    """The tokens of the batches from there on, (tokens,)."""
    step: float | None
    """The step of that batch; None if the figure always is off."""
    limit: float = math.inf
    """The figure up to which a batch is right."""

    @property
    def figure(self) -> float:
        """The mean figure of the batches that are off."""
        return float(self.values[self.start :].mean())

    @property
    def since(self) -> str:
        """The onset as the end of a sentence; empty without one."""
        return "" if self.step is None else f"; before step {self.step:g} they agree"

    @property
    def grows_from_the_start(self) -> bool:
        """Whether batches that are right by the limit are already farther apart than the first is."""
        before = self.values[1 : self.start]
        if not len(before):
            return False
        mean = float(before.mean())
        # What is less than a part of the limit is rounding.
        return mean > REMAINDER * self.limit and float(self.values[0]) < REMAINDER * mean

    @property
    def grows(self) -> bool:
        """Whether the figure begins near 0 and is larger later, as between weights that drift apart."""
        values = self.values[max(0, self.start - 1) :]
        if len(values) < 2:
            return False
        begins_low = float(values[0]) < min(REMAINDER * float(values.max()), self.limit)
        # A fault that begins within the run has its full size at once. Weights that are not pushed differ from the
        # second batch on, and may do so by as much as one large first update.
        at_once = self.start > 1 and float(values[1]) > MAJORITY * float(np.median(values[1:]))
        return begins_low and not (at_once and len(values) > FEWEST_BATCHES)


def _course(first_pass: FirstPass, values: Floats, where: Flags, limit: float) -> _Course:
    """Find the batches from which a figure is off.

    Args:
        first_pass: The first pass.
        values: The quantity whose mean is the figure, (tokens,).
        where: Tokens to average, (tokens,).
        limit: The figure up to which a batch is right.
    """
    numbers, batch_index = np.unique(first_pass.batch, return_inverse=True)
    of_tokens = batch_index[first_pass.sequence]
    counts = np.bincount(of_tokens[where], minlength=len(numbers))
    sums = np.bincount(of_tokens[where], weights=values[where], minlength=len(numbers))
    recorded = np.flatnonzero(counts)
    means = sums[recorded] / counts[recorded]
    return _course_of(first_pass, means, numbers[recorded], where, limit)


def _course_of(
    first_pass: FirstPass, means: Floats, numbers: Integers, where: Flags, limit: float
) -> _Course:
    off = means > limit
    # The split that leaves the fewest batches on the wrong side; the earliest of several.
    right_before = np.concatenate([[0], (~off).cumsum()])
    off_behind = off.sum() - np.concatenate([[0], off.cumsum()])
    start = int((right_before + off_behind)[:-1].argmax()) if len(means) else 0
    # A figure that is off before as well, though less, has no onset.
    if not off[start:].any() or (start and means[:start].mean() > REMAINDER * means[start:].mean()):
        start = 0
    from_start = where & np.isin(first_pass.batch, numbers[start:])[first_pass.sequence]
    # Of weights that drift apart the second batch is off, which is no onset within the run.
    step = first_pass.first_step.get(int(numbers[start])) if start > 1 else None
    return _Course(means, start, from_start, step, limit)


def check_ratio(first_pass: FirstPass) -> Finding:
    """Check that the policy in training is the old policy before any update."""
    tested = "the ratio is 1 at the first look"
    where = first_pass.tokens_before_updates
    if not first_pass.logp_old_is_rollout:
        # Data that is known to be stale moves the ratio; the trainer's log-probabilities are no less right for it.
        fresh = where & ~(first_pass.lag > 0)
        where = fresh if fresh.any() else where
    where = where & ~np.isnan(first_pass.logp)
    if not where.any():
        return Finding("ok", None, tested, advice="record update= with each loss")

    limit = ROUNDING_DISTANCE if first_pass.anchored_at_rollout else EXACT_DISTANCE
    distance = np.abs(first_pass.logp - first_pass.logp_old)
    course = _course(first_pass, distance, where, limit)
    passed = Finding.of(tested, course.values, int(where.sum()))
    if course.figure <= limit or float(course.values.max()) <= limit:
        return passed
    # One batch that is off among others, without an order, is no fault of the passes.
    off_share = float((course.values[course.start :] > limit).mean())
    is_last_alone = course.start and len(course.values) - course.start < 2
    if off_share < MAJORITY or (is_last_alone and not first_pass.logp_old_is_rollout):
        return passed
    passed = passed._replace(figure=course.figure, onset=course.step)
    return _cause_of_ratio(first_pass, passed, course)._replace(onset=course.step)


def _cause_of_ratio(first_pass: FirstPass, passed: Finding, course: _Course) -> Finding:
    """Return the finding for a ratio that is not 1 before updates.

    Args:
        first_pass: The first pass.
        passed: The finding if the check had passed.
        course: The mean abs log-ratio by batch.
    """
    where = course.where
    new, old = first_pass.logp, first_pass.logp_old
    shift, shifted_distance, unshifted_distance = first_pass.best_shift(new, old, where)
    if shift and shifted_distance < REMAINDER * unshifted_distance:
        return passed.failed(
            "shift", f"logp_old is {shift:+d} tokens from logp: there the ratio is 1{course.since}"
        )

    odd = _odd_one(first_pass, where)
    if odd == "old":
        witness = ", though the policy in training agrees with the engine"
    elif odd == "new":
        witness = ", though the old policy agrees with the engine"
    else:
        witness = ""
    permuted = _permuted(first_pass, new, old, where, odd)
    if not permuted and odd == "old" and float(-np.median(old[where])) > GREATEST_SURPRISAL:
        cause = (
            f"tokens are {float(-np.median(old[where])):.0f} nats rare in the median by logp_old, as by no policy: it "
            f"has the values of other tokens, as of padding{witness}{course.since}"
        )
        alternatives = () if first_pass.shows_shifts(where) else ("shift",)
        return passed.failed("permuted", cause, *alternatives)
    if permuted:
        cause = f"logp_old has the values of other tokens: {permuted}{witness}{course.since}"
        return passed.failed("permuted", cause)

    quotient, r_squared = _temperature(first_pass, new, old, where)
    if quotient:
        cause = (
            f"logp_old is at {quotient:.2f} times the temperature of logp (R² {r_squared:.2f}){course.since}"
        )
        return passed.failed("temperature", cause)

    if odd == "old":
        if not course.grows and course.figure <= PRECISION_DISTANCE:
            cause = f"logp_old is of another precision or kernel, or of a pass with dropout{witness}{course.since}"
            return passed.failed("precision", cause)
        begins = ": nearer in the first batch than later" if course.grows else ""
        cause = f"logp_old is of other weights{begins}{witness}{course.since}"
        return passed.failed("reference-as-old", cause)

    if first_pass.logp_old_is_rollout and course.figure > ROUNDING_DISTANCE:
        if _drawn_from_a_part(new - old, where):
            cause = "the engine is surer than the trainer nearly everywhere: it drew from a part of the vocabulary"
            return passed.failed("top-p", f"{cause}{course.since}")
        if course.grows or bool((first_pass.lag[where] > 0).any()):
            cause = f"logp_old is the engine's, of other weights than the trainer's{course.since}"
            return passed.failed("stale", cause, "weight-sync")

    if first_pass.logp_old_is_rollout and course.figure <= ROUNDING_DISTANCE:
        cause = f"logp_old is the engine's, of other kernels or another precision{course.since}"
        return passed.failed("engine-mismatch", cause)
    undetectable = _undetectable_codes(first_pass)
    has_engine = bool((~np.isnan(first_pass.logp_rollout[where])).any())
    if course.grows and not has_engine:
        cause = "logp_old is of other weights: the distance begins near 0 and grows; record logp_rollout="
        return passed.failed("reference-as-old", cause, "dropout", *undetectable)
    if not first_pass.logp_old_is_rollout and course.figure <= ROUNDING_DISTANCE:
        cause = (
            f"two passes of the trainer differ by rounding, of precision or of kernels{witness}{course.since}"
        )
        return passed.failed("precision", cause, "dropout")
    cause = f"two passes over the same tokens differ, and no shift or temperature explains it{witness}{course.since}"
    alternatives = ("engine-mismatch",) if first_pass.logp_old_is_rollout else ("precision",)
    return passed.failed("dropout", cause, *alternatives, *undetectable)


def _odd_one(first_pass: FirstPass, where: Flags) -> str:
    """Return which log-probabilities are far from the other two: ``new``, ``old`` or ``engine``; "" if none is."""
    where = where & ~np.isnan(first_pass.logp + first_pass.logp_rollout)
    if first_pass.logp_old_is_rollout or not where.any():
        return ""
    new, old, engine = (x[where] for x in (first_pass.logp, first_pass.logp_old, first_pass.logp_rollout))
    distances = {
        "engine": float(np.abs(new - old).mean()),
        "old": float(np.abs(new - engine).mean()),
        "new": float(np.abs(old - engine).mean()),
    }
    ordered = sorted(distances, key=lambda name: distances[name])
    nearest, second = ordered[:2]
    return nearest if distances[nearest] < 2 * REMAINDER * distances[second] else ""


def _permuted(first_pass: FirstPass, first: Floats, second: Floats, where: Flags, odd: str) -> str:
    """Return what is permuted if a column has the values of another at other tokens, as a phrase; "" if it has not.

    Args:
        first_pass: The first pass.
        first: Log-probabilities (nats), (tokens,).
        second: Log-probabilities (nats) that should be of the same tokens, (tokens,).
        where: Tokens to compare, (tokens,).
        odd: Which log-probabilities are far from the other two, as `_odd_one` returns it.
    """
    _, place = np.unique(
        np.stack([first_pass.batch[first_pass.sequence[where]], first_pass.position[where]]),
        axis=1,
        return_inverse=True,
    )
    groups = {"positions are permuted": first_pass.sequence[where], "rows are permuted": place.ravel()}
    shares = {
        name: _share_of_values_elsewhere(first[where], second[where], group) for name, group in groups.items()
    }
    likeliest = max(shares, key=lambda name: shares[name])
    if shares[likeliest] > REMAINDER:
        return likeliest
    # Of a long record the row that a value belongs to may not have been looked at.
    if odd == "old" and not first_pass.logp_old_is_rollout and _unrelated(first[where], second[where]):
        return "rows or positions are permuted"
    return ""


def _share_of_values_elsewhere(first: Floats, second: Floats, group: Integers) -> float:
    """Return the share of the second column's values, of those unlike the first's at their token, that the first has at
    another token of the same group, less what chance gives.

    Args:
        first: Log-probabilities (nats), (n,).
        second: Log-probabilities (nats), (n,).
        group: Number of each token's group, (n,).
    """
    # What is rarer than any token of the first column is padding.
    unlike = (np.abs(first - second) > 10 * SAME_VALUE) & (second > first.min() - SAME_VALUE)
    if int(unlike.sum()) < FEWEST_TOKENS:
        return 0.0
    # Groups stand farther apart than values differ.
    spacing = 2 * (LOG_WEIGHT_LIMIT + float(np.abs(np.concatenate([first, second])).max()))

    def share_near(values: Floats) -> float:
        keys = np.sort(group * spacing + first)
        wanted = (group * spacing + values)[unlike]
        place = np.searchsorted(keys, wanted).clip(1, len(keys) - 1)
        nearest = np.minimum(np.abs(keys[place] - wanted), np.abs(keys[place - 1] - wanted))
        return float((nearest < SAME_VALUE).mean())

    by_chance = share_near(second + 20 * SAME_VALUE)
    return share_near(second) - by_chance


def _unrelated(first: Floats, second: Floats) -> bool:
    """Return whether two columns have about the same values, at other tokens.

    Args:
        first: Log-probabilities (nats), (n,).
        second: Log-probabilities (nats) that should be of the same tokens, (n,).
    """
    if len(first) < FEWEST_TOKENS or min(first.var(), second.var()) <= NEGLIGIBLE**2:
        return False
    # Ranks, as a few tokens of padding would dominate a correlation of values.
    ranks = [np.argsort(np.argsort(column)).astype(np.float64) for column in (first, second)]
    correlation = float(np.corrcoef(ranks[0], ranks[1])[0, 1])
    quartiles = np.quantile(first, (0.25, 0.75))
    reach = float(quartiles[1] - quartiles[0]) + ROUNDING_DISTANCE
    distance_of_medians = abs(float(np.median(first)) - float(np.median(second)))
    return correlation < RELATED and distance_of_medians < reach


def _temperature(first_pass: FirstPass, first: Floats, second: Floats, where: Flags) -> tuple[float, float]:
    """Return the quotient of two columns' temperatures, 0 if it is none of a temperature, and R² of the fit.

    Args:
        first_pass: The first pass.
        first: Log-probabilities (nats), (tokens,).
        second: Log-probabilities (nats) that should be at the same temperature, (tokens,).
        where: Tokens to use, (tokens,).
    """
    slope, r_squared = first_pass.fit_temperature(first, second, where)
    quotient = 1 + slope
    is_one = r_squared > TEMPERATURE_R2 and TEMPERATURES[0] < quotient < TEMPERATURES[1]
    return (quotient if is_one and abs(slope) > NEGLIGIBLE else 0.0), r_squared


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
    course = _course(first_pass, divergence, where, KL_LIMIT)
    passed = Finding.of(f"{tested} (KL, nats per token)", course.values, int(where.sum()))

    # A temperature is looked for in any case: if the policy is nearly sure of its tokens, the divergence hides it.
    quotient, _ = _temperature(first_pass, first_pass.logp_old, first_pass.logp_rollout, where)
    mean_surplus, z = first_pass.mean_and_z(surplus, where)
    weights_are_one = abs(mean_surplus) < NEGLIGIBLE or abs(z) < Z_LIMIT
    mean_divergence = float(course.values.mean())
    begins_late = course.start > 1 and course.figure > KL_LIMIT
    if course.grows_from_the_start:
        course = replace(course, start=0, where=where, step=None)
    # Weights that drift apart slowly are off at the end alone, and have no onset.
    last_third = course.values[-(len(course.values) // 3) :]
    ends_off = len(last_third) > 1 and float(last_third.mean()) > KL_LIMIT and course.grows
    if not quotient and not begins_late:
        lacking = _part_without_some_tokens(first_pass, surplus, where)
        if lacking is not None:
            course = replace(course, start=lacking.start, where=lacking.where, step=lacking.step)
            weights_are_one = False
    if mean_divergence <= KL_LIMIT and weights_are_one and not quotient and not begins_late and not ends_off:
        return passed
    if course.figure > KL_LIMIT:
        passed = passed._replace(figure=course.figure)
    elif ends_off:
        passed = passed._replace(figure=float(last_third.mean()))
    finding = _cause_of_mismatch(first_pass, passed, course, log_weight)
    return finding._replace(onset=course.step)


def _part_without_some_tokens(first_pass: FirstPass, surplus: Floats, where: Flags) -> _Course | None:
    """Return the batches from which the engine cannot draw some of the trainer's tokens; None if it always can.

    The mean of π_old/π_rollout is then below 1. The divergence hardly shows it.

    Args:
        first_pass: The first pass.
        surplus: π_old/π_rollout − 1, (tokens,).
        where: Tokens to look at, (tokens,).
    """
    course = _course(first_pass, -surplus, where, NEGLIGIBLE)
    mean, z = first_pass.mean_and_z(surplus, course.where)
    return course if course.start > 1 and mean < -NEGLIGIBLE and -z > LATE_Z_LIMIT else None


def _cause_of_mismatch(
    first_pass: FirstPass, passed: Finding, course: _Course, log_weight: Floats
) -> Finding:
    """Return the finding for an engine whose log-probabilities are not the trainer's; of an untested check, if the
    tokens do not suffice.

    Args:
        first_pass: The first pass.
        passed: The finding if the check had passed.
        course: The KL divergence by batch.
        log_weight: The trainer's log-probability of each token, less the engine's, (tokens,).
    """
    where = course.where
    since = course.since
    old, engine = first_pass.logp_old, first_pass.logp_rollout
    surplus = np.expm1(np.clip(log_weight, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT))
    divergence = surplus - np.clip(log_weight, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)

    shift, shifted_distance, unshifted_distance = first_pass.best_shift(old, engine, where)
    if shift and shifted_distance < REMAINDER * unshifted_distance:
        return passed.failed("shift", f"the trainer's tokens stand {-shift:+d} from the engine's{since}")

    cause = _unsampled_edge(first_pass)
    if cause:
        return passed.failed("mask", cause)

    # The trainer sees a retokenised word before the next token too, whose probability changes with it. An expert that
    # flips at one token leaves the next.
    follower_share = _share_of_followers_off(first_pass, log_weight, where)
    are_followed = follower_share is not None and follower_share >= FOLLOWERS_OFF

    def is_unsampled(mean_weight: float) -> bool:
        return mean_weight < UNSAMPLED_WEIGHT if follower_share is None else are_followed

    few_share, mean_weight = _few_far_tokens(log_weight[where])
    if not few_share or not is_unsampled(mean_weight):
        # Beside rounding in half precision, tokens that nobody sampled are a nat and more away.
        far_share, far_weight = _few_far_tokens(log_weight[where], farther_than=1.0)
        # Flipped experts leave many more tokens at smaller distances.
        distance = np.abs(log_weight[where])
        off_share = float((distance > max(ROUNDING_DISTANCE, 10 * float(np.median(distance)))).mean())
        are_far = far_share > FAR_PART * off_share and int((distance > 1.0).sum()) >= FEWEST_FAR_TOKENS
        if are_far and is_unsampled(far_weight) and _retokenised_share(first_pass, log_weight, where):
            few_share, mean_weight = far_share, far_weight
    if few_share and is_unsampled(mean_weight) and _retokenised_share(first_pass, log_weight, where):
        far_count = int((np.abs(log_weight[where]) > 1.0).sum())
        if far_count < FEWEST_FAR_TOKENS or follower_share is None:
            return _untested(
                passed,
                f"{far_count} of {int(where.sum())} tokens are a nat off and the rest agree, too few to tell other "
                "experts from answers that were tokenised again; record more batches",
            )
        share = f"{few_share:.1%} of tokens"
        cause = f"{share} are far off, as the tokens after them are; sequences without them agree{since}"
        return passed.failed("retokenised", cause)

    # A vocabulary without some tokens gives their probability to the others. It multiplies none by twenty.
    far_log_weights = log_weight[where & (np.abs(log_weight) > 1.0)]
    too_far_for_truncation = len(far_log_weights) > 0 and float(np.median(far_log_weights)) < -math.log(20)
    if few_share and follower_share is not None and not are_followed and too_far_for_truncation:
        cause = (
            f"{few_share:.1%} of tokens are far off, and the rest agree, the tokens after them too: the engine "
            f"chooses other experts{since}"
        )
        return passed.failed("routing", cause, "engine-mismatch")

    quotient, r_squared = _temperature(first_pass, old, engine, where)
    mean_surplus, z = first_pass.mean_and_z(surplus, where)
    is_surer = mean_surplus < 0 and -z > Z_LIMIT and _drawn_from_a_part(log_weight, where)
    # Rounding hides on which side of the trainer's single probabilities lie. Their mean weight is below 1 only if the
    # engine cannot draw some tokens.
    lacks_tokens = mean_surplus < -NEGLIGIBLE and -z > Z_LIMIT and course.figure <= MODERATE_KL
    if lacks_tokens and not is_surer and not quotient and _is_mostly_surer(log_weight, where):
        cause = (
            f"π_old/π_rollout is {1 + mean_surplus:.3f} on average (z {z:.1f}), which rounding does not give: the "
            f"engine drew from a part of the vocabulary{since}"
        )
        return passed.failed("top-p", cause)
    if is_surer and _stands_at_the_start(first_pass, log_weight, where, silent=ROUNDING_DISTANCE / 2):
        place = f"the engine is surer than the trainer at the first tokens of answers alone{since}"
        if _has_silent_open_tokens(first_pass, log_weight, where):
            return passed.failed("edited-logits", f"{place}: it edits their logits, as min_tokens does")
        cause = (
            f"{place}: it draws from a part of the vocabulary, or edits their logits as min_tokens does; the policy "
            "is sure of later tokens, so that they do not tell"
        )
        return passed.failed("top-p", cause, "edited-logits")
    if is_surer and not quotient:
        cause = (
            f"π_old/π_rollout is {1 + mean_surplus:.3f} on average and hardly ever above 1: "
            f"the engine drew from a part of the vocabulary{since}"
        )
        return passed.failed("top-p", cause)
    if quotient:
        cause = (
            f"the trainer is at {1 / quotient:.2f} times the temperature of the engine's log-probabilities "
            f"(R² {r_squared:.2f}){since}"
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

    tokens = "tokens"
    # Where the engine is sure of most tokens, other weights leave these in place as well.
    if int((engine[where] < math.log(UNSURE)).sum()) >= FEWEST_TOKENS:
        few_share = _few_unsure_tokens(log_weight[where], engine[where])
        tokens = "tokens that the engine is not sure of"
    if few_share:
        cause = (
            f"{few_share:.1%} of {tokens} are far off, to both sides, and the rest agree: the engine chooses other "
            f"experts{since}"
        )
        severity = "look" if course.figure <= MODERATE_KL else None
        return passed.failed("routing", cause, "engine-mismatch", severity=severity)
    if course.grows and fresh.any():
        cause = f"weights are called fresh, but the distance grows batch by batch{since}"
        return passed.failed("weight-sync", cause)
    if course.grows:
        cause = f"the distance begins at 0 and grows with training; record version={since}"
        return passed.failed("stale", cause, "weight-sync")

    undetectable = _undetectable_codes(first_pass)
    # At the first step of a run no weights are older.
    begins_with_run = min(first_pass.first_step.values(), default=math.inf) <= 1
    may_be_old = not fresh.any() and not (begins_with_run and float(course.values[0]) > course.limit)
    age_unknown = ("stale",) if may_be_old else ()
    if course.figure > MODERATE_KL and _stands_at_the_start(first_pass, log_weight, where):
        cause = (
            f"they are farthest apart at the first tokens of answers, in every batch: the engine saw another prompt, "
            f"such as a second BOS or another template{since}"
        )
        return passed.failed("prompt", cause, "engine-mismatch", *undetectable)
    agree_at_start = _agrees_at_the_start(first_pass, log_weight, where)
    place = "at later tokens of answers" if agree_at_start else "all along the answers"
    cause = f"they are far apart from the first batch on, to both sides and {place}{since}"
    if course.step is not None:
        cause = f"they are far apart, to both sides and {place}{since}"
    # Weights that were not pushed are no farther away than the policy has moved since.
    if course.step is not None and _is_within_movement(first_pass, course, log_weight):
        cause = f"{cause}, and no farther than updates moved the policy since: weights that were not pushed would do so"
        return passed.failed("weight-sync", cause, "engine-mismatch", *age_unknown, *undetectable)
    if agree_at_start:
        return passed.failed("engine-mismatch", cause, *age_unknown, *undetectable)
    if course.figure > LARGEST_ROUNDING_KL:
        cause = f"{cause}, by more than rounding gives: compare the prompt's ids, then the weights' version"
        return passed.failed("prompt", cause, "engine-mismatch", *age_unknown, *undetectable)
    return passed.failed("engine-mismatch", cause, *age_unknown, "prompt", *undetectable)


def _is_within_movement(first_pass: FirstPass, course: _Course, log_weight: Floats) -> bool:
    """Return whether the first batch that is off is no farther than the updates before it moved the policy, and later
    ones are no nearer.

    Args:
        first_pass: The first pass.
        course: The figure by batch.
        log_weight: The trainer's log-probability of each token, less the engine's, (tokens,).
    """
    numbers = np.unique(first_pass.batch)
    moved = [first_pass.last_distance.get(int(number), math.nan) for number in numbers]
    if len(numbers) != len(course.values) or not course.start or not moved[course.start - 1] > 0:
        return False
    # From weights that are not pushed any more the policy moves away.
    later = course.values[course.start + 1 :]
    if len(later) and float(later.mean()) < float(course.values[course.start]):
        return False
    in_batch = (first_pass.batch == numbers[course.start])[first_pass.sequence] & course.where
    return _mean(np.abs(log_weight[in_batch])) < 2 * moved[course.start - 1]


def _few_far_tokens(log_weight: Floats, farther_than: float = ROUNDING_DISTANCE) -> tuple[float, float]:
    """Return the share of tokens that are far off if nearly all the rest agree, else 0; and the mean of π_old/π_rollout
    over those far off.

    Args:
        log_weight: The trainer's log-probability of each token, less the engine's, (n,).
        farther_than: Distance (nats) above which a token is far off.
    """
    distance = np.abs(log_weight)
    if not len(distance):
        return 0.0, 1.0
    # Rounding is the distance of the typical token.
    typical = float(np.median(distance))
    far = distance > max(farther_than, 10 * typical)
    share = float(far.mean())
    far_part = float(distance[far].sum()) / max(float(distance.sum()), 1e-30)
    if not 0 < share < FEW_TOKENS_SHARE or far_part < 1 - 2 * REMAINDER or typical > ROUNDING_DISTANCE:
        return 0.0, 1.0
    return share, float(np.exp(log_weight[far].clip(max=LOG_WEIGHT_LIMIT)).mean())


def _few_unsure_tokens(log_weight: Floats, engine: Floats) -> float:
    """Return the share of tokens that are far off, among those of which the engine is not sure, if the rest agree; else
    0.

    Other weights, another precision and another prompt move all of these tokens. Those of which it is sure agree in any
    case.

    Args:
        log_weight: The trainer's log-probability of each token, less the engine's, (n,).
        engine: The engine's log-probabilities (nats), (n,).
    """
    distance = np.abs(log_weight[engine < math.log(UNSURE)])
    if len(distance) < FEWEST_TOKENS:
        return 0.0
    typical = float(np.median(distance))
    far = distance > max(ROUNDING_DISTANCE, 10 * typical)
    far_part = float(distance[far].sum()) / max(float(distance.sum()), 1e-30)
    is_few = int(far.sum()) >= FEWEST_FAR_TOKENS and float(far.mean()) < FEW_TOKENS_SHARE
    return float(far.mean()) if is_few and far_part >= 1 - 2 * REMAINDER else 0.0


def _agrees_at_the_start(first_pass: FirstPass, log_weight: Floats, where: Flags) -> bool:
    """Return whether the first tokens of answers agree beside the later ones, which excludes another prompt.

    Args:
        first_pass: The first pass.
        log_weight: The distance with its sign, (tokens,).
        where: Tokens to look at, (tokens,).
    """
    unsure = where & (first_pass.logp_rollout < math.log(UNSURE))
    early = unsure & (first_pass.position == 0)
    late = unsure & (first_pass.position > 0)
    if min(int(early.sum()), int(late.sum())) < FEWEST_TOKENS:
        return False
    distance = np.abs(log_weight)
    return _mean(distance[early]) < min(ROUNDING_DISTANCE, NEGLIGIBLE * 10 * _mean(distance[late]))


def _stands_at_the_start(
    first_pass: FirstPass, log_weight: Floats, where: Flags, silent: float | None = None
) -> bool:
    """Return whether a distance is larger at the first tokens of answers than later.

    Args:
        first_pass: The first pass.
        log_weight: The distance with its sign, (tokens,).
        where: Tokens to look at, (tokens,).
        silent: The distance up to which the last tokens must agree; if omitted, the first are as far as another prompt
            makes them.
    """
    distance = np.abs(log_weight)
    longest = int(first_pass.position[where].max(initial=0))
    early = where & (first_pass.position < max(EDGE_TOKENS, longest // 8))
    late = where & (first_pass.position >= longest // 2)
    if not late.any() or not early.any():
        return False
    early_distance = _mean(distance[early])
    if silent is None:
        return early_distance > max(OTHER_PROMPT, LARGER_AT_START * _mean(distance[late]))
    late = where & (first_pass.position > (2 * longest) // 3)
    # Rounding of an engine in half precision is more than nothing, and less than what edits the first tokens.
    limit = max(
        min(silent, MAJORITY * early_distance), min(2 * ROUNDING_DISTANCE, NEGLIGIBLE * 10 * early_distance)
    )
    return bool(late.any()) and _mean(distance[late]) < limit


def _is_mostly_surer(log_weight: Floats, where: Flags) -> bool:
    """Return whether the engine's probabilities are above the trainer's twice as often as below."""
    above = float((log_weight[where] > ROUNDING_DISTANCE).mean())
    below = float((-log_weight[where] > ROUNDING_DISTANCE).mean())
    return below > 2 * above


def _has_silent_open_tokens(first_pass: FirstPass, log_weight: Floats, where: Flags) -> bool:
    """Return whether late tokens agree of which the policy is as unsure as of early ones that do not.

    A part of the vocabulary is missing wherever the policy is unsure, min_tokens shows at the first tokens alone.

    Args:
        first_pass: The first pass.
        log_weight: The trainer's log-probability of each token, less the engine's, (tokens,).
        where: Tokens to look at, (tokens,).
    """
    longest = int(first_pass.position[where].max(initial=0))
    known = where & ~np.isnan(first_pass.entropy)
    off = known & (first_pass.position <= longest // 2) & (-log_weight > ROUNDING_DISTANCE)
    if not off.any():
        return False
    unsure = first_pass.entropy >= float(np.median(first_pass.entropy[off]))
    late = known & (first_pass.position > (2 * longest) // 3) & unsure
    if int(late.sum()) < FEWEST_TOKENS:
        return False
    return float((-log_weight[late] > ROUNDING_DISTANCE).mean()) < MAJORITY * float(
        (-log_weight[known & unsure & (first_pass.position <= longest // 3)] > ROUNDING_DISTANCE).mean()
    )


def _drawn_from_a_part(log_weight: Floats, where: Flags) -> bool:
    """Return whether the engine's probabilities are hardly anywhere below the trainer's, and often above.

    A truncated vocabulary gives its tokens the probability of the rest.

    Args:
        log_weight: The trainer's log-probability of each token, less the engine's.
        where: The tokens that count.
    """
    share_above = float((log_weight[where] > ROUNDING_DISTANCE).mean())
    share_below = float((-log_weight[where] > ROUNDING_DISTANCE).mean())
    return share_above < max(NEGLIGIBLE, REMAINDER * share_below) and share_below > 2 * NEGLIGIBLE


def check_surprisal(first_pass: FirstPass) -> Finding:
    """Check that tokens were drawn from the policy: the mean of −log π is then its entropy."""
    tested = "surprisal equals entropy"
    where = first_pass.tokens_before_updates & ~np.isnan(first_pass.entropy)
    if not where.any():
        return Finding("ok", None, tested, advice="record entropy= and update=")

    excesses = first_pass.batch_means(first_pass.excess_surprisal, where)
    passed = Finding.of(tested, excesses, int(where.sum()))
    course, z = _surprising_part(first_pass, where)
    mean, _ = first_pass.mean_and_z(first_pass.excess_surprisal, course.where)
    whole_limit = Z_LIMIT if course.step is None else LATE_Z_LIMIT
    part = _part_of_answers(first_pass, course.where)
    is_off = abs(z) >= whole_limit and abs(mean) >= ROUNDING_DISTANCE
    if not is_off and not part:
        return passed

    since = "" if course.step is None else f"; before step {course.step:g} they are as rare as it says"
    passed = passed._replace(figure=mean, onset=course.step)
    cause = _unsampled_edge(first_pass)
    if cause:
        return passed.failed("mask", cause, "shift")._replace(onset=course.step)

    distance_of_engine = np.abs(first_pass.logp - first_pass.logp_rollout)[course.where]
    has_engine = bool((~np.isnan(distance_of_engine)).any())
    # Rounding is larger where tokens are rare.
    agreement = max(ROUNDING_DISTANCE, 0.1 * abs(mean))
    engine_agrees = has_engine and float(np.nanmean(distance_of_engine)) <= agreement
    witness = ", though engine and trainer agree" if engine_agrees else ""
    direction = "surer" if z < 0 else "rarer"
    if part:
        cause = (
            f"tokens are {direction if is_off else 'surer or rarer'} than the policy says {part} of answers "
            f"alone{witness}: the sampler edits logits{since}"
        )
        # Where the policy is unsure at that part alone, a part of the vocabulary shows there alone too.
        rare = int((first_pass.excess_surprisal[course.where] > RARE_EXCESS).sum())
        if engine_agrees and is_off and z < 0 and rare < FEWEST_FAR_TOKENS:
            cause = (
                f"tokens are surer than the policy says {part} of answers, and {rare} of all are {RARE_EXCESS:g} nats "
                f"rarer than it says{witness}: rare ones are missing, or the sampler edits logits{since}"
            )
            finding = passed.failed("top-p", cause, "edited-logits")
        else:
            finding = passed.failed("edited-logits", cause, *(() if engine_agrees else ("stale",)))
    elif z < 0:
        size = f"{-mean:.3f} nats (z {z:.1f})"
        cause = f"tokens are surer than the policy by {size}{witness}: rare ones are missing{since}"
        finding = passed.failed("top-p", cause, "temperature")
    elif engine_agrees:
        cause = (
            f"tokens are rarer than the policy says by {mean:.3f} nats (z {z:.1f}){witness}: the sampler edits "
            f"logits, as a repetition penalty does, or samples hotter than it reports{since}"
        )
        finding = passed.failed("edited-logits", cause, "temperature")
    else:
        cause = (
            f"tokens are rarer than the policy says by {mean:.3f} nats (z {z:.1f}){since}; record logp_rollout= to "
            "tell the sampler from its weights"
        )
        finding = passed.failed("stale", cause, "weight-sync", "retokenised", "temperature", "edited-logits")
    return finding._replace(onset=course.step)


def _surprising_part(first_pass: FirstPass, where: Flags) -> tuple[_Course, float]:
    """Return the batches from which tokens are surest or rarest in standard errors, and how much that is.

    Args:
        first_pass: The first pass.
        where: Tokens to look at, (tokens,).
    """
    numbers, batch_index = np.unique(first_pass.batch, return_inverse=True)
    sums = np.bincount(
        first_pass.sequence[where],
        weights=first_pass.excess_surprisal[where],
        minlength=len(first_pass.batch),
    )
    totals = np.bincount(batch_index, weights=sums, minlength=len(numbers))
    squares = np.bincount(batch_index, weights=np.square(sums), minlength=len(numbers))
    behind = totals[::-1].cumsum()[::-1]
    spread = np.sqrt(squares[::-1].cumsum()[::-1])
    z = np.divide(behind, spread, out=np.zeros(len(behind)), where=spread > 0)
    candidates = z[: max(1, len(z) - 1)]
    start = int(np.abs(candidates).argmax())
    before, spread_before = float(totals[:start].sum()), math.sqrt(float(squares[:start].sum()))
    z_before = before / spread_before if spread_before else 0.0
    # It began within the run if it is not there before.
    if start < 2 or abs(z[start]) < LATE_Z_LIMIT or abs(z_before) > 2 or abs(z[start]) < abs(z[0]) + 1:
        start = 0
    from_start = where & np.isin(first_pass.batch, numbers[start:])[first_pass.sequence]
    step = first_pass.first_step.get(int(numbers[start])) if start else None
    return _Course(totals.astype(np.float64), start, from_start, step), float(z[start])


def _part_of_answers(first_pass: FirstPass, where: Flags) -> str:
    """Return where in answers alone tokens are surer or rarer than the policy says, as a phrase; "" if nowhere.

    Args:
        first_pass: The first pass.
        where: Tokens to look at, (tokens,).
    """
    longest = int(first_pass.position[where].max(initial=0))
    for parts in (2, 3, 4):
        edge = (longest + 1) // parts
        early = where & (first_pass.position < edge)
        late = where & (first_pass.position >= edge)
        if edge < 2 or not late.any():
            continue
        early_mean, early_z = first_pass.mean_and_z(first_pass.excess_surprisal, early)
        late_mean, late_z = first_pass.mean_and_z(first_pass.excess_surprisal, late)
        if min(abs(early_mean), abs(late_mean)) > 2 * REMAINDER * max(abs(early_mean), abs(late_mean)):
            continue
        if abs(early_z) > LATE_Z_LIMIT and abs(late_z) < 2 and abs(early_mean) > ROUNDING_DISTANCE:
            return "at the start"
        if abs(late_z) > LATE_Z_LIMIT and abs(early_z) < 2 and abs(late_mean) > ROUNDING_DISTANCE:
            return "at the end"
    return ""


def check_updates(first_pass: FirstPass) -> Finding:
    """Check that updates move the policy, and that the gradient of none of their losses is lost."""
    tested = "updates move the policy"
    before = []
    after = []
    for movement in first_pass.movement.values():
        if max(movement) > 0:
            after.append(movement[max(movement)])
            before.append(movement.get(0, math.nan))
    if not after:
        return Finding("ok", None, tested, advice="record update= with each of several updates")
    passed = Finding.of(f"{tested} (mean abs log-ratio)", after, len(after))

    known = first_pass.advantage[~np.isnan(first_pass.advantage)]
    has_signal = not len(known) or bool((known != 0).any())
    most = max(map(max, (movement.keys() for movement in first_pass.movement.values())))
    if has_signal and max(after) <= UNMOVED:
        if first_pass.repeats_sequences:
            cause = (
                f"the same tokens come again after updates (up to {most} on a batch), yet their log-probabilities stay "
                f"the same to {max(after):.1g} nats: optimizer.step is not reached, or its learning rate is 0 or too "
                "small for the weights' precision"
            )
        else:
            cause = (
                f"update counts to {most}, yet every ratio is 1 to {max(after):.1g} nats: optimizer.step is not "
                "reached, its learning rate is too small for the weights' precision, or logp_old is computed anew "
                "before each update"
            )
        return passed.failed("no-step", cause)
    floor = float(np.nanmedian(before)) if not np.isnan(before).all() else 0.0
    # A policy that has collapsed no longer moves either, after steps that were large.
    hardly_moves = float(np.median(after)) <= HARDLY_MOVED and max(after) <= NEAR_LIMIT * HARDLY_MOVED
    if has_signal and hardly_moves and floor <= HARDLY_MOVED:
        cause = (
            f"all {most} updates on a batch move log-probabilities by {float(np.median(after)):.1g} nats together: "
            "the learning rate is too small to move the policy"
        )
        return passed.failed("hardly-moves", cause)

    cause = _lost_gradient(first_pass)
    if cause and has_signal:
        return passed.failed("micro-batch-lost", cause)
    return passed


def _lost_gradient(first_pass: FirstPass) -> str:
    """Return that the last micro-batch of updates is without effect, as a cause; "" if it is not.

    Were all alike, each loss of an update would be as likely as the others to follow its advantages least.

    Args:
        first_pass: The first pass.
    """
    followed = first_pass.followed
    if len(followed) < FEWEST_BATCHES:
        return ""
    last = float(np.median([of_batch.last for of_batch in followed]))
    others = float(np.median([of_batch.others for of_batch in followed]))
    lowest = sum(of_batch.is_lowest for of_batch in followed)
    # The probability of each number of batches in which the last is the lowest by chance.
    chances = np.ones(1)
    for of_batch in followed:
        chance = 1 / of_batch.losses
        chances = np.convolve(chances, [1 - chance, chance])
    if float(chances[lowest:].sum()) > LOST_P or last > 2 * REMAINDER * others:
        return ""
    return (
        f"log-probabilities of the last of {followed[0].losses} micro-batches follow their advantages by {last:.2g} "
        f"nats per unit, those of the others by {others:.2g}, and in {lowest} of {len(followed)} batches they follow "
        "least: its gradient is lost"
    )


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


def _retokenised_share(first_pass: FirstPass, log_weight: Floats, where: Flags) -> float:
    """Return the share of tokens that are far off, if the sequences without them agree; else 0.

    Args:
        first_pass: The first pass.
        log_weight: log(π_old/π_rollout), nats, 0 where the engine gave none, (tokens,).
        where: Tokens to look at, (tokens,).
    """
    distance = np.where(where, np.abs(log_weight), 0.0)
    largest = np.zeros(len(first_pass.batch))
    np.maximum.at(largest, first_pass.sequence, distance)
    without_far_tokens = where & (largest[first_pass.sequence] < 1)
    if not without_far_tokens.any():
        return 0.0
    if float(distance[without_far_tokens].mean()) >= 2 * ROUNDING_DISTANCE:
        return 0.0
    return float((distance[where] >= 1).mean())


def _share_of_followers_off(first_pass: FirstPass, log_weight: Floats, where: Flags) -> float | None:
    """Return the share of tokens that are off, among those that follow a token a nat away; None if they are too few.

    Tokens that agree and of which the engine is sure are left out: they agree in any case.

    Args:
        first_pass: The first pass.
        log_weight: log(π_old/π_rollout), nats, 0 where the engine gave none, (tokens,).
        where: Tokens to look at, (tokens,).
    """
    distance = np.where(where, np.abs(log_weight), 0.0)
    follows_far_token = np.roll(first_pass.neighbours(1, where & (distance > 1.0)), 1)
    is_off = distance > max(ROUNDING_DISTANCE, 10 * float(np.median(distance[where])))
    is_sure = first_pass.logp_rollout >= math.log(UNSURE)
    followers = where & follows_far_token & (is_off | ~is_sure)
    if int(followers.sum()) < FEWEST_FAR_TOKENS:
        return None
    return float(is_off[followers].mean())


def _undetectable_codes(first_pass: FirstPass) -> tuple[str, ...]:
    """Return the code of a temperature if there are no entropies to recognise it by."""
    return ("temperature",) if np.isnan(first_pass.entropy).all() else ()


def _mean(values: Floats | Flags) -> float:
    """Return the mean of values, 0 if there are none."""
    return float(values.mean()) if len(values) else 0.0
