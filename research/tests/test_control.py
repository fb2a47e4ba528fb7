"""The testbed of the control: its rules, its tasks, its updates against torch's own, and its predictions."""

import hashlib
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from bandpo.core.loss import policy_loss
from bandpo.core.text import as_method
from bandpo_lab.study.interval import student
from pages import ROOT
from reports import check_same_report
from studies import control
from studies.control import (
    BEST,
    BEST_OF_MORE,
    CELLS,
    CLIP,
    HELD_OUT,
    INTERACTION,
    PRIMARY,
    SMALLEST,
    STUDY,
    WORLDS,
    Cell,
    CellScores,
    Key,
    Measured,
    Trainer,
    World,
    all_keys,
    all_predictions,
    control_of,
    control_table,
    keys_of,
    metric_of,
    minus,
    page,
    parts_of,
    power_of,
    read_rows,
    rules,
    settings_of_rows,
    shows,
    side_effects,
    task_of,
    verdicts_table,
)
from studies.predictions import read_predictions

SMALL = World(vocabulary=12, features=6, length=3, decisive=1, prompts=40, prompts_per_batch=4, group=4)
PREDICTIONS = control.PREDICTIONS


@pytest.fixture
def cell(monkeypatch):
    monkeypatch.setitem(WORLDS, "small", SMALL)
    return Cell("x", "small", 4, (0.01, 0.03), range(3), 0.3, batches=4)


def test_the_rules_are_all_pairs_of_sides():
    assert len(rules()) == 5 * 3 + 1
    batch = torch.tensor([[0.02]]).log()
    for name, text in rules().items():
        upper, _, lower = name.partition(" over ")
        bounds = as_method(text).clip.bounds(batch)
        if upper in control.UPPER:
            assert bounds.upper.item() == pytest.approx(float(upper))
        if lower in control.LOWER:
            assert bounds.lower.item() == pytest.approx(float(lower))
    above, both = (as_method(rules()[name]).clip.bounds(batch) for name in ("Band over .8", "Band over Band"))
    assert torch.equal(above.upper, both.upper)
    assert both.lower < above.lower


def test_a_task_is_that_of_its_seed_and_neutral_tokens_are_right():
    together, alone = task_of(SMALL, [3, 4]), task_of(SMALL, [4])
    for both, one in zip(together, alone, strict=True):
        assert torch.equal(both[1], one[0])
    assert together.right[:, :, SMALL.decisive :].all()
    assert not together.right[:, :, 0].all()
    assert together.features.shape == (2, SMALL.prompts + HELD_OUT, 3, 7)


def test_held_out_prompts_are_not_trained_on(cell):
    trainer = Trainer(cell, "FixedClip(0.2)")
    for _ in range(20):
        prompts = trainer._draw(trainer._generators[0], 16)[0]
        assert prompts.min() >= HELD_OUT
        assert len(set(prompts.tolist())) == SMALL.prompts_per_batch


def test_an_update_is_that_of_torchs_adam_on_one_policy(cell):
    """A rate and a seed alone, by a linear layer, torch's optimizer and the loss of its own answers."""
    method = as_method(rules()["Band over .8"])
    trainer = Trainer(cell, method)
    batch = trainer._sample()
    rate, seed = 1, 2
    layer = trainer.task.start[seed].clone().requires_grad_()
    optimizer = torch.optim.Adam([layer], lr=cell.rates[rate], betas=(0.9, control.BETA2), eps=1e-8)
    for part in batch.order.chunk(cell.minibatches, 1):
        trainer._update(batch, part)
        of_seed = part[seed]
        tokens, logp_old = (values[rate, seed][of_seed] for values in (batch.tokens, batch.logp_old))
        logp = (
            (batch.features[0, seed][of_seed] @ layer).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        )
        loss = policy_loss(
            logp, logp_old, batch.advantages[rate, seed][of_seed], method=method, aggregation="token-mean"
        )
        optimizer.zero_grad()
        loss.loss.backward()
        optimizer.step()
    assert torch.allclose(trainer.weights[rate, seed], layer, atol=1e-5)
    assert not torch.allclose(trainer.weights[rate, seed], trainer.task.start[seed], atol=1e-2)


def test_a_run_does_not_depend_on_the_runs_beside_it(cell):
    def rows(seeds, rates):
        trainer = Trainer(replace(cell, rates=rates, lag=1, epochs=2, noise=0.3), rules()[CLIP], seeds)
        trainer.train()
        return {Key(*(row[name] for name in Key._fields)): row for row in trainer.rows(CLIP)}

    together, alone = rows([0, 1, 2], (0.01, 0.03)), rows([1], (0.03,))
    assert len(together) == 6
    key = Key("x", CLIP, 0.03, 1)
    for name, values in alone[key]["curves"].items():
        assert together[key]["curves"][name] == pytest.approx(values, abs=2e-4), name
    assert together[key]["AUC"] == pytest.approx(alone[key]["AUC"], abs=2e-4)
    assert together[key]["AUC"] != together[Key("x", CLIP, 0.03, 2)]["AUC"]
    assert len(together[key]["curves"]["entropy"]) == 1
    assert together[key]["spread"] == pytest.approx(alone[key]["spread"], abs=2e-4) != 0


def test_rewards_at_random_teach_nothing(cell):
    """If all rewards are noise, the reward on held-out prompts does not rise as it does with right answers."""
    gains = []
    for noise in (0.0, 1.0):
        trainer = Trainer(replace(cell, batches=40, rates=(0.03,), noise=noise), "GRPO()", range(24))
        trainer.train()
        rewards = torch.stack(trainer.curves["held out"], -1)[0]
        gains.append((rewards[:, -1] - rewards[:, 0]).mean().item())
    assert gains[0] > 0.05
    assert gains[0] > gains[1] + 0.05


def test_what_is_blocked_is_of_the_side_that_blocks(cell):
    sharp = replace(cell, batches=4, rates=(0.3,))
    blocked = {}
    for name, text in (("both", "FixedClip(0.1)"), ("none", "Unclipped()"), ("above", "FixedClip(1.0, 0.1)")):
        trainer = Trainer(sharp, text)
        trainer.train()
        rows = [*trainer.rows(name)]
        blocked[name] = [sum(row[f"blocked {side}"] for row in rows) for side in ("above", "below")]
    assert min(blocked["both"]) > 0
    assert blocked["none"] == [0, 0]
    assert blocked["above"][0] > 0 == blocked["above"][1]


def test_the_program_goes_on_where_its_file_ends(cell, monkeypatch, tmp_path):
    few = replace(cell, arms=(CLIP, "no bound"), seeds=range(2))
    monkeypatch.setattr(control, "STUDY", [few])
    file = tmp_path / "rows.jsonl"
    control.main([str(file)])
    first = file.read_text()
    assert len(first.splitlines()) == 2 * 2 * 2
    control.main([str(file)])
    assert file.read_text() == first
    kept = [line for line in first.splitlines() if json.loads(line)["arm"] == CLIP]
    file.write_text("\n".join(kept) + "\n")
    control.main([str(file)])
    again = [json.loads(line) | {"seconds": 0} for line in file.read_text().splitlines()]
    assert again == [json.loads(line) | {"seconds": 0} for line in first.splitlines()]


def test_each_prediction_has_its_cell_and_the_seeds_are_no_pilots():
    worlds = {f"{cell.name} at {rate:g}" for cell in CELLS for rate in cell.rates}
    worlds |= {f"{cell.name} at {rate}" for cell in CELLS for rate in (BEST, BEST_OF_MORE)}
    for prediction in all_predictions():
        assert prediction.world in worlds
        assert {prediction.arm, prediction.minus} <= set(rules())
        assert prediction.metric in ("entropy", "pass@32", "end", "AUC")
    pilots = {seed for cell in CELLS if cell.name.startswith("pilot") for seed in cell.seeds}
    others = [cell for cell in CELLS if not cell.name.startswith("pilot")]
    assert not pilots & {seed for cell in others for seed in cell.seeds}
    runs = sum(len(keys_of(cell, arm, seeds)) for cell in others for arm, seeds in parts_of(cell))
    assert f"All {runs:,} runs" in PREDICTIONS.read_text()
    for cell in STUDY:
        assert min(cell.higher_rates) > max(cell.rates)
        rates = " and ".join(f"{rate:g}" for rate in cell.higher_rates)
        assert f"{cell.name}: {rates}." in " ".join(control.MORE_RATES.read_text().lower().split())
    assert all(0.0125 in cell.rates for cell in CELLS)


# The report -----------------------------------------------------------------------------------------------------------


def made_row(entropy, end, reward=0.2, pass_at_32=0.5):
    """Return what the report reads of a row: an entropy that falls to a value, and a held-out reward that rises."""
    steps = [0.25, 0.5, 0.75, 1.0]
    curves = {
        "entropy": [4 * entropy, 2 * entropy, entropy, entropy],
        "held out": [end * step for step in steps],
        "pass@32": [0.0, 0.0, 0.0, pass_at_32],
    }
    return {"AUC": reward, "spread": 0.1, "blocked above": 0.0, "blocked below": 0.0, "curves": curves}


def made_rows(value_of, cell=STUDY[0], rates=None):
    """Return rows of a cell, with the keywords of `made_row` by rule, rate and seed."""
    return {
        Key(cell.name, arm, rate, seed): made_row(**value_of(arm, rate, seed))
        for arm in cell.arms
        for rate in rates or cell.rates
        for seed in cell.seeds
    }


def additive(arm, rate, seed):
    """Return an entropy to which each side adds its own, and which the seed moves more than any side."""
    upper, _, lower = arm.partition(" over ")
    gain = {"Band": 0.3, "3": 0.2, "2": 0.1}.get(upper, 0.0) - {"Band": 0.15}.get(lower, 0.0)
    return {"entropy": 1 + gain + seed % 7 + 0.01 * ((seed * len(arm)) % 5), "end": 0.5}


def test_metrics_by_hand():
    row = made_row(1.0, end=0.8, reward=0.3, pass_at_32=0.9)
    found = [metric_of(row, metric, 0.3) for metric in ("AUC", "end", "pass@32", "entropy")]
    assert found == [0.3, 0.8, 0.9, 1.0]
    # Between 0.2, where the entropy is 4, and 0.4, where it is 2.
    assert metric_of(row, "entropy at reward", 0.3) == pytest.approx(3.0)
    assert metric_of(row, "entropy at reward", 0.1) == 4.0
    assert math.isnan(metric_of(row, "entropy at reward", 0.9))


def test_adjusted_intervals_are_students():
    values = [0.1, 0.3, -0.1, 0.2, 0.25]
    found = Measured(student(values), len(values))
    assert found.adjusted(1) == pytest.approx(found.interval)
    assert found.adjusted(20) == pytest.approx(student(values, 1 - 0.05 / 20))


def test_the_effect_of_a_side_is_read_off_over_all_others():
    rows = made_rows(additive, rates=(0.0125,))
    scores = CellScores(STUDY[0], rows)
    effects = {name: scores.measure(side, "entropy", 0.0125) for name, side in side_effects().items()}
    values = {name: effect.interval.value for name, effect in effects.items()}
    expected = {
        "upper 1.28": 0,
        "upper 2": 0.1,
        "upper 3": 0.2,
        "upper Band": 0.3,
        "lower .3": 0,
        "lower Band": -0.15,
    }
    assert values == pytest.approx(expected, abs=0.02)
    assert effects["upper Band"].seeds == 64
    # The seeds, which differ most, drop out of a paired difference.
    assert effects["upper Band"].interval.half < 0.01
    assert scores.measure(INTERACTION, "entropy", 0.0125).interval.value == pytest.approx(0, abs=0.04)
    for contrast in (INTERACTION, *side_effects().values()):
        assert sum(contrast.values()) == pytest.approx(0)


def test_each_rule_is_at_its_best_rate_by_mean_reward():
    best = {"Band over .8": 0.0125, "3 over .8": 0.025}

    def rate_matters(arm, rate, seed):
        reward = 0.3 if rate == best.get(arm, 0.00625) else 0.2
        return {"entropy": rate, "end": 10 * rate, "reward": reward + 0.001 * (seed % 5)}

    scores = CellScores(STUDY[0], made_rows(rate_matters))
    assert scores.best_rate("Band over .8") == (0.0125, False)
    assert scores.best_rate("3 over .8") == (0.025, True)
    for metric, value in (("end", -0.125), ("entropy", -0.0125), ("AUC", 0)):
        assert scores.measure(PRIMARY, metric, BEST).interval.value == pytest.approx(value)
    # 0.4 is not reached by ends of 0.125 and 0.25.
    assert scores.measure(PRIMARY, "entropy at reward", BEST) is None
    few = CellScores(STUDY[0], made_rows(rate_matters, rates=(0.0125,)))
    assert few.best_rate("3 over .8") is None
    assert few.measure(PRIMARY, "end", BEST) is None


def test_more_rates_are_of_the_rules_that_have_them_and_change_no_first_best():
    """At a higher rate clip 0.2 learns more, and the other rules less."""

    def rate_matters(arm, rate, seed):
        reward = 0.2 + (rate == 0.025) * 0.1 + (rate == 0.05) * (0.2 if arm == CLIP else -0.1)
        return {"entropy": rate, "end": 0.5, "reward": reward + 0.001 * (seed % 5)}

    cell = STUDY[0]
    every = cell.with_higher_rates()
    assert every.rates == (*cell.rates, 0.05, 0.1)
    rows = made_rows(rate_matters, cell) | made_rows(rate_matters, every)
    first, more = CellScores(cell, rows), CellScores(every, rows)
    assert first.best_rate(CLIP) == first.best_rate("no bound") == (0.025, True)
    assert more.best_rate(CLIP) == (0.05, False)
    assert more.best_rate("Band over .8") == (0.025, False)
    gains = [
        scores.measure(minus("Band over .8", CLIP), "AUC", rate).interval.value
        for scores, rate in ((first, BEST), (more, BEST_OF_MORE))
    ]
    assert gains == pytest.approx([0, -0.1])
    # A rule that is not run at higher rates has no difference there.
    assert more.measure(minus("no bound", CLIP), "AUC", BEST_OF_MORE) is None
    assert more.measure(minus("no bound", CLIP), "entropy at reward", BEST_OF_MORE) is None


def test_seeds_without_both_runs_are_left_out_and_counted():
    rows = made_rows(additive, rates=(0.0125,))
    for seed in range(2000, 2010):
        del rows[Key("one token, 64", "Band over .8", 0.0125, seed)]
    never = Key("one token, 64", "3 over .8", 0.0125, 2020)
    rows[never] = made_row(1.0, end=0.1)
    scores = CellScores(STUDY[0], rows)
    assert scores.measure(PRIMARY, "entropy", 0.0125).seeds == 54
    assert scores.measure(PRIMARY, "entropy at reward", 0.0125).seeds == 53
    text = page(rows)
    assert "| Band over .8 | 54 of 64 |" in text
    assert "| one token, 64 | 1014 of 1024 | 1014 of 5120 | 0 of 1024 |" in text
    assert "| 3 over .8 | 64 of 64 |" in text
    verdicts = [
        line for line in text.splitlines() if line.endswith(("held |", "failed |", "undecided |", "open |"))
    ]
    assert len(verdicts) == len(all_predictions())
    assert sum(line.endswith("| not run | – | open |") for line in verdicts) > 0


@pytest.mark.parametrize(("gain", "says"), [(0.1, "shows"), (0.02, "does not show"), (-0.1, "does not show")])
def test_the_control_shows_if_it_is_above_0_and_large_enough(gain, says):
    def value_of(arm, rate, seed):
        return {"entropy": 1 + gain * (arm == "2 over .8") + 0.001 * (seed % 3 + len(arm) % 2), "end": 0.5}

    settings = settings_of_rows(made_rows(value_of, rates=(0.0125,)))
    [row] = control_table(settings).rows
    assert row[-1] == says


def test_power_is_the_share_of_simulated_studies():
    noise = np.random.default_rng(0).normal(0.02, 0.1, (2000, 32))
    found = np.mean([student(values).low > 0 for values in noise])
    assert power_of(0.1, 32, 0.02) == pytest.approx(found, abs=0.03)


def test_rates_and_rules_are_chosen_by_options(cell, monkeypatch, tmp_path):
    few = replace(cell, arms=(CLIP, "no bound"), seeds=range(2), higher_rates=(0.1,))
    monkeypatch.setattr(control, "STUDY", [few])
    file = tmp_path / "rows.jsonl"
    control.main([str(file), "--rate", "0.03", "--arm", CLIP])
    assert read_rows(file).keys() == {Key("x", CLIP, 0.03, seed) for seed in range(2)}
    # What is missing comes after, and no row twice: clip 0.2 is also run at the higher rate.
    control.main([str(file)])
    assert len(file.read_text().splitlines()) == len(read_rows(file)) == 2 * 2 * 2 + 2


# The committed rows ---------------------------------------------------------------------------------------------------

ROWS = ROOT / "research/results/control/rows.jsonl.gz"
REPORT = ROOT / "research/reports/control/report.md"
AS_COMMITTED_BEFORE_THE_RUNS = "f07ef291d16d33eebaaa0184cfe1770c97b372006c170ea72b004d73a64fe18e"
MORE_RATES_AS_COMMITTED = "634c1b47fd166fce94261836ab3f86f7055a2907af08981b27d6854f6829f633"


@pytest.fixture(scope="module")
def committed():
    return read_rows(ROWS)


@pytest.fixture(scope="module")
def settings(committed):
    return {setting.name: setting for setting in settings_of_rows(committed)}


@pytest.mark.parametrize(
    ("file", "digest"),
    [(PREDICTIONS, AS_COMMITTED_BEFORE_THE_RUNS), (control.MORE_RATES, MORE_RATES_AS_COMMITTED)],
)
def test_the_predictions_are_those_that_were_committed_before_the_runs(file, digest):
    text = file.read_bytes().replace(b"\r\n", b"\n")
    assert hashlib.sha256(text).hexdigest() == digest


def test_the_committed_report_is_that_of_the_rows(committed):
    check_same_report(REPORT.read_text(encoding="utf-8"), page(committed))


def test_the_rows_are_planned_and_their_seeds_whole(committed):
    planned = {key for cell in STUDY for each in (cell, cell.with_higher_rates()) for key in all_keys(each)}
    assert committed.keys() <= planned
    # Each rule has all seeds of a rate, or none, but for one token at four rates.
    counts = Counter((key.cell, key.arm, key.rate) for key in committed)
    assert set(counts.values()) <= {16, 64}
    for row in committed.values():
        assert [len(curve) for curve in row["curves"].values()] == [20, 20, 20]


def test_the_primary_differences_by_plain_arithmetic(committed, settings):
    """From the rows alone, by scipy's paired test, which shares nothing with the report."""
    for world in ("one token, 64", "eight tokens, 64"):
        for metric, curve in (("pass@32", "pass@32"), ("end", "held out")):
            values = []
            for arm in ("Band over .8", "3 over .8"):
                rows = [committed[world, arm, 0.0125, seed] for seed in range(2000, 2064)]
                values.append([row["curves"][curve][-1] for row in rows])
            expected = stats.ttest_rel(*values).confidence_interval(1 - 0.05 / 4)
            found = settings[f"{world} at 0.0125"].scores.measure(PRIMARY, metric, 0.0125).adjusted(4)
            if np.ptp(np.subtract(*values)):
                assert found[1:] == pytest.approx([*expected], abs=1e-9)
            else:
                assert found == (0, 0, 0)


def test_entropy_at_equal_step_by_plain_arithmetic(committed, settings):
    gaps = []
    for seed in range(2000, 2064):
        ours, theirs = (
            committed["one token, 64", arm, 0.0125, seed]["curves"]["entropy"] for arm in ("2 over .8", CLIP)
        )
        gaps.append(np.mean(ours[10:]) - np.mean(theirs[10:]))
    found = settings["one token, 64 at 0.0125"].measured["clip", "2 over .8", "entropy"].interval
    assert found.value == pytest.approx(np.mean(gaps))
    assert found[1:] == pytest.approx([*stats.ttest_1samp(gaps, 0).confidence_interval()])


def test_the_page_of_reports_counts_all_runs(committed):
    readme = " ".join((ROOT / "research/reports/README.md").read_text(encoding="utf-8").split())
    first = {key for cell in STUDY for key in all_keys(cell)}
    higher = {key for cell in STUDY for key in all_keys(cell.with_higher_rates())} - first
    counts = [len(committed.keys() & some) for some in (first, higher)]
    said = f"{counts[0]:,} of {len(first):,} runs, and {counts[1]:,} of {len(higher):,} at higher rates"
    assert said in readme


def test_each_prediction_with_runs_is_judged_on_all_seeds(settings):
    rows = verdicts_table([*settings.values()]).rows
    first = len(read_predictions(PREDICTIONS))
    assert [cells[-2] for cells in rows[:first]] == ["64"] * first
    assert {cells[-2] for cells in rows[first:]} <= {"64", "–"}
    readme = " ".join((ROOT / "research/reports/README.md").read_text(encoding="utf-8").split())
    for name, some in (("predictions", rows[:first]), ("predictions of higher rates", rows[first:])):
        counted = Counter(cells[-1] for cells in some)
        verdicts = [
            (counted["held"], "held"),
            (counted["failed"], "failed"),
            (counted["undecided"], "undecided"),
        ]
        said = ", ".join(
            f"{number} {'are undecided' if word == 'undecided' else word}" for number, word in verdicts
        )
        assert f"Of {len(some)} {name} {said} and {counted['open']} are open." in readme


@pytest.fixture(scope="module")
def said():
    """The page of conclusions, in one line."""
    return " ".join((ROOT / "docs/when.md").read_text(encoding="utf-8").split())


PAIR = ("one token, 64 at 0.0125", "eight tokens, 64 at 0.0125")


def test_what_the_page_says_of_both_sides(settings, said):
    pair = [settings[name] for name in PAIR]
    assert all(shows(control_of(setting)) for setting in pair)
    assert "[0.8, 2] surely keeps entropy at equal step in both policies" in said
    for setting in pair:
        above, below, both = (
            setting.measured["clip", arm, "entropy"].interval
            for arm in ("Band over .8", "1.2 over Band", "Band over Band")
        )
        assert above.low > 0 > below.high
        assert both.low < 0
    assert "Band's upper bound kept entropy against clip 0.2, its lower bound cost some" in said
    assert "`BandPO()`, which has both, kept none" in said


def test_what_the_page_says_of_a_constant_of_the_same_dose(settings, said):
    pair = [settings[name] for name in PAIR]
    adjusted = [setting.scores.measure(PRIMARY, "pass@32", 0.0125).adjusted(4) for setting in pair]
    assert [interval.low > 0 for interval in adjusted] == [True, False]
    assert "more pass@32 than a constant that blocks as much in one of the two policies, as predicted" in said
    # Of about its dose: what both block of the gradient on rare winners.
    for setting in pair:
        ours, theirs = (
            np.mean(
                [
                    setting.scores.rows[Key(setting.scores.cell.name, arm, 0.0125, seed)]["blocked above"]
                    for seed in setting.scores.cell.seeds
                ]
            )
            for arm in PRIMARY
        )
        assert abs(ours - theirs) < 0.005


def test_what_the_page_says_of_best_rates(settings, said):
    pair = [settings[f"{cell} at best of more rates"] for cell in ("one token, 64", "eight tokens, 64")]
    for setting in pair:
        best = [setting.scores.best_rate(arm) for arm in setting.scores.cell.arms]
        assert not any(place[1] for place in best if place)

    def gaps(other, metric):
        return [
            setting.scores.measure(minus("Band over .8", other), metric, BEST_OF_MORE).interval
            for setting in pair
        ]

    kept, reward = gaps(CLIP, "pass@32"), gaps(CLIP, "AUC")
    assert min(gap.low for gap in kept) > 0
    assert reward[0].high < 0
    assert -SMALLEST["AUC"] < reward[1].low < 0 < reward[1].high < SMALLEST["AUC"]
    assert f"`BandAbove()` up to {max(gap.value for gap in kept):.3f} more pass@32 than clip 0.2" in said
    assert "At best rates `BandAbove()` had more pass@32 than clip 0.2" in said
    assert f"and with one token {-reward[0].value:.3f} less mean reward" in said
    assert all(gap.low > 0 for gap in gaps(CLIP, "entropy"))


def test_what_the_page_says_of_best_rates_if_adjusted(settings, said):
    comparisons = sum(len(setting.measured) for setting in settings.values())
    at_best = [setting for name, setting in settings.items() if name.endswith(BEST_OF_MORE)]

    def stays_sure(setting, contrast, metric):
        low, high = setting.scores.measure(contrast, metric, BEST_OF_MORE).adjusted(comparisons)[1:]
        return low > 0 or high < 0

    with_64 = [setting for setting in at_best if setting.scores.cell.minibatches == 64]
    gains = [
        stays_sure(setting, minus("Band over .8", CLIP), metric)
        for metric in ("pass@32", "AUC")
        for setting in with_64
    ]
    assert gains == [False, True, False, False]
    assert [setting.scores.cell.world for setting in with_64] == ["one token", "eight tokens"]
    assert "sure if adjusted for the number of comparisons with eight tokens" in said
    assert len(at_best) == 4
    assert not any(stays_sure(setting, PRIMARY, metric) for setting in at_best for metric in SMALLEST)
    for metric in ("pass@32", "AUC"):
        values = [setting.scores.measure(PRIMARY, metric, BEST_OF_MORE).interval.value for setting in at_best]
        assert min(values) < 0 < max(values)
    assert (
        "At the best of all rates it had less in some, more in others; none stays sure if adjusted for their number."
        in said
    )
    assert "against a constant that blocks as much, not settled." in said


def test_what_the_page_says_beside_the_numbers_of_the_paper(settings, said):
    at_one_rate, more = settings[PAIR[0]], settings["one token, 64 at best of more rates"]
    entropy, solved = (
        at_one_rate.measured["clip", "Band over Band", metric].interval for metric in ("entropy", "pass@32")
    )
    place = [*at_one_rate.scores.cell.rates].index(0.0125)
    means = [at_one_rate.scores.scores(CLIP, metric)[place].mean() for metric in ("entropy", "pass@32")]
    assert max(entropy.high, solved.high) < 0
    assert f"| {entropy.value:.3f} nats of {means[0]:.2f} |" in said
    assert f"| at the end {solved.value:.3f} of {means[1]:.2f} |" in said
    reward = more.scores.measure(minus("Band over Band", CLIP), "AUC", BEST_OF_MORE).interval
    assert reward.high < 0
    assert f"| {reward.value:.3f} of {more.scores.scores(CLIP, 'AUC').mean(1).max():.2f} |" in said
