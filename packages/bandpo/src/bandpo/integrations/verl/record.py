"""The record of verl's losses: each worker writes those of its own, with what only the driver knows of their rows.

A worker has the log-probabilities of the policy in training, but verl passes it neither rewards and prompts nor the
version that sampled. The driver has these before the update, and writes them to the folder `BATCHES` within the
record. For each row of a loss the worker looks there for the row with the same old log-probabilities, bit for bit, and
the same advantages. A row without one, or with several that differ in what is known of them, is recorded without
tokens, prompt, reward and version, and a warning says how many there are.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import socket
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bandpo.audit.record_format import META, import_pyarrow
from bandpo.audit.recorder import Recorder, process_number
from bandpo.audit.sealed_file import SUFFIX
from bandpo.core.errors import BandWarning

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from verl.workers.config import ActorConfig

BATCHES = "batches"
"""The folder, within that of the record, to which the driver writes each batch before its update."""

STRATEGIES = ("fsdp", "fsdp2")
"""The values of ``actor.strategy`` whose workers record their losses. Which of several workers with the same rows has
to record them is not known for others."""


def records_losses(strategy: object) -> bool:
    """Return True if the workers of a strategy record their losses; else the driver's batches are the record."""
    return strategy in STRATEGIES


def record_loss(
    config: ActorConfig,
    log_prob: Float[Tensor, "batch time"],
    old_log_prob: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    response_mask: Float[Tensor, "batch time"],
) -> None:
    """Record the tokens of a loss in training, in its worker; do nothing if the settings name no record.

    Args:
        config: The actor's settings.
        log_prob: The log-probabilities (nats) of the policy in training.
        old_log_prob: The old log-probabilities (nats).
        advantages: The advantages.
        response_mask: 1 for tokens that count.
    """
    folder = config.policy_loss.get("record")
    if not folder or not records_losses(config.get("strategy")):
        return
    # Workers of one group of sequence parallelism compute the loss of the same rows; their ranks are consecutive.
    if process_number() % config.engine.get("ulysses_sequence_parallel_size", 1):
        return
    info = config.global_batch_info
    sequences, processes = info.get("global_batch_size"), info.get("dp_size")
    mini_batch = sequences // processes if sequences and processes else None
    tensors = (log_prob, old_log_prob, advantages, response_mask)
    log_prob, old_log_prob, advantages, response_mask = (x.detach().cpu() for x in tensors)
    _losses_of(str(folder)).add(log_prob, old_log_prob, advantages, response_mask > 0, mini_batch)


@functools.cache
def _losses_of(folder: str) -> Losses:
    """Return this process's writer of a record."""
    return Losses(Path(folder))


@dataclass(frozen=True)
class Row:
    """A sequence of a batch, as the driver knows it."""

    batch: Mapping[str, Any]
    """The values of its batch: ``step``, ``generation`` and ``current_version``."""
    advantages: Any
    """One value for each counted token, or one for all."""
    tokens: Any
    """The ids of the counted tokens; None if the driver does not have them."""
    log_weight: Any
    """log(π_old/μ) of the counted tokens; None if the driver does not have it."""
    values: tuple[Any, ...]
    """The values of `COLUMNS`."""

    @property
    def weights(self) -> object:
        """The weights with which training on the batch begins: their version, or the batch if that is not known."""
        version = self.batch["current_version"]
        return ("batch", self.batch["generation"]) if version is None else version

    def has_advantages(self, advantages: Any) -> bool:
        """Return True if these are the row's advantages."""
        import numpy as np

        return len(self.advantages) in (1, len(advantages)) and bool(np.all(self.advantages == advantages))

    @property
    def facts(self) -> tuple[Any, ...]:
        """All of what is known of the row, to compare it with another of the same batch."""
        ids, weights = (None if x is None else x.tobytes() for x in (self.tokens, self.log_weight))
        return (ids, weights, *self.values)


COLUMNS = ("group", "reward", "truncated", "version")
"""The columns with one value per sequence that only the driver knows."""

Rows = dict[bytes, list[Row]]
"""The rows of a batch by the bytes of their old log-probabilities."""


class DriverBatches:
    """A reader of the driver's batches, which it goes on writing meanwhile.

    Args:
        folder: The folder of the driver's record.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._path: Path | None = None
        self._ends: list[int] = []
        self._schema = b""
        self.metadata: dict[str, Any] = {}
        """The metadata of the driver's record: method, anchor, framework and more; empty before there is one."""
        # An update may begin before the rows of an earlier one are all used.
        self.latest: deque[Rows] = deque(maxlen=2)
        """The rows of the last two batches, the newest first."""

    def refresh(self) -> None:
        """Read what the driver has written since the last call."""
        files = sorted(self._folder.glob("tokens-*.arrow"))
        if not files:
            return
        if files[-1] != self._path:
            self._path, self._ends, self._schema = files[-1], [], b""
        path = files[-1]
        # A file that is opened again is that of the server, also on a file system of a network.
        lines = path.with_suffix(SUFFIX).read_bytes().splitlines(keepends=True)
        parts = [line.split() for line in lines if line.endswith(b"\n")]
        first = len(self._ends)
        with path.open("rb") as file:
            for number in range(first, len(parts)):
                start = self._ends[-1] if self._ends else 0
                end = int(parts[number][1])
                # Of the parts of an earlier time, the last are enough.
                needed = number == 0 or number >= len(parts) - (self.latest.maxlen or 0)
                if needed:
                    file.seek(start)
                    data = file.read(end - start)
                    if hashlib.sha256(data).hexdigest().encode() != parts[number][2]:
                        return
                    self._read_part(number, data)
                self._ends.append(end)

    def _read_part(self, number: int, data: bytes) -> None:
        """Read the schema, which is part 0, or a batch."""
        pa = import_pyarrow()
        if number == 0:
            self._schema = data
            self.metadata = json.loads(pa.ipc.open_stream(data).schema.metadata[META])
            return
        self.latest.appendleft(_rows_of(pa.ipc.open_stream(self._schema + data).read_next_batch()))

    def find(self, old_log_probs: Any, advantages: Any) -> Row | None:
        """Return the row with these values at its counted tokens; None if there is none, or several that differ.

        Args:
            old_log_probs: The old log-probabilities (nats), float32, compared bit for bit.
            advantages: The advantages, float32.
        """
        key = old_log_probs.tobytes()
        for rows in self.latest:
            found = [row for row in rows.get(key, ()) if row.has_advantages(advantages)]
            if found:
                return found[0] if all(row.facts == found[0].facts for row in found) else None
        return None


def _rows_of(batch: Any) -> Rows:
    """Return the rows of an Arrow record batch of the driver's record, without those that have no counted token."""
    lists = {name: _arrays(batch, name) for name in ("logp_old", "advantages", "token", "log_weight")}
    singles = {name: batch.column(name).to_pylist() for name in COLUMNS}
    counts = {
        name: batch.column(name)[0].as_py() if len(batch) else None
        for name in ("step", "generation", "current_version")
    }
    rows: Rows = {}
    for number, old_log_probs in enumerate(lists["logp_old"]):
        if not len(old_log_probs):
            continue
        values = [singles[name][number] for name in COLUMNS]
        version = values[-1]
        values[-1] = None if version is None else version[0]
        row = Row(
            batch=counts,
            advantages=lists["advantages"][number],
            tokens=lists["token"][number],
            log_weight=lists["log_weight"][number],
            values=tuple(values),
        )
        rows.setdefault(old_log_probs.tobytes(), []).append(row)
    return rows


def _arrays(batch: Any, name: str) -> Sequence[Any]:
    """Return a column of lists as one array for each row, or None for each row without the column."""
    column = batch.column(name)
    if column.null_count:
        return [None] * len(column)
    values = column.flatten().to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    offsets = offsets - offsets[0]
    return [values[start:end] for start, end in itertools.pairwise(offsets)]


class Losses:
    """The writer of a worker's losses.

    Args:
        folder: The folder of the record.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._driver = DriverBatches(folder / BATCHES)
        self._recorder: Recorder | None = None
        self._weights: object = None
        self._sequences = 0
        """The number of sequences whose loss was recorded since the weights had their present version."""
        self._warned = False

    def add(
        self,
        log_prob: Float[Tensor, "batch time"],
        old_log_prob: Float[Tensor, "batch time"],
        advantages: Float[Tensor, "batch time"],
        mask: Tensor,
        mini_batch: int | None,
    ) -> None:
        """Record a loss. All tensors are on the CPU.

        Args:
            log_prob: As for `record_loss`.
            old_log_prob: As for `record_loss`.
            advantages: As for `record_loss`.
            mask: True for tokens that count.
            mini_batch: The number of sequences of this process in an update; None if it is not known.
        """
        self._driver.refresh()
        if not self._driver.metadata:
            self._warn(
                f"the losses of rank {process_number()} on {socket.gethostname()} are not recorded: "
                f"{self._folder / BATCHES} of the driver is not there; name a folder that all nodes have"
            )
            return
        if self._recorder is None:
            names = ("method", "anchor", "framework", "sampling", "version_at")
            self._recorder = Recorder(self._folder, **{name: self._driver.metadata[name] for name in names})

        rows = self._find_rows(old_log_prob, advantages, mask)
        indices = {number: i for i, number in enumerate(dict.fromkeys(id(row.batch) for row in rows if row))}
        update = self._count_update(rows, mini_batch)

        tensors = {"logp": log_prob, "logp_old": old_log_prob, "advantages": advantages, "mask": mask}
        parts: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            if mask[number].any():
                parts.setdefault(-1 if row is None else indices[id(row.batch)], []).append(number)
        for part, numbers in parts.items():
            chosen = [rows[number] for number in numbers]
            of_part = {name: x[numbers] for name, x in tensors.items()}
            known = {} if part < 0 else _known(chosen, of_part)
            self._recorder.add(**of_part, update=None if part < 0 else update, **known)
        if -1 in parts:
            self._warn(
                f"{len(parts[-1])} of {len(rows)} sequences of a loss are not among the driver's in "
                f"{self._folder / BATCHES}, by their old log-probabilities and advantages: they are recorded without "
                "ids, prompt, reward, step and version. More of them are not named"
            )
        if mini_batch is None or not self._sequences % mini_batch:
            # verl writes a checkpoint after the last update of a step.
            self._recorder.flush()

    def _find_rows(self, old_log_prob: Tensor, advantages: Tensor, mask: Tensor) -> list[Row | None]:
        """Return the driver's row of each sequence of a loss; None if there is none, or no token counts."""
        rows: list[Row | None] = []
        for old, advantage, counted in zip(old_log_prob, advantages, mask, strict=True):
            values = (x[counted].float().numpy() for x in (old, advantage))
            rows.append(self._driver.find(*values) if counted.any() else None)
        return rows

    def _count_update(self, rows: Sequence[Row | None], mini_batch: int | None) -> int | None:
        """Count the sequences of a loss, and return the number of updates since the weights had their version."""
        for row in rows:
            # An asynchronous trainer may update on several batches before it gives the weights a new version.
            if row is not None and row.weights != self._weights:
                self._weights = row.weights
                self._sequences = 0
        update = None if mini_batch is None else self._sequences // mini_batch
        self._sequences += len(rows)
        return update

    def _warn(self, sentence: str) -> None:
        if not self._warned:
            warnings.warn(sentence, BandWarning, stacklevel=2)
        self._warned = True


def _known(rows: Sequence[Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what the driver knows of the rows of one of its batches, as arguments of `Recorder.add`."""
    known: dict[str, Any] = {**rows[0].batch}
    columns = dict(zip(COLUMNS, zip(*(row.values for row in rows), strict=True), strict=True))
    for name, values in columns.items():
        if None not in values:
            known[name] = torch.tensor(values) if name == "version" else list(values)
    mask = tensors["mask"]
    if all(row.tokens is not None for row in rows):
        ids = torch.zeros(mask.shape, dtype=torch.int32)
        ids[mask] = torch.cat([torch.as_tensor(row.tokens.copy()) for row in rows])
        known["tokens"] = ids
    if all(row.log_weight is not None for row in rows):
        sampled = tensors["logp_old"].float().clone()
        sampled[mask] -= torch.cat([torch.as_tensor(row.log_weight.copy()) for row in rows])
        known["logp_rollout"] = sampled
    return known
