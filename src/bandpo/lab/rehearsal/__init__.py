"""Rehearses a recipe for stock verl on two CPU cores, before you pay for GPUs.

Everything that a run on a cluster goes through is gone through: the config, the plug-ins in every process, the
reward function, the policy loss, the weight sync, validation, a checkpoint and a resume from it; with a tiny model
and unmodified verl and Ray. See `rehearse`.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bandpo.lab.rehearsal import files
from bandpo.lab.rehearsal.checks import Check, judge_first, judge_resumed
from bandpo.lab.rehearsal.inputs import RIGHT_ANSWER, choose_prompts, write_model, write_rows
from bandpo.lab.rehearsal.shrink import (
    PROMPT_TOKENS,
    PROMPTS,
    CannotRehearse,
    Change,
    changes,
    compose,
    refuse,
)

__all__ = ["NOT_COVERED", "CannotRehearse", "Change", "Check", "Rehearsal", "rehearse"]

NOT_COVERED = (
    "vLLM and SGLang, CUDA, FSDP1, Megatron, FlashAttention, bf16, memory and speed, more than one node, "
    "and whether the recipe learns anything"
)


@dataclass(frozen=True)
class Rehearsal:
    """What was changed and what was found."""

    changes: list[Change]
    checks: list[Check]
    prompts: str
    """Where the prompts came from."""
    folder: Path
    """Logs, metrics, responses and checkpoints."""

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def rehearse(
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    config_name: str = "ppo_trainer",
    steps: int = 2,
    ranks: int = 1,
    timeout: float = 300.0,
    right_answer: str = RIGHT_ANSWER,
    stand_in: bool = False,
    folder: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Rehearsal:
    """Runs a recipe for verl end to end on the CPU, small.

    Args:
        overrides: What follows `python -m verl.trainer.main_ppo` on the cluster, save the next two.
        config_dir: Its `--config-dir`.
        config_name: Its `--config-name`.
        steps: Training steps before the checkpoint; one more follows after the resume.
        ranks: Training processes.
        timeout: Seconds for each of the two runs.
        right_answer: How a right answer is written, `{0}` being the ground truth. Such answers are planted among
            the samples, so that the reward function sees right ones.
        stand_in: Go on where a data file or the model's folder is not on this machine, with prompts made up and a
            model of the family that the path names. Without it such a path is a failure.
        folder: Where to leave logs, metrics and checkpoints; a new one under the system's by default. Ray puts
            sockets there, so its path must be short.
        report: Called with a short text at every stage.

    Raises:
        CannotRehearse: The recipe needs what no CPU can stand in for.
        ValueError: The config cannot be composed, or too few of its prompts are short enough.
    """
    config = compose(list(overrides), config_dir, config_name)
    refuse(config)
    folder = Path(tempfile.mkdtemp(prefix="bandpo-")) if folder is None else folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    checks = [validate(config)]
    if not checks[-1].ok:
        return Rehearsal([], checks, "", folder)
    absent = [] if stand_in else missing(config)
    if absent:
        checks.append(Check("files", False, "; ".join(absent) + " (--stand-in: go on with made-up ones)"))
        return Rehearsal([], checks, "", folder)

    report("writing a tiny model")
    tokenizer = write_model(config.actor_rollout_ref.model.path, folder / "model")
    key = config.data.prompt_key
    answers: dict[str, str] = {}
    origins = []
    for split, count in (("train", PROMPTS * (steps + 2)), ("val", PROMPTS)):
        prompts = choose_prompts(data_files(config, split), key, tokenizer, PROMPT_TOKENS, count)
        write_rows(prompts.rows, folder / f"{split}.parquet")
        answers |= prompts.answers(key, right_answer)
        origins.append(f"{split} prompts: {prompts.origin}")
    (folder / files.ANSWERS).write_text(json.dumps(answers))

    from bandpo.lab.rehearsal.run import train

    made = changes(config, folder, ranks, steps)
    search = [] if config_dir is None else ["--config-dir", str(config_dir.resolve())]
    command = ["-m", "verl.trainer.main_ppo", "--config-name", config_name, *search, *overrides]
    command += [change.override for change in made]
    train(command, folder, "first", timeout, lambda stage: report(f"first run: {stage}"))
    checks += judge_first(folder, steps, loss_mode(config), answers)
    if all(check.ok for check in checks):
        more = f"++trainer.total_training_steps={steps + 1}"
        train([*command, more], folder, "resumed", timeout, lambda stage: report(f"resumed run: {stage}"))
        checks.append(judge_resumed(folder, steps))
    return Rehearsal(made, checks, "; ".join(origins), folder)


def validate(config) -> Check:
    """verl's own checks, on the recipe in its full size."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.import_utils import import_external_libs

    settings = config.actor_rollout_ref
    try:
        import_external_libs(settings.model.external_lib)
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(config, need_reference_policy(config), use_critic=False)
        # What verl itself leaves out where use_dynamic_bsz is set, or finds in the first update only.
        gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
        prompts, responses = settings.actor.ppo_mini_batch_size, settings.rollout.n
        if prompts > config.data.train_batch_size:
            raise ValueError(
                f"actor.ppo_mini_batch_size = {prompts} is more than data.train_batch_size = "
                f"{config.data.train_batch_size}"
            )
        if prompts * responses % gpus:
            raise ValueError(
                f"actor.ppo_mini_batch_size × rollout.n = {prompts} × {responses} responses cannot be split evenly "
                f"over {gpus} GPUs"
            )
    except Exception as error:  # whatever a user's plug-in or verl raises is the finding
        return Check("settings", False, f"verl refuses the settings: {type(error).__name__}: {error}")
    mode = loss_mode(config)
    if mode not in POLICY_LOSS_REGISTRY:
        known = ", ".join(sorted(POLICY_LOSS_REGISTRY))
        return Check("settings", False, f"there is no policy loss named {mode!r}; known are {known}")
    return Check("settings", True, "accepted by verl at full size")


def loss_mode(config) -> str:
    """The name under which verl's workers look the loss up: the config class may decide it."""
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss).loss_mode


def data_files(config, split: str) -> list[str]:
    """The recipe's files for `train` or `val`: verl takes one or a list."""
    named = config.data[f"{split}_files"]
    return [named] if isinstance(named, str) else list(named)


def missing(config) -> list[str]:
    """One sentence for each file of the recipe that is not on this machine.

    A model may be a name on a hub instead, which nobody looks up here; what cannot be such a name is a path.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    paths = [
        (f"data.{split}_files", path) for split in ("train", "val") for path in data_files(config, split)
    ]
    model = config.actor_rollout_ref.model.path
    try:
        validate_repo_id(model)
    except HFValidationError:
        paths.append(("actor_rollout_ref.model.path", model))
    return [f"{key}: {path} is not here" for key, path in paths if not Path(path).expanduser().exists()]
