"""Checks that verl applies the settings of its rollout correction.

verl applies them in one of two places. With ``bypass_mode=false`` and ``calculate_log_probs=true``, its driver weights
and rejects tokens once per batch. With ``bypass_mode=true``, only its loss ``bypass_mode`` does, in each worker and by
the settings of the policy loss; all other losses get the batch without a correction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from bandpo.core.errors import InvalidValue
from bandpo.integrations.verl.settings import (
    POLICY_LOSS,
    ROLLOUT,
    in_bypass_mode,
    mode_of,
    overrides,
    refuse_if,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.workers.config import ActorConfig

    from bandpo.core.methods import Method

CORRECTION = "algorithm.rollout_correction."
LOSS_CORRECTION = f"{POLICY_LOSS}rollout_correction."
DEFAULTS: Mapping[str, Any] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "loss_type": "ppo_clip",
}
"""verl's defaults, under which nothing is corrected."""
REQUIRED_SETTINGS = {
    "rollout_is_threshold": "rollout_is",
    "rollout_is_batch_normalize": "rollout_is",
    "rollout_rs_threshold": "rollout_rs",
}
"""For each setting that only works beside another one, the other setting."""


def check_correction(config: DictConfig, actor: ActorConfig, loss: str, method: Method | None) -> str:
    """Check that verl applies each setting of rollout correction.

    Args:
        config: The run's config.
        actor: The actor's settings.
        loss: The name of the loss in verl's registry.
        method: The method of the loss; None if it is not one of bandpo's.

    Returns:
        A line about the correction and the place in verl that applies it.

    Raises:
        ValueError: a setting would have no effect; the message names it and the fix.
    """
    driver = {**DEFAULTS, **dict(config.algorithm.get("rollout_correction") or {})}
    changed = {name: driver[name] for name, value in DEFAULTS.items() if driver[name] != value}
    refuse_if(
        in_bypass_mode(config) and not config.actor_rollout_ref.rollout.calculate_log_probs,
        f"{ROLLOUT}calculate_log_probs=false leaves out the rollout engine's log-probabilities, which "
        f"{CORRECTION}bypass_mode=true makes the old ones: set it to true",
    )
    if loss == "bypass_mode":
        return _check_correction_in_loss(config, actor, changed)
    description = _check_correction_in_driver(config, changed, method)
    if loss == "geo_mean" and "rollout_is" in changed:
        # All other losses of verl multiply each token's loss by its weight.
        description += "; geo_mean multiplies each sequence by the geometric mean of its weights"
    return description


def _check_correction_in_driver(config: DictConfig, changed: Mapping[str, Any], method: Method | None) -> str:
    """Check the settings beside every loss but ``bypass_mode``; return a line about the correction.

    Args:
        config: The run's config.
        changed: The settings of ``algorithm.rollout_correction`` that differ from verl's defaults.
        method: The method of the loss; None if it is not one of bandpo's.
    """
    for name in dict(config.actor_rollout_ref.actor.policy_loss.get("rollout_correction") or {}):
        raise InvalidValue(
            f"{LOSS_CORRECTION}{name}: no loss but verl's bypass_mode reads it; write {CORRECTION}{name}"
        )
    if "loss_type" in changed:
        beside = f" beside {method}" if method else ""
        raise InvalidValue(
            f"{CORRECTION}loss_type={changed['loss_type']} has no effect{beside}: "
            "verl's loss bypass_mode alone reads it"
        )
    _check_required_settings(changed, CORRECTION)
    corrections = [name for name in ("rollout_is", "rollout_rs") if name in changed]
    for name in corrections:
        setting = f"{CORRECTION}{name}={changed[name]}"
        if in_bypass_mode(config):
            needs_bypass = mode_of(config) != "sync" or (
                method is not None and method.old_policy == "rollout"
            )
            remedy = "leave it out" if needs_bypass else f"leave it out, or set {CORRECTION}bypass_mode=false"
            raise InvalidValue(
                f"{setting}: under {CORRECTION}bypass_mode=true no code of verl applies it to this loss, since its "
                f"driver does so with {CORRECTION}bypass_mode=false only, and its own loss bypass_mode is another "
                f"loss: {remedy}"
            )
        refuse_if(
            not config.actor_rollout_ref.rollout.calculate_log_probs,
            f"{setting} needs the rollout engine's log-probabilities, and {ROLLOUT}calculate_log_probs=false leaves "
            "them out: set it to true",
        )
    if not corrections:
        return "none"
    _try_settings({**DEFAULTS, **changed}, CORRECTION)
    return f"by verl's driver, once a batch: {_format_settings(changed)}"


def _check_correction_in_loss(config: DictConfig, actor: ActorConfig, changed: Mapping[str, Any]) -> str:
    """Check the settings of verl's loss ``bypass_mode``; return a line about the correction.

    The loss only reads the settings of the policy loss, in the workers.

    Args:
        config: The run's config.
        actor: The actor's settings.
        changed: The settings of ``algorithm.rollout_correction`` that differ from verl's defaults.
    """
    refuse_if(
        not in_bypass_mode(config),
        f"{POLICY_LOSS}loss_mode=bypass_mode takes the old log-probabilities for the rollout engine's: set "
        f"{CORRECTION}bypass_mode=true",
    )
    settings = {
        name: actor.policy_loss.rollout_correction.get(name, default) for name, default in DEFAULTS.items()
    }
    for name, value in changed.items():
        refuse_if(
            settings[name] != value,
            f"{CORRECTION}{name}={value} does not reach the workers, where the loss bypass_mode reads "
            f"{LOSS_CORRECTION}{name}: write +{LOSS_CORRECTION}{name}={value}",
        )
    user_settings = dict(config.actor_rollout_ref.actor.policy_loss.get("rollout_correction") or {})
    changed_in_loss = {name: value for name, value in user_settings.items() if value != DEFAULTS.get(name)}
    _check_required_settings(changed_in_loss, LOSS_CORRECTION, settings)
    refuse_if(
        settings["loss_type"] not in ("ppo_clip", "reinforce"),
        f"{LOSS_CORRECTION}loss_type must be ppo_clip or reinforce, got {settings['loss_type']!r}",
    )
    _try_settings(settings, LOSS_CORRECTION)

    applied = {name: value for name, value in settings.items() if value != DEFAULTS[name]}
    line = f"by verl's loss bypass_mode in each worker: {_format_settings(applied)}"
    if settings["rollout_is"] is not None and settings["loss_type"] == "ppo_clip":
        line += " (loss_type=ppo_clip reports the weights and does not apply them)"
    return line


def _check_required_settings(
    changed: Mapping[str, Any], prefix: str, settings: Mapping[str, Any] | None = None
) -> None:
    """Check that no setting was changed whose required setting is None.

    Args:
        changed: The settings that were changed.
        prefix: The path of the settings, for the error.
        settings: All settings; by default verl's, with the changes.
    """
    settings = {**DEFAULTS, **changed} if settings is None else settings
    for name, required in REQUIRED_SETTINGS.items():
        refuse_if(
            name in changed and settings[required] is None,
            f"{prefix}{name}={changed.get(name)} has no effect without {prefix}{required}",
        )


def _try_settings(settings: Mapping[str, Any], prefix: str) -> None:
    """Call verl's correction on one token, so that it raises its errors about the settings before training.

    Args:
        settings: All settings of the correction.
        prefix: The path of the settings, for the error.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    refuse_if(
        settings["rollout_is"] is not None and settings["rollout_is_threshold"] is None,
        f"{prefix}rollout_is={settings['rollout_is']} has no effect without {prefix}rollout_is_threshold",
    )
    for name in ("rollout_is_threshold", "rollout_rs_threshold"):
        # Hydra parses 0.5_2.0, verl's form of two bounds, as the number 0.52.
        text = overrides().get(f"{prefix}{name}", "")
        refuse_if(
            "_" in text and isinstance(settings[name], int | float),
            f"{prefix}{name}={text}: hydra reads the number {settings[name]} there, for two bounds write "
            f"""{prefix}{name}='"{text}"'""",
        )

    token = torch.full((1, 1), -1.0)
    arguments = {name: value for name, value in settings.items() if name != "loss_type"}
    try:
        compute_rollout_correction_and_rejection_mask(token, token, torch.ones(1, 1), **arguments)
    except (ValueError, TypeError) as error:
        names = " and ".join(f"{prefix}{name}" for name in ("rollout_is", "rollout_rs") if settings[name])
        raise InvalidValue(f"{names}: {error}") from error


def _format_settings(settings: Mapping[str, Any]) -> str:
    """Return the settings as text; "no correction" if there are none."""
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "no correction"


def metrics_of(config: DictConfig) -> tuple[str, ...]:
    """Return the names of the metrics that verl logs if it applies the rollout correction of a config."""
    in_loss = config.actor_rollout_ref.actor.policy_loss.get("rollout_correction") or {}
    in_driver = config.algorithm.get("rollout_correction") or {}
    names = {
        "rollout_is": "rollout_corr/rollout_is_mean",
        "rollout_rs": "rollout_corr/rollout_rs_masked_fraction",
    }
    return tuple(metric for name, metric in names.items() if in_driver.get(name) or in_loss.get(name))
