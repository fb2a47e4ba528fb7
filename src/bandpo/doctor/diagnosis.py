"""Diagnose a run: first what its tokens show, then the course of its log, causes before their effects."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandpo._severities import SEVERITIES, is_at_least
from bandpo._shown import as_html
from bandpo._terminal import printable
from bandpo.doctor.findings import Coverage, Finding
from bandpo.doctor.log_checks import log_findings
from bandpo.doctor.settings import with_settings
from bandpo.lint.checks import LintReport, lint_run_configuration
from bandpo.runs import Run, Setup, open_run
from bandpo.runs.logs import Log, shorten
from bandpo.runs.quantities import Row
from bandpo.runs.run import Collector, TolerantCollector

if TYPE_CHECKING:
    from bandpo.doctor.first_pass import FirstPass
    from bandpo.doctor.recorded_advantages import RecordedAdvantages
    from bandpo.methods import Method
    from bandpo.rules import ClipRule


FEW_TOKENS = 1000
"""Tokens of a record below which it is said that they are few."""

FEWEST_REWARDS = 10
"""Log steps with a reward below which a log in which nothing was found is not called right."""


@dataclass(frozen=True)
class Diagnosis:
    """Findings of a run, causes first, and the checks that passed.

    >>> finding = Finding("ok", True, "values are numbers").failed("nan", "3 of 64 sequences hold NaN")
    >>> Diagnosis([finding]).headline
    'nan: 3 of 64 sequences hold NaN'
    """

    tested: Sequence[Finding]
    setup: Setup = field(default_factory=Setup)
    """Framework and method of the run. Advice names the settings of the framework."""
    rows: Sequence[Row] = ()
    """The course that was looked at: the log's rows, or a record's by batch."""
    coverage: Coverage | None = None
    """Part of a record that was looked at; None for a log, which is read as a whole and holds no tokens."""
    log: Log | None = None
    """The log that was looked at; None for a record."""
    configuration: LintReport | None = None
    """What `bandpo lint` says of the configuration in the run's folder, or beside its log. None without one of a known
    framework, and for a record. It changes neither `healthy` nor an exit code: a risk that did no harm is no fault."""
    notes: Sequence[str] = ()
    """Sentences on the run that are no findings: which estimator a record's advantages are of, and files that could not
    be read."""

    @property
    def findings(self) -> list[Finding]:
        """Faults, causes first; then what is worth a look, a plateau after the rest; then notes."""
        findings = [finding for finding in self.tested if finding.cause]
        findings.sort(
            key=lambda finding: (max(SEVERITIES.index(finding.severity), 1), finding.code == "plateau")
        )
        return [finding._replace(advice=self.setup.fill(finding.advice)) for finding in findings]

    @property
    def passed(self) -> list[str]:
        """The names of the checks that passed."""
        return [finding.tested for finding in self.tested if finding.ok]

    @property
    def untested(self) -> dict[str, str]:
        """The checks that the run does not allow, and what would allow them."""
        return {f.tested: f.advice for f in self.tested if f.ok is None and not f.cause}

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.ok is not False for finding in self.tested)

    def is_at_least(self, severity: str) -> bool:
        """Check whether a finding is of a severity or a graver one.

        Args:
            severity: One of `bandpo._severities.SEVERITIES`.
        """
        return any(is_at_least(finding.severity, severity) for finding in self.findings)

    @property
    def no_verdict(self) -> str:
        """Why a log in which nothing was found allows no verdict; empty if it does, or if something was found.

        Few log steps show no course, and without a reward nothing is known of what the run is for.
        """
        if self.log is None or any(finding.severity != "note" for finding in self.findings):
            return ""
        rewards = sum("reward" in row for row in self.rows)
        if not rewards:
            return "no key of the log is known to be the reward; name it by --map reward=KEY"
        if rewards < FEWEST_REWARDS:
            return f"{rewards} log steps with a reward are too few, {FEWEST_REWARDS} are needed"
        return ""

    @property
    def basis(self) -> str:
        """What part of a log the verdict rests on, in a sentence; empty for a record."""
        if self.log is None or not self.rows:
            return ""
        first, last = self.rows[0]["step"], self.rows[-1]["step"]
        n = self.log.keys_of_learning
        return (
            f"read {n - len(self.log.unread)} of {n} logged keys in {len(self.rows)} log steps, {first:g} to {last:g}"
            f" ({self.log.source})"
        )

    @property
    def headline(self) -> str:
        """The diagnosis in one line."""
        if self.no_verdict:
            return f"no verdict: {self.no_verdict}"
        if not self.findings:
            part = "" if self.coverage is None else self.coverage.part
            where = f" of {part}" if part else ""
            return f"ok: nothing is wrong in what could be tested{where} ({len(self.passed)} tests)"
        first = self.findings[0]
        return f"{' or '.join((first.code, *first.or_else))}: {first.cause}"

    def __str__(self) -> str:
        """Return what is wrong, how much of the run was looked at, what passed in that, and what could not be tested.

        Control characters of a run's names are escaped, so that the text is safe to print.
        """
        lines = [self.headline]
        if self.coverage is not None:
            lines.append(str(self.coverage))
        if self.basis:
            lines.append(self.basis)
        if self.log is not None:
            lines += self.log.notes
        lines += self.notes
        for number, finding in enumerate(self.findings, 1):
            lines += ["", f"{number}. {finding.code} ({finding.severity}): {finding.cause}"]
            if finding.onset is not None:
                cost = f"; cost: {finding.cost}" if finding.cost else ""
                lines.append(f"   since step {finding.onset:g}{cost}")
            lines.append(f"   tested: {finding.tested}{finding.format_figure()}")
            if finding.settings:
                lines.append(f"   configuration: {'; '.join(finding.settings)}")
            lines.append(f"   do: {finding.advice}")
        lines += ["", f"the run: {self.setup}"] if str(self.setup) else [""]
        part = "" if self.coverage is None else self.coverage.part
        where = f" in {part}" if part else ""
        passed = "; ".join(dict.fromkeys(self.passed)) or "nothing"
        lines.append(f"passed{where}: {passed}")
        if self.untested:
            checks = [f"{name} ({how})" if how else name for name, how in self.untested.items()]
            lines.append(f"cannot be tested: {'; '.join(checks)}")
        if self.log is not None and self.log.unread:
            lines.append(f"not read: {shorten(self.log.unread)}")
        if self.configuration is not None:
            lines += ["", "the configuration:", *str(self.configuration).split("\n")]
        # Names of a run's log and folders stand in these lines.
        return "\n".join(map(printable, lines))

    def _repr_html_(self) -> str:
        title = self.headline if self.coverage is None else f"{self.headline}; {self.coverage}"
        return as_html(title, ["", "do"], ((f.cause, f.advice) for f in self.findings))

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON has it, with the codes that docs/diagnose.md lists."""
        return {
            "headline": self.headline,
            "coverage": None if self.coverage is None else self.coverage.as_json(),
            "log": None if self.log is None else self._log_as_json(self.log),
            "findings": [finding._asdict() for finding in self.findings],
            "passed": self.passed,
            "configuration": None if self.configuration is None else self.configuration.as_json(),
            "notes": list(self.notes),
        }

    def as_markdown(self) -> str:
        """Return the diagnosis in Markdown, for the summary of a job of continuous integration.

        Texts of the run stand in it as code, so that none is taken for a link, an image or HTML.
        """
        lines = [f"**bandpo diagnose:** {_as_code(self.headline)}", ""]
        lines += [_as_code(text) for text in (str(self.coverage or ""), self.basis) if text]
        if self.findings:
            lines += ["", "| severity | finding | since step | what to do | cost |", "|---|---|---|---|---|"]
        for finding in self.findings:
            cause = "; ".join((f"{finding.code}: {finding.cause}", *finding.settings))
            since = "" if finding.onset is None else f"{finding.onset:g}"
            texts = (
                finding.severity,
                _as_code(cause),
                since,
                _as_code(finding.advice),
            )
            lines.append(f"| {' | '.join(texts)} | {finding.cost} |")
        passed = "; ".join(dict.fromkeys(self.passed)) or "nothing"
        lines += ["", f"Passed: {passed}."]
        if self.log is not None and self.log.unread:
            lines += ["", f"Not read: {_as_code(shorten(self.log.unread))}"]
        lines += [f"\n{_as_code(note)}" for note in self.notes]
        if self.configuration is not None:
            lines += ["", f"The configuration: {self.configuration.as_markdown().rstrip()}"]
        return "\n".join(lines)

    def _log_as_json(self, log: Log) -> dict[str, Any]:
        return {
            "source": log.source,
            "rows": len(self.rows),
            "read": {quantity: list(keys) for quantity, keys in log.read.items()},
            "unread": list(log.unread),
            "notes": list(log.notes),
        }


def _as_code(text: str) -> str:
    """Return a text as inline code of Markdown that ends neither the code nor a cell of a table."""
    text = printable(text).replace("`", "'").replace("|", "\\|").replace("\n", " ")
    return f"`{text}`"


def diagnose(
    run: str | Path | Run,
    *,
    method: Method | ClipRule | str | None = None,
    collectors: Sequence[Collector] = (),
) -> Diagnosis:
    """Diagnose a run from its log, its record of tokens, or the batches that its framework wrote.

    Reading a log takes the standard library alone. Of a record, what the clip did is judged only where torch is
    installed.

    Args:
        run: What `bandpo.runs.open_run` opens, or an open run.
        method: The run's own method, used where nothing on the disk names one.
        collectors: Further collectors that the pass over a record feeds, so that it is read once.

    Raises:
        ValueError: if the run cannot be read.
    """
    run = run if isinstance(run, Run) else open_run(run, method=None if method is None else str(method))
    if not run.is_record:
        findings = with_settings(log_findings(run.rows, run.setup), run.setup)
        # A configuration of another framework than the log's is of another run.
        same_run = run.setup.framework == run.configuration.framework
        return Diagnosis(
            findings,
            run.setup,
            run.rows,
            log=run.log,
            configuration=lint_run_configuration(run.configuration) if same_run else None,
            notes=run.configuration.unread,
        )

    from bandpo.doctor.first_pass import FirstPass
    from bandpo.doctor.recorded_advantages import AdvantageCollector

    first_pass = FirstPass.collector()
    advantages = AdvantageCollector()
    replay = _replay_collector(method)
    fed: list[Collector] = [first_pass, advantages, *collectors]
    if replay is not None:
        fed.append(TolerantCollector([replay]))
    with warnings.catch_warnings():
        # Values that cannot be right are a finding here.
        warnings.filterwarnings("ignore", "(?s).*values that cannot be right")
        run.scan(fed)
    replayed = None if replay is None else replay.result()
    rows = [] if replayed is None else replayed.rows
    return diagnose_record(first_pass.result(), advantages.result(), run.setup, rows)


def diagnose_record(
    first_pass: FirstPass,
    advantages: RecordedAdvantages,
    setup: Setup,
    replayed_rows: Sequence[Row] = (),
) -> Diagnosis:
    """Diagnose a record from its first pass, and from the audit of its tokens where there is one.

    Args:
        first_pass: The tokens of every sequence when it was first recorded.
        advantages: Rewards, advantages and masks of the sequences.
        setup: What the run was trained with.
        replayed_rows: The rows of a replay, see `bandpo.audit.replay.Replay`.
    """
    from bandpo.doctor.advantage_checks import findings_and_notes

    of_advantages, notes = findings_and_notes(advantages)
    tokens = first_pass.coverage.total_tokens
    if 0 < tokens < FEW_TOKENS:
        notes = [
            *notes,
            f"{tokens:,} tokens are few: a fault that changes little, or few of them, would not show",
        ]
    findings = _in_order(first_pass, of_advantages)
    batch_rows = first_pass.batch_rows()
    # While the tokens are not what every method assumes, nothing is said of the clip and the learning rate.
    if any(finding.ok is False for finding in findings):
        return Diagnosis(findings, setup, batch_rows, first_pass.coverage, notes=notes)
    # The entropy of a replay is estimated; the batch rows have the recorded one.
    clip_rows = [{name: x for name, x in row.items() if name != "entropy"} for row in replayed_rows]
    findings += log_findings([*clip_rows, *batch_rows])
    return Diagnosis(findings, setup, batch_rows, first_pass.coverage, notes=notes)


def record_findings(
    first_pass: FirstPass, advantages: RecordedAdvantages, *, whole_groups: bool = True
) -> list[Finding]:
    """Run all checks of a record's tokens, advantages, rewards and masks, causes before their effects.

    Args:
        first_pass: The tokens of every sequence when it was first recorded.
        advantages: Rewards, advantages and masks of the sequences.
        whole_groups: Whether they have all answers to each prompt, as a micro-batch that is watched does not.
    """
    from bandpo.doctor.advantage_checks import advantage_findings

    of_advantages = advantage_findings(advantages, whole_groups=whole_groups)
    return _in_order(first_pass, of_advantages)


def _in_order(first_pass: FirstPass, of_advantages: Sequence[Finding]) -> list[Finding]:
    """Run the checks of tokens, and return all findings of a record, causes before their effects.

    Args:
        first_pass: The tokens of every sequence when it was first recorded.
        of_advantages: The findings on advantages, rewards and masks.
    """
    from bandpo.doctor.advantage_checks import ENDS, PROMPTS
    from bandpo.doctor.token_checks import token_findings

    counts_drawn_tokens = all(
        finding.ok is not False for finding in of_advantages if finding.tested in (ENDS, PROMPTS)
    )
    findings = token_findings(first_pass, counts_drawn_tokens=counts_drawn_tokens)
    numbers, *of_probabilities, updates = findings
    # Advantages are not those of their groups where a part of each batch is missing.
    if updates.code == "micro-batch-lost":
        return [numbers, updates, *of_advantages, *of_probabilities]
    # Masks and answers that were left out change the figures of the tokens, not the other way round.
    return [numbers, *of_advantages, *of_probabilities, updates]


def _replay_collector(method: Method | ClipRule | str | None) -> Any:
    """Return a collector that audits the record under the run's own method and others; None without torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    from bandpo.audit.replay import ReplayCollector
    from bandpo.text import as_method

    return ReplayCollector(method=None if method is None else as_method(method))
