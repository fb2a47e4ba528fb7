"""Add the settings of a run's configuration to the findings of its log."""

from __future__ import annotations

from collections.abc import Sequence

from rlvet._numbers import format_number, format_setting
from rlvet.checks.findings import Finding, Kind
from rlvet.lint.learning_rate import billions, is_adam, largest_rate, rate_is_high
from rlvet.runs.setup import Setup


def with_settings(findings: Sequence[Finding], setup: Setup) -> list[Finding]:
    """Return the findings, each with the related settings of the run.

    Args:
        findings: The findings of a log.
        setup: The framework, method and settings of the run.
    """
    return [finding._replace(settings=_related_settings(finding.kind, setup)) for finding in findings]


def _related_settings(kind: Kind | None, setup: Setup) -> tuple[str, ...]:
    """Return the settings that are related to a kind of finding, as texts with their values."""
    if kind is None:
        return ()
    texts = []
    for name in kind.settings:
        value = setup.number(name)
        # A LoRA rank of 0 means that there is no adapter.
        has_no_adapter = name == "LoRA rank" and value == 0
        if value is not None and not has_no_adapter:
            texts.append(str(setup.values[name]))
    if kind.is_effect_of_large_steps:
        rate = _describe_high_rate(setup)
        if rate:
            texts.append(rate)
    return tuple(texts)


def _describe_high_rate(setup: Setup) -> str:
    """Describe a learning rate that is above those of published runs; return an empty text if it is not."""
    rate = setup.number("learning rate")
    if rate is None:
        return ""
    lora = bool(setup.number("LoRA rank"))
    model = setup.values["model"].value if "model" in setup.values else None
    optimizer = setup.values["optimizer"].value if "optimizer" in setup.values else "adamw"
    if not is_adam(str(optimizer)) or not rate_is_high(rate, lora, model):
        return ""
    size = billions(model)
    weights = "all weights"
    if lora:
        weights = "LoRA adapters"
    elif size is not None:
        weights = f"all weights of a model of {format_number(size, 6)} billion parameters"
    limit = largest_rate(lora, model)
    rate_text = str(setup.values["learning rate"])
    return f"{rate_text}, above {format_setting(limit)}, the most that published runs use to train {weights}"
