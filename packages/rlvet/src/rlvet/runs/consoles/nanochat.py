"""Read the console of nanochat."""

from __future__ import annotations

import re

from rlvet.runs.consoles._console import Console, StepMetrics, by_step
from rlvet.runs.unread import Unread

STEP = re.compile(
    r"^Step (\d+)/\d+ \| Average reward: (-?[\d.]+(?:e-?\d+)?) \| Average sequence length: ([\d.]+)", re.M
)
"""The line of a step, which has the means over all passes."""

PASS = re.compile(r"^Step \d+/\d+ \| Example step \d+ \| Pass \d+ \| [^\n]*", re.M)
"""The line of a pass over the samples of one prompt."""


def _nanochat_rows(text: str, unread: Unread) -> StepMetrics:
    """Read ``Step 3/100 | Average reward: …``.

    The lines before it, of passes over single prompts, are not read.
    """
    steps = list(STEP.finditer(text))
    if steps:
        for line in PASS.finditer(text):
            unread.add("line of a pass", "the line of the step has the mean", line[0])
    for line in steps:
        yield int(line[1]), {"reward": float(line[2]), "sequence_length": float(line[3])}


CONSOLE = Console(
    "nanochat",
    "Step 3/100 | Average reward: 0.25 | Average sequence length: 202.84\n",
    by_step(_nanochat_rows),
    before=("custom",),
)
