"""Compare the recorded advantages with those of each estimator.

If no estimator fits, one fault after the other is tested, such as a changed sign or permuted answers, and the step from
which it shows is found. Advantages of an unknown formula that follow the reward are no fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlvet._numbers import format_number, format_share, format_step
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.signal import NO_SIGNAL
from rlvet.records.advantages.formulas import (
    BATCH_ESTIMATORS,
    GROUP_ESTIMATORS,
    estimator_family,
    estimators,
)
from rlvet.records.advantages.groups import (
    complete_groups,
    describe_sizes,
    group_index,
    has_groups_of_several_batches,
)
from rlvet.records.advantages.statistics import (
    FEWEST_CORRELATED,
    FEWEST_SEQUENCES,
    MAJORITY,
    MIN_PAIRS,
    NEARLY_ALL,
    distinct_index,
    means_by_index,
)
from rlvet.records.recorded_advantages import Flags, Floats, Integers, RecordCase, RecordedAdvantages
from rlvet.records.registry import ADVANTAGES as CHECKS

ADVANTAGES = Kind(
    code="advantages",
    severity="fix",
    meaning="advantages do not follow from reward and group",
    condition=(
        "no known estimator gives the advantages, and one fault explains nearly all of the difference: "
        "ties, dropped answers, another order, or one process"
    ),
    remedy=(
        "compute advantages once, from the rewards of whole groups and in the same way on all processes, "
        "and compare them with the advantages in the loss; drop answers before advantages are computed, not "
        "after"
    ),
    evidence=("advantages", "reward", "group"),
    source="the formulas of GRPO, Dr. GRPO, RLOO, OPO and batch normalisation",
    scenarios=("positive-only", "ties to ±1", "permuted within groups"),
)

GROUPING = Kind(
    code="grouping",
    severity="fix",
    meaning="advantages are compared between different prompts",
    condition=(
        "groups are not centred, and answers to one prompt with one reward have different advantages; or "
        "advantages are those of the whole batch"
    ),
    remedy=(
        "keep the answers to one prompt together where advantages are computed; check their order after "
        "each shuffle"
    ),
    evidence=("advantages", "reward", "group"),
    source="the formulas of GRPO, Dr. GRPO, RLOO, OPO and batch normalisation",
    scenarios=("wrong groups", "batch in place of group"),
)

REWARD_SIGN = Kind(
    code="reward-sign",
    severity="fix",
    meaning="better answers have lower advantages",
    condition="advantages are those of an estimator times −1, or fall clearly as the reward rises",
    remedy="check the sign of the reward, of the advantage and of the loss",
    evidence=("advantages", "reward"),
    source="the formulas of GRPO, Dr. GRPO, RLOO, OPO and batch normalisation",
    scenarios=("flipped sign", "sign flipped midway"),
)

RELATIVE_TOLERANCE = 6e-3
"""Relative difference up to which two advantages count as equal. Rounding to bfloat16 gives at most 4e-3."""

ABSOLUTE_TOLERANCE = 1e-3
"""Difference up to which two advantages count as equal, as a share of the root mean square of all advantages."""

ROUNDED_TIE = 0.02
"""Largest advantage that rounding gives in a group of equal rewards: 1e-7 of the reward, divided by an epsilon of 1e-4
or 1e-5."""

MANY = 0.3
"""Share of wrong advantages in a batch, process or group from which all of it counts as wrong."""

REORDERED_SHARE = 0.1
"""Share of sequences with the advantage of another sequence above which advantages count as permuted."""

UNCENTRED_SHARE = 0.05
"""Share of the advantages' mean square in the means of groups above which groups are not centred. It is 0 in the right
groups, and about 1/G in wrong ones."""

UNRELATED = 0.1
"""Absolute correlation of reward and advantage below which they are unrelated."""

OPPOSITE = 0.9
"""Negative correlation that is also judged with fewer sequences: that of an estimator's advantages times −1."""


@dataclass(frozen=True)
class _Departure:
    """A fault by which the recorded advantages differ from those of an estimator."""

    kind: Kind
    cause: str
    onset: float | None = None
    severity: str | None = None


class Comparison:
    """A comparison of the recorded advantages with those that each estimator computes from rewards and groups.

    Args:
        recorded: Rewards, advantages and masks of the sequences.
        whole_groups: True if `recorded` has all answers to each prompt. If not, and if no estimator fits, advantages
            are only compared with the reward.
    """

    def __init__(self, recorded: RecordedAdvantages, whole_groups: bool = True):
        self.recorded = recorded
        self.whole_groups = whole_groups
        has_reward_and_group = ~np.isnan(recorded.reward) & ~np.isnan(recorded.group)
        # Answers without a counted token have no advantage, but their rewards may count in the mean of their group.
        data = recorded.select(has_reward_and_group)
        self.split_groups = describe_sizes(data) if whole_groups else ""
        """What speaks against the recorded groups being whole ones; empty for nothing."""
        self.data = complete_groups(data) if whole_groups else data
        self.has_advantage = ~np.isnan(self.data.advantage)

    @cached_property
    def missing(self) -> str:
        """The data to record so that advantages can be checked, as advice; empty if nothing is missing."""
        if np.isnan(self.recorded.advantage).all():
            return "record advantages of counted tokens"
        arguments = []
        if np.isnan(self.recorded.reward).all():
            arguments.append("reward=")
        if np.isnan(self.recorded.group).all():
            arguments.append("group=")
        return f"record {' and '.join(arguments)}" if arguments else ""

    @cached_property
    def is_per_token(self) -> bool:
        """True if the tokens of most sequences have different advantages, as those of a critic."""
        # An answer of one token has one advantage under any estimator.
        uniform = self.data.uniform[self.has_advantage & (self.data.length > 1)]
        return len(uniform) > 0 and float(uniform.mean()) < MAJORITY

    @cached_property
    def batch(self) -> Integers:
        """Index of each sequence's batch, in the order of the steps, (sequences,)."""
        return distinct_index(self.data.step, self.data.batch)

    @cached_property
    def candidates(self) -> dict[str, tuple[Floats, Integers]]:
        """The advantages of each estimator, with the group index of each sequence, by the estimator's name.

        Different processes may use the same numbers for different prompts. Groups are therefore formed within each
        process and, if there are several processes, also across all of them. So are those of several batches.
        """
        data = self.data
        group = distinct_index(self.batch, data.process, data.group)
        values: dict[str, tuple[Floats, Integers]] = {}
        for name, advantages in estimators(data.reward, group, self.batch, data.length).items():
            values[name] = (advantages, group)
        if has_groups_of_several_batches(data):
            group_of_run = distinct_index(data.group)
            for name, advantages in estimators(data.reward, group_of_run, self.batch, data.length).items():
                if estimator_family(name) in GROUP_ESTIMATORS:
                    values[f"{name} in groups of several batches"] = (advantages, group_of_run)
        if len(np.unique(data.process)) <= 1:
            return values

        group_of_all = distinct_index(self.batch, data.group)
        for name, advantages in estimators(data.reward, group_of_all, self.batch, data.length).items():
            values[f"{name} over all processes"] = (advantages, group_of_all)
        local_batch = distinct_index(self.batch, data.process)
        for name, advantages in estimators(data.reward, group, local_batch, data.length).items():
            if estimator_family(name) in BATCH_ESTIMATORS:
                values[f"{name} within each process"] = (advantages, group)
        return values

    @cached_property
    def group(self) -> Integers:
        """Index of each sequence's group, (sequences,)."""
        return group_index(self.data)

    def fits(self, expected: Floats) -> Flags:
        """Return True for sequences whose advantage equals the expected one, (sequences,)."""
        advantage = np.where(self.has_advantage, self.data.advantage, 0.0)
        scale = math.sqrt(float(np.square(expected).mean())) if len(expected) else 0.0
        tolerance = RELATIVE_TOLERANCE * np.abs(expected) + ABSOLUTE_TOLERANCE * scale
        return np.abs(advantage - expected) <= tolerance

    def informative(self, expected: Floats) -> Flags:
        """Return True for sequences whose recorded or expected advantage is not 0, (sequences,)."""
        advantage = np.where(self.has_advantage, self.data.advantage, 0.0)
        small = 1e-6 + 1e-3 * math.sqrt(float(np.square(expected).mean()))
        recorded_small = np.where(self.tied, np.maximum(small, ROUNDED_TIE), small)
        return self.has_advantage & ((np.abs(expected) > small) | (np.abs(advantage) > recorded_small))

    @cached_property
    def tied(self) -> Flags:
        """True for sequences of a group with equal rewards, (sequences,). Rounding may give them small advantages."""
        spread = _spread(self.data.reward, self.group)
        return (spread <= 1e-6 * np.abs(self.data.reward).max(initial=1.0))[self.group]

    def share(self, expected: Floats) -> float:
        """Return the share of informative sequences whose advantage equals the expected one; 0 if there are few."""
        informative = self.informative(expected)
        if int(informative.sum()) < FEWEST_SEQUENCES:
            return 0.0
        return float(self.fits(expected)[informative].mean())

    @cached_property
    def best(self) -> tuple[str, Floats, Integers, float]:
        """The name of the estimator that fits most sequences, its advantages, the groups, and the share that fits."""
        scored = []
        for name, (expected, group) in self.candidates.items():
            scored.append((name, expected, group, self.share(expected)))
        best = max(scored, key=lambda item: item[3])
        if best[3] > NEARLY_ALL:
            return best

        # A constant factor is no fault, so the estimators are also compared with the best factor.
        scaled = []
        for name, expected, group, _ in scored:
            large = self.has_advantage & (np.abs(expected) > 0.1 * np.abs(expected).max(initial=0.0))
            if not large.any():
                continue
            factor = float(np.median(np.abs(self.data.advantage[large]) / np.abs(expected[large])))
            if 1e-3 < factor < 1e6:
                scaled_name = f"{name} times {format_number(factor)}"
                scaled.append((scaled_name, factor * expected, group, self.share(factor * expected)))
        best_scaled = max(scaled, key=lambda item: item[3], default=best)
        return best_scaled if best_scaled[3] > max(NEARLY_ALL, best[3]) else best

    @cached_property
    def is_exact(self) -> bool:
        """True if the best estimator fits nearly all sequences, and not fewer in any batch."""
        _, expected, _, share = self.best
        if share <= NEARLY_ALL:
            return False
        informative = self.informative(expected)
        misfit = ~self.fits(expected)[informative]
        batch = self.batch[informative]
        counts = np.bincount(batch)
        misfits = np.bincount(batch, weights=misfit)
        return not bool(((misfits > 0.1 * counts) & (misfits > 1)).any())

    @property
    def note(self) -> str:
        """A sentence that names the estimator, or the reason why it cannot be determined; empty for a fault."""
        if self.missing:
            return f"advantages are not recomputed: {self.missing}"
        if self.is_per_token:
            return (
                "advantages differ from token to token, as a critic's do; they cannot be recomputed from reward and "
                "group"
            )
        if not self.is_exact:
            if self.departure:
                return ""
            if self.split_groups:
                return f"the formula of the advantages was not tested: {self.split_groups}"
            r_squared = max(0.0, self.correlation) ** 2
            return (
                f"advantages follow the reward (R² {r_squared:.2f} within groups), but match no known formula"
            )

        name = self.best[0]
        families: list[str] = []
        for candidate, (expected, _) in self.candidates.items():
            family = estimator_family(candidate)
            if self.share(expected) > NEARLY_ALL and family not in (estimator_family(name), *families):
                families.append(family)
        equal = f"; {' and '.join(families[:2])} would give the same here" if families else ""
        return f"advantages are those of {name}, in all {len(np.unique(self.batch))} batches{equal}"

    @cached_property
    def correlation(self) -> float:
        """The correlation of reward and advantage within groups, or within batches for advantages of a critic."""
        index = self.batch if self.is_per_token else self.group
        reward = np.where(self.has_advantage, self.data.reward, math.nan)
        reward = reward - means_by_index(reward, index)[index]
        advantage = self.data.advantage - means_by_index(self.data.advantage, index)[index]
        x = reward[self.has_advantage]
        y = advantage[self.has_advantage]
        spread = math.sqrt(float(x @ x) * float(y @ y))
        return float(x @ y) / spread if spread > 0 else 0.0

    @cached_property
    def departure(self) -> _Departure | None:
        """The fault by which the advantages differ from those of an estimator; None if there is none.

        Each search tests one fault, and returns it only if it explains nearly all sequences that do not fit.
        """
        if self.missing or not self.has_advantage.any():
            return None
        if self.is_per_token:
            return self._find_wrong_correlation()
        if self.is_exact:
            return self._find_batch_baseline()
        if not self.whole_groups:
            return self._find_wrong_correlation()
        searches: tuple[Callable[[], _Departure | None], ...] = (
            self._find_nonzero_ties,
            self._find_wrong_signs,
            self._find_wrong_process,
            self._find_wrong_batches,
            self._find_permutation,
            self._find_missing_answers,
            self._find_wrong_groups,
            self._find_wrong_correlation,
        )
        if self.split_groups:
            # These would take answers to different prompts for those to one.
            wrong = (self._find_nonzero_ties, self._find_wrong_groups)
            searches = tuple(search for search in searches if search not in wrong)
        for search in searches:
            departure = search()
            if departure is not None:
                return departure
        return None

    def _find_batch_baseline(self) -> _Departure | None:
        """Find answers that are compared with the whole batch although each prompt has several answers."""
        name, _, group, _ = self.best
        several_groups = len(np.unique(group)) > len(np.unique(self.batch))
        if (
            estimator_family(name) not in BATCH_ESTIMATORS
            or not several_groups
            or int(np.bincount(group).max()) < 2
        ):
            return None
        group_means = means_by_index(self.data.advantage, group)[group]
        has_advantage = self.has_advantage
        share = float(
            np.square(group_means[has_advantage]).sum() / np.square(self.data.advantage[has_advantage]).sum()
        )
        cause = (
            f"advantages are those of {name}: answers are compared with the whole batch, not with the answers to the "
            f"same prompt, so {format_share(share)} of the advantages' mean square depends only on how easy the prompt "
            "is. REINFORCE++ does this on purpose, GRPO does not"
        )
        return _Departure(GROUPING, cause, severity="look")

    def _find_nonzero_ties(self) -> _Departure | None:
        """Find groups of equal rewards whose advantages are not 0, while all other groups fit."""
        for name, (expected, group) in self.candidates.items():
            if not estimator_family(name).startswith("GRPO"):
                continue
            sizes = np.bincount(group)[group]
            informative = self.informative(expected)
            # The other groups must show that the advantages are those of this estimator.
            not_tied = informative & ~self.tied
            if not not_tied.any() or float(self.fits(expected)[not_tied].mean()) < NEARLY_ALL:
                continue
            wrong = informative & self.tied & (sizes > 1)
            wrong_groups = np.unique(group[wrong])
            # If answers below the mean were left out, the others of a group may have equal rewards, but their
            # advantages are all above 0.
            has_negative = bool((self.data.advantage[wrong] < 0).any())
            if len(wrong_groups) < 2 or not has_negative:
                continue
            largest = float(np.abs(self.data.advantage[wrong]).max())
            tied_groups = np.unique(group[self.tied & (sizes > 1)])
            cause = (
                f"in {len(wrong_groups)} of {len(tied_groups)} groups with equal rewards, advantages reach "
                f"±{format_number(largest, 2)}, not 0: rounding errors are divided by a standard deviation near 0"
            )
            return _Departure(ADVANTAGES, cause, onset=float(self.data.step[wrong].min()))
        return None

    def _find_wrong_signs(self) -> _Departure | None:
        """Find a change of sign, or negative advantages that were set to 0, in nearly all sequences."""
        for name, (expected, _) in self.candidates.items():
            if self.share(-expected) > NEARLY_ALL:
                return _Departure(
                    REWARD_SIGN, f"better answers have lower advantages: those of {name} times −1"
                )
        for name, (expected, _) in self.candidates.items():
            negative = self.has_advantage & (
                expected < -ABSOLUTE_TOLERANCE * np.abs(expected).max(initial=0.0)
            )
            if negative.sum() < FEWEST_SEQUENCES or self.share(np.maximum(expected, 0.0)) <= NEARLY_ALL:
                continue
            zeros = int((self.data.advantage[negative] == 0).sum())
            if zeros > NEARLY_ALL * int(negative.sum()):
                cause = (
                    f"{zeros:,} advantages that are negative under {name} are 0: only positive ones are left"
                )
                return _Departure(ADVANTAGES, cause)
        return None

    def _find_wrong_process(self) -> _Departure | None:
        """Find one process, or one part of the rows of each batch, whose advantages are wrong while the others fit."""
        data = self.data
        if len(np.unique(data.process)) > 1:
            departure = self._find_wrong_part(data.process, 0)
            if departure is not None:
                return departure

        # The file of one process may hold the rows of several, one after the other. Index of each sequence among the
        # rows of its batch and process:
        local_batch = distinct_index(self.batch, data.process)
        order = np.lexsort((data.row, local_batch))
        starts = np.concatenate([[0], np.cumsum(np.bincount(local_batch))])[:-1]
        row = np.empty(len(local_batch), np.int64)
        row[order] = np.arange(len(local_batch)) - starts[local_batch[order]]
        sizes = np.bincount(local_batch)[local_batch]
        for parts in (2, 4, 8):
            departure = self._find_wrong_part(row * parts // sizes, parts)
            if departure is not None:
                return departure
        return None

    def _find_wrong_part(self, label: Integers, part_count: int) -> _Departure | None:
        """Find a part of the sequences whose advantages are wrong in most batches, while those of the others fit.

        Args:
            label: The number of the part that each sequence belongs to, (sequences,).
            part_count: The number of parts that the rows of a batch are divided into; 0 if the parts are processes.
        """
        for name, (expected, group) in self.candidates.items():
            # A part of the rows must consist of whole groups.
            if part_count and float(_spread(label.astype(float), group).max(initial=0.0)) > 0:
                continue
            informative = self.informative(expected)
            if informative.sum() < FEWEST_SEQUENCES:
                continue
            fit = self.fits(expected)
            shares: dict[int, float] = {}
            for k in np.unique(label[informative]):
                shares[int(k)] = float(fit[informative & (label == k)].mean())
            wrong_labels = [k for k, share in shares.items() if share < 1 - MANY]
            right_labels = [k for k, share in shares.items() if share > NEARLY_ALL]
            # Every part must be clearly wrong or right, and no more parts wrong than right.
            is_clear = len(wrong_labels) + len(right_labels) == len(shares)
            if not wrong_labels or not is_clear or len(wrong_labels) > len(right_labels):
                continue
            wrong = informative & np.isin(label, wrong_labels)
            description = self._describe(wrong, expected, group)
            # The part must be wrong in most of its batches. If not, the fault may begin at some batch.
            batch_shares = means_by_index((~fit[wrong]).astype(float), distinct_index(self.batch[wrong]))
            if float((batch_shares > 0).mean()) < MAJORITY:
                continue
            if part_count:
                numbers = " and ".join(str(k + 1) for k in wrong_labels)
                scope = f"in part {numbers} of {part_count} of the rows of each batch, as for one process,"
            else:
                scope = f"on process {', '.join(map(str, wrong_labels))}"
            cause = f"{scope} advantages {description}, while on the others they are those of {name}"
            kind = REWARD_SIGN if description.startswith("are negated") else ADVANTAGES
            return _Departure(kind, cause, onset=float(self.data.step[wrong & ~fit].min()))
        return None

    def _describe(self, sequences: Flags, expected: Floats, group: Integers) -> str:
        """Describe advantages that are not the expected ones, as a predicate.

        Args:
            sequences: True for the sequences with these advantages, (sequences,).
            expected: The advantages of an estimator, (sequences,).
            group: Index of each sequence's group, (sequences,).
        """
        advantage = self.data.advantage[sequences]
        if np.abs(advantage).max(initial=0.0) < 1e-9:
            return "are 0"
        if float(self.fits(-expected)[sequences].mean()) > NEARLY_ALL:
            return "are negated: better answers have lower ones"
        if (advantage == advantage[0]).all():
            return f"are all {format_number(float(advantage[0]), 6)}"
        if self._reordered_share(sequences, expected, group) > 0.9:
            return "are in another order: they belong to other answers to the same prompt"
        local_batch = distinct_index(self.batch, self.data.process)
        if self._reordered_share(sequences, expected, local_batch) > 0.9:
            return "are in another order: they belong to other answers"
        if self._reordered_share(sequences, expected, self.batch) > 0.9:
            return "are in another order: they belong to other answers"
        return "are different"

    def _reordered_share(self, sequences: Flags, expected: Floats, unit: Integers) -> float:
        """Return the share of units in which recorded and expected advantages are equal after sorting.

        Args:
            sequences: True for the sequences to compare, (sequences,).
            expected: The advantages of an estimator, (sequences,).
            unit: Index of the unit of each sequence, such as its group or batch, (sequences,).
        """
        index = unit[sequences]
        recorded = self.data.advantage[sequences]
        expected = expected[sequences]
        if np.isnan(recorded).any() or not len(recorded):
            return 0.0
        sorted_recorded = recorded[np.lexsort((recorded, index))]
        sorted_expected = expected[np.lexsort((expected, index))]
        sorted_index = np.sort(index)
        scale = math.sqrt(float(np.square(expected).mean()))
        tolerance = RELATIVE_TOLERANCE * np.abs(sorted_expected) + 2e-3 * scale
        close = np.abs(sorted_recorded - sorted_expected) <= tolerance

        # Units whose expected advantages are all 0 are left out.
        counts = np.bincount(sorted_index)
        shares = np.bincount(sorted_index, weights=close) / np.maximum(counts, 1)
        sizes = np.bincount(sorted_index, weights=np.abs(sorted_expected))
        informative = (counts > 0) & (sizes > 1e-9)
        return float((shares[informative] > NEARLY_ALL).mean()) if informative.any() else 0.0

    def _find_wrong_batches(self) -> _Departure | None:
        """Find a batch such that the advantages before it fit, and those of this batch and the later ones do not."""
        for name, (expected, group) in self.candidates.items():
            informative = self.informative(expected)
            if informative.sum() < FEWEST_SEQUENCES:
                continue
            shares = means_by_index(self.fits(expected)[informative], self.batch[informative])
            numbers = np.flatnonzero(~np.isnan(shares))
            fit = shares[numbers] > NEARLY_ALL
            if not fit[0] or fit.all():
                continue
            first = int(np.argmin(fit))
            # Most of the later batches must be wrong. Some with few groups may fit by chance.
            if float((shares[numbers[first:]] < 1 - MANY / 2).mean()) < 0.7 or not fit[:first].all():
                continue
            later = self.batch >= numbers[first]
            onset = float(self.data.step[informative & later].min())
            description = self._describe(self.has_advantage & later, expected, group)
            kind = ADVANTAGES
            if description.startswith("are negated"):
                kind = REWARD_SIGN
            elif description == "are 0":
                kind = NO_SIGNAL
            cause = f"from step {format_step(onset)} on advantages {description}; before it they are those of {name}"
            return _Departure(kind, cause, onset=onset)
        return None

    def _find_permutation(self) -> _Departure | None:
        """Find advantages that belong to other sequences of the group, of the process or of the batch."""
        units = (
            ("answers to the same prompt", None),
            ("answers in the batch of the process", distinct_index(self.batch, self.data.process)),
            ("answers in the batch", self.batch),
        )
        for text, unit in units:
            for name, (expected, group) in self.candidates.items():
                if self.informative(expected).sum() < FEWEST_SEQUENCES:
                    continue
                index = group if unit is None else unit
                if self._reordered_share(self.has_advantage, expected, index) < 0.9:
                    continue
                share = self.share(expected)
                # A permutation changes most advantages. If only a few differ, an answer of a group may be missing.
                if share > 1 - REORDERED_SHARE:
                    continue
                part = format_share(1 - share)
                cause = f"advantages are those of {name} in another order: {part} belong to other {text}"
                return _Departure(ADVANTAGES, cause)
        return None

    def _find_missing_answers(self) -> _Departure | None:
        """Find groups from which answers were left out after the advantages had been computed."""
        data = self.data
        group = self.group
        sizes = np.bincount(group)
        if len(np.unique(sizes)) < 2 or not self.has_advantage.all():
            return None
        positive_only = bool((data.advantage > 0).all())
        if positive_only and len(np.unique(data.advantage)) > 1:
            cause = "every advantage is above 0, and groups are of different sizes: answers below the mean are left out"
            return _Departure(ADVANTAGES, cause)

        # An estimator fits the largest groups, and does not fit the others.
        is_complete = (sizes == sizes.max())[group]
        for name, (expected, _) in self.candidates.items():
            if estimator_family(name) not in GROUP_ESTIMATORS or name.endswith("all processes"):
                continue
            informative = self.informative(expected)
            fit = self.fits(expected)
            complete = informative & is_complete
            incomplete = informative & ~is_complete
            # A single incomplete group is no evidence: the record drops an answer that repeats an equal one.
            if complete.sum() < FEWEST_SEQUENCES or len(np.unique(group[incomplete])) < 2:
                continue
            if float(fit[complete].mean()) > NEARLY_ALL and float(fit[incomplete].mean()) < 1 - MANY:
                return self._missing_answers(f"those of {name} in groups of {sizes.max()}", sizes)

        # Even if no group is complete, the advantages of a group are a rising linear function of its rewards. Their
        # mean is not 0.
        residual, means = _line_residuals(data.reward, data.advantage, group)
        total = float(np.square(data.advantage).sum())
        if residual < 1e-4 * total and means > UNCENTRED_SHARE * total and self._slopes_differ(group):
            return self._missing_answers("a function of the reward in each group", sizes)
        return None

    def _missing_answers(self, description: str, sizes: Integers) -> _Departure:
        """Return the fault of missing answers.

        Args:
            description: A description of the recorded advantages.
            sizes: The number of answers of each group, (groups,).
        """
        smaller = int((sizes < sizes.max()).sum())
        cause = (
            f"answers are missing from {smaller} of {len(sizes)} groups: advantages are {description}, and elsewhere "
            "their mean is not 0. Answers were left out after the advantages had been computed"
        )
        return _Departure(ADVANTAGES, cause)

    def _slopes_differ(self, group: Integers) -> bool:
        """Return whether advantages rise with the reward at different slopes in different groups.

        They do if each group is divided by its own standard deviation. With a common slope, group means other than 0
        may be due to another baseline.
        """
        reward = self.data.reward - means_by_index(self.data.reward, group)[group]
        advantage = self.data.advantage - means_by_index(self.data.advantage, group)[group]
        xx = np.bincount(group, weights=reward**2)
        xy = np.bincount(group, weights=reward * advantage)
        slopes = xy[xx > 1e-9] / xx[xx > 1e-9]
        return len(slopes) > 2 and float(slopes.std()) > 0.01 * abs(float(slopes.mean()))

    def _find_wrong_groups(self) -> _Departure | None:
        """Find advantages that were computed in other groups than the recorded ones, so that groups are not centred.

        There are two signs: answers to one prompt with equal rewards have different advantages; or each batch is
        centred, and the advantages of a group are no linear function of its rewards.
        """
        data = self.data
        has_advantage = self.has_advantage
        group = self.group
        total = float(np.square(data.advantage[has_advantage]).sum())
        means = means_by_index(data.advantage, group)[group]
        if float(np.square(means[has_advantage]).sum()) < UNCENTRED_SHARE * total:
            return None

        # Answers of a group with equal rewards.
        tie = distinct_index(group, np.round(data.reward, 6))
        has_equal = has_advantage & (np.bincount(tie)[tie] > 1)
        difference = data.advantage - means_by_index(data.advantage, tie)[tie]
        scale = float(np.abs(data.advantage[has_advantage]).max())
        if has_equal.sum() >= MIN_PAIRS:
            share = float((np.abs(difference[has_equal]) > 1e-3 * scale).mean())
            if share > MAJORITY:
                cause = (
                    f"{format_share(share)} of answers to one prompt with one reward differ in advantage, and groups "
                    "are not centred: answers are compared with those to other prompts"
                )
                return _Departure(GROUPING, cause)

        if not has_advantage.all():
            return None
        residual, _ = _line_residuals(data.reward, data.advantage, group)
        batch_means = np.abs(means_by_index(data.advantage, self.batch))
        if residual > UNCENTRED_SHARE * total and float(batch_means.max()) < 1e-3 * scale:
            cause = (
                "each batch is centred and groups are not, and answers to one prompt have different baselines: answers "
                "are compared with those to other prompts"
            )
            return _Departure(GROUPING, cause)
        return None

    def _find_wrong_correlation(self) -> _Departure | None:
        """Find advantages that fall as the reward rises, or that do not depend on it."""
        # If the rewards of every group are equal, there is nothing that advantages could depend on.
        if self.tied.all():
            return None
        count = int(self.has_advantage.sum())
        are_few = count < FEWEST_CORRELATED
        # In few sequences, the advantages of a critic may fall as the reward rises by chance.
        if count < FEWEST_SEQUENCES or (are_few and self.is_per_token):
            return None
        error = 1 / math.sqrt(count)
        correlation = self.correlation
        limit = OPPOSITE if are_few else max(0.3, 4 * error)
        if correlation < -limit:
            cause = f"better answers have lower advantages (correlation {correlation:.2f})"
            return _Departure(REWARD_SIGN, cause)
        if are_few:
            return None
        if not self.is_per_token and abs(correlation) < UNRELATED and 4 * error < MANY:
            cause = f"advantages do not depend on the reward (correlation {correlation:.2f} within groups)"
            return _Departure(ADVANTAGES, cause)
        return None


def _spread(values: Floats, index: Integers) -> Floats:
    """Compute the difference between the largest and the smallest value with each index."""
    count = int(index.max(initial=-1)) + 1
    smallest = np.full(count, math.inf)
    largest = np.full(count, -math.inf)
    np.minimum.at(smallest, index, values)
    np.maximum.at(largest, index, values)
    return largest - smallest


def _line_residuals(x: Floats, y: Floats, group: Integers) -> tuple[float, float]:
    """Fit a rising line to each group, and return two sums of squares: of the residuals, and of the group means of y.

    Args:
        x: The variable, (n,).
        y: The values to fit, (n,).
        group: Index of each value's group, (n,).
    """
    y_mean = means_by_index(y, group)
    dx = x - means_by_index(x, group)[group]
    dy = y - y_mean[group]
    xx = np.bincount(group, weights=dx * dx)
    xy = np.bincount(group, weights=dx * dy)
    slope = np.maximum(0.0, np.divide(xy, xx, out=np.zeros(len(xx)), where=xx > 0))
    residual = float(np.square(dy - slope[group] * dx).sum())
    means = float(np.square(y_mean[group]).sum())
    return residual, means


def compare_advantages(case: RecordCase) -> Comparison:
    """Return the recorded advantages, beside those of each estimator."""
    return Comparison(case.recorded, case.whole_groups)


@CHECKS.check(
    "formula of the advantages",
    after="advantages that are 0",
    tested="advantages follow from reward and group",
    explained="in a record, they follow from reward and group",
    reports=(REWARD_SIGN, ADVANTAGES, GROUPING, NO_SIGNAL),
)
def check_advantages(case: RecordCase) -> Finding:
    """Check that advantages are those of a known estimator, or at least follow the reward."""
    comparison = case.of(compare_advantages)
    if comparison.missing:
        return Finding("ok", None, "", advice=comparison.missing)
    count = int(comparison.has_advantage.sum())
    figure = comparison.correlation if comparison.is_per_token else comparison.best[3]
    measure = "share of advantages that are those of the nearest estimator"
    if comparison.is_per_token:
        measure = "correlation of reward and advantage"
    passed = Finding("ok", True, "", figure, None, count, measure=measure)
    departure = comparison.departure
    if departure is None and comparison.split_groups and not comparison.is_exact:
        return Finding("ok", None, "", advice=comparison.split_groups)
    if departure is None:
        return passed
    return passed.failed(departure.kind, departure.cause, severity=departure.severity, onset=departure.onset)
