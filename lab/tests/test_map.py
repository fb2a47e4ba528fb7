"""The map of clip rules: its tables against a loop over samples, its file, and what it says."""

import json
import math
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("matplotlib")
from bandpo import Band, FixedClip, Unclipped
from bandpo.cli.app import app
from bandpo_lab.files import locked
from bandpo_lab.study.cells import (
    BAND,
    BASELINE,
    RULES,
    TAILS,
    UPPER,
    Cell,
    Map,
    Place,
    Plan,
    run_cell,
    run_map,
)
from bandpo_lab.study.map_page import draw_map, map_tables, other_worlds_table
from bandpo_lab.study.statistics import random_halves
from bandpo_lab.study.tabular import (
    OPTIMIZERS,
    Optimizer,
    Outcome,
    coin_flips,
    rare_arm,
    simulate,
    two_stages,
)
from pages import ROOT

ADAM = Optimizer(0.9, adam=True)
TINY = Plan("quick", seeds=4, rates=2, batches=3, places=[Place("rare arm", 0.05, 32, 2, "Adam")])


def by_hand(world, low, high, optimizer, rate, samples, updates, batches, lag):
    """One seed under a fixed clip, sample by sample, in numpy: gradients from p alone, no autograd, no shared code."""
    generator = torch.Generator().manual_seed(0)
    theta = np.log(np.array(world.start))
    decisions, answers = theta.shape
    mean, square, rewards, count, drawn = np.zeros_like(theta), 0.0, [], 0, []
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
        for update in range(updates):
            p = np.exp(theta) / np.exp(theta).sum(-1, keepdims=True)
            gradient = np.zeros_like(theta)
            mine = range(update % 4, samples, 4)
            for i in mine:
                for d in range(decisions):
                    a = taken[d][i]
                    ratio = p[d, a] / old[d, a]
                    up, down = advantage[i] > 0 and ratio > 1 + high, advantage[i] < 0 and ratio < 1 - low
                    if not (up or down):
                        one = np.eye(answers)[a]
                        gradient[d] -= ratio * advantage[i] * (one - p[d]) / len(mine)
            count += 1
            if optimizer.adam:
                mean = optimizer.momentum * mean + (1 - optimizer.momentum) * gradient
                square = optimizer.beta2 * square + (1 - optimizer.beta2) * (gradient**2).mean()
                scale = math.sqrt(square / (1 - optimizer.beta2**count)) + 1e-8
                theta = theta - rate * mean / (1 - optimizer.momentum**count) / scale
            else:
                mean = optimizer.momentum * mean + gradient
                theta = theta - rate * mean
    weights = np.exp(theta[world.stages[-1].decision])
    return rewards, weights[0] / weights.sum()


@pytest.mark.parametrize(
    ("world", "rule", "optimizer", "rate", "lag"),
    [
        (rare_arm(0.1), FixedClip(0.2), Optimizer(), 2.0, 0),
        (rare_arm(0.1), FixedClip(0.2, 0.28), Optimizer(0.9), 0.3, 0),
        (two_stages(0.1), FixedClip(0.2), ADAM, 0.1, 0),
        (coin_flips(), Unclipped(), ADAM, 0.2, 0),
        (rare_arm(0.1), FixedClip(0.2), ADAM, 0.1, 2),
    ],
    ids=["SGD", "momentum", "Adam, two stages", "Adam, no clip", "Adam, stale"],
)
def test_a_table_learns_as_a_loop_over_its_samples_does(world, rule, optimizer, rate, lag):
    low, high = (rule.low, rule.high) if isinstance(rule, FixedClip) else (1.0, math.inf)
    sizes = {"samples": 64, "updates": 6, "batches": 5, "lag": lag}
    found = simulate(world, rule, optimizer, [rate], seeds=1, **sizes)
    rewards, end = by_hand(world, low, high, optimizer, rate, **sizes)
    assert found.rewards[0, 0].tolist() == pytest.approx(rewards)
    assert found.end.item() == pytest.approx(end, rel=1e-3)


def test_a_seed_means_the_same_draws_and_with_one_update_no_rule_acts():
    for rule in (FixedClip(0.2), Band()):
        found = simulate(rare_arm(0.1), rule, ADAM, [1e-9, 1e-8], seeds=3, samples=32, updates=1, batches=2)
        assert torch.equal(found.rewards[0], found.rewards[1])
    assert len(set(found.auc[0].tolist())) > 1
    once = {"seeds": 3, "updates": 1, "batches": 10}
    first, *others = [simulate(rare_arm(0.1), rule, ADAM, [0.1], **once) for rule in RULES.values()]
    assert all(torch.equal(first.rewards, table.rewards) for table in others)


def test_what_is_read_from_rewards():
    curve = torch.tensor([[[0.0, 0.6, 0.6, 0.3, 0.6, 0.6], [0.1] * 6]])
    found = Outcome(curve, curve, torch.tensor([[0.5, 0.0009]]))
    assert found.half.tolist() == [[4, 7]]  # (0.6 + 0.6 + 0.3) / 3 = 0.5 in the fourth batch; never
    assert found.lost.tolist() == [[False, True]]


@pytest.mark.parametrize(("samples", "updates", "rates"), [(24, 4, [0.1]), (32, 0, [0.1]), (32, 4, [])])
def test_a_world_refuses_numbers_that_do_not_fit(samples, updates, rates):
    with pytest.raises(ValueError, match=r"multiple of 16|above 0"):
        simulate(rare_arm(0.1), FixedClip(0.2), ADAM, rates, seeds=2, samples=samples, updates=updates)
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.5"):
        rare_arm(1.5)


# Mean reward over 80 batches, U = 16, N = 128, p = .002, Adam, best rate: measured by a program written apart from this
# one, twice (100 seeds; half-width .02 to .035).
ELSEWHERE = {BASELINE: (0.68, 0.655), BAND: (0.77, 0.751), UPPER: (0.81, 0.795)}


@pytest.mark.slow
def test_the_map_agrees_with_one_made_by_another_program():
    """At a learning rate that is good for each; 48 seeds give ± .05."""
    for rule, rate in ((BASELINE, 0.08), (BAND, 0.04), (UPPER, 0.06)):
        found = simulate(rare_arm(0.002), RULES[rule], ADAM, [rate], seeds=48).auc
        assert float(found.mean()) == pytest.approx(np.mean(ELSEWHERE[rule]), abs=0.09), rule


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
        assert [count for count, _ in run_map(TINY, cut, workers=1)] == [4]
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
    plan = Plan.of_size(size)
    assert len(plan.todo) == len(set(plan.todo))
    assert {updates for (s, _) in plan.todo if (updates := s.updates)} == {4, 16, 64}
    for name in OPTIMIZERS:
        rates = plan.learning_rates(name)
        assert rates == sorted(rates)
        assert len(rates) == plan.rates


# What it says ---------------------------------------------------------------------------------------------------------


def made_up(setting, rule, level):
    """A cell whose seeds score ``level``, ± 0.1 by turns, at the better of two rates."""
    good = [level + 0.1 * (-1) ** seed for seed in range(8)]
    bad = [x - 0.2 for x in good]
    rates, half = [0.16, 0.32, 0.64], [[9] * 8, [5] * 8, [9] * 8]
    return Cell(setting, rule, rates, [bad, good, bad], half, [1, 0.25, 1], [1, 2, 3], [4, 5, 6])


def test_scores_and_differences():
    place = TINY.places[0]
    found = of_cells([made_up(place, BASELINE, 0.5), made_up(place, BAND, 0.75)])
    score = found.score(place, BAND)
    assert (score.at_edge, score.half, score.lost) == (False, 5, 0.25)
    assert (score.auc.value, score.at_best, score.equal_rate) == pytest.approx((0.75, 0.75, 0.75))
    assert score.auc.half == pytest.approx(2.3646 * np.std([0.1, -0.1] * 4, ddof=1) / math.sqrt(8), rel=1e-3)
    apart = found.difference(place, BAND, BASELINE)
    assert (apart.value, apart.half) == pytest.approx((0.25, 0), abs=1e-9)


def test_the_rate_is_chosen_on_other_seeds_than_it_is_scored_on():
    noise = np.random.default_rng(0).normal(size=(50, 200))  # fifty rates that do not differ
    cell = replace(made_up(TINY.places[0], BASELINE, 0.5), rates=list(range(50)), auc=noise.tolist())
    assert noise.mean(1).max() > 0.1  # what choosing and scoring on the same seeds would give
    assert abs(cell.fitted.mean()) < 0.1
    assert abs(cell.curve.cross_fitted(random_halves(200)).mean()) < 0.1


@pytest.fixture
def drawn():
    places = [Place("rare arm", p, 128, u, "Adam") for p in TAILS for u in (4, 16, 64)]
    places += [Place("two stages", 0.01, 128, 16, "Adam"), Place("coin flips", 0.0, 128, 16, "Adam")]
    return [made_up(place, rule, 0.4 + 0.05 * k) for place in places for k, rule in enumerate(RULES)]


def test_the_figure_and_the_tables_show_every_place_and_say_what_is_missing(drawn):
    figure = draw_map(of_cells(drawn))
    texts = [text.get_text() for axes in figure.axes[:2] for text in axes.texts]
    assert texts[:12] == ["+0.10\n± 0.00"] * 12  # UPPER is the third rule, two steps over the clip
    assert texts[12:] == ["-0.05\n± 0.00"] * 12
    with pytest.raises(ValueError, match=r"not finished: rare arm, p = 0\.0005, 128 samples, 64 updates"):
        draw_map(of_cells(drawn[18:]))
    text = map_tables(of_cells(drawn))
    figures = "0.40 | 0.45 | 0.50 | 0.60 | +0.10 ± 0.00 | -0.05 ± 0.00 | +0.10 |"
    assert f"| Adam | 16 | 128 | 0.002 | {figures}" in text
    assert all(f"| {rule} | " in text for rule in RULES)


@pytest.fixture(scope="module")
def found():
    return Map.from_file(ROOT / "results/map/map.jsonl.gz")


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
        lines = [{"versions": {}}, *map(asdict, drawn)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        yield from enumerate(drawn, 1)

    monkeypatch.setattr("bandpo_lab.study.cells.run_map", whole)
    result = CliRunner().invoke(app, ["study", "map", "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "map.md").read_text() == map_tables(of_cells(drawn))


def test_a_folder_takes_one_map_at_a_time(tmp_path):
    with locked(tmp_path):
        result = CliRunner().invoke(app, ["study", "map", "--output-dir", str(tmp_path)])
    assert "another process is writing" in str(result.exception)


def test_a_study_file_needs_no_subcommand(tmp_path):
    for words in ([], ["run"], ["--workers", "2"]):
        result = CliRunner().invoke(app, ["study", *words, "nowhere.yaml"])
        assert "nowhere.yaml is no file" in str(result.exception)


def test_the_page_prints_the_map(found):
    page = (ROOT / "docs/theory.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) \| ([\d. /]+) \| ([\d.]+) \| [\d. /]+ \|$", page, re.M)
    assert len(rows) >= 16
    for updates, samples, p, here, width in rows:
        place = Place("rare arm", float(p), int(samples), int(updates), "Adam")
        main = [found.score(place, rule) for rule in (BASELINE, BAND, UPPER)]
        assert here == " / ".join(f"{x.at_best:.2f}" for x in main)
        assert width == f"{max(x.auc.half for x in main):.2f}"
    assert other_worlds_table(found).markdown() in page
    assert (ROOT / "results/map/map.md").read_text() == map_tables(found)
    assert found.cells.keys() == set(Plan.of_size(found.terms["size"]).todo)


def test_every_difference_of_the_page_is_the_map_s(found):
    """What docs/when.md says of the tables: its counts, each difference, and the scores at equal rates."""
    page = (ROOT / "docs/when.md").read_text()
    said = " ".join(page[page.index("## What tables say") : page.index("## What a network says")].split())
    places = found.places("rare arm", "two stages")
    upper = {place: found.difference(place, UPPER, BASELINE) for place in places}
    lower = {place: found.difference(place, BAND, UPPER) for place in places}

    def counting(gaps, sign):
        return [place for place, gap in gaps.items() if sign * gap.value > max(gap.half, 0.02)]

    gains, losses = counting(upper, 1), counting(upper, -1)
    assert f"their {len(places)} places" in said
    assert f"gains in {len(gains)} places and costs in {len(losses)}" in said
    assert [str(s) for s in gains if s.updates < 16] == ["two stages, p = 0.01, 128 samples, 4 updates, Adam"]
    assert [str(s) for s in counting(lower, 1)] == ["rare arm, p = 0.01, 128 samples, 4 updates, SGD"]
    assert f"lower side costs in {len(counting(lower, -1))} places**, by up to " in said
    named = [
        upper[Place("rare arm", 0.002, 128, 16, "Adam")],
        upper[Place("rare arm", 0.002, 32, 16, "Adam")],
        upper[Place("rare arm", 0.002, 128, 16, "Adam, β1 = 0")],
        upper[Place("rare arm", 0.0005, 128, 16, "Adam, β1 = 0")],
        upper[Place("rare arm", 0.0005, 512, 4, "Adam")],
        upper[Place("rare arm", 0.0005, 512, 64, "Adam")],
        upper[Place("two stages", 0.01, 128, 4, "Adam")],
        min(lower.values(), key=lambda gap: gap.value),
        lower[Place("rare arm", 0.01, 128, 4, "SGD")],
    ]
    assert re.findall(r"[\d.]+ ± [\d.]+\d", said) == [f"{abs(g.value):.2f} ± {g.half:.2f}" for g in named]

    place = Place("rare arm", 0.002, 128, 64, "Adam")
    cells = {rule: found.cells[place, rule] for rule in (BASELINE, UPPER)}
    scores = [dict(zip(cell.rates, cell.auc, strict=True)) for cell in cells.values()]
    low, high = ([f"{np.mean(of_rates[rate]):.2f}" for of_rates in scores] for rate in (0.02, 0.16))
    assert "{} at rate 0.02 and Band above with clip below {}".format(*low) in said
    assert "round: {} and {}.".format(*high) in said
