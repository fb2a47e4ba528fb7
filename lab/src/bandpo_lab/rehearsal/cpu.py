"""What verl 0.9.1 lacks to run on a CPU; loaded in every process through `VERL_USE_EXTERNAL_MODULES`.

Importing this module registers a verl platform named `cpu` (chosen by `VERL_PLATFORM=cpu`) and a rollout
backend named `transformers`. The trainer, the workers, the FSDP2 engine, the losses and the weight sync stay
verl's own. Each call of a policy loss is written to a file, for `bandpo_lab.rehearsal.by_hand`.
"""

import contextlib
import functools
import itertools
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from verl.models.transformers import monkey_patch
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.utils import losses

from bandpo_lab.rehearsal import by_hand, files

# verl's FSDP workers patch a class that newer TRL no longer has; a run on a GPU needs no TRL beside it.
monkey_patch.is_trl_available = lambda: False


def _device_module() -> types.ModuleType:
    """`torch.cpu` with the memory and random-state functions that verl calls on `torch.cuda`."""
    module = types.ModuleType("cpu")
    module.__dict__.update(vars(torch.cpu))
    sizes = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    calls = (
        "empty_cache",
        "ipc_collect",
        "reset_peak_memory_stats",
        "set_per_process_memory_fraction",
        "set_device",
    )
    module.__dict__.update(
        **dict.fromkeys(sizes, lambda *_: 0),
        **dict.fromkeys(calls, lambda *_: None),
        mem_get_info=lambda *_: (0, 0),
        get_device_name=lambda *_: "cpu",
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The methods verl asks of an accelerator, answered by a CPU."""

    device_name = "cpu"  # type: ignore[assignment]
    vendor_name = "cpu"  # type: ignore[assignment]
    device_module = _device_module()  # type: ignore[assignment]

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never chosen by detection, only by VERL_PLATFORM=cpu

    def current_device(self) -> str:  # type: ignore[override]
        return "cpu"  # verl passes this to Tensor.to

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        """`gloo`; opens the process group as well.

        verl asks for this name to open the group "cpu:gloo,cpu:gloo", which torch refuses because it names a
        device twice; verl leaves a group alone that is already open.
        """
        if "WORLD_SIZE" in os.environ and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", init_method=os.environ.get("DIST_INIT_METHOD"))
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str):  # type: ignore[override]  # verl's own annotation forgets the context manager
        yield

    def ray_resource_name(self) -> str:
        return "GPU"  # verl counts no other resource; Ray is told of logical GPUs

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self, *_: Any, **__: Any) -> None:
        return None

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart


def _replica():
    from bandpo_lab.rehearsal.rollout import TransformersReplica

    return TransformersReplica


RolloutReplicaRegistry.register("transformers", _replica)
rollout_base._ROLLOUT_REGISTRY[("transformers", "async")] = "bandpo_lab.rehearsal.rollout.TransformersRollout"


def _recorded(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A policy loss whose calls are written down: arguments, gradient, and how verl averages."""

    @functools.wraps(loss)
    def call(*, log_prob: torch.Tensor, config: Any, **arguments: Any) -> Any:
        value, metrics = loss(log_prob=log_prob, config=config, **arguments)
        (gradient,) = torch.autograd.grad(value, log_prob, retain_graph=True)
        record = arguments | {"log_prob": log_prob, "gradient": gradient, "average": config.global_batch_info}
        record["average_setting"] = config.policy_loss.get("average")
        folder = Path(os.environ[files.FOLDER]) / files.LOSSES.format(os.environ[files.RUN])
        folder.mkdir(exist_ok=True)
        by_hand.save(record, folder / f"{os.getpid()}-{next(_calls):04d}.pt")
        return value, metrics

    return call


_calls = itertools.count()
_by_name = losses.get_policy_loss_fn
losses.get_policy_loss_fn = lambda name: _recorded(_by_name(name))
