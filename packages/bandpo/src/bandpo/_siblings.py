"""Whether rlvet is installed, which reads runs and checks them, and the error if it is needed and missing.

No index has these packages, and whoever registers a name there could run code on users' machines. So no package
requires another in its metadata, and the error names a folder of the clone.
"""

from __future__ import annotations

import importlib.util

from bandpo.core.errors import MissingPackage

INSTALL_RLVET = "in a clone of bandpo, pip install ./packages/rlvet"
"""The command that installs rlvet."""

NOT_CHECKED = f"the run is not checked while it trains, as rlvet is missing: {INSTALL_RLVET}"
"""The line about a run that would be checked if rlvet were installed."""


def has_rlvet() -> bool:
    """Return True if rlvet is installed."""
    return importlib.util.find_spec("rlvet") is not None


def require_rlvet(user: str) -> None:
    """Check that rlvet is installed.

    Args:
        user: What needs it, as the beginning of a sentence.

    Raises:
        ImportError: if it is not installed.
    """
    if not has_rlvet():
        raise MissingPackage(f"{user} needs rlvet: {INSTALL_RLVET}")
