"""Band, and every other clip rule, as a policy loss of stock verl: `pip install bandpo` beside it and two overrides.

    actor_rollout_ref.actor.policy_loss._target_=bandpo.integrations.verl.BandPolicyLossConfig
    actor_rollout_ref.actor.policy_loss.loss_mode=band
    +actor_rollout_ref.actor.policy_loss.clip='Band(KL(), 0.05)'

The third names the clip rule and may be left out. Installing bandpo is what makes verl know the loss: verl loads the
entry points of the group ``verl.plugins``, of which this module is one, on every ``import verl``, in Ray's workers
too. So the package must be installed on every node, and this module imports no more than it needs.

Written for and tested with verl 0.9.1.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import verl.utils.import_utils

from bandpo.integrations._adapt import as_rule, token_weights
from bandpo.losses import policy_loss
from bandpo.notation import parse_objective

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from verl.workers.config import ActorConfig


def _hide_trl_without_value_head() -> None:
    """verl 0.9.1 imports a class from TRL that TRL 1.16 no longer has, and so fails wherever both are installed."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return
    trl = Path(spec.submodule_search_locations[0])
    if not any((trl / home).exists() for home in ("experimental/ppo", "models/modeling_value_head.py")):
        verl.utils.import_utils.is_trl_available = lambda: False


_hide_trl_without_value_head()  # before the imports below, which bind the name

from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss  # noqa: E402
from verl.utils.torch_functional import masked_mean  # noqa: E402
from verl.workers.config import PolicyLossConfig  # noqa: E402


@dataclass
class BandPolicyLossConfig(PolicyLossConfig):
    """verl's policy-loss settings with a clip rule; immutable once built, as all of verl's settings.

    Built by hydra in the driver before Ray starts, so a rule that cannot be read costs seconds.

    Args:
        objective: What becomes of clipped tokens, in text form, see `bandpo.objectives`.
        level: ``token`` or ``sequence`` (GSPO), see `bandpo.policy_loss`.
        clip: A clip rule in its text form, see `bandpo.parse_rule`. Of `bandpo.radius` it may hold `BySurprisal`; verl
            tells a policy loss neither the step nor an entropy. verl's ``clip_ratio``, ``clip_ratio_low`` and
            ``clip_ratio_high`` have no effect beside it; ``clip_ratio_c``, the dual clip, has.

    Raises:
        ValueError: ``clip`` is no clip rule, or its radius needs what verl does not tell; ``objective`` is no
            objective; or ``level`` is unknown.

    >>> BandPolicyLossConfig(clip="Band(KL(), 0.05)").loss_mode
    'band'
    """

    loss_mode: str = "band"
    clip: str = "Band(KL(), 0.05)"
    objective: str = "Surrogate()"
    level: str = "token"

    def __post_init__(self) -> None:
        for name, read in (("clip", as_rule), ("objective", parse_objective), ("level", _known_level)):
            try:
                read(getattr(self, name))
            except (TypeError, ValueError) as error:
                raise ValueError(f"actor_rollout_ref.actor.policy_loss.{name}: {error}") from error


def _known_level(level: str) -> str:
    if level not in ("token", "sequence"):
        raise ValueError(f"level must be 'token' or 'sequence', got {level!r}")
    return level


_objective = functools.lru_cache(parse_objective)


@register_policy_loss("band")  # type: ignore[arg-type]  # verl's alias has another name for the last parameter
def band(
    old_log_prob: Float[Tensor, "batch time"],
    log_prob: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    response_mask: Float[Tensor, "batch time"],
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Float[Tensor, "batch time"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """`bandpo.policy_loss` in the signature of verl's policy losses.

    Args:
        old_log_prob: Log-probabilities (nats) under the policy that the bounds are anchored at: the trainer's own
            at the start of the step, or the sampler's under ``algorithm.rollout_correction.bypass_mode``.
        log_prob: The same under the policy in training; carries the gradient.
        advantages: One per token.
        response_mask: 1 for tokens that count.
        loss_agg_mode: verl's aggregation; done by verl, over the global batch.
        config: The actor's settings: ``policy_loss.clip``, ``.objective``, ``.level``, and the dual clip
            ``clip_ratio_c``, which acts beside any objective (``.inf`` for none).
        rollout_is_weights: Importance weights ≥ 0 of ``algorithm.rollout_correction``.

    Returns:
        The loss, and metrics: those of `bandpo.policy_loss` under their names, and verl's own three so that its
        dashboards go on (``pg_clipfrac`` is ``clip_high + clip_low``).

    Raises:
        ValueError: see `bandpo.policy_loss`.
    """
    assert config is not None
    if response_mask.any():
        weights = token_weights(
            lambda loss: agg_loss(loss, response_mask, loss_agg_mode, **config.global_batch_info),
            response_mask,
        )
        if rollout_is_weights is not None:
            weights = weights * rollout_is_weights
        loss, metrics = policy_loss(
            log_prob,
            old_log_prob,
            advantages,
            response_mask,
            weights=weights,
            clip=as_rule(config.policy_loss.get("clip", BandPolicyLossConfig.clip)),
            objective=_objective(config.policy_loss.get("objective", BandPolicyLossConfig.objective)),
            level=config.policy_loss.get("level", BandPolicyLossConfig.level),
            dual_clip=config.clip_ratio_c,
            aggregation="sum",
        )
    else:  # a micro-batch whose responses were all rejected; other ranks wait for its gradient and its metrics
        loss, metrics = log_prob.sum() * 0.0, policy_loss(*torch.zeros(3, 1, 1)).metrics
    scalars = {name: value.item() for name, value in metrics.items()}
    scalars |= {
        "pg_clipfrac": scalars["clip_high"] + scalars["clip_low"],
        "pg_clipfrac_lower": scalars["dual_clip"],
        "ppo_kl": masked_mean((old_log_prob - log_prob).detach(), response_mask).item(),
    }
    return loss, {f"actor/{name}": value for name, value in scalars.items()}
