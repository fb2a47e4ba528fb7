"""The stages of a rehearsal, one after the other.

A rehearsal goes through all that a run on a cluster does, with a tiny model and unmodified verl and Ray. It reads the
config, loads the plug-ins in every process, and calls the reward function and the policy loss. It syncs weights,
validates, writes a checkpoint and resumes from it. See `rehearse`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bandpo.errors import InvalidValue
from bandpo_lab.rehearsal import files, preflight
from bandpo_lab.rehearsal.checks import Check, Expected, demanded_metrics, first_run_checks, resumed_run_check
from bandpo_lab.rehearsal.inputs import RIGHT_ANSWER, choose_prompts, write_model, write_rows
from bandpo_lab.rehearsal.processes import Forks
from bandpo_lab.rehearsal.run import environment, train
from bandpo_lab.rehearsal.shrink import PROMPT_TOKENS, PROMPTS, Change, changes, compose, refuse

NOT_COVERED = (
    "vLLM and SGLang: transformers generates, and weights reach it by another way",
    "CUDA, FlashAttention, fused kernels, torch.compile, bf16",
    "FSDP1, Megatron, off-loading, sharding over processes, sequence parallelism (Ulysses)",
    "the import of verl in each process: one imports, the others are forked from it",
    "TRL beside verl, which is hidden from it: a node is to have none (recipes/gpu.txt has none)",
    "the tokenizer and the chat template, unless the model is a folder on this machine",
    "more than one node, memory, speed, and whether the recipe learns anything",
)
"""What a rehearsal says nothing about."""


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

    @property
    def verdict(self) -> str:
        """One line."""
        failed = [check.name for check in self.checks if not check.ok]
        warned = [check.name for check in self.checks if check.warning]
        passed = f"REHEARSAL PASSED: {len(self.checks)} checks"
        words = f"REHEARSAL FAILED: {', '.join(failed)}" if failed else passed
        return words + (f", with warnings: {', '.join(warned)}" if warned else "")


def rehearse(
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    steps: int = 2,
    timeout: float = 300.0,
    right_answer: str = RIGHT_ANSWER,
    stand_in: bool = False,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Rehearsal:
    """Runs a recipe for verl end to end on the CPU, small.

    Options of `bandpo-lab rehearse` are explained there.

    Args:
        right_answer: How a right answer is written, `{0}` being the ground truth. Such answers are planted among
            the samples, so that the reward function sees right ones.
        stand_in: Go on where a data file or the model's folder is not on this machine, with prompts made up and a
            model of the family that the path names. Without it such a path is a failure.
        folder: Where to leave logs, metrics and checkpoints; a new one under the system's by default. It is empty or
            an earlier rehearsal's, which is cleared. Ray puts sockets there, so its path must be short.
        say: Called with what the run is at full size, line by line, and with each stage.

    Raises:
        ValueError: No CPU can stand in for what the recipe needs, the config cannot be composed, or the folder holds
            something else.
    """
    config = compose(list(overrides), config_dir, "ppo_trainer")
    if preflight.empty(config, overrides) is None:  # else the check of the settings says so
        with preflight.naming_unset(overrides):
            refuse(config)
    folder = _empty(Path(tempfile.mkdtemp(prefix="bandpo-")) if folder is None else folder.resolve())
    # The fork server imports the same modules as this process, at the same time, on another core.
    with Forks(folder, environment(folder)) as forks:
        checks = [preflight.validate(config, overrides)]
        for name, text in config.get("bandpo", {}).get("run", {}).items():
            say(f"{name:12}{text}")
        if checks[0].ok and not stand_in:
            checks += preflight.missing(config)
        if checks[-1].ok:
            with preflight.naming_unset(overrides):
                checks += preflight.reward(config)
        if not checks[-1].ok:
            return Rehearsal([], checks, "", folder)

        say("writing a tiny model")
        tokenizer = write_model(config.actor_rollout_ref.model.path, folder / "model")
        key = config.data.prompt_key
        answers: dict[str, str] = {}
        origins = []
        for split, count in (("train", PROMPTS * (steps + 2)), ("val", PROMPTS)):
            paths = preflight.data_files(config, split)
            try:
                prompts = choose_prompts(paths, key, tokenizer, PROMPT_TOKENS, count)
            except ValueError as error:
                checks.append(Check("files", False, f"data.{split}_files: {error}"))
                return Rehearsal([], checks, "", folder)
            write_rows(prompts.rows, folder / f"{split}.parquet")
            answers |= prompts.answers(key, right_answer)
            origins.append(f"{split} prompts: {prompts.origin}")
        (folder / files.ANSWERS).write_text(json.dumps(answers), encoding="utf-8")

        with preflight.naming_unset(overrides):
            made = changes(config, folder, steps)
            expected = Expected(*preflight.loss(config), answers, demanded_metrics(config))
        search = [] if config_dir is None else ["--config-dir", str(config_dir.resolve())]
        command = ["-m", "verl.trainer.main_ppo", *search, *overrides]
        command += [change.override for change in made]
        say("first run")
        train(forks, command, folder, "first", timeout)
        checks += first_run_checks(folder, steps, expected)
        if all(check.ok for check in checks):
            command.append(f"++trainer.total_training_steps={steps + 1}")
            say("resumed run")
            train(forks, command, folder, "resumed", timeout)
            checks.append(resumed_run_check(folder, steps))
    return Rehearsal(made, checks, "; ".join(origins), folder)


def _empty(folder: Path) -> Path:
    """The folder, without what an earlier rehearsal left there.

    Raises:
        ValueError: It holds something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / files.MARK
    found = [path for path in folder.iterdir() if path != mark]
    if found and not mark.exists():
        raise InvalidValue(
            f"{folder} is no rehearsal's and not empty ({found[0].name}): name a folder that is"
        )
    mark.touch()
    for path in found:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return folder
