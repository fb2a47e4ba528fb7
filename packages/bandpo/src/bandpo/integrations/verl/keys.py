"""The names of a run's settings: those that verl has, those of the user, and misspelt ones.

verl ignores a setting of an unknown name in many of its groups. In the others it ends with an error that does not name
the nearest setting. The names are those of the installed verl. What a misspelt one was meant to be is decided by rlvet;
without it, an unknown setting is printed and not refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from bandpo._siblings import has_rlvet
from bandpo.integrations.verl.settings import ACTOR, POLICY_LOSS, refuse_if, uses_bandpo

if TYPE_CHECKING:
    from omegaconf import DictConfig

FREE = re.compile(r"^(recipe|rllm)\b|^model_engine$|kwargs")
"""A pattern of settings that verl's config need not contain."""


@dataclass(frozen=True)
class UnknownSetting:
    """A setting that verl does not have."""

    key: str
    """Its path."""
    meant: str = ""
    """The path of the setting of verl that is probably meant; empty if there is none."""
    fault: str = ""
    """``misplaced`` if verl reads a setting of this name of the actor elsewhere, ``misspelt`` if the name is near that
    of a setting, and empty if it may be one of the user's own."""

    def __str__(self) -> str:
        if self.fault == "misplaced":
            return f"{self.key}: verl does not look there; write {self.meant}"
        if self.fault == "misspelt":
            return f"{self.key}: verl has no such setting; did you mean {self.meant}?"
        return self.key


def check_names(config: DictConfig) -> list[UnknownSetting]:
    """Check that no setting is at a path that verl does not read; return those that may be the user's own.

    In a run without bandpo a misspelt name is returned too.

    Args:
        config: The run's config.

    Raises:
        ValueError: a setting is misplaced or misspelt; the message has its path and that of the one that is meant.
    """
    unknown = unknown_settings(config)
    for setting in unknown:
        refuse_if(setting.fault == "misplaced", str(setting))
        refuse_if(setting.fault == "misspelt" and uses_bandpo(config), str(setting))
    return unknown


def unknown_settings(config: DictConfig) -> list[UnknownSetting]:
    """Return the settings that verl's own config does not have.

    Settings of a recipe and of ``kwargs`` are left out.
    """
    container = OmegaConf.to_container(config)
    keys = [key for key, value in leaves(container) if value is not None and not FREE.search(key)]
    found = [_examine(key, container) for key in keys if not _is_known(key)]
    return [setting for setting in found if setting is not None]


def _is_known(key: str) -> bool:
    # The children of a known setting are known: verl's default may be null or an empty group.
    return key in verl_settings() or ("." in key and _is_known(key.rpartition(".")[0]))


def _examine(key: str, config: Any) -> UnknownSetting | None:
    """Return what is known of a setting that verl's files do not have; None if a class of verl has it.

    Args:
        key: Its path.
        config: The run's config.
    """
    misplaced = _path_in_actor(key, config)
    if misplaced:
        return UnknownSetting(key, misplaced, "misplaced")
    parent = ""
    names = key.split(".")
    # The first part of the path that verl does not know.
    while f"{parent}.{names[0]}".lstrip(".") in _groups():
        parent = f"{parent}.{names[0]}".lstrip(".")
        names = names[1:]
        config = config[parent.rpartition(".")[2]]
    name = names[0]
    of_class = _names_of_class(config)
    if name in of_class:
        return None
    meant = _meant(key, {**_groups(), parent: _groups().get(parent, set()) | of_class})
    return UnknownSetting(key, meant, "misspelt" if meant else "")


def _meant(key: str, groups: Mapping[str, set[str]]) -> str:
    """Return the path that an unknown one is a misspelling of; empty if there is none, or rlvet is missing."""
    if not has_rlvet():
        return ""
    from rlvet.lint.names import Names

    return " or ".join(Names(groups).meant(key))


def _path_in_actor(key: str, config: Any) -> str:
    """Return the path of the actor's setting, or the policy loss's, with the last name of a path; empty if none.

    Args:
        key: A path that verl does not know.
        config: The run's config.
    """
    actor = (config.get("actor_rollout_ref") or {}).get("actor") or {}
    groups = {ACTOR: actor, POLICY_LOSS: actor.get("policy_loss")}
    name = key.rpartition(".")[2]
    for prefix, group in groups.items():
        names = _groups()[prefix.rstrip(".")] | _names_of_class(group)
        if prefix == POLICY_LOSS:
            names |= {"method"}
        if name in names and key != f"{prefix}{name}" and not name.startswith("_"):
            return f"{prefix}{name}"
    return ""


def _names_of_class(group: Any) -> set[str]:
    """Return the names of the settings of the class that a group is constructed as; empty if there is none."""
    target = group.get("_target_") if isinstance(group, dict) else None
    if not target:
        return set()
    from hydra.utils import get_class

    try:
        return {field.name for field in fields(get_class(str(target)))}
    except Exception:  # no class, or none with fields: verl's error about it follows
        return set()


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each setting of a nested config."""
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from leaves(child, f"{key}.{name}".lstrip("."))
    else:
        yield key, value


@functools.cache
def verl_settings() -> set[str]:
    """Return the paths of verl's own settings, for all of its engines and trainers."""
    import verl

    folder = Path(verl.__path__[0])
    files = [
        *folder.glob("trainer/config/_generated_ppo*.yaml"),
        *folder.glob("experimental/*/config/*.yaml"),
    ]
    paths = set[str]()
    for file in files:
        paths.update(key for key, _ in leaves(OmegaConf.to_container(OmegaConf.load(file))))
    return paths


@functools.cache
def _groups() -> dict[str, set[str]]:
    """Return the names in each group of verl's settings, by the path of the group; ``""`` is the whole."""
    groups: dict[str, set[str]] = {}
    for path in verl_settings():
        for group, name in _steps(path.split(".")):
            groups.setdefault(group, set()).add(name)
    return groups


def _steps(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each name of a path with the path of its group."""
    group = ""
    for name in names:
        yield group, name
        group = f"{group}.{name}".lstrip(".")
