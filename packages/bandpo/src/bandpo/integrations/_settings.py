"""The settings of each framework that would change a method or have no effect beside it, and the check for them.

The lists do not contain settings that work beside any method: terms added to the loss (a KL penalty, an entropy bonus,
distillation), importance weights that multiply it, and masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bandpo.core.errors import InvalidValue
from bandpo.core.methods import Method


@dataclass(frozen=True)
class RefusedSetting:
    """A setting of a framework with values that an integration cannot honour.

    Exactly one of ``refused`` and ``allowed`` lists values.

    Attributes:
        name: The framework's name of the setting, with its levels separated by dots: ``dppo.delta_low``.
        reason: The consequence of a refused value, as a clause that follows the value in the error message.
        fix: The remedy, as an imperative.
        refused: The values that are refused.
        allowed: The values that are allowed; all others are refused.
        allowed_beside_rule: True if every value is allowed beside a clip rule alone, because only a whole method
            contradicts the setting.
    """

    name: str
    reason: str
    fix: str
    refused: tuple[object, ...] = ()
    allowed: tuple[object, ...] = ()
    allowed_beside_rule: bool = False

    def refuses(self, value: object) -> bool:
        """Return True if a value is refused.

        >>> RefusedSetting("eps_clip", "it has no effect", "leave it out", allowed=(0.2,)).refuses(0.3)
        True
        """
        return value not in self.allowed if self.allowed else value in self.refused


@dataclass(frozen=True)
class RefusedSettings:
    """The settings of one framework with values that its integration refuses.

    Attributes:
        prefix: The prefix that users write before the names of the settings: ``--``, or ``actor.``.
        settings: The settings.
    """

    prefix: str
    settings: tuple[RefusedSetting, ...]


def _no_effect(name: str, *defaults: object) -> RefusedSetting:
    """Return the refusal of a framework's own clip bound, which would have no effect beside the method's bounds.

    Args:
        name: The name of the setting.
        defaults: The values that are accepted, since the user has not set them.
    """
    reason = "it would have no effect, as the method has its own bounds"
    fix = "leave it out; or, to clip at it instead, write the interval as the method FixedClip(low, high)"
    return RefusedSetting(name, reason, fix, allowed=(*defaults, None))


def _dual_clip(name: str, default: object = None) -> RefusedSetting:
    """Return the refusal of a framework's own dual clip; its default value is accepted."""
    reason = "the method and this setting would both determine which tokens are dropped"
    fix = "leave it out; a dual clip is part of the method, as in BandPO(dual_clip=3)"
    return RefusedSetting(name, reason, fix, allowed=(default,), allowed_beside_rule=True)


def _of_own_loss(framework: str, name: str, loss: str, method: str, default: object) -> RefusedSetting:
    """Return the refusal of a setting that only one of a framework's own losses reads; its default value is accepted.

    Args:
        framework: The framework's name.
        name: The name of the setting.
        loss: The loss that reads it.
        method: The method that is this loss; empty if bandpo has none in this framework.
        default: The default value of the setting.
    """
    reason = f"it is a setting of {framework}'s loss {loss}, and would have no effect"
    instead = (
        f"write it as an argument of the method {method}" if method else f"train with the loss {loss} itself"
    )
    fix = f"leave it out; or, for that loss, {instead}"
    return RefusedSetting(name, reason, fix, allowed=(default, None))


_SLIME = RefusedSettings(
    "--",
    (
        RefusedSetting(
            "advantage-estimator",
            "the loss would be another one: of one ratio per sequence (gspo), or CISPO's (cispo)",
            "use grpo or another estimator, which changes the advantages alone",
            refused=("gspo", "cispo"),
        ),
        _no_effect("eps-clip", 0.2),
        _no_effect("eps-clip-high", 0.2),
        _dual_clip("eps-clip-c"),
    ),
)
"""The settings of slime, and of miles, a fork of it with the same arguments."""

REFUSED: Mapping[str, RefusedSettings] = {
    "ms-swift": RefusedSettings(
        "--",
        (
            RefusedSetting(
                "use_liger_kernel",
                "Liger would compute the loss, with ms-swift's own clip in place of the method",
                "leave it out",
                refused=(True,),
            ),
            RefusedSetting(
                "loss_type",
                "this loss does not clamp the ratio at two bounds, or weights its tokens by it in another way",
                "use grpo, bnpo, dr_grpo or dapo",
                allowed=("grpo", "bnpo", "dr_grpo", "dapo"),
            ),
            RefusedSetting(
                "importance_sampling_level",
                "it makes one ratio of a sequence, and the bounds are per token",
                "use token",
                allowed=("token",),
            ),
            _no_effect("epsilon", 0.2),
            _no_effect("epsilon_high"),
            RefusedSetting(
                "delta",
                "the method and this setting would both determine which tokens are dropped",
                "leave it out",
                allowed=(None,),
                allowed_beside_rule=True,
            ),
        ),
    ),
    "slime": _SLIME,
    "miles": _SLIME,
    "OpenRLHF": RefusedSettings(
        "--actor.",
        (
            RefusedSetting(
                "policy_loss_type",
                "it makes one ratio of a sequence, and the bounds are per token",
                "use ppo",
                allowed=("ppo",),
            ),
            _no_effect("eps_clip_low_high", (0.2, 0.2), [0.2, 0.2]),
            _dual_clip("dual_clip"),
        ),
    ),
    "NeMo-RL": RefusedSettings(
        "loss_fn.",
        (
            RefusedSetting(
                "use_cispo",
                "NeMo-RL would compute CISPO's loss in place of the method",
                "set it to false",
                refused=(True,),
            ),
            RefusedSetting(
                "force_on_policy_ratio",
                "every ratio would be 1, and no bound would act",
                "set it to false",
                refused=(True,),
            ),
            RefusedSetting(
                "disable_ppo_ratio",
                "there would be no ratio to bound",
                "set it to false",
                refused=(True,),
            ),
            RefusedSetting(
                "sequence_level_importance_ratios",
                "it makes one ratio of a sequence, and the bounds are per token",
                "set it to false",
                refused=(True,),
            ),
            _no_effect("ratio_clip_min", 0.2),
            _no_effect("ratio_clip_max", 0.2),
            _dual_clip("ratio_clip_c"),
        ),
    ),
    "ROLL": RefusedSettings(
        "",
        (
            RefusedSetting(
                "use_pg_clip_range",
                "ROLL would clip at pg_clip, and the method's bounds would have no effect",
                "set it to true",
                allowed=(True,),
            ),
            RefusedSetting(
                "importance_sampling",
                "it makes one ratio of a sequence, and the bounds are per token",
                "use token",
                allowed=("token",),
            ),
            _no_effect("pg_clip_low", 0.2),
            _no_effect("pg_clip_high", 0.2),
            _dual_clip("dual_clip_loss", False),
        ),
    ),
    "AReaL": RefusedSettings(
        "actor.",
        (
            RefusedSetting(
                "use_sapo_loss",
                "AReaL would compute SAPO's loss in place of the method",
                "set it to false",
                refused=(True,),
            ),
            RefusedSetting(
                "importance_sampling_level",
                "it makes one ratio of a sequence, and the bounds are per token",
                "use token",
                allowed=("token",),
            ),
            RefusedSetting(
                "prox_logp_method",
                "AReaL would derive the log-probabilities that the bounds surround from the policy in training",
                "use recompute",
                refused=("loglinear",),
            ),
            _no_effect("eps_clip", 0.2),
            _no_effect("eps_clip_higher"),
            _dual_clip("c_clip"),
        ),
    ),
    "SkyRL": RefusedSettings(
        "trainer.algorithm.",
        (
            _no_effect("eps_clip_low", 0.2),
            _no_effect("eps_clip_high", 0.2),
            _of_own_loss("SkyRL", "clip_ratio_c", "dual_clip", "Method(FixedClip(0.2), DualClip(3))", 3.0),
            _of_own_loss("SkyRL", "sapo.tau_pos", "sapo", "SAPO(1.0, 1.05)", 1.0),
            _of_own_loss("SkyRL", "sapo.tau_neg", "sapo", "SAPO(1.0, 1.05)", 1.05),
            _of_own_loss("SkyRL", "cispo.cispo_eps_clip_low", "cispo", "CISPO(1.0, 4.0)", 0.0),
            _of_own_loss("SkyRL", "cispo.cispo_eps_clip_high", "cispo", "CISPO(1.0, 4.0)", 5.0),
            _of_own_loss("SkyRL", "dppo.dppo_type", "dppo", "DPPO(TotalVariation(), 0.2)", "binary_tv"),
            _of_own_loss("SkyRL", "dppo.delta_low", "dppo", "DPPO(TotalVariation(), 0.2)", 0.2),
            _of_own_loss("SkyRL", "dppo.delta_high", "dppo", "DPPO(TotalVariation(), 0.2)", 0.2),
            _of_own_loss("SkyRL", "kl_cov.kl_cov_frac", "kl_cov", "", 0.2),
            _of_own_loss("SkyRL", "kl_cov.ppo_kl_coef", "kl_cov", "", 1.0),
            _of_own_loss("SkyRL", "clip_cov.clip_ratio", "clip_cov", "", 0.0002),
            _of_own_loss("SkyRL", "clip_cov.clip_cov_lb", "clip_cov", "", 1.0),
            _of_own_loss("SkyRL", "clip_cov.clip_cov_ub", "clip_cov", "", 5.0),
        ),
    ),
    "verl": RefusedSettings(
        "actor_rollout_ref.actor.",
        (
            _no_effect("clip_ratio", 0.2),
            _no_effect("clip_ratio_low", 0.2),
            _no_effect("clip_ratio_high", 0.2),
            _of_own_loss("verl", "tau_pos", "sapo", "SAPO(1.0, 1.05)", 1.0),
            _of_own_loss("verl", "tau_neg", "sapo", "SAPO(1.0, 1.05)", 1.05),
            _of_own_loss("verl", "policy_loss.clip_cov_ratio", "clip_cov", "ClipCov()", 0.0002),
            _of_own_loss("verl", "policy_loss.clip_cov_lb", "clip_cov", "ClipCov()", 1.0),
            _of_own_loss("verl", "policy_loss.clip_cov_ub", "clip_cov", "ClipCov()", 5.0),
            _of_own_loss("verl", "policy_loss.kl_cov_ratio", "kl_cov", "KLCov(0.002, 1.0)", 0.0002),
            _of_own_loss("verl", "policy_loss.ppo_kl_coef", "kl_cov", "KLCov(0.002, 1.0)", 0.1),
            _of_own_loss("verl", "policy_loss.dro_beta", "dro", "DRO(0.1)", None),
        ),
    ),
    "rLLM": RefusedSettings(
        "algorithm.",
        (
            _no_effect("eps_clip", 0.2),
            _no_effect("eps_clip_high"),
            RefusedSetting(
                "kl_beta",
                "rLLM adds no KL penalty to a registered loss",
                "set it to 0",
                allowed=(0.0, None),
            ),
        ),
    ),
}
"""The refused settings of each framework, by its name in prose."""


def check_settings(framework: str, settings: object, method: Method) -> None:
    """Check that a framework's settings do not contradict a method.

    Args:
        framework: The framework's name in `REFUSED`.
        settings: An object with the settings as attributes, or a mapping. A setting that is missing counts as None.
        method: The run's method.

    Raises:
        ValueError: some are refused; the message has the name, value, reason and fix of each.

    >>> from bandpo.core.text import as_method
    >>> check_settings("rLLM", {"eps_clip": 0.2, "eps_clip_high": 0.28}, as_method("DAPO()"))
    Traceback (most recent call last):
    bandpo.core.errors.InvalidValue: algorithm.eps_clip_high=0.28: it would have no effect, as the method has its own \
bounds; leave it out; or, to clip at it instead, write the interval as the method FixedClip(low, high)
    """
    entries = REFUSED[framework]
    problems = []
    for setting in entries.settings:
        if setting.allowed_beside_rule and method.only_rule:
            continue
        value = get_setting(settings, setting.name)
        if setting.refuses(value):
            problems.append(f"{entries.prefix}{setting.name}={value}: {setting.reason}; {setting.fix}")
    if problems:
        raise InvalidValue("; also ".join(problems))


def get_setting(settings: object, name: str) -> object:
    """Return a setting by its name, with its levels separated by dots; None if there is none."""
    value = settings
    for level in name.replace("-", "_").split("."):
        value = value.get(level) if isinstance(value, Mapping) else getattr(value, level, None)
    return value
