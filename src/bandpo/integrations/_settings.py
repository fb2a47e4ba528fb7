"""The settings of each framework under which a method would be another one, and the check that refuses them.

What a framework adds to the loss (a KL penalty, an entropy bonus, distillation), multiplies it by (importance weights)
or leaves out of it (masks) is a setting that does what it says, and is no matter of these lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bandpo.errors import InvalidValue
from bandpo.methods import Method


@dataclass(frozen=True)
class RefusedSetting:
    """A setting of a framework, the values of it that an adapter cannot honour, and why.

    Exactly one of ``wrong`` and ``right`` lists values.

    Attributes:
        name: The setting as the framework names it, with a dot before each level: ``dppo.delta_low``.
        why: What would happen, as a clause that follows the value.
        fix: What to do instead, as an imperative.
        wrong: The values that are refused.
        right: The values that are not refused; every other one is.
        beside_rule: Whether it is a user's own choice beside a clip rule alone, and refused beside a whole method only.
    """

    name: str
    why: str
    fix: str
    wrong: tuple[object, ...] = ()
    right: tuple[object, ...] = ()
    beside_rule: bool = False

    def refuses(self, value: object) -> bool:
        """Return whether a value is refused.

        >>> RefusedSetting("eps_clip", "it has no effect", "leave it out", right=(0.2,)).refuses(0.3)
        True
        """
        return value not in self.right if self.right else value in self.wrong


@dataclass(frozen=True)
class RefusedSettings:
    """What an adapter refuses of its framework's settings.

    Attributes:
        prefix: What stands before each name where a user writes it: ``--``, or ``actor.``.
        settings: The list.
    """

    prefix: str
    settings: tuple[RefusedSetting, ...]

    def written(self, setting: RefusedSetting) -> str:
        """Return the name of a setting as a user writes it."""
        return self.prefix + setting.name


def _no_effect(name: str, *defaults: object) -> RefusedSetting:
    """Return the entry of a number whose place the method's bounds take."""
    why = "it would have no effect, as the method has its own bounds"
    fix = "leave it out, and write the interval as FixedClip(low, high)"
    return RefusedSetting(name, why, fix, right=(*defaults, None))


def _dual_clip(name: str, default: object = None) -> RefusedSetting:
    """Return the entry of a framework's own dual clip."""
    why = "the method and this setting would both say which tokens are dropped"
    fix = "leave it out; a dual clip is part of the method, as in Method(FixedClip(0.2, 0.28), DualClip(3))"
    return RefusedSetting(name, why, fix, right=(default,), beside_rule=True)


_SLIME = RefusedSettings(
    "--",
    (
        RefusedSetting(
            "advantage-estimator",
            "the loss would be another one: of one ratio per sequence (gspo), or CISPO's (cispo)",
            "use grpo or another estimator, which changes the advantages alone",
            wrong=("gspo", "cispo"),
        ),
        _no_effect("eps-clip", 0.2),
        _no_effect("eps-clip-high", 0.2),
        _dual_clip("eps-clip-c"),
    ),
)
"""miles grew out of slime and has its arguments."""

REFUSED: Mapping[str, RefusedSettings] = {
    "ms-swift": RefusedSettings(
        "--",
        (
            RefusedSetting(
                "use_liger_kernel",
                "Liger would compute the loss, with ms-swift's own clip in place of the method",
                "leave it out",
                wrong=(True,),
            ),
            RefusedSetting(
                "loss_type",
                "this loss does not clamp the ratio at two bounds, or weights its tokens by it in another way",
                "use grpo, bnpo, dr_grpo or dapo",
                right=("grpo", "bnpo", "dr_grpo", "dapo"),
            ),
            RefusedSetting(
                "importance_sampling_level",
                "it makes one ratio of a sequence, and the bounds are per token",
                "use token",
                right=("token",),
            ),
            _no_effect("epsilon", 0.2),
            _no_effect("epsilon_high"),
            RefusedSetting(
                "delta",
                "the method and this setting would both say which tokens are dropped",
                "leave it out",
                right=(None,),
                beside_rule=True,
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
                right=("ppo",),
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
                wrong=(True,),
            ),
            RefusedSetting(
                "force_on_policy_ratio",
                "every ratio would be 1, and no bound would act",
                "set it to false",
                wrong=(True,),
            ),
            RefusedSetting(
                "disable_ppo_ratio",
                "there would be no ratio to bound",
                "set it to false",
                wrong=(True,),
            ),
            RefusedSetting(
                "sequence_level_importance_ratios",
                "it makes one ratio of a sequence, and the bounds are per token",
                "set it to false",
                wrong=(True,),
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
                right=(True,),
            ),
            RefusedSetting(
                "importance_sampling",
                "it makes one ratio of a sequence, and the bounds are per token",
                "use token",
                right=("token",),
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
                wrong=(True,),
            ),
            RefusedSetting(
                "importance_sampling_level",
                "it makes one ratio of a sequence, and the bounds are per token",
                "use token",
                right=("token",),
            ),
            RefusedSetting(
                "prox_logp_method",
                "AReaL would derive the log-probabilities that the bounds surround from the policy in training",
                "use recompute",
                wrong=("loglinear",),
            ),
            _no_effect("eps_clip", 0.2),
            _no_effect("eps_clip_higher"),
            _dual_clip("c_clip"),
        ),
    ),
    "SkyRL": RefusedSettings(
        "trainer.algorithm.",
        (
            *(_no_effect(name, 0.2) for name in ("eps_clip_low", "eps_clip_high")),
            *(
                RefusedSetting(
                    name,
                    f"it is a setting of SkyRL's loss {loss}, and would have no effect",
                    f"leave it out, and write it as an argument of the method, as in {method}",
                    right=(default,),
                )
                for name, loss, method, default in (
                    ("clip_ratio_c", "dual_clip", "Method(FixedClip(0.2), DualClip(3))", 3.0),
                    ("sapo.tau_pos", "sapo", "SAPO(1.0, 1.05)", 1.0),
                    ("sapo.tau_neg", "sapo", "SAPO(1.0, 1.05)", 1.05),
                    ("cispo.cispo_eps_clip_low", "cispo", "CISPO(1.0, 4.0)", 0.0),
                    ("cispo.cispo_eps_clip_high", "cispo", "CISPO(1.0, 4.0)", 5.0),
                    ("dppo.dppo_type", "dppo", "DPPO(TotalVariation(), 0.2)", "binary_tv"),
                    ("dppo.delta_low", "dppo", "DPPO(TotalVariation(), 0.2)", 0.2),
                    ("dppo.delta_high", "dppo", "DPPO(TotalVariation(), 0.2)", 0.2),
                    ("kl_cov.kl_cov_frac", "kl_cov", "KLCov(0.002, 1.0)", 0.2),
                    ("kl_cov.ppo_kl_coef", "kl_cov", "KLCov(0.002, 1.0)", 1.0),
                    ("clip_cov.clip_ratio", "clip_cov", "KLCov(0.002, 1.0)", 0.0002),
                    ("clip_cov.clip_cov_lb", "clip_cov", "KLCov(0.002, 1.0)", 1.0),
                    ("clip_cov.clip_cov_ub", "clip_cov", "KLCov(0.002, 1.0)", 5.0),
                )
            ),
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
                right=(0.0, None),
            ),
        ),
    ),
}
"""For each framework, by its name in prose, what its adapter refuses."""


def check_settings(framework: str, settings: object, method: Method) -> None:
    """Refuse the settings of a framework that its adapter cannot honour.

    Args:
        framework: Its name in `REFUSED`.
        settings: An object with the settings as attributes, or a mapping. A setting that is missing counts as None.
        method: The run's method.

    Raises:
        ValueError: settings are refused; the message names each, its value, the reason and the fix.

    >>> from bandpo.text import as_method
    >>> check_settings("rLLM", {"eps_clip": 0.2, "eps_clip_high": 0.28}, as_method("DAPO()"))
    Traceback (most recent call last):
    bandpo.errors.InvalidValue: algorithm.eps_clip_high=0.28: it would have no effect, as the method has its own \
bounds; leave it out, and write the interval as FixedClip(low, high)
    """
    refused = REFUSED[framework]
    problems = []
    for setting in refused.settings:
        value = look_up(settings, setting.name)
        if setting.beside_rule and method.only_rule:
            continue
        if setting.refuses(value):
            problems.append(f"{refused.written(setting)}={value}: {setting.why}; {setting.fix}")
    if problems:
        raise InvalidValue("; also ".join(problems))


def look_up(settings: object, name: str) -> object:
    """Return a setting by its name, with a dot before each level; None if it is not there."""
    value = settings
    for part in name.replace("-", "_").split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value
