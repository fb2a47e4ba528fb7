"""Clip rules and other methods in Stable-Baselines3's PPO, for discrete actions.

    model = BandPPO("MlpPolicy", "CartPole-v1", clip="Band(KL(), 0.05)").learn(100_000)

Anchor: the log-probabilities of the actions when they were taken. With `MultiDiscrete` and `MultiBinary` actions the
bounds are on the joint probability. Continuous actions are refused: Band bounds a probability, and a density is none.

PPO's ``train`` has no place to put another clip in, so `BandPPO.train` is written anew, with SB3's settings and log
keys. Written for and tested with stable-baselines3 2.9.2.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.utils import explained_variance

from bandpo.errors import InvalidValue
from bandpo.integrations._adapt import read_method
from bandpo.loss import policy_loss
from bandpo.methods import Method
from bandpo.rules import ClipRule

if TYPE_CHECKING:
    from stable_baselines3.common.type_aliases import RolloutBufferSamples
    from torch import Tensor


class BandPPO(PPO):
    """`PPO` with a clip rule, or another method, in place of ``clip_range``.

    Args:
        policy: As for `PPO`.
        env: As for `PPO`; its actions must be discrete.
        method: A clip rule, a method, or the text form of one; ``Band(KL(), 0.05)`` by default. An action is a sequence
            of one token to it.
        clip: Another name of ``method``.
        arguments: `PPO`'s other settings. ``clip_range_vf``, the value function's clip, is one of them.

    Raises:
        ValueError: a setting cannot be read, both names are given, ``clip_range`` is given too, or the actions are
            continuous.
    """

    def __init__(
        self,
        policy: Any,
        env: Any,
        *,
        method: Method | ClipRule | str | None = None,
        clip: Method | ClipRule | str | None = None,
        **arguments: Any,
    ) -> None:
        if "clip_range" in arguments:
            raise InvalidValue(
                f"clip_range={arguments['clip_range']!r} has no effect beside clip; use clip='FixedClip(low, high)'"
            )
        self.method = read_method(method=method, clip=clip, whole=True)
        super().__init__(policy, env, **arguments)

    def _setup_model(self) -> None:
        if isinstance(self.action_space, spaces.Box):
            raise InvalidValue(
                f"the actions are {self.action_space}, and the log-probability of a continuous action is a density, "
                "which has no bound of 1 for Band to project to; use PPO, or discretise the actions"
            )
        super()._setup_model()

    def train(self) -> None:
        """Update the policy on the gathered rollout, ``n_epochs`` times over."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        records: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(self.n_epochs):
            stop = False
            for batch in self.rollout_buffer.get(self.batch_size):
                loss, metrics = self._loss(batch)
                for name, value in metrics.items():
                    records[name].append(value.item())
                stop = self.target_kl is not None and records["approx_kl"][-1] > 1.5 * self.target_kl
                if stop:
                    break
                self.policy.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
                self.policy.optimizer.step()
            self._n_updates += 1
            if stop:
                break
        for name, values in records.items():
            self.logger.record(f"train/{name}", np.mean(values))
        buffer = self.rollout_buffer
        self.logger.record(
            "train/explained_variance", explained_variance(buffer.values.flatten(), buffer.returns.flatten())
        )
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")

    def _loss(self, batch: RolloutBufferSamples) -> tuple[Tensor, dict[str, Tensor]]:
        """PPO's loss of one minibatch, and what to log of it."""
        actions = batch.actions
        if isinstance(self.action_space, spaces.Discrete):
            actions = actions.long().flatten()
        values, logp, entropy = self.policy.evaluate_actions(batch.observations, actions)
        advantages = batch.advantages
        if self.normalize_advantage and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        per_action = (x.unsqueeze(-1) for x in (logp, batch.old_log_prob, advantages))
        policy, metrics = policy_loss(*per_action, method=self.method)

        values = values.flatten()
        if self.clip_range_vf is not None:
            reach = self.clip_range_vf(self._current_progress_remaining)  # pyright: ignore  (a schedule by now)
            values = batch.old_values + (values - batch.old_values).clamp(-reach, reach)
        value = torch.nn.functional.mse_loss(values, batch.returns)
        # Where a distribution has no entropy in closed form, -logp estimates it.
        entropy_loss = logp.mean() if entropy is None else -entropy.mean()
        loss = policy + self.ent_coef * entropy_loss + self.vf_coef * value
        return loss, {
            "entropy_loss": entropy_loss,
            "policy_gradient_loss": policy,
            "value_loss": value,
            "loss": loss,
            "clip_fraction": metrics["clip_high"] + metrics["clip_low"],
            **metrics,
        }
