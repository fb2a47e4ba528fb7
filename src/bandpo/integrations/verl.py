"""Band, and every other method, as a policy loss of stock verl: bandpo installed beside it, and two overrides.

    actor_rollout_ref.actor.policy_loss._target_=bandpo.integrations.verl.BandPolicyLossConfig
    +actor_rollout_ref.actor.policy_loss.method='SAPO(1.0, 1.05)'

verl loads the entry points of the group ``verl.plugins``, of which this module is one, on every ``import verl``, in
Ray's workers too. So bandpo must be installed on every node, and this module imports no more than it needs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, register_policy_loss
from verl.utils import config as verls_settings
from verl.utils import device
from verl.utils.torch_functional import masked_mean
from verl.workers.config import PolicyLossConfig

from bandpo import _checks
from bandpo.audit.online import BandWarning
from bandpo.batch import Batch
from bandpo.errors import InvalidValue
from bandpo.integrations._adapt import as_floats, prefix_errors, read_method
from bandpo.integrations._verl_announcement import announce
from bandpo.integrations._verl_audit import Driver, instead_of, report
from bandpo.integrations._verl_average import NORM, average_of, check_name, share_of
from bandpo.integrations._verl_checks import check_settings
from bandpo.integrations._verl_contract import Certifier, WrongTokens, state_of
from bandpo.integrations._verl_settings import ACTOR, WHERE, check_needed, is_ours, refuse, trainer_of
from bandpo.loss import policy_loss
from bandpo.methods import Method
from bandpo.objectives import DualClip
from bandpo.runs.configs import verl_method
from bandpo.text import parse

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from verl.workers.config import ActorConfig

_certifier = Certifier()


def _examine(config: DictConfig) -> None:
    """Check the settings of a run once, and announce what the run is."""
    if "bandpo" in config:  # announced before, or in another process
        return
    if is_ours(config):
        check_needed(config)
    actor = verls_settings.omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    method = loss_method(actor)
    lines = check_settings(method, actor, config)
    if lines:
        announce(config, method, lines)


@instead_of(verls_settings.validate_config)
def validate_config(validate: Callable[..., None], config: DictConfig, *arguments: Any, **named: Any) -> None:
    """Check all settings: `verl.trainer.main_ppo` calls this before Ray starts.

    First that those which are read have a value, since verl's own check, which follows, fails there without a name.
    """
    if is_ours(config):
        check_needed(config)
    validate(config, *arguments, **named)
    _examine(config)


@instead_of(device.auto_set_device)
def auto_set_device(choose: Callable[..., None], config: DictConfig) -> None:
    """Check all settings where verl's asynchronous trainers begin; they start Ray before they validate, if at all."""
    choose(config)
    if "actor_rollout_ref" in config and trainer_of(config) in ("one_step_off", "fully_async"):
        _examine(config)


def _examine_late(config: dict[str, Any]) -> None:
    """Check the settings of a trainer that called none of the above, such as another project's on verl's workers."""
    if "bandpo" in config or "actor_rollout_ref" not in config:
        return
    whole = OmegaConf.create(config)
    assert isinstance(whole, DictConfig)
    if is_ours(whole):
        _examine(whole)
        config["bandpo"] = OmegaConf.to_container(whole.bandpo)


Driver().install(_examine_late)


@dataclass
class AuditedPolicyLossConfig(PolicyLossConfig):
    """verl's policy-loss settings with an audit: the loss is the one that ``loss_mode`` names, and trains as before.

    Args:
        loss_mode: Any loss that verl has registered. Once built it is ``audited``, and ``audited`` names the loss.
        audit, audit_detail: Whether ``audit/…`` metrics are logged, and all of them or the twelve of docs/verl.md.
        record: Folder to which verl's driver writes every batch before it is trained on, for `bandpo diagnose`.
        watched: What happens where the tests of `bandpo diagnose` find something wrong: ``warn``, ``stop`` or ``off``.
    """

    audited: str | None = None
    audit: bool = True
    audit_detail: bool = False
    record: str | None = None
    watched: str = "warn"

    def __post_init__(self) -> None:
        if self.loss_mode == "band":
            raise InvalidValue(f"{WHERE}_target_: write BandPolicyLossConfig, which audits band too")
        if bool(self.audited) != (self.loss_mode == "audited"):
            raise InvalidValue(f"{WHERE}audited is not to be set: name the loss in loss_mode")
        if (self.audit or self.record) and not self.audited:
            object.__setattr__(self, "audited", self.loss_mode)
            object.__setattr__(self, "loss_mode", "audited")


@dataclass
class BandPolicyLossConfig(AuditedPolicyLossConfig):
    """verl's policy-loss settings with a method; immutable once built, as all of verl's settings.

    Built by hydra in the driver, so what cannot be read costs seconds. The rest is as for `AuditedPolicyLossConfig`.

    Args:
        loss_mode: Always ``band``; verl's own default, ``vanilla``, counts as not set.
        method: A clip rule, a method of `bandpo.methods`, or a combination such as
            ``Method(FixedClip(0.2), DropOutside(20), level='sequence')``; ``Band(KL(), 0.05)`` by default. A clip rule
            alone leaves average and dual clip to verl; a whole method brings its own, see docs/verl.md.
        average: The average of the loss: ``method`` for the method's own, which a clip rule has not and then takes
            verl's; ``framework`` for verl's ``loss_agg_mode``; or a name such as ``token-mean``. By default ``method``,
            and a ``loss_agg_mode`` that was set and says otherwise is refused.
        certify: What happens if a token holds a value that no token can have, or if the gradient that reaches the
            log-probabilities is not the method's: ``stop``, ``warn`` or ``off``.

    Raises:
        ValueError: ``loss_mode`` names another loss, a setting cannot be read, or a radius depends on what verl
            does not tell. The message starts with the setting's name.

    >>> BandPolicyLossConfig(method="SAPO(1.0, 1.05)").loss_mode
    'band'
    """

    loss_mode: str = "band"
    method: str | None = None
    average: str | None = None
    certify: str = "stop"

    def __post_init__(self) -> None:
        check_name(self.average)
        if self.certify not in ("stop", "warn", "off"):
            raise InvalidValue(f"{WHERE}certify must be 'stop', 'warn' or 'off', got {self.certify!r}")
        other = self.audited or self.loss_mode
        if other not in ("band", PolicyLossConfig.loss_mode):
            raise InvalidValue(
                f"{WHERE}loss_mode: {other!r} reads no method: write loss_mode=band, or leave _target_ out; "
                "AuditedPolicyLossConfig in its place audits a loss of verl's own"
            )
        object.__setattr__(self, "loss_mode", "band")
        read_method(WHERE, self.method, whole_batch=True)


def loss_method(config: ActorConfig) -> Method | None:
    """The method that an actor's settings train, verl's own dual clip included; None if it is none of bandpo's."""
    settings = config.policy_loss
    if settings.loss_mode != "band":
        text = verl_method(settings.get("audited") or settings.loss_mode, config)
        return None if text is None else parse(text)
    chosen = read_method(WHERE, settings.get("method"), whole_batch=True)
    with prefix_errors(f"{ACTOR}clip_ratio_c"):
        return replace(chosen, objective=DualClip(config.clip_ratio_c)) if chosen.only_rule else chosen


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
        old_log_prob: Log-probabilities (nats) that the bounds surround: the trainer's own at the start of the step, or
            the sampler's under ``algorithm.rollout_correction.bypass_mode``.
        log_prob: And the rest, as verl gives any policy loss.

    Returns:
        The loss, and metrics: those of `bandpo.policy_loss`, where ``clip_low`` has the tokens of the dual clip in it
        as in the audit; verl's own three; and the sums of the audit. The loss is NaN where a token holds a value that
        no token can have and ``certify`` is not ``stop``: verl then leaves out the update.

    Raises:
        RuntimeError: in the backward pass, if the gradient is not the method's.
        ValueError: see `bandpo.policy_loss`; a token holds a value that no token can have; the method needs a whole
            mini-batch, and this is a part; or the average needs ``loss_scale_factor``.
    """
    assert config is not None
    method = loss_method(config)
    assert method is not None
    settings, info = config.policy_loss, config.global_batch_info
    certify = settings.get("certify", "stop")
    mode = average_of(method, settings.get("average"), loss_agg_mode)
    refuse(
        mode == NORM and not info.get("loss_scale_factor"),
        f"{NORM} needs {ACTOR}loss_scale_factor, one length for the whole run: verl would divide by the longest "
        "response of each micro-batch",
    )
    state = state_of(method, len(response_mask), config)

    logps = {"log_prob": log_prob.detach(), "old_log_prob": old_log_prob}
    others = {"advantages": advantages, "rollout_is_weights": rollout_is_weights}
    wrong = WrongTokens(response_mask, logps, others)
    if wrong.count:
        refuse(certify == "stop", f"{wrong}; {WHERE}certify=warn leaves out the update that it is in")
        warnings.warn(f"{wrong}; verl leaves out this update", BandWarning, stacklevel=2)
        response_mask = (response_mask > 0) & ~wrong.mask

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
        # Other processes wait for the backward pass of a micro-batch without tokens too.
        aggregation=lambda x: agg_loss(x, response_mask, mode, **info) if response_mask.any() else x.sum(),
        # verl pads to one sequence a row; advantages change within it with a critic, and with rewards of steps.
        packed=False,
    )
    scalars = as_floats(metrics)
    log_ratio = (old_log_prob - log_prob).detach().masked_fill(response_mask == 0, 0.0)
    scalars |= {
        "pg_clipfrac": scalars["clip_high"] + scalars["clip_low"],
        "pg_clipfrac_lower": scalars["dual_clip"],
        "ppo_kl": masked_mean(log_ratio, response_mask).item(),
        # One meaning beside the audit's metric of this name: all blocked tokens with a negative advantage.
        "clip_low": scalars["clip_low"] + scalars["dual_clip"],
    }
    logged = {f"actor/{name}": value for name, value in scalars.items()}
    if torch.is_grad_enabled() and log_prob.requires_grad:
        tensors = (log_prob, old_log_prob, advantages, response_mask)
        batch = Batch.read(*tensors, weights=rollout_is_weights, state=state)
        if certify != "off" and not wrong.count:
            blocked = scalars["pg_clipfrac"] + scalars["dual_clip"] > 0
            share = share_of(batch.mask, mode, info)
            _certifier(loss, seen, method, batch, share, blocked=blocked, stop=certify == "stop")
        logged |= report(method, batch, config, wrong.count)
    return loss * math.nan if wrong.count else loss, logged


@register_policy_loss("audited")  # type: ignore[arg-type]
def audited(*, config: ActorConfig, **tensors: Any) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """A loss of verl's own, or of another plug-in, as it is; and an audit, if it is one of bandpo's methods.

    A token with a value that no token can have is counted and named in a warning; the loss is what it is.
    """
    name = config.policy_loss.get("audited")
    if not name:
        raise InvalidValue(f"{WHERE}loss_mode: AuditedPolicyLossConfig sets audited; name the loss itself")
    loss, metrics = get_policy_loss_fn(name)(config=config, **tensors)  # pyright: ignore
    log_prob, text = tensors["log_prob"], verl_method(name, config)
    if text is None or not (torch.is_grad_enabled() and log_prob.requires_grad):
        return loss, metrics
    old_log_prob, advantages, mask = (
        tensors[part] for part in ("old_log_prob", "advantages", "response_mask")
    )
    weights = tensors.get("rollout_is_weights")
    logps = {"log_prob": log_prob.detach(), "old_log_prob": old_log_prob}
    wrong = WrongTokens(mask, logps, {"advantages": advantages, "rollout_is_weights": weights})
    if wrong.count:
        warnings.warn(f"{wrong}; the audit leaves it out", BandWarning, stacklevel=2)
        mask = (mask > 0) & ~wrong.mask
    batch = Batch.read(log_prob, old_log_prob, advantages, mask, weights=weights)
    return loss, metrics | report(parse(text), batch, config, wrong.count)
