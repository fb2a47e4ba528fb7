"""Clip rules in ms-swift's GRPO: its own loss, with the bounds of the batch in place of ``epsilon``.

    BANDPO_METHOD="Band(KL(), 0.05)" swift rlhf --rlhf_type grpo --external_plugins band_plugin.py ...

where ``band_plugin.py`` is one line, ``import bandpo_ms_swift``. ms-swift has no option for a rule's
text, so the environment has it: ``BANDPO_METHOD`` holds the rule, or a method that is PPO's surrogate on other bounds.
Importing this module makes ``--rlhf_type grpo`` train with `BandGRPOTrainer`. ms-swift's KL term, rollout correction,
masks and metrics stay as they are; ``--epsilon`` and ``--epsilon_high`` have no effect. Its Megatron trainer is another
class and does not take part.

``BANDPO_RECORD``, if set, is the folder to which the tokens of every loss are written, see `bandpo.Recorder`.

Anchor: the trainer's own log-probabilities at generation time. With one update per batch ms-swift has none, every ratio
is 1, and no clip does anything.

Overrides one private method of ms-swift; written for 4.6.0.
"""

from __future__ import annotations

import os
from typing import Any

from swift.rlhf_trainers import GRPOTrainer
from swift.trainers.trainer_factory import TrainerFactory

from bandpo.errors import InvalidValue
from bandpo.integrations._adapt import epsilons, read_rule, record
from bandpo.loss import TRL_LOSS_TYPES
from bandpo.methods import Method

CLAMPED = ("grpo", "bnpo", "dr_grpo", "dapo", "fipo")
"""The ``loss_type``s that clamp the ratio on both sides."""


class BandGRPOTrainer(GRPOTrainer):
    """ms-swift's `GRPOTrainer` with the clip rule of ``BANDPO_METHOD``; by default Band-KL.

    Raises:
        ValueError: a setting cannot be read; a method that is more than bounds; a ``loss_type`` that does not clamp,
            or ratios of sequences. On a batch: a counted old log-probability is NaN or above 0.
    """

    _training_on: Any = None
    """The batch of the loss that is being computed, until its log-probabilities are."""

    def _prepare_algorithm_params(self) -> None:
        super()._prepare_algorithm_params()
        average = TRL_LOSS_TYPES.get(self.loss_type, "token-mean")
        self._rule = read_rule("BANDPO_", os.environ.get("BANDPO_METHOD"), average=average)
        if self.loss_type not in CLAMPED:
            raise InvalidValue(
                f"--loss_type {self.loss_type} does not clamp the ratio; use {', '.join(CLAMPED)}"
            )
        if self.importance_sampling_level != "token":
            raise InvalidValue(
                f"--importance_sampling_level {self.importance_sampling_level} makes one ratio of a sequence, but the "
                "bounds are per token; use token"
            )

    def _compute_loss_and_metrics(self, model: Any, model_inputs: dict[str, Any], grpo_batch: Any) -> Any:
        self._training_on = grpo_batch if self.model.training else None
        if grpo_batch.old_per_token_logps is None:
            return super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)
        stock, old = (self.epsilon_low, self.epsilon_high), grpo_batch.old_per_token_logps
        _, self.epsilon_low, self.epsilon_high = epsilons(self._rule, old, grpo_batch.completion_mask)
        try:
            return super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)
        finally:
            self.epsilon_low, self.epsilon_high = stock

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        logp, entropy = super()._get_per_token_logps_and_entropies(*arguments, **named)
        batch, self._training_on = self._training_on, None
        if batch is not None:
            old = logp if batch.old_per_token_logps is None else batch.old_per_token_logps
            tensors = (logp, old, batch.advantages, batch.completion_mask)
            engine, step = batch.rollout_per_token_logps, self.state.global_step
            folder, method = os.environ.get("BANDPO_RECORD"), Method(self._rule)
            record(folder, "ms-swift", method, *tensors, logp_rollout=engine, entropy=entropy, step=step)
        return logp, entropy


TrainerFactory.TRAINER_MAPPING["grpo"] = "bandpo_ms_swift.BandGRPOTrainer"
