"""The certificate in TRL: the gradient at the log-probabilities that a loss was handed, against the method's."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import trl
from trl import GRPOTrainer

from bandpo.batch import Batch, at_level
from bandpo.certificate import Certificate, compare, slope
from bandpo.errors import RunProblem
from bandpo.methods import Method

if TYPE_CHECKING:
    from torch import Tensor

TESTED_LOSSES = {
    "5ebad3972adec390": "1.8.0",
    "75bd01badfb43ed6": "1.10 to 1.14",
    "80295546bbdbf6f7": "1.16.0",
}
"""TRL's losses that bandpo was tested with, by the hash of their source."""
MOVED = 1e-6
"""A log-ratio that is no rounding; smaller ones test nothing."""
EVERY = 100
"""Optimiser steps from one certificate to the next, so that its cost is < 0.1 % of a run's."""
SEARCHED = 10
"""Losses in which a token beyond a bound is looked for: a method without bounds has none."""


def warn_of_an_unknown_loss() -> None:
    """Say at start-up where TRL's loss is none that bandpo was tested with."""
    try:
        source = inspect.getsource(GRPOTrainer._compute_loss)
    except OSError:  # a plug-in has put in one that no file holds
        source = ""
    if hashlib.sha256(source.encode()).hexdigest()[:16] not in TESTED_LOSSES:
        tested = ", ".join(TESTED_LOSSES.values())
        warnings.warn(
            f"the loss of trl {trl.__version__} is none that bandpo was tested with ({tested}); the certificate of the "
            "first update tells whether its gradient is still the method's",
            stacklevel=3,
        )


@dataclass
class Watched:
    """One loss whose gradient is to be compared."""

    inputs: dict[str, Any]
    """As TRL's loss gets them, but for what the trainer puts in."""
    batch: Batch
    logp: Tensor
    entropy: Tensor | None
    gradient: Tensor | None = None

    def keep(self, gradient: Tensor) -> None:
        """Note what arrives at the log-probabilities, in the backward pass."""
        self.gradient = gradient.detach()

    def certificate(self, trainer: Any, method: Method) -> Certificate:
        """The gradient against the method's: its averages, TRL's masks and KL term included."""
        batch, mask = self.batch, self.batch.mask.double()
        average = _average(trainer, self.inputs, mask)
        share = average * _masks(trainer, self)
        # TRL's CISPO multiplies the log-probability of a token also where the ratio is the sequence's.
        level = "token" if trainer.loss_type == "cispo" else method.level

        def expected(method: Method) -> Tensor:
            with torch.enable_grad():
                logp = self.logp.double().masked_fill(mask == 0, 0.0).requires_grad_()
                loss = (share * slope(method, batch).double() * at_level(logp, mask, level)).sum()
                if trainer.beta:
                    gap = self.inputs["ref_per_token_logps"].double().masked_fill(mask == 0, 0.0) - logp
                    kl = gap.exp() - gap - 1
                    if trainer.args.use_bias_correction_kl:
                        kl = kl * at_level(logp - batch.logp_old.double(), mask, method.level).exp()
                    loss = loss + trainer.beta * (average * kl).sum()
                return torch.autograd.grad(loss, logp)[0]

        scaler = getattr(trainer.accelerator, "scaler", None)
        found = torch.zeros_like(self.logp) if self.gradient is None else self.gradient
        found = found.double() / (1.0 if scaler is None else scaler.get_scale())
        # What TRL's masks leave of a token may be 0 in all of a loss; the unit of a difference is without them.
        return compare(found, method, batch, average, expected=expected)


def _masks(trainer: Any, watched: Watched) -> Tensor:
    """What TRL's own masks leave of each token, by TRL's own functions."""
    batch = watched.batch
    kept = by_entropy(trainer, batch, watched.entropy)
    if trainer.off_policy_mask_threshold is not None:
        kept = kept * trainer.get_off_policy_mask(
            advantages=batch.advantages,
            per_token_logps=watched.logp,
            sampling_per_token_logps=watched.inputs.get("sampling_per_token_logps", batch.logp_old),
            mask=batch.mask,
            off_policy_threshold=trainer.off_policy_mask_threshold,
        )
    return kept


def by_entropy(trainer: Any, batch: Batch, entropy: Tensor | None) -> Tensor:
    """The counted tokens that TRL's ``top_entropy_quantile`` leaves, as 1."""
    if trainer.top_entropy_quantile == 1:
        return batch.mask
    # TRL's function takes a mask of whole numbers.
    kept = trainer.get_high_entropy_mask(entropy, batch.mask.long(), 1 - trainer.top_entropy_quantile)
    return batch.mask * kept


BY_WINDOW = tuple(map(int, trl.__version__.split(".")[:2])) >= (1, 10)
"""Whether the averages over an update's tokens and over sequences are those of TRL 1.10 and later."""


def _average(trainer: Any, inputs: dict[str, Any], mask: Tensor) -> Tensor:
    """What a token counts for in TRL's average, by ``loss_type``."""
    rows, accumulated = len(mask), trainer.current_gradient_accumulation_steps
    if trainer.loss_type == "grpo":
        return mask / mask.sum(1, keepdim=True).clamp(min=1.0) / rows / accumulated
    if trainer.loss_type == "bnpo":
        return mask / mask.sum().clamp(min=1.0) / accumulated
    if trainer.loss_type == "dr_grpo":
        return mask / (rows * trainer.max_completion_length) / accumulated
    if trainer.loss_type == "luspo":
        return mask / rows / accumulated
    tokens = inputs["num_items_in_batch"].double().clamp(min=1.0) / trainer.accelerator.num_processes
    return mask / (tokens * accumulated / trainer.args.steps_per_generation if BY_WINDOW else tokens)


class Certifier:
    """When a trainer's losses are compared: once their ratios have left 1, and rarely after."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.watched: Watched | None = None
        self._next, self._losses, self._told = 0, 0, -1

    def watch(self, trainer: Any, inputs: dict[str, Any], batch: Batch, logp: Tensor, entropy: Any) -> None:
        """Hook a loss's log-probabilities, if it is time."""
        due = self.mode != "off" and trainer.training and trainer.state.global_step >= self._next
        due = due and inputs.get("old_per_token_logps") is not None  # else they are the current ones
        # DeepSpeed scales losses by a number of its own; TRL 1.8's luspo averages over padding, by its ratio's shape.
        known = not trainer.is_deepspeed_enabled and (BY_WINDOW or trainer.loss_type != "luspo")
        if not due or not logp.requires_grad or not known:
            return
        moved = (batch.log_ratio.abs() > MOVED).any() & (batch.advantages != 0).any()
        if not trainer.accelerator.reduce(moved.float(), reduction="sum"):  # every process, or none
            return
        self.watched = Watched(dict(inputs), batch, logp.detach(), entropy)
        logp.register_hook(self.watched.keep)

    def settle(self, trainer: Any, method: Method) -> str:
        """Compare what was watched; a line to say, or nothing.

        Raises:
            RuntimeError: the gradient is not the method's, and the mode is ``stop``.
        """
        watched, self.watched = self.watched, None
        if watched is None:
            return ""
        found = watched.certificate(trainer, method)
        if not found.equal:
            remedy = "; certify='warn' goes on, where a change of the loss is meant"
            if self.mode == "stop":
                raise RunProblem(f"{found}{remedy}")
            warnings.warn(f"{found}{remedy}", stacklevel=3)
        self._losses += 1
        beyond = torch.tensor(float(found.beyond), device=watched.logp.device)
        tested = int(trainer.accelerator.reduce(beyond, reduction="sum").item() > 0)
        new, self._told = tested > self._told, max(tested, self._told)
        if self._told == 1 or self._losses >= SEARCHED:
            self._next = trainer.state.global_step + EVERY
        return str(found) if new and found.equal else ""
