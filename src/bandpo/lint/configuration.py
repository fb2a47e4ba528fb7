"""Settings of one training run as its configuration has them, each with its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bandpo.lint.frameworks import FRAMEWORKS
from bandpo.lint.scalars import read_scalar


@dataclass(frozen=True)
class Unread:
    """A value that is known only when the program runs, such as an expression or an environment variable."""

    reason: str
    """What the value is, as a phrase."""


@dataclass(frozen=True)
class Setting:
    """A setting that a configuration names."""

    name: str
    """Its name as it is written there."""
    value: Any
    """A number, text, list, boolean or None; or `Unread`."""
    line: int | None = None
    """The line of the file, from 1; None where the format has none."""


@dataclass(frozen=True)
class Configuration:
    """The settings of one training run.

    >>> configuration = Configuration.from_mapping("verl", {"data": {"train_batch_size": 64}})
    >>> configuration.settings["data.train_batch_size"].value
    64
    """

    framework: str
    """A key of `bandpo.lint.frameworks.FRAMEWORKS`."""
    path: str
    """The file, as it was named."""
    settings: Mapping[str, Setting]
    """By the dotted name that the framework's newest version has."""
    line: int | None = None
    """The line where the configuration begins."""
    incomplete: str = ""
    """Why a setting that is not here need not have its default, as a phrase; empty if it has."""

    @classmethod
    def from_mapping(cls, framework: str, nested: Mapping[Any, Any], path: str = "") -> Configuration:
        """Return the configuration that a nested mapping without lines holds, such as that of a finished run.

        Such a mapping names every setting. One that has the framework's default counts as not named.
        """
        defaults = FRAMEWORKS[framework].defaults
        settings: dict[str, Setting] = {}
        for name, value in _flattened(nested):
            if isinstance(value, str):
                value = Unread(f"the interpolation {value[:60]}") if "${" in value else read_scalar(value)
            if name not in defaults or value != defaults[name]:
                settings[name] = Setting(name, value)
        return cls(framework, path, settings)

    def with_defaults(self, prefix: str) -> Configuration:
        """Return the configuration with the default of each setting under a prefix that it does not name.

        Args:
            prefix: The part that is complete, where the configuration as a whole is not.
        """
        defaults = FRAMEWORKS[self.framework].defaults
        settings = {name: Setting(name, value) for name, value in defaults.items() if name.startswith(prefix)}
        return replace(self, settings={**settings, **self.settings})


def _flattened(nested: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    pending: list[tuple[str, Mapping[Any, Any]]] = [("", nested)]
    while pending:
        prefix, mapping = pending.pop()
        for key, value in mapping.items():
            if isinstance(value, Mapping):
                pending.append((f"{prefix}{key}.", value))
            else:
                yield f"{prefix}{key}", value
