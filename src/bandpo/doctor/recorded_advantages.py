"""Rewards, advantages and masks of a record, one row per sequence: the data of the checks of advantages.

A trainer passes over a generated batch several times, with the same advantages. `AdvantageCollector` keeps the first
pass over each batch, and of each sequence a few numbers, so that a whole run fits in memory.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bandpo.runs.record import LossBatch
from bandpo.runs.record_format import FILE_NAME

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

SEQUENCES = 2**19
"""Sequences above which every second batch is dropped, so that memory is bounded and all of a run is covered."""

LARGEST_ID = 2**22
"""Ids of tokens above which the ends of sequences are not counted; no vocabulary is that large."""

NO_TOKEN = -1
"""What stands for an id or an answer that is not known."""


def _no_values() -> Floats:
    return np.zeros(0)


def _no_numbers() -> Integers:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class RecordedAdvantages:
    """What a record says of each sequence when it was first recorded; arrays have the shape (sequences,).

    NaN stands for a value that was not recorded.
    """

    batch: Integers = field(default_factory=_no_numbers)
    """Number of the sequence's batch."""
    step: Integers = field(default_factory=_no_numbers)
    """Step of the first loss of that batch."""
    process: Integers = field(default_factory=_no_numbers)
    """Number of the process that recorded it."""
    row: Integers = field(default_factory=_no_numbers)
    """Its place among the sequences of its batch in its process."""
    advantage: Floats = field(default_factory=_no_values)
    """Its advantage; the mean of its tokens' advantages if these differ; NaN without a counted token."""
    uniform: Floats = field(default_factory=_no_values)
    """1 if its tokens have one advantage, else 0."""
    reward: Floats = field(default_factory=_no_values)
    group: Floats = field(default_factory=_no_values)
    """Number of its prompt."""
    truncated: Floats = field(default_factory=_no_values)
    """1 if it was cut off, else 0."""
    length: Integers = field(default_factory=_no_numbers)
    """Its counted tokens."""
    answer: Integers = field(default_factory=_no_numbers)
    """A number that is the same for the same tokens; `NO_TOKEN` if these were not recorded."""
    first_token: Integers = field(default_factory=_no_numbers)
    """Id of its first counted token, or `NO_TOKEN`."""
    first_logp: Floats = field(default_factory=_no_values)
    """Log-probability (nats) of its first counted token under the old policy."""
    last_token: Integers = field(default_factory=_no_numbers)
    """Id of its last counted token, or `NO_TOKEN`."""
    token_counts: Integers = field(default_factory=_no_numbers)
    """For each id, how often it was counted, (vocabulary,)."""
    end_counts: Integers = field(default_factory=_no_numbers)
    """For each id, how often it stood last, or before tokens that do not count, (vocabulary,)."""
    losses: int = 0
    """Losses of the record."""
    empty_losses: int = 0
    """Losses that count no token, though not every answer in them was cut off or is damaged."""
    first_empty_step: int | None = None
    """Step of the first of them."""

    @classmethod
    def of(cls, batches: Iterable[LossBatch]) -> RecordedAdvantages:
        """Return what the losses of a record say."""
        collector = AdvantageCollector()
        for batch in batches:
            collector.add(batch)
        return collector.result()

    def select(self, where: Flags) -> RecordedAdvantages:
        """Return some of the sequences, without what is known of the whole record."""
        return RecordedAdvantages(**{name: getattr(self, name)[where] for name in SEQUENCE_COLUMNS})


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
    """The losses of one update on a batch; one loss where updates were not recorded."""

    update: int | None
    losses: list[_Loss] = field(default_factory=list)

    @property
    def digest(self) -> int:
        """A number that is the same for the same sequences, in whichever order and losses they stand."""
        return sum(key for loss in self.losses for key in loss.keys) % 2**64

    @property
    def keys(self) -> Counter[int]:
        """How often each sequence stands in it."""
        return Counter(key for loss in self.losses for key in loss.keys)

    @property
    def bad_sequences(self) -> int:
        """Sequences that were left out because they hold values that cannot be right."""
        return sum(loss.bad_sequences for loss in self.losses)


@dataclass(eq=False)
class _Loss:
    """What is kept of a loss until it is known of which pass over its batch it is."""

    keys: list[int]
    """A number for each sequence with a counted token, see `sequence_keys`."""
    bad_sequences: int
    columns: dict[str, NDArray[Any]]
    token_counts: tuple[Integers, Integers]
    """Ids of its counted tokens, and how often each stands in it."""
    end_counts: tuple[Integers, Integers]
    """The same of tokens that stand last, or before a gap."""


class AdvantageCollector:
    """Collector of `RecordedAdvantages`, loss by loss.

    >>> AdvantageCollector().result().losses
    0
    """

    def __init__(self) -> None:
        """Create a collector that holds no loss yet."""
        self._columns: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
        self._count = 0

        # Batches in the order in which they were first seen, and the step of their first loss.
        self._ordinals: dict[int, int] = {}
        self._first_steps: dict[int, int] = {}
        self._stride = 1

        # The newest batch of the file, its number and process, and the updates on it that wait to be told apart.
        self._newest: tuple[int, int] | None = None
        self._units: list[_Unit] = []
        self._held_rows = 0

        # Units of one pass over an earlier batch.
        self._pass_length: int | None = None

        self._token_counts = _no_numbers()
        self._end_counts = _no_numbers()
        self._losses = 0
        self._empty_losses = 0
        self._first_empty_step: int | None = None

    def add(self, batch: LossBatch) -> None:
        """Add the next loss of the record."""
        step = self._losses if batch.step is None else batch.step
        self._losses += 1
        number = _number_of(batch, step)
        ordinal = self._ordinals.setdefault(number, len(self._ordinals))
        self._first_steps[number] = min(step, self._first_steps.get(number, step))
        self._note_empty(batch, step)

        process = _process_of(batch)
        if self._newest != (number, process):
            is_last = self._newest is not None and self._newest[1] != process
            self._append_first_pass(is_last=is_last)
            self._newest = number, process
        if ordinal % self._stride:
            return
        if batch.update is None or not self._units or batch.update != self._units[-1].update:
            self._units.append(_Unit(batch.update))
        loss = _loss_of(batch)
        self._units[-1].losses.append(loss)
        self._held_rows += len(batch.mask)
        if self._held_rows > SEQUENCES:
            self._append_first_pass(is_last=False)

    def _append_first_pass(self, *, is_last: bool) -> None:
        """Append the sequences of the first pass over the newest batch, and forget the others.

        Args:
            is_last: Whether it is the last batch of its process, which may be cut off.
        """
        units, self._units = self._units, []
        self._held_rows = 0
        if not units or self._newest is None:
            return
        length = _pass_length(units, self._pass_length, is_last=is_last)
        first_pass = units[:length]
        if length == len(units) != self._pass_length and units[0].update is None:
            # Nothing tells passes apart but what comes again.
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
                self._token_counts = _added(self._token_counts, *loss.token_counts)
                self._end_counts = _added(self._end_counts, *loss.end_counts)
                first_row += rows
        self._count += first_row
        if self._count > SEQUENCES:
            self._thin_out()

    def result(self) -> RecordedAdvantages:
        """Return what was recorded in the losses that were added so far."""
        self._append_first_pass(is_last=True)
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
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

    def _note_empty(self, batch: LossBatch, step: int) -> None:
        """Count a loss without a counted token, unless its answers were left out on purpose or hold NaN."""
        if batch.mask.any() or batch.bad_sequences:
            return
        if batch.truncated is not None and bool(np.asarray(batch.truncated).all()):
            return
        self._empty_losses += 1
        if self._first_empty_step is None:
            self._first_empty_step = step

    def _thin_out(self) -> None:
        """Drop every second batch of those that are kept."""
        self._stride *= 2
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        ordinals = np.array([self._ordinals[number] for number in columns["batch"].tolist()])
        kept = ordinals % self._stride == 0
        self._columns.clear()
        for name, values in columns.items():
            self._columns[name].append(values[kept])
        self._count = int(kept.sum())


def _pass_length(units: Sequence[_Unit], earlier: int | None, *, is_last: bool) -> int:
    """Return how many updates the first pass over a batch took, by which sequences come again.

    Two answers to a prompt may be equal, so a sequence that is known is no sign of a second pass. A second pass holds
    every sequence as often as the first.

    Args:
        units: The updates on the batch, in their order.
        earlier: What an earlier batch gave; None without one.
        is_last: Whether the batch may be cut off, so that the last pass lacks sequences.
    """
    count = len(units)
    if earlier is not None and is_last and _are_passes(units, earlier, may_lack=True):
        return min(earlier, count)
    digests = None if any(unit.bad_sequences for unit in units) else [unit.digest for unit in units]
    divisors = [length for length in range(1, count + 1) if count % length == 0]
    if earlier in divisors:
        divisors.insert(0, earlier)
    for length in divisors:
        if digests is None:
            is_repeated = _are_passes(units, length, may_lack=False)
        else:
            sums = [sum(digests[start : start + length]) % 2**64 for start in range(0, count, length)]
            is_repeated = sums.count(sums[0]) == len(sums)
        if is_repeated and length < count:
            return length
        if is_repeated and length == earlier:
            return length
    # The last of several passes may be a part of one.
    for length in range(1, (count + 1) // 2):
        if count % length and _are_passes(units, length, may_lack=True):
            return length
    return count


def _units_with_new_sequences(units: Sequence[_Unit]) -> list[_Unit]:
    """Return the units that hold a sequence which no earlier one holds, or none with a counted token."""
    known: set[int] = set()
    chosen = []
    for unit in units:
        keys = set(unit.keys)
        if not keys or keys - known:
            chosen.append(unit)
        known |= keys
    return chosen


def _are_passes(units: Sequence[_Unit], length: int, *, may_lack: bool) -> bool:
    """Return whether updates are passes over one set of sequences, each of some updates.

    Sequences that were left out for their values may be missing.

    Args:
        units: The updates.
        length: Updates of a pass.
        may_lack: Whether the last pass may be a part of one.
    """
    chunks = [units[start : start + length] for start in range(0, len(units), length)]
    first = sum((unit.keys for unit in chunks[0]), Counter[int]())
    bad_of_first = sum(unit.bad_sequences for unit in chunks[0])
    for number, chunk in enumerate(chunks[1:], 2):
        keys = sum((unit.keys for unit in chunk), Counter[int]())
        bad = sum(unit.bad_sequences for unit in chunk)
        is_part = may_lack and number == len(chunks)
        if (keys - first).total() > bad_of_first or ((first - keys).total() > bad and not is_part):
            return False
    return True


def sequence_keys(batch: LossBatch) -> list[int]:
    """Return a number for each sequence of a loss that is the same whenever a later loss holds the sequence again.

    Short answers are often equal, also those to different prompts. Their log-probabilities tell them apart, unless what
    is recorded as the old ones is wrong; then those of the engine do.
    """
    columns = [batch.logp_old, batch.advantages, batch.token, batch.logp_rollout]
    recorded = [column for column in columns if column is not None]
    keys = []
    for row, mask in enumerate(batch.mask):
        keys.append(hash(tuple(column[row][mask].tobytes() for column in recorded)))
    return keys


def _number_of(batch: LossBatch, step: int) -> int:
    """Return the number of the generated batch that a loss belongs to."""
    if batch.generation is not None:
        return batch.generation
    if batch.update is None and batch.lag is not None and batch.mask.any():
        return step - int(batch.lag[batch.mask].min())
    return step


def _process_of(batch: LossBatch) -> int:
    """Return the number of the process that recorded a loss, by the name of its file; 0 if it has none."""
    match = FILE_NAME.search(batch.location)
    return int(match[1]) if match else 0


def _loss_of(batch: LossBatch) -> _Loss:
    """Return what is kept of a loss."""
    has_token = np.asarray(batch.mask.any(axis=1)).tolist()
    ids = ends = _no_numbers()
    if batch.token is not None and batch.mask.any():
        ids = batch.token[batch.mask]
        if ids.min() < 0 or ids.max() > LARGEST_ID:
            ids = _no_numbers()
        else:
            last = np.zeros(batch.mask.shape, np.bool_)
            last[:, :-1] = batch.mask[:, :-1] & ~batch.mask[:, 1:]
            last[:, -1] = batch.mask[:, -1]
            if batch.position is not None:
                last[:, :-1] |= np.diff(batch.position, axis=1) > 1
            ends = batch.token[last & batch.mask]
    return _Loss(
        keys=[key for key, counts in zip(sequence_keys(batch), has_token, strict=True) if counts],
        bad_sequences=batch.bad_sequences,
        columns=_columns_of(batch),
        token_counts=np.unique(ids, return_counts=True),
        end_counts=np.unique(ends, return_counts=True),
    )


def _columns_of(batch: LossBatch) -> dict[str, NDArray[Any]]:
    """Return the columns of `RecordedAdvantages` for the sequences of a loss."""
    mask = batch.mask
    rows = np.arange(len(mask))
    length = mask.sum(1)
    not_empty = length > 0
    first = mask.argmax(1)
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)

    advantages = np.where(mask, batch.advantages, 0.0).astype(np.float64)
    of_first = advantages[rows, first]
    uniform = ((advantages == of_first[:, None]) | ~mask).all(1)
    mean = advantages.sum(1) / np.maximum(length, 1)
    advantage = np.where(uniform, of_first, mean)

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
    """Return the values of sequences, NaN if they were not recorded."""
    return np.full(rows, math.nan) if values is None else np.asarray(values).astype(np.float64)


def _added(counts: Integers, ids: Integers, numbers: Integers) -> Integers:
    """Return the counts of ids with more of them.

    Args:
        counts: For each id, how often it was counted.
        ids: Ids, each once.
        numbers: How often each of them is to be added.
    """
    total = np.zeros(max(len(counts), int(ids.max(initial=-1)) + 1), np.int64)
    total[: len(counts)] = counts
    total[ids] += numbers
    return total
