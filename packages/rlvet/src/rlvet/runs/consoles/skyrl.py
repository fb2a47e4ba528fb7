"""Read SkyRL's console."""

from __future__ import annotations

import re

from rlvet.runs.consoles._console import Console, StepMetrics, by_step
from rlvet.runs.consoles._printed import dictionary_at
from rlvet.runs.unread import Unread


def _skyrl_rows(text: str, unread: Unread) -> StepMetrics:
    """Read ``Step 3:`` and the dictionary below it, whose numbers are strings with four decimals."""
    for match in re.finditer(r"\bStep (\d+): *\r?\n(?=[^\n{]*\{)", text):
        yield int(match[1]), dictionary_at(text, text.index("{", match.end()))


CONSOLE = Console(
    "SkyRL",
    "tracking:log:189 - Step 3: \n{'policy/policy_entropy': '0.5000',\n 'reward/avg_raw_reward': '0.2500'}\n",
    by_step(_skyrl_rows),
    before=("trl",),
)
