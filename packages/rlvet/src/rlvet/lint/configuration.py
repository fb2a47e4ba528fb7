"""The settings of one training run, each with its line in the configuration file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlvet.lint.frameworks import FRAMEWORKS
from rlvet.lint.scalars import read_scalar


@dataclass(frozen=True)
class Unread:
    """A value that is only known when the program runs, such as an expression or an environment variable."""

    reason: str
    """A description of the value, such as ``the environment variable LR``."""
    known_part: str = ""
    """The part of the value that is known, such as ``/Qwen2.5-7B`` of ``$MODELS/Qwen2.5-7B``."""


@dataclass(frozen=True)
class Setting:
    """A setting that a configuration sets."""

    name: str
    """The name as it is written in the file."""
    value: Any
    """A number, text, list, boolean or None; or `Unread`."""
    line: int | None = None
    """The line in the file, counted from 1; None if the format has no lines."""


@dataclass(frozen=True)
class Configuration:
    """The settings of one training run.

    >>> configuration = Configuration.from_mapping("verl", {"data": {"train_batch_size": 64}})
    >>> configuration.settings["data.train_batch_size"].value
    64
    """

    framework: str
    """A key of `rlvet.lint.frameworks.FRAMEWORKS`."""
    path: str
    """The path of the file, as it was given."""
    settings: Mapping[str, Setting]
    """The settings that the configuration sets, by their dotted names in the newest version of the framework."""
    line: int | None = None
    """The line where the configuration begins."""
    incomplete: str = ""
    """Another source of settings, as a phrase. A setting that is not in `settings` may come from there. If this is
    empty, such a setting has its default."""

    @classmethod
    def from_mapping(cls, framework: str, nested: Mapping[Any, Any], path: str = "") -> Configuration:
        """Return the configuration of a nested mapping without lines, such as that of a finished run.

        Such a mapping contains every setting, so settings with the framework's default count as not set.

        Args:
            framework: A key of `rlvet.lint.frameworks.FRAMEWORKS`.
            nested: The settings, in nested mappings.
            path: The path of the file.
        """
        defaults = FRAMEWORKS[framework].defaults
        settings: dict[str, Setting] = {}
        for name, value in _flattened(nested):
            if isinstance(value, str) and "${" in value:
                value = Unread(f"the interpolation {value[:60]}")
            elif isinstance(value, str):
                value = read_scalar(value)
            if name not in defaults or value != defaults[name]:
                settings[name] = Setting(name, value)
        return cls(framework, path, settings)

    def with_defaults(self, prefix: str) -> Configuration:
        """Return the configuration with the defaults of the settings under a prefix that it does not set.

        Args:
            prefix: The beginning of the names of a part of the configuration that is complete.
        """
        defaults = FRAMEWORKS[self.framework].defaults
        settings = {name: Setting(name, value) for name, value in defaults.items() if name.startswith(prefix)}
        return replace(self, settings={**settings, **self.settings})


def _flattened(nested: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their dotted names."""
    pending: list[tuple[str, Mapping[Any, Any]]] = [("", nested)]
    while pending:
        prefix, mapping = pending.pop()
        for key, value in mapping.items():
            if isinstance(value, Mapping):
                pending.append((f"{prefix}{key}.", value))
            else:
                yield f"{prefix}{key}", value
