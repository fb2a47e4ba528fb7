"""The checks of `rlvet diagnose` during training. Each finding is announced once, with advice."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bandpo._terminal import printable
from bandpo.core.batch import normalize_mask
from bandpo.core.errors import BandWarning, InvalidValue, RunProblem
from bandpo.core.layout import Packed, Rows
from bandpo.core.sequences import unpack
from bandpo.watch.alerts import Alerts
from rlvet._numbers import format_step
from rlvet._severities import SEVERITIES, is_at_least
from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.findings import Finding
from rlvet.checks.watch import LogWatch
from rlvet.records import LossBatch
from rlvet.records.diagnosis import record_findings
from rlvet.records.first_pass import FirstPass
from rlvet.records.recorded_advantages import RecordedAdvantages
from rlvet.runs import Setup

if TYPE_CHECKING:
    from numpy import ndarray as Array
    from torch import Tensor

EVERY = 10
"""Number of batches between checks. A check costs about as much as a loss on the same tokens without its gradient."""

FAULTS = SEVERITIES[:2]
"""The severities of faults, as opposed to remarks."""

CHECKED_TOGETHER = 32
"""Number of the newest batches that are checked together. It limits the memory that their tokens take."""


TOKEN_CHECKS_OF_REWARDS = ("reward-flat", "no-signal", "truncated")
"""Codes of findings that a healthy run may have at its start, before any answer is right."""

FEWEST_BATCHES = 20
"""Number of batches from which these findings are reported."""

_logger = logging.getLogger("bandpo")


class RunWatch:
    """A watch that checks the batches and the log of a run during training, and announces each finding once.

    Faults (``stop`` and ``fix``) are announced as a `BandWarning` and by the alerts. Findings of severity ``look`` are
    logged by the logger ``bandpo`` as warnings, and notes as information.

    >>> watch, logp = RunWatch(), -torch.ones(4, 6)
    >>> watch.check_batch(logp=logp, logp_old=logp, advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]))
    >>> watch({"entropy": 1.2, "reward": 0.3})

    Args:
        setup: The training setup of the run, see `rlvet.runs.setup`. Advice names the settings of its framework.
        every: Number of log steps between checks of the log, see `rlvet.checks.watch.LogWatch`, and of generated
            batches between checks of tokens.
        stop_on: The severity from which a finding stops the run: ``stop``, ``fix`` (which includes ``stop``), or None.
        alerts: Channels for alerts of faults, see `bandpo.watch.alerts.Alerts`.
        anchor: As for `bandpo.audit.Recorder`.
        flat_steps: As for `rlvet.checks.watch.LogWatch`.

    Raises:
        ValueError: if ``every``, ``stop_on`` or ``alerts`` is invalid.
    """

    def __init__(
        self,
        setup: Setup | None = None,
        *,
        every: int = EVERY,
        stop_on: str | None = None,
        alerts: Sequence[str] = (),
        anchor: str = "trainer",
        flat_steps: float = 0.0,
    ):
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InvalidValue(f"every must be an integer of at least 1, got {every!r}")
        if stop_on is not None and stop_on not in FAULTS:
            raise InvalidValue(f"stop_on must be 'stop', 'fix' or None, got {stop_on!r}")
        self._setup = setup or Setup()
        self._every = every
        self._stop_on = stop_on
        self._alerts = Alerts(alerts)
        self._anchor = anchor
        self._batches: deque[LossBatch] = deque(maxlen=CHECKED_TOGETHER)
        self._log = LogWatch(every, flat_steps)
        self._rows: list[Mapping[str, Any]] = []
        self._failed_alerts: set[str] = set()
        self._last_codes: set[str] = set()
        self.announced: dict[str, str] = {}
        """The announced codes, each with its highest severity so far."""

    def is_due(self, generation: int, update: int) -> bool:
        """Return True if `check_batch` checks a loss.

        Args:
            generation: The number of the generated batch.
            update: The number of optimiser steps on that batch so far.
        """
        return update == 0 and generation % self._every == 0

    def check_batch(
        self,
        *,
        logp_old: Tensor,
        advantages: Tensor,
        logp: Tensor | None = None,
        mask: Tensor | None = None,
        logp_rollout: Tensor | None = None,
        entropy: Tensor | None = None,
        tokens: Tensor | None = None,
        group: Sequence[int] | Tensor | None = None,
        reward: Sequence[float] | Tensor | None = None,
        truncated: Sequence[bool] | Tensor | None = None,
        generation: int = 0,
        update: int = 0,
        layout: Rows | Packed | None = None,
    ) -> None:
        """Check the sequences of a generated batch for faults, if no update was made on it yet.

        Args:
            logp_old: As for `bandpo.audit.Recorder.add`, like all arguments that are not listed here.
            generation: Number of the generated batch. Only multiples of ``every`` are checked.

        Raises:
            RuntimeError: if a finding has the severity ``stop_on`` or a higher one. The update has not been made then.
        """
        if not self.is_due(generation, update):
            return
        tensors = unpack(
            {
                "logp_old": logp_old,
                "logp": logp,
                "advantages": advantages,
                "mask": mask,
                "logp_rollout": logp_rollout,
                "entropy": entropy,
                "tokens": tokens,
            },
            layout,
        )
        counted = normalize_mask(tensors["logp_old"], tensors["mask"]).cpu() != 0

        def counted_values(name: str) -> Array | None:
            return None if tensors[name] is None else _at_counted(counted, tensors[name])

        old = _at_counted(counted, tensors["logp_old"])
        new = counted_values("logp")
        per_token = tensors["advantages"].detach().float().cpu()
        if per_token.dim() != 2:
            per_token = per_token[:, None]
        batch = LossBatch(
            location="",
            step=None,
            method=None,
            anchor=self._anchor,
            framework="",
            log_ratio=old * 0 if new is None else new - old,
            logp_old=old,
            advantages=per_token.expand_as(counted).contiguous().numpy(),
            mask=counted.numpy(),
            logp_rollout=counted_values("logp_rollout"),
            entropy=counted_values("entropy"),
            token=_as_array(tensors["tokens"]),
            generation=generation,
            update=update,
            group=_as_array(group),
            reward=_as_array(reward),
            truncated=_as_array(truncated),
            has_logp=new is not None,
        )
        self._batches.append(batch.without_bad_sequences()[0])

        # Trainers shuffle answers over the micro-batches, so a group may be spread over several of them.
        checks = record_findings(
            FirstPass.of(self._batches), RecordedAdvantages.of(self._batches), whole_groups=False
        )
        findings = Diagnosis(checks, self._setup).findings
        if len(self._batches) < FEWEST_BATCHES:
            findings = [finding for finding in findings if finding.code not in TOKEN_CHECKS_OF_REWARDS]
        faults = [finding for finding in findings if finding.ok is False]
        reasons = self._reasons_to_stop(faults)
        self._announce(faults, raised=reasons[:1])
        self._raise_first(reasons)

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Add one row to the log, and check the log if a check is due.

        Args:
            row: The logged metrics, under the framework's own names.

        Raises:
            RuntimeError: if a finding has the severity ``stop_on`` or a higher one.
        """
        self._rows.append({"step": len(self._rows), **row})
        self._raise_first(self.check_log(self._rows))

    def check_log(
        self, raw: Sequence[Mapping[str, Any]], *, at_the_end: bool = False, announces: bool = True
    ) -> list[Finding]:
        """Check a log if a check is due, and return the findings for which the run should be stopped.

        A run is stopped for a fault that two consecutive checks find, or for NaN in one check.

        Args:
            raw: The log so far, under the framework's own names.
            at_the_end: True if the run has ended, so that the check is due in any case.
            announces: True to announce new findings.
        """
        if not at_the_end and not self._log.is_due(raw):
            return []
        findings = self._log.check(raw, self._setup, at_the_end=at_the_end)
        if announces:
            self._announce(findings)
        reasons = self._reasons_to_stop(findings)
        confirmed = [reason for reason in reasons if reason.code in self._last_codes or reason.code == "nan"]
        self._last_codes = {reason.code for reason in reasons}
        return confirmed

    def announce_end(self, reasons: Sequence[Finding], consequence: str) -> None:
        """Announce that the run is stopped.

        Args:
            reasons: The findings for which it is stopped.
            consequence: The consequence, as the beginning of a sentence.
        """
        codes = ", ".join(dict.fromkeys(reason.code for reason in reasons))
        text = f"{consequence}, as stop_on={self._stop_on!r} asks for, because of {codes}"
        _logger.warning("bandpo: %s", text)
        self._send(f"bandpo: stopped by {codes}", text, is_grave=True)

    def resume(self, rows: int, announced: Mapping[str, str]) -> None:
        """Continue the watch of a resumed run.

        Args:
            rows: Number of rows that the log has already.
            announced: The value of `announced` when the run was interrupted.
        """
        self._log.start_after(rows)
        self.announced |= announced

    def _reasons_to_stop(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return the findings with the severity ``stop_on`` or a higher one."""
        if self._stop_on is None:
            return []
        return [finding for finding in findings if is_at_least(finding.severity, self._stop_on)]

    def _raise_first(self, reasons: Sequence[Finding]) -> None:
        """Raise the first finding as an error, if there is one."""
        if reasons:
            raise RunProblem(_line(reasons[0]))

    def _announce(self, findings: Sequence[Finding], raised: Sequence[Finding] = ()) -> None:
        """Announce the findings that are new, or more severe than before.

        Args:
            findings: The findings of a check.
            raised: The findings that are raised as an error afterwards, and so need no warning.
        """
        new: list[Finding] = []
        for finding in findings:
            previous = self.announced.get(finding.code)
            # A lower index in SEVERITIES is more severe.
            if previous is not None and SEVERITIES.index(finding.severity) >= SEVERITIES.index(previous):
                continue
            self.announced[finding.code] = finding.severity
            new.append(finding)

        # Alerts are sent before warnings, because a filter may turn warnings into errors.
        faults = [finding for finding in new if finding.severity in FAULTS]
        if faults:
            title = f"bandpo: {', '.join(fault.code for fault in faults)}"
            is_grave = any(fault.severity == "stop" for fault in faults)
            self._send(title, "\n".join(map(_line, faults)), is_grave=is_grave)
        for finding in new:
            if finding in raised:
                continue
            if finding.severity in FAULTS:
                warnings.warn(_line(finding), BandWarning, stacklevel=4)
            else:
                level = logging.WARNING if finding.severity == "look" else logging.INFO
                _logger.log(level, "bandpo: %s", _line(finding))

    def _send(self, title: str, text: str, *, is_grave: bool) -> None:
        """Send an alert, and log the first failure of each channel."""
        failures = self._alerts.send(title, text, is_grave=is_grave)
        for name, problem in failures.items():
            if name not in self._failed_alerts:
                self._failed_alerts.add(name)
                _logger.warning(
                    "bandpo: an alert by %s failed (%s); training continues, and later failures are not logged",
                    name,
                    printable(problem),
                )


def _line(finding: Finding) -> str:
    """Return a finding in one line."""
    codes = " or ".join((finding.code, *finding.or_else))
    since = "" if finding.onset is None else f", since step {format_step(finding.onset)}"
    # The cause may contain names from the run's log, which are untrusted.
    return printable(f"{codes}: {finding.cause} ({finding.severity}{since}). Do: {finding.advice}")


def _at_counted(counted: Tensor, values: Tensor) -> Array:
    """Return values as an array in float32, 0 in the padding."""
    return values.detach().float().cpu().masked_fill(~counted, 0.0).numpy()


def _as_array(values: Any) -> Array | None:
    """Return values as an array; None if there are none."""
    return None if values is None else torch.as_tensor(values).detach().cpu().numpy()
