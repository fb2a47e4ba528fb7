"""Packed and jagged batches: the same loss, gradient, metrics, audit and gradient check as the padded batch."""

import functools

import pytest
import torch

from bandpo import Packed, Rows, aggregate, certify, linear_logp, policy_loss
from bandpo.audit import Audit
from bandpo.core.aggregation import AGGREGATIONS, TRL_LOSS_TYPES
from bandpo.core.batch import Batch
from bandpo.core.methods import METHODS, Method
from bandpo.core.objectives import SequenceMask
from bandpo.core.rules import Band, FixedClip
from bandpo.core.schedules import Radius, TrainingState
from bandpo.core.sequences import Sequences, part_sums
from bandpo.core.text import as_method
from helpers.losses import batch_loss

LENGTHS = (5, 1, 9, 2, 17, 3)
"""Of sequences with their prompts; no token of the second counts."""
AVERAGES = (*AGGREGATIONS, *TRL_LOSS_TYPES)
FORMS = ("segments", "cu_seqlens", "flat", "rows", "jagged")


def padded_batch(seed=0, dtype=torch.float32, lengths=LENGTHS):
    """Return a padded batch with prompts, a sequence without a counted token, and values in the padding."""
    random = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    old = -5 * torch.rand(shape, generator=random, dtype=dtype) ** 2 - 1e-2
    logp = (old + 0.4 * torch.randn(shape, generator=random, dtype=dtype)).clamp(max=-1e-3)
    place = torch.arange(shape[1])
    inside = place < torch.tensor(lengths)[:, None]
    mask = (inside & (place >= torch.randint(0, 3, (shape[0], 1), generator=random))).float()
    mask[1] = 0
    return {
        "logp": logp,
        "logp_old": old,
        "mask": mask,
        "advantages": torch.randn(shape[0], generator=random, dtype=dtype),
        "logp_anchor": (old + 0.1 * torch.randn(shape, generator=random, dtype=dtype)).clamp(max=-1e-3),
        "entropy": torch.rand(shape, generator=random, dtype=dtype),
        "weights": torch.rand(shape, generator=random, dtype=dtype),
    }, inside


def pack(batch, inside, form):
    """Return the batch in another form: its tensors per token, and the arguments with the boundaries of sequences."""
    lengths = inside.sum(1)
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    numbers = torch.arange(len(inside))[:, None].expand(inside.shape)
    packed = {}
    for name, x in batch.items():
        per_token = isinstance(x, torch.Tensor) and x.shape == inside.shape
        packed[name] = x[inside] if per_token else x
    where = {}
    if form == "segments":
        where["layout"] = Packed(segments=numbers[inside][None])
    if form in ("cu_seqlens", "flat"):
        where["layout"] = Packed(cu_seqlens=ends)
    if form == "rows":
        # Two rows, the first with two sequences, and padding at the end of both.
        first = int(lengths[:2].sum())
        width = int(lengths.sum()) - first + 2
        segments = torch.full((2, width), -1)
        filled = torch.zeros(2, width, dtype=torch.bool)
        filled[0, :first] = True
        filled[1, : width - 2] = True
        segments[filled] = numbers[inside]
        where["layout"] = Packed(segments=segments)
    for name, x in packed.items():
        if not (isinstance(x, torch.Tensor) and batch[name].shape == inside.shape):
            continue
        if form in ("segments", "cu_seqlens"):
            packed[name] = x[None]
        if form == "rows":
            table = torch.full(filled.shape, float("nan"), dtype=x.dtype)
            table[filled] = x
            packed[name] = table.nan_to_num(0.0) if name == "mask" else table
        if form == "jagged":
            packed[name] = torch.nested.nested_tensor_from_jagged(x, ends)
    return packed, where


def loss_and_gradient(batch, inside, form, **settings):
    """Loss, the gradient of each token in the order of the padded batch, and metrics."""
    where = {}
    if form != "padded":
        batch, where = pack(batch, inside, form)
    logp = batch["logp"].detach().clone().requires_grad_()
    loss, metrics = batch_loss(logp, **{k: x for k, x in batch.items() if k != "logp"}, **where, **settings)
    (gradient,) = torch.autograd.grad(loss, logp)
    if form == "padded":
        gradient = gradient[inside]
    if form == "jagged":
        gradient = gradient.values()
    if form == "rows":
        gradient = gradient[where["layout"].segments >= 0]
    return loss, gradient.flatten(), metrics


def needed(method, batch):
    """Return the tensors that a method takes, with importance weights and entropies."""
    return {name: x for name, x in batch.items() if name != "logp_anchor" or method.level == "token"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", METHODS)
def test_a_packed_batch_equals_the_padded_one(name, dtype):
    method = METHODS[name].method()
    tolerance = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 1e-12}
    for seed, average in enumerate(AVERAGES):
        batch, inside = padded_batch(seed, dtype)
        batch = needed(method, batch)
        settings = {"method": method, "aggregation": average}
        if average in ("seq-mean-token-sum-norm", "dr_grpo"):
            settings["normalizer"] = 20.0
        loss, gradient, metrics = loss_and_gradient(batch, inside, "padded", **settings)
        form = FORMS[(seed + len(name)) % len(FORMS)]
        packed_loss, packed_gradient, packed_metrics = loss_and_gradient(batch, inside, form, **settings)
        scale = gradient.abs().max().clamp(min=1.0)
        torch.testing.assert_close(packed_gradient / scale, gradient / scale, **tolerance)
        size = loss.abs().clamp(min=1.0)
        torch.testing.assert_close(packed_loss / size, loss / size, **tolerance)
        torch.testing.assert_close(packed_metrics, metrics, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "text", ["GRPO()", "GSPO()", "VESPO()", "FIPO()", "Method(Band(), SequenceMask(0.01, drift='max_k2'))"]
)
def test_all_forms_are_the_same_batch(form, text):
    batch, inside = padded_batch(3)
    expected = loss_and_gradient(batch, inside, "padded", method=text)
    result = loss_and_gradient(batch, inside, form, method=text)
    torch.testing.assert_close(result[:2], expected[:2], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_weights_and_advantages_per_sequence(form):
    batch, inside = padded_batch(4)
    batch["weights"] = torch.rand(len(LENGTHS))
    for text in ("VESPO()", "GRPO()"):
        expected = loss_and_gradient(batch, inside, "padded", method=text)
        result = loss_and_gradient(batch, inside, form, method=text)
        torch.testing.assert_close(result[:2], expected[:2], rtol=1e-5, atol=1e-7)


def test_the_example_of_three_sequences_in_a_row():
    """Without boundaries a packed row gives the mean of one long sequence."""
    batch, inside = padded_batch(5, lengths=(3, 6, 12))
    batch["mask"][1, 2:4] = 1
    del batch["logp_anchor"], batch["weights"]
    padded = loss_and_gradient(batch, inside, "padded", method="GRPO()")[0]
    packed, where = pack(batch, inside, "segments")
    packed["advantages"] = packed["advantages"][where["layout"].segments]
    one_row = batch_loss(method="GRPO()", layout=Rows(), **packed).loss
    torch.testing.assert_close(batch_loss(**packed, **where, method="GRPO()").loss, padded)
    assert (one_row - padded).abs() > 0.01
    with pytest.raises(ValueError, match=r"segments=.*cu_seqlens=.*Rows"):
        batch_loss(**packed, method="GRPO()")


class Later(Radius):
    """A radius that depends on position and length."""

    needs = "position"
    per_token = True
    range = (0.01, 0.2)

    def resolve(self, state):
        return 0.01 + 0.1 * state.position / state.length.clamp(min=1.0)


@pytest.mark.parametrize("form", FORMS)
def test_position_and_length(form):
    batch, inside = padded_batch(6)
    method = Method(Band(radius=Later()), aggregation="token-mean")
    expected = loss_and_gradient(batch, inside, "padded", method=method)
    result = loss_and_gradient(batch, inside, form, method=method)
    torch.testing.assert_close(result[:2], expected[:2], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("average", AVERAGES)
def test_aggregate(form, average):
    batch, inside = padded_batch(7, torch.float64)
    tensors = {"logp": batch["logp_old"], "mask": batch["mask"]}
    normalizer = 20.0 if "norm" in average or average == "dr_grpo" else None
    expected = aggregate(tensors["logp"], tensors["mask"], average, normalizer=normalizer)
    packed, where = pack(tensors, inside, form)
    result = aggregate(packed["logp"], packed["mask"], average, normalizer=normalizer, **where)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", ["GSPO()", "BandPO()"])
def test_the_audit_counts_the_same(form, text):
    batch, inside = padded_batch(8)
    batch = {name: batch[name] for name in ("logp", "logp_old", "advantages", "mask", "entropy")}
    expected = Audit.from_batch(Batch.read(layout=Rows(), **batch), method=text).metrics()
    packed, where = pack(batch, inside, form)
    assert Audit.from_batch(Batch.read(**packed, **where), method=text).metrics() == pytest.approx(
        expected, rel=1e-4
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_check_names_sequence_and_token(form):
    batch, inside = padded_batch(9)
    del batch["weights"], batch["logp_anchor"]
    packed, where = pack(batch, inside, form)
    rest = {name: x for name, x in packed.items() if name != "logp"}
    loss = lambda x: batch_loss(x, **rest, **where, method="GRPO()").loss  # noqa: E731
    assert certify(loss, Batch.read(packed["logp"], **rest, **where), method="GRPO()").equal
    # Twice the gradient of the fifth sequence.
    fifth = (torch.arange(len(LENGTHS)) == 4)[:, None].expand(inside.shape)[inside]

    def wrong(x):
        values = x.values() if x.is_nested else x
        doubled = fifth if form != "rows" else torch.zeros_like(values, dtype=torch.bool)
        if form == "rows":
            doubled[where["layout"].segments == 4] = True
        scaled = torch.where(doubled.view(values.shape), 2 * values - values.detach(), values)
        if x.is_nested:
            scaled = torch.nested.nested_tensor_from_jagged(scaled, x.offsets())
        return loss(scaled)

    with pytest.raises(RuntimeError, match=r"each sequence has a factor of its own.*sequence 5, token"):
        certify(wrong, Batch.read(packed["logp"], **rest, **where), method="GRPO()")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["segments", "cu_seqlens", "rows"])
@pytest.mark.parametrize("text", ["GRPO()", "GSPO()", "VESPO()", "BandPO()"])
def test_one_graph(form, text):
    from bandpo import parse

    method = parse(text)
    batch, inside = padded_batch(10)
    packed, where = pack(batch, inside, form)
    loss = functools.partial(batch_loss, method=method)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**packed, **where), loss(**packed, **where))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("text", ["GRPO()", pytest.param("GSPO()", marks=pytest.mark.exhaustive)])
def test_compiled_by_inductor(text):
    from bandpo import parse

    method = parse(text)
    batch, inside = padded_batch(11)
    packed, where = pack(batch, inside, "cu_seqlens")
    rest = {name: x for name, x in packed.items() if name != "logp"}
    gradients = []
    for function in (batch_loss, torch.compile(batch_loss, fullgraph=True)):
        logp = packed["logp"].clone().requires_grad_()
        function(logp, **rest, **where, method=method).loss.backward()
        gradients.append(logp.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_sequences_in_any_order_and_padding_between_them():
    index = torch.tensor([[2, 2, -1, 0, 0, 0, -1, 1]])
    sequences = Sequences.read((index >= 0).float(), Packed(segments=index))
    x = torch.arange(8.0)[None]
    assert sequences.at_tokens(sequences.sum(x))[0].tolist() == [1, 1, 8, 12, 12, 12, 8, 7]
    assert sequences.position[0, [0, 1, 3, 4, 5, 7]].tolist() == [0, 1, 0, 1, 2, 0]
    assert sequences.ahead(x, 1)[0, [0, 1, 3, 4, 5, 7]].tolist() == [1, 0, 4, 5, 0, 0]
    assert sequences.to_rows(x, -1.0).tolist() == [[3, 4, 5], [7, -1, -1], [0, 1, -1]]
    assert int(sequences.number_with_empty) == 3


@pytest.mark.parametrize("average", ["grpo", "seq-mean-token-mean"])
def test_an_empty_sequence_counts_in_the_averages_of_trl_alone(average):
    values, mask, ends = torch.tensor([[2.0, 2.0, 5.0]]), torch.ones(1, 3), torch.tensor([0, 2, 2, 3])
    expected = 7 / (3 if average == "grpo" else 2)
    assert aggregate(values, mask, average, layout=Packed(cu_seqlens=ends)).item() == pytest.approx(expected)


def test_position_ids_tell_segments():
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 0]])
    segments = (position_ids == 0).cumsum(-1) - 1
    assert segments.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert Sequences.read(torch.ones(1, 6), Packed(segments=segments)).length[:3].tolist() == [3, 2, 1]


REFUSED = {
    "both": (
        {"segments": torch.zeros(1, 6, dtype=torch.long), "cu_seqlens": torch.tensor([0, 6])},
        "which have the same meaning; got both",
    ),
    "shape": ({"segments": torch.zeros(1, 5, dtype=torch.long)}, r"segments have the shape \(1, 5\)"),
    "torn": (
        {"segments": torch.tensor([[0, 0, 1, 1, 0, 0]])},
        "segment 0 occurs at tokens that are not adjacent",
    ),
    "too high": ({"segments": torch.tensor([[0, 0, 1, 1, 7, 7]])}, "segments hold 7"),
    "not from 0": ({"cu_seqlens": torch.tensor([1, 6])}, "must rise from 0"),
    "falls": ({"cu_seqlens": torch.tensor([0, 4, 3, 6])}, "must rise from 0"),
    "too long": ({"cu_seqlens": torch.tensor([0, 4, 9])}, "at most the number of tokens, 6"),
    "one number": ({"cu_seqlens": torch.tensor([0])}, "must hold 0 and the end of each sequence"),
    "counts in none": ({"cu_seqlens": torch.tensor([0, 3, 5])}, "token 5 of the flattened batch counts"),
    "counts in none too": (
        {"segments": torch.tensor([[0, 0, 0, 1, 1, -1]])},
        "token 5 of the flattened batch counts",
    ),
    "neither": ({}, "which have the same meaning; got neither"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case):
    given, message = REFUSED[case]
    logp = torch.full((1, 6), -1.0)
    with pytest.raises(ValueError, match=message):
        policy_loss(logp, logp, torch.ones(1, 6), method="GRPO()", layout=Packed(**given))


def test_a_segment_in_two_rows_is_refused():
    logp = torch.full((2, 3), -1.0)
    with pytest.raises(
        ValueError,
        match=r"segment 0 occurs at tokens that are not adjacent.*add the number of sequences",
    ):
        policy_loss(
            logp, logp, torch.ones(2, 3), layout=Packed(segments=torch.tensor([[0, 0, 1], [0, 1, 1]]))
        )


@pytest.mark.parametrize(
    "given", [torch.zeros(1, 6), torch.zeros(1, 6, dtype=torch.bool), [0, 0, 0, 1, 1, 1]]
)
def test_numbers_that_are_no_integers_are_refused(given):
    logp = torch.full((1, 6), -1.0)
    with pytest.raises(TypeError, match="segments must be a tensor of integers"):
        policy_loss(logp, logp, torch.ones(1, 6), layout=Packed(segments=given))


def test_advantages_of_another_number_of_sequences_are_refused():
    logp = torch.full((1, 6), -1.0)
    with pytest.raises(ValueError, match=r"advantages of shape \(3,\) fit neither the tokens \(1, 6\) nor"):
        policy_loss(logp, logp, torch.ones(3), layout=Packed(cu_seqlens=torch.tensor([0, 3, 6])))
    with pytest.raises(
        ValueError, match="number the sequences from 0 to 1, but advantages or weights are given for 6"
    ):
        policy_loss(logp, logp, torch.ones(6), layout=Packed(segments=torch.tensor([[0, 0, 0, 1, 1, 1]])))


def test_where_values_cannot_be_read_a_lost_token_makes_the_loss_nan(monkeypatch):
    monkeypatch.setattr("bandpo.core._checks.values_can_be_read", lambda x: False)
    logp = torch.full((1, 6), -1.0)
    assert policy_loss(
        logp, logp, torch.ones(1, 6), layout=Packed(cu_seqlens=torch.tensor([0, 3, 5]))
    ).loss.isnan()


def test_jagged_tensors_of_other_lengths_are_refused():
    tensors = [
        torch.nested.nested_tensor([torch.full((n,), -1.0) for n in lengths], layout=torch.jagged)
        for lengths in ((2, 3), (3, 2))
    ]
    with pytest.raises(ValueError, match="the rows of logp_old and logp have different lengths"):
        policy_loss(*tensors, torch.ones(2))


def test_log_probabilities_of_jagged_hidden_states():
    random = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(6, 4, generator=random), torch.randn(9, 4, generator=random)
    ids = torch.randint(9, (6,), generator=random)
    ends = torch.tensor([0, 2, 6])
    logp, entropy, top = linear_logp(
        torch.nested.nested_tensor_from_jagged(hidden, ends),
        head,
        torch.nested.nested_tensor_from_jagged(ids, ends),
        entropy=True,
    )
    expected = linear_logp(hidden, head, ids, entropy=True)
    torch.testing.assert_close((logp.values(), entropy.values()), expected[:2])
    assert top is expected.top is None
    assert torch.equal(logp.offsets(), ends)
    batch = Batch.read(logp, logp.detach(), torch.ones(2), entropy=entropy.detach())
    assert as_method("GSPO()").loss(batch).loss.isfinite()


def test_the_state_of_packed_sequences():
    batch = Batch.read(
        torch.full((1, 5), -1.0),
        torch.full((1, 5), -1.0),
        torch.tensor([1.0, -1.0]),
        state=TrainingState(group=torch.tensor([3, 4])),
        layout=Packed(cu_seqlens=torch.tensor([0, 2, 5])),
    )
    assert batch.state.length.tolist() == [[2, 2, 3, 3, 3]]
    assert batch.advantages.tolist() == [[1, 1, -1, -1, -1]]


def test_a_view_of_packed_tokens():
    tokens = Batch.read(
        torch.tensor([[-1.0, -1.0, -2.0]]),
        torch.tensor([[-1.0, -1.0, -1.0]]),
        torch.tensor([1.0, 1.0]),
        layout=Packed(segments=torch.tensor([[0, 0, 1]])),
    ).tokens(FixedClip(0.2), "sequence")
    assert tokens.log_ratio.tolist() == [[0, 0, -1]]
    assert SequenceMask(0.5, both_signs=True).weight(tokens)[0, :2].tolist() == [1, 1]


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1500])
def test_rows_are_one_part_unless_a_compiler_can_divide_them(length, monkeypatch):
    assert part_sums(torch.ones(3, 2048)).tolist() == [[2048.0]] * 3
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    assert part_sums(torch.ones(3, 2048)).tolist() == [[1024.0, 1024.0]] * 3
    assert part_sums(torch.ones(3, length)).tolist() == [[float(length)]] * 3
