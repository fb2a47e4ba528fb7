"""The cost of a run of verl: time per step and stage, GPU memory, estimates, and a comparison with the authors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from bandpo_lab.errors import InvalidValue
from bandpo_lab.output.tables import Table

_STEP = re.compile(r"\bstep:(\d+) - (.*)")
_METRIC = re.compile(r"([\w/@.-]+):(?:np\.\w+\()?([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))\)?(?= - |\s*$)")

ROWS = {
    "perf/time_per_step": ("s per step", median),
    "perf/throughput": ("tokens per s and GPU", median),
    "perf/max_memory_allocated_gb": ("GB of GPU memory allocated, at most", max),
    "perf/max_memory_reserved_gb": ("GB of GPU memory reserved, at most", max),
    "perf/cpu_memory_used_gb": ("GB of the machine's memory in use, at most", max),
}
"""verl's metrics of cost, each with its name in the table and the function that summarizes its values over steps."""

PRICE = 2.5
"""The price of a GPU, in dollars per hour, as in the recipes' table."""


PARAMETERS = {
    "qwen2.5-3b-instruct": (3.1e9, 700),
    "qwen2.5-7b": (7.6e9, 700),
    "deepseek-r1-distill-qwen-1.5b": (1.8e9, 3000),
    "deepseek-r1-distill-qwen-7b": (7.6e9, 3000),
    "deepseek-r1-distill-llama-8b": (8.0e9, 3000),
    "llama-3.2-3b-instruct": (3.2e9, 700),
}
"""The number of parameters of each model of the recipes, and the assumed mean length of its responses in tokens."""
GENERATION = 3.1e13
"""The speed of generation: tokens per second and GPU times parameters, fitted to 16 steps that the authors logged."""
TRAINING = 0.246 * 989e12
"""The speed of training, in operations per second and GPU, fitted to the same steps.

It is that of the reference, the old log-probabilities and the update together.
"""
OPERATIONS = 12
"""The operations per parameter and token: 6 of the update, 2 of its recomputation, 2 of each forward pass."""
OVERHEAD = 4.0
"""The time of a step for everything else, in seconds."""
PROMPT_TOKENS = 169
"""The mean length of a prompt in those steps, in tokens."""
CHECKPOINT = 12
"""The size of a checkpoint, in bytes per parameter: the weights and Adam's two moments in float32."""
RUN_STEPS = 769
"""The steps of a run that the estimates assume: 10 epochs of about 19,700 problems."""


@dataclass(frozen=True)
class Estimate:
    """The estimated time of a step in seconds, by a formula that was fitted to the authors' steps."""

    generation: float
    training: float

    @property
    def step(self) -> float:
        """The time of the whole step."""
        return self.generation + self.training + OVERHEAD


def estimated_step(parameters: float, tokens: float, responses: int = 4096, gpus: int = 8) -> Estimate:
    """Estimate the time of a step.

    Args:
        parameters: The parameters of the model.
        tokens: The mean length of a response, in tokens.
        responses: The responses of a batch.
        gpus: The number of GPUs, H100 or H200; the formula was fitted to eight H200s.

    >>> step = estimated_step(3.1e9, 700)
    >>> round(step.generation), round(step.training), round(step.step)
    (36, 68, 108)
    """
    generation = responses * tokens * parameters / (GENERATION * gpus)
    training = OPERATIONS * parameters * responses * (tokens + PROMPT_TOKENS) / (TRAINING * gpus)
    return Estimate(generation, training)


def estimated_hours(
    parameters: float, tokens: float, steps: int = RUN_STEPS, evaluations: int = 154, gpus: int = 8
) -> float:
    """Estimate the hours of a whole run, with evaluations of 100 problems with 32 responses each."""
    evaluation = estimated_step(parameters, tokens, 3200, gpus).generation
    return (steps * estimated_step(parameters, tokens, gpus=gpus).step + evaluations * evaluation) / 3600


def estimate_of(model: str, gpus: int = 8) -> str:
    """Return the estimated time and price of a run of a recipe's model, in one line."""
    parameters, tokens = PARAMETERS[model]
    step = estimated_step(parameters, tokens, gpus=gpus)
    hours = estimated_hours(parameters, tokens, gpus=gpus)
    return (
        f"{step.step:.0f} s a step, {hours:.0f} h for {RUN_STEPS} steps, {hours * gpus:,.0f} GPU hours, "
        f"${PRICE * hours * gpus:,.0f} at ${PRICE:.2f}, {CHECKPOINT * parameters / 1e9:.0f} GB a checkpoint; "
        f"extrapolated from the authors' steps on 8 H200s, with {tokens} tokens a response"
    )


def kept_checkpoints(steps: int, every: int, most: int | None) -> int:
    """Return the number of checkpoints that a run of verl keeps.

    Args:
        steps: The steps of the run.
        every: The setting ``trainer.save_freq``; the last step is saved too, and 0 or less saves none.
        most: The setting ``trainer.max_actor_ckpt_to_keep``; verl keeps all if it is None or 0.

    >>> kept_checkpoints(769, 20, 3), kept_checkpoints(769, 10, None), kept_checkpoints(769, -1, 3)
    (3, 77, 0)
    """
    if every <= 0:
        return 0
    written = -(-steps // every)
    return min(written, most) if most else written


class Checkpoints(NamedTuple):
    """The checkpoints that a run keeps."""

    count: int
    size: float
    """The size of one, in GB."""

    @property
    def total(self) -> float:
        """The size of all, in GB."""
        return self.count * self.size

    def __str__(self) -> str:
        return f"{self.count} checkpoints of {self.size:.0f} GB are kept, {self.total:,.0f} GB in all"


def read_steps(lines: Iterable[str]) -> dict[int, dict[str, float]]:
    """Read the metrics of each step in a log of verl's console; if a step is printed twice, the last is used.

    >>> read_steps(["(TaskRunner pid=1) step:3 - actor/lr:1e-06 - perf/time_per_step:np.float64(12.5)"])
    {3: {'actor/lr': 1e-06, 'perf/time_per_step': 12.5}}
    """
    steps = {}
    for line in lines:
        match = _STEP.search(line)
        if match:
            steps[int(match[1])] = {name: float(value) for name, value in _METRIC.findall(match[2])}
    return steps


AUTHORS = {
    "grpo": (109.5, 36.4, 69.3, 702, 0.572, -0.572, 3.3e-4),
    "clip-higher": (108.9, 36.4, 68.8, 701, 0.584, -0.577, 1.9e-4),
    "band-kl": (108.9, 36.6, 68.1, 706, 0.576, -0.567, 1.3e-5),
    "dcpo": (107.6, 35.4, 68.1, 707, 0.567, -0.562, 1.1e-5),
}
"""The means of the quantities of `COMPARED` over the authors' first four steps, by the method.

They were logged with Qwen2.5-3B-Instruct on 8 H200s (OpenMOSS/BandPO, baselinescripts/Qwen2.5-3B-Instruct-L4k/time).
"""
COMPARED = {
    "s per step": ("timing_s/step",),
    "s of generation": ("timing_s/gen",),
    "s of training": ("timing_s/ref", "timing_s/old_log_prob", "timing_s/update_actor"),
    "tokens per response": ("response_length/mean",),
    "entropy": ("actor/entropy",),
    "reward": ("critic/score/mean",),
    "share of tokens clipped": ("actor/pg_clipfrac",),
}
"""The quantities that are compared with the authors', each the sum of some of verl's metrics."""


def comparison_with_authors(steps: dict[int, dict[str, float]]) -> str:
    """Compare the first four steps of a run with those of the authors, as a Markdown table."""
    first_steps = [metrics for step, metrics in sorted(steps.items()) if 1 <= step <= 4]

    def mean(names: tuple[str, ...]) -> str:
        values = [
            sum(metrics[name] for name in names) for metrics in first_steps if {*names} <= metrics.keys()
        ]
        return f"{fmean(values):.3g}" if values else ""

    rows = []
    for k, (text, names) in enumerate(COMPARED.items()):
        rows.append([text, mean(names), *(f"{means[k]:.3g}" for means in AUTHORS.values())])
    return Table(["steps 1 to 4", "this run", *AUTHORS], rows, prose=True).markdown()


def cost_table(steps: dict[int, dict[str, float]]) -> str:
    """Return time and memory as a Markdown table, with the stages ordered by their time.

    Args:
        steps: The metrics of each step, as `read_steps` returns them.

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

    stages: dict[str, list[float]] = {}
    for metrics in steps.values():
        for name, value in metrics.items():
            if name.startswith("timing_s/"):
                stages.setdefault(name, []).append(value)
    total = sum(stages.get("timing_s/step", ()))
    for name, values in sorted(stages.items(), key=lambda stage: (-sum(stage[1]), stage[0])):
        share = f", {sum(values) / total:.0%} of the time" if total and name != "timing_s/step" else ""
        rows.append(
            [f"{name.removeprefix('timing_s/')}, {len(values)} times", f"{median(values):.4g} s{share}"]
        )
    return Table([f"{len(steps)} steps, {min(steps)} to {max(steps)}", ""], rows, prose=True).markdown()
