"""What a run of verl cost: time per step, by stage, and GPU memory, from what it printed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from statistics import median

from bandpo.errors import InvalidValue
from bandpo_lab.tables import Table

_STEP = re.compile(r"\bstep:(\d+) - (.*)")
_METRIC = re.compile(r"([\w/@.-]+):(?:np\.\w+\()?([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))\)?(?= - |\s*$)")

ROWS = {
    "perf/time_per_step": ("s per step", median),
    "perf/throughput": ("tokens per s and GPU", median),
    "perf/max_memory_allocated_gb": ("GB of GPU memory allocated, at most", max),
    "perf/max_memory_reserved_gb": ("GB of GPU memory reserved, at most", max),
    "perf/cpu_memory_used_gb": ("GB of the machine's memory in use, at most", max),
}
"""verl's metrics of cost: their names here, and how the steps' values are summed up."""


def read_steps(lines: Iterable[str]) -> dict[int, dict[str, float]]:
    """The metrics of each step in a log of verl's console; of a step that was printed twice, the last.

    >>> read_steps(["(TaskRunner pid=1) step:3 - actor/lr:1e-06 - perf/time_per_step:np.float64(12.5)"])
    {3: {'actor/lr': 1e-06, 'perf/time_per_step': 12.5}}
    """
    found = (_STEP.search(line) for line in lines)
    return {
        int(match[1]): {name: float(value) for name, value in _METRIC.findall(match[2])}
        for match in found
        if match
    }


def summed_up(steps: dict[int, dict[str, float]]) -> str:
    """Time and memory as a Markdown table, the stages by the time they took; the steps are those of `read_steps`.

    Raises:
        ValueError: There are no steps.
    """
    if not steps:
        raise InvalidValue("the log has no line of verl's with a step; its console logger writes them")
    rows = []
    for key, (text, summary) in ROWS.items():
        values = [metrics[key] for metrics in steps.values() if key in metrics]
        if values:
            rows.append([text, f"{summary(values):.4g}"])
    names = {name for metrics in steps.values() for name in metrics if name.startswith("timing_s/")}
    stages = {name: [m[name] for m in steps.values() if name in m] for name in names}
    total = sum(stages.get("timing_s/step", ()))
    for name, values in sorted(stages.items(), key=lambda stage: (-sum(stage[1]), stage[0])):
        share = f", {sum(values) / total:.0%} of the time" if total and name != "timing_s/step" else ""
        rows.append(
            [f"{name.removeprefix('timing_s/')}, {len(values)} times", f"{median(values):.4g} s{share}"]
        )
    return Table([f"{len(steps)} steps, {min(steps)} to {max(steps)}", ""], rows, prose=True).markdown()
