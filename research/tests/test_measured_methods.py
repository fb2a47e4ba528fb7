"""What docs/which-method.md says of the methods that were measured here: those of the arms of the studies."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bandpo import FixedClip, Method
from bandpo.core.methods import METHODS
from bandpo.core.objectives import ClippedWeight, DualClip, SelfAnchored
from bandpo.core.text import as_method
from studies import grid, smollm2, staleness

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/which-method.md").read_text()


def essence(method):
    """Return a method without what the studies set otherwise: the average and a dual clip."""
    method = as_method(method)
    objective = method.objective
    if isinstance(objective, DualClip):
        objective = objective.objective
    return replace(method, objective=objective, aggregation=None)


@pytest.fixture(scope="module")
def measured():
    arms = [arm.method for arms in (grid.ARMS, smollm2.ARMS) for arm in arms.values()]
    arms += staleness.ARMS.values()
    trained = [essence(arm) for arm in arms]
    return {name for name, paper in METHODS.items() if essence(paper.method()) in trained}


def test_the_page_says_which_methods_were_measured(measured):
    text = " ".join(PAGE.split())
    names = text.partition(f"the rules of {len(measured)} of the {len(METHODS)} methods: ")[2].partition(
        ". "
    )[0]
    assert {*re.findall(r"`(\w+)\(\)`", names)} == measured
    assert f"The other {len(METHODS) - len(measured)} were never measured here" in text


def test_what_is_recommended_as_measured_was(measured):
    """A method of the column *not measured here* was not; one of the column before it was, or is said to be a part."""
    table = PAGE.partition("| what you see in your run |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    assert len(rows) > 4
    for _, here, not_here in rows:
        assert not {*re.findall(r"`(\w+)\(\)`", not_here)} & measured
        assert {*re.findall(r"(?<!veto of )`(\w+)\(\)`", here)} <= measured


def test_the_truncated_negatives_of_smollm2_are_those_of_tokens():
    """The rows were made with the ratio of each token, which was called TOPR at that time."""
    trained = Method(FixedClip(1.0, 0.0), SelfAnchored(ClippedWeight()), aggregation="seq-mean-token-mean")
    assert smollm2.ARMS["truncated negatives"].method == trained
