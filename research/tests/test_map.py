"""Tables, their optimizers and the map of arms: against a loop over samples, against torch, its file, and its page."""

import json
import math
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import map_page
import when_tables

pytest.importorskip("matplotlib")
from bandpo import Band, FixedClip, Unclipped
from pages import ROOT
from studies import tables_map
from studies.bandits import (
    falling_rate,
    positions,
    random_rewards,
    rare_arm,
    simulate,
    two_stages,
    zipf,
)
from studies.grid import (
    ABOVE,
    ARMS,
    BASELINE,
    BEST_CONSTANT,
    OUTCOMES,
    RANDOM_REWARDS,
    Cell,
    Grid,
    GridPlan,
    Key,
    Setting,
    run_cell,
    run_grid,
)
from studies.grid_report import draw_grid, grid_text
from studies.learning_rates import Curve, difference, remembering, simulated_coverage
from studies.optimizers import OPTIMIZERS, HeadAndTrunk

TINY = GridPlan("quick", seeds=4, batches=3, settings=[Setting("uniform", 0.05, 32, 2, 1, 0)])


class AdamByHand:
    """Adam of the logits as its paper has it, in numpy."""

    def __init__(self, theta, shared):
        self.theta, self.shared = theta, shared
        self.mean, self.square, self.count = np.zeros_like(theta), np.zeros_like(theta), 0

    def step(self, gradient, rate):
        self.count += 1
        squares = (gradient**2).mean() if self.shared else gradient**2
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.99 * self.square + 0.01 * squares
        scale = np.sqrt(self.square / (1 - 0.99**self.count)) + 1e-8
        self.theta = self.theta - rate * self.mean / (1 - 0.9**self.count) / scale


class MomentumByHand:
    """Gradient descent with momentum 0.9, in numpy."""

    def __init__(self, theta):
        self.theta, self.velocity = theta, np.zeros_like(theta)

    def step(self, gradient, rate):
        self.velocity = 0.9 * self.velocity + gradient
        self.theta = self.theta - rate * self.velocity


BY_HAND = {
    "adam": lambda theta: AdamByHand(theta, shared=False),
    "shared-moment": lambda theta: AdamByHand(theta, shared=True),
    "momentum": MomentumByHand,
}


def by_hand(world, low, high, rate, optimizer, samples, epochs, minibatches, batches, lag):
    """One seed under a fixed clip, sample by sample, in numpy: gradients from p alone, no autograd, no shared code."""
    generator = torch.Generator().manual_seed(0)
    theta = np.log(np.array(world.start))
    decisions, answers = theta.shape
    policy = BY_HAND[optimizer](theta)
    rewards, drawn = [], []
    mass, blocked = 0.0, 0.0
    hard, common = 0.0, 0.0
    for batch in range(batches):
        stage = world.stages[batch * len(world.stages) // batches]
        draws = torch.rand(1, decisions + 1, samples, generator=generator)[0].double().numpy()
        theta = policy.theta
        old = np.exp(theta) / np.exp(theta).sum(-1, keepdims=True)
        taken = [np.searchsorted(old[d].cumsum()[:-1], draws[d]).tolist() for d in range(decisions)]
        chances = np.array(stage.chances)[taken[stage.decision]]
        reward = (draws[-1] < chances).astype(float)
        advantage = np.concatenate([(g - g.mean()) / (g.std(ddof=1) + 1e-4) for g in reward.reshape(-1, 16)])
        rewards.append(reward.mean())
        drawn.append((old, taken, advantage))
        for i in range(samples):
            rewarded = sum(reward[i // 16 * 16 : i // 16 * 16 + 16])
            if reward[i] and rewarded <= 4:
                for d in range(decisions):
                    hard += advantage[i]
                    common += advantage[i] * (old[d, taken[d][i]] >= 0.1)
        if batch < lag:
            continue
        old, taken, advantage = drawn[batch - lag]
        for update in range(epochs * minibatches):
            theta = policy.theta
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
            policy.step(gradient, rate)
    return rewards, blocked / mass, common / hard


@pytest.mark.parametrize(
    ("world", "rule", "optimizer", "rate", "lag"),
    [
        (zipf(0.1), FixedClip(0.2, 0.28), "shared-moment", 0.1, 0),
        (two_stages(0.1), FixedClip(0.2), "shared-moment", 0.1, 0),
        (zipf(0.05), Unclipped(), "adam", 0.2, 0),
        (rare_arm(0.09), FixedClip(0.2), "adam", 0.1, 2),
        (positions(0.1), FixedClip(0.2), "adam", 0.05, 0),
        (zipf(0.05), FixedClip(0.2), "momentum", 0.5, 1),
    ],
)
def test_a_table_learns_as_a_loop_over_its_samples_does(world, rule, optimizer, rate, lag):
    low, high = (rule.low, rule.high) if isinstance(rule, FixedClip) else (1.0, math.inf)
    sizes = {"samples": 64, "epochs": 3, "minibatches": 2, "batches": 5, "lag": lag}
    outcome = simulate(world, rule, [rate], seeds=1, optimizer=optimizer, **sizes)
    rewards, blocked, luck = by_hand(world, low, high, rate, optimizer, **sizes)
    assert outcome.rewards[0, 0].tolist() == pytest.approx(rewards)
    assert outcome.blocked.item() == pytest.approx(blocked, abs=1e-5)
    assert outcome.luck.item() == pytest.approx(luck, abs=1e-5)


def test_a_head_and_a_trunk_are_trained_by_the_adam_of_torch():
    start = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(2))
    policy = HeadAndTrunk(start, seeds=2)
    # Both learning rates of a seed begin with the same parameters, and with the logits given.
    hidden = policy._hidden[:2].repeat(2, 1, 1)
    assert torch.equal(hidden, policy._hidden)
    assert torch.equal(policy.logits, start)
    offset = (start - policy._hidden @ policy._head).double()
    parameters = [policy._hidden.double().requires_grad_(), policy._head.double().requires_grad_()]
    rates = torch.tensor([0.1, 0.1, 0.3, 0.3])[:, None, None]
    optimizers = [
        torch.optim.Adam([parameters[0]], lr=0.1, betas=(0.9, 0.99)),
        torch.optim.Adam([parameters[1]], lr=0.1, betas=(0.9, 0.99)),
    ]
    draws = torch.Generator().manual_seed(3)
    for _ in range(4):
        gradient = torch.randn(start.shape, generator=draws)
        policy.step(gradient, rates)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (parameters[0] @ parameters[1]).backward(gradient.double())
        for optimizer in optimizers:
            optimizer.step()
    # torch's optimizers have one learning rate, that of the first two rows.
    expected = offset + parameters[0] @ parameters[1]
    assert torch.allclose(policy.logits[:2].double(), expected[:2], atol=1e-4)
    assert not torch.allclose(policy.logits[2:].double(), expected[2:], atol=1e-2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns_within_its_rates(optimizer):
    rates = OPTIMIZERS[optimizer].rates
    outcome = simulate(rare_arm(0.002), FixedClip(0.2), rates, seeds=8, epochs=1, optimizer=optimizer)
    scores = outcome.auc.mean(1)
    assert scores.max() > 0.5
    assert 0 < scores.argmax() < len(rates) - 1


def test_outcomes_are_of_the_policy_that_draws_a_batch():
    outcome = simulate(rare_arm(0.1), FixedClip(0.2), [0.2], seeds=3, batches=40)
    assert torch.allclose(outcome.right[..., 0], torch.tensor(0.1))
    uniform = -(0.1 * math.log(0.1) + 0.9 * math.log(0.06))
    assert outcome.entropy[..., 0].tolist() == [[pytest.approx(uniform, abs=1e-5)] * 3]
    # Rewards are 0.97 for the right answer and 0.05 for others.
    assert torch.allclose(outcome.rewards, 0.05 + 0.92 * outcome.right, atol=0.2)
    [batches] = outcome.batches_to(0.5).tolist()
    for seed, count in enumerate(batches):
        before = outcome.right[0, seed, : int(count) - 1]
        assert (before < 0.5).all()
        assert outcome.right[0, seed, int(count) - 1] >= 0.5
        assert outcome.entropy_at(0.5)[0, seed] == outcome.entropy[0, seed, int(count) - 1]
    assert outcome.batches_to(2.0).isinf().all()
    assert outcome.entropy_at(2.0).isnan().all()
    assert torch.allclose(outcome.pass_at(2), 1 - (1 - outcome.right[..., -1]) ** 2)
    assert not outcome.broken.any()


def test_a_falling_rate_ends_at_nothing_and_random_rewards_start_at_the_entropy_they_say():
    sizes = {"seeds": 2, "batches": 40, "samples": 32}
    constant = simulate(rare_arm(0.1), FixedClip(0.2), [0.2], **sizes)
    falling = simulate(rare_arm(0.1), FixedClip(0.2), [0.2], rate_schedule=falling_rate, **sizes)
    moved = [(outcome.right[..., -1] - outcome.right[..., -3]).abs().max() for outcome in (constant, falling)]
    assert moved[1] < moved[0]
    entropy = simulate(random_rewards(), FixedClip(0.2), [0.1], seeds=1, batches=1).entropy
    assert entropy.item() == pytest.approx(1.60, abs=0.01)
    with pytest.raises(ValueError, match=r"optimizer must be one of adam, .*, got 'adagrad'"):
        simulate(rare_arm(0.1), FixedClip(0.2), [0.1], seeds=1, optimizer="adagrad")


def test_a_seed_means_the_same_draws_and_with_one_update_no_rule_acts():
    once = {"seeds": 3, "epochs": 1, "minibatches": 1, "batches": 10}
    for rule in (FixedClip(0.2), Band()):
        outcome = simulate(rare_arm(0.1), rule, [1e-9, 1e-8], **once)
        assert torch.equal(outcome.rewards[0], outcome.rewards[1])
    assert len(set(outcome.auc[0].tolist())) > 1
    arms = [arm for arm in ARMS.values() if arm.kind != "schedule"]
    first, *others = [simulate(rare_arm(0.1), arm.method, [0.1], **once) for arm in arms]
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
    setting = Setting("uniform", 0.002, 128, 1, 4, 4)
    plan = GridPlan("quick", seeds=48, settings=[setting])
    keys = [Key(setting, "shared-moment", arm) for arm in (BASELINE, ABOVE)]
    results = of_cells([run_cell(plan, key) for key in keys])
    assert 0.5 < results.blocked(setting, "shared-moment") < 0.9
    scores = [results.score(*key) for key in keys]
    assert 0.05 < scores[1] - scores[0] < 0.25


# The file -------------------------------------------------------------------------------------------------------------


def of_cells(cells, /, **terms):
    return Grid({"batches": 80, "cells": len(cells), **terms}, {cell.key: cell for cell in cells})


def without_provenance(file):
    """The rows of a map, without when they were made and how long it took."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("time", "seconds")} for row in rows]


@pytest.mark.slow
def test_a_map_is_resumed_to_the_same_file_and_refuses_other_terms(tmp_path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    count = len(TINY.keys)
    assert [number for number, _ in run_grid(TINY, whole, workers=1)] == list(range(1, count + 1))
    lines = whole.read_text().splitlines(keepends=True)
    assert json.loads(lines[1]).keys() >= {"commit", "time", "machine", "seconds"}
    cut.write_text("".join(lines[: count - 2]) + lines[count - 2][:30])  # killed while it wrote
    with pytest.warns(UserWarning, match="cut off"):
        assert [number for number, _ in run_grid(TINY, cut, workers=1)] == [count - 2, count - 1, count]
    assert without_provenance(cut) == without_provenance(whole)
    results = Grid.from_file(whole)
    assert results.terms["versions"]["bandpo"]
    key = Key(TINY.settings[0], "adam", BASELINE)
    again = run_cell(TINY, key)  # the same whoever runs it
    for outcome in OUTCOMES:
        assert np.array_equal(getattr(results.cells[key], outcome), getattr(again, outcome), equal_nan=True)
    with pytest.raises(ValueError, match=r"other terms \(quick, 4 seeds\)"):
        next(run_grid(replace(TINY, seeds=5), whole, workers=1))
    (tmp_path / "other.jsonl").write_text('{"reward": 1}\n')
    with pytest.raises(ValueError, match="was not written by"):
        Grid.from_file(tmp_path / "other.jsonl")
    with pytest.raises(RuntimeError, match="failed under clip"):
        list(run_grid(replace(TINY, batches=0), tmp_path / "none.jsonl", workers=1))


@pytest.mark.slow
def test_an_interrupted_map_keeps_what_has_ended(tmp_path):
    running = run_grid(TINY, tmp_path / "map.jsonl", workers=1)
    next(running)
    with pytest.raises(KeyboardInterrupt):
        running.throw(KeyboardInterrupt)
    assert len(Grid.from_file(tmp_path / "map.jsonl").cells) == 1


@pytest.mark.parametrize("size", ["quick", "full"])
def test_no_cell_is_planned_twice(size):
    todo = GridPlan.of_size(size).keys
    assert len(todo) == len(set(todo))


# What it says ---------------------------------------------------------------------------------------------------------


def made_up(key, level):
    """A cell whose seeds score ``level``, ± 0.1 by turns, at the fourth rate, and less at the others."""
    rates = OPTIMIZERS[key.optimizer].rates
    good = np.array([level + 0.1 * (-1) ** seed for seed in range(8)])
    auc = np.tile(good - 0.2, (len(rates), 1))
    auc[3] = good
    blocked = np.full(auc.shape, 0.2 + 0.1 * key.setting.lag)
    others = {name: auc for name in OUTCOMES if name not in ("auc", "blocked")}
    return Cell(*key, rates, auc=auc, blocked=blocked, **others)


def test_the_rate_is_chosen_on_other_seeds_than_it_is_scored_on():
    noise = Curve(
        [*range(50)], np.random.default_rng(0).normal(size=(50, 200))
    )  # fifty rates that do not differ
    assert noise.best_scores.mean() > 0.1  # what choosing and scoring on the same seeds would give
    assert abs(noise.resampled_scores(np.ones((1, 200)))[0]) < 0.1


@pytest.mark.parametrize("other", [False, True])
def test_scores_of_samples_are_those_of_a_loop_over_halves(other):
    """Each half of the seeds of a sample is scored at the rate that is best on the other half."""
    rng = np.random.default_rng(0)
    curve, chooser = (Curve([1, 2, 3], rng.random((3, 9))) for _ in range(2))
    counts = rng.multinomial(9, np.full(9, 1 / 9), size=4)
    rng_of_splits = np.random.default_rng(0)
    splits = [rng_of_splits.permutation(9) < 4 for _ in range(20)]
    expected = []
    for sample in counts:
        seeds = np.repeat(np.arange(9), sample)
        total = 0.0
        for split in splits:
            for half in (split, ~split):
                choosing = (chooser if other else curve).scores[:, seeds[half[seeds]]].sum(1)
                total += curve.scores[choosing.argmax(), seeds[~half[seeds]]].sum()
        expected.append(total / (len(splits) * len(seeds)))
    scores = curve.resampled_scores(counts, chosen_by=chooser if other else None)
    assert scores == pytest.approx(expected)


def test_remembered_scores_are_computed_once_for_the_same_samples():
    calls = []

    def scores(counts):
        calls.append(len(counts))
        return counts.sum(1)

    remembered = remembering(scores)
    for counts in (np.ones((2, 3)), np.ones((2, 3)), 2 * np.ones((2, 3)), np.ones((4, 2))):
        assert (remembered(counts) == counts.sum(1)).all()
    assert calls == [2, 2, 4]


def test_intervals_are_paired_hold_the_truth_and_draw_seeds_within_their_groups():
    noise, level = np.random.default_rng(0).normal(size=(2, 3, 12)), np.array([[0.0], [1.0], [0.0]])
    ours, theirs = (Curve([1, 2, 3], level + 0.3 * x) for x in noise)
    same = difference(ours.resampled_scores, ours.resampled_scores, [0] * 12)
    assert same == (0, 0, 0)
    assert 0.9 <= simulated_coverage(ours, theirs, [0, 1] * 6) <= 0.99
    apart = Curve([1, 2, 3], ours.scores + 10.0 * (np.arange(12) % 2))  # two base models, far apart
    spread = [
        difference(apart.resampled_scores, theirs.resampled_scores, groups).half
        for groups in ([0, 1] * 6, [0] * 12)
    ]
    assert spread[0] < 1 < spread[1]


SETTINGS = [
    *(Setting(world, 0.002, 128, 1, 4, lag) for world in ("uniform", "Zipf") for lag in (0, 4)),
    Setting("uniform", 0.002, 128, 1, 4, 4, luck=0.2),
    Setting(RANDOM_REWARDS, 0.0, 128, 1, 4, 4, 0.5),
]


@pytest.fixture(scope="module")
def cells():
    """Cells in which all constants are equal, and each other arm is better by 0.05 more, but worse under momentum."""
    made: list[Cell] = []
    for setting in SETTINGS:
        for optimizer in OPTIMIZERS:
            step = -0.05 if optimizer == "momentum" else 0.05
            others = 0
            for arm in ARMS:
                others += ARMS[arm].kind != "constant"
                level = 0.4 + (step * others if ARMS[arm].kind != "constant" else 0)
                made.append(made_up(Key(setting, optimizer, arm), level))
    return made


def without_coverage(monkeypatch):
    """Leave out the simulation of how often an interval holds the truth, most of the time that a page takes."""
    monkeypatch.setattr("studies.grid.simulated_coverage", lambda *_: 0.95)


def test_the_page_says_where_all_optimizers_agree(cells, monkeypatch):
    without_coverage(monkeypatch)
    text = grid_text(of_cells(cells, seeds=8))
    by_optimizer = re.findall(r"^\| stale \(3\) \| ([a-z-]+) \| (.*) \|$", text, re.M)
    assert [name for name, _ in by_optimizer] == list(OPTIMIZERS)
    for name, row in by_optimizer:
        sign, counts = ("-", "(0, 3)") if name == "momentum" else ("+", "(3, 0)")
        assert row.split(" | ") == [f"{sign}{0.05 * k:.3f} {counts}" for k in range(1, 6)]
    # No optimizer's gain is every optimizer's.
    assert re.findall(r"^\| stale \(3\) \| (0, 0 .*) \|$", text, re.M) == ["0, 0 | 0, 0 | 0, 0 | 0, 0 | 0, 0"]
    assert "| uniform, p = 0.002, luck 0.2, 128 samples, 1 × 4 updates, lag 4 | momentum | -0.150 ± " in text
    assert "## Entropy under random rewards" in text
    assert "So far" not in text
    assert "So far 360 of 361 cells have run." in grid_text(of_cells(cells, seeds=8, cells=361))


def test_the_best_constant_is_chosen_on_other_seeds_than_it_is_scored_on(cells):
    results = of_cells(cells, seeds=8)
    curve = results.curve(SETTINGS[0], "adam", BEST_CONSTANT)
    constants = [arm for arm in ARMS.values() if arm.kind == "constant"]
    assert curve.scores.shape == (8 * len(constants), 8)
    assert results.score(SETTINGS[0], "adam", BEST_CONSTANT) == pytest.approx(0.4)


def test_the_figure_shows_every_place_where_there_is_something_to_learn(cells):
    panels = draw_grid(of_cells(cells, seeds=8)).axes
    assert len(panels) == 2 * len(OPTIMIZERS)
    assert panels[0].get_title() == "adam\nabove in 5,\nbelow in 0 of 5"


def test_a_cell_is_the_same_after_it_was_written_and_read():
    cell = run_cell(TINY, Key(TINY.settings[0], "momentum", "room by mass"))
    again = Cell.from_row(json.loads(json.dumps(cell.as_row())))
    assert again.key == cell.key
    for outcome in OUTCOMES:
        assert np.array_equal(getattr(cell, outcome), getattr(again, outcome), equal_nan=True), outcome


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_runs_and_an_interrupt_is_one_line(tmp_path, monkeypatch, cells):
    def some(plan, file, workers):
        yield 1, cells[0]
        raise KeyboardInterrupt

    monkeypatch.setattr("studies.tables_map.run_grid", some)
    with pytest.raises(SystemExit, match=r"^interrupted; the same command goes on") as end:
        tables_map.main(["--output_dir", str(tmp_path)])
    assert isinstance(end.value.code, str)  # exit status 1

    without_coverage(monkeypatch)
    header = {"versions": {}, "seeds": 8, "batches": 80, "cells": len(cells)}

    def whole(plan, file, workers):
        lines = [header, *(cell.as_row() for cell in cells)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        yield from enumerate(cells, 1)

    monkeypatch.setattr("studies.tables_map.run_grid", whole)
    tables_map.main(["--output_dir", str(tmp_path)])
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "map.md").read_text() == grid_text(Grid.from_file(tmp_path / "map.jsonl"))


# What the pages say of it ---------------------------------------------------------------------------------------------


def test_the_counts_of_entropies_on_the_page_are_those_of_the_rows():
    grid = map_page.read_parts(ROOT / "research/results/optimizers")
    constants = [name for name, arm in ARMS.items() if arm.kind == "constant"]
    cases, above_constants, below_above, below_clip = 0, 0, 0, 0
    for setting, optimizer in product(grid.settings, OPTIMIZERS):
        if setting.world != RANDOM_REWARDS:
            continue
        entropy = {arm: grid.cells[Key(setting, optimizer, arm)].entropy_at_end.mean(1) for arm in ARMS}
        for rate in (2, 4, 6):
            cases += 1
            # Within half of the last digit that the page of the map shows.
            largest = max(entropy[arm][rate] for arm in constants)
            above_constants += entropy["BandAbove"][rate] >= largest - 0.005
            below_above += entropy["Band"][rate] < entropy["BandAbove"][rate]
            below_clip += entropy["Band"][rate] < entropy["clip 0.2"][rate]
    prose = " ".join((ROOT / "research/reports/rules-compared.md").read_text().split())
    above = f"of every one of {len(constants)} constants in {above_constants} of {cases} cases"
    assert f"at least the entropy at equal step {above}" in prose.replace("ten constants", "10 constants")
    page_of_map = (ROOT / "research/reports/optimizers/map.md").read_text()
    of_luck = re.findall(r"rank correlation of luck .*? constant is (.*)\.$", page_of_map, re.M)
    correlations = [float(x) for line in of_luck for x in re.findall(r"-?0\.\d\d", line)]
    assert len(correlations) == 8
    assert f"rank correlation is {min(correlations):.2f} to {max(correlations):.2f}" in prose
    assert f"Band ended below `BandAbove` in {below_above} and below clip 0.2 in {below_clip}." in prose


@pytest.mark.slow
def test_the_committed_page_of_the_map_is_of_the_committed_rows(tmp_path):
    map_page.main(ROOT / "research/results/optimizers", tmp_path / "map.md")
    assert (tmp_path / "map.md").read_text() == (ROOT / "research/reports/optimizers/map.md").read_text()


@pytest.mark.parametrize("table", when_tables.TABLES)
def test_tables_that_no_report_has_are_the_data_s(table):
    rows = "\n".join(when_tables.TABLES[table]())
    page = when_tables.PAGES.get(table, when_tables.COMPARED).read_text()
    assert f"<!-- {table}: begin -->\n{rows}\n<!-- {table}: end -->" in page
