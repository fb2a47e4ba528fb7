"""The gradient check: equal gradients pass, changed ones are stopped with their cause."""

import pytest
import torch

import method_references as reference
from bandpo import Band, FixedClip, Method, certify, policy_loss
from bandpo.core.batch import Batch
from bandpo.core.gradient_check import compare, near_discontinuity
from bandpo.core.methods import METHODS
from bandpo.core.schedules import TrainingState


def batch(seed=0, rows=12, columns=10, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    old = -6 * torch.rand(rows, columns, generator=generator, dtype=dtype) - 0.05
    logp = (old + 0.5 * torch.randn(rows, columns, generator=generator, dtype=dtype)).clamp(max=-1e-3)
    advantages = torch.randn(rows, 1, generator=generator, dtype=dtype)
    mask = torch.arange(columns) < torch.randint(2, columns + 1, (rows, 1), generator=generator)
    return logp, old, advantages.expand(rows, columns), mask.to(dtype)


def ppo(low=0.2, high=0.2, clamp=20.0, scale=1.0, offset=0.0, advantage=lambda a: a, rows=1.0):
    """Compute PPO's loss as a training loop would."""

    def loss(logp, old, advantages, mask):
        ratio = (logp - old).clamp(-clamp, clamp).exp()
        a = advantage(advantages)
        each = -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a) + offset * logp
        return scale * (rows * each * mask).sum() / mask.sum()

    return loss


def certified(loss, given=None, layout=None, weights=None, **settings):
    logp, *rest = given or batch()
    return certify(
        lambda x: loss(x, *rest), Batch.read(logp, *rest, layout=layout, weights=weights), **settings
    )


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


CHANGED = {
    "another clip": (ppo(0.2, 0.28), r"it is that of FixedClip\(low=0.2, high=0.28\)"),
    "no clip": (ppo(1.0, 9e9), r"it is that of Unclipped\(\)"),
    "a hard-coded clip": (
        ppo(0.01, 0.01),
        "0 tokens that the method blocks have a gradient, .* that it keeps have none",
    ),
    "a clamp": (ppo(clamp=0.1), "that it keeps have none: another clip or mask, or a clamp of the ratio"),
    "a factor": (ppo(scale=0.5), "every token is 0.5 times as expected"),
    "advantages clamped": (
        ppo(advantage=lambda a: a.clamp(-0.3, 0.3)),
        "each sequence has a factor of its own",
    ),
    "a sign": (ppo(scale=-1.0), "every token is -1 times as expected"),
    "a term": (ppo(offset=0.1), "is added to every token"),
    "padding": (lambda x, *rest: ppo()(x, *rest[:2], torch.ones_like(rest[2])), "another mask"),
    "another average": (
        lambda x, old, a, mask: policy_loss(x, old, a, mask, method=FixedClip(), aggregation="grpo").loss,
        "each sequence has a factor of its own",
    ),
    "nothing": (lambda x, *rest: 0 * x.sum(), "no gradient reached the log-probabilities"),
    "not finite": (lambda x, *rest: x.sum() * float("inf"), "it is not finite"),
    "another loss": (
        lambda x, old, a, mask: -(x * a * mask).sum() / mask.sum(),
        "that the method blocks have a gradient",
    ),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_changed_loss_is_stopped_and_its_cause_named(what):
    loss, cause = CHANGED[what]
    with pytest.raises(
        RuntimeError, match=rf"gradient differs from FixedClip.*{cause}.*sequence \d+, token \d+: "
    ):
        certified(loss, method="FixedClip(0.2)")


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
    wrong[0, 0] += size * 1e-4 * max(share.max() * seen.advantages.abs().max(), exact[0, 0].abs())
    assert compare(wrong, Method(FixedClip(0.2)), seen, share).equal == (size < 1)


def test_a_token_on_its_bound_is_not_judged():
    """Rounding decides on which side of the bound a ratio of 1.2 in float32 lies."""
    old = torch.full((1, 4), 0.1).log()
    ratio = torch.tensor([[1.2, 1.21, 0.8, 1.0]])
    seen = Batch.read(old + ratio.log(), old, torch.tensor([[1.0, 1.0, -1.0, 1.0]]))
    assert near_discontinuity(Method(FixedClip(0.2)), seen).tolist() == [[True, False, True, False]]
    found = -ratio * seen.advantages / 4
    found[0, 1] = 0.0
    assert compare(found, Method(FixedClip(0.2)), seen, torch.full((1, 4), 0.25)).equal


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_formulas_of_papers_are_certified(name):
    """Written without the library."""
    formula = {"grpo": reference.ppo, "gspo": reference.gspo}[name]

    def loss(x, old, a, mask):
        return reference.mean_of_sequence(formula(x, old, a, mask, low=0.2, high=0.2), mask).mean()

    rule = "FixedClip(0.2)" if name == "grpo" else "Method(FixedClip(0.2), level='sequence')"
    assert certified(loss, method=rule, aggregation="seq-mean-token-mean").beyond > 3
