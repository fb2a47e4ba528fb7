"""Clip rules in ms-swift's GRPO: its own loss, with bounds per token in place of ``epsilon``.

    BANDPO_METHOD="Band(KL(), 0.05)" swift rlhf --rlhf_type grpo --external_plugins band_plugin.py ...

where ``band_plugin.py`` has one line, ``import bandpo_ms_swift``. Importing this module makes ``--rlhf_type grpo``
train with `BandGRPOTrainer`. ms-swift's Megatron trainer is another class, and is unchanged. ms-swift has no options
for these settings, so they are environment variables:

- ``BANDPO_METHOD``: a clip rule, or a method that is PPO's surrogate with other bounds.
- ``BANDPO_RECORD``: a folder to which the tokens of every loss are written, see `bandpo.audit.Recorder`, with
  truncation flags and, without ``--padding_free true``, token ids and prompts. ms-swift's batch has no rewards, and no
  version of the weights that sampled it.
- ``BANDPO_ACCEPT_IDLE_CLIP``: 1 to accept one update for each batch, as the baseline of a sweep.

ms-swift's KL term, rollout correction, masks and metrics are unchanged. Settings under which it would compute another
loss raise an error.

The old log-probabilities are the trainer's own before the first update on a batch, or with
``Method(…, old_policy='rollout')`` the sampler's, as asynchronous generation (``--async_generate``) needs. With the
trainer's own and one update for each batch every ratio is 1, and no clip acts: this raises an error when the trainer is
built.

Overrides private methods of ms-swift; written for 4.6.0.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

from swift.rlhf_trainers import GRPOTrainer
from swift.trainers.trainer_factory import TrainerFactory

from bandpo import Method
from bandpo.core.aggregation import TRL_LOSS_TYPES
from bandpo.core.errors import InvalidValue
from bandpo.core.objectives import RatioCap
from bandpo.integrations import check_anchor, check_settings, epsilons, read_bounds, record


class BandGRPOTrainer(GRPOTrainer):
    """ms-swift's `GRPOTrainer` with the clip rule of ``BANDPO_METHOD``; by default Band-KL.

    Raises:
        ValueError: ``BANDPO_METHOD`` cannot be read, it is not PPO's surrogate, every ratio would be 1, or a setting of
            ms-swift would change the loss. On a batch: an old log-probability is NaN or above 0.
    """

    _batch_to_record: Any = None
    """The batch of the loss in progress, until its log-probabilities are computed and it is recorded."""

    def _prepare_algorithm_params(self) -> None:
        super()._prepare_algorithm_params()
        aggregation = TRL_LOSS_TYPES.get(self.loss_type, "token-mean")
        method = read_bounds("BANDPO_", os.environ.get("BANDPO_METHOD"), aggregation=aggregation)
        check_settings("ms-swift", self.args, method)
        if self.args.delta is not None:
            method = Method(method.clip, RatioCap(self.args.delta), old_policy=method.old_policy)
        self._method = method
        losses = self.args.steps_per_generation * self.args.num_iterations
        lines = check_anchor(
            method,
            math.inf if self.args.gradient_accumulation_steps % losses else 1,
            sampler=method.old_policy == "rollout",
            setting=f"BANDPO_METHOD={method!r}",
            asynchronous=self.args.async_generate,
            to_sampler="write the method as Method(..., old_policy='rollout')",
            more_updates="use --num_iterations 2, or --steps_per_generation above --gradient_accumulation_steps",
            accepted=os.environ.get("BANDPO_ACCEPT_IDLE_CLIP") == "1",
            accept="BANDPO_ACCEPT_IDLE_CLIP=1",
        )
        print(*[f"bandpo: {line}" for line in lines], sep="\n", flush=True)

    def _compute_loss_and_metrics(self, model: Any, model_inputs: dict[str, Any], grpo_batch: Any) -> Any:
        self._batch_to_record = grpo_batch if self.model.training else None
        logp_old = self._logp_old(grpo_batch)
        if logp_old is None:
            return super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)

        # The loss reads its epsilons from the trainer, and accepts tensors of the shape of the ratio.
        configured = self.epsilon_low, self.epsilon_high
        bounds = epsilons(self._method.clip, logp_old, grpo_batch.completion_mask)
        grpo_batch = replace(grpo_batch, old_per_token_logps=bounds.logp_old)
        self.epsilon_low, self.epsilon_high = bounds.low, bounds.high
        try:
            return super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)
        finally:
            self.epsilon_low, self.epsilon_high = configured

    def _logp_old(self, batch: Any) -> Any:
        """Return the log-probabilities that the ratio refers to; None if ms-swift has not computed them."""
        if self._method.old_policy != "rollout":
            return batch.old_per_token_logps
        if batch.rollout_per_token_logps is None:
            raise InvalidValue(
                f"BANDPO_METHOD={self._method!r} refers to the sampler's log-probabilities, and the batch has none: "
                "use --use_vllm true"
            )
        return batch.rollout_per_token_logps

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        logp, entropy = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        batch = self._batch_to_record
        self._batch_to_record = None
        if batch is not None:
            model_inputs = kwargs.get("model_inputs", args[1] if len(args) > 1 else None) or {}
            record(
                os.environ.get("BANDPO_RECORD"),
                "ms-swift",
                self._method,
                logp,
                logp if self._logp_old(batch) is None else self._logp_old(batch),
                batch.advantages,
                batch.completion_mask,
                logp_rollout=batch.rollout_per_token_logps,
                old_is_rollout=self._method.old_policy == "rollout",
                entropy=entropy,
                step=self.state.global_step,
                sampling={name: getattr(self.args, name, None) for name in ("temperature", "top_p", "top_k")},
                truncated=batch.truncated_mask,
                **self._token_ids(model_inputs, logp, batch.completion_mask),
                **self._progress(),
            )
        return logp, entropy

    @staticmethod
    def _token_ids(model_inputs: Any, logp: Any, mask: Any) -> dict[str, Any]:
        """Return the token ids of completions and prompts; empty for packed inputs.

        Args:
            model_inputs: The inputs of the model, with prompts and completions in each row.
            logp: The log-probabilities of the completions; shape (sequences, tokens).
            mask: 1 for tokens that count; same shape.
        """
        ids = model_inputs.get("input_ids")
        attention_mask = model_inputs.get("attention_mask")
        if ids is None or attention_mask is None or len(ids) != len(logp) or ids.shape[1] < logp.shape[1]:
            return {}
        prompt_length = ids.shape[1] - logp.shape[1]
        # A prompt ends before the first token that counts, and is padded on the left.
        ends = (prompt_length + mask.int().argmax(1)).tolist()
        prompts = []
        for row, attended, end in zip(ids, attention_mask, ends, strict=True):
            prompts.append(row[:end][attended[:end] > 0])
        return {"tokens": ids[:, prompt_length:], "prompts": prompts}

    def _progress(self) -> dict[str, int]:
        """Return the number of the generated batch, and of the updates on it so far; empty if they are not known."""
        if not hasattr(self, "_step") or not hasattr(self.args, "steps_per_generation"):
            return {}
        losses = self.args.steps_per_generation * self.num_iterations
        generation, loss = divmod(self._step, losses)
        return {"generation": generation, "update": loss // self.args.gradient_accumulation_steps}


TrainerFactory.TRAINER_MAPPING["grpo"] = "bandpo_ms_swift.BandGRPOTrainer"
