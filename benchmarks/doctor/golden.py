"""Print every finding of the checks of a log, for a comparison before and after a change that must change none.

    PYTHONPATH=tests:benchmarks/doctor python benchmarks/doctor/golden.py > before.jsonl

The logs are those of each scenario of `log_scenarios.py` for three seeds, and 2,100 random ones. Each is checked
without settings, and with settings that findings name. A line is the name of a log and the JSON of its findings; takes
about 20 seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from log_scenarios import SCENARIOS

from helpers.random_logs import random_rows
from rlvet.checks.log_checks import log_findings
from rlvet.runs.logs import Log
from rlvet.runs.quantities import Row
from rlvet.runs.setup import Setup, Value

SEEDS = (1, 940, 941)
SETUP = Setup(
    "trl",
    "GSPO()",
    "sequence",
    updates=2,
    stale=True,
    values={
        name: Value(key, value, "config.yaml")
        for name, key, value in (
            ("learning rate", "learning_rate", 5e-4),
            ("group size", "num_generations", 8),
            ("length cap", "max_completion_length", 1024),
            ("temperature", "temperature", 0.05),
            ("weight level", "vllm_importance_sampling_mode", "sequence_mask"),
            ("KL term", "beta", 0.04),
            ("LoRA rank", "lora_r", 16),
        )
    },
)
"""A run whose settings occur in the findings, and change some of them."""


def logs() -> Iterator[tuple[str, list[Row]]]:
    """Yield the name and the rows of each log."""
    for name, scenario in SCENARIOS.items():
        for seed in SEEDS:
            yield f"{name}, {seed}", Log.of(scenario.rows(seed)).rows
    for seed in range(1500):
        yield f"random, {seed}", Log.of(random_rows(seed)).rows
    for seed in range(600):
        yield f"random and short, {seed}", Log.of(random_rows(seed, (12, 46, 60))).rows


def main() -> None:
    """Print a line for each log and setup."""
    for name, rows in logs():
        for setup in (Setup(), SETUP):
            findings = log_findings(rows, setup)
            line = {"log": name, "method": setup.method, "findings": [one.as_json() for one in findings]}
            print(json.dumps(line, sort_keys=True))


if __name__ == "__main__":
    main()
