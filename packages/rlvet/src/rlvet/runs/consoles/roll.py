"""Read ROLL's console."""

from __future__ import annotations

import json
import re

from rlvet.runs.consoles._console import Console, StepMetrics, by_step
from rlvet.runs.unread import Unread


def _roll_rows(text: str, unread: Unread) -> StepMetrics:
    """Read ROLL's tracker ``stdout``: ``metrics_tag: {"step": 3, "metrics": {…}}``."""
    for match in re.finditer(r"\bmetrics_tag: (?=\{)([^\n]*)", text):
        end = match[1].rfind("}")
        try:
            content = json.loads(match[1][: end + 1])
        except (ValueError, RecursionError):
            unread.add("line of a step", "it is no JSON", match[0], is_lost=True)
            continue
        step = content.get("step")
        metrics = content.get("metrics")
        if type(step) is int and isinstance(metrics, dict):
            yield step, metrics


CONSOLE = Console(
    "ROLL with its tracker `stdout`",
    'metrics_tag: {"step": 3, "metrics": {"critic/score/mean": 0.25, "actor/entropy": 0.5, "actor/lr": 1e-6}}\n',
    by_step(_roll_rows),
    before=("trl",),
)
