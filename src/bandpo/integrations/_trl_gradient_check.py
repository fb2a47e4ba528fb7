"""The gradient check in TRL: the gradients of log-probabilities and entropies in a loss, against the method's."""

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
from bandpo.gradient_check import TOLERANCE, GradientCheck, compare, near_discontinuity, slope
from bandpo.integrations._trl_parameter_check import Expected, ParameterCheck, Scoring, loss_scale
from bandpo.methods import Method

if TYPE_CHECKING:
    from torch import Tensor

TESTED_LOSSES = {
    "75bd01badfb43ed6": "1.10 to 1.14",
    "80295546bbdbf6f7": "1.15 and 1.16",
}
"""TRL's losses that bandpo was tested with, by the hash of their source."""
MOVED = 1e-6
"""A log-ratio that is no rounding; smaller ones test nothing."""
EVERY = 10
"""Optimiser steps from one gradient check to the next."""
SEARCHED = 10
"""Losses whose ratios have left 1, in which a token beyond a bound is looked for: a method without bounds has none."""
GO_ON = "; certify='warn' goes on, where a change of the loss is meant"


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
    """One loss whose gradients are to be compared."""

    inputs: dict[str, Any]
    """As TRL's loss gets them, but for what the trainer puts in."""
    batch: Batch
    logp: Tensor
    entropy: Tensor | None
    entropy_bonus: Tensor
    """The gradient that TRL's entropy bonus should give the entropies."""
    scoring: Scoring
    moved: bool
    """Whether a ratio has left 1, in any process."""
    gradient: Tensor | None = None
    """Of the log-probabilities."""
    entropy_gradient: Tensor | None = None

    def keep(self, gradient: Tensor | None) -> None:
        """Note what arrives at the log-probabilities, in the backward pass; nothing may."""
        self.gradient = None if gradient is None else gradient.detach()

    def keep_of_entropy(self, gradient: Tensor | None) -> None:
        """Note what arrives at the entropies, in the backward pass; nothing may."""
        self.entropy_gradient = None if gradient is None else gradient.detach()

    def unscaled(self, trainer: Any) -> Tensor:
        """Return the gradient of the log-probabilities without the factor of a gradient scaler."""
        gradient = torch.zeros_like(self.logp) if self.gradient is None else self.gradient
        return gradient.double() / loss_scale(trainer)

    def expected(self, trainer: Any, method: Method) -> Tensor:
        """Return the gradient that a method gives the log-probabilities, with TRL's averages, masks and KL term."""
        batch, mask = self.batch, self.batch.mask.double()
        average = _average(trainer, self.inputs, mask)
        # A weight multiplies the log-probability of a token also where the ratio is the sequence's.
        level = "token" if trainer.hooked or trainer.loss_type == "cispo" else method.level
        with torch.enable_grad():
            logp = self.logp.double().masked_fill(mask == 0, 0.0).requires_grad_()
            weighted = slope(method, batch).double() * reduce_to_level(logp, mask, level)
            loss = (average * _kept(trainer, self) * weighted).sum()
            if trainer.beta:
                gap = self.inputs["ref_per_token_logps"].double().masked_fill(mask == 0, 0.0) - logp
                kl = gap.exp() - gap - 1
                if trainer.args.use_bias_correction_kl:
                    kl = kl * reduce_to_level(logp - batch.logp_old.double(), mask, method.level).exp()
                loss = loss + trainer.beta * (average * kl).sum()
            return torch.autograd.grad(loss, logp)[0]

    def gradient_check(self, trainer: Any, method: Method) -> GradientCheck:
        """Compare the gradient of the log-probabilities with the method's."""
        # What TRL's masks leave of a token may be 0 in all of a loss; the unit of a difference is without them.
        average = _average(trainer, self.inputs, self.batch.mask.double())
        return compare(
            self.unscaled(trainer),
            method,
            self.batch,
            average,
            expected=lambda other: self.expected(trainer, other),
        )

    def entropy_problem(self, trainer: Any) -> str:
        """Return what differs in the gradient of the entropies; empty if it is that of TRL's entropy bonus."""
        if self.entropy_gradient is None:
            gradient = torch.zeros_like(self.entropy_bonus)
        else:
            gradient = self.entropy_gradient.double() / loss_scale(trainer)
        average = _average(trainer, self.inputs, self.batch.mask.double())
        unit = average.max() * self.batch.advantages.abs().max()
        unit = torch.maximum(unit, self.entropy_bonus.abs().max()).clamp(min=1e-300)
        error = ((gradient - self.entropy_bonus).abs().max() / unit).nan_to_num(nan=torch.inf).item()
        if error <= TOLERANCE:
            return ""
        return (
            f"gradient of the entropies differs from that of entropy_coef={_entropy_coefficient(trainer):g} by "
            f"{error:.2g} of the largest: it adds up to {gradient.sum():.4g}, expected {self.entropy_bonus.sum():.4g}"
        )

    def expected_through_the_model(self, trainer: Any, method: Method) -> Expected:
        """Return what the loss should send back into the model; of a token at a bound what it did send."""
        at_a_bound = near_discontinuity(method, self.batch)
        gradient = torch.where(at_a_bound, self.unscaled(trainer), self.expected(trainer, method))
        return Expected(self.scoring, self.logp, self.batch.mask, gradient, self.entropy_bonus)


def _kept(trainer: Any, watched: Watched) -> Tensor:
    """Compute what TRL's masks leave of each token, without TRL's functions, which may be replaced."""
    batch = watched.batch
    kept = by_entropy(trainer, batch, watched.entropy)
    threshold = trainer.off_policy_mask_threshold
    if threshold is None:
        return kept
    # Drift is measured from the engine that sampled; a token that it could not score counts as no drift.
    sampled = watched.inputs.get("sampling_per_token_logps", batch.logp_old)
    drift = (sampled - watched.logp).nan_to_num(nan=0.0) * batch.mask
    mean_drift = drift.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp(min=1.0)
    return kept * ((batch.advantages >= 0) | (mean_drift <= threshold))


def by_entropy(trainer: Any, batch: Batch, entropy: Tensor | None) -> Tensor:
    """Return 1 for the counted tokens that TRL's ``top_entropy_quantile`` leaves: those of the highest entropies.

    The quantile is that of the tokens of all processes.
    """
    if trainer.top_entropy_quantile == 1 or entropy is None:
        return batch.mask
    counted = batch.mask > 0
    # Processes have different numbers of tokens: what fills up is below every entropy, and taken out again.
    accelerator = trainer.accelerator
    filled = accelerator.pad_across_processes(entropy[counted].float(), dim=0, pad_index=-1e9)
    everywhere = accelerator.gather(filled)
    everywhere = everywhere[everywhere > -1e8]
    if not everywhere.numel():
        return torch.zeros_like(batch.mask)
    lowest = torch.quantile(everywhere, 1 - trainer.top_entropy_quantile)
    return batch.mask * (entropy.masked_fill(~counted, 0.0) >= lowest)


def _entropy_coefficient(trainer: Any) -> float:
    """Return the coefficient of TRL's entropy bonus in the loss that is being computed."""
    args = trainer.args
    if not trainer.use_adaptive_entropy:
        return args.entropy_coef
    # The coefficient moves within its limits, and is 0 while the entropy of the last update is above the target.
    least, most = min(args.entropy_coef_min, args.entropy_coef), max(args.entropy_coef_max, args.entropy_coef)
    below = trainer._last_world_entropy <= args.entropy_target
    return min(max(trainer.entropy_coef, least), most) if below else 0.0


def _entropy_bonus(trainer: Any, batch: Batch, entropy: Tensor | None) -> Tensor:
    """Compute the gradient that TRL's entropy bonus, a mean over the tokens that count, gives the entropies."""
    kept = by_entropy(trainer, batch, entropy).double()
    share = kept / kept.sum().clamp(min=1.0) / trainer.current_gradient_accumulation_steps
    return -_entropy_coefficient(trainer) * share


def _average(trainer: Any, inputs: dict[str, Any], mask: Tensor) -> Tensor:
    """Compute what a token counts for in TRL's average, by ``loss_type``."""
    rows = len(mask)
    accumulated = trainer.current_gradient_accumulation_steps
    if trainer.loss_type in ("grpo", "sapo"):
        return mask / mask.sum(1, keepdim=True).clamp(min=1.0) / rows / accumulated
    if trainer.loss_type == "bnpo":
        return mask / mask.sum().clamp(min=1.0) / accumulated
    if trainer.loss_type == "dr_grpo":
        return mask / (rows * trainer.max_completion_length) / accumulated
    if trainer.loss_type == "luspo":
        return mask / rows / accumulated
    # dapo, cispo, vespo: the tokens of the generated batch, scaled to one update.
    tokens = inputs["num_items_in_batch"].double().clamp(min=1.0) / trainer.accelerator.num_processes
    return mask / (tokens * accumulated / trainer.args.steps_per_generation)


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
    until a token is beyond a bound, then one of every `EVERY` steps. The parameters' gradient is compared once, in the
    first update that can be compared.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.watched: list[Watched] = []
        """Of the training step that is being made; several where a subclass splits a batch."""
        self.tested = Tested.NOTHING
        """The most that a comparison has tested so far."""
        self._parameters: ParameterCheck | None = None
        """The comparison of the parameters' gradient in the training step that is being made."""
        self._parameters_settled = False
        """Whether the parameters' gradient was compared, or cannot be."""
        self._passed_over = False
        """Whether a loss of the training step that is being made was not watched."""
        self._next_at_one = 0
        """The optimiser step from which a loss at ratio 1 is compared."""
        self._next_moved = 0
        """The optimiser step from which a loss whose ratios have left 1 is compared."""
        self._searched = 0
        """Losses compared whose ratios have left 1."""

    def scoring(self, trainer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Scoring | None:
        """Return how a loss asks for its log-probabilities, if losses are compared."""
        return Scoring.of(trainer, arguments, named) if self.mode != "off" and trainer.training else None

    def watch(
        self,
        trainer: Any,
        inputs: dict[str, Any],
        batch: Batch,
        logp: Tensor,
        entropy: Tensor | None,
        scoring: Scoring | None,
    ) -> None:
        """Hook a loss's log-probabilities and entropies, if it is time."""
        if scoring is None or not logp.requires_grad or not _comparable(trainer):
            return
        moved = self._moved_if_due(trainer, inputs, batch)
        if moved is None:
            self._passed_over = True
            return
        if not self.watched and not self._passed_over and not self._parameters_settled:
            self._begin_with_parameters(trainer)
        kept_entropy = None if entropy is None else entropy.detach()
        bonus = _entropy_bonus(trainer, batch, kept_entropy)
        watched = Watched(dict(inputs), batch, logp.detach(), kept_entropy, bonus, scoring, moved)
        self.watched.append(watched)
        logp.register_hook(watched.keep)
        if entropy is not None and entropy.requires_grad:
            entropy.register_hook(watched.keep_of_entropy)

    def _moved_if_due(self, trainer: Any, inputs: dict[str, Any], batch: Batch) -> bool | None:
        """Return whether ratios have left 1 in a loss that is to be compared; None in one that is not."""
        step = trainer.state.global_step
        # What holds where ratios have left 1 holds at 1.
        one_is_due = self.tested <= Tested.RATIO_ONE and step >= self._next_at_one
        # TRL leaves the old log-probabilities out where they are the current ones, so every ratio is 1.
        moved_is_due = inputs.get("old_per_token_logps") is not None and step >= self._next_moved
        if not one_is_due and not moved_is_due and not self.watched:
            return None
        # Without advantages there is nothing to compare. Every process compares a loss, or none does.
        informative = (batch.advantages != 0).any()
        moved = informative & (batch.log_ratio.abs() > MOVED).any()
        flags = torch.stack([informative, moved]).float()
        processes_informative, processes_moved = trainer.accelerator.reduce(flags, reduction="sum").tolist()
        due = moved_is_due if processes_moved else one_is_due
        # A further loss of a training step goes through the same backward pass.
        if not self.watched and (not processes_informative or not due):
            return None
        return bool(processes_moved)

    def _begin_with_parameters(self, trainer: Any) -> None:
        """Note the parameters' gradients before the backward pass, if they can be compared."""
        # Gradients of several processes are averaged in the last backward pass of an update, with what was there.
        one_process = trainer.accelerator.num_processes == 1
        if ParameterCheck.obstacle(trainer) or one_process or ParameterCheck.begins_an_update(trainer):
            self._parameters = ParameterCheck(trainer)

    def settle(self, trainer: Any, method: Method) -> list[str]:
        """Compare what was watched.

        Returns:
            Lines to say, for what no earlier comparison has tested.

        Raises:
            RuntimeError: a gradient is not the method's, and the mode is ``stop``.
        """
        watched, self.watched = self.watched, []
        parameters, self._parameters = self._parameters, None
        passed_over, self._passed_over = self._passed_over, False
        if not watched:
            return []
        # A loss that nothing was sent back through is not the one that trains, unless it is the only one.
        watched = [loss for loss in watched if loss.gradient is not None] or watched[:1]
        equal = True
        lines: list[str] = []
        for loss in watched:
            check = loss.gradient_check(trainer, method)
            problem = loss.entropy_problem(trainer) if check.equal else str(check)
            if problem:
                self._object(problem)
                equal = False
            lines += self._count(trainer, loss, check) if not problem else []
        self._schedule_next(trainer.state.global_step, any(loss.moved for loss in watched))
        if equal and parameters is not None and not passed_over:
            lines.append(self._settle_parameters(trainer, method, parameters, watched))
        return [line for line in lines if line]

    def _object(self, problem: str) -> None:
        """Stop the run with a problem, or warn of it.

        Raises:
            RuntimeError: the mode is ``stop``.
        """
        if self.mode == "stop":
            raise RunProblem(f"{problem}{GO_ON}")
        warnings.warn(f"{problem}{GO_ON}", stacklevel=5)

    def _count(self, trainer: Any, loss: Watched, check: GradientCheck) -> list[str]:
        """Note what an equal gradient has tested; return a line to say if it is more than before."""
        beyond = torch.tensor(float(check.beyond), device=loss.logp.device)
        some_beyond = trainer.accelerator.reduce(beyond, reduction="sum").item() > 0
        tested = _tested_by(loss.moved, some_beyond)
        if tested <= self.tested:
            return []
        self.tested = tested
        return [str(check) if loss.moved else f"{check}; every ratio is 1"]

    def _settle_parameters(
        self, trainer: Any, method: Method, parameters: ParameterCheck, watched: list[Watched]
    ) -> str:
        """Compare the parameters' gradient, once a run."""
        self._parameters_settled = True
        obstacle = ParameterCheck.obstacle(trainer)
        if obstacle:
            return f"gradient of the parameters was not compared: {obstacle}"
        expected = [loss.expected_through_the_model(trainer, method) for loss in watched]
        comparison = parameters.compare(trainer, expected)
        sentence = comparison.sentence(method)
        if comparison.equal:
            return sentence
        self._object(sentence)
        return ""

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
            cause = "under DeepSpeed the gradient check is not available"
        elif self.watched:
            cause = "training_step is replaced by one that does not call super().training_step()"
        else:
            cause = "every advantage of a counted token was 0, or the trainer's compute_loss was not called"
        return f"no gradient was compared with that of {method!r}: {cause}"


def _comparable(trainer: Any) -> bool:
    """Return whether the gradient of a trainer's loss can be told from the outside."""
    # DeepSpeed scales losses by a number of its own.
    return not trainer.is_deepspeed_enabled
