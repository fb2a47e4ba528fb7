"""Implement a method from a paper: a clip rule whose bounds depend on the tokens of a batch, and a function for it.

What it shows: a published method as a `TokenRule` and a `Method`, `check` for the rule, and `certify`, which compares
its gradient with that of the authors' algorithm, implemented step by step.

The method is M2PO (Zheng, Zhao and Chen, "Prosperity before Collapse", arXiv 2510.01161), for stale data. It bounds the
second moment, the mean of (log r)², over the tokens that a clip could block: those with A > 0 and r > 1, or A < 0 and
r < 1. `M2PO()` of bandpo is the algorithm of the paper. The authors' code, which this program implements, computes
another bound: the largest τ, among the |log r| of these tokens, for which the mean of min((log r)², τ²) is below a
threshold of 0.04. The interval [e^−τ, e^τ] is then extended to at least [0.7, 1.5].

What it needs: ``pip install ./packages/bandpo`` in a clone.

How to run it (about 3 seconds)::

    python examples/new_method.py

What one should see::

    check: Method(clip=__main__.CappedMoment(threshold=0.04, low=0.3, high=0.5), ...) is a valid method
    M2POAsCoded() drops 10.3% of the tokens
    M2PO()        drops 12.1% of the tokens
    PPO()         drops 26.7% of the tokens
    gradient equals Method(...) on 116 tokens (12 beyond a bound), 0e+00
"""

import math
from dataclasses import dataclass

import torch

from bandpo import Batch, Method, RatioBounds, certify, check, policy_loss
from bandpo.core.rules import TokenRule
from bandpo.core.text import as_text


# A `TokenRule` has one method, which returns the bounds of each token as log-ratios. All tensors in ``tokens`` are
# detached and have the shape (sequences, time). The method transfers no value to the CPU, so that it does not
# synchronise a GPU, and can be compiled.
@dataclass(frozen=True)
class CappedMoment(TokenRule):
    """Bounds [e^−τ, e^τ] with the largest τ that keeps the mean of min((log r)², τ²) below ``threshold``."""

    threshold: float = 0.04
    low: float = 0.3
    high: float = 0.5

    @property
    def whole_batch(self) -> bool:
        # The bounds depend on all tokens of an update, so a trainer that splits it into micro-batches must raise an
        # error. It reads this property.
        return True

    def for_tokens(self, tokens):
        log_ratio = tokens.log_ratio_anchor
        candidates = (tokens.advantages * log_ratio > 0) & (tokens.mask > 0)
        count = candidates.sum()

        # (log r)² of the candidates in ascending order, then infinity for all other tokens.
        squares, _ = log_ratio.square().masked_fill(~candidates, math.inf).flatten().sort()
        # The capped mean for each candidate as the cap: smaller squares count as they are, larger ones as the cap.
        ranks = torch.arange(len(squares), device=squares.device)
        capped_means = (squares.cumsum(0) + (count - ranks - 1) * squares) / count

        # The means ascend with the cap, so the number of means below the threshold gives the largest allowed cap.
        number = ((capped_means < self.threshold) & (ranks < count)).sum().view(1)
        cap = squares.gather(0, (number - 1).clamp(min=0)).sqrt()
        cap = torch.where(number > 0, cap, 0.0)
        cap = torch.where(number == count, math.inf, cap)
        return RatioBounds(
            log_lower=-cap.clamp(min=-math.log(1 - self.low)),
            log_upper=cap.clamp(min=math.log(1 + self.high)),
        )


# A function that is annotated to return a `Method` can be named in settings and on the command line, as
# "new_method.M2POAsCoded(0.04)". The default objective is PPO's surrogate. The authors' code averages the loss over
# the tokens of all sequences.
def M2POAsCoded(threshold: float = 0.04) -> Method:
    """Return M2PO, arXiv 2510.01161, as its authors' code computes it."""
    return Method(CappedMoment(threshold), aggregation="token-mean")


def loss_as_coded(logp, logp_old, advantages, mask, threshold=0.04, low=0.3, high=0.5):
    """Compute the loss as the authors' code does, with a loop over the candidates and autograd for the gradient."""
    log_ratio = logp - logp_old
    advantages = advantages[:, None].expand_as(logp)
    candidates = (mask > 0) & (advantages * log_ratio.detach() > 0)
    squares = sorted(log_ratio.detach()[candidates].square().tolist())

    cap = 0.0
    for square in squares:
        capped_mean = sum(min(other, square) for other in squares) / len(squares)
        if capped_mean >= threshold:
            break
        cap = math.sqrt(square)
    else:
        cap = math.inf  # no cap is needed

    ratio = log_ratio.exp()
    clipped = ratio.clamp(min(math.exp(-cap), 1 - low), max(math.exp(min(cap, 80.0)), 1 + high))
    return -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum() / mask.sum()


def stale_batch():
    """Return a random batch whose current policy is far from the one that sampled it."""
    generator = torch.Generator().manual_seed(0)
    logp_old = -3 * torch.rand(8, 16, generator=generator) - 0.3
    logp = (logp_old + 0.4 * torch.randn(8, 16, generator=generator)).clamp(max=-1e-3)
    advantages = torch.tensor([1.0, -1.0]).repeat(4)
    mask = torch.ones(8, 16)
    mask[::3, 12:] = 0
    return logp, logp_old, advantages, mask


def main():
    """Check the method, compare it with two others, and certify it against the authors' algorithm."""
    method = M2POAsCoded()
    check(method)
    print(f"check: {as_text(method)} is a valid method")

    logp, logp_old, advantages, mask = stale_batch()
    methods = {"M2POAsCoded()": method, "M2PO()": "M2PO()", "PPO()": "PPO()"}
    for name, compared_method in methods.items():
        metrics = policy_loss(logp, logp_old, advantages, mask, method=compared_method).metrics
        print(f"{name:13} drops {metrics['clip_high'] + metrics['clip_low']:.1%} of the tokens")

    # `certify` compares the gradient of a loss, given as a function of ``logp``, with the method's.
    def loss(logp):
        return loss_as_coded(logp, logp_old, advantages, mask)

    print(certify(loss, Batch.read(logp, logp_old, advantages, mask), method=method))


if __name__ == "__main__":
    main()
