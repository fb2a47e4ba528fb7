"""`bandpo_lab.compare`: figures by hand, methods whose order is known, the command, and what it refuses."""

import json
import math
import sys
import typing
from collections.abc import Sequence

import pytest

pytest.importorskip("typer")
from scipy import stats
from typer.testing import CliRunner

import bandpo_lab
from bandpo import ClipRule, Method
from bandpo.core.objectives import Objective
from bandpo_lab.cli.app import app
from bandpo_lab.errors import RunProblem
from bandpo_lab.toy.comparison import Comparison, blocked_so_far, compare, metrics
from bandpo_lab.toy.fast_loop import Run, Settings

SMALL = {"task": "random", "batches": 3, "lag": 1}
WORDS = ["--task", "random", "--batches", "3", "--lag", "1"]
CLIP, BAND = "FixedClip(0.2)", "BandPO()"


def made(rewards, end=0.5, seed=0, **columns):
    """A run whose curves are given."""
    log = []
    for index, reward in enumerate(rewards):
        line = {"step": index + 1, "reward": reward, "entropy": 1.0 - reward, "scratchpad": reward}
        log.append(line | {name: values[index] for name, values in columns.items()})
    settings = Settings(CLIP, batches=len(rewards), lag=0, seed=seed)
    return Run(settings, log, {"pass@1": end, "pass@8": 1.0, "pass@32": 1.0, "seconds": 1.0})


def test_the_metrics_of_a_run_by_hand():
    mass = [0.0, 1.0, 3.0, 0.0, 0.0, 0.0]
    blocked = [0.9, 1.0, 0.0, 0.5, 0.5, 0.5]
    columns = {"audit/mass_positive_below_0.1": mass, "audit/blocked_mass_below_0.1": blocked}
    run = made([0.0, 0.4, 0.8, 0.8, 1.0, 1.0], **columns)
    found = metrics(run)
    assert found["reward"] == pytest.approx(4 / 6)
    # Means of up to five batches: 0, .2, .4, .5, .6, .8; the entropy there is one minus that.
    assert (found["batches"], found["entropy"]) == (4, pytest.approx(0.5))
    assert (found["end"], found["pass@32"]) == (0.5, 1.0)
    assert found["last_entropy"] == pytest.approx(0.2)
    assert blocked_so_far(run.log)[1:] == pytest.approx([1.0, 0.25, 0.25, 0.25, 0.25])
    assert math.isnan(blocked_so_far(run.log)[0])
    never = metrics(made([0.1] * 6, **columns))
    assert never["batches"] == math.inf
    assert math.isnan(never["entropy"])


def test_differences_are_paired_by_seed_and_their_intervals_hold_together():
    gaps = [0.1, 0.1, -0.1, 0.3]
    levels = [0.2, 0.6, 0.4, 0.5]
    runs = {
        CLIP: [made([level] * 5, seed=k) for k, level in enumerate(levels)],
        BAND: [
            made([level + gap] * 5, seed=k) for k, (level, gap) in enumerate(zip(levels, gaps, strict=True))
        ],
        "PPO()": [made([level] * 5, seed=k) for k, level in enumerate(levels)],
    }
    comparison = Comparison(CLIP, runs)
    interval = comparison.difference(BAND, "reward")
    # Two comparisons, so that each interval has 97.5 %: mean 0.1, standard error √(0.08/3)/2.
    half = stats.t.ppf(1 - 0.025 / 2, 3) * math.sqrt(0.08 / 3) / 2
    assert interval == pytest.approx((0.1, 0.1 - half, 0.1 + half))
    assert comparison.difference("PPO()", "reward") == (0, 0, 0)
    # Two seeds never reach a reward of one half.
    assert comparison.difference(BAND, "batches") is None
    assert [row["batches"] for row in comparison.table] == [None, None, None]
    assert f"{BAND} is left open (+0.100 [{0.1 - half:+.3f}, {0.1 + half:+.3f}])" in comparison.sentence
    assert "PPO() equals it within 0.02" in str(comparison)
    shifted = Comparison(CLIP, {CLIP: runs[CLIP], BAND: [made([x + 0.1] * 5) for x in levels]})
    assert f"{BAND} gains (+0.100 [+0.100, +0.100])" in shifted.sentence
    assert f"{CLIP} loses (-0.100" in Comparison(BAND, shifted.runs).sentence
    assert comparison.sentence.endswith("; 95 % intervals adjusted for 2 comparisons (Bonferroni).")
    # A single difference needs no adjustment.
    assert shifted.sentence.endswith("; 95 % intervals.")


def test_one_seed_has_a_table_and_no_differences():
    comparison = compare([CLIP, "FixedClip(0.2, 0.2)", "Unclipped()"], workers=1, **SMALL)
    assert comparison.seeds == 1
    first, same, none = comparison.table
    assert {**first, "method": ""} == {**same, "method": ""}
    assert none["blocked"] == 0
    assert comparison.difference("Unclipped()", "reward") is None
    header, *_ = str(comparison).splitlines()
    # Random rewards have no level to reach.
    assert header.split("  ")[0] == "method"
    assert "batches to" not in header
    assert "One seed:" in comparison.sentence
    assert "95 % intervals" not in comparison.sentence
    assert "<table>" in comparison._repr_html_()


def test_what_each_rule_dropped_of_the_gradient_on_rare_winners_is_a_sentence():
    columns = {"audit/mass_positive_below_0.1": [1.0] * 5, "audit/tokens_positive_below_0.1": [8.0] * 5}
    blocked = {CLIP: 0.91, BAND: 0.18}
    runs = {
        method: [made([0.5] * 5, **columns, **{"audit/blocked_mass_below_0.1": [share] * 5})]
        for method, share in blocked.items()
    }
    begin = "Of the gradient on rare winners (p < 0.1, A > 0) of its own runs"
    assert f"{begin}, {CLIP} dropped 91%, {BAND} 18%." in str(Comparison(CLIP, runs)).splitlines()
    few = {
        method: [made([0.5] * 5, **columns | {"audit/tokens_positive_below_0.1": [1.0] * 5})]
        for method in runs
    }
    assert "Rare winners (p < 0.1, A > 0) are too few to say what each clip did to them: 5." in str(
        Comparison(CLIP, few)
    )


@pytest.mark.slow
def test_processes_give_the_bits_of_this_process_and_their_logs_are_gone_on_with(tmp_path):
    here = compare([CLIP, BAND], workers=1, seeds=2, **SMALL)
    elsewhere = compare([CLIP, BAND], workers=2, seeds=2, folder=tmp_path, **SMALL)
    for method, runs in here.runs.items():
        assert [run.log for run in runs] == [run.log for run in elsewhere.runs[method]]
    names = {"FixedClip-0.2-seed-0", "FixedClip-0.2-seed-1", "BandPO-seed-0", "BandPO-seed-1"}
    assert {path.name for path in tmp_path.iterdir()} == names
    # A method is added: the others are read.
    before = (tmp_path / "BandPO-seed-0/scores.json").stat().st_mtime_ns
    more = compare([CLIP, BAND, "Unclipped()"], workers=1, seeds=2, folder=tmp_path, **SMALL)
    assert (tmp_path / "BandPO-seed-0/scores.json").stat().st_mtime_ns == before
    assert more.runs[BAND] == elsewhere.runs[BAND]
    with pytest.raises(RunProblem, match="has a run with other settings: batches 3, now 4"):
        compare([CLIP, BAND], workers=2, folder=tmp_path, **SMALL | {"batches": 4})


@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        ([CLIP], {}, "two or more methods"),
        ([CLIP, CLIP], {}, "two or more methods, each once"),
        ([CLIP, BAND], {"baseline": "PPO()"}, "baseline 'PPO"),
        ([CLIP, BAND], {"seeds": 0}, "seeds=0: choose at least 1"),
        ([CLIP, BAND], {"task": "chess"}, "choose one of multiplication, mental, random"),
        ([CLIP, "Bnad()"], {}, "did you mean Band"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_trained(methods, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        compare(methods, folder=tmp_path / "runs", **SMALL | options)
    assert not (tmp_path / "runs").exists()


def test_the_package_exports_it_with_types():
    assert bandpo_lab.compare is compare
    hints = typing.get_type_hints(bandpo_lab.compare)
    assert hints["methods"] == Sequence[Method | ClipRule | Objective | str]
    assert hints["return"] is Comparison


def test_the_command_prints_the_table_and_writes_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    words = ["compare", "Unclipped()", CLIP, *WORDS, "--workers", "1", "--output-dir", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    rows = [
        line.split()[0] for line in lines if line.startswith(("method", "Unclipped()  ", "FixedClip(0.2)  "))
    ]
    assert rows == ["method", "Unclipped()", "FixedClip(0.2)"]
    assert "random, data 1 batches old, 1 × 4 updates, rate 0.0002, 3 batches." in result.output
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads(CliRunner().invoke(app, [*words, "--baseline", CLIP, "--json"]).output)
    assert content["baseline"] == CLIP
    assert [row["method"] for row in content["table"]] == ["Unclipped()", CLIP]
    assert [row["method"] for row in content["differences"]] == ["Unclipped()"]


def test_without_matplotlib_the_table_is_printed(tmp_path, monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] == "matplotlib" or name == "bandpo_lab.output.style":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["compare", CLIP, "Unclipped()", *WORDS, "--workers", "1", "--output-dir", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "One seed:" in result.output
    assert "no picture: matplotlib is missing" in result.output
    assert not (tmp_path / "curves.png").exists()


def test_the_figure_has_a_line_for_each_method():
    pytest.importorskip("matplotlib")
    runs = {CLIP: [made([0.1] * 6)], BAND: [made([0.2] * 6)]}
    figure = Comparison(CLIP, runs).figure()
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[0] == "Mean reward"
    assert len(titles) == 4
    for axes in figure.axes:
        assert [line.get_label() for line in axes.lines] == [CLIP, BAND]
    assert list(figure.axes[0].lines[1].get_ydata()) == pytest.approx([0.2] * 6)
