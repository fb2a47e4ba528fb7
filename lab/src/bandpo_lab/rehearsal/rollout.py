"""verl's side of the rollout: starts the servers of `bandpo_lab.rehearsal.server` and pushes the weights to them."""

import os
from collections.abc import Generator
from typing import Any

import ray
import torch
from torch.distributed.tensor import DTensor
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from bandpo_lab.rehearsal.server import TransformersServer


def server_name(replica_rank: int) -> str:
    """Name of the Ray actor that serves replica `replica_rank`."""
    return f"transformers_server_{replica_rank}"


class TransformersReplica(RolloutReplica):
    """Starts the server of one replica as a named Ray actor."""

    async def launch_servers(self) -> None:
        server = ray.remote(num_cpus=0)(TransformersServer)
        options = {"name": server_name(self.replica_rank), "max_concurrency": self.max_concurrency}
        handle: Any = server.options(**options).remote(
            self.model_config.path, self.config.prompt_length, self.config.response_length, self.config.seed
        )
        self._server_handle = handle
        self.servers = [self._server_handle]
        self._server_address = server_name(self.replica_rank)


class TransformersRollout(BaseRollout):
    """The trainer's side: pushes its weights to the server."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Sends all weights to the server of this rank: the rehearsal has one replica per rank."""
        # The generator gathers sharded parameters, a collective call: every rank has to drain it.
        full = {n: (w.full_tensor() if isinstance(w, DTensor) else w).detach().float() for n, w in weights}
        server: Any = ray.get_actor(server_name(int(os.environ["RANK"])))
        await server.load_weights.remote(full, global_steps)
