"""The command ``rlvet demo``: each finding of a log is shown on a small run that the package contains."""

import re
import subprocess
import sys

import pytest

from pages import ROOT
from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.log_checks import log_findings
from rlvet.checks.registry import LOGS
from rlvet.cli.demo import demo_text, list_text, load_demos, rows_of
from rlvet.errors import InvalidValue
from rlvet.runs.logs import Log

DEMOS = load_demos()

WITHOUT = {"clip-idle", "rare-tokens-blocked"}
"""Findings that need settings, or a record of tokens."""


def test_each_finding_of_a_log_has_a_demo():
    """If one is missing, run benchmarks/doctor/demo_logs.py."""
    assert {kind.code for kind in LOGS.kinds()} == DEMOS.keys() | WITHOUT


@pytest.mark.parametrize("code", DEMOS)
def test_a_demo_has_its_finding(code):
    rows = rows_of(DEMOS[code])
    assert len(rows) <= 400
    findings = log_findings(Log.of(rows).rows)
    assert code in [finding.code for finding in findings]
    text = demo_text(code)
    assert text.count("\n") < 60
    assert re.search(rf"\d\. {code}\b", text) or text.splitlines()[8].startswith(code)
    assert Diagnosis(findings).headline in text


def test_the_page_has_a_real_output():
    """Of a demo, without its rows. The page leaves out lines in the middle, at an ellipsis."""
    page = (ROOT / "docs/diagnose.md").read_text()
    assert "rlvet demo entropy-collapse" in page
    (shown,) = re.findall(r"^    entropy-collapse: .*\n(?:(?:    .*)?\n)+", page, re.M)
    start, end = re.sub("^    ", "", shown.rstrip(), flags=re.M).split("…\n")
    _, _, printed = demo_text("entropy-collapse").rstrip().partition("\n\n")
    assert printed.startswith(start)
    assert printed.endswith(end)


def test_findings_are_listed_with_their_meaning():
    lines = list_text().splitlines()
    assert len(lines) == len(DEMOS)
    assert any(line.split() == ["truncated", "fix", "most", "answers", "are", "truncated"] for line in lines)


def test_what_has_no_demo_is_said():
    with pytest.raises(
        InvalidValue, match="called 'truncatted'; rlvet demo lists them; did you mean truncated"
    ):
        demo_text("truncatted")
    with pytest.raises(InvalidValue, match="clip-idle has no demo, as a log alone does not show it"):
        demo_text("clip-idle")


def test_the_command_prints_a_demo():
    run = subprocess.run(
        [sys.executable, "-m", "rlvet", "demo", "collapse"], capture_output=True, text=True, check=True
    )
    assert run.stdout == demo_text("collapse") + "\n"
