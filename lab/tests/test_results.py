"""What the documentation and the repository's report say is what the study's data say."""

from __future__ import annotations

import csv
import json
import re
from functools import cache

import pytest
from safetensors import safe_open

from bandpo.audit.interval import Interval
from bandpo_lab.study.report import study_page
from bandpo_lab.study.statistics import Results, student
from bandpo_lab.tasks import multiplication
from pages import ROOT

RESULTS = ROOT / "results" / "clipping"
NUMBER = r"[-+]?\d+(?:\.\d+)?"
BANDS = ["Band-KL", "Band-TV", "Band-χ²", "Band above, clip below", "relaxed Band"]


@cache
def content() -> dict:
    return json.loads((RESULTS / "results.json").read_text())


@cache
def first_study() -> Results:
    return Results.from_file(content())


def mean(experiment: str, arm: str, metric: str = "mean@32") -> str:
    values = first_study().by_seed(experiment, arm, metric).values()
    return f"{sum(values) / len(values):.3f}"


def section(page: str, heading: str) -> str:
    """The prose under a heading, without names, links and tables."""
    text = (ROOT / page).read_text().partition(f"# {heading}\n")[2]
    text = re.split(r"^(?:#+ |<!--|\|)", text, maxsplit=1, flags=re.M)[0]
    return re.sub(r"\]\([^)]*\)|`[^`]*`|\w+@\d+|clip 0\.2", "", text)


def parameters() -> int:
    with safe_open(multiplication.base_model_path() / "model.safetensors", "np") as weights:
        return sum(weights.get_tensor(name).size for name in weights.keys())  # noqa: SIM118  (it is no mapping)


def lower_side() -> list[str]:
    gap = first_study().contrast("Band above, clip below", "Band-KL", "mean entropy")
    return [*(f"{x:.3f}" for x in gap.overall), str(gap.above), str(gap.pairs)]


def test_every_number_of_the_account_is_the_data_s():
    found, study = first_study(), first_study().study
    bands = (d for d in found.differences("mean@32") if d.arm in BANDS)
    apart = [d.interval for d in bands if d.experiment in ("main", "lock")]
    steps, updates = study.options["max_steps"], study.options["logging_steps"]
    assert re.findall(NUMBER, section("docs/study.md", "What the first study found")) == [
        f"{parameters() / 1000:.0f}",
        str(steps // updates),
        f"{min(i.low for i in apart):+.3f}",
        f"{max(i.high for i in apart):+.3f}",
        mean("main", "no clip"),
        mean("main", "clip 0.2"),
        *(mean("common tail", arm) for arm in ("Band-KL", "Band above, clip below", "clip 0.2")),
        *(mean("common tail", arm, "AUC") for arm in ("Band-KL", "Band above, clip below", "clip 0.2")),
        *lower_side(),
    ]


def test_what_the_account_says_in_words_is_the_data_s():
    found, study = first_study(), first_study().study
    assert len(study.arms) == 9  # nine rules
    assert {len(e.seeds) for e in study.experiments.values() if not e.identical} == {8}  # eight seeds
    rates = {c["arm"]: c["values"]["learning_rate"] for c in content()["chosen"]}
    assert {rates["clip 0.2"] / rates[band] for band in BANDS} == {2}  # twice the rate
    assert rates["Clip-Higher"] == rates["Band above, clip below"] == rates["Band-KL"]  # equal rates
    tail = [("common tail", arm) for arm in ("Band-KL", "Band above, clip below")]
    seen = {e.name: [0, 1] for e in study.experiments.values() if e.tuned_in}
    for without in ({}, seen):  # of the six seeds that had not been seen, too
        claimed = {(d.experiment, d.arm) for d in found.differences("mean@32", without) if d.claimed}
        assert claimed == {("main", "no clip"), *tail}


def test_what_is_said_of_the_control_tasks_is_the_data_s():
    rows = list(csv.DictReader((ROOT / "benchmarks/results/discrete_actions.csv").read_text().splitlines()))

    def gap(environment: str, rule: str, other: str) -> Interval:
        here = (row for row in rows if row["environment"] == environment)
        returns = {(row["rule"], row["seed"]): float(row["training_return"]) for row in here}
        seeds = {seed for _, seed in returns}
        return student([returns[rule, seed] - returns[other, seed] for seed in seeds])

    wide, band = "FixedClip(0.4, 0.4)", "Band(KL(), 0.05)"
    page = (ROOT / "docs/frameworks.md").read_text()
    for rule, other in ((wide, "PPO"), (band, wide)):
        interval = gap("Acrobot-v1", rule, other)
        assert f"{interval.value:.1f} ± {interval.half:.1f}".replace("-", "−") in page
    # The wide clip has nearly all of the gain.
    assert gap("Acrobot-v1", band, wide).high < 0.1 * gap("Acrobot-v1", band, "PPO").value
    for rule in (wide, band):
        cart_pole = gap("CartPole-v1", rule, "PPO")
        assert cart_pole.low < 0 < cart_pole.high  # not told apart


@pytest.mark.slow
def test_the_report_says_what_the_data_say(tmp_path):
    page = study_page(content(), (RESULTS / "afterwards.yaml").read_text())
    made = page.save(tmp_path / "report.md")
    assert made[0].read_text() == (RESULTS / "report.md").read_text()
    assert {path.name for path in made} <= {path.name for path in RESULTS.iterdir()}
