"""The errors that bandpo raises, and its warning about a run.

Each error also derives from the built-in error of its kind, so either name catches it.

>>> try:
...     Band(KL(), radius=-1.0)
... except BandpoError as error:
...     isinstance(error, ValueError)
True
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BandWarning",
    "BandpoError",
    "FileProblem",
    "InvalidType",
    "InvalidValue",
    "MissingPackage",
    "RunProblem",
]


class BandpoError(Exception):
    """The base of bandpo's errors. Messages name the value and the fix; commands print them in one line."""


class InvalidValue(BandpoError, ValueError):
    """The error for an invalid value: a negative radius, a text that names no rule, shapes that do not fit."""


class InvalidType(BandpoError, TypeError):
    """The error for an object of the wrong type."""


class FileProblem(BandpoError, OSError):
    """The error for a file, folder or server that is missing, in use or unusable."""


class MissingPackage(BandpoError, ImportError):
    """The error for a required package that is not installed."""


class RunProblem(BandpoError, RuntimeError):
    """The error for a run that cannot continue."""


class BandWarning(UserWarning):
    """A warning about a run that continues to train, with a fault."""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return the end of an error about an unknown name, with the closest candidate; empty if none is close.

    >>> did_you_mean("bnd", ["Band", "FixedClip"])
    '; did you mean Band?'
    """
    by_lowercase = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), by_lowercase, n=1)
    return f"; did you mean {by_lowercase[matches[0]]}?" if matches else ""
