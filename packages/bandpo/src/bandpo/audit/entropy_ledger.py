"""The entropy ledger: by how much the tokens that a method keeps would change the entropy of the policy.

It needs no training: the log-probabilities, entropies and advantages of recorded tokens are enough. The difference of
two methods on the same tokens is an account of what one of them blocks. It is of first order and of each token's own
logits. What a step does through shared weights, momentum and Adam's scale is left out.

It is exact for one small step on logits, and no forecast of a run: in a small network the ledger of the first batches
had the sign of 8 of 21 sure differences of entropy at equal step, and a guess by rule that of 15
(research/reports/network-ledger.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bandpo.core.batch import Batch
from bandpo.core.errors import InvalidValue
from bandpo.core.methods import Method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def collision_of(logp_all: Float[Tensor, "*shape vocabulary"]) -> Float[Tensor, "*shape"]:
    """Return ``Σ_b q_b²·(log q_b + H)``, the term of `entropy_changes` that needs all probabilities of a position.

    It is the mean of ``q_a·(log q_a + H)`` over tokens ``a`` that are drawn from ``q``.

    Args:
        logp_all: The log-probabilities (nats) of all tokens of the vocabulary, normalised.

    >>> collision_of(torch.tensor([0.9, 0.1]).log())
    tensor(0.1582)
    """
    probabilities = logp_all.exp()
    # A token of probability 0 adds nothing, and its log-probability of -inf would give NaN.
    finite = logp_all.masked_fill(probabilities == 0, 0.0)
    entropy = -(probabilities * finite).sum(-1, keepdim=True)
    return (probabilities.square() * (finite + entropy)).sum(-1)


def entropy_changes(
    batch: Batch, method: Method, collision: Float[Tensor, "batch time"] | float | None = None
) -> Float[Tensor, "batch time"]:
    """Return the change of the policy's entropy by each token under a method, for a small step on the token's logits.

    A step of size ε along the gradient of the method's objective moves the logits of a position with probabilities
    ``q`` and entropy ``H`` by ``ε·(w·A + b)·(e_a − q)``, and the entropy by ``ε`` times

        ``−(w·A + b)·[q_a·(log q_a + H) − Σ_b q_b²·(log q_b + H)]``

    where ``a`` is the sampled token, ``A`` its advantage, and ``w`` and ``b`` the weight and the bias of the method, 0
    for a token that it drops. So, but for the second term, a token that is more surprising than the mean
    (``−log q_a > H``) raises the entropy if it is raised, and lowers it if it is lowered.

    The formula is the derivative ``∂H/∂z_b = −q_b·(log q_b + H)`` along that direction. It equals minus the covariance
    under ``q`` of log-probabilities and changes of logits, by which "The Entropy Mechanism of Reinforcement Learning
    for Reasoning Language Models" (arXiv 2505.22617) explains the entropy.

    Args:
        batch: The batch, with the entropy (nats) of the policy at each token.
        method: The method, such as ``parse("BandPO()")``.
        collision: The second term of the bracket, from `collision_of` or from a record; or one number for all tokens,
            such as the mean of ``q_a·(log q_a + H)`` over a batch, where a record holds no more. Left out if not given.

    Returns:
        The change in nats per unit of ε, 0 in the padding. Add it over tokens for the ledger of a batch.

    Raises:
        ValueError: if the batch has no entropies or no log-probabilities; or as by `Method.loss`.

    >>> q = torch.tensor([[0.9, 0.1]])
    >>> batch = Batch.read(q.log(), q.log(), torch.ones(1), entropy=torch.full((1, 2), 0.3251))
    >>> entropy_changes(batch, Method(FixedClip(0.2)), collision_of(torch.tensor([0.9, 0.1]).log()))
    tensor([[-0.0396,  0.3559]])
    """
    if batch.entropy is None:
        raise InvalidValue("the batch has no entropies; pass entropy= to Batch.read")
    gradient = _gradient(batch, method)
    logp = batch.log_ratio + batch.logp_old
    surprise = logp.exp() * (logp + batch.entropy)
    if collision is not None:
        surprise = surprise - collision
    # The collision may hold anything in the padding.
    return torch.where(batch.mask > 0, -gradient * surprise, 0.0)


def _gradient(batch: Batch, method: Method) -> Float[Tensor, "batch time"]:
    """Return ``w·A + b`` of each token, the derivative of the method's objective by the token's log-probability."""
    if batch.logp is None:
        raise InvalidValue("the log-probabilities of the batch are not known, so it has no gradient")
    leaf = batch.logp.detach().clone().requires_grad_()
    with torch.enable_grad():
        loss = method.loss(batch._replace(logp=leaf), aggregation=torch.sum, metrics=False).loss
    # The value of a loss without metrics is NaN, and its gradient is not.
    (gradient,) = torch.autograd.grad(loss, leaf)
    return -gradient.view_as(batch.mask)
