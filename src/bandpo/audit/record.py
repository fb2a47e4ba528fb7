"""Read what `bandpo.Recorder` wrote: the tokens of every loss, as a method would have seen them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bandpo._checks import LOGP_SLACK
from bandpo.audit.recorder import FILE_NAME, META, pyarrow, record_files
from bandpo.batch import Batch
from bandpo.errors import InvalidValue
from bandpo.methods import Method
from bandpo.schedules import TrainingState
from bandpo.text import parse

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = (1, 2)
TENSORS = ("version", "advantages", "logp_old", "log_ratio", "log_weight", "entropy")
"""Columns of lists that every format has."""
STREAM_START = b"\xff\xff\xff\xff"
"""How an Arrow stream, and each message in it, begins."""


@dataclass(frozen=True, eq=False)
class Call:
    """The tokens of one loss."""

    place: str
    """File and number of the call in it, from 1."""
    step: int | None
    method: Method | None
    """The run's own, if it is known."""
    anchor: str
    """Whose log-probabilities the bounds surround: ``trainer`` or ``rollout``; as read, the run's."""
    framework: str
    """What trained, as the recorder was told."""
    batch: Batch
    """``logp_anchor`` is the rollout engine's: NaN where it gave no log-probability, None without an engine."""
    lag: Tensor | None
    """``step − version``, int64; None where one of them is not known."""
    token: Tensor | None = None
    """Ids of the tokens, int32; None, like all below, where the record does not tell."""
    position: Tensor | None = None
    """Columns of the loss's tensors in which the tokens stood, int32."""
    generation: int | None = None
    """Number of the generated batch."""
    update: int | None = None
    """Optimiser steps on that batch before this loss."""
    group: Tensor | None = None
    """Number of each sequence's prompt."""
    reward: Tensor | None = None
    """Of each sequence."""
    truncated: Tensor | None = None
    """Whether each sequence was cut off."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The engine's settings."""
    bad: int = 0
    """Sequences that were left out for values that cannot be right."""
    known: bool = True
    """Whether the log-probabilities of the policy in training are; else the old ones stand for them."""

    @property
    def engine(self) -> Tensor | None:
        """Its log-probabilities; the trainer's where it gave none."""
        logp = self.batch.logp_anchor
        return None if logp is None else torch.where(logp.isnan(), self.batch.logp_old, logp)

    @property
    def judged(self) -> Batch:
        """The batch with what the bounds surround as its ``logp_anchor``.

        Raises:
            ValueError: the bounds surround ``rollout``, but the record has none.
        """
        surround = self.engine if self.anchor == "rollout" else None
        if self.anchor == "rollout" and surround is None:
            raise InvalidValue(
                f"{self.place} has no log-probabilities of the rollout engine to anchor at; give them to "
                "Recorder.add(logp_rollout=…)"
            )
        return self.batch._replace(logp_anchor=surround)


def told_method(text: str | None, place: object, given: Method | None = None) -> Method | None:
    """Return the run's method as a file names it; if it names none, or one that cannot be read, ``given``.

    The text is a stranger's, so it may only name classes of bandpo. A warning says what cannot be read, unless a method
    is given.

    Args:
        text: What the file says.
        place: Where it stands, for the warning.
        given: What the user says that it is.
    """
    if text is None:
        return given
    try:
        return parse(text, imports=False)
    except (AttributeError, TypeError, ValueError) as error:
        if given is None:
            warnings.warn(
                f"{place}: the method that the run was trained with is not known: {error}; if you trust it, name it "
                "yourself by --run-method (method=)",
                stacklevel=3,
            )
        return given


def read_calls(path: str | Path, method: Method | None = None) -> Iterator[Call]:
    """The losses of a record, file by file in the order in which they were recorded.

    Of a run that was resumed, the steps that a later file of a process repeats are left out of its earlier ones. A
    last batch that is cut off, as a kill or a run still at work leaves it, is left out with a warning. So are sequences
    whose values cannot be right (NaN, a log-probability above 0); the warning counts them and names the first.

    Args:
        path: The folder, or one file of it.
        method: The run's own, where the record does not tell it.

    Raises:
        ValueError: there is no record; a file is of another kind or format, lacks a column or is damaged. The
            message names the file.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with Recorder(folder) as recorder:
    ...     recorder.add(logp=-torch.ones(1, 3), logp_old=-torch.ones(1, 3), advantages=torch.ones(1), step=7)
    >>> [(call.step, call.batch.advantages) for call in read_calls(folder)]
    [(7, tensor([[1., 1., 1.]]))]
    """
    path = Path(path)
    files = record_files(path)
    if not files:
        raise InvalidValue(
            f"{path} holds no record; give the folder that bandpo.Recorder wrote, or a tokens-….arrow in it"
        )
    until = _repeated_from(files)
    bad, fault = 0, ""
    for file in files:
        for call in _read_file(file, method):
            if call.step is not None and call.step >= until.get(file, call.step + 1):
                continue
            cleared, first = without_bad(call)
            bad, fault = bad + cleared.bad, fault or (first and f"{call.place}, {first}")
            yield cleared
    if bad:
        text = f"{path}: {bad} sequences with values that cannot be right are left out; the first: {fault}"
        warnings.warn(text, stacklevel=2)


def _opened(file: Path, source: Any) -> tuple[Any, dict[str, Any]]:
    """The stream of a file that is no record of another kind, and what its schema says."""
    start = source.read(len(STREAM_START))
    if start and not STREAM_START.startswith(start):
        raise InvalidValue(f"{file} is no record of bandpo.Recorder: it is no Arrow stream")
    source.seek(0)
    pa = pyarrow()
    try:
        stream = pa.ipc.open_stream(source)
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidValue(f"{file} ends or breaks before its first tokens ({error})") from error
    written = (stream.schema.metadata or {}).get(META)
    if written is None:
        raise InvalidValue(f"{file} is no record of bandpo.Recorder: its schema says nothing of bandpo")
    said = json.loads(written)
    if said["format"] not in FORMATS:
        raise InvalidValue(
            f"{file} is in format {said['format']} (bandpo {said['bandpo']}), this version reads formats "
            f"{', '.join(map(str, FORMATS))}; read it with that version"
        )
    lacks = [name for name in ("step", *TENSORS) if name not in stream.schema.names]
    if lacks:
        raise InvalidValue(f"{file} lacks the column{'s'[: len(lacks) > 1]} {', '.join(lacks)}")
    return stream, said


def _batches(file: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """What is said of each record batch, and the batch."""
    pa = pyarrow()
    with pa.OSFile(str(file)) as source:
        size = source.size()
        if not size:  # killed before it could say anything
            return
        (reader, said), number = _opened(file, source), 0
        while True:
            start = source.tell()
            try:
                read = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                return
            except (pa.ArrowInvalid, OSError) as error:
                ran_out = source.tell() == size
                source.seek(start)
                if not (ran_out and STREAM_START.startswith(source.read(len(STREAM_START)))):
                    raise InvalidValue(
                        f"{file} is damaged after call {number}, at byte {start} of {size}: {error}"
                    ) from error
                warnings.warn(f"{file}: what follows call {number} is cut off and is left out", stacklevel=2)
                return
            number += 1
            own = (read.custom_metadata or {}).get(META)
            yield (said | json.loads(own) if own else said), read.batch


def _read_file(file: Path, given: Method | None) -> Iterator[Call]:
    last: Any = None
    method = given
    for number, (said, rows) in enumerate(_batches(file), 1):
        place = f"{file}, call {number}"
        if said["method"] != last:
            last, method = said["method"], told_method(said["method"], file.parent, given)
        counts = _lengths(rows.column("logp_old"))
        mask = torch.arange(int(counts.max(initial=1)))[None] < torch.from_numpy(counts)[:, None]
        columns = {name: _padded(name, rows.column(name), mask, place) for name in TENSORS}
        advantages, old, ratio = (columns[name] for name in ("advantages", "logp_old", "log_ratio"))
        if advantages is None or old is None:
            raise InvalidValue(f"{place}: one of the columns advantages and logp_old is empty")
        rollout = None if columns["log_weight"] is None else old - columns["log_weight"]
        step, version = rows.column("step")[0].as_py(), columns["version"]
        lag = None if step is None or version is None else (step - version) * mask
        counted, entropy = mask.float(), columns["entropy"]
        state = TrainingState(age=lag, mask=counted)
        known = ratio is not None
        batch = Batch(
            ratio if known else torch.zeros_like(old), old, advantages, counted, rollout, entropy, state=state
        )
        names = rows.schema.names  # of format 1 the rest is not
        later: dict[str, Any] = {
            name: _padded(name, rows.column(name), mask, place)
            for name in ("token", "position")
            if name in names
        }
        later |= {name: rows.column(name)[0].as_py() for name in ("generation", "update") if name in names}
        for name in ("group", "reward", "truncated"):
            if name in names and not rows.column(name).null_count:
                later[name] = torch.tensor(rows.column(name).to_pylist())
        later |= {"sampling": said.get("sampling", {}), "known": known}
        yield Call(place, step, method, said["anchor"], said["framework"], batch, lag, **later)


def _lengths(column: Any) -> Any:
    return column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype("int64")


def _padded(name: str, column: Any, mask: Tensor, place: str) -> Tensor | None:
    """A column of lists in the shape of the mask; a list of one value holds for its whole sequence."""
    if column.null_count == len(column):
        return None
    lengths = torch.from_numpy(_lengths(column))
    values = torch.from_numpy(column.flatten().to_numpy(zero_copy_only=False).copy())
    values = values.float() if values.is_floating_point() else values
    counts = mask.sum(1)
    if torch.equal(lengths, counts):
        return torch.zeros(mask.shape, dtype=values.dtype).masked_scatter_(mask, values)
    if (lengths == 1).all():
        return torch.where(mask, values[:, None], torch.zeros((), dtype=values.dtype))
    row = int(((lengths != counts) & (lengths != 1)).nonzero()[0]) + 1
    raise InvalidValue(
        f"{place}, row {row}: {name} has {lengths[row - 1]} values, logp_old {counts[row - 1]}; they must be equal"
    )


def _repeated_from(files: Sequence[Path]) -> dict[Path, int]:
    """For each file the step from which a later one of its process recorded again."""
    found: dict[Path, int] = {}
    first: dict[str, int] = {}
    for file in reversed(files):
        match = FILE_NAME.fullmatch(file.name)
        process = match[1] if match else file.name
        if process in first:
            found[file] = first[process]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = next((batch for _, batch in _batches(file)), None)
        step = None if batch is None else batch.column("step")[0].as_py()
        if step is not None:
            first[process] = min(step, first.get(process, step))
    return found


def without_bad(call: Call) -> tuple[Call, str]:
    """A call without the rows that hold a value that cannot be right, and what stands in the first of them."""
    batch = call.batch
    values = {"advantages": batch.advantages, "logp_old": batch.logp_old, "logp": batch.logp}
    if call.engine is not None:
        values["logp_rollout"] = call.engine
    faults = {name: ~x.isfinite() | ((x > LOGP_SLACK) & (name != "advantages")) for name, x in values.items()}
    bad = torch.stack([*faults.values()]).any(0).any(1)
    if not bad.any():
        return call, ""
    row = int(bad.int().argmax())
    name = next(name for name, wrong in faults.items() if wrong[row].any())
    token = int(faults[name][row].int().argmax())
    cleared = replace(call, batch=batch.map(lambda x: x.masked_fill(bad[:, None], 0.0)), bad=int(bad.sum()))
    return cleared, f"row {row + 1}: {name} is {values[name][row, token]:g} at counted token {token + 1}"
