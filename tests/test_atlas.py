"""`scripts/atlas.py`: the nearest method of a loss, and a mutation of any row of the atlas that can be run here."""

from dataclasses import replace

import pytest
import torch

import atlas
import method_references as reference
from bandpo import policy_loss
from bandpo.core.layout import Rows
from bandpo.core.methods import DPPO, IcePop


@pytest.fixture(scope="module")
def small():
    """Return an atlas of the random batches."""
    return atlas.Atlas(atlas.random_batches())


def ppo(batch, **clip):
    """Return PPO's loss by its formula, averaged over tokens."""
    values = reference.ppo(batch.logp, batch.logp_old, batch.advantages, batch.mask, **clip)
    return (values * batch.mask).sum() / batch.mask.sum()


def of_method(method, *, engine=False, aggregation=None):
    def loss(batch):
        old = batch.logp_rollout if engine else batch.logp_old
        tensors = (batch.logp, old, batch.advantages, batch.mask)
        return policy_loss(*tensors, method=method, aggregation=aggregation, layout=Rows()).loss

    return loss


def test_a_loss_is_found_whatever_it_is_called(small):
    found = small.nearest(lambda batch: ppo(batch, low=0.2, high=0.28, dual=3.0), [0.28])
    assert found["identical"]
    assert found["method"] == "Method(FixedClip(0.2, 0.28), DualClip(3))"
    assert (found["average"], found["factor"], found["old_policy"]) == ("token-mean", 1.0, "trainer")
    assert set(found["agree"].values()) == {1.0}
    assert found["blocked"] == 1.0


def test_the_old_policy_and_the_factor_are_found(small):
    found = small.nearest(of_method(DPPO(), engine=True), [0.05])
    assert (found["method"], found["old_policy"], found["identical"]) == ("DPPO()", "engine", True)
    # Up to its largest weight DPPO has the gradient of BandPO without a cap below.
    (other,) = (one for one in found["others"] if one["method"].startswith("BandPO"))
    assert other["condition"] == "r ≤ 20"

    found = small.nearest(lambda batch: 0.5 * ppo(batch, low=0.2, high=0.2))
    assert (found["method"], found["factor"], found["identical"]) == ("PPO()", 0.5, True)

    found = small.nearest(of_method(IcePop(), aggregation="seq-mean-token-sum"))
    assert (found["method"], found["average"], found["old_policy"]) == (
        "IcePop()",
        "seq-mean-token-sum",
        "trainer",
    )


def test_a_loss_that_is_no_method_has_a_condition_and_a_first_token(small):
    def capped(batch):
        # PPO, of which tokens have no gradient above a ratio of 6: no candidate has this number.
        log_ratio = (batch.logp - batch.logp_old).detach()
        return ppo(
            replace(batch, logp=batch.logp.where(log_ratio.exp() <= 6, batch.logp.detach())),
            low=0.2,
            high=0.2,
        )

    found = small.nearest(capped)
    assert not found["identical"]
    assert found["condition"] in ("A > 0", "r ≤ 6")
    first = found["first"]
    assert first["advantage"] < 0
    assert first["loss"] != pytest.approx(first["method"])
    assert found["agree"]["near"] == 1.0
    assert 0 < found["agree"]["far"] < 1
    assert found["blocked"] < 1


def test_a_gradient_in_the_padding_is_no_identity(small):
    found = small.nearest(lambda batch: ppo(batch, low=0.2, high=0.2) + (batch.logp * (1 - batch.mask)).sum())
    assert (found["method"], found["identical"], found["condition"]) == ("PPO()", False, "the token counts")


def test_agreement_alone_does_not_decide(small):
    """A loss that blocks one token in a thousand is not that of a method which blocks other ones."""
    few = of_method("KLCov(0.002, 1.0)")
    found = small.nearest(few)
    assert (found["method"], found["identical"]) == ("KLCov()", True)
    gradient = small.gradient(of_method("PPO()"))
    none = torch.zeros_like(gradient)
    assert small.score(gradient, gradient) == 1
    assert small.score(gradient, none) < 0.5


def test_equal_tokens_of_a_batch_are_ties_of_a_method_that_selects_some(small):
    (batch,) = (batch for batch in small.batches if batch.name == "usual")
    twice = replace(
        batch,
        **{
            name: torch.cat([getattr(batch, name)] * 2)
            for name in ("logp", "logp_old", "logp_rollout", "advantages", "mask")
        },
    )
    doubled = atlas.Atlas([twice])
    assert doubled.ties(atlas.Candidate("KLCov()", False)).all()
    assert not doubled.ties(atlas.Candidate("PPO()", False)).all()


def test_the_overlap_of_two_sets():
    one, other = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    assert atlas.overlap(one, other) == 0.5
    assert atlas.overlap(one & ~one, other & ~other) == 1


def test_a_condition_is_the_roundest_number_that_holds():
    assert atlas.roundest(2.93, 3.08) == 3
    assert atlas.roundest(19.8, 20.3) == 20
    assert 1.2345 <= atlas.roundest(1.2345, 1.2346) < 1.2346


def test_the_records_are_tokens_that_moved():
    batches = list(atlas.recorded_batches())
    assert [batch.name for batch in batches] == ["record async", "record trl", "record verl"]
    for batch in batches:
        counted = batch.mask > 0
        log_ratio = (batch.logp - batch.logp_old)[counted]
        assert counted.sum() > 1000
        assert log_ratio.std() > 0.5
        assert {True, False} == set((batch.advantages[counted] > 0).tolist())
