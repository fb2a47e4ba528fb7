"""What other packages add to rlvet by entry points. bandpo adds all of them; rlvet works without.

- ``rlvet.readers``: a function for each type of file that needs more than the standard library, named by its suffix.
- ``rlvet.collectors``: a function that checks the method which a user names, and those that return collectors of a
  record's tokens:

  - ``method(method, run)``: raises an error if the text cannot be read, or the run's files name another;
  - ``replay(method)``: what the run's method and others do with the tokens, for a diagnosis: rows of metrics, and the
    share of the gradient that each method blocks by age;
  - ``words(method, tokenizer)``: the tokens whose gradient is blocked, and those on which engine and trainer disagree;
  - ``token_figures(methods, method, tokenizer)``: the figures of a report about recorded tokens.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rlvet.errors import MissingPackage

READERS = "rlvet.readers"
COLLECTORS = "rlvet.collectors"

INSTALL_BANDPO = "in a clone of bandpo, pip install ./packages/bandpo"
"""The command that installs bandpo. Its name is on no index, and is not to be installed from one."""


@cache
def installed_plugins(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group; the metadata of all packages are read once, which takes 20 ms."""
    return tuple(entry_points(group=group))


def load_plugin(group: str, name: str) -> Any:
    """Return the object of an entry point; None if no package has it.

    Args:
        group: `READERS` or `COLLECTORS`.
        name: The name in the group.

    Raises:
        ImportError: if a package has it, but lacks a package that it requires.
    """
    for point in installed_plugins(group):
        if point.name != name:
            continue
        try:
            return point.load()
        except ImportError as error:
            raise MissingPackage(
                f"{point.value} of an installed package cannot be imported: {error}"
            ) from error
    return None


def require_plugin(group: str, name: str, user: str) -> Any:
    """Return the object of an entry point.

    Args:
        group: `READERS` or `COLLECTORS`.
        name: The name in the group.
        user: What needs it, as the beginning of a sentence.

    Raises:
        ImportError: if no package has it.
    """
    plugin = load_plugin(group, name)
    if plugin is None:
        raise MissingPackage(f"{user} needs bandpo: {INSTALL_BANDPO}")
    return plugin
