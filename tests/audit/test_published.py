"""Clip rates that were reported, the names of settings, and the verdicts that use them."""

import json
import math

import pytest

from bandpo.audit.findings import all_findings
from bandpo.audit.logs import named_rows, summarize
from bandpo.audit.published import REPORTED, closest, reported
from bandpo.audit.settings import Setup, framework_of
from bandpo.text import as_method
from pages import ROOT


def usual(rate, method, framework=None, **audit):
    audited = {f"audit/{name}": value for name, value in audit.items()}
    rows = named_rows([{"step": 1, "actor/pg_clipfrac": rate} | audited])
    setup = Setup(framework, None if method is None else as_method(method))
    return all_findings(summarize(rows), setup)["Is the clip rate usual?"]


def test_four_tenths_with_gspo_has_been_reported():
    assert "verl#7356" in usual(0.4, "GSPO()").answer
    assert usual(0.15, "GSPO()", on_policy=0.25).answer.startswith("15% of tokens, as reported: 15%")


@pytest.mark.parametrize(
    ("rate", "method", "ok", "text"),
    [
        (0.4, "GSPO()", True, "40% of tokens, as reported: 35% to 44% (Qwen3.5-35B-A3B"),
        (0.05, "DAPO()", None, "5% of tokens, far above what was reported: at most 0.13%"),
        (0.0005, "DAPO()", True, "0.05% of tokens; the nearest report is 0.024% to 0.04%"),
        (1e-5, "BandPO()", True, "0.001% of tokens, as reported: 0.00025% to 0.003%"),
        (0.01, "BandPO()", None, "far above"),
        (0.01, "SAPO()", None, "we know of no report on this method"),
        (0.01, "Band(TotalVariation(), 0.15)", None, "we know of no report on this method"),
        (0.0, "GSPO(0.2, 0.2)", False, "0% of tokens, under a width for single tokens"),
        (0.0, "GSPO()", None, "no token was clipped"),
        (0.4, None, None, "nearest report at token level is 0.13% (Qwen3-30B-A3B-Base"),
    ],
)
def test_verdicts_on_the_clip_rate(rate, method, ok, text):
    found = usual(rate, method)
    assert found.ok is ok
    assert text in found.answer


def test_a_run_is_compared_with_those_of_as_many_updates():
    assert reported("fixed", "token", 5)[0].updates == 4
    assert {entry.updates for entry in reported("fixed", "token", 100)} == {16}
    assert {entry.updates for entry in reported("fixed", "sequence", None)} == {4, None}
    assert reported(None, "token", 4) == []
    assert usual(0.0096, "Band(KL(), 0.05)", on_policy=1 / 8).ok is True
    assert usual(0.0096, "Band(KL(), 0.05)", on_policy=1 / 4).ok is None


def test_every_report_has_a_range_and_that_of_our_study_is_what_it_measured():
    for entry in REPORTED:
        assert 0 < entry.low <= entry.high < 1
    assert closest(0.33, reported("fixed", "sequence", None)).low == 0.35
    assert math.isclose(closest(1.0, REPORTED).high, 0.44)
    runs = json.loads((ROOT / "results/clipping/results.json").read_text())["runs"]
    for entry in (entry for entry in REPORTED if entry.source == "our study, results/clipping"):
        arm = "clip 0.2" if entry.rule == "fixed" else "Band-KL"
        of_arm = {"experiment": "main", "arm": arm, "tuning": None}
        curves = [run["curves"] for run in runs if of_arm.items() <= run.items()]
        rates = [sum(c["clip_high"] + c["clip_low"]) / len(c["clip_high"]) for c in curves]
        assert len(rates) == 8
        assert (min(rates), max(rates)) == pytest.approx((entry.low, entry.high), rel=0.02)


def test_a_framework_is_told_from_its_log_or_not_at_all():
    assert framework_of([{"step": 1, "actor/pg_loss": 0.1}]) == "verl"
    assert framework_of([{"step": 1, "completions/mean_length": 9.0}]) == "trl"
    assert framework_of([{"step": 1, "entropy": 0.1}]) is None
    assert Setup().named("learning rate") == Setup("prime-rl").named("clip") == ""
    advice = usual(0.05, "DAPO()", "slime").try_next
    assert advice.endswith("smaller steps (--lr) or fewer updates per batch (--num-steps-per-rollout)")


def test_a_run_folder_says_its_method(tmp_path):
    rows = [{"step": 1, "completions/mean_length": 9.0}]
    assert Setup.of_log(tmp_path, rows) == Setup("trl")
    said = Setup.of_log(tmp_path, rows, framework="slime", method="GSPO()")
    assert said == Setup("slime", as_method("GSPO()"))
    (tmp_path / "config.yaml").write_text("model: other\n")
    assert Setup.of_log(tmp_path, rows).method is None
    with pytest.raises(ValueError, match="framework 'nope' is none of trl, verl"):
        Setup.of_log(tmp_path, rows, framework="nope")
