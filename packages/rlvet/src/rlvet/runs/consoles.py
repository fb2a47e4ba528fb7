"""Read the metrics that SkyRL, OpenRLHF, slime, miles, prime-rl, ROLL, AReaL and NeMo-RL print during training.

The patterns follow the frameworks' source code, to which ``packages/rlvet/tests/runs/test_consoles.py`` refers. Tables
of notebooks and lines printed by custom training loops are read too.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from rlvet.runs.limits import DEEPEST_ROW, LONGEST_ROW

Rows = list[dict[str, Any]]
"""Rows with the keys of the framework's trackers and a ``step``."""

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""The escape sequences of a terminal's colours."""

ROUNDED_TO_ZERO = re.compile(r"(^|[/_])(lr|learning_rate|grad_norm)$")
"""Keys for which a printed 0.000 is a small number that was rounded."""

BRACE = re.compile(r"[{}]")
"""The start or end of a dictionary."""


def console_rows(text: str) -> Rows:
    r"""Return the rows in the console output of one of these frameworks; empty if there are none.

    All lines of a step, which several processes may have printed, become one row.

    >>> console_rows("Step 2 | 1.00s | Loss 0.1 | Entropy 0.3\nStep 2 | 1.00s | Reward 0.5 | Truncation 10.0%")
    [{'step': 2, 'loss/mean': 0.1, 'entropy/all/mean': 0.3, 'reward/mean': 0.5, 'is_truncated/mean': 0.1}]
    """
    text = ESCAPES.sub("", text)
    for reader in READERS:
        by_step: dict[int, dict[str, Any]] = {}
        for step, metrics in reader(text):
            by_step.setdefault(step, {"step": step}).update(metrics)
        rows = [row for row in by_step.values() if len(row) > 1]
        if rows:
            return rows
    return []


StepMetrics = Iterator[tuple[int, dict[str, Any]]]
"""Pairs of a step and its metrics, several per step if the framework prints several lines."""


def _skyrl_rows(text: str) -> StepMetrics:
    """Read ``Step 3:`` and the dictionary below it, whose numbers are strings with four decimals."""
    for match in re.finditer(r"\bStep (\d+): *\r?\n(?=[^\n{]*\{)", text):
        yield int(match[1]), _dictionary_at(text, text.index("{", match.end()))


def _openrlhf_rows(text: str) -> StepMetrics:
    """Read ``Global step 3: {…}``."""
    for match in re.finditer(r"\bGlobal step (\d+): (?=\{)", text):
        yield int(match[1]), _dictionary_at(text, match.end())


def _slime_rows(text: str) -> StepMetrics:
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
        yield number, _dictionary_at(text, match.end())


PRIME_RL_NAMES = {
    "Reward": "reward/mean",
    "Truncation": "is_truncated/mean",
    "Loss": "loss/mean",
    "Entropy": "entropy/all/mean",
    "Mismatch KL": "mismatch_kl/all/mean",
    "Grad. Norm": "optim/grad_norm",
    "LR": "optim/lr",
}
"""The key of prime-rl's trackers for each name on its console."""

PRIME_RL_METRIC = re.compile(r"([A-Za-z. ]+?):? (-?[\d.]+(?:e[+-]?\d+)?|nan|inf)(%?)(?=\s|$)")
"""A metric on prime-rl's console: name, value and percent sign. Versions of 2025 print a colon after the name."""


def _prime_rl_rows(text: str) -> StepMetrics:
    """Read ``Step 3 | 1.00s | Reward 0.5 | …``."""
    for line in re.finditer(r"\bStep (\d+) \| ([^\n]*)", text):
        metrics: dict[str, Any] = {}
        for cell in line[2].split(" | "):
            match = PRIME_RL_METRIC.match(cell.strip())
            if match is None or match[1] not in PRIME_RL_NAMES:
                continue
            value = _parse_number(match[2])
            if match[3] and isinstance(value, float):
                value /= 100
            metrics[PRIME_RL_NAMES[match[1]]] = value
        yield int(line[1]), metrics


def _roll_rows(text: str) -> StepMetrics:
    """Read ROLL's tracker ``stdout``: ``metrics_tag: {"step": 3, "metrics": {…}}``."""
    for match in re.finditer(r"\bmetrics_tag: (?=\{)([^\n]*)", text):
        end = match[1].rfind("}")
        try:
            content = json.loads(match[1][: end + 1])
        except (ValueError, RecursionError):
            continue
        step = content.get("step")
        metrics = content.get("metrics")
        if isinstance(step, int) and isinstance(metrics, dict):
            yield step, {key: value for key, value in metrics.items() if isinstance(value, (int, float))}


def _areal_rows(text: str) -> StepMetrics:
    """Read AReaL's ``Train step 3/100 done.`` and the table below it, whose columns are keys and values in turn."""
    # The text before the first step, and then a number and a table for each step.
    pieces = re.split(r"\bTrain step (\d+)/\d+ done\.", text)
    for number, table in zip(pieces[1::2], pieces[2::2], strict=True):
        metrics: dict[str, Any] = {}
        for line in re.findall(r"│([^\n]*)│", table):
            cells = [cell.strip() for cell in line.split("│")]
            for key, value in zip(cells[::2], cells[1::2], strict=False):
                if key and re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?|nan|-?inf", value):
                    metrics[key] = _parse_number(value)
        yield int(number), metrics


NEMO_RL_NAMES = {
    "Loss": "loss",
    "Generation KL Error": "gen_kl_error",
    "Avg Reward": "reward",
    "Mean Generation Length": "mean_gen_tokens_per_sample",
}
"""The key of NeMo-RL's trackers for each name in its results of a step."""


def _nemo_rl_rows(text: str) -> StepMetrics:
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
            continue
        metrics: dict[str, Any] = {}
        for name, value in re.findall(r"• ([\w ]+): (-?[\d.]+|nan|-?inf)\s*$", results, re.M):
            if name in NEMO_RL_NAMES:
                metrics.setdefault(NEMO_RL_NAMES[name], _parse_number(value))
        yield (epoch - 1) * int(total) + int(number), metrics


READERS: tuple[Callable[[str], StepMetrics], ...] = (
    _skyrl_rows,
    _openrlhf_rows,
    _slime_rows,
    _prime_rl_rows,
    _roll_rows,
    _areal_rows,
    _nemo_rl_rows,
)
"""One reader per framework. The first that finds metrics is used."""


# --- Tables of a notebook ---

FEWEST_COLUMNS = 3
"""The smallest number of columns of a table of metrics."""

TABLE_NAMES = {"Training Loss": "loss"}
"""The key of the trainer's other logs for each column of a notebook's table that has another name."""


def table_rows(text: str) -> Rows:
    r"""Return the rows of tables with a column ``Step``, such as a trainer's in a notebook; empty if there are none.

    Cells are separated by ``|`` or tabs. All table rows of a step become one row, and cells without a number are left
    out.

    >>> table_rows("Step | reward | completions / mean_length\n-- | -- | --\n1 | 0.5 | 12.0")
    [{'step': 1, 'reward': 0.5, 'completions/mean_length': 12.0}]
    """
    by_step: dict[int, dict[str, Any]] = {}
    keys: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"[|\t]", line.strip().strip("|"))]
        if len(cells) < FEWEST_COLUMNS:
            keys = []
        elif cells[0].lower() == "step":
            keys = [TABLE_NAMES.get(cell, cell.replace(" / ", "/")) for cell in cells]
        elif keys and re.fullmatch(r"\d+", cells[0]):
            # The last cell of a truncated row may be an incomplete number.
            end = len(cells) if len(cells) == len(keys) else len(cells) - 1
            numbers = {key: _parse_number(cell) for key, cell in zip(keys[1:end], cells[1:end], strict=True)}
            row = by_step.setdefault(int(cells[0]), {"step": int(cells[0])})
            row.update({key: number for key, number in numbers.items() if number is not None})
    return [row for row in by_step.values() if len(row) > 1]


# --- Custom training loops ---

STEP_IN_EPOCH = re.compile(r"\bepoch\W*(\d+)(?:/\d+)?\W+(?:step\W*)?(\d+)/(\d+)", re.I)
"""An epoch, the step in it, and the steps of an epoch: ``Epoch:[1/2](20/500)``."""

STEP_OF_LINE = re.compile(r"\b(?:global[_ ])?(?:step|iter|iteration|update)\W{0,3}(\d+)(?:/\d+)?", re.I)
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


def custom_loop_rows(text: str) -> Rows:
    """Return the rows that a custom training loop prints, one per line; empty if there are none.

    A line is a row if it has a step, and after the step a reward and another number. Names become lower-case keys with
    underscores.

    >>> custom_loop_rows("step 3/100 | Avg Reward: 0.5 | KL: 0.01")
    [{'step': 3, 'avg_reward': 0.5, 'kl': 0.01}]
    """
    rows: Rows = []
    for line in ESCAPES.sub("", text).splitlines():
        if len(line) > LONGEST_ROW:
            continue
        in_epoch = STEP_IN_EPOCH.search(line)
        step_match = in_epoch or STEP_OF_LINE.search(line)
        if step_match is None:
            continue
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
            value = _parse_number(pair["number"].lower())
            if not key or (value == 0 and ROUNDED_TO_ZERO.search(key)):
                continue
            if pair["percent"] and isinstance(value, float):
                value /= 100
            row.setdefault(key, value)
        if len(row) > 2 and any("reward" in key for key in row):
            rows.append(row)
    return rows


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


def _dictionary_at(text: str, start: int) -> dict[str, Any]:
    """Return the numbers of the dictionary that begins at a position of a text; empty if it is not valid."""
    end = 0
    depth = 0
    for match in BRACE.finditer(text, start, start + LONGEST_ROW):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            end = match.end()
            break
        if depth > DEEPEST_ROW:
            return {}
    if not end:
        return {}

    # Make a Python literal of it: nan and inf become strings, np.float64(0.5) becomes 0.5.
    literal = text[start:end]
    literal = re.sub(r"(?<=: )(nan|-?inf)(?=[,}\n])", r"'\1'", literal)
    literal = re.sub(r"np\.\w+\(([^()]*)\)", r"\1", literal)
    try:
        content = ast.literal_eval(literal)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    if not isinstance(content, dict):
        return {}
    metrics: dict[str, Any] = {}
    for key, value in content.items():
        # A learning rate that is printed as 0.000 was rounded, so its value is unknown.
        is_zero = isinstance(value, str) and re.fullmatch(r"-?0\.0+", value)
        if is_zero and ROUNDED_TO_ZERO.search(str(key)):
            continue
        number = _parse_number(value)
        if isinstance(key, str) and number is not None:
            metrics[key] = number
    return metrics


def _parse_number(value: Any) -> float | str | None:
    """Return a printed number, with NaN and infinity as texts, as JSON logs have them; None if it is not a number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, str):  # a list or a dictionary
        return None
    words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    if value in words:
        return words[value]
    try:
        return float(value)
    except ValueError:
        return None
