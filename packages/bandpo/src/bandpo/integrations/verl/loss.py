"""The losses ``band`` and ``audited`` of verl, their configurations, and the checks of a run's settings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, register_policy_loss
from verl.utils import config as verls_settings
from verl.utils.torch_functional import masked_mean
from verl.workers.config import PolicyLossConfig

from bandpo.core import _checks
from bandpo.core.batch import Batch
from bandpo.core.errors import BandWarning, InvalidValue
from bandpo.core.layout import Rows
from bandpo.core.methods import Method
from bandpo.core.objectives import DualClip
from bandpo.core.text import parse
from bandpo.integrations._adapt import as_floats, prefix_errors, read_method
from bandpo.integrations.stock_methods import verl_method
from bandpo.integrations.verl.announcement import announce
from bandpo.integrations.verl.audit import report_sums
from bandpo.integrations.verl.average import NORM, average_of, check_name
from bandpo.integrations.verl.checks import check_settings
from bandpo.integrations.verl.driver import Driver
from bandpo.integrations.verl.keys import check_names
from bandpo.integrations.verl.loss_checks import InvalidTokens, state_of
from bandpo.integrations.verl.probe import is_probing, probe_once
from bandpo.integrations.verl.record import record_loss
from bandpo.integrations.verl.settings import (
    ACTOR,
    POLICY_LOSS,
    check_required,
    refuse_if,
    uses_bandpo,
)

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from verl.workers.config import ActorConfig


def check_run(config: DictConfig) -> None:
    """Check all settings of a run, and print its description. Do nothing if this was done before, in any process.

    Args:
        config: The run's config, to which the description is added.

    Raises:
        ValueError: a setting is refused.
        RuntimeError: the gradient of verl's loss is not that of the settings.
    """
    if "bandpo" in config:
        return
    if uses_bandpo(config):
        check_required(config)
    # Before verl's classes refuse a name without the nearest one.
    check_names(config)
    actor = verls_settings.omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    method = loss_method(actor)
    lines = check_settings(method, actor, config)
    if lines:
        announce(config, method, lines)


def _check_late(config: dict[str, Any]) -> None:
    """Check the settings of a trainer that does not call verl's ``auto_set_device``, such as one of another project."""
    if "bandpo" in config or "actor_rollout_ref" not in config:
        return
    dict_config = OmegaConf.create(config)
    assert isinstance(dict_config, DictConfig)
    if uses_bandpo(dict_config):
        check_run(dict_config)
        config["bandpo"] = OmegaConf.to_container(dict_config.bandpo)


Driver().install(check_run, _check_late)


@dataclass
class AuditedPolicyLossConfig(PolicyLossConfig):
    """verl's policy-loss settings for one of verl's own losses with an audit. Training is unchanged.

    Args:
        loss_mode: Any loss in verl's registry. After construction ``loss_mode`` is ``audited``, and the field
            ``audited`` has the loss.
        audit: True to log ``audit/…`` metrics.
        audit_detail: True to log all of them, False for the twelve in bold in docs/audit.md.
        record: Folder to which verl's workers write the tokens of each loss, for `bandpo audit` and `rlvet diagnose`.
        watched: Reaction to a failed check of `rlvet diagnose`: ``warn``, ``stop`` the run, or ``off`` to check
            nothing.
    """

    audited: str | None = None
    audit: bool = True
    audit_detail: bool = False
    record: str | None = None
    watched: str = "warn"

    def __post_init__(self) -> None:
        if self.loss_mode == "band":
            raise InvalidValue(f"{POLICY_LOSS}_target_: write BandPolicyLossConfig, which audits band too")
        # In a config that was constructed from another one, both are set already.
        if bool(self.audited) != (self.loss_mode == "audited"):
            raise InvalidValue(f"{POLICY_LOSS}audited is not to be set: name the loss in loss_mode")
        # The loss that is registered as "audited" computes the audit, and calls the one in `audited`. Settings are
        # immutable, therefore object.__setattr__.
        if (self.audit or self.record) and not self.audited:
            object.__setattr__(self, "audited", self.loss_mode)
            object.__setattr__(self, "loss_mode", "audited")


@dataclass
class BandPolicyLossConfig(AuditedPolicyLossConfig):
    """verl's policy-loss settings with a method. Like all of verl's settings they are immutable after construction.

    Hydra constructs them in the driver, so errors are raised within seconds. For the other settings see
    `AuditedPolicyLossConfig`.

    Args:
        loss_mode: Always ``band``; verl's own default, ``vanilla``, counts as not set.
        method: A clip rule, a method of `bandpo.core.methods`, or a combination such as
            ``Method(FixedClip(0.2), DropOutside(20), level='sequence')``; ``Band(KL(), 0.05)`` by default. Beside a
            clip rule alone verl's loss aggregation and dual clip apply; a whole method fixes both, see docs/verl.md.
        average: The loss aggregation: ``method`` for the method's own, or ``loss_agg_mode`` if the method is a clip
            rule alone; ``framework`` for ``loss_agg_mode``; or one of verl's modes such as ``token-mean``. If not
            given, it is ``method``, and a ``loss_agg_mode`` that was set and differs raises an error.
        certify: Reaction to an invalid value of a token, and to a loss of verl whose gradient, on a synthetic batch
            before training, is not that of the settings: ``stop`` the run, ``warn``, or ``off`` to compare no gradient.
        accept_idle_clip: True to accept one update for each batch, with which every ratio is 1 and no clip acts, as the
            baseline of a sweep.

    Raises:
        ValueError: ``loss_mode`` is another loss, a setting cannot be read, or a number of the method needs a training
            state that verl does not pass to its losses. The message starts with the setting's name.

    >>> BandPolicyLossConfig(method="SAPO(1.0, 1.05)").loss_mode
    'band'
    """

    loss_mode: str = "band"
    method: str | None = None
    average: str | None = None
    certify: str = "stop"
    accept_idle_clip: bool = False

    def __post_init__(self) -> None:
        check_name(self.average)
        if self.certify not in ("stop", "warn", "off"):
            raise InvalidValue(f"{POLICY_LOSS}certify must be 'stop', 'warn' or 'off', got {self.certify!r}")
        loss = self.audited or self.loss_mode
        if loss not in ("band", PolicyLossConfig.loss_mode):
            raise InvalidValue(
                f"{POLICY_LOSS}loss_mode: {loss!r} reads no method: write loss_mode=band, or leave _target_ out; "
                "AuditedPolicyLossConfig in its place audits a loss of verl's own"
            )
        object.__setattr__(self, "loss_mode", "band")
        read_method(POLICY_LOSS, self.method, whole_batch=True)


def loss_method(config: ActorConfig) -> Method | None:
    """Return the method of an actor's settings, with verl's dual clip if it applies; None if bandpo has no such method.

    Args:
        config: The actor's settings.
    """
    settings = config.policy_loss
    if settings.loss_mode != "band":
        text = verl_method(settings.get("audited") or settings.loss_mode, config)
        return None if text is None else parse(text)
    method = read_method(POLICY_LOSS, settings.get("method"), whole_batch=True)
    if not method.only_rule:
        return method
    with prefix_errors(f"{ACTOR}clip_ratio_c"):
        return replace(method, objective=DualClip(config.clip_ratio_c))


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
        old_log_prob: The old log-probabilities (nats): the trainer's own at the start of the step, or the sampler's
            under ``algorithm.rollout_correction.bypass_mode``.
        log_prob: The current log-probabilities (nats).
        advantages: The advantages.
        response_mask: 1 for tokens that count.
        loss_agg_mode: verl's aggregation mode, which applies if the method and the setting ``average`` have none.
        config: The actor's settings.
        rollout_is_weights: verl's importance weights.

    Returns:
        The loss, and metrics: those of `bandpo.policy_loss`, except that ``clip_low`` includes the tokens of the dual
        clip, as in the audit; three of verl's own; and the sums of the audit. If a token has an invalid value and
        ``certify`` is not ``stop``, the loss is NaN, so that verl skips the update.

    Raises:
        RuntimeError: at the first loss of a process, if the gradient of verl's loss is not that of the settings.
        ValueError: see `bandpo.policy_loss`; a token has an invalid value; the method needs all sequences of a
            mini-batch and gets only some; or the aggregation mode needs ``loss_scale_factor``.
    """
    assert config is not None
    method = loss_method(config)
    assert method is not None
    settings = config.policy_loss
    info = config.global_batch_info
    certify = settings.get("certify", "stop")
    mode = average_of(method, settings.get("average"), loss_agg_mode)
    refuse_if(
        mode == NORM and not info.get("loss_scale_factor"),
        f"{NORM} needs {ACTOR}loss_scale_factor, one length for the whole run: verl would divide by the longest "
        "response of each micro-batch",
    )
    # Only in training: verl also computes losses without a gradient.
    is_training = torch.is_grad_enabled() and log_prob.requires_grad
    if is_training:
        probe_once(config, method, log_prob.device)
        if not is_probing():
            record_loss(config, log_prob, old_log_prob, advantages, response_mask)
    state = state_of(method, len(response_mask), config)

    logps = {"log_prob": log_prob.detach(), "old_log_prob": old_log_prob}
    invalid = InvalidTokens(response_mask, logps, advantages, rollout_is_weights)
    if invalid.count:
        refuse_if(
            certify == "stop", f"{invalid}; {POLICY_LOSS}certify=warn leaves out the update that it is in"
        )
        warnings.warn(f"{invalid}; verl leaves out this update", BandWarning, stacklevel=2)
        response_mask = (response_mask > 0) & ~invalid.mask

    # verl pads to one sequence per row. With a critic or step rewards advantages vary within a sequence, which must not
    # be mistaken for a packed row.
    batch = Batch.read(
        _checks.as_float("log_prob", log_prob),
        old_log_prob,
        advantages,
        response_mask,
        layout=Rows(),
        weights=rollout_is_weights,
        state=state,
    )
    loss, metrics = method.loss(
        batch,
        # A micro-batch without tokens needs a backward pass too, as the other processes wait for it.
        aggregation=lambda x: agg_loss(x, response_mask, mode, **info) if response_mask.any() else x.sum(),
    )

    scalars = _actor_metrics(metrics, log_prob, old_log_prob, response_mask)
    logged = {f"actor/{name}": value for name, value in scalars.items()}

    if is_training and not is_probing():
        logged |= report_sums(method, batch, config, invalid.count)

    if invalid.count:
        loss = loss * math.nan
    return loss, logged


def _actor_metrics(
    metrics: Mapping[str, Tensor],
    log_prob: Float[Tensor, "batch time"],
    old_log_prob: Float[Tensor, "batch time"],
    response_mask: Float[Tensor, "batch time"],
) -> dict[str, float]:
    """Return the metrics of `bandpo.policy_loss` as floats, with those of verl's own losses.

    Args:
        metrics: The metrics of `bandpo.policy_loss`.
        log_prob: As for `band`.
        old_log_prob: As for `band`.
        response_mask: As for `band`.
    """
    scalars = as_floats(metrics)
    log_ratio = (old_log_prob - log_prob).detach().masked_fill(response_mask == 0, 0.0)
    return scalars | {
        "pg_clipfrac": scalars["clip_high"] + scalars["clip_low"],
        "pg_clipfrac_lower": scalars["dual_clip"],
        "ppo_kl": masked_mean(log_ratio, response_mask).item(),
        # As in the audit's metric of this name: all blocked tokens with a negative advantage.
        "clip_low": scalars["clip_low"] + scalars["dual_clip"],
    }


@register_policy_loss("audited")  # type: ignore[arg-type]
def audited(*, config: ActorConfig, **tensors: Any) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """Compute a loss of verl's own, or of another plug-in, and audit it if it is a method of bandpo.

    The loss is unchanged. Tokens with an invalid value are not audited, and a warning describes the first of them.

    Args:
        config: The actor's settings.
        tensors: The arguments of verl's policy losses, see `band`.
    """
    name = config.policy_loss.get("audited")
    if not name:
        raise InvalidValue(
            f"{POLICY_LOSS}loss_mode: AuditedPolicyLossConfig sets audited; name the loss itself"
        )
    log_prob = tensors["log_prob"]
    is_training = torch.is_grad_enabled() and log_prob.requires_grad
    if is_training:
        probe_once(config, loss_method(config), log_prob.device)
    loss, metrics = get_policy_loss_fn(name)(config=config, **tensors)  # pyright: ignore
    if not is_training or is_probing():
        return loss, metrics

    old_log_prob = tensors["old_log_prob"]
    advantages = tensors["advantages"]
    mask = tensors["response_mask"]
    record_loss(config, log_prob, old_log_prob, advantages, mask)
    text = verl_method(name, config)
    if text is None:
        return loss, metrics

    weights = tensors.get("rollout_is_weights")
    logps = {"log_prob": log_prob.detach(), "old_log_prob": old_log_prob}
    invalid = InvalidTokens(mask, logps, advantages, weights)
    if invalid.count:
        warnings.warn(f"{invalid}; the audit leaves it out", BandWarning, stacklevel=2)
        mask = (mask > 0) & ~invalid.mask
    batch = Batch.read(log_prob, old_log_prob, advantages, mask, weights=weights)
    return loss, metrics | report_sums(parse(text), batch, config, invalid.count)
