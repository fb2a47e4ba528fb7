"""What a run was trained with: its method, and its framework, with the names of the settings that a verdict advises."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bandpo.audit.files import shipped
from bandpo.audit.logs import Row
from bandpo.audit.record import Call, told_method
from bandpo.methods import Method
from bandpo.rules import ClipRule
from bandpo.text import as_method

SETTINGS: Mapping[str, Mapping[str, str]] = shipped("settings")
"""By framework and what is set. Those of TRL 1.16 and verl 0.9.1 are tested, the others are from public configs."""


OWN_KEYS = {
    "verl": ("actor/pg_clipfrac", "actor/pg_loss"),
    "trl": ("clip_ratio/region_mean", "completions/mean_length"),
    "skyrl": ("reward/avg_raw_reward",),
    "slime": ("rollout/raw_reward", "train/pg_clipfrac"),
    "prime-rl": ("mismatch_kl/all/mean", "is_truncated/mean"),
}
"""What each framework's log holds, and no other's; a tracker may put something before it."""


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

    @classmethod
    def of_log(
        cls,
        path: Path,
        rows: Sequence[Row],
        *,
        method: Method | ClipRule | str | None = None,
    ) -> Setup:
        """That of a run with a log: the method that its config.yaml tells, or what is given; its framework.

        Nothing that the folder names is imported.

        Args:
            path: The run folder of `bandpo train`, or any other log.
            rows: Its log, whose keys may tell the framework.
            method: What it was trained with, where no config.yaml says so, e.g. ``"GSPO()"``.

        Raises:
            ValueError: the method cannot be read.

        >>> Setup.of_log(Path("steps.jsonl"), [{"step": 1, "actor/pg_clipfrac": 0.4}], method="GSPO()").framework
        'verl'
        """
        given = None if method is None else as_method(method)
        return cls(framework_of(rows), _told_by(path / "config.yaml", given))

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


def _told_by(config: Path, given: Method | None) -> Method | None:
    import yaml

    try:
        said: Any = yaml.safe_load(config.read_text())["arguments"]
        text, level = said["method"], said["importance_sampling_level"]
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError):
        return given  # there is none, or it is another program's
    told = told_method(text, config, given)
    return replace(told, level=level) if told and told.only_rule else told


def framework_of(rows: Sequence[Row]) -> str | None:
    """Whose log these rows are, told from keys that no other framework has; None if there are none of them."""
    keys = {key for row in rows for key in row}
    return next((name for name, own in OWN_KEYS.items() if any(key.endswith(own) for key in keys)), None)
