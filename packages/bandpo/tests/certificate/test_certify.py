"""The gradient check: equal gradients pass, changed ones are stopped with their cause."""

import pytest
import torch
from integrations.sabotages.plain import ROWS, batch, certified, ppo

import method_references as reference
from bandpo import Band, FixedClip, Method, certify, policy_loss
from bandpo.certificate.gradient import PolicyTerm, near_discontinuity
from bandpo.certificate.subject import compare
from bandpo.core.batch import Batch
from bandpo.core.methods import METHODS
from bandpo.core.schedules import TrainingState


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loop_s_own_ppo_is_certified(dtype):
    given = batch(dtype=dtype)
    found = certified(ppo(), given, method="FixedClip(0.2)")
    assert (found.equal, found.tokens, found.beyond > 5) == (True, int(given[3].sum()), True)
    assert str(found).startswith("gradient equals FixedClip(low=0.2, high=0.2) on ")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_itself_and_no_other(name):
    method = METHODS[name].method()
    state = TrainingState(progress=0.5, group=torch.arange(12) // 4)
    logp, *rest = batch()

    def loss(x):
        return policy_loss(x, *rest, method=method, state=state).loss

    assert certify(loss, Batch.read(logp, *rest, state=state), method=method).error < 1e-6
    with pytest.raises(RuntimeError, match=r"gradient differs from Method\(clip=Band"):
        certify(loss, Batch.read(logp, *rest), method=Method(Band(radius=1e-5), aggregation="token-mean"))


@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith("certify: ")])
def test_a_changed_loss_is_stopped(name, tmp_path, monkeypatch):
    """The rows of the table of sabotages that take no time, as the table itself needs the frameworks."""
    with pytest.raises(ROWS[name].error, match=ROWS[name].sentence):
        ROWS[name].certify(tmp_path, monkeypatch)


def test_what_a_framework_averages_and_weighs_is_part_of_it():
    given = batch(1)
    weights = torch.rand(12, 10, generator=torch.Generator().manual_seed(2))
    loss = ppo(rows=weights, scale=given[3].sum() / 50)
    settings = {"method": "FixedClip(0.2)", "weights": weights, "normalizer": torch.tensor(50.0)}
    assert certified(loss, given, **settings).equal
    with pytest.raises(RuntimeError, match="gradient differs"):
        certified(loss, given, **settings | {"weights": None})


@pytest.mark.parametrize("size", [0.9, 1.1])
def test_the_tolerance_is_between_rounding_and_a_change(size):
    logp, *rest = batch()
    seen = Batch.read(logp, *rest)
    share = seen.mask / seen.mask.sum()
    exact = -(seen.log_ratio.exp() * seen.advantages) * share
    exact = exact.masked_fill(seen.tokens(FixedClip(0.2)).blocked, 0.0)
    wrong = exact.clone()
    wrong[0, 0] += size * 1e-4 * max(share[0, 0], exact[0, 0].abs())
    assert compare(PolicyTerm(wrong, Method(FixedClip(0.2)), seen, share)).equal == (size < 1)


def test_a_token_on_its_bound_is_not_judged():
    """Rounding decides on which side of the bound a ratio of 1.2 in float32 lies."""
    old = torch.full((1, 4), 0.1).log()
    ratio = torch.tensor([[1.2, 1.21, 0.8, 1.0]])
    seen = Batch.read(old + ratio.log(), old, torch.tensor([[1.0, 1.0, -1.0, 1.0]]))
    assert near_discontinuity(Method(FixedClip(0.2)), seen).tolist() == [[True, False, True, False]]
    found = -ratio * seen.advantages / 4
    found[0, 1] = 0.0
    assert compare(PolicyTerm(found, Method(FixedClip(0.2)), seen, torch.full((1, 4), 0.25))).equal


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_formulas_of_papers_are_certified(name):
    """Written without the library."""
    formula = {"grpo": reference.ppo, "gspo": reference.gspo}[name]

    def loss(x, old, a, mask):
        return reference.mean_of_sequence(formula(x, old, a, mask, low=0.2, high=0.2), mask).mean()

    rule = "FixedClip(0.2)" if name == "grpo" else "Method(FixedClip(0.2), level='sequence')"
    assert certified(loss, method=rule, aggregation="seq-mean-token-mean").beyond > 3
