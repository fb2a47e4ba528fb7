"""The tokens of every sequence when it was first recorded: the data of the token checks.

A trainer passes over a generated batch several times. Before the first update on it, the policy in training is the one
that the ratio refers to, so that faults in the log-probabilities show. `FirstPass` therefore holds every sequence once.
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

from bandpo.doctor.findings import Coverage
from bandpo.doctor.recorded_advantages import sequence_keys
from bandpo.runs.record import LossBatch

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

TOKENS = 2**20
"""Number of tokens that a `FirstPass` holds at most. If a record has more, each batch gets an equal part of them."""

SEQUENCES = 2**18
"""Number of sequences that a `FirstPass` holds at most, in equal parts of whole groups."""

FEWEST_TOKENS = 1024
"""Number of tokens of a batch below which batches are left out instead, all but the first, the last and each n-th."""

WINDOWS = 16
"""Number of sequences that a batch's part comes from at least: of longer ones, the start, the middle and the end."""

REMEMBERED = 2**18
"""Number of sequences among which a repeated one is recognised: the last that were recorded."""

NEW_SHARE = 0.1
"""Share of new sequences above which a loss is of the first pass over its batch, with answers that are equal."""

ROUNDING_DISTANCE = 0.02
"""Mean abs log-ratio (nats) between passes of one policy with different kernels; bfloat16 gives up to half of it."""

FEWEST_SHIFTED = 20
"""Tokens below which nothing is said of whether a column is shifted."""

SHIFTS = (-2, -1, 1, 2)
"""Numbers of tokens by which two columns of log-probabilities are moved against each other."""

NEGLIGIBLE_VARIANCE = 1e-9
"""Variance (nats²) up to which a column is constant, so that no line is fitted to it."""


def _no_values() -> Floats:
    return np.zeros(0)


def _no_numbers() -> Integers:
    return np.zeros(0, np.int64)


def _no_flags() -> Flags:
    return np.zeros(0, np.bool_)


@dataclass(frozen=True, eq=False)
class FirstPass:
    """The tokens of every sequence when it was first recorded.

    The tokens of all sequences stand one after the other in arrays of shape (tokens,); values of whole sequences are
    arrays of shape (sequences,). NaN stands for a value that was not recorded.
    """

    logp: Floats = field(default_factory=_no_values)
    """Log-probabilities (nats) under the policy in training, (tokens,)."""
    logp_old: Floats = field(default_factory=_no_values)
    """Log-probabilities (nats) under the policy that the ratio refers to, (tokens,)."""
    logp_rollout: Floats = field(default_factory=_no_values)
    """Log-probabilities (nats) of the engine that sampled, (tokens,)."""
    entropy: Floats = field(default_factory=_no_values)
    """Entropy (nats) of the policy at each token, (tokens,)."""
    lag: Floats = field(default_factory=_no_values)
    """Age of the weights that drew each token, in versions, (tokens,)."""
    position: Integers = field(default_factory=_no_numbers)
    """Number of counted tokens before each token in its sequence, (tokens,)."""
    remaining: Integers = field(default_factory=_no_numbers)
    """Number of counted tokens after each token in its sequence, (tokens,)."""
    sequence: Integers = field(default_factory=_no_numbers)
    """Index of each token's sequence, ascending, (tokens,)."""
    before_updates: Flags = field(default_factory=_no_flags)
    """Whether no update had been made on the sequence's batch, (sequences,)."""
    batch: Integers = field(default_factory=_no_numbers)
    """Number of the sequence's batch, (sequences,)."""
    advantage: Floats = field(default_factory=_no_values)
    """Advantage of each sequence, NaN if its tokens have different ones, (sequences,)."""
    group: Floats = field(default_factory=_no_values)
    """Number of each sequence's prompt, (sequences,)."""
    reward: Floats = field(default_factory=_no_values)
    """Reward of each sequence, (sequences,)."""
    truncated: Floats = field(default_factory=_no_values)
    """1 for a sequence that was cut off, else 0, (sequences,)."""
    answer_ids: Sequence[int | None] = ()
    """A number per sequence that is the same for the same tokens; None if the tokens were not recorded."""
    bad_sequences: int = 0
    """Number of sequences that were left out because of NaN, infinity or a log-probability above 0."""
    anchored_at_rollout: bool = False
    """Whether the run's bounds surround the engine's log-probabilities."""
    last_distance: Mapping[int, float] = field(default_factory=dict)
    """Mean abs log-ratio (nats) of each batch's last loss, by the number of the batch."""
    movement: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """Mean abs log-ratio (nats) of each batch after each number of updates on it. Where these numbers were not
    recorded, 1 stands for a loss whose sequences all come again."""
    followed: Sequence[Followed] = ()
    """How far log-probabilities followed their advantages, for each batch whose updates consist of several losses."""
    repeats_sequences: bool = False
    """Whether losses after an update hold sequences of losses before it, with the same old log-probabilities."""
    first_step: Mapping[int, int] = field(default_factory=dict)
    """Step of each batch's first loss, by the number of the batch."""
    coverage: Coverage = field(default_factory=Coverage)
    """The part of the record that the tokens come from."""

    @classmethod
    def of(cls, batches: Iterable[LossBatch]) -> FirstPass:
        """Return the first pass over the losses of a record."""
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
        """Whether the old log-probabilities are the engine's."""
        recorded = ~np.isnan(self.logp_rollout)
        equal = np.array_equal(self.logp_old[recorded], self.logp_rollout[recorded])
        return bool(recorded.any()) and equal

    @cached_property
    def tokens_before_updates(self) -> Flags:
        """Tokens of batches on which no update had been made, (tokens,)."""
        return self.before_updates[self.sequence]

    @cached_property
    def excess_surprisal(self) -> Floats:
        """Surprisal less entropy (nats), (tokens,); 0 where the entropy was not recorded.

        Its mean is 0 if tokens are drawn from the policy.
        """
        logp = np.where(np.isnan(self.logp), self.logp_old, self.logp)
        excess = -logp - self.entropy
        return np.where(np.isnan(excess), 0.0, excess)

    def batch_means(self, values: Floats, where: Flags) -> Floats:
        """Compute the mean of values per batch.

        Args:
            values: One value per token, (tokens,).
            where: Tokens to average, (tokens,).

        Returns:
            One mean for each batch with such tokens, in the order of the batches' numbers.
        """
        _, batch_index = np.unique(self.batch, return_inverse=True)
        of_tokens = batch_index[self.sequence[where]]
        counts = np.bincount(of_tokens)
        sums = np.bincount(of_tokens, weights=values[where])
        not_empty = counts > 0
        return sums[not_empty] / counts[not_empty]

    def mean_and_z(self, values: Floats, where: Flags) -> tuple[float, float]:
        """Compute the mean of values, and its distance from 0 in standard errors.

        Sequences are independent, the tokens of one are not: the standard error is that of sums per sequence.

        Args:
            values: One value per token, (tokens,).
            where: Tokens to average, (tokens,).
        """
        sums = np.bincount(self.sequence[where], weights=values[where], minlength=len(self.batch))
        total = float(sums.sum())
        spread = math.sqrt(float(np.square(sums).sum()))
        count = int(where.sum())
        mean = total / max(1, count)
        z = total / spread if spread else 0.0
        return mean, z

    def best_shift(self, first: Floats, second: Floats, where: Flags) -> tuple[int, float, float]:
        """Find the shift of a column by some tokens at which it is nearest to another.

        Args:
            first: The column that stays in place, (tokens,).
            second: The column to shift, (tokens,).
            where: Tokens of the first column to compare, (tokens,).

        Returns:
            The shift, the mean abs difference there, and that of the same tokens without a shift. A shift at which few
            tokens can be compared is left out.
        """
        unshifted = np.abs(first - second)
        distances = {0: _mean_of_recorded(unshifted[where])}
        of_same_tokens = dict(distances)
        for shift in SHIFTS:
            neighbours = self.neighbours(shift, where)
            if int(neighbours.sum()) >= FEWEST_SHIFTED:
                difference = np.abs(first - np.roll(second, -shift))
                distances[shift] = _mean_of_recorded(difference[neighbours])
                of_same_tokens[shift] = _mean_of_recorded(unshifted[neighbours])
        best = min(distances, key=lambda shift: distances[shift])
        return best, distances[best], of_same_tokens[best]

    def neighbours(self, shift: int, where: Flags) -> Flags:
        """Return the tokens that have another one so many places on, in their sequence and with none left out between,
        (tokens,).

        Args:
            shift: The number of places.
            where: Tokens to look at, (tokens,).
        """
        neighbours = (self.sequence == np.roll(self.sequence, -shift)) & where
        return neighbours & (np.roll(self.position, -shift) - self.position == shift)

    def shows_shifts(self, where: Flags) -> bool:
        """Return whether enough tokens have neighbours for `best_shift` to find a column that is shifted by one.

        Args:
            where: Tokens to look at, (tokens,).
        """
        return all(int(self.neighbours(shift, where).sum()) >= FEWEST_SHIFTED for shift in (-1, 1))

    def fit_temperature(self, first: Floats, second: Floats, where: Flags) -> tuple[float, float]:
        """Fit a quotient of temperatures to two columns of log-probabilities.

        ``first − second`` is regressed on ``second + entropy``. If both columns come from the same logits at two
        temperatures, the slope is the quotient of the temperatures, minus 1.

        Args:
            first: Log-probabilities (nats), (tokens,).
            second: Log-probabilities (nats) at the other temperature, (tokens,).
            where: Tokens to use, (tokens,).

        Returns:
            The slope and R²; both 0 if there are fewer than three tokens, or if either side is constant.
        """
        complete = where & ~np.isnan(first + second + self.entropy)
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
        """Return one row per batch, under the names that `bandpo.runs.logs` gives to the metrics of a log.

        A row holds the step, the mean reward (``reward``), the mean entropy before updates (``entropy``), the share of
        sequences cut off (``cut``) and the mean abs log-ratio at the batch's last loss (``moved``), as far as they were
        recorded.
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


class Followed(NamedTuple):
    """How far log-probabilities followed their advantages from one look at a sequence to the next, in one batch."""

    last: float
    """Those of the last loss of each update, in nats per unit of advantage."""
    others: float
    """Those of the other losses."""
    is_lowest: bool
    """Whether those of each other loss followed farther than those of the last."""
    losses: int
    """Losses of an update."""


@dataclass
class _BatchSample:
    """The sequences and tokens that are kept of one batch, in chunks of one loss each."""

    tokens: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    sequences: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    token_count: int = 0
    sequence_count: int = 0

    def keep_tokens(self, limit: int) -> None:
        """Leave out tokens above a limit: first the middle parts of long sequences, then whole sequences."""
        if self.token_count <= limit:
            return
        tokens = _concatenated(self.tokens)
        window = max(FEWEST_TOKENS // WINDOWS, limit // WINDOWS)
        length = tokens["position"] + tokens["remaining"] + 1
        from_middle = np.abs(tokens["position"] - length // 2)
        in_window = np.minimum(tokens["position"], tokens["remaining"]) < window // 4
        in_window |= from_middle < window // 4
        tokens = {name: values[in_window] for name, values in tokens.items()}

        # Whole sequences in an order that looks random, and is the same at each call.
        ids, index, counts = np.unique(tokens["sequence"], return_inverse=True, return_counts=True)
        order = np.argsort(_scrambled(ids))
        kept = np.zeros(len(ids), np.bool_)
        kept[order] = counts[order].cumsum() <= limit
        self.tokens = [{name: values[kept[index]] for name, values in tokens.items()}]
        self.token_count = int(counts[kept].sum())

    def keep_sequences(self, limit: int) -> None:
        """Leave out sequences above a limit, whole groups of them, with their tokens."""
        if self.sequence_count <= limit:
            return
        sequences = _concatenated(self.sequences)
        group = np.where(np.isnan(sequences["group"]), -1.0 - sequences["id"], sequences["group"])
        groups, index, counts = np.unique(group, return_inverse=True, return_counts=True)
        order = np.argsort(_scrambled(groups))
        before = counts[order].cumsum() - counts[order]
        kept = np.zeros(len(groups), np.bool_)
        kept[order] = before < limit
        sequences = {name: values[kept[index]] for name, values in sequences.items()}
        tokens = _concatenated(self.tokens)
        has_sequence = np.isin(tokens["sequence"], sequences["id"])
        self.sequences = [sequences]
        self.sequence_count = len(sequences["id"])
        self.tokens = [{name: values[has_sequence] for name, values in tokens.items()}]
        self.token_count = int(has_sequence.sum())


class FirstPassCollector:
    """Collector of the first pass over a record, loss by loss, in bounded memory.

    >>> collector = FirstPass.collector()
    >>> collector.result().coverage
    Coverage(tokens=0, total_tokens=0, batches=0, total_batches=0)
    """

    def __init__(self) -> None:
        """Create a collector that holds no loss yet."""
        self._samples: dict[int, _BatchSample] = {}
        self._tokens_per_batch = TOKENS
        self._sequences_per_batch = SEQUENCES
        self._every = 1
        self._next_id = 0

        # The last sequences that were recorded, by the hash of their values, the oldest first: for each the batch and
        # the update (−1 if that is not known) at which it was first recorded.
        self._sequence_hashes: dict[int, tuple[int, int]] = {}
        self._recorded_sequences = 0
        self._repeated_sequences = 0
        self._repeats_after_update = False

        # Batches by number, in the order in which they first appear.
        self._order: dict[int, int] = {}
        self._first_step: dict[int, int] = {}
        self._last_distance: dict[int, float] = {}
        self._movement: defaultdict[int, dict[int, tuple[float, int]]] = defaultdict(dict)

        self._looks = _Looks()

        # The whole record.
        self._losses = 0
        self._new_tokens = 0
        self._losses_without_update = 0
        self._bad_sequences = 0
        self._anchored_at_rollout = False

    def add(self, batch: LossBatch) -> None:
        """Add the next loss of the record."""
        step = self._losses if batch.step is None else batch.step
        self._losses += 1
        number = _batch_number(batch, step)
        if batch.update is None:
            before_updates = number not in self._first_step
            self._losses_without_update += 1
        else:
            before_updates = batch.update == 0

        self._order.setdefault(number, len(self._order))
        self._first_step.setdefault(number, step)
        self._bad_sequences += batch.bad_sequences
        self._anchored_at_rollout = batch.anchor == "rollout"

        keys = sequence_keys(batch)
        new = self._find_new_sequences(batch, keys, number)
        self._looks.add(batch, keys, number)
        if batch.has_logp and batch.mask.any():
            self._add_distance(batch, number, comes_again=not new.any())
        if new.any():
            self._new_tokens += int(batch.mask[new].sum())
            self._store(batch, new, number, before_updates)

    def result(self) -> FirstPass:
        """Return the first pass over the losses that were added so far."""
        samples = [self._samples[number] for number in sorted(self._samples, key=self._order.__getitem__)]
        tokens = _concatenated([chunk for sample in samples for chunk in sample.tokens])
        sequences = _concatenated([chunk for sample in samples for chunk in sample.sequences])
        if sequences:
            # Sequences in the order of the record, whose ids become their indices.
            order = np.argsort(sequences["id"])
            sequences = {name: values[order] for name, values in sequences.items()}
            token_order = np.argsort(tokens["sequence"], kind="stable")
            tokens = {name: values[token_order] for name, values in tokens.items()}
            tokens["sequence"] = np.searchsorted(sequences.pop("id"), tokens["sequence"])
        columns = {name: _widened(values) for name, values in (tokens | sequences).items()}
        distance = columns.pop("distance", _no_values())
        answers = columns.pop("answer", _no_numbers())
        has_answer = columns.pop("has_answer", _no_flags())
        first_pass = FirstPass(
            **columns,
            answer_ids=tuple(int(a) if known else None for a, known in zip(answers, has_answer, strict=True)),
            bad_sequences=self._bad_sequences,
            anchored_at_rollout=self._anchored_at_rollout,
            last_distance=dict(self._last_distance),
            movement=self._mean_movement(),
            followed=self._looks.result(),
            repeats_sequences=self._repeats_after_update,
            first_step=dict(self._first_step),
            coverage=Coverage(
                tokens=sum(sample.token_count for sample in samples),
                total_tokens=self._new_tokens,
                batches=sum(sample.token_count > 0 for sample in samples),
                total_batches=len(self._order),
            ),
        )
        return replace(first_pass, before_updates=self._correct_before_updates(first_pass, distance))

    def _add_distance(self, batch: LossBatch, number: int, *, comes_again: bool) -> None:
        """Add what the policy has moved by at a loss.

        Args:
            batch: The loss.
            number: Number of the generated batch.
            comes_again: Whether earlier losses held all of its sequences.
        """
        log_ratio = batch.log_ratio[batch.mask]
        distance = _mean_distance(log_ratio)
        self._last_distance[number] = distance
        # Without a number, sequences that come again come after an update.
        update = int(comes_again) if batch.update is None else batch.update
        total, count = self._movement[number].get(update, (0.0, 0))
        self._movement[number][update] = (total + distance * len(log_ratio), count + len(log_ratio))

    def _mean_movement(self) -> dict[int, dict[int, float]]:
        return {
            number: {update: total / count for update, (total, count) in sorted(updates.items())}
            for number, updates in self._movement.items()
        }

    def _find_new_sequences(self, batch: LossBatch, keys: Sequence[int], number: int) -> Flags:
        """Return which sequences have tokens and were in no earlier pass, (batch,), and remember them.

        Args:
            batch: The loss.
            keys: A number for each of its sequences, (batch,).
            number: Number of the generated batch.
        """
        not_empty = batch.mask.any(1)
        of_earlier = [self._sequence_hashes.get(key) for key in keys]
        unknown = np.array([earlier is None for earlier in of_earlier], np.bool_)
        # Answers of one pass over a batch may be equal. Those of one update are no repetition, and neither are those of
        # a loss that holds new sequences of the same batch, more than damaged rows would explain.
        update = -1 if batch.update is None else batch.update
        has_new = int((unknown & not_empty).sum()) > NEW_SHARE * int(not_empty.sum())
        same_pass = [
            earlier is not None and earlier[0] == number and (has_new or 0 <= update == earlier[1])
            for earlier in of_earlier
        ]
        is_new = unknown | np.array(same_pass, np.bool_)
        for key in keys:
            self._sequence_hashes.setdefault(key, (number, update))
        while len(self._sequence_hashes) > REMEMBERED:
            del self._sequence_hashes[next(iter(self._sequence_hashes))]
        repeated = int((not_empty & ~is_new).sum())
        self._recorded_sequences += int(not_empty.sum())
        self._repeated_sequences += repeated
        self._repeats_after_update |= batch.update != 0 and repeated > 0
        return not_empty & is_new

    def _store(self, batch: LossBatch, new: Flags, number: int, before_updates: bool) -> None:
        """Store the columns of a loss's new sequences, and keep to the budget.

        Args:
            batch: The loss.
            new: Its sequences to store, (batch,).
            number: Number of the generated batch.
            before_updates: Whether no update had been made on that batch.
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
        self._keep_to_budget(number)

    def _keep_to_budget(self, newest: int) -> None:
        """Halve the part of each batch, or leave out every second batch, until all fit.

        Args:
            newest: Number of the batch that is being added to, which is never left out.
        """
        while sum(sample.sequence_count for sample in self._samples.values()) > SEQUENCES:
            if self._sequences_per_batch == 1:
                self._leave_out_batches(newest)
            self._sequences_per_batch = max(1, self._sequences_per_batch // 2)
            for sample in self._samples.values():
                sample.keep_sequences(self._sequences_per_batch)
        while sum(sample.token_count for sample in self._samples.values()) > TOKENS:
            if self._tokens_per_batch <= FEWEST_TOKENS:
                self._leave_out_batches(newest)
            self._tokens_per_batch = max(FEWEST_TOKENS, self._tokens_per_batch // 2)
            for sample in self._samples.values():
                sample.keep_tokens(self._tokens_per_batch)

    def _leave_out_batches(self, newest: int) -> None:
        self._every *= 2
        self._samples = {
            number: sample
            for number, sample in self._samples.items()
            if self._order[number] % self._every == 0 or number == newest
        }

    def _correct_before_updates(self, first_pass: FirstPass, distance: Floats) -> Flags:
        """Return `FirstPass.before_updates` for runs that record neither batches nor updates.

        If each loss has a step of its own, each looks like the first on a batch. Yet several may share a batch, and all
        but the first of these follow an update on it.

        Args:
            first_pass: The first pass, in which every loss is the first on a batch.
            distance: Mean abs log-ratio (nats) of each sequence's first loss, (sequences,).
        """
        before_updates = first_pass.before_updates
        every_loss_is_first = self._losses_without_update == len(self._first_step)
        if not every_loss_is_first or self._losses_without_update <= 1:
            return before_updates

        # Losses before an update have a ratio of 1. Of an engine's log-probabilities, the distance tells nothing unless
        # the run refers to them on purpose.
        near = distance <= ROUNDING_DISTANCE
        distance_tells = first_pass.anchored_at_rollout or not first_pass.logp_old_is_rollout
        if near.any() and distance_tells:
            return before_updates & near

        # A single pass over the data, in which some sequences are equal by chance: only the first loss is safe.
        if 2 * self._repeated_sequences < self._recorded_sequences:
            return before_updates & (first_pass.batch == first_pass.batch[0])
        return before_updates


class _Looks:
    """How far log-probabilities follow their advantages between the looks at a sequence, by the place of its loss.

    An update raises the log-probabilities of sequences with an advantage above 0 and lowers the others'. Where the
    gradient of a loss is lost, its sequences move with the others' alone.
    """

    def __init__(self) -> None:
        self._followed: list[Followed] = []
        self._place: tuple[str, int] | None = None
        self._clear()

    def _clear(self) -> None:
        self._update = -1
        self._slot = 0
        # For each sequence its last look: the update, the loss in it, and the sum of A·log π over its tokens. The loss
        # is None where equal sequences stand in several.
        self._last_look: dict[int, tuple[int, int | None, float]] = {}
        # For each update and loss in it the sums of A·Δlog π and of A².
        self._sums: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, batch: LossBatch, keys: Sequence[int], number: int) -> None:
        """Add the next loss.

        Args:
            batch: The loss.
            keys: A number for each of its sequences, (batch,).
            number: Number of the generated batch.
        """
        if batch.update is None or not batch.has_logp:
            return
        place = batch.location.rpartition(" ")[0], number
        if place != self._place or batch.update < self._update:
            self._finish_batch()
            self._place = place
        if batch.update != self._update:
            self._update = batch.update
            self._slot = 0
        else:
            self._slot += 1
        advantages = np.where(batch.mask, batch.advantages, 0.0)
        products = (advantages * np.where(batch.mask, batch.logp, 0.0)).sum(1, dtype=np.float64).tolist()
        squares = np.square(advantages).sum(1, dtype=np.float64).tolist()
        for key, product, square in zip(keys, products, squares, strict=True):
            if not square:
                continue
            slot: int | None = self._slot
            earlier = self._last_look.get(key)
            if earlier is not None:
                update, earlier_slot, earlier_product = earlier
                if update == self._update:
                    slot = slot if earlier_slot == slot else None
                elif earlier_slot is not None:
                    gain, energy = self._sums.get((update, earlier_slot), (0.0, 0.0))
                    self._sums[update, earlier_slot] = gain + product - earlier_product, energy + square
            self._last_look[key] = self._update, slot, product

    def _finish_batch(self) -> None:
        """Add what the batch shows to the result, and forget its sequences."""
        losses = 1 + max((slot for _, slot in self._sums), default=0)
        sums = np.zeros((losses, 2))
        for (_, slot), of_loss in self._sums.items():
            sums[slot] += of_loss
        if losses > 1 and sums[:, 1].all():
            slopes = sums[:, 0] / sums[:, 1]
            others = sums[:-1].sum(0)
            is_lowest = bool(slopes[-1] < slopes[:-1].min())
            followed = Followed(float(slopes[-1]), float(others[0] / others[1]), is_lowest, losses)
            self._followed.append(followed)
        self._clear()

    def result(self) -> list[Followed]:
        """Return how far the sequences of each batch followed."""
        self._finish_batch()
        self._place = None
        return self._followed


def _batch_number(batch: LossBatch, step: int) -> int:
    """Return the number of the generated batch that a loss belongs to."""
    if batch.generation is not None:
        return batch.generation
    if batch.update is None and batch.lag is not None and batch.mask.any():
        return step - int(batch.lag[batch.mask].min())  # the newest version that drew its tokens
    return step


def _token_columns(batch: LossBatch, new: Flags) -> dict[str, NDArray[Any]]:
    """Return the columns of `FirstPass` that have one value per token, for some sequences of a loss."""
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

    # 0 · log 0 of a masked vocabulary gives no finite entropy; such a value counts as not recorded.
    entropy = columns["entropy"]
    columns["entropy"] = np.where(np.isfinite(entropy), entropy, math.nan)
    return columns


def _sequence_advantages(advantages: NDArray[Any], mask: Flags) -> Floats:
    """Return the advantage of each sequence, (batch,); NaN if its tokens have different ones."""
    first_token = mask.argmax(1)[:, None]
    of_first_token = np.take_along_axis(advantages, first_token, axis=1)
    uniform = ((advantages == of_first_token) | ~mask).all(1)
    return np.where(uniform, of_first_token[:, 0].astype(np.float64), math.nan)


def _recorded(values: NDArray[Any] | None, new: Flags) -> Floats:
    """Return the values of some sequences, (batch,); NaN if they were not recorded."""
    if values is None:
        return np.full(int(new.sum()), math.nan)
    return values[new].astype(np.float64)


def _answer_ids(batch: LossBatch, new: Flags) -> list[int | None]:
    """Return a number for each sequence that is the same for the same tokens; None if they were not recorded."""
    mask = batch.mask[new]
    if batch.token is None:
        return [None] * len(mask)
    rows = zip(batch.token[new], mask, strict=True)
    return [hash(token[counted].tobytes()) for token, counted in rows]


def _concatenated(chunks: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Return the columns of chunks, one after the other; no columns without chunks."""
    if not chunks:
        return {}
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def _widened(values: NDArray[Any]) -> NDArray[Any]:
    """Return values in 64 bits; flags as they are."""
    widths = {"f": np.float64, "i": np.int64}
    return values.astype(widths.get(values.dtype.kind, values.dtype))


def _scrambled(numbers: NDArray[Any]) -> NDArray[np.uint64]:
    """Return numbers that order whole numbers as if at random, the same ones always alike."""
    return numbers.astype(np.int64).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def _mean_distance(log_ratio: NDArray[Any]) -> float:
    """Compute the mean abs log-ratio (nats)."""
    return float(np.abs(log_ratio).mean(dtype=np.float64))


def _mean_of_recorded(values: Floats) -> float:
    """Compute the mean of the values that are not NaN; NaN if there are none."""
    recorded = values[~np.isnan(values)]
    return float(recorded.mean()) if len(recorded) else math.nan


def _means_of_recorded(values: Floats, index: Integers, count: int) -> Floats:
    """Compute the means of groups of values, leaving out NaN.

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
