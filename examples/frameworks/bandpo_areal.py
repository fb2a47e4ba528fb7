"""Clip rules in AReaL: its own PPO loss, with bounds per token in place of ``eps_clip``.

In a subclass of `FSDPPPOActor`, set ``self.actor = BandPPOActor(config, self)`` at the end of ``__init__``, and return
the subclass from `PPOTrainer._create_train_engine`. Environment variables of the workers:

- ``BANDPO_METHOD``: a clip rule, or a method that is PPO's surrogate with other bounds, with or without a dual clip.
- ``BANDPO_RECORD``: a folder to which the tokens of every loss are written, see `bandpo.audit.Recorder`, with the
  version of the weights that sampled each token, the prompts and the rewards. AReaL's batch has no flag for truncated
  completions.
- ``BANDPO_ACCEPT_IDLE_CLIP``: 1 to accept a run in which every ratio is 1, as the baseline of a sweep.

AReaL's rejection sampling, M2PO mask, distillation, loss aggregation and metrics are unchanged. Settings under which it
would compute another loss raise an error.

The old log-probabilities are the sampler's. With ``use_decoupled_loss`` or ``recompute_logprob`` they are
``prox_logp``, the trainer's own before the first update on a batch. With these and ``ppo_n_minibatches: 1`` every ratio
is 1, and no clip acts: this raises an error.

Written for AReaL 1.0.4.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from areal.trainer.ppo.actor import PPOActor

from bandpo import Method, Packed
from bandpo.core.objectives import DualClip
from bandpo.integrations import check_anchor, check_settings, dual_clip_of, epsilons, read_bounds, record

TO_SAMPLER = "set actor.use_decoupled_loss=false and actor.recompute_logprob=false"
"""The settings that make the ratio refer to the sampler's log-probabilities."""
REWARD = "bandpo_reward"
"""The key, in a batch, of the reward of each token's sequence."""


class BandPPOActor(PPOActor):
    """AReaL's `PPOActor` with the clip rule of ``BANDPO_METHOD``; by default Band-KL.

    Raises:
        ValueError: ``BANDPO_METHOD`` cannot be read, it is not PPO's surrogate, or a setting of AReaL would change the
            loss. On a batch: an old log-probability is NaN or above 0.
    """

    def __init__(self, config: Any, engine: Any):
        text = os.environ.get("BANDPO_METHOD")
        refers_to_trainer = config.use_decoupled_loss or config.recompute_logprob
        method = read_bounds(
            "BANDPO_",
            text,
            aggregation="token-mean",
            dual_clip=True,
            to_sampler=TO_SAMPLER if refers_to_trainer else "",
        )
        check_settings("AReaL", config, method)
        lines = check_anchor(
            method,
            config.ppo_n_minibatches,
            sampler=not refers_to_trainer,
            setting=f"actor.use_decoupled_loss={config.use_decoupled_loss}, "
            f"actor.recompute_logprob={config.recompute_logprob}",
            # AReaL's rollout.max_head_offpolicyness is not among these settings.
            asynchronous=None,
            to_sampler=TO_SAMPLER,
            more_updates="set actor.ppo_n_minibatches above 1",
            accepted=os.environ.get("BANDPO_ACCEPT_IDLE_CLIP") == "1",
            accept="BANDPO_ACCEPT_IDLE_CLIP=1",
        )
        print(*[f"bandpo: {line}" for line in lines], sep="\n", flush=True)
        if method.only_rule and config.c_clip is not None:
            method = Method(method.clip, DualClip(config.c_clip))
        super().__init__(config, BoundedEngine(engine, method, config))

    def _ppo_update(self, data: dict[str, Any]) -> Any:
        # AReaL removes the rewards from the batch before it splits it. A copy with one value per token is split too.
        data[REWARD] = data["rewards"].float()[:, None].expand_as(data["loss_mask"]).contiguous()
        self.engine.updates = 0
        return super()._ppo_update(data)


class BoundedEngine:
    """A wrapper of an engine that passes bounds per token to its loss as ``eps_clip``.

    Args:
        engine: AReaL's engine, to which all other attributes are delegated.
        method: The method of the run.
        config: AReaL's ``actor`` settings.
    """

    def __init__(self, engine: Any, method: Method, config: Any):
        self.engine = engine
        self.method = method
        # Without the trainer's own old log-probabilities, AReaL computes ratios from the sampler's.
        self.old_is_rollout = not config.should_compute_prox_logp()
        # Otherwise a batch has both, under this setting.
        self.has_rollout_logp = config.use_decoupled_loss
        self.temperature = config.temperature
        # The number of optimiser steps on the batch so far.
        self.updates = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train_batch(self, input_: Any, loss_fn: Any, **options: Any) -> Any:
        """Train on a batch with AReaL's loss, a partial of ``grpo_loss_fn``, under the method's bounds."""

        def loss_with_bounds(logprobs: Any, entropy: Any, input_data: dict[str, Any], **kwargs: Any) -> Any:
            old_key = "logprobs" if input_data.get("prox_logp") is None else "prox_logp"
            bounds = epsilons(self.method.clip, input_data[old_key], input_data["loss_mask"])
            settings = {
                **loss_fn.keywords,
                "eps_clip": bounds.low,
                "eps_clip_higher": bounds.high,
                "c_clip": dual_clip_of(self.method),
            }
            self._record(logprobs, entropy, input_data, bounds.logp_old, settings["current_version"])
            input_data = {**input_data, old_key: bounds.logp_old}
            return loss_fn.func(logprobs, entropy, input_data, **settings, **kwargs)

        result = self.engine.train_batch(input_, loss_fn=loss_with_bounds, **options)
        self.updates += 1
        return result

    def _record(self, logp: Any, entropy: Any, data: dict[str, Any], logp_old: Any, step: int | None) -> None:
        """Write a micro-batch to the record."""
        folder = os.environ.get("BANDPO_RECORD")
        if not folder:
            return
        columns: dict[str, Any] = {"entropy": entropy, "generation": step, "update": self.updates}
        if self.has_rollout_logp:
            columns["logp_rollout"] = data["logprobs"]
        # Values of the loss at a position are those of the next token. Ids and versions are not shifted yet.
        if "versions" in data:
            columns["version"] = data["versions"].roll(-1, -1)
        if "cu_seqlens" in data:  # the batch is packed
            columns["layout"] = Packed(cu_seqlens=data["cu_seqlens"])
        if "input_ids" in data:
            columns["tokens"] = data["input_ids"].roll(-1, -1)
            columns["prompts"] = []
            for ids, mask in zip(_sequences(data, "input_ids"), _sequences(data, "loss_mask"), strict=True):
                first_counted = int(mask.int().argmax())
                columns["prompts"].append(ids[: first_counted + 1])
        if REWARD in data:
            columns["reward"] = torch.stack([rewards[0] for rewards in _sequences(data, REWARD)])
        record(
            folder,
            "areal",
            self.method,
            logp,
            logp_old,
            data["advantages"],
            data["loss_mask"],
            old_is_rollout=self.old_is_rollout,
            sampling={"temperature": self.temperature},
            step=step,
            **columns,
        )


def _sequences(data: dict[str, Any], name: str) -> Any:
    """Return a column of a micro-batch, packed or padded, as one tensor per sequence."""
    if "cu_seqlens" in data:
        return data[name].split(data["cu_seqlens"].diff().tolist())
    return data[name].unbind(0)
