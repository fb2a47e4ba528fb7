"""Check the log of a run that is still training. Only the standard library is needed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rlvet.checks.course import Course
from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.findings import Finding
from rlvet.checks.liveness import (
    ALONE,
    FAMILIES,
    FEWEST_LIVE,
    FINE_AT_ZERO,
    HISTORY,
    REGIONS,
    TOGETHER,
    deaths_of,
)
from rlvet.checks.log_checks import log_findings
from rlvet.runs.logs import Log
from rlvet.runs.quantities import named_rows
from rlvet.runs.setup import Setup

GROWTH_BETWEEN_CHECKS = 0.05
"""Relative growth of a log between two checks. All checks of a run together then read each row about twenty times,
whatever the length of the run."""

FEWEST_ROWS = 10
"""Number of log steps below which only NaN is reported."""

ONLY_AT_THE_END = ("plateau",)
"""Codes that are not reported while a run trains. A plateau is one of them, since every run is flat at first."""


TEMPORARY_FAULTS = {"collapse": 2.0, "no-signal": math.inf}
"""Faults that a healthy run may also show for some time: a reward may dip, and on a hard task the rewards of few groups
differ at first. For each code, the factor by which the log must have grown while every check found the fault. Until
then its severity is ``look``."""


class LifeWatch:
    """A look at each new row of a log, by which a death is noticed within a few rows, at a cost that does not grow.

    The rows in which a metric is missing, repeats its value or is far from its earlier ones are counted. Only if there
    are as many as a death has, the newest rows are judged by `rlvet.checks.liveness.deaths_of`.
    """

    ROWS = HISTORY + 200
    """Number of the newest rows that are judged."""

    REFRESH = 50
    """Number of rows after which the region of dead values is computed anew."""

    def __init__(self) -> None:
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=self.ROWS)
        self._seen = 0
        self._live: dict[str, deque[float]] = {}
        self._regions: dict[str, tuple[float, float]] = {}
        self._last: Mapping[str, float] = {}
        self._dead_rows: dict[str, int] = {}
        # The number of times that a death was told, by whether it is sure. Both are 0 while the run lives.
        self._told = {False: 0, True: 0}

    @property
    def is_dead(self) -> bool:
        """True if the newest rows are surely those of a dead run."""
        return self._told[True] > 0

    def start_after(self, rows: int) -> None:
        """Treat the first rows as seen. The newest of them are read with the next row."""
        self._seen = max(0, rows - self.ROWS)

    def shows_death(self, raw: Sequence[Mapping[str, Any]]) -> bool:
        """Read the new rows, and return True if the run is dead and this was returned less than twice.

        Args:
            raw: The rows so far, under the names of the framework.
        """
        new = min(len(raw) - self._seen, self.ROWS)
        self._seen = len(raw)
        if new <= 0:
            return False
        for row in raw[-new:]:
            self._rows.append(row)
            self._count(row)
        counts = [count for count in self._dead_rows.values() if count >= TOGETHER]
        if not counts:
            self._told = {False: 0, True: 0}
            return False
        # A metric may be dead for long, so that its rows are not judged at each step.
        if all(count > ALONE + TOGETHER and count % ALONE for count in counts):
            return False
        deaths = deaths_of(Course(Log.of(self._rows).rows))
        if not deaths or not deaths[-1].lasts:
            self._told = {False: 0, True: 0}
            return False
        is_sure = deaths[-1].is_sure
        self._told[is_sure] += 1
        return self._told[is_sure] <= 2

    def _count(self, raw: Mapping[str, Any]) -> None:
        """Count the rows up to this one in which each metric is dead."""
        row = next(iter(named_rows([{"step": 0.0, **raw}])), {})
        is_refreshed = self._seen % self.REFRESH == 0
        for name in FAMILIES:
            live = self._live.get(name)
            value = row.get(name)
            if live is None:
                if value is not None:
                    self._live[name] = deque([value], maxlen=HISTORY)
                continue
            if name in REGIONS and len(live) >= FEWEST_LIVE and (is_refreshed or name not in self._regions):
                self._regions[name] = REGIONS[name](sorted(live))
            low, high = self._regions.get(name, (-math.inf, math.inf))
            repeats = value == self._last.get(name) and (value != 0 or name not in FINE_AT_ZERO)
            is_dead = value is None or repeats or not low < value < high
            self._dead_rows[name] = self._dead_rows.get(name, 0) + 1 if is_dead else 0
            if value is not None and not is_dead:
                live.append(value)
        self._last = row


class LogWatch:
    """Checks of a log while it grows, with the findings that `rlvet.diagnose` returns for a finished run.

    >>> watch = LogWatch(every=2)
    >>> [watch.is_due([{"reward": 0.5, "step": step} for step in range(n)]) for n in (1, 2)]
    [False, True]

    Args:
        every: Log steps from one check to the next. If the log has more than 20 times as many log steps, the next check
            is due when it has grown by a twentieth.
        flat_steps: Training steps over which rewards must be equal before this is a fault, in addition to the
            `rlvet.checks.log.reward.CONSTANT_ROWS` log steps.
    """

    def __init__(self, every: int, flat_steps: float = 0.0):
        self._every = every
        self._flat_steps = flat_steps
        self._checked_rows = 0
        self._has_bad_number = False
        self._life = LifeWatch()
        # For each code of the last check, the number of rows at the first check that found it.
        self._rows_at_first_finding: dict[str, int] = {}

    def start_after(self, rows: int) -> None:
        """Treat the first rows as checked, as after a run was resumed.

        Args:
            rows: Number of log steps so far.
        """
        self._checked_rows = rows
        self._life.start_after(rows)

    def is_due(self, raw: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if a check is due.

        A check is due after a number of new rows, as soon as the newest row is the first with a value that is not
        finite, and twice when the newest rows show that the run is dead.

        Args:
            raw: The rows so far, under the names of the framework.
        """
        if not self._has_bad_number and any("not_finite" in row for row in named_rows(raw[-1:])):
            self._has_bad_number = True
            return True
        if self._life.shows_death(raw):
            return True
        new_rows = len(raw) - self._checked_rows
        return new_rows >= max(self._every, GROWTH_BETWEEN_CHECKS * len(raw))

    def check(
        self, raw: Sequence[Mapping[str, Any]], setup: Setup, *, at_the_end: bool = False
    ) -> list[Finding]:
        """Check the log so far, and return the findings, causes first, with advice that names the framework's settings.

        Args:
            raw: The rows so far, under the names of the framework.
            setup: The framework, method and settings of the run.
            at_the_end: True if the run has ended.
        """
        self._checked_rows = len(raw)
        rows = Log.of(raw).rows
        if not rows:
            return []
        findings = Diagnosis(log_findings(rows, setup), setup, rows).findings
        if len(rows) < FEWEST_ROWS:
            findings = [finding for finding in findings if finding.code == "nan"]
        if not at_the_end:
            findings = [finding for finding in findings if finding.code not in ONLY_AT_THE_END]
            findings = self._lower_severities(findings, len(rows))
        return [finding for finding in findings if not self._is_too_early(finding, rows[-1]["step"])]

    def _lower_severities(self, findings: Sequence[Finding], rows: int) -> list[Finding]:
        """Return the findings, with severity ``look`` for those of `TEMPORARY_FAULTS` that have not lasted yet."""
        earlier = self._rows_at_first_finding
        self._rows_at_first_finding = {finding.code: earlier.get(finding.code, rows) for finding in findings}
        lowered: list[Finding] = []
        for finding in findings:
            growth = rows / self._rows_at_first_finding[finding.code]
            if finding.code == "collapse" and self._life.is_dead:
                growth = math.inf
            if finding.ok is False and growth < TEMPORARY_FAULTS.get(finding.code, 1.0):
                finding = finding._replace(severity="look", ok=None)
            lowered.append(finding)
        return lowered

    def _is_too_early(self, finding: Finding, last_step: float) -> bool:
        """Return True if equal rewards have not lasted for `flat_steps`: on hard tasks, no answer is right at first."""
        if finding.code != "reward-flat" or finding.onset is None:
            return False
        flat_steps = last_step - finding.onset + 1
        return flat_steps < self._flat_steps
