"""Read the batches that frameworks write by themselves as losses of a record, before their first update.

NeMo-RL's ``train_data_step….jsonl``, the files of ``--save-debug-train-data`` of slime and miles, and SkyRL's
``dump_data_batch``. A table of names brings all of them to the columns of docs/record-format.md. None holds the
log-probabilities of the policy in training, nor an entropy.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bandpo.audit.files import read_jsonl, unpickled
from bandpo.audit.record import Call
from bandpo.batch import Batch
from bandpo.errors import InvalidValue

COLUMNS = {
    "old": ("prev_logprobs", "log_probs", "action_log_probs"),
    "engine": ("generation_logprobs", "rollout_log_probs", "rollout_logprobs"),
    "advantages": ("advantages",),
    "mask": ("token_loss_mask", "loss_masks", "loss_mask"),
    "tokens": ("token_ids", "tokens", "sequences"),
    "entropy": ("entropy",),
    "reward": ("raw_reward", "filtered_rewards", "rewards"),
    "truncated": ("truncated",),
}
"""What NeMo-RL, slime (miles alike) and SkyRL call the columns of a batch."""
NEEDED = ("old", "advantages", "mask")
Columns = Mapping[str, Any]


def _jsonl(path: Path) -> Columns:
    rows = [row for _, row in read_jsonl(path)]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _saved(path: Path) -> Columns:
    """slime writes a dict a sample, miles and older slime a list of each column."""
    said = torch.load(path, map_location="cpu", weights_only=True)
    if "samples" not in said:
        return said.get("rollout_data", {})
    samples = said["samples"]
    whole = {name: x for name, x in said.items() if isinstance(x, list) and len(x) == len(samples)}
    return whole | {name: [sample[name] for sample in samples] for name in (samples or [{}])[0]}


def _pickled(path: Path) -> Columns:
    """SkyRL's batch is a pickle of arrays as bytes."""

    def tensor(x: Mapping[str, Any]) -> Tensor:
        if x["format"] == "torch":
            return torch.load(io.BytesIO(x["data"]), weights_only=True)
        return torch.from_numpy(np.frombuffer(x["data"], x["dtype"]).reshape(x["shape"]).copy())

    columns = unpickled(path.read_bytes(), path).arguments[-1]["batch_dict"]
    return {name: tensor(x) for name, x in columns.items() if x and x["format"] in ("numpy", "torch")}


KINDS = {"train_data_step*.jsonl": _jsonl, "*.pt": _saved, "*.pkl": _pickled}
"""For each kind of file what reads it."""


def dump_files(path: Path) -> list[Path]:
    """The dumps that a path names, or that lie in a folder, in the order of their steps; none if there are none."""
    found = [path] if path.is_file() else [file for kind in KINDS for file in path.glob(kind)]
    return sorted(
        (f for f in found if any(f.match(kind) for kind in KINDS)), key=lambda f: (_step(f), f.name)
    )


def _step(path: Path) -> int:
    """The first number of its name: a rank may follow."""
    return int((re.findall(r"\d+", path.stem) or [0])[0])


def read_dump(path: Path) -> Iterator[Call]:
    """The batches of one framework's dumps.

    Raises:
        ValueError: a file is no dump of them, or lacks a column.
    """
    for file in dump_files(path):
        read = next(read for kind, read in KINDS.items() if file.match(kind))
        try:
            yield _call(file, read(file))
        except (LookupError, AttributeError, TypeError, RuntimeError, EOFError) as error:
            raise InvalidValue(f"{file} is no batch of NeMo-RL, slime, miles or SkyRL ({error!r})") from error


def _call(file: Path, whole: Columns) -> Call:
    named = {name: next((whole[key] for key in keys if key in whole), None) for name, keys in COLUMNS.items()}
    said = {name: x for name, x in named.items() if x is not None}
    lacks = [name for name in NEEDED if name not in said]
    if lacks:
        raise InvalidValue(f"{file} lacks {', '.join(' or '.join(COLUMNS[name]) for name in lacks)}")
    mask = [torch.as_tensor(x).bool() for x in said["mask"]]
    if "sample_loss_mask" in whole:  # NeMo-RL's, of whole sequences
        mask = [x & bool(kept) for x, kept in zip(mask, whole["sample_loss_mask"], strict=True)]

    def padded(name: str) -> Tensor | None:
        """Of the tokens that count. Those of the answer stand last, whatever is before them."""
        if name not in said:
            return None
        rows = (torch.as_tensor(x) for x in said[name])
        rows = [
            x.expand(len(m)) if not x.dim() else x[len(x) - len(m) :] for x, m in zip(rows, mask, strict=True)
        ]
        return pad_sequence([x[m] for x, m in zip(rows, mask, strict=True)], batch_first=True)

    def of_rows(name: str) -> Tensor | None:
        if name not in said:
            return None
        values = torch.as_tensor(said[name])
        return values if values.dim() == 1 else values.sum(1)

    counted = pad_sequence([x[x].float() for x in mask], batch_first=True)
    of_tokens = (padded(name) for name in ("old", "advantages", "engine", "entropy"))
    old, advantages, *more = (counted if x is None else x.float() for x in of_tokens)
    engine, entropy = (
        x if name in said else None for name, x in zip(("engine", "entropy"), more, strict=True)
    )
    batch = Batch(torch.zeros_like(old), old, advantages, counted, engine, entropy)
    return Call(
        str(file),
        _step(file),
        None,
        "trainer",
        "",
        batch,
        None,
        padded("tokens"),
        update=0,
        group=_groups(said, mask),
        reward=of_rows("reward"),
        truncated=of_rows("truncated"),
        known=False,
    )


def _groups(said: Columns, mask: list[Tensor]) -> Tensor | None:
    """Answers belong together whose prompts are the same: the tokens before the first that counts."""
    if "tokens" not in said:
        return None
    numbers: dict[bytes, int] = {}
    found = []
    for tokens, m in zip(said["tokens"], mask, strict=True):
        ids = torch.as_tensor(tokens)
        prompt = ids[: len(ids) - len(m) + int(m.int().argmax())]
        found.append(numbers.setdefault(prompt.long().numpy().tobytes(), len(numbers)))
    return torch.tensor(found)
