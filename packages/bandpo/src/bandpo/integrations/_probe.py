"""The common parts of all trainers' probes: a small synthetic batch, and the comparison of a loss's gradient on it.

A probe runs a framework's own loss on this batch before training, without a model, and compares its gradient by the
log-probabilities with that of the method. The batch has sequences of different lengths, one without a token, ratios
near 1 and far from it, tokens that are almost certain, and a gap to the reference policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bandpo.certificate.gradient import TOLERANCE, PolicyTerm
from bandpo.certificate.subject import Certificate, compare
from bandpo.core import _checks
from bandpo.core.batch import Batch
from bandpo.core.methods import Method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

LENGTHS = (9, 7, 8, 6, 1, 0, 5, 4)
"""The number of tokens of each sequence of the batch."""
ADVANTAGES = (1.2, -0.7, 0.3, -1.9, -1.1, 0.4, 0.0, 0.6)
"""The advantage of each sequence."""
NEAR_BOUNDS = {(0, 1): 0.2, (0, 7): 0.26, (2, 5): 0.5, (1, 2): -0.25, (3, 4): -0.4}
"""The log-ratios of some tokens, by sequence and position: on the side of 1 where bounds act for their advantages, and
so that clips at 1.2, 1.28, 1.5, 1.7 and at 0.8, 0.7, 0.6 block different ones."""


@dataclass(frozen=True)
class SyntheticTokens:
    """The tokens of the batch; tensors of shape (sequences, tokens) unless stated otherwise."""

    logp: Float[Tensor, "batch time"]
    """The current log-probabilities (nats)."""
    old: Float[Tensor, "batch time"]
    """The old log-probabilities: ratios alternate between both sides of 1, up to about 0.15 and 7 in the first four
    sequences, and are near 1 in the others."""
    mask: Float[Tensor, "batch time"]
    """1 for the tokens of each sequence."""
    used: Float[Tensor, "batch time"]
    """1 for the tokens that count, 0 for about a fifth of the others, as of tools."""
    sampled: Float[Tensor, "batch time"]
    """The sampler's log-probabilities."""
    reference: Float[Tensor, "batch time"]
    """The reference policy's log-probabilities."""
    weights: Float[Tensor, "batch time"]
    """Importance weights between 0.8 and 1.3."""
    advantages: Float[Tensor, " batch"]
    """The advantage of each sequence."""

    @classmethod
    def on(cls, device: torch.device) -> SyntheticTokens:
        """Return the batch on a device, in its widest floating-point type.

        >>> tokens = SyntheticTokens.on(torch.device("cpu"))
        >>> tokens.logp.shape, int(tokens.used.sum())
        (torch.Size([8, 9]), 36)
        """
        dtype = _checks.widest_float(device)
        rows = len(LENGTHS)
        columns = max(LENGTHS)
        random = torch.Generator().manual_seed(0)

        def uniform(low: float, high: float) -> Tensor:
            x = torch.rand(rows, columns, generator=random, dtype=torch.float64)
            return (low + (high - low) * x).to(device, dtype)

        distance = uniform(0.7, 1.95)
        distance[:, ::2] *= -1
        distance[4:] *= 0.05
        logp = uniform(-2.5, -0.1)
        # The first tokens are almost certain.
        logp[:, 0] = -0.012
        distance[:, 0] *= 0.005
        for token, log_ratio in NEAR_BOUNDS.items():
            distance[token] = log_ratio
        old = (logp - distance).clamp(max=-1e-3)
        mask = (torch.arange(columns) < torch.tensor(LENGTHS)[:, None]).to(device, dtype)
        used = (uniform(0.0, 1.0) > 0.2).to(dtype)
        used[:, 0] = 1.0
        return cls(
            logp=logp,
            old=old,
            mask=mask,
            used=mask * used,
            sampled=(old + uniform(-0.1, 0.1)).clamp(max=-1e-3),
            reference=old + uniform(-0.5, 0.0),
            weights=uniform(0.8, 1.3),
            advantages=torch.tensor(ADVANTAGES, dtype=dtype, device=device),
        )

    @property
    def entropy(self) -> Float[Tensor, "batch time"]:
        """Entropies (nats)."""
        return 0.2 - self.logp


@dataclass(frozen=True)
class Gradients:
    """The gradient of a loss on the batch, and the parts that it should have.

    The two gradients are by log-probabilities and by entropies, of shape (2, sequences, tokens).
    """

    whole: Float[Tensor, "2 batch time"]
    """The gradient of the loss."""
    other_terms: Float[Tensor, "2 batch time"]
    """The gradient of all terms but the policy's: KL term and entropy bonus."""
    shares: Float[Tensor, "batch time"]
    """The factor of each token's policy term in the loss."""
    policy: Callable[[Method], Float[Tensor, "batch time"]]
    """A function that returns the gradient of a method's policy term by the log-probabilities."""

    def compare(self, method: Method, batch: Batch) -> Certificate:
        """Compare the gradient of the policy term with a method's."""
        gradient = self.whole[0] - self.other_terms[0]
        return compare(PolicyTerm(gradient, method, batch, self.shares, self.policy))

    def unit(self, method: Method, batch: Batch) -> Tensor:
        """Return the size of the policy term's gradient, to which differences of other terms are relative."""
        return torch.maximum((self.shares * batch.advantages).abs().max(), self.policy(method).abs().max())


def relative_difference(x: Tensor, expected: Tensor, unit: Tensor | float = 0.0) -> float:
    """Return the largest difference, relative to the largest expected value or to a larger unit.

    >>> relative_difference(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0]))
    0.125
    """
    scale = torch.maximum(expected.abs().max(), torch.as_tensor(unit).to(expected))
    if not scale:
        return 0.0 if torch.equal(x, expected) else torch.inf
    return ((x - expected).abs().max() / scale).nan_to_num(nan=torch.inf).item()


def average_difference(shares: Tensor, expected: Tensor) -> str:
    """Return how the shares of tokens in a loss differ from those of an average; empty if they do not.

    >>> average_difference(torch.tensor([[0.5, 0.25]]), torch.tensor([[0.25, 0.25]]))
    'the share of a token in the loss is 1 to 2 times that of the average'
    """
    if relative_difference(shares, expected) <= TOLERANCE:
        return ""
    quotient = (shares / expected)[expected > 0]
    return f"the share of a token in the loss is {quotient.min():.3g} to {quotient.max():.3g} times that of the average"


def describe_comparison(check: Certificate, batch: Batch, *parts: str) -> str:
    """Return what was compared, as the end of a sentence.

    Args:
        check: The comparison of the policy term.
        batch: The batch, as the method sees it.
        parts: The names of further parts of the loss that were compared.
    """
    ratio = batch.log_ratio.exp()
    compared = (
        f"{len(LENGTHS)} sequences of {min(LENGTHS)} to {max(LENGTHS)} tokens",
        f"ratios {ratio.min():.2g} to {ratio.max():.2g} ({check.beyond} tokens beyond a bound)",
        *parts,
    )
    return ", ".join(compared)
