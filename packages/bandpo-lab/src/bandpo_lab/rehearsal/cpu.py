"""A verl plug-in that lets verl 0.9.1 run on a CPU; loaded in every process through `VERL_USE_EXTERNAL_MODULES`.

Importing this module registers a verl platform named `cpu` (chosen by `VERL_PLATFORM=cpu`) and a rollout
backend named `transformers`. The trainer, the workers, the FSDP2 engine, the losses and the weight sync are
verl's, unmodified. Each call of a policy loss is written to a file, for `bandpo_lab.rehearsal.by_hand`.
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

from bandpo.integrations.verl.probe import is_probing
from bandpo_lab.rehearsal import by_hand, files

# verl's FSDP workers patch a class that newer versions of TRL no longer have, so verl must not see TRL.
monkey_patch.is_trl_available = lambda: False


def _device_module() -> types.ModuleType:
    """Return `torch.cpu` with the memory and random-state functions that verl calls on `torch.cuda`."""
    module = types.ModuleType("cpu")
    module.__dict__.update(vars(torch.cpu))
    memory_sizes = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    no_operations = (
        "empty_cache",
        "ipc_collect",
        "reset_peak_memory_stats",
        "set_per_process_memory_fraction",
        "set_device",
    )
    module.__dict__.update(
        **dict.fromkeys(memory_sizes, lambda *_: 0),
        **dict.fromkeys(no_operations, lambda *_: None),
        mem_get_info=lambda *_: (0, 0),
        get_device_name=lambda *_: "cpu",
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """A verl platform for the CPU."""

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
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str):  # type: ignore[override]  # verl's annotation lacks the context manager
        yield

    def ray_resource_name(self) -> str:
        return "GPU"  # verl counts no other resource; the rehearsal starts Ray with logical GPUs

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


_init_process_group = torch.distributed.init_process_group


@functools.wraps(_init_process_group)
def _init_group(backend: str | None = None, *arguments: Any, **options: Any) -> None:
    """Initialize a process group for verl.

    verl asks for the backend "cpu:gloo,cpu:gloo", which torch refuses because it names a device twice. A group of one
    process needs no port: another process might have taken the one that verl chose.
    """
    backend = "gloo" if backend == "cpu:gloo,cpu:gloo" else backend
    if options.get("world_size") == 1:
        options |= {"init_method": None, "store": torch.distributed.HashStore()}
    _init_process_group(backend, *arguments, **options)


torch.distributed.init_process_group = _init_group


def _with_recording(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a policy loss so that each call writes its arguments, its gradient and verl's averaging to a file."""

    @functools.wraps(loss)
    def recorded_loss(*, log_prob: torch.Tensor, config: Any, **arguments: Any) -> Any:
        # bandpo's check of verl's loss calls it, too, before training and in each worker.
        if is_probing():
            return loss(log_prob=log_prob, config=config, **arguments)
        value, metrics = loss(log_prob=log_prob, config=config, **arguments)
        (gradient,) = torch.autograd.grad(value, log_prob, retain_graph=True)
        record = arguments | {"log_prob": log_prob, "gradient": gradient, "average": config.global_batch_info}
        record["average_setting"] = config.policy_loss.get("average")
        folder = Path(os.environ[files.FOLDER]) / files.LOSSES.format(os.environ[files.RUN])
        folder.mkdir(exist_ok=True)
        by_hand.save(record, folder / f"{os.getpid()}-{next(_call_numbers):04d}.pt")
        return value, metrics

    return recorded_loss


_call_numbers = itertools.count()
_get_policy_loss_fn = losses.get_policy_loss_fn
losses.get_policy_loss_fn = lambda name: _with_recording(_get_policy_loss_fn(name))
