"""The text form of methods, rules and other settings, for Python, YAML and command lines: ``Band(KL(), 0.05)``."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from . import _checks
from .divergences import KL, Divergence, PearsonChi2, TotalVariation
from .errors import InvalidType, InvalidValue, did_you_mean
from .methods import METHODS, Method
from .objectives import Objective
from .rules import DCPO, Band, ClipRule, FixedClip, Loosest
from .schedules import Radius

__all__ = ["as_method", "as_text", "importable_current_folder", "parse"]

Kind = TypeVar("Kind", ClipRule, Divergence, Objective, Method, Radius)
Setting = ClipRule | Divergence | Objective | Method | Radius

PACKAGE = f"{__package__}."
"""The beginning of the names of this package's modules: the folder may be copied into another codebase."""

DEFAULT = Method()
"""The method if none is given."""

EXAMPLES: dict[type, str] = {
    ClipRule: "a clip rule such as Band(KL(), 0.05) or FixedClip(0.2, 0.28)",
    Divergence: "a divergence such as KL() or TotalVariation()",
    Objective: "an objective such as Surrogate() or DropOutside(20)",
    Method: "a method such as DPPO() or SAPO(1.0, 1.05), or a clip rule",
    Radius: "a radius such as Linear(0.05, 0.01)",
}
"""The base classes of objects with a text form, and their description in errors."""

ACCEPTED: dict[type, tuple[type, ...]] = {Method: (Method, ClipRule)}
"""The base classes of the objects that a text of a kind may name, where it is not the kind alone."""

PAPER_DIVERGENCES: dict[str, Callable[[], Divergence]] = {
    "bandkl": KL,
    "bandtv": TotalVariation,
    "bandchi2": PearsonChi2,
}
"""The divergence of each ``tokenwise_ratio_bounds_method`` of the BandPO authors' scripts that is a Band."""

PAPER_DCPO = "dcpodac"
"""The ``tokenwise_ratio_bounds_method`` that is DCPO, in these scripts with the limits and the cap of `DCPO`."""

PAPER_NAME = re.compile(r"(bandkl|bandtv|bandchi2)(?:0(\d\d))?(_relax)?")
"""A name in these scripts: the method, the decimals of its radius (``005`` is 0.05), and ``_relax`` if relaxed."""


def parse(text: str, kind: type[Kind] = Method, *, imports: bool = True) -> Kind:
    """Parse the text form of a method, rule, objective, divergence or radius.

    The text may contain their names, numbers, ``inf``, quoted words, and positional and keyword arguments. It is what
    ``repr`` prints, or a shorter form. A name without parentheses means its defaults. A class of your own is named by
    its import path, ``Band(my_module.MyDivergence(), 0.05)``, and so is a function of your own that is annotated to
    return a `Method`; its module is imported. Nothing else is evaluated.

    The names of the BandPO authors' scripts are parsed too: ``bandkl``, ``bandtv`` and ``bandchi2`` are `Band` with
    their divergence, a radius of 0.05 and a cap of 10. ``bandkl005`` names the radius, and ``bandkl005_relax`` is
    `Loosest` of Band and Clip-Higher's interval. ``dcpodac`` is `DCPO`.

    Args:
        text: The text.
        kind: The class of the result: `Method`, `ClipRule`, `Objective`, `Divergence` or `Radius`. For `Method`, the
            text of a clip rule is accepted too.
        imports: True if the text may name classes outside of bandpo. Pass False for untrusted text, such as the
            configuration of a downloaded run: names are then looked up among bandpo's own classes only, and no module
            is imported.

    Raises:
        ValueError: if the text names no such object, a module cannot or may not be imported, or an argument is invalid.
            The message names the part at fault.

    >>> parse("SAPO"), parse("FixedClip(0.2)")
    (SAPO(positive=1.0, negative=1.05), FixedClip(low=0.2, high=0.2))
    >>> parse("Method(Band(KL(), Linear(0.05, 0.01)), DropOutside(20), level='sequence')").level
    'sequence'
    >>> parse("Band(KL, radius=0.1)", ClipRule)
    Band(divergence=KL(), radius=0.1, max_ratio=10.0)
    >>> parse("bandtv005", ClipRule)
    Band(divergence=TotalVariation(), radius=0.05, max_ratio=10.0)
    """
    if "__main__" in text:  # not cached, because a notebook cell may redefine the class
        return _parse.__wrapped__(text, kind, imports)
    return _parse(text, kind, imports)


@contextmanager
def importable_current_folder() -> Generator[None]:
    """Make modules of the current folder importable within a ``with`` block.

    Commands use it to parse options, which the user has typed. The folder is on ``sys.path`` only within the block, so
    no module in it is imported unless an option names it. It is appended, so its files do not shadow installed
    packages.

    >>> with importable_current_folder():
    ...     rule = parse("FixedClip(0.2)")
    """
    folder = os.getcwd()
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)


def as_method(method: Method | ClipRule | str | None = None) -> Method:
    """Return ``method`` as a `Method`; PPO's surrogate with `Band` if not given.

    Args:
        method: A method, a clip rule, which is used with PPO's surrogate, or the text of either.

    Raises:
        TypeError: if ``method`` is neither a method, a clip rule nor a text.
        ValueError: if the text cannot be parsed.

    >>> as_method("DPPO()").objective, as_method(FixedClip(0.2)).clip
    (DropOutside(max_weight=20.0, both_sides=False), FixedClip(low=0.2, high=0.2))
    """
    if method is None:
        return DEFAULT
    if isinstance(method, str):
        return parse(method)
    if isinstance(method, ClipRule):
        # Newer versions of torch.compile break the graph if the default objective is created here.
        return Method(method, DEFAULT.objective)
    if not _checks.is_a(method, Method):
        name = getattr(method, "__name__", "")
        if name in METHODS or (isinstance(method, type) and issubclass(method, (ClipRule, Method))):
            raise InvalidType(f"method is {name} itself: write {name}(), with its arguments if it needs any")
        raise InvalidType(f"method must be {EXAMPLES[Method]}, or its text, got {method!r}")
    return method


def as_text(setting: Setting) -> str:
    """Return the text form of a setting, which `parse` reads; a class of your own is named with its module.

    A class of a notebook or script is named ``__main__.Mine()``, which only the same process can parse.

    Raises:
        ValueError: if there is no text form: the setting holds a tensor or a function, or its class is defined within a
            function.

    >>> as_text(Band(KL(), 0.05)), as_text(DAPO())
    ('Band(divergence=KL(), radius=0.05, max_ratio=10.0)', 'DAPO(low=0.2, high=0.28)')
    """
    if isinstance(setting, Method):
        return setting.to_text(_value_text)
    cls = type(setting)
    name = cls.__name__
    if not cls.__module__.startswith(PACKAGE):
        if "<locals>" in cls.__qualname__:
            raise InvalidValue(
                f"{cls.__qualname__} has no text form, since it cannot be imported; move it out of the function"
            )
        name = f"{cls.__module__}.{cls.__qualname__}"
    arguments: list[str] = []
    if is_dataclass(setting):
        arguments = [f"{f.name}={_value_text(getattr(setting, f.name))}" for f in fields(setting)]
    return f"{name}({', '.join(arguments)})"


def _value_text(value: Any) -> str:
    """Return the text form of an argument."""
    if isinstance(value, Setting):
        return as_text(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    raise InvalidValue(f"{type(value).__name__} has no text form; write names and numbers only")


@functools.lru_cache
def _parse(text: str, kind: type, imports: bool) -> Any:
    """Parse a text form; see `parse`."""
    try:
        value = _build(ast.parse(text.strip(), mode="eval").body, imports, ACCEPTED.get(kind, (kind,)))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise InvalidValue(f"{text!r:.200} cannot be read; write {EXAMPLES[kind]}") from error
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"in {text!r}: {error}") from error
    if kind is Method and isinstance(value, ClipRule):
        value = Method(value)
    if not isinstance(value, kind):
        raise InvalidValue(f"{text!r} is not {EXAMPLES[kind]}")
    return value


def _build(node: ast.expr, imports: bool, kinds: tuple[type, ...]) -> Any:
    """Return the value of a node of the syntax tree.

    Args:
        node: The node.
        imports: As for `parse`.
        kinds: The base classes of the objects that may be at this place, for errors.
    """
    match node:
        case ast.Constant(value=float() | int() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_build(operand, imports, kinds)
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name() | ast.Attribute():
            return _look_up(node, imports, kinds)()
        case ast.Call(func=func, args=args, keywords=keywords):
            function = _look_up(func, imports, kinds)
            parameters = _kinds_of_arguments(function)
            kwargs: dict[str, Any] = {}
            for keyword in keywords:
                name = str(keyword.arg)
                kwargs[name] = _build(keyword.value, imports, parameters.get(name, (*EXAMPLES,)))
            if len(kwargs) < len(keywords):
                raise InvalidValue("an argument is given twice")
            _check_arguments(function, kwargs)
            positional = [*parameters.values()]
            positional += [(*EXAMPLES,)] * len(args)
            values = [_build(arg, imports, kinds) for arg, kinds in zip(args, positional, strict=False)]
            return function(*values, **kwargs)
        case _:
            raise _cannot_parse(node)


def _kinds_of_arguments(function: Callable[..., Any]) -> dict[str, tuple[type, ...]]:
    """Return the base classes of the objects that each argument of a function accepts, by its name, from annotations.

    >>> {name: [kind.__name__ for kind in kinds] for name, kinds in _kinds_of_arguments(Band).items()}
    {'divergence': ['Divergence'], 'radius': ['Radius'], 'max_ratio': ['Radius']}
    """
    kinds: dict[str, tuple[type, ...]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        names = re.findall(r"\w+", str(parameter.annotation))
        accepted = tuple(kind for kind in EXAMPLES if kind.__name__ in names)
        if not accepted and "Band" in names:
            accepted = (ClipRule,)
        # A number may be a schedule.
        kinds[name] = accepted or ((Radius,) if "float" in names else (*EXAMPLES,))
    return kinds


def _check_arguments(function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Raise an error that lists the arguments of ``function`` if a keyword is none of them."""
    parameters = [name for name in inspect.signature(function).parameters if not name.startswith("_")]
    for name in kwargs:
        if name not in parameters:
            accepted = f"it takes {', '.join(parameters)}" if parameters else "it takes no arguments"
            raise InvalidValue(
                f"{function.__name__} has no argument {name!r}{did_you_mean(name, parameters)}; {accepted}"
            )


def _vocabulary(*, package_only: bool) -> dict[str, Callable[..., Any]]:
    """Return all methods and all concrete classes with a text form, by name.

    If a user's class has the name of one of bandpo's, the name means bandpo's.

    Args:
        package_only: True to leave out the classes of users.
    """
    vocabulary: dict[str, Callable[..., Any]] = {"Method": Method}
    pending: list[type] = [*EXAMPLES]
    while pending:
        for cls in pending.pop().__subclasses__():
            pending.append(cls)
            if inspect.isabstract(cls) or cls.__name__.startswith("_"):
                continue
            if cls.__module__.startswith(PACKAGE):
                # Private modules such as objectives._around only have base classes.
                if not cls.__module__.rpartition(".")[2].startswith("_"):
                    vocabulary[cls.__name__] = cls
            elif not package_only:
                vocabulary.setdefault(cls.__name__, cls)
    return vocabulary | {name: paper.method for name, paper in METHODS.items()}


def _look_up(node: ast.expr, imports: bool, kinds: tuple[type, ...]) -> Callable[..., Any]:
    """Return the class or function that a name means.

    Args:
        node: The name, or the path of a class or function that is imported.
        imports: As for `parse`.
        kinds: As for `_build`.
    """
    path = ast.unparse(node)
    if not all(identifier.isidentifier() for identifier in path.split(".")):
        raise _cannot_parse(node)
    module, _, name = path.rpartition(".")
    if module:
        if not imports:
            raise InvalidValue(f"{path} would have to be imported, which is not allowed for this text")
        return _import(module, name)
    vocabulary = _vocabulary(package_only=not imports)
    if name in vocabulary:
        return vocabulary[name]
    if name == PAPER_DCPO:
        return DCPO
    paper_name = PAPER_NAME.fullmatch(name)
    if paper_name:
        return _paper_rule(*paper_name.groups())
    candidates = [known for known, value in vocabulary.items() if _makes(value, kinds)]
    raise InvalidValue(
        f"unknown name {name!r}{_hint(name, candidates, kinds)}; write module.Name for a class of your own"
    )


def _makes(value: Callable[..., Any], kinds: tuple[type, ...]) -> bool:
    """Return True if a class or a function of the vocabulary makes an object of one of these base classes."""
    return issubclass(value if isinstance(value, type) else Method, kinds)


def _hint(name: str, candidates: Sequence[str], kinds: tuple[type, ...]) -> str:
    """Return the end of an error about an unknown name: the candidate that is meant, or all of them, nearest first.

    Args:
        name: The unknown name.
        candidates: The names of the expected kinds.
        kinds: As for `_build`.
    """
    hint = did_you_misspell(name, candidates)
    if hint:
        return hint
    if Method in kinds or ClipRule in kinds:
        hint = paper_name_hint(name)
    else:
        abbreviations = {re.sub(r"[^A-Z]", "", candidate): candidate for candidate in candidates}
        candidate = abbreviations.get(name.upper())
        hint = f"; did you mean {candidate}?" if candidate else did_you_mean(name, candidates)
    if hint:
        return hint
    related = [known for known in candidates if _bare(known) in _bare(name) or _bare(name) in _bare(known)]
    if len(related) == 1 and Method not in kinds:
        return f"; did you mean {related[0]}?"
    nearest = sorted(
        candidates, key=lambda known: (known not in related, _edits(_bare(name), _bare(known)), known)
    )
    methods = "; bandpo.core.methods.METHODS lists the methods" if Method in kinds else ""
    return f"; known are {', '.join(nearest)}{methods}"


def paper_name_hint(name: str) -> str:
    """Return the end of an error about an unknown name that is near one of the BandPO authors' scripts; else empty.

    >>> paper_name_hint("bandkl5")
    '; did you mean bandkl? Three digits are its radius without the point, as in bandkl005, which is bandkl(0.05)'
    """
    meant = did_you_mean(re.sub(r"\d.*", "", name), PAPER_DIVERGENCES)
    if not meant:
        return ""
    known = next(known for known in PAPER_DIVERGENCES if f" {known}?" in meant)
    return f"{meant} Three digits are its radius without the point, as in {known}005, which is {known}(0.05)"


def did_you_misspell(name: str, candidates: Iterable[str]) -> str:
    """Return the end of an error about an unknown name, with the candidate of which it is a misspelling, if any.

    Names of published methods often differ by one letter (CISPO and DISPO, GRPO and TRPO), and no method may be
    answered with another one. So a name in capitals is suggested for four slips only: upper and lower case, a letter
    typed twice, two neighbouring letters exchanged, the last letter missing. Exchanging the first letter counts as
    another name (PSPO and SPPO), and so does a change of a number (DeepSeekV32 and DeepSeekV4).

    >>> did_you_misspell("GSPPO", ["GSPO", "PPO"]), did_you_misspell("DISPO", ["CISPO"])
    ('; did you mean GSPO?', '')
    """
    for candidate in sorted(candidates, key=lambda candidate: _edits(_bare(name), _bare(candidate))):
        if _misspelt(_bare(name), candidate):
            return f"; did you mean {candidate}?"
    return ""


def _bare(name: str) -> str:
    """Return a name in lower case without hyphens, with a letter O for a zero."""
    return re.sub(r"[-_]", "", name.lower()).replace("0", "o")


def _misspelt(typed: str, candidate: str) -> bool:
    """Return True if a name, as `_bare` returns it, is a misspelling of a candidate."""
    name = _bare(candidate)
    if typed == name:
        return True
    if len(name) < 4 or re.findall(r"\d", typed) != re.findall(r"\d", name):
        return False
    if candidate.isupper():
        doubled = {name[:i] + name[i] + name[i:] for i in range(len(name))}
        exchanged = {name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in range(1, len(name) - 1)}
        return typed in {name[:-1], *doubled, *exchanged}
    return _edits(typed, name) <= (2 if len(name) >= 8 else 1)


def _edits(one: str, other: str) -> int:
    """Count the letters to insert, delete, replace or exchange with their neighbour to make one name the other."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one):
        after = [i + 1]
        for j, target in enumerate(other):
            changes = [row[j] + (letter != target), row[j + 1] + 1, after[j] + 1]
            if i and j and (letter, one[i - 1]) == (other[j - 1], target):
                changes.append(before[j - 1] + 1)
            after.append(min(changes))
        before, row = row, after
    return row[-1]


def _paper_rule(name: str, decimals: str | None, relaxed: str | None) -> Callable[..., ClipRule]:
    """Return the function that a name matched by `PAPER_NAME` means, from the groups of the match."""
    default_radius = 0.05 if decimals is None else float(f"0.{decimals}")

    def rule(radius: float = default_radius, max_ratio: float = 10.0) -> ClipRule:
        band = Band(PAPER_DIVERGENCES[name](), radius, max_ratio)
        return Loosest(band, FixedClip(0.2, 0.28)) if relaxed else band

    rule.__name__ = name
    return rule


def _import(module: str, name: str) -> Callable[..., Any]:
    """Import a user's class with a text form, or a function that returns a `Method`."""
    try:
        value = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidValue(
            f"cannot import {name} from {module}: {error}; install the module, or put its folder on PYTHONPATH"
        ) from error
    if isinstance(value, type) and issubclass(value, tuple(EXAMPLES)):
        return value
    if inspect.isfunction(value):
        annotation = str(value.__annotations__.get("return"))
        if annotation.endswith(("Method", "Method'>")):
            return value
    kinds = ", ".join(kind.__name__ for kind in EXAMPLES)
    raise InvalidValue(
        f"{module}.{name} derives from none of {kinds}, and is not a function annotated `-> Method`"
    )


def _cannot_parse(node: ast.expr) -> InvalidValue:
    """Return the error for a node of the syntax tree that is not allowed."""
    return InvalidValue(f"cannot read {ast.unparse(node)!r}; write names, numbers and parentheses only")
