"""Tests of the tables from which many tokens take the bounds of a divergence without a closed form."""

import math
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from itertools import pairwise, product

import mpmath as mp
import pytest
import torch

import oracle
from bandpo import KL, Band, Batch, FDivergence, TotalVariation, policy_loss, ratio_bounds
from bandpo.core.divergences import (
    AlphaDivergence,
    JensenShannon,
    NeymanChi2,
    PearsonChi2,
    ReverseKL,
    SquaredHellinger,
    _table,
)
from selection import mostly_slow

TRIANGULAR = FDivergence(lambda u: (u - 1) ** 2 / (u + 1))
SOLVED = {
    "ReverseKL()": ReverseKL(),
    "JensenShannon()": JensenShannon(),
    "AlphaDivergence(alpha=-0.5)": AlphaDivergence(-0.5),
    "AlphaDivergence(alpha=0.5)": AlphaDivergence(0.5),
    "AlphaDivergence(alpha=3.0)": AlphaDivergence(3.0),
    "triangular": TRIANGULAR,
}
MANY = _table.FEW_TOKENS
# p from 1e-30 to 1 - 1e-7.
LOGPS = [
    -69.0,
    -40.0,
    -21.0,
    -11.3,
    -7.1,
    -4.4,
    -2.9,
    -1.8,
    -0.9,
    -0.69,
    -0.4,
    -0.1,
    -0.012,
    -1e-3,
    -1e-5,
    -1e-7,
]


def drawn(tokens=MANY, seed=0):
    """Return log-probabilities of rare and of common tokens."""
    random = torch.Generator().manual_seed(seed)
    rare = -70 * torch.rand(tokens // 2, generator=random)
    common = -(10 ** (-7 * torch.rand(tokens - tokens // 2, generator=random)))
    return torch.cat([rare, common])


def margins(bounds):
    return -torch.expm1(bounds.log_lower.double()), torch.expm1(bounds.log_upper.double())


def worst_difference(found, wanted):
    """Return the largest relative difference of the margins. Bounds whose margins are infinite must be equal."""
    errors = [((a - b) / b).abs() for a, b in zip(margins(found), margins(wanted), strict=True)]
    return max(error.nan_to_num(nan=math.inf).max().item() for error in errors)


@pytest.mark.parametrize("name", SOLVED)
@pytest.mark.parametrize("radius", mostly_slow([0.05, 1e-12, 1e-6, 1.0, 1e3], 5))
def test_margins_against_the_oracle(name, radius):
    divergence = SOLVED[name]
    logp = torch.tensor(LOGPS)
    assert _table.bounds_table(divergence, logp.repeat(MANY), radius) is not None
    bounds = ratio_bounds(logp.repeat(MANY // len(LOGPS)), divergence, radius)
    for lp, lower, upper in zip(
        logp.tolist(), bounds.log_lower.tolist(), bounds.log_upper.tolist(), strict=False
    ):
        wanted = oracle.margins(name, lp, radius)
        for found, exact in zip((-mp.expm1(lower), mp.expm1(upper)), wanted, strict=True):
            assert abs(found / exact - 1) <= 1e-5, f"at logp = {lp}"


@pytest.mark.parametrize("name", SOLVED)
@pytest.mark.parametrize("radius", mostly_slow([0.05, 1e-9, 0.4, 8.0], 4))
def test_bounds_are_those_of_the_solver(name, radius):
    logp = drawn()
    found = ratio_bounds(logp, SOLVED[name], radius)
    wanted = ratio_bounds(logp.double(), SOLVED[name], radius)
    assert worst_difference(found, wanted) <= 1e-5
    assert (found.log_lower <= 0).all()
    assert (found.log_upper >= 0).all()
    assert (found.log_upper <= -logp).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVED)
def test_bounds_next_to_the_edge_of_the_simplex(name):
    """A bound changes fastest where it reaches 0 or 1/p."""
    for radius, above in product((0.05, 0.3), (False, True)):
        edge = _table.edge_of(SOLVED[name], radius, above=above)
        if abs(edge) > _table.FARTHEST:
            continue  # it reaches neither
        distances = torch.logspace(-9, 0, MANY // 2, dtype=torch.float64)
        z = torch.cat([edge - distances, edge + distances])
        logp = -torch.nn.functional.softplus(z, threshold=800.0).float()
        found, wanted = (ratio_bounds(x, SOLVED[name], radius) for x in (logp, logp.double()))
        assert worst_difference(found, wanted) <= 1e-5, (
            f"radius {radius}, {'upper' if above else 'lower'} edge"
        )


@pytest.mark.parametrize("divergence", [ReverseKL(), AlphaDivergence(-2.0), TRIANGULAR])
def test_tokens_that_the_solver_limits(divergence):
    """Masked tokens, tokens of probability 1, and probabilities beyond the range, in any place."""
    few = torch.tensor([-math.inf, 0.0, -80.0, -1e-38, -1.0])
    wanted = ratio_bounds(few, divergence, 0.05)
    found = ratio_bounds(few.repeat(MANY), divergence, 0.05)
    for a, b in zip((found.log_lower, found.log_upper), (wanted.log_lower, wanted.log_upper), strict=True):
        torch.testing.assert_close(a[: len(few)], b, rtol=2e-5, atol=1e-30)
        assert (a.view(-1, len(few)) == a[: len(few)]).all()


def test_one_bound_of_each_token_is_that_of_both():
    logp = drawn()
    above = torch.arange(len(logp)) % 2 == 0
    bounds = Band(ReverseKL(), 0.05).bounds(logp)
    found = Band(ReverseKL(), 0.05).log_bound(logp, above)
    assert torch.equal(found, torch.where(above, bounds.log_upper, bounds.log_lower))


@dataclass(frozen=True)
class Unhashable(ReverseKL):
    names: list = field(default_factory=list)


@pytest.mark.parametrize(
    ("divergence", "logp", "radius"),
    [
        (ReverseKL(), drawn(MANY - 1), 0.05),
        (ReverseKL(), drawn().double(), 0.05),
        (ReverseKL(), drawn(), torch.full((MANY,), 0.05)),
        (Unhashable(), drawn(), 0.05),
        (KL(), drawn(), 0.05),
        (TotalVariation(), drawn(), 0.05),
    ],
    ids=["few tokens", "float64", "radius per token", "a field without a hash", "KL", "closed form"],
)
def test_no_table_where_it_does_not_pay(divergence, logp, radius, monkeypatch):
    monkeypatch.setattr(_table, "_made", None) if divergence != Unhashable() else None
    assert _table.bounds_table(divergence, logp, radius) is None
    with warnings.catch_warnings(action="error"):
        ratio_bounds(logp, divergence, radius)


def test_half_precision_uses_the_table():
    logp = drawn().bfloat16()
    assert torch.equal(
        ratio_bounds(logp, ReverseKL(), 0.05).log_upper,
        ratio_bounds(logp.float(), ReverseKL(), 0.05).log_upper,
    )


def test_a_table_without_its_accuracy_is_told_once_and_not_used():
    kinks = FDivergence(lambda u: (u - 1).abs() + (u - 2).clamp(min=0) + (0.4 - u).clamp(min=0))
    logp = drawn()
    with pytest.warns(
        UserWarning, match=r"FDivergence.* with radius 0\.2 are solved for each token, .* error of"
    ):
        found = ratio_bounds(logp, kinks, 0.2)
    with warnings.catch_warnings(action="error"):
        again = ratio_bounds(logp, kinks, 0.2)
    parts = [ratio_bounds(part, kinks, 0.2) for part in logp.split(1000)]
    for side in ("log_lower", "log_upper"):
        assert torch.equal(getattr(found, side), getattr(again, side))
        assert torch.equal(getattr(found, side), torch.cat([getattr(part, side) for part in parts]))


def test_a_table_made_in_inference_mode_serves_a_training():
    divergence = AlphaDivergence(1.7)
    logp = drawn()
    with torch.inference_mode():
        first = ratio_bounds(logp, divergence, 0.05).log_upper.tolist()
    leaf = (logp - 0.2).view(1, -1).requires_grad_()
    loss, _ = policy_loss(leaf, logp.view(1, -1), torch.ones(1), method=Band(divergence, 0.05))
    loss.backward()
    assert ratio_bounds(logp, divergence, 0.05).log_upper.tolist() == first


def test_positions_and_distances_are_inverse():
    distances = torch.logspace(-7, 2.2, 500, dtype=torch.float64)
    torch.testing.assert_close(
        _table.distance_at(_table.position(distances)), distances, rtol=1e-12, atol=0.0
    )


@pytest.mark.parametrize("divergence", [TotalVariation(), PearsonChi2(), NeymanChi2(), SquaredHellinger()])
def test_a_loss_computes_bounds_of_blocked_tokens_alone(divergence, monkeypatch):
    """The mask needs no bounds, and the value of the loss only those that a blocked token is beyond."""
    counts = []
    compute = type(divergence).log_bounds

    def counted(self, logp, radius):
        counts.append(logp.numel())
        return compute(self, logp, radius)

    monkeypatch.setattr(type(divergence), "log_bounds", counted)
    old = drawn(8192).clamp(min=-20).view(8, -1)
    new = (old + torch.randn(old.shape, generator=torch.Generator().manual_seed(1))).clamp(max=-1e-6)
    band = Band(divergence, 0.05)
    blocked = Batch.read(new, old, torch.ones(8)).tokens(band).blocked
    policy_loss(new.requires_grad_(), old, torch.ones(8), method=band)
    assert counts == [blocked.sum()]
    counts.clear()
    policy_loss(new, old, torch.ones(8), method=band, metrics=False)
    assert counts == []


@pytest.mark.parametrize(
    "name",
    [
        "KL()",
        "TotalVariation()",
        "PearsonChi2()",
        "NeymanChi2()",
        pytest.param("triangular", marks=pytest.mark.slow),
    ],
)
def test_vmap_gives_the_same_bounds(name):
    divergence = SOLVED.get(name) or next(
        d for d in (KL(), TotalVariation(), PearsonChi2(), NeymanChi2()) if repr(d) == name
    )
    logp = drawn(96).view(4, 3, 8)
    radius = torch.tensor([0.01, 0.05, 0.1, 0.4])
    wanted = ratio_bounds(logp, divergence, radius.view(4, 1, 1))
    found = torch.vmap(lambda x, r: tuple(ratio_bounds(x, divergence, r)))(logp, radius)
    twice = torch.vmap(torch.vmap(lambda x: ratio_bounds(x, divergence, 0.05).upper))(logp)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(twice, ratio_bounds(logp, divergence, 0.05).upper, rtol=1e-6, atol=0.0)


FIRST_USE = """
import sys
import torch
import bandpo
import bandpo.core.divergences as divergences
before = set(sys.modules)
{divergence}
bandpo.ratio_bounds(torch.tensor([-1.0]), divergence, 0.05)
logp = torch.tensor([[-1.0]], requires_grad=True)
bandpo.policy_loss(logp, torch.tensor([[-2.0]]), torch.ones(1), method=bandpo.Band(divergence, 0.05))[0].backward()
print(sorted(set(sys.modules) - before))
"""


@pytest.mark.slow
def test_the_first_use_of_a_function_of_one_s_own_loads_no_compiler():
    """It took two seconds. What KL loads too is not counted."""
    texts = ("divergence = bandpo.KL()", "divergence = bandpo.FDivergence(lambda u: (u - 1) ** 2 / (u + 1))")
    loaded = [
        subprocess.run(
            [sys.executable, "-c", FIRST_USE.format(divergence=text)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for text in texts
    ]
    assert loaded[0] == loaded[1]


@pytest.mark.slow
def test_more_of_the_divergence_is_never_a_smaller_interval():
    """Neighbouring tables are made apart, and agree in their order."""
    logp = drawn()
    bounds = [ratio_bounds(logp, ReverseKL(), radius) for radius in (0.01, 0.02, 0.04, 0.08)]
    for narrow, wide in pairwise(bounds):
        assert (narrow.log_upper <= wide.log_upper).all()
        assert (narrow.log_lower >= wide.log_lower).all()
