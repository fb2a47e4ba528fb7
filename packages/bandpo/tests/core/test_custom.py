"""Tests of the functions that `FDivergence` accepts and of its errors; its bounds are tested in test_bounds."""

import math

import pytest
import torch

from bandpo import KL, FDivergence
from bandpo.core.divergences import AlphaDivergence


def triangular(u):
    return (u - 1) ** 2 / (u + 1)


@pytest.mark.parametrize(
    ("f", "error", "message"),
    [
        (lambda u: u**2, ValueError, r"f\(1\) must be 0, got 1; subtract it from f"),
        (lambda u: -triangular(u), ValueError, "f must be convex, but its slope falls around u = "),
        (lambda u: torch.sin(3 * (u - 1)), ValueError, "f must be convex"),
        (lambda u: 3 * (u - 1), ValueError, "f is linear around u = 1"),
        (
            lambda u: torch.where(u < 0.5, math.nan, triangular(u)),
            ValueError,
            "must be finite for u > 0, got f",
        ),
        (lambda u: triangular(u).sum(), TypeError, "f must map a tensor to one of equal shape"),
    ],
)
def test_refuses_what_is_no_divergence(f, error, message):
    with pytest.raises(error, match=message):
        FDivergence(f)


def test_refuses_a_derivative_of_another_shape():
    with pytest.raises(TypeError, match="derivative must map a tensor to one of equal shape"):
        FDivergence(triangular, lambda u: u.sum())


def test_a_multiple_of_u_minus_one_changes_nothing():
    log_u = torch.tensor([-3.0, -1e-4, 0.0, 1e-4, 2.0])
    tilted = FDivergence(lambda u: u * torch.log(u))  # ReverseKL's f plus u − 1
    torch.testing.assert_close(tilted.f(log_u), AlphaDivergence(1.0).f(log_u), rtol=1e-5, atol=0)
    torch.testing.assert_close(tilted.df(log_u), AlphaDivergence(1.0).df(log_u), rtol=1e-5, atol=1e-12)


def test_defaults_compare_with_kls():
    kl = FDivergence(lambda u: u - 1 - torch.log(u))
    assert kl.curvature == pytest.approx(1.0, rel=1e-6)
    assert kl.default_radius == pytest.approx(KL().default_radius, rel=1e-3)
    absolute = FDivergence(lambda u: (u - 1).abs() / 2)  # has a kink and no curvature
    assert absolute.default_radius == pytest.approx(0.15, rel=0.05)


@pytest.mark.parametrize("alpha", [-8.1, 8.1, math.nan])
def test_alpha_has_a_range(alpha):
    with pytest.raises(ValueError, match="alpha must be between -8 and 8"):
        AlphaDivergence(alpha)
