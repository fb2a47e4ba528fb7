"""The errors that bandpo-lab raises, which are rlvet's, and those of bandpo that it passes on.

Data and answers are read and graded without torch, which bandpo's own module of errors would load.
"""

from __future__ import annotations

import sys

from rlvet.errors import (
    FileProblem,
    InvalidType,
    InvalidValue,
    MissingPackage,
    RlvetError,
    RunProblem,
    did_you_mean,
    error_about,
)

__all__ = [
    "FileProblem",
    "InvalidType",
    "InvalidValue",
    "MissingPackage",
    "RlvetError",
    "RunProblem",
    "did_you_mean",
    "error_about",
    "is_reported",
]


def is_reported(error: BaseException) -> bool:
    """Return True if an error is rlvet's or bandpo's, whose message names the value and the fix.

    >>> is_reported(InvalidValue("seeds must be positive")), is_reported(KeyError("seeds"))
    (True, False)
    """
    errors = sys.modules.get("bandpo.core.errors")
    return isinstance(error, RlvetError) or (errors is not None and isinstance(error, errors.BandpoError))
