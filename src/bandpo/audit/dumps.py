"""Read the batches that frameworks write by themselves as losses of a record, before their first update.

NeMo-RL's ``train_data_step….jsonl``, the files of ``--save-debug-train-data`` of slime and miles, and SkyRL's
``dump_data_batch``. A table of names brings all of them to the columns of docs/record-format.md. None holds the
log-probabilities of the policy in training, nor an entropy.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bandpo.audit.files import read_jsonl, unpickled
from bandpo.audit.record import Call, without_bad
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


KINDS = {
    "train_data_step*.jsonl": ("nemo-rl", _jsonl),
    "*.pt": ("slime", _saved),
    "*.pkl": ("skyrl", _pickled),
}
"""For each kind of file who writes it, and what reads it."""


def _step(path: Path) -> int:
    """The first number of its name: a rank may follow."""
    return int((re.findall(r"\d+", path.stem) or [0])[0])


def dump_files(path: Path) -> list[Path]:
    """The dumps that a path names, or that lie in a folder, in the order of their steps; none if there are none."""
    found = [path] if path.is_file() else [file for kind in KINDS for file in path.glob(kind)]
    return sorted((f for f in found if any(map(f.match, KINDS))), key=lambda f: (_step(f), f.name))


def read_dumps(files: Sequence[Path]) -> Iterator[Call]:
    """The batches in them, without the sequences that hold what cannot be right.

    Raises:
        ValueError: a file is no dump of these frameworks, or lacks a column.
    """
    for file in files:
        framework, read = next(how for kind, how in KINDS.items() if file.match(kind))
        try:
            yield without_bad(_call(file, framework, read(file)))[0]
        except (LookupError, AttributeError, TypeError, RuntimeError, EOFError) as error:
            raise InvalidValue(f"{file} is no batch of NeMo-RL, slime, miles or SkyRL ({error!r})") from error


def _call(file: Path, framework: str, whole: Columns) -> Call:
    said = {name: whole[key] for name, keys in COLUMNS.items() for key in reversed(keys) if key in whole}
    if lacks := [" or ".join(COLUMNS[name]) for name in NEEDED if name not in said]:
        raise InvalidValue(f"{file} lacks {', '.join(lacks)}")
    rows = whole.get("sample_loss_mask", [1] * len(said["mask"]))  # NeMo-RL's, of whole sequences
    mask = [torch.as_tensor(x).bool() & bool(kept) for x, kept in zip(said["mask"], rows, strict=True)]
    counts = torch.tensor([int(m.sum()) for m in mask])
    counted = (torch.arange(int(counts.max())) < counts[:, None]).float()

    def of_answer(x: Any, m: Tensor) -> Tensor:
        """At the tokens that count. Those of the answer stand last, whatever is before them."""
        x = torch.as_tensor(x)
        return (x[len(x) - len(m) :] if x.dim() else x.expand(len(m)))[m]

    tokens = {
        name: pad_sequence(list(map(of_answer, said[name], mask)), batch_first=True)
        for name in ("old", "advantages", "engine", "entropy", "tokens")
        if name in said
    }
    told = {
        name: torch.as_tensor(said[name]).float().view(len(mask), -1).sum(1)
        for name in ("reward", "truncated")
        if name in said
    }
    # Answers belong together whose prompts, the tokens before the first that counts, are the same.
    if "tokens" in said:
        cuts = (
            len(ids) - len(m) + int(m.int().argmax()) for ids, m in zip(said["tokens"], mask, strict=True)
        )
        prompts = [tuple(map(int, ids[:cut])) for ids, cut in zip(said["tokens"], cuts, strict=True)]
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        told["group"] = torch.tensor([numbers[prompt] for prompt in prompts])
    old, advantages = (tokens[name].float() for name in ("old", "advantages"))
    batch = Batch(
        torch.zeros_like(old), old, advantages, counted, tokens.get("engine"), tokens.get("entropy")
    )
    ids = tokens.get("tokens")
    call = Call(str(file), _step(file), None, "trainer", framework, batch, None, ids, update=0, known=False)
    return replace(call, **told)
