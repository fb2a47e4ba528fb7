"""What the documentation says of our measurements is what their data say."""

import csv

from bandpo.audit.interval import Interval
from bandpo_lab.study.statistics import student
from pages import ROOT


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
