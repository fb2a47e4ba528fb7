"""One text form for every setting, the same in Python, YAML and on a command line: ``Band(KL(), 0.05)``, ``SAPO()``."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from bandpo import _checks
from bandpo.divergences import Divergence
from bandpo.errors import InvalidType, InvalidValue, did_you_mean
from bandpo.methods import METHODS, Method
from bandpo.objectives import Objective
from bandpo.radius import Radius
from bandpo.rules import ClipRule

__all__ = ["as_method", "as_text", "parse"]

Kind = TypeVar("Kind", ClipRule, Divergence, Objective, Method, Radius)
Setting = ClipRule | Divergence | Objective | Method | Radius

DEFAULT = Method()
"""What is meant where no method is given."""

EXAMPLES: dict[type, str] = {
    ClipRule: "a clip rule such as Band(KL(), 0.05) or FixedClip(0.2, 0.28)",
    Divergence: "a divergence such as KL() or TotalVariation()",
    Objective: "an objective such as Surrogate() or Masked(20)",
    Method: "a method such as DPPO() or SAPO(1.0, 1.05), or a clip rule",
    Radius: "a radius such as Linear(0.05, 0.01)",
}
"""What has a text form, and how to name it in an error."""


def parse(text: str, kind: type[Kind] = Method, *, imports: bool = True) -> Kind:
    """The setting written as ``text``: what its ``repr`` prints, or shorter.

    Names of methods, rules, objectives, divergences and radii, numbers, ``inf``, words in quotes, positional and
    keyword arguments; a name without parentheses means its defaults. A class of your own is named by its import path,
    ``Band(my_module.MyDivergence(), 0.05)``; so is a function of your own that is annotated to return a `Method`. Its
    module is imported. Nothing else is evaluated.

    Args:
        text: The text.
        kind: What it should name: `Method`, `ClipRule`, `Objective`, `Divergence` or `Radius`. Where a method is asked
            for, a clip rule will do.
        imports: Whether modules may be imported. If not, for a text that somebody else wrote, a class of your own is
            known only where its module is loaded already.

    Raises:
        ValueError: the text names no such setting, a module cannot or may not be imported, or an argument is refused;
            the message names the part at fault.

    >>> parse("SAPO"), parse("FixedClip(0.2)")
    (SAPO(positive=1.0, negative=1.05), FixedClip(low=0.2, high=0.2))
    >>> parse("Method(Band(KL(), Linear(0.05, 0.01)), Masked(20), level='sequence')").level
    'sequence'
    >>> parse("Band(KL, radius=0.1)", ClipRule)
    Band(divergence=KL(), radius=0.1, max_ratio=10.0)
    """
    read = _parse.__wrapped__ if "__main__" in text else _parse  # a cell may define its class anew
    return read(text, kind, imports)


def as_method(
    method: Method | ClipRule | str | None = None, clip: Method | ClipRule | str | None = None
) -> Method:
    """What is given as ``method``, or by its other name ``clip``; by default PPO's surrogate under `Band`.

    Raises:
        TypeError: it is of another kind.
        ValueError: both are given, or a text cannot be read.

    >>> as_method("DPPO()").objective, as_method(clip=FixedClip(0.2)).clip
    (Masked(max_weight=20.0, both_sides=False), FixedClip(low=0.2, high=0.2))
    """
    if method is not None and clip is not None:
        raise InvalidValue(f"method={method!r} and clip={clip!r} are two names of one setting; leave one out")
    given = clip if method is None else method
    if given is None:
        return DEFAULT
    if isinstance(given, str):
        return parse(given)
    if isinstance(given, ClipRule):
        return Method(given, DEFAULT.objective)  # newer compilers break the graph where a default is made
    if not _checks.is_a(given, Method):
        raise InvalidType(f"method must be {EXAMPLES[Method]}, or its text, got {given!r}")
    return given


def as_text(setting: Setting) -> str:
    """The text from which a fresh process reads ``setting`` back; a class of your own comes with its module.

    A class of a notebook or script is ``__main__.Mine()``, which only that process reads back.

    Raises:
        ValueError: no text can say it: it holds a tensor or a function, or its class stands within a function.

    >>> as_text(Band(KL(), 0.05)), as_text(DAPO())
    ('Band(divergence=KL(), radius=0.05, max_ratio=10.0)', 'DAPO(low=0.2, high=0.28)')
    """
    if isinstance(setting, Method):
        return setting.written(_value_text)
    cls = type(setting)
    name = cls.__name__
    if not cls.__module__.startswith("bandpo."):
        if "<locals>" in cls.__qualname__:
            raise InvalidValue(
                f"{cls.__qualname__} has no text form, since it cannot be imported; move it out of the function"
            )
        name = f"{cls.__module__}.{cls.__qualname__}"
    values = {f.name: getattr(setting, f.name) for f in fields(setting)} if is_dataclass(setting) else {}
    return f"{name}({', '.join(f'{field}={_value_text(value)}' for field, value in values.items())})"


def _value_text(value: Any) -> str:
    if isinstance(value, Setting):
        return as_text(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    raise InvalidValue(f"{type(value).__name__} has no text form; write names and numbers only")


@functools.lru_cache
def _parse(text: str, kind: type, imports: bool) -> Any:
    try:
        value = _build(ast.parse(text.strip(), mode="eval").body, imports)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise InvalidValue(f"{text!r:.200} cannot be read; write {EXAMPLES[kind]}") from error
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"in {text!r}: {error}") from error
    if kind is Method and isinstance(value, ClipRule):
        value = Method(value)
    if not isinstance(value, kind):
        raise InvalidValue(f"{text!r} is not {EXAMPLES[kind]}")
    return value


def _build(node: ast.expr, imports: bool) -> Any:
    match node:
        case ast.Constant(value=float() | int() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_build(operand, imports)
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name() | ast.Attribute():
            return _named(node, imports)()
        case ast.Call(func=func, args=args, keywords=keywords):
            named = {str(keyword.arg): _build(keyword.value, imports) for keyword in keywords}
            if len(named) < len(keywords):
                raise InvalidValue("an argument is given twice")
            return _named(func, imports)(*(_build(arg, imports) for arg in args), **named)
        case _:
            raise _cannot_read(node)


def _vocabulary() -> dict[str, Callable[..., Any]]:
    """Every method, and every concrete class with a text form by its bare name; where two have one name, ours."""
    found: dict[str, Callable[..., Any]] = {"Method": Method}
    pending: list[type] = [*EXAMPLES]
    while pending:
        for cls in pending.pop().__subclasses__():
            pending.append(cls)
            if not (inspect.isabstract(cls) or cls.__name__.startswith("_")):
                ours = cls.__module__.startswith("bandpo.")
                found[cls.__name__] = cls if ours else found.get(cls.__name__, cls)
    return found | {name: paper.method for name, paper in METHODS.items()}


def _named(node: ast.expr, imports: bool) -> Callable[..., Any]:
    path = ast.unparse(node)
    if not all(part.isidentifier() for part in path.split(".")):
        raise _cannot_read(node)
    module, _, name = path.rpartition(".")
    if module:
        if not imports and name not in vars(sys.modules.get(module, object)):  # no look-up that could import
            raise InvalidValue(f"{path} would have to be imported, which this text may not ask for")
        return _imported(module, name)
    known = _vocabulary()
    if name in known:
        return known[name]
    hint = did_you_mean(name, known) or f"; known are {', '.join(sorted(known))}"
    raise InvalidValue(f"unknown name {name!r}{hint}; write module.Name for a class of your own")


def _imported(module: str, name: str) -> Callable[..., Any]:
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidValue(
            f"cannot import {name} from {module}: {error}; install the module, or put its folder on PYTHONPATH"
        ) from error
    if isinstance(found, type) and issubclass(found, tuple(EXAMPLES)):
        return found
    if inspect.isfunction(found) and str(found.__annotations__.get("return")).endswith(
        ("Method", "Method'>")
    ):
        return found
    kinds = ", ".join(kind.__name__ for kind in EXAMPLES)
    raise InvalidValue(
        f"{module}.{name} derives from none of {kinds}, and is no function annotated `-> Method`"
    )


def _cannot_read(node: ast.expr) -> InvalidValue:
    return InvalidValue(f"cannot read {ast.unparse(node)!r}; write names, numbers and parentheses only")
