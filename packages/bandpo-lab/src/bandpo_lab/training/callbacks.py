"""The callbacks of a run: the log of metrics, evaluations during training, and the progress bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback

from bandpo_lab.output.console import echo

if TYPE_CHECKING:
    from transformers import TrainerState

    from bandpo_lab.training.run_folder import RunFolder

PROGRESS_METRICS = {
    "reward": "reward",
    "entropy": "entropy",
    "clip_ratio/high_mean": "clip high",
    "clip_ratio/low_mean": "clip low",
}


"""The metrics of the progress bar, with their labels."""


class MetricsLog(TrainerCallback):
    """A callback that appends each log step to the run folder's metrics.jsonl.

    A checkpoint holds all rows up to its step. A run that is resumed writes the file again from these rows, so rows
    after the checkpoint are removed, and a file that was damaged by a kill is repaired.
    """

    def __init__(self, folder: RunFolder):
        self._folder = folder

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._folder.rewrite_log([row for row in state.log_history if "train_runtime" not in row])

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "train_runtime" not in logs:
            row = state.log_history[-1]  # it holds `logs` and the details of the audit
            self._folder.log({"step": state.global_step, **row})


class PeriodicEvaluation(TrainerCallback):
    """A callback that evaluates the model periodically and writes the scores to metrics.jsonl.

    Args:
        folder: The run folder.
        interval: The number of optimizer steps between evaluations.
        evaluate: A function that returns the scores.
    """

    def __init__(self, folder: RunFolder, interval: int, evaluate: Callable[[], dict[str, float]]):
        self._folder = folder
        self._interval = interval
        self._evaluate = evaluate

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step % self._interval == 0:
            scores = {name: score for name, score in self._evaluate().items() if "@" in name}
            row = {"step": state.global_step, **scores}
            state.log_history.append(row)  # the next checkpoint saves it
            self._folder.log(row)


class ProgressBar(ProgressCallback):
    """The progress bar of transformers with the latest metrics, which are printed as a line if there is no terminal."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, disable=None)
        self.current_step = 0

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any], **_: Any) -> None:
        latest = {
            label: f"{logs[key]:.3f}" for key, label in PROGRESS_METRICS.items() if logs.get(key) is not None
        }
        if latest and self.training_bar is not None:
            self.training_bar.set_postfix(latest, refresh=False)
            if self.training_bar.disable:
                metrics = ", ".join(f"{label} {value}" for label, value in latest.items())
                echo(f"step {state.global_step}/{state.max_steps}: {metrics}", err=True)
