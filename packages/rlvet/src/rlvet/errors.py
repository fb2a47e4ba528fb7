"""The errors that rlvet raises. Each also derives from the built-in error of its kind, so either name catches it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TypeVar

__all__ = [
    "FileProblem",
    "InvalidType",
    "InvalidValue",
    "MissingPackage",
    "OtherFormat",
    "RlvetError",
    "RunProblem",
]


class RlvetError(Exception):
    """The base of rlvet's errors. Messages name the value and the fix; commands print them in one line.

    An error about several problems has them in ``problems``, and commands print each in a line of its own.
    """

    title: str = ""
    """The text before the problems."""
    problems: Sequence[str] = ()
    """The problems of an error about several."""


class InvalidValue(RlvetError, ValueError):
    """The error for an invalid value: a key that the log lacks, a file of another kind."""


class OtherFormat(InvalidValue):
    """The error for a file that is whole, and of another program. The message names the program and what to run."""


class InvalidType(RlvetError, TypeError):
    """The error for an object of the wrong type."""


class FileProblem(RlvetError, OSError):
    """The error for a file, folder or server that is missing, in use or unusable."""


class MissingPackage(RlvetError, ImportError):
    """The error for a required package that is not installed."""


class RunProblem(RlvetError, RuntimeError):
    """The error for a run that cannot continue."""


Kind = TypeVar("Kind", bound=RlvetError)


def error_about(kind: type[Kind], problems: Sequence[str], *, title: str = "") -> Kind:
    """Return an error about one or several problems.

    Args:
        kind: The class of the error.
        problems: The problems, at least one.
        title: The text before them.

    >>> error = error_about(InvalidValue, ["no GPU", "no data"], title="not started")
    >>> str(error), error.problems
    ('not started: no GPU; no data', ('no GPU', 'no data'))
    """
    text = "; ".join(problems)
    error = kind(f"{title}: {text}" if title else text)
    error.title = title
    error.problems = tuple(problems)
    return error


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return the end of an error about an unknown name, with the closest candidate; empty if none is close.

    >>> did_you_mean("bnd", ["Band", "FixedClip"])
    '; did you mean Band?'
    """
    by_lowercase = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), by_lowercase, n=1)
    return f"; did you mean {by_lowercase[matches[0]]}?" if matches else ""
