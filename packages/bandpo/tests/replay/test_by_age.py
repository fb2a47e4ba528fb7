"""The tokens of a record by age: counts, spread, effective sample size, and what each method blocks."""

import json
import math
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("rlvet")

from bandpo import DAPO, Batch, FixedClip
from bandpo.audit import Audit, Recorder
from bandpo.audit.closing_lines import FEWEST_RARE_WINNERS
from bandpo.audit.metric_names import BINS
from bandpo.audit.metrics import EDGES
from bandpo.cli.app import app
from bandpo.replay.record import RUN, replay_record
from rlvet import diagnose, open_run
from rlvet.records.ages import CLASSES, AgeCollector, age_classes

AGES = (0, 1, 3, 7)


def loss_of_age(age, seed=0, spread=0.1, rows=24, columns=20):
    """Return the tensors of a loss whose log-ratios spread in proportion to the age."""
    generator = torch.Generator().manual_seed(100 * seed + age)
    logp_old = -torch.rand(rows, columns, generator=generator) * 6 - 0.05
    logp = (logp_old + spread * age * torch.randn(rows, columns, generator=generator)).clamp(max=0.0)
    return {"logp": logp, "logp_old": logp_old, "advantages": torch.randn(rows, generator=generator)}


def write(folder, ages=AGES, shift=0.0, current=True, **settings):
    with Recorder(folder, method="FixedClip(0.2)", anchor="trainer", **settings) as recorder:
        for step, age in enumerate(ages):
            loss = loss_of_age(age)
            loss["logp"] = (loss["logp"] + shift).clamp(max=0.0)
            versions = {"version": 50 - age, "current_version": 50} if current else {}
            recorder.add(**loss, step=step, logp_rollout=loss["logp_old"], update=0, **versions)
    return folder


def test_each_age_has_its_tokens_and_what_each_method_blocks_of_them(tmp_path):
    replay = replay_record(write(tmp_path), {"Clip-Higher": "FixedClip(0.2, 0.28)"})
    assert [row.name for row in replay.ages.rows] == ["0", "1", "3 to 4", "5 to 7"]
    for age, row in zip(AGES, replay.ages.rows, strict=True):
        loss = loss_of_age(age)
        log_ratio = (loss["logp"] - loss["logp_old"]).double()
        ratio = log_ratio.exp()
        assert row.tokens == log_ratio.numel()
        assert row.spread == pytest.approx(float(log_ratio.square().mean().sqrt()), abs=1e-6)
        expected = float(ratio.sum() ** 2 / ratio.square().sum() / ratio.numel())
        assert row.effective == pytest.approx(expected, rel=1e-5)
        batch = Batch.read(*loss.values())
        for name, clip in {RUN: FixedClip(0.2), "Clip-Higher": FixedClip(0.2, 0.28)}.items():
            audit = Audit.from_batch(batch, method=clip).metrics()
            share = replay.blocked_by_age[name][row.name]
            assert share == pytest.approx(audit["blocked_mass_below_0.1"], rel=1e-5)
            check_bins(replay, name, row.name, loss, clip)
    assert (replay.ages.mismatch, replay.ages.unknown) == ("", 0)


def check_bins(replay, name, age, loss, clip):
    """Compare the shares by probability with sums over the tokens of each bin."""
    p = loss["logp_old"].exp()
    ratio = (loss["logp"] - loss["logp_old"]).exp()
    winner = (loss["advantages"] > 0).unsqueeze(1).expand_as(p)
    edges = [0.0, *EDGES, 1.0]
    for label, low, high in zip(BINS, edges, edges[1:], strict=False):
        chosen = winner & (p >= low) & (p < high)
        size = (ratio * loss["advantages"].unsqueeze(1))[chosen]
        expected = size[ratio[chosen] > 1 + clip.high].sum() / size.sum()
        found = replay.blocked_by_age_and_bin[name].get(label, {}).get(age)
        enough = len(size) >= FEWEST_RARE_WINNERS
        assert found == (pytest.approx(float(expected), abs=1e-5) if enough else None)


def test_the_share_of_a_class_is_that_of_all_its_tokens(tmp_path):
    """Two losses of ages 5 and 7 are one class, and a loss may have tokens of several ages."""
    losses = [loss_of_age(5), loss_of_age(7)]
    both = {name: torch.cat([loss[name] for loss in losses]) for name in losses[0]}
    with Recorder(tmp_path, method="DAPO()") as recorder:
        recorder.add(**both, version=torch.tensor([2, 0]).repeat_interleave(24), step=7)
    replay = replay_record(tmp_path, {})
    audit = Audit.from_batch(Batch.read(*both.values()), method=DAPO()).metrics()
    assert replay.blocked_by_age == {
        RUN: {"5 to 7": pytest.approx(audit["blocked_mass_below_0.1"], rel=1e-5)}
    }
    assert [row.tokens for row in replay.ages.rows] == [960]


def test_without_versions_the_age_is_unknown_and_nothing_else_changes(tmp_path):
    known = replay_record(write(tmp_path / "known"))
    unknown = replay_record(write(tmp_path / "unknown", current=False))
    assert unknown.audits.keys() == known.audits.keys()
    for name in known.audits:
        assert unknown.audits[name].metrics() == known.audits[name].metrics()
    assert (unknown.ages.rows, unknown.blocked_by_age, unknown.ages.unknown) == ([], {}, 4 * 480)
    output = CliRunner().invoke(app, ["audit", str(tmp_path / "unknown")]).output
    assert "the age is unknown: the record has no version of the weights that sampled" in output
    assert "by age" not in output


@pytest.mark.parametrize("anchor", ["trainer", "rollout"])
def test_a_record_from_before_the_update_has_its_tokens_by_age(anchor, tmp_path):
    """As verl's. Its old log-probabilities are the trainer's, or the sampler's: then nothing tells the ratio."""
    with Recorder(tmp_path, anchor=anchor, version_at="answer") as recorder:
        for step, age in enumerate(AGES):
            loss = loss_of_age(age)
            sampled = loss["logp_old"]
            old = loss["logp"] if anchor == "trainer" else sampled
            recorder.add(
                logp_old=old,
                logp_rollout=sampled,
                advantages=loss["advantages"],
                step=step,
                version=50 - age,
                current_version=50,
            )
    collector = AgeCollector()
    open_run(tmp_path).scan([collector])
    rows = collector.result().rows
    assert [(row.name, row.tokens) for row in rows] == [
        ("0", 480),
        ("1", 480),
        ("3 to 4", 480),
        ("5 to 7", 480),
    ]
    (line, *more) = [note for note in diagnose(tmp_path).notes if "by age" in note]
    meaning = "versions between sampling and update, an upper bound; mean 2.8"
    assert line.startswith(f"by age ({meaning}): 0: 480 tokens")
    if anchor == "rollout":
        assert all(math.isnan(row.spread) and math.isnan(row.effective) for row in rows)
        assert line.endswith("1: 480 tokens; 3: 480 tokens; 7: 480 tokens")
        assert "so the spread of the ratios by age is unknown" in more[0]
        return
    for age, row in zip(AGES, rows, strict=True):
        loss = loss_of_age(age)
        log_ratio = (loss["logp"] - loss["logp_old"]).double()
        assert row.spread == pytest.approx(float(log_ratio.square().mean().sqrt()), abs=1e-6)
    assert not more
    with pytest.raises(ValueError, match="`rlvet diagnose` has the tokens by age"):
        replay_record(tmp_path)


def test_a_bound_is_named_so(tmp_path):
    output = CliRunner().invoke(app, ["audit", str(write(tmp_path, version_at="group"))]).output
    assert "versions between sampling and update, an upper bound" in " ".join(output.split())
    assert "upper bound" in " ".join(diagnose(tmp_path).notes)


@pytest.mark.parametrize("shift", [-0.3, 0.15])
def test_ratios_of_fresh_tokens_far_from_1_are_told_first(shift, tmp_path):
    write(tmp_path, shift=shift)
    replay = replay_record(tmp_path)
    distance = abs(loss_of_age(0)["logp_old"] + shift).numpy()
    assert replay.ages.fresh_distance == pytest.approx(abs(shift), rel=0.1), distance.mean()
    output = CliRunner().invoke(app, ["audit", str(tmp_path)]).output
    assert output.index("tokens of age 0 have a mean abs(log r) of") < output.index("on the same tokens")
    diagnosis = diagnose(tmp_path)
    assert diagnosis.notes[0].startswith("tokens of age 0 have a mean abs(log r) of 0.")
    assert diagnosis.notes[1].startswith("by age (versions between sampling and update; mean 2.8): 0: 480")
    assert diagnosis.notes[2].startswith(
        "the run blocks of the gradient on rare winners (p < 0.1), by age: 0: "
    )
    assert re.search(r"; 3: [\d.]+%; 7: [\d.]+%$", diagnosis.notes[2])


def test_the_ages_of_a_record_of_trl_are_updates(tmp_path):
    output = CliRunner().invoke(app, ["audit", str(write(tmp_path, framework="trl 1.16"))]).output
    assert "by age (updates between sampling and update; mean 2.8)" in " ".join(output.split())


@pytest.mark.parametrize(
    ("ages", "mean", "names"),
    [
        ((3, 3), "3.0", ["3"]),
        ((3, 4, 6), "4.3", ["3 to 4", "6"]),
        ((0, 9, 11, 20), "10.0", ["0", "9 to 11", "20"]),
        ((-2, 18, 30), "15.3", ["-2", "18 to 30"]),
    ],
)
def test_a_class_is_named_by_the_ages_that_occur_in_it(ages, mean, names, tmp_path):
    write(tmp_path, ages=ages)
    output = CliRunner().invoke(app, ["audit", str(tmp_path)], env={"COLUMNS": "200"}).output
    assert f"mean {mean})" in " ".join(output.split())
    header = next(line for line in output.splitlines() if line.startswith("┃ age "))
    assert [cell.strip() for cell in header.strip("┃").split("┃")] == ["age", *names]
    [line] = [note for note in diagnose(tmp_path).notes if note.startswith("by age")]
    assert re.findall(r"(?:: |; )([-\d to]+): [\d,]+ tokens", line) == names


def test_of_few_rare_winners_of_an_age_no_share_is_said(tmp_path):
    """Of 29 tokens of the age 2, and of 30 of the age 1, all are dropped."""
    with Recorder(tmp_path, method="FixedClip(0.2)") as recorder:
        for age, count in ((1, 30), (2, 29)):
            old = torch.full((count, 1), 0.05).log()
            versions = {"version": 10 - age, "current_version": 10}
            recorder.add(logp=old + 1, logp_old=old, advantages=torch.ones(count), step=age, **versions)
    replay = replay_record(tmp_path, {})
    assert replay.rare_winners_by_age == {"1": 30, "2": 29}
    assert replay.blocked_by_age == {RUN: {"1": 1.0}}
    output = CliRunner().invoke(app, ["audit", str(tmp_path)]).output
    assert re.search(r"│ rare winners +│ 30 +│ 29 +│", output)
    assert re.search(r"│ the run, p < 0.1 +│ 100.00% +│ – +│", output)


def test_no_name_of_a_rule_is_folded_at_80_columns(tmp_path):
    output = CliRunner().invoke(app, ["audit", str(write(tmp_path))], env={"COLUMNS": "80"}).output
    headers = [line for line in output.splitlines() if line.startswith("┃")]
    assert [line for line in headers if "Clip-Higher ┃" in line and "DCPO" in line]
    assert not re.search(r"Clip-H\w*\s*[┃│]", output.replace("Clip-Higher", ""))
    assert "│ Clip-Higher, p < 0.1" in output


def test_later_updates_on_a_fresh_batch_are_no_mismatch(tmp_path):
    with Recorder(tmp_path, method="DAPO()") as recorder:
        for update in range(2):
            loss = loss_of_age(0)
            loss["logp"] = (loss["logp"] - 0.2 * update).clamp(max=0.0)
            recorder.add(**loss, step=update, update=update, version=3, current_version=3)
    assert replay_record(tmp_path).ages.mismatch == ""


def test_the_metrics_of_ages_are_in_the_json(tmp_path):
    write(tmp_path)
    output = CliRunner().invoke(app, ["audit", str(tmp_path), "--json"]).output
    metrics = json.loads(output)[str(tmp_path)]["methods"]
    assert metrics[RUN]["age/3 to 4/tokens"] == 480
    assert (
        0
        < metrics["Clip-Higher"]["age/3 to 4/blocked_mass_below_0.1"]
        < metrics[RUN]["age/3 to 4/blocked_mass_below_0.1"]
    )


def test_each_effective_sample_size_says_of_which_tokens_it_is(tmp_path):
    """Half of the tokens have no advantage, and their ratios are 1."""
    ratio = torch.tensor([[1.0, 1.0], [0.4, 1.6]]).repeat(100, 1)
    logp_old = torch.full(ratio.shape, 0.5).log()
    advantages = torch.tensor([0.0, 1.0]).repeat(100)
    with Recorder(tmp_path, method="Unclipped()") as recorder:
        recorder.add(logp=logp_old + ratio.log(), logp_old=logp_old, advantages=advantages, step=1, version=0)
    output = CliRunner().invoke(app, ["audit", str(tmp_path)], env={"COLUMNS": "200"}).output
    every, with_advantage = [4**2 / (4 * 4.72), 2**2 / (2 * 2.72)]
    assert re.search(rf"│ effective sample size of r, all tokens +│ {every:.0%} ", output)
    assert re.search(rf"│ effective sample size of its weights, A ≠ 0 +│ {with_advantage:.2%} ", output)


def test_large_ratios_keep_the_effective_sample_size_finite(tmp_path):
    loss = loss_of_age(1)
    loss["logp_old"] = loss["logp_old"] - 800
    with Recorder(tmp_path, method="DAPO()") as recorder:
        recorder.add(**loss, step=1, version=0)
    (row,) = replay_record(tmp_path).ages.rows
    assert math.isfinite(row.effective)
    assert row.spread > 700


def test_classes_cover_all_ages():
    ages = np.arange(-3, 40)
    names = [CLASSES[k] for k in age_classes(ages)]
    assert list(dict.fromkeys(names)) == list(CLASSES)
    assert [name for age, name in zip(ages, names, strict=True) if 0 <= age < 4] == ["0", "1", "2", "3 to 4"]
