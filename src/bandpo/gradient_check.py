"""Comparison of the gradient that a loss gives the log-probabilities with a method's, token by token.

A trainer's average, another plug-in or a new release can change the loss between the method and the optimiser step. The
gradient at ``logp`` shows every such change. `certify` checks any loss; the trainers of `bandpo.integrations` check
their own loss when the method first matters and rarely after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from bandpo._packed import check_unpacked
from bandpo.batch import Batch
from bandpo.errors import RunProblem
from bandpo.loss import average_share
from bandpo.methods import Method
from bandpo.objectives import DualClip
from bandpo.rules import ClipRule, FixedClip, Unclipped
from bandpo.schedules import TrainingState
from bandpo.sequences import as_row
from bandpo.text import as_method

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from bandpo.sequences import Sequences

__all__ = ["GradientCheck", "certify", "compare", "slope", "unsure"]

TOLERANCE = 1e-4
"""Largest difference that counts as rounding. Float32 losses have at most 4e-7, also under autocast; losses with other
clips, advantages or averages differ by more than 1e-2."""
NEAR = 1e-6
"""Distance of a log-probability, relative to 1 or its size, that rounding may move; 8 units of float32's last place."""


@dataclass(frozen=True)
class GradientCheck:
    """The result of a comparison; ``str`` gives one sentence."""

    method: str
    tokens: int
    """How many counted tokens were compared."""
    beyond: int
    """How many of them the method blocks. With 0 no bound was tested."""
    error: float
    """The largest difference, in units of what a token with the largest advantage counts for, or of its gradient."""
    cause: str
    """What the difference points to; empty if there is none."""
    examples: tuple[str, ...]
    """The tokens that differ most, each with both numbers."""

    @property
    def equal(self) -> bool:
        """Whether the gradient is the method's up to rounding."""
        return self.error <= TOLERANCE

    def __str__(self) -> str:
        tokens = f"on {self.tokens:,} tokens ({self.beyond:,} beyond a bound)"
        if self.equal:
            return f"gradient equals {self.method} {tokens}, {self.error:.0e}"
        return (
            f"gradient differs from {self.method} {tokens} by {self.error:.2g}: {self.cause}; "
            + "; ".join(self.examples)
        )

    def or_stop(self) -> GradientCheck:
        """Itself, if the gradient is the method's.

        Raises:
            RuntimeError: it is not.
        """
        if not self.equal:
            raise RunProblem(str(self))
        return self


def certify(
    loss: Callable[[Tensor], Tensor],
    logp: Float[Tensor, "batch time"],
    logp_old: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"] | Float[Tensor, " batch"],
    mask: Tensor | None = None,
    *,
    method: Method | ClipRule | str | None = None,
    logp_anchor: Float[Tensor, "batch time"] | None = None,
    entropy: Float[Tensor, "batch time"] | None = None,
    weights: Float[Tensor, "batch time"] | Float[Tensor, " batch"] | None = None,
    state: TrainingState | None = None,
    aggregation: str | None = None,
    normalizer: float | Tensor | None = None,
    segments: Int[Tensor, "batch time"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    packed: bool | None = None,
) -> GradientCheck:
    """Check that a loss has a method's gradient.

    Args:
        loss: The loss as a function of ``logp``, which it must not detach: a framework's, or one of your own.
        logp: As for `bandpo.policy_loss`, and so are the rest. A batch whose ratios are all 1 tests no bound.

    Returns:
        What was compared, and the largest difference.

    Raises:
        RuntimeError: the gradient is another; the message names the tokens, both numbers and the likely cause.
        TypeError, ValueError: see `bandpo.policy_loss`.

    >>> logp, logp_old = torch.tensor([[0.16, 0.05]]).log(), torch.tensor([[0.08, 0.05]]).log()
    >>> def loss(x):  # that the first token is clipped its author knew
    ...     return -(x - logp_old).exp()[0, 1] / 2
    >>> print(certify(loss, logp, logp_old, torch.ones(1), method="FixedClip(0.2)"))
    gradient equals FixedClip(low=0.2, high=0.2) on 2 tokens (1 beyond a bound), 0e+00
    """
    chosen = as_method(method)
    batch = Batch.read(
        logp,
        logp_old,
        advantages,
        mask,
        logp_anchor=logp_anchor,
        entropy=entropy,
        weights=weights,
        state=state,
        segments=segments,
        cu_seqlens=cu_seqlens,
    )
    average = aggregation or chosen.aggregation or "token-mean"
    check_unpacked(batch, advantages, chosen, average, packed)
    leaf = logp.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    if batch.sequences.packed:
        gradient = as_row(gradient)
    share = average_share(batch.sequences, average, normalizer, dtype=batch.log_ratio.dtype)
    return compare(gradient, chosen, batch, share).or_stop()


def slope(method: Method, batch: Batch) -> Float[Tensor, "batch time"]:
    """The derivative of each token's loss by its log-probability: ``−(w·A + b)``, importance weights included."""
    with torch.no_grad():
        tokens, objective = method.tokens(batch), method.objective.resolve(batch.state)
        found, bias = objective.weight(tokens) * batch.advantages, objective.bias(tokens)
        found = -found if bias is None else -(found + bias * batch.mask)
        token_weights = batch.token_weights
        return found if token_weights is None or objective.weights_inside else found * token_weights


def unsure(method: Method, batch: Batch) -> Bool[Tensor, "batch time"]:
    """Tokens so near to a bound, or another jump of the weight, that rounding decides."""
    here = slope(method, batch)
    size = NEAR * (batch.logp_old + batch.log_ratio).abs().clamp(min=1.0)
    # A smooth weight changes by about NEAR; a jump by much more than its root.
    jump = NEAR**0.5 * here.abs().clamp(min=NEAR)
    moved = (slope(method, batch._replace(log_ratio=batch.log_ratio + sign * size)) for sign in (-1, 1))
    return torch.stack([(there - here).abs() > jump for there in moved]).any(0)


def compare(
    found: Float[Tensor, "batch time"],
    method: Method,
    batch: Batch,
    share: Float[Tensor, "batch time"],
    *,
    expected: Callable[[Method], Float[Tensor, "batch time"]] | None = None,
) -> GradientCheck:
    """A gradient at the log-probabilities against a method's.

    Args:
        found: The gradient.
        method: The method.
        batch: What the loss was computed from.
        share: What each token's loss counts for: the derivative of the average, times what else a trainer multiplies.
        expected: The gradient of a method, where it is more than ``slope(method, batch)·share``.
    """
    expected = expected or (lambda method: slope(method, batch) * share)
    found, wanted = found.detach().double(), expected(method).double()
    counted = (batch.mask > 0) & ~unsure(method, batch)
    unit = share.abs().max().double() * batch.advantages.abs().max()

    def difference(other: Tensor, factor: float | Tensor = 1.0) -> Tensor:
        apart = (found - factor * other).abs() / torch.maximum(other.abs(), unit).clamp(min=1e-300)
        padding = (found != 0) & (batch.mask == 0)
        return torch.where(counted, apart, padding.double()).nan_to_num(nan=torch.inf)

    apart = difference(wanted)
    error = apart.max().item() if apart.numel() else 0.0
    cause, examples = "", ()
    if error > TOLERANCE:
        # What is most often in a method's place: the fixed clips, none, a dual clip around it.
        clips = FixedClip(0.2), FixedClip(0.2, 0.28), Unclipped()
        suspects = [Method(rule, level=method.level) for rule in clips]
        suspects.append(replace(method, objective=DualClip(3.0, method.objective)))
        others = {f"that of {other!r}": expected(other).double() for other in suspects}
        cause = _cause(
            found, wanted, counted, batch.sequences, lambda *x: difference(*x).max().item(), others
        )
        worst = [int(token) for token in apart.flatten().topk(min(3, apart.numel())).indices]
        examples = tuple(
            f"{batch.sequences.place(token)}: {found.flatten()[token]:.4g}, expected {wanted.flatten()[token]:.4g}"
            for token in worst
        )
    blocked = counted & (method.weight(method.tokens(batch)) <= 0) & (batch.advantages != 0)
    return GradientCheck(repr(method), int(counted.sum()), int(blocked.sum()), error, cause, examples)


def _cause(
    found: Tensor,
    wanted: Tensor,
    counted: Tensor,
    sequences: Sequences,
    difference: Callable[..., float],
    others: Mapping[str, Tensor],
) -> str:
    live = counted & (wanted != 0)
    if not found.isfinite().all():
        return "it is not finite"
    if not (found[live] != 0).any():
        return "no gradient reached the log-probabilities"
    if (found[sequences.mask == 0] != 0).any():
        return "tokens that do not count have a gradient: another mask"
    quotient = torch.where(live, found / wanted, torch.nan)
    factor = quotient.nanmedian()
    if difference(wanted, factor) <= TOLERANCE:
        return f"every token is {factor:.4g} times as expected: another average, or a factor on the loss"
    for name, other in others.items():
        if difference(other) <= TOLERANCE:
            return f"it is {name}: another plug-in, or a setting of the trainer's own"
    medians = (
        sequences.to_rows(quotient, fill=torch.nan).nanmedian(-1, keepdim=True).values.nan_to_num(nan=1.0)
    )
    if difference(wanted, sequences.of_rows(medians)) <= TOLERANCE:
        return "each sequence has a factor of its own: another average, or other advantages"
    offset = (found - wanted)[counted]
    if (offset - offset.median()).abs().max() <= TOLERANCE * offset.abs().max():
        return f"{offset.median():.3g} is added to every token: a term that knows no advantage"
    extra, missing = counted & (wanted == 0) & (found != 0), live & (found == 0)
    if extra.any() or missing.any():
        return (
            f"{int(extra.sum())} tokens that it blocks have a gradient, {int(missing.sum())} that it keeps have none: "
            "another clip or mask, or a clamp of the ratio"
        )
    return "another loss, or another term in it"
