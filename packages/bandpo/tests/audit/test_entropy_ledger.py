"""The entropy ledger against the true change of the entropy of a softmax, by finite differences in float64."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from bandpo import Batch, FixedClip, Packed, policy_loss
from bandpo.audit.entropy_ledger import collision_of, entropy_changes
from bandpo.core.methods import METHODS, Method
from bandpo.core.text import as_method

RULES = ("FixedClip(0.2)", "FixedClip(0.2, 1.0)", "BandPO()", "BandAbove()", "Unclipped()")
NAMES = (*RULES, "CISPO()", "SAPO()", "GSPO()", "TOPR()", "DAPO()")
STEP = 1e-4


def entropy_of(logits):
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def made(seed, rows=3, time=4, vocabulary=7, spread=2.0):
    """Logits of the policy and of the old one at each position, sampled tokens, and advantages, in float64."""
    generator = torch.Generator().manual_seed(seed)
    old = spread * torch.randn(rows, time, vocabulary, generator=generator, dtype=torch.float64)
    logits = old + 0.5 * torch.randn(old.shape, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocabulary, (rows, time, 1), generator=generator)
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    return old, logits, tokens, advantages


def read(old, logits, tokens, advantages, **others):
    logp, logp_old = (each.log_softmax(-1).gather(-1, tokens)[..., 0] for each in (logits, old))
    return Batch.read(logp, logp_old, advantages, entropy=entropy_of(logits), **others)


def true_change(old, logits, tokens, advantages, method):
    """The change of the entropy at each position for a step of gradient descent on the logits, per unit of the step."""
    leaf = logits.clone().requires_grad_()
    logp = leaf.log_softmax(-1).gather(-1, tokens)[..., 0]
    logp_old = old.log_softmax(-1).gather(-1, tokens)[..., 0]
    loss = policy_loss(logp, logp_old, advantages, method=method, aggregation=torch.sum).loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    # The difference of both sides has an error of the order of the step squared.
    after, before = entropy_of(logits - STEP * gradient), entropy_of(logits + STEP * gradient)
    return (after - before) / (2 * STEP)


@given(st.sampled_from(NAMES), st.integers(0, 10_000), st.floats(0.1, 6.0))
def test_it_is_the_true_change_of_the_entropy_of_a_softmax(name, seed, spread):
    data = made(seed, spread=spread)
    batch = read(*data)
    changes = entropy_changes(batch, as_method(name), collision_of(data[1].log_softmax(-1)))
    true = true_change(*data, as_method(name))
    scale = batch.advantages.abs() * (1 + batch.log_ratio.exp())
    assert (changes - true).abs().max() <= 1e-5 * (1 + scale.max() ** 3)


@given(st.sampled_from(RULES), st.sampled_from(RULES), st.integers(0, 10_000))
def test_the_ledger_of_two_rules_is_of_the_tokens_that_one_of_them_drops(name, other, seed):
    data = made(seed)
    batch = read(*data)
    collision = collision_of(data[1].log_softmax(-1))
    gap = entropy_changes(batch, as_method(name), collision) - entropy_changes(
        batch, as_method(other), collision
    )
    ours, theirs = (as_method(text).weight(as_method(text).tokens(batch)) for text in (name, other))
    assert torch.equal(gap != 0, (ours != theirs) & (gap != 0))
    assert (gap[ours == theirs] == 0).all()
    true = true_change(*data, as_method(name)) - true_change(*data, as_method(other))
    assert gap.sum().item() == pytest.approx(true.sum().item(), abs=1e-4)


@given(st.integers(0, 10_000), st.floats(0.1, 6.0))
def test_the_second_term_is_the_mean_of_the_first_over_the_policy(seed, spread):
    """So an advantage that all tokens of a position share changes nothing on average."""
    _, logits, _, _ = made(seed, rows=1, time=1, vocabulary=9, spread=spread)
    logp = logits[0, 0].log_softmax(-1)
    batch = Batch.read(logp[:, None], logp[:, None], torch.ones(9), entropy=entropy_of(logits[0]).expand(9))
    first = entropy_changes(batch, Method(FixedClip(0.2)))
    assert -(logp.exp() * first[:, 0]).sum().item() == pytest.approx(collision_of(logp).item(), abs=1e-12)
    both = entropy_changes(batch, Method(FixedClip(0.2)), collision_of(logp).item())
    assert (logp.exp() * both[:, 0]).sum().item() == pytest.approx(0.0, abs=1e-12)


@given(st.integers(0, 10_000))
def test_surprising_winners_raise_the_entropy_and_surprising_losers_lower_it(seed):
    batch = read(*made(seed))
    changes = entropy_changes(batch, as_method("Unclipped()"))
    logp = batch.log_ratio + batch.logp_old
    surprising = -logp > batch.entropy
    assert torch.equal(changes > 0, surprising == (batch.advantages > 0))


def test_by_hand():
    """Two tokens of equal probability have the entropy log 2, at its maximum, where no step changes it."""
    q = torch.full((1, 1), 0.5, dtype=torch.float64)
    batch = Batch.read(q.log(), q.log(), torch.ones(1), entropy=-q.log())
    assert entropy_changes(batch, as_method("GRPO()"), collision_of(q.log().expand(1, 2))).abs().max() < 1e-15
    # q = (0.8, 0.2), H = 0.5004; the winner is the second token: 0.2·(log 0.2 + H) = -0.2218, and the second term is
    # 0.64·(log 0.8 + H) + 0.04·(log 0.2 + H) = 0.1331.
    q = torch.tensor([0.8, 0.2], dtype=torch.float64)
    entropy = -(q * q.log()).sum()
    batch = Batch.read(q[1:, None].log(), q[1:, None].log(), torch.ones(1), entropy=entropy.view(1, 1))
    assert entropy_changes(batch, as_method("GRPO()")).item() == pytest.approx(0.2218, abs=1e-4)
    assert collision_of(q.log()).item() == pytest.approx(0.1331, abs=1e-4)
    assert entropy_changes(batch, as_method("GRPO()"), 0.1331).item() == pytest.approx(0.3549, abs=1e-4)


def test_padding_and_tokens_of_probability_0_add_nothing():
    nan = math.nan
    logp, entropy = torch.tensor([[-1.0, nan]]), torch.tensor([[0.5, nan]])
    batch = Batch.read(logp, logp, torch.ones(1), mask=torch.tensor([[1, 0]]), entropy=entropy)
    changes = entropy_changes(batch, as_method("BandPO()"), torch.tensor([[0.1, nan]]))
    assert changes[0, 1] == 0
    assert changes.isfinite().all()
    one = torch.tensor([1.0, 0.0]).log()
    assert collision_of(one) == 0


def test_what_it_needs_is_named():
    logp = torch.tensor([[-1.0]])
    with pytest.raises(ValueError, match="no entropies; pass entropy= to Batch"):
        entropy_changes(Batch.read(logp, logp, torch.ones(1)), as_method("GRPO()"))
    batch = Batch.read(logp, logp, torch.ones(1), entropy=torch.ones(1, 1))._replace(logp=None)
    with pytest.raises(ValueError, match="log-probabilities of the batch are not known"):
        entropy_changes(batch, as_method("GRPO()"))


def test_half_precision_and_packed_rows_have_the_changes_of_the_padded_batch():
    data = made(5)
    method = as_method("BandPO()")
    padded = entropy_changes(read(*data), method)
    half = [each.half() if each.is_floating_point() else each for each in data]
    assert entropy_changes(read(*half), method).dtype == torch.float32
    old, logits, tokens, advantages = data
    packed = read(
        old.view(1, 12, -1),
        logits.view(1, 12, -1),
        tokens.view(1, 12, 1),
        advantages,
        layout=Packed(cu_seqlens=torch.tensor([0, 4, 8, 12])),
    )
    assert torch.allclose(entropy_changes(packed, method).view(3, 4), padded)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_published_method_has_a_finite_ledger(name):
    changes = entropy_changes(read(*made(3)), METHODS[name].method())
    assert changes.isfinite().all()
