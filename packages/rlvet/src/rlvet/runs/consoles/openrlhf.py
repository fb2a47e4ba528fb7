"""Read OpenRLHF's console."""

from __future__ import annotations

import re

from rlvet.runs.consoles._console import Console, StepMetrics, by_step
from rlvet.runs.consoles._printed import dictionary_at
from rlvet.runs.unread import Unread


def _openrlhf_rows(text: str, unread: Unread) -> StepMetrics:
    """Read ``Global step 3: {…}``."""
    for match in re.finditer(r"\bGlobal step (\d+): (?=\{)", text):
        yield int(match[1]), dictionary_at(text, match.end())


CONSOLE = Console(
    "OpenRLHF",
    "ppo_trainer.py:547] Global step 3: {'reward': 0.25, 'actor_grad_norm': 0.5, 'entropy_loss': 0.5}\n",
    by_step(_openrlhf_rows),
    before=("slime", "trl"),
)
