"""The class of a framework whose configurations are checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlvet.lint.rules import Rule
from rlvet.runs.configuration import Setting


@dataclass(frozen=True, eq=False)
class Framework:
    """A framework: the names and defaults of its settings, as far as rules depend on them, and the rules."""

    key: str
    """Its name in `rlvet.runs.Setup`, in JSON and for `FRAMEWORKS`."""
    title: str
    """The name of the framework, as it is printed."""
    version: str
    """The version that the defaults are from."""
    defaults: Mapping[str, Any]
    """The default of each setting that a rule reads."""
    marks: tuple[tuple[str, ...], ...]
    """Setting names that no other framework has. Each entry lists names that must all occur, since some names are
    shared and only their combination is not. A name that ends with ``*`` is a prefix."""
    mark_among_own: str = ""
    """A setting name that identifies the framework only if all other names are in `defaults`. Other programs have this
    name too, but beside names of their own."""
    programs: tuple[str, ...] = ()
    """Beginnings of the modules that run the framework, as in ``python -m MODULE``."""
    older_names: Mapping[str, str] = field(default_factory=dict)
    """The newest name of each setting that had another name in earlier versions."""
    overriding: Mapping[str, str] = field(default_factory=dict)
    """The setting that takes the place of another, by its name, if it is set."""
    optional: frozenset[str] = frozenset()
    """Settings that the file of a run may lack: those that are no settings, and those that an earlier version had not,
    which behaved as with the default."""
    programs_of_settings: tuple[str, ...] = ()
    """Beginnings of the modules whose settings have `defaults`, apart from `program_defaults`. If this is empty, any
    program's have."""
    extensions: tuple[str, ...] = ()
    """Beginnings of the settings of programs that add settings to the framework's, and keep its defaults."""
    program_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Defaults that differ from `defaults`, by the beginning of the module."""
    early_settings: frozenset[str] = frozenset()
    """Settings that early versions had, and the newest has not."""
    stable: frozenset[str] = frozenset()
    """Settings of `defaults` that have had the same default in every version."""
    sections: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The names of all settings in some sections. Hydra refuses others, unless they begin with ``+``."""
    added: frozenset[str] = frozenset()
    """Settings that the adapter of bandpo adds. They change none of `defaults`."""
    rules: tuple[Rule, ...] = ()
    """The checks of its configurations, in the order of the table in docs/lint.md."""

    def mark_in(self, names: Collection[str], program: str = "") -> str:
        """Return a mark of the framework, for messages; an empty text if there is none.

        Args:
            names: The dotted names of settings.
            program: The module or file that a command runs.

        >>> from rlvet.lint.known import FRAMEWORKS
        >>> TRL = FRAMEWORKS["trl"]
        >>> TRL.mark_in(["num_generations", "use_vllm"]), TRL.mark_in(["num_generations", "num_epochs"])
        ('num_generations, use_vllm', '')
        """
        for mark in self.marks:
            matches = [_first_match(pattern, names) for pattern in mark]
            if all(matches):
                return ", ".join(matches)
        if program.startswith(self.programs):
            return program
        if self.mark_among_own in names and all(
            name in self.defaults or name in self.added for name in names
        ):
            return self.mark_among_own
        return ""

    def defaults_of(self, program: str, names: Collection[str] = ()) -> Mapping[str, Any] | None:
        """Return the defaults of a program that differ from `defaults`; None if its defaults are not known.

        Args:
            program: The module or file that a command runs.
            names: The dotted names of the settings of the command.

        >>> from rlvet.lint.known import FRAMEWORKS
        >>> VERL = FRAMEWORKS["verl"]
        >>> VERL.defaults_of("verl.trainer.main_ppo"), VERL.defaults_of("mine.main_ppo")
        ({}, None)
        """
        for beginning, defaults in self.program_defaults.items():
            if program.startswith(beginning):
                return defaults
        known = not self.programs_of_settings or program.startswith(self.programs_of_settings)
        if not known and self.extensions:
            known = any(name.startswith(self.extensions) for name in names)
        return {} if known else None

    def default_settings(self, prefix: str) -> dict[str, Setting]:
        """Return the settings under a prefix with their defaults.

        Args:
            prefix: The beginning of the names of a part of the configuration.
        """
        return {
            name: Setting(name, value) for name, value in self.defaults.items() if name.startswith(prefix)
        }

    def in_effect(self, settings: Mapping[str, Setting]) -> dict[str, Setting]:
        """Return the settings, each that is overridden with the value of the other.

        >>> from rlvet.lint.known import FRAMEWORKS
        >>> engine = {"generation_kwargs.top_p": Setting("generation_kwargs.top_p", 0.9)}
        >>> FRAMEWORKS["trl"].in_effect(engine)["top_p"].value
        0.9
        """
        overridden = {
            self.overriding[name]: setting for name, setting in settings.items() if name in self.overriding
        }
        return {**settings, **overridden}

    def unknown_setting(self, names: Collection[str]) -> str:
        """Return the first name that `sections` should have and does not; an empty text if there is none.

        >>> from rlvet.lint.known import FRAMEWORKS
        >>> VERL = FRAMEWORKS["verl"]
        >>> VERL.unknown_setting(["actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.n_agent"])
        'actor_rollout_ref.rollout.n_agent'
        """
        for name in names:
            section = name
            while "." in section:
                section, _, setting = section.rpartition(".")
                known = setting in HYDRA_NAMES or name in self.added
                if section in self.sections and setting not in self.sections[section] and not known:
                    return name
        return ""


HYDRA_NAMES = ("_target_", "_args_", "_convert_", "_partial_", "_recursive_")
"""Names that every section may have: hydra's own, such as the class that is constructed with the settings."""


def _first_match(pattern: str, names: Collection[str]) -> str:
    """Return the first name that a pattern of `Framework.marks` matches; an empty text if there is none."""
    if pattern.endswith("*"):
        return next((name for name in names if name.startswith(pattern[:-1])), "")
    return pattern if pattern in names else ""


def each_with(name: str, *others: str) -> tuple[tuple[str, ...], ...]:
    """Return the marks that consist of one setting name and one of several others."""
    return tuple((name, other) for other in others)
