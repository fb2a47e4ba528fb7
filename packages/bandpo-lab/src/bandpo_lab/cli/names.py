"""Completion of the names of models and methods in a shell. It imports neither torch nor a framework."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import typer

from bandpo_lab.cli.recipes import SHIPPED

VANILLA = "vanilla"
"""The name of verl's own loss."""


def recipe_names(recipes: Path, kind: str) -> list[str]:
    """Return the names of the recipes of a kind, such as ``model``, without those of TRL."""
    names = sorted(path.stem for path in (recipes / "paper" / kind).glob("*.yaml"))
    return [name for name in names if name not in ("accelerate", "trl")]


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    """Return the models of the recipes whose names begin as the typed text does."""
    from bandpo_lab.models import SMOLLM2

    names = [*recipe_names(_recipes(context), "model"), SMOLLM2]
    return [name for name in names if name.startswith(incomplete.lower())]


def complete_method(context: typer.Context, incomplete: str) -> list[str]:
    """Return the rules of the recipes, and the published methods as calls, whose names begin as the typed text does."""
    names = [*recipe_names(_recipes(context), "rule"), VANILLA, *published_methods()]
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def published_methods() -> list[str]:
    """Return the published methods of bandpo as calls, such as ``GSPO()``.

    Their names are read from the source, as importing them imports torch.

    >>> "GSPO()" in published_methods()
    True
    """
    spec = find_spec("bandpo")
    if spec is None or spec.origin is None:
        return []
    source = (Path(spec.origin).parent / "core/methods.py").read_text(encoding="utf-8")
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return [
                f"{name}()" for name in ast.literal_eval(statement.value) if name not in ("METHODS", "Method")
            ]
    return []


def _recipes(context: typer.Context) -> Path:
    return Path(context.params.get("config_dir") or SHIPPED)
