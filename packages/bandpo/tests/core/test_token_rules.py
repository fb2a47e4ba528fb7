"""Tests of token rules: their inputs, their combinations, packed batches, compilation and text forms."""

import math
from dataclasses import dataclass

import pytest
import torch
from core.test_sequences import FORMS, loss_and_gradient, padded_batch

import method_references as reference
from bandpo import (
    CISPO,
    KL,
    Band,
    ClipRule,
    FixedClip,
    Loosest,
    Method,
    RatioBounds,
    TotalVariation,
    TwoSided,
    Unclipped,
    check,
    parse,
    policy_loss,
)
from bandpo.core.batch import Batch
from bandpo.core.layout import Rows
from bandpo.core.objectives import ClippedWeight, DropOutside, SequenceMask, Surrogate
from bandpo.core.rules import Tightest, TokenRule
from bandpo.core.schedules import Linear, TrainingState
from bandpo.core.text import as_text
from bandpo.core.token_rules import BalancedBounds, PrefixBudget, SecondMoment
from helpers.losses import batch_loss


@dataclass(frozen=True)
class Seen(TokenRule):
    """A clip whose width depends on every quantity of `TokenData`."""

    def for_tokens(self, tokens):
        width = 0.02 * (1 + tokens.position) + 0.01 * tokens.length + 0.03 * tokens.entropy
        width = width + 0.01 * tokens.advantages.abs() + 0.05 * tokens.sequence_before(tokens.log_ratio.abs())
        width = width / (1 + tokens.age) + 0.001 * tokens.group
        return RatioBounds(-width, width)

    @property
    def whole_sequence(self):
        return True


@dataclass(frozen=True)
class Early(TokenRule):
    """A band whose radius grows along the sequence."""

    radius: float = 0.01

    def for_tokens(self, tokens):
        return Band(KL(), self.radius * (1 + tokens.position))

    @property
    def whole_sequence(self):
        return True


# --- what a rule sees -------------------------------------------------------------------------------------------------


def test_a_rule_sees_advantages_positions_lengths_entropies_groups_ages_and_what_came_before():
    old, logp = torch.full((2, 3), -2.0), torch.tensor([[-1.9, -2.3, -2.0], [-2.0, -1.5, -9.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    state = TrainingState(group=torch.tensor([4, 7]), age=torch.tensor([0, 3]))
    tokens = Batch.read(
        logp, old, torch.tensor([2.0, -1.0]), mask, entropy=torch.full((2, 3), 0.5), state=state
    ).tokens(Seen())
    expected = torch.tensor(
        [
            [
                0.02 + 0.03 + 0.015 + 0.02 + 0.0 + 0.004,
                0.04 + 0.03 + 0.015 + 0.02 + 0.005 + 0.004,
                0.06 + 0.03 + 0.015 + 0.02 + 0.02 + 0.004,
            ],
            [(0.02 + 0.02 + 0.015 + 0.01) / 4 + 0.007, (0.04 + 0.02 + 0.015 + 0.01) / 4 + 0.007, 0.0],
        ]
    )
    torch.testing.assert_close(tokens.bounds.log_upper * mask, expected)
    torch.testing.assert_close(tokens.bounds.log_lower * mask, -expected)
    assert tokens.blocked.tolist() == [[True, False, False], [False, False, False]]


@pytest.mark.parametrize("name", ["age", "group"])
def test_what_is_not_known_is_named(name):
    @dataclass(frozen=True)
    class Needs(TokenRule):
        def for_tokens(self, tokens):
            width = getattr(tokens, name)
            return RatioBounds(-width, width)

    logp = torch.full((1, 2), -1.0)
    with pytest.raises(
        ValueError, match=rf"the {name} of the tokens is not known.*TrainingState\({name}=\.\.\.\)"
    ):
        policy_loss(logp, logp, torch.ones(1), method=Needs())


@pytest.mark.parametrize("age", [torch.tensor([0.0, 3.0, 1.0]), torch.tensor([0.0])])
def test_an_age_of_another_number_of_sequences_is_refused(age):
    logp = torch.full((2, 2), -1.0)
    tokens = Batch.read(logp, logp, torch.ones(2), state=TrainingState(age=age)).tokens(Unclipped())
    with pytest.raises(ValueError, match=r"age of shape .* fit neither the tokens \(2, 2\)"):
        _ = tokens.age


def test_bounds_without_tokens_are_refused():
    for rule in (BalancedBounds(), TwoSided(FixedClip(), PrefixBudget())):
        with pytest.raises(ValueError, match=r"the bounds of .* depend on more than logp_old"):
            rule.bounds(torch.tensor([-1.0]))


def test_a_rule_that_looks_at_p_alone_is_itself():
    logp = torch.full((1, 2), -1.0)
    for rule in (FixedClip(), Tightest(Band(), TwoSided(FixedClip(), Unclipped()))):
        assert not rule.depends_on_tokens
        assert Batch.read(logp, logp, torch.ones(1)).tokens(rule).rule is rule


def test_bounds_around_the_anchor():
    """If the bounds surround another policy, the second moment is that of the ratio to this policy."""
    old, anchor = torch.full((1, 2), 0.2).log(), torch.tensor([[0.25, 0.4]]).log()
    logp = torch.tensor([[0.27, 0.7]]).log()
    tokens = Batch.read(logp, old, torch.ones(1), logp_anchor=anchor).tokens(SecondMoment(0.05))
    assert tokens.blocked.tolist() == [[False, True]]
    assert tokens.bounds.upper[0, 0].item() == pytest.approx(0.27 / 0.25)


# --- with what it combines --------------------------------------------------------------------------------------------


def stale(seed, shape=(12, 9)):
    generator = torch.Generator().manual_seed(seed)
    old = -5 * torch.rand(shape, generator=generator, dtype=torch.float64) ** 2 - 0.05
    logp = (old + 0.6 * torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    advantages = torch.randn(shape[:1], generator=generator, dtype=torch.float64)
    mask = torch.arange(shape[1]) < torch.randint(1, shape[1] + 1, (shape[0], 1), generator=generator)
    return logp, old, advantages, mask.double()


def gradient(loss, logp):
    return torch.autograd.grad(loss, logp)[0]


def of_balanced_bounds(logp, old, advantages, mask):
    """Compute the bounds of BAPO's reference for a batch."""
    return reference.bapo_bounds(logp.detach(), old, advantages[:, None], mask, **reference.BAPO)


COMBINATIONS = {
    "CISPO": (
        Method(BalancedBounds(), ClippedWeight()),
        lambda ratio, logp, a, lower, upper: -ratio.detach().clamp(lower, upper) * a * logp,
    ),
    "dropped outside": (
        Method(BalancedBounds(), DropOutside(1.5, both_sides=True)),
        lambda ratio, logp, a, lower, upper: (
            -ratio.detach().clamp(max=1.5) * ((ratio >= lower) & (ratio <= upper)) * a * logp
        ),
    ),
    "its upper bound alone": (
        Method(TwoSided(FixedClip(0.2), BalancedBounds()), Surrogate()),
        lambda ratio, logp, a, lower, upper: -torch.minimum(ratio * a, ratio.clamp(0.8, upper) * a),
    ),
    "tightest": (
        Method(Tightest(BalancedBounds(), FixedClip(0.05, 0.1)), Surrogate()),
        lambda ratio, logp, a, lower, upper: -torch.minimum(ratio * a, ratio.clamp(0.95, 1.1) * a),
    ),
    "loosest": (
        Method(Loosest(BalancedBounds(), FixedClip(0.5, 0.1)), Surrogate()),
        lambda ratio, logp, a, lower, upper: -torch.minimum(ratio * a, ratio.clamp(0.5, upper) * a),
    ),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", COMBINATIONS)
def test_balanced_bounds_combine(name, seed):
    method, formula = COMBINATIONS[name]
    logp, old, advantages, mask = stale(seed)
    logp.requires_grad_()
    lower, upper = of_balanced_bounds(logp, old, advantages, mask)
    loss = (formula((logp - old).exp(), logp, advantages[:, None], lower, upper) * mask).sum() / mask.sum()
    found = gradient(policy_loss(logp, old, advantages, mask, method=method).loss, logp)
    torch.testing.assert_close(found, gradient(loss, logp), rtol=1e-6, atol=1e-12)
    assert (found == 0)[mask > 0].any() == (name != "CISPO")


def test_the_bounds_differ_between_batches():
    bounds = {of_balanced_bounds(*stale(seed)) for seed in range(4)}
    assert len(bounds) > 1


def test_beside_a_sequence_mask():
    logp, old, advantages, mask = stale(0)
    alone = Method(BalancedBounds(), ClippedWeight())
    masked = Method(BalancedBounds(), SequenceMask(0.05, ClippedWeight()))
    tensors = Batch.read(logp, old, advantages, mask)
    weight, kept = (method.weight(method.tokens(tensors)) for method in (alone, masked))
    drift = reference.mean_of_sequence(old - logp, mask)
    dropped = (drift > 0.05) & (advantages[:, None] < 0)
    assert 0 < dropped.sum() < len(dropped)
    assert torch.equal(kept * mask, weight.masked_fill(dropped, 0.0) * mask)


def test_at_the_level_of_the_method():
    """A sequence's ratio is compared with bounds made of sequences' ratios."""
    logp, old, advantages, mask = stale(1)
    logp.requires_grad_()
    ratio = reference.mean_of_sequence(logp - old, mask).exp().expand_as(logp)
    squares = ratio.detach().log().square()
    pushed = advantages[:, None] * ratio.detach().log() > 0
    outward = (mask > 0) & pushed
    while squares[outward].mean() > 0.05:
        outward = outward & (squares < squares[outward].max() - 1e-12)
    kept = (squares <= squares[outward].max() + 1e-12) | ~pushed
    expected = gradient((-ratio * kept * advantages[:, None] * mask).sum() / mask.sum(), logp)
    method = Method(SecondMoment(0.05), DropOutside(math.inf), level="sequence", aggregation="token-mean")
    found = gradient(policy_loss(logp, old, advantages, mask, method=method).loss, logp)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
    assert 0 < (found == 0)[mask > 0].double().mean() < 1


def test_numbers_of_such_a_rule_may_vary():
    logp, old, advantages, mask = stale(2)
    varying = Method(PrefixBudget(Band(TotalVariation(), Linear(0.3, 0.1), math.inf)))
    fixed = Method(PrefixBudget(Band(TotalVariation(), 0.2, math.inf)))
    losses = [
        policy_loss(logp, old, advantages, mask, method=method, state=TrainingState(progress=0.5)).loss
        for method in (varying, fixed)
    ]
    assert torch.equal(*losses)
    assert varying.varying() == {"clip.band.radius": Linear(0.3, 0.1)}


@pytest.mark.parametrize(
    "around", [lambda x: x, lambda x: TwoSided(FixedClip(), x), lambda x: Loosest(x, Band())]
)
def test_what_a_rule_depends_on_is_its_methods(around):
    whole, sequence = Method(around(BalancedBounds())), Method(around(PrefixBudget()))
    assert (whole.whole_batch, whole.whole_sequence) == (True, False)
    assert (sequence.whole_batch, sequence.whole_sequence) == (False, True)
    assert whole.clip.depends_on_tokens


def test_a_packed_row_is_refused_by_a_rule_that_looks_at_whole_sequences():
    logp = torch.full((1, 6), -1.0)
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]])
    with pytest.raises(ValueError, match=r"but the clip rule PrefixBudget\(.*takes a row for one sequence"):
        policy_loss(logp, logp, advantages, method="CPPO()")


# --- packed, compiled, as text ----------------------------------------------------------------------------------------

MADE_OF_RULES = [
    Method(Seen(), Surrogate()),
    Method(TwoSided(Early(), Seen()), ClippedWeight()),
    Method(Loosest(Early(), FixedClip(0.1)), DropOutside()),
    Method(Tightest(BalancedBounds(), Band(KL(), 0.1)), ClippedWeight()),
    Method(PrefixBudget(Band(KL(), 0.05), 0.01), SequenceMask(0.1)),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", MADE_OF_RULES, ids=repr)
def test_packed_and_padded(method, form):
    batch, inside = padded_batch(12)
    sequences = len(inside)
    state = TrainingState(group=torch.arange(sequences) // 2, age=torch.arange(sequences) % 3)
    del batch["weights"], batch["logp_anchor"]
    expected = loss_and_gradient(batch, inside, "padded", method=method, state=state)
    result = loss_and_gradient(batch, inside, form, method=method, state=state)
    torch.testing.assert_close(result[:2], expected[:2], rtol=1e-5, atol=1e-7)
    assert (expected[1] == 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("method", MADE_OF_RULES, ids=repr)
def test_one_graph(method):
    logp, old, advantages, mask = (x.float() for x in stale(3))
    state = TrainingState(group=torch.arange(12) // 2, age=torch.arange(12) % 3)
    known = {"entropy": torch.ones_like(logp), "state": state, "method": method, "layout": Rows()}
    torch._dynamo.reset()
    compiled = torch.compile(batch_loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(logp, old, advantages, mask, **known), batch_loss(logp, old, advantages, mask, **known)
    )


@pytest.mark.parametrize(
    "text",
    [
        "Method(BalancedBounds(), ClippedWeight())",
        "TwoSided(FixedClip(0.2), SecondMoment(0.1))",
        "PrefixBudget(Band(KL(), Linear(0.1, 0.05)), 0.01)",
    ],
)
def test_as_text(text):
    method = parse(text)
    assert parse(as_text(method)) == method
    assert parse(repr(method)) == method


# --- what is refused --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratios(TokenRule):
    def for_tokens(self, tokens):
        width = torch.full_like(tokens.ratio, 0.2)
        return RatioBounds(1 - width, 1 + width)


@dataclass(frozen=True)
class OfNumber(TokenRule):
    def for_tokens(self, tokens):
        return 0.2


@dataclass(frozen=True)
class OfAnotherShape(TokenRule):
    def for_tokens(self, tokens):
        return RatioBounds(torch.full((7,), -0.1), torch.full((7,), 0.1))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Ratios(), "these are ratios, return their logarithms"),
        (OfNumber(), "OfNumber.for_tokens must return RatioBounds or a clip rule, got float"),
        (OfAnotherShape(), r"log_lower of shape \(7,\) does not broadcast"),
        (TwoSided(FixedClip(), Ratios()), "these are ratios, return their logarithms"),
    ],
)
def test_check_tries_such_a_rule_on_tokens(rule, message):
    with pytest.raises((TypeError, ValueError), match=message):
        check(rule)


@pytest.mark.parametrize("rule", [Seen(), Early(), TwoSided(Early(), Seen())], ids=repr)
def test_check_takes_a_rule_that_keeps_its_promises(rule):
    check(rule)
    check(Method(rule))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BalancedBounds(lower=1.1), "0 <= lower <= max_lower <= 1"),
        (lambda: SecondMoment(0.0), "threshold must be above 0, got 0.0"),
        (lambda: PrefixBudget(FixedClip()), r"band must be a Band such as .* got FixedClip"),
        (lambda: PrefixBudget(budget=0.0), "budget must be above 0, got 0.0"),
        (lambda: PrefixBudget(last_weight=1.1), r"last_weight must be in \(0, 1\], got 1.1"),
    ],
)
def test_bad_numbers_are_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_rule_of_tokens_must_say_what_it_makes_of_them():
    class Nothing(TokenRule):
        pass

    with pytest.raises(TypeError, match="for_tokens"):
        Nothing()
    assert issubclass(TokenRule, ClipRule)


# --- the rules themselves ---------------------------------------------------------------------------------------------


def test_a_prefix_that_has_moved_leaves_less_to_what_follows():
    """By hand: radius 0.15, budget at least 0.02; three tokens with weights 1, 0.9, 0.8."""
    old = torch.full((1, 3), 0.3, dtype=torch.float64).log()
    logp = torch.tensor([[0.42, 0.44, 0.36]], dtype=torch.float64).log()
    bounds = Batch.read(logp, old, torch.ones(1, dtype=torch.float64)).tokens(PrefixBudget()).bounds
    moved, weights, allowance = (
        (0.12, 0.14, 0.06),
        (1.0, 0.9, 0.8),
        0.04,
    )  # of 0.02 to 0.04; the percentile is 0.136
    spent, total = 0.0, 0.0
    for step in range(3):
        radius = max(0.0, min(0.15, 0.15 + allowance * total - spent)) / weights[step]
        assert bounds.upper[0, step].item() == pytest.approx(1 + radius / 0.3)
        spent, total = spent + weights[step] * moved[step], total + weights[step]


def test_a_spent_budget_blocks_every_move_outward_and_none_back():
    old = torch.full((2, 4), 0.3, dtype=torch.float64).log()
    logp = torch.tensor([[0.9, 0.8, 0.31, 0.29], [0.9, 0.8, 0.31, 0.29]], dtype=torch.float64).log()
    tokens = Batch.read(logp, old, torch.tensor([1.0, -1.0], dtype=torch.float64)).tokens(PrefixBudget())
    assert tokens.blocked.tolist() == [[True, True, True, False], [False, False, False, True]]


def test_where_nothing_could_be_blocked_the_second_moment_bounds_nothing():
    old = torch.full((1, 2), -1.0)
    tokens = Batch.read(old - 0.7, old, torch.ones(1)).tokens(SecondMoment())
    assert tokens.bounds.upper.tolist() == [[math.inf, math.inf]]


def test_a_second_moment_that_no_token_keeps_blocks_all_that_move_outward():
    old = torch.full((1, 2), -1.0)
    tokens = Batch.read(old + 0.7, old, torch.ones(1)).tokens(SecondMoment())
    assert tokens.bounds.upper.tolist() == [[1.0, 1.0]]
    assert tokens.blocked.all()


def test_cispo_with_bounds_of_its_own_is_still_cispo():
    assert CISPO().clip == FixedClip(1.0, 4.0)
