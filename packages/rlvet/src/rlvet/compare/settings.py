"""The settings of a configuration with the defaults of its framework's version, and the source of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from rlvet.compare.other_defaults import OTHER_DEFAULTS
from rlvet.compare.vocabulary import Origin, Reading
from rlvet.lint.known import FRAMEWORKS
from rlvet.lint.values import UnknownValue, reason_unknown
from rlvet.runs.configuration import Configuration, Unresolved, title_of
from rlvet.runs.files import load_table

DEFAULTS: Mapping[str, Mapping[str, Any]] = {**load_table("defaults"), **OTHER_DEFAULTS}
"""The defaults of each framework, with the versions that they are of; `framework_defaults.py` among bandpo's tests
writes those of TRL and verl."""

BEFORE: Mapping[str, Mapping[str, Any]] = {
    "trl": {
        "importance_sampling_level": "token",
        "loss_type": "grpo",
        "scale_rewards": "group",
        "use_bias_correction_kl": False,
        "vllm_importance_sampling_correction": False,
    },
    "verl": {},
}
"""The effect of versions without a setting, where it is not that of the newest version's default."""


LARGEST = 1e15
"""Numbers from this one on are no settings."""
LONGEST_VALUE = 80
"""The most characters of a value in a message."""


class NotSet(UnknownValue):
    """Raised if a setting is not set in the file and may be set elsewhere.

    Args:
        message: The setting and the reason.
        elsewhere: Where it may be set, as a clause that is the same for all settings of a file.
    """

    def __init__(self, message: str, elsewhere: str):
        super().__init__(message)
        self.elsewhere = elsewhere


class Settings:
    """The settings of a configuration, with defaults. It remembers which ones were read.

    Args:
        configuration: The configuration, of a framework with quantities; one that a run saved without the defaults,
            see `rlvet.lint.checks.without_defaults`.

    >>> from rlvet.runs.configuration import Setting
    >>> file = Configuration("trl", "a.yaml", {"beta": Setting("beta", 0.1, 3)})
    >>> settings = Settings(file)
    >>> settings("beta"), settings("temperature")
    (0.1, 1.0)
    >>> [origin.source for origin in settings.reading(lambda s: s("epsilon") + s("beta")).origins]
    ['default of TRL 1.16.0', 'a.yaml:3']
    """

    def __init__(self, configuration: Configuration):
        self._configuration = configuration
        self._framework = framework = FRAMEWORKS[configuration.framework]
        table = DEFAULTS[framework.key]
        self._defaults = {**framework.defaults, **table["defaults"], **configuration.defaults}
        self._version = f"{framework.title} {table['version']}"
        self._current: list[str] = []
        self.names_read: set[str] = set()

    def __call__(self, name: str) -> Any:
        """Return the value of a setting: that of the file, or else the default.

        Raises:
            UnknownValue: if the value is not known.
        """
        self._current.append(name)
        self.names_read.add(name)
        setting = self._configuration.settings.get(name)
        if setting is not None:
            # Another setting may be in its place.
            self.names_read.add(setting.name)
            if isinstance(setting.value, Unresolved):
                raise UnknownValue(f"{setting.name} is {setting.value.reason}")
            value = setting.value
            if isinstance(value, str) and value.startswith("${"):
                raise UnknownValue(f"{name} is the interpolation {value[:60]}")
            return value
        if self._configuration.incomplete:
            elsewhere = f"may come from {self._configuration.incomplete}"
            raise NotSet(f"{name} {elsewhere}", elsewhere)
        if self._configuration.is_saved and self._is_absent(name):
            # A version without the setting saved the file.
            return BEFORE.get(self._framework.key, {}).get(name, self._defaults[name])
        reason = reason_unknown(self._configuration, self._framework, name)
        if reason:
            is_unsaid = name in self._configuration.unsaid
            raise NotSet(reason, "is not in it" if is_unsaid else "has the default of another version")
        default = self._defaults[name]
        if isinstance(default, str) and default.startswith("${"):
            raise UnknownValue(f"{name} is the interpolation {default[:60]}")
        return default

    def _is_absent(self, name: str) -> bool:
        """Return whether a saved file has no such setting. Those with lint's defaults are left out on reading."""
        in_lint = name in self._framework.defaults
        return name in self._configuration.absent or not in_lint

    def number(self, name: str) -> float:
        """Return the value of a setting that is a number.

        Raises:
            UnknownValue: if the value is not known, or is no finite number.
        """
        value = self(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
            raise UnknownValue(f"{name} is {str(value)[:LONGEST_VALUE]}, and not a number")
        return value

    def number_or_none(self, name: str) -> float | None:
        """Return the value of a setting that is a number or None."""
        return None if self(name) is None else self.number(name)

    def is_set(self, name: str) -> bool:
        """Return whether the file sets a setting."""
        return name in self._configuration.settings

    @property
    def program(self) -> str:
        """The program that a command runs; empty for other files."""
        setting = self._configuration.settings.get("program")
        return str(setting.value) if setting is not None else ""

    @property
    def file(self) -> str:
        """The name of the file, with that of the settings in it."""
        return title_of(PurePath(self._configuration.path).name, self._configuration.part)

    def reading(self, compute: Callable[[Settings], Any]) -> Reading:
        """Return the value of a quantity, with the settings that were read to compute it.

        Args:
            compute: A function that computes the quantity from these settings.
        """
        self._current = []
        value = None
        unknown = ""
        elsewhere = ""
        try:
            value = compute(self)
        except UnknownValue as error:
            unknown = str(error)
            elsewhere = error.elsewhere if isinstance(error, NotSet) else ""
        except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError):
            names = ", ".join(dict.fromkeys(self._current))
            unknown = f"one of {names} has a value of another type than {self._version} expects"
        if isinstance(value, int | float) and not abs(value) < LARGEST:
            value = None
            unknown = f"{self._current[0]} is no number of a usual size"
        names = list(dict.fromkeys(self._current))
        # The setting that is read first is the one of the quantity; the others are conditions.
        conditions = [name for name in names[1:] if self.is_set(name)]
        origins = tuple(self.origin(name) for name in (*names[:1], *conditions))
        return Reading(value, origins, unknown, elsewhere)

    def origin(self, name: str) -> Origin:
        """Return a setting with its value and its source."""
        setting = self._configuration.settings.get(name)
        if setting is None and self._configuration.is_saved and not self._is_absent(name):
            # A file that a run saved has those with the default too.
            return Origin(name, self._defaults.get(name), self.file)
        if setting is None:
            return Origin(name, self._defaults.get(name), f"default of {self._version}")
        source = self.file if setting.line is None else f"{self.file}:{setting.line}"
        value = setting.value.reason if isinstance(setting.value, Unresolved) else setting.value
        return Origin(setting.name, value, source)

    def default(self, name: str) -> Any:
        """Return the default of a setting; None if it is not known."""
        return self._defaults.get(name)


def last_parts(path: Any, count: int = 1) -> str:
    """Return the end of a path or of a name on the hub, in lower case.

    >>> last_parts("/models/Qwen2.5-7B/"), last_parts("~/data/gsm8k/train.parquet", 2)
    ('qwen2.5-7b', 'gsm8k/train.parquet')
    """
    parts = [part for part in re.split(r"[/\\]", str(path)) if part]
    return "/".join(parts[-count:]).lower()
