"""Clip rules in ROLL's RLVR pipeline: its own loss, with the bounds of the batch in place of ``pg_clip_low`` and
``pg_clip_high``.

    actor_train:
      worker_cls: bandpo_roll.BandActorWorker
      system_envs: {BANDPO_METHOD: "Band(KL(), 0.05)"}
    use_pg_clip_range: true

``BANDPO_METHOD`` holds a clip rule, or a method that is PPO's surrogate on other bounds, with or without a dual clip.
ROLL's KL term, importance weights, sample weights, average and metrics stay as they are; settings under which it would
compute another loss are refused at the first loss.

``BANDPO_RECORD`` in the same place, if set, is the folder to which the tokens of every loss are written, see
`bandpo.Recorder`, with the prompts and the scores. ROLL's batch says neither which answers were cut off nor which
update on it a loss is of.

Anchor: what ``get_old_log_probs_with_cache`` returns, the trainer's own log-probabilities.

Written for ROLL 0.3.0 (commit 8eb27cc).
"""

from __future__ import annotations

import os
from typing import Any

from roll.pipeline.rlvr.actor_worker import ActorWorker

from bandpo import Method
from bandpo.integrations import check_settings, dual_clip_of, epsilons, read_bounds, record


class BandActorWorker(ActorWorker):
    """ROLL's `ActorWorker` with the clip rule of ``BANDPO_METHOD``; by default Band-KL.

    Raises:
        ValueError: at the first loss, if ``BANDPO_METHOD`` cannot be read, it is more than bounds, or a setting makes
            ROLL's loss another one. On a batch: a counted old log-probability is NaN or above 0.
    """

    _method: Method | None = None
    """The method, once the settings are checked."""

    def loss_func(self, data: Any, output_tensor: Any) -> Any:
        if self._method is None:
            config = self.pipeline_config
            text = os.environ.get("BANDPO_METHOD")
            self._method = read_bounds("BANDPO_", text, aggregation=config.loss_agg_mode, dual_clip=True)
            check_settings("ROLL", config, self._method)
            dual_clip = dual_clip_of(self._method)
            if dual_clip is not None:
                # ROLL's dual clip is at 1 + 2·pg_clip.
                config.dual_clip_loss = True
                config.pg_clip = (dual_clip - 1) / 2
        return super().loss_func(data, output_tensor)

    def get_old_log_probs_with_cache(self, data: Any, log_probs: Any) -> Any:
        assert self._method is not None
        config = self.pipeline_config
        logp_old = super().get_old_log_probs_with_cache(data, log_probs)
        mask = data.batch["response_mask"][:, 1:].long()
        bounds = epsilons(self._method.clip, logp_old, mask)
        config.pg_clip_low, config.pg_clip_high = bounds.low, bounds.high
        self._record(data, log_probs, logp_old)
        return bounds.logp_old

    def _record(self, data: Any, logp: Any, logp_old: Any) -> None:
        """Write a micro-batch to the record."""
        folder = os.environ.get("BANDPO_RECORD")
        if not folder:
            return
        assert self._method is not None
        batch, step = data.batch, data.meta_info.get("global_step")
        mask = batch.get("final_response_mask", batch["response_mask"][:, 1:])
        engine = batch.get("infer_logprobs")
        columns: dict[str, Any] = {"step": step, "generation": step, "reward": batch.get("scores")}
        if batch["input_ids"] is not None:
            seen = batch.get("attention_mask", batch["response_mask"] >= 0)
            columns["tokens"] = batch["input_ids"][:, 1:]
            columns["prompts"] = [
                ids[:end][attended[:end] > 0]
                for ids, attended, end in zip(
                    batch["input_ids"], seen, batch["response_mask"].int().argmax(1).tolist(), strict=True
                )
            ]
        record(
            folder,
            "roll",
            self._method,
            logp,
            logp_old,
            batch["advantages"],
            mask,
            logp_rollout=engine if engine is not None and len(engine) else None,
            sampling=self._sampling(),
            **columns,
        )

    def _sampling(self) -> dict[str, Any]:
        """Return the engine's settings."""
        infer = getattr(self.pipeline_config, "actor_infer", None)
        settings = getattr(infer, "generating_args", None)
        return {name: getattr(settings, name, None) for name in ("temperature", "top_p", "top_k")}
