"""Setup of a run: its method, and its framework with the names of the settings that advice refers to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bandpo.runs.files import shipped

SETTINGS: Mapping[str, Mapping[str, str]] = {
    framework: entry["settings"] for framework, entry in shipped("settings").items()
}
"""For each framework, what it calls a setting. The data file says beside them against which version or commit of the
framework's own source each name was compared."""


class Value(NamedTuple):
    """A setting of the run's configuration with its value.

    >>> str(Value("num_generations", 2, "config.yaml"))
    'num_generations=2 (config.yaml)'
    """

    name: str
    """Its dotted name in the file."""
    value: Any
    file: str
    """The file that sets it; empty for a configuration that was not read from a file."""

    def __str__(self) -> str:
        value = f"{self.value:g}" if isinstance(self.value, float) else str(self.value)[:80]
        return f"{self.name}={value} ({self.file})" if self.file else f"{self.name}={value}"


@dataclass(frozen=True)
class Setup:
    """Framework, method and updates of a run, as far as they are known.

    >>> "use a smaller learning rate" + Setup("verl").setting("learning rate")
    'use a smaller learning rate (actor_rollout_ref.actor.optim.lr)'
    >>> Setup().setting("learning rate")
    ''
    """

    framework: str | None = None
    """A key of `SETTINGS`."""
    method: str | None = None
    """The text of the method. A stranger may have written it: it is data, see `bandpo.text.parse`."""
    level: str | None = None
    """Whether ratios are formed per ``token`` or per ``sequence``, where the framework's configuration says it."""
    updates: float | None = None
    """Optimiser steps on each batch."""
    stale: bool | None = None
    """Whether it was trained on data some batches old."""
    values: Mapping[str, Value] = field(default_factory=dict, compare=False, repr=False)
    """Settings of the run's configuration by what they set: ``learning rate``, ``group size``, ``length cap``,
    ``KL term``, ``LoRA rank``, ``model``."""

    def number(self, name: str) -> float | None:
        """Return the value of a setting that is a number; None if the configuration does not tell it.

        Args:
            name: A key of `values`.
        """
        value = self.values[name].value if name in self.values else None
        return value if isinstance(value, (int, float)) else None

    def __str__(self) -> str:
        parts = []
        if self.framework:
            parts.append(self.framework)
        if self.method:
            parts.append(f"{self.method} per {self.level}" if self.level else self.method)
        if self.updates:
            parts.append(f"updates on each batch: {self.updates:g}")
        return ", ".join(parts)

    def setting(self, name: str) -> str:
        """Return the framework's name for a setting, in brackets after a space; empty if it is not known.

        Args:
            name: A key of the inner tables of `SETTINGS`.
        """
        own_name = SETTINGS.get(self.framework, {}).get(name) if self.framework else None
        return f" ({own_name})" if own_name else ""

    def fill(self, advice: str) -> str:
        """Return advice with each ``{setting}`` in it replaced as by `setting`."""
        return re.sub(r"{(.+?)}", lambda match: self.setting(match[1]), advice)


def framework_of(text: str) -> str | None:
    """Return the key of `SETTINGS` that a recorder's text begins with, such as ``trl`` of ``trl 1.16``."""
    return next((name for name in SETTINGS if text.startswith(name)), None)
