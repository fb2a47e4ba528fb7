import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bandpo import KL, Band, Batch, ClipRule, FixedClip, Loosest, TotalVariation, TwoSided, Unclipped, parse
from bandpo.core.rules import Tightest

leaves = st.sampled_from(
    [Band(KL(), 0.05), Band(TotalVariation(), 0.1, math.inf), FixedClip(), FixedClip(0.1, 0.5), Unclipped()]
)
rules = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(TwoSided, lower=inner, upper=inner),
        st.builds(Loosest, inner, inner),
        st.builds(Tightest, inner, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(rule=rules, logp=st.floats(-30, -1e-4), log_ratio=st.floats(-40, 40))
def test_membership_is_the_bounds(rule, logp, log_ratio):
    logp = torch.tensor(logp, dtype=torch.float64)
    log_ratio = torch.tensor(log_ratio, dtype=torch.float64).clamp(max=-logp)
    bounds, applied = rule.bounds(logp), rule.clip_mask(log_ratio, logp)
    assert bounds.log_lower <= 0 <= bounds.log_upper
    for bound in (bounds.log_lower, bounds.log_upper):
        if abs(log_ratio - bound) <= 1e-9 * (1 + abs(bound)):
            return  # at the edge itself rounding decides
    assert applied.clipped_low == (log_ratio < bounds.log_lower)
    assert applied.clipped_high == (log_ratio > bounds.log_upper)
    assert parse(repr(rule), ClipRule) == rule


exact = st.sampled_from([FixedClip(), FixedClip(0.1, 0.5), FixedClip(0.4, 0.1), Unclipped()])


@given(a=exact, b=exact, log_ratio=st.floats(-2, 2))
def test_clipped_values(a, b, log_ratio):
    log_ratio, logp = torch.tensor([[log_ratio]]), torch.tensor([[-8.0]])
    for rule in (TwoSided(a, b), Loosest(a, b), Tightest(a, b)):
        bounds = rule.bounds(logp)
        tokens = Batch.read(logp + log_ratio, logp, torch.ones(1, 1)).tokens(rule)
        # The ratio as the view has it: the sum above rounds.
        expected = tokens.log_ratio.clamp(bounds.log_lower, bounds.log_upper)
        assert torch.equal(tokens.clipped, expected.exp())
        outside = tokens.clip_mask.clipped_low | tokens.clip_mask.clipped_high
        at_bound = tokens.ratio_at_bound(outside)
        assert torch.equal(at_bound[outside], tokens.clipped[outside])
        assert not rule.solves


def test_a_rule_with_a_band_solves():
    assert Band().solves
    assert Tightest(TwoSided(FixedClip(), Band()), FixedClip(1.0, 3.0)).solves


def test_trgppo_is_a_union():
    bounds = Loosest(Band(KL(), 0.05), FixedClip(0.2)).bounds(torch.tensor([0.08, 0.9]).log())
    assert bounds.lower.tolist() == [pytest.approx(0.262, abs=1e-3), pytest.approx(0.8)]
    assert bounds.upper.tolist() == [pytest.approx(2.411, abs=1e-3), pytest.approx(1.2)]


def test_refuses_bad_members():
    with pytest.raises(TypeError, match="upper must be a ClipRule"):
        TwoSided(FixedClip(), 0.2)
