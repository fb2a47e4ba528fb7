"""Frameworks' own code in a test: from an installed package or from a clone, without the packages that need a GPU."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

CLONES = "BANDPO_CLONES"
"""The environment variable that names a folder of clones, each under its repository's name."""


class _EmptyType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(name)

    def __getitem__(cls, _: Any) -> Any:
        return cls


class _Empty(metaclass=_EmptyType):
    """A class of an absent module: it can be called, extended, and used as a decorator that changes nothing."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __call__(self, function: Any = None, *_: Any, **__: Any) -> Any:
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty()


def _empty(name: str) -> type:
    return _EmptyType(name, (_Empty,), {})


class _Absent(ModuleType):
    """A module in the place of one that is not imported: each of its names is an empty class."""

    __path__: list[str] = []  # noqa: RUF012  (a package, so that its modules can be imported)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _empty(name))
        return vars(self)[name]


class _AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The import of modules, and of all that is in them, as empty ones."""

    def __init__(self, modules: tuple[str, ...]):
        self.modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        parts = name.split(".")
        parents = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        if not any(parent in self.modules for parent in parents):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _uncompiled(function: Any = None, **_: Any) -> Any:
    return (lambda decorated: decorated) if function is None else function


@contextmanager
def importing(*absent: str) -> Iterator[None]:
    """Import a framework in this block without some modules, and without the warnings of its import.

    What the block imports stays imported, except the empty modules. Functions that it decorates with `torch.compile`
    are left as they are.

    Args:
        absent: Modules that are empty, with all that is in them. A package is left as it is where it is installed. A
            module of the framework itself (a name with a dot) is always replaced: name those that its loss does not
            need and that take long, or a GPU, to import.
    """
    modules = tuple(name for name in absent if "." in name or importlib.util.find_spec(name) is None)
    finder = _AbsentFinder(modules)
    sys.meta_path.insert(0, finder)
    try:
        with warnings.catch_warnings(), patch.object(torch, "compile", _uncompiled):
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.meta_path.remove(finder)
        # Other tests, and other packages, look for these modules, too.
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Absent)]:
            del sys.modules[name]


def needs(package: str, *folders: str, clone: str = "") -> None:
    """Skip a module of tests where a framework is not here.

    `pytest.importorskip` would import it, and skip the tests if one of the packages that it requires is missing.

    Args:
        package: What one imports.
        folders: As for `is_here`.
        clone: As for `is_here`; none for a framework on the package index.
    """
    if not is_here(package, *folders, clone=clone):
        source = f", or a clone called {clone} in ${CLONES}" if clone else ""
        pytest.skip(f"needs {package}{source}", allow_module_level=True)


def is_here(package: str, *folders: str, clone: str = "") -> bool:
    """Return whether a framework can be imported, and put its clone on the import path if it is not installed.

    Args:
        package: What one imports.
        folders: The folders of the clone to import from; the clone itself if there are none.
        clone: The name of its repository, which is that of the clone's folder in ``$BANDPO_CLONES``.
    """
    if importlib.util.find_spec(package) is not None:
        return True
    home = Path(os.environ.get(CLONES, "unset")) / clone
    if not clone or not home.is_dir():
        return False
    sys.path.extend(str(home / folder) for folder in folders or (".",))
    return True
