"""Read the metrics that SkyRL, OpenRLHF, slime, miles, prime-rl, ROLL, AReaL and NeMo-RL print while they train.

Each pattern is that of the framework's own source, which ``tests/runs/test_consoles.py`` names. Tables of a notebook
and lines of a loop of one's own are read, too.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

Rows = list[dict[str, Any]]
"""Rows with the keys that the framework's trackers have, and their ``step``."""

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""Colours of a terminal."""

ROUNDED_AWAY = re.compile(r"(^|[/_])(lr|learning_rate|grad_norm)$")
"""Keys of which a printed 0.000 is a small number, not 0."""

LONGEST_ROW = 20_000
"""Characters above which a printed dictionary is no row of metrics."""


def console_rows(text: str) -> Rows:
    """Return the rows in the console output of one of these frameworks; empty if there are none.

    Lines of one step are put together, whichever process printed them.

    >>> console_rows("Step 2 | 1.00s | Loss 0.1 | Entropy 0.3\\nStep 2 | 1.00s | Reward 0.5 | Truncation 10.0%")
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


def _skyrl_rows(text: str) -> StepMetrics:
    """Read ``Step 3:`` and the dictionary that is printed below it, whose numbers are texts of four decimals."""
    for match in re.finditer(r"\bStep (\d+): *\r?\n(?=[^\n{]*\{)", text):
        yield int(match[1]), _dictionary_at(text, text.index("{", match.end()))


def _openrlhf_rows(text: str) -> StepMetrics:
    for match in re.finditer(r"\bGlobal step (\d+): (?=\{)", text):
        yield int(match[1]), _dictionary_at(text, match.end())


def _slime_rows(text: str) -> StepMetrics:
    """Read ``rollout 3: {…}`` and ``step 3: {…}`` of slime and miles.

    A rollout may be several steps of training, so each is kept under the number of its rollout: the steps are as many
    for each rollout, and the last of them counts.
    """
    lines = list(re.finditer(r"(?<![\w/-])(rollout|perf|step) (\d+): (?=\{)", text))
    train = [match for match in lines if match[1] == "step"]
    rollouts = {int(match[2]) for match in lines if match[1] == "rollout"}
    per_rollout = max(1, round(len({match[2] for match in train}) / len(rollouts))) if rollouts else 1
    for match in lines:
        number = int(match[2])
        if match[1] == "step":
            number //= per_rollout
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
"""For each name on prime-rl's console the key that its trackers have."""


def _prime_rl_rows(text: str) -> StepMetrics:
    for match in re.finditer(r"\bStep (\d+) \| ([^\n]*)", text):
        metrics: dict[str, Any] = {}
        for part in match[2].split(" | "):
            # Versions of 2025 print a colon after the name.
            named = re.match(r"([A-Za-z. ]+?):? (-?[\d.]+(?:e[+-]?\d+)?|nan|inf)(%?)(?=\s|$)", part.strip())
            if named is not None and named[1] in PRIME_RL_NAMES:
                value = _number(named[2])
                if named[3] and isinstance(value, float):
                    value /= 100
                metrics[PRIME_RL_NAMES[named[1]]] = value
        yield int(match[1]), metrics


def _roll_rows(text: str) -> StepMetrics:
    """Read ROLL's tracker ``stdout``: ``metrics_tag: {"step": 3, "metrics": {…}}``."""
    for match in re.finditer(r"\bmetrics_tag: (\{[^\n]*\})", text):
        try:
            content = json.loads(match[1])
        except (ValueError, RecursionError):
            continue
        step = content.get("step")
        metrics = content.get("metrics")
        if isinstance(step, int) and isinstance(metrics, dict):
            yield step, {key: value for key, value in metrics.items() if isinstance(value, (int, float))}


def _areal_rows(text: str) -> StepMetrics:
    """Read AReaL's ``Train step 3/100 done.`` and the table below it, with keys and values side by side."""
    parts = re.split(r"\bTrain step (\d+)/\d+ done\.", text)
    for number, table in zip(parts[1::2], parts[2::2], strict=True):
        metrics: dict[str, Any] = {}
        for line in re.findall(r"│([^\n]*)│", table):
            cells = [cell.strip() for cell in line.split("│")]
            for key, value in zip(cells[::2], cells[1::2], strict=False):
                if key and re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?|nan|-?inf", value):
                    metrics[key] = _number(value)
        yield int(number), metrics


NEMO_RL_NAMES = {
    "Loss": "loss",
    "Generation KL Error": "gen_kl_error",
    "Avg Reward": "reward",
    "Mean Generation Length": "mean_gen_tokens_per_sample",
}
"""For each name in NeMo-RL's results of a step the key that its trackers have."""


def _nemo_rl_rows(text: str) -> StepMetrics:
    """Read NeMo-RL's ``===== Step 3/100 =====`` and the results that are printed below it, a line each.

    Steps are counted anew in each epoch.
    """
    epoch = 1
    parts = re.split(r"={5,} (Epoch|Step) (\d+)/(\d+) ={5,}", text)
    for title, number, of, printed in zip(parts[1::4], parts[2::4], parts[3::4], parts[4::4], strict=True):
        if title == "Epoch":
            epoch = int(number)
            continue
        _, is_there, results = printed.partition("Training Results:")
        metrics: dict[str, Any] = {}
        for name, value in re.findall(r"• ([\w ]+): (-?[\d.]+|nan|-?inf)\s*$", results, re.M):
            if name in NEMO_RL_NAMES:
                metrics.setdefault(NEMO_RL_NAMES[name], _number(value))
        if is_there:
            yield (epoch - 1) * int(of) + int(number), metrics


READERS: tuple[Callable[[str], StepMetrics], ...] = (
    _skyrl_rows,
    _openrlhf_rows,
    _slime_rows,
    _prime_rl_rows,
    _roll_rows,
    _areal_rows,
    _nemo_rl_rows,
)


# --- Tables of a notebook ---

FEWEST_COLUMNS = 3

TABLE_NAMES = {"Training Loss": "loss"}
"""For each name in the table of a notebook the key that the trainer's other logs have."""


def table_rows(text: str) -> Rows:
    """Return the rows of tables with a column ``Step``, such as a trainer's in a notebook; empty if there are none.

    Cells are separated by ``|`` or by tabs. Rows of one step are put together, and cells without a number are left out.

    >>> table_rows("Step | reward | completions / mean_length\\n-- | -- | --\\n1 | 0.5 | 12.0")
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
            # The last cell of a row that was cut off may be a part of a number.
            whole = len(cells) if len(cells) == len(keys) else len(cells) - 1
            numbers = {key: _number(cell) for key, cell in zip(keys[1:whole], cells[1:whole], strict=True)}
            row = by_step.setdefault(int(cells[0]), {"step": int(cells[0])})
            row.update({key: number for key, number in numbers.items() if number is not None})
    return [row for row in by_step.values() if len(row) > 1]


# --- Loops of one's own ---

STEP_IN_EPOCH = re.compile(r"\bepoch\W*(\d+)(?:/\d+)?\W+(?:step\W*)?(\d+)/(\d+)", re.I)
"""An epoch, the step in it, and the steps of an epoch: ``Epoch:[1/2](20/500)``."""

STEP_OF_LINE = re.compile(r"\b(?:global[_ ])?(?:step|iter|iteration|update)\W{0,3}(\d+)(?:/\d+)?", re.I)

NAMED_NUMBER = re.compile(
    r"(?P<name>[a-z][\w/.@-]*(?: [a-z][\w/.@-]*){0,3}) ?[:=] ?"
    r"(?P<number>-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|-?inf)(?P<percent>%?)(?=[\s,;|)\]]|$)",
    re.I,
)
"""A name of up to four words and its number: ``Avg Response Len: 271.00``, ``kl=0.01``."""


def own_loop_rows(text: str) -> Rows:
    """Return the rows that a loop of the user's own prints, a line each; empty if there are none.

    A row is a line that names a step, and after it a reward and another number. Names are written as keys are.

    >>> own_loop_rows("step 3/100 | Avg Reward: 0.5 | KL: 0.01")
    [{'step': 3, 'avg_reward': 0.5, 'kl': 0.01}]
    """
    rows: Rows = []
    for line in ESCAPES.sub("", text).splitlines():
        in_epoch = STEP_IN_EPOCH.search(line)
        place = in_epoch or STEP_OF_LINE.search(line)
        if place is None or len(line) > LONGEST_ROW:
            continue
        step = int(place[1])
        if in_epoch is not None:
            step = (step - 1) * int(place[3]) + int(place[2])
        row: dict[str, Any] = {"step": step}
        for pair in NAMED_NUMBER.finditer(line, place.end()):
            key = pair["name"].lower().replace(" ", "_")
            value = _number(pair["number"].lower())
            if value == 0 and ROUNDED_AWAY.search(key):
                continue
            if pair["percent"] and isinstance(value, float):
                value /= 100
            row.setdefault(key, value)
        if len(row) > 2 and any("reward" in key for key in row):
            rows.append(row)
    return rows


def _dictionary_at(text: str, start: int) -> dict[str, Any]:
    """Return the numbers of the dictionary that begins at a position of a text; empty if it is none."""
    depth = 0
    for match in re.finditer(r"[{}]", text[start : start + LONGEST_ROW]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            printed = text[start : start + match.end()]
            break
    else:
        return {}
    printed = re.sub(r"(?<=: )(nan|-?inf)(?=[,}\n])", r"'\1'", printed)
    printed = re.sub(r"np\.\w+\(([^()]*)\)", r"\1", printed)
    try:
        content = ast.literal_eval(printed)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    if not isinstance(content, dict):
        return {}
    metrics: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, str) and re.fullmatch(r"-?0\.0+", value) and ROUNDED_AWAY.search(str(key)):
            continue
        number = _number(value)
        if isinstance(key, str) and number is not None:
            metrics[key] = number
    return metrics


def _number(value: Any) -> float | str | None:
    """Return a printed number, NaN and infinity as the words that a log has for them; None if it is no number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    if value in words:
        return words[value]
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
