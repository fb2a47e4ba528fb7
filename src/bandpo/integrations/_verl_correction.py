"""Rollout correction in verl: which code applies a setting of it, and a refusal where none does.

verl has two places. Its driver weights and rejects tokens once a batch, where the trainer computes log-probabilities
of its own (``bypass_mode=false``) and the rollout engine's are there (``calculate_log_probs=true``). Its loss
``bypass_mode`` does so in each worker, by settings of the policy loss. Under ``bypass_mode=true`` every other loss is
given the batch as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from bandpo.errors import InvalidValue
from bandpo.integrations._verl_settings import ROLLOUT, WHERE, bypasses, overrides, refuse

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.workers.config import ActorConfig

    from bandpo.methods import Method

DRIVER = "algorithm.rollout_correction."
LOSS = f"{WHERE}rollout_correction."
STOCK: Mapping[str, Any] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "loss_type": "ppo_clip",
}
"""The defaults of verl's configuration, under which nothing is corrected."""
PARENTS = {
    "rollout_is_threshold": "rollout_is",
    "rollout_is_batch_normalize": "rollout_is",
    "rollout_rs_threshold": "rollout_rs",
}
"""For each setting that acts beside another alone, that other."""


def check_correction(config: DictConfig, actor: ActorConfig, loss: str, method: Method | None) -> str:
    """Check that some code applies each setting of rollout correction.

    Args:
        config: The run's configuration.
        actor: Its actor's settings.
        loss: The loss that the worker calls.
        method: The method that it is; None if it is none of bandpo's.

    Returns:
        What is applied, and by which code, in words.

    Raises:
        ValueError: nothing applies a setting; the message names it, and the setting that would change that.
    """
    driver = {**STOCK, **dict(config.algorithm.get("rollout_correction") or {})}
    changed = {name: driver[name] for name, value in STOCK.items() if driver[name] != value}
    refuse(
        bypasses(config) and not config.actor_rollout_ref.rollout.calculate_log_probs,
        f"{ROLLOUT}calculate_log_probs=false leaves out the rollout engine's log-probabilities, which "
        f"{DRIVER}bypass_mode=true makes the old ones: set it to true",
    )
    if loss == "bypass_mode":
        return _of_loss(config, actor, changed)
    applied = _of_driver(config, changed, method)
    if loss == "geo_mean" and "rollout_is" in changed:
        # The one loss of verl's that does not multiply each token's loss by its weight.
        applied += "; geo_mean multiplies each sequence by the geometric mean of its weights"
    return applied


def _of_driver(config: DictConfig, changed: Mapping[str, Any], method: Method | None) -> str:
    """Check the settings beside a loss that corrects nothing itself."""
    for name in dict(config.actor_rollout_ref.actor.policy_loss.get("rollout_correction") or {}):
        raise InvalidValue(f"{LOSS}{name}: no loss but verl's bypass_mode reads it; write {DRIVER}{name}")
    if "loss_type" in changed:
        beside = f" beside {method}" if method else ""
        raise InvalidValue(
            f"{DRIVER}loss_type={changed['loss_type']} has no effect{beside}: verl's loss bypass_mode alone reads it"
        )
    _check_parents(changed, DRIVER)
    corrections = [name for name in ("rollout_is", "rollout_rs") if name in changed]
    for name in corrections:
        setting = f"{DRIVER}{name}={changed[name]}"
        if bypasses(config):
            anchored = method is not None and method.old_policy == "rollout"
            remedy = "leave it out" if anchored else f"set {DRIVER}bypass_mode=false, or leave it out"
            raise InvalidValue(
                f"{setting}: under {DRIVER}bypass_mode=true no code of verl applies it to this loss, since its driver "
                f"does so with {DRIVER}bypass_mode=false only, and its own loss bypass_mode is another loss: {remedy}"
            )
        refuse(
            not config.actor_rollout_ref.rollout.calculate_log_probs,
            f"{setting} needs the rollout engine's log-probabilities, and {ROLLOUT}calculate_log_probs=false leaves "
            "them out: set it to true",
        )
    if not corrections:
        return "none"
    _try({**STOCK, **changed}, DRIVER)
    return f"by verl's driver, once a batch: {_listed(changed)}"


def _of_loss(config: DictConfig, actor: ActorConfig, changed: Mapping[str, Any]) -> str:
    """Check the settings of verl's loss ``bypass_mode``, which reads those of the policy loss alone."""
    refuse(
        not bypasses(config),
        f"{WHERE}loss_mode=bypass_mode takes the old log-probabilities for the rollout engine's: set "
        f"{DRIVER}bypass_mode=true",
    )
    read = {name: actor.policy_loss.rollout_correction.get(name, value) for name, value in STOCK.items()}
    for name, value in changed.items():
        refuse(
            read[name] != value,
            f"{DRIVER}{name}={value} does not reach the workers, where the loss bypass_mode reads {LOSS}{name}: write "
            f"+{LOSS}{name}={value}",
        )
    written = dict(config.actor_rollout_ref.actor.policy_loss.get("rollout_correction") or {})
    _check_parents({name: value for name, value in written.items() if value != STOCK.get(name)}, LOSS, read)
    refuse(
        read["loss_type"] not in ("ppo_clip", "reinforce"),
        f"{LOSS}loss_type must be ppo_clip or reinforce, got {read['loss_type']!r}",
    )
    _try(read, LOSS)
    set_here = {name: value for name, value in read.items() if value != STOCK[name]}
    weights = " (loss_type=ppo_clip reports the weights and does not apply them)"
    reported = read["rollout_is"] is not None and read["loss_type"] == "ppo_clip"
    return f"by verl's loss bypass_mode in each worker: {_listed(set_here)}{weights if reported else ''}"


def _check_parents(changed: Mapping[str, Any], where: str, read: Mapping[str, Any] | None = None) -> None:
    """Refuse a threshold of what is switched off."""
    read = {**STOCK, **changed} if read is None else read
    for name, parent in PARENTS.items():
        refuse(
            name in changed and read[parent] is None,
            f"{where}{name}={changed.get(name)} has no effect without {where}{parent}",
        )


def _try(settings: Mapping[str, Any], where: str) -> None:
    """Have verl's own code correct one token, so that it reads the settings now and not in the first batch."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    refuse(
        settings["rollout_is"] is not None and settings["rollout_is_threshold"] is None,
        f"{where}rollout_is={settings['rollout_is']} has no effect without {where}rollout_is_threshold",
    )
    for name in ("rollout_is_threshold", "rollout_rs_threshold"):
        text = overrides().get(f"{where}{name}", "")
        refuse(
            "_" in text and isinstance(settings[name], int | float),
            f"{where}{name}={text}: hydra reads the number {settings[name]} there, for two bounds write "
            f"""{where}{name}='"{text}"'""",
        )
    token = torch.full((1, 1), -1.0)
    chosen = {name: value for name, value in settings.items() if name != "loss_type"}
    try:
        compute_rollout_correction_and_rejection_mask(token, token, torch.ones(1, 1), **chosen)
    except (ValueError, TypeError) as error:
        names = " and ".join(f"{where}{name}" for name in ("rollout_is", "rollout_rs") if settings[name])
        raise InvalidValue(f"{names}: {error}") from error


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "no correction"


def metrics_of(config: DictConfig) -> tuple[str, ...]:
    """Return the metrics that verl logs if it applies the rollout correction that a configuration asks for."""
    inner = config.actor_rollout_ref.actor.policy_loss.get("rollout_correction") or {}
    outer = config.algorithm.get("rollout_correction") or {}
    names = {
        "rollout_is": "rollout_corr/rollout_is_mean",
        "rollout_rs": "rollout_corr/rollout_rs_masked_fraction",
    }
    return tuple(metric for name, metric in names.items() if outer.get(name) or inner.get(name))
