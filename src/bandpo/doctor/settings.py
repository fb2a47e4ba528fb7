"""What the configuration of a run adds to the findings of its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bandpo.doctor.findings import Finding
from bandpo.lint.rules import billions, largest_rate, rate_is_high
from bandpo.runs.setup import Setup

EVIDENCE: Mapping[str, tuple[str, ...]] = {
    "reference-kl": ("LoRA rank", "KL term"),
    "no-signal": ("group size",),
    "truncated": ("length cap",),
    "kl-drift": ("KL term",),
    "hardly-moves": ("learning rate",),
    "no-step": ("learning rate",),
}
"""For each code the settings, as `bandpo.runs.Setup.values` has them, whose values are shown with it."""

OF_LARGE_STEPS = (
    "step-too-large",
    "kl-drift",
    "entropy-collapse",
    "entropy-rise",
    "gradient-spikes",
    "clip-heavy",
    "collapse",
    "nan",
)
"""Codes of what a learning rate that is too large does."""


def with_settings(findings: Sequence[Finding], setup: Setup) -> list[Finding]:
    """Return findings, each with the settings of the run that bear on it.

    Args:
        findings: What a log shows.
        setup: What the run was trained with.
    """
    return [finding._replace(settings=_evidence(finding.code, setup)) for finding in findings]


def _evidence(code: str, setup: Setup) -> tuple[str, ...]:
    texts = []
    for name in EVIDENCE.get(code, ()):
        # A rank of 0 is no adapter.
        if setup.number(name) is not None and (name != "LoRA rank" or setup.number(name)):
            texts.append(str(setup.values[name]))
    if code in OF_LARGE_STEPS:
        rate = _high_rate(setup)
        if rate:
            texts.append(rate)
    return tuple(texts)


def _high_rate(setup: Setup) -> str:
    """Return the learning rate if it is above those of published runs, with the largest of them; else nothing."""
    rate = setup.number("learning rate")
    if rate is None:
        return ""
    lora = bool(setup.number("LoRA rank"))
    model = setup.values["model"].value if "model" in setup.values else None
    if not rate_is_high(rate, lora, model):
        return ""
    size = billions(model)
    trained = "LoRA adapters" if lora else "all weights"
    of = "" if size is None or lora else f" of a model of {size:g} billion parameters"
    most = largest_rate(lora, model)
    return (
        f"{setup.values['learning rate']}, above the {most:g} up to which published runs train {trained}{of}"
    )
