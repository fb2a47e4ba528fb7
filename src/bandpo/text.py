"""One text form for every setting, the same in Python, YAML and on a command line: ``Band(KL(), 0.05)``, ``SAPO()``."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import math
import sys
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from bandpo.batch import known_level
from bandpo.divergences import Divergence
from bandpo.errors import InvalidType, InvalidValue, did_you_mean
from bandpo.methods import Method, Parts
from bandpo.objectives import DualClip, Objective
from bandpo.radius import Radius
from bandpo.rules import ClipRule

__all__ = ["as_text", "parse_divergence", "parse_method", "parse_objective", "parse_rule"]

Kind = TypeVar("Kind", ClipRule, Divergence, Objective, Method, Radius)

EXAMPLES: dict[type, str] = {
    ClipRule: "a clip rule such as Band(KL(), 0.05) or FixedClip(0.2, 0.28)",
    Divergence: "a divergence such as KL() or TotalVariation()",
    Objective: "an objective such as Surrogate() or Masked(20)",
    Method: "a method such as DPPO() or SAPO(1.0, 1.05), or a clip rule",
    Radius: "a radius such as Linear(0.05, 0.01)",
}
"""What has a text form, and how to name it in an error."""


def parse_rule(text: str, imports: bool = True) -> ClipRule:
    """The clip rule written as ``text``: what its ``repr`` prints, or shorter.

    Names of rules, divergences and radii, numbers, ``True``, ``inf``, positional and keyword arguments; a name without
    parentheses means its defaults. A class of your own is named by its import path,
    ``Band(my_module.MyDivergence(), 0.05)``: its module is imported. Nothing else is evaluated.

    Args:
        text: As above.
        imports: Whether a module may be imported. If not, for a text that somebody else wrote, a class of your own is
            known only where its module is loaded already.

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
    return _parse(text, ClipRule, imports)


def parse_divergence(text: str, imports: bool = True) -> Divergence:
    """The divergence written as ``text``, e.g. ``KL`` or ``TotalVariation()``; see `parse_rule`.

    >>> parse_divergence("KL")
    KL()
    """
    return _parse(text, Divergence, imports)


def parse_objective(text: str, imports: bool = True) -> Objective:
    """The objective written as ``text``, e.g. ``Surrogate()`` or ``Masked(20)``; see `parse_rule`.

    >>> parse_objective("Masked")
    Masked(max_weight=20.0, both_sides=False)
    """
    return _parse(text, Objective, imports)


def parse_method(text: str, imports: bool = True) -> Method | ClipRule:
    """The method written as ``text``, e.g. ``DPPO()``; a clip rule is a method too. See `parse_rule`.

    >>> parse_method("SAPO(1.0, 1.05)"), parse_method("FixedClip(0.2, 0.28)")
    (SAPO(positive=1.0, negative=1.05), FixedClip(low=0.2, high=0.28))
    """
    return _parse(text, Method, imports)


def as_text(setting: ClipRule | Divergence | Objective | Method | Radius) -> str:
    """The text from which a fresh process reads ``setting`` back; a class of your own comes with its module.

    Raises:
        ValueError: no text can say it: it holds a tensor or a function, or its class is not at the top level of a
            module that can be imported.

    >>> as_text(Band(KL(), 0.05))
    'Band(divergence=KL(), radius=0.05, max_ratio=10.0)'
    """
    cls = type(setting)
    if not cls.__module__.startswith("bandpo."):
        if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
            raise InvalidValue(
                f"{cls.__qualname__} has no text form, since no other process can import it; move it to the top level "
                "of a module of its own"
            )
        name = f"{cls.__module__}.{cls.__qualname__}"
    else:
        name = cls.__name__
    values = {f.name: getattr(setting, f.name) for f in fields(setting)} if is_dataclass(setting) else {}
    return f"{name}({', '.join(f'{field}={_value_text(value)}' for field, value in values.items())})"


def _value_text(value: Any) -> str:
    if isinstance(value, tuple(EXAMPLES)):
        return as_text(value)
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    raise InvalidValue(f"{type(value).__name__} has no text form; write names and numbers only")


def as_parts(
    method: Method | ClipRule | str | None = None,
    *,
    clip: ClipRule | str | None = None,
    objective: Objective | str | None = None,
    level: str | None = None,
    dual_clip: float | None = None,
    imports: bool = True,
) -> Parts:
    """What a method is made of, or what ``clip``, ``objective`` and ``level`` say in its place; objects or text.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: ``method`` stands beside what it fixes, a text cannot be read, or ``level`` is unknown.

    >>> as_parts("DPPO()").objective, as_parts(clip="FixedClip(0.2)").clip
    (Masked(max_weight=20.0, both_sides=False), FixedClip(low=0.2, high=0.2))
    """
    given = {"clip": clip, "objective": objective, "level": level}
    given = {name: value for name, value in given.items() if value is not None}
    if method is None:
        if clip is not None:
            given["clip"] = _read(clip, ClipRule, "clip", imports)
        if objective is not None:
            given["objective"] = _read(objective, Objective, "objective", imports)
        if level is not None:
            known_level(level)
        parts = Parts(**given)  # pyright: ignore[reportArgumentType]
    elif given:
        raise InvalidValue(f"method={method!r} already says what {' and '.join(given)} would; leave one out")
    else:
        read = method if isinstance(method, ClipRule) else _read(method, Method, "method", imports)
        parts = Parts(read) if isinstance(read, ClipRule) else read.parts()
    if dual_clip is not None:
        parts = parts._replace(objective=DualClip(dual_clip, parts.objective))
    return parts


def _read(value: Any, kind: type[Kind], name: str, imports: bool) -> Kind:
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        return _parse(value, kind, imports)
    raise InvalidType(f"{name} must be {EXAMPLES[kind]}, or its text, got {value!r}")


@functools.lru_cache
def _parse(text: str, kind: type, imports: bool) -> Any:
    try:
        value = _build(ast.parse(text.strip(), mode="eval").body, imports)
    except SyntaxError as error:
        raise InvalidValue(f"{text!r} cannot be read; write {EXAMPLES[kind]}") from error
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"in {text!r}: {error}") from error
    if not isinstance(value, (Method, ClipRule) if kind is Method else kind):
        raise InvalidValue(f"{text!r} is not {EXAMPLES[kind]}")
    return value


def _build(node: ast.expr, imports: bool) -> Any:
    match node:
        case ast.Constant(value=float() | int() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_build(operand, imports)
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name() | ast.Attribute():
            return _named(node, imports)()
        case ast.Call(func=func, args=args, keywords=keywords):
            values = [_build(value, imports) for value in args]
            named = {str(k.arg): _build(k.value, imports) for k in keywords}
            return _named(func, imports)(*values, **named)
        case _:
            raise _cannot_read(node)


def _vocabulary() -> dict[str, type]:
    """Every concrete class with a text form by its bare name; where two have one name, ours."""
    found: dict[str, type] = {}
    pending: list[type] = [*EXAMPLES]
    while pending:
        for cls in pending.pop().__subclasses__():
            pending.append(cls)
            if not (inspect.isabstract(cls) or cls.__name__.startswith("_")):
                ours = cls.__module__.startswith("bandpo.")
                found[cls.__name__] = cls if ours else found.get(cls.__name__, cls)
    return found


def _named(node: ast.expr, imports: bool) -> type:
    path = ast.unparse(node)
    if not all(part.isidentifier() for part in path.split(".")):
        raise _cannot_read(node)
    module, _, name = path.rpartition(".")
    if module:
        return _imported(module, name, imports)
    known = _vocabulary()
    if name in known:
        return known[name]
    hint = did_you_mean(name, known) or f"; known are {', '.join(sorted(known))}"
    raise InvalidValue(f"unknown name {name!r}{hint}; write module.Name for a class of your own")


def _imported(module: str, name: str, imports: bool) -> type:
    if not imports and name not in vars(sys.modules.get(module, object)):  # no look-up that could import
        raise InvalidValue(
            f"{module}.{name} would have to be imported, which a file that is read may not ask for"
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidValue(
            f"cannot import {name} from {module}: {error}; install the module, or put its folder on PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, tuple(EXAMPLES))):
        kinds = ", ".join(kind.__name__ for kind in EXAMPLES)
        raise InvalidValue(f"{module}.{name} derives from none of {kinds}")
    return found


def _cannot_read(node: ast.expr) -> ValueError:
    return ValueError(f"cannot read {ast.unparse(node)!r}; write names, numbers and parentheses only")
