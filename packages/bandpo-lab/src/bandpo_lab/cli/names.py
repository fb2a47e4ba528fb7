"""Completion of the names of models and methods in a shell. It imports neither torch nor a framework."""

from __future__ import annotations

from pathlib import Path

import typer

from bandpo.cli import method_names
from bandpo_lab.cli.recipes import SHIPPED

VANILLA = "vanilla"
"""The name of verl's own loss."""


def recipe_names(recipes: Path, kind: str) -> list[str]:
    """Return the names of the recipes of a kind, such as ``model``, without those of TRL."""
    names = sorted(path.stem for path in (recipes / "paper" / kind).glob("*.yaml"))
    return [name for name in names if name not in ("accelerate", "trl")]


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    """Return the models of the recipes whose names begin as the typed text does."""
    from bandpo_lab.models.embedded import SMOLLM2

    names = [*recipe_names(_recipes(context), "model"), SMOLLM2]
    return [name for name in names if name.startswith(incomplete)]


def complete_method(context: typer.Context, incomplete: str) -> list[str]:
    """Return the rules of the recipes, and the published methods as calls, whose names begin as the typed text does."""
    rules = [*recipe_names(_recipes(context), "rule"), VANILLA]
    matching = [name for name in rules if name.startswith(incomplete)]
    return [*matching, *method_names.complete_method(incomplete)]


def _recipes(context: typer.Context) -> Path:
    return Path(context.params.get("config_dir") or SHIPPED)
