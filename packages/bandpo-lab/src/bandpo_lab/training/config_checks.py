"""What the configs of both trainers share: the range of their numbers, and the processes of a training on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from bandpo_lab.errors import InvalidValue


def check_range(
    settings: Any, names: Sequence[str], is_valid: Callable[[float], bool], requirement: str
) -> None:
    """Check numbers among settings.

    Args:
        settings: The settings.
        names: The names of the settings to check; those that are not numbers, or that there are not, pass.
        is_valid: The condition on a value.
        requirement: The condition in words.

    Raises:
        ValueError: A value is not valid; the message names it.
    """
    for name in names:
        value = getattr(settings, name, None)
        if isinstance(value, int | float) and not is_valid(value):
            raise InvalidValue(f"{name} must be {requirement}, got {value}")


ABOVE_0 = (
    "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "num_generations", "steps_per_generation", "num_iterations", "max_completion_length", "temperature",
    "logging_steps", "save_steps",
)  # fmt: skip
AT_LEAST_0 = ("lag", "learning_rate", "weight_decay", "max_grad_norm", "beta", "warmup_steps", "seed")


def check_numbers(settings: Any) -> None:
    """Check the range of the numbers of a training that a config has.

    Args:
        settings: The config.

    Raises:
        ValueError: A number is out of its range; the message names it.
    """
    check_range(settings, ABOVE_0, lambda value: value > 0, "above 0")
    check_range(settings, AT_LEAST_0, lambda value: value >= 0, "at least 0")
    if settings.max_steps == 0 or settings.max_steps < -1:
        raise InvalidValue(
            f"max_steps must be at least 1, or -1 to go by num_train_epochs, got {settings.max_steps}"
        )


class CpuDevice:
    """A mixin for configs of transformers that sets up the processes of a training on a CPU."""

    @cached_property
    def _setup_devices(self) -> torch.device:
        config: Any = self
        # transformers applies ddp_timeout to devices other than the CPU only.
        has_launcher = dist.is_torchelastic_launched() or "LOCAL_RANK" in os.environ
        if config.use_cpu and has_launcher and not dist.is_initialized():
            dist.init_process_group(config.ddp_backend or "gloo", timeout=config.ddp_timeout_delta)
        device = super()._setup_devices  # pyright: ignore[reportAttributeAccessIssue]
        # With several processes, transformers names the CPU "cpu:0", with which torch.load cannot load an optimizer.
        return torch.device("cpu") if device.type == "cpu" else device
