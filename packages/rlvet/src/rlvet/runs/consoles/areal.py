"""Read AReaL's console."""

from __future__ import annotations

import re
from typing import Any

from rlvet.runs.consoles._console import Console, StepMetrics, by_step
from rlvet.runs.consoles._printed import number_of
from rlvet.runs.unread import Unread


def _areal_rows(text: str, unread: Unread) -> StepMetrics:
    """Read AReaL's ``Train step 3/100 done.`` and the table below it, whose columns are keys and values in turn."""
    # The text before the first step, and then a number and a table for each step.
    pieces = re.split(r"\bTrain step (\d+)/\d+ done\.", text)
    for number, table in zip(pieces[1::2], pieces[2::2], strict=True):
        metrics: dict[str, Any] = {}
        for line in re.findall(r"│([^\n]*)│", table):
            cells = [cell.strip() for cell in line.split("│")]
            for key, value in zip(cells[::2], cells[1::2], strict=False):
                if key:
                    value_of_key = number_of(value)
                    metrics[key] = value if value_of_key is None else value_of_key
        yield int(number), metrics


CONSOLE = Console(
    "AReaL",
    "StatsLogger INFO: Epoch 1/1 Step 3/12 Train step 3/12 done.\n"
    "│ ppo_actor/task_reward/avg │ 2.5000e-01 │ ppo_actor/update/entropy/avg │ 5.0000e-01 │\n",
    by_step(_areal_rows),
)
