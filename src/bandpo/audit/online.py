"""The checks of `bandpo diagnose` while a run trains: each finding is announced once, with its remedy."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bandpo._severities import SEVERITIES, is_at_least
from bandpo._terminal import printable
from bandpo.audit.alerts import Alerts
from bandpo.batch import normalize_mask
from bandpo.doctor.diagnosis import Diagnosis, record_findings
from bandpo.doctor.findings import Finding
from bandpo.doctor.first_pass import FirstPass
from bandpo.doctor.recorded_advantages import RecordedAdvantages
from bandpo.doctor.watch import LogWatch
from bandpo.errors import InvalidValue, RunProblem
from bandpo.runs import LossBatch, Setup
from bandpo.sequences import unpack

if TYPE_CHECKING:
    from numpy import ndarray as Array
    from torch import Tensor

EVERY = 10
"""Batches from one check to the next. A check costs about as much as a loss of the same tokens without its gradient."""

FAULTS = SEVERITIES[:2]
"""Severities of faults, as opposed to remarks."""

CHECKED_TOGETHER = 32
"""Batches that are judged together, the newest: their tokens bound the memory."""


class BandWarning(UserWarning):
    """A run that trains, but not as its settings say."""


TOKEN_CHECKS_OF_REWARDS = ("reward-flat", "no-signal", "truncated")
"""Codes of findings about tokens that a healthy run may give at its start, when no answer is right yet."""

FEWEST_BATCHES = 20
"""Batches that must be judged together before one of these is believed."""

_logger = logging.getLogger("bandpo")


class RunWatch:
    """Checks batches and the log of a run that trains, and announces each finding once.

    Faults (``stop`` and ``fix``) are announced as a `BandWarning` and by the alerts. What is worth a look is written to
    the logger ``bandpo`` as a warning, and notes as information.

    >>> watch, logp = RunWatch(), -torch.ones(4, 6)
    >>> watch.look(logp=logp, logp_old=logp, advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]))
    >>> watch({"entropy": 1.2, "reward": 0.3})

    Args:
        setup: What the run is trained with; advice names the settings of its framework, see `bandpo.runs.setup`.
        every: Log steps from one check of the log to the next, see `bandpo.doctor.watch.LogWatch`, and generated
            batches from one check of tokens to the next.
        stop_on: The severity from which a finding ends the run: ``stop``, ``fix`` (which includes ``stop``), or None.
        alerts: Ways to tell people of faults, see `bandpo.audit.alerts.Alerts`.
        anchor: As for `bandpo.Recorder`.
        flat_steps: As for `bandpo.doctor.watch.LogWatch`.

    Raises:
        ValueError: if a setting is none of these.
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
            raise InvalidValue(f"every must be a whole number of log steps from 1, got {every!r}")
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
        """The codes that were announced, with their gravest severity."""

    def is_due(self, generation: int, update: int) -> bool:
        """Return whether `look` checks a loss, by the numbers of its batch and of its update on that batch."""
        return update == 0 and generation % self._every == 0

    def look(
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
        segments: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        """Check what a run assumes on sequences of a generated batch, if no update was made on it yet.

        Args:
            logp_old: This, and what is not named here, as for `bandpo.Recorder.add`.
            generation: Batches whose number is no multiple of ``every`` are not checked.

        Raises:
            RuntimeError: if a finding is as grave as ``stop_on``; no update was made on the batch.
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
            segments,
            cu_seqlens,
        )
        logp_old, logp, advantages = tensors["logp_old"], tensors["logp"], tensors["advantages"]
        logp_rollout, entropy, tokens = tensors["logp_rollout"], tensors["entropy"], tensors["tokens"]
        counted = normalize_mask(logp_old, tensors["mask"]).cpu() != 0
        old = _at_counted(counted, logp_old)
        new = None if logp is None else _at_counted(counted, logp)
        per_token = advantages.detach().float().cpu()
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
            logp_rollout=None if logp_rollout is None else _at_counted(counted, logp_rollout),
            entropy=None if entropy is None else _at_counted(counted, entropy),
            token=_as_array(tokens),
            generation=generation,
            update=update,
            group=_as_array(group),
            reward=_as_array(reward),
            truncated=_as_array(truncated),
            has_logp=new is not None,
        )
        self._batches.append(batch.without_bad_sequences()[0])
        # Trainers shuffle answers over the micro-batches, so that a group may lie in several of them.
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
        """Take one log step, and check the log if it is time.

        Args:
            row: What is logged, under the framework's own names.

        Raises:
            RuntimeError: if a finding is as grave as ``stop_on``.
        """
        self._rows.append({"step": len(self._rows), **row})
        self._raise_first(self.check_log(self._rows))

    def check_log(
        self, raw: Sequence[Mapping[str, Any]], *, at_the_end: bool = False, announces: bool = True
    ) -> list[Finding]:
        """Check a log if it is time, and return the findings for which the run should be stopped.

        A course must show a fault in two checks, one after the other, to be stopped; NaN in one.

        Args:
            raw: The log so far, as it was logged.
            at_the_end: Whether the run has ended, so that it is time in any case.
            announces: Whether new findings are announced.
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
            reasons: The findings for which it is.
            consequence: What happens, in a sentence.
        """
        codes = ", ".join(dict.fromkeys(reason.code for reason in reasons))
        text = f"{consequence}, as stop_on={self._stop_on!r} asks for, because of {codes}"
        _logger.warning("bandpo: %s", text)
        self._send(f"bandpo: stopped by {codes}", text, is_grave=True)

    def resume(self, rows: int, announced: Mapping[str, str]) -> None:
        """Go on with a run that was watched before.

        Args:
            rows: Log steps of which the log consists already.
            announced: What was announced of them, as `announced` had it.
        """
        self._log.start_after(rows)
        self.announced |= announced

    def _reasons_to_stop(self, findings: Sequence[Finding]) -> list[Finding]:
        if self._stop_on is None:
            return []
        return [finding for finding in findings if is_at_least(finding.severity, self._stop_on)]

    def _raise_first(self, reasons: Sequence[Finding]) -> None:
        if reasons:
            raise RunProblem(_line(reasons[0]))

    def _announce(self, findings: Sequence[Finding], raised: Sequence[Finding] = ()) -> None:
        """Announce the findings that are new, or graver than before.

        Args:
            findings: What was found.
            raised: Those of them that are raised as an error afterwards, which needs no warning beside it.
        """
        new: list[Finding] = []
        for finding in findings:
            before = self.announced.get(finding.code, SEVERITIES[-1])
            is_known = finding.code in self.announced
            if is_known and SEVERITIES.index(finding.severity) >= SEVERITIES.index(before):
                continue
            self.announced[finding.code] = finding.severity
            new.append(finding)
        faults = [finding for finding in new if finding.severity in FAULTS]
        # People are told first: a user may have made errors of warnings.
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
        """Send an alert, and name the first failure of each way."""
        failures = self._alerts.send(title, text, is_grave=is_grave)
        for name, problem in failures.items():
            if name not in self._failed_alerts:
                self._failed_alerts.add(name)
                _logger.warning(
                    "bandpo: an alert by %s failed (%s); training goes on, and later failures are not named",
                    name,
                    printable(problem),
                )


def _line(finding: Finding) -> str:
    """Return a finding in one line."""
    codes = " or ".join((finding.code, *finding.or_else))
    since = "" if finding.onset is None else f", since step {finding.onset:g}"
    # Names of a run's log stand in the cause.
    return printable(f"{codes}: {finding.cause} ({finding.severity}{since}). Do: {finding.advice}")


def _at_counted(counted: Tensor, values: Tensor) -> Array:
    """Return values on the CPU in float32, 0 where a token does not count."""
    return values.detach().float().cpu().masked_fill(~counted, 0.0).numpy()


def _as_array(values: Any) -> Array | None:
    """Return values on the CPU as an array; None if there are none."""
    return None if values is None else torch.as_tensor(values).detach().cpu().numpy()
