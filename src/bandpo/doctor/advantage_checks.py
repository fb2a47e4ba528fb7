"""Checks of advantages, rewards and masks: are the advantages those that reward and group give?

`estimators` computes the advantages of each known estimator. `check_advantages` looks for the one that fits. If none
does, it looks for the way in which the recorded ones depart from it, and since which batch. A departure is named only
where the data show it; advantages of an unknown formula that follow the reward are no fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from bandpo.doctor.findings import Finding
from bandpo.doctor.recorded_advantages import NO_TOKEN, Flags, Floats, Integers, RecordedAdvantages

ENDS = "the end token counts (share of finished answers that end with one)"
"""What `check_ends` tests."""

PROMPTS = "the first token that counts is of the answer"
"""What `check_prompts` tests."""

RELATIVE_TOLERANCE = 6e-3
"""Relative difference up to which two advantages are equal: bfloat16 rounds by 4e-3 at most."""

ABSOLUTE_TOLERANCE = 1e-3
"""The same as a share of the root mean square of all advantages."""

ROUNDED_TIE = 0.02
"""Advantage up to which that of a group of equal rewards is what rounding leaves: 1e-7 of the reward over an epsilon of
1e-4 or 1e-5."""

NEARLY_ALL = 0.98
"""Share of sequences from which a statement holds for all of them."""

NEARLY_EVERY = 0.8
"""Share of the batches above which something happens in each of them."""

FEWEST_BATCHES = 3
"""Batches from which something is said of what happens in each of them, and groups that each of these has."""

MANY = 0.3
"""Share of the sequences of a batch or process from which these depart as a whole."""

REORDERED_SHARE = 0.1
"""Share of sequences with an advantage of another, up to which these are not called permuted."""

FEWEST_SEQUENCES = 8
"""Sequences whose advantage is not 0, below which no formula is looked for."""

MAJORITY = 0.5
"""Share of truncated answers, or of groups without signal, above which these are a fault."""

NO_SIGNAL_SHARE = 0.98
"""Share of sequences with an advantage of 0 from which a batch has no signal."""

ADVANTAGE_LIMIT = 100.0
"""Advantage that no normalised group reaches: a group of G sequences gives √G at most."""

UNCENTRED_SHARE = 0.05
"""Share of the advantages' mean square that is due to the means of groups: 0 in the right groups, 1/G in wrong ones."""

UNRELATED = 0.1
"""Correlation of reward and advantage below which they have nothing to do with each other."""

FEWEST_CORRELATED = 60
"""Sequences from which such a correlation is judged."""

OPPOSITE = 0.9
"""Negative correlation that is judged of fewer: that of an estimator's advantages times −1."""

MIN_PAIRS = 20
"""Number of pairs of equal answers from which their rewards are compared."""

NOISE_SHARE = 0.5
"""Share of the rewards' variance among the answers to one prompt that equal answers show as well: all of it if the
reward does not depend on the answer."""

NOISE_OF_RANGE = 0.1
"""Standard deviation of the rewards of one answer, as a share of the range of rewards, up to which a judge is well."""

COMMON_ENDS = 3
"""Ids that most answers end with, where they end at an end token or a stop string."""

FORCED_EVIDENCE = 30.0
"""Nats by which the first tokens of groups are less probable, drawn anew for each answer, than a common prompt."""

FORCED_PROBABILITY = 0.5
"""Geometric mean of the probabilities of such first tokens, at most; answers begin alike where the policy is surer."""

GROUP_ESTIMATORS = ("GRPO", "GRPO (standard deviation with n)", "Dr. GRPO", "RLOO")
"""The estimators that compare an answer with the answers to the same prompt alone."""

BATCH_ESTIMATORS = ("batch normalisation", "batch normalisation over tokens", "the batch's mean as baseline")
"""The estimators that compare an answer with all answers of the batch."""

EPSILONS = (1e-4, 1e-6)
"""What is added to a standard deviation: by TRL, and by verl and others."""


def advantage_findings(recorded: RecordedAdvantages, *, whole_groups: bool = True) -> list[Finding]:
    """Run all checks of advantages, rewards and masks, causes before their effects.

    Args:
        recorded: Rewards, advantages and masks of the sequences.
        whole_groups: Whether it has all answers to each prompt.

    Returns:
        One finding per check.
    """
    return findings_and_notes(recorded, whole_groups=whole_groups)[0]


def findings_and_notes(
    recorded: RecordedAdvantages, *, whole_groups: bool = True
) -> tuple[list[Finding], list[str]]:
    """Return what `advantage_findings` and `advantage_notes` do, which rest on one comparison.

    Args:
        recorded: Rewards, advantages and masks of the sequences.
        whole_groups: Whether it has all answers to each prompt.
    """
    comparison = _Comparison(recorded, whole_groups)
    findings = [
        check_groups(recorded, whole_groups=whole_groups),
        check_losses(recorded),
        check_ends(recorded),
        check_prompts(recorded),
        check_signal(recorded),
        _advantage_finding(comparison),
        check_rewards(recorded),
    ]
    return findings, [comparison.note] if comparison.note else []


def advantage_notes(recorded: RecordedAdvantages) -> list[str]:
    """Return which estimator the advantages are of, or why that cannot be told, as sentences."""
    note = _Comparison(recorded).note
    return [note] if note else []


# --- masks ------------------------------------------------------------------------------------------------------------


def check_groups(recorded: RecordedAdvantages, *, whole_groups: bool = True) -> Finding:
    """Check that no part of a batch is left out of its updates, as the rest of a division into micro-batches is.

    Args:
        recorded: Rewards, advantages and masks of the sequences.
        whole_groups: Whether it has all answers to each prompt. Otherwise nothing can be said to be left out.
    """
    tested = "every group has all of its answers (share that has)"
    known = ~np.isnan(recorded.group)
    if not known.any() or not whole_groups:
        return Finding("ok", None, tested, advice="record group=")
    data = recorded.select(known)
    batch = _index(data.batch, data.process)
    group = _index(batch, data.group)
    sizes = np.bincount(group)
    batch_of_group = np.zeros(len(sizes), np.int64)
    batch_of_group[group] = batch
    group_size = int(np.bincount(sizes).argmax())
    smaller = sizes[sizes < group_size]
    passed = Finding("ok", True, tested, float((sizes >= group_size).mean()), None, len(sizes))
    incomplete = np.bincount(batch_of_group, weights=sizes < group_size)
    groups_of_batch = float(np.bincount(batch_of_group).mean())
    if len(incomplete) < FEWEST_BATCHES or not len(smaller) or groups_of_batch < FEWEST_BATCHES:
        return passed
    remaining = int(np.median(smaller))
    is_regular = float((smaller == remaining).mean()) > NEARLY_EVERY
    is_one_each = float((incomplete == 1).mean()) > NEARLY_EVERY
    if not (is_regular and is_one_each):
        return passed
    cause = (
        f"in nearly every batch one group has {group_size - remaining} of {group_size} answers fewer than the others: "
        "the last micro-batch, or the rest of a division, is lost"
    )
    return passed.failed("micro-batch-lost", cause)


def check_losses(recorded: RecordedAdvantages) -> Finding:
    """Check that every loss counts a token."""
    tested = "every loss counts a token (share that does not)"
    share = recorded.empty_losses / max(1, recorded.losses)
    passed = Finding("ok", True, tested, share, None, recorded.losses)
    if not recorded.empty_losses:
        return passed
    cause = (
        f"{recorded.empty_losses} of {recorded.losses} losses count no token, so nothing is learned from them"
    )
    severity = "fix" if share > 0.05 else "look"
    return passed.failed("mask", cause, severity=severity, onset=recorded.first_empty_step)


def check_ends(recorded: RecordedAdvantages) -> Finding:
    """Check that answers which were not cut off end with an end token that counts.

    An end token hardly stands anywhere else. Other last tokens are as common within answers.
    """
    tested = ENDS
    finished = (recorded.truncated == 0) & (recorded.last_token != NO_TOKEN) & (recorded.length > 1)
    last = recorded.last_token[finished]
    # Where no answer at all is said to be cut off, that may be what a writer says of every answer.
    if not (recorded.truncated == 1).any():
        return Finding("ok", None, tested, advice="needs truncated=, and an answer that was cut off")
    if len(last) < FEWEST_CORRELATED or not len(recorded.token_counts):
        return Finding("ok", None, tested, advice="record tokens= and truncated=")

    # The answer itself does not show that its last token is one.
    counts = recorded.token_counts[last] - 1
    ends = recorded.end_counts[last] - 1
    is_end = 2 * ends >= np.maximum(counts, 1)
    share = float(is_end.mean())
    passed = Finding("ok", True, tested, share, None, len(last))
    common = np.sort(np.unique(last, return_counts=True)[1])[::-1][:COMMON_ENDS].sum() / len(last)
    if share > MAJORITY or common > 0.8:
        return passed
    cause = (
        f"{1 - share:.0%} of finished answers end with a token that stands within answers as well: "
        "the end token is outside the loss, so answers are not trained to end"
    )
    return passed.failed("mask", cause)


def check_prompts(recorded: RecordedAdvantages) -> Finding:
    """Check that answers to one prompt do not all begin with the same improbable token, as prompts do."""
    tested = PROMPTS
    known = ~np.isnan(recorded.group) & (recorded.first_token != NO_TOKEN)
    if not known.any():
        return Finding("ok", None, tested, advice="record tokens= and group=")
    some = recorded.select(known)
    index = _index(some.batch, some.process, some.group)
    sizes = np.bincount(index)
    smallest = np.full(len(sizes), np.iinfo(np.int64).max)
    largest = np.full(len(sizes), NO_TOKEN)
    np.minimum.at(smallest, index, some.first_token)
    np.maximum.at(largest, index, some.first_token)
    judged = sizes > 1
    equal = judged & (smallest == largest)
    if not judged.any():
        return Finding("ok", None, tested, advice="record tokens= and group=")

    share = float(equal[judged].mean())
    surprisals = -np.bincount(index, weights=some.first_logp) / sizes
    evidence = float((surprisals * (sizes - 1))[equal].sum())
    passed = Finding("ok", True, tested, 1 - share, None, int(judged.sum()))
    if share < NEARLY_ALL or evidence < FORCED_EVIDENCE:
        return passed
    probability = float(np.exp(-surprisals[equal].mean()))
    if probability > FORCED_PROBABILITY:
        return passed
    cause = (
        f"the first token that counts is the same in all answers to a prompt, though they would be drawn with "
        f"{probability:.2g} each: the prompt is counted, or a beginning that was not drawn"
    )
    return passed.failed("mask", cause)


# --- signal -----------------------------------------------------------------------------------------------------------


def check_signal(recorded: RecordedAdvantages) -> Finding:
    """Check that advantages distinguish sequences."""
    tested = "advantages carry signal (share that is 0)"
    known = ~np.isnan(recorded.advantage)
    if not known.any():
        return Finding("ok", None, tested)

    some = recorded.select(known)
    zero_shares = _means(some.advantage == 0, _index(some.batch))
    passed = Finding.of(tested, zero_shares, int(known.sum()))

    rewards = some.reward[~np.isnan(some.reward)]
    rewards_are_equal = len(rewards) > 1 and bool((rewards == rewards[0]).all())
    advantages_are_equal = bool((some.advantage == some.advantage[0]).all())
    # Where answers below the mean were left out, the rest have one reward, and advantages above 0 that differ.
    only_positive = bool((some.advantage > 0).all()) and not advantages_are_equal
    if rewards_are_equal and not only_positive:
        cause = f"every reward is {float(rewards[0]):g}"
        truncated_share = float((some.truncated == 1).mean())
        if truncated_share > MAJORITY:
            return passed.failed("truncated", f"{truncated_share:.0%} of answers are cut off, and {cause}")
        return passed.failed("reward-flat", f"{cause}, so nothing can be learned")

    if bool((zero_shares >= NO_SIGNAL_SHARE).all()):
        cause = f"{float(zero_shares.mean()):.0%} of advantages are 0"
        alternatives = () if len(rewards) else ("reward-flat",)
        return passed.failed("no-signal", cause, *alternatives)
    if advantages_are_equal and known.sum() >= FEWEST_SEQUENCES:
        cause = (
            f"every advantage is {float(some.advantage[0]):g}, whatever the reward: no answer is preferred"
        )
        return passed.failed("no-signal", cause)

    largest = float(np.abs(some.advantage).max())
    if largest > ADVANTAGE_LIMIT:
        cause = f"the largest advantage is {largest:.3g}; a normalised group gives √(its size) at most"
        return passed.failed("advantage-scale", cause)
    return passed


# --- estimators -------------------------------------------------------------------------------------------------------


def _index(*columns: Floats | Integers) -> Integers:
    """Return a number for each row that is the same for rows with equal values, counted from 0."""
    index = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        _, of_column = np.unique(column, return_inverse=True)
        _, index = np.unique(index * (int(of_column.max(initial=0)) + 1) + of_column, return_inverse=True)
    return index


def _means(values: Floats | Flags, index: Integers, weights: Floats | None = None) -> Floats:
    """Return the mean of the values with each index, NaN left out; NaN if there are none."""
    known = ~np.isnan(values)
    weights = np.ones(len(values)) if weights is None else weights
    count = int(index.max(initial=-1)) + 1
    sums = np.bincount(index[known], weights=(values * weights)[known], minlength=count)
    totals = np.bincount(index[known], weights=weights[known], minlength=count)
    return np.divide(sums, totals, out=np.full(count, math.nan), where=totals > 0)


def estimators(reward: Floats, group: Integers, batch: Integers, length: Integers) -> dict[str, Floats]:
    """Compute the advantages of each known estimator, (sequences,).

    Args:
        reward: Reward of each sequence.
        group: Index of its group.
        batch: Index of its batch.
        length: Its number of tokens.
    """
    sizes = np.bincount(group)[group].astype(np.float64)
    baseline = _means(reward, group)[group]
    centred = reward - baseline
    # What rounding leaves of equal rewards is 0.
    centred = np.where(np.abs(centred) <= 1e-6 * np.abs(baseline), 0.0, centred)
    variance = _means(centred**2, group)[group]
    of_sample = variance * sizes / np.maximum(sizes - 1, 1)

    batch_sizes = np.bincount(batch)[batch].astype(np.float64)
    of_batch = reward - _means(reward, batch)[batch]
    batch_variance = _means(of_batch**2, batch)[batch] * batch_sizes / np.maximum(batch_sizes - 1, 1)
    tokens = length.astype(np.float64)
    of_tokens = reward - _means(reward, batch, tokens)[batch]
    token_variance = _means(of_tokens**2, batch, tokens)[batch]
    mean_length = _means(reward * tokens, group)[group] / np.maximum(_means(tokens, group)[group], 1e-9)

    values: dict[str, Floats] = {}
    for epsilon in EPSILONS:
        text = "" if epsilon == EPSILONS[0] else f" (epsilon {epsilon:g})"
        values[f"GRPO{text}"] = centred / (np.sqrt(of_sample) + epsilon)
        values[f"GRPO (standard deviation with n){text}"] = centred / (np.sqrt(variance) + epsilon)
    values["Dr. GRPO"] = centred
    values["RLOO"] = centred * sizes / np.maximum(sizes - 1, 1)
    values["the group's mean over the batch's standard deviation"] = centred / (
        np.sqrt(batch_variance) + 1e-6
    )
    values["batch normalisation"] = of_batch / (np.sqrt(batch_variance) + 1e-6)
    values["batch normalisation over tokens"] = of_tokens / (np.sqrt(token_variance) + 1e-6)
    values["the batch's mean as baseline"] = of_batch
    values["OPO"] = reward - mean_length
    values["the reward without a baseline"] = reward
    return values


def _family(name: str) -> str:
    """Return the name of an estimator without its epsilon, its factor and the processes that it is computed over."""
    for addition in (" (epsilon", " times ", " over all processes", " within each process"):
        name = name.partition(addition)[0]
    return name


@dataclass(frozen=True)
class _Departure:
    """A way in which advantages are not those of an estimator."""

    code: Literal["advantages", "grouping", "no-signal", "reward-sign"]
    cause: str
    onset: float | None = None
    severity: str | None = None


class _Comparison:
    """Comparison of the recorded advantages with those that reward and group give.

    Args:
        recorded: What a record says.
        whole_groups: Whether it has all answers to each prompt. Otherwise advantages are compared with the reward alone
            where no estimator fits.
    """

    def __init__(self, recorded: RecordedAdvantages, whole_groups: bool = True):
        self.recorded = recorded
        self.whole_groups = whole_groups
        known = ~np.isnan(recorded.reward) & ~np.isnan(recorded.group)
        # Answers without a counted token have no advantage, yet their rewards may be in the mean of their group.
        self.data = recorded.select(known)
        self.has_advantage = ~np.isnan(self.data.advantage)

    @cached_property
    def missing(self) -> str:
        """What to record so that advantages can be judged; empty if nothing is missing."""
        if np.isnan(self.recorded.advantage).all():
            return "record advantages of counted tokens"
        wanted = []
        if np.isnan(self.recorded.reward).all():
            wanted.append("reward=")
        if np.isnan(self.recorded.group).all():
            wanted.append("group=")
        return f"record {' and '.join(wanted)}" if wanted else ""

    @cached_property
    def of_tokens(self) -> bool:
        """Whether the tokens of most sequences have different advantages, as a critic's do."""
        # An answer of one token has one advantage, whoever gave it.
        some = self.data.uniform[self.has_advantage & (self.data.length > 1)]
        return len(some) > 0 and float(some.mean()) < MAJORITY

    @cached_property
    def batch(self) -> Integers:
        """Index of each sequence's batch, in the order of their steps."""
        return _index(self.data.step, self.data.batch)

    @cached_property
    def candidates(self) -> dict[str, tuple[Floats, Integers]]:
        """The advantages of each estimator with the index of each group, by the estimator's name.

        Processes may number prompts alike, so groups are read as those of one process, then as those of all.
        """
        data = self.data
        scopes = [_index(self.batch, data.process, data.group)]
        if len(np.unique(data.process)) > 1:
            scopes.append(_index(self.batch, data.group))
        values: dict[str, tuple[Floats, Integers]] = {}
        for number, group in enumerate(scopes):
            for name, advantages in estimators(data.reward, group, self.batch, data.length).items():
                values[name if not number else f"{name} over all processes"] = (advantages, group)
        local = _index(self.batch, data.process)
        if len(scopes) > 1:
            for name, advantages in estimators(data.reward, scopes[0], local, data.length).items():
                if _family(name) in BATCH_ESTIMATORS:
                    values[f"{name} within each process"] = (advantages, scopes[0])
        return values

    def fits(self, expected: Floats) -> Flags:
        """Return for each sequence whether its advantage is the expected one, (sequences,)."""
        advantage = np.where(self.has_advantage, self.data.advantage, 0.0)
        scale = math.sqrt(float(np.square(expected).mean())) if len(expected) else 0.0
        tolerance = RELATIVE_TOLERANCE * np.abs(expected) + ABSOLUTE_TOLERANCE * scale
        return np.abs(advantage - expected) <= tolerance

    def informative(self, expected: Floats) -> Flags:
        """Return the sequences that tell advantages apart: those in which one of both is not 0."""
        advantage = np.where(self.has_advantage, self.data.advantage, 0.0)
        small = 1e-6 + 1e-3 * math.sqrt(float(np.square(expected).mean()))
        recorded_small = np.where(self.tied, np.maximum(small, ROUNDED_TIE), small)
        return self.has_advantage & ((np.abs(expected) > small) | (np.abs(advantage) > recorded_small))

    @cached_property
    def tied(self) -> Flags:
        """Which sequences are of a group of equal rewards, of which rounding leaves an advantage near 0."""
        group = next(iter(self.candidates.values()))[1]
        spread = _spread(self.data.reward, group)
        return (spread <= 1e-6 * np.abs(self.data.reward).max(initial=1.0))[group]

    def share(self, expected: Floats) -> float:
        """Return the share of informative sequences whose advantage is the expected one; 0 if there are few."""
        where = self.informative(expected)
        if int(where.sum()) < FEWEST_SEQUENCES:
            return 0.0
        return float(self.fits(expected)[where].mean())

    @cached_property
    def best(self) -> tuple[str, Floats, Integers, float]:
        """The estimator that fits most sequences, its advantages, the groups, and the share that it fits."""
        scored = [(name, *values, self.share(values[0])) for name, values in self.candidates.items()]
        best = max(scored, key=lambda item: item[3])
        if best[3] > NEARLY_ALL:
            return best
        # A constant factor is no fault.
        scaled = []
        for name, expected, group, _ in scored:
            large = self.has_advantage & (np.abs(expected) > 0.1 * np.abs(expected).max(initial=0.0))
            if not large.any():
                continue
            factor = float(np.median(np.abs(self.data.advantage[large]) / np.abs(expected[large])))
            if 1e-3 < factor < 1e6:
                scaled_name = f"{name} times {factor:.3g}"
                scaled.append((scaled_name, factor * expected, group, self.share(factor * expected)))
        best_scaled = max(scaled, key=lambda item: item[3], default=best)
        return best_scaled if best_scaled[3] > max(NEARLY_ALL, best[3]) else best

    @cached_property
    def is_exact(self) -> bool:
        """Whether an estimator gives the advantages of nearly all sequences, in every batch."""
        _, expected, _, share = self.best
        if share <= NEARLY_ALL:
            return False
        where = self.informative(expected)
        misfit = ~self.fits(expected)[where]
        batch = self.batch[where]
        counts = np.bincount(batch)
        misfits = np.bincount(batch, weights=misfit)
        return not bool(((misfits > 0.1 * counts) & (misfits > 1)).any())

    @property
    def note(self) -> str:
        """Which estimator the advantages are of, or why that cannot be told."""
        if self.missing:
            return f"advantages are not recomputed: {self.missing}"
        if self.of_tokens:
            return (
                "advantages differ from token to token, as a critic's do; reward and group do not give them"
            )
        if not self.is_exact:
            return (
                ""
                if self.departure
                else f"advantages follow the reward {self.explained}, by no formula that is known"
            )
        name = self.best[0]
        equal = [other for other, (x, _) in self.candidates.items() if self.share(x) > NEARLY_ALL]
        others = [other for other in dict.fromkeys(map(_family, equal)) if other != _family(name)]
        alike = f", which are here those of {' and '.join(others[:2])} too" if others else ""
        return f"advantages are those of {name}, in all {len(np.unique(self.batch))} batches{alike}"

    @property
    def explained(self) -> str:
        """How much of the advantages' variance within groups the reward explains, in brackets."""
        return f"(R² {max(0.0, self.correlation) ** 2:.2f} within groups)"

    @cached_property
    def correlation(self) -> float:
        """Correlation of reward and advantage; within groups, or within batches where a critic gave them."""
        index = self.batch if self.of_tokens else next(iter(self.candidates.values()))[1]
        where = self.has_advantage
        reward = np.where(where, self.data.reward, math.nan)
        reward = reward - _means(reward, index)[index]
        advantage = self.data.advantage - _means(self.data.advantage, index)[index]
        x, y = reward[where], advantage[where]
        spread = math.sqrt(float(x @ x) * float(y @ y))
        return float(x @ y) / spread if spread > 0 else 0.0

    @cached_property
    def departure(self) -> _Departure | None:
        """How the advantages depart from those that reward and group give; None if they do not.

        Every search is for one fault. It names it only if that explains nearly all sequences that do not fit.
        """
        if self.missing or not self.has_advantage.any():
            return None
        if self.of_tokens:
            return self._unlike_reward()
        if self.is_exact:
            return self._compared_with_the_batch()
        if not self.whole_groups:
            return self._unlike_reward()
        searches: tuple[Callable[[], _Departure | None], ...] = (
            self._of_ties,
            self._of_all_sequences,
            self._of_a_process,
            self._since_a_batch,
            self._in_another_order,
            self._of_missing_answers,
            self._between_prompts,
            self._unlike_reward,
        )
        for search in searches:
            departure = search()
            if departure is not None:
                return departure
        return None

    def _compared_with_the_batch(self) -> _Departure | None:
        """Return a remark if prompts have several answers, which are compared with those to other prompts."""
        name, _, group, _ = self.best
        several_groups = len(np.unique(group)) > len(np.unique(self.batch))
        if _family(name) not in BATCH_ESTIMATORS or not several_groups or int(np.bincount(group).max()) < 2:
            return None
        between = _means(self.data.advantage, group)[group]
        where = self.has_advantage
        share = float(np.square(between[where]).sum() / np.square(self.data.advantage[where]).sum())
        cause = (
            f"advantages are those of {name}: answers are compared with all of the batch and not with those to the "
            f"same prompt, {share:.0%} of advantages tell how easy a prompt is. REINFORCE++ does, GRPO does not"
        )
        return _Departure("grouping", cause, severity="look")

    def _plain(self) -> Iterator[tuple[str, Floats, Integers]]:
        for name, (expected, group) in self.candidates.items():
            yield name, expected, group

    def _of_ties(self) -> _Departure | None:
        """Find groups of equal rewards whose advantages are not 0, while all others fit."""
        for name, expected, group in self._plain():
            if not _family(name).startswith("GRPO"):
                continue
            tied = self.tied
            sizes = np.bincount(group)[group]
            where = self.informative(expected)
            rest = where & ~tied
            # Other groups must show that the advantages are of this estimator.
            if not rest.any() or float(self.fits(expected)[rest].mean()) < NEARLY_ALL:
                continue
            wrong = where & tied & (sizes > 1)
            groups = np.unique(group[wrong])
            # Where answers below the mean were left out, the rest of a group has equal rewards too.
            has_both_signs = bool((self.data.advantage[wrong] < 0).any())
            if len(groups) < 2 or not has_both_signs:
                continue
            largest = float(np.abs(self.data.advantage[wrong]).max())
            all_tied = len(np.unique(group[tied & (sizes > 1)]))
            cause = (
                f"in {len(groups)} of {all_tied} groups with equal rewards, advantages reach ±{largest:.2g}, not "
                "0: rounding is divided by a standard deviation of nearly 0"
            )
            return _Departure("advantages", cause, onset=float(self.data.step[wrong].min()))
        return None

    def _of_all_sequences(self) -> _Departure | None:
        """Find a change of sign, or negative advantages that were set to 0, in nearly all sequences."""
        for name, expected, _ in self._plain():
            if self.share(-expected) > NEARLY_ALL:
                return _Departure(
                    "reward-sign", f"better answers have lower advantages: those of {name} times −1"
                )
        for name, expected, _ in self._plain():
            below = self.has_advantage & (expected < -ABSOLUTE_TOLERANCE * np.abs(expected).max(initial=0.0))
            if below.sum() < FEWEST_SEQUENCES or self.share(np.maximum(expected, 0.0)) <= NEARLY_ALL:
                continue
            zeros = int((self.data.advantage[below] == 0).sum())
            if zeros > NEARLY_ALL * int(below.sum()):
                cause = f"{zeros:,} advantages that {name} gives below 0 are 0: only positive ones are left"
                return _Departure("advantages", cause)
        return None

    def _of_a_process(self) -> _Departure | None:
        """Find one process, or one part of the rows of each batch, whose advantages depart while the others fit."""
        data = self.data
        labels: list[tuple[str, Integers]] = []
        if len(np.unique(data.process)) > 1:
            labels.append(("process", data.process))
        local = _index(self.batch, data.process)
        order = np.lexsort((data.row, local))
        starts = np.concatenate([[0], np.cumsum(np.bincount(local))])[:-1]
        place = np.empty(len(local), np.int64)
        place[order] = np.arange(len(local)) - starts[local[order]]
        sizes = np.bincount(local)[local]
        labels += [(f"part of {parts}", place * parts // sizes) for parts in (2, 4, 8)]

        for kind, label in labels:
            for name, expected, group in self._plain():
                # A group that is cut through has no part of its own.
                if kind != "process" and float(_spread(label.astype(float), group).max(initial=0.0)) > 0:
                    continue
                where = self.informative(expected)
                if where.sum() < FEWEST_SEQUENCES:
                    continue
                fit = self.fits(expected)
                shares = {int(k): float(fit[where & (label == k)].mean()) for k in np.unique(label[where])}
                bad = [k for k, share in shares.items() if share < 1 - MANY]
                good = [k for k, share in shares.items() if share > NEARLY_ALL]
                if not bad or not good or len(bad) + len(good) < len(shares) or len(bad) > len(good):
                    continue
                wrong = where & np.isin(label, bad)
                how = self._how(wrong, expected, group)
                # The process must depart in most of its batches, not from one batch on.
                batches = _means((~fit[wrong]).astype(float), _index(self.batch[wrong]))
                if float((batches > 0).mean()) < MAJORITY:
                    continue
                text = ", ".join(map(str, bad))
                which = f"on process {text}" if kind == "process" else self._rows_text(kind, bad)
                cause = f"{which} advantages {how}, while on the others they are those of {name}"
                code = "reward-sign" if how.startswith("are negated") else "advantages"
                return _Departure(code, cause, onset=float(data.step[wrong & ~fit].min()))
        return None

    @staticmethod
    def _rows_text(kind: str, bad: list[int]) -> str:
        parts = int(kind.rpartition(" ")[2])
        numbers = " and ".join(str(k + 1) for k in bad)
        return f"in the rows of {kind.partition(' of')[0]} {numbers} of {parts} of each batch, as of one process,"

    def _how(self, where: Flags, expected: Floats, group: Integers) -> str:
        """Return in words what the advantages of some sequences are, of which an estimator expects others."""
        advantage = self.data.advantage[where]
        if np.abs(advantage).max(initial=0.0) < 1e-9:
            return "are 0"
        if float(self.fits(-expected)[where].mean()) > NEARLY_ALL:
            return "are negated: better answers have lower ones"
        if (advantage == advantage[0]).all():
            return f"are all {float(advantage[0]):g}"
        if self._same_values(where, expected, group) > 0.9:
            return "are in another order: they belong to other answers to the same prompt"
        if self._same_values(where, expected, _index(self.batch, self.data.process)) > 0.9:
            return "are in another order: they belong to other answers"
        if self._same_values(where, expected, self.batch) > 0.9:
            return "are in another order: they belong to other answers"
        return "are others"

    def _same_values(self, where: Flags, expected: Floats, unit: Integers) -> float:
        """Return the share of units in which recorded and expected advantages are the same but for their order."""
        index = unit[where]
        ours = self.data.advantage[where]
        theirs = expected[where]
        if np.isnan(ours).any() or not len(ours):
            return 0.0
        sorted_ours = ours[np.lexsort((ours, index))]
        sorted_theirs = theirs[np.lexsort((theirs, index))]
        sorted_index = np.sort(index)
        scale = math.sqrt(float(np.square(theirs).mean()))
        close = (
            np.abs(sorted_ours - sorted_theirs) <= RELATIVE_TOLERANCE * np.abs(sorted_theirs) + 2e-3 * scale
        )
        shares = np.bincount(sorted_index, weights=close) / np.maximum(np.bincount(sorted_index), 1)
        present = np.bincount(sorted_index) > 0
        telling = present & (np.bincount(sorted_index, weights=np.abs(sorted_theirs)) > 1e-9)
        return float((shares[telling] > NEARLY_ALL).mean()) if telling.any() else 0.0

    def _since_a_batch(self) -> _Departure | None:
        """Find a batch up to which advantages fit, and from which they do not."""
        for name, expected, group in self._plain():
            where = self.informative(expected)
            if where.sum() < FEWEST_SEQUENCES:
                continue
            shares = _means(self.fits(expected)[where], self.batch[where])
            numbers = np.flatnonzero(~np.isnan(shares))
            fit = shares[numbers] > NEARLY_ALL
            if not fit[0] or fit.all():
                continue
            first = int(np.argmin(fit))
            # After the onset advantages do not return to the formula, but for batches of few groups by chance.
            if float((shares[numbers[first:]] < 1 - MANY / 2).mean()) < 0.7 or not fit[:first].all():
                continue
            later = where & (self.batch >= numbers[first])
            onset = float(self.data.step[later].min())
            how = self._how(self.has_advantage & (self.batch >= numbers[first]), expected, group)
            code = "reward-sign" if how.startswith("are negated") else "advantages"
            if how == "are 0":
                code = "no-signal"
            cause = f"from step {onset:g} on advantages {how}; before it they are those of {name}"
            return _Departure(code, cause, onset=onset)
        return None

    def _in_another_order(self) -> _Departure | None:
        """Find advantages that belong to other sequences of the group, of the process or of the batch."""
        where = self.has_advantage
        units = (
            ("answers to the same prompt", None),
            ("answers in the batch of the process", _index(self.batch, self.data.process)),
            ("answers in the batch", self.batch),
        )
        for text, unit in units:
            for name, expected, group in self._plain():
                if self.informative(expected).sum() < FEWEST_SEQUENCES:
                    continue
                index = group if unit is None else unit
                if self._same_values(where, expected, index) < 0.9:
                    continue
                share = self.share(expected)
                # A column in another order differs for most sequences. A few are what an answer that was left out
                # does to its group.
                if share > 1 - REORDERED_SHARE:
                    continue
                cause = (
                    f"advantages are those of {name} in another order: {1 - share:.0%} belong to other {text}"
                )
                return _Departure("advantages", cause)
        return None

    def _of_missing_answers(self) -> _Departure | None:
        """Find groups from which answers were left out after the advantages had been computed."""
        data, where = self.data, self.has_advantage
        _, group = next(iter(self.candidates.values()))
        sizes = np.bincount(group)
        if len(np.unique(sizes)) < 2 or not where.all():
            return None
        positive_only = bool((data.advantage > 0).all())
        if positive_only and len(np.unique(data.advantage)) > 1:
            cause = "every advantage is above 0, and groups are of different sizes: answers below the mean are left out"
            return _Departure("advantages", cause)

        complete = (sizes == sizes.max())[group]
        for name, expected, _ in self._plain():
            if _family(name) not in GROUP_ESTIMATORS or name.endswith("all processes"):
                continue
            informative = self.informative(expected)
            fit = self.fits(expected)
            whole, rest = informative & complete, informative & ~complete
            # One group may lack an answer that the record holds as a repetition of an equal one.
            if whole.sum() < FEWEST_SEQUENCES or len(np.unique(group[rest])) < 2:
                continue
            if float(fit[whole].mean()) > NEARLY_ALL and float(fit[rest].mean()) < 1 - MANY:
                return self._left_out(f"those of {name} in groups of {sizes.max()}", group, sizes)
        # No group may be complete. A group's advantages are then still a linear function of its rewards, of a rising
        # one, yet their mean is not 0.
        residual, means = _line_residuals(data.reward, data.advantage, group)
        total = float(np.square(data.advantage).sum())
        if residual < 1e-4 * total and means > UNCENTRED_SHARE * total and self._slopes_differ(group):
            return self._left_out("a function of the reward in each group", group, sizes)
        return None

    def _left_out(self, name: str, group: Integers, sizes: Integers) -> _Departure:
        smaller = int((sizes < sizes.max()).sum())
        cause = (
            f"answers are missing from {smaller} of {len(sizes)} groups: advantages are {name}, and elsewhere their "
            "mean is not 0. Answers were left out after the advantages had been computed"
        )
        return _Departure("advantages", cause)

    def _slopes_differ(self, group: Integers) -> bool:
        """Return whether groups are divided by different numbers; with one slope, a baseline explains their means."""
        reward = self.data.reward - _means(self.data.reward, group)[group]
        advantage = self.data.advantage - _means(self.data.advantage, group)[group]
        xx = np.bincount(group, weights=reward**2)
        xy = np.bincount(group, weights=reward * advantage)
        slopes = xy[xx > 1e-9] / xx[xx > 1e-9]
        return len(slopes) > 2 and float(slopes.std()) > 0.01 * abs(float(slopes.mean()))

    def _between_prompts(self) -> _Departure | None:
        """Find groups that are not centred, though something is: advantages of other groups than the recorded ones.

        Either answers to one prompt with one reward have different advantages, or each batch is centred and no line
        leads from the rewards of a group to its advantages, as one would from any baseline of a prompt.
        """
        data, where = self.data, self.has_advantage
        _, group = next(iter(self.candidates.values()))
        total = float(np.square(data.advantage[where]).sum())
        means = _means(data.advantage, group)[group]
        if float(np.square(means[where]).sum()) < UNCENTRED_SHARE * total:
            return None

        same = _index(group, np.round(data.reward, 6))
        paired = where & (np.bincount(same)[same] > 1)
        inner = data.advantage - _means(data.advantage, same)[same]
        scale = float(np.abs(data.advantage[where]).max())
        if paired.sum() >= MIN_PAIRS:
            differ = float((np.abs(inner[paired]) > 1e-3 * scale).mean())
            if differ > MAJORITY:
                cause = (
                    f"{differ:.0%} of answers to one prompt with one reward differ in advantage, and groups are not "
                    "centred: answers are compared with those to other prompts"
                )
                return _Departure("grouping", cause)
        if not where.all():
            return None
        residual, _ = _line_residuals(data.reward, data.advantage, group)
        of_batches = np.abs(_means(data.advantage, self.batch))
        if residual > UNCENTRED_SHARE * total and float(of_batches.max()) < 1e-3 * scale:
            cause = (
                "each batch is centred and groups are not, and answers to one prompt have different baselines: answers "
                "are compared with those to other prompts"
            )
            return _Departure("grouping", cause)
        return None

    def _unlike_reward(self) -> _Departure | None:
        """Find advantages that fall as the reward rises, or have nothing to do with it."""
        count = int(self.has_advantage.sum())
        are_few = count < FEWEST_CORRELATED
        # A critic's advantages of few sequences may fall as the reward rises by chance.
        if count < FEWEST_SEQUENCES or (are_few and self.of_tokens):
            return None
        error = 1 / math.sqrt(count)
        correlation = self.correlation
        if correlation < -(OPPOSITE if are_few else max(0.3, 4 * error)):
            cause = f"better answers have lower advantages (correlation {correlation:.2f})"
            return _Departure("reward-sign", cause)
        if are_few:
            return None
        if not self.of_tokens and abs(correlation) < UNRELATED and 4 * error < MANY:
            cause = (
                f"advantages have nothing to do with the reward (correlation {correlation:.2f} within groups)"
            )
            return _Departure("advantages", cause)
        return None


def _spread(values: Floats, index: Integers) -> Floats:
    """Return the difference of the largest and the smallest value with each index."""
    count = int(index.max(initial=-1)) + 1
    smallest = np.full(count, math.inf)
    largest = np.full(count, -math.inf)
    np.minimum.at(smallest, index, values)
    np.maximum.at(largest, index, values)
    return largest - smallest


def _line_residuals(x: Floats, y: Floats, group: Integers) -> tuple[float, float]:
    """Return what a rising line per group leaves of y, and what is due to the means of groups; both sums of squares."""
    x_mean, y_mean = _means(x, group), _means(y, group)
    dx, dy = x - x_mean[group], y - y_mean[group]
    xx = np.bincount(group, weights=dx * dx)
    xy = np.bincount(group, weights=dx * dy)
    slope = np.maximum(0.0, np.divide(xy, xx, out=np.zeros(len(xx)), where=xx > 0))
    return float(np.square(dy - slope[group] * dx).sum()), float(np.square(y_mean[group]).sum())


def check_advantages(recorded: RecordedAdvantages, *, whole_groups: bool = True) -> Finding:
    """Check that advantages are those that reward and group give under a known estimator, or at least follow reward.

    Args:
        recorded: Rewards, advantages and masks of the sequences.
        whole_groups: Whether it has all answers to each prompt. A micro-batch of a shuffled batch has some of them, and
            its advantages are then compared with the reward alone where no estimator fits.
    """
    return _advantage_finding(_Comparison(recorded, whole_groups))


def _advantage_finding(comparison: _Comparison) -> Finding:
    """Return the finding of `check_advantages`."""
    tested = "advantages are those that reward and group give"
    if comparison.missing:
        return Finding("ok", None, tested, advice=comparison.missing)
    count = int(comparison.has_advantage.sum())
    figure = comparison.correlation if comparison.of_tokens else comparison.best[3]
    passed = Finding("ok", True, tested, figure, None, count)
    departure = comparison.departure
    if departure is None:
        return passed
    # Codes are written out, so that the tests see which findings there are.
    options: dict[str, Any] = {"severity": departure.severity, "onset": departure.onset}
    if departure.code == "reward-sign":
        return passed.failed("reward-sign", departure.cause, **options)
    if departure.code == "grouping":
        return passed.failed("grouping", departure.cause, **options)
    if departure.code == "no-signal":
        return passed.failed("no-signal", departure.cause, **options)
    return passed.failed("advantages", departure.cause, **options)


# --- rewards ----------------------------------------------------------------------------------------------------------


def check_rewards(recorded: RecordedAdvantages) -> Finding:
    """Check that the answer explains its reward: that equal answers to one prompt differ less than other answers."""
    tested = "rewards depend on the answer (share of their variance that equal answers have)"
    known = (
        ~np.isnan(recorded.reward + recorded.group) & (recorded.answer != NO_TOKEN) & (recorded.length > 0)
    )
    data = recorded.select(known)
    prompt = _index(data.batch, data.process, data.group)
    same = _index(prompt, data.answer)
    sizes = np.bincount(same) if len(same) else np.zeros(0, np.int64)
    pairs = int((sizes * (sizes - 1) // 2).sum())
    if pairs < MIN_PAIRS:
        return Finding("ok", None, tested, advice="needs reward=, group=, tokens= and answers that are equal")

    several = sizes[same] > 1
    freedom = float((sizes[sizes > 1] - 1).sum())
    noise = float(np.square(data.reward - _means(data.reward, same)[same])[several].sum()) / freedom
    of_prompts = np.bincount(prompt)
    rest = float((of_prompts - 1).sum())
    variance = float(np.square(data.reward - _means(data.reward, prompt)[prompt]).sum()) / max(1.0, rest)
    share = noise / variance if variance > 0 else 0.0
    value_range = float(data.reward.max() - data.reward.min())
    passed = Finding("ok", True, tested, share, None, pairs)
    if share < NOISE_SHARE or math.sqrt(noise) < NOISE_OF_RANGE * value_range:
        return passed
    cause = (
        f"rewards of the same answer to one prompt differ by {math.sqrt(noise):.2g} (standard deviation), which is "
        f"{share:.0%} of the variance among all answers to it"
    )
    return passed.failed("reward-noise", cause)
