"""Read verl's console."""

from __future__ import annotations

import re
from typing import Any

from rlvet.runs.consoles._console import Console, as_one_training
from rlvet.runs.consoles._printed import ROUNDED, ROUNDED_TO_ZERO
from rlvet.runs.unread import Unread

VERL_STEP = re.compile(r"\bstep:(\d+) - ([^\n]*)")
"""A line of verl's console logger: ``step:3 - actor/entropy:0.424 - …``."""

PRINTED_NUMBER = re.compile(r"(?:np\.\w+\()?(-?(?:\d[\d_]*+(?:\.\d*)?(?:e[+-]?\d+)?|nan|inf))\)?", re.I)
"""A number, possibly of numpy: ``0.5``, ``np.float64(0.5)``."""

NEXT_LINE = re.compile(r"\r|(?<=[\d)])\s*\(\w+ pid=\d+\)")
"""The start of another line, such as that of a progress bar, that Ray joins to one."""

SCALED_KEY = re.compile(r"(.+)\((1e-?\d+)\)")
"""A key with the unit of its value: ``actor/lr(1e-4):0.010``."""


def verl_rows(text: str, unread: Unread | None = None) -> list[dict[str, Any]]:
    r"""Return the rows in verl's console output.

    verl rounds to three decimals there, so a learning rate or gradient norm that is printed as 0.000 is no number.
    Other texts are kept as they are.

    Args:
        text: The console output.
        unread: The object to which lines without a metric are added.

    >>> verl_rows("(TaskRunner pid=1) step:2 - actor/lr:0.000 - critic/score/mean:np.float64(0.5)")
    [{'step': 2, 'actor/lr': '0.000 (rounded)', 'critic/score/mean': 0.5}]
    >>> verl_rows("step:2 - perf/throughput:41.9(TaskRunner pid=8) \rTraining Progress:  26%| 52/200 [05:34<6:50:10]")
    [{'step': 2, 'perf/throughput': 41.9}]
    """
    unread = Unread() if unread is None else unread
    rows = []
    for line in VERL_STEP.finditer(text):
        row: dict[str, Any] = {"step": int(line[1])}
        for metric in NEXT_LINE.split(line[2])[0].split(" - "):
            key, _, text_of_value = metric.strip().rpartition(":")
            number = PRINTED_NUMBER.fullmatch(text_of_value.strip())
            if not key or number is None:
                if key:
                    row[key] = text_of_value.strip()
                continue
            unit = 1.0
            scaled = SCALED_KEY.fullmatch(key)
            if scaled is not None:
                key = scaled[1]
                unit = float(scaled[2])
            if re.fullmatch(r"-?0\.000", text_of_value.strip()) and ROUNDED_TO_ZERO.search(key):
                row[key] = ROUNDED.format(text_of_value.strip())
                continue
            row[key] = float(number[1]) * unit
        if len(row) > 1:
            rows.append(row)
        else:
            unread.add("line of a step", "it has no metric", line[0])
    return rows


CONSOLE = Console(
    "verl",
    "(TaskRunner pid=1) step:3 - actor/entropy:0.500 - critic/rewards/mean:0.250 - actor/kl_loss:0.010\n",
    as_one_training(verl_rows),
    before=("custom",),
)
