"""Certificates of a loss that is a function: of the log-probabilities, or of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bandpo.certificate.explain import NOT_FINITE, NOT_REACHED
from bandpo.certificate.gradient import TOLERANCE, PolicyTerm
from bandpo.certificate.search import find_method
from bandpo.certificate.subject import Certificate, compare
from bandpo.certificate.tokens import LossBatch
from bandpo.certificate.variants import Case, Variant, explanation
from bandpo.core.aggregation import aggregation_weights
from bandpo.core.batch import Batch
from bandpo.core.errors import InvalidValue
from bandpo.core.layout import as_row
from bandpo.core.methods import Method
from bandpo.core.rules import ClipRule
from bandpo.core.text import as_method

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Comparison", "certify", "compare_loss"]


def certify(
    loss: Callable[[Tensor], Tensor],
    batch: Batch,
    *,
    method: Method | ClipRule | str | None = None,
    aggregation: str | None = None,
    normalizer: float | Tensor | None = None,
) -> Certificate:
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
    return compare(PolicyTerm(gradient, chosen, batch, share)).or_stop()


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_loss`."""

    method: str
    differences: tuple[str, ...] | None
    """Names of the changes that make the gradients equal; empty if they are, None if no known changes do."""
    shares: dict[str, float]
    """The share of the counted tokens whose gradients differ, by the name of the batch."""
    same_value: bool
    """True if, with these changes, the values of the losses are equal too."""
    cause: str
    """The likely cause of the difference; empty if there is none."""
    examples: tuple[str, ...]
    """The tokens that differ most, each with both numbers."""
    found: str = ""
    """The published method that the loss is, with its average if that is not the method's; empty if none is known."""

    @property
    def equal(self) -> bool:
        """True if the loss has the method's gradient."""
        return self.differences == ()

    def __str__(self) -> str:
        if self.equal:
            return f"the loss has the gradient of {self.method}"
        shares = [f"{share:.2%} of the tokens of the batch {name!r}" for name, share in self.shares.items()]
        lines = [f"the loss does not have the gradient of {self.method}: {', '.join(shares)} differ."]
        lines += [f"  {example}" for example in self.examples]
        lines.append(f"Likely difference: {self.cause}.")
        if self.found:
            lines.append(f"It has the gradient of {self.found}.")
        return "\n".join(lines)


def compare_loss(
    loss: Callable[[LossBatch], Tensor],
    expected: Variant,
    batches: Sequence[LossBatch],
    *,
    tolerance: float = TOLERANCE,
    finds: bool = False,
) -> Comparison:
    """Compare the gradient of a loss with a method's on every batch, and find the fewest changes that explain it.

    Args:
        loss: The loss as a function of a batch, differentiable with respect to the batch's ``logp``.
        expected: The method.
        batches: The batches of `loss_batches`.
        tolerance: The largest difference that counts as rounding, relative to the gradient or to that of a token with
            A = w = 1, whichever is larger.
        finds: True to look for the published method that the loss is, if it is another one.
    """
    cases = [Case.of(loss, expected, batch) for batch in batches]
    certificates = [compare(case.term, tolerance) for case in cases]
    method = repr(expected.method)
    shares: dict[str, float] = {}
    for case, certificate in zip(cases, certificates, strict=True):
        shares[case.batch.name] = certificate.different / float(case.batch.mask.sum())

    first = next((found for found in certificates if not found.equal), None)
    if first is None:
        same_value = all(case.has_value_of(expected) for case in cases)
        return Comparison(method, (), shares, same_value, "", ())
    if first.cause in (NOT_FINITE, NOT_REACHED):
        return Comparison(method, None, shares, False, first.cause, first.examples)
    instead = find_method(expected, cases, tolerance) if finds else None
    found = "" if instead is None else instead.describe()
    explained = explanation(expected, cases, tolerance)
    if explained is None:
        return Comparison(method, None, shares, False, first.cause, first.examples, found)
    changes, variant = explained
    same_value = all(case.has_value_of(variant) for case in cases)
    return Comparison(method, changes, shares, same_value, "; ".join(changes), first.examples, found)
