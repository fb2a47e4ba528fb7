"""Clip rules in TorchRL's ClipPPOLoss, for discrete actions.

    loss_module = BandPPOLoss(actor, critic, clip="Band(KL(), 0.05)")

TorchRL clamps the log-ratio between two bounds that it asks itself for; this loss answers with the tensors of the
batch. Its value, entropy and reduction terms and its metrics (``clip_fraction``, ``kl_approx``, ``ESS``) stay as they
are.

Anchor: the log-probabilities stored with the actions (``tensor_keys.sample_log_prob``). Continuous actions are refused:
Band bounds a probability, and a density is none.

Overrides two private names of torchrl, so it is written for and tested with torchrl 0.14.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torchrl.objectives import ClipPPOLoss

from bandpo.errors import InvalidValue
from bandpo.integrations._adapt import read_rule
from bandpo.methods import Method
from bandpo.rules import ClipRule

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from torch import Tensor


class BandPPOLoss(ClipPPOLoss):
    """`ClipPPOLoss` with a clip rule in place of ``clip_epsilon``.

    Args:
        actor_network: As for `ClipPPOLoss`.
        critic_network: As for `ClipPPOLoss`.
        method: A clip rule, or a method that is PPO's surrogate on other bounds, such as ``DAPO()``; or its text form.
            ``Band(KL(), 0.05)`` by default.
        clip: Another name of ``method``.
        arguments: `ClipPPOLoss`'s other settings; ``clip_value``, the value function's clip, as a number.

    Raises:
        ValueError: a setting cannot be read; a method that is more than bounds; ``clip_epsilon`` or
            ``clip_value=True`` is given, which mean TorchRL's constant; ``delay_actor``. On a batch: continuous
            actions, or not one log-probability for each action.
    """

    def __init__(
        self,
        actor_network: Any = None,
        critic_network: Any = None,
        *,
        method: Method | ClipRule | str | None = None,
        clip: Method | ClipRule | str | None = None,
        **arguments: Any,
    ) -> None:
        if "clip_epsilon" in arguments or arguments.get("clip_value") is True:
            raise InvalidValue(
                "clip_epsilon has no effect beside clip: use clip='FixedClip(low, high)', and a number for clip_value"
            )
        if arguments.get("delay_actor"):
            raise InvalidValue(
                "delay_actor=True clips around a third policy, whose log-probabilities are not stored"
            )
        rule = read_rule(method=method, clip=clip)
        super().__init__(actor_network, critic_network, **arguments)
        self.rule = rule
        self._batch_bounds: tuple[Tensor, Tensor] | None = None

    def _log_weight(self, tensordict: TensorDictBase, adv_shape: torch.Size) -> tuple[Any, ...]:
        log_weight, dist, *others = super()._log_weight(tensordict, adv_shape)
        if not _is_discrete(dist):
            raise InvalidValue(
                f"the actions have the distribution {type(dist).__name__}, and the log-probability of a continuous "
                "action is a density, which has no bound of 1 for Band to project to; use ClipPPOLoss"
            )
        logp_old = tensordict.get(self.tensor_keys.sample_log_prob)
        if not isinstance(logp_old, torch.Tensor) or logp_old.numel() != log_weight.numel():
            raise InvalidValue(
                f"{self.tensor_keys.sample_log_prob} is not one log-probability for each of the "
                f"{log_weight.numel()} actions, but the bounds are per action"
            )
        bounds = self.rule.bounds(logp_old.reshape(log_weight.shape))
        self._batch_bounds = bounds.log_lower, bounds.log_upper
        return log_weight, dist, *others

    @property
    def _clip_bounds(self) -> tuple[Tensor, Tensor]:
        assert self._batch_bounds is not None  # `forward` asks for the log-weight first
        return self._batch_bounds


def _is_discrete(dist: Any) -> bool:
    try:
        return dist.support.is_discrete
    except NotImplementedError:  # torch's answer where a transformed density has no written support
        return False
