"""Clip rules in Molt, OpenRLHF's successor: its own PPO surrogate, with the bounds of the batch for two numbers.

    from bandpo_molt import install
    install(clip="Band(KL(), 0.05)")

in each process that trains, before Molt builds its loss. Molt's command line takes the losses that it lists and no
other, and has no option to import a module. So ``install`` replaces the loss of the name ``ppo``, and
docs/frameworks.md shows where to call it. Molt's ``--actor.eps_clip_low_high`` then has no effect. Its dual clip,
importance-sampling correction, aggregation and metrics stay as they are.

Anchor: the old log-probabilities that Molt's ratio refers to.

Written for Molt of 2026-08-06 (commit 2d62608), and tested with a stand-in for its ``molt.models.loss``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bandpo.integrations._adapt import epsilons, read_rule
from bandpo.methods import Method
from bandpo.rules import ClipRule

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def install(
    *, method: Method | ClipRule | str | None = None, clip: Method | ClipRule | str | None = None
) -> None:
    """Give Molt's loss ``ppo`` the bounds of a clip rule, in this process.

    Args:
        method: A clip rule, or a method that is PPO's surrogate on other bounds, such as ``DAPO()``; or its text form.
            ``Band(KL(), 0.05)`` by default.
        clip: Another name of ``method``.

    Raises:
        ValueError: a setting cannot be read, or the method is more than bounds. When the loss is computed: a counted
            old log-probability is NaN or above 0.
    """
    from molt.models import loss

    rule, stock = read_rule(method=method, clip=clip), loss.ppo_policy_loss

    def ppo(
        ratio: Float[Tensor, "batch time"],
        advantages: Float[Tensor, "batch time"],
        log_probs: Float[Tensor, "batch time"],
        action_mask: Float[Tensor, "batch time"],
        *,
        policy_log_ratio: Float[Tensor, "batch time"],
        **settings: Any,
    ) -> tuple[Float[Tensor, "batch time"], Float[Tensor, ""]]:
        logp_old = (log_probs.float() - policy_log_ratio).detach()
        _, low, high = epsilons(rule, logp_old, action_mask)
        settings |= {"clip_eps_low": low, "clip_eps_high": high, "policy_log_ratio": policy_log_ratio}
        return stock(ratio, advantages, log_probs, action_mask, **settings)

    loss.POLICY_LOSSES["ppo"] = ppo
