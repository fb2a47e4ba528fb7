"""Modules in the place of a framework's that is not installed."""

import sys
from types import ModuleType


def stand_in(monkeypatch, path: str, **names) -> ModuleType:
    """Add a module with these names, and its parents, to sys.modules until the test ends."""
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
    vars(sys.modules[path]).update(names)
    return sys.modules[path]
