import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from bandpo import (
    KL,
    Band,
    Batch,
    ClipRule,
    FixedClip,
    Loosest,
    Method,
    TotalVariation,
    TwoSided,
    Unclipped,
    parse,
    policy_loss,
)
from bandpo.audit.metrics import Audit
from bandpo.core.rules import Tightest, bands
from bandpo.core.schedules import ClipRateController, Linear, TrainingState
from bandpo.integrations._adapt import read_method

sizes = st.floats(1e-4, 1.0)
shares = st.floats(0.0, 1.0)
RADII = [
    Linear(0.05, 0.01),
    ClipRateController(0.01, 0.05),
    ClipRateController(1e-3, 0.05, gain=-0.3, min_radius=0.01, max_radius=0.06),
]


def tokens(seed=0, shape=(6, 9)):
    """Old and new log-probabilities of a policy that has moved, and advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    logp_old = torch.randn(shape, generator=generator).abs().neg() * 2
    logp = (logp_old + 0.5 * torch.randn(shape, generator=generator)).clamp(max=-0.01)
    return logp, logp_old, torch.randn(shape[:1], generator=generator)


def gradient(clip, level="token"):
    logp, logp_old, advantages = tokens()
    logp.requires_grad_()
    policy_loss(logp, logp_old, advantages, method=Method(clip, level=level)).loss.backward()
    return logp.grad


@pytest.mark.parametrize(
    ("radius", "progress", "expected"),
    [
        (Linear(0.05, 0.01), 0.0, 0.05),
        (Linear(0.05, 0.01), 0.25, 0.04),
        (Linear(0.05, 0.01), 1.0, 0.01),
        (Linear(0.01, 0.03), 0.5, 0.02),
    ],
)
def test_schedules_by_hand(radius, progress, expected):
    assert radius.resolve(TrainingState(progress=progress)) == pytest.approx(expected, rel=1e-14)
    assert Band(KL(), radius).resolve(TrainingState(progress=progress)) == Band(
        KL(), radius.resolve(TrainingState(progress=progress))
    )


@given(start=sizes, end=sizes, a=shares, b=shares)
def test_schedules_are_bounded_and_monotone(start, end, a, b):
    radius = Linear(start, end)
    low, high = radius.range
    first, second = (radius.resolve(TrainingState(progress=x)) for x in sorted((a, b)))
    for value in (first, second):
        assert low * (1 - 1e-12) <= value <= high * (1 + 1e-12)
    assert (second - first) * math.copysign(1, end - start) >= -1e-15


@pytest.mark.parametrize("radius", RADII, ids=repr)
def test_text_reads_back(radius):
    for rule in (
        Band(KL(), radius),
        TwoSided(FixedClip(), Tightest(Band(TotalVariation(), radius, math.inf), FixedClip(1.0, 3.0))),
    ):
        assert parse(repr(rule), ClipRule) == rule
        assert hash(parse(repr(rule), ClipRule)) == hash(rule)


def test_short_text():
    assert parse("Band(KL, Linear(0.05, 0.01))", ClipRule) == Band(KL(), Linear(0.05, 0.01))
    assert parse("Band(radius=ClipRateController(1e-3, 0.05))", ClipRule) == Band(
        KL(), ClipRateController(1e-3, 0.05)
    )
    for text, message in (
        ("Band(KL(), Liner(1, 2))", "did you mean Linear"),
        ("Band(KL(), Controller(1, 2))", "unknown name 'Controller'"),
        ("Band(KL(), Linear(0.05))", "missing 1 required"),
        ("Linear(0.05, 0.01)", "is not a clip rule"),
        ("Band(KL(), KL())", r"radius must be a finite number above 0.* got KL\(\)"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(text, ClipRule)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    "radius",
    [
        Linear(0.01, 0.01),
        ClipRateController(0.1, 0.01),
        torch.full((6, 9), 0.01),
        torch.full((6, 1), 0.01),
        torch.tensor(0.01, dtype=torch.float64),
    ],
    ids=lambda r: repr(r) if not isinstance(r, torch.Tensor) else f"tensor{tuple(r.shape)}",
)
def test_a_constant_in_any_form_is_the_constant(radius, level):
    moment = TrainingState(progress=0.3, controller_state={})
    clip = TwoSided(Band(KL(), radius), Tightest(Band(KL(), radius), FixedClip(1.0, 1.0))).resolve(moment)
    fixed = TwoSided(Band(KL(), 0.01), Tightest(Band(KL(), 0.01), FixedClip(1.0, 1.0)))
    expected = gradient(fixed, level=level)
    assert torch.equal(gradient(clip, level=level), expected)
    assert (expected == 0).any()
    assert (expected != 0).any()
    logp_old = tokens()[1]
    torch.testing.assert_close(clip.bounds(logp_old).log_upper, fixed.bounds(logp_old).log_upper)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 99), per=st.sampled_from(["token", "sequence"]))
def test_a_tensor_is_one_band_per_token_or_sequence(seed, per):
    logp, logp_old, _ = tokens(seed, (3, 4))
    generator = torch.Generator().manual_seed(seed)
    radius = torch.rand((3, 4) if per == "token" else (3, 1), generator=generator) / 5 + 1e-3
    band = Band(KL(), radius)
    bounds, applied = band.bounds(logp_old), band.clip_mask(logp - logp_old, logp_old)
    for place, one in zip(
        torch.cartesian_prod(torch.arange(3), torch.arange(4)), radius.expand(3, 4).flatten(), strict=True
    ):
        i, j = place.tolist()
        alone = Band(KL(), one.item())
        torch.testing.assert_close(bounds.log_upper[i, j], alone.bounds(logp_old[i, j]).log_upper)
        single = alone.clip_mask((logp - logp_old)[i, j], logp_old[i, j])
        assert (applied.clipped_low[i, j], applied.clipped_high[i, j]) == (
            single.clipped_low,
            single.clipped_high,
        )


def test_rules_within_rules():
    controller = ClipRateController(0.01, 0.1)
    rule = Tightest(TwoSided(Band(KL(), Linear(0.04, 0.02)), Band(KL(), controller)), FixedClip(1.0, 3.0))
    assert list(bands(rule)) == ["a.lower", "a.upper"]
    later = rule.resolve(TrainingState(progress=0.5), strict=False)
    assert later == Tightest(TwoSided(Band(KL(), 0.03), Band(KL(), controller)), FixedClip(1.0, 3.0))
    with pytest.raises(ValueError, match="depends on the training state"):
        rule.resolve(TrainingState(progress=0.5))
    both = later.resolve(TrainingState(controller_state={}))
    assert both == Tightest(TwoSided(Band(KL(), 0.03), Band(KL(), 0.1)), FixedClip(1.0, 3.0))
    for fixed in (
        Band(),
        Unclipped(),
        Loosest(Band(), FixedClip()),
        Tightest(Band(), Band(KL(), torch.ones(6, 9))),
    ):
        assert fixed.resolve(TrainingState(progress=0.5, controller_state={})) is fixed


@pytest.mark.parametrize(
    ("radius", "needs"),
    [(Linear(1, 2), "progress"), (ClipRateController(1, 2), "controller_state")],
    ids=repr,
)
def test_a_radius_that_is_not_known_yet_refuses(radius, needs):
    logp, logp_old, advantages = tokens()
    rule = Loosest(FixedClip(), Band(KL(), radius)).resolve(TrainingState(), strict=False)
    for use in (
        lambda: rule.bounds(logp_old),
        lambda: rule.clip_mask(logp - logp_old, logp_old),
        lambda: policy_loss(logp, logp_old, advantages, method=rule),
        lambda: Audit.from_batch(Batch.read(logp, logp_old, advantages), method=rule),
    ):
        with pytest.raises(
            ValueError,
            match=rf"depends on the training state: pass state=TrainingState\({needs}=",
        ):
            use()
    with pytest.raises(
        ValueError, match=f"depends on {needs}, which this framework does not pass to its loss"
    ):
        read_method(method=repr(rule))


@pytest.mark.slow
@pytest.mark.parametrize("form", [float, torch.tensor], ids=["number", "tensor"])
def test_a_radius_that_changes_does_not_recompile_for_ever(form):
    logp, logp_old, advantages = tokens()
    compiled = torch.compile(policy_loss, backend=(counter := CompileCounter()))
    for k in range(12):
        clip = Band(KL(), form(0.02 + 0.01 * k))
        loss = compiled(logp.clone().requires_grad_(), logp_old, advantages, method=clip).loss
        torch.testing.assert_close(loss, policy_loss(logp, logp_old, advantages, method=clip).loss)
    assert counter.frame_count <= 2


def test_equality_and_text_of_a_tensor():
    radius = torch.tensor([0.1, 0.2])
    band = Band(KL(), radius)
    assert band == Band(KL(), radius)
    assert band != Band(KL(), radius.clone())
    assert band != Band(KL(), 0.1)
    assert Band(KL(), 0.1) != band
    assert band != "band"
    assert len({band, Band(KL(), radius), Band()}) == 2
    assert "tensor([0.1000, 0.2000])" in repr(band)
    with pytest.raises(ValueError, match="unknown name 'tensor'"):
        parse(repr(band), ClipRule)


# Controllers


@pytest.mark.parametrize(
    ("controller", "measured", "expected"),
    [
        (
            ClipRateController(0.01, 0.05),
            0.03,
            0.05 * math.exp(0.05),
        ),  # (0.03 − 0.01)/0.04 = ½, of a gain of 0.1
        (ClipRateController(0.01, 0.05), 0.0, 0.05 * math.exp(-0.1)),
        (ClipRateController(0.01, 0.05, gain=-0.4), 0.03, 0.05 * math.exp(-0.2)),
        (ClipRateController(0.5, 0.05), 0.1, 0.05 * math.exp(-0.1 * 2 / 3)),
        (ClipRateController(0.5, 0.05, gain=-0.1), 0.1, 0.05 * math.exp(0.1 * 2 / 3)),
        (ClipRateController(0.01, 0.05), 0.01, 0.05),
        (ClipRateController(0.01, 0.05), math.nan, 0.05),
        (ClipRateController(0.01, 0.05), math.inf, 0.05),
        (ClipRateController(0.01, 0.05, min_radius=0.049), 0.0, 0.049),
        (ClipRateController(0.01, 0.05, max_radius=0.051), 9.0, 0.051),
    ],
)
def test_updates_by_hand(controller, measured, expected):
    assert controller.update(0.05, measured) == pytest.approx(expected, rel=1e-14)


@given(
    gain=st.sampled_from([0.1, -0.1]),
    target=sizes,
    radius=sizes,
    a=st.floats(0, 1e6),
    b=st.floats(0, 1e6),
)
def test_updates_are_bounded_and_monotone(gain, target, radius, a, b):
    controller = ClipRateController(target, 0.05, gain, min_radius=1e-5, max_radius=2.0)
    less, more = (controller.update(radius, x) for x in sorted((a, b)))
    for after in (less, more):
        assert 1e-5 <= after <= 2.0
        assert abs(math.log(after / radius)) <= 0.1 + 1e-12
    assert (more >= less * (1 - 1e-12)) if gain > 0 else (more <= less * (1 + 1e-12))
    assert controller.update(radius, target) == radius


def test_a_controller_holds_the_clip_rate():
    """The loop closed over real bands: random moves of a policy, clipped at the rate asked for."""
    rule, controller_state, rates = (
        Band(KL(), ClipRateController(0.15, 0.5, gain=0.3, min_radius=1e-3, max_radius=1.0)),
        {},
        [],
    )
    for batch in range(80):
        logp, logp_old, advantages = tokens(batch, (40, 20))
        metrics = policy_loss(
            logp, logp_old, advantages, method=rule.resolve(TrainingState(controller_state=controller_state))
        ).metrics
        controller_state = rule.update_controllers(controller_state, metrics)
        rates.append(float(metrics["clip_high"] + metrics["clip_low"]))
    assert rates[0] < 0.05
    assert sum(rates[-30:]) / 30 == pytest.approx(0.15, rel=0.1)
    assert list(controller_state) == [repr(rule.radius)]


@pytest.mark.parametrize(
    ("gain", "rate"),
    [(0.3, lambda radius: 0.002 / radius), (-0.3, lambda radius: radius**2)],
    ids=["falls with the radius", "rises with the radius"],
)
def test_the_sign_of_the_gain_is_the_direction(gain, rate):
    def metrics(radius):
        return {"clip_high": rate(radius), "clip_low": 0.0}

    controller = ClipRateController(0.01, 0.15, gain=gain)
    rule, controller_state = TwoSided(FixedClip(), Band(KL(), controller)), {}
    for _ in range(200):
        controller_state = rule.update_controllers(
            controller_state,
            metrics(rule.resolve(TrainingState(controller_state=controller_state)).upper.radius),
        )
    assert controller.measured(metrics(controller_state[repr(controller)])) == pytest.approx(
        controller.target, rel=1e-3
    )


def test_two_controllers_in_one_rule():
    rule = TwoSided(
        Band(KL(), ClipRateController(0.01, 0.05, gain=-0.1)), Band(KL(), ClipRateController(0.01, 0.1))
    )
    controller_state = rule.update_controllers({}, {"clip_high": 0.03, "clip_low": 0.0})
    later = rule.resolve(TrainingState(controller_state=controller_state))
    assert later.lower.radius == pytest.approx(0.05 * math.exp(-0.05))
    assert later.upper.radius == pytest.approx(0.1 * math.exp(0.05))
    assert Band().update_controllers({}, {}) == {}
    with pytest.raises(ValueError, match="measures 'clip_low', which the metrics lack"):
        rule.update_controllers({}, {"clip_high": 0.1})


def test_the_audit_measures_what_controllers_need():
    logp, logp_old, advantages = tokens()
    rule = Band(KL(), ClipRateController(0.3, 0.05))
    audit = Audit.from_batch(
        Batch.read(logp, logp_old, advantages), method=rule.resolve(TrainingState(controller_state={}))
    )
    assert rule.update_controllers({}, audit.without_counterfactuals.metrics()) == rule.update_controllers(
        {}, audit.metrics()
    )
    assert "if/Band/clip_high" not in audit.without_counterfactuals.metrics()
    other = Audit.from_batch(Batch.read(logp, logp_old, advantages), method=Band(), counterfactuals={})
    both = (audit.without_counterfactuals + other).metrics()
    assert both["tokens"] == 2 * audit.metrics()["tokens"]
    assert both["clip_high"] == pytest.approx(other.metrics()["clip_high"])


def test_the_share_of_a_radius_that_differs_by_token():
    logp, logp_old, advantages = tokens()
    rule = Band(KL(), 0.1 - 0.08 * logp_old.exp())
    share = KL().divergence_of_ratio(logp - logp_old, logp_old) / (0.1 - 0.08 * logp_old.exp())
    audited = Audit.from_batch(Batch.read(logp, logp_old, advantages), method=rule).metrics()
    assert audited["radius_used"] == pytest.approx(share.mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Band(KL(), Linear(0.0, 0.1)), ValueError, "radius must be a finite number above 0, got 0.0"),
        (lambda: Linear(0.1, math.inf), ValueError, "end must be a finite number, got inf"),
        (lambda: ClipRateController(0.0, 0.05), ValueError, "target must be"),
        (
            lambda: ClipRateController(0.1, 0.05, min_radius=0.1),
            ValueError,
            r"between min_radius=0.1 and max_radius=0.5",
        ),
        (
            lambda: ClipRateController(0.1, 0.05, gain=0.0),
            ValueError,
            "gain must be a finite number other than 0, got 0.0",
        ),
        (
            lambda: ClipRateController(0.1, 0.05).update(0.05, -0.1),
            ValueError,
            "never negative, but got -0.1",
        ),
        (lambda: TrainingState(progress=1.5), ValueError, r"progress must be in \[0, 1\].*got 1.5"),
        (lambda: Band(KL(), torch.tensor([1, 2])), TypeError, "radius must be a floating-point tensor"),
        (lambda: Band(KL(), torch.tensor([0.1, 0.0])).bounds(-torch.ones(2)), ValueError, "finite and above 0"),
        (lambda: Band(KL(), torch.ones(3)).clip_mask(torch.zeros(2), -torch.ones(2)), ValueError, "does not broadcast"),
    ],
)  # fmt: skip
def test_refuses_bad_settings(make, error, message):
    with pytest.raises(error, match=message):
        make()
