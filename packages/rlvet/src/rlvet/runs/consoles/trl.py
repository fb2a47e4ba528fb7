"""Read the dictionaries of metrics that trainers of transformers, such as TRL's, print during training.

They have no step of their own, may be wrapped by a terminal or cut off, and several trainings may follow each other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvet.runs.consoles._console import Console
from rlvet.runs.consoles._printed import literal_dictionary
from rlvet.runs.limits import LONGEST_ROW
from rlvet.runs.quantities import EVALUATION, STEP_KEYS, SUMMARY, component_name, is_of_evaluation, sources
from rlvet.runs.unread import STEPS_COUNTED, Unread

TRL_ROW_OR_PROGRESS = re.compile(r"\{['\"][^{}\n]*\}|\b(\d+)/(\d+) \[")
"""A row that a trainer printed as a dictionary, or the steps on its progress bar."""

PAIR_OF_ROW = re.compile(r"""(['"])[^'"\n]+\1: (?:'[^'\n]*'|"[^"\n]*"|[^\s,'"{}]+)(?=\s*[,}])""")
"""A key and its value in a row. A comma or brace must follow, as the last value of a truncated row is incomplete."""

METRIC_OF_ROW = re.compile(r"""['"](?:train/|eval_)?(?:loss|reward)['"]:""")
"""A key that a row of metrics has."""

CUT_OFF: dict[str, Any] = {"cut off": True}
"""The place of a row that is cut off, which has a number but is not read."""

COUNTERS = ("num_tokens", "epoch")
"""Keys of a row whose values only grow during a training."""

ROUNDING_OF_RATE = 0.0005
"""The largest error of the steps per second in a summary, which have three decimals."""

ROUNDING_OF_EPOCH = 0.01
"""The largest error of an epoch that is printed with two decimals."""

FEWEST_PAIRS = 4
"""The smallest number of pairs in a truncated row."""

OPEN_ROW = re.compile(r"""\{['"][^{}]*+\Z""")
"""A row at the end of a line that does not end there."""

NUMBER_OF_ROW = re.compile(r"""['"](?:train/)?(?:loss|reward)['"]: ['"]?(?:-?\d|nan\b|-?inf\b)""")
"""A loss or a reward in a row, with the start of its number."""

NARROWEST = 40
"""The smallest width in characters of a terminal that wraps rows."""


@dataclass
class _Printed:
    """A dictionary that a trainer printed, and the steps on the progress bars beside it; 0 without a bar."""

    row: dict[str, Any]
    before: int
    after: int = 0


def trl_trainings(text: str, unread: Unread | None = None) -> list[list[dict[str, Any]]]:
    r"""Return the rows of each training in the console output of TRL, ms-swift or another trainer of transformers.

    The step of a row is the one in the row. If the rows have none, it is that of a progress bar, see `_bar_steps`, or
    that by the summary of the training, see `_steps_by_summary`, and else the number of the row; a row without a metric
    of training has the step of the row before it. Steps begin anew with each training in the output. A training that
    was not finished, and the one after it, which may have been restarted, are one here.

    Args:
        text: The console output.
        unread: The object to which dictionaries with a loss or a reward that cannot be read are added.

    >>> trl_trainings("{'loss': '0.1', 'reward': nan}")
    [[{'loss': 0.1, 'reward': 'NaN', 'step': 1}]]
    >>> text = "{'loss': 0.1, 'epoch': 0.1}\n{'loss': 0.1, 'epoch': 0.2}\n"
    >>> text += "{'train_runtime': 1.5, 'train_loss': 0.1, 'epoch': 0.2}\n"
    >>> [[row["step"] for row in rows] for rows in trl_trainings(2 * text)]
    [[1, 2, 2], [1, 2, 2]]
    """
    unread = Unread() if unread is None else unread
    printed = _printed_rows(text, unread)
    if not any(_is_of_training(one.row) for one in printed):
        # The names of all metrics may be the user's own.
        for number, one in enumerate(printed, 1):
            _set_step(one.row, number)
        rows = [one.row for one in printed if one.row is not CUT_OFF]
        return [rows] if rows else []

    trainings: list[list[dict[str, Any]]] = []
    for attempt, follows_a_summary in _attempts(printed):
        rows = _with_steps(attempt, unread)
        if follows_a_summary:
            trainings.append(rows)
        else:
            trainings[-1] += rows
    return [rows for rows in trainings if rows]


def _attempts(printed: Sequence[_Printed]) -> Iterator[tuple[list[_Printed], bool]]:
    """Yield what each attempt printed, and True if it is the first or follows the summary of another training."""
    attempt: list[_Printed] = []
    follows_a_summary = True
    is_finished = False
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for one in printed:
        if SUMMARY in one.row:
            is_finished = True
        elif _is_of_training(one.row):
            counters = {key: one.row[key] for key in COUNTERS if isinstance(one.row.get(key), (int, float))}
            fallen = [key for key, value in counters.items() if key in last and value < last[key]]
            # The counters of a run that was resumed fall too, but not to its start.
            if any(is_finished or counters[key] <= first[key] for key in fallen):
                yield attempt, follows_a_summary
                attempt = []
                follows_a_summary = is_finished
                first = {}
                last = {}
            first = counters | first
            last |= counters
            is_finished = False
        attempt.append(one)
    yield attempt, follows_a_summary


def _printed_rows(text: str, unread: Unread) -> list[_Printed]:
    """Return the dictionaries of metrics in a text, those that are cut off as `CUT_OFF`."""
    printed: list[_Printed] = []
    bar_step = 0
    # The number of rows before the last bar.
    rows_before_bar = 0
    rows_in_part = 0
    text, interrupted = _without_interruptions(text)
    if interrupted:
        rows = "1 row was" if interrupted == 1 else f"{interrupted} rows were"
        unread.remarks.append(f"{rows} interrupted by an error message, and joined")
    for line in _unwrapped_lines(text):
        has_row = False
        for match in TRL_ROW_OR_PROGRESS.finditer(line):
            if match[1] is not None:
                # Shards and data sets have bars too. That of training is the last one before a row, with a total > 1.
                bar_step = int(match[1]) if int(match[2]) > 1 else 0
                for one in printed[rows_before_bar:]:
                    one.after = bar_step
                rows_before_bar = len(printed)
                continue
            has_row = True
            row = _parse_row(match[0]) if len(match[0]) <= LONGEST_ROW else {}
            if row:
                printed.append(_Printed(row, bar_step))
            elif METRIC_OF_ROW.search(match[0], 0, LONGEST_ROW):
                unread.add("dictionary", "it cannot be parsed", match[0], is_lost=True)
        row = {} if has_row else _parse_truncated_row(line)
        rows_in_part += bool(row)
        open_row = OPEN_ROW.search(line)
        if not row and open_row is not None and NUMBER_OF_ROW.search(line, open_row.start()):
            unread.add("dictionary", "it is cut off", open_row[0], is_lost=True)
            row = CUT_OFF
        if row:
            printed.append(_Printed(row, bar_step))
    if rows_in_part:
        rows = "1 row is" if rows_in_part == 1 else f"{rows_in_part} rows are"
        its = "its" if rows_in_part == 1 else "their"
        unread.remarks.append(f"{rows} cut off; {its} complete values are read")
    return printed


INTERRUPTION = re.compile(r"""(\{['"][^{}\n]*)(Traceback \(most recent call last\):\n)""")
"""The start of a row, and that of an error message which another stream has written within it."""

LONGEST_INTERRUPTION = 2**14
"""The number of characters after the start of the message in which the end of the row is looked for."""

END_OF_ROW = re.compile(r"^([^{}\n]*+\}) *$", re.M)
"""A line that may be the end of a row."""


def _without_interruptions(text: str) -> tuple[str, int]:
    r"""Return a text in which the rows that an error message has interrupted stand before it, and their number.

    >>> message = "Traceback (most recent call last):\n  File 'a.py', line 1\nKeyboardInterrupt: \n"
    >>> _without_interruptions("{'loss': 0.1, 'reward': 0." + message + "5, 'kl': 0.2}\n")[0].splitlines()[:2]
    ["{'loss': 0.1, 'reward': 0.5, 'kl': 0.2}", 'Traceback (most recent call last):']
    """
    pieces = []
    position = count = 0
    for match in INTERRUPTION.finditer(text):
        if match.start() < position:
            continue
        end = END_OF_ROW.search(text, match.end(), match.end() + LONGEST_INTERRUPTION)
        if end is None or not _parse_row(match[1] + end[1]):
            continue
        pieces += [text[position : match.start()], match[1], end[1], "\n", text[match.start(2) : end.start()]]
        position = end.end()
        count += 1
    return "".join([*pieces, text[position:]]), count


def _is_of_training(row: Mapping[str, Any]) -> bool:
    """Return True if a printed dictionary is of a training step, and no summary or evaluation.

    >>> _is_of_training({"kl": 0.1}), _is_of_training({"eval_reward": 0.5}), _is_of_training({"train_runtime": 1.5})
    (True, False, False)
    """
    return row is CUT_OFF or (SUMMARY not in row and has_training_metric(row))


def has_training_metric(row: Mapping[str, Any]) -> bool:
    """Return True if a row has a metric of training, other than the learning rate."""
    if "loss" in row or "train/loss" in row:
        return True
    keys = tuple(row)
    if any(source.quantity not in (EVALUATION, "learning_rate") for source in sources(keys)):
        return True
    return any(component_name(key) is not None for key in keys)


def _with_steps(printed: Sequence[_Printed], unread: Unread) -> list[dict[str, Any]]:
    """Return the rows of a training with their steps; those that were cut off have a step, but are left out."""
    trained = [one for one in printed if _is_of_training(one.row)]
    bar_steps = _bar_steps(trained)
    steps = iter(bar_steps or _steps_of_rows(printed, trained, unread))
    step: int | None = None
    rows = []
    for one in printed:
        if _is_of_training(one.row):
            step = next(steps)
        elif SUMMARY in one.row and step is not None and has_training_metric(one.row):
            # A summary may have the means over the last steps.
            step = max(step + 1, one.before if bar_steps else 0)
        elif step is None and any(map(is_of_evaluation, one.row)):
            step = 0
        if step is not None:
            _set_step(one.row, step)
        # What is printed before training, such as settings or counts of the data, has no step, and is no row.
        if one.row is not CUT_OFF and not one.row.keys().isdisjoint(STEP_KEYS):
            rows.append(one.row)
    return rows


def _set_step(row: dict[str, Any], step: int) -> None:
    """Add a step to a row that has none."""
    if row is not CUT_OFF and row.keys().isdisjoint(STEP_KEYS):
        row["step"] = step


def _bar_steps(printed: Sequence[_Printed]) -> Sequence[int]:
    """Return the steps of the rows of a training by its progress bar; empty if they cannot be told.

    They are the steps on the bar before or after each row. A trainer logs every so many steps: if both are possible,
    those are taken that begin with such a distance.
    """
    before = [one.before for one in printed]
    after = [one.after for one in printed]
    possible = [steps for steps in (before, after) if _increases(steps)]
    if not possible:
        return _steps_written_together(before)
    return next((steps for steps in possible if steps[0] == steps[1] - steps[0]), possible[0])


def _steps_of_rows(printed: Sequence[_Printed], trained: Sequence[_Printed], unread: Unread) -> Sequence[int]:
    """Return the steps of the rows of a training without a progress bar, and add a remark on how they were found."""
    by_summary = _steps_by_summary(printed, trained)
    if by_summary:
        if by_summary[0] > 1:
            unread.remarks.append(
                f"no row has its step; by the summary at the end, there is one each {by_summary[0]} steps"
            )
        return by_summary
    # Rows that were printed together at the end, one for each step of the bar.
    is_one_each = bool(trained) and trained[-1].before == len(trained)
    has_no_step = any(one.row.keys().isdisjoint(STEP_KEYS) for one in trained if one.row is not CUT_OFF)
    if has_no_step and not is_one_each:
        unread.remarks.append(STEPS_COUNTED)
    return range(1, len(trained) + 1)


def _steps_by_summary(printed: Sequence[_Printed], trained: Sequence[_Printed]) -> Sequence[int]:
    """Return the steps of the rows of a training by the number of its steps; empty if they cannot be told.

    A summary has the training's time and, rounded, its steps per second. Rows are at regular distances, and the last
    one may be up to a distance before the end.

    >>> summary = {"train_runtime": 735.8, "train_steps_per_second": 0.272}
    >>> rows = [_Printed({"reward": 0.5, "epoch": 0.01 * number}, 0) for number in range(1, 41)]
    >>> list(_steps_by_summary([*rows, _Printed(summary, 0)], rows))[:3]
    [5, 10, 15]
    """
    summary = next((one.row for one in reversed(printed) if SUMMARY in one.row), {})
    seconds = summary.get(SUMMARY)
    rate = summary.get("train_steps_per_second")
    if not isinstance(seconds, (int, float)) or not isinstance(rate, (int, float)) or not _is_whole(trained):
        return []
    fewest = seconds * (rate - ROUNDING_OF_RATE)
    most = seconds * (rate + ROUNDING_OF_RATE)
    count = len(trained)
    possible = [
        distance
        for distance in range(1, int(most) // count + 1)
        if fewest < distance * (count + 1) and distance * count <= most
    ]
    if len(possible) != 1:
        return []
    return range(possible[0], possible[0] * count + 1, possible[0])


def _is_whole(trained: Sequence[_Printed]) -> bool:
    """Return True if rows are at regular distances in the data, so that no part of a training is missing."""
    if not trained or not isinstance(trained[-1].row.get("epoch"), (int, float)):
        return False
    distance = trained[-1].row["epoch"] / len(trained)
    for number, one in enumerate(trained, 1):
        epoch = one.row.get("epoch")
        is_known = isinstance(epoch, (int, float))
        if is_known and abs(epoch - number * distance) > distance + ROUNDING_OF_EPOCH:
            return False
    return True


FEWEST_BARS = 3
"""The smallest number of different steps on the bar from which rows that are not at these steps have known ones."""

LARGEST_DISTANCE = 10_000
"""The largest number of steps between two rows that is looked for."""

LATE_START = 10
"""Number of distances between rows above which the first row is one of a run that was resumed, or whose start is
lost."""


def _steps_written_together(bar_steps: Sequence[int]) -> Sequence[int]:
    """Return the steps of rows at regular distances, of which several were written at once; empty if they are unknown.

    What is printed is kept until it fills a buffer, while the bar goes on: the rows between two bars were made before
    the second one, and not long before the first. The last row is written at the end, or is lost with it.

    Args:
        bar_steps: The step on the bar before each row.

    >>> list(_steps_written_together([20, 20, 40, 40, 55]))
    [10, 20, 30, 40, 50]
    >>> list(_steps_written_together([26, 26, 26, 26, 26, 52, 52, 52, 52, 52, 56]))
    [5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55]
    >>> _steps_written_together([20, 20, 30, 30])
    []
    """
    bars = len(set(bar_steps))
    if bars < 2 or sorted(bar_steps) != list(bar_steps):
        return []
    count = len(bar_steps)
    for lost in (0, 1):
        possible = []
        for distance in range(1, min(bar_steps[-1] // (count - 1), LARGEST_DISTANCE) + 1):
            last = (bar_steps[-1] // distance - lost) * distance
            first = last - (count - 1) * distance
            steps = range(first, last + 1, distance)
            is_start = first == distance or first > LATE_START * distance
            if is_start and _fit_bar(steps, bar_steps):
                possible.append(steps)
        # The bar may be shown at each row alone.
        at_bars = [steps for steps in possible if _are_at_bars(steps, bar_steps)]
        if len(at_bars) == 1:
            return at_bars[0]
        if possible:
            return possible[0] if len(possible) == 1 and bars >= FEWEST_BARS else []
    return []


def _are_at_bars(steps: Sequence[int], bar_steps: Sequence[int]) -> bool:
    """Return whether the last row before each change of the bar is of the step on the bar."""
    pairs = zip(steps, bar_steps, bar_steps[1:], strict=False)
    return all(step == bar for step, bar, following in pairs if following > bar)


def _fit_bar(steps: Sequence[int], bar_steps: Sequence[int]) -> bool:
    """Return whether rows of these steps can have been written after these steps on the bar."""
    distance = steps[1] - steps[0]
    for number, (step, bar) in enumerate(zip(steps, bar_steps, strict=True)):
        before = bar_steps[number - 1] if number else 0
        if step > bar or (number and bar > before and step + distance < before):
            return False
    return True


def _increases(steps: Sequence[int]) -> bool:
    """Return True if there are several steps, from 1 on, each larger than the one before."""
    pairs = itertools.pairwise(steps)
    return len(steps) > 1 and steps[0] >= 1 and all(before < after for before, after in pairs)


def _unwrapped_lines(text: str) -> Iterator[str]:
    """Yield the lines of a text; those of a row that a terminal has wrapped at its width as one line."""
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        joined, count = _unwrapped_line(lines, number)
        yield joined
        number += count


def _unwrapped_line(lines: Sequence[str], first: int) -> tuple[str, int]:
    """Return a line, joined with those below it if they continue its last row, and the number of these lines."""
    if not OPEN_ROW.search(lines[first]):
        return lines[first], 1
    # What a progress bar has written at the start of the line takes no space.
    overwritten, carriage_return, start = lines[first].rstrip("\r").rpartition("\r")
    pieces = [start]
    length = len(start)
    end = ""
    for number in range(first + 1, len(lines)):
        piece = lines[number].rstrip("\r")
        length += len(piece)
        # A line with another row is read for that one, so that no line is read twice.
        if "{" in piece or length > LONGEST_ROW:
            break
        if "}" in piece:
            end = piece
            break
        # Spaces at the end of a line are often lost.
        if abs(len(piece) - len(start)) > 1:
            break
        pieces.append(piece)

    width = max(map(len, pieces))
    last, brace, _ = end.partition("}")
    is_wrapped = brace and NARROWEST <= width <= min(map(len, pieces)) + 1 and len(last) < width
    if not is_wrapped:
        return lines[first], 1
    joined = "".join(piece.ljust(width) for piece in pieces)
    if not _parse_row(joined[joined.rindex("{") :] + last + brace):
        return lines[first], 1
    return overwritten + carriage_return + joined + end, len(pieces) + 1


def _parse_truncated_row(line: str) -> dict[str, Any]:
    """Return the metrics in a line that is a row without its start or end; empty if it is none."""
    if len(line) > LONGEST_ROW or not ("reward'" in line or 'reward"' in line or "loss" in line):
        return {}
    pairs = [match[0] for match in PAIR_OF_ROW.finditer(line)]
    if len(pairs) < FEWEST_PAIRS:
        return {}
    row = _parse_row("{" + ", ".join(pairs) + "}")
    return row if "reward" in row or "loss" in row else {}


def _parse_row(text: str) -> dict[str, Any]:
    """Return a printed dictionary of metrics; empty if the text is none."""
    text = re.sub(r"(?<=: )(nan|-?inf)(?=[,}])", lambda match: repr(match[1]), text)
    result: dict[str, Any] = {}
    for key, value in literal_dictionary(text).items():
        if isinstance(value, str):
            value = parse_number(value)
        if isinstance(key, str) and isinstance(value, (int, float, str)):
            result[key] = value
    numbers = [value for value in result.values() if not isinstance(value, str)]
    is_metrics = len(numbers) >= 3 or "loss" in result or "reward" in result
    return result if is_metrics else {}


def parse_number(text: str) -> float | str:
    """Return a text as a number, ``240/960`` as 240; the text itself if it is no number."""
    text = text.strip()
    words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    if text in words:
        return words[text]
    progress = re.fullmatch(r"(\d+)/\d+", text)
    try:
        return float(progress[1] if progress else text)
    except ValueError:
        return text


CONSOLE = Console(
    "TRL, ms-swift",
    "{'loss': 0.01, 'reward': 0.25, 'kl': 0.01, 'step': 3}\n",
    trl_trainings,
    before=("custom",),
    may_be_settings=True,
)
