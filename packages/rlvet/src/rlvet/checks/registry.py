"""The checks, which register themselves, in the order of their results: causes before their effects.

This module needs only the standard library. What a registry lists is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, TypeVar

from rlvet.checks.course import Case
from rlvet.checks.findings import Finding, Kind

Examined = TypeVar("Examined")
"""What a check looks at."""


@dataclass(frozen=True)
class Check(Generic[Examined]):
    """A registered check: its name and place, the property that it tests, and the findings that it reports."""

    name: str
    """The name in the output, of two words or more."""
    after: str
    """The name of the check before it; empty for the first one."""
    tested: str
    """The property of a correct run."""
    explained: str
    """The row of docs/diagnose.md, in "Names of the checks"."""
    reports: Collection[Kind]
    """The kinds of findings that it reports, causes before their effects."""
    function: Callable[[Examined], Finding]
    """The function, whose result has the name and the property."""


class Registry(Generic[Examined]):
    """The checks in the modules of a package.

    >>> [check.name for check in LOGS.checks()][:2]
    ['values that are no numbers', 'whether weights move']
    >>> [kind.code for kind in LOGS.kinds()][:3]
    ['nan', 'no-step', 'reference-kl']

    Args:
        package: The name of the package.
    """

    def __init__(self, package: str):
        self._package = package
        self._registered: dict[str, Check[Examined]] = {}
        self._ordered: tuple[Check[Examined], ...] = ()

    def check(
        self, name: str, *, after: str, tested: str, explained: str, reports: Sequence[Kind]
    ) -> Callable[[Callable[[Examined], Finding]], Callable[[Examined], Finding]]:
        """Return a decorator that registers a check.

        The results of the function get the name as their ``subject``, and the property as their ``tested``. What the
        function itself writes there, such as a unit, follows the property.

        Args:
            name: The name in the output.
            after: The name of the check before it; empty for the first one.
            tested: The property of a correct run.
            explained: The row of docs/diagnose.md.
            reports: The kinds of findings that it reports, causes before their effects.
        """

        def register(function: Callable[[Examined], Finding]) -> Callable[[Examined], Finding]:
            @wraps(function)
            def complete(examined: Examined) -> Finding:
                finding = function(examined)
                kind = finding.kind
                assert kind is None or kind in reports, f"{name!r} reports {kind}: add it to its reports"
                return finding._replace(subject=name, tested=f"{tested}{finding.tested}")

            self.add(Check(name, after, tested, explained, tuple(reports), complete))
            return complete

        return register

    def add(self, check: Check[Examined]) -> None:
        """Add a check, in place of one with its name."""
        self._registered[check.name] = check
        self._ordered = ()

    def checks(self) -> tuple[Check[Examined], ...]:
        """Return all checks of the package, each after the one that it names."""
        if not self._ordered:
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
            self._ordered = in_order(self._registered.values())
        return self._ordered

    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of findings that the checks report, in their order."""
        return tuple(dict.fromkeys(kind for check in self.checks() for kind in check.reports))


def in_order(checks: Collection[Check[Any]]) -> tuple[Check[Any], ...]:
    """Return checks, each behind the one that it names.

    Of several that name the same one, that with the fewest behind it is first, so that a check which others do not name
    is directly behind the one that it names. If these are as many, their names decide.

    Raises:
        LookupError: if a check is after one that does not exist, or after itself.
    """
    followers: dict[str, list[Check[Any]]] = {}
    for check in sorted(checks, key=lambda check: check.name):
        followers.setdefault(check.after, []).append(check)

    def behind(name: str) -> list[Check[Any]]:
        parts = [[check, *behind(check.name)] for check in followers.get(name, [])]
        return [check for part in sorted(parts, key=len) for check in part]

    ordered = behind("")
    lost = [f"{check.name!r} after {check.after!r}" for check in checks if check not in ordered]
    if lost:
        raise LookupError(f"no check has this name: {', '.join(lost)}")
    return tuple(ordered)


LOGS: Registry[Case] = Registry("rlvet.checks.log")
"""The checks of a log's metrics."""
