"""Train on data that is some batches old, as asynchronous training does, in one process."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from trl import GRPOTrainer

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo_lab.training.arguments import TrainingConfig


class StaleBatches(GRPOTrainer):
    """A mixin for TRL's trainer that trains on each batch ``args.lag`` batches after it was generated.

    Use it before a trainer: ``class MyTrainer(StaleBatches, GRPOTrainer): ...``. Rewards are logged when a batch is
    generated. No step is made while the first ``lag`` batches are generated. A batch has a column ``version`` with the
    optimizer step at which it was generated. Checkpoints hold the batches that were not trained on yet.
    """

    def __init__(self, *positional: Any, args: TrainingConfig, **kwargs: Any):
        self._pending: deque[dict[str, Any]] = deque()
        self._lag = args.lag
        self._idle_steps = args.lag * args.updates_per_batch
        super().__init__(*positional, args=args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if not self._lag or not (self.model and self.model.training):
            return super()._generate_and_score_completions(inputs)
        iterations = self.num_iterations
        # TRL does not compute the old log-probabilities if a batch is used for a single optimizer step. With this
        # number of iterations it does.
        self.num_iterations = self.args.gradient_accumulation_steps + 1
        try:
            batch = super()._generate_and_score_completions(inputs)
        finally:
            self.num_iterations = iterations
        batch["version"] = torch.full_like(batch["completion_ids"][:, 0], self.state.global_step)
        self._pending.append(batch)
        return self._pending.popleft() if len(self._pending) > self._lag else batch

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
        if self.state.global_step >= self._idle_steps:
            return super().training_step(model, inputs, *args)
        # Generate a batch without training on it. Without gradients, the optimizer changes nothing.
        model.train()
        self._prepare_inputs(inputs)
        self._step += 1
        return torch.zeros((), device=self.args.device)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._lag:
            torch.save(list(self._pending), self._pending_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint and self._lag:
            self._pending = deque(torch.load(self._pending_file(checkpoint), map_location=self.args.device))

    def _pending_file(self, folder: str) -> Path:
        return Path(folder) / f"waiting_{self.args.process_index}.pt"
