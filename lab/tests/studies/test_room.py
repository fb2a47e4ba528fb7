"""Which tokens should have room to rise: the rule, and what the pages say of the committed tables and runs."""

import json
import re

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")
from bandpo import Band, FixedClip
from bandpo_lab.study.cells import Place
from bandpo_lab.study.execute import read_results
from bandpo_lab.study.statistics import Results, student
from pages import ROOT
from studies.network import effects, on_curves, read_predictions, verdict
from studies.room import RoomFor

CLIP, ALL, RARE, COMMON = "clip 0.2", "all tokens", "rare tokens", "common tokens"


def test_both_kinds_of_room_together_are_bands():
    logp = torch.tensor([1e-6, 0.0005, 0.01, 0.0299, 0.0301, 0.067, 0.5]).log()
    rules = FixedClip(0.2), Band(), RoomFor(rare=True), RoomFor(rare=False)
    clip, everything, rare, common = (rule.bounds(logp) for rule in rules)
    assert torch.equal(torch.maximum(rare.upper, common.upper), everything.upper)
    assert rare.upper[3] > 1.2 == pytest.approx(float(rare.upper[4]))
    for bounds in (rare, common):
        assert torch.equal(bounds.lower, clip.lower)


def test_the_page_says_what_the_network_found():
    results = read_results(ROOT / "results/network-room")
    assert (len(results["runs"]), results["failed"]) == (120, [])
    predictions = read_predictions(ROOT / "studies/network-room-predictions.md")
    found = effects(on_curves(Results.from_file(results)), predictions)
    said = (ROOT / "docs/when.md").read_text().partition("**Rare tokens make it.**")[2].partition("\n- ")[0]
    assert re.findall(r"[-+]0\.\d+ \[.*?\]", " ".join(said.split())) == [str(e) for e in found.values()]
    assert {verdict(e.interval, p.expects) for p, e in found.items()} == {"held"}


def test_the_pages_say_what_the_tables_found():
    auc = {}
    for line in map(json.loads, (ROOT / "results/room.jsonl").read_text().splitlines()):
        auc.setdefault((Place(**line["setting"]), line["accidents"]), {})[line["arm"]] = np.array(line["auc"])
    page = (ROOT / "docs/theory.md").read_text()
    for (place, accidents), scores in auc.items():
        apart = [student(scores[arm] - scores[CLIP]) for arm in (ALL, RARE, COMMON)]
        row = [f"{scores[CLIP].mean():.2f}", *(f"{gap.value:+.2f} ± {gap.half:.2f}" for gap in apart)]
        assert f"| {place}{'' if accidents else ', no accidents'} | {' | '.join(row)} |" in page
    for (_, accidents), scores in auc.items():
        assert accidents or all(abs(scores[arm].mean() - scores[CLIP].mean()) < 0.005 for arm in scores)
