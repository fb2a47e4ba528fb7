"""What a run was trained with: its method, and its framework, with the names of the settings that a verdict advises."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bandpo.audit.files import shipped
from bandpo.audit.record import Call
from bandpo.methods import Method

SETTINGS: Mapping[str, Mapping[str, str]] = shipped("settings")
"""By framework and what is set. Those of TRL 1.16 and verl 0.9.1 are tested, the others are from public configs."""


@dataclass(frozen=True)
class Setup:
    """What a run was trained with, as far as that is known.

    >>> "use a smaller learning rate" + Setup("verl").named("learning rate")
    'use a smaller learning rate (actor_rollout_ref.actor.optim.lr)'
    >>> Setup().named("learning rate")
    ''
    """

    framework: str | None = None
    """A key of `SETTINGS`."""
    method: Method | None = None
    updates: float | None = None
    """Optimiser steps on each batch."""
    stale: bool | None = None
    """Whether it was trained on data some batches old."""

    def __str__(self) -> str:
        told = [self.framework] if self.framework else []
        told += [f"{self.method!r} per {self.method.level}"] if self.method else []
        told += [f"updates on each batch: {self.updates:g}"] if self.updates else []
        return ", ".join(told)

    @classmethod
    def of_record(cls, call: Call) -> Setup:
        """That of a record's run, as one of its losses tells it."""
        return cls(next((name for name in SETTINGS if call.framework.startswith(name)), None), call.method)

    def named(self, what: str) -> str:
        """The framework's name for a setting, in brackets behind a space; nothing where it is not known.

        Args:
            what: A key of the inner tables of `SETTINGS`.
        """
        name = SETTINGS[self.framework].get(what) if self.framework else None
        return f" ({name})" if name else ""

    def filled(self, advice: str) -> str:
        """Advice with each ``{setting}`` in it as `named` has it."""
        return re.sub(r"{(.+?)}", lambda match: self.named(match[1]), advice)
