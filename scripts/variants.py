"""Print the settings in which two variants of the paper's experiment differ, for all models and rules.

python scripts/variants.py authors recommended
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.errors import InvalidValue
from bandpo_lab.output.tables import Table

PAPER = SHIPPED / "paper"

IGNORED = (
    "recipe.",
    "trainer.default_local_dir",
    "trainer.experiment_name",
    "actor_rollout_ref.rollout.trace",
)
"""Prefixes of settings that only name the run, or that repeat other settings."""


@dataclass(frozen=True)
class Difference:
    """A setting of verl's config with different values in two variants; "unset" if a variant has none."""

    key: str
    first: str
    second: str
    where: tuple[str, ...] = ()
    """The models or rules with this difference; empty for all."""


def names(kind: str) -> list[str]:
    """Return the names of the models, rules, arms or tasks of the recipes.

    >>> names("arm")
    ['dapo', 'filter-groups']
    """
    return sorted(path.stem for path in (PAPER / kind).glob("*.yaml"))


def differences(first: str, second: str) -> list[Difference]:
    """Return the settings in which two variants, files of ``paper/``, differ.

    The files of models and rules do not depend on each other. So each model is composed with one rule, and each rule
    with one model.

    Raises:
        ValueError: if there is no such variant, or a config cannot be composed.
    """
    for variant in (first, second):
        if not (PAPER / f"{variant}.yaml").exists():
            known = ", ".join(path.stem for path in sorted(PAPER.glob("*.yaml")))
            raise InvalidValue(f"{variant!r} is no variant of the paper's experiment; choose from {known}")
    models, rules = names("model"), names("rule")
    experiments = [(model, rules[0]) for model in models] + [(models[0], rule) for rule in rules[1:]]
    experiments_by_setting: defaultdict[tuple[str, str, str], set[tuple[str, str]]] = defaultdict(set)
    for model, rule in experiments:
        first_settings = _settings(model, rule, first)
        second_settings = _settings(model, rule, second)
        for key in first_settings | second_settings:
            first_value = first_settings.get(key, "unset")
            second_value = second_settings.get(key, "unset")
            if first_value != second_value:
                experiments_by_setting[key, first_value, second_value].add((model, rule))
    return [
        Difference(*setting, where=_where(pairs, experiments))
        for setting, pairs in sorted(experiments_by_setting.items())
    ]


def as_table(first: str, second: str, rows: Sequence[Difference]) -> str:
    """Return the differences between two variants as a Markdown table."""
    cells = []
    for row in rows:
        where = ", ".join(f"`{name}`" for name in row.where) or "everywhere"
        cells.append([f"`{row.key}`", f"`{row.first}`", f"`{row.second}`", where])
    return Table(["setting", first, second, "where"], cells, prose=True).markdown()


def _settings(model: str, rule: str, variant: str) -> dict[str, str]:
    """Compose an experiment, and return its settings by their dotted names."""
    from omegaconf import OmegaConf

    from bandpo_lab.rehearsal.shrink import compose

    overrides = [f"+paper/model={model}", f"+paper/rule={rule}", f"+paper={variant}"]
    config = OmegaConf.to_container(compose(overrides, PAPER.parent, "ppo_trainer"), resolve=True)
    return {key: value for key, value in _leaves(config) if not key.startswith(IGNORED)}


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted names and the values of a nested config, written as in YAML."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}".lstrip("."))
    elif value is None:
        yield key, "null"
    elif isinstance(value, bool):
        yield key, str(value).lower()
    else:
        yield key, str(value)


def _where(pairs: set[tuple[str, str]], experiments: list[tuple[str, str]]) -> tuple[str, ...]:
    """Return the models or the rules that describe a set of experiments; empty for all experiments."""
    if len(pairs) == len(experiments):
        return ()
    model, rule = experiments[0]
    models = {pair[0] for pair in pairs if pair[1] == rule}
    rules = {pair[1] for pair in pairs if pair[0] == model}
    of_models = {pair for pair in experiments if pair[0] in models}
    return tuple(sorted(models if pairs == of_models else rules))


if __name__ == "__main__":
    print(as_table(*sys.argv[1:], differences(*sys.argv[1:])))
