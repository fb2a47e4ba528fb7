"""Read prime-rl's console."""

from __future__ import annotations

import re
from typing import Any

from rlvet.runs.consoles._console import Console, StepMetrics, by_step
from rlvet.runs.consoles._printed import number_of
from rlvet.runs.unread import Unread

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
        value = number_of(match["number"])
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


CONSOLE = Console(
    "prime-rl",
    "10:00:00 SUCCESS Step 3 | Time: 62.0s | Reward: 0.2500 | Seq. Length: 331.1 tokens/sample\n"
    "10:00:09 SUCCESS Step 3 | Time: 9.51s | Loss: 0.0100 | Entropy: 0.5000\n",
    by_step(_prime_rl_rows),
    before=("custom",),
)
