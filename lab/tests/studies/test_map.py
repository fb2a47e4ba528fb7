"""The map of clip rules: its tables against a loop over samples, its file, and what it says."""

import json
import math
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

import when_tables

pytest.importorskip("matplotlib")
from bandpo import Band, FixedClip, Unclipped
from bandpo_lab.cli.app import app
from bandpo_lab.study.cells import ABOVE, BASELINE, RULES, WORLDS, Cell, Map, Place, Plan, run_cell, run_map
from bandpo_lab.study.map_page import draw_map, map_text
from bandpo_lab.study.statistics import Curve, difference, simulated_coverage
from bandpo_lab.study.tabular import rare_arm, simulate, two_stages, zipf
from pages import ROOT

TINY = Plan("quick", seeds=4, batches=3, places=[Place("uniform", 0.05, 32, 2, 1, 0)])


def by_hand(world, low, high, rate, samples, epochs, minibatches, batches, lag):
    """One seed under a fixed clip, sample by sample, in numpy: gradients from p alone, no autograd, no shared code."""
    generator = torch.Generator().manual_seed(0)
    theta = np.log(np.array(world.start))
    decisions, answers = theta.shape
    mean, square, rewards, count, drawn = np.zeros_like(theta), 0.0, [], 0, []
    mass, blocked = 0.0, 0.0
    for batch in range(batches):
        stage = world.stages[batch * len(world.stages) // batches]
        draws = torch.rand(1, decisions + 1, samples, generator=generator)[0].double().numpy()
        old = np.exp(theta) / np.exp(theta).sum(-1, keepdims=True)
        taken = [np.searchsorted(old[d].cumsum()[:-1], draws[d]).tolist() for d in range(decisions)]
        chances = np.array(stage.chances)[taken[stage.decision]]
        reward = (draws[-1] < chances).astype(float)
        advantage = np.concatenate([(g - g.mean()) / (g.std(ddof=1) + 1e-4) for g in reward.reshape(-1, 16)])
        rewards.append(reward.mean())
        drawn.append((old, taken, advantage))
        if batch < lag:
            continue
        old, taken, advantage = drawn[batch - lag]
        for update in range(epochs * minibatches):
            p = np.exp(theta) / np.exp(theta).sum(-1, keepdims=True)
            gradient = np.zeros_like(theta)
            mine = range(update % minibatches, samples, minibatches)
            for i in mine:
                for d in range(decisions):
                    a = taken[d][i]
                    ratio = p[d, a] / old[d, a]
                    up, down = advantage[i] > 0 and ratio > 1 + high, advantage[i] < 0 and ratio < 1 - low
                    if advantage[i] > 0 and old[d, a] < 0.1:
                        mass += ratio * advantage[i]
                        blocked += up * ratio * advantage[i]
                    if not (up or down):
                        one = np.eye(answers)[a]
                        gradient[d] -= ratio * advantage[i] * (one - p[d]) / len(mine)
            count += 1
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.99 * square + 0.01 * (gradient**2).mean()
            scale = math.sqrt(square / (1 - 0.99**count)) + 1e-8
            theta = theta - rate * mean / (1 - 0.9**count) / scale
    return rewards, blocked / mass


@pytest.mark.parametrize(
    ("world", "rule", "rate", "lag"),
    [
        (zipf(0.1), FixedClip(0.2, 0.28), 0.1, 0),
        (two_stages(0.1), FixedClip(0.2), 0.1, 0),
        (zipf(0.05), Unclipped(), 0.2, 0),
        (rare_arm(0.09), FixedClip(0.2), 0.1, 2),
    ],
    ids=["Zipf", "two stages", "no clip", "stale"],
)
def test_a_table_learns_as_a_loop_over_its_samples_does(world, rule, rate, lag):
    low, high = (rule.low, rule.high) if isinstance(rule, FixedClip) else (1.0, math.inf)
    sizes = {"samples": 64, "epochs": 3, "minibatches": 2, "batches": 5, "lag": lag}
    found = simulate(world, rule, [rate], seeds=1, **sizes)
    rewards, blocked = by_hand(world, low, high, rate, **sizes)
    assert found.rewards[0, 0].tolist() == pytest.approx(rewards)
    assert found.blocked.item() == pytest.approx(blocked, abs=1e-5)


def test_a_seed_means_the_same_draws_and_with_one_update_no_rule_acts():
    once = {"seeds": 3, "epochs": 1, "minibatches": 1, "batches": 10}
    for rule in (FixedClip(0.2), Band()):
        found = simulate(rare_arm(0.1), rule, [1e-9, 1e-8], **once)
        assert torch.equal(found.rewards[0], found.rewards[1])
    assert len(set(found.auc[0].tolist())) > 1
    first, *others = [simulate(rare_arm(0.1), rule, [0.1], **once) for rule in RULES.values()]
    assert all(torch.equal(first.rewards, table.rewards) for table in others)


@pytest.mark.parametrize(("samples", "epochs", "rates"), [(24, 4, [0.1]), (32, 0, [0.1]), (32, 4, [])])
def test_a_world_refuses_numbers_that_do_not_fit(samples, epochs, rates):
    with pytest.raises(ValueError, match=r"multiple of 16|above 0"):
        simulate(rare_arm(0.1), FixedClip(0.2), rates, seeds=2, samples=samples, epochs=epochs)
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        rare_arm(1.5)


@pytest.mark.slow
def test_the_map_agrees_with_one_made_by_another_program():
    """That one, with 80 seeds: clip 0.2 blocks .70 of rare winners' gradient in stale data; BandAbove gains .18."""
    place = Place("uniform", 0.002, 128, 1, 4, 4)
    plan = Plan("quick", seeds=48, places=[place])
    found = of_cells([run_cell(plan, place, rule) for rule in (BASELINE, ABOVE)])
    assert 0.5 < found.blocked(place) < 0.9
    assert 0.05 < found.difference(place, ABOVE).value < 0.25


# The file -------------------------------------------------------------------------------------------------------------


def of_cells(cells, **terms):
    return Map(terms, {(cell.setting, cell.rule): cell for cell in cells})


@pytest.mark.slow
def test_a_map_is_resumed_to_the_same_file_and_refuses_other_terms(tmp_path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert [count for count, _ in run_map(TINY, whole, workers=1)] == list(range(1, len(TINY.todo) + 1))
    lines = whole.read_text().splitlines(keepends=True)
    cut.write_text("".join(lines[:4]) + lines[4][:30])  # killed while it wrote
    with pytest.warns(UserWarning, match="cut off"):
        assert [count for count, _ in run_map(TINY, cut, workers=1)] == [4, 5, 6, 7]
    assert cut.read_text() == whole.read_text()
    found = Map.from_file(whole)
    assert found.terms["versions"]["bandpo"]
    place = TINY.places[0]
    assert found.cells[place, BASELINE] == run_cell(TINY, place, BASELINE)  # the same whoever runs it
    with pytest.raises(ValueError, match=r"other terms \(quick, 4 seeds\)"):
        next(run_map(replace(TINY, seeds=5), whole, workers=1))
    (tmp_path / "other.jsonl").write_text('{"reward": 1}\n')
    with pytest.raises(ValueError, match="is no map"):
        Map.from_file(tmp_path / "other.jsonl")
    with pytest.raises(RuntimeError, match="failed under clip"):
        list(run_map(replace(TINY, batches=0), tmp_path / "none.jsonl", workers=1))


@pytest.mark.slow
def test_an_interrupted_map_keeps_what_has_ended(tmp_path):
    running = run_map(TINY, tmp_path / "map.jsonl", workers=1)
    next(running)
    with pytest.raises(KeyboardInterrupt):
        running.throw(KeyboardInterrupt)
    assert len(Map.from_file(tmp_path / "map.jsonl").cells) == 1


@pytest.mark.parametrize("size", ["quick", "full"])
def test_no_cell_is_planned_twice(size):
    todo = Plan.of_size(size).todo
    assert len(todo) == len(set(todo))


# What it says ---------------------------------------------------------------------------------------------------------


def made_up(setting, rule, level):
    """A cell whose seeds score ``level``, ± 0.1 by turns, at the better of two rates."""
    good = [level + 0.1 * (-1) ** seed for seed in range(8)]
    bad = [x - 0.2 for x in good]
    return Cell(setting, rule, [0.16, 0.32, 0.64], [bad, good, bad], [0.1, 0.2 + 0.1 * setting.lag, 0.3])


def test_the_rate_is_chosen_on_other_seeds_than_it_is_scored_on():
    noise = Curve(
        [*range(50)], np.random.default_rng(0).normal(size=(50, 200))
    )  # fifty rates that do not differ
    assert noise.best_scores.mean() > 0.1  # what choosing and scoring on the same seeds would give
    assert abs(noise.drawn(np.ones((1, 200)))[0]) < 0.1


def test_intervals_are_paired_hold_the_truth_and_draw_seeds_within_their_groups():
    noise, level = np.random.default_rng(0).normal(size=(2, 3, 12)), np.array([[0.0], [1.0], [0.0]])
    ours, theirs = (Curve([1, 2, 3], level + 0.3 * x) for x in noise)
    same = difference(ours.drawn, ours.drawn, [0] * 12)
    assert same == (0, 0, 0)
    assert 0.9 <= simulated_coverage(ours, theirs, [0, 1] * 6) <= 0.99
    apart = Curve([1, 2, 3], ours.scores + 10.0 * (np.arange(12) % 2))  # two base models, far apart
    spread = [difference(apart.drawn, theirs.drawn, groups).half for groups in ([0, 1] * 6, [0] * 12)]
    assert spread[0] < 1 < spread[1]


@pytest.fixture
def drawn():
    places = [Place(world, 0.002, 128, 1, 4, lag) for world in WORLDS for lag in (0, 4)]
    return [made_up(p, rule, 0.4 + 0.05 * k * (p.lag + 1)) for p in places for k, rule in enumerate(RULES)]


def test_the_figure_and_the_table_show_every_place(drawn):
    assert [len(axes.containers) for axes in draw_map(of_cells(drawn, seeds=8)).axes] == [3, 3, 3]
    text = map_text(of_cells(drawn, seeds=8))
    gains = " | ".join(f"{0.25 * k:+.2f} ± 0.00" for k in range(1, 7))
    assert (
        f"| uniform, p = 0.002, 128 samples, 1 × 4 updates, lag 4 | 0.60 | 0.40 | {gains} | +0.25 | none |"
        in text
    )
    assert "rank correlation of 1.00" in text


# The commands ---------------------------------------------------------------------------------------------------------


def test_the_commands_run_and_an_interrupt_is_one_line(tmp_path, monkeypatch, drawn):
    def some(plan, file, workers):
        yield 1, drawn[0]
        raise KeyboardInterrupt

    monkeypatch.setattr("bandpo_lab.study.cells.run_map", some)
    result = CliRunner().invoke(app, ["study", "map", "--output-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "interrupted; the same command goes on" in str(result.exception) + result.output

    def whole(plan, file, workers):
        lines = [{"versions": {}, "seeds": 8}, *map(asdict, drawn)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        yield from enumerate(drawn, 1)

    monkeypatch.setattr("bandpo_lab.study.cells.run_map", whole)
    result = CliRunner().invoke(app, ["study", "map", "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "map.md").read_text() == map_text(of_cells(drawn, seeds=8))


def test_a_study_file_needs_no_subcommand(tmp_path):
    for words in ([], ["run"], ["--workers", "2"]):
        result = CliRunner().invoke(app, ["study", *words, "nowhere.yaml"])
        assert "nowhere.yaml is no file" in str(result.exception)


# What the pages say of it ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    return Map.from_file(ROOT / "results/map/map.jsonl.gz")


@pytest.mark.slow
def test_the_committed_table_is_the_map_s(found):
    assert found.cells.keys() == set(Plan.of_size("full").todo)
    assert (ROOT / "docs/studies/map/map.md").read_text() == map_text(found)


def test_every_place_on_the_page_is_the_map_s():
    """Rows of docs/when.md, its counts, its ranges, and the coverage."""
    page, table = ((ROOT / name).read_text() for name in ("docs/when.md", "docs/studies/map/map.md"))
    cells = [row.split(" | ") for row in re.findall(r"^\| (.* updates, lag \d.*) \|$", table, re.M)]
    assert len(cells) == 58
    stale = [row for row in cells if not row[0].endswith("lag 0")]
    said = dict(re.findall(r"^\| ([^|]+) \|.*\| ([+-]0\.\d\d) \|$", page, re.M))
    rules = ("Band", "Clip-Higher", "clip [.8, 2]", "BandAbove", "room by mass", "no upper bound")
    for column, rule in enumerate(rules, 3):
        assert said[rule] == f"{np.mean([float(row[column].split(' ± ')[0]) for row in stale]):+.2f}", rule
    gains = [float(row[6].split(" ± ")[0]) for row in stale]
    sure = sum(float(x) > float(half) for x, half in (row[6].split(" ± ") for row in stale))
    prose = " ".join(page.split())
    assert f"surely above 0 in {sure} of {len(stale)} settings" in prose
    reused = [row for row in cells if re.search(r"(4 × 4|16 × 1) updates, lag 0$", row[0])]
    fresh = [float(row[6].split(" ± ")[0]) for row in reused]
    assert f"BandAbove minus clip 0.2 is {min(fresh):+.2f} to {max(fresh):+.2f}" in prose
    shares = [float(row[1]) for row in stale]
    assert f"Over stale tables alone it is negative, {stats.spearmanr(shares, gains)[0]:.2f}" in prose
    covered = re.search(r"held the truth in (\d+)%", table)[1]
    assert f"In a simulation they held the truth in {covered} %" in prose


@pytest.mark.parametrize("rows", [when_tables.fresh, when_tables.matched])
def test_tables_that_no_report_has_are_the_data_s(rows):
    assert "\n".join(rows()) in (ROOT / "docs/when.md").read_text()
