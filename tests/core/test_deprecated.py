"""Names that moved: the old ones work for one release, and say the new one."""

import importlib
import sys
import warnings

import pytest
import torch

import bandpo
from bandpo import KL, Balanced, Band, ClipRule, FixedClip, HoldKL, KeepBound, Linear, Radius, TrainingState
from bandpo._deprecated import MODULES


@pytest.mark.parametrize(("old", "new"), MODULES.items())
def test_a_module_by_its_old_name_is_the_module(old, new):
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        assert importlib.import_module(old) is importlib.import_module(new)


def test_a_module_within_one_is_no_second_copy():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        old = importlib.import_module("bandpo.tasks.multiplication")
        with pytest.raises(ModuleNotFoundError, match="nothing"):
            importlib.import_module("bandpo.tasks.nothing")
    assert old is importlib.import_module("bandpo.lab.tasks.multiplication")
    assert "bandpo.tasks.multiplication is now bandpo.lab.tasks.multiplication" in [
        str(w.message) for w in said
    ]


def test_names_of_the_radius():
    rule = Band(KL(), Linear(0.04, 0.02))
    with pytest.warns(DeprecationWarning, match="bandpo.Moment is now bandpo.TrainingState"):
        state = bandpo.Moment(progress=0.5)
    assert (type(state), state.progress) == (TrainingState, 0.5)
    with pytest.warns(DeprecationWarning, match="ClipRule.at is now resolved"):
        assert rule.at(state) == rule.resolved(state)
    with pytest.warns(DeprecationWarning, match="Radius.at is now resolved"):
        assert rule.radius.at(state) == 0.03
    metrics = {"approx_kl": 0.03}
    held = Band(KL(), HoldKL(0.01, 0.05))
    with pytest.warns(DeprecationWarning, match="ClipRule.updated is now next_radii"):
        assert held.updated({}, metrics) == held.next_radii({}, metrics)


def test_the_same_tokens_under_another_rule():
    tokens = bandpo.Tokens.build(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), rule=FixedClip(0.2))
    with pytest.warns(DeprecationWarning, match="Tokens.under is now with_rule"):
        assert tokens.under(FixedClip(0.1)).rule == FixedClip(0.1)


def test_arguments():
    with pytest.warns(DeprecationWarning, match=r"HoldKL\(low=…\) is now min_radius=…"):
        assert HoldKL(0.01, 0.05, low=0.02) == HoldKL(0.01, 0.05, min_radius=0.02)
    with pytest.warns(DeprecationWarning, match=r"KeepBound\(high=…\) is now keep_high=…"):
        assert KeepBound(high=0.5) == KeepBound(keep_high=0.5)
    with pytest.warns(DeprecationWarning, match=r"Balanced\(max_low=…\) is now max_lower=…"):
        assert Balanced(max_low=0.8) == Balanced(max_lower=0.8)


def test_a_class_of_ones_own_that_overrides_an_old_name():
    with pytest.warns(DeprecationWarning, match="Twice.of is now per_token"):

        class Twice(Radius):
            needs, range = None, (0.1, 0.1)

            def of(self, logp_old):
                return torch.full_like(logp_old, 0.1)

    assert Band(KL(), Twice()).radius_for(torch.zeros(2)).tolist() == pytest.approx([0.1, 0.1])
    with pytest.warns(DeprecationWarning, match="Fixed.at is now resolved"):

        class Fixed(FixedClip):
            def at(self, moment):
                return FixedClip(0.1)

    assert Fixed().resolved(TrainingState()) == FixedClip(0.1)
    assert issubclass(Fixed, ClipRule)
