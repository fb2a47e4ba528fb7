"""Frameworks' own code in a test: from an installed package or from a clone, without the packages that need a GPU.

Where a framework is absent or of another version than its tests are for, they are skipped with the reason.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = Path(__file__).parents[2] / "packages/bandpo/pyproject.toml"
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
def importing(*absent: str, framework: str = "") -> Iterator[None]:
    """Import a framework in this block without some modules, and without the warnings of its import.

    What the block imports stays imported, except the empty modules. Functions that it decorates with `torch.compile`
    are left as they are.

    Args:
        absent: Modules that are empty, with all that is in them. A package is left as it is where it is installed. A
            module of the framework itself (a name with a dot) is always replaced: name those that its loss does not
            need and that take long, or a GPU, to import.
        framework: The framework's package. The module of tests is skipped if the installed version, or the commit of
            the clone, lacks a module or a name that the block imports from it.
    """
    modules = tuple(name for name in absent if "." in name or importlib.util.find_spec(name) is None)
    finder = _AbsentFinder(modules)
    sys.meta_path.insert(0, finder)
    try:
        with warnings.catch_warnings(), patch.object(torch, "compile", _uncompiled):
            warnings.simplefilter("ignore")
            yield
    except ImportError as error:
        if not framework or (error.name or "").partition(".")[0] != framework:
            raise
        pytest.skip(f"needs another version of {framework}: {error}", allow_module_level=True)
    finally:
        sys.meta_path.remove(finder)
        # Other tests, and other packages, look for these modules, too.
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Absent)]:
            del sys.modules[name]


def needs(package: str, *folders: str, clone: str = "", oldest: str = "") -> None:
    """Skip a test, or a module of tests, where a framework is not here or too old.

    A version that is too new is no reason: its tests show what changed.
    `pytest.importorskip` would import the framework, and skip the tests if one of the packages that it requires is
    missing.

    Args:
        package: What one imports.
        folders: As for `is_here`.
        clone: As for `is_here`; none for a framework on the package index.
        oldest: The oldest version that the tests are for; by default the one that bandpo's extra admits, if there is
            an extra.
    """
    if reason := _missing(package, *folders, clone=clone, oldest=oldest):
        pytest.skip(reason, allow_module_level=True)


def _missing(package: str, *folders: str, clone: str = "", oldest: str = "") -> str:
    """Return why the tests of a framework cannot run, or an empty text."""
    admitted = oldest or _oldest_admitted().get(package, "")
    if not is_here(package, *folders, clone=clone):
        source = f", or a clone called {clone} in ${CLONES}" if clone else ""
        return f"needs {package}{f' {admitted} or later' if admitted else ''}{source}"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # on the import path, and not installed
        return ""
    if admitted and Version(version) < Version(admitted):
        return f"needs {package} {admitted} or later, and this is {version}"
    return ""


@cache
def _oldest_admitted() -> dict[str, str]:
    """Return the oldest version of each package that an extra of bandpo admits."""
    extras = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    versions = {}
    for requirements in extras.values():
        for requirement in map(Requirement, requirements):
            for bound in requirement.specifier:
                if bound.operator in (">=", "=="):
                    versions[requirement.name] = bound.version
    return versions


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
