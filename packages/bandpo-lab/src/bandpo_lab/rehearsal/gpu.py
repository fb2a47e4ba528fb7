"""Run one step of a recipe on a node's GPUs: `bandpo-lab run verl --one-step`. No GPU has run it yet."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from bandpo_lab.cluster.cost import PRICE, cost_table, kept_checkpoints, read_steps
from bandpo_lab.errors import RunProblem, error_about
from bandpo_lab.rehearsal import files
from bandpo_lab.rehearsal.checks import explain
from bandpo_lab.rehearsal.preflight import (
    NO_FLASH_ATTENTION,
    absent_files,
    data_files,
    lacking_gpus,
    lacks_attention,
)

ROLLOUT = "actor_rollout_ref.rollout."
EXPLANATIONS = {
    r"No module named '(?:flash_attn)|FlashAttention2 has been toggled on": NO_FLASH_ATTENTION,
    r"No space left on device": "The disk is full: name another by --output-dir",
    r"Free memory on device .* is less than desired GPU memory utilization": "vLLM finds less free memory than it was "
    f"promised: end what else is on the GPU (nvidia-smi), or lower {ROLLOUT}gpu_memory_utilization",
    r"No available memory for the cache blocks|larger than the available KV cache memory": "vLLM has no room for its "
    f"cache beside the model: raise {ROLLOUT}gpu_memory_utilization, or set {ROLLOUT}tensor_model_parallel_size=2",
    r"(?m)^.*(?:vLLM|EngineCore|Worker_TP).*OutOfMemoryError": "The rollout ran out of memory: lower "
    f"{ROLLOUT}gpu_memory_utilization or {ROLLOUT}max_num_seqs, or set {ROLLOUT}tensor_model_parallel_size=2",
    r"OutOfMemoryError|CUDA out of memory": "Training ran out of memory: lower actor_rollout_ref.actor."
    "ppo_max_token_len_per_gpu, or set actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
    r"Engine core initialization failed|EngineDeadError": "vLLM did not start: its error is earlier in the log",
}
"""The patterns of known errors in a log, each with the advice for it; the first match is used."""


def run_one_step(command: list[str], config: Any, output: Path) -> str:
    """Run the command of a single step, and estimate the cost of the full run from it.

    Args:
        command: The command that trains for one step and writes a checkpoint.
        config: The recipe's composed config.
        output: The folder for the log and the checkpoint; the checkpoint is removed after the step.

    Returns:
        The cost of the step and of the full run, as text.

    Raises:
        RuntimeError: The step cannot be run here, or failed; the message says what to change.
    """
    problem = missing_on_node(config)
    problems = [problem] if problem else []
    problems += absent_files(config, remote=True)
    if problems:
        raise error_about(RunProblem, problems, title="not started")

    folder = output / "one-step"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / files.LOG.format("gpu")
    checkpoint = folder / "global_step_1"
    with log.open("w") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    text = log.read_text(encoding="utf-8", errors="replace")
    checkpoint_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    shutil.rmtree(checkpoint, ignore_errors=True)

    # Without metrics of step 1, the run has failed.
    steps = read_steps(text.splitlines())
    if 1 in steps:
        return whole_run(steps, config, checkpoint_bytes, shutil.disk_usage(folder).free)
    for pattern, explanation in EXPLANATIONS.items():
        if re.search(pattern, text):
            raise RunProblem(f"{explanation}. Its log is {log}")
    raise RunProblem(explain(folder, "gpu"))


def whole_run(steps: dict[int, dict[str, float]], config: Any, checkpoint_bytes: int, free_bytes: int) -> str:
    """Return the cost of the first step and an estimate of the cost of the whole run, as a text.

    Args:
        steps: The metrics of each step, as `read_steps` returns them; the first step is used.
        config: The composed config of the run.
        checkpoint_bytes: The size of a checkpoint.
        free_bytes: The free space for checkpoints.
    """
    import pyarrow.parquet

    trainer = config.trainer
    rows = sum(pyarrow.parquet.read_metadata(path).num_rows for path in data_files(config, "train"))
    count = trainer.total_training_steps or rows // config.data.train_batch_size * trainer.total_epochs
    hours = count * steps[1]["perf/time_per_step"] / 3600
    gpu_hours = hours * trainer.nnodes * trainer.n_gpus_per_node
    checkpoints = kept_checkpoints(count, trainer.save_freq, trainer.max_actor_ckpt_to_keep)
    checkpoint_gb = round(checkpoint_bytes / 1e9)
    all_gb = round(checkpoints * checkpoint_bytes / 1e9)
    free_gb = round(free_bytes / 1e9)
    warning = ": too few" if all_gb > free_gb else ""
    return f"""{cost_table(steps)}

Each response had {config.data.max_response_length} tokens; shorter ones cost less.
{count} steps: at most {hours:.0f} h, {gpu_hours:.0f} GPU hours, ${PRICE * gpu_hours:,.0f} at ${PRICE:.2f} an hour
{checkpoint_gb} GB a checkpoint, {all_gb} GB for {checkpoints}; {free_gb} GB are free{warning}"""


def missing_on_node(config: Any) -> str | None:
    """Return the first requirement of the run that this node does not meet; None if it meets all.

    The checks take less than a second: GPUs, the inference engine and FlashAttention.
    """
    engine = config.actor_rollout_ref.rollout.name
    gpus = config.trainer.n_gpus_per_node
    problem = lacking_gpus(gpus, f"trainer.n_gpus_per_node is {gpus}")
    if problem:
        return problem
    if importlib.util.find_spec(engine) is None:
        return f"{ROLLOUT}name is {engine}, which is not installed: docs/install.md has the environment of a node"
    if lacks_attention(config):
        return NO_FLASH_ATTENTION
    return None
