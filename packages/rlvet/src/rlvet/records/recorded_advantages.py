"""The data of the checks of advantages: rewards, advantages and masks of a record, one row per sequence.

A trainer passes over a generated batch several times, with the same advantages. `AdvantageCollector` keeps the first
pass over each batch, and only a few numbers of each sequence, so that a run fits in memory.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvet.checks.course import Examination
from rlvet.records.format import FILE_NAME
from rlvet.records.record import LossBatch

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

SEQUENCES = 2**19
"""Number of sequences above which every second batch is dropped. This bounds the memory and still covers the run."""

LARGEST_ID = 2**22
"""Token id above which ids are not counted, since no vocabulary is that large."""

NO_TOKEN = -1
"""The value of a token id, or of an answer, that is not known."""


def _no_values() -> Floats:
    return np.zeros(0)


def _no_numbers() -> Integers:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class RecordedAdvantages:
    """Rewards, advantages and masks of the sequences of a record, from the first pass over each batch.

    Arrays have the shape (sequences,) unless another is given. NaN marks a value that was not recorded. A counted token
    is one whose mask is 1.
    """

    batch: Integers = field(default_factory=_no_numbers)
    """Number of the sequence's generated batch."""
    step: Integers = field(default_factory=_no_numbers)
    """Step of the first loss of that batch."""
    process: Integers = field(default_factory=_no_numbers)
    """Number of the process that recorded the sequence."""
    row: Integers = field(default_factory=_no_numbers)
    """Index of the sequence in its batch and process."""
    advantage: Floats = field(default_factory=_no_values)
    """Advantage of the sequence: the mean over its tokens if they have different ones; NaN without a counted token."""
    uniform: Floats = field(default_factory=_no_values)
    """1 if all tokens of the sequence have the same advantage, else 0."""
    reward: Floats = field(default_factory=_no_values)
    """Reward of the sequence."""
    group: Floats = field(default_factory=_no_values)
    """Number of the group, the answers to one prompt, in its batch or in the run."""
    truncated: Floats = field(default_factory=_no_values)
    """1 if the sequence was cut off, else 0."""
    length: Integers = field(default_factory=_no_numbers)
    """Number of counted tokens."""
    answer: Integers = field(default_factory=_no_numbers)
    """A hash of the counted token ids; `NO_TOKEN` if these were not recorded."""
    first_token: Integers = field(default_factory=_no_numbers)
    """Id of the first counted token, or `NO_TOKEN`."""
    first_logp: Floats = field(default_factory=_no_values)
    """Log-probability (nats) of the first counted token under the old policy."""
    last_token: Integers = field(default_factory=_no_numbers)
    """Id of the last counted token, or `NO_TOKEN`."""
    token_counts: Integers = field(default_factory=_no_numbers)
    """For each token id, the number of counted tokens with it, (vocabulary,)."""
    end_counts: Integers = field(default_factory=_no_numbers)
    """The same for counted tokens at the end of a sequence, or directly before a gap in the mask, (vocabulary,)."""
    losses: int = 0
    """Number of losses in the record."""
    empty_losses: int = 0
    """Number of losses without a counted token. Losses with a damaged answer do not count, nor those whose answers were
    all cut off."""
    first_empty_step: int | None = None
    """Step of the first of these."""

    @classmethod
    def of(cls, batches: Iterable[LossBatch]) -> RecordedAdvantages:
        """Collect the rewards, advantages and masks of a record.

        Args:
            batches: The losses, in the order of the record.
        """
        collector = AdvantageCollector()
        for batch in batches:
            collector.add(batch)
        return collector.result()

    def select(self, sequences: Flags) -> RecordedAdvantages:
        """Return some of the sequences, without the counts over the whole record.

        Args:
            sequences: True for the sequences to return, (sequences,).
        """
        return RecordedAdvantages(**{name: getattr(self, name)[sequences] for name in SEQUENCE_COLUMNS})


class RecordCase(Examination):
    """The advantages, rewards and masks of a record under examination, and what was concluded from them.

    Args:
        recorded: Rewards, advantages and masks of the sequences.
        whole_groups: True if `recorded` has all answers to each prompt.
    """

    def __init__(self, recorded: RecordedAdvantages, *, whole_groups: bool = True):
        super().__init__()
        self.recorded = recorded
        self.whole_groups = whole_groups


SEQUENCE_COLUMNS = (
    "batch",
    "step",
    "process",
    "row",
    "advantage",
    "uniform",
    "reward",
    "group",
    "truncated",
    "length",
    "answer",
    "first_token",
    "first_logp",
    "last_token",
)
"""The attributes of `RecordedAdvantages` that have one value per sequence."""


@dataclass(eq=False)
class _Unit:
    """The losses of one update on a batch; a single loss if updates were not recorded."""

    update: int | None
    losses: list[_Loss] = field(default_factory=list)

    @property
    def keys(self) -> Counter[int]:
        """The number of occurrences of each sequence, by its key."""
        counts: Counter[int] = Counter()
        for loss in self.losses:
            counts.update(loss.keys)
        return counts

    @property
    def digest(self) -> int:
        """A number that depends only on the sequences, not on their order or their distribution among losses."""
        return sum(sum(loss.keys) for loss in self.losses) % 2**64

    @property
    def bad_sequences(self) -> int:
        """The number of sequences that were left out because of impossible values."""
        return sum(loss.bad_sequences for loss in self.losses)


@dataclass(eq=False)
class _Loss:
    """Data of a loss, held until the passes over its batch can be told apart."""

    keys: list[int]
    """The hash of each sequence with a counted token, see `sequence_keys`."""
    bad_sequences: int
    """Number of sequences that were left out because of impossible values."""
    columns: dict[str, NDArray[Any]]
    """Columns of `RecordedAdvantages`, (batch,)."""
    token_counts: tuple[Integers, Integers]
    """The distinct ids of its counted tokens, and the number of tokens with each."""
    end_counts: tuple[Integers, Integers]
    """The same for tokens at the end of a sequence, or directly before a gap in the mask."""


class AdvantageCollector:
    """Collects `RecordedAdvantages`, loss by loss, in bounded memory.

    >>> AdvantageCollector().result().losses
    0
    """

    def __init__(self) -> None:
        """Create a collector that holds no loss yet."""
        self._columns: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
        self._count = 0

        # By the number of the batch: its index in the order of the record, and the smallest step of its losses. Only
        # batches whose index is a multiple of the stride are kept.
        self._batch_index: dict[int, int] = {}
        self._first_steps: dict[int, int] = {}
        self._stride = 1

        # The number and process of the batch that is being read, the updates on it, and the number of their rows.
        self._newest: tuple[int, int] | None = None
        self._units: list[_Unit] = []
        self._unit_rows = 0

        # Number of updates in one pass over the previous batch.
        self._pass_length: int | None = None

        # Counts over the whole record.
        self._token_counts = _no_numbers()
        self._end_counts = _no_numbers()
        self._losses = 0
        self._empty_losses = 0
        self._first_empty_step: int | None = None

    def add(self, batch: LossBatch) -> None:
        """Add the next loss of the record."""
        step = self._losses if batch.step is None else batch.step
        self._losses += 1
        number = batch_number(batch, step)
        batch_index = self._batch_index.setdefault(number, len(self._batch_index))
        self._first_steps[number] = min(step, self._first_steps.get(number, step))
        self._count_empty_loss(batch, step)

        # A batch is complete when the first loss of another batch, or of another process, follows.
        process = _process_number(batch)
        if self._newest != (number, process):
            is_last = self._newest is not None and self._newest[1] != process
            self._append_first_pass(is_last=is_last)
            self._newest = (number, process)
        if batch_index % self._stride:
            return
        if batch.update is None or not self._units or batch.update != self._units[-1].update:
            self._units.append(_Unit(batch.update))
        self._units[-1].losses.append(_summarize_loss(batch))
        self._unit_rows += len(batch.mask)
        if self._unit_rows > SEQUENCES:
            self._append_first_pass(is_last=False)

    def _append_first_pass(self, *, is_last: bool) -> None:
        """Append the sequences of the first pass over the newest batch, and forget the other passes.

        Args:
            is_last: True if the batch is the last of its process, which may be cut off.
        """
        units = self._units
        self._units = []
        self._unit_rows = 0
        if not units or self._newest is None:
            return
        length = _pass_length(units, self._pass_length, is_last=is_last)
        first_pass = units[:length]
        no_pass_found = length == len(units) and length != self._pass_length
        if no_pass_found and units[0].update is None:
            # Without numbers of updates, only repeated sequences show which losses belong to a later pass.
            first_pass = _units_with_new_sequences(units)
        if not is_last:
            self._pass_length = length

        number, process = self._newest
        first_row = 0
        for unit in first_pass:
            for loss in unit.losses:
                rows = len(loss.columns["length"])
                loss.columns["batch"] = np.full(rows, number, np.int64)
                loss.columns["process"] = np.full(rows, process, np.int64)
                loss.columns["row"] = np.arange(first_row, first_row + rows)
                for name, values in loss.columns.items():
                    self._columns[name].append(values)
                self._token_counts = _add_counts(self._token_counts, *loss.token_counts)
                self._end_counts = _add_counts(self._end_counts, *loss.end_counts)
                first_row += rows
        self._count += first_row
        if self._count > SEQUENCES:
            self._drop_batches()

    def result(self) -> RecordedAdvantages:
        """Return the data of the losses that were added so far."""
        self._append_first_pass(is_last=True)
        columns = {name: np.concatenate(chunks) for name, chunks in self._columns.items()}
        if columns:
            steps = [self._first_steps[number] for number in columns["batch"].tolist()]
            columns["step"] = np.array(steps, np.int64)
        return RecordedAdvantages(
            **columns,
            token_counts=self._token_counts,
            end_counts=self._end_counts,
            losses=self._losses,
            empty_losses=self._empty_losses,
            first_empty_step=self._first_empty_step,
        )

    def _count_empty_loss(self, batch: LossBatch, step: int) -> None:
        """Count a loss without a counted token, unless its answers are damaged, or were left out as cut off."""
        if batch.mask.any() or batch.bad_sequences:
            return
        if batch.truncated is not None and bool(np.asarray(batch.truncated).all()):
            return
        self._empty_losses += 1
        if self._first_empty_step is None:
            self._first_empty_step = step

    def _drop_batches(self) -> None:
        """Drop every second of the kept batches."""
        self._stride *= 2
        columns = {name: np.concatenate(chunks) for name, chunks in self._columns.items()}
        batch_index = np.array([self._batch_index[number] for number in columns["batch"].tolist()])
        is_kept = batch_index % self._stride == 0
        self._columns.clear()
        for name, values in columns.items():
            self._columns[name].append(values[is_kept])
        self._count = int(is_kept.sum())


def _pass_length(units: Sequence[_Unit], previous_length: int | None, *, is_last: bool) -> int:
    """Find the number of updates in the first pass over a batch, from the sequences that are repeated.

    Two answers to a prompt may be equal, so a single repeated sequence does not show a second pass. A second pass
    contains every sequence as often as the first.

    Args:
        units: The updates on the batch, in their order.
        previous_length: The pass length of an earlier batch; None without one.
        is_last: True if the batch may be cut off, so that its last pass may be incomplete.

    Returns:
        The number of updates; that of all units if no repetition is found.
    """
    count = len(units)
    if previous_length is not None and is_last and _are_passes(units, previous_length, allow_partial=True):
        return min(previous_length, count)

    # Complete passes: the length divides the number of updates. Digests are compared, which is fast, unless sequences
    # are missing because of impossible values.
    digests = None
    if not any(unit.bad_sequences for unit in units):
        digests = [unit.digest for unit in units]
    lengths = [length for length in range(1, count + 1) if count % length == 0]
    if previous_length in lengths:
        lengths.insert(0, previous_length)
    for length in lengths:
        if digests is None:
            is_repeated = _are_passes(units, length, allow_partial=False)
        else:
            sums = [sum(digests[start : start + length]) % 2**64 for start in range(0, count, length)]
            is_repeated = sums.count(sums[0]) == len(sums)
        if is_repeated and (length < count or length == previous_length):
            return length

    # Several passes, of which the last is incomplete.
    for length in range(1, (count + 1) // 2):
        if count % length and _are_passes(units, length, allow_partial=True):
            return length
    return count


def _units_with_new_sequences(units: Sequence[_Unit]) -> list[_Unit]:
    """Return the units with a sequence that no earlier unit contains, and those without a counted token."""
    known_keys: set[int] = set()
    units_with_new = []
    for unit in units:
        keys = set(unit.keys)
        if not keys or keys - known_keys:
            units_with_new.append(unit)
        known_keys |= keys
    return units_with_new


def _are_passes(units: Sequence[_Unit], length: int, *, allow_partial: bool) -> bool:
    """Return whether consecutive chunks of updates are passes over the same sequences.

    Sequences that were left out because of impossible values may be missing.

    Args:
        units: The updates.
        length: Number of updates per pass.
        allow_partial: True if the last pass may be incomplete.
    """
    chunks = [units[start : start + length] for start in range(0, len(units), length)]
    first_keys = sum((unit.keys for unit in chunks[0]), Counter[int]())
    first_bad = sum(unit.bad_sequences for unit in chunks[0])
    for number, chunk in enumerate(chunks[1:], 2):
        keys = sum((unit.keys for unit in chunk), Counter[int]())
        bad = sum(unit.bad_sequences for unit in chunk)
        may_be_partial = allow_partial and number == len(chunks)
        added = (keys - first_keys).total()
        missing = (first_keys - keys).total()
        if added > first_bad or (missing > bad and not may_be_partial):
            return False
    return True


def sequence_keys(batch: LossBatch) -> list[int]:
    """Return a hash of each sequence of a loss, which is the same in every loss that contains the sequence.

    Short answers are often equal, even answers to different prompts. The hash therefore contains their old
    log-probabilities, and those of the engine in case the old ones are wrong.
    """
    columns = [batch.logp_old, batch.advantages, batch.token, batch.logp_rollout]
    recorded = [column for column in columns if column is not None]
    keys = []
    for row, mask in enumerate(batch.mask):
        keys.append(hash(tuple(column[row][mask].tobytes() for column in recorded)))
    return keys


def batch_number(batch: LossBatch, step: int) -> int:
    """Return the number of the generated batch that a loss belongs to.

    Args:
        batch: The loss.
        step: Its training step.
    """
    if batch.generation is not None:
        return batch.generation
    if batch.update is None and batch.lag is not None and batch.mask.any():
        # The newest version of the weights that sampled its tokens.
        return step - int(batch.lag[batch.mask].min())
    return step


def _process_number(batch: LossBatch) -> int:
    """Return the number of the process that recorded a loss, from the name of its file; 0 if it has none."""
    match = FILE_NAME.search(batch.location)
    return int(match[1]) if match else 0


def _summarize_loss(batch: LossBatch) -> _Loss:
    """Return the data of a loss that `RecordedAdvantages` needs."""
    has_token = np.asarray(batch.mask.any(axis=1)).tolist()
    ids = _no_numbers()
    end_ids = _no_numbers()
    if batch.token is not None and batch.mask.any():
        ids = batch.token[batch.mask]
        if ids.min() < 0 or ids.max() > LARGEST_ID:
            ids = _no_numbers()
        else:
            # Counted tokens at the end of a sequence, or directly before a gap in the mask or in the positions.
            is_end = np.zeros(batch.mask.shape, np.bool_)
            is_end[:, :-1] = batch.mask[:, :-1] & ~batch.mask[:, 1:]
            is_end[:, -1] = batch.mask[:, -1]
            if batch.position is not None:
                is_end[:, :-1] |= np.diff(batch.position, axis=1) > 1
            end_ids = batch.token[is_end & batch.mask]
    return _Loss(
        keys=[key for key, not_empty in zip(sequence_keys(batch), has_token, strict=True) if not_empty],
        bad_sequences=batch.bad_sequences,
        columns=_sequence_columns(batch),
        token_counts=np.unique(ids, return_counts=True),
        end_counts=np.unique(end_ids, return_counts=True),
    )


def _sequence_columns(batch: LossBatch) -> dict[str, NDArray[Any]]:
    """Return the columns of `RecordedAdvantages` for the sequences of a loss, each (batch,)."""
    mask = batch.mask
    rows = np.arange(len(mask))
    length = mask.sum(1)
    not_empty = length > 0
    first = mask.argmax(1)
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)

    advantages = np.where(mask, batch.advantages, 0.0).astype(np.float64)
    first_advantage = advantages[rows, first]
    uniform = ((advantages == first_advantage[:, None]) | ~mask).all(1)
    mean = advantages.sum(1) / np.maximum(length, 1)
    advantage = np.where(uniform, first_advantage, mean)

    answer = np.full(len(mask), NO_TOKEN, np.int64)
    first_token = answer.copy()
    last_token = answer.copy()
    if batch.token is not None:
        pairs = zip(batch.token, mask, strict=True)
        answer = np.array([hash(ids[counted].tobytes()) for ids, counted in pairs], np.int64)
        first_token = np.where(not_empty, batch.token[rows, first], NO_TOKEN).astype(np.int64)
        last_token = np.where(not_empty, batch.token[rows, last], NO_TOKEN).astype(np.int64)
    return {
        "advantage": np.where(not_empty, advantage, math.nan),
        "uniform": uniform.astype(np.float64),
        "reward": _recorded(batch.reward, len(mask)),
        "group": _recorded(batch.group, len(mask)),
        "truncated": _recorded(batch.truncated, len(mask)),
        "length": length.astype(np.int64),
        "answer": answer,
        "first_token": first_token,
        "first_logp": batch.logp_old[rows, first].astype(np.float64),
        "last_token": last_token,
    }


def _recorded(values: NDArray[Any] | None, rows: int) -> Floats:
    """Return values per sequence, (rows,); NaN if they were not recorded."""
    if values is None:
        return np.full(rows, math.nan)
    return np.asarray(values).astype(np.float64)


def _add_counts(counts: Integers, ids: Integers, increments: Integers) -> Integers:
    """Return the counts of token ids after increments of some of them.

    Args:
        counts: For each id, its count, (vocabulary,). The result may be longer.
        ids: Distinct ids, (n,).
        increments: The increment of the count of each, (n,).
    """
    total = np.zeros(max(len(counts), int(ids.max(initial=-1)) + 1), np.int64)
    total[: len(counts)] = counts
    total[ids] += increments
    return total
