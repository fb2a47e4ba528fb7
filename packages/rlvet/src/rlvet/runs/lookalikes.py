"""Find the lines of a text that look like rows of metrics and were not read.

The readers are not asked, so that a line which none of them knows is found too: the numbers of each line are compared
with those of the rows that were read, and with those of the lines that a reader has refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rlvet.runs.consoles._printed import ESCAPES
from rlvet.runs.limits import LONGEST_ROW
from rlvet.runs.unread import Unread

METRIC = re.compile(
    r"(?<![a-z])(?:rewards?|scores?|entropy|kl|loss|grad[_ ]?norm|acc|accuracy|returns?|advantages?|len|length|clip\w*)"
    r"(?![a-z])",
    re.I,
)
"""A word in the name of a metric."""

STEP = re.compile(
    r"\b(?:global[_ ]?)?(?:step|iter(?:ation)?|update|episode|epoch|rollout)\W{0,3}\s{0,12}\d"
    r"|[\[(]\s{0,9}\d+\s{0,3}/\s{0,3}\d+\s{0,3}[\])]",
    re.I,
)
"""A step in any form: ``step=    1``, ``[1/1000]``."""

STEP_NUMBER = re.compile(r"\b(?:step|rollout)\W{1,3}(\d{1,18})", re.I)
"""A step as readers name a line that they refuse."""

PAIR = re.compile(
    r"(?<![\w/.@-])(?P<name>[A-Za-z][\w/.@-]{0,60}+)[\"'`*]{0,2}(?:\s{0,3}[=:]\s{0,12}|\s{1,12})[\"'`*]{0,2}(?:np\.\w{1,9}\(|tensor\()?"
    r"(?P<number>-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|-?inf)(?=[\s,;|)\]}%\"'`*]|\Z)",
    re.I,
)
"""A name and its number: ``reward=0.5``, ``'reward': 0.5``, ``Reward 0.5``."""

SUMMARY = re.compile(r"train_runtime|TrainOutput\(")
"""What is printed at the end of a training, which is no row."""

FEWEST_METRICS = 2
"""The smallest number of metrics in a row."""

MOST_CANDIDATES = 500
"""The largest number of rows that are compared with a line. Of a number that more rows have, it only counts that it is
known."""

TELLING_PLACES = 6
"""The number of places to which numbers are compared."""

NAME = "line of metrics"
"""What a line that no reader knows is called."""


def count_lookalikes(text: str, rows: Iterable[Mapping[str, Any]], unread: Unread) -> None:
    r"""Count the lines of a text that look like rows of metrics, and are in no row that was read or refused.

    A line looks like a row if it has the numbers of two metrics and a step. It is in a row if four in five of these
    numbers are, other than 0 and 1, which do not tell rows apart.

    Args:
        text: The text.
        rows: The rows that were read.
        unread: The rows that readers have refused, to which the lines are added.

    >>> unread = Unread()
    >>> lines = "step=    1 reward=0.25 kl=0.5\nstep=  100 reward=0.75 kl=0.5"
    >>> count_lookalikes(lines, [{"step": 100, "reward": 0.75, "kl": 0.5}], unread)
    >>> unread.notes()
    ("1 line of metrics is not read, as no reader knows its form: 'step=    1 reward=0.25 kl=0.5'",)
    """
    text = ESCAPES.sub("", text)
    lookalikes = [(line, numbers) for line in text.splitlines() if (numbers := numbers_of_row(line))]
    if not lookalikes:
        return
    known: dict[float, list[int]] = {}
    number_of_rows = 0
    for number_of_rows, row in enumerate(rows, 1):
        for value in row.values():
            _add_number(value, number_of_rows, known)
    for place, refused in enumerate(unread.texts, number_of_rows + 1):
        for number in _numbers(refused):
            _add_number(number, place, known)
    # The number of lines that were refused by the step alone.
    refused_steps = Counter(refused for refused in unread.texts if re.fullmatch(r"step \d{1,18}", refused))

    for line, numbers in lookalikes:
        if _is_in_a_row(numbers, known):
            continue
        step = STEP_NUMBER.search(line)
        name = f"step {step[1]}" if step is not None else ""
        if refused_steps[name] > 0:
            refused_steps[name] -= 1
        else:
            unread.add(NAME, "no reader knows its form", line, is_lost=True)


def numbers_of_row(line: str) -> list[float]:
    """Return the numbers of the metrics in a line that looks like a row of metrics, without 0 and 1; empty for another.

    >>> numbers_of_row("[3/100] reward 0.25 | kl: 0.5"), numbers_of_row("at step 3 the reward is 0.25")
    ([0.25, 0.5], [])
    """
    if len(line) > LONGEST_ROW or not METRIC.search(line) or not STEP.search(line) or SUMMARY.search(line):
        return []
    numbers = _numbers(line)
    return (
        [number for number in numbers if number not in (0.0, 1.0)] if len(numbers) >= FEWEST_METRICS else []
    )


def _numbers(line: str) -> list[float]:
    """Return the finite numbers of the metrics in a line."""
    pairs = PAIR.finditer(line, 0, LONGEST_ROW)
    texts = [pair["number"].lower() for pair in pairs if METRIC.search(pair["name"])]
    return [float(text) for text in texts if text[-1] not in "nf"]


def _add_number(value: Any, place: int, known: dict[float, list[int]]) -> None:
    """Add a value of a row, as it may have been printed, to the places of each number."""
    if isinstance(value, str):
        # A text such as 0.000 (rounded).
        value = value.partition(" ")[0]
    try:
        number = float(value)
    except (TypeError, ValueError):
        return
    for form in {number, 100 * number, -number}:
        places = known.setdefault(_rounded(form), [])
        if len(places) <= MOST_CANDIDATES and (not places or places[-1] != place):
            places.append(place)


def _rounded(number: float) -> float:
    """Return a number to as many places as decide whether two are the same."""
    return float(f"{number:.{TELLING_PLACES}g}")


def _is_in_a_row(numbers: list[float], known: Mapping[float, list[int]]) -> bool:
    """Return True if a row has four in five of the numbers of a line."""
    fewest = len(numbers) - len(numbers) // 5
    places = [known[rounded] for number in numbers if (rounded := _rounded(number)) in known]
    if len(places) < fewest:
        return False
    counts: dict[int, int] = {}
    # Numbers of many rows do not tell them apart.
    common = sum(len(rows) > MOST_CANDIDATES for rows in places)
    for rows in places:
        if len(rows) <= MOST_CANDIDATES:
            for row in rows:
                counts[row] = counts.get(row, 0) + 1
    return common + max(counts.values(), default=0) >= fewest
