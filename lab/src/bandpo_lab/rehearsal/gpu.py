"""One step of a recipe on a node's GPUs: `bandpo-lab run verl --one-step`. No GPU has run it yet."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from bandpo.errors import RunProblem
from bandpo_lab.rehearsal import files
from bandpo_lab.rehearsal.checks import explain
from bandpo_lab.rehearsal.preflight import FLASH, absent_files, lacking_gpus, lacks_attention

ROLLOUT = "actor_rollout_ref.rollout."
KNOWN = {
    r"No module named '(?:flash_attn)|FlashAttention2 has been toggled on": FLASH,
    r"No space left on device": "The disk is full: name another by --output-dir",
    r"Free memory on device .* is less than desired GPU memory utilization": "vLLM finds less free memory than it was "
    f"promised: end what else is on the GPU (nvidia-smi), or lower {ROLLOUT}gpu_memory_utilization",
    r"No available memory for the cache blocks|larger than the available KV cache memory": "vLLM has no room for its "
    f"cache beside the model: raise {ROLLOUT}gpu_memory_utilization, or set {ROLLOUT}tensor_model_parallel_size=2",
    r"(?m)^.*(?:vLLM|EngineCore|Worker_TP).*OutOfMemoryError": "The rollout ran out of memory: lower "
    f"{ROLLOUT}gpu_memory_utilization or {ROLLOUT}max_num_seqs, or set {ROLLOUT}tensor_model_parallel_size=2",
    r"OutOfMemoryError|CUDA out of memory": "Training ran out of memory: lower actor_rollout_ref.actor."
    "ppo_max_token_len_per_gpu, or set actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
    r"Engine core initialization failed|EngineDeadError": "vLLM did not start: its own error stands further up",
}
"""What a log has, and what to do; the first that is found."""


def tried(command: list[str], config: Any, output: Path) -> str:
    """What the command of a single step costs, and by that the whole run of the config.

    Raises:
        RuntimeError: it cannot be run here, or failed; with what to change.
    """
    from bandpo_lab.cost import read_steps, whole_run

    lacks = [*filter(None, [missing(config)]), *absent_files(config, remote=True)]
    if lacks:
        raise RunProblem(f"not started: {'; '.join(lacks)}")
    folder = output / "one-step"
    folder.mkdir(parents=True, exist_ok=True)
    log, checkpoint = folder / files.LOG.format("gpu"), folder / "global_step_1"
    with log.open("w") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    text = log.read_text(encoding="utf-8", errors="replace")
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    shutil.rmtree(checkpoint, ignore_errors=True)
    steps = read_steps(text.splitlines())
    if 1 in steps:
        return whole_run(steps, config, size, shutil.disk_usage(folder).free)
    for pattern, words in KNOWN.items():
        if re.search(pattern, text):
            raise RunProblem(f"{words}. Its log is {log}")
    raise RunProblem(explain(folder, "gpu"))


def missing(config: Any) -> str | None:
    """What this node lacks for the run, known at once."""
    engine, wanted = config.actor_rollout_ref.rollout.name, config.trainer.n_gpus_per_node
    if few := lacking_gpus(wanted, f"trainer.n_gpus_per_node is {wanted}"):
        return few
    if importlib.util.find_spec(engine) is None:
        return f"{ROLLOUT}name is {engine}, which is not installed: docs/install.md has the environment of a node"
    if lacks_attention(config):
        return FLASH
    return None
