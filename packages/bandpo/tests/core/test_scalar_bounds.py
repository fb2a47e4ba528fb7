"""Band's bounds with KL for one token without torch, against the core."""

import math
import random

import pytest
import torch

from bandpo import KL, Band
from bandpo._scalar_bounds import DEFAULT_RADIUS, RADII, SMALLEST_P, scalar_bounds

RARE = [SMALLEST_P, *(10.0**-k for k in (200, 100, 50, 30, 20, 15, 12, 10, 8, 6, 5, 4, 3, 2))]
COMMON = [0.02, 0.05, 0.08, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 0.999]
ALMOST_CERTAIN = [*(1 - 10.0**-k for k in (4, 5, 6, 8, 10, 12, 14, 15)), 1 - 2**-53, 1.0]
P = [*RARE, *COMMON, *ALMOST_CERTAIN]
RADIUS = [
    *(RADII[0], 1e-9, 1e-6, 1e-4, 1e-3, 0.005, 0.01, 0.03, 0.05, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 0.69, 1.0, 2.0, 5.0, 10.0, 100.0, RADII[1]),
]


def bounds_of_the_core(p, radius, max_ratio):
    bounds = Band(KL(), radius, max_ratio).bounds(torch.tensor(p, dtype=torch.float64).log())
    return [*zip(bounds.lower.tolist(), bounds.upper.tolist(), strict=True)]


@pytest.mark.parametrize("max_ratio", [1.5, 10.0, math.inf])
@pytest.mark.parametrize("radius", RADIUS)
def test_the_printed_digits_are_those_of_the_core(radius, max_ratio):
    def printed(p, lower, upper):
        return [f"{x:.4g}" for x in (p, lower, upper, p * upper)]

    expected = bounds_of_the_core(P, radius, max_ratio)
    for p, pair in zip(P, expected, strict=True):
        assert printed(p, *scalar_bounds(p, radius, max_ratio)) == printed(p, *pair)


def test_random_tokens_have_nine_digits_in_common_with_the_core():
    drawn = random.Random(5)
    for _ in range(300):
        log_odds = drawn.uniform(-25, 25)
        p = 1 / (1 + math.exp(-log_odds))
        radius = math.exp(drawn.uniform(math.log(1e-4), math.log(10)))
        (expected,) = bounds_of_the_core([p], radius, math.inf)
        assert scalar_bounds(p, radius, math.inf) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_the_default_radius_is_that_of_the_core():
    assert KL().default_radius == DEFAULT_RADIUS
