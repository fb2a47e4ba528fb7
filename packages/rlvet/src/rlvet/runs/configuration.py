"""The configuration of one training run: its settings by their dotted names, each with its line in the file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Unresolved:
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
    """A number, text, list, boolean or None; or `Unresolved`. In a saved configuration also an empty mapping, which may
    stand for an object of a class that is not imported, such as a number of bandpo's."""
    line: int | None = None
    """The line in the file, counted from 1; None if the format has no lines."""


@dataclass(frozen=True)
class Configuration:
    """The settings of one training run, which a user wrote or a run saved."""

    framework: str
    """The key of the framework in `rlvet.runs.configs.FRAMEWORKS` or `rlvet.lint.known.FRAMEWORKS`."""
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
    unsaid: Collection[str] = ()
    """Settings of which a saved configuration says nothing, as they are given to the trainer beside its arguments."""
    is_saved: bool = False
    """True if a run saved it. Then it has every setting of the version that saved it, also those with their default."""
    part: str = ""
    """Its name in a file that holds more than it, such as a log; empty for other files."""

    @property
    def title(self) -> str:
        """The path, with its name in the file."""
        return title_of(self.path, self.part)


def title_of(path: str, part: str) -> str:
    """Return the path of a configuration with its name in the file, see `Configuration.part`."""
    return f"{path}, {part}" if part else path
