"""The names of the published methods, for completion in a shell, which cannot wait for torch."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path


def published_methods() -> list[str]:
    """Return the methods of `bandpo.core.methods.METHODS` as calls, such as ``GSPO()``.

    Importing that module imports torch, so the functions with its decorator ``@_published`` are read from its source.

    >>> "GSPO()" in published_methods()
    True
    """
    package = find_spec("bandpo.core")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).with_name("methods.py").read_text(encoding="utf-8")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return [
        f"{function.name}()" for function in functions if any(map(_is_published, function.decorator_list))
    ]


def complete_method(incomplete: str) -> list[str]:
    """Return the published methods whose names begin as the typed text does."""
    return [name for name in published_methods() if name.startswith(incomplete)]


def _is_published(decorator: ast.expr) -> bool:
    """Return True if a decorator is a call of ``_published``."""
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "_published"
