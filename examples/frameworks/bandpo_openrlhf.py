"""Clip rules in OpenRLHF: its own policy loss, with the bounds of the batch in place of ``--actor.eps_clip``.

    ray job submit --runtime-env-json='{"worker_process_setup_hook": "bandpo_openrlhf.patch",
        "env_vars": {"BANDPO_METHOD": "Band(KL(), 0.05)"}}' -- python -m openrlhf.cli.train_ppo_ray ...

OpenRLHF has no option for a loss, so a hook replaces the name by which its workers build theirs. This file must be on
``PYTHONPATH`` of every node. ``BANDPO_METHOD`` holds a clip rule, or a method that is PPO's surrogate on other bounds,
with or without a dual clip. OpenRLHF's correction for the rollout engine, KL term, entropy bonus, average and metrics
stay as they are; settings under which it would compute another loss are refused when a worker starts.

Anchor: the trainer's own log-probabilities.

Written for OpenRLHF 0.11.2.
"""

from __future__ import annotations

import os
from typing import Any

from openrlhf.models import PolicyLoss

from bandpo.integrations import check_settings, dual_clip_of, epsilons, read_bounds


class BandPolicyLoss(PolicyLoss):
    """OpenRLHF's `PolicyLoss` with the clip rule of ``BANDPO_METHOD``; by default Band-KL.

    Raises:
        ValueError: ``BANDPO_METHOD`` cannot be read, it is more than bounds, or a setting makes OpenRLHF's loss another
            one. On a batch: a counted old log-probability is NaN or above 0.
    """

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        average = "token-mean" if self.token_level_loss else "seq-mean-token-mean"
        method = read_bounds("BANDPO_", os.environ.get("BANDPO_METHOD"), average=average, dual_clip=True)
        checked = {
            "policy_loss_type": self.policy_loss_type,
            "eps_clip_low_high": (self.clip_eps_low, self.clip_eps_high),
            "dual_clip": self.dual_clip,
        }
        check_settings("OpenRLHF", checked, method)
        self._rule = method.clip
        if not method.only_rule:
            self.dual_clip = dual_clip_of(method)

    def forward(
        self, log_probs: Any, old_log_probs: Any, advantages: Any, action_mask: Any = None, **more: Any
    ) -> Any:
        bounds = epsilons(self._rule, old_log_probs, action_mask)
        self.clip_eps_low, self.clip_eps_high = bounds.low, bounds.high
        return super().forward(log_probs, bounds.logp_old, advantages, action_mask, **more)


def patch() -> None:
    """Make the workers of this process build `BandPolicyLoss`."""
    import openrlhf.trainer.ray.ppo_actor as ppo_actor

    ppo_actor.PolicyLoss = BandPolicyLoss
