"""`bandpo_lab.compare`: hand-worked figures, methods whose order is known, and what it refuses."""

import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("typer")
from typer.testing import CliRunner

import bandpo_lab
from bandpo import ClipRule, FixedClip, Method, RatioBounds
from bandpo.core.objectives import Objective, SigmoidGate
from bandpo_lab.cli.app import app
from bandpo_lab.comparison import Case, Comparison, compare
from bandpo_lab.study.bandits import Outcome, simulate
from bandpo_lab.study.optimizers import OPTIMIZERS
from pages import ROOT
from studies import equal_methods

QUICK = {"lags": [4], "optimizers": ["shared-moment"], "seeds": 16, "rates": [0.16, 0.08], "samples": 64}


@dataclass(frozen=True)
class Closed(ClipRule):
    """Nothing may move, so it learns little."""

    def bounds(self, logp_old):
        return RatioBounds(torch.zeros_like(logp_old), torch.zeros_like(logp_old))


def made(scores, baseline="b", optimizer="adam"):
    """A comparison of curves that are given, as (rates, seeds) by method."""
    outcomes = {}
    for name, of_one in scores.items():
        batches = torch.tensor(of_one)[..., None].expand(-1, -1, 3)
        shares = torch.zeros(np.shape(of_one))
        outcomes[Case(0, optimizer, name)] = Outcome(batches, batches, batches, shares, shares)
    return Comparison(baseline, {optimizer: [0.1 * 2**k for k in range(len(scores[baseline]))]}, outcomes)


def joined(*comparisons):
    """Comparisons of different optimizers as one."""
    rates = {name: grid for one in comparisons for name, grid in one.rates.items()}
    outcomes = {case: outcome for one in comparisons for case, outcome in one.outcomes.items()}
    return Comparison(comparisons[0].baseline, rates, outcomes)


def test_differences_and_their_intervals_by_hand():
    found = made({"a": [[0.5, 0.9, 0.1, 0.7]], "b": [[0.4, 0.8, 0.2, 0.4]]})
    [row] = [row for row in found.by_rate if row["method"] == "a"]
    gaps = np.array([0.1, 0.1, -0.1, 0.3])
    assert row["difference"] == pytest.approx(0.1)
    # All 256 ways to draw four seeds of four; Student's reach of 95 % for 3 degrees of freedom, 3.182·√(4/3), of
    # normal quantiles lies beyond all of them but the ends.
    means = np.sort([gaps[list(np.unravel_index(k, [4] * 4))].mean() for k in range(256)])
    assert (row["low"], row["high"]) == pytest.approx((means[0], means[-1]))
    # Seeds are paired: with what both share made a hundred times larger, nothing changes.
    shared = 100 * np.array([[0.3, -0.2, 0.9, -0.5]])
    far = made({case.method: curve.scores + shared for case, curve in found.curves.items()})
    assert [r["high"] for r in far.by_rate] == pytest.approx([r["high"] for r in found.by_rate], abs=1e-3)


def test_of_equal_methods_few_are_called_different_and_a_shift_is_found():
    draws = np.random.default_rng(0)
    wrong = 0
    for _ in range(30):
        noise = draws.normal(0.5, 0.1, (3, 2, 24)).astype(np.float32)
        rows = made({"a": noise[0], "c": noise[1], "b": noise[2]}).table
        wrong += any(row["verdict"] in ("gains", "loses") for row in rows)
    assert wrong <= 4  # of 30 at 5 %: more in one case of 60
    shifted = made({"a": noise[2] + 0.1, "c": noise[2] - 0.1, "b": noise[2]})
    assert [row["verdict"] for row in shifted.table] == ["gains", "loses", "equals it within 0.02"]


def test_equal_methods_with_real_seeds_seldom_differ_and_the_page_says_how_often():
    """The committed count, its page, and the count itself in a small form."""
    result = json.loads((ROOT / "research/results/equal_methods.json").read_text())
    assert {*result["differing"]} == {*OPTIMIZERS}
    assert max(result["differing"].values()) <= 0.05 * result["sets"] == 10
    page = " ".join((ROOT / "docs/measured/studies.md").read_text().split())
    counts = [f"{count} under `{name}`" for name, count in result["differing"].items()]
    assert f"it did so in {', '.join(counts[:-1])} and {counts[-1]}" in page

    rates = {"adam": OPTIMIZERS["adam"].rates}
    outcome = simulate(equal_methods.WORLD, FixedClip(0.2), rates["adam"], seeds=40, epochs=1, batches=20)
    assert equal_methods.false_differences({("adam", 0): outcome}, sets=10, seeds=16)["adam"] <= 3


def test_a_gain_is_claimed_where_every_optimizer_has_it():
    noise = np.random.default_rng(0).normal(0.5, 0.1, (2, 24)).astype(np.float32)
    gains = {"a": noise + 0.1, "b": noise}
    loses = {"a": noise - 0.1, "b": noise}
    both = joined(made(gains), made(gains, optimizer="momentum"))
    assert both.verdicts == {(0, "a"): "gains"}
    assert "a gains (adam +0.100 [+0.100, +0.100], momentum +0.100" in both.sentence
    against = joined(made(gains), made(loses, optimizer="momentum"))
    assert against.verdicts == {(0, "a"): "depends on the optimizer"}
    assert "a depends on the optimizer: it gains under adam (+0.100" in against.sentence
    assert "loses under momentum (-0.100" in against.sentence
    wide = {"a": noise + np.random.default_rng(1).normal(0, 0.3, (2, 24)).astype(np.float32), "b": noise}
    assert joined(made(gains), made(wide, optimizer="momentum")).verdicts == {(0, "a"): "is left open"}


def test_a_rule_that_blocks_is_worse_an_alias_equal_and_the_same_seeds_give_the_same():
    threads = torch.get_num_threads()
    methods = [Closed(), SigmoidGate(), "GRPO()", "FixedClip(0.2)"]
    found = compare(methods, **QUICK)
    closed, _, alias, _ = found.table
    assert closed["verdict"] == "loses"
    assert alias["difference"] == alias["low"] == alias["high"] == 0
    assert "GRPO() equals it within 0.02 (shared-moment +0.000" in str(found)
    assert json.loads(json.dumps(found.table)) == compare(methods, **QUICK).table
    assert torch.get_num_threads() == threads
    assert found._repr_html_().startswith('<div><img src="data:image/svg+xml;base64,')
    assert found.figure().axes[0].get_title() == "shared-moment\ndata 4 batches old"


@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        (["FixedClip(0.2)"], {}, "two or more methods"),
        (["DAPO()", "GRPO()"], {"optimizers": ["lion"]}, "optimizers must be of adam, .*, got 'lion'"),
        (["DAPO()", "GRPO()"], {"rates": [0.1]}, "give one optimizer with rates, got adam, head-and-trunk"),
        (["DAPO()", "GRPO()"], {"baseline": "PPO()"}, "baseline 'PPO"),
        (["DAPO()", "GRPO()"], {"seeds": 3}, "at least 4 seeds"),
        (["GSPO()", "GRPO()"], {}, r"GSPO\(\) weights a token by others"),
        (["DeepSeekV32()", "GRPO()"], {}, r"DeepSeekV32\(\) weights a token by others"),
        (
            ["Band(KL(), ClipRateController(0.05, 0.1))", "GRPO()"],
            {},
            "needs controller_state, which a table does not have",
        ),
    ],
)
def test_what_a_table_cannot_compare_is_refused(methods, options, message):
    with pytest.raises(ValueError, match=message):
        compare(methods, **options)


def test_the_package_exports_it_with_types():
    assert bandpo_lab.compare is compare
    hints = typing.get_type_hints(bandpo_lab.compare)
    assert hints["methods"] == Sequence[Method | ClipRule | Objective | str]
    assert hints["return"] is Comparison


def test_the_command_prints_the_table_and_the_sentence_and_writes_the_figure(tmp_path):
    figure = tmp_path / "comparison.png"
    words = [
        "compare",
        "Unclipped()",
        "FixedClip(0.2)",
        "--lags",
        "4",
        "--seeds",
        "16",
        "--optimizers",
        "shared-moment",
        "--rates",
        "0.08,0.16",
    ]
    result = CliRunner().invoke(app, [*words, "--output", str(figure)])
    assert result.exit_code == 0, result.output
    header, *rows = result.output.splitlines()
    columns = ["lag", "optimizer", "method", "reward", "difference", "end", "best", "rate", "blocked"]
    assert header.split() == columns
    assert [row.split()[2] for row in rows[:2]] == ["Unclipped()", "FixedClip(0.2)"]
    assert "Mean reward against FixedClip(0.2)" in result.output
    assert figure.read_bytes().startswith(b"\x89PNG")
    content = json.loads(CliRunner().invoke(app, [*words, "--baseline", "Unclipped()", "--json"]).output)
    assert content["baseline"] == "Unclipped()"
    assert [row["verdict"] for row in content["table"]][1] == "loses"
    assert len(content["by_rate"]) == 4
    assert content["verdicts"] == [{"lag": 4, "method": "FixedClip(0.2)", "verdict": "loses"}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lags", "0,x"], "--lags takes whole numbers separated by commas, such as --lags 0,4; got '0,x'"),
        (["--rates", "fast"], "--rates takes numbers separated by commas"),
        (["--output", "figure.txt"], "a figure is written as .png, .svg or .pdf"),
    ],
)
def test_the_command_refuses_options_before_it_trains(options, message):
    result = CliRunner().invoke(app, ["compare", "DAPO()", "GRPO()", *options])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
