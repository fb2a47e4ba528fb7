"""One text form for clip rules, the same in Python, YAML and on a command line: ``Band(KL(), 0.05)``."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
from typing import Any

from bandpo.clipping import ClipRule
from bandpo.divergences import Divergence
from bandpo.objectives import Objective
from bandpo.radius import Radius


def _vocabulary() -> dict[str, type]:
    """Every concrete rule, divergence, objective and radius by its name; a new subclass is readable once imported."""
    found: dict[str, type] = {}
    pending: list[type] = [ClipRule, Divergence, Objective, Radius]
    while pending:
        for cls in pending.pop().__subclasses__():
            pending.append(cls)
            if not (inspect.isabstract(cls) or cls.__name__.startswith("_")):
                found[cls.__name__] = cls
    return found


def parse_rule(text: str) -> ClipRule:
    """The clip rule written as ``text``: what its ``repr`` prints, or shorter.

    Names of rules, divergences and radii, numbers, ``inf``, positional and keyword arguments; a name without
    parentheses means its defaults. Nothing is evaluated.

    Raises:
        ValueError: the text names no clip rule, or an argument is refused; the message names the part at fault.

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
        case ast.Name(id=name):
            return _named(name)()
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return _named(name)(*map(_build, args), **{str(k.arg): _build(k.value) for k in keywords})
        case _:
            raise ValueError(f"cannot read {ast.unparse(node)!r}; write names, numbers and parentheses only")


def _named(name: str) -> type:
    known = _vocabulary()
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name.lower(), [k.lower() for k in known], n=1)
    near = next((k for k in known if close and k.lower() == close[0]), None)
    hint = f"did you mean {near}?" if near else f"known are {', '.join(sorted(known))}"
    raise ValueError(f"unknown name {name!r}; {hint}")
