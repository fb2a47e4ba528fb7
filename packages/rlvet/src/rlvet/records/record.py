"""Read the records of `bandpo.audit.Recorder`: the tokens of every loss of a run."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvet._limits import LOGP_SLACK
from rlvet.errors import InvalidValue
from rlvet.records.format import (
    FILE_NAME,
    META,
    READ_FORMATS,
    REQUIRED_COLUMNS,
    VERSION_AT,
    import_pyarrow,
    record_schema,
)
from rlvet.records.gaps import StepGaps
from rlvet.records.parts import decompressed_size, read_parts
from rlvet.runs.limits import LARGEST_BATCH, MOST_TOKENS

if TYPE_CHECKING:
    from numpy import ndarray as Array

LARGEST_NUMBER = 2**53
"""The largest step, generation or update. A float represents every smaller integer exactly."""


@dataclass(frozen=True, eq=False)
class LossBatch:
    """The tokens of one loss, as numpy arrays.

    Arrays of tokens have the shape (batch, time), and are 0 where ``mask`` is False. An attribute is None if the run
    did not record it.
    """

    location: str
    """The file, and the number of the loss in it, from 1."""
    step: int | None
    """The trainer's step."""
    method: str | None
    """The text of the run's method. It comes from a file that may not be trusted, see `bandpo.core.text.parse`."""
    anchor: str
    """The policy whose log-probabilities the bounds are computed from: ``trainer`` or ``rollout``."""
    framework: str
    """The framework and its version, as passed to the recorder: ``trl 1.16``."""
    log_ratio: Array
    """log(π/π_old), nats, float32; 0 if the log-probabilities of the policy in training were not recorded."""
    logp_old: Array
    """Log-probabilities (nats) under the old policy, float32."""
    advantages: Array
    """Advantages per token, float32."""
    mask: Array
    """True for tokens that count."""
    logp_rollout: Array | None = None
    """Log-probabilities (nats) of the rollout engine, float32; NaN where it returned none."""
    entropy: Array | None = None
    """Entropy (nats) of the policy at each token, float32."""
    lag: Array | None = None
    """Age of the weights that sampled each token, in versions, int64; an upper bound if `version_at` is not ``token``.
    """
    current_version: int | None = None
    """The version of the weights in training. Without it, versions are counted in steps."""
    token: Array | None = None
    """Token ids, int32."""
    position: Array | None = None
    """The column of each token in the loss's tensors, int32."""
    generation: int | None = None
    """The number of the generated batch."""
    update: int | None = None
    """The number of optimiser steps on that batch before this loss."""
    group: Array | None = None
    """The number of each sequence's group, the answers to one prompt, in the generated batch, (batch,)."""
    reward: Array | None = None
    """The reward of each sequence, (batch,)."""
    truncated: Array | None = None
    """True for sequences that were cut off at the length limit, (batch,)."""
    collision: Array | None = None
    """Σ q²·(log q + H) over the vocabulary at each token, with the probabilities q and the entropy H of the policy in
    training, nats, float32."""
    version_at: str = "token"
    """The moment at which the version of the sampling weights was read, one of `rlvet.records.format.VERSION_AT`."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The engine's sampling settings."""
    bad_sequences: int = 0
    """The number of sequences that were left out because of invalid values."""
    has_logp: bool = True
    """True if the log-probabilities of the policy in training were recorded."""

    @property
    def logp(self) -> Array:
        """The log-probabilities (nats) under the policy in training."""
        return self.logp_old + self.log_ratio

    @property
    def logp_engine(self) -> Array | None:
        """The engine's log-probabilities, and the trainer's where it returned none; None without an engine."""
        import numpy as np

        if self.logp_rollout is None:
            return None
        return np.where(np.isnan(self.logp_rollout), self.logp_old, self.logp_rollout)

    @property
    def logp_anchor(self) -> Array | None:
        """The log-probabilities from which the run's bounds are computed; None if they are ``logp_old``.

        Raises:
            ValueError: if they are the engine's, and the record does not have them.
        """
        if self.anchor != "rollout":
            return None
        if self.logp_rollout is None:
            raise InvalidValue(
                f"{self.location} has no log-probabilities of the rollout engine to anchor at; pass them to "
                "Recorder.add(logp_rollout=…)"
            )
        return self.logp_engine

    def without_bad_sequences(self) -> tuple[LossBatch, str]:
        """Return the batch without the sequences that have an invalid value, and a description of the first such value.

        A value is invalid if it is NaN or infinite, or if it is a log-probability above 0 by more than rounding. The
        rows of the sequences stay, with a mask of False. The description is empty if every value is valid.
        """
        import numpy as np

        values = {"advantages": self.advantages, "logp_old": self.logp_old, "logp": self.logp}
        if self.logp_engine is not None:
            values["logp_rollout"] = self.logp_engine
        invalid = {}
        for name, array in values.items():
            invalid[name] = ~np.isfinite(array)
            if name != "advantages":
                invalid[name] |= array > LOGP_SLACK
        bad_rows = np.asarray(np.stack([*invalid.values()]).any(axis=(0, 2)))
        if not bad_rows.any():
            return self, ""

        row = int(bad_rows.argmax())
        name = next(name for name, invalid_tokens in invalid.items() if invalid_tokens[row].any())
        token = int(invalid[name][row].argmax())
        first = f"row {row + 1}: {name} is {values[name][row, token]:g} at counted token {token + 1}"

        changes: dict[str, Any] = {"bad_sequences": int(bad_rows.sum())}
        for name in ("log_ratio", "logp_old", "advantages", "mask", "logp_rollout", "entropy", "collision"):
            array = getattr(self, name)
            if array is not None:
                changes[name] = np.where(bad_rows[:, None], np.zeros((), array.dtype), array)
        return replace(self, **changes), first


def record_files(path: Path) -> Sequence[Path]:
    """Return the files of a record: the path itself, or those in the folder; empty if the path is no record."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if FILE_NAME.fullmatch(file.name))
    return [path] if path.suffix == ".arrow" else []


def read_record(path: str | Path) -> Iterator[LossBatch]:
    """Yield the loss batches of a record, file by file in the order in which they were recorded.

    If a run was resumed, steps that a process recorded again are only read from its later file. Left out with a warning
    are an incomplete last batch, from a run that was killed or is still writing; batches whose digest does not match;
    and sequences with invalid values (NaN, a log-probability above 0), with their number and the first of them.
    A warning names the steps that are missing between two files of a process, or before its first one, as after a loss
    of power.

    Args:
        path: The folder that `bandpo.audit.Recorder` wrote, or one file of it.

    Raises:
        ValueError: if there is no record, or a file is of another kind or format, lacks a column or is damaged. The
            message names the file.
    """
    path = Path(path)
    files = record_files(path)
    if not files:
        raise InvalidValue(
            f"{path} holds no record; give the folder that bandpo.audit.Recorder wrote, or a tokens-….arrow in it"
        )
    first_repeated = _first_repeated_steps(files)
    bad_sequences = 0
    first_problem = ""
    gaps = StepGaps()
    for file in files:
        for batch in _read_file(file):
            if batch.step is not None and batch.step >= first_repeated.get(file, batch.step + 1):
                continue
            gaps.add(file, batch.step)
            valid_batch, problem = batch.without_bad_sequences()
            bad_sequences += valid_batch.bad_sequences
            if problem and not first_problem:
                first_problem = f"{batch.location}, {problem}"
            yield valid_batch
    if path.is_dir():
        for message in gaps.messages():
            warnings.warn(f"{path}: {message}", stacklevel=2)
    if bad_sequences:
        warnings.warn(
            f"{path}: {bad_sequences} sequences with values that cannot be right are left out; the first: "
            f"{first_problem}",
            stacklevel=2,
        )


def _parse_metadata(text: bytes | None, file: Path) -> dict[str, Any]:
    """Parse and check the metadata of a file's schema.

    Raises:
        ValueError: if they are not those of a record, or of another version of the format.
    """
    if text is None:
        raise InvalidValue(
            f"{file} is no record of bandpo.audit.Recorder: its schema has no metadata of bandpo"
        )
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(
            f"{file} is no record of bandpo.audit.Recorder: its metadata are no JSON"
        ) from error
    if not isinstance(metadata, dict):
        raise InvalidValue(f"{file} is no record of bandpo.audit.Recorder: its metadata are no object")
    if metadata.get("format") not in READ_FORMATS:
        raise InvalidValue(
            f"{file} is in format {metadata.get('format')} (bandpo {metadata.get('bandpo')}), this version reads "
            f"the formats {' and '.join(map(str, READ_FORMATS))}; read it with the version that wrote it"
        )
    defaults = {"method": None, "anchor": "trainer", "framework": "", "sampling": {}, "version_at": "token"}
    metadata = defaults | metadata
    sampling = metadata["sampling"]
    is_valid = {
        "method": metadata["method"] is None or isinstance(metadata["method"], str),
        "anchor": metadata["anchor"] in ("trainer", "rollout"),
        "framework": isinstance(metadata["framework"], str),
        "version_at": metadata["version_at"] in VERSION_AT,
        "sampling": isinstance(sampling, dict)
        and all(isinstance(value, int | float | None) for value in sampling.values()),
    }
    for name, valid in is_valid.items():
        if not valid:
            raise InvalidValue(
                f"{file} is no record of bandpo.audit.Recorder: its {name} is {metadata[name]!r:.80}"
            )
    return metadata


def _check_columns(schema: Any, file: Path) -> list[int]:
    """Check the columns of a file, and return the indices of those that a record has.

    Raises:
        ValueError: if a required column is missing, or a column has another type than in a record.
    """
    missing = [name for name in REQUIRED_COLUMNS if name not in schema.names]
    if missing:
        columns = "columns" if len(missing) > 1 else "column"
        raise InvalidValue(f"{file} lacks the {columns} {', '.join(missing)}")
    pa = import_pyarrow()
    indices: list[int] = []
    for expected in record_schema("float32"):
        positions = schema.get_all_field_indices(expected.name)
        if not positions:
            continue
        kind = schema.field(positions[0]).type
        expected_kind = expected.type
        if pa.types.is_list(expected.type):
            expected_kind = expected.type.value_type
            if pa.types.is_list(kind) or pa.types.is_large_list(kind):
                kind = kind.value_type
        both_floating = pa.types.is_floating(expected_kind) and pa.types.is_floating(kind)
        if len(positions) > 1 or not (kind == expected_kind or both_floating):
            raise InvalidValue(
                f"{file} has the column {expected.name} as {str(schema.field(positions[0]).type)[:80]}, not once as "
                f"{expected.type}"
            )
        indices.append(positions[0])
    return indices


def _read_record_batches(file: Path) -> Iterator[tuple[int, dict[str, Any], Any]]:
    """Yield the number, the metadata and the Arrow record batch of each loss in a file."""
    pa = import_pyarrow()
    # Each part is read as a stream of its own, after the schema's part.
    schema_part = b""
    metadata: dict[str, Any] = {}
    options = pa.ipc.IpcReadOptions(use_threads=False)
    for number, part in read_parts(file):
        location = f"{file}, call {number}" if number else str(file)
        try:
            if not number:
                schema = pa.ipc.open_stream(pa.BufferReader(part)).schema
                metadata = _parse_metadata((schema.metadata or {}).get(META), file)
                options.included_fields = _check_columns(schema, file)
                schema_part = part
                continue
            size = decompressed_size(part)
            if size > LARGEST_BATCH:
                raise InvalidValue(f"it takes {size:,} bytes, and at most {LARGEST_BATCH:,} are read")
            stream = pa.ipc.open_stream(pa.BufferReader(schema_part + part), options=options)
            message = stream.read_next_batch_with_custom_metadata()
            message.batch.validate(full=True)
        except (pa.ArrowException, OSError, StopIteration, UnicodeDecodeError, InvalidValue) as error:
            if not number and isinstance(error, InvalidValue):
                raise
            raise InvalidValue(f"{location} cannot be read: {error!s:.300}") from error
        method = (message.custom_metadata or {}).get(META)
        if message.batch.num_rows:
            yield number, _with_method(metadata, method, location), message.batch


def _with_method(metadata: dict[str, Any], text: bytes | None, location: str) -> dict[str, Any]:
    """Return the metadata of a loss: those of the file, with the method of the loss's metadata, if it has any."""
    if text is None:
        return metadata
    try:
        method = json.loads(text)["method"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InvalidValue(f"{location}: its metadata name no method") from error
    if not isinstance(method, str):
        raise InvalidValue(f"{location}: its method is no text")
    return metadata | {"method": method}


def _read_file(file: Path) -> Iterator[LossBatch]:
    """Yield the loss batches of a file."""
    for number, metadata, rows in _read_record_batches(file):
        location = f"{file}, call {number}"
        try:
            yield _loss_batch(location, metadata, rows)
        # Corrupt numbers, such as a negative or huge length, raise these errors.
        except (ArithmeticError, LookupError, TypeError, MemoryError) as error:
            raise InvalidValue(f"{location} holds no loss ({error!r:.200})") from error


def _loss_batch(location: str, metadata: Mapping[str, Any], rows: Any) -> LossBatch:
    """Return the loss batch of an Arrow record batch, which has one row per sequence."""
    import numpy as np

    lengths = _list_lengths(rows.column("logp_old"))
    longest = int(lengths.max(initial=1))
    if longest * len(lengths) > MOST_TOKENS:
        raise InvalidValue(
            f"{location} has {len(lengths):,} sequences, the longest of {longest:,} tokens: more than are read"
        )
    mask = np.arange(longest)[None] < lengths[:, None]

    def pad(name: str) -> Array | None:
        """Return a column of tokens in the shape of the mask; None without the column."""
        if name not in rows.schema.names:
            return None
        return _pad(name, rows.column(name), mask, location)

    def read_count(name: str) -> int | None:
        """Return the value of a column that is the same in all rows; None without the column."""
        value = rows.column(name)[0].as_py() if name in rows.schema.names else None
        if value is not None and abs(value) > LARGEST_NUMBER:
            raise InvalidValue(f"{location}: {name} is {value}, which no count reaches")
        return value

    logp_old = pad("logp_old")
    advantages = pad("advantages")
    if advantages is None or logp_old is None:
        raise InvalidValue(f"{location}: one of the columns advantages and logp_old is empty")
    log_ratio = pad("log_ratio")
    log_weight = pad("log_weight")
    version = pad("version")
    step = read_count("step")
    current_version = read_count("current_version")
    latest = step if current_version is None else current_version
    lag = None if latest is None or version is None else (latest - version) * mask

    per_sequence = {}
    for name in ("group", "reward", "truncated"):
        if name in rows.schema.names and not rows.column(name).null_count:
            per_sequence[name] = np.array(rows.column(name).to_pylist())
    return LossBatch(
        location=location,
        step=step,
        method=metadata["method"],
        anchor=metadata["anchor"],
        framework=metadata["framework"],
        log_ratio=np.zeros_like(logp_old) if log_ratio is None else log_ratio,
        logp_old=logp_old,
        advantages=advantages,
        mask=mask,
        logp_rollout=None if log_weight is None else logp_old - log_weight,
        entropy=pad("entropy"),
        lag=lag,
        current_version=current_version,
        token=pad("token"),
        position=pad("position"),
        generation=read_count("generation"),
        update=read_count("update"),
        collision=pad("collision"),
        version_at=metadata["version_at"],
        sampling=metadata["sampling"],
        has_logp=log_ratio is not None,
        **per_sequence,
    )


def _list_lengths(column: Any) -> Array:
    """Return the length of each list in an Arrow column; 0 for null."""
    return column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype("int64")


def _pad(name: str, column: Any, mask: Array, location: str) -> Array | None:
    """Return an Arrow column of lists as an array in the shape of the mask, with 0 at padding.

    A list with a single value applies to all tokens of its sequence.

    Args:
        name: The name of the column, for errors.
        column: The column, one list per sequence.
        mask: True for tokens; shape (batch, time).
        location: The file and the number of the loss, for errors.

    Returns:
        The array; None if every list is null.
    """
    import numpy as np

    if column.null_count == len(column):
        return None
    lengths = _list_lengths(column)
    flat = column.flatten()
    values = flat.to_numpy(zero_copy_only=False)
    if flat.null_count and not import_pyarrow().types.is_floating(flat.type):
        raise InvalidValue(f"{location}: {name} holds a null among its numbers")
    if values.dtype.kind == "f":
        values = values.astype(np.float32)
    counts = mask.sum(1)
    array = np.zeros(mask.shape, values.dtype)
    if np.array_equal(lengths, counts):
        array[mask] = values
        return array
    if (lengths == 1).all():
        return np.where(mask, values[:, None], array)
    row = int(((lengths != counts) & (lengths != 1)).nonzero()[0][0]) + 1
    raise InvalidValue(
        f"{location}, row {row}: {name} has {lengths[row - 1]} values, logp_old {counts[row - 1]}; they must be equal"
    )


def _first_repeated_steps(files: Sequence[Path]) -> dict[Path, int]:
    """Return, for each file, the first step of the later files of its process, if there are any."""
    processes = {}
    for file in files:
        match = FILE_NAME.fullmatch(file.name)
        processes[file] = match[1] if match else file.name
    counts = Counter(processes.values())

    first_repeated: dict[Path, int] = {}
    first_steps: dict[str, int] = {}
    for file in reversed(files):
        process = processes[file]
        if counts[process] == 1:
            continue  # the process was not resumed, so there is no need to open its file
        if process in first_steps:
            first_repeated[file] = first_steps[process]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = next((rows for _, _, rows in _read_record_batches(file)), None)
        step = None if rows is None else rows.column("step")[0].as_py()
        if step is not None:
            first_steps[process] = min(step, first_steps.get(process, step))
    return first_repeated
