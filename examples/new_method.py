"""Write a method of your own from a paper: a clip rule that looks at tokens, and a function that names the method.

What it shows: how a published method is written down in the terms of bandpo, `check` for the rule, and `certify`
against its authors' algorithm, which is written out step by step for the comparison.

The method is M2PO (Zheng, Zhao and Chen, "Prosperity before Collapse", arXiv 2510.01161), which is made for stale data.
It bounds the second moment, the mean of (log r)², over the tokens that a clip could block: those with A > 0 and r > 1,
or A < 0 and r < 1. bandpo has the paper's algorithm as `M2PO()`. The authors' code computes another bound: the largest
τ among these tokens under which the mean of min((log r)², τ²) is below a threshold, 0.04 throughout, and no narrower
interval than [0.7, 1.5].

What it needs: ``pip install '.[torch]'`` in a clone.

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

from bandpo import Method, RatioBounds, TokenRule, as_text, certify, check, policy_loss


# A rule that looks at tokens has one method, which returns their bounds as log-ratios. Everything in ``tokens`` is
# detached. No value is read on the host, so the rule runs on an accelerator without waiting, and compiles.
@dataclass(frozen=True)
class CappedMoment(TokenRule):
    """Bounds [e^−τ, e^τ] with the largest τ that keeps the mean of min((log r)², τ²) below ``threshold``."""

    threshold: float = 0.04
    low: float = 0.3
    high: float = 0.5

    @property
    def whole_batch(self) -> bool:
        # Whether a token counts depends on all others, so a trainer must not cut an update into micro-batches. It
        # reads that here and refuses to.
        return True

    def for_tokens(self, tokens):
        moved = tokens.log_ratio_anchor
        candidates = (tokens.advantages * moved > 0) & (tokens.mask > 0)
        count = candidates.sum()
        squares, _ = moved.square().masked_fill(~candidates, math.inf).flatten().sort()
        # The mean of the capped squares, with each of them as the cap: those below it as they are, the others as it.
        ranks = torch.arange(len(squares), device=squares.device)
        capped = (squares.cumsum(0) + (count - ranks - 1) * squares) / count
        number = ((capped < self.threshold) & (ranks < count)).sum().view(1)
        cap = squares.gather(0, (number - 1).clamp(min=0)).sqrt()
        cap = torch.where(number > 0, cap, 0.0)
        cap = torch.where(number == count, math.inf, cap)
        return RatioBounds(
            log_lower=-cap.clamp(min=-math.log(1 - self.low)),
            log_upper=cap.clamp(min=math.log(1 + self.high)),
        )


# A method is a function that returns a `Method`, and is annotated so. Whatever takes a method by text then takes
# "new_method.M2POAsCoded(0.04)". PPO's surrogate is the objective where none is named. The authors average over the
# tokens of all sequences.
def M2POAsCoded(threshold: float = 0.04) -> Method:
    """M2PO, arXiv 2510.01161, by its authors' code."""
    return Method(CappedMoment(threshold), aggregation="token-mean")


def loss_as_coded(logp, logp_old, advantages, mask, threshold=0.04, low=0.3, high=0.5):
    """Compute the loss as the authors' code does, one candidate after the other, with autograd for the gradient."""
    log_ratio = logp - logp_old
    advantages = advantages[:, None].expand_as(logp)
    moved = log_ratio.detach()
    outward = (mask > 0) & (((advantages > 0) & (moved > 0)) | ((advantages < 0) & (moved < 0)))
    squares = sorted(moved[outward].square().tolist())
    cap = 0.0
    for square in squares:
        if sum(min(other, square) for other in squares) / len(squares) >= threshold:
            break
        cap = math.sqrt(square)
    else:
        cap = math.inf
    ratio = log_ratio.exp()
    clipped = ratio.clamp(min(math.exp(-cap), 1 - low), max(math.exp(min(cap, 80.0)), 1 + high))
    return -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum() / mask.sum()


def stale_batch():
    """Make up the log-probabilities of a batch whose policy has moved far from the one that sampled it."""
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
    for name, tried in (("M2POAsCoded()", method), ("M2PO()", "M2PO()"), ("PPO()", "PPO()")):
        metrics = policy_loss(logp, logp_old, advantages, mask, method=tried).metrics
        print(f"{name:13} drops {metrics['clip_high'] + metrics['clip_low']:.1%} of the tokens")

    # `certify` takes the loss as a function of ``logp`` and compares its gradient with the method's.
    print(
        certify(
            lambda x: loss_as_coded(x, logp_old, advantages, mask),
            logp,
            logp_old,
            advantages,
            mask,
            method=method,
        )
    )


if __name__ == "__main__":
    main()
