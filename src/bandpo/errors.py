"""The errors that bandpo's own checks raise. Each is also the built-in error of its kind, so both names catch it.

>>> try:
...     Band(KL(), radius=-1.0)
... except bandpo.errors.BandpoError as error:
...     isinstance(error, ValueError)
True
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["BandpoError", "FileProblem", "InvalidType", "InvalidValue", "MissingPackage", "RunProblem"]


class BandpoError(Exception):
    """What bandpo refuses, with the value and the remedy in its message. The command prints it in one line."""


class InvalidValue(BandpoError, ValueError):
    """A value that cannot be worked with: a negative radius, a text that names no rule, shapes that do not fit."""


class InvalidType(BandpoError, TypeError):
    """An object of the wrong kind."""


class FileProblem(BandpoError, OSError):
    """A file, folder or server that is missing, in use or not what it should be."""


class MissingPackage(BandpoError, ImportError):
    """A package that is needed here and not installed."""


class RunProblem(BandpoError, RuntimeError):
    """A run that cannot go on."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the known name that is nearest; empty where none is near.

    >>> bandpo.errors.did_you_mean("bnd", ["Band", "FixedClip"])
    '; did you mean Band?'
    """
    spelled = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), spelled, n=1)
    return f"; did you mean {spelled[close[0]]}?" if close else ""
