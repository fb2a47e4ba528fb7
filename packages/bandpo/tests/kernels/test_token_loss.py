"""`compile_loss(…, kernels=True)` by Triton's interpreter, against the eager loss: decisions, gradients, values."""

import functools
import math

import pytest
import torch

from bandpo import Band, Batch, FixedClip, Method, Packed, Rows, compile_loss, policy_loss
from bandpo.core import _checks
from bandpo.core.errors import BandWarning
from bandpo.core.kernels import _token_loss as token_loss
from bandpo.core.schedules import Linear, TrainingState
from bandpo.core.text import as_method

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = [
    # The interpreter computes both sides of a condition with numpy.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:numpy"),
]

METHODS = [
    "Band(KL(), 0.05)",
    "Band(KL(), 0.001)",
    "Band(KL(), 0.5, inf)",
    "Band(TotalVariation(), 0.15)",
    "Band(TotalVariation(), 0.01, inf)",
    "Band(PearsonChi2(), 0.1)",
    "Band(PearsonChi2(), 0.1, inf)",
    "FixedClip(0.2, 0.28)",
    "TwoSided(FixedClip(0.2), Band(KL(), 0.05))",
    "TwoSided(Band(TotalVariation(), 0.15), LogClip(0.1, 0.3))",
    "TwoSided(Band(KL(), 0.02), Band(PearsonChi2(), 0.1))",
    "BandPO(dual_clip=3.0)",
    "Method(FixedClip(0.2), DualClip(1.1))",
    "Method(Unclipped(), DualClip(3.0))",
]
FEW = ["BandPO(dual_clip=3.0)", "Band(PearsonChi2(), 0.1)", "FixedClip(0.2)"]
"""A method for each of three kinds of bounds, with a dual clip or without."""


@functools.cache
def loss_with_kernels(method):
    """Return the loss by the kernels, which would be the eager one after a warning, and a warning is an error."""
    return compile_loss(method, kernels=True, backend="eager")


def batch(rows=4, columns=50, spread=0.4, seed=0):
    random = torch.Generator().manual_seed(seed)
    old = -torch.empty(rows, columns).exponential_(0.5, generator=random)
    logp = (old + spread * torch.randn(rows, columns, generator=random)).clamp(max=-1e-3)
    mask = torch.rand(rows, columns, generator=random) > 0.2
    return logp, old, torch.randn(rows, generator=random), mask


def gradient(loss_of, tensors, **settings):
    leaf = tensors[0].clone().requires_grad_()
    loss, metrics = loss_of(leaf, *tensors[1:], **settings)
    loss.backward()
    return leaf.grad, loss.detach(), metrics


def assert_equal(found, expected, tolerance=1e-6):
    """Compare gradients, losses and metrics of `gradient`; the loss on the scale of its terms, metrics on that of 1."""
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0.0)
    scale = expected[0].double().abs().sum().item()
    torch.testing.assert_close(found[1], expected[1], rtol=0.0, atol=tolerance * scale)
    assert found[2].keys() == expected[2].keys()
    for name, value in expected[2].items():
        scale = max(1.0, abs(value.item()))
        torch.testing.assert_close(found[2][name], value, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def check(method, tensors, **settings):
    expected = gradient(policy_loss, tensors, method=method, **settings)
    assert_equal(gradient(loss_with_kernels(method), tensors, **settings), expected)
    return expected


@pytest.fixture
def large_blocks(monkeypatch):
    """The interpreter takes as long for 16,384 tokens as for 32."""
    monkeypatch.setattr(token_loss, "BLOCK_SIZES", (16384,))
    monkeypatch.setattr(token_loss, "CHUNK", 16384)


def many_tokens(method, near_bounds):
    """Return 212,992 tokens with p from e^−100 to 1 and ratios of e^±30, or with ratios at the bounds."""
    random = torch.Generator().manual_seed(1)
    shape = (13, 16384)
    old = -(10 ** torch.empty(shape).uniform_(-6, 2, generator=random))
    old[::2] = -torch.empty(old[::2].shape).exponential_(0.5, generator=random)
    if near_bounds:
        bounds = as_method(method).clip.bounds(old)
        is_upper = torch.rand(shape, generator=random) > 0.5
        log_ratio = torch.where(is_upper, bounds.log_upper.clamp(max=60.0), bounds.log_lower.clamp(min=-60.0))
        log_ratio *= 1 + 2.0**-23 * torch.randint(-3, 4, shape, generator=random)
    else:
        spread = torch.tensor([0.05, 0.3, 1.5, 10.0]).repeat(4)[:13, None]
        log_ratio = spread * torch.randn(shape, generator=random)
        log_ratio[3::4] = torch.empty(log_ratio[3::4].shape).uniform_(-30, 30, generator=random)
    # The ratio is e^(logp − logp_old), and a new probability is at most 1.
    logp = torch.where(old + log_ratio < -1e-6, old + log_ratio, old)
    advantages = torch.randn(13, generator=random)
    return logp, old, advantages, torch.rand(shape, generator=random) > 0.05


@pytest.mark.parametrize("method", METHODS)
def test_every_clip_decision_is_that_of_the_eager_loss(method, large_blocks):
    tensors = many_tokens(method, near_bounds=False)
    check(method, batch())
    found = gradient(loss_with_kernels(method), tensors)
    expected = gradient(policy_loss, tensors, method=method)
    assert int(tensors[3].sum()) > 200_000
    assert torch.equal(found[0] == 0, expected[0] == 0)
    assert_equal(found, expected)


@pytest.mark.parametrize("method", METHODS[::2])
def test_decisions_at_the_bound_differ_within_rounding_alone(method, large_blocks):
    tensors = many_tokens(method, near_bounds=True)
    check(method, batch())
    found, _, _ = gradient(loss_with_kernels(method), tensors)
    expected, _, _ = gradient(policy_loss, tensors, method=method)
    differ = (found == 0) != (expected == 0)
    assert not (differ & ~token_loss._undecided(as_method(method), tensors)).any()
    if "Band" not in method:
        assert not differ.any()  # a comparison of two numbers


# The approximate instructions of a card, which the interpreter does not have: the functions with errors of up to two
# units of the last digit, and of log₂ near 1 with an error of 2^−22.


@triton.jit
def _error(x):
    number = x * 7919.123
    return tl.where(tl.abs(number) < 1e30, number - tl.floor(number) - 0.5, 0.0) * 2.0**-21


@triton.jit
def _exp(x, FAST: tl.constexpr):
    return tl.exp(x) * (1.0 + _error(x))


@triton.jit
def _log(x, FAST: tl.constexpr):
    y = tl.log(x)
    return tl.where(tl.abs(y) < 0.7, y + 0.7 * _error(x), y * (1.0 + _error(x)))


@triton.jit
def _inverse(x, FAST: tl.constexpr):
    return (1.0 / x) * (1.0 + 0.5 * _error(x))


@triton.jit
def _sqrt(x, FAST: tl.constexpr):
    return tl.sqrt(x) * (1.0 + 0.5 * _error(x))


@pytest.mark.parametrize("method", ["BandPO(dual_clip=3.0)", "Band(PearsonChi2(), 0.1)"])
def test_errors_of_approximate_functions_decide_at_a_bound_alone(method, large_blocks, monkeypatch):
    from bandpo.core.kernels import _token_kernels

    for function in (_exp, _log, _inverse, _sqrt):
        monkeypatch.setattr(_token_kernels, function.__name__, function)
    tensors = many_tokens(method, near_bounds=False)
    loss_with_noise = compile_loss(method, kernels=True, backend="eager")  # passes its trial, too
    found, _, _ = gradient(loss_with_noise, tensors)
    expected, _, _ = gradient(policy_loss, tensors, method=method)
    differ = (found == 0) != (expected == 0)
    assert not (differ & ~token_loss._undecided(as_method(method), tensors)).any()
    assert not torch.equal(found, expected)
    torch.testing.assert_close(
        found.masked_fill(differ, 0.0), expected.masked_fill(differ, 0.0), rtol=5e-6, atol=0.0
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_value_beyond_a_bound_is_exact(method):
    """All tokens are beyond a bound: the loss is the mean of the bounds, in float64."""
    old = -torch.logspace(-4, 1.2, 400).view(2, 200)
    logp = torch.stack([torch.full((200,), -1e-6), old[1] - 3.0])
    advantages = torch.tensor([1.0, -1.0])
    _, loss, _ = gradient(loss_with_kernels(method), (logp, old, advantages), aggregation="sum")
    tokens = as_method(method).tokens(Batch.read(logp.double(), old.double(), advantages.double()))
    expected = -(tokens.advantages * as_method(method).objective.surrogate(tokens)).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("method", FEW)
@pytest.mark.parametrize("columns", [1, 7, 128, 129, 700])
def test_sizes(method, columns):
    check(method, batch(3, columns))


AVERAGES = [
    ("token-mean", None),
    ("token-mean", 77.0),
    ("sum", None),
    ("bnpo", None),
    ("seq-mean-token-mean", None),
    ("seq-mean-token-mean", 5.0),
    ("seq-mean-token-sum", None),
    ("seq-mean-token-sum-norm", 64),
    ("grpo", None),
    ("dr_grpo", 64.0),
    ("luspo", None),
    ("dapo", torch.tensor(9.0)),
]


@pytest.mark.parametrize(("aggregation", "normalizer"), AVERAGES)
@pytest.mark.parametrize("method", ["BandPO(dual_clip=3.0)", "FixedClip(0.2)"])
def test_averages(method, aggregation, normalizer):
    """One sequence is empty: verl's means leave it out, TRL's do not."""
    logp, old, advantages, mask = batch(3, 600)
    mask[1] = False
    check(method, (logp, old, advantages, mask), aggregation=aggregation, normalizer=normalizer)


def test_a_normalizer_on_the_device(monkeypatch):
    """It is not read on the host."""
    check("FixedClip(0.2)", batch(), aggregation="token-mean", normalizer=50)
    monkeypatch.setattr(_checks, "values_can_be_read", lambda _: False)
    for normalizer in (torch.tensor(50), torch.tensor(50.0)):
        check("FixedClip(0.2)", batch(), aggregation="token-mean", normalizer=normalizer)


@pytest.mark.parametrize("method", FEW)
def test_advantages_of_each_shape(method):
    logp, old, advantages, mask = batch()
    per_token = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    per_token[:, ::7] = 0.0
    expanded = advantages.unsqueeze(1).expand(4, 50)
    for shape in (advantages, advantages.unsqueeze(1), expanded, expanded.contiguous(), per_token):
        check(method, (logp, old, shape, mask))


@pytest.mark.parametrize("method", FEW)
def test_masks_of_each_type_and_none(method):
    logp, old, advantages, mask = batch()
    for some in (mask, mask.float(), mask.long(), mask.to(torch.bfloat16), torch.ones_like(mask), None):
        check(method, (logp, old, advantages, some))


@pytest.mark.parametrize("method", FEW)
def test_padding_may_hold_anything(method):
    logp, old, advantages, mask = batch()
    expected, loss, metrics = gradient(policy_loss, (logp, old, advantages, mask), method=method)
    for value in (math.nan, math.inf, -math.inf, 3.0):
        tensors = (logp.masked_fill(~mask, value), old.masked_fill(~mask, value), advantages, mask)
        assert_equal(gradient(loss_with_kernels(method), tensors), (expected, loss, metrics))
    per_token = advantages.unsqueeze(1).expand(4, 50).masked_fill(~mask, math.nan)
    tensors = (logp, old, per_token, mask)
    assert_equal(gradient(loss_with_kernels(method), tensors), (expected, loss, metrics))
    # An advantage of a sequence without a counted token.
    mask[2] = False
    advantages[2] = math.nan
    check(method, (logp, old, advantages, mask), aggregation="grpo")


@pytest.mark.parametrize("name", ["logp", "logp_old", "advantages", "mask"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1])
def test_an_invalid_value_makes_the_loss_nan(name, value, monkeypatch):
    if name == "advantages" and value == 0.1:
        pytest.skip("an advantage of 0.1 is valid")
    logp, old, advantages, mask = batch()
    tensors = {
        "logp": logp,
        "logp_old": old,
        "advantages": advantages.view(4, 1).repeat(1, 50),
        "mask": mask.float(),
    }
    check("BandPO()", tuple(tensors.values()))
    place = tuple(mask.nonzero()[3].tolist())
    tensors[name][place] = value
    found, loss, _ = gradient(loss_with_kernels("BandPO()"), tuple(tensors.values()))
    # Values are not read on an accelerator.
    monkeypatch.setattr(_checks, "values_can_be_read", lambda _: False)
    expected, eager_loss, _ = gradient(policy_loss, tuple(tensors.values()), method="BandPO()")
    assert loss.isnan()
    assert eager_loss.isnan()
    # The mask is in the length of its sequence too, which makes all of its gradient NaN in eager mode.
    differs = found.isnan() != expected.isnan()
    assert not differs[torch.arange(4) != place[0]].any()
    assert found.isnan().nonzero().tolist() == [[*place]]


def test_all_tokens_masked():
    logp, old, advantages, mask = batch()
    check("BandPO()", (logp, old, advantages, mask))
    found, loss, metrics = gradient(loss_with_kernels("BandPO()"), (logp, old, advantages, mask & False))
    assert loss == 0
    assert not found.any()
    assert all(value.isnan() for value in metrics.values())


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_an_empty_batch_is_that_of_the_compiled_loss(shape):
    tensors = (torch.empty(shape), torch.empty(shape), torch.empty(shape[0]))
    assert gradient(loss_with_kernels("FixedClip(0.2)"), tensors)[1] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", FEW)
def test_half_precision(method, dtype):
    tensors = [x.to(dtype) if x.is_floating_point() else x for x in batch()]
    expected = gradient(policy_loss, tensors, method=method)
    found = gradient(loss_with_kernels(method), tensors)
    assert found[0].dtype == dtype
    # The gradient is rounded to half precision once.
    torch.testing.assert_close(found[0], expected[0], rtol=torch.finfo(dtype).eps, atol=0.0)
    assert_equal((expected[0], *found[1:]), expected)


def test_tensors_need_not_be_contiguous():
    logp, old, _, mask = batch(50, 8)
    tensors = (logp.T, old.T, torch.randn(16)[::2], mask.T)
    check("BandPO()", tensors)


def test_the_gradient_is_scaled_by_that_of_the_loss():
    logp, old, advantages, mask = batch()
    leaf = logp.clone().requires_grad_()
    loss = loss_with_kernels("BandPO()")(leaf, old, advantages, mask).loss
    (tripled,) = torch.autograd.grad(3 * loss, leaf)
    once, _, _ = gradient(loss_with_kernels("BandPO()"), (logp, old, advantages, mask))
    torch.testing.assert_close(tripled, 3 * once)


def test_a_second_derivative_is_refused():
    logp, *rest = batch()
    leaf = logp.clone().requires_grad_()
    loss = loss_with_kernels("BandPO()")(leaf, *rest).loss
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(loss + leaf.square().sum(), leaf, create_graph=True)


@pytest.mark.parametrize("method", ["FixedClip(0.2)", "Band(KL(), 0.05)"])
@pytest.mark.parametrize("size", [69.0, 80.0, 100.0, 1e3])
def test_large_ratios_are_limited_as_without_kernels(method, size):
    new = torch.full((2, 6), -0.01)
    tensors = (new, new - size, torch.tensor([1.0, -1.0]))
    expected = gradient(policy_loss, tensors, method=method)
    found = gradient(loss_with_kernels(method), tensors)
    assert expected[0].isfinite().all()
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=0.0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=0.0)


def test_without_metrics_the_loss_is_nan_with_the_same_gradient():
    tensors = batch()
    found, loss, metrics = gradient(loss_with_kernels("BandPO()"), tensors, metrics=False)
    assert loss.isnan()
    assert metrics == {}
    torch.testing.assert_close(
        found, gradient(policy_loss, tensors, method="BandPO()")[0], rtol=1e-6, atol=0.0
    )


def test_a_schedule_has_its_value_of_each_step():
    method = Method(Band(radius=Linear(0.05, 0.001)))
    loss_of = loss_with_kernels(method)
    for progress in (0.0, 1.0):
        state = TrainingState(progress=progress)
        expected = gradient(policy_loss, batch(), method=method, state=state)
        assert_equal(gradient(loss_of, batch(), state=state), expected)


logp, old, advantages, mask = batch()
OUTSIDE = [
    ("GSPO()", {}, "ratios per sequence have no kernel"),
    ("CISPO()", {}, "the objective ClippedWeight"),
    ("Method(FixedClip(0.2), Surrogate(0.5))", {}, "the objective Surrogate"),
    ("Band(JensenShannon())", {}, "the kernels have no bounds of Band"),
    ("Loosest(FixedClip(0.2), Band())", {}, "the kernels have no bounds of Loosest"),
    ("TwoSided(FixedClip(0.2), DCPO())", {}, "the kernels have no bounds of DCPO"),
    ("BandPO()", {"weights": torch.ones(4)}, "weights is given"),
    ("BandPO()", {"logp_anchor": old}, "logp_anchor is given"),
    ("BandPO()", {"aggregation": torch.mean}, "the aggregation is a function"),
]


@pytest.mark.parametrize(("method", "settings", "reason"), OUTSIDE)
def test_other_methods_and_batches_take_the_path_without_kernels(method, settings, reason):
    loss_of = compile_loss(method, kernels=True, backend="eager")
    with pytest.warns(BandWarning, match=reason):
        found = gradient(loss_of, batch(), **settings)
    expected = gradient(compile_loss(method, backend="eager"), batch(), **settings)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    gradient(loss_of, batch(), **settings)  # without a second warning


def test_a_packed_batch_takes_the_path_without_kernels():
    loss_of = compile_loss("BandPO()", kernels=True, backend="eager")
    flat = [x.reshape(1, -1) for x in (logp, old, mask)]
    layout = Packed(cu_seqlens=torch.arange(5) * 50)
    with pytest.warns(BandWarning, match="the batch is packed"):
        found = loss_of(flat[0], flat[1], advantages, flat[2], layout=layout)
    torch.testing.assert_close(found, policy_loss(*batch(), method="BandPO()", layout=Rows()))


def test_float64_takes_the_path_without_kernels():
    loss_of = compile_loss("BandPO()", kernels=True, backend="eager")
    tensors = [x.double() if x.is_floating_point() else x for x in batch()]
    with pytest.warns(
        BandWarning, match=r"logp is of torch.float64, and kernels read float32 and half precision"
    ):
        found = loss_of(*tensors)
    torch.testing.assert_close(found, policy_loss(*tensors, method="BandPO()"))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"mask": torch.ones(4, 49)}, "mask has shape"),
        ({"logp": torch.ones(4, 50, dtype=torch.long)}, "must be a floating-point tensor"),
        ({"advantages": torch.ones(1)}, "fit neither"),
        ({"aggregation": "mean"}, "unknown aggregation"),
        ({"normalizer": -1.0}, "normalizer must be"),
        ({"aggregation": "dr_grpo"}, "needs normalizer"),
    ],
)
@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")
def test_errors_are_those_without_kernels(change, error):
    arguments = {"logp": logp, "logp_old": old, "advantages": advantages, "mask": mask} | change
    with pytest.raises(Exception, match=error):
        compile_loss("BandPO()", kernels=True, backend="eager")(**arguments)


def test_on_a_cpu_without_the_interpreter_the_loss_is_the_compiled_one(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    loss_of = compile_loss("BandPO()", kernels=True, backend="eager")
    with pytest.warns(BandWarning, match="kernels are for CUDA, and the tensors are on cpu"):
        found = gradient(loss_of, batch())
    expected = gradient(compile_loss("BandPO()", backend="eager"), batch())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("plan", "difference"),
    [
        (token_loss.plan_of(Method(FixedClip(0.3))), "clip decisions differ at"),
        (token_loss.plan_of(as_method("BandPO(dual_clip=1.01)")), "clip decisions differ at"),
    ],
)
def test_a_kernel_with_other_results_does_not_run(plan, difference, monkeypatch):
    monkeypatch.setattr(token_loss, "plan_of", lambda _: plan)
    loss_of = compile_loss("FixedClip(0.2)", kernels=True, backend="eager")
    with pytest.warns(BandWarning, match=difference):
        found = gradient(loss_of, batch())
    assert_equal(found, gradient(policy_loss, batch(), method="FixedClip(0.2)"))
    gradient(loss_of, batch())


def test_the_first_batch_of_a_run_passes():
    """The policy has not changed, and advantages of a group cancel: the loss and approx_kl are 0 up to rounding."""
    _, old, _, mask = batch(8, 300)
    advantages = torch.tensor([1.0, -1.0]).repeat(4)
    for noise in (0.0, 1e-4):
        logp = (old + noise * torch.randn(old.shape)).clamp(max=-1e-6)
        found = gradient(
            compile_loss("BandPO()", kernels=True, backend="eager"), (logp, old, advantages, mask)
        )
        expected = gradient(policy_loss, (logp, old, advantages, mask), method="BandPO()")
        torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0.0)
