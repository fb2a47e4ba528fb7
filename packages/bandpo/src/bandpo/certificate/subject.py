"""The certificate of a loss, and what a trainer hands over for one: a `Subject`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bandpo.certificate.explain import likely_cause
from bandpo.certificate.gradient import TOLERANCE, PolicyTerm, relative_differences, slope
from bandpo.core.batch import Batch
from bandpo.core.errors import RunProblem
from bandpo.core.methods import Method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

EXAMPLES = 3
"""The number of tokens that a message names."""


@dataclass(frozen=True)
class Certificate:
    """The result of a comparison. ``str`` gives it as one sentence."""

    method: str
    """The text form of the method."""
    tokens: int
    """The number of counted tokens that were compared."""
    beyond: int
    """The number of these tokens that the method blocks. With 0 no bound was tested."""
    error: float
    """The largest difference, relative to the gradient or to that of a token with A = w = 1, whichever is larger."""
    different: int
    """The number of counted tokens whose gradient differs."""
    cause: str
    """The likely cause of the difference; empty if there is none."""
    examples: tuple[str, ...]
    """The tokens that differ most, each with both numbers."""

    @property
    def equal(self) -> bool:
        """True if the gradient is the method's, up to rounding."""
        return not self.cause

    def __str__(self) -> str:
        tokens = f"on {self.tokens:,} tokens ({self.beyond:,} beyond a bound)"
        if self.equal:
            return f"gradient equals {self.method} {tokens}, {self.error:.0e}"
        examples = "; ".join(self.examples)
        return f"gradient differs from {self.method} {tokens} by {self.error:.2g}: {self.cause}; {examples}"

    def or_stop(self) -> Certificate:
        """Return the result if the gradient is the method's, else raise it as an error.

        Raises:
            RuntimeError: if the gradient is not the method's.
        """
        if not self.equal:
            raise RunProblem(str(self))
        return self


def compare(term: PolicyTerm, tolerance: float = TOLERANCE) -> Certificate:
    """Compare the gradient of a loss's policy term with that of its method.

    Args:
        term: The gradient.
        tolerance: The largest difference that counts as rounding.
    """
    differences = term.differences(term.expected)
    error = differences.max().item() if differences.numel() else 0.0
    cause = ""
    examples: tuple[str, ...] = ()
    if error > tolerance:
        cause = likely_cause(term)
        worst = differences.flatten().topk(min(EXAMPLES, differences.numel())).indices
        examples = tuple(map(term.describe, worst.tolist()))
    is_blocked = term.method.weight(term.method.tokens(term.batch)) <= 0
    blocked = term.counted & is_blocked & (term.batch.advantages != 0)
    return Certificate(
        method=repr(term.method),
        tokens=int(term.counted.sum()),
        beyond=int(blocked.sum()),
        error=error,
        different=int(((differences > tolerance) & term.counted).sum()),
        cause=cause,
        examples=examples,
    )


def shares_difference(share: Tensor, expected: Tensor) -> str:
    """Return how the shares of tokens in a loss differ from those of an average; empty if they do not.

    >>> shares_difference(torch.tensor([[0.5, 0.25]]), torch.tensor([[0.25, 0.25]]))
    'the share of a token in the loss is 1 to 2 times that of the average'
    """
    if not bool((relative_differences(share, expected, expected.abs().max()) > TOLERANCE).any()):
        return ""
    quotient = (share / expected)[expected > 0]
    return f"the share of a token in the loss is {quotient.min():.3g} to {quotient.max():.3g} times that of the average"


class Subject(ABC):
    """A trainer's loss, computed on synthetic tokens and without a model.

    Gradients have the shape (2, sequences, tokens): those by the log-probabilities and by the entropies.
    """

    loss: str
    """The name of the loss in messages, such as ``the loss of verl 0.9.1``."""
    method: Method
    """The method that it should have."""
    measure: str
    """What the terms beside the policy's are compared with, such as ``TRL's loss``."""
    unseen: str
    """What can change the training, and is not part of the loss."""
    hint: str = ""
    """The end of an error."""

    @abstractmethod
    def batch(self) -> Batch:
        """Return the tokens as the method sees them."""

    @abstractmethod
    def gradient(self, advantages: float | None = None) -> Float[Tensor, "2 batch time"]:
        """Return the gradient of the loss.

        Args:
            advantages: The advantage of all tokens; by default those of the batch.
        """

    @abstractmethod
    def share(self) -> Float[Tensor, "batch time"]:
        """Return the factor of each token's policy term in the loss."""

    def other_terms(self) -> Float[Tensor, "2 batch time"]:
        """Return the gradient of all terms but the policy's: KL term and entropy bonus."""
        return torch.zeros_like(torch.stack([self.share()] * 2))

    def expected(self, method: Method, batch: Batch, share: Tensor) -> Float[Tensor, "batch time"]:
        """Return the gradient of a method's policy term by the log-probabilities."""
        return share * slope(method, batch)

    def parts(self) -> Sequence[str]:
        """Return the names of the parts of the loss that are compared beside the policy term."""
        return ()

    def problem(self, text: str) -> RunProblem:
        """Return the error about a difference."""
        return RunProblem(f"{self.loss} is not that of {self.method!r}: {text}{self.hint}")

    def certify(self) -> str:
        """Compare the loss with its method, and return a line about what was compared and what was not.

        Raises:
            RuntimeError: the first difference, with the part of the loss that has it.
        """
        batch = self.batch()
        other_terms = self.other_terms()
        share = self.share()
        gradient = self.gradient()
        by_entropy = relative_differences(gradient[1], other_terms[1], share.abs().max()).max()
        if by_entropy > TOLERANCE:
            raise self.problem(
                f"its gradient by the entropies differs from that of {self.measure} by {by_entropy:.2g}"
            )

        term = PolicyTerm(
            gradient[0] - other_terms[0],
            self.method,
            batch,
            share,
            lambda method: self.expected(method, batch, share),
        )
        found = compare(term)
        if found.equal:
            return self.line(found, batch)
        if self.method.objective.bias(self.method.tokens(batch)) is None:
            at_zero = self.gradient(advantages=0.0)[0]
            difference = relative_differences(at_zero, other_terms[0], share.abs().max()).max()
            if difference > TOLERANCE:
                raise self.problem(
                    f"with advantages of 0 its gradient differs from that of {self.measure} by {difference:.2g}: "
                    "another KL term, or a term of its own"
                )
        raise self.problem(f"its gradient differs by {found.error:.2g}: {found.cause}; {found.examples[0]}")

    def line(self, found: Certificate, batch: Batch) -> str:
        """Return a line about a loss without a difference."""
        ratio = batch.log_ratio.exp()
        length = batch.sequences.length
        compared = (
            f"{length.numel()} sequences of {length.min():.0f} to {length.max():.0f} tokens",
            f"ratios {ratio.min():.2g} to {ratio.max():.2g} ({found.beyond} tokens beyond a bound)",
            *self.parts(),
        )
        return (
            f"{self.loss} has the gradient of {self.method!r}, {found.error:.0e}: compared on {', '.join(compared)}; "
            f"not compared: {self.unseen}"
        )
