"""The settings of one training run, each with its line in the configuration file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlvet.lint.framework import Framework
from rlvet.lint.scalars import read_scalar
from rlvet.runs.config_lines import line_of


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

    >>> from rlvet.lint.known import FRAMEWORKS
    >>> configuration = Configuration.from_mapping(FRAMEWORKS["verl"], {"data": {"train_batch_size": 64}})
    >>> configuration.settings["data.train_batch_size"].value
    64
    """

    framework: Framework
    path: str
    """The path of the file, as it was given."""
    settings: Mapping[str, Setting]
    """The settings that the configuration sets, by their dotted names in the newest version of the framework."""
    line: int | None = None
    """The line where the configuration begins."""
    incomplete: str = ""
    """Another source of settings, as a phrase. A setting that is not in `settings` may come from there. If this is
    empty, such a setting has its default."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the program that a command runs, where they differ from the framework's."""
    absent: Collection[str] = ()
    """Settings whose defaults are not known, since another version of the framework saved the file without them, or is
    to read it."""

    @classmethod
    def from_mapping(
        cls,
        framework: Framework,
        nested: Mapping[Any, Any],
        path: str = "",
        lines: Mapping[str, int] | None = None,
    ) -> Configuration:
        """Return the configuration of a nested mapping, such as that of a finished run.

        Such a mapping contains every setting of the version that saved it. Settings with the framework's default count
        as not set. Settings that are missing are `absent`: they are of a later version.

        Args:
            framework: One of `rlvet.lint.known.FRAMEWORKS`.
            nested: The settings, in nested mappings.
            path: The path of the file.
            lines: The lines of settings and tables by their dotted names, if they are known.
        """
        defaults = framework.defaults
        # Settings that are taken for their defaults where they are missing.
        assumed = framework.optional | framework.stable
        settings: dict[str, Setting] = {}
        saved_names: set[str] = set()
        for name, value in _flattened(nested):
            saved_names.add(framework.older_names.get(name, name))
            if isinstance(value, str) and "${" in value:
                value = Unread(f"the interpolation {value[:60]}")
            elif isinstance(value, str):
                value = read_scalar(value)
            elif isinstance(value, Mapping):
                # An empty mapping, or an object of a class that is not imported, such as a number of bandpo's.
                default = defaults.get(name)
                is_known = not default or name in assumed
                value = default if is_known else Unread("an object of the program that saved it")
            if name not in defaults or value != defaults[name]:
                settings[name] = Setting(name, value, line_of(lines or {}, name))
        absent = defaults.keys() - saved_names - assumed
        return cls(framework, path, settings, absent=absent)

    def default(self, name: str) -> Any:
        """Return the default of a setting: that of the program, or else that of the framework."""
        return self.defaults[name] if name in self.defaults else self.framework.defaults[name]

    def reason_unknown(self, name: str) -> str:
        """Return the reason why the value of a setting that is not set is unknown; empty if it has its default."""
        if name == "program" and self.incomplete:
            return "the program that reads this file is not known"
        if self.incomplete:
            return f"{name} may come from {self.incomplete}"
        if name in self.absent:
            return f"{name} is not set, and its default is that of another version of {self.framework.title}"
        return ""

    def with_defaults(self, prefix: str) -> Configuration:
        """Return the configuration with the defaults of the settings under a prefix that it does not set.

        Args:
            prefix: The beginning of the names of a part of the configuration that is complete.
        """
        defaults = self.framework.defaults
        settings = {name: Setting(name, value) for name, value in defaults.items() if name.startswith(prefix)}
        absent = [name for name in self.absent if not name.startswith(prefix)]
        return replace(self, settings={**settings, **self.settings}, absent=absent)


def _flattened(nested: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their dotted names; an empty mapping is a value."""
    pending: list[tuple[str, Mapping[Any, Any]]] = [("", nested)]
    while pending:
        prefix, mapping = pending.pop()
        for key, value in mapping.items():
            if isinstance(value, Mapping) and value:
                pending.append((f"{prefix}{key}.", value))
            else:
                yield f"{prefix}{key}", value
