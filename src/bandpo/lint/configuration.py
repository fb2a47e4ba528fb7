"""Settings of one training run as its configuration has them, each with its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


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
        """Return the configuration that a nested mapping without lines holds, such as that of a finished run."""
        settings = {name: Setting(name, value) for name, value in _flattened(nested)}
        return cls(framework, path, settings)


def _flattened(nested: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{name}.")
        else:
            yield name, value
