"""Find the checkpoints that a training says to have saved, in what it printed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlvet._numbers import format_step

FOLDER = re.compile(r"(?<![A-Za-z])(?:checkpoint-|global_step_)(?P<step>\d{1,9})(?!\w)")
"""A folder of a checkpoint as transformers and verl name it."""

SAVED = re.compile(r"\bsav(?:ed|ing)\b", re.IGNORECASE)
"""The word of a line that names a checkpoint as saved, and not as the start of a run or in its settings."""

LONGEST_PATH = 300
"""The number of characters between that word and the step."""


def saved_steps(text: str) -> tuple[int, ...]:
    """Return the steps of the checkpoints that a text names as saved, in order.

    >>> saved_steps("Saving model checkpoint to runs/a/checkpoint-100")
    (100,)
    >>> saved_steps("model: sft/global_step_105")
    ()
    """
    steps = set()
    for folder in FOLDER.finditer(text):
        before = text[max(0, folder.start() - LONGEST_PATH) : folder.start()]
        line = before.rpartition("\n")[2]
        if SAVED.search(line):
            steps.add(int(folder["step"]))
    return tuple(sorted(steps))


def describe_saved(saved: Sequence[int], step: float) -> str:
    """Return a clause on the last checkpoint from before a step; empty if no checkpoint is known.

    >>> describe_saved((100, 200), 125)
    ': the output names one of step 100'
    >>> describe_saved((100, 200), 60)
    ', or begin again: the first that the output names is of step 100'
    """
    if not saved:
        return ""
    earlier = [other for other in saved if other < step]
    if earlier:
        return f": the output names one of step {format_step(max(earlier))}"
    return f", or begin again: the first that the output names is of step {format_step(min(saved))}"
