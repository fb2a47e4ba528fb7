"""Clip rules in AReaL: its own PPO loss, with the bounds of the batch in place of ``eps_clip``.

In a subclass of `FSDPPPOActor`, set ``self.actor = BandPPOActor(config, self)`` in ``__init__`` after that of the
parent, and return the subclass from `PPOTrainer._create_train_engine`. ``BANDPO_METHOD`` in the environment of the
workers holds a clip rule, or a method that is PPO's surrogate on other bounds, with or without a dual clip.
``BANDPO_RECORD``, if set, is the folder to which the tokens of every loss are written, see `bandpo.Recorder`, with the
version of the weights that sampled each token, the prompts and the rewards. AReaL's batch does not say which answers
were cut off.

AReaL's rejection sampling, M2PO mask, distillation, average and metrics stay as they are; settings under which it would
compute another loss are refused.

Anchor: ``prox_logp``, which are the trainer's own log-probabilities, or the sampler's where AReaL computes none.

Written for AReaL 1.0.4.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from areal.trainer.ppo.actor import PPOActor

from bandpo import Method
from bandpo.integrations import check_settings, dual_clip_of, epsilons, read_bounds, record
from bandpo.objectives import DualClip

REWARD = "bandpo_reward"
"""The column of a batch that has each token's sequence's reward."""


class BandPPOActor(PPOActor):
    """AReaL's `PPOActor` with the clip rule of ``BANDPO_METHOD``; by default Band-KL.

    Raises:
        ValueError: ``BANDPO_METHOD`` cannot be read, it is more than bounds, or a setting makes AReaL's loss another
            one. On a batch: a counted old log-probability is NaN or above 0.
    """

    def __init__(self, config: Any, engine: Any):
        text = os.environ.get("BANDPO_METHOD")
        method = read_bounds("BANDPO_", text, aggregation="token-mean", dual_clip=True)
        check_settings("AReaL", config, method)
        if method.only_rule and config.c_clip is not None:
            method = Method(method.clip, DualClip(config.c_clip))
        super().__init__(config, BoundedEngine(engine, method, config))

    def _ppo_update(self, data: dict[str, Any]) -> Any:
        # AReaL takes the rewards out of the batch before it splits it. A column of tokens is split with the others.
        data[REWARD] = data["rewards"].float()[:, None].expand_as(data["loss_mask"]).contiguous()
        self.engine.updates = 0
        return super()._ppo_update(data)


class BoundedEngine:
    """An engine whose loss gets the bounds of its batch for ``eps_clip``; everything else is the engine's own.

    Args:
        engine: AReaL's.
        method: The run's.
        config: AReaL's ``actor`` settings.
    """

    def __init__(self, engine: Any, method: Method, config: Any):
        self.engine = engine
        self.method = method
        # Without a forward pass of the trainer's before the update, the ratio refers to the sampler.
        self.sampler = not config.should_compute_prox_logp()
        # With such a pass, the sampler's log-probabilities are kept beside the trainer's under this setting alone.
        self.keeps_sampler = config.use_decoupled_loss
        self.temperature = config.temperature
        # Optimiser steps on the batch so far.
        self.updates = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train_batch(self, input_: Any, loss_fn: Any, **options: Any) -> Any:
        """Train on a batch with AReaL's loss, a partial of ``grpo_loss_fn``, under the method's bounds."""

        def bounded(logprobs: Any, entropy: Any, input_data: dict[str, Any], **more: Any) -> Any:
            anchor = "logprobs" if input_data.get("prox_logp") is None else "prox_logp"
            bounds = epsilons(self.method.clip, input_data[anchor], input_data["loss_mask"])
            settings = {
                **loss_fn.keywords,
                "eps_clip": bounds.low,
                "eps_clip_higher": bounds.high,
                "c_clip": dual_clip_of(self.method),
            }
            self._record(logprobs, entropy, input_data, bounds.logp_old, settings["current_version"])
            return loss_fn.func(
                logprobs, entropy, {**input_data, anchor: bounds.logp_old}, **settings, **more
            )

        result = self.engine.train_batch(input_, loss_fn=bounded, **options)
        self.updates += 1
        return result

    def _record(self, logp: Any, entropy: Any, data: dict[str, Any], logp_old: Any, step: int | None) -> None:
        """Write a micro-batch to the record, with the version of the weights that sampled each token."""
        folder = os.environ.get("BANDPO_RECORD")
        if not folder:
            return
        columns: dict[str, Any] = {"entropy": entropy, "generation": step, "update": self.updates}
        if self.keeps_sampler:
            columns["logp_rollout"] = data["logprobs"]
        if "versions" in data:
            # A place of the loss belongs to the token after it, and the versions are not shifted.
            columns["version"] = data["versions"].roll(-1, -1)
        if "cu_seqlens" in data:
            # A packed batch, in which each sequence begins at one of these places.
            columns["cu_seqlens"] = data["cu_seqlens"]
        if "input_ids" in data:
            # A place of the loss belongs to the token after it.
            columns["tokens"] = data["input_ids"].roll(-1, -1)
            pairs = zip(_by_sequence(data, "input_ids"), _by_sequence(data, "loss_mask"), strict=True)
            columns["prompts"] = [ids[: int(counts.int().argmax()) + 1] for ids, counts in pairs]
        if REWARD in data:
            columns["reward"] = torch.stack([rewards[0] for rewards in _by_sequence(data, REWARD)])
        record(
            folder,
            "areal",
            self.method,
            logp,
            logp_old,
            data["advantages"],
            data["loss_mask"],
            old_is_rollout=self.sampler,
            sampling={"temperature": self.temperature},
            step=step,
            **columns,
        )


def _by_sequence(data: dict[str, Any], name: str) -> Any:
    """Return a column of a micro-batch, packed or padded, sequence by sequence."""
    if "cu_seqlens" in data:
        return data[name].split(data["cu_seqlens"].diff().tolist())
    return data[name].unbind(0)
