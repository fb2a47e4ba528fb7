"""Sentences on a user's reward function that failed, for all integrations."""

from __future__ import annotations

import sys
from typing import Any

LARGEST_REWARD = 1e18
"""The largest size of a reward whose square is far from the largest number of float32, about 3e38."""


def say(line: str) -> None:
    """Print a line to stderr, on each process."""
    print(f"bandpo: {line}", file=sys.stderr, flush=True)


def shown(value: Any) -> str:
    """Return a value as text of at most 80 characters in one line.

    >>> shown([0.5, "right"]), len(shown([0.5] * 99))
    ("[0.5, 'right']", 80)
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"
