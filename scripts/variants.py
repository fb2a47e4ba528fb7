"""Where two variants of the paper's experiment differ, found by composing both for every model and rule.

python scripts/variants.py authors recommended
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bandpo.errors import InvalidValue
from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.tables import Table

PAPER = SHIPPED / "paper"

NAMES = ("recipe.", "trainer.default_local_dir", "trainer.experiment_name", "actor_rollout_ref.rollout.trace")
"""What only names a run, or stands in other settings too."""


@dataclass(frozen=True)
class Difference:
    """One setting of verl's config with two values, "unset" where a variant has none."""

    key: str
    first: str
    second: str
    where: tuple[str, ...] = ()
    """The models or rules in which it is so; empty for all."""


def names(kind: str) -> list[str]:
    """The models, rules, arms or tasks of the recipes.

    >>> names("arm")
    ['dapo', 'filter-groups']
    """
    return sorted(path.stem for path in (PAPER / kind).glob("*.yaml"))


def differences(first: str, second: str) -> list[Difference]:
    """Every setting in which two variants, files of ``paper/``, differ.

    A model's settings and a rule's are files of their own, which do not look at each other. So each model is composed
    with one rule, and each rule with one model.

    Raises:
        ValueError: There is no such variant, or a config cannot be composed.
    """
    for variant in (first, second):
        if not (PAPER / f"{variant}.yaml").exists():
            known = ", ".join(path.stem for path in sorted(PAPER.glob("*.yaml")))
            raise InvalidValue(f"{variant!r} is no variant of the paper's experiment; there are {known}")
    models, rules = names("model"), names("rule")
    experiments = [(model, rules[0]) for model in models] + [(models[0], rule) for rule in rules[1:]]
    found: defaultdict[tuple[str, str, str], set[tuple[str, str]]] = defaultdict(set)
    for model, rule in experiments:
        one, other = (_settings(model, rule, variant) for variant in (first, second))
        for key in one | other:
            values = one.get(key, "unset"), other.get(key, "unset")
            if values[0] != values[1]:
                found[(key, *values)].add((model, rule))
    return [
        Difference(*setting, where=_where(pairs, experiments)) for setting, pairs in sorted(found.items())
    ]


def as_table(first: str, second: str, found: Sequence[Difference]) -> str:
    """The differences as a Markdown table."""
    rows = [
        [
            *(f"`{cell}`" for cell in (d.key, d.first, d.second)),
            ", ".join(f"`{name}`" for name in d.where) or "everywhere",
        ]
        for d in found
    ]
    return Table(["setting", first, second, "where"], rows, prose=True).markdown()


def _settings(model: str, rule: str, variant: str) -> dict[str, str]:
    from omegaconf import OmegaConf

    from bandpo_lab.rehearsal.shrink import compose

    chosen = [f"+paper/model={model}", f"+paper/rule={rule}", f"+paper={variant}"]
    config = OmegaConf.to_container(compose(chosen, PAPER.parent, "ppo_trainer"), resolve=True)
    return {key: value for key, value in _leaves(config) if not key.startswith(NAMES)}


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}".lstrip("."))
    else:
        yield key, "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _where(pairs: set[tuple[str, str]], experiments: list[tuple[str, str]]) -> tuple[str, ...]:
    """The models or the rules that these experiments have in common and the others lack; empty for all."""
    if len(pairs) == len(experiments):
        return ()
    model, rule = experiments[0]
    models = {pair[0] for pair in pairs if pair[1] == rule}
    rules = {pair[1] for pair in pairs if pair[0] == model}
    of_models = {pair for pair in experiments if pair[0] in models}
    return tuple(sorted(models if pairs == of_models else rules))


if __name__ == "__main__":
    print(as_table(*sys.argv[1:], differences(*sys.argv[1:])))
