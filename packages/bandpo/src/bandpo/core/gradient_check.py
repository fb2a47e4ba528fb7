"""Comparison of a loss's gradient with respect to the log-probabilities with that of a method, token by token.

A trainer's aggregation, another plug-in or a new release can change the loss between the method and the optimiser step.
The gradient with respect to ``logp`` shows every such change. `certify` checks any loss. The trainers of
`bandpo.integrations` check their own loss at the first update on which the method has an effect, and rarely afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .aggregation import aggregation_weights
from .batch import Batch
from .errors import InvalidValue, RunProblem
from .layout import as_row
from .methods import Method
from .objectives import DualClip
from .rules import ClipRule, FixedClip, Unclipped
from .text import as_method

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from .sequences import Sequences

__all__ = ["GradientCheck", "certify", "compare", "near_discontinuity", "slope"]

TOLERANCE = 1e-4
"""Largest difference that counts as rounding. Float32 losses differ by at most 4e-7, also under autocast; losses with
another clip, advantage or aggregation differ by more than 1e-2."""
ROUNDING = 1e-6
"""Largest rounding error of a log-probability, relative to the larger of 1 and its size: 8 units in float32's last
place."""


@dataclass(frozen=True)
class GradientCheck:
    """The result of a comparison. ``str`` gives it as one sentence."""

    method: str
    """The text form of the method."""
    tokens: int
    """The number of counted tokens that were compared."""
    beyond: int
    """The number of these tokens that the method blocks. With 0 no bound was tested."""
    error: float
    """The largest relative difference: to the gradient, or to that of a token with the largest advantage and w = 1."""
    cause: str
    """The likely cause of the difference; empty if there is none."""
    examples: tuple[str, ...]
    """The tokens that differ most, each with both numbers."""

    @property
    def equal(self) -> bool:
        """True if the gradient is the method's, up to rounding."""
        return self.error <= TOLERANCE

    def __str__(self) -> str:
        tokens = f"on {self.tokens:,} tokens ({self.beyond:,} beyond a bound)"
        if self.equal:
            return f"gradient equals {self.method} {tokens}, {self.error:.0e}"
        examples = "; ".join(self.examples)
        return f"gradient differs from {self.method} {tokens} by {self.error:.2g}: {self.cause}; {examples}"

    def or_stop(self) -> GradientCheck:
        """Return the result if the gradient is the method's, else raise it as an error.

        Raises:
            RuntimeError: if the gradient is not the method's.
        """
        if not self.equal:
            raise RunProblem(str(self))
        return self


def certify(
    loss: Callable[[Tensor], Tensor],
    batch: Batch,
    *,
    method: Method | ClipRule | str | None = None,
    aggregation: str | None = None,
    normalizer: float | Tensor | None = None,
) -> GradientCheck:
    """Check that a loss has a method's gradient on a batch.

    Args:
        loss: The loss as a function of ``logp``, a framework's or one of your own. It must not detach ``logp``.
        batch: The batch, from `Batch.read`. One whose ratios are all 1 tests no bound.
        method: As for `bandpo.policy_loss`.
        aggregation: As for `bandpo.policy_loss`.
        normalizer: As for `bandpo.policy_loss`.

    Returns:
        The number of compared tokens, and the largest difference.

    Raises:
        RuntimeError: if the gradient differs. The message names the tokens, both numbers and the likely cause.
        TypeError, ValueError: see `bandpo.policy_loss`.

    >>> logp, logp_old = torch.tensor([[0.16, 0.05]]).log(), torch.tensor([[0.08, 0.05]]).log()
    >>> def loss(x):  # the first token is clipped, so only the second has a gradient
    ...     return -(x - logp_old).exp()[0, 1] / 2
    >>> print(certify(loss, Batch.read(logp, logp_old, torch.ones(1)), method="FixedClip(0.2)"))
    gradient equals FixedClip(low=0.2, high=0.2) on 2 tokens (1 beyond a bound), 0e+00
    """
    chosen = as_method(method)
    if batch.logp is None:
        raise InvalidValue(
            "the log-probabilities of the batch are not known, so its gradient cannot be compared"
        )
    average = aggregation or chosen.aggregation or "token-mean"
    chosen.check_rows(batch, average)
    leaf = batch.logp.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    if batch.sequences.packed:
        gradient = as_row(gradient)
    share = aggregation_weights(batch.sequences, average, normalizer, dtype=batch.log_ratio.dtype)
    return compare(gradient, chosen, batch, share).or_stop()


def slope(method: Method, batch: Batch) -> Float[Tensor, "batch time"]:
    """Compute the derivative of each token's loss with respect to its log-probability, ``−(w·A + b)``.

    Importance weights are included, the aggregation is not.
    """
    with torch.no_grad():
        tokens = method.tokens(batch)
        objective = method.objective.resolve(batch.state)
        derivative = objective.weight(tokens) * batch.advantages
        bias = objective.bias(tokens)
        if bias is not None:
            derivative = derivative + bias * batch.mask
        derivative = -derivative
        token_weights = batch.token_weights
        if token_weights is None or objective.weights_inside:
            return derivative
        return derivative * token_weights


def near_discontinuity(method: Method, batch: Batch) -> Bool[Tensor, "batch time"]:
    """Mark the tokens so close to a bound, or to another discontinuity of the weight, that rounding decides."""
    derivative = slope(method, batch)
    size = ROUNDING * (batch.logp_old + batch.log_ratio).abs().clamp(min=1.0)
    # A smooth weight changes by about ROUNDING, a discontinuous one by much more than its square root.
    threshold = ROUNDING**0.5 * derivative.abs().clamp(min=ROUNDING)
    jumps: list[Tensor] = []
    for sign in (-1, 1):
        shifted = batch._replace(log_ratio=batch.log_ratio + sign * size)
        jumps.append((slope(method, shifted) - derivative).abs() > threshold)
    return torch.stack(jumps).any(0)


def compare(
    gradient: Float[Tensor, "batch time"],
    method: Method,
    batch: Batch,
    share: Float[Tensor, "batch time"],
    *,
    expected: Callable[[Method], Float[Tensor, "batch time"]] | None = None,
) -> GradientCheck:
    """Compare the gradient of a loss with respect to the log-probabilities with that of a method.

    Args:
        gradient: The gradient.
        method: The method.
        batch: The batch that the loss was computed from.
        share: The weight of each token's loss in the total: the derivative of the aggregation, times other factors of
            the trainer.
        expected: A function that returns the gradient of a method, if that is not ``slope(method, batch)·share``.
    """
    expected = expected or (lambda method: slope(method, batch) * share)
    gradient = gradient.detach().double()
    expected_gradient = expected(method).double()
    counted = (batch.mask > 0) & ~near_discontinuity(method, batch)
    unit = share.abs().max().double() * batch.advantages.abs().max()

    def difference(reference: Tensor, factor: float | Tensor = 1.0) -> Tensor:
        """Compute the relative difference of each token; 1 for padding with a gradient, inf for NaN."""
        scale = torch.maximum(reference.abs(), unit).clamp(min=1e-300)
        relative = (gradient - factor * reference).abs() / scale
        padding = (gradient != 0) & (batch.mask == 0)
        return torch.where(counted, relative, padding.double()).nan_to_num(nan=torch.inf)

    differences = difference(expected_gradient)
    error = differences.max().item() if differences.numel() else 0.0
    cause = ""
    examples: tuple[str, ...] = ()
    if error > TOLERANCE:
        # The methods that most often replace the expected one: fixed clips, no clip, and an additional dual clip.
        clips = (FixedClip(0.2), FixedClip(0.2, 0.28), Unclipped())
        suspects = [Method(rule, level=method.level) for rule in clips]
        # A method of a whole update would wait for other processes, whose gradients may be equal to the expected ones.
        if batch.state.processes is None or not method.whole_batch:
            suspects.append(replace(method, objective=DualClip(3.0, method.objective)))
        alternatives = {f"that of {suspect!r}": expected(suspect).double() for suspect in suspects}
        cause = _cause(
            gradient,
            expected_gradient,
            counted,
            batch.sequences,
            lambda *arguments: difference(*arguments).max().item(),
            alternatives,
        )
        worst = differences.flatten().topk(min(3, differences.numel())).indices
        examples = tuple(
            f"{batch.sequences.describe_position(token)}: {gradient.flatten()[token]:.4g}, "
            f"expected {expected_gradient.flatten()[token]:.4g}"
            for token in map(int, worst)
        )
    blocked = counted & (method.weight(method.tokens(batch)) <= 0) & (batch.advantages != 0)
    return GradientCheck(repr(method), int(counted.sum()), int(blocked.sum()), error, cause, examples)


def _cause(
    gradient: Tensor,
    expected: Tensor,
    counted: Tensor,
    sequences: Sequences,
    difference: Callable[..., float],
    alternatives: Mapping[str, Tensor],
) -> str:
    """Return the likely cause of a difference.

    Args:
        gradient: The gradient, (batch, time).
        expected: The expected gradient.
        counted: True for the tokens that are compared.
        sequences: The sequences of the batch.
        difference: A function that returns the largest difference from a reference, optionally with a factor.
        alternatives: Gradients of other methods, by description.
    """
    nonzero = counted & (expected != 0)
    if not gradient.isfinite().all():
        return "it is not finite"
    if not (gradient[nonzero] != 0).any():
        return "no gradient reached the log-probabilities"
    if (gradient[sequences.mask == 0] != 0).any():
        return "tokens that do not count have a gradient: another mask"

    # A constant factor, another method, or a factor for each sequence.
    quotient = torch.where(nonzero, gradient / expected, torch.nan)
    factor = quotient.nanmedian()
    if difference(expected, factor) <= TOLERANCE:
        return f"every token is {factor:.4g} times as expected: another average, or a factor on the loss"
    for name, alternative in alternatives.items():
        if difference(alternative) <= TOLERANCE:
            return f"it is {name}: another plug-in, or a setting of the trainer's own"
    rows = sequences.to_rows(quotient, fill=torch.nan)
    medians = rows.nanmedian(-1, keepdim=True).values.nan_to_num(nan=1.0)
    if difference(expected, sequences.from_rows(medians)) <= TOLERANCE:
        return "each sequence has a factor of its own: another average, or other advantages"

    # A constant term, or tokens that are blocked in one of the two only.
    offset = (gradient - expected)[counted]
    if (offset - offset.median()).abs().max() <= TOLERANCE * offset.abs().max():
        return f"{offset.median():.3g} is added to every token: a term that does not depend on the advantage"
    extra = counted & (expected == 0) & (gradient != 0)
    missing = nonzero & (gradient == 0)
    if extra.any() or missing.any():
        return (
            f"{int(extra.sum())} tokens that the method blocks have a gradient, {int(missing.sum())} that it keeps "
            "have none: another clip or mask, or a clamp of the ratio"
        )
    return "another loss, or another term in it"
