"""The study of one number of a batch: its numbers by hand, its cells, its report, and the committed rows."""

import hashlib
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from bandpo.core.text import as_method
from bandpo_lab.study.interval import Interval
from pages import ROOT
from reports import check_same_report
from studies import control, control_axis
from studies.control import CLIP, WORLDS, Key, Trainer, World, keys_of, read_rows, rules
from studies.control_axis import (
    ARMS,
    SEEDS,
    SIDES,
    AccountingTrainer,
    Axis,
    AxisTrainer,
    axis_settings,
    orders,
    page,
    planned_cells,
    read_expected,
    trainer_of,
    verdict_on,
)

SMALL = World(vocabulary=12, features=6, length=2, decisive=1, prompts=40, prompts_per_batch=4, group=4)


@pytest.fixture
def cell(monkeypatch):
    monkeypatch.setitem(WORLDS, "one token", SMALL)
    return replace(planned_cells()[0], minibatches=4, rates=(0.05, 0.8), seeds=range(2), batches=10)


def test_the_cells_are_those_of_the_predictions():
    cells = planned_cells()
    assert len({cell.name for cell in cells}) == len(cells) == 43
    assert f"{len(cells)} cells" in control_axis.PREDICTIONS.read_text(encoding="utf-8")
    assert not any((cell.minibatches, cell.lag, cell.epochs) == (1, 0, 1) for cell in cells)
    kinds = Counter((cell.world, cell.epochs, cell.noise) for cell in cells)
    assert kinds == {
        ("one token", 1, 0.0): 11,
        ("eight tokens", 1, 0.0): 11,
        ("one token", 4, 0.0): 9,
        ("one token", 1, 1.0): 4,
        ("one token", 1, 0.3): 6,
        ("eight tokens", 4, 0.0): 2,
    }
    others = {seed for cell in control.CELLS for seed in cell.seeds}
    assert not others & set(SEEDS)


def test_accounting_does_not_change_the_run(cell):
    plain, accounting = AxisTrainer(cell, rules()[CLIP]), trainer_of(cell, CLIP)
    for trainer in (plain, accounting):
        trainer.train()
    for ours, theirs in zip(accounting.rows(CLIP), plain.rows(CLIP), strict=True):
        assert theirs.items() <= ours.items()
    assert type(trainer_of(cell, "Band over .8")) is AxisTrainer


def test_a_row_has_the_ends_of_the_curves_of_which_the_report_reads_no_more(cell):
    whole, ends = Trainer(cell, rules()[CLIP]), AxisTrainer(cell, rules()[CLIP])
    for trainer in (whole, ends):
        trainer.train()
    for ours, theirs in zip(ends.rows(CLIP), whole.rows(CLIP), strict=True):
        assert ours["curves"]["entropy"] == theirs["curves"]["entropy"]
        for metric in ("entropy", "pass@32", "end", "AUC"):
            assert control.metric_of(ours, metric, 0.5) == control.metric_of(theirs, metric, 0.5)


def test_the_numbers_of_an_update_by_hand(cell):
    """Each token alone, with the entropy's derivative by autograd on its logits."""
    trainer = AccountingTrainer(cell)
    for _ in range(2):
        trainer._learn(trainer._sample())
    trainer._surprising.zero_()
    trainer._ledgers.zero_()
    batch = trainer._sample()
    # One update moves the ratios, so that the next one has tokens beyond the bounds.
    first, second = batch.order.chunk(2, 1)
    Trainer._update(trainer, batch, first)
    features, tokens, logp_old, advantages = trainer.part_of(batch, second)
    weights = trainer.weights.detach().clone()
    trainer._update(batch, second)
    rate, seed = 1, 0
    shares = {side: [0.0, 0.0] for side in SIDES}
    ledgers = {side: [] for side in SIDES}
    answers, length = tokens.shape[2:]
    for answer in range(answers):
        for place in range(length):
            logits = (features[0, seed, answer, place] @ weights[rate, seed]).requires_grad_()
            logp_all = logits.log_softmax(-1)
            entropy = -(logp_all.exp() * logp_all).sum()
            (slope,) = torch.autograd.grad(entropy, logits, retain_graph=True)
            token = tokens[rate, seed, answer, place]
            (direction,) = torch.autograd.grad(logp_all[token], logits)
            old, advantage = logp_old[rate, seed, answer, place], advantages[rate, seed, answer].item()
            ratio = (logp_all[token] - old).exp().item()
            side = "above" if advantage > 0 else "below"
            if -logp_all[token] > entropy and advantage:
                shares[side][0] += abs(ratio * advantage)
                shares[side][1] += abs(ratio * advantage) * (ratio > 1.2 if advantage > 0 else ratio < 0.8)
            for side, arm in SIDES.items():
                kept = []
                for name in (arm, CLIP):
                    bounds = as_method(rules()[name]).clip.bounds(old[None])
                    is_kept = ratio <= bounds.upper if advantage > 0 else ratio >= bounds.lower
                    kept.append(ratio * advantage * bool(is_kept))
                ledgers[side].append((kept[0] - kept[1]) * (slope @ direction).item())
    for index, side in enumerate(SIDES):
        of_side, beyond = trainer._surprising[index, :, rate, seed]
        assert [of_side.item(), beyond.item()] == pytest.approx(shares[side], rel=1e-3)
        exact = cell.rates[rate] * np.mean(ledgers[side])
        assert trainer._ledgers[index, 0, rate, seed].item() == pytest.approx(exact, rel=1e-3, abs=1e-7)
        assert exact != 0


def test_the_early_ledger_is_of_the_first_batches(cell):
    whole, early = AccountingTrainer(cell), AccountingTrainer(replace(cell, batches=control_axis.EARLY))
    for trainer in (whole, early):
        trainer.train()
    assert torch.equal(whole._ledgers[:, 2], early._ledgers[:, 0])
    assert not torch.equal(whole._ledgers[:, 0], early._ledgers[:, 0])


def made_rows(cells, effect_of, number_of):
    """Return rows in which the effect of each side and the numbers are given by setting."""
    rows = {}
    for index, cell in enumerate(cells):
        for place, rate in enumerate(cell.rates):
            x = 3 * index + place
            for arm in ARMS:
                for seed in cell.seeds:
                    sides = (arm.startswith("Band")) - (arm.endswith("Band"))
                    entropy = 1 + sides * effect_of(x) + 0.001 * ((seed + x) % 3) + seed % 5
                    curves = {"entropy": [entropy] * 20, "held out": [0.5] * 20, "pass@32": [0.5] * 20}
                    row = {"AUC": 0.2, "blocked above": 0.0, "curves": curves}
                    if arm == CLIP:
                        numbers = [name for names in control_axis.NUMBERS.values() for name in names]
                        row |= {
                            name: number_of(x)
                            * (-1 if name.endswith("below") and "beyond" not in name else 1)
                            for name in numbers
                        }
                    rows[Key(cell.name, arm, rate, seed)] = row
    return rows


def test_a_number_that_orders_all_settings_is_named():
    cells = planned_cells()[:6]
    ordered = made_rows(cells, lambda x: 0.01 * x, lambda x: float(x**2))
    axis = Axis(ordered)
    for name in ("ledger above", "spread below", "beyond below", "ledger below"):
        assert axis.correlations["both testbeds", name].value == pytest.approx(1, abs=0.01), name
        assert orders(axis, name)
    mixed = Axis(made_rows(cells, lambda x: 0.01 * x, lambda x: float((7 * x) % 18)))
    assert not orders(mixed, "ledger above")
    assert "Said to order the effect of its side in entropy at equal step: none." in page(mixed.rows)
    assert "step: spread above, beyond above" in page(ordered)
    # A vote by side is right if the upper side keeps and the lower one costs, and so is the ledger.
    for cells_of_row in axis.signs_table().rows:
        assert len(set(cells_of_row[2:])) == 1


def test_a_setting_without_all_its_runs_is_left_out():
    rows = made_rows(planned_cells()[:2], lambda x: 0.1, lambda x: 1.0)
    assert len(axis_settings(rows)) == 6
    del rows[Key(planned_cells()[0].name, ARMS[-1], planned_cells()[0].rates[1], SEEDS[3])]
    assert len(axis_settings(rows)) == 5


@pytest.mark.parametrize(
    ("found", "verdict"),
    [((0.8, 0.6, 0.9), "held"), ((0.8, 0.5, 0.9), "undecided"), ((0.6, 0.5, 0.65), "failed")],
)
def test_verdicts(found, verdict):
    assert verdict_on(Interval(*found), 0.7) == verdict


def test_predictions_name_numbers_and_testbeds():
    names = {"above", "below"}
    for testbed, number, at_least in read_expected():
        assert testbed in (*control_axis.LEVELS, "both testbeds")
        assert number.split()[-1] in names
        assert 0 < at_least < 1


# The committed rows ---------------------------------------------------------------------------------------------------

ROWS = ROOT / "research/results/control/axis.jsonl.gz"
REPORT = ROOT / "research/reports/control/axis.md"
AS_COMMITTED_BEFORE_THE_RUNS = "9e247066f4447bdf5d662d6ff9a4b291b65e1b1392774369bac7d114dd662919"


@pytest.fixture(scope="module")
def committed():
    return read_rows(ROWS)


def test_the_predictions_are_those_that_were_committed_before_the_runs():
    text = control_axis.PREDICTIONS.read_bytes().replace(b"\r\n", b"\n")
    assert hashlib.sha256(text).hexdigest() == AS_COMMITTED_BEFORE_THE_RUNS


def test_the_committed_report_is_that_of_the_rows(committed):
    check_same_report(REPORT.read_text(encoding="utf-8"), page(committed))


def test_the_rows_are_planned(committed):
    planned = {key for cell in planned_cells() for arm in cell.arms for key in keys_of(cell, arm, cell.seeds)}
    assert committed.keys() <= planned
    whole = [cell for cell in planned_cells() if any(key.cell == cell.name for key in committed)]
    assert len(committed) == sum(len(keys_of(cell, arm, cell.seeds)) for cell in whole for arm in cell.arms)
    for name in ("research/README.md", "research/reports/README.md"):
        assert f"{len(whole)} of 43 cells" in (ROOT / name).read_text(encoding="utf-8")


def test_a_rank_correlation_by_plain_arithmetic(committed):
    axis = Axis(committed)
    numbers, effects = [], []
    for setting in axis.settings:
        if setting.cell.world != "one token" or setting.cell.noise == 1:
            continue
        curves = {
            arm: np.mean(
                [
                    np.mean(committed[setting.cell.name, arm, setting.rate, seed]["curves"]["entropy"][10:])
                    for seed in SEEDS
                ]
            )
            for arm in ("Band over .8", CLIP)
        }
        effects.append(curves["Band over .8"] - curves[CLIP])
        numbers.append(
            np.mean(
                [committed[setting.cell.name, CLIP, setting.rate, seed]["ledger above"] for seed in SEEDS]
            )
        )
    expected = stats.spearmanr(numbers, effects).statistic
    found = axis.correlations["one token", "ledger above"].value
    assert found == pytest.approx(expected, abs=1e-6)
    assert not math.isnan(expected)


def test_what_the_page_says_of_pass_at_32_beyond_the_dose(committed):
    """At a spread of 0.2 and more, by scipy's paired test of the rows alone."""
    sure, near = [], []
    for setting in axis_settings(committed):
        if setting.number("spread").mean() < 0.2:
            continue
        ours, theirs = (
            [row["curves"]["pass@32"][-1] for row in setting.rows[arm]]
            for arm in ("Band over .8", "3 over .8")
        )
        sure.append(stats.ttest_rel(ours, theirs).confidence_interval().low > 0)
        blocked = [control_axis.blocked_above([setting], arm) for arm in ("Band over .8", "3 over .8")]
        near.append(abs(blocked[0] - blocked[1]) < 0.07)
    said = " ".join((ROOT / "docs/when.md").read_text(encoding="utf-8").split())
    number = f"all {len(sure)}" if all(sure) else f"{sum(sure)} of {len(sure)}"
    assert f"not predicted, in {number} toy settings where log r spread by 0.2 or more" in said
    assert all(near)


def test_no_number_orders_both_testbeds(committed):
    """The page says so."""
    axis = Axis(committed)
    assert not [name for name in {number for _, number in axis.correlations} if orders(axis, name)]
    said = " ".join((ROOT / "docs/when.md").read_text(encoding="utf-8").split())
    assert "ordered it in both toy policies" in said
