"""Tests of `Batch` and `Tokens`: which quantities are computed, and when."""

import math

import pytest
import torch

from bandpo import (
    KL,
    Band,
    Batch,
    FixedClip,
    Loosest,
    Method,
    TotalVariation,
    TwoSided,
    policy_loss,
    ratio_bounds,
)
from bandpo.audit import Audit
from bandpo.core._checks import widest_float
from bandpo.core.objectives import DualClip, Surrogate
from bandpo.core.rules import Tightest

P, RATIO = torch.tensor([[0.08, 0.08, 0.5, 0.5]]), torch.tensor([[2.0, 0.5, 1.0, 1.5]])


CLIP = FixedClip(0.2)


def tokens(rule=CLIP, advantages=(1.0, -1.0, 1.0, -1.0), level="token", **settings):
    logp_old = P.log()
    return Batch.read(logp_old + RATIO.log(), logp_old, torch.tensor([advantages]), **settings).tokens(
        rule, level
    )


def test_a_move_to_a_side_that_is_closed_stays_finite():
    used = tokens(FixedClip(0.0, 0.2)).interval_used
    assert used.isfinite().all()
    assert used[0, 1] < -1e30


def test_worked_by_hand():
    seen = tokens()
    torch.testing.assert_close(seen.ratio, RATIO)
    assert seen.clip_mask.clipped_high.tolist() == [[True, False, False, True]]
    assert seen.clip_mask.clipped_low.tolist() == [[False, True, False, False]]
    assert seen.blocked.tolist() == [[True, True, False, False]]  # the last one is pulled back
    torch.testing.assert_close(seen.clipped, torch.tensor([[1.2, 0.8, 1.0, 1.2]]))
    torch.testing.assert_close(seen.interval_used, torch.tensor([[5.0, -2.5, 0.0, 2.5]]))
    torch.testing.assert_close(seen.sequence_mean(RATIO), torch.full((1, 4), 1.25))
    torch.testing.assert_close(seen.sequence_sum(RATIO), torch.full((1, 4), 5.0))


def test_another_anchor_moves_the_interval():
    """The anchor's p is half the old one: the ratio to it is twice the ratio to the old policy."""
    seen = tokens(logp_anchor=(P / 2).log())
    torch.testing.assert_close(seen.ratio, RATIO)
    torch.testing.assert_close(seen.log_ratio_anchor.exp(), 2 * RATIO)
    torch.testing.assert_close(seen.clipped, torch.tensor([[0.6, 0.5, 0.6, 0.6]]))  # 1.2·½, 1.0·½, …


def test_an_anchor_is_taken_at_the_level_of_the_ratio():
    """The sequence's geometric means: p = 0.2 before, 0.1 at the anchor, 0.2 now."""
    seen = tokens(level="sequence", logp_anchor=torch.tensor([[0.02, 0.5, 0.1, 0.1]]).log())
    torch.testing.assert_close(seen.logp_anchor.exp(), torch.full((1, 4), 0.1))
    torch.testing.assert_close(seen.log_ratio_anchor, (seen.logp_old + seen.log_ratio) - math.log(0.1))


def test_an_objective_sees_the_entropy():
    entropy = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    assert torch.equal(tokens(entropy=entropy).entropy, entropy)
    assert tokens().entropy is None


def test_a_band_is_solved_for_when_it_is_asked(monkeypatch):
    calls = []
    monkeypatch.setattr(Band, "bounds", lambda self, logp: calls.append(1) or ratio_bounds(logp, KL(), 0.05))
    seen = tokens(Band(KL(), 0.05))
    assert (seen.blocked.any(), Surrogate().surrogate(seen).tolist(), calls) == (
        False,
        seen.ratio.tolist(),
        [],
    )
    _ = seen.clipped, seen.bounds, seen.interval_used
    assert calls == [1]


@pytest.mark.parametrize(
    ("rule", "reported"),
    [
        (Band(KL(), 1e-3, max_ratio=3.0), 3.0),
        (Band(TotalVariation(), 1e-3, max_ratio=math.inf), 1 + 1e-3 / math.exp(-30)),
        (TwoSided(FixedClip(), Band(KL(), 1e-3, max_ratio=4.0)), 4.0),
        (Loosest(Band(KL(), 1e-3, max_ratio=4.0), FixedClip(0.2, 5.0)), 6.0),
        (Tightest(Band(KL(), 1e-3, max_ratio=4.0), FixedClip(0.2, 5.0)), 4.0),
    ],
    ids=repr,
)
def test_what_is_reported_does_not_depend_on_how_dear_a_bound_is(rule, reported):
    """The closed bound itself; else the cap that is known."""
    seen = Batch.read(torch.tensor([[-0.5]]), torch.tensor([[-30.0]]), torch.ones(1)).tokens(rule)
    assert Surrogate().surrogate(seen).item() == pytest.approx(reported, rel=1e-5)
    moved = {"logp_anchor": torch.tensor([[-30.0 - math.log(2)]])}  # the ratio to it is twice as great
    seen = Batch.read(torch.tensor([[-0.5]]), torch.tensor([[-30.0]]), torch.ones(1), **moved).tokens(
        FixedClip()
    )
    assert Surrogate().surrogate(seen).item() == pytest.approx(0.6)


def test_the_reported_loss_is_finite_where_nothing_moves():
    logp, old = torch.tensor([[0.6, 0.6]]).log(), torch.full((1, 2), -100.0)
    advantages = torch.tensor([[1.0, -1.0]])
    leaf = logp.clone().requires_grad_()
    method = Method(Band(KL(), 0.05, math.inf), DualClip(3.0))
    loss = policy_loss(leaf, old, advantages, method=method).loss
    loss.backward()
    assert loss.isfinite()
    assert leaf.grad.tolist() == [[0.0, 0.0]]


def test_the_loss_of_a_band_solves_for_nothing(monkeypatch):
    monkeypatch.setattr(Band, "bounds", lambda *_: pytest.fail("solved"))
    logp_old = P.log()
    policy_loss(logp_old + RATIO.log(), logp_old, torch.ones(1), method=Band(KL(), 1e-3))


def test_padding_may_hold_anything():
    mask = torch.tensor([[1, 1, 0, 0]])
    dirty = torch.tensor([[0.0, 0.0, math.nan, -math.inf]])
    seen = Batch.read(P.log() + dirty, P.log() + dirty, torch.ones(1), mask).tokens(Band())
    assert (seen.ratio == 1).all()
    assert (seen.clipped == 1).all()
    assert not any(x.any() for x in (seen.log_ratio, seen.interval_used, seen.blocked))


def test_ratios_stay_finite_and_above_0():
    far = Batch.read(torch.tensor([[-1.0, -300.0]]), torch.tensor([[-300.0, -1.0]]), torch.ones(1)).tokens(
        FixedClip()
    )
    limits = torch.finfo(torch.float32)
    assert far.ratio.tolist() == [[pytest.approx(limits.max / 2**24), limits.tiny]]


def test_sums_are_as_wide_as_the_device_has():
    """Apple's MPS has no float64; the audit's sums are float32 there."""
    assert widest_float(torch.device("mps")) == torch.float32
    assert widest_float(torch.device("cpu")) == torch.float64
    audit = Audit.from_batch(Batch.read(P.log() + RATIO.log(), P.log(), torch.ones(1)), method=FixedClip())
    assert {x.dtype for x in audit.sums.values()} == {torch.float64}
