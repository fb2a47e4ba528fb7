"""The doctor's judgement of a log that still grows, with the standard library alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bandpo.doctor.diagnosis import Diagnosis
from bandpo.doctor.findings import Finding
from bandpo.doctor.log_checks import log_findings
from bandpo.runs.logs import Log
from bandpo.runs.quantities import named_rows
from bandpo.runs.setup import Setup

GROWTH_BETWEEN_CHECKS = 0.05
"""Share by which a log must have grown since the last check. All checks of a run together then read each row about
twenty times, however long the run is."""

FEWEST_ROWS = 10
"""Log steps before which nothing but NaN is judged."""

ONLY_AT_THE_END = ("plateau",)
"""Codes that say nothing while a run trains: every run is flat at first."""


MAY_PASS = {"collapse": 2.0, "no-signal": math.inf}
"""For each fault that a healthy run may show and leave behind, by how much its log must have grown while every check
found it. Until then it is worth a look: a reward may dip, and a hard task may begin with few groups that differ."""


class LogWatch:
    """Judges a log while it grows, as `bandpo.doctor.diagnose` judges one that has ended.

    >>> watch = LogWatch(every=2)
    >>> [watch.is_due([{"reward": 0.5, "step": step} for step in range(n)]) for n in (1, 2)]
    [False, True]

    Args:
        every: Log steps from one check to the next. In a log of more than 20 times as many, one check follows the other
            when the log has grown by a twentieth.
        flat_steps: Training steps over which rewards must be equal before that is called a fault, beside the number of
            log steps that `bandpo.doctor.log_checks.CONSTANT_ROWS` asks for.
    """

    def __init__(self, every: int, flat_steps: float = 0.0):
        self._every = every
        self._flat_steps = flat_steps
        self._checked_rows = 0
        self._has_bad_number = False
        self._found_since: dict[str, int] = {}

    def start_after(self, rows: int) -> None:
        """Count log steps from here on, as after a run was resumed.

        Args:
            rows: Log steps that there are already.
        """
        self._checked_rows = rows

    def is_due(self, raw: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether it is time for a check; at once when the newest row is the first that holds NaN.

        Args:
            raw: The log so far, as it was logged.
        """
        if not self._has_bad_number and any("not_finite" in row for row in named_rows(raw[-1:])):
            self._has_bad_number = True
            return True
        return len(raw) - self._checked_rows >= max(self._every, GROWTH_BETWEEN_CHECKS * len(raw))

    def check(
        self, raw: Sequence[Mapping[str, Any]], setup: Setup, *, at_the_end: bool = False
    ) -> list[Finding]:
        """Return what the log shows so far, causes first, with advice in the framework's names.

        Args:
            raw: The log so far, as it was logged.
            setup: What the run is trained with.
            at_the_end: Whether the run has ended.
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
            findings = self._softened(findings, len(rows))
        return [finding for finding in findings if not self._is_too_early(finding, rows[-1]["step"])]

    def _softened(self, findings: Sequence[Finding], rows: int) -> list[Finding]:
        """Return the findings, those of `MAY_PASS` as worth a look until they have lasted."""
        self._found_since = {finding.code: self._found_since.get(finding.code, rows) for finding in findings}
        softened: list[Finding] = []
        for finding in findings:
            growth = rows / self._found_since[finding.code]
            if finding.ok is False and growth < MAY_PASS.get(finding.code, 1.0):
                finding = finding._replace(severity="look", ok=None)
            softened.append(finding)
        return softened

    def _is_too_early(self, finding: Finding, last_step: float) -> bool:
        """Return whether a finding of equal rewards rests on too few answers: hard tasks begin with none right."""
        if finding.code != "reward-flat" or finding.onset is None:
            return False
        return last_step - finding.onset + 1 < self._flat_steps
