"""The gradient check of the parameters in TRL: what reaches them, against what a method's loss sends to them.

The check at the log-probabilities does not see what goes around them: a second forward pass, a penalty on the
parameters, log-probabilities that are detached in part. So once a run the pass through the model is repeated, by TRL's
function as it was when this module was imported, and the expected gradient is sent back through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from trl import GRPOTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

SCORE = GRPOTrainer._get_per_token_logps_and_entropies
"""TRL's own pass through the model, whatever a class or a patch puts in its place later."""
TOLERANCE = 1e-3
"""Largest difference, relative to the gradient's norm, that counts as rounding where all is computed in float32."""
TOLERANCE_HALF = 0.03
"""The same where parameters or passes have half precision."""
SAME_PASS = 1e-3
"""Largest mean difference of log-probabilities (nats) at which a repeated pass counts as the same."""
LARGEST = 2**27
"""Elements of gradients that are kept for the comparison; of larger models every second, fourth, ... tensor."""


@dataclass
class Scoring:
    """A call by which a loss asked for its log-probabilities, and the random numbers that it began with."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    device: torch.device
    random_state: Tensor
    device_random_state: Tensor | None

    @classmethod
    def of(cls, trainer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Scoring:
        device = trainer.accelerator.device
        on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(arguments, named, device, torch.get_rng_state(), on_device)

    def repeat(self, trainer: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log-probabilities, entropies and the auxiliary loss of the same pass, with a graph."""
        arguments, named = self.arguments, dict(self.named)
        if arguments:
            arguments = (_undistributed(arguments[0]), *arguments[1:])
        else:
            named["model"] = _undistributed(named["model"])
        fused = getattr(trainer.args, "fused_logits", False)
        with self._random_numbers(), torch.enable_grad(), trainer.compute_loss_context_manager():
            if fused:
                return trainer._fused(*arguments, **named)
            return SCORE(trainer, *arguments, **named)

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """Draw the numbers that the pass drew, and leave the training's as they are."""
        on_cpu = self.device_random_state is None
        fork: AbstractContextManager[None] = (
            torch.random.fork_rng(devices=[])
            if on_cpu
            else torch.random.fork_rng([self.device], device_type=self.device.type)
        )
        with fork:
            torch.set_rng_state(self.random_state)
            if not on_cpu:
                torch.get_device_module(self.device).set_rng_state(self.device_random_state, self.device)
            yield


def loss_scale(trainer: Any) -> float:
    """Return the factor by which a gradient scaler of half precision multiplies the loss."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    return 1.0 if scaler is None else scaler.get_scale()


def _undistributed(model: Any) -> Any:
    """Return the model that a DDP wrapper holds: a pass of the wrapper would wait for a backward pass of its own."""
    return model.module if isinstance(model, DistributedDataParallel) else model


class Expected(NamedTuple):
    """What one loss should send back into the model."""

    scoring: Scoring
    """How the loss asked for its log-probabilities."""
    logp: Tensor
    """The log-probabilities that it got."""
    mask: Tensor
    """Which of them count."""
    logp_gradient: Tensor
    """The gradient that the log-probabilities should have."""
    entropy_gradient: Tensor
    """The gradient that the entropies should have."""


class ParameterCheck:
    """The gradients that parameters have before and after the backward pass of one loss."""

    def __init__(self, trainer: Any) -> None:
        named = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
        named = [(name, p) for name, p in named if p.numel() <= LARGEST]
        while sum(p.numel() for _, p in named) > LARGEST:
            named = named[::2]
        self.parameters = dict(named)
        self._before = {name: None if p.grad is None else p.grad.clone() for name, p in named}

    @staticmethod
    def obstacle(trainer: Any) -> str:
        """Return why the gradients of a trainer's parameters cannot be compared; empty if they can."""
        args = trainer.args
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            return "parameters are sharded"
        if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            return "gradient_checkpointing_kwargs={'use_reentrant': True} allows no second pass"
        return ""

    @staticmethod
    def begins_an_update(trainer: Any) -> bool:
        """Return whether no parameter has a gradient yet."""
        return all(p.grad is None for p in trainer.model.parameters())

    def compare(self, trainer: Any, losses: Sequence[Expected]) -> Comparison:
        """Compare what the backward pass added to the gradients with what the losses should.

        Args:
            trainer: The trainer.
            losses: All losses that the backward pass went through.
        """
        total = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters.values()]
        half = trainer.accelerator.mixed_precision != "no"
        half = half or any(p.dtype in (torch.bfloat16, torch.float16) for p in trainer.model.parameters())
        try:
            for loss in losses:
                logp, entropy, auxiliary = loss.scoring.repeat(trainer)
                counted = loss.mask > 0
                distance = (logp.detach() - loss.logp).abs()[counted].mean().item()
                if not distance <= SAME_PASS * (10 if half else 1):
                    return Comparison(
                        obstacle="a second pass over the batch gives other log-probabilities, by "
                        f"{distance:.2g} in the mean"
                    )
                outputs, gradients = [logp], [loss.logp_gradient.to(logp)]
                if entropy is not None and entropy.requires_grad:
                    outputs.append(entropy)
                    gradients.append(loss.entropy_gradient.to(entropy))
                if auxiliary is not None:
                    outputs.append(auxiliary)
                    coefficient = trainer.router_aux_loss_coef / trainer.current_gradient_accumulation_steps
                    gradients.append(torch.full_like(auxiliary, coefficient))
                parts = torch.autograd.grad(
                    outputs, list(self.parameters.values()), gradients, allow_unused=True
                )
                for sum_of_parts, part in zip(total, parts, strict=True):
                    if part is not None:
                        sum_of_parts += part
        except torch.OutOfMemoryError:
            return Comparison(obstacle="memory is too small for a second pass")
        if trainer.accelerator.num_processes > 1 and trainer.accelerator.sync_gradients:
            total = [trainer.accelerator.reduce(part, reduction="mean") for part in total]
        return self._compared(trainer, total, TOLERANCE_HALF if half else TOLERANCE)

    def _compared(self, trainer: Any, expected: Sequence[Tensor], tolerance: float) -> Comparison:
        scale = loss_scale(trainer)
        differences: dict[str, float] = {}
        norms: list[float] = []
        for (name, parameter), wanted in zip(self.parameters.items(), expected, strict=True):
            gradient, before = parameter.grad, self._before[name]
            gradient = torch.zeros_like(wanted) if gradient is None else gradient.detach().float()
            if before is not None:
                gradient = gradient - before
            differences[name] = (gradient / scale - wanted).norm().item()
            norms.append(wanted.norm().item())
        size = sum(norm**2 for norm in norms) ** 0.5
        distance = sum(difference**2 for difference in differences.values()) ** 0.5
        worst = max(differences, key=lambda name: differences[name])
        return Comparison(distance / max(size, 1e-30), tolerance, worst)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison of the parameters' gradients."""

    error: float = 0.0
    """The norm of the difference, relative to the norm of the expected gradient."""
    tolerance: float = 0.0
    worst: str = ""
    """The parameter that contributes most to the difference."""
    obstacle: str = ""
    """Why nothing was compared; empty if it was."""

    @property
    def equal(self) -> bool:
        """Whether the gradients are equal up to rounding, or nothing was compared."""
        return bool(self.obstacle) or self.error <= self.tolerance

    def sentence(self, method: object) -> str:
        """One sentence about the comparison with a method's loss."""
        if self.obstacle:
            return f"gradient of the parameters was not compared: {self.obstacle}"
        if self.equal:
            return f"gradient of the parameters equals that of {method!r}, {self.error:.0e}"
        return (
            f"gradient of the parameters differs from that of {method!r} by {self.error:.2g} of its size, most in "
            f"{self.worst}, while that of the log-probabilities is equal: something goes around these, such as a "
            "second forward pass, a penalty on the parameters, or log-probabilities that are detached in part"
        )
