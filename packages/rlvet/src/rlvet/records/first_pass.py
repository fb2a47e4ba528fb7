"""The data of the token checks: the tokens of every sequence in the first loss that contains it.

A trainer passes over a generated batch several times. Before the first update on it, the policy in training equals the
old policy, so the ratio must be 1, and faults in the log-probabilities are visible. `FirstPass` therefore holds every
sequence once, as it was in the first pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlvet.checks.findings import Coverage
from rlvet.records.ages import ROUNDING_DISTANCE
from rlvet.records.record import LossBatch
from rlvet.records.recorded_advantages import batch_number, sequence_keys

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

TOKENS = 2**20
"""Largest number of tokens in a `FirstPass`. If a record has more, each batch gets the same number of them."""

SEQUENCES = 2**18
"""Largest number of sequences in a `FirstPass`. If a record has more, each batch gets the same number, in whole
groups."""

FEWEST_TOKENS = 1024
"""Smallest number of tokens of a batch. If batches are too many for it, only every n-th is kept, with the first and the
last."""

WINDOWS = 16
"""Smallest number of sequences that the tokens of a batch come from. Of long sequences only the start, the middle and
the end are kept."""

REMEMBERED = 2**18
"""Number of the last sequences that are remembered to recognise a repeated one."""

NEW_SHARE = 0.1
"""Share of new sequences above which a loss belongs to the first pass over its batch, if some of an earlier pass are
not known. Its other sequences are then equal answers, not repetitions."""

FEWEST_SHIFTED = 20
"""Number of tokens below which a shift of a column is not tested."""

SHIFTS = (-2, -1, 1, 2)
"""The shifts, in tokens, that are tested between two columns of log-probabilities."""

NEGLIGIBLE_VARIANCE = 1e-9
"""Variance (nats²) up to which a column counts as constant, so that no line is fitted to it."""


def _no_values() -> Floats:
    return np.zeros(0)


def _no_numbers() -> Integers:
    return np.zeros(0, np.int64)


def _no_flags() -> Flags:
    return np.zeros(0, np.bool_)


@dataclass(frozen=True, eq=False)
class FirstPass:
    """The tokens of every sequence in the first loss that contains it.

    Values per token are arrays of shape (tokens,), with the sequences one after the other. Values per sequence are
    arrays of shape (sequences,). NaN marks a value that was not recorded. A counted token is one whose mask is 1.
    """

    logp: Floats = field(default_factory=_no_values)
    """Log-probabilities (nats) under the policy in training, (tokens,)."""
    logp_old: Floats = field(default_factory=_no_values)
    """Log-probabilities (nats) under the old policy, the denominator of the ratio, (tokens,)."""
    logp_rollout: Floats = field(default_factory=_no_values)
    """Log-probabilities (nats) that the inference engine reported when it sampled, (tokens,)."""
    entropy: Floats = field(default_factory=_no_values)
    """Entropy (nats) of the policy at each token, (tokens,)."""
    lag: Floats = field(default_factory=_no_values)
    """Age of the weights that sampled each token, in versions, (tokens,)."""
    position: Integers = field(default_factory=_no_numbers)
    """Number of counted tokens before each token in its sequence, (tokens,)."""
    remaining: Integers = field(default_factory=_no_numbers)
    """Number of counted tokens after each token in its sequence, (tokens,)."""
    sequence: Integers = field(default_factory=_no_numbers)
    """Index of each token's sequence, ascending, (tokens,)."""
    before_updates: Flags = field(default_factory=_no_flags)
    """True for sequences that were recorded before the first update on their batch, (sequences,)."""
    batch: Integers = field(default_factory=_no_numbers)
    """Number of each sequence's generated batch, (sequences,)."""
    advantage: Floats = field(default_factory=_no_values)
    """Advantage of each sequence; NaN if its tokens have different ones, (sequences,)."""
    group: Floats = field(default_factory=_no_values)
    """Number of each sequence's prompt, (sequences,)."""
    reward: Floats = field(default_factory=_no_values)
    """Reward of each sequence, (sequences,)."""
    truncated: Floats = field(default_factory=_no_values)
    """1 for a sequence that was cut off, else 0, (sequences,)."""
    answer_ids: Sequence[int | None] = ()
    """A hash of each sequence's token ids; None if these were not recorded."""
    bad_sequences: int = 0
    """Number of sequences that were left out because of NaN, infinity or a log-probability above 0."""
    anchored_at_rollout: bool = False
    """True if the clip bounds of the run surround the log-probabilities of the engine."""
    last_distance: Mapping[int, float] = field(default_factory=dict)
    """Mean abs log-ratio (nats) of the last loss of each batch, by the number of the batch."""
    movement: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """Mean abs log-ratio (nats) of each batch after each number of updates on it. If these numbers were not recorded, a
    loss counts as after 1 update if earlier losses contain all of its sequences, else as after 0."""
    advantage_slopes: Sequence[AdvantageSlopes] = ()
    """For each batch with several losses per update, how far log-probabilities moved with their advantages."""
    repeats_sequences: bool = False
    """True if losses after an update contain sequences of losses before it, with the same old log-probabilities."""
    first_step: Mapping[int, int] = field(default_factory=dict)
    """Step of the first loss of each batch, by the number of the batch."""
    coverage: Coverage = field(default_factory=Coverage)
    """The part of the record that the tokens come from."""

    @classmethod
    def of(cls, batches: Iterable[LossBatch]) -> FirstPass:
        """Return the first pass over the losses of a record.

        Args:
            batches: The losses, in the order of the record.
        """
        collector = cls.collector()
        for batch in batches:
            collector.add(batch)
        return collector.result()

    @staticmethod
    def collector() -> FirstPassCollector:
        """Return a collector, for a reader that passes each loss to several collectors."""
        return FirstPassCollector()

    @cached_property
    def logp_old_is_rollout(self) -> bool:
        """True if the old log-probabilities are those of the engine."""
        recorded = ~np.isnan(self.logp_rollout)
        equal = np.array_equal(self.logp_old[recorded], self.logp_rollout[recorded])
        return bool(recorded.any()) and equal

    @cached_property
    def tokens_before_updates(self) -> Flags:
        """True for tokens that were recorded before the first update on their batch, (tokens,)."""
        return self.before_updates[self.sequence]

    @cached_property
    def excess_surprisal(self) -> Floats:
        """Surprisal minus entropy, ``−log π − H`` (nats), (tokens,); 0 if the entropy was not recorded.

        Its mean is 0 if tokens are sampled from the policy.
        """
        logp = np.where(np.isnan(self.logp), self.logp_old, self.logp)
        excess = -logp - self.entropy
        return np.where(np.isnan(excess), 0.0, excess)

    def batch_means(self, values: Floats, tokens: Flags) -> Floats:
        """Compute the mean of token values in each batch.

        Args:
            values: One value per token, (tokens,).
            tokens: True for tokens to average, (tokens,).

        Returns:
            One mean for each batch that has such tokens, in the order of the batch numbers.
        """
        _, batch_index = np.unique(self.batch, return_inverse=True)
        token_batches = batch_index[self.sequence[tokens]]
        counts = np.bincount(token_batches)
        sums = np.bincount(token_batches, weights=values[tokens])
        not_empty = counts > 0
        return sums[not_empty] / counts[not_empty]

    def mean_and_z(self, values: Floats, tokens: Flags) -> tuple[float, float]:
        """Compute the mean of token values, and its distance from 0 in standard errors.

        Tokens of one sequence are correlated, sequences are independent. The standard error is therefore computed from
        the sum over each sequence.

        Args:
            values: One value per token, (tokens,).
            tokens: True for tokens to average, (tokens,).

        Returns:
            The mean, and the mean divided by its standard error.
        """
        sums = np.bincount(self.sequence[tokens], weights=values[tokens], minlength=len(self.batch))
        total = float(sums.sum())
        spread = math.sqrt(float(np.square(sums).sum()))
        count = int(tokens.sum())
        mean = total / max(1, count)
        z = total / spread if spread else 0.0
        return mean, z

    def best_shift(self, first: Floats, second: Floats, tokens: Flags) -> tuple[int, float, float]:
        """Find the shift of one column that brings it closest to another.

        Args:
            first: The column that is not shifted, (tokens,).
            second: The column to shift, (tokens,).
            tokens: True for tokens of the first column to compare, (tokens,).

        Returns:
            The shift in tokens, the mean abs difference at this shift, and the mean abs difference of the same tokens
            without a shift. Shifts at which too few tokens can be compared are left out.
        """
        difference = np.abs(first - second)
        distances = {0: _mean_of_recorded(difference[tokens])}
        unshifted_distances = dict(distances)
        for shift in SHIFTS:
            comparable = self.has_shifted_token(shift, tokens)
            if int(comparable.sum()) >= FEWEST_SHIFTED:
                shifted_difference = np.abs(first - np.roll(second, -shift))
                distances[shift] = _mean_of_recorded(shifted_difference[comparable])
                unshifted_distances[shift] = _mean_of_recorded(difference[comparable])
        best = min(distances, key=lambda shift: distances[shift])
        return best, distances[best], unshifted_distances[best]

    def has_shifted_token(self, shift: int, tokens: Flags) -> Flags:
        """Return True for tokens whose sequence has a token `shift` positions later, (tokens,).

        Args:
            shift: The number of positions; below 0 for an earlier token.
            tokens: True for tokens to test, (tokens,).
        """
        same_sequence = self.sequence == np.roll(self.sequence, -shift)
        # Only parts of long sequences are kept, so the next token of the array may not be the next of the sequence.
        at_shift = np.roll(self.position, -shift) - self.position == shift
        return same_sequence & tokens & at_shift

    def can_find_shifts(self, tokens: Flags) -> bool:
        """Return whether enough tokens have neighbours for `best_shift` to find a shift by one token.

        Args:
            tokens: True for tokens to compare, (tokens,).
        """
        counts = [int(self.has_shifted_token(shift, tokens).sum()) for shift in (-1, 1)]
        return min(counts) >= FEWEST_SHIFTED

    def fit_temperature(self, first: Floats, second: Floats, tokens: Flags) -> tuple[float, float]:
        """Fit the ratio of the temperatures of two columns of log-probabilities.

        ``first − second`` is regressed on ``second + entropy``. If both columns come from the same logits at two
        temperatures, the slope is the ratio of the temperatures minus 1.

        Args:
            first: Log-probabilities (nats), (tokens,).
            second: Log-probabilities (nats) at the other temperature, (tokens,).
            tokens: True for tokens to use, (tokens,).

        Returns:
            The slope and R²; both 0 if there are fewer than three tokens, or if either side is constant.
        """
        complete = tokens & ~np.isnan(first + second + self.entropy)
        count = int(complete.sum())
        if count < 3:
            return 0.0, 0.0

        y = (first - second)[complete]
        x = (second + self.entropy)[complete]
        y = y - y.mean()
        x = x - x.mean()
        xx = float(x @ x)
        yy = float(y @ y)
        xy = float(x @ y)
        if min(xx, yy) <= NEGLIGIBLE_VARIANCE * count:
            return 0.0, 0.0
        slope = xy / xx
        r_squared = xy**2 / (xx * yy)
        return slope, r_squared

    def batch_rows(self) -> list[dict[str, float]]:
        """Return one row of metrics per batch, with the names of `rlvet.runs.quantities.QUANTITIES`.

        A row has the step (``step``) and, as far as they were recorded, the mean reward (``reward``), the mean entropy
        before updates (``entropy``), the share of sequences that were cut off (``cut``) and the mean abs log-ratio of
        the batch's last loss (``moved``).
        """
        numbers, batch_index = np.unique(self.batch, return_inverse=True)
        entropy = np.where(self.tokens_before_updates, self.entropy, math.nan)
        means = {
            "reward": _means_of_recorded(self.reward, batch_index, len(numbers)),
            "cut": _means_of_recorded(self.truncated, batch_index, len(numbers)),
            "entropy": _means_of_recorded(entropy, batch_index[self.sequence], len(numbers)),
        }

        rows = []
        for index, number in enumerate(numbers.tolist()):
            row = {
                "step": self.first_step[number],
                "moved": self.last_distance.get(number, math.nan),
            }
            for name, values in means.items():
                row[name] = float(values[index])
            rows.append({name: value for name, value in row.items() if not math.isnan(value)})
        return rows


class AdvantageSlopes(NamedTuple):
    """The movement of one batch's log-probabilities in the direction of their advantages, loss by loss.

    Each figure is the slope ``Σ A·Δlog π / Σ A²`` (nats per unit of advantage). The change ``Δlog π`` of a sequence is
    measured between two losses of different updates that contain it.
    """

    last_loss: float
    """The slope of the sequences in the last loss of each update."""
    other_losses: float
    """The slope of the sequences in all other losses."""
    is_lowest: bool
    """True if the last loss has the lowest slope of all."""
    losses: int
    """Number of losses per update."""


@dataclass
class _BatchSample:
    """The sampled sequences and tokens of one batch, in chunks of one loss each."""

    tokens: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    sequences: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    token_count: int = 0
    sequence_count: int = 0

    def keep_tokens(self, limit: int) -> None:
        """Drop tokens above a limit: first all but three windows of long sequences, then whole sequences."""
        if self.token_count <= limit:
            return
        tokens = _concatenated(self.tokens)
        window = max(FEWEST_TOKENS // WINDOWS, limit // WINDOWS)
        length = tokens["position"] + tokens["remaining"] + 1
        distance_from_ends = np.minimum(tokens["position"], tokens["remaining"])
        distance_from_middle = np.abs(tokens["position"] - length // 2)
        in_window = (distance_from_ends < window // 4) | (distance_from_middle < window // 4)
        tokens = {name: values[in_window] for name, values in tokens.items()}

        # Choose whole sequences in a pseudo-random order that is the same at each call.
        ids, index, counts = np.unique(tokens["sequence"], return_inverse=True, return_counts=True)
        order = np.argsort(_scrambled(ids))
        chosen = np.zeros(len(ids), np.bool_)
        chosen[order] = counts[order].cumsum() <= limit
        self.tokens = [{name: values[chosen[index]] for name, values in tokens.items()}]
        self.token_count = int(counts[chosen].sum())

    def keep_sequences(self, limit: int) -> None:
        """Drop sequences above a limit, in whole groups, with their tokens."""
        if self.sequence_count <= limit:
            return
        sequences = _concatenated(self.sequences)
        # A sequence without a group is a group of its own, with a number below 0.
        group = np.where(np.isnan(sequences["group"]), -1.0 - sequences["id"], sequences["group"])
        groups, index, counts = np.unique(group, return_inverse=True, return_counts=True)
        order = np.argsort(_scrambled(groups))
        sequences_before = counts[order].cumsum() - counts[order]
        chosen = np.zeros(len(groups), np.bool_)
        chosen[order] = sequences_before < limit
        sequences = {name: values[chosen[index]] for name, values in sequences.items()}

        tokens = _concatenated(self.tokens)
        has_sequence = np.isin(tokens["sequence"], sequences["id"])
        self.sequences = [sequences]
        self.sequence_count = len(sequences["id"])
        self.tokens = [{name: values[has_sequence] for name, values in tokens.items()}]
        self.token_count = int(has_sequence.sum())


class FirstPassCollector:
    """Collects the first pass over a record, loss by loss, in bounded memory.

    >>> collector = FirstPass.collector()
    >>> collector.result().coverage
    Coverage(tokens=0, total_tokens=0, batches=0, total_batches=0)
    """

    def __init__(self) -> None:
        """Create a collector that holds no loss yet."""
        self._samples: dict[int, _BatchSample] = {}
        self._tokens_per_batch = TOKENS
        self._sequences_per_batch = SEQUENCES
        self._batch_stride = 1
        self._next_id = 0

        # The last recorded sequences, the oldest first. The key is a hash of the sequence; the value is the batch and
        # the update (−1 if that is not known) in which it was first recorded.
        self._sequence_hashes: dict[int, tuple[int, int]] = {}
        self._recorded_sequences = 0
        self._repeated_sequences = 0
        self._repeats_after_update = False

        # By the number of the batch: its index in the order of the record, the step of its first loss, the mean abs
        # log-ratio of its last loss, and for each update the sum of abs log-ratios with the number of tokens.
        self._batch_index: dict[int, int] = {}
        self._first_step: dict[int, int] = {}
        self._last_distance: dict[int, float] = {}
        self._movement: defaultdict[int, dict[int, tuple[float, int]]] = defaultdict(dict)

        self._slopes = _AdvantageSlopeCollector()

        # Counts over the whole record.
        self._losses = 0
        self._new_tokens = 0
        self._losses_without_update = 0
        self._bad_sequences = 0
        self._anchored_at_rollout = False

    def add(self, batch: LossBatch) -> None:
        """Add the next loss of the record."""
        step = self._losses if batch.step is None else batch.step
        self._losses += 1
        number = batch_number(batch, step)
        if batch.update is None:
            before_updates = number not in self._first_step
            self._losses_without_update += 1
        else:
            before_updates = batch.update == 0

        self._batch_index.setdefault(number, len(self._batch_index))
        self._first_step.setdefault(number, step)
        self._bad_sequences += batch.bad_sequences
        self._anchored_at_rollout = batch.anchor == "rollout"

        keys = sequence_keys(batch)
        new = self._find_new_sequences(batch, keys, number)
        self._slopes.add(batch, keys, number)
        if batch.has_logp and batch.mask.any():
            self._add_movement(batch, number, is_repeated=not new.any())
        if new.any():
            self._new_tokens += int(batch.mask[new].sum())
            self._store(batch, new, number, before_updates)

    def result(self) -> FirstPass:
        """Return the first pass over the losses that were added so far."""
        numbers = sorted(self._samples, key=self._batch_index.__getitem__)
        samples = [self._samples[number] for number in numbers]
        token_chunks = []
        sequence_chunks = []
        for sample in samples:
            token_chunks += sample.tokens
            sequence_chunks += sample.sequences
        tokens = _concatenated(token_chunks)
        sequences = _concatenated(sequence_chunks)
        if sequences:
            # Sort the sequences in the order of the record, and replace their ids by their indices.
            order = np.argsort(sequences["id"])
            sequences = {name: values[order] for name, values in sequences.items()}
            token_order = np.argsort(tokens["sequence"], kind="stable")
            tokens = {name: values[token_order] for name, values in tokens.items()}
            tokens["sequence"] = np.searchsorted(sequences.pop("id"), tokens["sequence"])

        columns = {name: _widened(values) for name, values in (tokens | sequences).items()}
        distance = columns.pop("distance", _no_values())
        answers = columns.pop("answer", _no_numbers())
        has_answer = columns.pop("has_answer", _no_flags())
        answer_ids = [
            int(answer) if has_id else None for answer, has_id in zip(answers, has_answer, strict=True)
        ]
        first_pass = FirstPass(
            **columns,
            answer_ids=tuple(answer_ids),
            bad_sequences=self._bad_sequences,
            anchored_at_rollout=self._anchored_at_rollout,
            last_distance=dict(self._last_distance),
            movement=self._mean_movement(),
            advantage_slopes=self._slopes.result(),
            repeats_sequences=self._repeats_after_update,
            first_step=dict(self._first_step),
            coverage=Coverage(
                tokens=sum(sample.token_count for sample in samples),
                total_tokens=self._new_tokens,
                batches=sum(sample.token_count > 0 for sample in samples),
                total_batches=len(self._batch_index),
            ),
        )
        return replace(first_pass, before_updates=self._correct_before_updates(first_pass, distance))

    def _add_movement(self, batch: LossBatch, number: int, *, is_repeated: bool) -> None:
        """Add the distance of the policy from the old policy at a loss.

        Args:
            batch: The loss.
            number: Number of the generated batch.
            is_repeated: True if earlier losses contain all of its sequences.
        """
        log_ratio = batch.log_ratio[batch.mask]
        distance = _mean_distance(log_ratio)
        self._last_distance[number] = distance
        # If the record does not number the updates, repeated sequences follow an update.
        update = int(is_repeated) if batch.update is None else batch.update
        total, count = self._movement[number].get(update, (0.0, 0))
        self._movement[number][update] = (total + distance * len(log_ratio), count + len(log_ratio))

    def _mean_movement(self) -> dict[int, dict[int, float]]:
        """Return `FirstPass.movement`."""
        movement = {}
        for number, sums in self._movement.items():
            movement[number] = {update: total / count for update, (total, count) in sorted(sums.items())}
        return movement

    def _find_new_sequences(self, batch: LossBatch, keys: Sequence[int], number: int) -> Flags:
        """Return True for sequences that have tokens and were in no earlier pass, (batch,), and remember them.

        Args:
            batch: The loss.
            keys: A hash of each of its sequences, (batch,).
            number: Number of the generated batch.
        """
        not_empty = batch.mask.any(1)
        first_records = [self._sequence_hashes.get(key) for key in keys]
        unknown = np.array([first_record is None for first_record in first_records], np.bool_)

        # Answers in one pass over a batch may be equal, so a known hash is not always a repetition. It is none if the
        # sequence was first recorded in the same update, or if this loss has new sequences of the same batch. Those
        # that were left out of an earlier pass as damaged, or forgotten, may be new in a later one, but they are few.
        update = -1 if batch.update is None else batch.update
        may_be_unknown = self._bad_sequences > 0 or len(self._sequence_hashes) >= REMEMBERED
        fewest_new = NEW_SHARE * int(not_empty.sum()) if may_be_unknown else 0
        has_new = int((unknown & not_empty).sum()) > fewest_new
        in_same_pass = np.zeros(len(keys), np.bool_)
        for row, first_record in enumerate(first_records):
            if first_record is None:
                continue
            first_batch, first_update = first_record
            in_same_update = update >= 0 and update == first_update
            in_same_pass[row] = first_batch == number and (has_new or in_same_update)
        is_new = unknown | in_same_pass

        for key in keys:
            self._sequence_hashes.setdefault(key, (number, update))
        while len(self._sequence_hashes) > REMEMBERED:
            oldest = next(iter(self._sequence_hashes))
            del self._sequence_hashes[oldest]
        repeated = int((not_empty & ~is_new).sum())
        self._recorded_sequences += int(not_empty.sum())
        self._repeated_sequences += repeated
        self._repeats_after_update |= batch.update != 0 and repeated > 0
        return not_empty & is_new

    def _store(self, batch: LossBatch, new: Flags, number: int, before_updates: bool) -> None:
        """Store the new sequences of a loss, and drop samples until the limits are met.

        Args:
            batch: The loss.
            new: True for the sequences to store, (batch,).
            number: Number of the generated batch.
            before_updates: True if the loss comes before the first update on that batch.
        """
        mask = batch.mask[new]
        count = len(mask)
        tokens = _token_columns(batch, new)
        tokens["sequence"] += self._next_id
        answers = _answer_ids(batch, new)
        sequences = {
            "id": np.arange(self._next_id, self._next_id + count),
            "before_updates": np.full(count, before_updates),
            "batch": np.full(count, number, np.int64),
            "distance": np.full(count, _mean_distance(batch.log_ratio[new][mask])),
            "advantage": _sequence_advantages(batch.advantages[new], mask),
            "group": _recorded(batch.group, new),
            "reward": _recorded(batch.reward, new),
            "truncated": _recorded(batch.truncated, new),
            "answer": np.array([answer or 0 for answer in answers], np.int64),
            "has_answer": np.array([answer is not None for answer in answers], np.bool_),
        }
        self._next_id += count

        sample = self._samples.setdefault(number, _BatchSample())
        sample.tokens.append(tokens)
        sample.sequences.append(sequences)
        sample.token_count += len(tokens["sequence"])
        sample.sequence_count += count
        sample.keep_sequences(self._sequences_per_batch)
        sample.keep_tokens(self._tokens_per_batch)
        self._apply_limits(number)

    def _apply_limits(self, newest: int) -> None:
        """Halve the sample of each batch, or drop every second batch, until `SEQUENCES` and `TOKENS` are met.

        Args:
            newest: Number of the batch that is being added to, which is never dropped.
        """
        while sum(sample.sequence_count for sample in self._samples.values()) > SEQUENCES:
            if self._sequences_per_batch == 1:
                self._drop_batches(newest)
            self._sequences_per_batch = max(1, self._sequences_per_batch // 2)
            for sample in self._samples.values():
                sample.keep_sequences(self._sequences_per_batch)
        while sum(sample.token_count for sample in self._samples.values()) > TOKENS:
            if self._tokens_per_batch <= FEWEST_TOKENS:
                self._drop_batches(newest)
            self._tokens_per_batch = max(FEWEST_TOKENS, self._tokens_per_batch // 2)
            for sample in self._samples.values():
                sample.keep_tokens(self._tokens_per_batch)

    def _drop_batches(self, newest: int) -> None:
        """Double the stride of the kept batches, and drop the others except the newest."""
        self._batch_stride *= 2
        self._samples = {
            number: sample
            for number, sample in self._samples.items()
            if self._batch_index[number] % self._batch_stride == 0 or number == newest
        }

    def _correct_before_updates(self, first_pass: FirstPass, distance: Floats) -> Flags:
        """Return `FirstPass.before_updates`, corrected for runs that record neither batches nor updates.

        If each loss has a step of its own, each looks like the first loss of a batch. In fact several losses may share
        a batch, and all but the first of these follow an update on it.

        Args:
            first_pass: The first pass, not corrected.
            distance: Mean abs log-ratio (nats) of each sequence in its first loss, (sequences,).
        """
        before_updates = first_pass.before_updates
        every_loss_is_first = self._losses_without_update == len(self._first_step)
        if not every_loss_is_first or self._losses_without_update <= 1:
            return before_updates

        # Before an update the ratio is 1. This is no evidence if the old log-probabilities are the engine's, since
        # these differ from the trainer's anyway, unless the run uses them as the anchor on purpose.
        near = distance <= ROUNDING_DISTANCE
        is_evidence = first_pass.anchored_at_rollout or not first_pass.logp_old_is_rollout
        if near.any() and is_evidence:
            return before_updates & near

        # If most sequences are not repeated, the run makes a single pass over its data. Only its first loss certainly
        # comes before any update.
        if 2 * self._repeated_sequences < self._recorded_sequences:
            return before_updates & (first_pass.batch == first_pass.batch[0])
        return before_updates


class _AdvantageSlopeCollector:
    """A collector of the slope of the change of log-probabilities over advantages, for each loss of an update.

    An update raises the log-probabilities of sequences with an advantage above 0 and lowers those of the others. If the
    gradient of one loss is lost, its sequences move only as an effect of the other losses.
    """

    def __init__(self) -> None:
        self._results: list[AdvantageSlopes] = []
        # The file and the generated batch of the losses that are being added.
        self._source: tuple[str, int] | None = None
        self._clear()

    def _clear(self) -> None:
        """Forget the sequences of the batch."""
        self._update = -1
        # Index of the loss in its update.
        self._loss = 0
        # For each sequence its last occurrence: the update, the index of the loss in it, and the sum of A·log π over
        # the tokens. The index is None if several losses of the update contain equal sequences.
        self._last_occurrence: dict[int, tuple[int, int | None, float]] = {}
        # For each update and each loss in it, the sums of A·Δlog π and of A².
        self._sums: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, batch: LossBatch, keys: Sequence[int], number: int) -> None:
        """Add the next loss.

        Args:
            batch: The loss.
            keys: A hash of each of its sequences, (batch,).
            number: Number of the generated batch.
        """
        if batch.update is None or not batch.has_logp:
            return
        file, _, _ = batch.location.rpartition(" ")
        source = (file, number)
        if source != self._source or batch.update < self._update:
            self._finish_batch()
            self._source = source
        if batch.update != self._update:
            self._update = batch.update
            self._loss = 0
        else:
            self._loss += 1

        # Sums over the tokens of each sequence: A·log π and A².
        advantages = np.where(batch.mask, batch.advantages, 0.0)
        logp = np.where(batch.mask, batch.logp, 0.0)
        products = (advantages * logp).sum(1, dtype=np.float64).tolist()
        squares = np.square(advantages).sum(1, dtype=np.float64).tolist()
        for key, product, square in zip(keys, products, squares, strict=True):
            if square:
                self._add_sequence(key, product, square)

    def _add_sequence(self, key: int, product: float, square: float) -> None:
        """Add a sequence of the current loss.

        Args:
            key: Its hash.
            product: The sum of A·log π over its tokens.
            square: The sum of A² over its tokens.
        """
        loss: int | None = self._loss
        occurrence = self._last_occurrence.get(key)
        if occurrence is not None:
            last_update, last_loss, last_product = occurrence
            if last_update == self._update:
                if last_loss != loss:
                    loss = None
            elif last_loss is not None:
                change, total_square = self._sums.get((last_update, last_loss), (0.0, 0.0))
                self._sums[last_update, last_loss] = (change + product - last_product, total_square + square)
        self._last_occurrence[key] = (self._update, loss, product)

    def _finish_batch(self) -> None:
        """Add the slopes of the batch to the result, and forget its sequences."""
        # The sums of A·Δlog π and of A² over all updates, for each loss of an update: (losses, 2).
        losses = 1 + max((loss for _, loss in self._sums), default=0)
        sums = np.zeros((losses, 2))
        for (_, loss), sums_of_loss in self._sums.items():
            sums[loss] += sums_of_loss
        if losses > 1 and sums[:, 1].all():
            slopes = sums[:, 0] / sums[:, 1]
            other_sums = sums[:-1].sum(0)
            batch_slopes = AdvantageSlopes(
                last_loss=float(slopes[-1]),
                other_losses=float(other_sums[0] / other_sums[1]),
                is_lowest=bool(slopes[-1] < slopes[:-1].min()),
                losses=losses,
            )
            self._results.append(batch_slopes)
        self._clear()

    def result(self) -> list[AdvantageSlopes]:
        """Return the slopes of each batch."""
        self._finish_batch()
        self._source = None
        return self._results


def _token_columns(batch: LossBatch, new: Flags) -> dict[str, NDArray[Any]]:
    """Return the columns of `FirstPass` with one value per token, for the new sequences of a loss.

    Args:
        batch: The loss.
        new: True for the sequences to return, (batch,).
    """
    mask = batch.mask[new]
    lengths = mask.sum(1)
    position = mask.cumsum(1) - 1
    remaining = lengths[:, None] - 1 - position

    columns: dict[str, NDArray[Any]] = {
        "position": position[mask].astype(np.int32),
        "remaining": remaining[mask].astype(np.int32),
        "sequence": np.repeat(np.arange(len(lengths)), lengths),
    }
    recorded = {
        "logp": batch.logp if batch.has_logp else None,
        "logp_old": batch.logp_old,
        "logp_rollout": batch.logp_rollout,
        "entropy": batch.entropy,
        "lag": batch.lag,
    }
    for name, values in recorded.items():
        if values is None:
            columns[name] = np.full(int(lengths.sum()), math.nan, np.float32)
        else:
            columns[name] = values[new][mask].astype(np.float32)

    # The entropy of masked logits may be NaN, since it contains 0 · log 0. Such a value counts as not recorded.
    entropy = columns["entropy"]
    columns["entropy"] = np.where(np.isfinite(entropy), entropy, math.nan)
    return columns


def _sequence_advantages(advantages: NDArray[Any], mask: Flags) -> Floats:
    """Return the advantage of each sequence, (batch,); NaN if its tokens have different ones."""
    first_token = mask.argmax(1)[:, None]
    first_advantage = np.take_along_axis(advantages, first_token, axis=1)
    uniform = ((advantages == first_advantage) | ~mask).all(1)
    return np.where(uniform, first_advantage[:, 0].astype(np.float64), math.nan)


def _recorded(values: NDArray[Any] | None, new: Flags) -> Floats:
    """Return the values of the new sequences, (new,); NaN if they were not recorded."""
    if values is None:
        return np.full(int(new.sum()), math.nan)
    return values[new].astype(np.float64)


def _answer_ids(batch: LossBatch, new: Flags) -> list[int | None]:
    """Return a hash of the counted token ids of each new sequence; None if these were not recorded."""
    mask = batch.mask[new]
    if batch.token is None:
        return [None] * len(mask)
    rows = zip(batch.token[new], mask, strict=True)
    return [hash(token[counted].tobytes()) for token, counted in rows]


def _concatenated(chunks: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Concatenate the columns of chunks; return no columns if there are no chunks."""
    if not chunks:
        return {}
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def _widened(values: NDArray[Any]) -> NDArray[Any]:
    """Convert floats and integers to 64 bits; leave flags as they are."""
    widths = {"f": np.float64, "i": np.int64}
    return values.astype(widths.get(values.dtype.kind, values.dtype))


def _scrambled(numbers: NDArray[Any]) -> NDArray[np.uint64]:
    """Map whole numbers to pseudo-random ones, by multiplication with an odd constant modulo 2**64."""
    return numbers.astype(np.int64).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def _mean_distance(log_ratio: NDArray[Any]) -> float:
    """Compute the mean abs log-ratio (nats)."""
    return float(np.abs(log_ratio).mean(dtype=np.float64))


def _mean_of_recorded(values: Floats) -> float:
    """Compute the mean of the values that are not NaN; NaN if there are none."""
    recorded = values[~np.isnan(values)]
    return float(recorded.mean()) if len(recorded) else math.nan


def _means_of_recorded(values: Floats, index: Integers, count: int) -> Floats:
    """Compute the mean of each group of values, leaving out NaN.

    Args:
        values: The values, (n,).
        index: Index of each value's group, (n,).
        count: Number of groups.

    Returns:
        One mean per group, NaN if its values are all NaN, (count,).
    """
    recorded = ~np.isnan(values)
    counts = np.bincount(index[recorded], minlength=count)
    sums = np.bincount(index[recorded], weights=values[recorded], minlength=count)
    means = np.full(count, math.nan)
    return np.divide(sums, counts, out=means, where=counts > 0)
