"""The gradient check in TRL: compare the gradients of log-probabilities and entropies with those of the method."""

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

from bandpo.core.batch import Batch, reduce_to_level
from bandpo.core.errors import RunProblem
from bandpo.core.gradient_check import TOLERANCE, GradientCheck, compare, near_discontinuity, slope
from bandpo.core.methods import Method
from bandpo.integrations.trl.parameter_check import ExpectedGradient, ForwardCall, ParameterCheck, loss_scale

if TYPE_CHECKING:
    from torch import Tensor

TESTED_LOSSES = {
    "75bd01badfb43ed6": "1.10 to 1.14",
    "80295546bbdbf6f7": "1.15 and 1.16",
}
"""Versions of TRL with which bandpo was tested, by the hash of their loss's source."""
MIN_LOG_RATIO = 1e-6
"""The smallest log-ratio that counts as different from 0. Smaller ones are rounding, and test nothing."""
EVERY = 10
"""Number of optimiser steps from one gradient check to the next."""
MAX_SEARCH = 10
"""Number of losses with ratios other than 1 that are compared in search of a token beyond a bound.

A method without bounds never has one.
"""
HINT = "; if the loss was changed on purpose, set certify='warn' to train on"


def check_trl_loss() -> None:
    """Warn if bandpo was not tested with the loss of the installed version of TRL."""
    try:
        source = inspect.getsource(GRPOTrainer._compute_loss)
    except OSError:  # a plug-in has replaced it by generated code
        source = ""
    if hashlib.sha256(source.encode()).hexdigest()[:16] not in TESTED_LOSSES:
        tested = ", ".join(TESTED_LOSSES.values())
        warnings.warn(
            f"bandpo was not tested with the loss of trl {trl.__version__}, only with that of {tested}; the gradient "
            "check of the first update shows whether its gradient is still the method's",
            stacklevel=3,
        )


@dataclass
class WatchedLoss:
    """A loss whose gradients are compared after the backward pass. Tensors have shape (sequences, tokens)."""

    inputs: dict[str, Any]
    """TRL's inputs of the loss, before the trainer changes them."""
    batch: Batch
    """The tokens of the loss."""
    logp: Tensor
    """The log-probabilities that the loss used, detached."""
    entropy: Tensor | None
    """The entropies of the same tokens, detached."""
    entropy_bonus: Tensor
    """The expected gradient of the entropies, from TRL's entropy bonus."""
    forward: ForwardCall
    """The forward pass that computed the log-probabilities."""
    ratios_moved: bool
    """True if a ratio differs from 1 in any process."""
    gradient: Tensor | None = None
    """The gradient of the log-probabilities after the backward pass."""
    entropy_gradient: Tensor | None = None
    """The gradient of the entropies after the backward pass."""

    def save_gradient(self, gradient: Tensor | None) -> None:
        """Save the gradient of the log-probabilities; the hook of the backward pass, which may pass None."""
        self.gradient = None if gradient is None else gradient.detach()

    def save_entropy_gradient(self, gradient: Tensor | None) -> None:
        """Save the gradient of the entropies; the hook of the backward pass, which may pass None."""
        self.entropy_gradient = None if gradient is None else gradient.detach()

    def unscaled_gradient(self, trainer: Any) -> Tensor:
        """Return the gradient of the log-probabilities without the factor of a gradient scaler."""
        gradient = torch.zeros_like(self.logp) if self.gradient is None else self.gradient
        return gradient.double() / loss_scale(trainer)

    def expected_gradient(self, trainer: Any, method: Method) -> Tensor:
        """Return a method's gradient of the log-probabilities, with TRL's loss aggregation, masks and KL term."""
        batch = self.batch
        mask = batch.mask.double()
        shares = _token_shares(trainer, self.inputs, mask)
        loss_mask = _loss_mask(trainer, self)
        # CISPO's weight multiplies the log-probability of each token, even if the ratio is that of the sequence.
        level = "token" if trainer.loss_type == "cispo" else method.level

        with torch.enable_grad():
            logp = self.logp.double().masked_fill(mask == 0, 0.0).requires_grad_()
            weighted = slope(method, batch).double() * reduce_to_level(logp, mask, level)
            loss = (shares * loss_mask * weighted).sum()

            if trainer.beta:
                logp_ref = self.inputs["ref_per_token_logps"].double().masked_fill(mask == 0, 0.0)
                gap = logp_ref - logp
                kl = gap.exp() - gap - 1
                if trainer.args.use_bias_correction_kl:
                    kl = kl * reduce_to_level(logp - batch.logp_old.double(), mask, method.level).exp()
                loss = loss + trainer.beta * (shares * kl).sum()
            return torch.autograd.grad(loss, logp)[0]

    def gradient_check(self, trainer: Any, method: Method) -> GradientCheck:
        """Compare the gradient of the log-probabilities with the method's."""
        # Differences are measured in units of these shares, without TRL's masks, which may drop every token.
        shares = _token_shares(trainer, self.inputs, self.batch.mask.double())
        return compare(
            self.unscaled_gradient(trainer),
            method,
            self.batch,
            shares,
            expected=lambda other_method: self.expected_gradient(trainer, other_method),
        )

    def entropy_problem(self, trainer: Any) -> str:
        """Return a description of the error in the gradient of the entropies; empty if there is none."""
        if self.entropy_gradient is None:
            gradient = torch.zeros_like(self.entropy_bonus)
        else:
            gradient = self.entropy_gradient.double() / loss_scale(trainer)

        shares = _token_shares(trainer, self.inputs, self.batch.mask.double())
        unit = shares.max() * self.batch.advantages.abs().max()
        unit = torch.maximum(unit, self.entropy_bonus.abs().max()).clamp(min=1e-300)
        largest_difference = (gradient - self.entropy_bonus).abs().max()
        error = (largest_difference / unit).nan_to_num(nan=torch.inf).item()
        if error <= TOLERANCE:
            return ""
        return (
            f"gradient of the entropies differs from that of entropy_coef={_entropy_coefficient(trainer):g} by "
            f"{error:.2g} of the largest: it adds up to {gradient.sum():.4g}, expected {self.entropy_bonus.sum():.4g}"
        )

    def expected_in_model(self, trainer: Any, method: Method) -> ExpectedGradient:
        """Return the gradient that the loss should send into the model.

        For tokens at a bound, where rounding decides the gradient, it is the gradient that the loss did send.
        """
        at_a_bound = near_discontinuity(method, self.batch)
        actual = self.unscaled_gradient(trainer)
        gradient = torch.where(at_a_bound, actual, self.expected_gradient(trainer, method))
        return ExpectedGradient(self.forward, self.logp, self.batch.mask, gradient, self.entropy_bonus)


def _loss_mask(trainer: Any, loss: WatchedLoss) -> Tensor:
    """Return 1 for the tokens that TRL's masks leave in the loss.

    The masks are computed here and not by TRL's functions, which a subclass may have replaced.
    """
    batch = loss.batch
    mask = high_entropy_mask(trainer, batch, loss.entropy)
    threshold = trainer.off_policy_mask_threshold
    if threshold is None:
        return mask
    # Drift is measured from the sampler. Where the sampler has no log-probability (NaN), the drift counts as 0.
    sampled = loss.inputs.get("sampling_per_token_logps", batch.logp_old)
    drift = (sampled - loss.logp).nan_to_num(nan=0.0) * batch.mask
    mean_drift = drift.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp(min=1.0)
    return mask * ((batch.advantages >= 0) | (mean_drift <= threshold))


def high_entropy_mask(trainer: Any, batch: Batch, entropy: Tensor | None) -> Tensor:
    """Return 1 for the tokens of the highest entropies, which TRL's ``top_entropy_quantile`` leaves in the loss.

    The quantile is over the tokens of all processes.
    """
    if trainer.top_entropy_quantile == 1 or entropy is None:
        return batch.mask
    counted = batch.mask > 0

    # Processes have different numbers of tokens. The padding is below every entropy, and removed after the gather.
    accelerator = trainer.accelerator
    padded = accelerator.pad_across_processes(entropy[counted].float(), dim=0, pad_index=-1e9)
    entropies = accelerator.gather(padded)
    entropies = entropies[entropies > -1e8]
    if not entropies.numel():
        return torch.zeros_like(batch.mask)

    lowest = torch.quantile(entropies, 1 - trainer.top_entropy_quantile)
    return batch.mask * (entropy.masked_fill(~counted, 0.0) >= lowest)


def _entropy_coefficient(trainer: Any) -> float:
    """Return the coefficient of TRL's entropy bonus in the loss that is being computed."""
    args = trainer.args
    if not trainer.use_adaptive_entropy:
        return args.entropy_coef
    # The adaptive coefficient is 0 while the entropy of the last update is above the target.
    if not trainer._last_world_entropy <= args.entropy_target:
        return 0.0
    lowest = min(args.entropy_coef_min, args.entropy_coef)
    highest = max(args.entropy_coef_max, args.entropy_coef)
    return min(max(trainer.entropy_coef, lowest), highest)


def _entropy_bonus(trainer: Any, batch: Batch, entropy: Tensor | None) -> Tensor:
    """Return the derivative of the loss by the entropy of each token, (batch, time), due to TRL's entropy bonus.

    The bonus is the mean entropy over the tokens, times minus its coefficient.
    """
    mask = high_entropy_mask(trainer, batch, entropy).double()
    share = mask / mask.sum().clamp(min=1.0) / trainer.current_gradient_accumulation_steps
    return -_entropy_coefficient(trainer) * share


def _token_shares(trainer: Any, inputs: dict[str, Any], mask: Tensor) -> Tensor:
    """Return the factor of each token's loss in TRL's loss aggregation, by ``loss_type``."""
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
    # dapo, cispo, vespo: a mean over the tokens of the generated batch, scaled to one update.
    tokens = inputs["num_items_in_batch"].double().clamp(min=1.0) / trainer.accelerator.num_processes
    return mask / (tokens * accumulated / trainer.args.steps_per_generation)


class Coverage(IntEnum):
    """The part of a method that comparisons have tested, in ascending order."""

    NOTHING = 0
    RATIO_ONE = 1
    """The sign, the loss aggregation, the masks and the KL term, at ratio 1."""
    MOVED = 2
    """The weights of ratios other than 1, none of them beyond a bound."""
    BEYOND = 3
    """A token beyond a bound."""


class Certifier:
    """The schedule of comparisons between a trainer's losses and its method.

    While all ratios are 1, the first loss is compared, and then one in every `EVERY` optimiser steps. Once ratios
    differ from 1, only losses with such ratios are compared: up to `MAX_SEARCH` of them until a token is beyond a
    bound, then one in every `EVERY` steps. The parameters' gradient is compared once, in the first update that allows
    it.

    Args:
        mode: The reaction to a gradient that is not the method's: ``stop``, ``warn``, or ``off`` to compare none.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.watched: list[WatchedLoss] = []
        """The watched losses of the current training step; several if a subclass splits a batch."""
        self.coverage = Coverage.NOTHING
        """The part of the method that was tested so far."""
        self._parameter_check: ParameterCheck | None = None
        """The comparison of the parameters' gradient in the current training step."""
        self._parameters_done = False
        """True if the parameters' gradient was compared, or cannot be."""
        self._skipped_a_loss = False
        """True if a loss of the current training step is not watched."""
        self._next_step_at_one = 0
        """The optimiser step from which a loss at ratio 1 is compared."""
        self._next_step_moved = 0
        """The optimiser step from which a loss with ratios other than 1 is compared."""
        self._moved_comparisons = 0
        """The number of compared losses with ratios other than 1."""

    def save_forward(
        self, trainer: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ForwardCall | None:
        """Return the forward pass that a loss asks for, so that it can be repeated; None if losses are not compared."""
        if self.mode == "off" or not trainer.training:
            return None
        return ForwardCall.of(trainer, arguments, kwargs)

    def watch(
        self,
        trainer: Any,
        inputs: dict[str, Any],
        batch: Batch,
        logp: Tensor,
        entropy: Tensor | None,
        forward: ForwardCall | None,
    ) -> None:
        """Register hooks that save the gradients of a loss, if a comparison is due.

        Args:
            trainer: The trainer.
            inputs: TRL's inputs of the loss.
            batch: The tokens of the loss.
            logp: The log-probabilities, with their graph.
            entropy: The entropies, with their graph; None if the loss needs none.
            forward: The forward pass that computed both; None if losses are not compared.
        """
        if forward is None or not logp.requires_grad or not _comparable(trainer):
            return
        ratios_moved = self._ratios_moved_if_due(trainer, inputs, batch)
        if ratios_moved is None:
            self._skipped_a_loss = True
            return
        if not self.watched and not self._skipped_a_loss and not self._parameters_done:
            self._start_parameter_check(trainer)

        entropy_values = None if entropy is None else entropy.detach()
        loss = WatchedLoss(
            inputs=dict(inputs),
            batch=batch,
            logp=logp.detach(),
            entropy=entropy_values,
            entropy_bonus=_entropy_bonus(trainer, batch, entropy_values),
            forward=forward,
            ratios_moved=ratios_moved,
        )
        self.watched.append(loss)
        logp.register_hook(loss.save_gradient)
        if entropy is not None and entropy.requires_grad:
            entropy.register_hook(loss.save_entropy_gradient)

    def _ratios_moved_if_due(self, trainer: Any, inputs: dict[str, Any], batch: Batch) -> bool | None:
        """Return True if a loss has ratios other than 1, False if it has none; None if no comparison of it is due.

        All processes return the same.
        """
        step = trainer.state.global_step
        # A comparison with other ratios also tests everything that one at ratio 1 does.
        is_due_at_one = self.coverage <= Coverage.RATIO_ONE and step >= self._next_step_at_one
        # TRL omits the old log-probabilities where they are the current ones, so that every ratio is 1.
        is_due_moved = inputs.get("old_per_token_logps") is not None and step >= self._next_step_moved
        if not is_due_at_one and not is_due_moved and not self.watched:
            return None

        # If every advantage is 0, there is no gradient to compare.
        informative = (batch.advantages != 0).any()
        moved = informative & (batch.log_ratio.abs() > MIN_LOG_RATIO).any()
        flags = torch.stack([informative, moved]).float()
        informative_processes, moved_processes = trainer.accelerator.reduce(flags, reduction="sum").tolist()

        # Further losses of a watched training step go through the same backward pass, so they are watched too.
        is_due = is_due_moved if moved_processes else is_due_at_one
        if not self.watched and (not informative_processes or not is_due):
            return None
        return bool(moved_processes)

    def _start_parameter_check(self, trainer: Any) -> None:
        """Save the parameters' gradients before the backward pass, if they can be compared after it."""
        # With several processes the last backward pass of an update averages all that the gradients have accumulated,
        # so that the contribution of one loss is only known if there was nothing before it.
        one_process = trainer.accelerator.num_processes == 1
        if ParameterCheck.obstacle(trainer) or one_process or ParameterCheck.begins_an_update(trainer):
            self._parameter_check = ParameterCheck(trainer)

    def compare_watched(self, trainer: Any, method: Method) -> list[str]:
        """Compare the gradients of the watched losses with the method's, after the backward pass.

        Returns:
            Lines for the console about comparisons that tested more than earlier ones.

        Raises:
            RuntimeError: a gradient is not the method's, and the mode is ``stop``.
        """
        losses = self.watched
        parameter_check = self._parameter_check
        skipped_a_loss = self._skipped_a_loss
        self.watched = []
        self._parameter_check = None
        self._skipped_a_loss = False
        if not losses:
            return []

        # A loss without a backward pass does not train the model, unless it is the only one.
        losses = [loss for loss in losses if loss.gradient is not None] or losses[:1]
        lines: list[str] = []
        all_equal = True
        for loss in losses:
            check = loss.gradient_check(trainer, method)
            problem = loss.entropy_problem(trainer) if check.equal else str(check)
            if problem:
                self._report_problem(problem)
                all_equal = False
            else:
                lines.append(self._update_coverage(trainer, loss, check))

        self._schedule_next(trainer.state.global_step, any(loss.ratios_moved for loss in losses))
        if all_equal and parameter_check is not None and not skipped_a_loss:
            lines.append(self._compare_parameters(trainer, method, parameter_check, losses))
        return [line for line in lines if line]

    def _report_problem(self, problem: str) -> None:
        """Raise an error or a warning about a problem, by the mode.

        Raises:
            RuntimeError: the mode is ``stop``.
        """
        if self.mode == "stop":
            raise RunProblem(f"{problem}{HINT}")
        warnings.warn(f"{problem}{HINT}", stacklevel=5)

    def _update_coverage(self, trainer: Any, loss: WatchedLoss, check: GradientCheck) -> str:
        """Update the coverage after a successful comparison; return a line if it tested more, else an empty string."""
        beyond = torch.tensor(float(check.beyond), device=loss.logp.device)
        any_beyond = trainer.accelerator.reduce(beyond, reduction="sum").item() > 0
        if not loss.ratios_moved:
            coverage = Coverage.RATIO_ONE
        elif any_beyond:
            coverage = Coverage.BEYOND
        else:
            coverage = Coverage.MOVED

        if coverage <= self.coverage:
            return ""
        self.coverage = coverage
        return str(check) if loss.ratios_moved else f"{check}; every ratio is 1"

    def _compare_parameters(
        self, trainer: Any, method: Method, parameter_check: ParameterCheck, losses: list[WatchedLoss]
    ) -> str:
        """Compare the parameters' gradient, once per run; return a line about the result."""
        self._parameters_done = True
        obstacle = ParameterCheck.obstacle(trainer)
        if obstacle:
            return f"gradient of the parameters was not compared: {obstacle}"
        expected = [loss.expected_in_model(trainer, method) for loss in losses]
        comparison = parameter_check.compare(trainer, expected)
        sentence = comparison.sentence(method)
        if comparison.equal:
            return sentence
        self._report_problem(sentence)
        return ""

    def _schedule_next(self, step: int, ratios_moved: bool) -> None:
        """Set the step of the next comparison of a loss of the same kind, with or without ratios other than 1."""
        if not ratios_moved:
            self._next_step_at_one = step + EVERY
            return
        self._moved_comparisons += 1
        if self.coverage == Coverage.BEYOND or self._moved_comparisons >= MAX_SEARCH:
            self._next_step_moved = step + EVERY

    def summary(self, trainer: Any, method: Method) -> str:
        """Return a line for the end of training if nothing was compared; else an empty string."""
        if self.mode == "off" or self.coverage > Coverage.NOTHING:
            return ""
        if not _comparable(trainer):
            cause = "under DeepSpeed the gradient check is not available"
        elif self.watched:
            cause = "training_step is replaced by one that does not call super().training_step()"
        else:
            cause = "every advantage of a counted token was 0, or the trainer's compute_loss was not called"
        return f"no gradient was compared with that of {method!r}: {cause}"


def _comparable(trainer: Any) -> bool:
    """Return True if the expected gradient of a trainer's loss can be computed."""
    # DeepSpeed scales losses by a factor of its own.
    return not trainer.is_deepspeed_enabled
