"""The recorder, which writes the tokens of each loss to disk, to be audited later with ``bandpo audit FOLDER``.

Each process writes an Arrow stream of its own, ``tokens-PROCESS-OPENING.arrow``. Each call of `Recorder.add` appends a
record batch with one row per sequence. A second file has digests, by which a reader detects damage. The data is in the
file when `add` returns, so a killed process loses at most the batch that was being written. A machine that loses power
keeps what was added before the last `Recorder.flush`. docs/audit.md describes the files.
"""

from __future__ import annotations

import json
import os
import re
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import bandpo
from bandpo._atomic import sync
from bandpo.audit.record_format import FORMAT, META, VERSION_AT, import_pyarrow, record_schema
from bandpo.audit.sealed_file import STREAM_END, SUFFIX, SealedFile, holds_nothing_readable
from bandpo.core.batch import Batch, normalize_mask
from bandpo.core.errors import InvalidValue
from bandpo.core.layout import Packed, Rows, as_row
from bandpo.core.methods import Method
from bandpo.core.rules import ClipRule
from bandpo.core.sequences import unpack
from bandpo.core.text import as_method, as_text

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Recorder:
    """A writer of the tokens of each loss. Call `add` where the loss is computed.

    Several processes may write to one folder: each has a file of its own. A resumed run starts another file, and steps
    that it repeats count once. If an earlier file of the process is so damaged that nothing of it can be read, as after
    a loss of power, it is renamed to ``damaged-…``, with a warning. The recorder does not use torch's random numbers.

    Args:
        folder: The folder of the files; created if it does not exist.
        method: The run's method, as for `bandpo.policy_loss`; it is the first in a replay. Optional.
        anchor: The policy that the run's bounds surround: ``trainer`` (``logp_old``) or ``rollout``.
        every: Only steps that are a multiple of it are recorded. Without a step, calls of `add` are counted instead.
        dtype: ``float32`` gives exact metrics in a replay; ``float16`` takes half the space, see docs/audit.md.
        process: Number of this process; by default its rank in torch.distributed, else 0.
        framework: Name and version of the training framework, such as ``trl 1.16``.
        sampling: The engine's settings, such as ``{"temperature": 0.7, "top_p": 1.0}``.
        version_at: The moment at which ``version`` of `add` was read: when each ``token`` was sampled, or at the start
            of its ``answer`` or ``group``. In the last two cases the age of a token is an upper bound.

    Raises:
        ImportError: if pyarrow is not installed.
        ValueError: if a setting is out of range, or the method has no text form.
        OSError: if the folder cannot be written to.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> logp_old = torch.tensor([[0.08, 0.50]]).log()
    >>> with Recorder(folder, method="FixedClip(0.2)") as recorder:
    ...     recorder.add(Batch.read(logp_old + 0.5, logp_old, torch.tensor([1.0])), step=3)
    >>> recorder.path.name
    'tokens-00000-0000.arrow'
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        method: Method | ClipRule | str | None = None,
        anchor: str = "trainer",
        every: int = 1,
        dtype: str = "float32",
        process: int | None = None,
        framework: str = "",
        sampling: Mapping[str, float] | None = None,
        version_at: str = "token",
    ):
        import_pyarrow()
        if every < 1:
            raise InvalidValue(f"every must be at least 1 (each step), got {every!r}")
        if dtype not in ("float32", "float16"):
            raise InvalidValue(f"dtype must be 'float32' or 'float16', got {dtype!r}")
        if anchor not in ("trainer", "rollout"):
            raise InvalidValue(f"anchor must be 'trainer' or 'rollout', got {anchor!r}")
        if version_at not in VERSION_AT:
            raise InvalidValue(f"version_at must be one of {', '.join(VERSION_AT)}, got {version_at!r}")
        self.every = every
        self._anchor = anchor
        self.dtype = dtype
        process = process_number() if process is None else process
        self._method = None if method is None else as_text(as_method(method))
        metadata = {
            "format": FORMAT,
            "method": self._method,
            "anchor": anchor,
            "every": every,
            "process": process,
            "framework": framework,
            "sampling": dict(sampling or {}),
            "version_at": version_at,
            "bandpo": bandpo.__version__,
            "torch": torch.__version__,
        }
        self._schema = record_schema(dtype).with_metadata({META: json.dumps(metadata).encode()})
        self._calls = 0
        self.path, self._file = _new_file(Path(folder), process)
        schema_part = _stream_of(self._schema)[: -len(STREAM_END)]
        self._schema_size = len(schema_part)
        self._file.write_part(schema_part)
        # The new names are on the disk before a checkpoint can be.
        self.flush()
        sync(self.path.parent, self.path.parent.absolute().parent)
        # The finalizer also closes the file at exit, if close was not called.
        self._end = weakref.finalize(self, self._file.close_at_exit)

    @torch.no_grad()
    def add(
        self,
        batch: Batch | None = None,
        *,
        logp: Float[Tensor, "batch time"] | None = None,
        logp_old: Float[Tensor, "batch time"] | None = None,
        advantages: Float[Tensor, "batch time"] | Float[Tensor, " batch"] | None = None,
        mask: Tensor | None = None,
        logp_rollout: Float[Tensor, "batch time"] | None = None,
        entropy: Float[Tensor, "batch time"] | None = None,
        step: int | None = None,
        version: int | Tensor | None = None,
        current_version: int | None = None,
        collision: Float[Tensor, "batch time"] | None = None,
        tokens: Tensor | None = None,
        generation: int | None = None,
        update: int | None = None,
        group: Sequence[int] | Tensor | None = None,
        reward: Sequence[float] | Tensor | None = None,
        truncated: Sequence[bool] | Tensor | None = None,
        method: Method | ClipRule | str | None = None,
        layout: Rows | Packed | None = None,
    ) -> None:
        """Append the tokens of one loss, from a batch or from tensors. Padding is not recorded.

        The values of tensors are not checked: NaN is recorded, and a replay names its row. Shapes and the mask are
        checked as for `bandpo.policy_loss`.

        Args:
            batch: The batch of the loss, from `bandpo.Batch.read`. It has the log-probabilities, the advantages, the
                mask, the entropies and the layout, which are then not given. With ``anchor="rollout"`` its anchor is
                ``logp_rollout``.
            logp: Log-probabilities (nats) of the sampled tokens under the policy in training, (batch, time). None for
                a batch that is recorded before its loss is computed; no rule can be replayed on it.
            logp_old: The same under the old policy, the denominator of the ratio.
            advantages: One per token or per sequence.
            mask: 1 (or True) for tokens that count, 0 for padding. All tokens count if not given.
            logp_rollout: The log-probabilities (nats) that the rollout engine reported; NaN where there are none.
            entropy: Entropy (nats) of the policy at each token.
            step: The trainer's step.
            version: The version of the weights that sampled: one number, one per sequence, or one per token. The age of
                a token is ``current_version − version``.
            current_version: The version of the weights in training, counted like ``version``. By default the step, for
                versions that are counted in steps.
            collision: Σ q²·(log q + H) over the vocabulary, with the probabilities q and the entropy H (nats) of the
                policy in training at each token: the second term of the entropy that an update adds.
            tokens: Ids of the sampled tokens, in the shape of ``logp_old``.
            generation: Number of the generated batch that the sequences belong to.
            update: Number of optimiser steps before this loss, from 0, on that batch or on all with the same
                ``current_version``.
            group: Number of each sequence's group, the answers to one prompt, which is the same in all losses of the
                ``generation``.
            reward: Total reward of each sequence, before any baseline.
            truncated: True for each sequence that was cut off at the length limit.
            method: The run's method in this loss, if it differs from that of the constructor, as with a radius that
                changes.
            layout: The layout of the tensors, as for `bandpo.policy_loss`. Each sequence becomes a row of the record.

        Raises:
            ValueError: if shapes differ, both or neither of batch and tensors are given, the mask holds another value
                than 0 and 1, or the recorder is closed.
        """
        if not self._end.alive:
            raise InvalidValue(f"{self.path} is closed; create another Recorder to record more")
        number = self._calls if step is None else step
        self._calls += 1
        if number % self.every:
            return
        tensors: dict[str, Any] = {
            "logp_old": logp_old,
            "logp": logp,
            "advantages": advantages,
            "mask": mask,
            "logp_rollout": logp_rollout,
            "entropy": entropy,
            "tokens": tokens,
            "version": version,
            "collision": collision,
        }
        if batch is not None:
            tensors = self._rows_of(batch, tensors, layout)
        else:
            if logp_old is None or advantages is None:
                raise InvalidValue("add needs a batch, or logp_old= and advantages=")
            tensors = unpack(tensors, layout)
        old: Tensor = tensors["logp_old"]
        if old.dim() != 2:
            raise InvalidValue(f"logp_old must have the shape (batch, time), got {tuple(old.shape)}")
        counted = normalize_mask(old, tensors["mask"]).cpu() != 0
        rows = len(counted)

        token_columns = _token_columns(tensors)
        columns: dict[str, list[Any] | _Lists | None] = {
            "step": [step] * rows,
            "generation": [generation] * rows,
            "update": [update] * rows,
            "current_version": [current_version] * rows,
        }
        for name, x in {"group": group, "reward": reward, "truncated": truncated}.items():
            columns[name] = _values_of_sequences(name, x, rows)
        for name, dtype in {"version": torch.int64, "advantages": torch.float32}.items():
            columns[name] = _by_sequence(name, tensors[name], counted, dtype)
        for name, x in token_columns.items():
            columns[name] = _Lists(x, counted)
        record_batch = _record_batch(columns, self._schema, rows)

        text = None if method is None else as_text(as_method(method))
        metadata = None
        if text and text != self._method:
            metadata = {META: json.dumps({"method": text}).encode()}
        stream = _stream_of(self._schema, record_batch, metadata)
        self._file.write_part(stream[self._schema_size : -len(STREAM_END)])

    def _rows_of(
        self, batch: Batch, tensors: Mapping[str, Any], layout: Rows | Packed | None
    ) -> dict[str, Any]:
        """Return the tensors of a batch, and those that were given beside it, with one row for each sequence.

        Args:
            batch: The batch.
            tensors: The tensors by name; None for those that were not given.
            layout: As given beside the batch.
        """
        given = [
            name
            for name in ("logp_old", "logp", "advantages", "mask", "entropy")
            if tensors[name] is not None
        ]
        if layout is not None:
            given.append("layout")
        if given:
            raise InvalidValue(f"the batch has its own {', '.join(given)}: leave them out")
        if tensors["logp_rollout"] is None and self._anchor == "rollout":
            tensors = {**tensors, "logp_rollout": batch.logp_anchor}
        sequences = batch.sequences
        columns: dict[str, Any] = {
            **tensors,
            "logp_old": batch.logp_old,
            "logp": None if batch.logp is None else as_row(batch.logp) if sequences.packed else batch.logp,
            "advantages": batch.advantages,
            "mask": batch.mask,
            "entropy": batch.entropy,
        }
        if not sequences.packed:
            return columns
        shape = batch.mask.shape
        on_cpu = sequences.to("cpu")
        rows: dict[str, Any] = {}
        for name, x in columns.items():
            if isinstance(x, torch.Tensor):
                dense = as_row(x) if x.is_nested or x.shape == shape[1:] else x
                rows[name] = on_cpu.to_rows(dense.detach().cpu()) if dense.shape == shape else x
            else:
                rows[name] = x
        return rows

    def flush(self) -> None:
        """Force all added losses to the disk (fsync), so that they survive a loss of power.

        Call it before each checkpoint: a run that is resumed from the checkpoint does not record these losses again.

        Raises:
            OSError: if the disk refuses; the error names the file.
        """
        self._file.sync()

    def close(self) -> None:
        """Close the file. Nothing can be added afterwards.

        Raises:
            OSError: if the disk refuses; the error names the file.
        """
        if self._end.detach() is not None:
            self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Lists(NamedTuple):
    """A column of lists: the list of a sequence has those of its values that are stored."""

    values: Tensor
    """The values, (batch, width)."""
    stored: Tensor
    """True for the values that are stored, (batch, width)."""

    def to_arrow(self, kind: Any) -> Any:
        """Return the column as an Arrow array of this type."""
        pa = import_pyarrow()
        values = self.values.half() if pa.types.is_float16(kind.value_type) else self.values
        offsets = torch.zeros(len(values) + 1, dtype=torch.int32)
        offsets[1:] = self.stored.sum(1).cumsum(0)
        stored_values = pa.array(values[self.stored].numpy())
        return pa.ListArray.from_arrays(pa.array(offsets.numpy()), stored_values, type=kind)


def _token_columns(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the columns with one value per token, each (batch, time) on the CPU.

    Args:
        tensors: The arguments of `Recorder.add` by name; None for those that were not given.

    Raises:
        ValueError: if a tensor has another shape than ``logp_old``.
    """
    logp_old = tensors["logp_old"]

    def on_cpu(name: str) -> Tensor:
        x = tensors[name]
        if x.shape != logp_old.shape:
            raise InvalidValue(
                f"{name} has shape {tuple(x.shape)}, logp_old {tuple(logp_old.shape)}; they must be equal"
            )
        return x.detach().cpu()

    old = on_cpu("logp_old").float()
    columns = {"logp_old": old}
    if tensors["logp"] is not None:
        columns["log_ratio"] = on_cpu("logp").float() - old
    if tensors["logp_rollout"] is not None:
        columns["log_weight"] = old - on_cpu("logp_rollout").float()
    if tensors["entropy"] is not None:
        columns["entropy"] = on_cpu("entropy")
    if tensors["collision"] is not None:
        columns["collision"] = on_cpu("collision").float()
    if tensors["tokens"] is not None:
        columns["token"] = on_cpu("tokens").int()
    columns["position"] = torch.arange(logp_old.shape[1], dtype=torch.int32).expand(len(logp_old), -1)
    return columns


def process_number() -> int:
    """Return the number of this process among those that train together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


SET_ASIDE = "damaged-"
"""The beginning of the names of files of which nothing can be read."""


def _new_file(folder: Path, process: int) -> tuple[Path, SealedFile]:
    """Create another file of this process, and return its path and the file.

    Earlier files of the process of which nothing can be read are set aside, so that the others can be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    openings = [-1]
    for path in sorted(folder.iterdir()):
        match = re.fullmatch(rf"({SET_ASIDE})?tokens-{process:05d}-(\d+)\.(?:arrow|sha256)", path.name)
        if match is None:
            continue
        openings.append(int(match[2]))
        if path.suffix == ".arrow" and not match[1] and holds_nothing_readable(path):
            _set_aside(path)
    opening = max(openings) + 1
    while True:
        path = folder / f"tokens-{process:05d}-{opening:04d}.arrow"
        try:
            return path, SealedFile(path)
        except FileExistsError:  # of another process with this number
            opening += 1


def _set_aside(path: Path) -> None:
    """Rename a file and its digests, so that they are no part of the record."""
    for file in (path, path.with_suffix(SUFFIX)):
        if file.exists():
            file.replace(file.with_name(SET_ASIDE + file.name))
    warnings.warn(
        f"{path} is damaged and nothing of it can be read, so it is set aside as {SET_ASIDE}{path.name}",
        stacklevel=4,
    )


def _values_of_sequences(name: str, x: Any, rows: int) -> list[Any] | None:
    """Return a tensor or list with one value per sequence as a list; None if there is none."""
    if x is None:
        return None
    values = torch.as_tensor(x).detach().cpu()
    if values.shape != (rows,):
        raise InvalidValue(f"{name} has shape {tuple(values.shape)}; there are {rows} sequences")
    return values.tolist()


def _by_sequence(name: str, x: Any, counted: Tensor, dtype: torch.dtype) -> _Lists | None:
    """Return the values of a column, with one value per sequence in place of one per token if nothing is lost by it.

    Args:
        name: The column, for errors.
        x: A number, or a tensor with one value per sequence or per token.
        counted: True for the counted tokens, (batch, time).
        dtype: The dtype of the column.

    Returns:
        The column, of width 1 if all counted tokens of a sequence have the same value, in every sequence; else of the
        width of the batch. None if ``x`` is None.
    """
    if x is None:
        return None
    x = torch.as_tensor(x).detach().cpu().to(dtype)
    shape = counted.shape
    if x.shape == (shape[0], 1):
        x = x.squeeze(-1)
    if x.shape not in ((), shape[:1], shape):
        raise InvalidValue(
            f"{name} of shape {tuple(x.shape)} fits neither the tokens {tuple(shape)} nor the sequences "
            f"{tuple(shape[:1])}"
        )
    x = x if x.shape == shape else x.expand(shape[:1]).unsqueeze(-1).expand(shape)
    first = x.gather(1, counted.int().argmax(1, keepdim=True))
    shared = bool(((x == first) | ~counted).all())
    if shared:
        return _Lists(first, torch.ones_like(first, dtype=torch.bool))
    return _Lists(x, counted)


def _stream_of(schema: Any, batch: Any = None, metadata: Mapping[bytes, bytes] | None = None) -> bytes:
    """Return the bytes of an Arrow stream with a schema and, if given, one batch with its metadata."""
    pa = import_pyarrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        if batch is not None:
            stream.write_batch(batch, custom_metadata=metadata)
    return sink.getvalue().to_pybytes()


def _record_batch(columns: Mapping[str, list[Any] | _Lists | None], schema: Any, rows: int) -> Any:
    """Build an Arrow record batch.

    Args:
        columns: The columns by name, each with one value or one list per row. Missing columns are null.
        schema: The schema.
        rows: The number of rows.
    """
    pa = import_pyarrow()

    def array(field: Any) -> Any:
        column = columns.get(field.name)
        if column is None:
            return pa.nulls(rows, field.type)
        if isinstance(column, _Lists):
            return column.to_arrow(field.type)
        return pa.array(column, field.type)

    return pa.record_batch([array(field) for field in schema], schema=schema)
