"""Tokens written to disk while any loop trains, to be audited afterwards under any rule: ``bandpo audit FOLDER``.

Each process writes one Arrow stream of its own (``tokens-PROCESS-OPENING.arrow``), and each `Recorder.add` one record
batch in it, a row a sequence. A file of digests lies beside it, by which a reader notices damage. What was added is in
the file when `add` returns, so a kill loses at most the batch that was being written. docs/record-format.md describes
the files.
"""

from __future__ import annotations

import itertools
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import bandpo
from bandpo.batch import normalize_mask
from bandpo.errors import InvalidValue
from bandpo.methods import Method
from bandpo.rules import ClipRule
from bandpo.runs.record_format import FORMAT, META, import_pyarrow, record_schema
from bandpo.runs.record_parts import STREAM_END, SealedFile
from bandpo.sequences import unpack
from bandpo.text import as_method, as_text

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Recorder:
    """Writes the tokens of every loss to ``folder``; `add` is called where the loss is computed.

    Several processes may write to one folder: each has a file of its own. A run that is resumed gets a further one, and
    the steps that it repeats count once. Nothing here draws from torch's random numbers.

    Args:
        folder: Where the files go; made if it is not there.
        method: The run's method, which a replay shows first; as for `bandpo.policy_loss`. It may be left out.
        anchor: Whose log-probabilities the run's bounds surround: ``trainer`` (``logp_old``) or ``rollout``.
        every: Steps that are no multiple of it are left out. (Calls of `add` are counted where no step is given.)
        dtype: ``float32`` replays the same figures; ``float16`` takes half the space, see docs/record.md.
        process: Number of this process; by default its rank in torch.distributed, else 0.
        framework: What trains, for the reader: ``trl 1.16``.
        sampling: The engine's settings: ``{"temperature": 0.7, "top_p": 1.0}``.

    Raises:
        ImportError: pyarrow is not installed.
        ValueError: a setting is out of range, or the method cannot be written as text.
        OSError: the folder cannot be written to.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> logp_old = torch.tensor([[0.08, 0.50]]).log()
    >>> with Recorder(folder, method="FixedClip(0.2)") as recorder:
    ...     recorder.add(logp=logp_old + 0.5, logp_old=logp_old, advantages=torch.tensor([1.0]), step=3)
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
    ):
        import_pyarrow()
        if every < 1:
            raise InvalidValue(f"every must be at least 1 (each step), got {every!r}")
        if dtype not in ("float32", "float16"):
            raise InvalidValue(f"dtype must be 'float32' or 'float16', got {dtype!r}")
        if anchor not in ("trainer", "rollout"):
            raise InvalidValue(f"anchor must be 'trainer' or 'rollout', got {anchor!r}")
        self.every, self.dtype = every, dtype
        process = _rank() if process is None else process
        self._method = None if method is None else as_text(as_method(method))
        said = {
            "format": FORMAT,
            "method": self._method,
            "anchor": anchor,
            "every": every,
            "process": process,
            "framework": framework,
            "sampling": dict(sampling or {}),
            "bandpo": bandpo.__version__,
            "torch": torch.__version__,
        }
        self._schema = record_schema(dtype).with_metadata({META: json.dumps(said).encode()})
        self._calls = 0
        self.path, self._file = _new_file(Path(folder), process)
        schema_part = _stream_of(self._schema)[: -len(STREAM_END)]
        self._schema_size = len(schema_part)
        self._file.write_part(schema_part)
        # It runs at exit too, if nobody calls close.
        self._end = weakref.finalize(self, self._file.close)

    @torch.no_grad()
    def add(
        self,
        *,
        logp: Float[Tensor, "batch time"] | None = None,
        logp_old: Float[Tensor, "batch time"],
        advantages: Float[Tensor, "batch time"] | Float[Tensor, " batch"],
        mask: Tensor | None = None,
        logp_rollout: Float[Tensor, "batch time"] | None = None,
        entropy: Float[Tensor, "batch time"] | None = None,
        step: int | None = None,
        version: int | Tensor | None = None,
        tokens: Tensor | None = None,
        generation: int | None = None,
        update: int | None = None,
        group: Sequence[int] | Tensor | None = None,
        reward: Sequence[float] | Tensor | None = None,
        truncated: Sequence[bool] | Tensor | None = None,
        method: Method | ClipRule | str | None = None,
        segments: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        """Append the tokens of one loss; what stands where the mask is 0 is not kept.

        Values are kept as they are, NaN included: a replay names the row, and training goes on. Shapes and the mask
        are checked as for `bandpo.policy_loss`.

        Args:
            logp: Log-probabilities (nats) of the sampled tokens under the policy in training; None where a batch is
                recorded before a loss is made of it, of which no rule can be replayed.
            logp_old: The same under the policy that the ratio refers to.
            advantages: One per token or per sequence.
            mask: 1 (or True) for tokens that count; all if omitted.
            logp_rollout: The same as the engine that sampled gave them; NaN where it gave none.
            entropy: Entropy (nats) of the policy at each token.
            step: The trainer's step.
            version: The step whose weights sampled, in the same count as ``step``: one, one per sequence, or one per
                token. ``step − version`` is the lag of an asynchronous trainer.
            tokens: Ids of the sampled tokens, of the shape of ``logp_old``.
            generation: Number of the generated batch that these sequences are of.
            update: Optimiser steps made on that batch before this loss: 0 for the first look at it.
            group: For each sequence the number of its prompt.
            reward: For each sequence its whole reward, before any baseline.
            truncated: For each sequence whether its answer was cut off at the length limit.
            method: The run's method in this loss, if it is not the one told at construction (a radius that changes).
            segments: In a packed batch the number of each token's sequence, as for `bandpo.policy_loss`. Each sequence
                becomes a row of the record.
            cu_seqlens: In a packed batch where each sequence begins, as for `bandpo.policy_loss`.

        Raises:
            ValueError: shapes differ, the mask holds another value than 0 and 1, or the recorder is closed.
        """
        if not self._end.alive:
            raise InvalidValue(f"{self.path} is closed; make a new Recorder for more")
        call, self._calls = self._calls, self._calls + 1
        if (call if step is None else step) % self.every:
            return
        tensors = unpack(
            {
                "logp_old": logp_old,
                "logp": logp,
                "advantages": advantages,
                "mask": mask,
                "logp_rollout": logp_rollout,
                "entropy": entropy,
                "tokens": tokens,
                "version": version,
            },
            segments,
            cu_seqlens,
        )
        logp_old, logp, advantages = tensors["logp_old"], tensors["logp"], tensors["advantages"]
        mask, logp_rollout, entropy = tensors["mask"], tensors["logp_rollout"], tensors["entropy"]
        tokens, version = tensors["tokens"], tensors["version"]
        if logp_old.dim() != 2:
            raise InvalidValue(f"logp_old must have the shape (batch, time), got {tuple(logp_old.shape)}")
        counted = normalize_mask(logp_old, mask).cpu() != 0
        rows = len(counted)

        def each_token(name: str, x: Tensor) -> Tensor:
            if x.shape != logp_old.shape:
                raise InvalidValue(
                    f"{name} has shape {tuple(x.shape)}, logp_old {tuple(logp_old.shape)}; they must be equal"
                )
            return x.detach().cpu()

        old = each_token("logp_old", logp_old).float()
        each = {"logp_old": old}
        if logp is not None:
            each["log_ratio"] = each_token("logp", logp).float() - old
        if logp_rollout is not None:
            each["log_weight"] = old - each_token("logp_rollout", logp_rollout).float()
        if entropy is not None:
            each["entropy"] = each_token("entropy", entropy)
        if tokens is not None:
            each["token"] = each_token("tokens", tokens).int()
        each["position"] = torch.arange(logp_old.shape[1], dtype=torch.int32).expand(rows, -1)
        of_sequences = {"group": group, "reward": reward, "truncated": truncated}
        columns = {
            "step": [step] * rows,
            "generation": [generation] * rows,
            "update": [update] * rows,
            **{name: _one_each(name, x, rows) for name, x in of_sequences.items()},
            "version": _by_sequence("version", version, counted, torch.int64),
            "advantages": _by_sequence("advantages", advantages, counted, torch.float32),
            **{name: (x, counted) for name, x in each.items()},
        }
        batch = _record_batch(columns, self._schema, rows)
        text = None if method is None else as_text(as_method(method))
        said = {META: json.dumps({"method": text}).encode()} if text != self._method and text else None
        self._file.write_part(_stream_of(self._schema, batch, said)[self._schema_size : -len(STREAM_END)])

    def flush(self) -> None:
        """Put what was added on the disk, so that a machine that goes down does not lose it either."""
        self._file.sync()

    def close(self) -> None:
        """End the file; nothing can be added after it."""
        self._end()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rank() -> int:
    """Of this process among those that train together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _new_file(folder: Path, process: int) -> tuple[Path, SealedFile]:
    """Make a file of this process that was not there before."""
    folder.mkdir(parents=True, exist_ok=True)
    for opening in itertools.count():
        path = folder / f"tokens-{process:05d}-{opening:04d}.arrow"
        try:
            return path, SealedFile(path)
        except FileExistsError:
            continue
    raise AssertionError("unreachable")


def _one_each(name: str, x: Any, rows: int) -> list[Any] | None:
    """A value for each sequence."""
    if x is None:
        return None
    values = torch.as_tensor(x).detach().cpu()
    if values.shape != (rows,):
        raise InvalidValue(f"{name} has shape {tuple(values.shape)}; there are {rows} sequences")
    return values.tolist()


def _by_sequence(name: str, x: Any, counted: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Values and where they count: one per sequence where its tokens share it, else one per token."""
    if x is None:
        return None
    x, shape = torch.as_tensor(x).detach().cpu().to(dtype), counted.shape
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
    return (first, torch.ones_like(first, dtype=torch.bool)) if shared else (x, counted)


def _stream_of(schema: Any, batch: Any = None, metadata: Mapping[bytes, bytes] | None = None) -> bytes:
    """Return the Arrow stream of a schema, and of a batch with metadata of its own."""
    pa = import_pyarrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        if batch is not None:
            stream.write_batch(batch, custom_metadata=metadata)
    return sink.getvalue().to_pybytes()


def _record_batch(columns: Mapping[str, Any], schema: Any, rows: int) -> Any:
    """One Arrow record batch; of a column of lists the values are ``x[where]``, row by row."""
    pa = import_pyarrow()

    def array(field: Any) -> Any:
        column = columns.get(field.name)
        if column is None:
            return pa.nulls(rows, field.type)
        if isinstance(column, list):
            return pa.array(column, field.type)
        values, where = column
        if pa.types.is_float16(field.type.value_type):
            values = values.half()
        ends = torch.zeros(rows + 1, dtype=torch.int32)
        ends[1:] = where.sum(1).cumsum(0)
        return pa.ListArray.from_arrays(
            pa.array(ends.numpy()), pa.array(values[where].numpy()), type=field.type
        )

    return pa.record_batch([array(field) for field in schema], schema=schema)
