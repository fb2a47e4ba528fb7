"""The gradient check of the parameters in TRL: compare their gradient with the one that a method's loss gives them.

The check at the log-probabilities does not cover gradients on other paths: a second forward pass, a penalty on the
parameters, log-probabilities that are partly detached. So, once per run, the forward pass is repeated by TRL's own
function, as it was when this module was imported, and the expected gradient is propagated back through it.
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

TRL_FORWARD = GRPOTrainer._get_per_token_logps_and_entropies
"""TRL's own forward pass, which subclasses and patches may replace later."""
TOLERANCE = 1e-3
"""The largest relative difference of gradients that counts as rounding if everything is computed in float32."""
TOLERANCE_HALF = 0.03
"""The same if parameters or forward passes are in half precision."""
MAX_LOGP_DISTANCE = 1e-3
"""The largest mean difference of log-probabilities (nats) between a forward pass and its repetition."""
MAX_ELEMENTS = 2**27
"""The largest number of elements of gradients that are saved; of larger models every second, fourth, ... tensor is."""


@dataclass
class ForwardCall:
    """The arguments of a forward pass by which a loss got its log-probabilities, and the RNG state before it."""

    arguments: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    rng_state: Tensor
    device_rng_state: Tensor | None

    @classmethod
    def of(cls, trainer: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardCall:
        """Return the forward pass with these arguments and the current RNG state."""
        device = trainer.accelerator.device
        device_rng_state = None
        if device.type != "cpu":
            device_rng_state = torch.get_device_module(device).get_rng_state(device)
        return cls(arguments, kwargs, device, torch.get_rng_state(), device_rng_state)

    def repeat(self, trainer: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Repeat the forward pass; return log-probabilities, entropies and the auxiliary loss, with a graph."""
        arguments = self.arguments
        kwargs = dict(self.kwargs)
        if arguments:
            arguments = (_unwrap_ddp(arguments[0]), *arguments[1:])
        else:
            kwargs["model"] = _unwrap_ddp(kwargs["model"])

        is_fused = getattr(trainer.args, "fused_logits", False)
        with self._saved_rng(), torch.enable_grad(), trainer.compute_loss_context_manager():
            if is_fused:
                return trainer._fused_forward(*arguments, **kwargs)
            return TRL_FORWARD(trainer, *arguments, **kwargs)

    @contextmanager
    def _saved_rng(self) -> Iterator[None]:
        """Use the saved RNG state in the block, so that dropout is repeated, and restore the current one after it."""
        on_cpu = self.device_rng_state is None
        if on_cpu:
            fork: AbstractContextManager[None] = torch.random.fork_rng(devices=[])
        else:
            fork = torch.random.fork_rng([self.device], device_type=self.device.type)
        with fork:
            torch.set_rng_state(self.rng_state)
            if not on_cpu:
                torch.get_device_module(self.device).set_rng_state(self.device_rng_state, self.device)
            yield


def loss_scale(trainer: Any) -> float:
    """Return the factor by which the gradient scaler of fp16 training multiplies the loss; 1 without one."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    return 1.0 if scaler is None else scaler.get_scale()


def _unwrap_ddp(model: Any) -> Any:
    """Return the model within a DDP wrapper, whose own forward pass would wait for a backward pass."""
    return model.module if isinstance(model, DistributedDataParallel) else model


class ExpectedGradient(NamedTuple):
    """The gradient that one loss should send into the model. Tensors have shape (sequences, tokens)."""

    forward: ForwardCall
    """The forward pass that computed the log-probabilities."""
    logp: Tensor
    """The log-probabilities that the loss used."""
    mask: Tensor
    """1 for tokens that count."""
    logp_gradient: Tensor
    """The expected gradient of the log-probabilities."""
    entropy_gradient: Tensor
    """The expected gradient of the entropies."""


class ParameterCheck:
    """A comparison of the parameters' gradients around one backward pass.

    Construct it before the backward pass, when it saves the gradients that have accumulated so far, and call `compare`
    after it.
    """

    def __init__(self, trainer: Any) -> None:
        named = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
        named = [(name, p) for name, p in named if p.numel() <= MAX_ELEMENTS]
        while sum(p.numel() for _, p in named) > MAX_ELEMENTS:
            named = named[::2]
        self.parameters = dict(named)
        self._before = {name: None if p.grad is None else p.grad.clone() for name, p in named}

    @staticmethod
    def obstacle(trainer: Any) -> str:
        """Return the reason why the gradients of a trainer's parameters cannot be compared; empty if they can."""
        args = trainer.args
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            return "parameters are sharded"
        if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            return "gradient_checkpointing_kwargs={'use_reentrant': True} allows no second pass"
        return ""

    @staticmethod
    def begins_an_update(trainer: Any) -> bool:
        """Return True if no parameter has a gradient yet."""
        return all(p.grad is None for p in trainer.model.parameters())

    def compare(self, trainer: Any, losses: Sequence[ExpectedGradient]) -> Comparison:
        """Compare the gradients that the backward pass added with the expected ones.

        Args:
            trainer: The trainer.
            losses: The expected gradient of each loss of the backward pass.
        """
        is_half = trainer.accelerator.mixed_precision != "no"
        is_half = is_half or any(
            p.dtype in (torch.bfloat16, torch.float16) for p in trainer.model.parameters()
        )
        max_distance = MAX_LOGP_DISTANCE * (10 if is_half else 1)

        total = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters.values()]
        try:
            for loss in losses:
                logp, entropy, aux_loss = loss.forward.repeat(trainer)
                distance = (logp.detach() - loss.logp).abs()[loss.mask > 0].mean().item()
                if not distance <= max_distance:
                    return Comparison(
                        obstacle="a second pass over the batch gives other log-probabilities, by "
                        f"{distance:.2g} in the mean"
                    )
                gradients = self._propagate(trainer, loss, logp, entropy, aux_loss)
                for accumulated, gradient in zip(total, gradients, strict=True):
                    if gradient is not None:
                        accumulated += gradient
        except torch.OutOfMemoryError:
            return Comparison(obstacle="memory is too small for a second pass")

        if trainer.accelerator.num_processes > 1 and trainer.accelerator.sync_gradients:
            total = [trainer.accelerator.reduce(gradient, reduction="mean") for gradient in total]
        return self._compare_with(total, loss_scale(trainer), TOLERANCE_HALF if is_half else TOLERANCE)

    def _propagate(
        self,
        trainer: Any,
        loss: ExpectedGradient,
        logp: Tensor,
        entropy: Tensor | None,
        aux_loss: Tensor | None,
    ) -> Sequence[Tensor | None]:
        """Propagate the expected gradient of one loss through a repeated forward pass, to each parameter."""
        outputs = [logp]
        gradients = [loss.logp_gradient.to(logp)]
        if entropy is not None and entropy.requires_grad:
            outputs.append(entropy)
            gradients.append(loss.entropy_gradient.to(entropy))
        if aux_loss is not None:
            outputs.append(aux_loss)
            coefficient = trainer.router_aux_loss_coef / trainer.current_gradient_accumulation_steps
            gradients.append(torch.full_like(aux_loss, coefficient))
        return torch.autograd.grad(outputs, list(self.parameters.values()), gradients, allow_unused=True)

    def _compare_with(self, expected: Sequence[Tensor], scale: float, tolerance: float) -> Comparison:
        """Compare the gradients that were added since construction, divided by ``scale``, with the expected ones."""
        differences: dict[str, float] = {}
        norms: list[float] = []
        for (name, parameter), expected_gradient in zip(self.parameters.items(), expected, strict=True):
            before = self._before[name]
            if parameter.grad is None:
                gradient = torch.zeros_like(expected_gradient)
            else:
                gradient = parameter.grad.detach().float()
            if before is not None:
                gradient = gradient - before
            differences[name] = (gradient / scale - expected_gradient).norm().item()
            norms.append(expected_gradient.norm().item())

        norm = sum(x**2 for x in norms) ** 0.5
        distance = sum(difference**2 for difference in differences.values()) ** 0.5
        worst = max(differences, key=lambda name: differences[name])
        return Comparison(distance / max(norm, 1e-30), tolerance, worst)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison of the parameters' gradients."""

    error: float = 0.0
    """The norm of the difference, relative to the norm of the expected gradient."""
    tolerance: float = 0.0
    """The largest error that counts as rounding."""
    worst: str = ""
    """The parameter that contributes most to the difference."""
    obstacle: str = ""
    """The reason why nothing was compared; empty if the gradients were compared."""

    @property
    def equal(self) -> bool:
        """True if the gradients are equal up to rounding, or nothing was compared."""
        return bool(self.obstacle) or self.error <= self.tolerance

    def sentence(self, method: object) -> str:
        """Return one sentence about the comparison with a method's loss."""
        if self.obstacle:
            return f"gradient of the parameters was not compared: {self.obstacle}"
        if self.equal:
            return f"gradient of the parameters equals that of {method!r}, {self.error:.0e}"
        return (
            f"gradient of the parameters differs from that of {method!r} by {self.error:.2g} of its size, most in "
            f"{self.worst}, while that of the log-probabilities is equal: a gradient reaches the parameters on another "
            "path, such as a second forward pass, a penalty on the parameters, or log-probabilities that are partly "
            "detached"
        )
