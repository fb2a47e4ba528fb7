"""Data some batches old: what asynchronous training does, made on purpose and in one process."""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from trl import GRPOTrainer

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo_lab.training.arguments import TrainingConfig


class StaleBatches(GRPOTrainer):
    """Trains on each batch ``args.lag`` batches after it was generated. With 0 it is TRL's trainer.

    Put it before the trainer that it changes: ``class Mine(StaleBatches, TheirTrainer): ...``. Rewards are logged when
    a batch is generated. While the first ``lag`` batches are, nothing is trained. A batch holds the ``version`` that
    generated it, in optimizer steps. Checkpoints hold the batches that wait.
    """

    def __init__(self, *arguments: Any, args: TrainingConfig, **named: Any):
        self._waiting: deque[dict[str, Any]] = deque()
        self._lag, self._idle_steps = args.lag, args.lag * args.updates_per_batch
        with warnings.catch_warnings():
            if args.lag:  # with which the ratio leaves 1 all the same
                warnings.filterwarnings("ignore", "each batch is used for one optimiser step")
            super().__init__(*arguments, args=args, **named)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if not self._lag or not (self.model and self.model.training):
            return super()._generate_and_score_completions(inputs)
        iterations = self.num_iterations
        # TRL leaves out the old log-probabilities where a batch ends with an optimizer step. Here it does not.
        self.num_iterations = self.args.gradient_accumulation_steps + 1
        try:
            made = super()._generate_and_score_completions(inputs)
        finally:
            self.num_iterations = iterations
        made["version"] = torch.full_like(made["completion_ids"][:, 0], self.state.global_step)
        self._waiting.append(made)
        return self._waiting.popleft() if len(self._waiting) > self._lag else made

    def training_step(self, model: Any, inputs: Any, *arguments: Any) -> Tensor:
        if self.state.global_step >= self._idle_steps:
            return super().training_step(model, inputs, *arguments)
        model.train()
        self._prepare_inputs(inputs)
        self._step += 1
        return torch.zeros((), device=self.args.device)  # no gradients, so the optimizer moves nothing

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._lag:
            torch.save(list(self._waiting), self._waiting_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint and self._lag:
            self._waiting = deque(torch.load(self._waiting_file(checkpoint), map_location=self.args.device))

    def _waiting_file(self, folder: str) -> Path:
        return Path(folder) / f"waiting_{self.args.process_index}.pt"
