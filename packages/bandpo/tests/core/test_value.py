"""The value of the loss is the objective, for every divergence and rule: against 70 digits, and against float64."""

import math

import mpmath as mp
import pytest
import torch

import oracle
from bandpo import (
    KL,
    Band,
    BandPO,
    Batch,
    FixedClip,
    JensenShannon,
    Loosest,
    Method,
    TotalVariation,
    TwoSided,
)
from bandpo.core.objectives import DualClip, RatioCap, Surrogate
from bandpo.core.rules import DCPO, LogClip, Tightest, Unclipped
from bandpo.core.text import as_method, parse

DIVERGENCES = [name for name in oracle.F if name != "triangular"]
BANDS = [
    f"Band({name}, {radius}, {cap})" for name in DIVERGENCES for radius, cap in ((0.01, "inf"), (0.3, "10.0"))
]
LOGPS = (-30.0, -8.0, -2.5, -0.7, -0.1, -1e-3)


def values(logp, logp_old, advantages, method, **settings):
    """Return the value of each token's loss."""
    kept = []

    def reduce(losses):
        kept.append(losses.detach())
        return losses.sum()

    as_method(method).loss(Batch.read(logp, logp_old, advantages, **settings), aggregation=reduce)
    return kept[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize(("radius", "cap"), [(0.01, math.inf), (0.3, 10.0)])
def test_the_value_of_a_clipped_token_is_its_bound(name, radius, cap, dtype):
    rule = parse(f"Band({name}, {radius}, {cap})").clip
    old = torch.tensor([LOGPS], dtype=dtype)
    # Far above the upper bound with A = 2, and far below the lower one with A = −2.
    above = values(torch.full_like(old, -1e-9), old, torch.full_like(old, 2.0), rule)
    below = values(old - 60, old, torch.full_like(old, -2.0), rule)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for column, logp in enumerate(old[0].tolist()):
        down, up = oracle.margins(name, logp, radius)
        # A ratio of 1/p is the largest there is; that of the token is a little smaller.
        largest = min(1 + up, mp.mpf(cap), mp.exp(mp.mpf(-1e-9) - mp.mpf(logp)))
        expected = float(-2 * largest)
        assert above[0, column].item() == pytest.approx(expected, rel=tolerance)
        expected = float(2 * max(1 - down, mp.exp(mp.mpf(-60))))
        assert below[0, column].item() == pytest.approx(expected, rel=tolerance, abs=tolerance)


def objective(ratio, lower, upper, advantages):
    """Compute PPO's objective from bounds, in float64."""
    clipped = torch.maximum(torch.minimum(ratio, upper), lower)
    return -torch.minimum(ratio * advantages, clipped * advantages)


RULES = [
    FixedClip(0.2, 0.28),
    LogClip(0.3, 0.4),
    DCPO(),
    Unclipped(),
    TwoSided(FixedClip(0.2), Band(KL(), 0.05)),
    TwoSided(Band(JensenShannon(), 0.01), Band(TotalVariation(), 0.1)),
    Loosest(Band(KL(), 0.05), FixedClip(0.2, 0.28)),
    Tightest(Band(JensenShannon(), 0.02), Band(KL(), 0.02)),
    *(parse(text).clip for text in BANDS),
]


def draw(seed, shape, spread):
    random = torch.Generator().manual_seed(seed)
    old = (-6 * torch.rand(shape, generator=random) ** 2).clamp(max=-1e-4)
    new = (old + spread * torch.randn(shape, generator=random)).clamp(max=-1e-6)
    return new, old, torch.randn(shape, generator=random)


# With a root for every token, and for those outside.
@pytest.mark.parametrize("shape", [(4, 32), pytest.param((80, 64), marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_loss_is_the_objective_of_the_bounds(rule, shape):
    for seed, spread in ((0, 0.5), (1, 2.0)):
        new, old, advantages = draw(seed, shape, spread)
        bounds = rule.bounds(old.double())
        ratio = (new - old).double().exp()
        expected = objective(ratio, bounds.lower, bounds.upper, advantages.double())
        value = values(new, old, advantages, rule).double()
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
        loss = as_method(rule).loss(Batch.read(new, old, advantages)).loss
        assert loss.item() == pytest.approx(expected.mean().item(), rel=1e-5)


def test_at_a_spread_of_a_half_the_loss_is_the_objective_and_not_the_unclipped_one():
    new, old, advantages = draw(2, (64, 64), 0.5)
    bounds = Band().bounds(old.double())
    ratio = (new - old).double().exp()
    exact = objective(ratio, bounds.lower, bounds.upper, advantages.double()).mean().item()
    loss = as_method(Band()).loss(Batch.read(new, old, advantages)).loss.item()
    assert loss == pytest.approx(exact, rel=1e-5)
    assert abs(-(ratio * advantages).mean().item() - exact) > 0.01


def test_the_issue_s_example():
    batch = Batch.read(torch.tensor([[-0.2]]), torch.tensor([[-2.5]]), torch.ones(1))
    assert as_method(Band(KL(), 0.05)).loss(batch).loss.item() == pytest.approx(-2.38, abs=0.01)


@pytest.mark.parametrize("objective", [Surrogate(0.25), Surrogate(-0.3), RatioCap(1.4), DualClip(2.0)])
def test_other_objectives_report_the_bound_too(objective):
    new, old, advantages = draw(3, (70, 64), 1.0)
    bounds = Band().bounds(old.double())
    ratio = (new - old).double().exp()
    signs = advantages.double()
    clipped = torch.maximum(torch.minimum(ratio, bounds.upper), bounds.lower)
    blocked = ((signs > 0) & (ratio > bounds.upper)) | ((signs < 0) & (ratio < bounds.lower))
    if isinstance(objective, Surrogate):
        slope = clipped + objective.beyond * (ratio - clipped)
        expected = -signs * torch.where(blocked, slope, ratio)
    elif isinstance(objective, RatioCap):
        expected = -torch.minimum(ratio.clamp(max=1.4) * signs, clipped * signs)
    else:
        expected = -torch.minimum(ratio * signs, clipped * signs)
        expected = torch.where(signs < 0, torch.minimum(expected, -2.0 * signs), expected)
    value = values(new, old, advantages, Method(Band(), objective)).double()
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_an_anchor_moves_the_reported_bound():
    new, old, advantages = draw(4, (70, 64), 1.0)
    anchor = (old - 0.3).clamp(max=-1e-6)
    bounds = Band().bounds(anchor.double())
    ratio = (new - old).double().exp()
    shift = (anchor - old).double().exp()
    expected = objective(ratio, bounds.lower * shift, bounds.upper * shift, advantages.double())
    value = values(new, old, advantages, Band(), logp_anchor=anchor).double()
    torch.testing.assert_close(value, expected, rtol=2e-5, atol=1e-6)


def test_the_cap_and_the_dual_clip_of_bandpo_are_two_numbers():
    """Ratios of 4, 8 and 30 at p = 0.01 with each sign, by hand: KL's upper bound there is 7.8."""
    old = torch.full((1, 6), 0.01).log()
    ratio = torch.tensor([[4.0, 8.0, 30.0] * 2])
    advantages = torch.tensor([[1.0] * 3 + [-1.0] * 3])
    leaf = (old + ratio.log()).requires_grad_()
    for cap, dual, value, kept in (
        (3.0, 20.0, [-3.0, -3.0, -3.0, 4.0, 8.0, 20.0], [0, 0, 0, 4, 8, 0]),
        (20.0, 5.0, [-4.0, -7.81, -7.81, 4.0, 5.0, 5.0], [-4, 0, 0, 4, 0, 0]),
        (5.0, math.inf, [-4.0, -5.0, -5.0, 4.0, 8.0, 30.0], [-4, 0, 0, 4, 8, 30]),
    ):
        method = BandPO(KL(), 0.05, cap, dual)
        seen = values(leaf, old, advantages, method)[0].tolist()
        assert seen == pytest.approx(value, abs=2e-3)
        loss = method.loss(Batch.read(leaf, old, advantages), aggregation="sum").loss
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert gradient[0].tolist() == pytest.approx(kept, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_edges_are_finite(name, dtype):
    """Tokens of almost no and of all probability, with a cap and without."""
    old = torch.tensor([[-100.0, -100.0, 0.0, 0.0, -1e-7, -1e-7, -87.5, -69.0]], dtype=dtype)
    new = torch.tensor([[-0.5, -0.5, 0.0, -60.0, 0.0, -1e-3, -1e-9, -95.0]], dtype=dtype)
    # At p = e^−100 the clip test of the Cressie–Read family is 0·∞ in float32: without a cap nothing is blocked.
    for cap in ("10.0",) if name.startswith("Alpha") else ("10.0", "inf"):
        for sign in (1.0, -1.0):
            leaf = new.clone().requires_grad_()
            batch = Batch.read(leaf, old, torch.full((1,), sign, dtype=dtype))
            method = Method(parse(f"Band({name}, 0.05, {cap})").clip, DualClip(3.0))
            loss = method.loss(batch).loss
            loss.backward()
            assert loss.isfinite()
            assert leaf.grad.isfinite().all()
            if sign > 0 and cap == "10.0":
                assert loss >= -10


@pytest.mark.parametrize("text", ["BandPO()", "GRPO()", "KLCov()", "PrimeRL()", "GMPO()"])
def test_without_metrics_the_gradient_is_the_same_and_the_value_is_none(text):
    gradients = []
    for metrics in (True, False):
        new, old, advantages = draw(5, (8, 32), 0.5)
        leaf = new.clone().requires_grad_()
        loss, reported = parse(text).loss(Batch.read(leaf, old, advantages[:, 0]), metrics=metrics)
        assert (bool(loss.isnan()), bool(reported)) == (not metrics, metrics)
        loss.backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert gradients[0].any()
