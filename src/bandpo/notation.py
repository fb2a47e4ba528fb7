"""One text form for clip rules, the same in Python, YAML and on a command line: ``Band(KL(), 0.05)``."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import math
from typing import Any

from bandpo.clipping import ClipRule
from bandpo.divergences import Divergence
from bandpo.objectives import Objective
from bandpo.radius import Radius

KINDS = (ClipRule, Divergence, Objective, Radius)


def _vocabulary() -> dict[str, type]:
    """Every concrete rule, divergence, objective and radius by its name; a new subclass is readable once imported."""
    found: dict[str, type] = {}
    pending: list[type] = [*KINDS]
    while pending:
        for cls in pending.pop().__subclasses__():
            pending.append(cls)
            if not (inspect.isabstract(cls) or cls.__name__.startswith("_")):
                found[cls.__name__] = cls
    return found


def parse_rule(text: str) -> ClipRule:
    """The clip rule written as ``text``: what its ``repr`` prints, or shorter.

    Names of rules, divergences and radii, numbers, ``inf``, positional and keyword arguments; a name without
    parentheses means its defaults. A class of your own is named by its import path,
    ``Band(my_module.MyDivergence(), 0.05)``: its module is imported. Nothing else is evaluated.

    Raises:
        ValueError: the text names no clip rule, a module cannot be imported, or an argument is refused; the message
            names the part at fault.

    >>> parse_rule("Band(KL, radius=0.1)")
    Band(divergence=KL(), radius=0.1, max_ratio=10.0)
    >>> parse_rule("Band(KL(), Linear(0.05, 0.01))")
    Band(divergence=KL(), radius=Linear(start=0.05, end=0.01), max_ratio=10.0)
    >>> parse_rule("FixedClip(0.2, 0.28)") == FixedClip(0.2, 0.28)
    True
    """
    return _parse(text, ClipRule, "clip rule")


def parse_divergence(text: str) -> Divergence:
    """The divergence written as ``text``, e.g. ``KL`` or ``TotalVariation()``; see `parse_rule`.

    >>> parse_divergence("KL")
    KL()
    """
    return _parse(text, Divergence, "divergence")


def parse_objective(text: str) -> Objective:
    """The objective written as ``text``, e.g. ``Surrogate()`` or ``Masked(20)``; see `parse_rule`.

    >>> parse_objective("Masked")
    Masked(max_weight=20.0)
    """
    return _parse(text, Objective, "objective")


def _parse(text: str, kind: type, what: str) -> Any:
    try:
        value = _build(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not written like a {what}, e.g. {_EXAMPLES[kind]}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"in {text!r}: {error}") from error
    if not isinstance(value, kind):
        raise ValueError(
            f"{text!r} is not {'an' if kind is Objective else 'a'} {what}, e.g. {_EXAMPLES[kind]}"
        )
    return value


_EXAMPLES = {
    ClipRule: "Band(KL(), 0.05) or FixedClip(0.2, 0.28)",
    Divergence: "KL or TotalVariation",
    Objective: "Surrogate() or Masked(20)",
}


def _build(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=float() | int() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_build(operand)
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name() | ast.Attribute():
            return _named(node)()
        case ast.Call(func=func, args=args, keywords=keywords):
            return _named(func)(*map(_build, args), **{str(k.arg): _build(k.value) for k in keywords})
        case _:
            raise _cannot_read(node)


def _named(node: ast.expr) -> type:
    path = ast.unparse(node)
    if not all(part.isidentifier() for part in path.split(".")):
        raise _cannot_read(node)
    module, _, name = path.rpartition(".")
    if module:
        return _imported(module, name)
    known = _vocabulary()
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name.lower(), [k.lower() for k in known], n=1)
    near = next((k for k in known if close and k.lower() == close[0]), None)
    hint = f"did you mean {near}?" if near else f"known are {', '.join(sorted(known))}"
    raise ValueError(f"unknown name {name!r}; {hint}; write module.Name for a class of your own")


def _imported(module: str, name: str) -> type:
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"cannot import {name} from {module}: {error}; install the module, or put its folder on PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, KINDS)):
        raise ValueError(f"{module}.{name} is no subclass of ClipRule, Divergence or Objective")
    return found


def _cannot_read(node: ast.expr) -> ValueError:
    return ValueError(f"cannot read {ast.unparse(node)!r}; write names, numbers and parentheses only")
