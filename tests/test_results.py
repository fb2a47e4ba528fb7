"""What README and the repository's report say is what the study's data say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from bandpo.study.report import study_page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "clipping"


def test_readme_says_what_the_data_say():
    script = runpy.run_path(str(ROOT / "scripts" / "readme_results.py"))
    readme = (ROOT / "README.md").read_text()
    assert script["START"] in readme
    assert script["renewed"](readme) == readme


def test_the_report_says_what_the_data_say(tmp_path):
    page = study_page(json.loads((RESULTS / "results.json").read_text()))
    made = page.save(tmp_path / "report.md")
    assert made[0].read_text() == (RESULTS / "report.md").read_text()
    assert {path.name for path in made} <= {path.name for path in RESULTS.iterdir()}


def test_every_run_that_was_announced_is_in_the_data():
    from bandpo.study.plan import parse_study

    results = json.loads((RESULTS / "results.json").read_text())
    study = parse_study(results["study"])
    chosen = {(c["experiment"], c["arm"]): c["values"] for c in results["chosen"]}
    announced = {
        (r.experiment, r.arm, r.seed, str(r.tuning)) for r in study.searches() + study.reported(chosen)
    }
    there = {(r["experiment"], r["arm"], r["seed"], str(r["tuning"])) for r in results["runs"]}
    assert (
        announced - there == set()
        if not results["failed"]
        else len(announced - there) == len(results["failed"])
    )
    assert there <= announced
