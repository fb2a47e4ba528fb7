"""When two methods with bounds by probability have the same gradient, and when not: the lines of docs/paper.md."""

import math

import pytest
import torch

from bandpo import policy_loss
from bandpo.core.divergences import KL, PearsonChi2, TotalVariation
from bandpo.core.methods import DPPO, BandAbove, BandPO
from bandpo.core.rules import DCPO, Band

COUNT = 20_000


@pytest.fixture(scope="module")
def tokens():
    """Return probabilities from e^-8 to 1, wide ratios, and advantages of both signs, in float64."""
    generator = torch.Generator().manual_seed(0)
    logp_old = -8 * torch.rand(COUNT, generator=generator, dtype=torch.float64) - 1e-3
    log_ratio = 1.2 * torch.randn(COUNT, generator=generator, dtype=torch.float64)
    logp = torch.minimum(logp_old + log_ratio, torch.tensor(-1e-6, dtype=torch.float64))
    advantages = torch.randn(COUNT, generator=generator, dtype=torch.float64)
    return logp, logp_old, advantages


def gradient(method, tokens):
    """Return the derivative of the sum of a method's token losses by each log-probability."""
    logp, logp_old, advantages = tokens
    logp = logp[None].clone().requires_grad_()
    loss = policy_loss(logp, logp_old[None], advantages[None], method=method, aggregation="sum").loss
    return torch.autograd.grad(loss, logp)[0][0]


def differ(one, other, tokens):
    """Return where the gradients of two methods differ, beyond rounding."""
    return (gradient(one, tokens) - gradient(other, tokens)).abs() > 1e-12


@pytest.mark.parametrize("divergence", [KL(), TotalVariation(), PearsonChi2()], ids=str)
def test_a_ratio_outside_of_bands_interval_leaves_the_trust_region_of_dppo(divergence, tokens):
    logp, logp_old, _ = tokens
    bounds = Band(divergence, 0.05, math.inf).bounds(logp_old)
    ratio = (logp - logp_old).exp()
    outside = (ratio < bounds.lower) | (ratio > bounds.upper)
    # The definition of DPPO's test, in the probabilities of the token and of all others.
    p, q = logp_old.exp(), logp.exp()
    size = {
        KL(): p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log(),
        TotalVariation(): (p - q).abs(),
        PearsonChi2(): (p - q) ** 2 / (p * (1 - p)),
    }[divergence]
    assert torch.equal(outside, size > 0.05)
    assert 0.1 < outside.double().mean() < 0.9


def test_bandpo_and_dppo_differ_only_beyond_the_caps(tokens):
    logp, logp_old, _ = tokens
    ratio = (logp - logp_old).exp()
    beyond = ratio > 10
    assert beyond.any()
    assert not (differ(BandPO(), DPPO(), tokens) & ~beyond).any()
    # Beyond the cap BandPO has no gradient, and DPPO keeps that of each token within the trust region.
    assert differ(BandPO(), DPPO(), tokens).any()
    without_caps = (BandPO(max_ratio=math.inf, dual_clip=math.inf), DPPO(max_weight=math.inf))
    assert not differ(*without_caps, tokens).any()
    # A largest weight of 3, the default in verl, changes all tokens with a larger ratio that keep their gradient.
    changed = differ(BandPO(), DPPO(max_weight=3), tokens)
    assert not (changed & (ratio <= 3)).any()
    assert (changed & (ratio > 3) & ~beyond).any()


def test_bandpo_and_bandabove_differ_for_losers_between_their_lower_bounds_and_beyond_the_cap(tokens):
    logp, logp_old, advantages = tokens
    ratio = (logp - logp_old).exp()
    lower = BandPO().clip.bounds(logp_old).lower
    between = (ratio > lower.clamp(max=0.8)) & (ratio < lower.clamp(min=0.8))
    changed = differ(BandPO(), BandAbove(), tokens)
    beyond = ratio > 10
    assert torch.equal(changed, (advantages < 0) & (between | beyond))
    assert (changed & between).any()
    # Beyond the cap BandPO has no gradient, and BandAbove keeps the whole one of a loser.
    losers = (advantages < 0) & beyond
    assert losers.any()
    assert (gradient(BandPO(), tokens)[losers] == 0).all()
    torch.testing.assert_close(gradient(BandAbove(), tokens)[losers], (-ratio * advantages)[losers])


def test_the_lower_bounds_of_bandpo_and_bandabove_cross_at_a_common_token():
    lower = Band(KL(), 0.05).bounds(torch.tensor([0.74, 0.76], dtype=torch.float64).log()).lower
    assert lower[0] < 0.8 < lower[1]


def test_dcpos_upper_bound_is_that_of_chi_square_for_rare_tokens():
    p = torch.tensor([1e-1, 1e-2, 1e-3, 1e-5], dtype=torch.float64)
    dcpo = DCPO(0.2, 0.2, math.inf).bounds(p.log()).upper
    band = Band(PearsonChi2(), 0.2, math.inf).bounds(p.log()).upper
    distance = (dcpo / band - 1).abs()
    assert (distance[1:] < distance[:-1]).all()
    assert distance[2] < 0.04
    assert distance[3] < 0.004
    # No radius makes them equal for all p, below nor above.
    common = torch.tensor([0.9], dtype=torch.float64).log()
    assert DCPO(0.2, 0.2).bounds(common).upper > 1 / 0.9 > Band(PearsonChi2(), 0.05).bounds(common).upper
    rare = torch.tensor([1e-4], dtype=torch.float64).log()
    assert DCPO().bounds(rare).lower == 0.5
    assert Band(PearsonChi2(), 0.01).bounds(rare).lower == 0
