"""Read the lines that a custom training loop prints."""

from __future__ import annotations

import re
from typing import Any

from rlvet.runs.consoles._console import Console, Rows, as_one_training
from rlvet.runs.consoles._printed import (
    PRINTED_ZERO,
    ROUNDED,
    ROUNDED_TO_ZERO,
    dictionary_at,
    is_number,
    number_of,
)
from rlvet.runs.limits import LONGEST_ROW
from rlvet.runs.quantities import is_evaluation_score
from rlvet.runs.unread import Unread

STEP_IN_EPOCH = re.compile(r"\bepoch\W*(\d+)(?:/\d+)?\W+(?:step\W*)?(\d+)/(\d+)", re.I)
"""An epoch, the step in it, and the steps of an epoch: ``Epoch:[1/2](20/500)``."""

STEP_OF_LINE = re.compile(
    r"\b(?:global[_ ])?(?:step|iter|iteration|update)\W{0,3}\s{0,12}(\d++)(?!\.\d)(?:/\d+)?", re.I
)
"""A step: ``global_step=3``, ``iter 3/100``."""

NUMBER_OF_NAME = re.compile(
    r" ?(?P<sign>[:=]) ?(?P<number>-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|-?inf)(?P<percent>%?)(?=[\s,;|)\]]|$)",
    re.I,
)
"""The number of a name, such as ``: 271.00`` of ``Avg Response Len: 271.00`` and ``=0.01`` of ``kl=0.01``."""

MOST_WORDS = 4
"""The largest number of words in a name."""

WORD_CHARACTERS = re.compile(r"[\w/.@-]*")

LETTER = re.compile(r"[a-z]", re.I)

TENSOR = re.compile(r"\btensor\((-?[\d.]+(?:e[+-]?\d+)?|nan|-?inf)(?:, \w+=[^,()\s]+)*\)")
"""A number of torch: ``tensor(0.5)``, ``tensor(0.5, device='cuda:0', grad_fn=<DivBackward0>)``."""

KL_KEY = re.compile(r"(?:^|[/_.-])kl(?:$|[/_.-])")
"""A key of a KL divergence."""


def custom_loop_rows(text: str, unread: Unread | None = None) -> Rows:
    """Return the rows that a custom training loop prints, one per line; empty if there are none.

    A line is a row if it has a step, and after the step a reward or a KL divergence, and another number. If there are
    such lines, others with a step and the score of an evaluation, or an accuracy, are rows too. Names become lower-case
    keys with underscores. The numbers of a dictionary on a line of its own belong to the row below it, or to that above
    it if a row comes first.

    Args:
        text: The console output.
        unread: The object to which other lines with a step and numbers are added.

    >>> custom_loop_rows("step 3/100 | Avg Reward: 0.5 | KL: tensor(0.01)")
    [{'step': 3, 'avg_reward': 0.5, 'kl': 0.01}]
    """
    unread = Unread() if unread is None else unread
    rows: Rows = []
    has_reward = False
    # True if dictionaries belong to the row below; None before the first of them.
    is_above: bool | None = None
    dictionary: dict[str, Any] = {}
    others = Unread()
    for line in text.splitlines():
        if len(line) > LONGEST_ROW:
            others.add("line", f"it has more than {LONGEST_ROW:,} characters", line[:200])
            continue
        line = TENSOR.sub(r"\1", line)
        numbers = _numbers_of_dictionary(line)
        if numbers:
            if is_above is None:
                is_above = not rows
            if is_above:
                dictionary = numbers
            else:
                # In place, as a row may have many dictionaries.
                for key, value in numbers.items():
                    rows[-1].setdefault(key, value)
            continue
        row = _row_of_line(line)
        if row is None:
            continue
        is_reward = len(row) > 2 and any("reward" in key or KL_KEY.search(key) for key in row)
        has_reward = has_reward or is_reward
        if is_reward or any(key == "accuracy" or is_evaluation_score(key) for key in row):
            rows.append({**dictionary, **row})
            dictionary = {}
        elif len(row) > 2:
            others.add("line with a step and numbers", "it has no reward", line)
    if not has_reward:
        return []
    unread.add_all(others)
    return rows


def _numbers_of_dictionary(line: str) -> dict[str, Any]:
    """Return the numbers of a line that is a dictionary; empty if it is none."""
    if not line.startswith("{"):
        return {}
    return {key: value for key, value in dictionary_at(line, 0).items() if is_number(value)}


def _row_of_line(line: str) -> dict[str, Any] | None:
    """Return the step of a line and the numbers after it, by their names; None without a step."""
    in_epoch = STEP_IN_EPOCH.search(line)
    step_match = in_epoch or STEP_OF_LINE.search(line)
    if step_match is None:
        return None
    step = int(step_match[1])
    if in_epoch is not None:
        step = (step - 1) * int(in_epoch[3]) + int(in_epoch[2])

    row: dict[str, Any] = {"step": step}
    # The names are read backwards from their numbers, so that no text is scanned twice.
    start = step_match.end()
    for pair in NUMBER_OF_NAME.finditer(line, start):
        name = _name_at_end(line[start : pair.start()])
        start = pair.end() if name else pair.end("sign")
        key = name.lower().replace(" ", "_")
        if not key:
            continue
        value = number_of(pair["number"].lower())
        if PRINTED_ZERO.fullmatch(pair["number"]) and ROUNDED_TO_ZERO.search(key):
            value = ROUNDED.format(pair["number"])
        if pair["percent"] and isinstance(value, float):
            value /= 100
        row.setdefault(key, value)
    return row


def _name_at_end(text: str) -> str:
    """Return the name at the end of a text, up to `MOST_WORDS` words that begin with a letter; empty without one.

    >>> _name_at_end("1.5 | Avg Response Len"), _name_at_end("12kl"), _name_at_end("kl 0.5")
    ('Avg Response Len', 'kl', '')
    """
    words: list[str] = []
    for piece in reversed(text.rsplit(" ", MOST_WORDS)[-MOST_WORDS:]):
        match = WORD_CHARACTERS.match(piece[::-1])
        run = piece[len(piece) - (match.end() if match else 0) :]
        letter = LETTER.search(run)
        if letter is None:
            break
        words.append(run[letter.start() :])
        # A word before this one must be separated from it by a space alone.
        if letter.start() or run != piece:
            break
    return " ".join(reversed(words))


CONSOLE = Console(
    "a loop of your own that prints a step, a reward and another number in a line, such as "
    "`step 3: reward=0.5, kl=0.01`",
    "step 3: reward=0.25, kl=0.01\n",
    as_one_training(custom_loop_rows),
)
