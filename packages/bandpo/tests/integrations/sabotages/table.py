"""The rows of the table of sabotages: what is changed, and by which sentence the certificate stops it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from bandpo.core.errors import RunProblem


class Row(NamedTuple):
    """A sabotage of a loss, or of what surrounds it."""

    certify: Callable[[Path, pytest.MonkeyPatch], object]
    """A function that makes the change, certifies the loss, and returns the certificate. It gets an empty folder."""
    sentence: str | None
    """A regular expression for the error; None for a change after which the loss is certified rightly, as its gradient
    is the method's or as the change is outside of it."""
    error: type[Exception] = RunProblem
    unseen: str = ""
    """A regular expression for what the certificate says that it does not compare, of a change outside of the loss."""
    warning: str = ""
    """A regular expression for the warning of the checks of the run, at its first update; empty if there is none."""
    slow: bool = False
    """True if the row needs seconds, and other rows guard the same code."""
