"""Read the batches that frameworks save with their own debug options, as loss batches.

NeMo-RL's ``train_data_step….jsonl``, the files of ``--save-debug-train-data`` of slime and miles, and SkyRL's
``dump_data_batch`` have no log-probabilities of the policy in training, so their ratios are 1, as before the first
update. prime-rl's token exports and miles' ``policy_loss_debug`` have them, so that clip rules can be replayed.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvet.errors import InvalidValue, RlvetError
from rlvet.plugins import READERS, require_plugin
from rlvet.records.record import LossBatch
from rlvet.runs.files import check_file, is_leaf, read_jsonl, read_pickle
from rlvet.runs.limits import LARGEST_DUMP, MOST_TOKENS

if TYPE_CHECKING:
    from numpy import ndarray as Array

COLUMNS = {
    "new": ("trainer_logprobs", "train_log_probs"),
    "old": ("prev_logprobs", "log_probs", "action_log_probs", "old_log_probs", "inference_logprobs"),
    "engine": ("generation_logprobs", "rollout_log_probs", "rollout_logprobs", "inference_logprobs"),
    "advantages": ("advantages",),
    "mask": ("token_loss_mask", "loss_masks", "loss_mask", "local_loss_mask"),
    "tokens": ("token_ids", "tokens", "sequences"),
    "entropy": ("entropy",),
    "reward": ("raw_reward", "filtered_rewards", "rewards"),
    "truncated": ("truncated",),
}
"""The names of each column in the files of NeMo-RL, slime (and miles), SkyRL, prime-rl and miles' losses.

prime-rl's ratio uses the engine's log-probabilities as the old ones."""

REQUIRED = ("old", "advantages", "mask")
"""The columns that every batch must have."""

Columns = Mapping[str, Any]
"""The columns of a batch, by the framework's names: each a list with one entry per sequence, or an array."""


def _read_jsonl_columns(path: Path) -> Columns:
    """Read NeMo-RL's file, which has one line per sequence."""
    rows = [row for _, row in read_jsonl(path)]
    if not rows:
        return {}
    return {name: [row[name] for row in rows] for name in rows[0]}


def _read_token_export(path: Path) -> Columns:
    """Read prime-rl's file of one step and process, which has one line per sequence, and null for NaN and infinity."""
    columns = dict(_read_jsonl_columns(path))
    for kind in ("new", "old", "advantages", "entropy"):
        for name in COLUMNS[kind]:
            if name in columns:
                columns[name] = [_null_to_nan(row) for row in columns[name]]
    return columns


def _null_to_nan(row: Sequence[float | None]) -> list[float]:
    """Return a row of numbers with NaN for None."""
    return [math.nan if value is None else value for value in row]


def check_dumps(files: Sequence[Path]) -> None:
    """Check the sizes of files before they are read, as importing torch takes seconds.

    Raises:
        ValueError: if a file, or the content that its directory declares, is larger than the limit, or if it is
            compressed, which files of torch never are, or no regular file.
    """
    for file in files:
        check_file(file, LARGEST_DUMP)
        if file.suffix == ".pt":
            # A damaged archive raises an error when it is read.
            with suppress(zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError):
                _check_archive(file)


def _check_archive(path: Path) -> None:
    """Check the sizes in the directory of a zip archive of torch.

    Raises:
        ValueError: if they add up to more than the limit, or an entry is compressed, which torch never writes.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise InvalidValue(f"{path} is compressed, as no file of torch is")
        _check_bytes(path, sum(entry.file_size for entry in entries))


def _load_tensors(path: Path) -> Any:
    """Load a file of torch without unpickling other classes than tensors.

    Raises:
        ValueError: if its content is larger than the limit, or it is compressed, which torch never writes.
    """
    _check_archive(path)
    return require_plugin(READERS, ".pt", f"{path}, a file of torch,")(path)


def _check_bytes(path: Path, size: int) -> None:
    """Check the size that an archive declares for its content.

    Raises:
        ValueError: if it is above the limit.
    """
    if size > LARGEST_DUMP:
        raise InvalidValue(f"{path} states {size:,} bytes, and at most {LARGEST_DUMP:,} are read")


def _read_policy_loss(path: Path) -> Columns:
    """Read miles' file of one loss of one process, a list with a dict per sequence."""
    samples = _load_tensors(path)["samples"]
    if not samples:
        return {}
    names = [name for name in samples[0] if all(name in sample for sample in samples)]
    return {name: [sample[name] for sample in samples] for name in names}


def _read_train_data(path: Path) -> Columns:
    """Read a file of ``--save-debug-train-data``: slime's, with a dict per sample, or miles', with a list per column.

    Older versions of slime write the second form too.
    """
    content = _load_tensors(path)
    if "samples" not in content:
        return content.get("rollout_data", {})
    samples = content["samples"]
    columns = {}
    for name, value in content.items():
        if isinstance(value, list) and len(value) == len(samples):
            columns[name] = value
    for name in samples[0] if samples else ():
        columns[name] = [sample[name] for sample in samples]
    return columns


def _read_pickled_batch(path: Path) -> Columns:
    """Read SkyRL's batch, a pickle with the arrays as bytes."""
    columns = read_pickle(path.read_bytes(), path).arguments[-1]["batch_dict"]
    return {name: _decode_array(x) for name, x in columns.items() if x and x["format"] in ("numpy", "torch")}


def _decode_array(column: Mapping[str, Any]) -> Any:
    """Return the array or tensor of a column in SkyRL's batch."""
    import numpy as np

    if column["format"] == "torch":
        return require_plugin(READERS, ".pt", "a column that torch wrote")(column["data"])
    return np.frombuffer(column["data"], column["dtype"]).reshape(column["shape"]).copy()


KINDS: Mapping[str, tuple[str, Callable[[Path], Columns]]] = {
    "train_data_step*.jsonl": ("nemo-rl", _read_jsonl_columns),
    "step_*/rank_*.jsonl": ("prime-rl", _read_token_export),
    "rank_*_call_*.pt": ("miles", _read_policy_loss),
    "*.pt": ("slime", _read_train_data),
    "*.pkl": ("skyrl", _read_pickled_batch),
}
"""The framework and the reader of each kind of file. The first pattern that matches is used."""


OF_CHECKPOINT = re.compile(r"optim|sched|rng_state|model|extra_state|^data\.pt$", re.IGNORECASE)
"""Names of files of a checkpoint, which are no dumps, such as ``optimizer.pt``."""


def dump_files(path: Path) -> list[Path]:
    """Return the dumps at a path, which is a file or a folder, in the order of their steps.

    In a folder, files of a checkpoint are left out.
    """
    candidates = {path: None}
    if not is_leaf(path):
        # The path may be prime-rl's folder of a single step, so the pattern with the folder's name does not match.
        candidates = {}
        for pattern in (*KINDS, "rank_*.jsonl"):
            found = path.glob(pattern)
            candidates |= dict.fromkeys(file for file in found if not OF_CHECKPOINT.search(file.name))
    files = [file for file in candidates if is_leaf(file) and _kind_of(file) is not None]
    return sorted(files, key=lambda file: (_step_of(file), file.name))


def _kind_of(path: Path) -> tuple[str, Callable[[Path], Columns]] | None:
    """Return the framework and the reader of a file; None if it is no dump."""
    return next((kind for pattern, kind in KINDS.items() if path.absolute().match(pattern)), None)


def _step_of(path: Path) -> int:
    """Return the step in the name of a file or its folder; for a loss of miles the number of its call."""
    folder = path.absolute().parent.name
    if folder.startswith("step_"):
        text = folder
    else:
        text = path.stem.partition("_call_")[2] or path.stem
    numbers = re.findall(r"\d+", text)
    return int(numbers[0]) if numbers else 0


def read_dumps(files: Sequence[Path]) -> Iterator[LossBatch]:
    """Yield the loss batch of each file, without the sequences that have invalid values.

    Raises:
        ValueError: if a file is no dump of these frameworks, or lacks a column.
    """
    for file in files:
        kind = _kind_of(file)
        if kind is None:
            raise InvalidValue(f"{file} is no batch that a framework wrote")
        framework, read = kind
        check_file(file, LARGEST_DUMP)
        try:
            batch = _loss_batch(file, framework, read(file)).without_bad_sequences()[0]
        except (RlvetError, ImportError, MemoryError):
            raise
        except Exception as error:  # damaged or other files can raise errors of any type
            # Errors of the disk have a file name. An OSError without one is torch's, for a seek beyond the file's end.
            if isinstance(error, OSError) and error.filename is not None:
                raise
            raise InvalidValue(
                f"{file} is no batch of NeMo-RL, slime, miles, SkyRL or prime-rl, or a damaged one ({error!r:.300})"
            ) from error
        yield batch


def _loss_batch(file: Path, framework: str, content: Columns) -> LossBatch:
    """Return the loss batch of a framework's columns.

    Args:
        file: The file.
        framework: The framework that wrote it.
        content: Its columns.

    Raises:
        ValueError: if a column is missing, or the batch is larger than the limit.
    """
    import numpy as np

    columns = {}
    for name, keys in COLUMNS.items():
        key = next((key for key in keys if key in content), None)
        if key is not None:
            columns[name] = content[key]
    missing = [" or ".join(COLUMNS[name]) for name in REQUIRED if name not in columns]
    if missing:
        raise InvalidValue(f"{file} lacks {', '.join(missing)}")

    masks = _sequence_masks(columns["mask"], content.get("sample_loss_mask"))
    lengths = np.array([int(mask.sum()) for mask in masks])
    if len(lengths) * int(lengths.max()) > MOST_TOKENS:
        raise InvalidValue(
            f"{file} has {len(lengths):,} sequences of up to {int(lengths.max()):,} tokens, and at most "
            f"{MOST_TOKENS:,} tokens are read with their padding"
        )
    # Counted tokens are moved to the start of each row, as in a record; shape (sequences, time).
    mask = np.arange(int(lengths.max())) < lengths[:, None]

    def pad(name: str, dtype: Any) -> Array | None:
        """Return a column's values at the counted tokens; None without the column."""
        return _pad(columns[name], masks, mask.shape, dtype) if name in columns else None

    def sum_per_sequence(name: str) -> Array | None:
        """Return the sum of a column's values in each sequence; None without the column."""
        if name not in columns:
            return None
        return np.array([_as_array(value).sum() for value in columns[name]], np.float32)

    logp_old = pad("old", np.float32)
    advantages = pad("advantages", np.float32)
    assert logp_old is not None
    assert advantages is not None
    logp = pad("new", np.float32)
    # The file of a loss of miles does not have the number of updates before it.
    update = None if framework == "miles" and logp is not None else 0
    batch = LossBatch(
        location=str(file),
        step=_step_of(file),
        method=None,
        anchor="rollout" if framework == "prime-rl" else "trainer",
        framework=framework,
        log_ratio=np.zeros_like(logp_old) if logp is None else logp - logp_old,
        logp_old=logp_old,
        advantages=advantages,
        mask=mask,
        logp_rollout=pad("engine", np.float32),
        entropy=pad("entropy", np.float32),
        token=pad("tokens", np.int64),
        update=update,
        reward=sum_per_sequence("reward"),
        truncated=sum_per_sequence("truncated"),
        has_logp=logp is not None,
    )
    if "tokens" not in columns:
        return batch
    return replace(batch, group=_groups(columns["tokens"], masks))


def _sequence_masks(token_masks: Sequence[Any], sequence_mask: Sequence[Any] | None) -> list[Array]:
    """Return the mask of each sequence, a boolean array.

    Args:
        token_masks: The mask of each sequence's tokens.
        sequence_mask: NeMo-RL's mask of sequences; all of them count if it is None.
    """
    if sequence_mask is None:
        sequence_mask = [1] * len(token_masks)
    masks = []
    for token_mask, is_counted in zip(token_masks, sequence_mask, strict=True):
        masks.append(_as_array(token_mask).astype(bool) & bool(is_counted))
    return masks


def _pad(sequences: Sequence[Any], masks: Sequence[Array], shape: tuple[int, ...], dtype: Any) -> Array:
    """Return a column's values at the counted tokens, with 0 at padding.

    Args:
        sequences: The values of each sequence, or a single value.
        masks: The mask of each sequence's completion.
        shape: The shape of the result, (sequences, time).
        dtype: The type of the result.
    """
    import numpy as np

    array = np.zeros(shape, dtype)
    for row, (sequence, mask) in enumerate(zip(sequences, masks, strict=True)):
        values = _as_array(sequence)
        if values.ndim:
            # Some columns also have the tokens of the prompt, in front of those of the completion.
            values = values[len(values) - len(mask) :]
        else:
            values = np.broadcast_to(values, len(mask))
        counted_values = values[mask]
        array[row, : len(counted_values)] = counted_values
    return array


def _as_array(values: Any) -> Array:
    """Return a list, an array or a tensor as an array; bfloat16, which numpy does not have, as float32.

    Raises:
        ValueError: if a tensor has more elements than the limit.
    """
    import numpy as np

    if hasattr(values, "detach"):
        # A file of a few bytes can declare a tensor of any size, by strides of 0.
        if values.numel() > MOST_TOKENS:
            raise InvalidValue(
                f"a tensor has {values.numel():,} elements, and at most {MOST_TOKENS:,} are read"
            )
        tensor = values.detach()
        if tensor.is_floating_point():
            tensor = tensor.float()
        values = tensor.numpy()
    return np.asarray(values)


def _groups(tokens: Sequence[Any], masks: Sequence[Array]) -> Array:
    """Return a number for each sequence, the same for equal prompts: the tokens before the first that counts.

    Args:
        tokens: The token ids of each sequence, with or without the prompt in front.
        masks: The mask of each sequence, at the end of its tokens.
    """
    import numpy as np

    numbers: dict[tuple[int, ...], int] = {}
    groups = []
    for ids, mask in zip(tokens, masks, strict=True):
        prompt_length = len(ids) - len(mask) + int(mask.argmax())
        prompt = tuple(map(int, ids[:prompt_length]))
        groups.append(numbers.setdefault(prompt, len(numbers)))
    return np.array(groups)
