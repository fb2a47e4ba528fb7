"""Band, and every other method, as a policy loss of stock verl: bandpo installed beside it, and two overrides.

    actor_rollout_ref.actor.policy_loss._target_=bandpo.integrations.verl.BandPolicyLossConfig
    +actor_rollout_ref.actor.policy_loss.method='SAPO(1.0, 1.05)'

The second names a method or a clip rule, and may be called ``clip``; without it the rule is ``Band(KL(), 0.05)``.
Any loss of verl's own is audited by one override, and trains as before:

    actor_rollout_ref.actor.policy_loss._target_=bandpo.integrations.verl.AuditedPolicyLossConfig

Installing bandpo is what makes verl know the loss: verl loads the entry points of the group ``verl.plugins``, of which
this module is one, on every ``import verl``, in Ray's workers too. So the package must be installed on every node, and
this module imports no more than it needs.

Written for and tested with verl 0.9.1.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, register_policy_loss
from verl.utils import config as verls_settings
from verl.utils.torch_functional import masked_mean
from verl.workers.config import PolicyLossConfig

from bandpo import _checks
from bandpo.audit.configs import verl_method
from bandpo.batch import Batch
from bandpo.errors import InvalidValue
from bandpo.integrations import _verl_digest as _verl_digest  # registers ${bandpo.digest:}
from bandpo.integrations._adapt import averaged, naming, numbers, read_method, with_dual_clip
from bandpo.integrations._verl_audit import (
    Driver,
    replace_everywhere,
    report,
)
from bandpo.integrations._verl_contract import Certifier, check_settings, mode_of, share_of, state_of
from bandpo.loss import policy_loss
from bandpo.methods import Method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from verl.workers.config import ActorConfig

WHERE = "actor_rollout_ref.actor.policy_loss."


def _skip_a_patch_of_what_trl_no_longer_has() -> None:
    """Let verl's FSDP workers start beside a TRL without the class that verl 0.9.1 patches there, such as TRL 1.16.

    One function of verl is told that there is no TRL to patch; whoever else asks verl gets the true answer.
    """
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return
    trl = Path(spec.submodule_search_locations[0])
    if any((trl / home).exists() for home in ("experimental/ppo", "models/modeling_value_head.py")):
        return
    with contextlib.suppress(ImportError):  # FSDP alone needs this module, other engines run without it
        from verl.models.transformers import monkey_patch

        monkey_patch.is_trl_available = lambda: False


_skip_a_patch_of_what_trl_no_longer_has()
Driver().install()
_certifier = Certifier()


def _check_settings_too(validate: Callable[..., None]) -> Callable[..., None]:
    """verl's check of all settings, in the driver, and then ours."""

    @functools.wraps(validate)
    def validate_config(config: Any, *arguments: Any, **named: Any) -> None:
        validate(config, *arguments, **named)
        actor = verls_settings.omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        if isinstance(actor.policy_loss, BandPolicyLossConfig):
            with naming(f"{WHERE}method"):
                check_settings(loss_method(actor), actor, config)

    return validate_config


replace_everywhere(
    "validate_config", verls_settings.validate_config, _check_settings_too(verls_settings.validate_config)
)


@dataclass
class AuditedPolicyLossConfig(PolicyLossConfig):
    """verl's policy-loss settings with an audit: the loss is the one that ``loss_mode`` names, and trains as before.

    Args:
        loss_mode: Any loss that verl has registered, a plug-in's too. Once built it is ``audited``.
        audited: The loss that ``loss_mode`` named; taken from there.
        audit: Whether the loss is audited: ``audit/…`` metrics, see docs/audit.md.
        audit_detail: Whether all of them are logged, and not only the twelve of `bandpo.audit.metrics.LOGGED`.
        record: Folder to which verl's driver writes every batch before it is trained on, with rewards, prompts and the
            engine's log-probabilities (``actor_rollout_ref.rollout.calculate_log_probs=true``), for `bandpo diagnose`.
        watched: What happens where the tests of `bandpo diagnose`, made of every tenth batch in the driver, find
            something wrong: ``warn``, ``stop`` the run, or ``off``.

    Raises:
        ImportError: ``record`` is given, and what writes it is not installed.
        ValueError: ``loss_mode`` is ``band``, which `BandPolicyLossConfig` audits.

    >>> AuditedPolicyLossConfig(loss_mode="gspo").audited
    'gspo'
    """

    audited: str | None = None
    audit: bool = True
    audit_detail: bool = False
    record: str | None = None
    watched: str = "warn"

    def __post_init__(self) -> None:
        if self.loss_mode == "band":
            raise InvalidValue(
                f"{WHERE}_target_: AuditedPolicyLossConfig is for verl's own losses; write BandPolicyLossConfig, which "
                "audits band too"
            )
        if (self.audit or self.record) and self.loss_mode != "audited":
            object.__setattr__(self, "audited", self.loss_mode)
            object.__setattr__(self, "loss_mode", "audited")


@dataclass
class BandPolicyLossConfig(AuditedPolicyLossConfig):
    """verl's policy-loss settings with a method; immutable once built, as all of verl's settings.

    Built by hydra in the driver before Ray starts, so a setting that cannot be read costs seconds. All are text.

    Args:
        loss_mode: Always ``band``. verl's own default, ``vanilla``, counts as not set, since verl's config passes it
            whether or not the user does. verl's own losses need no ``_target_``, or `AuditedPolicyLossConfig`.
        audited: Not used here.
        audit: As for `AuditedPolicyLossConfig`.
        audit_detail: As for `AuditedPolicyLossConfig`.
        record: As for `AuditedPolicyLossConfig`.
        watched: As for `AuditedPolicyLossConfig`.
        method: A clip rule, a method of `bandpo.methods`, or a combination such as
            ``Method(FixedClip(0.2), Masked(20), level='sequence')``; ``Band(KL(), 0.05)`` by default. A clip rule
            alone leaves to verl what it does not say: the average, ``loss_agg_mode``, and the dual clip,
            ``clip_ratio_c``. A whole method brings its own: it has a dual clip or none, as in ``BandPO(dual_clip=5)``,
            and its average, unless ``loss_agg_mode`` is set to another than verl's ``token-mean``; the average is in
            either case verl's, over the global batch. verl's ``clip_ratio``, ``clip_ratio_low`` and
            ``clip_ratio_high`` never have an effect. ``DPPO`` and ``IcePop`` need
            ``algorithm.rollout_correction.bypass_mode``, ``BAPO`` a mini-batch that no GPU splits. Of
            `bandpo.radius` a band may hold `BySurprisal`; verl tells a policy loss neither the step nor an entropy.
        clip: Another name of ``method``.
        certify: What happens if the gradient that reaches the log-probabilities is not the method's, see
            docs/verl.md: ``stop``, ``warn`` or ``off``.

    Raises:
        ValueError: ``loss_mode`` names another loss, a setting cannot be read, a radius needs what verl does not tell,
            or both names are given. The message starts with the setting's name.

    >>> BandPolicyLossConfig(method="SAPO(1.0, 1.05)").loss_mode
    'band'
    """

    loss_mode: str = "band"
    method: str | None = None
    clip: str | None = None
    certify: str = "stop"

    def __post_init__(self) -> None:
        if self.certify not in ("stop", "warn", "off"):
            raise InvalidValue(f"{WHERE}certify must be 'stop', 'warn' or 'off', got {self.certify!r}")
        if self.loss_mode not in ("band", PolicyLossConfig.loss_mode):
            raise InvalidValue(
                f"{WHERE}loss_mode: {self.loss_mode!r} would not read the settings of bandpo: write loss_mode=band, "
                "or leave _target_ out for a loss of verl's own; AuditedPolicyLossConfig in its place audits one"
            )
        object.__setattr__(self, "loss_mode", "band")
        read_method(WHERE, self.method, self.clip, whole=True)


def loss_method(config: ActorConfig) -> Method:
    """What an actor's settings with a `BandPolicyLossConfig` ask for, verl's own dual clip included.

    Raises:
        ValueError: a setting cannot be read; the message starts with its name.
    """
    settings = config.policy_loss
    chosen = read_method(WHERE, settings.get("method"), settings.get("clip"), whole=True)
    return with_dual_clip(chosen, config.clip_ratio_c, "actor_rollout_ref.actor.clip_ratio_c")


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
        loss_agg_mode: verl's aggregation, over the global batch; a method's own stands in for verl's default.
        config: The actor's settings: ``policy_loss``, see `BandPolicyLossConfig`, and verl's dual clip ``clip_ratio_c``
            (``.inf`` for none), which acts beside a clip rule alone.
        rollout_is_weights: Importance weights ≥ 0 of ``algorithm.rollout_correction``.

    Returns:
        The loss, and metrics. They are those of `bandpo.policy_loss` under their names; verl's own three, so that its
        dashboards go on; and the sums that verl's driver makes the audit of. ``pg_clipfrac`` is
        ``clip_high + clip_low``, and ``pg_clipfrac_lower`` is ``dual_clip``.

    Raises:
        RuntimeError: in the backward pass, if the gradient is not the method's.
        ValueError: see `bandpo.policy_loss`; or the method needs a whole mini-batch, and this is a part.
    """
    assert config is not None
    method = loss_method(config)
    mode = mode_of(method, loss_agg_mode)
    state = state_of(method, len(response_mask), config)
    # verl's KL term has a gradient at its log-probabilities too; at a view of them it has none.
    seen = log_prob.view_as(log_prob) if config.use_kl_loss else log_prob
    seen = _checks.as_float("log_prob", seen)
    loss, metrics = policy_loss(
        seen,
        old_log_prob,
        advantages,
        response_mask,
        method=method,
        weights=rollout_is_weights,
        state=state,
        aggregation=_average(response_mask, mode, config),
    )
    scalars = numbers(metrics)
    log_ratio = (old_log_prob - log_prob).detach().masked_fill(response_mask == 0, 0.0)
    scalars |= {
        "pg_clipfrac": scalars["clip_high"] + scalars["clip_low"],
        "pg_clipfrac_lower": scalars["dual_clip"],
        "ppo_kl": masked_mean(log_ratio, response_mask).item(),
    }
    found = {f"actor/{name}": value for name, value in scalars.items()}
    if torch.is_grad_enabled() and log_prob.requires_grad:
        tensors = (log_prob, old_log_prob, advantages, response_mask)
        batch = Batch.read(*tensors, weights=rollout_is_weights, state=state)
        certify = config.policy_loss.get("certify", "stop")
        if certify != "off":
            blocked = scalars["pg_clipfrac"] + scalars["dual_clip"] > 0
            share = share_of(batch.mask, mode, config.global_batch_info)
            _certifier(loss, seen, method, batch, share, blocked=blocked, stop=certify == "stop")
        found |= report(method, batch, config)
    return loss, found


def _average(mask: Tensor, mode: str, config: ActorConfig) -> Callable[[Tensor], Tensor]:
    return averaged(lambda losses: agg_loss(losses, mask, mode, **config.global_batch_info), mask)


@register_policy_loss("audited")  # type: ignore[arg-type]
def audited(
    old_log_prob: Float[Tensor, "batch time"],
    log_prob: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    response_mask: Float[Tensor, "batch time"],
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Float[Tensor, "batch time"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """A loss of verl's own, or of another plug-in, as it is, and an audit of it.

    A loss that is one of bandpo's methods is audited as that method, with its bounds. Of any other the batches are
    tested and recorded alone.

    Args:
        old_log_prob: And the rest: as for any policy loss of verl, and handed on.
        log_prob, advantages, response_mask, loss_agg_mode, rollout_is_weights: As for `band`.
        config: The actor's settings; ``policy_loss`` is an `AuditedPolicyLossConfig`.

    Returns:
        The loss and the metrics of the audited loss, and the sums that verl's driver makes the audit of.

    Raises:
        ValueError: verl has no loss of that name.
    """
    assert config is not None
    name = config.policy_loss.get("audited")
    if not name:
        raise InvalidValue(
            f"{WHERE}loss_mode: audited is set by AuditedPolicyLossConfig; name the loss itself"
        )
    tensors = (old_log_prob, log_prob, advantages, response_mask)
    loss, metrics = get_policy_loss_fn(name)(*tensors, loss_agg_mode, config, rollout_is_weights)
    if not (torch.is_grad_enabled() and log_prob.requires_grad):
        return loss, metrics
    run = verl_method(name, config)
    if run is None:
        return loss, metrics
    batch = Batch.read(log_prob, old_log_prob, advantages, response_mask, weights=rollout_is_weights)
    return loss, metrics | report(run, batch, config)
