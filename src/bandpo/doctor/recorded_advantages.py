"""Rewards, advantages and masks of a record, one row per sequence: the data of the checks of advantages.

A trainer passes over a generated batch several times, with the same advantages. `AdvantageCollector` keeps the first
pass over each batch, and of each sequence a few numbers, so that a whole run fits in memory.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
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

        # For the newest batch of the file, the update at which each sequence was first recorded, and its size so far.
        self._newest: tuple[int, int] | None = None
        self._place = (0, 0)
        self._first_updates: dict[int, int] = {}
        self._rows = 0

        # The newest update on it, whether it holds new sequences, and the columns of its losses that hold none.
        self._update: int | None = None
        self._has_new = False
        self._undecided: list[dict[str, NDArray[Any]]] = []
        self._groups: Counter[float] = Counter()
        self._largest_group = 0

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
        if self._newest != (process, number):
            self._newest = (process, number)
            self._first_updates = {}
            self._decide()
            self._place = number, process
            self._groups.clear()
            self._rows = 0
            self._update = None
        if batch.update is None or batch.update != self._update:
            self._decide()
            self._update = batch.update
            self._has_new = False
        repeated = self._is_repeated(batch)
        if ordinal % self._stride:
            return
        if repeated and not self._has_new:
            # All answers of a small loss may be equal to earlier ones. Other losses of the update tell whether it is
            # one of the first pass.
            if batch.update is not None:
                self._undecided.append(_columns_of(batch))
            return
        self._has_new = batch.update is not None
        for columns in (*self._undecided, _columns_of(batch)):
            self._append(columns, number, process)
        self._undecided = []
        self._count_tokens(batch)
        if self._count > SEQUENCES:
            self._thin_out()

    def _decide(self) -> None:
        """Append the sequences of an update that are all equal to earlier ones if groups lack as many."""
        undecided, self._undecided = self._undecided, []
        groups = Counter(group for columns in undecided for group in columns["group"].tolist())
        lacking = all(self._groups[group] + count <= self._largest_group for group, count in groups.items())
        if undecided and lacking and not any(map(math.isnan, groups)):
            for columns in undecided:
                self._append(columns, *self._place)

    def _append(self, columns: dict[str, NDArray[Any]], number: int, process: int) -> None:
        """Append the sequences of a loss.

        Args:
            columns: Their columns, as `_columns_of` returns them.
            number: Number of the generated batch.
            process: Number of the process that recorded them.
        """
        rows = len(columns["length"])
        columns["batch"] = np.full(rows, number, np.int64)
        columns["process"] = np.full(rows, process, np.int64)
        columns["row"] = np.arange(self._rows, self._rows + rows)
        for name, values in columns.items():
            self._columns[name].append(values)
        self._rows += rows
        self._count += rows
        self._groups.update(columns["group"].tolist())
        self._largest_group = max(self._largest_group, *self._groups.values(), 0)

    def result(self) -> RecordedAdvantages:
        """Return what was recorded in the losses that were added so far."""
        self._decide()
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

    def _is_repeated(self, batch: LossBatch) -> bool:
        """Return whether every sequence of a loss was in a loss of an earlier update on the same batch.

        Two answers to a prompt may be equal, so one sequence that is known does not make the loss a repetition.
        """
        if not self._rows:
            repeated = False
        elif batch.mask.any():
            repeated = True
        else:
            repeated = bool(batch.update)
        update = batch.update or 0
        for key, mask in zip(sequence_keys(batch), batch.mask, strict=True):
            if not mask.any():
                continue
            is_new = key not in self._first_updates
            first_update = self._first_updates.setdefault(key, update)
            if is_new or (batch.update is not None and first_update == update):
                repeated = False
        return repeated

    def _note_empty(self, batch: LossBatch, step: int) -> None:
        """Count a loss without a counted token, unless its answers were left out on purpose or hold NaN."""
        if batch.mask.any() or batch.bad_sequences:
            return
        if batch.truncated is not None and bool(np.asarray(batch.truncated).all()):
            return
        self._empty_losses += 1
        if self._first_empty_step is None:
            self._first_empty_step = step

    def _count_tokens(self, batch: LossBatch) -> None:
        """Count each id, and how often it stands last or before a gap."""
        if batch.token is None or not batch.mask.any():
            return
        ids = batch.token[batch.mask]
        if ids.min() < 0 or ids.max() > LARGEST_ID:
            return
        ends = np.zeros(batch.mask.shape, np.bool_)
        ends[:, :-1] = batch.mask[:, :-1] & ~batch.mask[:, 1:]
        ends[:, -1] = batch.mask[:, -1]
        if batch.position is not None:
            ends[:, :-1] |= np.diff(batch.position, axis=1) > 1
        self._token_counts = _added(self._token_counts, ids)
        self._end_counts = _added(self._end_counts, batch.token[ends & batch.mask])

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


def _added(counts: Integers, ids: NDArray[Any]) -> Integers:
    """Return the counts of ids with more of them."""
    more = np.bincount(ids, minlength=len(counts))
    more[: len(counts)] += counts
    return more
