import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bandpo import KL, Band, FixedClip, Method, TotalVariation, Unclipped, aggregate, policy_loss
from bandpo.core.batch import reduce_to_level
from bandpo.core.divergences import PearsonChi2
from bandpo.core.methods import BandPO
from bandpo.core.objectives import DualClip
from helpers.losses import batch_loss

RULES = [
    Band(KL(), 0.05),
    Band(TotalVariation(), 0.1),
    Band(PearsonChi2(), 0.1),
    FixedClip(),
    FixedClip(0.2, 0.28),
    Unclipped(),
]


def textbook(logp, logp_old, advantages, mask, clip, dual_clip=None):
    """Compute PPO's loss by its definition, with autograd through exp, clamp and min."""
    bounds = clip.bounds(logp_old)
    ratio = (logp - logp_old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(bounds.lower, bounds.upper) * advantages)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    return -(surrogate * mask).sum() / mask.sum()


def clipped_twice(clip, dual_clip):
    return clip if dual_clip is None else Method(clip, DualClip(dual_clip))


def batch(seed, rows=4, columns=50, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    logp_old = -torch.rand(rows, columns, generator=g, dtype=dtype) * 6 - 0.01
    logp = (logp_old + 0.7 * torch.randn(rows, columns, generator=g, dtype=dtype)).clamp(max=-1e-4)
    advantages = torch.randn(rows, columns, generator=g, dtype=dtype)
    mask = (torch.rand(rows, columns, generator=g) > 0.2).to(dtype)
    return logp, logp_old, advantages, mask


@pytest.mark.parametrize("clip", RULES, ids=repr)
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_is_the_textbooks(clip, dual_clip, seed):
    logp, *rest = batch(seed)
    ours, theirs = (logp.clone().requires_grad_() for _ in range(2))
    policy_loss(ours, *rest, method=clipped_twice(clip, dual_clip)).loss.backward()
    textbook(theirs, *rest, clip, dual_clip).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    assert (ours.grad == 0).any()
    assert (ours.grad != 0).any()


@pytest.mark.parametrize("clip", [r for r in RULES if not isinstance(r, Band)], ids=repr)
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_value_is_the_textbooks(clip, dual_clip):
    tensors = batch(7)
    loss = policy_loss(*tensors, method=clipped_twice(clip, dual_clip)).loss
    torch.testing.assert_close(loss, textbook(*tensors, clip, dual_clip))


def token_of_bandpo(p, ratio, advantage, radius, max_ratio, dual_clip):
    """Return the surrogate and the weight of a token by BandPO's definition for total variation, in plain Python.

    Its bounds are 1 ± radius/p, as p·|r − 1|/2 + (1 − p)·|(1 − p·r)/(1 − p) − 1|/2 = p·|r − 1|.
    """
    upper = min(1 + radius / p, max_ratio)
    lower = 1 - radius / p
    if advantage > 0:
        return min(ratio, upper) * advantage, ratio if ratio <= upper else 0.0
    if ratio > dual_clip:
        return dual_clip * advantage, 0.0
    return max(ratio, lower) * advantage, ratio if ratio >= lower else 0.0


@pytest.mark.parametrize(
    ("max_ratio", "dual_clip"), [(2.5, 6.0), (6.0, 2.5), (math.inf, 2.5), (2.5, math.inf)]
)
def test_bandpos_largest_ratio_and_dual_clip_are_two_settings(max_ratio, dual_clip):
    probabilities = [[0.005, 0.02, 0.05, 0.3], [0.01, 0.03, 0.1, 0.6]]
    ratios = [[1.5, 2.0, 3.9, 1.2], [8.0, 4.0, 3.0, 0.7]]
    advantages = [[1.0, 0.5, 2.0, 1.5], [1.0, 0.25, 0.75, 3.0]]
    # Each token once with either sign.
    signed = [*advantages, *([-a for a in row] for row in advantages)]
    logp_old = torch.tensor(probabilities * 2, dtype=torch.float64).log()
    logp = (logp_old + torch.tensor(ratios * 2, dtype=torch.float64).log()).requires_grad_()
    method = BandPO(TotalVariation(), 0.15, max_ratio, dual_clip)
    loss = policy_loss(logp, logp_old, torch.tensor(signed, dtype=torch.float64), method=method).loss
    loss.backward()

    tokens = [
        [token_of_bandpo(*token, 0.15, max_ratio, dual_clip) for token in zip(*rows, strict=True)]
        for rows in zip(probabilities * 2, ratios * 2, signed, strict=True)
    ]
    value = -sum(surrogate for row in tokens for surrogate, _ in row) / 16
    gradient = [
        [-weight * a / 16 for (_, weight), a in zip(row, advantage_row, strict=True)]
        for row, advantage_row in zip(tokens, signed, strict=True)
    ]
    assert loss.item() == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(logp.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("clip", RULES, ids=repr)
def test_value_where_nothing_is_clipped(clip):
    _logp, logp_old, advantages, mask = batch(3)
    near = logp_old + 1e-4 * torch.sign(advantages)
    loss = policy_loss(near, logp_old, advantages, mask, method=clip).loss
    torch.testing.assert_close(loss, textbook(near, logp_old, advantages, mask, clip))


def test_gradcheck():
    """Numerical derivatives of the value itself, where it is differentiable: rules that report it exactly."""
    logp, *rest = batch(1, 2, 8)
    for clip in (Method(FixedClip(), DualClip(3.0)), Unclipped()):
        for aggregation, normalizer in (
            ("token-mean", None),
            ("grpo", None),
            ("dr_grpo", 16.0),
            ("sum", None),
        ):
            assert torch.autograd.gradcheck(
                lambda x, c=clip, a=aggregation, n=normalizer: (
                    policy_loss(x, *rest, method=c, aggregation=a, normalizer=n).loss
                ),
                logp.requires_grad_(),
            )


def test_numbers_worked_by_hand():
    """Four tokens of probability 0.08, clip 0.2, the four cases of PPO's min."""
    logp_old = torch.full((1, 4), math.log(0.08))
    logp = torch.tensor([[0.16, 0.16, 0.04, 0.04]]).log().requires_grad_()  # ratios 2, 2, ½, ½
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    loss, metrics = policy_loss(logp, logp_old, advantages, method=FixedClip(0.2))
    loss.backward()
    # −1.2 (clipped high), +2, −½, +0.8 (clipped low), averaged
    assert loss.item() == pytest.approx((-1.2 + 2 - 0.5 + 0.8) / 4)
    torch.testing.assert_close(logp.grad, torch.tensor([[0.0, 2.0, -0.5, 0.0]]) / 4)
    assert metrics["clip_high"].item() == metrics["clip_low"].item() == 0.25
    assert metrics["ratio_mean"].item() == pytest.approx(1.25)
    assert metrics["approx_kl"].item() == pytest.approx((2 * (1 - math.log(2)) + 2 * (math.log(2) - 0.5)) / 4)
    # Band-KL 0.05 at p = 0.08 is [0.262, 2.41]: nothing is clipped.
    assert policy_loss(logp, logp_old, advantages, method=Band(KL(), 0.05)).metrics["clip_high"] == 0
    # The dual clip at 1.5 takes the second token: 1.5 instead of 2, and no gradient.
    loss, metrics = policy_loss(logp, logp_old, advantages, method=Method(FixedClip(0.2), DualClip(1.5)))
    assert loss.item() == pytest.approx((-1.2 + 1.5 - 0.5 + 0.8) / 4)
    assert metrics["dual_clip"] == 0.25


def test_aggregations_worked_by_hand():
    values = torch.tensor([[1.0, 3.0, math.nan], [5.0, math.inf, math.nan]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    expected = {"token-mean": 3, "seq-mean-token-sum": 4.5, "seq-mean-token-mean": 3.5, "sum": 9}
    for name, value in expected.items():
        assert aggregate(values, mask, name).item() == value
    for trl, ours in (
        ("bnpo", "token-mean"),
        ("dapo", "token-mean"),
        ("grpo", "seq-mean-token-mean"),
        ("luspo", "seq-mean-token-sum"),
    ):
        assert aggregate(values, mask, trl) == aggregate(values, mask, ours)
    assert aggregate(values, mask, "dr_grpo", normalizer=9).item() == 0.5
    for name, value in expected.items():  # over two batches of this size, as a number and as a tensor
        count = 2 * (3 if name == "token-mean" else 1 if name == "sum" else 2)
        assert aggregate(values, mask, name, normalizer=count).item() == value / 2
        assert aggregate(values, mask, name, normalizer=torch.tensor(count)).item() == value / 2


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), junk=st.sampled_from([math.nan, math.inf, -math.inf, 7.0]))
def test_what_stands_at_padding_has_no_effect(seed, junk):
    logp, logp_old, advantages, mask = batch(seed, 2, 10)
    mask[0, 0] = 1.0
    clean = logp.clone().requires_grad_()
    loss, metrics = policy_loss(clean, logp_old, advantages, mask)
    loss.backward()
    dirty = [x.masked_fill(mask == 0, junk) for x in (logp, logp_old, advantages)]
    again = dirty[0].requires_grad_()
    loss_again, metrics_again = policy_loss(again, *dirty[1:], mask.bool())
    loss_again.backward()
    assert torch.equal(loss, loss_again)
    assert torch.equal(clean.grad, again.grad)
    torch.testing.assert_close(metrics, metrics_again, rtol=0, atol=0)


def test_advantages_per_sequence_and_half_precision():
    logp, logp_old, advantages, mask = batch(0, dtype=torch.float32)
    per_sequence = advantages[:, 0]
    expected = policy_loss(logp, logp_old, per_sequence[:, None].expand_as(logp), mask).loss
    assert policy_loss(logp, logp_old, per_sequence, mask).loss == expected
    assert policy_loss(logp, logp_old, per_sequence[:, None], mask).loss == expected
    half = logp.bfloat16().requires_grad_()
    loss = policy_loss(half, logp_old.bfloat16(), per_sequence.bfloat16(), mask).loss
    loss.backward()
    assert (loss.dtype, half.grad.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.6's own
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own
def test_one_elementwise_graph_in_torch_compile():
    logp, *rest = batch(0, dtype=torch.float32)
    explained = torch._dynamo.explain(
        lambda x: policy_loss(x, *rest, method=Method(Band(), DualClip(3.0))).loss
    )(logp.requires_grad_())
    assert explained.graph_break_count == 0
    assert explained.graph_count == 1


BAD = [
    ({"logp_old": torch.zeros(1, 3)}, ValueError, r"logp_old has shape \(1, 3\), logp \(2, 4\)"),
    ({"mask": torch.ones(2, 3)}, ValueError, r"mask has shape \(2, 3\)"),
    (
        {"mask": torch.full((2, 4), 0.5)},
        ValueError,
        r"mask holds 0.5, .* pass fractional weights as weights=",
    ),
    ({"method": "Bnd(KL())"}, ValueError, "did you mean Band"),
    ({"method": "DropOutside()"}, ValueError, "is not a method such as DPPO"),
    ({"method": 0.2}, TypeError, "method must be a method such as DPPO"),
    ({"advantages": torch.zeros(3)}, ValueError, r"advantages of shape \(3,\) fit neither"),
    ({"advantages": torch.zeros(2, 3)}, ValueError, r"advantages of shape \(2, 3\)"),
    ({"logp": torch.full((2, 4), math.nan)}, ValueError, "logp holds nan"),
    ({"logp_old": torch.full((2, 4), 1.5)}, ValueError, "logp_old holds 1.5"),
    ({"logp_old": torch.full((2, 4), -math.inf)}, ValueError, "holds -inf at a counted token"),
    ({"logp": torch.zeros(2, 4, dtype=torch.long)}, TypeError, "logp must be a floating-point tensor"),
    (
        {"advantages": torch.zeros(2, dtype=torch.long)},
        TypeError,
        "advantages must be a floating-point tensor",
    ),
    ({"method": "Method(Band(), DualClip(1))"}, ValueError, "DualClip.s max_ratio must be above 1"),
    ({"clip": "Band"}, TypeError, "unexpected keyword argument 'clip'"),
    ({"advantages": torch.tensor([1.0, math.nan])}, ValueError, "advantages hold nan at a counted token"),
    ({"entropy": torch.full((2, 4), math.inf)}, ValueError, "entropy hold inf at a counted token"),
    ({"aggregation": "mean"}, ValueError, "unknown aggregation 'mean'; known are token-mean"),
    ({"aggregation": "dr_grpo"}, ValueError, "needs normalizer"),
    ({"normalizer": 0.0}, ValueError, "normalizer must be a finite number above 0"),
    ({"normalizer": torch.tensor(-1.0)}, ValueError, "normalizer must be a finite number above 0"),
    ({"normalizer": torch.ones(2)}, ValueError, r"normalizer must be one number, got shape \(2,\)"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_refuses_bad_input(change, error, message):
    arguments = {
        "logp": torch.full((2, 4), -1.0),
        "logp_old": torch.full((2, 4), -1.1),
        "advantages": torch.ones(2),
        "mask": torch.ones(2, 4),
    }
    with pytest.raises(error, match=message):
        batch_loss(**arguments | change)


WRONG = {  # at a counted token
    "logp": (math.nan, 0.5, -math.inf),
    "logp_old": (math.nan, 3.0, -math.inf),
    "logp_anchor": (math.nan, 1.0),
    "advantages": (math.nan, math.inf),
    "entropy": (math.nan,),
    "weights": (math.nan, -1.0, math.inf),
    "mask": (0.5, -1.0),
}


@pytest.mark.parametrize("method", ["Band()", "SAPO()", "Method(FixedClip(0.2), level='sequence')"])
@pytest.mark.parametrize(("name", "value"), [(name, x) for name in WRONG for x in WRONG[name]])
def test_where_values_are_not_read_a_wrong_one_poisons_the_gradient(name, value, method, monkeypatch):
    """On an accelerator and in compiled code the loss is NaN. On the CPU the same value raises an error."""
    tensors = {key: torch.full((2, 3), -1.0) for key in ("logp", "logp_old", "logp_anchor")}
    tensors |= {key: torch.ones(2, 3) for key in ("advantages", "entropy", "weights", "mask")}
    tensors[name][0, 1] = value
    with pytest.raises(ValueError, match=name):
        batch_loss(**tensors, method=method)
    monkeypatch.setattr("bandpo.core._checks.values_can_be_read", lambda x: False)
    leaf = tensors["logp"].clone().requires_grad_()
    loss = batch_loss(**tensors | {"logp": leaf}, method=method).loss
    loss.backward()
    assert loss.isnan()
    assert leaf.grad.isnan().any()
    tensors[name][0, 1] = math.nan  # padding: no matter
    tensors["mask"][0, 1] = 0.0
    assert batch_loss(**tensors, method=method).loss.isfinite()


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("aggregation", ["token-mean", "grpo", "seq-mean-token-mean", "sum"])
def test_a_batch_without_a_token(aggregation, readable, monkeypatch):
    """The loss is 0 with a gradient, because another process may have tokens and waits for the backward pass."""
    monkeypatch.setattr("bandpo.core._checks.values_can_be_read", lambda x: readable)
    logp = torch.full((2, 4), -1.0, requires_grad=True)
    loss, metrics = policy_loss(
        logp, logp.detach(), torch.ones(2), torch.zeros(2, 4), aggregation=aggregation
    )
    loss.backward()
    assert (loss.item(), logp.grad.abs().sum().item()) == (0.0, 0.0)
    assert all(value.isnan() for value in metrics.values())


def test_a_loop_may_reduce_as_it_likes():
    logp, logp_old, advantages, mask = batch(0)
    found = policy_loss(logp, logp_old, advantages, mask, aggregation=lambda values: values.sum() / 7)
    torch.testing.assert_close(found.loss, policy_loss(logp, logp_old, advantages, mask, normalizer=7.0).loss)


def test_sequence_level_worked_by_hand():
    """Each row its own mean over its own counted tokens, at every token of that row."""
    logp = torch.tensor([[-1.0, -3.0, -9.0], [-4.0, -9.0, -9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert reduce_to_level(logp, mask, "sequence").tolist() == [[-2.0] * 3, [-4.0] * 3]
    assert reduce_to_level(logp, torch.zeros(2, 3), "sequence").tolist() == [[0.0] * 3] * 2


def test_one_counted_token_is_a_batch():
    values, mask = torch.tensor([[3.0, math.nan]]), torch.tensor([[1.0, 0.0]])
    assert aggregate(values, mask) == aggregate(values, mask, "seq-mean-token-mean") == 3.0
    assert aggregate(torch.ones(2, 2), torch.tensor([[1.0, 1.0], [1.0, 0.0]])) == 1.0


def test_a_ratio_on_the_bound_is_inside():
    """Tokens beyond a bound are dropped, those on it are not; tokens with A = 0 are never dropped."""
    logp_old = torch.tensor([[0.25, 0.25, 0.25]]).log()
    logp = torch.tensor([[0.5, 0.125, 0.5]]).log()
    advantages = torch.tensor([[1.0, -1.0, 0.0]])
    _, metrics = policy_loss(logp, logp_old, advantages, method=FixedClip(0.5, 1.0))
    assert (metrics["clip_high"], metrics["clip_low"]) == (0, 0)
    _, metrics = policy_loss(logp, logp_old, -advantages.abs(), method=Method(Unclipped(), DualClip(2.0)))
    assert metrics["dual_clip"] == 0
    _, metrics = policy_loss(logp, logp_old, -advantages.abs(), method=Method(Unclipped(), DualClip(1.5)))
    assert metrics["dual_clip"] == pytest.approx(1 / 3)


def test_half_precision_counts_its_tokens_exactly():
    """1001 is no bfloat16: without a mask of at least float32 the mean would be over 1000 tokens."""
    logp_old = torch.full((1, 1001), -1.0, dtype=torch.bfloat16)
    loss, metrics = policy_loss(logp_old, logp_old, torch.ones(1), method=FixedClip())
    assert loss.item() == pytest.approx(-1, abs=1e-6)
    assert metrics["ratio_mean"].item() == pytest.approx(1, abs=1e-6)


def test_sequences_without_a_counted_token():
    """The names of verl leave them out of the mean over sequences, TRL's count them as 0."""
    values, mask = torch.tensor([[2.0, 4.0], [9.0, 9.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    verls = {"seq-mean-token-mean": 3.0, "seq-mean-token-sum": 6.0}
    assert {name: aggregate(values, mask, name).item() for name in verls} == verls
    assert aggregate(values, mask, "seq-mean-token-sum-norm", normalizer=2.0) == 3.0
    trls = {"grpo": 1.5, "luspo": 3.0}
    assert {name: aggregate(values, mask, name).item() for name in trls} == trls
    assert aggregate(values, mask, "dr_grpo", normalizer=2.0) == 1.5


def test_text_is_taken_wherever_an_object_is():
    tensors = batch(0)
    for text, rule in (("Band(KL(), 0.05)", Band(KL(), 0.05)), ("FixedClip(0.2)", FixedClip(0.2))):
        assert policy_loss(*tensors, method=text).loss == policy_loss(*tensors, method=rule).loss
        assert policy_loss(*tensors, method=text).loss == policy_loss(*tensors, method=rule).loss
