"""The rule on the learning rate, which depends on the optimizer, on LoRA and on the size of the model."""

from __future__ import annotations

import re
from typing import Any

from rlvet._numbers import format_number, format_setting
from rlvet.lint.values import UnknownValue, Values
from rlvet.runs.configuration import Setting, Unresolved

LARGEST_RATES = ((0.05, 1e-3), (0.2, 1e-4), (2.0, 3e-5), (float("inf"), 1e-5))
"""Largest learning rates of full fine-tuning without a finding, each below a model size (billions of parameters).

The last two are from published runs. Models below 0.2 billion parameters are rarely trained by RL, so the first two are
estimates: the rates at which models of that size are usually trained with supervision, divided by ten for the second.
"""
LARGEST_RATE_UNKNOWN = 3e-5
"""The largest learning rate for a model of unknown size."""
LARGEST_RATE_LORA = 2e-4
"""The largest learning rate with LoRA."""

TINY = 0.01
"""Size of a model for tests and demonstrations, in billions of parameters. Its name has no size."""
TINY_NAME = re.compile(r"(?<![a-z])tiny(?![a-z])|(^|/)multiplication$", re.IGNORECASE)
"""Names of such models: ``tiny-Qwen2ForCausalLM``, and the embedded model of bandpo-lab."""
_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d{1,4}(?:\.\d{1,3})?)([bBmM])(?![A-Za-z0-9])")


def billions(model: Any) -> float | None:
    """Return the billions of parameters in a model's name; None if the name has no size.

    >>> billions("Qwen/Qwen2.5-0.5B-Instruct"), billions("SmolLM2-135M"), billions("gpt2"), billions("Qwen3-30B-A3B")
    (0.5, 0.135, None, 30.0)
    """
    match = _SIZE.search(str(model))
    if match is None:
        return TINY if TINY_NAME.search(str(model)) else None
    unit = 1e-3 if match[2] in "mM" else 1.0
    return float(match[1]) * unit


def rate_is_high(rate: Any, lora: Any, model: Any) -> bool:
    """Return whether a learning rate is far above those of published runs.

    >>> rate_is_high(2e-5, False, "Qwen2.5-7B"), rate_is_high(2e-5, True, "Qwen2.5-7B")
    (True, False)
    """
    return rate > largest_rate(lora, model)


def largest_rate(lora: Any, model: Any) -> float:
    """Return the learning rate above which one is far above those of published runs.

    Args:
        lora: True if only an adapter is trained.
        model: The model's name, from which its size is read.
    """
    if lora:
        return LARGEST_RATE_LORA
    size = billions(model)
    if size is None:
        return LARGEST_RATE_UNKNOWN
    return next(rate for size_limit, rate in LARGEST_RATES if size < size_limit)


def describe_high_rate(rate: float, lora: bool | None, model: Any, optimizer: str) -> str:
    """Say what a learning rate is above, if it is far above those of published runs; return an empty text if it is not.

    Args:
        rate: The learning rate.
        lora: True if only an adapter is trained; None if this is not known.
        model: The model's name, from which its size is read; None if it is not known.
        optimizer: The name of the optimizer. The limits are those of Adam.

    >>> describe_high_rate(5e-4, False, "Qwen2.5-7B", "adamw")
    'above 1e-05, the largest that counts as usual for all weights of a model of 7 billion parameters'
    >>> describe_high_rate(5e-5, None, None, "adamw")
    'above 3e-05, the largest that counts as usual for all weights (LoRA adapters: 0.0002)'
    """
    if not is_adam(optimizer) or not rate_is_high(rate, lora, model):
        return ""
    size = billions(model)
    weights = "all weights"
    if lora:
        weights = "LoRA adapters"
    elif size is not None:
        weights = f"all weights of a model of {format_number(size, 6)} billion parameters"
    limit = largest_rate(lora, model)
    text = f"above {format_setting(limit)}, the largest that counts as usual for {weights}"
    if lora is not None:
        return text
    lora_limit = format_setting(LARGEST_RATE_LORA)
    if rate > LARGEST_RATE_LORA:
        return f"{text}, and above {lora_limit}, the largest for LoRA adapters"
    return f"{text} (LoRA adapters: {lora_limit})"


def learning_rate_is_high(v: Values) -> bool:
    """Return whether the learning rate is far above those of published runs.

    Args:
        v: The values of a rule that reads ``rate``, ``model`` and ``lora``, and ``optimizer`` if the framework has such
            a setting.

    Raises:
        UnknownValue: if the answer depends on a value that is not known, or the optimizer is no variant of Adam.
    """
    _check_optimizer(v)
    if v.rate <= LARGEST_RATES[-1][1]:
        return False
    if v.reads("optimizer"):
        # Raises an error if the optimizer is not known.
        _ = v.optimizer
    try:
        is_lora = uses_lora(v)
    except UnknownValue:
        # A rate above both limits is high with LoRA and without.
        if v.rate <= LARGEST_RATE_LORA:
            raise
        is_lora = False
    if is_lora:
        return v.rate > LARGEST_RATE_LORA
    model = v.setting("model")
    if model is None or model.value is None:
        return rate_is_high(v.rate, lora=False, model=v.get("model"))

    # A part of a path may be known, and contain the size.
    is_unread = isinstance(model.value, Unresolved)
    text = f"{model.value.known_part} {model.value.reason}" if is_unread else str(model.value)
    if billions(text) is not None:
        return rate_is_high(v.rate, lora=False, model=text)
    if LARGEST_RATE_UNKNOWN < v.rate <= LARGEST_RATES[0][1]:
        reason = model.value.reason if is_unread else f"{text}, a name without a size"
        raise UnknownValue(f"{model.name} is {reason}, and the limit depends on the model's size")
    return v.rate > LARGEST_RATE_UNKNOWN


# The optimizer

_OPTIMIZER = re.compile(r"(^|[._])optim(izer)?(_config|_args)?([._](type|name|cls))?$")
_LARGER_RATES = ("galore", "apollo", "schedule", "lomo")
"""Parts of the names of variants of Adam that are used with much larger rates."""


def is_adam(optimizer: str) -> bool:
    """Return whether an optimizer is a variant of Adam that is used with the learning rates of Adam.

    >>> is_adam("adamw_bnb_8bit"), is_adam("FusedAdam"), is_adam("sgd"), is_adam("galore_adamw")
    (True, True, False, False)
    """
    name = optimizer.lower()
    return "adam" in name and not any(part in name for part in _LARGER_RATES)


def _check_optimizer(v: Values) -> None:
    """Raise an error if the optimizer is known and no variant of Adam, for which the limits do not hold."""
    setting = v.setting("optimizer") if v.reads("optimizer") else None
    if setting is None:
        settings = [s for name, s in v.settings.items() if _OPTIMIZER.search(name) and _is_of_policy(name)]
        setting = next((setting for setting in settings if isinstance(setting.value, str)), None)
    if setting is None or not isinstance(setting.value, str):
        return
    if not is_adam(setting.value):
        raise UnknownValue(f"{setting.name} is {setting.value}, and the limits are those of Adam")


# LoRA

_LORA = re.compile(r"(^|[._])(q?lora|peft)([._]|$)", re.IGNORECASE)
_SWITCH = re.compile(r"(^|[._])((use|enable|with)_(q?lora|peft)|q?lora|peft|lora\.enabled?)$", re.IGNORECASE)
_RANK = re.compile(r"[._](r|rank|dim)$", re.IGNORECASE)
_ADAPTER = re.compile(r"[._](adapter|adapter_path|config)$", re.IGNORECASE)
_OTHER_MODELS = re.compile(
    r"(^|\.)(critic|ref|reference|reward|teacher|rollout|inference|orchestrator)([._]|$)|max_lora"
)
"""Names of settings of other models than the policy, and of the engine."""


def _is_of_policy(name: str) -> bool:
    """Return whether a setting is one of the policy's training, and not of another model or of the engine."""
    return not _OTHER_MODELS.search(name)


def uses_lora(v: Values) -> bool:
    """Return whether only a LoRA adapter is trained, whatever the name of the setting. A rank of 0 is no LoRA.

    Args:
        v: The values of a rule that reads ``lora``.

    Raises:
        UnknownValue: if this is not known.
    """
    settings = {name: s for name, s in v.settings.items() if _LORA.search(name) and _is_of_policy(name)}
    switches = [setting for name, setting in settings.items() if _SWITCH.search(name)]
    ranks = [setting for name, setting in settings.items() if _RANK.search(name)]
    adapters = [setting for name, setting in settings.items() if _ADAPTER.search(name)]
    deciding = [*switches, *ranks, *adapters]
    if any(setting.value is False for setting in switches):
        return False
    if any(_is_on(setting) for setting in deciding):
        return True
    for setting in deciding:
        if isinstance(setting.value, Unresolved):
            raise UnknownValue(f"{setting.name} is {setting.value.reason}")
    # Other settings, such as lora_alpha, have no effect where the rank is 0 by default.
    is_off_by_rank = v.default("lora") == 0 and v.default("lora") is not False
    if settings and not deciding and not is_off_by_rank:
        return True
    return bool(v.lora)


def _is_on(setting: Setting) -> bool:
    """Return whether a setting of LoRA has a value that enables it."""
    return bool(setting.value) and not isinstance(setting.value, Unresolved)
