"""The values of the settings that a rule reads, for its condition and its message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvet._numbers import format_setting
from rlvet.lint.framework import Framework
from rlvet.runs.configuration import Configuration, Setting, Unresolved


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
        if isinstance(self.value, Unresolved):
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
        framework: Its framework.
        reads: The dotted name of each setting, by its short name.
    """

    def __init__(self, configuration: Configuration, framework: Framework, reads: Mapping[str, str]):
        self._configuration = configuration
        self._framework = framework
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
            return self._default(name)
        if isinstance(setting.value, Unresolved):
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
        reason = reason_unknown(self._configuration, self._framework, name)
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
        return self._default(self._reads[short_name])

    def _default(self, name: str) -> Any:
        """Return the default of a setting: that of the program, or else that of the framework."""
        defaults = self._configuration.defaults
        return defaults[name] if name in defaults else self._framework.defaults[name]

    def setting(self, short_name: str) -> Setting | None:
        """Return the setting of the configuration; None if the configuration does not set it."""
        return self._configuration.settings.get(self._reads[short_name])

    def for_message(self, short_name: str) -> MessageSetting:
        """Return a setting for a message, with the name that the configuration uses for it."""
        setting = self.setting(short_name)
        if setting is None:
            return MessageSetting(self._reads[short_name], self.get(short_name))
        return MessageSetting(setting.name, setting.value)


def reason_unknown(configuration: Configuration, framework: Framework, name: str) -> str:
    """Return the reason why the value of a setting that is not set is unknown; empty if it has its default."""
    if name == "program" and configuration.incomplete:
        return "the program that reads this file is not known"
    if configuration.incomplete:
        return f"{name} may come from {configuration.incomplete}"
    if name in configuration.unsaid:
        return f"{name} is not among the arguments of the trainer"
    if name in configuration.absent:
        return f"{name} is not in the file, as of another version of {framework.title}, or another of its trainers"
    return ""


def largest(*values: Any) -> float:
    """Return the largest of the values that are not None."""
    return max(value for value in values if value is not None)
