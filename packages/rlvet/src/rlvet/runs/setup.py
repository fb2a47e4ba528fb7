"""The setup of a run: its framework, its method, and the framework's names of the settings that advice refers to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlvet._numbers import format_number, format_setting, is_number
from rlvet.runs.files import load_table

SETTINGS: Mapping[str, Mapping[str, str]] = {
    framework: entry["settings"] for framework, entry in load_table("settings").items()
}
"""Each framework's names of settings. The data file has the version or commit of the framework with which each name was
compared."""


ALTERNATIVES: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "fewer updates": ("updates", lambda updates: updates <= 1),
    "higher temperature": ("temperature", lambda temperature: temperature >= 1),
    "larger groups": ("group size", lambda size: size > 1),
    "smaller entropy bonus": ("entropy bonus", lambda coefficient: coefficient == 0),
}
"""Alternatives in advice that a setting can exclude, each with the setting, and whether its value leaves nothing to
change."""

ALTERNATIVE = re.compile(r"\[([^\[\]|]+)\|([^\[\]|]*)\]")
"""An alternative in advice: its key in `ALTERNATIVES`, and its text."""


class Value(NamedTuple):
    """A setting of the run's configuration with its value.

    >>> str(Value("num_generations", 2, "config.yaml"))
    'num_generations=2 (config.yaml)'
    """

    name: str
    """The dotted path of the setting in the file."""
    value: Any
    """The value."""
    file: str
    """The file that sets it; empty for a configuration that was not read from a file."""

    def __str__(self) -> str:
        value = format_setting(self.value) if isinstance(self.value, float) else str(self.value)[:80]
        return f"{self.name}={value} ({self.file})" if self.file else f"{self.name}={value}"


@dataclass(frozen=True)
class Setup:
    """The framework, method and updates of a run, as far as they are known.

    >>> "use a smaller learning rate" + Setup("verl").setting("learning rate")
    'use a smaller learning rate (actor_rollout_ref.actor.optim.lr)'
    >>> Setup().setting("learning rate")
    ''
    """

    framework: str | None = None
    """A key of `SETTINGS`."""
    method: str | None = None
    """The text of the method. It comes from a file that may not be trusted, see `bandpo.core.text.parse`."""
    level: str | None = None
    """The level of the ratios, ``token`` or ``sequence``, if the framework's configuration has it."""
    updates: float | None = None
    """The number of optimiser steps on each batch."""
    stale: bool | None = None
    """True if the run was trained on data from earlier weights; None if that is not known."""
    values: Mapping[str, Value] = field(default_factory=dict, compare=False, repr=False)
    """Settings of the run's configuration by quantity: ``learning rate``, ``group size``, ``length cap``,
    ``temperature``, ``estimator`` (of advantages), ``weight level`` (of importance weights), ``reward scale``,
    ``KL term``, ``entropy bonus``, ``training steps``, ``saving``, ``LoRA rank``, ``model``, ``optimizer``."""

    def number(self, name: str) -> float | None:
        """Return the value of a setting that is a number; None if it is not known.

        Args:
            name: A key of `values`.
        """
        value = self.values[name].value if name in self.values else None
        return value if is_number(value) else None

    def __str__(self) -> str:
        parts = []
        if self.framework:
            parts.append(self.framework)
        if self.method:
            parts.append(f"{self.method} per {self.level}" if self.level else self.method)
        if self.updates:
            parts.append(f"updates on each batch: {format_number(self.updates, 6)}")
        return ", ".join(parts)

    def setting(self, name: str) -> str:
        """Return the framework's name of a setting, in brackets after a space; empty if it is not known.

        Args:
            name: A key of the inner tables of `SETTINGS`.
        """
        if self.framework is None:
            return ""
        framework_name = SETTINGS.get(self.framework, {}).get(name)
        # Earlier versions of TRL have no bonus.
        since = ", in newer versions" if name == "entropy bonus" and name not in self.values else ""
        return f" ({framework_name}{since})" if framework_name else ""

    def excludes(self, alternative: str) -> bool:
        """Return True if the settings are known to leave nothing to change by an alternative.

        Args:
            alternative: A key of `ALTERNATIVES`.

        >>> Setup(updates=1).excludes("fewer updates"), Setup().excludes("fewer updates")
        (True, False)
        """
        name, is_at_end = ALTERNATIVES[alternative]
        value = self.updates if name == "updates" else self.number(name)
        return value is not None and is_at_end(value)

    def fill(self, advice: str) -> str:
        """Return advice with the framework's names of settings, without the alternatives that the settings exclude.

        Args:
            advice: The advice. Each ``{NAME}`` becomes ``setting(NAME)``, each ``[ALTERNATIVE|TEXT]`` becomes the text,
                or nothing if the settings exclude the alternative.

        >>> advice = "[fewer updates|make fewer updates{updates}, or ]lower the learning rate{learning rate}"
        >>> Setup("trl", updates=1).fill(advice)
        'lower the learning rate (learning_rate)'
        >>> Setup().fill(advice)
        'make fewer updates, or lower the learning rate'
        """
        kept = ALTERNATIVE.sub(lambda match: "" if self.excludes(match[1]) else match[2], advice)
        return re.sub(r"{([^{}]+)}", lambda match: self.setting(match[1]), kept)


def framework_of(text: str) -> str | None:
    """Return the key of `SETTINGS` for a framework with a version: ``trl`` for ``trl 1.16``; None for others."""
    return next((name for name in SETTINGS if text.startswith(name)), None)
