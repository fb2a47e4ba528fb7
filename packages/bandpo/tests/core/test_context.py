"""Tests of the training state, of schedules and of other quantities that rules and objectives may depend on."""

from dataclasses import dataclass

import pytest
import torch

from bandpo import KL, Band, ClipRule, FixedClip, Method, TwoSided, Unclipped, policy_loss
from bandpo.core.batch import Batch
from bandpo.core.bounds import RatioBounds
from bandpo.core.methods import METHODS, SAPO, BandPO
from bandpo.core.objectives import DualClip, Objective, SequenceMask, Surrogate
from bandpo.core.schedules import ClipRateController, Linear, Radius, TrainingState
from bandpo.core.token_rules import BalancedBounds

LOGP = torch.tensor([[0.3, 0.1, 0.4], [0.2, 0.5, 0.6]]).log()
OLD = torch.tensor([[0.2, 0.2, 0.2], [0.3, 0.3, 0.3]]).log()
ADVANTAGES = torch.tensor([[1.0, -1.0, 2.0], [-0.5, 1.0, -3.0]])
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])


def gradient(mask=MASK, logp=LOGP, **settings):
    leaf = logp.clone().requires_grad_()
    policy_loss(leaf, OLD, ADVANTAGES, mask, **settings).loss.backward()
    return leaf.grad


# --- numbers that vary ------------------------------------------------------------------------------------------------

VARYING = {  # a setting with a schedule from its first value to its last, and what it is in the middle
    "rule": (FixedClip(Linear(0.3, 0.1), Linear(0.4, 0.2)), FixedClip(0.2, 0.3)),
    "within rules": (TwoSided(FixedClip(Linear(0.3, 0.1)), Band()), TwoSided(FixedClip(0.2), Band())),
    "objective": (Method(Unclipped(), DualClip(Linear(2.0, 1.2))), Method(Unclipped(), DualClip(1.6))),
    "within objectives": (
        Method(FixedClip(), SequenceMask(Linear(0.3, 0.1), Surrogate(Linear(0.2, 0.0)))),
        Method(FixedClip(), SequenceMask(0.2, Surrogate(0.1))),
    ),
    "a paper's": (BandPO(radius=Linear(0.3, 0.1)), BandPO(radius=0.2)),
    "another paper's": (SAPO(Linear(1.0, 3.0)), SAPO(2.0)),
}


@pytest.mark.parametrize("name", VARYING)
def test_any_number_may_be_a_schedule(name):
    setting, midway = VARYING[name]
    found = gradient(method=setting, state=TrainingState(progress=0.5))
    assert torch.equal(found, gradient(method=midway))
    with pytest.raises(ValueError, match=r"depends on the training state: pass .*TrainingState\(progress="):
        policy_loss(LOGP, OLD, ADVANTAGES, method=setting)


def test_a_controller_may_stand_for_any_number():
    hold = ClipRateController(target=0.01, start=2.0, min_radius=1.1)
    method = Method(FixedClip(), DualClip(hold))
    controller_state = method.update_controllers({}, {"clip_high": 0.002, "clip_low": 0.0})
    state = TrainingState(controller_state=controller_state)
    assert controller_state[repr(hold)] < 2.0
    assert torch.equal(
        gradient(method=method, state=state),
        gradient(method=Method(FixedClip(), DualClip(controller_state[repr(hold)]))),
    )
    assert method.varying() == {"objective.max_ratio": hold}


@pytest.mark.parametrize("make", [lambda: FixedClip(Linear(0.5, 1.5)), lambda: DualClip(Linear(3.0, 1.0))])
def test_both_ends_must_be_allowed(make):
    with pytest.raises(ValueError, match=r"must be .* got Linear"):
        make()


def test_only_a_band_has_a_number_for_each_token():
    class Early(Radius):
        needs = "position"
        per_token = True
        range = (0.01, 0.1)

    with pytest.raises(ValueError, match="differs from token to token, which only the radius of a Band may"):
        FixedClip(Early())


# --- the context ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Older(ClipRule):
    """A clip that is narrower for older weights."""

    age: object = None

    def resolve(self, state, strict=True):
        return Older(state.age)

    def bounds(self, logp_old):
        width = (0.6 / (1 + self.age)).expand_as(logp_old)
        return RatioBounds(torch.log1p(-width), torch.log1p(width))


@dataclass(frozen=True)
class Shares(Objective):
    """An objective whose weight depends on every quantity of `Tokens`."""

    def weight(self, tokens):
        state = tokens.state
        return state.position / state.length + state.group[:, None] + state.progress


def test_rules_and_objectives_see_one_context():
    state = TrainingState(progress=0.25, group=torch.tensor([3, 5]), age=torch.tensor([[0.0], [4.0]]))
    found = Method(Unclipped(), Shares()).weight(
        Batch.read(LOGP, OLD, ADVANTAGES, MASK, state=state).tokens(Unclipped())
    )
    expected = torch.tensor([[3.25, 3.75, 3.75], [5.25, 5.25 + 1 / 3, 5.25 + 2 / 3]])
    torch.testing.assert_close(found, expected)
    seen = Batch.read(LOGP, OLD, ADVANTAGES, MASK, state=state).tokens(Older())
    assert seen.blocked.tolist() == [[False, False, False], [True, True, False]]


# --- more than a weight -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regression(Objective):
    """−A·log π + ½·beta·(log r)², whose gradient does not vanish at A = 0."""

    beta: float = 0.5

    def weight(self, tokens):
        return torch.ones_like(tokens.ratio)

    def bias(self, tokens):
        return -self.beta * tokens.log_ratio

    def regularizer(self, tokens):
        return self.beta * tokens.log_ratio**2 / 2


@pytest.mark.parametrize("around", [lambda x: x, lambda x: DualClip(9.0, x), lambda x: SequenceMask(9.0, x)])
def test_a_gradient_free_of_the_advantage(around):
    advantages = ADVANTAGES.clone()
    advantages[1, 0] = 0.0
    weights = torch.tensor([[2.0, 1.0, 9.0], [0.5, 1.0, 3.0]])
    ours, theirs = (LOGP.clone().requires_grad_() for _ in range(2))
    method = Method(Unclipped(), around(Regression()))
    policy_loss(ours, OLD, advantages, MASK, method=method, weights=weights).loss.backward()
    each = weights * (-advantages * theirs + 0.25 * (theirs - OLD) ** 2)
    ((each * MASK).sum() / 5).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert ours.grad[1, 0] != 0 == ours.grad[0, 2]


def test_the_bound_may_be_of_the_sequence_and_the_ratio_of_the_token():
    """Row 1: (1.5·0.5)^½ = 0.87; row 2: (2/3·5/3·2)^⅓ = 1.30. Only the second lies outside of [0.8, 1.2]."""
    method = Method(FixedClip(0.2), bound_level="sequence")
    seen = method.tokens(Batch.read(LOGP, OLD, ADVANTAGES, MASK))
    assert seen.clip_mask.clipped_high.tolist() == [[False] * 3, [True] * 3]
    expected = torch.tensor([[1.5, 0.5, 1.0], [2 / 3, 0.0, 2.0]])
    torch.testing.assert_close(method.weight(seen)[MASK > 0], expected[MASK > 0])
    torch.testing.assert_close(seen.clipped[1], seen.ratio[1] * 1.2 / (20 / 9) ** (1 / 3))
    assert repr(method) == "Method(clip=FixedClip(low=0.2, high=0.2), bound_level='sequence')"


def test_importance_weights_may_enter_the_weight_itself():
    """VESPO's are factors of the sequence's ratio; one given for a whole sequence counts once."""
    method, mask = METHODS["VESPO"].method(), torch.ones(1, 2)
    old, logp, weights = (torch.tensor([x]).log() for x in ([0.2, 0.2], [0.3, 0.2], [0.5, 3.0]))
    folded = policy_loss(logp + weights, old, torch.ones(1), mask, method=method).loss
    assert torch.equal(
        policy_loss(logp, old, torch.ones(1), mask, method=method, weights=weights.exp()).loss, folded
    )
    once = policy_loss(logp, old, torch.ones(1), mask, method=method, weights=torch.tensor([1.5])).loss
    torch.testing.assert_close(once, folded)


def test_sums_run_over_all_processes(monkeypatch):
    """With the gains of the other process the first bounds are enough; without them they are not."""
    seen = []

    def all_reduce(sums, group):
        seen.append(group)
        sums.add_(100.0 if len(seen) == 1 else 0.0)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    alone, together = (
        Batch.read(
            torch.tensor([[0.16, 0.24]]).log(),
            torch.full((1, 2), 0.08).log(),
            torch.tensor([[0.1, -1.0]]),
            state=TrainingState(processes=group),
        ).tokens(BalancedBounds())
        for group in (None, "all")
    )
    assert Surrogate().weight(alone).tolist() == [[2.0, pytest.approx(3.0)]]
    assert Surrogate().weight(together).tolist() == [[0.0, pytest.approx(3.0)]]
    assert seen == ["all", "all"]
    assert {name for name, paper in METHODS.items() if paper.method().whole_batch} >= {"BAPO"}


def test_a_number_of_your_own_sees_the_context():
    @dataclass(frozen=True)
    class Early(Radius):
        needs = "position"
        per_token = True
        range = (0.01, 0.1)

        def resolve(self, state):
            return self if state.position is None else 0.1 / (1 + state.position)

    seen = Batch.read(LOGP, OLD, ADVANTAGES, MASK).tokens(Band(KL(), Early()))
    torch.testing.assert_close(seen.rule.radius[1], torch.tensor([0.1, 0.05, 0.1 / 3]))


def test_controllers_of_rules_and_objectives_are_held_together():
    first, second = ClipRateController(0.1, 0.2), ClipRateController(0.01, 3.0, min_radius=1.1)
    method = Method(Band(KL(), first), DualClip(second))
    controller_state = method.update_controllers({}, {"clip_high": 0.3, "clip_low": 0.0})
    assert set(controller_state) == {repr(first), repr(second)}
    with pytest.raises(ValueError, match="measures 'clip_low', which the metrics lack"):
        method.update_controllers({}, {"clip_high": 0.3})
