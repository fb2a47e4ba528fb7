"""Read NeMo-RL's console."""

from __future__ import annotations

import re
from typing import Any

from rlvet.runs.consoles._console import Console, StepMetrics, by_step
from rlvet.runs.consoles._printed import number_of
from rlvet.runs.unread import Unread

NEMO_RL_NAMES = {
    "Loss": "loss",
    "Generation KL Error": "gen_kl_error",
    "Avg Reward": "reward",
    # Dynamic sampling prints these two in place of that one. The filtered one is of the prompts that were kept.
    "Avg Total Reward": "reward",
    "Avg Filtered Reward": "filtered_reward",
    "Mean Generation Length": "mean_gen_tokens_per_sample",
}
"""The key of NeMo-RL's trackers for each name in its results of a step."""


def _nemo_rl_rows(text: str, unread: Unread) -> StepMetrics:
    """Read NeMo-RL's ``===== Step 3/100 =====`` and the results below it, one per line.

    The printed numbers of steps start at 1 in each epoch.
    """
    epoch = 1
    # The text before the first header, and then for each header its title, number, total and the text below it.
    pieces = re.split(r"(?<!=)={5,}+ (Epoch|Step) (\d+)/(\d+) ={5,}", text)
    for start in range(1, len(pieces), 4):
        title, number, total, body = pieces[start : start + 4]
        if title == "Epoch":
            epoch = int(number)
            continue
        _, heading, results = body.partition("Training Results:")
        if not heading:
            unread.add("step", "it has no results", f"step {number}")
            continue
        results = results.partition("Timing:")[0]
        metrics: dict[str, Any] = {}
        for result in re.finditer(r"• ([\w ]+): ([^\n]*)", results):
            name = result[1]
            text_of_value = result[2].strip()
            number_of_name = number_of(text_of_value)
            key = NEMO_RL_NAMES[name] if name in NEMO_RL_NAMES else name.lower().replace(" ", "_")
            metrics.setdefault(key, text_of_value if number_of_name is None else number_of_name)
        yield (epoch - 1) * int(total) + int(number), metrics


CONSOLE = Console(
    "NeMo-RL",
    f"{'=' * 25} Step 3/6 {'=' * 25}\n📊 Training Results:\n  • Loss: 0.0100\n  • Avg Reward: 0.2500\n",
    by_step(_nemo_rl_rows),
)
