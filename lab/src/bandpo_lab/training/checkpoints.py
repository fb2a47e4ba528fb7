"""Checkpoints that are whole or have another name, and what tells a whole one from a damaged one."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import Trainer

from bandpo.errors import FileProblem, RunProblem
from bandpo_lab.files import SEAL, UNFINISHED, digest, naming, put_in_place, remove, seal, sealed


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder or checkpoint, None if it is whole: no byte differs from what was sealed.

    Raises:
        OSError: the disk does not give a file, which says nothing about its bytes.
    """
    digests = sealed(folder)
    if not digests:
        return f"{SEAL} cannot be read"
    for name, expected in digests.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{SEAL} names a file elsewhere"
        if not (folder / name).is_file():
            return f"{name} is missing"
        if digest(folder / name) != expected:
            return f"{name} has changed"
    state = folder / "trainer_state.json"
    if state.name in digests:
        try:
            step = json.loads(state.read_text(encoding="utf-8"))["global_step"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return f"{state.name} tells no step"
        if step != step_of(folder):
            return f"it is of step {step}"
    return None


@contextmanager
def _loading(checkpoint: str | None) -> Generator[None, None, None]:
    """Name the checkpoint in an error of loading it.

    A checkpoint is loaded only if no byte of it has changed. What fails then is the program that loads it: another
    version, device or number of processes. So the checkpoint is left where it is.

    Raises:
        RunProblem: the block raised.
    """
    try:
        yield
    except Exception as error:
        message = " ".join(str(error).split())
        raise RunProblem(
            f"{checkpoint} is whole, but loading it raised {type(error).__name__}: {message}. Nothing was moved. "
            "If other versions of torch, transformers or trl, or another number of processes, wrote it, resume with "
            "those. To go on from the checkpoint before it, move this folder elsewhere"
        ) from error


WRITE_ERRORS = ("PytorchStreamWriter", "inline_container", "I/O error", "os error")
"""Parts of the messages with which torch.save and safetensors say that the disk took no more; they raise no OSError."""


@contextmanager
def saving(checkpoint: Path) -> Generator[None, None, None]:
    """Name the checkpoint in an error of the disk while it is written.

    Raises:
        FileProblem: torch.save or safetensors could not write.
        OSError: anything else could not.
    """
    try:
        with naming(checkpoint):
            yield
    except (RuntimeError, SafetensorError) as error:
        message = " ".join(str(error).split())
        if not any(part in message for part in WRITE_ERRORS):
            raise
        raise FileProblem(
            f"{checkpoint} cannot be written: {message}. See whether the disk is full or fails; then add --resume "
            "to go on from the checkpoint before it"
        ) from error


def saved_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, whole or not, the newest first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.partition("-")[2].isdecimal()]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The optimiser step after which it was written."""
    return int(checkpoint.name.partition("-")[2])


class WholeCheckpoints(Trainer):
    """Writes each checkpoint under another name, seals it, and gives it its own name last.

    Put it before any Trainer: ``class Mine(WholeCheckpoints, TheirTrainer): ...``. A kill or a full disk then leaves a
    checkpoint that is not taken for one. A run that is resumed from its last step trains no further.

    Raises:
        RunProblem: a checkpoint to resume from cannot be loaded.
    """

    _writing = False

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, UNFINISHED) if self._writing else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial))
        finished = folder / f"checkpoint-{self.state.global_step}"
        unfinished = folder / UNFINISHED / finished.name
        self._writing = True
        try:
            with saving(finished):
                super()._save_checkpoint(model, trial)
        finally:
            self._writing = False
        best = folder / f"checkpoint-{self.state.best_global_step}"
        if best == finished or best.is_dir():
            # transformers looked for it in the folder of this checkpoint
            self.state.best_model_checkpoint = str(best)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self.state.save_to_json(str(unfinished / "trainer_state.json"))
            seal(unfinished, (file for file in unfinished.rglob("*") if file.is_file()))
            remove(finished)  # transformers may save a step twice
            put_in_place(unfinished, finished)
            if self.args.save_total_limit:
                _rotate(folder, self.args.save_total_limit, {finished, best} if best.is_dir() else {finished})
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(finished))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *arguments: Any, **named: Any) -> None:
        with _loading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, *arguments, **named)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _loading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with _loading(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _loading(checkpoint):
            super()._load_rng_state(checkpoint)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # The upload runs beside the training, so it must not read a folder that is about to be renamed.
        if not self._writing:
            super()._push_from_checkpoint(checkpoint_folder)

    def get_batch_samples(self, *arguments: Any, **named: Any) -> Any:
        # transformers asks only after a step whether all are done. A finished run that is resumed would get one more.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(*arguments, **named)


def _rotate(folder: Path, limit: int, protected: set[Path]) -> None:
    """Delete the oldest checkpoints beyond a number.

    By step: transformers goes by the time of the last change, which is lost where a run folder is copied.
    """
    others = [checkpoint for checkpoint in saved_checkpoints(folder) if checkpoint not in protected]
    for old in others[max(limit - len(protected), 0) :]:
        remove(old)
