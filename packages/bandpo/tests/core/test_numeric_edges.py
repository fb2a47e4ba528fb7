"""Bounds, decisions, losses and second derivatives at the ends of what a float can hold, against 70 digits."""

import math

import mpmath as mp
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import oracle
from bandpo import (
    KL,
    Band,
    Batch,
    FDivergence,
    FixedClip,
    Method,
    Rows,
    TotalVariation,
    compile_loss,
    linear_logp,
    policy_loss,
    ratio_bounds,
)
from bandpo.core import divergences
from bandpo.core.divergences import AlphaDivergence
from bandpo.core.methods import METHODS
from bandpo.core.objectives import LogRatioPenalty, Quadratic, RolloutSurrogate, SequenceProduct
from bandpo.core.rules import Unclipped
from bandpo.core.schedules import ClipRateController, Linear, TrainingState
from bandpo.core.text import parse
from bandpo.core.token_rules import PrefixBudget
from selection import mostly_slow

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAMES = [name for name in divergences.__all__ if name not in ("Divergence", "FDivergence", "AlphaDivergence")]
EXACT = [getattr(divergences, name)() for name in NAMES]
EXACT += map(AlphaDivergence, (-8.0, -3.0, -1.0, -0.5, 0.5, 0.999, 1.5, 3.0))
TRIANGULAR = FDivergence(lambda u: (u - 1) ** 2 / (u + 1))
USERS = {
    "triangular": TRIANGULAR,
    "ReverseKL()": FDivergence(lambda u: u * torch.log(u)),
    "TotalVariation()": FDivergence(lambda u: (u - 1).abs() / 2),
}
ALL = [*EXACT, *map(AlphaDivergence, (0.0, 1.0, 2.0, 8.0)), *USERS.values()]

SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, 1e6
RADII = [SMALLEST, 1e-30, 1e-20, 1e-16, *(10.0**k for k in range(-12, 4)), 1e4, LARGEST]
# From p = 1 and the smallest number below, over p = ½, to the smallest p of float32 and of float64, and p = 0.
EDGES = [0.0, -5e-324, -1e-300, -1e-45, -1e-38, -1e-16, -1e-8, -1e-7, -1e-4, -0.01, -0.5, -0.6931, -0.6932]
EDGES += [-2.5, -10.0, -30.0, -69.0, -71.0, -87.4, -88.8, -100.0, -103.9, -104.1, -200.0, -690.8, -708.5]
EDGES += [-744.5, -746.0, -1e4, -6e4, -1e10, -1e38, -1e300, -math.inf]


def ids(value):
    if isinstance(value, FDivergence):
        return f"FDivergence[{next(key for key, divergence in USERS.items() if divergence is value)}]"
    return str(value)


def check_bounds(bounds, logp):
    """Both bounds are numbers on their side of 1, and the upper one is within the simplex."""
    lower, upper = bounds.log_lower, bounds.log_upper
    wrong = ~((lower <= 0) & (upper >= 0) & (upper <= -logp))
    assert not wrong.any(), f"at logp = {logp[wrong].tolist()}: {lower[wrong]}, {upper[wrong]}"
    assert not (upper.isinf() & ~logp.isinf()).any()
    assert bounds.lower.isfinite().all()


def in_float32(logp):
    """Return log-probabilities as `ratio_bounds` reads them."""
    return logp.to(torch.promote_types(logp.dtype, torch.float32))


@pytest.mark.parametrize("divergence", mostly_slow(ALL, 2), ids=ids)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_accepted_radius_has_bounds(divergence, dtype):
    logp = torch.tensor(EDGES, dtype=torch.float64).to(dtype).expand(len(RADII), -1)
    radius = torch.tensor(RADII, dtype=torch.float64)[:, None]
    bounds = ratio_bounds(logp, divergence, radius)
    check_bounds(bounds, in_float32(logp))
    for row in (0, 5, -1):
        alone = ratio_bounds(logp[row], divergence, RADII[row])
        assert torch.equal(alone.log_upper, bounds.log_upper[row])
        assert torch.equal(alone.log_lower, bounds.log_lower[row])


@pytest.mark.parametrize("divergence", mostly_slow(ALL, 2), ids=ids)
@settings(max_examples=5, deadline=None)
@given(
    points=st.lists(
        st.tuples(
            st.one_of(st.floats(-800, 0), st.floats(-320, 0).map(lambda x: -(10**x)), st.just(-math.inf)),
            st.floats(-37.9, 6),
        ),
        min_size=1,
        max_size=20,
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_each_accepted_radius_has_bounds_at_random_points(divergence, points, dtype):
    logps, log10_radii = zip(*points, strict=True)
    logp = torch.tensor(logps, dtype=torch.float64).to(dtype)
    radius = torch.tensor([10**x for x in log10_radii], dtype=torch.float64)
    check_bounds(ratio_bounds(logp, divergence, radius), in_float32(logp))


@pytest.mark.parametrize("radius", [1e-46, 1e-39, 1e7, 1e100])
@pytest.mark.parametrize("divergence", [KL(), divergences.JensenShannon(), TRIANGULAR], ids=ids)
def test_a_radius_outside_of_the_range_of_numbers_is_refused(divergence, radius):
    logp = torch.tensor([-1.0])
    message = r"radius must be from 1\.2e-38 to 1e\+06, got .*FixedClip\(0\.0\).*Unclipped\(\)"
    for give in (
        lambda: ratio_bounds(logp, divergence, radius),
        lambda: ratio_bounds(logp.double(), divergence, torch.full((1,), radius, dtype=torch.float64)),
        lambda: Band(divergence, radius),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            give()
        assert "\n" not in str(raised.value)


SMALL = [10.0**k for k in range(-12, -6)]


@pytest.mark.parametrize("divergence", EXACT, ids=ids)
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
def test_margins_of_small_radii_against_the_oracle(divergence, dtype, bar):
    logps = (-69.0, -30.0, -9.0, -2.5, -0.7, -0.5, -0.01, -1e-5)
    points = [(logp, radius) for k, radius in enumerate(SMALL) for logp in logps[k % 4 :: 4]]
    logp, radius = (torch.tensor(x, dtype=dtype) for x in zip(*points, strict=True))
    bounds = ratio_bounds(logp, divergence, radius)
    for at in range(len(points)):
        down, up = oracle.margins(repr(divergence), logp[at].item(), radius[at].item())
        errors = [
            float(abs(mp.expm1(bounds.log_upper[at].item()) / up - 1)),
            float(abs(-mp.expm1(bounds.log_lower[at].item()) / down - 1)),
        ]
        assert max(errors) <= bar, f"{max(errors):.1e} at logp = {logp[at]}, radius {radius[at]}"


# Log-ratios and old log-probabilities at which a ratio, its square or its product with p is too large or too small for
# float32, though the new probability is not.
FAR = [
    (old, new) for old in (-20.0, -50.0, -69.0, -95.0, -110.0, -200.0) for new in (-12.0, -4.0, -0.5, -0.01)
]
FAR += [(new, old) for old, new in FAR]
# These have bounds for each p; the others for p of at least e^−70 in float32.
EXACT_FAR = ("KL", "TotalVariation", "PearsonChi2", "NeymanChi2", "SquaredHellinger")


@pytest.mark.parametrize("divergence", [*EXACT, TRIANGULAR], ids=ids)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_decisions_on_ratios_that_overflow(divergence, dtype):
    """A ratio is outside of the trust region exactly if it is outside of the bounds."""
    old, new = (torch.tensor(x, dtype=dtype) for x in zip(*FAR, strict=True))
    for radius in (1e-6, 0.05, 0.3):
        rule = Band(divergence, radius, math.inf)
        low, high = rule.compare(new - old, old)
        bounds = rule.bounds(old)
        assert torch.equal(high, new - old > bounds.log_upper), radius
        assert torch.equal(low, new - old < bounds.log_lower), radius
        value = divergence.divergence_of_ratio(new - old, old)
        assert not value.isnan().any()
        if type(divergence).__name__ not in EXACT_FAR:
            continue
        for at, (p, q) in enumerate(FAR):
            exact = oracle.divergence_of_ratio(repr(divergence), p, mp.exp(mp.mpf(q) - mp.mpf(p)))
            assert bool(high[at] | low[at]) == (exact > radius), (p, q)


SIZES = [20.0, 44.0, 69.0, 88.0, 89.0, 1e3, 6e4, 1e30]
ADVANTAGES = (1.0, -1.0, 0.0, 1e-3, 100.0)


def moved(size, dtype, advantages=ADVANTAGES):
    """Return new and old log-probabilities that differ by at most ``size``, and advantages: a row for each of these."""
    steps = [[size] * 4, [-size] * 4, [size, -size, 0.1, 0.0]]
    log_ratio = torch.tensor(steps, dtype=torch.float64).repeat(len(advantages), 1)
    new = -0.01 + log_ratio.clamp(max=0)
    return new.to(dtype), (new - log_ratio).to(dtype), torch.tensor(advantages).repeat_interleave(len(steps))


def check_loss(method, new, old, advantages, **settings):
    leaf = new.clone().requires_grad_()
    loss, metrics = policy_loss(leaf, old, advantages, method=method, **settings)
    loss.backward()
    assert loss.isfinite(), loss
    for name, value in metrics.items():
        assert value.isfinite(), name
    gradient = leaf.grad
    if new.dtype == torch.float16:
        # Its largest number is 65,504. The gradient of a loss in float32 is the number that has to fit.
        wide = new.float().requires_grad_()
        policy_loss(wide, old, advantages, method=method, **settings).loss.backward()
        assert torch.equal(wide.grad.half(), gradient)
        gradient = wide.grad
    assert gradient.isfinite().all(), gradient


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_each_method_is_finite_at_each_ratio(name, dtype):
    method = METHODS[name].method()
    for size in SIZES:
        if size > torch.finfo(dtype).max:
            continue
        new, old, advantages = moved(size, dtype)
        check_loss(method, new, old, advantages)
        # The rows alone too, as one row's tokens and means could hide what another one's do.
        if size == 69.0:
            for row in range(len(new)):
                check_loss(method, new[[row]], old[[row]], advantages[[row]])


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=5, deadline=None)
@given(
    rows=st.lists(
        st.lists(
            st.tuples(st.floats(-110, 110), st.floats(-1, 0), st.floats(-10, 10)), min_size=5, max_size=5
        ),
        min_size=1,
        max_size=3,
    ),
    weight=st.sampled_from([None, 0.0, 2.0, 20.0]),
)
@example(
    rows=[[(69.0, -0.5, 1.0), (-69.0, -0.5, -1.0), (69.0, 0.0, -1.0), (-69.0, 0.0, 1.0), (0.0, 0.0, 0.0)]],
    weight=None,
)
def test_each_method_is_finite_at_random_ratios(name, rows, weight):
    log_ratio, largest, advantages = torch.tensor(rows).unbind(-1)
    new = largest + log_ratio.clamp(max=0)
    extra = {} if weight is None else {"weights": torch.full_like(new, weight)}
    check_loss(
        METHODS[name].method(), new, largest - log_ratio.clamp(min=0), advantages, layout=Rows(), **extra
    )


@pytest.mark.parametrize(
    "method",
    [
        Method(Band(KL(), 0.05), Quadratic()),
        Method(Band(TotalVariation(), 1e-30), Quadratic()),
        Method(FixedClip(0.0), Quadratic()),
        Method(FixedClip(0.2), LogRatioPenalty(1e3)),
        Method(Unclipped(), SequenceProduct()),
        Method(FixedClip(0.2), RolloutSurrogate(math.inf)),
        Method(PrefixBudget(Band(KL(), 0.05))),
        Method(PrefixBudget(Band(divergences.PearsonChi2(), 0.05))),
        Method(FixedClip(0.2), level="sequence"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_other_combinations_are_finite(method, dtype):
    for size in SIZES:
        tensors = moved(size, dtype)
        check_loss(method, *tensors)
        check_loss(method, *tensors, weights=torch.full((len(tensors[0]),), 2.0))


@pytest.mark.parametrize("size", [44.0, 69.0, 72.0])
def test_a_large_ratio_is_not_changed(size):
    """PPO's gradient of a token with A < 0 is its ratio, up to the largest number that a sum over tokens can hold."""
    new = torch.full((1, 4), -0.01)
    old = new - size
    leaf = new.clone().requires_grad_()
    loss, metrics = policy_loss(leaf, old, -torch.ones(1), method="PPO()")
    loss.backward()
    exact = float(mp.exp(mp.mpf(new[0, 0].item()) - mp.mpf(old[0, 0].item())))
    assert loss.item() == pytest.approx(exact, rel=1e-5)
    assert metrics["ratio_mean"].item() == pytest.approx(exact, rel=1e-5)
    assert leaf.grad.sum().item() == pytest.approx(exact, rel=1e-5)


def test_advantages_in_float32_leave_a_float64_gradient_exact():
    old = torch.tensor([[-3.0, -2.0]], dtype=torch.float64)
    new = (old + math.pi / 31).requires_grad_()
    policy_loss(new, old, torch.tensor([1.0]), method="GPG()").loss.backward()
    assert new.grad.tolist() == [[-0.5, -0.5]]
    new = new.detach().requires_grad_()
    policy_loss(new, old, torch.tensor([-1.0]), method=Unclipped()).loss.backward()
    exact = math.exp(math.pi / 31) / 2
    assert new.grad[0].tolist() == pytest.approx([exact, exact], rel=1e-14)


@settings(max_examples=40, deadline=None)
@given(
    start=st.floats(-37.9, 6).map(lambda x: 10**x),
    end=st.floats(-37.9, 6).map(lambda x: 10**x),
    progress=st.floats(0, 1),
    gain=st.one_of(st.floats(1e-3, 1e308), st.floats(-1e308, -1e-3)),
    measured=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 5e-324, 1e300, math.inf, math.nan])),
)
@example(start=0.05, end=0.05, progress=0.0, gain=1e4, measured=1.0)
def test_each_radius_of_a_schedule_is_within_its_range(start, end, progress, gain, measured):
    smallest, largest = sorted((start, end))
    linear = Band(KL(), Linear(start, end)).resolve(TrainingState(progress=progress))
    assert smallest * (1 - 1e-9) <= linear.radius <= largest * (1 + 1e-9)
    controller = ClipRateController(
        target=0.01, start=smallest, gain=gain, min_radius=smallest, max_radius=largest
    )
    radius = controller.update(smallest, measured)
    assert smallest <= radius <= largest
    for rule in (
        linear,
        Band(KL(), controller).resolve(TrainingState(controller_state={repr(controller): radius})),
    ):
        check_bounds(rule.bounds(torch.tensor([-1e-7, -0.5, -30.0])), torch.tensor([-1e-7, -0.5, -30.0]))


@pytest.mark.parametrize(
    "radius", ["Linear(0.05, 1e-40)", "Linear(1e7, 0.05)", "ClipRateController(0.01, 0.05, 0.1, 1e-40, 1.0)"]
)
def test_a_schedule_that_leaves_the_range_of_radii_is_refused(radius):
    with pytest.raises(ValueError, match=r"radius must be from 1\.2e-38 to 1e\+06"):
        parse(f"Band(KL(), {radius})")


REFUSAL = "has no second derivative.*without create_graph=True"


def policy(logp):
    return policy_loss(logp, torch.tensor([[-1.0, -2.0]]), torch.tensor([1.0])).loss


@pytest.mark.parametrize(
    "loss",
    [
        policy,
        lambda logp: policy(logp) + logp.square().sum(),
        lambda logp: policy(logp) ** 2,
        lambda logp: policy(logp * logp.abs()),
    ],
    ids=["alone", "added", "squared", "of a function"],
)
def test_a_second_derivative_of_the_loss_is_refused(loss):
    """It would miss how the weight depends on the log-probability."""
    logp = torch.tensor([[-1.05, -1.95]], requires_grad=True)
    with pytest.raises(RuntimeError, match=REFUSAL) as raised:
        torch.autograd.grad(loss(logp), logp, create_graph=True)
    assert "\n" not in str(raised.value)
    with pytest.raises(RuntimeError, match=REFUSAL):
        loss(logp).backward(create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSAL):
        torch.autograd.functional.hessian(loss, logp.detach())
    assert torch.autograd.grad(loss(logp), logp)[0].isfinite().all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_no_second_derivative(reentrant):
    logp = torch.tensor([[-1.05, -1.95]], requires_grad=True)
    checkpoint(policy, logp, use_reentrant=reentrant).backward()
    assert torch.equal(logp.grad, torch.autograd.grad(policy(logp), logp)[0])


def test_the_remedy_of_the_refusal_gives_the_second_derivative_of_the_other_loss():
    """The gradient of the policy loss in a call of its own, and that of the other loss with its graph."""
    logp = torch.tensor([[-1.05, -1.95]], requires_grad=True)
    (first,) = torch.autograd.grad(policy(logp), logp)
    (other,) = torch.autograd.grad(logp.pow(3).sum(), logp, create_graph=True)
    (second,) = torch.autograd.grad((first + other).sum(), logp)
    assert second.tolist() == [pytest.approx([-6.3, -11.7])]


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "aot_eager", "inductor")]
)
def test_a_second_derivative_of_the_compiled_loss_is_refused(backend):
    loss_of = compile_loss(backend=backend)
    logp = torch.tensor([[-1.05, -1.95]], requires_grad=True)

    def loss():
        return loss_of(logp, torch.tensor([[-1.0, -2.0]]), torch.tensor([1.0])).loss

    for value in (loss(), loss() + logp.square().sum()):
        with pytest.raises(RuntimeError, match=REFUSAL):
            torch.autograd.grad(value, logp, create_graph=True)
    assert torch.autograd.grad(loss(), logp)[0].isfinite().all()


@pytest.mark.parametrize("entropy", [False, True])
def test_a_second_derivative_of_linear_log_probabilities_is_refused(entropy):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, generator=generator, requires_grad=True)
    weight = torch.randn(7, 4, generator=generator, requires_grad=True)
    result = linear_logp(hidden, weight, torch.tensor([0, 3, 6]), entropy=entropy)
    values = list(result) if isinstance(result, tuple) else [result]
    total = sum(value.sum() for value in values if value is not None and value.requires_grad)
    for value in (total, total + hidden.square().sum()):
        with pytest.raises(RuntimeError, match=REFUSAL):
            torch.autograd.grad(value, (hidden, weight), create_graph=True, retain_graph=True)
    assert torch.autograd.grad(total, hidden)[0].isfinite().all()


def test_the_largest_numbers_are_those_of_the_documentation():
    far = Batch.read(torch.tensor([[-1.0]]), torch.tensor([[-300.0]]), torch.ones(1)).tokens(FixedClip())
    assert far.ratio.item() == pytest.approx(2.0**104)
