"""`bandpo-lab train`."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from bandpo_lab.cluster.engines import memory_problem, missing_engine
from bandpo_lab.errors import MissingPackage, RunProblem
from bandpo_lab.output.console import echo, print_table
from rlvet.cli import INTERRUPTED, stop

if TYPE_CHECKING:
    from bandpo_lab.training.arguments import TrainingConfig
    from bandpo_lab.training.async_config import AsyncTrainingConfig


def train_command(context: typer.Context) -> None:
    """Train with GRPO and a clip rule; without arguments, the embedded task with Band."""
    from bandpo.core.text import importable_current_folder, parse
    from bandpo_lab.files.writing import PATHS, check_path

    # Check the method and the paths before TRL is imported, which takes seconds.
    words: list[str] = []
    for argument in context.args:
        words += argument.split("=", 1) if argument.startswith("--") else [argument]
    for flag, value in pairwise(words):
        if flag == "--method":
            with importable_current_folder():
                parse(value)
        option = flag.removeprefix("--").replace("-", "_")
        if option in PATHS:
            check_path(option, value, PATHS[option])

    from transformers.utils.logging import disable_progress_bar

    from bandpo_lab.training.arguments import parse_arguments
    from bandpo_lab.training.checkpoints import saved_checkpoints
    from bandpo_lab.training.train import run_training

    arguments = parse_arguments(context.args)
    if arguments.is_async:
        from bandpo_lab.training.async_run import check_gpu

        check_gpu(cast("AsyncTrainingConfig", arguments.training))
    else:
        _check_engine(cast("TrainingConfig", arguments.training))
    if not sys.stderr.isatty():
        disable_progress_bar()  # of loading and saving; `ProgressBar` prints lines instead
    try:
        folder = run_training(arguments)
    except KeyboardInterrupt:
        folder = arguments.training.output_dir or "."
        if saved_checkpoints(Path(folder)):
            stop(f"interrupted; add --resume to go on from the last checkpoint in {folder}", INTERRUPTED)
        stop(
            f"interrupted before the first checkpoint in {folder}, so the steps are lost; add --resume to start again "
            "there, with a smaller --save_steps for earlier checkpoints",
            INTERRUPTED,
        )
    if folder.evaluations:
        evaluations = folder.evaluations.values()
        names = next(iter(evaluations))
        rows = [(name, *(f"{scores[name]:.3f}" for scores in evaluations)) for name in names]
        print_table(("", *folder.evaluations), rows)
    results = {
        "method": arguments.training.method,
        "model": folder.model,
        "report": folder.report,
        "metrics": folder.metrics,
    }
    for name, value in results.items():
        echo(f"{name:8} {value}")


def _check_engine(training: TrainingConfig) -> None:
    """Check that vLLM, if TRL is to use it, is installed and can start in this process.

    TRL itself fails after it has loaded the model.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: There is no GPU, or too little of its memory is free.
    """
    if not training.use_vllm:
        return
    if missing_engine("vllm"):
        raise MissingPackage(
            "use_vllm: vLLM is not installed: pip install 'trl[vllm]', or --use_vllm false for transformers"
        )
    if training.vllm_mode != "colocate":
        return
    import torch

    if training.use_cpu or not torch.cuda.is_available():
        raise RunProblem(
            f"use_vllm: vLLM in this process needs a GPU, and torch {torch.__version__} sees none (nvidia-smi), or "
            "use_cpu is set: --use_vllm false generates with transformers"
        )
    share = training.vllm_gpu_memory_utilization
    problem = memory_problem("vllm", "vllm_gpu_memory_utilization", share, torch.cuda.device_count())
    if problem:
        raise RunProblem(problem)
