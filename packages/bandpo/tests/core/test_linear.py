"""Log-probabilities from hidden states, against those of full logits in float64."""

import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bandpo import Batch, linear_logp
from bandpo.core.methods import METHODS
from processes import run_on_processes


def batch(dtype=torch.float64, shape=(3, 5), vocabulary=53, width=7, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = (*shape, width), (vocabulary, width), (vocabulary,)
    tensors = [torch.randn(*of, generator=draw, dtype=torch.float64).to(dtype) for of in shapes]
    return *(x.requires_grad_() for x in tensors), torch.randint(vocabulary, shape, generator=draw)


def full(hidden, head, ids, bias=None, temperature=1.0, logit_softcap=None):
    """By the textbook: log-probabilities, entropies, and the mass of the four likeliest."""
    logits = torch.nn.functional.linear(hidden, head, bias)
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    logps = torch.log_softmax(logits / temperature, -1)
    p = logps.exp()
    return logps.gather(-1, ids[..., None])[..., 0], -(p * logps).sum(-1), p.topk(4).values.sum(-1).detach()


@pytest.mark.parametrize("chunk", [10, pytest.param(53, marks=pytest.mark.slow), 1000])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"temperature": 0.7}, marks=pytest.mark.slow),
        pytest.param({"logit_softcap": 3.0, "temperature": 1.3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_full_logits(settings, chunk):
    hidden, head, bias, ids = batch()

    def ours(hidden, head, bias):
        return linear_logp(hidden, head, ids, bias=bias, chunk=chunk, entropy=True, top=4, **settings)

    expected = full(hidden, head, ids, bias, **settings)
    torch.testing.assert_close(ours(hidden, head, bias), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(linear_logp(hidden, head, ids).logp, full(hidden, head, ids)[0])
    assert torch.autograd.gradcheck(lambda *x: ours(*x)[:2], (hidden, head, bias), check_undefined_grad=False)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_a_scale_of_the_logits_is_a_part_of_temperature_and_cap(cap):
    """As the docstring says: the scale acts before the cap, and on the bias too."""
    hidden, head, bias, ids = batch()
    scale = 0.3
    expected = full(scale * hidden, head, ids, scale * bias, temperature=1.4, logit_softcap=cap)[:2]
    settings = {"temperature": 1.4 / scale, "logit_softcap": cap and cap / scale}
    outputs = linear_logp(hidden, head, ids, bias=bias, entropy=True, **settings)[:2]
    torch.testing.assert_close(outputs, expected)
    tensors = (hidden, head, bias)
    gradients = [
        torch.autograd.grad(logp.sum() + entropy.sum(), tensors) for logp, entropy in (outputs, expected)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_as_from_full_logits(name):
    hidden, head, _, ids = batch(seed=1)
    old = full(hidden + 0.3 * torch.randn_like(hidden), head, ids)[0].detach()
    rest = old, torch.tensor([1.0, -0.5, 0.0]), torch.arange(5).expand(3, 5) < torch.tensor([[5], [3], [4]])
    found = []
    for logp, entropy in (linear_logp(hidden, head, ids, entropy=True)[:2], full(hidden, head, ids)[:2]):
        loss = METHODS[name].method().loss(Batch.read(logp, *rest, entropy=entropy), normalizer=5).loss
        found.append((loss, *torch.autograd.grad(loss, (hidden, head))))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_precision_loses_more_than_with_full_logits(dtype):
    hidden, head, _, ids = batch(dtype, (2, 64), 3000, 64)
    weights = torch.randn(ids.shape)
    exact = [x.detach().double().requires_grad_() for x in (hidden, head)]
    right = torch.autograd.grad(full(*exact, ids)[0], exact, weights)
    textbook = (hidden @ head.T).float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    scores = linear_logp(hidden, head, ids, chunk=100).logp, textbook
    for own, other, x in zip(
        *(torch.autograd.grad(y, (hidden, head), weights) for y in scores), right, strict=True
    ):
        assert own.dtype == dtype
        assert (own - x).norm() <= 2 * (other - x).norm()


def test_tokens_without_a_gradient_cost_nothing(monkeypatch):
    hidden, head, _, ids = batch()
    logp, seen, mm = linear_logp(hidden, head, ids).logp, [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **named: seen.append(a.shape) or mm(a, b, **named))
    weights = torch.zeros_like(logp)
    weights[1, 2:4] = 1.0
    found = torch.autograd.grad(logp, hidden, weights)[0]
    assert all(2 in shape for shape in seen)
    assert (found != 0).any(-1).equal(weights != 0)


def check_gradient(compute):
    """Compare the gradient of log-probabilities, computed from hidden states and head, with that of full logits."""
    hidden, head, _, ids = batch(torch.float32)
    right = torch.autograd.grad(full(hidden, head, ids)[0].sum(), (hidden, head))
    logp = compute(lambda *x: linear_logp(*x, ids).logp * 1.0)(hidden, head)
    torch.testing.assert_close(torch.autograd.grad(logp.sum(), (hidden, head)), right)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_it_is_compiled():
    check_gradient(lambda function: torch.compile(function, backend="aot_eager"))


def test_where_else_it_works():
    check_gradient(lambda function: partial(checkpoint, function, use_reentrant=False))
    hidden, head, _, ids = batch(torch.float32)
    with torch.autocast("cpu"):
        logp = linear_logp(hidden, head, ids).logp
    assert 0 < (logp - linear_logp(hidden, head, ids).logp).abs().max() < 0.1
    assert {x.dtype for x in (logp, *torch.autograd.grad(logp.sum(), (hidden, head)))} == {torch.float32}
    # Tied weights; and no tokens at all.
    tied = [
        torch.autograd.grad(x.sum(), head)[0]
        for x in (linear_logp(head[ids], head, ids).logp, full(head[ids], head, ids)[0])
    ]
    torch.testing.assert_close(*tied)
    assert not torch.autograd.grad(linear_logp(hidden[:0], head, ids[:0]).logp.sum(), head)[0].any()


def test_what_is_not_finite_poisons_its_token_alone():
    hidden, head, bias, ids = batch(torch.float32)
    broken = hidden.detach().clone()
    broken[0, 1, 2], broken[2, 0, 0] = math.nan, math.inf
    assert linear_logp(broken, head, ids).logp.isnan().nonzero().tolist() == [[0, 1], [2, 0]]
    # Entries that a bias rules out, a whole chunk of them first.
    bias, ids = bias.detach().masked_fill(torch.arange(53) < 20, -math.inf), ids % 33
    kept = full(hidden, head[20:], ids, bias[20:])[0]
    torch.testing.assert_close(linear_logp(hidden, head, ids + 20, bias=bias, chunk=10).logp, kept)


@pytest.mark.parametrize("chunk", [10, 53])
def test_an_entry_that_the_bias_rules_out_has_no_part_in_the_entropy(chunk):
    hidden, head, bias, ids = batch()
    ruled_out = bias.detach().masked_fill(torch.arange(53) < 20, -math.inf)
    entropy = linear_logp(hidden, head, ids % 33 + 20, bias=ruled_out, chunk=chunk, entropy=True).entropy
    expected = full(hidden, head[20:], ids % 33, bias.detach()[20:])[1]
    torch.testing.assert_close(entropy, expected)
    gradients = [torch.autograd.grad(x.sum(), (hidden, head)) for x in (entropy, expected)]
    torch.testing.assert_close(*gradients)


REFUSED = [
    ({"ids": torch.full((3, 5), 53)}, r"ids hold 53, which has no row in lm_head_weight \(53, 7\)"),
    ({"ids": torch.full((3, 5), -100)}, "ids hold -100"),
    ({"ids": torch.zeros(3, 4, dtype=torch.long)}, r"hidden \(3, 5, 7\), .* ids \(3, 4\) do not fit"),
    ({"ids": torch.zeros(3, 5)}, "ids must be integers, got torch.float32"),
    ({"hidden": torch.zeros(3, 5, 7, dtype=torch.long)}, "hidden must be a floating-point tensor"),
    ({"lm_head_weight": torch.zeros(0)}, r"lm_head_weight \(0,\).*gathered"),
    ({"bias": torch.zeros(7)}, r"bias \(7,\)"),
    ({"temperature": 0.0}, "temperature must be a finite number above 0"),
    ({"logit_softcap": -1.0}, "logit_softcap must be"),
    ({"chunk": 0}, "chunk must be"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refuses_what_does_not_fit(change, message):
    hidden, head, _, ids = batch(torch.float32)
    with pytest.raises((TypeError, ValueError), match=message):
        linear_logp(**{"hidden": hidden, "lm_head_weight": head, "ids": ids} | change)


SHARDED = """
import pytest
import torch
import torch.distributed as dist
from bandpo import linear_logp
from test_linear import batch, full

dist.init_process_group("gloo")
start = 20 * dist.get_rank()
mine = slice(start, None if start else 20)
where = {"group": dist.group.WORLD, "offset": start}
for settings in ({}, {"logit_softcap": 3.0, "temperature": 1.3}):
    hidden, head, bias, ids = batch()
    right = full(hidden, head, ids, bias, **settings)
    share, part = (x.detach()[mine].requires_grad_() for x in (head, bias))
    found = linear_logp(hidden, share, ids, bias=part, chunk=7, entropy=True, top=4, **where, **settings)
    torch.testing.assert_close(found, right)
    weights = torch.arange(15.0).view(3, 5)
    whole = torch.autograd.grad(((right[0] + right[1]) * weights).sum(), (hidden, head, bias))
    own = torch.autograd.grad(((found[0] + found[1]) * weights).sum(), (hidden, share, part))
    torch.testing.assert_close(own, (whole[0], whole[1][mine], whole[2][mine]))
with pytest.raises(ValueError, match="has no row"):
    linear_logp(hidden, share, ids + 50, **where)
"""


@pytest.mark.slow
def test_a_vocabulary_over_two_processes_is_the_whole_one(tmp_path):
    run_on_processes(SHARDED, tmp_path, preload=("torch.distributed", "bandpo"))
