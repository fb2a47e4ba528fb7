"""Read the batches that frameworks write by themselves as losses of a record, before their first update.

NeMo-RL's ``train_data_step….jsonl``, the files of ``--save-debug-train-data`` of slime and miles, and SkyRL's
``dump_data_batch`` do not hold the log-probabilities of the policy in training. prime-rl's token exports and miles'
``policy_loss_debug`` do, so that rules are replayed on them.
"""

from __future__ import annotations

import io
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandpo.errors import BandpoError, InvalidValue
from bandpo.runs.files import check_size, read_jsonl, unpickled
from bandpo.runs.record import LossBatch

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
"""For each column of a batch, what NeMo-RL, slime (miles alike), SkyRL, prime-rl and miles' losses call it.

The ratio of prime-rl's loss refers to the engine's log-probabilities."""

LARGEST_DUMP = 2**32
"""Bytes of a batch that are read, also once it is decompressed."""

MOST_TOKENS = 2**27
"""Tokens of a batch that are read, with its padding: 4,096 answers of 32,768 tokens."""

REQUIRED = ("old", "advantages", "mask")
"""The columns without which a batch tells nothing."""

Columns = Mapping[str, Any]
"""The columns of a batch by the framework's own names: a list with one entry a sequence, or an array."""


def _read_jsonl_columns(path: Path) -> Columns:
    rows = [row for _, row in read_jsonl(path)]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _read_token_export(path: Path) -> Columns:
    """Read prime-rl's file of one step and process: a line a sequence, null where a number is not finite."""
    columns = dict(_read_jsonl_columns(path))
    numbers = [
        name for kind in ("new", "old", "advantages", "entropy") for name in COLUMNS[kind] if name in columns
    ]
    for name in numbers:
        rows = columns[name]
        columns[name] = [[math.nan if value is None else value for value in row] for row in rows]
    return columns


def check_dumps(files: Sequence[Path]) -> None:
    """Check that no file is larger than what is read, before torch is imported, which takes seconds.

    Raises:
        ValueError: if one has or states more bytes than are read, or is compressed, which torch never writes.
    """
    for file in files:
        check_size(file, LARGEST_DUMP)
        if file.suffix == ".pt":
            # A damaged archive is refused where it is read.
            with suppress(zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError):
                _check_archive(file)


def _check_archive(path: Path) -> None:
    """Check what an archive of torch states of itself.

    Raises:
        ValueError: if it states more bytes than are read, or is compressed, which torch never writes.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise InvalidValue(f"{path} is compressed, as no file of torch is")
        _check_bytes(path, sum(entry.file_size for entry in entries))


def _load_tensors(path: Path) -> Any:
    """Read a file of torch without unpickling what it names.

    Raises:
        ValueError: if it states more bytes than are read, or is compressed, which torch never writes.
    """
    _check_archive(path)
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def _check_bytes(path: Path, stated: int) -> None:
    """Check the bytes that the parts of an archive state.

    Raises:
        ValueError: if they are more than are read.
    """
    if stated > LARGEST_DUMP:
        raise InvalidValue(f"{path} states {stated:,} bytes, and at most {LARGEST_DUMP:,} are read")


def _read_policy_loss(path: Path) -> Columns:
    """Read miles' file of one loss of one process, which holds a dict a sequence."""
    samples = _load_tensors(path)["samples"]
    names = [name for name in samples[0] if all(name in sample for sample in samples)] if samples else []
    return {name: [sample[name] for sample in samples] for name in names}


def _read_saved(path: Path) -> Columns:
    """Read slime's file, which holds a dict a sample, or that of miles and older slime, a list of each column."""
    content = _load_tensors(path)
    if "samples" not in content:
        return content.get("rollout_data", {})
    samples = content["samples"]
    columns = {}
    for name, value in content.items():
        if isinstance(value, list) and len(value) == len(samples):
            columns[name] = value
    for name in (samples or [{}])[0]:
        columns[name] = [sample[name] for sample in samples]
    return columns


def _read_pickled(path: Path) -> Columns:
    """Read SkyRL's batch, a pickle of arrays as bytes."""
    import numpy as np

    def array(stored: Mapping[str, Any]) -> Any:
        if stored["format"] == "torch":
            import torch

            return torch.load(io.BytesIO(stored["data"]), weights_only=True)
        return np.frombuffer(stored["data"], stored["dtype"]).reshape(stored["shape"]).copy()

    columns = unpickled(path.read_bytes(), path).arguments[-1]["batch_dict"]
    return {name: array(x) for name, x in columns.items() if x and x["format"] in ("numpy", "torch")}


KINDS: Mapping[str, tuple[str, Callable[[Path], Columns]]] = {
    "train_data_step*.jsonl": ("nemo-rl", _read_jsonl_columns),
    "step_*/rank_*.jsonl": ("prime-rl", _read_token_export),
    "rank_*_call_*.pt": ("miles", _read_policy_loss),
    "*.pt": ("slime", _read_saved),
    "*.pkl": ("skyrl", _read_pickled),
}
"""For each kind of file, the framework that writes it, and its reader. The first pattern that matches counts."""


def dump_files(path: Path) -> list[Path]:
    """Return the dumps that a path names, or that lie in a folder, in the order of their steps."""
    candidates = [path]
    if not path.is_file():
        # A folder that is named may itself be the one of a step.
        patterns = [*KINDS, "rank_*.jsonl"]
        candidates = list(dict.fromkeys(file for pattern in patterns for file in path.glob(pattern)))
    files = [file for file in candidates if _kind_of(file) is not None]
    return sorted(files, key=lambda file: (_step_of(file), file.name))


def _kind_of(path: Path) -> tuple[str, Callable[[Path], Columns]] | None:
    """Return the framework that writes a file and its reader; None if it is no dump."""
    return next((kind for pattern, kind in KINDS.items() if path.absolute().match(pattern)), None)


def _step_of(path: Path) -> int:
    """Return the step that a file's name or its folder tells; of a loss of miles the number of its call."""
    folder = path.absolute().parent.name
    if folder.startswith("step_"):
        text = folder
    else:
        text = path.stem.partition("_call_")[2] or path.stem
    numbers = re.findall(r"\d+", text)
    return int(numbers[0]) if numbers else 0


def read_dumps(files: Sequence[Path]) -> Iterator[LossBatch]:
    """Read batches, without the sequences that hold a value that cannot be right.

    Raises:
        ValueError: if a file is no dump of these frameworks, or lacks a column.
    """
    for file in files:
        kind = _kind_of(file)
        if kind is None:
            raise InvalidValue(f"{file} is no batch that a framework wrote")
        framework, read = kind
        check_size(file, LARGEST_DUMP)
        try:
            batch = _loss_batch(file, framework, read(file)).without_bad_sequences()[0]
        except (BandpoError, ImportError):
            raise
        except Exception as error:  # whatever damaged bytes, or those of another kind, lead to
            # An error of the disk names its file. Where torch seeks beyond the end of a file, none is named.
            if isinstance(error, OSError) and error.filename is not None:
                raise
            raise InvalidValue(
                f"{file} is no batch of NeMo-RL, slime, miles, SkyRL or prime-rl, or a damaged one ({error!r:.300})"
            ) from error
        yield batch


def _loss_batch(file: Path, framework: str, content: Columns) -> LossBatch:
    """Bring a framework's columns to those of a record."""
    import numpy as np

    columns = {}
    for name, keys in COLUMNS.items():
        key = next((key for key in keys if key in content), None)
        if key is not None:
            columns[name] = content[key]
    missing = [" or ".join(COLUMNS[name]) for name in REQUIRED if name not in columns]
    if missing:
        raise InvalidValue(f"{file} lacks {', '.join(missing)}")

    sequence_mask = content.get("sample_loss_mask", [1] * len(columns["mask"]))  # NeMo-RL's
    masks = []
    for tokens_mask, counts in zip(columns["mask"], sequence_mask, strict=True):
        masks.append(_as_array(tokens_mask).astype(bool) & bool(counts))
    lengths = np.array([int(mask.sum()) for mask in masks])
    if len(lengths) * int(lengths.max()) > MOST_TOKENS:
        raise InvalidValue(
            f"{file} has {len(lengths):,} sequences of up to {int(lengths.max()):,} tokens, and at most "
            f"{MOST_TOKENS:,} tokens are read with their padding"
        )
    mask = np.arange(int(lengths.max())) < lengths[:, None]

    def padded(name: str, dtype: Any) -> Array | None:
        """Return the values at the counted tokens. The tokens of an answer stand last, whatever is before them."""
        if name not in columns:
            return None
        array = np.zeros(mask.shape, dtype)
        for row, (stored, counted) in enumerate(zip(columns[name], masks, strict=True)):
            values = _as_array(stored)
            if values.ndim:
                values = values[len(values) - len(counted) :]
            else:
                values = np.broadcast_to(values, len(counted))
            array[row, : lengths[row]] = values[counted]
        return array

    def per_sequence(name: str) -> Array | None:
        if name not in columns:
            return None
        return np.array([_as_array(value).sum() for value in columns[name]], np.float32)

    logp_old = padded("old", np.float32)
    advantages = padded("advantages", np.float32)
    assert logp_old is not None
    assert advantages is not None
    logp = padded("new", np.float32)
    # Whether miles made an update before a loss, its file does not tell.
    before_updates = None if framework == "miles" and logp is not None else 0
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
        logp_rollout=padded("engine", np.float32),
        entropy=padded("entropy", np.float32),
        token=padded("tokens", np.int64),
        update=before_updates,
        reward=per_sequence("reward"),
        truncated=per_sequence("truncated"),
        has_logp=logp is not None,
    )
    return replace(batch, group=_groups(columns["tokens"], masks)) if "tokens" in columns else batch


def _as_array(values: Any) -> Array:
    """Return a list, an array or a tensor of any type as an array; numpy has no bfloat16."""
    import numpy as np

    if hasattr(values, "detach"):
        # A few bytes can state a tensor of any size, all of whose elements lie at one place.
        if values.numel() > MOST_TOKENS:
            raise InvalidValue(
                f"a tensor has {values.numel():,} elements, and at most {MOST_TOKENS:,} are read"
            )
        tensor = values.detach()
        values = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return np.asarray(values)


def _groups(tokens: Sequence[Any], masks: Sequence[Array]) -> Array:
    """Number the sequences by their prompts: the tokens before the first that counts."""
    import numpy as np

    numbers: dict[tuple[int, ...], int] = {}
    groups = []
    for ids, mask in zip(tokens, masks, strict=True):
        prompt_length = len(ids) - len(mask) + int(mask.argmax())
        prompt = tuple(map(int, ids[:prompt_length]))
        groups.append(numbers.setdefault(prompt, len(numbers)))
    return np.array(groups)
