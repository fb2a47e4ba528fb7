"""The checkpoints of the trainers of a run folder."""

from __future__ import annotations

from typing import Any

from bandpo_lab.training.checkpoints import AtomicCheckpoints
from bandpo_lab.training.failures import check_weights


class RunCheckpoints(AtomicCheckpoints):
    """A mixin for the trainers of a run folder: a checkpoint is written atomically, and only with finite weights."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        check_weights(self, f"checkpoint-{self.state.global_step}")
        super()._save_checkpoint(model, trial)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write no model card, since TRL's would name neither a local base model, the clip rule nor the scores."""
