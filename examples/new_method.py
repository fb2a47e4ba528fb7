"""Write a method of your own from a paper: an objective, and a function that gives the method its name.

What it shows: how a published method is written down in the terms of bandpo, `check` for the objective, and
`certify` against the paper's algorithm, which is written out step by step for the comparison.

The method is M2PO (Zheng, Zhao and Chen, "Prosperity before Collapse", arXiv 2510.01161), which is made for stale data
and which bandpo does not have. It has no interval for single tokens. It bounds the mean of (log r)², the second
moment, over the tokens that a clip could block: those with A > 0 and r > 1, or A < 0 and r < 1. As long as their mean
is above a threshold, the token with the largest (log r)² is dropped. The paper uses a threshold of 0.04 throughout.

What it needs: ``pip install '.[torch]'`` in a clone.

How to run it (about 3 seconds)::

    python examples/new_method.py

What one should see::

    check: Method(clip=Unclipped(), objective=__main__.SecondMoment(threshold=0.04), ...) is a valid method
    M2PO()  drops 12.1% of the tokens
    PPO()   drops 26.7% of the tokens
    gradient equals Method(...) on 116 tokens (14 beyond a bound), 0e+00
"""

from dataclasses import dataclass

import torch

from bandpo import Method, Objective, Unclipped, as_text, certify, check, policy_loss


# An objective gives each token its weight w; the gradient is −w·A·∇log π. Everything in ``tokens`` is detached.
@dataclass(frozen=True)
class SecondMoment(Objective):
    """Weight r, and 0 for the tokens that have to go until the mean of (log r)² is at most ``threshold``."""

    threshold: float = 0.04

    @property
    def whole_batch(self) -> bool:
        # Whether a token counts depends on all others, so a trainer must not cut an update into micro-batches. It
        # reads that here and refuses to.
        return True

    def weight(self, tokens):
        outward = tokens.advantages * tokens.log_ratio > 0
        candidates = outward & (tokens.mask > 0)
        squares = tokens.log_ratio.square()
        # Sorted from the smallest square, the mean of the first k squares rises with k. To drop the largest ones until
        # the mean is low enough is therefore to retain the longest beginning whose mean is low enough.
        order = squares.masked_fill(~candidates, torch.inf).flatten().argsort()
        ascending = squares.flatten()[order]
        ranks = torch.arange(len(order), device=order.device)
        means = ascending.cumsum(0) / (ranks + 1)
        number = ((means <= self.threshold) & (ranks < candidates.sum())).sum()
        retained = torch.zeros_like(candidates.flatten())
        retained[order] = ranks < number
        dropped = candidates & ~retained.view_as(candidates)
        return tokens.ratio.masked_fill(dropped, 0.0)


# A method is a function that returns a `Method`, and is annotated so. Whatever takes a method by text then takes
# "new_method.M2PO(0.04)". `Unclipped()` says that no interval blocks a token; the objective does all of it. The paper
# averages over the tokens of all sequences.
def M2PO(threshold: float = 0.04) -> Method:
    """M2PO, arXiv 2510.01161."""
    return Method(Unclipped(), SecondMoment(threshold), aggregation="token-mean")


def loss_of_the_paper(logp, logp_old, advantages, mask, threshold=0.04):
    """Compute the loss as the paper's Algorithm 1 says, one dropped token at a time, with autograd for the gradient."""
    log_ratio = logp - logp_old
    advantages = advantages[:, None].expand_as(logp)
    squares = log_ratio.detach().square()
    counted = mask > 0
    region = counted & (((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0)))
    retained = counted.clone()
    while region.any() and squares[region].mean() > threshold:
        largest = squares.masked_fill(~region, -1.0).argmax()
        region.view(-1)[largest] = False
        retained.view(-1)[largest] = False
    return -(log_ratio.exp() * advantages)[retained].sum() / mask.sum()


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
    """Check the method, compare it with PPO's clip, and certify it against the paper's algorithm."""
    method = M2PO()
    check(method)
    print(f"check: {as_text(method)} is a valid method")

    logp, logp_old, advantages, mask = stale_batch()
    for name, tried in (("M2PO()", method), ("PPO()", "PPO()")):
        metrics = policy_loss(logp, logp_old, advantages, mask, method=tried).metrics
        print(f"{name:7} drops {metrics['clip_high'] + metrics['clip_low']:.1%} of the tokens")

    # `certify` takes the loss as a function of ``logp`` and compares its gradient with the method's.
    print(
        certify(
            lambda x: loss_of_the_paper(x, logp_old, advantages, mask),
            logp,
            logp_old,
            advantages,
            mask,
            method=method,
        )
    )


if __name__ == "__main__":
    main()
