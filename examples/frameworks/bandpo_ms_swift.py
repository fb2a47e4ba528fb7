"""Clip rules in ms-swift's GRPO: its own loss, with the bounds of the batch in place of ``epsilon``.

    BANDPO_METHOD="Band(KL(), 0.05)" swift rlhf --rlhf_type grpo --external_plugins band_plugin.py ...

where ``band_plugin.py`` is one line, ``import bandpo_ms_swift``. ms-swift has no option for a rule's
text, so the environment has it: ``BANDPO_METHOD`` holds the rule, or a method that is PPO's surrogate on other bounds.
Importing this module makes ``--rlhf_type grpo`` train with `BandGRPOTrainer`. ms-swift's KL term, rollout correction,
masks and metrics stay as they are; settings under which it would compute another loss are refused. Its Megatron trainer
is another class and does not take part.

``BANDPO_RECORD``, if set, is the folder to which the tokens of every loss are written, see `bandpo.Recorder`, with the
cuts and, but for ``--padding_free true``, ids and prompts. ms-swift's batch has no rewards.

Anchor: the trainer's own log-probabilities at generation time. With one update per batch ms-swift has none, every ratio
is 1, and no clip does anything. A batch does not say with which weights it was sampled.

Overrides private methods of ms-swift; written for 4.6.0.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from swift.rlhf_trainers import GRPOTrainer
from swift.trainers.trainer_factory import TrainerFactory

from bandpo import Method
from bandpo.integrations import check_settings, epsilons, read_bounds, record
from bandpo.loss import TRL_LOSS_TYPES
from bandpo.objectives import RatioCap


class BandGRPOTrainer(GRPOTrainer):
    """ms-swift's `GRPOTrainer` with the clip rule of ``BANDPO_METHOD``; by default Band-KL.

    Raises:
        ValueError: ``BANDPO_METHOD`` cannot be read, it is more than bounds, or a setting makes ms-swift's loss another
            one. On a batch: a counted old log-probability is NaN or above 0.
    """

    _recorded_batch: Any = None
    """The batch of the loss that is being computed, until its log-probabilities are."""

    def _prepare_algorithm_params(self) -> None:
        super()._prepare_algorithm_params()
        average = TRL_LOSS_TYPES.get(self.loss_type, "token-mean")
        method = read_bounds("BANDPO_", os.environ.get("BANDPO_METHOD"), aggregation=average)
        check_settings("ms-swift", self.args, method)
        if self.args.delta is not None:
            method = Method(method.clip, RatioCap(self.args.delta))
        self._method = method

    def _compute_loss_and_metrics(self, model: Any, model_inputs: dict[str, Any], grpo_batch: Any) -> Any:
        self._recorded_batch = grpo_batch if self.model.training else None
        logp_old = grpo_batch.old_per_token_logps
        if logp_old is None:
            return super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)
        stock = self.epsilon_low, self.epsilon_high
        bounds = epsilons(self._method.clip, logp_old, grpo_batch.completion_mask)
        grpo_batch = replace(grpo_batch, old_per_token_logps=bounds.logp_old)
        self.epsilon_low, self.epsilon_high = bounds.low, bounds.high
        try:
            return super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)
        finally:
            self.epsilon_low, self.epsilon_high = stock

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        logp, entropy = super()._get_per_token_logps_and_entropies(*arguments, **named)
        batch, self._recorded_batch = self._recorded_batch, None
        if batch is not None:
            record(
                os.environ.get("BANDPO_RECORD"),
                "ms-swift",
                self._method,
                logp,
                logp if batch.old_per_token_logps is None else batch.old_per_token_logps,
                batch.advantages,
                batch.completion_mask,
                logp_rollout=batch.rollout_per_token_logps,
                entropy=entropy,
                step=self.state.global_step,
                sampling={name: getattr(self.args, name, None) for name in ("temperature", "top_p", "top_k")},
                truncated=batch.truncated_mask,
                **self._words(arguments, named, logp, batch.completion_mask),
                **self._place(),
            )
        return logp, entropy

    @staticmethod
    def _words(arguments: Any, named: Any, logp: Any, mask: Any) -> dict[str, Any]:
        """Return the ids of the answers and of their prompts, where sequences are rows of the model's inputs."""
        inputs = named.get("model_inputs", arguments[1] if len(arguments) > 1 else None) or {}
        ids, seen = inputs.get("input_ids"), inputs.get("attention_mask")
        if ids is None or seen is None or len(ids) != len(logp) or ids.shape[1] < logp.shape[1]:
            return {}
        before = ids.shape[1] - logp.shape[1]
        ends = (before + mask.int().argmax(1)).tolist()
        rows = zip(ids, seen, ends, strict=True)
        return {
            "tokens": ids[:, before:],
            "prompts": [row[:end][attended[:end] > 0] for row, attended, end in rows],
        }

    def _place(self) -> dict[str, int]:
        """Return the number of the generated batch, and of the updates on it; nothing where they cannot be told."""
        if not hasattr(self, "_step") or not hasattr(self.args, "steps_per_generation"):
            return {}
        losses = self.args.steps_per_generation * self.num_iterations
        generation, loss = divmod(self._step, losses)
        return {"generation": generation, "update": loss // self.args.gradient_accumulation_steps}


TrainerFactory.TRAINER_MAPPING["grpo"] = "bandpo_ms_swift.BandGRPOTrainer"
