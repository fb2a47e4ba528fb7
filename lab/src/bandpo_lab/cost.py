"""What a run of verl cost and will cost: time per step, by stage, and GPU memory; beside what the authors logged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

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

PRICE = 2.5
"""Dollars for an hour of a GPU, as in the recipes' table."""


PARAMETERS = {
    "qwen2.5-3b-instruct": (3.1e9, 700),
    "qwen2.5-7b": (7.6e9, 700),
    "deepseek-r1-distill-qwen-1.5b": (1.8e9, 3000),
    "deepseek-r1-distill-qwen-7b": (7.6e9, 3000),
    "deepseek-r1-distill-llama-8b": (8.0e9, 3000),
    "llama-3.2-3b-instruct": (3.2e9, 700),
}
"""Of each model of the recipes, its parameters and the tokens that are assumed for a response."""
GENERATION = 3.1e13
"""Tokens per second and GPU, times parameters: fitted to the 16 steps that the authors logged."""
TRAINING = 0.246 * 989e12
"""Operations per second and GPU, of reference, old log-probabilities and update together: fitted to the same steps."""
OPERATIONS = 12
"""For each parameter and token: 6 of the update, 2 of its recomputation, 2 of each pass without a gradient."""
OTHER = 4.0
"""Seconds of a step for everything else."""
PROMPT_TOKENS = 169
"""Tokens of a prompt in those steps, on average."""
CHECKPOINT = 12
"""Bytes for each parameter: the weights and Adam's two moments in float32."""


@dataclass(frozen=True)
class Estimate:
    """What a step takes by the formula that was fitted to the authors' steps, in seconds."""

    generation: float
    training: float

    @property
    def step(self) -> float:
        """The whole step."""
        return self.generation + self.training + OTHER


def estimated_step(parameters: float, tokens: float, responses: int = 4096, gpus: int = 8) -> Estimate:
    """Return what a step takes.

    Args:
        parameters: Of the model.
        tokens: Of a response, on average.
        responses: Of a batch.
        gpus: H100s or H200s; the steps were logged on eight H200s.

    >>> step = estimated_step(3.1e9, 700)
    >>> round(step.generation), round(step.training), round(step.step)
    (36, 68, 108)
    """
    generation = responses * tokens * parameters / (GENERATION * gpus)
    training = OPERATIONS * parameters * responses * (tokens + PROMPT_TOKENS) / (TRAINING * gpus)
    return Estimate(generation, training)


def estimated_hours(
    parameters: float, tokens: float, steps: int = 769, evaluations: int = 154, gpus: int = 8
) -> float:
    """Return the hours of a whole run, whose evaluations have 100 problems with 32 responses each."""
    evaluation = estimated_step(parameters, tokens, 3200, gpus).generation
    return (steps * estimated_step(parameters, tokens, gpus=gpus).step + evaluations * evaluation) / 3600


def estimate_of(model: str, gpus: int = 8) -> str:
    """Return in a line what a run of a recipe's model takes and costs."""
    parameters, tokens = PARAMETERS[model]
    step, hours = (
        estimated_step(parameters, tokens, gpus=gpus),
        estimated_hours(parameters, tokens, gpus=gpus),
    )
    return (
        f"{step.step:.0f} s a step, {hours:.0f} h for 769 steps, {hours * gpus:,.0f} GPU hours, "
        f"${PRICE * hours * gpus:,.0f} at ${PRICE:.2f}, {CHECKPOINT * parameters / 1e9:.0f} GB a checkpoint; "
        f"extrapolated from the authors' steps on 8 H200s, with {tokens} tokens a response"
    )


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


AUTHORS = {
    "grpo": (109.5, 36.4, 69.3, 702, 0.572, -0.572, 3.3e-4),
    "clip-higher": (108.9, 36.4, 68.8, 701, 0.584, -0.577, 1.9e-4),
    "band-kl": (108.9, 36.6, 68.1, 706, 0.576, -0.567, 1.3e-5),
    "dcpo": (107.6, 35.4, 68.1, 707, 0.567, -0.562, 1.1e-5),
}
"""Means over the first four steps that the authors logged of Qwen2.5-3B-Instruct on 8 H200s (OpenMOSS/BandPO,
baselinescripts/Qwen2.5-3B-Instruct-L4k/time): `BESIDE`, of which the third is ref, old_log_prob and update_actor."""
BESIDE = {
    "s per step": ("timing_s/step",),
    "s of generation": ("timing_s/gen",),
    "s of training": ("timing_s/ref", "timing_s/old_log_prob", "timing_s/update_actor"),
    "tokens per response": ("response_length/mean",),
    "entropy": ("actor/entropy",),
    "reward": ("critic/score/mean",),
    "share of tokens clipped": ("actor/pg_clipfrac",),
}


def beside_authors(steps: dict[int, dict[str, float]]) -> str:
    """The first four steps of a run beside those of the authors', as a Markdown table."""
    first = [metrics for step, metrics in sorted(steps.items()) if 1 <= step <= 4]

    def mean(names: tuple[str, ...]) -> str:
        values = [sum(metrics[name] for name in names) for metrics in first if {*names} <= metrics.keys()]
        return f"{fmean(values):.3g}" if values else ""

    rows = [
        [text, mean(names), *(f"{of[k]:.3g}" for of in AUTHORS.values())]
        for k, (text, names) in enumerate(BESIDE.items())
    ]
    return Table(["steps 1 to 4", "this run", *AUTHORS], rows, prose=True).markdown()


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


def whole_run(steps: dict[int, dict[str, float]], config: Any, checkpoint: int, free: int) -> str:
    """What a run will cost by its first step. ``checkpoint`` and ``free`` are bytes."""
    import pyarrow.parquet

    from bandpo_lab.rehearsal.preflight import data_files

    trainer = config.trainer
    rows = sum(pyarrow.parquet.read_metadata(path).num_rows for path in data_files(config, "train"))
    count = trainer.total_training_steps or rows // config.data.train_batch_size * trainer.total_epochs
    hours = count * steps[1]["perf/time_per_step"] / 3600
    gpus = hours * trainer.nnodes * trainer.n_gpus_per_node
    kept = trainer.max_actor_ckpt_to_keep or count // trainer.save_freq
    one, whole, free = (round(size / 1e9) for size in (checkpoint, kept * checkpoint, free))
    return f"""{summed_up(steps)}

Each response had {config.data.max_response_length} tokens; shorter ones cost less.
{count} steps: at most {hours:.0f} h, {gpus:.0f} GPU hours, ${PRICE * gpus:,.0f} at ${PRICE:.2f} an hour
{one} GB a checkpoint, {whole} GB for {kept}; {free} GB are free{": too few" if whole > free else ""}"""
