"""Clip rules in OpenRLHF: its own policy loss, with the bounds of the batch in place of ``--actor.eps_clip``.

    ray job submit --runtime-env-json='{"worker_process_setup_hook": "bandpo_openrlhf.patch",
        "env_vars": {"BANDPO_METHOD": "Band(KL(), 0.05)"}}' -- python -m openrlhf.cli.train_ppo_ray ...

OpenRLHF has no option for a loss, so a hook replaces the name by which its workers build theirs. This file must be on
``PYTHONPATH`` of every node. ``BANDPO_METHOD`` holds a clip rule, or a method that is PPO's surrogate on other bounds,
with or without a dual clip. OpenRLHF's correction for the rollout engine, KL term, entropy bonus, average and metrics
stay as they are; settings under which it would compute another loss are refused when a worker starts.

``BANDPO_RECORD``, if set, is the folder to which the tokens of every loss are written, see `bandpo.Recorder`, with the
rewards, prompts and cuts of OpenRLHF's ``Experience``. It does not say with which weights an answer was sampled.

Anchor: the trainer's own log-probabilities.

Written for OpenRLHF 0.11.2.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

from openrlhf.models import PolicyLoss

from bandpo.integrations import check_settings, dual_clip_of, epsilons, read_bounds, record


@dataclass
class Place:
    """What a trainer is at, which its loss is not told."""

    experience: Any = None
    """OpenRLHF's micro-batch; None outside of a training step."""
    generation: int = -1
    """Number of the generated batch in this process, from 0."""
    losses: int = 0
    """Losses on it before this one."""
    losses_per_update: int | None = None
    """Losses of an optimiser step; None where OpenRLHF makes micro-batches of different sizes."""
    sampling: dict[str, float] | None = None
    """The engine's settings."""


PLACE = Place()
"""The place of this process's trainer."""


class BandPolicyLoss(PolicyLoss):
    """OpenRLHF's `PolicyLoss` with the clip rule of ``BANDPO_METHOD``; by default Band-KL.

    Raises:
        ValueError: ``BANDPO_METHOD`` cannot be read, it is more than bounds, or a setting makes OpenRLHF's loss another
            one. On a batch: a counted old log-probability is NaN or above 0.
    """

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        average = "token-mean" if self.token_level_loss else "seq-mean-token-mean"
        method = read_bounds("BANDPO_", os.environ.get("BANDPO_METHOD"), aggregation=average, dual_clip=True)
        checked = {
            "policy_loss_type": self.policy_loss_type,
            "eps_clip_low_high": (self.clip_eps_low, self.clip_eps_high),
            "dual_clip": self.dual_clip,
        }
        check_settings("OpenRLHF", checked, method)
        self._method = method
        self._rule = method.clip
        if not method.only_rule:
            self.dual_clip = dual_clip_of(method)

    def forward(
        self, log_probs: Any, old_log_probs: Any, advantages: Any, action_mask: Any = None, **more: Any
    ) -> Any:
        bounds = epsilons(self._rule, old_log_probs, action_mask)
        self.clip_eps_low, self.clip_eps_high = bounds.low, bounds.high
        self._record(log_probs, old_log_probs, advantages, action_mask, more.get("rollout_log_probs"))
        return super().forward(log_probs, bounds.logp_old, advantages, action_mask, **more)

    def _record(self, logp: Any, logp_old: Any, advantages: Any, mask: Any, rollout: Any) -> None:
        """Write a micro-batch to the record, with what OpenRLHF knows of its answers."""
        folder = os.environ.get("BANDPO_RECORD")
        if not folder:
            return
        columns: dict[str, Any] = {}
        experience = PLACE.experience
        if experience is not None:
            columns = {
                # An action is the token after its place.
                "tokens": experience.sequences[:, 1:][:, -mask.shape[1] :],
                "prompts": _prompts(experience),
                "reward": _flat(experience.rewards),
                "truncated": _flat(experience.truncated),
                "step": PLACE.generation,
                "generation": PLACE.generation,
            }
            if PLACE.losses_per_update:
                columns["update"] = PLACE.losses // PLACE.losses_per_update
        tensors = (logp, logp_old, advantages, mask)
        record(
            folder,
            "openrlhf",
            self._method,
            *tensors,
            logp_rollout=rollout,
            sampling=PLACE.sampling,
            **columns,
        )


def _flat(values: Any) -> Any:
    """Return one value per sequence; None where there are none."""
    return None if values is None else values.flatten()


def _prompts(experience: Any) -> list[Any]:
    """Return the ids of each sequence's prompt: its tokens before the first that counts."""
    length = experience.action_mask.shape[1]
    before = experience.sequences.shape[1] - length
    prompts = []
    for ids, seen, counts in zip(
        experience.sequences, experience.attention_mask, experience.action_mask, strict=True
    ):
        end = before + int(counts.int().argmax())
        prompts.append(ids[:end][seen[:end] > 0])
    return prompts


def patch() -> None:
    """Make the workers of this process build `BandPolicyLoss`, and tell it the micro-batch and its place."""
    import openrlhf.trainer.ray.ppo_actor as ppo_actor

    ppo_actor.PolicyLoss = BandPolicyLoss
    trainer = ppo_actor.ActorPPOTrainer
    train, step = trainer.ppo_train, trainer.training_step

    @functools.wraps(train)
    def ppo_train(self: Any, *arguments: Any, **named: Any) -> Any:
        PLACE.generation += 1
        PLACE.losses = 0
        dynamic = self.args.train.dynamic_batch_enable
        PLACE.losses_per_update = None if dynamic else self.strategy.accumulated_gradient
        rollout = self.args.rollout
        PLACE.sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p}
        return train(self, *arguments, **named)

    @functools.wraps(step)
    def training_step(self: Any, experience: Any, *arguments: Any, **named: Any) -> Any:
        PLACE.experience = experience
        try:
            return step(self, experience, *arguments, **named)
        finally:
            PLACE.experience = None
            PLACE.losses += 1

    trainer.ppo_train, trainer.training_step = ppo_train, training_step
