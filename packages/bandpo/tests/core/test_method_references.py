"""Tests of `method_references` against the losses of verl, TRL and SkyRL, and against weights computed by hand."""

from functools import partial

import pytest
import torch

import framework_losses
import method_references as reference
from bandpo.certificate.tokens import LossBatch
from helpers.frameworks import needs


def batch(seed=0, shape=(40, 9), spread=0.7, whole_sequences=False):
    """Tokens common and rare, ratios near and far, both signs of advantage, ragged lengths."""
    generator = torch.Generator().manual_seed(seed)
    old = -8 * torch.rand(shape, generator=generator, dtype=torch.float64) ** 2 - 1e-3
    new = (old + spread * torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(max=-1e-5)
    lengths = torch.randint(1, shape[1] + 1, (shape[0], 1), generator=generator)
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    if whole_sequences:
        advantages = advantages[:, :1].expand(shape)
    return new.requires_grad_(), old, advantages, (torch.arange(shape[1]) < lengths).double()


def given(logp, old, advantages, mask):
    """Return the batch for `framework_losses`; the rollout engine's policy is the trainer's old one."""
    return LossBatch("made", logp, old, old, advantages, mask)


def token_mean(loss, mask):
    return (loss * mask).sum() / mask.sum()


def sequence_mean(loss, mask):
    return reference.mean_of_sequence(loss, mask).mean()


def gradient(loss, logp):
    return torch.autograd.grad(loss, logp)[0]


def assert_same_and_varied(ours, theirs, mask, *, rtol=1e-6):
    """Equal gradients, on a batch where every case of a method is met."""
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-10, check_dtype=False)
    assert (ours[mask == 1] != 0).double().mean() > 0.2
    assert (ours[mask == 0] == 0).all()


# --- verl -------------------------------------------------------------------------------------------------------------

VERL = {
    "vanilla": (
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5},
        partial(reference.ppo, low=0.2, high=0.28, dual=1.5),
    ),
    "gspo": ({"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}, partial(reference.gspo, low=0.1, high=0.2)),
    "geo_mean": ({"clip_ratio_low": 0.3, "clip_ratio_high": 0.4}, partial(reference.gmpo, low=0.3, high=0.4)),
    "cispo": ({"clip_ratio_low": 0.3, "clip_ratio_high": 0.5}, partial(reference.cispo, low=0.3, high=0.5)),
    "dppo_tv": (
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 2.0},
        partial(reference.dppo_tv, low=0.1, high=0.15, max_weight=2.0),
    ),
    "dppo_kl": (
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.05, "clip_ratio_c": 2.0},
        partial(reference.dppo_kl, low=0.02, high=0.05, max_weight=2.0),
    ),
    "sapo": ({"tau_pos": 1.5, "tau_neg": 3.0}, partial(reference.sapo, positive=1.5, negative=3.0)),
    "gpg": ({}, reference.gpg),
    # With a share of 1 no token is left to chance.
    "clip_cov": (
        {"clip_ratio": 0.2, "clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.6},
        partial(reference.clip_cov, low=0.2, high=0.2, minimum=0.1, maximum=0.6),
    ),
}
OF_SEQUENCES = ("gspo", "geo_mean")


@pytest.mark.slow
@pytest.mark.parametrize("name", VERL)
def test_verl(name):
    needs("verl")
    settings, ours = VERL[name]
    loss = framework_losses.verl(name, loss_agg_mode="seq-mean-token-mean", **settings)
    logp, old, advantages, mask = tensors = batch(whole_sequences=name in OF_SEQUENCES)
    found = gradient(sequence_mean(ours(logp, old, advantages, mask), mask), logp)
    assert_same_and_varied(found, gradient(loss(given(*tensors)), logp), mask)


@pytest.mark.slow  # it imports verl
def test_verl_icepop():
    """The bypass mode of verl with the REINFORCE loss, whose weight is the ratio to the rollout engine."""
    needs("verl")
    loss = framework_losses.verl("bypass_mode", threshold=2.0, threshold_lower=0.5)
    logp, old, advantages, mask = tensors = batch()
    ours = token_mean(reference.icepop(logp, old, advantages, mask, lower=0.5, upper=2.0), mask)
    assert_same_and_varied(gradient(ours, logp), gradient(loss(given(*tensors)), logp), mask)


# --- TRL --------------------------------------------------------------------------------------------------------------


TRL = {
    "grpo": (
        {"loss_type": "grpo", "epsilon_high": 0.28},
        partial(reference.ppo, low=0.2, high=0.28),
        sequence_mean,
    ),
    "delta": ({"loss_type": "grpo", "delta": 1.5}, partial(reference.ppo, dual=1.5), sequence_mean),
    "sequence": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_high": 0.3},
        partial(reference.gspo, low=0.2, high=0.3),
        sequence_mean,
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.7},
        partial(reference.cispo, low=1.0, high=0.7),
        token_mean,
    ),
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 3.0},
        partial(reference.sapo, positive=1.5, negative=3.0),
        sequence_mean,
    ),
    "vespo": ({"loss_type": "vespo"}, reference.vespo, token_mean),
    "gmpo": (
        {"kind": "GMPO", "epsilon": 0.3, "epsilon_high": 0.4},
        partial(reference.gmpo, low=0.3, high=0.4),
        sequence_mean,
    ),
    "off-policy mask": (
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.1},
        partial(reference.opsm, delta=0.1),
        sequence_mean,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRL)
def test_trl(name):
    needs("trl")
    settings, ours, mean = TRL[name]
    logp, old, advantages, mask = tensors = batch(1, whole_sequences=True)
    theirs = gradient(framework_losses.trl(**settings)(given(*tensors)), logp)
    found = gradient(mean(ours(logp, old, advantages, mask), mask), logp)
    assert_same_and_varied(found, theirs, mask)


def test_the_off_policy_mask_drops_sequences():
    logp, old, advantages, mask = tensors = batch(1, whole_sequences=True)
    kept, all_of_them = (
        gradient((loss * mask).sum(), logp) != 0
        for loss in (reference.opsm(*tensors, delta=0.1), reference.ppo(*tensors))
    )
    dropped = all_of_them.any(1) & ~kept.any(1)
    drift = reference.mean_of_sequence(old - logp, mask)[:, 0]
    assert 2 < dropped.sum() < len(mask) / 2
    assert torch.equal(dropped, all_of_them.any(1) & (drift > 0.1) & (advantages[:, 0] < 0))


# --- SkyRL ------------------------------------------------------------------------------------------------------------

SKYRL = {
    "regular": ({"eps_clip_low": 0.2, "eps_clip_high": 0.28}, partial(reference.ppo, low=0.2, high=0.28)),
    "dual_clip": ({"clip_ratio_c": 1.5}, partial(reference.ppo, dual=1.5)),
    "gspo": ({"eps_clip_low": 0.1, "eps_clip_high": 0.2}, partial(reference.gspo, low=0.1, high=0.2)),
    "cispo": (
        {"cispo.cispo_eps_clip_low": 0.3, "cispo.cispo_eps_clip_high": 0.5},
        partial(reference.cispo, low=0.3, high=0.5),
    ),
    "dppo": (
        {"dppo.delta_low": 0.1, "dppo.delta_high": 0.15},
        partial(reference.dppo_tv, low=0.1, high=0.15, max_weight=torch.inf),
    ),
    "sapo": ({"sapo.tau_pos": 1.5, "sapo.tau_neg": 3.0}, partial(reference.sapo, positive=1.5, negative=3.0)),
    "rollout_is": (
        {"eps_clip_low": 0.5, "eps_clip_high": 1.0},
        partial(reference.icepop, lower=0.5, upper=2.0),
    ),
}


@pytest.mark.parametrize("name", SKYRL)
def test_skyrl(name):
    needs("skyrl")
    settings, ours = SKYRL[name]
    logp, old, advantages, mask = tensors = batch(3, whole_sequences=name in OF_SEQUENCES)
    theirs = framework_losses.skyrl(name, **settings)(given(*tensors))
    found = gradient(token_mean(ours(logp, old, advantages, mask), mask), logp)
    assert_same_and_varied(found, gradient(theirs, logp), mask, rtol=1e-5)


# --- by hand ----------------------------------------------------------------------------------------------------------

P = 0.4
RATIOS = [0.25, 0.7, 1.1, 1.5, 2.4]

BY_HAND = {
    # method: the weight w in −w·A·∇logp at those ratios from π_old = 0.4, for A = 2 and for A = −0.5
    "ppo": (
        partial(reference.ppo, low=0.2, high=0.28, dual=2.0),
        [0.25, 0.7, 1.1, 0, 0],
        [0, 0, 1.1, 1.5, 0],
    ),
    "cispo": (partial(reference.cispo, low=0.2, high=0.28), [0.8, 0.8, 1.1, 1.28, 1.28], ...),
    "gpg": (reference.gpg, [1, 1, 1, 1, 1], ...),
    # (π − π_old): −0.3, −0.12, 0.04, 0.2, 0.56
    "dppo_tv": (
        partial(reference.dppo_tv, low=0.15, high=0.15, max_weight=1.4),
        [0.25, 0.7, 1.1, 0, 0],
        [0, 0.7, 1.1, 1.4, 1.4],
    ),
    "ipo": (partial(reference.ipo, radius=0.15, coefficient=0), [0, 0.7, 1.1, 0, 0], ...),
    "icepop": (partial(reference.icepop, lower=0.5, upper=2.0), [0, 0.7, 1.1, 1.5, 0], ...),
    "minirl": (partial(reference.minirl, max_weight=2.0), [0.25, 0.7, 1.1, 0, 0], [0, 0, 1.1, 1.5, 2.0]),
    "token_topr": (reference.token_topr, [1, 1, 1, 1, 1], [0.25, 0.7, 1, 1, 1]),
    # 0.25 · 0.7 · 1.1 · 1.5 · 2.4
    "topr": (reference.topr, [1, 1, 1, 1, 1], [0.693] * 5),
    # r·(1 ∓ (r − 1)/0.5)
    "spo": (
        partial(reference.spo, epsilon=0.5),
        [0.25 * 2.5, 0.7 * 1.6, 1.1 * 0.8, 0, 2.4 * -1.8],
        [0.25 * -0.5, 0.7 * 0.4, 1.1 * 1.2, 1.5 * 2, 2.4 * 3.8],
    ),
    # r·(1 ∓ (π − π_old)/0.2)
    "drpo": (
        partial(reference.drpo, delta=0.2),
        [0.25 * 2.5, 0.7 * 1.6, 1.1 * 0.8, 0, 2.4 * -1.8],
        [0.25 * -0.5, 0.7 * 0.4, 1.1 * 1.2, 1.5 * 2, 2.4 * 3.8],
    ),
    "up": (partial(reference.up, low=0.2, dual=2.0), [1, 1, 1, 1, 1], [0, 0, 1.1, 1.5, 0]),
    "gppo": (
        partial(reference.gppo, low=0.2, high=0.28, beta_low=0.5, beta_high=0.75, dual=2.0),
        [0.25, 0.7, 1.1, 0.96, 0.96],
        [0.4, 0.4, 1.1, 1.5, 0],
    ),
    "aspo": (
        partial(reference.aspo, low=0.2, high=0.2, max_weight=2.0),
        [2, 1 / 0.7, 1 / 1.1, 0, 0],
        [0, 0, 1.1, 1.5, 2],
    ),
    # bounds ½ + ½·√(1 + 4·0.2/0.4) = 1.366 and, as 4·0.09/0.4 = 0.9, ½ + ½·√0.1 = 0.658
    "dcpo": (partial(reference.dcpo, low=0.09), [0.25, 0.7, 1.1, 0, 0], [0, 0.7, 1.1, 1.5, 2.4]),
    # binary KL from 0.4 to 0.1, 0.28, 0.44, 0.6: 0.311, 0.033, 0.003, 0.081; to 0.96: 1.28
    "trgppo": (partial(reference.trgppo, delta=0.05), [0.25, 0.7, 1.1, 0, 0], [0, 0.7, 1.1, 1.5, 2.4]),
    # bounds 0.6 and 1.2 where all is positive; 0.9 and 3, their ends, where nothing is
    "bapo": (reference.bapo, [0.25, 0.7, 1.1, 0, 0], [0, 0, 1.1, 1.5, 2.4]),
}


def weights(method, advantage, old=P):
    logp_old = torch.full((1, len(RATIOS)), old, dtype=torch.float64).log()
    logp = (logp_old + torch.tensor([RATIOS], dtype=torch.float64).log()).requires_grad_()
    advantages = torch.full_like(logp_old, advantage)
    loss = method(logp, logp_old, advantages, torch.ones_like(logp_old))
    return (gradient(loss.sum(), logp) / -advantages)[0]


@pytest.mark.parametrize("name", BY_HAND)
def test_weights_by_hand(name):
    method, positive, negative = BY_HAND[name]
    for advantage, expected in ((2.0, positive), (-0.5, positive if negative is ... else negative)):
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(weights(method, advantage), expected, atol=1e-9, rtol=1e-9)


def test_dppo_kl_and_trgppo_block_the_same_tokens():
    tensors = logp, _, _, mask = batch(4)
    assert torch.equal(
        gradient((reference.dppo_kl(*tensors, max_weight=torch.inf) * mask).sum(), logp) == 0,
        gradient((reference.trgppo(*tensors, delta=0.05) * mask).sum(), logp) == 0,
    )


def test_vespo_by_hand():
    """Two tokens of ratio 2 and ¾: W = 1.5, φ = 1.5²·e^(3·(1 − 1.5)) for A ≥ 0 and 1.5³·e^(2·(1 − 1.5)) below."""
    old = torch.full((2, 2), 0.3, dtype=torch.float64).log()
    logp = (old + torch.tensor([2.0, 0.75], dtype=torch.float64).log()).requires_grad_()
    advantages = torch.tensor([[2.0], [-0.5]], dtype=torch.float64)
    found = gradient(reference.vespo(logp, old, advantages, torch.ones_like(old)).sum(), logp) / -advantages
    expected = torch.tensor([[2.25], [3.375]]).double() * torch.tensor([[-1.5], [-1.0]]).double().exp()
    torch.testing.assert_close(found, expected.expand(2, 2))


def test_gmpo_by_hand():
    """Ratios 2 and ½ with bounds e^±0.4: A > 0 blocks the 2 and G = √(e^0.4·½); A < 0 blocks the ½, G = √(2·e^−0.4)."""
    old = torch.full((2, 2), 0.3, dtype=torch.float64).log()
    logp = (old + torch.tensor([2.0, 0.5], dtype=torch.float64).log()).requires_grad_()
    advantages = torch.tensor([[2.0], [-0.5]], dtype=torch.float64)
    loss = reference.gmpo(logp, old, advantages, torch.ones_like(old))
    high, low = (torch.tensor([0.2, -0.2]).double().exp() * torch.tensor([0.5, 2.0]).double().sqrt()).tolist()
    torch.testing.assert_close(
        gradient(loss.sum(), logp) / -advantages, torch.tensor([[0, high], [low, 0]]).double()
    )


def test_bapo_by_hand():
    """Ratios 1 and 2, A = 1 and −1, bounds from 0.6 and 1.2: the objective is 1 against 2 until nothing more moves."""
    old = torch.full((1, 3), 0.3, dtype=torch.float64).log()
    logp = (old + torch.tensor([1.0, 2.0, 0.1], dtype=torch.float64).log()).requires_grad_()
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    start = {"lower": (0.6, 0.9), "upper": (1.2, 3.0), "steps": (0.1, 0.3), "share": 0.5}

    def bounds(advantages, upper_first=False):
        return reference.bapo_bounds(
            logp, old, torch.tensor([advantages]).double(), mask, **start, upper_first=upper_first
        )

    assert bounds([1.0, -1.0, 5.0]) == pytest.approx((0.9, 3.0))  # 1 / (1 + 2) whatever the bounds
    # The upper bound must reach 1.6; its steps are 1.2, 1.5, 1.8.
    assert bounds([-1.6, 1.0, 5.0]) == pytest.approx((0.9, 1.8))
    assert bounds([-1.6, 1.0, 5.0], upper_first=True) == pytest.approx((0.6, 1.8))
    assert bounds([1.0, 1.0, -5.0]) == (0.6, 1.2)  # nothing negative
