"""The class of a rule, with texts and limits that rules of several frameworks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlvet._numbers import format_setting
from rlvet.lint.configuration import Configuration, Setting, Unread


class UnknownValue(Exception):
    """Raised if a rule needs a value that is not known. The message names the value and the reason."""


@dataclass(frozen=True)
class MessageSetting:
    """A setting in a message: ``{x}`` is formatted as its value, ``{x.name}`` as its name.

    ``{x:TEXT}`` is formatted as the text if the value is None, and else as the value.
    """

    name: str
    value: Any

    def __str__(self) -> str:
        if isinstance(self.value, Unread):
            return self.value.reason
        if isinstance(self.value, float):
            return format_setting(self.value)
        return str(self.value)

    def __format__(self, text: str) -> str:
        return text if text and self.value is None else str(self)


class Values:
    """The values of the settings that a rule reads, as attributes with the rule's short names.

    A setting that the configuration does not set has the framework's default.

    Args:
        configuration: The configuration.
        reads: The dotted name of each setting, by its short name.
    """

    def __init__(self, configuration: Configuration, reads: Mapping[str, str]):
        self._configuration = configuration
        self._reads = reads

    def __getattr__(self, short_name: str) -> Any:
        """Return the value of a setting.

        Raises:
            UnknownValue: if the value is not known.
        """
        name = self._reads[short_name]
        setting = self._configuration.settings.get(name)
        if setting is None:
            self._check_default(name)
            return self._configuration.default(name)
        if isinstance(setting.value, Unread):
            raise UnknownValue(f"{setting.name} is {setting.value.reason}")
        return setting.value

    def is_set(self, *short_names: str) -> bool:
        """Return whether the configuration sets at least one of the settings.

        Raises:
            UnknownValue: if it sets none, and is not complete.
        """
        names = [self._reads[short_name] for short_name in short_names]
        if any(name in self._configuration.settings for name in names):
            return True
        for name in names:
            self._check_default(name)
        return False

    def _check_default(self, name: str) -> None:
        """Check that a setting that the configuration does not set has its default.

        Raises:
            UnknownValue: if it may be set elsewhere, or is of another version.
        """
        reason = self._configuration.reason_unknown(name)
        if reason:
            raise UnknownValue(reason)

    def is_set_to_more_than(self, short_name: str, limit: float) -> bool:
        """Return whether the configuration sets a setting to a number above a limit.

        Raises:
            UnknownValue: if it does not set it and is not complete, or the value is not known.
        """
        return self.is_set(short_name) and getattr(self, short_name) > limit

    def has_value(self, short_name: str) -> bool:
        """Return whether the configuration sets a setting to anything but None, even to a value that is not known.

        Raises:
            UnknownValue: if the configuration does not set it, and is not complete.
        """
        setting = self.setting(short_name)
        if setting is None:
            self._check_default(self._reads[short_name])
            return False
        return setting.value is not None

    def get(self, short_name: str) -> Any:
        """Return the value of a setting; None if it is not known."""
        try:
            return getattr(self, short_name)
        except UnknownValue:
            return None

    @property
    def settings(self) -> Mapping[str, Setting]:
        """All settings that the configuration sets, by their dotted names."""
        return self._configuration.settings

    def reads(self, short_name: str) -> bool:
        """Return whether the rule reads a setting of this short name."""
        return short_name in self._reads

    def default(self, short_name: str) -> Any:
        """Return the default of a setting."""
        return self._configuration.default(self._reads[short_name])

    def setting(self, short_name: str) -> Setting | None:
        """Return the setting of the configuration; None if the configuration does not set it."""
        return self._configuration.settings.get(self._reads[short_name])

    def for_message(self, short_name: str) -> MessageSetting:
        """Return a setting for a message, with the name that the configuration uses for it."""
        setting = self.setting(short_name)
        if setting is None:
            return MessageSetting(self._reads[short_name], self.get(short_name))
        return MessageSetting(setting.name, setting.value)


@dataclass(frozen=True)
class Rule:
    """A check of the configurations of one framework for one fault."""

    id: str
    """The name of the rule, unique within its framework."""
    framework: str
    """A key of `FRAMEWORKS`."""
    severity: str
    """``fix``: the run stops, or does not train as intended; ``look``: a risk; ``note``: worth knowing, or true only
    for earlier versions."""
    title: str
    """The fault, in a few words."""
    reads: Mapping[str, str]
    """The dotted names of the settings that the rule reads, by short names. The line of a finding is that of the first
    one that the configuration sets."""
    condition: Callable[[Values], bool]
    """A function that returns True if the configuration has the fault."""
    happens: str
    """The effect of the fault, with ``{short_name}`` for the value of a setting and ``{short_name.name}`` for its
    name."""
    fix: str
    """The settings to change, under the framework's own names."""
    source: str
    """The evidence: a paper, the framework's source or documentation, or a thread."""
    only_before_start: bool = False
    """True if the rule does not apply to the configuration that a run has saved: a run with the fault stops before its
    first step, or the framework derives one of the settings from the others when the run begins."""


# Parts of the texts `happens` and `source` of several rules.

ONE_UPDATE = (
    "Each batch gets one update. The ratio of new to old probabilities is computed before it, so it is 1 for every "
    "token, and the clip has no effect."
)
TRUNCATED_SAMPLING = (
    "The engine reports probabilities over the tokens that remain after truncation, the trainer computes them over "
    "all tokens. Every importance weight is thus multiplied by the total probability of the remaining tokens, although "
    "the policy has not changed."
)
ONE_ANSWER = (
    "An advantage compares an answer with the other answers to its prompt, and there are no other answers: "
)
TWO_ANSWERS = (
    "With two answers to a prompt, division by their standard deviation gives all advantages the same absolute value, "
    "however little the rewards differ."
)
UNWEIGHTED_TRUNCATION = (
    "Answers are sampled from a part of the vocabulary, and the trainer computes probabilities over all of it. The "
    "gradient is not that of the policy that answers."
)
SAMPLING_PENALTY = (
    "The engine changes the probabilities of tokens that are in the answer already. The trainer computes them without "
    "the penalty, so the gradient is not that of the policy that answers, and an importance weight that compares both "
    "is far from 1."
)
KEEP_SAMPLING_MASK = (
    "DeepSeek-V3.2, arXiv 2512.02556, section 3.1 (keep sampling mask), on the effect; {} on the trainer's "
    "probabilities"
)
GREEDY = "Sampling is greedy: the answers to a prompt are all the same, so that no advantage compares them. "
NEARLY_GREEDY = (
    "At a temperature near 0, the answers to a prompt differ little or not at all. A group of equal rewards has no "
    "advantage, and no gradient. "
)
ENTROPY_BONUS = (
    "Published runs use 0, or up to 0.01. A larger bonus makes the entropy grow until the answers are noise. "
)
ENTROPY_SOURCE = (
    "verl-project/verl pull requests 781 and 1770; He et al., Skywork Open Reasoner 1, arXiv 2505.22312, section 4; "
    "{}"
)
GROUP_AND_CRITIC = (
    "{estimator.name} is not set, and its default {estimator} learns a critic. The {group} answers to a prompt are not "
    "compared with each other, and no setting of a critic is in the configuration."
)
GSPO_RANGE = (
    "GSPO clips the geometric mean of the ratios of an answer, which stays near 1: its paper clips at 3e-4 and 4e-4. "
    "At 0.05 or more, hardly any answer is clipped."
)
ASYNCHRONOUS = (
    "The old probabilities are the trainer's. Training is asynchronous, and older weights sampled: what changed since "
    "is in no ratio, and no clip bounds it."
)
GSPO_PAPER = (
    "Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, section 5.1; "
    "huggingface/trl issue 3834"
)


GREEDY_BELOW = 0.01
"""Temperatures below this are greedy. vLLM does not sample below 1e-5, and raises lower temperatures to 0.01."""
NEAR_ZERO = 0.2
"""The largest temperature that is near 0. Published runs use 0.6 to 1.0."""
LARGEST_ENTROPY_COEFFICIENT = 0.01
"""The largest coefficient of the entropy without a finding."""


def samples_greedily(v: Values) -> bool:
    """Return whether several answers to a prompt are sampled, and all are the most probable one.

    Args:
        v: The values of a rule that reads ``temperature`` and ``group``, and ``top_k`` if the framework has it.
    """
    if v.temperature >= GREEDY_BELOW and not (v.reads("top_k") and v.top_k == 1):
        return False
    return v.group > 1


def samples_nearly_greedily(v: Values) -> bool:
    """Return whether several answers to a prompt are sampled at a temperature near 0, but not greedily.

    Args:
        v: The values of a rule that reads ``temperature`` and ``group``.
    """
    return GREEDY_BELOW <= v.temperature <= NEAR_ZERO and v.group > 1


def largest(*values: Any) -> float:
    """Return the largest of the values that are not None."""
    return max(value for value in values if value is not None)
