"""The gradient check in TRL: the gradient at the log-probabilities that a loss was handed, against the method's."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
import trl
from trl import GRPOTrainer

from bandpo.batch import Batch, reduce_to_level
from bandpo.errors import RunProblem
from bandpo.gradient_check import GradientCheck, compare, slope
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
"""Optimiser steps from one gradient check to the next, so that its cost is < 0.1 % of a run's."""
SEARCHED = 10
"""Losses whose ratios have left 1, in which a token beyond a bound is looked for: a method without bounds has none."""


def warn_of_an_unknown_loss() -> None:
    """Say at start-up where TRL's loss is none that bandpo was tested with."""
    try:
        source = inspect.getsource(GRPOTrainer._compute_loss)
    except OSError:  # a plug-in has put in one that no file holds
        source = ""
    if hashlib.sha256(source.encode()).hexdigest()[:16] not in TESTED_LOSSES:
        tested = ", ".join(TESTED_LOSSES.values())
        warnings.warn(
            f"the loss of trl {trl.__version__} is none that bandpo was tested with ({tested}); the gradient check of "
            "the first update tells whether its gradient is still the method's",
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
    moved: bool
    """Whether a ratio has left 1, in any process."""
    gradient: Tensor | None = None

    def keep(self, gradient: Tensor) -> None:
        """Note what arrives at the log-probabilities, in the backward pass."""
        self.gradient = gradient.detach()

    def gradient_check(self, trainer: Any, method: Method) -> GradientCheck:
        """The gradient against the method's: its averages, TRL's masks and KL term included."""
        batch, mask = self.batch, self.batch.mask.double()
        average = _average(trainer, self.inputs, mask)
        share = average * _masks(trainer, self)
        # TRL's CISPO multiplies the log-probability of a token also where the ratio is the sequence's.
        level = "token" if trainer.loss_type == "cispo" else method.level

        def expected(method: Method) -> Tensor:
            with torch.enable_grad():
                logp = self.logp.double().masked_fill(mask == 0, 0.0).requires_grad_()
                loss = (share * slope(method, batch).double() * reduce_to_level(logp, mask, level)).sum()
                if trainer.beta:
                    gap = self.inputs["ref_per_token_logps"].double().masked_fill(mask == 0, 0.0) - logp
                    kl = gap.exp() - gap - 1
                    if trainer.args.use_bias_correction_kl:
                        kl = kl * reduce_to_level(logp - batch.logp_old.double(), mask, method.level).exp()
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
    if trainer.loss_type in ("grpo", "sapo"):
        return mask / mask.sum(1, keepdim=True).clamp(min=1.0) / rows / accumulated
    if trainer.loss_type == "bnpo":
        return mask / mask.sum().clamp(min=1.0) / accumulated
    if trainer.loss_type == "dr_grpo":
        return mask / (rows * trainer.max_completion_length) / accumulated
    if trainer.loss_type == "luspo":
        return mask / rows / accumulated
    tokens = inputs["num_items_in_batch"].double().clamp(min=1.0) / trainer.accelerator.num_processes
    return mask / (tokens * accumulated / trainer.args.steps_per_generation if BY_WINDOW else tokens)


def _comparable(trainer: Any) -> bool:
    """Whether the gradient of a trainer's loss can be told from the outside."""
    # DeepSpeed scales losses by a number of its own; TRL 1.8's luspo averages over padding, by its ratio's shape.
    return not trainer.is_deepspeed_enabled and (BY_WINDOW or trainer.loss_type != "luspo")


class Tested(IntEnum):
    """How much of a method a comparison has tested."""

    NOTHING = 0
    RATIO_ONE = 1
    """The sign, the average, the masks and the KL term, at ratio 1."""
    MOVED = 2
    """The weights of ratios that have left 1, none of them beyond a bound."""
    BEYOND = 3
    """A token beyond a bound."""


def _tested_by(moved: bool, beyond: bool) -> Tested:
    """Return how much a comparison has tested, by what the losses of all processes hold."""
    if not moved:
        return Tested.RATIO_ONE
    return Tested.BEYOND if beyond else Tested.MOVED


class Certifier:
    """The schedule by which a trainer's losses are compared.

    The first loss is compared, and one of every `EVERY` optimiser steps after, as long as all ratios are 1. The first
    loss whose ratios have left 1 is compared again, and from then on only such losses are: up to `SEARCHED` of them
    until a token is beyond a bound, then one of every `EVERY` steps.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.watched: Watched | None = None
        self.tested = Tested.NOTHING
        """The most that a comparison has tested so far."""
        self._next_at_one = 0
        """The optimiser step from which a loss at ratio 1 is compared."""
        self._next_moved = 0
        """The optimiser step from which a loss whose ratios have left 1 is compared."""
        self._searched = 0
        """Losses compared whose ratios have left 1."""

    def watch(
        self, trainer: Any, inputs: dict[str, Any], batch: Batch, logp: Tensor, entropy: Tensor | None
    ) -> None:
        """Hook a loss's log-probabilities, if it is time."""
        if self.mode == "off" or not trainer.training or not logp.requires_grad or not _comparable(trainer):
            return
        step = trainer.state.global_step
        # What holds where ratios have left 1 holds at 1.
        one_is_due = self.tested <= Tested.RATIO_ONE and step >= self._next_at_one
        # TRL leaves the old log-probabilities out where they are the current ones, so every ratio is 1.
        moved_is_due = inputs.get("old_per_token_logps") is not None and step >= self._next_moved
        if not one_is_due and not moved_is_due:
            return
        # Without advantages there is nothing to compare. Every process compares a loss, or none does.
        informative = (batch.advantages != 0).any()
        moved = informative & (batch.log_ratio.abs() > MOVED).any()
        flags = torch.stack([informative, moved]).float()
        processes_informative, processes_moved = trainer.accelerator.reduce(flags, reduction="sum").tolist()
        due = moved_is_due if processes_moved else one_is_due
        if not processes_informative or not due:
            return
        self.watched = Watched(dict(inputs), batch, logp.detach(), entropy, bool(processes_moved))
        logp.register_hook(self.watched.keep)

    def settle(self, trainer: Any, method: Method) -> str:
        """Compare what was watched.

        Returns:
            A line to say; empty if the comparison tested no more than an earlier one.

        Raises:
            RuntimeError: the gradient is not the method's, and the mode is ``stop``.
        """
        watched, self.watched = self.watched, None
        if watched is None:
            return ""
        check = watched.gradient_check(trainer, method)
        if not check.equal:
            remedy = "; certify='warn' goes on, where a change of the loss is meant"
            if self.mode == "stop":
                raise RunProblem(f"{check}{remedy}")
            warnings.warn(f"{check}{remedy}", stacklevel=3)
        beyond = torch.tensor(float(check.beyond), device=watched.logp.device)
        some_beyond = trainer.accelerator.reduce(beyond, reduction="sum").item() > 0
        tested = _tested_by(watched.moved, some_beyond)
        is_new = tested > self.tested
        self.tested = max(tested, self.tested)
        self._schedule_next(trainer.state.global_step, watched.moved)
        if not is_new or not check.equal:
            return ""
        return str(check) if watched.moved else f"{check}; every ratio is 1"

    def _schedule_next(self, step: int, moved: bool) -> None:
        """Set the step from which a loss of the kind that was compared is compared again."""
        if not moved:
            self._next_at_one = step + EVERY
            return
        self._searched += 1
        if self.tested == Tested.BEYOND or self._searched >= SEARCHED:
            self._next_moved = step + EVERY

    def summary(self, trainer: Any, method: Method) -> str:
        """Return a line to say at the end of a training in which nothing was compared; else empty."""
        if self.mode == "off" or self.tested > Tested.NOTHING:
            return ""
        if not _comparable(trainer):
            cause = "under DeepSpeed, and for TRL 1.8's luspo, the gradient check is not available"
        elif self.watched is not None:
            cause = "training_step is replaced by one that does not call super().training_step()"
        else:
            cause = "every advantage of a counted token was 0, or the trainer's compute_loss was not called"
        return f"no gradient was compared with that of {method!r}: {cause}"
