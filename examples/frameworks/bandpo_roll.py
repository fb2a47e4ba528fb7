"""Clip rules in ROLL's RLVR pipeline: its own loss, with bounds per token in place of ``pg_clip_low`` and ``_high``.

    actor_train:
      worker_cls: bandpo_roll.BandActorWorker
      system_envs: {BANDPO_METHOD: "Band(KL(), 0.05)"}
    use_pg_clip_range: true

Environment variables in ``system_envs``:

- ``BANDPO_METHOD``: a clip rule, or a method that is PPO's surrogate with other bounds, with or without a dual clip.
- ``BANDPO_RECORD``: a folder to which the tokens of every loss are written, see `bandpo.audit.Recorder`, with the
  prompts and the scores. ROLL's batch has no truncation flags, and no number of the update.
- ``BANDPO_ACCEPT_IDLE_CLIP``: 1 to accept a run in which every ratio is 1, as the baseline of a sweep.

ROLL's KL term, importance weights, sample weights, loss aggregation and metrics are unchanged. Settings under which it
would compute another loss raise an error at the first loss.

The old log-probabilities are those of ``get_old_log_probs_with_cache``, the trainer's own before the first update on a
batch, or with ``Method(…, old_policy='rollout')`` the sampler's, ``infer_logprobs``, as an ``async_generation_ratio``
above 0 needs. With the trainer's own and one update for each batch every ratio is 1, and no clip acts: this raises an
error at the first loss.

Written for ROLL 0.3.0 (commit 8eb27cc).
"""

from __future__ import annotations

import os
from typing import Any

from roll.pipeline.rlvr.actor_worker import ActorWorker

from bandpo import Method
from bandpo.core.errors import InvalidValue
from bandpo.integrations import check_anchor, check_settings, dual_clip_of, epsilons, read_bounds, record


class BandActorWorker(ActorWorker):
    """ROLL's `ActorWorker` with the clip rule of ``BANDPO_METHOD``; by default Band-KL.

    Raises:
        ValueError: at the first loss, if ``BANDPO_METHOD`` cannot be read, it is not PPO's surrogate, or a setting of
            ROLL would change the loss. On a batch: an old log-probability is NaN or above 0.
    """

    _method: Method | None = None
    """The method, from the first loss on."""

    def loss_func(self, data: Any, output_tensor: Any) -> Any:
        if self._method is None:
            config = self.pipeline_config
            text = os.environ.get("BANDPO_METHOD")
            self._method = read_bounds("BANDPO_", text, aggregation=config.loss_agg_mode, dual_clip=True)
            check_settings("ROLL", config, self._method)
            self._check_anchor()
            dual_clip = dual_clip_of(self._method)
            if dual_clip is not None:
                # The bound of ROLL's dual clip is 1 + 2·pg_clip.
                config.dual_clip_loss = True
                config.pg_clip = (dual_clip - 1) / 2
        return super().loss_func(data, output_tensor)

    def _check_anchor(self) -> None:
        """Check that ratios can differ from 1, and print the log-probabilities that they refer to."""
        assert self._method is not None
        config = self.pipeline_config
        training = self.worker_config.training_args
        responses = config.rollout_batch_size * config.actor_infer.generating_args.num_return_sequences
        mini_batch = training.per_device_train_batch_size * training.gradient_accumulation_steps
        lines = check_anchor(
            self._method,
            responses // self.rank_info.dp_size // mini_batch * config.ppo_epochs,
            sampler=self._method.old_policy == "rollout",
            setting=f"BANDPO_METHOD={self._method!r}",
            asynchronous=config.async_generation_ratio > 0,
            to_sampler="write the method as Method(..., old_policy='rollout')",
            more_updates="set ppo_epochs: 2, or fewer gradient_accumulation_steps of actor_train",
            accepted=os.environ.get("BANDPO_ACCEPT_IDLE_CLIP") == "1",
            accept="BANDPO_ACCEPT_IDLE_CLIP=1",
        )
        print(*[f"bandpo: {line}" for line in lines], sep="\n", flush=True)

    def get_old_log_probs_with_cache(self, data: Any, log_probs: Any) -> Any:
        assert self._method is not None
        config = self.pipeline_config
        if self._method.old_policy == "rollout":
            logp_old = data.batch.get("infer_logprobs")
            if logp_old is None or not len(logp_old):
                raise InvalidValue(
                    f"BANDPO_METHOD={self._method!r} refers to the sampler's log-probabilities, and the batch has "
                    "none: set actor_infer.generating_args.logprobs: 1"
                )
        else:
            logp_old = super().get_old_log_probs_with_cache(data, log_probs)
        mask = data.batch["response_mask"][:, 1:].long()
        bounds = epsilons(self._method.clip, logp_old, mask)
        # The loss reads these from the config after this call, and accepts tensors.
        config.pg_clip_low = bounds.low
        config.pg_clip_high = bounds.high
        self._record(data, log_probs, logp_old)
        return bounds.logp_old

    def _record(self, data: Any, logp: Any, logp_old: Any) -> None:
        """Write a micro-batch to the record."""
        folder = os.environ.get("BANDPO_RECORD")
        if not folder:
            return
        assert self._method is not None
        batch = data.batch
        step = data.meta_info.get("global_step")
        columns: dict[str, Any] = {"step": step, "generation": step, "reward": batch.get("scores")}
        if batch["input_ids"] is not None:
            columns["tokens"] = batch["input_ids"][:, 1:]
            columns["prompts"] = _prompts(batch)
        logp_rollout = batch.get("infer_logprobs")
        if logp_rollout is not None and not len(logp_rollout):
            logp_rollout = None
        record(
            folder,
            "roll",
            self._method,
            logp,
            logp_old,
            batch["advantages"],
            batch.get("final_response_mask", batch["response_mask"][:, 1:]),
            logp_rollout=logp_rollout,
            old_is_rollout=self._method.old_policy == "rollout",
            sampling=self._sampling(),
            **columns,
        )

    def _sampling(self) -> dict[str, Any]:
        """Return the engine's sampling settings."""
        actor_infer = getattr(self.pipeline_config, "actor_infer", None)
        settings = getattr(actor_infer, "generating_args", None)
        return {name: getattr(settings, name, None) for name in ("temperature", "top_p", "top_k")}


def _prompts(batch: Any) -> list[Any]:
    """Return the token ids of each sequence's prompt: the tokens before the first of the response, without padding."""
    attention_mask = batch.get("attention_mask", batch["response_mask"] >= 0)
    ends = batch["response_mask"].int().argmax(1).tolist()
    prompts = []
    for ids, attended, end in zip(batch["input_ids"], attention_mask, ends, strict=True):
        prompts.append(ids[:end][attended[:end] > 0])
    return prompts
