"""Read the metrics that SkyRL, OpenRLHF, slime, miles, prime-rl, ROLL, AReaL and NeMo-RL print during training.

The patterns follow the frameworks' source code, to which ``packages/rlvet/tests/runs/test_consoles.py`` refers. Lines
printed by custom training loops are read too.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from rlvet.runs.limits import DEEPEST_ROW, LONGEST_ROW
from rlvet.runs.quantities import NOT_FINITE, is_evaluation_score
from rlvet.runs.unread import Unread

Rows = list[dict[str, Any]]
"""Rows with the keys of the framework's trackers and a ``step``."""

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""The escape sequences of a terminal's colours."""

ROUNDED_TO_ZERO = re.compile(r"(^|[/_])(lr|learning_rate|grad_norm)$")
"""Keys for which a printed 0.000 is a small number that was rounded."""

ROUNDED = "{} (rounded)"
"""The text of a row for such a number, which is not known."""

BRACE = re.compile(r"[{}]")
"""The start or end of a dictionary."""


def console_rows(text: str, unread: Unread | None = None) -> Rows:
    r"""Return the rows in the console output of one of these frameworks; empty if there are none.

    All lines of a step, which several processes may have printed, become one row. Values that are no numbers are texts
    in it.

    Args:
        text: The console output.
        unread: The object to which lines that are not read are added.

    >>> [row] = console_rows("Step 2 | 1.00s | Loss 0.1\nStep 2 | 1.00s | Reward 0.5 | Truncation 10.0%")
    >>> row["step"], row["loss/mean"], row["reward/mean"], row["is_truncated/mean"]
    (2, 0.1, 0.5, 0.1)
    """
    unread = Unread() if unread is None else unread
    text = ESCAPES.sub("", text)
    for reader in READERS:
        unread_of_reader = Unread()
        by_step: dict[int, dict[str, Any]] = {}
        for step, metrics in reader(text, unread_of_reader):
            row = by_step.setdefault(step, {"step": step})
            if not metrics:
                unread_of_reader.add("line of a step", "its metrics cannot be parsed", f"step {step}")
            elif metrics.keys() <= row.keys() and any(row[key] != value for key, value in metrics.items()):
                unread_of_reader.add("line of a step", "a later line has the same metrics", f"step {step}")
            row.update(metrics)
        rows = [row for row in by_step.values() if _has_metric(row)]
        if rows:
            unread.add_all(unread_of_reader)
            return rows
    return []


def _has_metric(row: dict[str, Any]) -> bool:
    """Return True if a row has a number besides its step, or a value that is not finite."""
    return any(key != "step" and _is_number(value) for key, value in row.items())


StepMetrics = Iterator[tuple[int, dict[str, Any]]]
"""Pairs of a step and its metrics, several per step if the framework prints several lines."""


def _skyrl_rows(text: str, unread: Unread) -> StepMetrics:
    """Read ``Step 3:`` and the dictionary below it, whose numbers are strings with four decimals."""
    for match in re.finditer(r"\bStep (\d+): *\r?\n(?=[^\n{]*\{)", text):
        yield int(match[1]), _dictionary_at(text, text.index("{", match.end()))


def _openrlhf_rows(text: str, unread: Unread) -> StepMetrics:
    """Read ``Global step 3: {…}``."""
    for match in re.finditer(r"\bGlobal step (\d+): (?=\{)", text):
        yield int(match[1]), _dictionary_at(text, match.end())


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
        metrics = _dictionary_at(text, match.end())
        # An empty dictionary has nothing that can be lost.
        if metrics or not text.startswith("{}", match.end()):
            yield number, metrics


PRIME_RL_NAMES = {
    "reward": "reward/mean",
    "val. reward": "val_reward/mean",
    "truncation": "is_truncated/mean",
    "seq. length": "seq_len/mean",
    "max. off-policy level": "off_policy_level/max",
    "max off-policy": "off_policy_level/max",
    "async level": "async_level",
    "loss": "loss/mean",
    "entropy": "entropy/all/mean",
    "mismatch kl": "mismatch_kl/all/mean",
    "grad. norm": "optim/grad_norm",
    "lr": "optim/lr",
    "time": "time/step",
    "throughput": "perf/throughput",
    "mfu": "perf/mfu",
    "peak mem.": "perf/peak_memory",
}
"""The key of prime-rl's trackers for each name on its console, in lower case."""

PRIME_RL_METRIC = re.compile(
    r"(?P<name>[A-Za-z][A-Za-z.@-]*(?: [A-Za-z.@-]+){0,4}):? "
    r"(?P<number>-?\d[\d.]*(?:e[+-]?\d+)?|nan|inf)(?P<total>/\d+)?(?P<unit>%?)(?: \S+)?"
)
"""A metric on prime-rl's console: name, value and unit. Versions of 2025 print a colon after the name. A value may be a
part of a total: ``Trainable 60/64 (93.8%)``."""

DURATION = re.compile(r"(?:Time:? +)?(?:(\d+)h *)?(?:(\d+)m *)?(\d+(?:\.\d*)?)s")
"""A time, such as ``1m 2s``."""

PRIME_RL_FILTERS = re.compile(r"\bDetected \d+/(\d+) rollouts \(([^()\n]*)\)")
"""The number of rollouts, and the number that each filter found: ``Detected 97/128 rollouts (zero_advantage=95)``."""

PRIME_RL_EVALUATION = re.compile(r"\bEvaluated (\S+) in [\d.]++\w*+ \(([^\n]*)\)")
"""The name of an evaluation, and its metrics."""

PRIME_RL_VALUE = re.compile(r"[=:] ?(-?\d+(?:\.\d+)?)(%?)")
"""A value of an evaluation, after its name: ``Avg@8: 0.5`` or ``truncated=10%``."""

PRIME_RL_LINE = re.compile(r"\bStep (?P<step>\d+) \| (?P<cells>[^\n]*)|\bDetected [^\n]*|\bEvaluated [^\n]*")
"""A line with metrics of prime-rl."""


def _prime_rl_rows(text: str, unread: Unread) -> StepMetrics:
    """Read ``Step 3 | 1.00s | Reward 0.5 | …``, and the lines about filters and evaluations before it.

    A line about filters is printed before that of its step. An evaluation has the step of the line after it too; if
    none follows, that of the last step.
    """
    last_step = None
    waiting: dict[str, Any] = {}
    for line in PRIME_RL_LINE.finditer(text):
        if line["step"] is None:
            waiting |= _prime_rl_filters(line[0]) | _prime_rl_evaluation(line[0])
            continue
        metrics = _prime_rl_metrics(line["cells"])
        last_step = int(line["step"])
        # The trainer prints its own line of a step, without a reward.
        if "reward/mean" in metrics or not waiting:
            metrics |= waiting
            waiting = {}
        yield last_step, metrics
    if waiting and last_step is not None:
        yield last_step, waiting


def _prime_rl_metrics(line: str) -> dict[str, Any]:
    """Return the metrics of a line of a step.

    >>> _prime_rl_metrics("1m 2s | Reward: 0.5 | Seq. Length: 331.1 tokens/sample | Trainable 60/64 (93.8%)")
    {'time/step': 62.0, 'reward/mean': 0.5, 'seq_len/mean': 331.1, 'trainable': 0.9375}
    """
    metrics: dict[str, Any] = {}
    for cell in line.split(" | "):
        cell = cell.strip()
        duration = DURATION.fullmatch(cell)
        if duration is not None:
            hours, minutes, seconds = (float(part or 0) for part in duration.groups())
            metrics["time/step"] = 3600 * hours + 60 * minutes + seconds
            continue
        match = PRIME_RL_METRIC.fullmatch(cell)
        if match is None:
            # A cell without a known form is a key without a number.
            name = cell.partition(":")[0].strip().lower()
            known_names = [known for known in PRIME_RL_NAMES if name == known or name.startswith(f"{known} ")]
            if known_names:
                metrics[PRIME_RL_NAMES[max(known_names, key=len)]] = cell
            elif name:
                metrics[name.replace(" ", "_")] = cell
            continue
        name = match["name"].lower()
        value = _parse_number(match["number"])
        if isinstance(value, float) and match["total"]:
            value /= float(match["total"][1:]) or 1.0
        elif isinstance(value, float) and match["unit"] == "%":
            value /= 100
        key = PRIME_RL_NAMES.get(name, name.replace(".", "").replace(" ", "_"))
        metrics[key] = cell if value is None else value
    if "time/step" in metrics and "reward/mean" not in metrics:
        metrics = {f"trainer/{key}" if key == "time/step" else key: value for key, value in metrics.items()}
    return metrics


def _prime_rl_filters(line: str) -> dict[str, Any]:
    """Return the share of rollouts that each filter found.

    >>> _prime_rl_filters("Detected 97/128 rollouts (gibberish=2, zero_advantage=96), enforced 96")
    {'filters/all/gibberish': 0.015625, 'filters/all/zero_advantage': 0.75}
    """
    match = PRIME_RL_FILTERS.match(line)
    if match is None or not int(match[1]):
        return {}
    counts = re.findall(r"\b(\w+)=(\d+)", match[2])
    return {f"filters/all/{name}": int(count) / int(match[1]) for name, count in counts}


def _prime_rl_evaluation(line: str) -> dict[str, Any]:
    """Return the metrics of an evaluation.

    >>> _prime_rl_evaluation("Evaluated aime in 34.06s (Avg@8=0.25, Pass@8: 0.5, Truncated: 1.0%)")
    {'eval/aime/avg@8': 0.25, 'eval/aime/pass@8': 0.5, 'eval/aime/truncated': 0.01}
    """
    match = PRIME_RL_EVALUATION.match(line)
    if match is None:
        return {}
    metrics = {}
    end = 0
    for value in PRIME_RL_VALUE.finditer(match[2]):
        before = match[2][end : value.start()]
        end = value.end()
        # The name begins with a letter, after the last other character than a letter, a digit, a space, _ and @.
        name = re.sub(r"\A[^A-Za-z]+", "", re.split(r"[^\w@ ]", before)[-1]).strip()
        if name:
            key = f"eval/{match[1]}/{name.lower().replace(' ', '_')}"
            metrics[key] = float(value[1]) / 100 if value[2] else float(value[1])
    return metrics


def _roll_rows(text: str, unread: Unread) -> StepMetrics:
    """Read ROLL's tracker ``stdout``: ``metrics_tag: {"step": 3, "metrics": {…}}``."""
    for match in re.finditer(r"\bmetrics_tag: (?=\{)([^\n]*)", text):
        end = match[1].rfind("}")
        try:
            content = json.loads(match[1][: end + 1])
        except (ValueError, RecursionError):
            unread.add("line of a step", "it is no JSON", match[0])
            continue
        step = content.get("step")
        metrics = content.get("metrics")
        if type(step) is int and isinstance(metrics, dict):
            yield step, metrics


def _areal_rows(text: str, unread: Unread) -> StepMetrics:
    """Read AReaL's ``Train step 3/100 done.`` and the table below it, whose columns are keys and values in turn."""
    # The text before the first step, and then a number and a table for each step.
    pieces = re.split(r"\bTrain step (\d+)/\d+ done\.", text)
    for number, table in zip(pieces[1::2], pieces[2::2], strict=True):
        metrics: dict[str, Any] = {}
        for line in re.findall(r"│([^\n]*)│", table):
            cells = [cell.strip() for cell in line.split("│")]
            for key, value in zip(cells[::2], cells[1::2], strict=False):
                if key:
                    value_of_key = _parse_number(value)
                    metrics[key] = value if value_of_key is None else value_of_key
        yield int(number), metrics


NEMO_RL_NAMES = {
    "Loss": "loss",
    "Generation KL Error": "gen_kl_error",
    "Avg Reward": "reward",
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
            number_of_name = _parse_number(text_of_value)
            key = NEMO_RL_NAMES[name] if name in NEMO_RL_NAMES else name.lower().replace(" ", "_")
            metrics.setdefault(key, text_of_value if number_of_name is None else number_of_name)
        yield (epoch - 1) * int(total) + int(number), metrics


READERS: tuple[Callable[[str, Unread], StepMetrics], ...] = (
    _skyrl_rows,
    _openrlhf_rows,
    _slime_rows,
    _prime_rl_rows,
    _roll_rows,
    _areal_rows,
    _nemo_rl_rows,
)
"""One reader per framework. The first that finds metrics is used."""


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
    for line in ESCAPES.sub("", text).splitlines():
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
    return {key: value for key, value in _dictionary_at(line, 0).items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    """Return True if a value is a number, or a text for one that is not finite."""
    return isinstance(value, (int, float)) or (isinstance(value, str) and value in NOT_FINITE)


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
        value = _parse_number(pair["number"].lower())
        if value == 0 and ROUNDED_TO_ZERO.search(key):
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


def _dictionary_at(text: str, start: int) -> dict[str, Any]:
    """Return the dictionary that begins at a position of a text, with its numbers parsed; empty if it is not valid."""
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
    metrics: dict[str, Any] = {}
    for key, value in literal_dictionary(literal).items():
        # A learning rate that is printed as 0.000 was rounded, so its value is unknown.
        is_zero = isinstance(value, str) and re.fullmatch(r"-?0\.0+", value)
        number = _parse_number(value)
        if is_zero and ROUNDED_TO_ZERO.search(str(key)):
            metrics[str(key)] = ROUNDED.format(value)
        else:
            metrics[str(key)] = value if number is None else number
    return metrics


def literal_dictionary(text: str) -> dict[Any, Any]:
    """Return the dictionary that a text is as a literal of Python; an empty one if it is none.

    >>> literal_dictionary("{'loss': 0.1}"), literal_dictionary("{'loss': f()}"), literal_dictionary("[0.1]")
    ({'loss': 0.1}, {}, {})
    """
    try:
        content = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    return content if isinstance(content, dict) else {}


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
