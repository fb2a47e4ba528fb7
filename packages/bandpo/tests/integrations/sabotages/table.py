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
    """A function that makes the change and certifies the loss. It gets an empty folder."""
    sentence: str | None
    """A regular expression for the error; None for a change after which the loss is certified."""
    error: type[Exception] = RunProblem
    slow: bool = False
    """True if the row needs seconds, and other rows guard the same code."""
