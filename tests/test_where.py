"""`bandpo where`: a reader's place in the theory and in the map."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from bandpo import Band, FixedClip
from bandpo.cli.app import app
from bandpo.where import Optimizer, Placement, advice, expected, lift_from_clipping, lift_from_rate
from pages import ROOT

ADAM = Optimizer(0.9, adam=True)


def test_a_clip_binds_above_so_many_updates():
    """Clip 0.2 binds only if U > h + 0.18/g."""
    assert Placement(0.002, 128, 16, ADAM).binding_lift == pytest.approx(math.log(1.2) / 6)
    for lift in (0.01, 0.1):
        limit = 10 + math.log(1.2) / lift
        for updates in (math.floor(limit), math.ceil(limit)):
            word, _ = expected(Placement(0.002, 128, updates, ADAM, (lift, lift)))
            assert word == ("Yes" if updates > limit else "No")


def test_the_gain_follows_from_the_share_clipped():
    """Clip 0.2 met after 8 of 16 updates: each lifted the token by ln 1.2 / 8."""
    assert lift_from_clipping(0.5, 16) == pytest.approx(math.log(1.2) / 8)
    with pytest.raises(ValueError, match="below 1, got 1"):
        lift_from_clipping(1.0, 16)
    with pytest.raises(ValueError, match="above 0"):
        lift_from_rate(0.0, 1e6)
    with pytest.raises(ValueError, match="below 1, got 1"):
        Optimizer(1.0)


def test_the_lift_of_the_embedded_model_is_that_of_the_first_study():
    """Clip 0.2 at learning rate 1e-4: share of winners between 0.01 and 0.1 that were clipped, over all such runs."""
    results = json.loads((ROOT / "results/clipping/results.json").read_text())
    searched = [r for r in results["runs"] if r["tuning"] and r["tuning"]["learning_rate"] == 1e-4]
    tried = [r for r in searched if r["arm"] == "clip 0.2"]
    tokens, clipped = np.array([r["by_bin"]["0.01_to_0.1"] for r in tried]).T
    lift = lift_from_clipping(float((tokens * clipped).sum() / tokens.sum()), updates=16)
    assert lift == pytest.approx(0.02, rel=0.05)
    assert math.sqrt(math.prod(lift_from_rate(1e-4, parameters=335e3))) == pytest.approx(lift, rel=0.05)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, "Yes"),
        ({"updates": 4}, "No"),  # momentum outlasts the batch
        ({"updates": 4, "optimizer": Optimizer()}, "Yes"),
        ({"lift": (0.01, 0.01)}, "No"),  # 16 · 0.01 nats < ln 1.2
        ({"lift": (0.01, 0.1)}, "Perhaps"),
        ({"lift": None}, "Perhaps"),
        ({"tail": 0.01}, "A little"),  # 1.28 draws
        ({"batch": 4096}, "No"),
        ({"updates": 1}, "No"),
        ({"rule": FixedClip(0.2, math.inf)}, "No"),
        ({"rule": Band()}, "No"),  # its bound is 10, and 16 · 0.1 < ln 10 + 10 · 0.1
    ],
    ids=str,
)
def test_what_the_theory_expects_of_a_run(change, word):
    assert expected(replace(Placement(0.002, 128, 16, ADAM, lift=(0.1, 0.1)), **change))[0] == word


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tail": 0.0}, "--tail 0: it is a probability"),
        ({"batch": 0}, "--batch 0: choose at least 1"),
        ({"updates": -4}, "--updates -4: choose at least 1"),
        ({"lift": (0.0, 0.0)}, "above 0, got 0 nats"),
    ],
)
def test_a_run_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(Placement(0.002, 128, 16, ADAM), **change)


@pytest.mark.parametrize(
    ("run", "upper", "setting"),
    [
        (
            Placement(0.0005, 512, 64, ADAM, (0.1, 0.1)),
            "Not clear. The theory says yes, but at the nearest place of the map Band's upper side costs (-0.09 ±",
            "A tight upper bound",
        ),
        (Placement(0.0005, 512, 64, ADAM), "Not clear. The theory says perhaps, but", "A tight upper bound"),
        (Placement(0.0005, 512, 4, ADAM), "Not clear. The theory says no, but", "A tight upper bound"),
        (
            Placement(0.0005, 128, 16, Optimizer(0.95, adam=True)),
            "Not clear. The theory says no, but at the nearest place of the map Band's upper side gains",
            "Your rule, or method",
        ),
        # No place speaks of a run in which the rule does nothing: each has a rate at which clip 0.2 acts.
        (Placement(0.0005, 512, 64, ADAM, (0.001, 0.001)), "No. With 64 updates", "Keep your rule"),
        (Placement(0.0005, 512, 4, ADAM, rule=FixedClip(0.2, math.inf)), "No. Your rule", "Keep your rule"),
        # Nor does one that is far away: four times the batch.
        (Placement(0.0005, 2048, 4, ADAM), "No. Your batch is over", "Keep your rule"),
    ],
)  # fmt: skip
def test_where_the_map_contradicts_the_theory_it_says_so(run, upper, setting):
    said = dict(advice(run))
    assert said["Can the upper side matter?"].startswith(upper)
    assert said["What to set"].startswith(setting)


def test_the_nearest_place_is_named_where_it_is_near():
    two_stages = "worth nothing until half-time, and all after it: +0.04 ± 0.01."
    said = [dict(advice(Placement(p, 128, 4, ADAM))) for p in (0.01, 0.002, 1e-7)]
    near, far, outside = (one["Nearest in the map"] for one in said)
    assert two_stages in near
    assert "half-time" not in far
    assert "your run lies outside of it" in outside


COMMAND = ["where", "--tail", "0.002", "--batch", "128", "--updates", "16"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "Perhaps. A batch draws the tail 0.26 times"),
        (["--clip-high", "0.43"], "nats. Your run's lift is 0.02 nats"),
        (["--clip-high", "0.8"], "Yes. With 16 updates the bound of 1.2 holds"),
        (["--learning-rate", "1e-4", "--parameters", "335e3"], "lift of your run is roughly 0.0051 to 0.081"),
        (["--lift", "0.05", "--optimizer", "sgd"], "more than 0.012 nats. Your run's lift is 0.05 nats"),
        (["--lift", "0.05", "--clip", "FixedClip(0.2, inf)"], "Your rule has no upper bound"),
        (["--tail", "0.01"], "Nearest network 1.3 draws, 16 updates, Adam: Band's upper side in place of"),
        (["--tail", "0.0001"], "Nearest network None: your run lies outside of what was trained. The"),
    ],
)
def test_the_command_says_whether_the_rule_can_matter(options, said):
    result = CliRunner().invoke(app, [*COMMAND, *options])
    assert result.exit_code == 0, result.output
    assert said in " ".join(result.output.split()).replace("Can the upper side matter? ", "")


def test_the_command_refuses_two_measurements():
    result = CliRunner().invoke(app, [*COMMAND, "--lift", "0.1", "--clip-high", "0.1"])
    assert "leave one out" in str(result.exception)
