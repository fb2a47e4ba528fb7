"""Names that moved, which work with a warning until 0.2."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

MODULES = {
    "bandpo.audit": "bandpo.diagnostics.audit",
    "bandpo.diagnosis": "bandpo.diagnostics.summary",
    "bandpo.figures": "bandpo.diagnostics.figures",
    "bandpo.rivals": "bandpo.dcpo",
    "bandpo.watch": "bandpo.diagnostics.watch",
    **{
        f"bandpo.{name}": f"bandpo.lab.{name}"
        for name in ("data", "evals", "rehearsal", "study", "tasks", "training")
    },
}
"""Each with all modules below it."""


def warn(old: str, new: str) -> None:
    """Say that ``old`` is now ``new``, at the line that called what called this."""
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)


class MovedModules(MetaPathFinder, Loader):
    """Imports a module by its old name: the module itself, not a copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if self._now(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        new = self._now(module.__name__)
        warnings.warn(f"{module.__name__} is now {new}", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(new)

    def _now(self, name: str) -> str:
        moved = next((old for old in MODULES if name == old or name.startswith(f"{old}.")), None)
        return MODULES[moved] + name.removeprefix(moved) if moved else ""


def renamed_arguments(**new_names: str) -> Callable[[type[T]], type[T]]:
    """For a dataclass whose arguments were renamed: takes the old keywords too, with a warning."""

    def decorate(cls: type[T]) -> type[T]:
        init: Any = cls.__init__

        @wraps(init)
        def takes_old_names(self: T, *args: Any, **named: Any) -> None:
            for old, new in new_names.items():
                if old in named:
                    warn(f"{type(self).__name__}({old}=…)", f"{new}=…")
                    named[new] = named.pop(old)
            init(self, *args, **named)

        cls.__init__ = takes_old_names
        return cls

    return decorate


def renamed_method(old: str, new: str) -> Callable[..., Any]:
    """A method that calls ``new`` of the same object, with a warning; ``old`` is ``Class.name``."""

    def call(self: Any, *args: Any, **named: Any) -> Any:
        warn(old, new)
        return getattr(self, new)(*args, **named)

    return call


def adopt_old_overrides(cls: type, **new_names: str) -> None:
    """Let a class that overrides a method by its old name override it by the new one, with a warning."""
    for old, new in new_names.items():
        if old in cls.__dict__ and new not in cls.__dict__ and cls.__module__.split(".")[0] != "bandpo":
            warn(f"{cls.__name__}.{old}", new)
            setattr(cls, new, cls.__dict__[old])
