"""A log's rates over the whole run, and the interval of the blocked share against simulated runs."""

import math
import statistics

import numpy as np
import pytest

from rlvet.runs.quantities import named_rows
from rlvet.runs.summary import FEW_STEPS, Summary, summarize


def audited(step, **metrics):
    """One log step of an audited run."""
    audit = {"tokens": 1000, "calls": 4, "clip_high": 0.01, "clip_low": 0.02}
    audit |= {"tokens_positive_below_0.1": 100, "clip_high_below_0.1": 0.4}
    audit |= {"mass_positive_below_0.1": 50, "blocked_mass_below_0.1": 0.3}
    return {"step": step} | {f"audit/{name}": value for name, value in (audit | metrics).items()}


def test_rates_are_weighted_with_what_they_were_taken_over():
    few = {"tokens": 1000, "clip_high": 0.1, "tokens_positive/0.01_to_0.1": 10, "clip_high/0.01_to_0.1": 1.0}
    many = {"tokens": 9000, "clip_high": 0.0, "tokens_positive/0.01_to_0.1": 90, "clip_high/0.01_to_0.1": 0.0}
    light = {"mass_positive_below_0.1": 1, "blocked_mass_below_0.1": 1.0}
    heavy = {"mass_positive_below_0.1": 3, "blocked_mass_below_0.1": 0.0}
    rows = named_rows([audited(1, **few, **light), audited(2, **many, **heavy)])
    metrics = summarize(rows).metrics
    expected = {"clip_high": 0.01, "clip_high/0.01_to_0.1": 0.1, "tokens_positive/0.01_to_0.1": 100}
    expected |= {"blocked_mass_below_0.1": 0.25, "tokens": 10_000}
    assert metrics.items() >= {name: pytest.approx(x) for name, x in expected.items()}.items()
    assert "clip_high/above_0.1" not in metrics


def test_what_a_log_does_not_tell_is_not_summed_up():
    summary = summarize(named_rows([{"step": 3, "reward": 0.5}]))
    assert (summary.steps, summary.clipped, summary.rare) == (3, None, (0.0, 0.0))
    assert (summary.metrics, list(summary.blocked), summary.blocked_interval()) == ({}, [], None)


def summary_of(blocked, masses, tokens=0.0, clipped_share=0.0):
    metrics = {"tokens_positive_below_0.1": tokens, "clip_high_below_0.1": clipped_share}
    return Summary(len(masses), metrics, list(zip(blocked, masses, strict=True)))


def drawn_steps(rng, shape):
    """Draw blocked and whole gradient of log steps: heavy tails, and heavy steps lose a larger share."""
    mass = rng.lognormal(0.0, 0.6, shape)
    share = rng.beta(2.0, 6.0, shape) * (0.5 + 0.5 * mass / (1 + mass))
    return share * mass, mass


@pytest.mark.parametrize(("steps", "least"), [(FEW_STEPS, 0.83), (30, 0.9), (100, 0.92)])
def test_the_interval_covers_the_share_of_simulated_runs(steps, least):
    """It is one of 95 % by the normal distribution, which is narrow over few and skewed steps."""
    rng = np.random.default_rng(steps)
    blocked, masses = drawn_steps(rng, 4_000_000)
    share = blocked.sum() / masses.sum()
    covered = []
    widths = []
    estimates = []
    for _ in range(2000):
        blocked, masses = drawn_steps(rng, steps)
        low, high = summary_of(blocked.tolist(), masses.tolist()).blocked_interval()
        covered.append(low <= share <= high)
        widths.append(high - low)
        estimates.append(blocked.sum() / masses.sum())
    assert least <= np.mean(covered) <= 0.98
    if steps > FEW_STEPS:
        # Nor is it wider than it must be.
        assert np.mean(widths) == pytest.approx(2 * 1.96 * np.std(estimates), rel=0.1)


def test_of_equal_masses_it_is_that_of_a_mean():
    from scipy import stats

    shares = [0.05 * k / 7 for k in range(3, 18)]
    low, high = summary_of([2 * share for share in shares], [2.0] * len(shares)).blocked_interval()
    half = stats.t.ppf(0.975, len(shares) - 1) * statistics.stdev(shares) / math.sqrt(len(shares))
    centre = statistics.fmean(shares)
    assert (low, high) == pytest.approx((centre - half, centre + half), rel=1e-3)


@pytest.mark.parametrize(("tokens", "clipped"), [(400, 0), (400, 3), (25, 25), (10_000, 1)])
def test_what_has_not_happened_yet_is_as_likely_as_by_the_share_of_tokens(tokens, clipped):
    """Every log step lost the same share, so that they do not show how much steps differ."""
    from scipy import stats

    n = 20
    share = clipped / tokens
    low, high = summary_of([share] * n, [1.0] * n, tokens, share).blocked_interval()
    wilson = stats.binomtest(clipped, tokens).proportion_ci(0.95, method="wilson")
    assert high == pytest.approx(max(share, wilson.high), rel=1e-9)
    assert low == pytest.approx(share, abs=1e-9)


def test_the_ends_are_shares_and_do_not_depend_on_the_unit_of_gradient():
    rng = np.random.default_rng(0)
    mass = rng.lognormal(0.0, 1.0, 12)
    for share in (rng.random(12) ** 6, 1 - rng.random(12) ** 6):
        ends = summary_of((share * mass).tolist(), mass.tolist()).blocked_interval()
        assert 0 <= ends[0] < ends[1] <= 1
        scaled = summary_of((7 * share * mass).tolist(), (7 * mass).tolist()).blocked_interval()
        assert scaled == pytest.approx(ends)


def test_a_few_log_steps_give_no_interval():
    rows = [audited(step) for step in range(1, FEW_STEPS + 1)]
    assert summarize(named_rows(rows[1:])).blocked_interval() is None
    assert summarize(named_rows(rows)).blocked_interval() is not None
    without_rare = [audited(0, **{"mass_positive_below_0.1": 0.0})]
    assert summarize(named_rows(rows[1:] + without_rare)).blocked_interval() is None
