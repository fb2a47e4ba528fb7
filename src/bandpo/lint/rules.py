"""What a rule is, and what the rules of several frameworks share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bandpo.lint.configuration import Configuration, Setting, Unread
from bandpo.lint.frameworks import FRAMEWORKS


class NotRead(Exception):
    """A rule needs a value that the configuration does not tell. The message says which, and why."""


@dataclass(frozen=True)
class Shown:
    """A setting as a message shows it: ``{x}`` is its value, ``{x.name}`` its name."""

    name: str
    value: Any

    def __str__(self) -> str:
        if isinstance(self.value, Unread):
            return self.value.reason
        return f"{self.value:g}" if isinstance(self.value, float) else str(self.value)


class Values:
    """The settings that a rule reads, as attributes by the rule's short names for them.

    A setting that is not in the configuration has the framework's default.

    Args:
        configuration: The configuration.
        reads: The dotted name of each setting by its short name.
    """

    def __init__(self, configuration: Configuration, reads: Mapping[str, str]):
        self._configuration = configuration
        self._reads = reads

    def __getattr__(self, short_name: str) -> Any:
        """Return the value of a setting.

        Raises:
            NotRead: if it is not known.
        """
        name = self._reads[short_name]
        setting = self._configuration.settings.get(name)
        if setting is None:
            if self._configuration.incomplete:
                raise NotRead(f"{name} may come from {self._configuration.incomplete}")
            return FRAMEWORKS[self._configuration.framework].defaults[name]
        if isinstance(setting.value, Unread):
            raise NotRead(f"{setting.name} is {setting.value.reason}")
        return setting.value

    def is_set(self, *short_names: str) -> bool:
        """Return whether the configuration names one of the settings.

        Raises:
            NotRead: if it names none, and is not complete.
        """
        names = [self._reads[short_name] for short_name in short_names]
        if any(name in self._configuration.settings for name in names):
            return True
        if self._configuration.incomplete:
            raise NotRead(f"{names[0]} may come from {self._configuration.incomplete}")
        return False

    def is_given(self, short_name: str) -> bool:
        """Return whether the configuration gives a setting a value other than None, be it known or not."""
        setting = self.setting(short_name)
        return setting is not None and setting.value is not None

    def known(self, short_name: str) -> Any:
        """Return the value of a setting; None if it is not known."""
        try:
            return getattr(self, short_name)
        except NotRead:
            return None

    def setting(self, short_name: str) -> Setting | None:
        """Return the setting as the configuration names it; None if it does not."""
        return self._configuration.settings.get(self._reads[short_name])

    def shown(self, short_name: str) -> Shown:
        """Return the setting for a message, under the name that the configuration has for it."""
        setting = self.setting(short_name)
        name = self._reads[short_name] if setting is None else setting.name
        return Shown(name, self.known(short_name) if setting is None else setting.value)


@dataclass(frozen=True)
class Rule:
    """One check of the configurations of one framework."""

    id: str
    framework: str
    """A key of `FRAMEWORKS`."""
    severity: str
    """``fix``: the run stops, or trains something else; ``look``: a risk; ``note``: worth knowing, or true of earlier
    versions only."""
    title: str
    """What is wrong, in a few words."""
    reads: Mapping[str, str]
    """Short names of the settings that it reads, with their dotted names. A finding stands at the first "
    "that is set."""
    condition: Callable[[Values], bool]
    """Whether the configuration has the fault."""
    happens: str
    """What happens, with ``{short name}`` for a value and ``{short name.name}`` for the name of a setting."""
    fix: str
    """What to change, in the framework's own names."""
    source: str
    """Where it is shown: a paper, the framework's source or documentation, or a thread."""
    only_before_start: bool = False
    """Whether it is not asked of the configuration that a run has saved, as the framework sets one of its settings from
    the others when the run begins."""


ONE_UPDATE = (
    "Each batch gets one update, and the ratio of new and old probabilities is taken before it: it is 1 for "
    "every "
    "token, and no clip acts."
)
"""What makes a clip idle."""
TRUNCATED_SAMPLING = (
    "The engine reports probabilities among the tokens that are left, the trainer computes them among all. "
    "Every "
    "importance weight is multiplied by the probability of what is left, which is no change of the policy."
)
ONE_ANSWER = (
    "The advantage of an answer is measured against the other answers to its prompt, and there are none: "
)
TWO_ANSWERS = (
    "With two answers to a prompt, division by their spread makes every advantage plus or minus one "
    "constant, however "
    "little the rewards differ."
)
GSPO_RANGE = (
    "GSPO clips the geometric mean of the ratios of an answer, which stays near 1: its paper clips at 3e-4 "
    "and 4e-4. "
    "At 0.05 and more, hardly an answer is clipped."
)
ASYNCHRONOUS = (
    "The old probabilities are computed by the trainer, from weights that are newer than those that sampled "
    "the "
    "answers. The ratio does not measure the distance from the sampler, so the clip does not bound it."
)
GSPO_PAPER = (
    "Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, section 5.1; huggingface/trl "
    "issue 3834"
)
LARGEST_RATES = ((2.0, 3e-5), (float("inf"), 1e-5))
"""Largest learning rates of full fine-tuning that pass, for models below so many billions of parameters."""
LARGEST_RATE_UNKNOWN = 3e-5
"""That for a model whose size is not known."""
LARGEST_RATE_LORA = 2e-4
"""That with LoRA."""
RATE_HAPPENS = (
    "{rate.name} is {rate}. Of 314 examples that verl, SkyRL, prime-rl and OpenRLHF ship for training all weights, 268 "
    "use 1e-6 and none more than 1e-5; 27 with LoRA use 1e-6 to 1e-4. Far above that, a few steps can move the policy "
    "far from where it began."
)
RATE_SOURCE = (
    "examples of verl, verl-recipe, SkyRL, prime-rl and OpenRLHF, August 2026; DAPO, arXiv 2503.14476 (32B: 1e-6); "
    "Schulman et al., LoRA Without Regret, 2025 (with LoRA ten times the rate for all weights)"
)


def billions(model: Any) -> float | None:
    """Return the billions of parameters that a model's name tells; None if it tells none.

    >>> billions("Qwen/Qwen2.5-0.5B-Instruct"), billions("gpt2"), billions("Qwen3-30B-A3B")
    (0.5, None, 30.0)
    """
    match = re.search(r"(?<![A-Za-z0-9.])(\d{1,4}(?:\.\d{1,3})?)[bB](?![A-Za-z0-9])", str(model))
    return float(match[1]) if match else None


def rate_is_high(rate: Any, lora: Any, model: Any) -> bool:
    """Return whether a learning rate is far above those of published runs.

    >>> rate_is_high(2e-5, False, "Qwen2.5-7B"), rate_is_high(2e-5, True, "Qwen2.5-7B")
    (True, False)
    """
    return rate > largest_rate(lora, model)


def largest_rate(lora: Any, model: Any) -> float:
    """Return the learning rate above which one is far above those of published runs.

    Args:
        lora: Whether an adapter is trained, and not all weights.
        model: The model's name, whose size counts.
    """
    if lora:
        return LARGEST_RATE_LORA
    size = billions(model)
    if size is None:
        return LARGEST_RATE_UNKNOWN
    return next(largest for below, largest in LARGEST_RATES if size < below)


def largest(*values: Any) -> float:
    """Return the largest of some numbers; None is left out."""
    return max(value for value in values if value is not None)
