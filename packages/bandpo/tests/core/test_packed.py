"""Tests of the errors for packed rows without boundaries, and for shapes that would broadcast silently."""

import re

import pytest
import torch

from bandpo import FixedClip, Method, Rows, certify, policy_loss
from bandpo.audit import Audit
from bandpo.core.batch import Batch
from bandpo.core.methods import METHODS
from bandpo.core.objectives import DualClip, FutureKL, GammaWeight, GeometricMean, SequenceMask, Surrogate
from bandpo.core.rules import Band
from bandpo.core.schedules import Radius

ROWS, COLUMNS = 2, 6
OLD = torch.full((ROWS, COLUMNS), -1.0)
NEW = OLD + torch.tensor([[0.4, 0.0, -0.4, 0.3, 0.1, 0.2], [0.1, 0.2, -0.1, 0.0, 0.3, -0.3]])
CONSTANT = torch.tensor([1.0, -1.0])
PACKED = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 0.5, -2.0, -2.0, -2.0]])
"""The second row holds two sequences of three tokens."""
CRITIC = torch.tensor([[0.3, 0.2, 0.1, -0.1, -0.4, 0.7], [1.0, 0.8, 0.6, 0.4, 0.2, 0.1]])
"""A value per token, as a critic gives them."""

TOKEN = Method(FixedClip(0.2))
SEQUENCE = Method(FixedClip(0.2), level="sequence")
PER_SEQUENCE = (
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "grpo",
    "dr_grpo",
    "luspo",
)


def zero_loss(logp):
    return (logp * 0.0).sum()


def loss_of(advantages, method=TOKEN, mask=None, new=NEW, old=OLD, **settings):
    if settings.get("aggregation") in ("seq-mean-token-sum-norm", "dr_grpo"):
        settings["normalizer"] = 6.0
    return policy_loss(new, old, advantages, mask, method=method, **settings).loss


# Values.


@pytest.mark.parametrize("aggregation", PER_SEQUENCE)
def test_a_packed_row_is_refused_under_an_average_over_sequences(aggregation):
    message = (
        rf"row 1 looks packed: its advantages change from 0\.5 to -2 at token 3.*average '{aggregation}'.*"
        r"one sequence.*segments=.*cu_seqlens=.*Rows\(\)"
    )
    with pytest.raises(ValueError, match=message):
        loss_of(PACKED, aggregation=aggregation)


def test_the_average_of_a_method_counts_where_none_is_given():
    with pytest.raises(ValueError, match="row 1 looks packed"):
        loss_of(PACKED, method="GRPO()")
    assert loss_of(PACKED, method="GRPO()", aggregation="token-mean").isfinite()


@pytest.mark.parametrize("advantages", [PACKED, CRITIC])
@pytest.mark.parametrize("method", [SEQUENCE, Method(FixedClip(0.2), bound_level="sequence")])
def test_at_the_level_of_sequences_no_advantage_may_change_within_a_row(advantages, method):
    changed = (1, 3) if advantages is PACKED else (0, 1)
    message = rf"row {changed[0]}.*at token {changed[1]}.*level 'sequence'.*segments=.*Rows\(\)"
    with pytest.raises(ValueError, match=message):
        loss_of(advantages, method=method, aggregation="token-mean")


@pytest.mark.parametrize(
    "objective",
    [
        GeometricMean(),
        GammaWeight(),
        SequenceMask(0.5),
        FutureKL(),
        DualClip(3.0, FutureKL()),
    ],
)
def test_a_packed_row_is_refused_by_an_objective_that_looks_at_whole_sequences(objective):
    with pytest.raises(ValueError, match=rf"row 1 looks packed.*{type(objective).__name__}.*segments="):
        loss_of(PACKED, method=Method(FixedClip(0.2), objective), aggregation="token-mean")


def test_a_packed_row_is_refused_by_a_number_that_depends_on_the_position():
    class Later(Radius):
        needs = "position"
        range = (0.01, 0.1)

        def resolve(self, state):
            return 0.01 + 0.001 * state.position

    with pytest.raises(ValueError, match=r"row 1 looks packed.*position"):
        loss_of(PACKED, method=Method(Band(radius=Later())), aggregation="token-mean")


@pytest.mark.parametrize("aggregation", ["token-mean", "sum", "bnpo", "dapo", lambda x: x.mean()])
@pytest.mark.parametrize("advantages", [PACKED, CRITIC])
def test_a_loss_of_tokens_alone_takes_any_advantages(aggregation, advantages):
    assert loss_of(advantages, aggregation=aggregation).isfinite()


@pytest.mark.parametrize("aggregation", PER_SEQUENCE)
def test_the_advantages_of_a_critic_are_no_packed_row(aggregation):
    assert loss_of(CRITIC, aggregation=aggregation).isfinite()


@pytest.mark.parametrize(
    ("row", "refused"),
    [
        ([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], True),
        ([1.0, 1.0, -1.0, -1.0, 1.0, 1.0], True),
        ([1.0, 1.0, 1.0, 1.0, 1.0, -1.0], True),
        ([1.0, 1.0, 2.0, 3.0, 3.0, 3.0], True),  # of five pairs three are equal
        ([1.0, 1.0, 2.0, 3.0, 4.0, 4.0], False),  # of five pairs two are equal
        ([0.6, 0.5, 0.4, 0.3, 0.2, 0.1], False),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], False),
    ],
)
def test_a_row_looks_packed_where_half_of_its_neighbours_are_equal(row, refused):
    advantages = torch.tensor([row, [1.0] * COLUMNS])
    if refused:
        with pytest.raises(ValueError, match="row 0 looks packed"):
            loss_of(advantages, aggregation="seq-mean-token-mean")
    else:
        assert loss_of(advantages, aggregation="seq-mean-token-mean").isfinite()


def test_neighbours_are_the_counted_tokens():
    """A prompt between two sequences does not count, and neither does what stands there."""
    advantages = torch.tensor([[1.0, 1.0, 9.0, 8.0, -1.0, -1.0], [3.0, 4.0, 5.0, 2.0, 2.0, 2.0]])
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]])
    with pytest.raises(ValueError, match="row 0 looks packed: its advantages change from 1 to -1 at token 4"):
        loss_of(advantages, mask=mask, aggregation="grpo")
    mask[0, 4:] = 0
    assert loss_of(advantages, mask=mask, aggregation="grpo").isfinite()
    assert loss_of(advantages, SEQUENCE, mask).isfinite()


@pytest.mark.parametrize("advantages", [PACKED, CRITIC])
@pytest.mark.parametrize("method", [SEQUENCE, "GRPO()", "VESPO()"])
def test_an_explicit_layout_says_that_each_row_is_one_sequence(advantages, method):
    assert loss_of(advantages, method=method, layout=Rows()).isfinite()
    seen = Audit.from_batch(Batch.read(NEW, OLD, advantages, layout=Rows()), method=method)
    assert seen.metrics()["tokens"] == ROWS * COLUMNS
    loss = lambda x: policy_loss(x, OLD, advantages, method=method, layout=Rows()).loss  # noqa: E731
    assert certify(loss, Batch.read(NEW, OLD, advantages, layout=Rows()), method=method).equal


@pytest.mark.parametrize("method", [SEQUENCE, "GRPO()", "VESPO()"])
def test_gradient_check_and_audit_refuse_the_same_rows(method):
    with pytest.raises(ValueError, match="row 1"):
        certify(zero_loss, Batch.read(NEW, OLD, PACKED), method=method)
    with pytest.raises(ValueError, match="row 1"):
        Audit.from_batch(Batch.read(NEW, OLD, PACKED), method=method)


def test_an_audit_refuses_the_rows_that_a_method_it_tries_cannot_take():
    assert Audit.from_batch(Batch.read(NEW, OLD, PACKED), method="DAPO()").metrics()
    with pytest.raises(ValueError, match=r"row 1.*level 'sequence'"):
        Audit.from_batch(Batch.read(NEW, OLD, PACKED), method="DAPO()", counterfactuals={"GSPO": "GSPO()"})


def test_a_single_sequence_without_a_batch_dimension():
    with pytest.raises(ValueError, match=r"row 0.*at token 3"):
        policy_loss(NEW[1], OLD[1], PACKED[1], method=SEQUENCE)
    assert policy_loss(NEW[1], OLD[1], PACKED[0], method=SEQUENCE).loss.isfinite()


@pytest.mark.parametrize("advantages", [CONSTANT, CONSTANT[:, None], CONSTANT[:, None].expand(ROWS, COLUMNS)])
def test_no_value_is_looked_at_where_advantages_are_of_sequences(advantages, monkeypatch):
    monkeypatch.setattr("bandpo.core._rows._pairs", lambda *_: pytest.fail("looked"))
    assert loss_of(advantages, method="GSPO()").isfinite()
    assert loss_of(advantages, method="GRPO()").isfinite()


def test_values_are_not_read_where_that_would_cost_a_synchronisation(monkeypatch):
    monkeypatch.setattr("bandpo.core._checks.values_can_be_read", lambda x: False)
    assert loss_of(PACKED, method="GRPO()").isfinite()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GRPO()", "GSPO()"])
def test_the_compiled_loss_stays_one_graph(method):
    method = METHODS[method[:-2]].method()
    compiled = torch.compile(lambda *x: policy_loss(*x, method=method).loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(NEW, OLD, CRITIC), policy_loss(NEW, OLD, CRITIC, method=method, layout=Rows()).loss
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_looks_at_whole_sequences_says_so(name):
    """The objectives for which the ratio of the first or the last token changes another token's weight."""
    method = METHODS[name].method()
    if method.level == "sequence" or method.whole_batch:
        return
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(8, 5, generator=generator) - 0.1
    new = old + 0.05 * torch.randn(8, 5, generator=generator)
    advantages = torch.tensor([1.0, -1.0] * 4)
    weights = []
    for moved in (-4.0, 0.0, 1.0):
        changed = new.clone()
        changed[:, [0, -1]] = old[:, [0, -1]] + moved
        changed = changed.clamp(max=0.0)
        weights.append(method.weight(Batch.read(changed, old, advantages).tokens(method.clip))[:, 1:-1])
    changes = not all(torch.equal(weights[1], other) for other in weights)
    assert method.whole_sequence == changes


def test_an_objective_looks_at_tokens_alone_unless_it_says_so():
    assert not Surrogate().whole_sequence
    assert not DualClip(3.0).whole_sequence


# Shapes.


@pytest.mark.parametrize("name", ["advantages", "weights", "entropy"])
@pytest.mark.parametrize("shape", [(1,), (1, COLUMNS), (1, 1), ()])
def test_what_is_of_one_sequence_is_not_spread_over_several(name, shape):
    given = {"advantages": CONSTANT, name: torch.ones(shape)}
    written = re.escape(str(tuple(shape)))
    message = rf"{name} of shape {written} fit neither the tokens \(2, 6\) nor the sequences \(2,\)"
    with pytest.raises(ValueError, match=message):
        Batch.read(NEW, OLD, **given)


@pytest.mark.parametrize("shape", [(1,), (1, COLUMNS), (1, 1)])
def test_a_batch_of_one_sequence_takes_these_shapes(shape):
    batch = Batch.read(NEW[:1], OLD[:1], torch.ones(shape), weights=torch.ones(shape))
    assert batch.advantages.shape == (1, COLUMNS)


# Nested tensors.


def nested(layout=torch.jagged):
    rows = [torch.full((n,), -1.0) for n in (2, 3)]
    return torch.nested.nested_tensor(rows, layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize(
    "name", ["logp", "logp_old", "advantages", "mask", "logp_anchor", "entropy", "weights"]
)
def test_a_nested_tensor_beside_padded_ones_is_refused(name, layout):
    padded = torch.full((2, 3), -1.0)
    tensors = {"logp": padded, "logp_old": padded, "advantages": torch.ones(2), name: nested(layout)}
    first = "logp_old" if name == "logp" else name
    message = rf"{first} .*logp is|{name} is a nested tensor"
    with pytest.raises((TypeError, ValueError), match=message):
        Batch.read(**tensors)
