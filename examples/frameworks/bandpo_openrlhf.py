"""Clip rules in OpenRLHF: its own policy loss, with bounds per token in place of ``--actor.eps_clip``.

    ray job submit --runtime-env-json='{"worker_process_setup_hook": "bandpo_openrlhf.patch",
        "env_vars": {"BANDPO_METHOD": "Band(KL(), 0.05)"}}' -- python -m openrlhf.cli.train_ppo_ray ...

OpenRLHF has no option for a loss, so a hook replaces the loss class that its workers construct. This file must be on
``PYTHONPATH`` of every node. Environment variables of the workers:

- ``BANDPO_METHOD``: a clip rule, or a method that is PPO's surrogate with other bounds, with or without a dual clip.
- ``BANDPO_RECORD``: a folder to which the tokens of every loss are written, see `bandpo.audit.Recorder`, with the
  rewards, prompts and truncation flags of OpenRLHF's ``Experience``, which has no version of the weights.
- ``BANDPO_ACCEPT_IDLE_CLIP``: 1 to accept a run in which every ratio is 1, as the baseline of a sweep.

OpenRLHF's correction for the rollout engine, KL term, entropy bonus, loss aggregation and metrics are unchanged.
Settings under which it would compute another loss raise an error when a worker starts.

The old log-probabilities are the trainer's own before the first update on a batch, or with
``Method(…, old_policy='rollout')`` the sampler's, as ``--train.async_enable`` needs. OpenRLHF only passes the latter
with ``--algo.advantage.is_correction_level token``, whose weights are then 1. With the trainer's own and one update for
each batch every ratio is 1, and no clip acts: this raises an error when a worker builds its trainer.

Written for OpenRLHF 0.11.2.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

from openrlhf.models import PolicyLoss

from bandpo import Method
from bandpo.core.errors import InvalidValue
from bandpo.integrations import check_anchor, check_settings, dual_clip_of, epsilons, read_bounds, record


@dataclass
class Progress:
    """The progress of a trainer, which OpenRLHF does not pass to its loss."""

    experience: Any = None
    """OpenRLHF's micro-batch; None outside of a training step."""
    generation: int = -1
    """The number of the generated batch in this process, from 0."""
    losses: int = 0
    """The number of losses on this batch so far."""
    losses_per_update: int | None = None
    """The number of losses per optimiser step; None if the sizes of micro-batches vary."""
    sampling: dict[str, float] | None = None
    """The engine's sampling settings."""


PROGRESS = Progress()
"""The progress of this process's trainer."""


class BandPolicyLoss(PolicyLoss):
    """OpenRLHF's `PolicyLoss` with the clip rule of ``BANDPO_METHOD``; by default Band-KL.

    Raises:
        ValueError: ``BANDPO_METHOD`` cannot be read, it is not PPO's surrogate, or a setting of OpenRLHF would change
            the loss. On a batch: an old log-probability is NaN or above 0.
    """

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        aggregation = "token-mean" if self.token_level_loss else "seq-mean-token-mean"
        method = read_bounds(
            "BANDPO_", os.environ.get("BANDPO_METHOD"), aggregation=aggregation, dual_clip=True
        )
        loss_settings = {
            "policy_loss_type": self.policy_loss_type,
            "eps_clip_low_high": (self.clip_eps_low, self.clip_eps_high),
            "dual_clip": self.dual_clip,
        }
        check_settings("OpenRLHF", loss_settings, method)
        if method.old_policy == "rollout" and self.is_correction_level == "off":
            raise InvalidValue(
                f"BANDPO_METHOD={method!r} refers to the sampler's log-probabilities, and OpenRLHF asks for none: use "
                "--algo.advantage.is_correction_level token, whose weights are then 1"
            )
        self.method = method
        if not method.only_rule:
            self.dual_clip = dual_clip_of(method)

    def forward(
        self, log_probs: Any, old_log_probs: Any, advantages: Any, action_mask: Any = None, **kwargs: Any
    ) -> Any:
        if self.method.old_policy == "rollout":
            old_log_probs = kwargs["rollout_log_probs"]
        bounds = epsilons(self.method.clip, old_log_probs, action_mask)
        self.clip_eps_low = bounds.low
        self.clip_eps_high = bounds.high
        self._record(log_probs, old_log_probs, advantages, action_mask, kwargs.get("rollout_log_probs"))
        return super().forward(log_probs, bounds.logp_old, advantages, action_mask, **kwargs)

    def _record(self, logp: Any, logp_old: Any, advantages: Any, mask: Any, logp_rollout: Any) -> None:
        """Write a micro-batch to the record."""
        folder = os.environ.get("BANDPO_RECORD")
        if not folder:
            return
        columns: dict[str, Any] = {}
        experience = PROGRESS.experience
        if experience is not None:
            columns = {
                # The action at a position is the next token.
                "tokens": experience.sequences[:, 1:][:, -mask.shape[1] :],
                "prompts": _prompts(experience),
                "reward": _flatten(experience.rewards),
                "truncated": _flatten(experience.truncated),
                "step": PROGRESS.generation,
                "generation": PROGRESS.generation,
            }
            if PROGRESS.losses_per_update:
                columns["update"] = PROGRESS.losses // PROGRESS.losses_per_update
        record(
            folder,
            "openrlhf",
            self.method,
            logp,
            logp_old,
            advantages,
            mask,
            logp_rollout=logp_rollout,
            old_is_rollout=self.method.old_policy == "rollout",
            sampling=PROGRESS.sampling,
            **columns,
        )


def _flatten(values: Any) -> Any:
    """Return values of sequences in one dimension; None if there are none."""
    return None if values is None else values.flatten()


def _prompts(experience: Any) -> list[Any]:
    """Return the token ids of each sequence's prompt: the tokens before the first that counts, without padding."""
    offset = experience.sequences.shape[1] - experience.action_mask.shape[1]
    prompts = []
    rows = zip(experience.sequences, experience.attention_mask, experience.action_mask, strict=True)
    for ids, attention_mask, action_mask in rows:
        end = offset + int(action_mask.int().argmax())
        prompts.append(ids[:end][attention_mask[:end] > 0])
    return prompts


def _check_anchor(method: Method, args: Any) -> None:
    """Check that ratios can differ from 1, and print the log-probabilities that they refer to."""
    responses = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    lines = check_anchor(
        method,
        responses // args.train.batch_size * args.train.max_epochs,
        sampler=method.old_policy == "rollout",
        setting=f"BANDPO_METHOD={method!r}",
        asynchronous=args.train.async_enable,
        to_sampler="write the method as Method(..., old_policy='rollout')",
        more_updates="use --train.max_epochs 2, or a smaller --train.batch_size",
        accepted=os.environ.get("BANDPO_ACCEPT_IDLE_CLIP") == "1",
        accept="BANDPO_ACCEPT_IDLE_CLIP=1",
    )
    print(*[f"bandpo: {line}" for line in lines], sep="\n", flush=True)


def patch() -> None:
    """Make the workers of this process construct `BandPolicyLoss`, and update `PROGRESS` during training."""
    import openrlhf.trainer.ray.ppo_actor as ppo_actor

    ppo_actor.PolicyLoss = BandPolicyLoss
    trainer = ppo_actor.ActorPPOTrainer
    original_init = trainer.__init__
    original_ppo_train = trainer.ppo_train
    original_training_step = trainer.training_step

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        _check_anchor(self.actor_loss_fn.method, self.args)

    @functools.wraps(original_ppo_train)
    def ppo_train(self: Any, *args: Any, **kwargs: Any) -> Any:
        PROGRESS.generation += 1
        PROGRESS.losses = 0
        varies = self.args.train.dynamic_batch_enable
        PROGRESS.losses_per_update = None if varies else self.strategy.accumulated_gradient
        rollout = self.args.rollout
        PROGRESS.sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p}
        return original_ppo_train(self, *args, **kwargs)

    @functools.wraps(original_training_step)
    def training_step(self: Any, experience: Any, *args: Any, **kwargs: Any) -> Any:
        PROGRESS.experience = experience
        try:
            return original_training_step(self, experience, *args, **kwargs)
        finally:
            PROGRESS.experience = None
            PROGRESS.losses += 1

    trainer.__init__ = init
    trainer.ppo_train = ppo_train
    trainer.training_step = training_step
