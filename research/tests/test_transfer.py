"""The control in the network: its updates against the loop's own, its metrics, its best rates and its predictions."""

import hashlib
import itertools
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from bandpo.audit.metrics import EDGES
from bandpo_lab.study.interval import student
from bandpo_lab.toy.fast_loop import Training
from pages import ROOT
from reports import check_same_report
from studies import control, transfer
from studies.control import CLIP, Key, minus, read_rows
from studies.equal_reward import entropy_at
from studies.predictions import read_predictions
from studies.transfer import ABOVE, CELL, COMMON_RATE, SAME_DOSE, ManyUpdates, Scores, page, study

FEW = replace(CELL, batches=2, minibatches=4)
KEY = Key(CELL.name, ABOVE, 4e-4, 3)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(transfer, "PROMPTS", 4)
    monkeypatch.setattr(transfer, "HELD_OUT", 4)
    return FEW


def test_a_run_has_the_bits_of_the_loop(few):
    """The loop's run of the same settings, with its own updates."""
    ours = ManyUpdates(KEY, few)
    theirs = Training(transfer.settings_of(KEY, few), None)
    row, run = ours.row(), theirs.run(None)
    for name, weight in theirs.network.weights.items():
        assert torch.equal(ours.network.weights[name], weight), name
    assert row["curves"]["reward"] == [round(reward, 4) for reward in run.curve("reward")]
    assert row["curves"]["entropy"] == [round(entropy, 4) for entropy in run.curve("entropy")]
    assert (row["end"], row["pass@32"]) == (run.scores["pass@1"], run.scores["pass@32"])
    assert row["AUC"] == pytest.approx(np.mean(run.curve("reward")), abs=1e-5)


def test_what_is_blocked_is_that_of_the_audit(monkeypatch):
    """At a rate at which ratios move: the audit of the loop's run has the same sums over rare winners and losers."""
    monkeypatch.setattr(transfer, "HELD_OUT", 4)
    key, cell = KEY._replace(arm=CLIP, rate=1e-3), replace(CELL, batches=2, minibatches=16)
    row, theirs = ManyUpdates(key, cell).row(), Training(transfer.settings_of(key, cell), None)
    theirs.run(None)
    rare = EDGES.index(control.RARE) + 1
    for sign, side in enumerate(("above", "below")):
        mass, blocked = (
            theirs.audit.sums[name][0, sign, :rare].sum().item() for name in ("mass", "blocked_mass")
        )
        assert 0.01 < blocked / mass < 0.99
        assert row[f"blocked {side}"] == pytest.approx(blocked / mass, abs=1e-4)


def test_the_program_goes_on_where_its_file_ends(few, tmp_path):
    keys = [KEY._replace(arm=arm) for arm in (CLIP, "no bound")]
    file = tmp_path / "rows.jsonl"
    transfer.run_missing(file, keys, few)
    first = [json.loads(line) | {"seconds": 0} for line in file.read_text().splitlines()]
    assert [row["arm"] for row in first] == [CLIP, "no bound"]
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:1]) + '{"cell": "netw')
    transfer.run_missing(file, keys, few)
    assert [json.loads(line) | {"seconds": 0} for line in file.read_text().splitlines()] == first


def made_row(entropy, reward, end=0.2):
    """Return what the report reads of a row: a reward that rises in two steps, and an entropy that falls with it."""
    curves = {"reward": [0.1] * 10 + [reward] * 20, "entropy": [2 * entropy] * 15 + [entropy] * 15}
    return {
        "AUC": reward,
        "end": end,
        "pass@32": 2 * end,
        "spread": 0.2,
        "blocked above": 0.1,
        "blocked below": 0.0,
        "curves": curves,
    }


def made_rows(value_of):
    """Return rows of all runs of the study, with the arguments of `made_row` by run."""
    return {key: made_row(*value_of(key)) for key in study()}


def test_metrics_by_hand():
    row = made_row(0.5, 0.2)
    assert transfer.metric_of(row, "entropy", 0.15) == 0.5
    assert transfer.metric_of(row, "pass@32", 0.15) == 0.4
    curves = row["curves"]
    expected = entropy_at(curves["reward"], curves["entropy"], 0.15)
    assert transfer.metric_of(row, "entropy at reward", 0.15) == expected == pytest.approx(1.0)
    assert np.isnan(transfer.metric_of(row, "entropy at reward", 0.3))


def test_each_rule_is_at_its_better_rate_and_intervals_at_one_rate_are_students():
    """Clip 0.2 is better at the higher rate, Band's upper side at the common one."""
    low, high = CELL.rates

    def value(key):
        is_better = key.rate == (high if key.arm == CLIP else low)
        return 0.5, 0.2 + 0.1 * is_better, 1000 * key.rate + 0.01 * ((key.seed * len(key.arm)) % 7)

    rows = made_rows(value)
    scores = Scores(rows)
    ends = {
        (arm, rate): np.array([rows[Key(CELL.name, arm, rate, seed)]["end"] for seed in CELL.seeds])
        for arm in (ABOVE, CLIP)
        for rate in CELL.rates
    }
    found = scores.measure(minus(ABOVE, CLIP), "end", COMMON_RATE)
    assert found.interval == pytest.approx(student(ends[ABOVE, low] - ends[CLIP, low]))
    assert found.seeds == len(CELL.seeds)
    assert scores.best_rate(CLIP) == (high, False)
    assert scores.best_rate(ABOVE) == (low, False)
    best = scores.measure(minus(ABOVE, CLIP), "end", control.BEST)
    assert best.interval.value == pytest.approx((ends[ABOVE, low] - ends[CLIP, high]).mean())
    # Rules that are run at the common rate alone have no best one.
    assert scores.best_rate("2 over .8") is None
    assert scores.measure(minus("2 over .8", CLIP), "end", control.BEST) is None


def test_the_page_counts_what_is_missing():
    rows = made_rows(lambda key: (0.5 + 0.01 * ((key.seed * len(key.arm)) % 7), 0.2))
    runs = len(rows)
    del rows[Key(CELL.name, SAME_DOSE, COMMON_RATE, CELL.seeds[0])]
    text = page(rows)
    assert f"There are {runs - 1} of {runs} planned runs." in text
    assert f"| {SAME_DOSE} | {len(CELL.seeds) - 1} of {len(CELL.seeds)} |" in text
    lines = [
        line for line in text.splitlines() if line.endswith(("held |", "failed |", "undecided |", "open |"))
    ]
    assert len(lines) == len(read_predictions(transfer.PREDICTIONS))
    assert not any(line.endswith("open |") for line in lines)


def test_sides_are_of_the_rules_that_are_run():
    for kind in control.KINDS:
        for name, contrast in transfer.contrasts_of(kind).items():
            assert contrast.keys() <= {*CELL.arms}, name
            assert sum(contrast.values()) == pytest.approx(0)


def test_predictions_are_of_runs_and_the_seeds_are_no_pilots():
    worlds = {
        f"{CELL.name} at {COMMON_RATE:g}": {*CELL.arms},
        f"{CELL.name} at best": {*transfer.AT_ALL_RATES},
    }
    for prediction in read_predictions(transfer.PREDICTIONS):
        assert {prediction.arm, prediction.minus} <= worlds[prediction.world]
        assert prediction.metric in transfer.SMALLEST
    assert not {*CELL.seeds} & {*transfer.PILOT.seeds}
    assert f"{len([*study()])} runs" in transfer.PREDICTIONS.read_text()


# The committed rows ---------------------------------------------------------------------------------------------------

RESULTS = ROOT / "research/results/transfer"
AS_COMMITTED_BEFORE_THE_RUNS = "d1baa6632b100979314d72e7b7cfa7cf9f3113c619437b4d23c06234eb3f256c"


@pytest.fixture(scope="module")
def pilots():
    return read_rows(RESULTS / "pilots.jsonl.gz")


def test_the_predictions_are_those_that_were_committed_before_the_runs():
    text = transfer.PREDICTIONS.read_bytes().replace(b"\r\n", b"\n")
    assert hashlib.sha256(text).hexdigest() == AS_COMMITTED_BEFORE_THE_RUNS


def test_what_the_predictions_say_of_the_pilots(pilots):
    """Their numbers by plain arithmetic, and the power of the table."""
    said = " ".join(transfer.PREDICTIONS.read_text(encoding="utf-8").split())
    assert set(pilots) <= {*transfer.pilots()}

    def mean(arm, metric, seeds=range(900, 902), rate=COMMON_RATE):
        rows = [pilots[Key("pilot", arm, rate, seed)] for seed in seeds]
        if metric == "entropy":
            return np.mean([row["curves"]["entropy"][15:] for row in rows])
        return np.mean([row[metric] for row in rows])

    shares = [f"{mean(arm, 'blocked above'):.2f}" for arm in (ABOVE, "2 over .8", "3 over .8", SAME_DOSE)]
    assert (
        "upper side blocked {} of the gradient of rare winners, 2, 3 and 5 blocked {}, {} and {}".format(
            *shares
        )
        in said
    )
    four = range(900, 904)

    def gap(arm, metric, minus=CLIP, seeds=four):
        return f"{mean(arm, metric, seeds) - mean(minus, metric, seeds):+.3f}"

    assert (
        f"2 over .8 had {gap('2 over .8', 'entropy')} nats at equal step, {gap('2 over .8', 'end')} of final and "
        f"{gap('2 over .8', 'AUC')} of mean reward, Band over .8 {gap(ABOVE, 'entropy')} nats, Band over Band "
        f"{gap('Band over Band', 'entropy')} nats" in said
    )
    assert f"and {gap('Band over Band', 'pass@32')} of pass@32" in said
    two = range(900, 902)
    ends, solved = (gap(ABOVE, metric, SAME_DOSE, two) for metric in ("end", "pass@32"))
    assert f"Band over .8 minus 5 over .8 with two seeds: {ends} of final reward, {solved} of pass@32" in said
    for arm in transfer.AT_ALL_RATES:
        rewards = [mean(arm, "AUC", range(900, 901), rate) for rate in (1e-5, *CELL.rates, 8e-5)]
        assert max(rewards[0], rewards[-1]) < max(rewards)

    power = {row[0]: row[1:] for row in transfer.power_table(Scores(pilots, transfer.PILOT), seeds=16).rows}
    against_3, control_row = power[f"{ABOVE} minus 3 over .8"], power[f"2 over .8 minus {CLIP}"]
    first = [cell.split(": ")[1].split(",")[0].replace("%", " %") for cell in against_3]
    assert (
        f"in pass@32 is found in {first[2]} of studies and in the end in {first[3]}, one of 0.01 in AUC in"
        in said
    )
    assert f"in AUC in {first[4]}, of 0.03 nats in {first[0]}" in said
    first = [cell.split(": ")[1].split(",")[0].replace("%", " %") for cell in control_row]
    assert f"0.03 nats in {first[0]}, at equal reward in {first[1]}, 0.03 of pass@32 in {first[2]}" in said


@pytest.fixture(scope="module")
def committed():
    return read_rows(RESULTS / "rows.jsonl.gz")


@pytest.fixture(scope="module")
def settings(committed):
    return {setting.rate: setting for setting in transfer.settings_of_rows(committed)}


def test_the_committed_report_is_that_of_the_rows(committed):
    report = ROOT / "research/reports/control/network.md"
    check_same_report(report.read_text(encoding="utf-8"), page(committed))


def test_the_rows_are_planned_and_a_rule_that_is_named_has_as_many_seeds_as_the_others(committed):
    assert committed.keys() <= {*study()}
    named = [key for key in study() if key.arm in transfer.NAMED]
    counts = Counter((key.arm, key.rate) for key in named if key in committed)
    assert max(counts.values()) - min(counts.values()) <= 1
    for row in committed.values():
        assert [len(curve) for curve in row["curves"].values()] == [CELL.batches] * 2


def test_differences_at_the_common_rate_by_plain_arithmetic(committed, settings):
    """From the rows alone, by scipy's paired test, which shares nothing with the report."""
    primary = transfer.primary_measures([*settings.values()])
    for (ours, theirs), metric in itertools.product(
        ((ABOVE, SAME_DOSE), ("2 over .8", CLIP)), ("end", "entropy")
    ):
        pairs = [
            [committed.get(Key(CELL.name, arm, COMMON_RATE, seed)) for arm in (ours, theirs)]
            for seed in CELL.seeds
        ]
        values = [
            [np.mean(row["curves"]["entropy"][15:]) if metric == "entropy" else row[metric] for row in pair]
            for pair in pairs
            if all(pair)
        ]
        first, second = np.transpose(values)
        found = settings[COMMON_RATE].scores.measure(minus(ours, theirs), metric, COMMON_RATE)
        assert found.seeds == len(values)
        assert found.interval[1:] == pytest.approx([*stats.ttest_rel(first, second).confidence_interval()])
        if (ours, metric) == (ABOVE, "end"):
            expected = stats.ttest_rel(first, second).confidence_interval(1 - 0.05 / 4)
            of_report = primary[f"{CELL.name} at {COMMON_RATE:g}", "end"].adjusted(len(primary))
            assert len(primary) == 4
            assert of_report[1:] == pytest.approx([*expected])


def test_what_the_pages_say_of_the_network(committed, settings):
    pages = ("docs/when.md", "README.md", "research/reports/README.md")
    when, readme, reports = (" ".join((ROOT / page).read_text(encoding="utf-8").split()) for page in pages)
    common, best = settings[COMMON_RATE], settings[control.BEST]
    comparisons = sum(len(setting.measured) for setting in settings.values())

    # The control costs entropy, surely; Band's lower side does also if adjusted for all comparisons.
    assert control.control_of(common).interval.high < 0
    assert (
        "The control, `FixedClip(0.2, 1.0)` or [0.8, 2], kept entropy at equal step in both policies and "
        "not in the network." in when
    )
    for arm in ("1.2 over Band", "Band over Band"):
        assert common.measured["clip", arm, "entropy"].adjusted(comparisons).high < 0
    assert not any(
        setting.measured["clip", ABOVE, metric].interval.low > 0
        for setting in settings.values()
        for metric in ("entropy", "entropy at reward")
    )
    assert "In a network only the lower bound's cost showed." in when

    # Band's upper side against the constant of its dose: less mean reward at the common rate, and nothing else
    # is sure if adjusted.
    adjusted = {}
    for rate, setting in settings.items():
        for metric in transfer.SMALLEST:
            found = setting.scores.measure(transfer.PRIMARY, metric, rate)
            adjusted[rate, metric] = found.adjusted(comparisons)
    assert [key for key, found in adjusted.items() if found.low > 0] == []
    assert [key for key, found in adjusted.items() if found.high < 0] == [(COMMON_RATE, "AUC")]
    assert not [
        1 for found in transfer.primary_measures([*settings.values()]).values() if found.adjusted(4).low > 0
    ]
    assert "In the network the constant surely learned sooner at one rate." in when
    ours, theirs = (
        np.mean([row["blocked above"] for key, row in committed.items() if key[1:3] == (arm, COMMON_RATE)])
        for arm in (ABOVE, SAME_DOSE)
    )
    assert abs(ours - theirs) < 0.02

    gain = best.measured["clip", SAME_DOSE, "AUC"]
    assert gain.interval.low > 0
    assert transfer.RULES[SAME_DOSE] == "FixedClip(0.2, 4.0)"
    assert (
        "In the network at best rates "
        "`FixedClip(0.2, 4.0)`, which blocks as much as `BandAbove()`, had "
        f"{gain.interval.value:.3f} more mean reward than clip 0.2." in when
    )
    for setting in (common, best):
        solved = setting.measured["clip", ABOVE, "pass@32"].interval
        assert solved.low < 0 < solved.high
    for said in (when, readme):
        assert "against a constant that blocks as much, not settled. [Network](" in said
        assert "control/network.md): that constant learned sooner. |" in said
    assert f"{len(committed)} of {len([*study()])} runs" in reports
    counted = Counter(row[-1] for row in transfer.verdicts_table([*settings.values()]).rows)
    assert (
        f"Of {counted.total()} predictions {counted['held']} held, {counted['failed']} failed and "
        f"{counted['undecided']} are undecided" in reports
    )
