"""A checkpoint engine for verl that sends the trainer's weights to other processes of this machine through files.

verl's own engines, such as `nccl`, need a GPU. A rehearsal sets `checkpoint_engine.backend=file` and names this module
in `custom_backend_module`, so that verl imports it in the trainer and in each worker that receives weights.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from bandpo_lab.rehearsal.files import FOLDER, RUN, TRANSFER

POLL_SECONDS = 0.05
"""The time between two looks for the file of a version."""


@CheckpointEngineRegistry.register("file")  # type: ignore[attr-defined]  # verl lacks a @staticmethod
class FileCheckpointEngine(CheckpointEngine):
    """The trainer's first process writes one file for each version, and each receiver reads it."""

    def __init__(self, bucket_size: int, **_: Any):
        self.rank: int | None = None

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the rank of each process of the trainer; a receiver has none."""
        return {"rank": list(range(actor_wg_world_size))}, {"rank": [None] * rollout_world_size}

    def prepare(self) -> dict[str, Any]:
        return {}

    def init_process_group(self, rank: int | None) -> None:  # type: ignore[override]
        self.rank = rank

    def finalize(self) -> None: ...

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> None:
        """Write the weights; all ranks iterate over them, since collective calls gather the shards."""
        full_weights = {}
        for name, weight in weights:
            full_weights[name] = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if self.rank == 0:
            path = _path(global_steps)
            unfinished = path.with_suffix(".unfinished")
            torch.save(full_weights, unfinished)
            unfinished.rename(path)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, Tensor], None]:  # type: ignore[override]
        """Yield the weights of a version, as soon as the trainer has written them."""
        path = _path(global_steps)
        while not path.exists():
            await asyncio.sleep(POLL_SECONDS)
        for name, weight in torch.load(path).items():
            yield name, weight


def _path(version: int | None) -> Path:
    return Path(os.environ[FOLDER]) / TRANSFER.format(os.environ[RUN], version)
