import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bandpo import KL, Band, FDivergence, FixedClip, TotalVariation, Unclipped
from bandpo.core.divergences import AlphaDivergence, JensenShannon, PearsonChi2, ReverseKL

BANDS = [Band(KL(), 0.05), Band(TotalVariation(), 0.1), Band(PearsonChi2(), 0.1, max_ratio=math.inf)]

# Divergences whose constraint is evaluated from f alone.
GENERIC = [JensenShannon(), ReverseKL(), AlphaDivergence(3.0), FDivergence(lambda u: (u - 1) ** 2 / (u + 1))]


@pytest.mark.parametrize(
    "band", [*BANDS, *map(Band, GENERIC)], ids=lambda band: type(band.divergence).__name__
)
@settings(max_examples=10, deadline=None)
@given(points=st.lists(st.tuples(st.floats(-30, -1e-4), st.floats(-3, 3)), min_size=20, max_size=20))
def test_membership_is_the_bounds(band, points):
    """`clip_mask` never solves; it must agree with the solved interval away from its very edge."""
    logp, position = torch.tensor(points, dtype=torch.float64).T
    bounds = band.bounds(logp)
    edge = torch.where(position > 0, bounds.log_upper, bounds.log_lower.clamp(min=-50))
    log_ratio = torch.minimum(edge * abs(position), -logp)  # no further than the simplex
    found = band.clip_mask(log_ratio, logp)
    # By rounding KL's upper bound can coincide with the simplex edge, which it never reaches.
    clear = abs(log_ratio - edge) > 1e-9 * abs(edge)
    assert torch.equal(found.clipped_high[clear], (log_ratio > bounds.log_upper)[clear])
    assert torch.equal(found.clipped_low[clear], (log_ratio < bounds.log_lower)[clear])


@pytest.mark.parametrize("band", BANDS, ids=repr)
def test_membership_at_the_ends_of_probability(band):
    logp = torch.tensor([0.0, -1e-8, -90.0])
    assert not any(side.any() for side in band.clip_mask(torch.zeros(3), logp))
    assert band.clip_mask(torch.tensor([-3.0, -3.0, 80.0]), logp).clipped_low.tolist() == [True, True, False]
    assert band.clip_mask(torch.tensor([-3.0, -3.0, 89.0]), logp).clipped_high.tolist() == [
        False,
        False,
        True,
    ]


def test_the_cap_bounds_rare_tokens_only():
    logp = torch.tensor([1e-6, 0.5]).log()
    assert Band(max_ratio=10.0).bounds(logp).upper.tolist() == [
        pytest.approx(10),
        pytest.approx(1.308, abs=1e-3),
    ]
    assert Band(max_ratio=10.0).clip_mask(
        torch.tensor([11.0, 9.0]).log(), logp[:1].expand(2)
    ).clipped_high.tolist() == [True, False]


def test_a_ratio_on_the_bound_is_inside():
    half = torch.tensor([0.5], dtype=torch.float64).log()
    capped = Band(KL(), 5.0, max_ratio=1.5).clip_mask(torch.full_like(half, math.log(1.5)), half)
    assert not capped.clipped_high.any()
    ratio = torch.tensor([0.5, 1.5], dtype=torch.float64)
    radius = TotalVariation().divergence_of_ratio(ratio.log(), half.expand(2))  # 0.25, as it is rounded
    on = Band(TotalVariation(), radius).clip_mask(ratio.log(), half.expand(2))
    assert not (on.clipped_low | on.clipped_high).any()


def test_fixed_clip_is_ppo():
    clip, logp = FixedClip(0.2, 0.28), torch.tensor([-1.0, -9.0, -0.1])
    assert clip.bounds(logp).lower.tolist() == [pytest.approx(0.8)] * 3
    assert clip.bounds(logp).upper.tolist() == [pytest.approx(1.28)] * 3
    ratio = torch.tensor([0.5, 1.0, 2.0])
    found = clip.clip_mask(ratio.log(), logp)
    assert (found.clipped_low.tolist(), found.clipped_high.tolist()) == (
        [True, False, False],
        [False, False, True],
    )


def test_unclipped_lets_everything_pass():
    log_ratio = torch.tensor([-80.0, 0.0, 80.0])
    found = Unclipped().clip_mask(log_ratio, torch.full((3,), -90.0))
    assert not (found.clipped_low | found.clipped_high).any()


def test_defaults_belong_to_the_divergence():
    assert Band() == Band(KL(), 0.05, 10.0)
    assert Band(TotalVariation()).radius == TotalVariation().default_radius


def test_a_subclass_is_another_rule():
    class Mine(Band):
        pass

    assert Mine() == Mine()
    assert Mine() != Band()
    assert Band() != Mine()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Band(KL(), -1.0), "radius must be a finite number above 0, got -1.0"),
        (lambda: Band(KL(), math.nan), "radius must be"),
        (lambda: Band(max_ratio=1.0), "max_ratio must be above 1"),
        (lambda: FixedClip(1.2), r"low must be in \[0, 1\]"),
        (lambda: FixedClip(0.2, math.nan), "high must be at least 0"),
    ],
)
def test_refuses_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_refuses_a_divergence_by_name():
    for wrong in ("kl", 0.05):
        with pytest.raises(
            TypeError, match=rf"first argument is the divergence, got {wrong!r}; write Band\(KL\(\), 0.05\)"
        ):
            Band(wrong)


@pytest.mark.parametrize(
    "divergence", [KL(), TotalVariation(), PearsonChi2(), *GENERIC], ids=lambda d: type(d).__name__
)
def test_a_ratio_beyond_the_simplex_is_above(divergence):
    """Rounding alone leads there; the constraint is then at least what it is at the edge."""
    rule = Band(divergence, max_ratio=math.inf)
    assert rule.clip_mask(torch.tensor([3.0]).log(), torch.tensor([0.5]).log()).clipped_high.all()


def test_the_narrowest_settings():
    assert Band(max_ratio=1.5).bounds(torch.tensor([0.01]).log()).upper.item() == pytest.approx(1.5)
    still = FixedClip(0.0, 0.0).clip_mask(torch.tensor([-1e-3, 0.0, 1e-3]), torch.full((3,), -1.0))
    assert (still.clipped_low.tolist(), still.clipped_high.tolist()) == (
        [True, False, False],
        [False, False, True],
    )


@pytest.mark.parametrize("rule", [Band(), FixedClip()], ids=repr)
def test_bad_log_probabilities_are_named(rule):
    for read in (lambda logp: rule.clip_mask(torch.zeros(1), logp), rule.bounds):
        with pytest.raises(ValueError, match="logp_old holds nan"):
            read(torch.tensor([math.nan]))
