"""The class of a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A check of the configurations of one framework for one fault."""

    id: str
    """The name of the rule, unique within its framework."""
    severity: str
    """``fix``: the run stops, or does not train as intended; ``look``: a risk; ``note``: worth knowing, or true only
    for earlier versions."""
    title: str
    """The fault, in a few words."""
    reads: Mapping[str, str]
    """The dotted names of the settings that the rule reads, by short names. The line of a finding is that of the first
    one that the configuration sets."""
    condition: Callable[[Any], bool]
    """A function of `rlvet.lint.values.Values` that returns True if the configuration has the fault."""
    effect: str = ""
    """The effect of the fault, as far as rules of several frameworks share the text."""
    details: str = ""
    """The effect in this framework, after `effect`. In both, ``{short_name}`` is the value of a setting, and
    ``{short_name.name}`` its name."""
    fix: str
    """The settings to change, under the framework's own names."""
    source: str
    """The evidence: a paper, the framework's source or documentation, or a thread."""
    concerns: Callable[[Any], Sequence[str]] | None = None
    """A function of the values that returns the short names of the settings which have the fault, for a rule of which
    any may have it. ``{concerned}`` in a text is their names and values. If None, a finding is about all that the rule
    reads."""
    only_before_start: bool = False
    """True if the rule does not apply to the configuration that a run has saved: a run with the fault stops before its
    first step, or the framework derives one of the settings from the others when the run begins."""

    @property
    def happens(self) -> str:
        """The whole text about the effect."""
        return f"{self.effect} {self.details}".strip()
