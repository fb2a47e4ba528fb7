"""The text of the method that equals a stock loss of TRL or verl with given settings.

rlvet has the same for the configurations that it reads; a test compares both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
"""Settings by name."""


def method_text(clip: str, objective: str | None = None, level: str = "token") -> str:
    """Return the text of a method from the texts of its parts.

    >>> method_text("FixedClip(0.2)"), method_text("FixedClip(0.2)", "DualClip(3.0)")
    ('FixedClip(0.2)', 'Method(FixedClip(0.2), DualClip(3.0))')
    """
    arguments = [clip]
    if objective is not None:
        arguments.append(objective)
    if level != "token":
        arguments.append(f"level={level!r}")
    return clip if len(arguments) == 1 else f"Method({', '.join(arguments)})"


def call_text(name: str, *numbers: Any) -> str:
    """Return the text of a class or method with numbers as arguments.

    Raises:
        TypeError: if an argument is not a number, as in a damaged configuration or one of another version.

    >>> call_text("FixedClip", 0.2, 0.28)
    'FixedClip(0.2, 0.28)'
    """
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"{name} takes numbers, got {number!r}")
    return f"{name}({', '.join(map(repr, numbers))})"


def fixed_clip(low: float, high: float | None) -> str:
    """Return the text of a clip. A ``low`` above 1 is the same as 1, since ratios are positive."""
    return call_text("FixedClip", min(low, 1.0), low if high is None else high)


TRL_CLIPS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""TRL's ``loss_type``s that clamp the ratio."""


def trl_method(config: Config) -> str:
    """Return the text of the method of a stock GRPOTrainer with these arguments."""
    loss_type = config["loss_type"]
    level = config["importance_sampling_level"]
    low = config["epsilon"]
    high = config.get("epsilon_high")
    if not isinstance(loss_type, str) or not isinstance(level, str):
        raise TypeError(f"loss_type and importance_sampling_level are texts, got {loss_type!r} and {level!r}")
    if loss_type in TRL_CLIPS:
        delta = config.get("delta")
        objective = None if delta is None else call_text("RatioCap", delta)
        return method_text(fixed_clip(low, high), objective, level)
    if loss_type == "cispo":
        # For CISPO, epsilon_high is the bound itself, not its distance from 1.
        return method_text("Unclipped()", call_text("ClippedWeight", low if high is None else high), level)
    if loss_type == "sapo":
        gate = call_text("SigmoidGate", config["sapo_temperature_pos"], config["sapo_temperature_neg"])
        return method_text("Unclipped()", gate, level)
    if loss_type == "vespo":
        names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        weight = call_text("GammaWeight", *(config[f"vespo_{name}"] for name in names))
        return method_text("Unclipped()", weight)
    return method_text("Unclipped()", "Surrogate()", level)


def verl_method(loss_mode: str, actor: Any) -> str | None:
    """Return the text of the method that equals one of verl's policy losses; None if bandpo has no such method.

    There is none for ``clip_cov``, since it draws the tokens that it drops at random. `ClipCov` drops the same share of
    tokens, but not the same tokens.

    Args:
        loss_mode: The loss's name in verl's registry.
        actor: The settings of ``actor_rollout_ref.actor``, and those of its ``policy_loss``.
    """
    low = actor["clip_ratio"] if actor["clip_ratio_low"] is None else actor["clip_ratio_low"]
    high = actor["clip_ratio"] if actor["clip_ratio_high"] is None else actor["clip_ratio_high"]
    if loss_mode == "vanilla":
        return method_text(fixed_clip(low, high), call_text("DualClip", actor["clip_ratio_c"]))
    if loss_mode in ("dppo_tv", "dppo_kl"):
        divergence = "TotalVariation()" if loss_mode == "dppo_tv" else "KL()"
        lower = f"Band({divergence}, {low}, inf)"
        upper = f"Band({divergence}, {high}, inf)"
        clip = lower if low == high else f"TwoSided({lower}, {upper})"
        return method_text(clip, call_text("DropOutside", actor["clip_ratio_c"]))
    if loss_mode == "gspo":
        return call_text("GSPO", low, high)
    if loss_mode == "sapo":
        return call_text("SAPO", actor["tau_pos"], actor["tau_neg"])
    if loss_mode == "gpg":
        return "GPG()"
    if loss_mode == "geo_mean":
        # verl's bounds of this loss are distances of log r from 0: convert them to distances of r from 1.
        return method_text(call_text("FixedClip", -math.expm1(-low), math.expm1(high)), "GeometricMean()")
    if loss_mode == "cispo":
        return call_text("CISPO", low, high)
    return None
