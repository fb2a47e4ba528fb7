"""Write checkpoints atomically, and detect damaged ones."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import Trainer

from bandpo_lab.errors import FileProblem, RunProblem
from bandpo_lab.files.writing import (
    SEAL,
    UNFINISHED,
    digest,
    is_write_error,
    naming,
    put_in_place,
    remove,
    seal,
    sealed,
)
from rlvet.runs.files import check_file
from rlvet.runs.limits import LARGEST_TEXT


def damage(folder: Path) -> str | None:
    """Return a description of the damage to a sealed folder or checkpoint; None if all files have their digests.

    Raises:
        OSError: A file cannot be read from the disk, so it is not known whether it is damaged.
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
            check_file(state, LARGEST_TEXT)
            step = json.loads(state.read_text(encoding="utf-8"))["global_step"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return f"{state.name} has no step"
        if step != step_of(folder):
            return f"it is of step {step}"
    return None


@contextmanager
def _loading(checkpoint: str | None) -> Generator[None, None, None]:
    """Name the checkpoint in an error that is raised while it is loaded.

    A checkpoint is only loaded if it is not damaged. If loading fails, the cause is another version, device or number
    of processes, so the checkpoint is not moved.

    Raises:
        RunProblem: The block raised an error.
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


@contextmanager
def saving(checkpoint: Path) -> Generator[None, None, None]:
    """Name the checkpoint in an error of the disk that is raised while it is written.

    Raises:
        FileProblem: torch.save, safetensors or tokenizers could not write a file.
        OSError: Another file could not be written.
    """
    try:
        with naming(checkpoint):
            yield
    except Exception as error:  # tokenizers raises no narrower one
        if not is_write_error(error):
            raise
        message = " ".join(str(error).split())
        raise FileProblem(
            f"{checkpoint} cannot be written: {message}. See whether the disk is full or fails; then add --resume "
            "to go on from the checkpoint before it"
        ) from error


def saved_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run folder, damaged ones included, the newest first."""
    paths = [path for path in folder.glob("checkpoint-*") if path.name.partition("-")[2].isdecimal()]
    return sorted(paths, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step after which a checkpoint was written."""
    return int(checkpoint.name.partition("-")[2])


class AtomicCheckpoints(Trainer):
    """A mixin for trainers that writes each checkpoint to a temporary folder, seals it and renames it last.

    Use it before a trainer: ``class MyTrainer(AtomicCheckpoints, Trainer): ...``. If the process is killed or the disk
    is full, no unfinished checkpoint has the name of a checkpoint. A run that is resumed after its last step does not
    train further.

    Raises:
        RunProblem: The checkpoint to resume from cannot be loaded.
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
            # transformers has looked for the best checkpoint in the temporary folder.
            self.state.best_model_checkpoint = str(best)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self.state.save_to_json(str(unfinished / "trainer_state.json"))
            seal(unfinished, (file for file in unfinished.rglob("*") if file.is_file()))
            remove(finished)  # transformers may save a step twice
            put_in_place(unfinished, finished)
            if self.args.save_total_limit:
                protected = {finished, best} if best.is_dir() else {finished}
                _rotate(folder, self.args.save_total_limit, protected)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(finished))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        with _loading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

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
        # The upload runs in the background, so it must not read a folder that will be renamed.
        if not self._writing:
            super()._push_from_checkpoint(checkpoint_folder)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        # transformers checks only after a step whether it was the last, so a finished run that is resumed would make
        # one step more.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(*args, **kwargs)


def _rotate(folder: Path, limit: int, protected: set[Path]) -> None:
    """Delete the oldest checkpoints beyond a limit.

    Age is by step. transformers uses the time of the last change, which is lost if a run folder is copied.

    Args:
        folder: The run folder.
        limit: The number of checkpoints to keep.
        protected: The checkpoints that are kept in any case; they count towards the limit.
    """
    checkpoints = [checkpoint for checkpoint in saved_checkpoints(folder) if checkpoint not in protected]
    for checkpoint in checkpoints[max(limit - len(protected), 0) :]:
        remove(checkpoint)
