"""Counts of the logs of other people on which each code was the first line, and right: how sure a finding is.

The counts are in ``data/first_lines.json``, which ``tests/findings_page.py`` writes from the logs of
``benchmarks/doctor``. Needs only the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import NamedTuple


class FirstLines(NamedTuple):
    """The logs of other people on which a code was the first line."""

    logs: int = 0
    """The number of these logs."""
    right: int = 0
    """The number on which it was right or fair."""
    unseen: int = 0
    """The number on which it was right or fair before anything was changed with that log in view."""

    @property
    def unseen_text(self) -> str:
        """The number of logs, of those on which it was right, on which it was so at first sight, in words."""
        if not self.unseen:
            return "none at first sight"
        if self.unseen == self.right:
            return "all at first sight" if self.right > 1 else "at first sight"
        return f"{self.unseen} of the {self.right} at first sight"


@cache
def counts_by_code() -> dict[str, FirstLines]:
    """Return the counts, by each code that was the first line on a log of other people."""
    file = resources.files("rlvet") / "data" / "first_lines.json"
    return {code: FirstLines(**counts) for code, counts in json.loads(file.read_text("utf-8")).items()}


def how_sure(codes: Iterable[str]) -> str:
    """Return a sentence on how often codes were right as the first line; empty without a code.

    >>> how_sure(["kl-drift", "length-collapse"]).partition("fair: ")[2].partition(";")[0]
    'kl-drift on 2 of 3 (1 of the 2 at first sight), length-collapse never first yet'
    """
    clauses = []
    for code in dict.fromkeys(codes):
        counts = counts_by_code().get(code, FirstLines())
        if counts.logs:
            clauses.append(f"{code} on {counts.right} of {counts.logs} ({counts.unseen_text})")
        else:
            clauses.append(f"{code} never first yet")
    if not clauses:
        return ""
    measured = "whether advice helps was not measured"
    return f"how sure: first line on logs of others, right or fair: {', '.join(clauses)}; {measured}"
