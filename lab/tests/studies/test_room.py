"""Which tokens should have room to rise: the rule, a look, and what the pages say of the committed ones."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")
from bandpo.where import BASELINE, UPPER
from bandpo_lab.study.cells import half_width, read_map, scores
from bandpo_lab.study.execute import read_results
from bandpo_lab.study.plan import parse_study
from studies import network_room, room

ROOT = Path(__file__).parents[3]


def test_both_kinds_of_room_together_are_bands():
    logp = torch.tensor([1e-6, 0.0005, 0.01, 0.0299, 0.0301, 0.067, 0.5]).log()
    clip, everything, rare, common = (rule.bounds(logp) for rule in room.ARMS.values())
    assert torch.equal(torch.maximum(rare.upper, common.upper), everything.upper)
    assert rare.upper[3] > 1.2 == pytest.approx(float(rare.upper[4]))
    for bounds in (everything, rare, common):
        assert torch.equal(bounds.lower, clip.lower)


def test_a_look_without_accidents_rewards_no_wrong_answer(monkeypatch):
    monkeypatch.setattr(room, "SEEDS", 2)
    seen = []

    def simulate(world, *arguments, **named):
        seen.append([stage.chances for stage in world.stages])
        return simulate_as_is(world, *arguments, **named, batches=2)

    simulate_as_is = room.simulate
    monkeypatch.setattr(room, "simulate", simulate)
    for accidents in (True, False):
        found = room.look(room.Look(room.COSTS[3], accidents, "rare tokens"))
        assert len(found.auc) == 2
        assert found.setting.optimizer == "Adam, β1 = 0.95"
    with_accidents, without = seen
    assert with_accidents == [(0.97, *[0.05] * 15)]
    assert without == [[0.97, *[0.0] * 15]]


def test_the_places_are_those_of_the_map_in_which_the_upper_side_costs_and_gains():
    _, cells = read_map(ROOT / "results/map/map.jsonl.gz")
    table = scores(cells)
    for setting in [*room.COSTS, *room.GAINS]:
        apart = table[setting][UPPER].auc - table[setting][BASELINE].auc
        assert (apart > 0.02) == (setting in room.GAINS)


def test_the_networks_predictions_are_those_of_their_page():
    page = (ROOT / "studies/network-room-predictions.md").read_text()
    said = [tuple(row.split(" | ")[:5]) for row in re.findall(r"^\| (plenty .*) \|$", page, re.M)]
    assert said == [(p.world, p.arm, p.minus, p.metric, p.expects) for p in network_room.PREDICTIONS]


def test_the_networks_world_is_plenty_with_other_seeds():
    one, other = (
        parse_study((ROOT / f"studies/{name}.yaml").read_text()) for name in ("network", "network-room")
    )
    assert other.options == one.options
    plenty = {name: e for name, e in one.experiments.items() if e.world == "plenty"}
    assert plenty.keys() == other.experiments.keys()
    for name, there in plenty.items():
        here = other.experiments[name]
        assert (here.options, here.point) == (there.options, there.point)
        assert not set(here.seeds) & set(there.seeds)


def test_the_page_says_what_the_network_found(capsys):
    folder = ROOT / "results/network-room"
    results = read_results(folder)
    assert len(results["runs"]) == 120
    assert results["failed"] == []
    network_room.main([str(folder)])
    assert len(capsys.readouterr().out.splitlines()) == 3
    said = (ROOT / "docs/when.md").read_text().partition("**Rare tokens make it.**")[2].partition("\n- ")[0]
    found = network_room.rows(results)
    assert re.findall(r"[-+]0\.\d+ \[.*?\]", " ".join(said.split())) == [row[2] for row in found]
    assert {row[4] for row in found} == {"held"}


def test_the_pages_say_what_was_found():
    found = room.read()
    assert set(found) == set(room.planned())
    theory = (ROOT / "docs/theory.md").read_text()
    for row in room.rows(found):
        assert "| " + " | ".join(row) + " |" in theory

    def gap(setting, arm, minus=BASELINE):
        ours, theirs = (np.array(found[room.Look(setting, True, name)].auc) for name in (arm, minus))
        mean, half = (ours - theirs).mean(), half_width(ours - theirs)
        return mean - half, mean, mean + half

    # “nearly twice as much”, in the three places of one stage; less in the two stages.
    *one_stage, two_stages = room.GAINS
    for setting in one_stage:
        assert 1.5 < gap(setting, "rare tokens")[1] / gap(setting, "all tokens")[1] < 2
        assert gap(setting, "rare tokens", minus="all tokens")[0] > 0
    assert gap(two_stages, "rare tokens", minus="all tokens")[2] < 0
    assert gap(two_stages, "common tokens")[0] > 0
    # Common tokens cost in all six places, and more; rare ones gain in four, cost in one.
    for setting in room.COSTS:
        assert gap(setting, "common tokens")[2] < 0
        assert gap(setting, "common tokens")[1] < gap(setting, "all tokens")[1]
    rare = [gap(setting, "rare tokens") for setting in room.COSTS]
    assert (sum(low > 0 for low, _, _ in rare), sum(high < 0 for _, _, high in rare)) == (4, 1)
    for look, line in found.items():
        if not look.accidents:
            clip = found[room.Look(look.setting, False, BASELINE)].auc
            assert abs(np.mean(line.auc) - np.mean(clip)) < 0.005
    page = (ROOT / "docs/when.md").read_text()
    assert len(re.findall("Room for rare tokens alone is better", page)) == 1
