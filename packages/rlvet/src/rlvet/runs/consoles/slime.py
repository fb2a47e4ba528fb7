"""Read the console of slime and miles."""

from __future__ import annotations

import re

from rlvet.runs.consoles._console import Console, StepMetrics, by_step
from rlvet.runs.consoles._printed import dictionary_at
from rlvet.runs.unread import Unread


def _slime_rows(text: str, unread: Unread) -> StepMetrics:
    """Read ``rollout 3: {…}`` and ``step 3: {…}`` of slime and miles.

    There may be several training steps per rollout, the same number for each. Their metrics are yielded under the
    number of the rollout, so that those of its last step are kept.
    """
    lines = list(re.finditer(r"(?<![\w/-])(rollout|perf|step) (\d+): (?=\{)", text))
    training_steps = {match[2] for match in lines if match[1] == "step"}
    rollouts = {int(match[2]) for match in lines if match[1] == "rollout"}
    steps_per_rollout = 1
    if rollouts:
        steps_per_rollout = max(1, round(len(training_steps) / len(rollouts)))

    for match in lines:
        number = int(match[2])
        if match[1] == "step":
            number //= steps_per_rollout
        metrics = dictionary_at(text, match.end())
        # An empty dictionary has nothing that can be lost.
        if metrics or not text.startswith("{}", match.end()):
            yield number, metrics


CONSOLE = Console(
    "slime, miles",
    "rollout 3: {'rollout/raw_reward': 0.25, 'rollout/response_lengths': 300.0}\n"
    "step 3: {'train/pg_clipfrac': 0.01, 'train/entropy_loss': 0.5, 'train/grad_norm': 0.25}\n",
    by_step(_slime_rows),
    before=("trl",),
)
