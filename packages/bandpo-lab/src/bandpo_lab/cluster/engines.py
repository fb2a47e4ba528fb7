"""The engines that generate responses during training: whether they can start on this machine."""

from __future__ import annotations

import importlib.util

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
"""The engines by their module, which is also their name in the settings of verl."""


def missing_engine(module: str) -> str | None:
    """Return the name of an engine that is not installed; None if it is, or if it is no engine of `ENGINES`."""
    name = ENGINES.get(module)
    return name if name is not None and importlib.util.find_spec(module) is None else None


def memory_problem(module: str, setting: str, share: float, gpus: int) -> str | None:
    """Return a message if a GPU has not the free memory that an engine claims at its start; None if all have it.

    Args:
        module: The module of the engine.
        setting: The name of the setting with the share.
        share: The share of the GPU's memory that the engine claims.
        gpus: The number of GPUs on which it starts; those that are not here are not checked.
    """
    import torch

    for index in range(min(gpus, torch.cuda.device_count())):
        free, total = torch.cuda.mem_get_info(index)
        if free < share * total:
            return (
                f"{ENGINES[module]} claims {share * total / 2**30:.1f} GiB of GPU {index} ({setting}={share:g}), and "
                f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free: end what else is on the GPU (nvidia-smi), or "
                "lower that setting"
            )
    return None
