import math

import pytest
import torch

from bandpo import DCPO, FixedClip


def test_numbers_worked_by_hand():
    """At p = 0.8: 4·0.16/0.8 = 0.8, so lower = ½ + ½·√0.2; 4·0.2/0.8 = 1, so upper = ½ + ½·√2."""
    bounds = DCPO().bounds(torch.tensor([0.8], dtype=torch.float64).log())
    assert bounds.lower.item() == pytest.approx(0.5 + 0.5 * math.sqrt(0.2), rel=1e-12)
    assert bounds.upper.item() == pytest.approx(0.5 + 0.5 * math.sqrt(2), rel=1e-12)
    assert (bounds.upper * 0.8).item() == pytest.approx(0.9657, abs=1e-4)  # inside the simplex …
    common = DCPO().bounds(torch.tensor([0.9], dtype=torch.float64).log())
    assert common.upper.item() * 0.9 > 1  # … and outside it at p = 0.9, as the paper's formula has it


def test_both_sides_solve_the_papers_inequality():
    p = torch.logspace(-6, 0, 100, dtype=torch.float64)
    bounds = DCPO(max_ratio=math.inf).bounds(p.log())
    torch.testing.assert_close((bounds.upper - 1) * bounds.upper * p, torch.full_like(p, 0.2))
    inner = p > 4 * 0.16
    torch.testing.assert_close(
        ((1 - bounds.lower) * bounds.lower * p)[inner], torch.full_like(p, 0.16)[inner]
    )
    assert (bounds.lower[~inner] == 0.5).all()


def test_the_ends():
    logp = torch.tensor([-math.inf, -90.0, -200.0, 0.0])
    assert DCPO().bounds(logp).upper[:3].tolist() == [pytest.approx(10)] * 3
    assert DCPO(max_ratio=math.inf).bounds(logp).log_upper[1].item() == pytest.approx(
        (math.log(0.2) + 90) / 2, rel=1e-6
    )
    assert DCPO().bounds(logp).lower.tolist() == [0.5] * 3 + [pytest.approx(0.5 + 0.5 * math.sqrt(1 - 0.64))]
    nothing = DCPO(0.0, 0.0).bounds(logp)
    assert (nothing.log_lower.tolist(), nothing.log_upper.tolist()) == ([0.0] * 4, [0.0] * 4)


def test_no_probability_has_no_bound():
    """A rare token's bounds without a cap; and none, on either side, where a bad value was not read."""
    uncapped = DCPO(max_ratio=math.inf).bounds(torch.tensor([-math.inf]))
    assert (uncapped.lower.item(), uncapped.upper.item()) == (0.5, math.inf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bandpo.core._checks.values_can_be_read", lambda x: False)
        bounds = DCPO().bounds(torch.tensor([math.nan, 0.7, -1.0]))
    assert bounds.log_lower.isnan().tolist() == [True, True, False]
    assert bounds.log_upper.isnan().tolist() == [True, True, False]


def test_unbounded_positive_is_a_fixed_clip():
    log_ratio = torch.tensor([math.log(1e6), math.log(0.7)])
    clipped = FixedClip(0.2, math.inf).clip_mask(log_ratio, torch.full((2,), -20.0))
    assert (clipped.clipped_high.tolist(), clipped.clipped_low.tolist()) == ([False, False], [False, True])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DCPO(low=-0.1), "low must be a finite number of at least 0, got -0.1"),
        (lambda: DCPO(high=math.nan), "high must be"),
        (lambda: DCPO(max_ratio=1.0), "max_ratio must be above 1"),
    ],
)
def test_refuses_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()
