import math
from functools import partial

import pytest
import torch

from bandpo import DCPO, KL, Band, Batch, FixedClip, Method, TotalVariation, Unclipped, policy_loss
from bandpo.core.batch import reduce_to_level
from bandpo.core.objectives import (
    ClippedWeight,
    CovarianceMask,
    DropOutside,
    DualClip,
    FutureKL,
    SelfAnchored,
    SequenceMask,
    Surrogate,
)
from bandpo.core.text import as_method
from helpers.losses import batch_loss


def batch(seed, rows=6, columns=40, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    logp_old = -torch.rand(rows, columns, generator=g, dtype=dtype) * 6 - 0.01
    logp = (logp_old + 0.7 * torch.randn(rows, columns, generator=g, dtype=dtype)).clamp(max=-1e-3)
    advantages = torch.randn(rows, columns, generator=g, dtype=dtype)
    mask = (torch.rand(rows, columns, generator=g) > 0.2).to(dtype)
    return logp, logp_old, advantages, mask


def gradient(logp, *rest, **settings):
    logp = logp.clone().requires_grad_()
    batch_loss(logp, *rest, **settings).loss.backward()
    return logp.grad


# Two tokens of p = 0.08 with ratio 2, one of each sign, and the same with ratio ½; clip 0.2.
FOUR = (
    torch.tensor([[0.16, 0.16, 0.04, 0.04]], dtype=torch.float64).log(),
    torch.full((1, 4), 0.08, dtype=torch.float64).log(),
    torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64),
)


@pytest.mark.parametrize(
    ("objective", "weights", "values"),
    [
        (Surrogate(), [0, 2, 0.5, 0], [1.2, 2, 0.5, 0.8]),
        # beyond 1.2 a slope of ¼: 1.2 + (2 − 1.2)/4 = 1.4; below 0.8: 0.8 + (0.5 − 0.8)/4 = 0.725
        (Surrogate(0.25), [0.5, 2, 0.5, 0.125], [1.4, 2, 0.5, 0.725]),
        # PPO-RB's −α·r + (1 + α)(1 + ε) with α = 0.3: −0.6 + 1.56 = 0.96, and −0.15 + 1.04 = 0.89
        (Surrogate(-0.3), [-0.6, 2, 0.5, -0.15], [0.96, 2, 0.5, 0.89]),
        (DropOutside(20), [0, 2, 0.5, 0], [0, 2, 0.5, 0]),
        (DropOutside(1.5), [0, 1.5, 0.5, 0], [0, 1.5, 0.5, 0]),
        (ClippedWeight(), [1.2, 1.2, 0.8, 0.8], [1.2, 1.2, 0.8, 0.8]),
    ],
    ids=repr,
)
def test_numbers_worked_by_hand(objective, weights, values):
    settings = {"method": Method(FixedClip(0.2), objective), "aggregation": "sum"}
    expected = -torch.tensor([weights], dtype=torch.float64) * FOUR[2]
    torch.testing.assert_close(gradient(*FOUR, **settings), expected)
    for token, value in enumerate(values):
        one = [x[:, token : token + 1] for x in FOUR]
        assert policy_loss(*one, **settings).loss.item() == pytest.approx(-value * one[2].item())


@pytest.mark.parametrize("divergence", [KL(), TotalVariation()], ids=repr)
@pytest.mark.parametrize("seed", range(3))
def test_dppo_is_band(divergence, seed):
    """Equal anchor, cap and truncation: DPPO's mask and Band's clip have the same gradient, token by token."""
    tensors = batch(seed)
    radius = 0.02
    for cap in (math.inf, 4.0):
        band = Band(divergence, radius, cap)
        masked = gradient(*tensors, method=Method(band, DropOutside(cap)))
        # Band's own cap *blocks* positive tokens beyond it; truncation also caps the weight of negative ones.
        surrogate = gradient(*tensors, method=band)
        logp, logp_old, advantages, _ = tensors
        same = ((logp - logp_old).exp() <= cap) | (advantages > 0)
        torch.testing.assert_close(masked[same], surrogate[same], rtol=1e-12, atol=1e-15)
        assert (masked[same] != 0).any()
        assert (masked[same] == 0).sum() > (tensors[3] == 0).sum() / 2


def test_sequence_level_by_hand():
    """Ratios 4 and 1 over two tokens: the sequence's is 2; p is the geometric mean √(0.1·0.4) = 0.2."""
    logp_old = torch.tensor([[0.1, 0.4, 0.9]], dtype=torch.float64).log()
    logp = torch.tensor([[0.4, 0.4, 0.1]], dtype=torch.float64).log()
    mask = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    rest = (logp_old, torch.ones(1, dtype=torch.float64), mask)
    assert reduce_to_level(logp_old, mask, "sequence").exp().tolist() == [[pytest.approx(0.2)] * 3]
    free = gradient(
        logp, *rest, method=Method(FixedClip(0.2, 1.1), level="sequence"), aggregation="seq-mean-token-mean"
    )
    torch.testing.assert_close(free, torch.tensor([[-1.0, -1.0, 0.0]], dtype=torch.float64))  # −2·A/|y|
    upper = Band(KL(), 0.05).bounds(torch.tensor(0.2, dtype=torch.float64).log()).upper.item()
    assert upper < 2
    assert not gradient(logp, *rest, method=Method(Band(KL(), 0.05), level="sequence")).any()
    wide = gradient(logp, *rest, method=Method(Band(KL(), 0.5), level="sequence"), aggregation="sum")
    torch.testing.assert_close(wide, torch.tensor([[-2.0, -2.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("rule", [Band(KL(), 0.02), FixedClip(), DCPO()], ids=repr)
def test_another_anchor_moves_the_interval_not_the_ratio(rule):
    logp, logp_old, advantages, mask = batch(5)
    anchor = (logp_old + 0.3 * torch.randn(logp.shape, dtype=logp.dtype)).clamp(max=-1e-3)
    ours = gradient(logp, logp_old, advantages, mask, method=rule, logp_anchor=anchor, aggregation="sum")
    bounds = rule.bounds(anchor)
    q, p = logp.exp(), anchor.exp()
    blocked = ((q > bounds.upper * p) & (advantages > 0)) | ((q < bounds.lower * p) & (advantages < 0))
    expected = (-(logp - logp_old).exp() * advantages * mask).masked_fill(blocked, 0.0)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    same = gradient(logp, logp_old, advantages, mask, method=rule, logp_anchor=logp_old)
    assert torch.equal(same, gradient(logp, logp_old, advantages, mask, method=rule))
    # Anchor, ratio and all at the rollout engine's: that is logp_old itself.
    if not isinstance(rule, Band):  # the others report the clipped value: it is the anchor's interval, in q
        value = as_method(rule).loss(Batch.read(logp, logp_old, advantages, mask, logp_anchor=anchor)).loss
        ratio, old = (logp - logp_old).exp(), logp_old.exp()
        low, high = (bounds.lower * p / old), (bounds.upper * p / old)
        surrogate = torch.where(advantages > 0, torch.minimum(ratio, high), torch.maximum(ratio, low))
        torch.testing.assert_close(value, -(surrogate * advantages * mask).sum() / mask.sum())


def test_another_anchor_is_what_a_drift_and_a_rise_are_measured_from():
    """One token of A < 0 and p = 0.2 → 0.16; the anchor's p is 0.5, from which it fell, or 0.04, from which it rose."""
    logp, logp_old, advantages = (torch.tensor([[x]]) for x in (math.log(0.16), math.log(0.2), -1.0))
    far, near = (torch.tensor([[math.log(p)]]) for p in (0.5, 0.04))
    masked = Method(Unclipped(), SequenceMask(0.5))
    assert not gradient(
        logp, logp_old, advantages, method=masked, logp_anchor=far
    ).any()  # log(0.5/0.16) > 0.5
    assert gradient(logp, logp_old, advantages, method=masked).any()  # log(0.2/0.16) is less
    outside = Method(FixedClip(0.2), DropOutside(both_sides=True))
    for anchor, name in ((far, "clip_low"), (near, "dual_clip")):
        metrics = as_method(outside).loss(Batch.read(logp, logp_old, advantages, logp_anchor=anchor)).metrics
        assert {key: metrics[key].item() for key in ("clip_low", "dual_clip")} == {
            "clip_low": 0.0,
            "dual_clip": 0.0,
            name: 1.0,
        }


@pytest.mark.parametrize(
    ("drift", "expected"),
    # of l = −log 2 and 0: (log 2)/2; (½ − 1 + log 2)/2; ½·log² 2
    [("mean_k1", 0.34657359), ("mean_k3", 0.09657359), ("max_k2", 0.24022651)],
)
def test_how_far_a_sequence_has_drifted_by_hand(drift, expected):
    logp = torch.tensor([[0.04, 0.08, 0.9], [0.08, 0.08, 0.08]], dtype=torch.float64).log()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    for signs in (torch.tensor([1.0, 1.0]), torch.tensor([-1.0, -1.0])):
        for limit, kept in ((0.999 * expected, False), (1.001 * expected, True)):
            for both in (False, True):
                tokens = Batch.read(logp, logp[1:].expand(2, 3), signs, mask).tokens(Unclipped())
                found = SequenceMask(limit, Surrogate(), drift, both).weight(tokens) != 0
                assert found[:, :2].tolist() == [[kept or (not both and signs[0] > 0)] * 2, [True] * 2]
    with pytest.raises(ValueError, match="drift must be 'mean_k1', 'mean_k3' or 'max_k2', got 'kl'"):
        SequenceMask(0.1, drift="kl")


@pytest.mark.parametrize(
    "around", [partial(DualClip, 3.0), partial(SequenceMask, 9.0), SelfAnchored], ids=repr
)
def test_what_stands_around_an_objective_leaves_the_other_tokens_to_it(around):
    seen = Batch.read(*FOUR).tokens(FixedClip(0.2))
    inner, same = (
        ClippedWeight(),
        seen.advantages < 0,
    )  # none of ratio above 3, none of a sequence that drifted
    for name in ("weight", "surrogate"):
        found, expected = getattr(around(inner), name)(seen), getattr(inner, name)(seen)
        torch.testing.assert_close(found[same], expected[same])
        assert not torch.equal(expected[same], getattr(Surrogate(), name)(seen)[same])


def test_a_token_whose_advantage_is_0_keeps_its_weight_in_self_anchored():
    tokens = Batch.read(*(torch.tensor([[p]]).log() for p in (0.16, 0.08)), torch.zeros(1, 1)).tokens(
        Unclipped()
    )
    torch.testing.assert_close(SelfAnchored().weight(tokens), torch.tensor([[2.0]]))


def test_an_overflowing_ratio_that_is_blocked_has_no_gradient():
    logp, logp_old = torch.tensor([[-0.1, -1.0]]), torch.tensor([[-200.0, -1.0]])
    for objective in (Surrogate(), DropOutside()):
        grad = gradient(logp, logp_old, torch.ones(1), method=Method(FixedClip(), objective))
        assert grad.tolist() == [[0.0, -0.5]]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"weights": torch.tensor([-1.0])},
            ValueError,
            "weights must be at least 0 at counted tokens, got -1",
        ),
        ({"weights": torch.ones(3)}, ValueError, r"weights of shape \(3,\) fit neither"),
        ({"logp_anchor": torch.zeros(1, 3)}, ValueError, r"logp_anchor has shape \(1, 3\)"),
    ],
)
def test_refuses_bad_input(settings, error, message):
    with pytest.raises(error, match=message):
        batch_loss(*FOUR, **settings)


@pytest.mark.parametrize(
    "bad", [lambda: Surrogate(1.0), lambda: Surrogate(math.nan), lambda: DropOutside(0.0)]
)
def test_refuses_bad_settings(bad):
    with pytest.raises(ValueError, match="must be"):
        bad()


def test_future_kl_raises_no_token_beyond_the_safety_ratio_with_a_negative_advantage():
    old = torch.full((1, 3), 0.01).log()
    tokens = Batch.read(
        torch.tensor([[0.05, 0.05, 0.03]]).log(), old, torch.tensor([[-1.0, 1.0, -1.0]])
    ).tokens(Unclipped())
    raised = FutureKL(decay=1.0).weight(tokens) / tokens.ratio
    kept = FutureKL(decay=1.0, safety_ratio=4.0).weight(tokens) / tokens.ratio
    torch.testing.assert_close(raised, torch.full((1, 3), 1.2))
    torch.testing.assert_close(kept, torch.tensor([[1.0, 1.2, 1.2]]))


# --- tokens drawn by their covariance ---------------------------------------------------------------------------------


def tensors_to_draw_from(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    old = -4 * torch.rand(50, 40, generator=generator, dtype=dtype) - 0.05
    logp = (old + 0.3 * torch.randn(50, 40, generator=generator, dtype=dtype)).clamp(max=-1e-3)
    advantages = torch.randn(50, 40, generator=generator, dtype=dtype)
    mask = (torch.rand(50, 40, generator=generator) < 0.8).float()
    return logp, old, advantages, mask


def tokens_to_draw_from(dtype=torch.float32):
    return Batch.read(*tensors_to_draw_from(dtype)).tokens(FixedClip(0.2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.0001, 0.002, 0.01])
def test_a_share_of_the_counted_tokens_is_drawn_from_those_between_two_covariances(share, dtype):
    tokens = tokens_to_draw_from(dtype=dtype)
    drawn = (CovarianceMask(share).weight(tokens) == 0) & ~tokens.blocked
    count = int(tokens.mask.sum())
    assert int(drawn.sum()) == max(1, int(share * count))
    counted = tokens.mask > 0
    a, x = tokens.advantages, tokens.logp_old + tokens.log_ratio
    covariance = (a - a[counted].mean()) * (x - x[counted].mean())
    assert ((covariance > 1) & (covariance < 5))[drawn].all()
    assert counted[drawn].all()


def test_the_same_tokens_are_drawn_wherever_they_stand():
    tensors = tensors_to_draw_from(torch.float64)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    views = [Batch.read(*batch).tokens(Unclipped()) for batch in (tensors, [x[order] for x in tensors])]
    drawn, again = (CovarianceMask(0.01).weight(view) == 0 for view in views)
    assert torch.equal(drawn[order], again)
    assert drawn.any()


def test_other_tokens_are_drawn_once_the_policy_has_moved():
    """Each of forty batches draws from the same tokens, whose log-probabilities differ a little."""
    drawn = []
    for step in range(40):
        old = torch.full((1, 200), -3.0) - torch.linspace(0, 1, 200)
        logp = old + 1e-3 * (step + 1)
        advantages = torch.full((1, 200), 3.0)
        advantages[:, 100:] = -3.0
        objective = CovarianceMask(0.01, 0.1, 5.0)
        weight = objective.weight(Batch.read(logp, old, advantages).tokens(Unclipped()))
        drawn += (weight[0] == 0).nonzero().flatten().tolist()
    assert len(drawn) == 80
    # Of about 190 candidates eighty draws meet far more than a few.
    assert len(set(drawn)) > 40


def test_where_fewer_can_be_drawn_all_of_them_are():
    tokens = tokens_to_draw_from()
    some, all_of_them = (CovarianceMask(share).weight(tokens) == 0 for share in (0.9, 1.0))
    assert torch.equal(some, all_of_them)


def test_a_range_of_covariances_without_values_is_refused():
    with pytest.raises(ValueError, match=r"min_covariance=5.0 must be below max_covariance=1.0"):
        CovarianceMask(0.1, 5.0, 1.0)
