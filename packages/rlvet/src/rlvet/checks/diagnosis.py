"""The diagnosis of a run: the results of all checks, as text, Markdown and JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from rlvet._numbers import format_number, format_step
from rlvet._severities import MEANINGS, SEVERITIES, is_at_least
from rlvet._shown import as_html
from rlvet._terminal import printable
from rlvet.checks.course import Course, Series, begins_in_the_middle, starts_late
from rlvet.checks.findings import Coverage, Finding
from rlvet.checks.first_lines import how_sure
from rlvet.checks.log.entropy import expected_fall
from rlvet.checks.log.life import TOLD_BY
from rlvet.checks.log.reward import PLATEAU_STEPS
from rlvet.checks.log.signal import PART_OF_DEAD
from rlvet.checks.passing import in_passing, in_single_steps
from rlvet.checks.unjudged import constant_values, values_of_evaluation, values_without_verdict
from rlvet.lint.checks import LintReport
from rlvet.runs import Setup
from rlvet.runs.beginnings import groups_of
from rlvet.runs.compact_rows import compact
from rlvet.runs.logs import Log, shorten
from rlvet.runs.quantities import EVALUATION, OF_AUDIT, Row

MOST_IN_LINE = 12
"""The most keys that a line names."""

LONGEST_HEADLINE = 120
"""Largest number of characters of the first line."""

FEWEST_REWARDS = 10
"""Number of log steps with a reward below which a log without findings gets no verdict."""


OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory", re.I)
"""A part of an error of a GPU whose memory is full."""

UP_TO = {
    True: " up to its last row, after which the output has an error",
    False: " up to its last row, before the end of its progress bar",
}
"""What is said of a sound run whose output ends early, by whether it has an error."""

LESS_MEMORY = "smaller micro-batches, shorter answers and gradient checkpointing need less memory"
"""What a user can do then."""


@dataclass(frozen=True)
class Diagnosis:
    """The findings of a run, causes first, and the checks that passed.

    >>> from rlvet.checks.log.numbers import NOT_A_NUMBER
    >>> finding = Finding("ok", True, "values are numbers").failed(NOT_A_NUMBER, "3 of 64 sequences hold NaN")
    >>> Diagnosis([finding]).headline
    'nan: 3 of 64 sequences hold NaN'
    """

    tested: Sequence[Finding]
    """The results of all checks, those that passed and those that could not run included."""
    setup: Setup = field(default_factory=Setup)
    """Framework and method of the run. Advice names the settings of the framework."""
    rows: Sequence[Row] = ()
    """The metrics that were checked: the rows of the log, or one row per batch of a record."""
    coverage: Coverage | None = None
    """The part of a record that was checked; None for a log, which is read completely and has no tokens."""
    log: Log | None = None
    """The log that was checked; None for a record."""
    configuration: LintReport | None = None
    """The report of `rlvet lint` on the configuration in the run's folder, or beside its log. None for a record, and
    without a configuration of a known framework. It changes neither `healthy` nor an exit code: a risk that did no harm
    is no fault."""
    notes: Sequence[str] = ()
    """Sentences about the run that are not findings, such as the estimator of a record's advantages, and the files that
    could not be read."""

    @property
    def findings(self) -> list[Finding]:
        """Faults (``stop`` and ``fix``), causes first; then ``look``, from a lost reward to a plateau; then notes."""
        findings = [finding for finding in self.tested if finding.cause]
        findings.sort(key=_place)
        return [finding._replace(advice=self.setup.fill(finding.advice)) for finding in findings]

    @property
    def order(self) -> dict[float, list[str]]:
        """The codes of the findings by their onsets, the earliest first. Notes are no part of it.

        The findings themselves are in the order of causes and effects that is usual, whatever their onsets.
        """
        codes: dict[float, dict[str, None]] = {}
        for finding, onset in self._with_onsets:
            codes.setdefault(onset, {})[finding.code] = None
        return {onset: list(codes[onset]) for onset in sorted(codes)}

    @property
    def _with_onsets(self) -> list[tuple[Finding, float]]:
        """The findings that began at a known step, without notes, each with that step.

        What a log that lacks the start of its run shows from its first row on may have begun before.
        """
        unknown = self.rows[0]["step"] if self._lacks_start else None
        return [
            (finding, finding.onset)
            for finding in self.findings
            if finding.severity != "note" and finding.onset is not None and finding.onset != unknown
        ]

    @property
    def _lacks_start(self) -> bool:
        """Whether the log begins long after the start of its run."""
        return self.log is not None and bool(self.rows) and begins_in_the_middle(Course(self.rows))

    @property
    def how_sure(self) -> str:
        """A sentence on how often the codes of the findings were right on logs of others; empty without a finding."""
        findings = [finding for finding in self.findings if finding.severity != "note"]
        return how_sure(code for finding in findings for code in finding.codes)

    @property
    def order_text(self) -> str:
        """The order in which the findings began or half of their change was over; empty if all began at one step.

        >>> from rlvet.checks.log.distance import KL_DRIFT
        >>> from rlvet.checks.log.reward import COLLAPSE
        >>> drift = Finding("ok", True, "a").failed(KL_DRIFT, "KL 0 → 5", onset=46)
        >>> Diagnosis([drift, Finding("ok", True, "b").failed(COLLAPSE, "reward 1 → 0", onset=42)]).order_text
        'in order: collapse from step 42, kl-drift from step 46'
        """
        if len(self.order) < 2:
            return ""
        groups: dict[tuple[float, float, float | None], dict[str, None]] = {}
        for finding, onset in self._with_onsets:
            place = (finding.first_sign, onset, finding.half_by)
            groups.setdefault(place, {})[finding.code] = None
        parts = []
        for (_, onset, half), codes in sorted(groups.items(), key=lambda group: group[0][:2]):
            by_half = "" if half is None else f" (half of its change by step {format_step(half)})"
            parts.append(f"{_enumerate(list(codes))} from step {format_step(onset)}{by_half}")
        return f"in order: {', '.join(parts)}"

    @property
    def passed(self) -> list[str]:
        """The names of the checks that passed."""
        return [finding.tested for finding in self.tested if finding.ok]

    @property
    def untested(self) -> dict[str, str]:
        """The names of the checks that could not run, with the data to record for each."""
        return {f.tested: f.advice for f in self.tested if f.ok is None and not f.cause}

    @property
    def healthy(self) -> bool:
        """True if no check failed."""
        return all(finding.ok is not False for finding in self.tested)

    def is_at_least(self, severity: str) -> bool:
        """Check whether any finding has this severity or a graver one.

        Args:
            severity: One of `rlvet._severities.SEVERITIES`.
        """
        return any(is_at_least(finding.severity, severity) for finding in self.findings)

    @property
    def no_verdict(self) -> str:
        """The reason why a log without findings gets no verdict; empty if it gets one, or if there are findings.

        A verdict needs a reward, and enough log steps to show a trend, unless most checks were decided. There are no
        findings either if too many rows were not read.
        """
        if self.log is not None and self.log.unjudged:
            return self.log.unjudged
        if self.log is None or any(finding.severity != "note" for finding in self.findings):
            return ""
        rewards = len(self._rewards.values)
        if not rewards:
            return "no key of the log is known to be the reward; name it by --map reward=KEY"
        if rewards < FEWEST_REWARDS:
            steps = (
                "1 log step with a reward is" if rewards == 1 else f"{rewards} log steps with a reward are"
            )
            return f"{steps} too few, at least {FEWEST_REWARDS} are needed"
        undecided = sum(finding.ok is None and not finding.cause for finding in self.tested)
        if rewards < PLATEAU_STEPS and undecided > len(self.tested) / 2:
            return (
                f"{undecided} of {len(self.tested)} checks are undecided, and {rewards} log steps have a reward: "
                f"{PLATEAU_STEPS} are always enough"
            )
        return ""

    @property
    def _rewards(self) -> Series:
        """The mean rewards of the log steps that have one."""
        return Course(self.rows).series("reward")

    @property
    def for_a_verdict(self) -> str:
        """A sentence on the steps or rows that a log with too few rewards needs for a verdict; empty if it gets one.

        TRL logs a reward only in the first of the steps that train on the same generated answers, and any framework may
        log once in several steps.
        """
        steps = self._rewards.steps
        if not self.no_verdict or len(steps) < 2 or (self.log is not None and self.log.unjudged):
            return ""
        needed = FEWEST_REWARDS if len(steps) < FEWEST_REWARDS else PLATEAU_STEPS
        rows = compact(self.rows).column("step")
        distance = median(after - before for before, after in pairwise(steps))
        distance_of_rows = median(after - before for before, after in pairwise(rows))
        # Rows without a metric that is known are not among those that were read.
        unread_rows = 0 if self.log is None else self.log.unread_rows
        if distance_of_rows > 1 and not unread_rows:
            need = f"every step in the log, and not one in {format_step(distance_of_rows)}"
            if len(steps) * distance < needed:
                need = f"{need}, and at least {needed} steps"
        else:
            need = f"a log of about {format_step(math.ceil(needed * max(1, distance)))} steps"
        reason = ""
        log_steps = len(rows) + unread_rows
        if len(steps) < log_steps:
            share = f"{len(steps)} of {log_steps} log steps have a reward"
            reason = f"{share}, one in {format_step(distance)} steps" if distance > 1 else share
        if needed == FEWEST_REWARDS:
            because = f": {reason}" if reason else ""
            return (
                f"a verdict needs {need}{because}; {PLATEAU_STEPS} log steps with a reward are always enough"
            )
        return "; ".join(filter(None, [f"always enough for a verdict: {need}", reason]))

    @property
    def remarks(self) -> list[str]:
        """Sentences on the end and the start of the log, on values that are not judged, and on parts in passing."""
        if self.no_verdict:
            values = values_without_verdict(Course(self.rows)) if self.rows else ""
            return [
                *filter(None, [self.faults, self.errors, self.ending, self.for_a_verdict, values]),
                *self.near_limits,
                *self.in_passing,
            ]
        spikes = scores = constants = ""
        if self.log is not None:
            constants = constant_values(Course(self.rows), self._told)
            spikes = in_single_steps(Course(self.rows), self.findings)
            is_told = any(EVALUATION in finding.quantities for finding in self.findings)
            scores = "" if is_told else values_of_evaluation(Course(self.rows))
        return [
            *filter(None, [self.faults, self.errors, self.ending, self.beginning, scores, constants, spikes]),
            *self.near_limits,
            *self.in_passing,
        ]

    @property
    def _told(self) -> set[str]:
        """Quantities of which the findings tell, also as an effect."""
        told = {name for finding in self.findings for name in finding.quantities}
        return told.union(*(TOLD_BY[finding.kind] for finding in self.findings if finding.kind in TOLD_BY))

    @property
    def faults(self) -> str:
        """A sentence on faults of the configuration, which are below the findings; empty without any."""
        findings = [] if self.configuration is None else self.configuration.findings
        ids = [finding.id for finding in findings if is_at_least(finding.severity, "fix")]
        if not ids:
            return ""
        return (
            f"to fix in the configuration before the next run, whatever it did in this one: {', '.join(ids)}"
        )

    @property
    def near_limits(self) -> list[str]:
        """Sentences on checks that decided nothing as their figures are near their limits; empty with a finding."""
        if any(finding.severity != "note" for finding in self.findings):
            return []
        return [f"near a limit: {finding.advice}" for finding in self.tested if finding.is_near]

    @property
    def errors(self) -> str:
        """A sentence on the lines of the output that name an error; empty without many."""
        return "" if self.log is None else self.log.ending.errors

    @property
    def ending(self) -> str:
        """A sentence on an error at the end of the output, and on steps that are missing there; else empty."""
        if self.log is None:
            return ""
        ending = self.log.ending
        texts = [ending.text]
        if ending.error and ending.is_early and not ending.error.startswith("KeyboardInterrupt"):
            texts.append("mend it first, if it ended the run")
            if OUT_OF_MEMORY.search(ending.error):
                texts.append(LESS_MEMORY)
        texts.append(self._missing_steps)
        return "; ".join(filter(None, texts))

    @property
    def _missing_steps(self) -> str:
        """A clause on the steps that the settings plan after the last row; empty if none are missing."""
        planned = self.setup.number("training steps")
        if self.log is None or not self.rows or planned is None or self.log.are_steps_counted:
            return ""
        steps = Course(self.rows).rows.column("step")
        distance = median([after - before for before, after in pairwise(steps)] or [1])
        if steps[-1] + distance > planned:
            return ""
        name = self.setup.values["training steps"].name
        return f"the last log step is {format_step(steps[-1])}, of {format_step(planned)} by {name}"

    @property
    def beginning(self) -> str:
        """A sentence on a log that lacks the start of its run; empty for others."""
        if not self._lacks_start:
            return ""
        course = Course(self.rows)
        first = f"step {format_step(self.rows[0]['step'])}"
        if not starts_late(course.rows.column("step")):
            first = f"epoch {format_number(course.series('epoch').values[0])}"
        return (
            f"the log begins at {first}: the start of the run is missing, and what is said to begin with its first row "
            "may have begun before"
        )

    @property
    def unread(self) -> list[str]:
        """The logged keys of which no quantity is known. The log of a record is not read, so it has none."""
        return [] if self.log is None else list(self.log.unread)

    @property
    def replaced_keys(self) -> dict[str, str]:
        """The logged keys whose quantity was read from another key, each with that key.

        An example is ``entropy`` in a log that has ``audit/entropy`` too.
        """
        return {} if self.log is None else dict(self.log.replaced)

    @property
    def _of_audit(self) -> list[str]:
        """The keys of bandpo's audit."""
        return [] if self.log is None else [key for key in self.log.counters if key.startswith(OF_AUDIT)]

    @property
    def basis(self) -> str:
        """The keys and log steps of a log that were read, in a sentence; empty for a record."""
        if self.log is None or not self.rows:
            return ""
        first = self.rows[0]["step"]
        last = self.rows[-1]["step"]
        keys = self.log.keys_of_learning
        read_keys = keys - len(self.log.unread) - len(self.log.replaced)
        same = len(self.log.replaced)
        others = ""
        if same == 1:
            others = " (1 other has a quantity of these)"
        elif same:
            others = f" ({same} others have quantities of these)"
        of_audit = len(self._of_audit)
        if of_audit:
            others += f" beside {of_audit} of bandpo's audit"
        rewards = len(self._rewards.steps)
        of_rewards = f", {rewards} of them with a reward," if 0 < rewards < len(self.rows) else ","
        return (
            f"read {read_keys} of {keys} logged keys{others} in {len(self.rows)} log steps{of_rewards} "
            f"from step {format_step(first)} to {format_step(last)} ({self.log.source})"
        )

    @property
    def headline(self) -> str:
        """The diagnosis in one line: the gravest finding, or ``ok`` if there are only notes.

        A cause that is longer than the line is cut after a clause, and is complete in `findings`.
        """
        if self.no_verdict:
            return shorten_sentence(f"no verdict: {self.no_verdict}", LONGEST_HEADLINE)
        if all(finding.severity == "note" for finding in self.findings):
            part = f" of {self._part}" if self._part else ""
            up_to = (
                "" if self.log is None or not self.log.ending.is_early else UP_TO[bool(self.log.ending.error)]
            )
            return f"ok: nothing is wrong in what could be tested{part}{up_to} ({len(self.passed)} tests)"
        return shorten_sentence(_first_line(self.findings[0]), LONGEST_HEADLINE)

    @property
    def _part(self) -> str:
        """The part of a record that was checked, as a phrase; empty for a log, or if all tokens were checked."""
        return "" if self.coverage is None else self.coverage.part

    @property
    def expected_fall(self) -> str:
        """A clause on a large fall of entropy that is expected in learning; empty without one, or with a finding."""
        is_ok = not self.no_verdict and all(finding.severity == "note" for finding in self.findings)
        return expected_fall(Course(self.rows)) if is_ok else ""

    @property
    def in_passing(self) -> list[str]:
        """Sentences on parts of the run in which metrics left their usual values and returned."""
        if not self.rows or (self.log is not None and self.log.unjudged):
            return []
        return in_passing(Course(self.rows), self.findings)

    @property
    def _all_notes(self) -> list[str]:
        """The notes, after a large change that is expected in learning, if the run has no findings, and the remarks."""
        return [*filter(None, [self.expected_fall]), *self.remarks, *self.notes]

    @property
    def counts(self) -> str:
        """The number of checks that passed and that decided nothing, and of keys that were not read, in a phrase.

        The other checks have a finding each.

        >>> Diagnosis([Finding("ok", True, "a", subject="KL"), Finding("ok", None, "b", subject="the clip")]).counts
        '1 of 2 checks passed, 1 undecided'
        """
        passed = len(dict.fromkeys(self.passed))
        total = len({finding.tested for finding in self.tested})
        part = f" in {self._part}" if self._part else ""
        texts = [f"{passed} of {total} {'check' if total == 1 else 'checks'} passed{part}"]
        undecided = [name for name in self.untested if name not in self.passed]
        if undecided:
            texts.append(f"{len(undecided)} undecided")
        if self.log is not None and self.log.unread:
            texts.append(f"{len(self.log.unread)} of {self.log.keys_of_learning} keys not read")
        return ", ".join(texts)

    @property
    def legend(self) -> str:
        """The meanings of the severities that the findings have, in a line; empty without a finding."""
        severities = {finding.severity for finding in self.findings}
        if self.configuration is not None:
            severities |= {finding.severity for finding in self.configuration.findings}
        return "; ".join(f"{level}: {MEANINGS[level]}" for level in SEVERITIES if level in severities)

    def __str__(self) -> str:
        """Return the diagnosis as `as_text` does."""
        return self.as_text()

    def as_text(self, *, verbose: bool = False) -> str:
        """Return the headline, what was read, the findings, and the number of checks that passed.

        Control characters in the run's texts are escaped, so that the result is safe to print.

        Args:
            verbose: Also list the checks that passed or decided nothing, the keys that were not read, and the rules for
                the configuration that could not be checked.
        """
        lines = [self.headline]
        if self.coverage is not None:
            lines.append(str(self.coverage))
        if self.basis:
            lines.append(self.basis)
        if self.log is not None:
            lines += self.log.notes
        lines += self._all_notes

        lines += filter(None, [self.order_text])
        for number, finding in enumerate(self.findings, 1):
            is_told = self.headline == _first_line(finding)
            lines += ["", *_finding_lines(number, finding, is_told=is_told)]

        lines += ["", *(self._list_lines() if verbose else self._count_lines())]
        lines += filter(None, [self.how_sure])
        if self.legend:
            lines.append(self.legend)
        # Some of these lines contain names from the run's log and folders.
        return "\n".join(map(printable, lines))

    def _list_lines(self) -> list[str]:
        """Return the lines that name all checks and keys without a finding, and the report on the configuration."""
        lines = []
        if str(self.setup):
            lines.append(f"the run: {self.setup}")
        part = f" in {self._part}" if self._part else ""
        passed = "; ".join(dict.fromkeys(self.passed)) or "nothing"
        lines.append(f"passed{part}: {passed}")
        if self.untested:
            lines.append(f"undecided: {self._untested_text()}")
        if self.replaced_keys:
            lines.append(f"read from another key: {self.replaced_text}")
        lines += _lines_of_keys(self.unread)
        if self.log is not None:
            counters = [key for key in self.log.counters if not key.startswith(OF_AUDIT)]
            if counters:
                lines.append(f"steps, counters and times: {shorten(counters)}")
            of_audit = self._of_audit
            if of_audit:
                lines.append(f"of bandpo's audit, which `bandpo audit` prints: {shorten(of_audit)}")
        if self.configuration is not None:
            lines += ["", "the configuration:", *str(self.configuration).split("\n")]
        return lines

    def _count_lines(self) -> list[str]:
        """Return the line of counts, and the findings on the configuration if there are any."""
        lines = [f"{self.counts}; -v lists them"]
        if self.no_verdict and self.unread:
            lines.insert(0, f"not read: {shorten(self.unread)}")
        if self.configuration is not None and self.configuration.findings:
            lines += ["", "the configuration:", *self.configuration.text_of_findings.split("\n")]
        if self.configuration is not None:
            lines.append(f"configuration: {self.configuration.summary}")
        return lines

    def _untested_text(self) -> str:
        """Return the names of the checks that could not run, each with the data to record in parentheses."""
        return "; ".join(f"{name} ({advice})" if advice else name for name, advice in self.untested.items())

    @property
    def replaced_text(self) -> str:
        """The keys whose quantity was read from another key, each with that key in parentheses."""
        return shorten([f"{key} ({other})" for key, other in self.replaced_keys.items()])

    def _repr_html_(self) -> str:
        title = self.headline if self.coverage is None else f"{self.headline}; {self.coverage}"
        return as_html(title, ["", "do"], ((f.cause, f.advice) for f in self.findings))

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as a dictionary for JSON, with the codes that docs/diagnose.md lists."""
        return {
            "headline": self.headline,
            "coverage": None if self.coverage is None else self.coverage.as_json(),
            "log": None if self.log is None else self._log_as_json(self.log),
            "findings": [finding.as_json() for finding in self.findings],
            "order": [{"step": step, "codes": codes} for step, codes in self.order.items()],
            "passed": self.passed,
            "untested": self.untested,
            "configuration": None if self.configuration is None else self.configuration.as_json(),
            "notes": self._all_notes,
        }

    def as_markdown(self) -> str:
        """Return the diagnosis in Markdown, for the summary of a job of continuous integration.

        Texts of the run are formatted as code, so that none is taken for a link, an image or HTML.
        """
        lines = [f"**rlvet diagnose:** {_as_code(self.headline)}", ""]
        if self.coverage is not None:
            lines.append(_as_code(str(self.coverage)))
        if self.basis:
            lines.append(_as_code(self.basis))

        if self.findings:
            lines += [
                "",
                "| severity | finding | since step | what to do | since then |",
                "|---|---|---|---|---|",
            ]
        for finding in self.findings:
            cause = "; ".join((f"{finding.code}: {finding.cause}", *finding.settings))
            since = "" if finding.onset is None else format_step(finding.onset)
            cells = (
                finding.severity,
                _as_code(cause),
                since,
                _as_code(finding.advice),
                finding.cost,
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines += [f"\n{line}" for line in (self.order_text, self.how_sure, self.legend) if line]

        notes_of_log = () if self.log is None else self.log.notes
        lines += [f"\n{_as_code(note)}" for note in (*notes_of_log, *self._all_notes)]

        passed = "; ".join(dict.fromkeys(self.passed)) or "nothing"
        lines += ["", "<details>", f"<summary>{self.counts}</summary>", "", f"Passed: {passed}."]
        if self.untested:
            lines += ["", f"Undecided: {_as_code(self._untested_text())}"]
        if self.replaced_keys:
            lines += ["", f"Read from another key: {_as_code(self.replaced_text)}"]
        if self.unread:
            lines += ["", f"Not read: {_as_code(shorten(self.unread))}"]
        lines += ["", "</details>"]
        if self.configuration is not None:
            lines += ["", f"The configuration: {self.configuration.as_markdown().rstrip()}"]
        return "\n".join(lines)

    def _log_as_json(self, log: Log) -> dict[str, Any]:
        return {
            "source": log.source,
            "rows": len(self.rows),
            "read": {quantity: list(keys) for quantity, keys in log.read.items()},
            "unread": list(log.unread),
            "replaced": dict(log.replaced),
            "counters": list(log.counters),
            "unread_rows": log.unread_rows,
            "unread_values": dict(log.unread_values),
            "notes": list(log.notes),
        }


def _place(finding: Finding) -> tuple[int, int]:
    """Return the place of a finding by its severity, and of one that is worth a look by what a user wants to know."""
    place = max(SEVERITIES.index(finding.severity), 1)
    if finding.severity != "look":
        return place, 0
    return place, {"collapse": -1, "plateau": 1}.get(finding.code, 0)


def _enumerate(names: Sequence[str]) -> str:
    """Return names as a list in words.

    >>> _enumerate(["a"]), _enumerate(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _first_line(finding: Finding) -> str:
    """Return the codes of a finding and its cause."""
    return f"{_codes(finding)}: {finding.cause}"


def _codes(finding: Finding) -> str:
    """Return the code of a finding, and those that the rows cannot tell from it."""
    return " or ".join((finding.code, *finding.or_else))


def _lines_of_keys(keys: Sequence[str]) -> list[str]:
    """Return lines that name all keys that were not read: many of them in groups with the same beginning.

    >>> _lines_of_keys(["my/score", "my/loss"])
    ['not read: my/score, my/loss']
    """
    if len(keys) <= MOST_IN_LINE:
        return [f"not read: {', '.join(keys)}"] if keys else []
    groups, single = groups_of(keys)
    used = [key for key in keys if PART_OF_DEAD.search(key)]
    return [
        f"not read: {len(keys)} keys",
        *(f"- {', '.join(group)}" for group in (*groups, single) if group),
        *([f"of these, a check reads one that is no quantity: {', '.join(used)}"] if used else []),
    ]


def shorten_sentence(text: str, longest: int) -> str:
    """Return a sentence that is not longer than a number of characters, cut after a clause or a word.

    >>> shorten_sentence("the reward fell, from step 20 on; the entropy did too", 40)
    'the reward fell, from step 20 on'
    >>> shorten_sentence("the reward fell to the smallest of all", 24)
    'the reward fell to the …'
    >>> shorten_sentence("the reward fell in all rows (0.5 to 0.25, from the first to the last)", 40)
    'the reward fell in all rows'
    >>> shorten_sentence("format: it is 1 in each of 20 steps; means of others: a 0.5, b 0.25", 60)
    'format: it is 1 in each of 20 steps'
    """
    if len(text) <= longest:
        return text
    start = text[: longest + 2]
    # A clause that is too short says too little.
    ends = [
        match.start() for match in END_OF_CLAUSE.finditer(start) if longest // 2 <= match.start() <= longest
    ]
    whole = [
        end
        for end in ends
        if not _is_label(text, end) and start.count("(", 0, end) == start.count(")", 0, end)
    ]
    if whole:
        return start[: whole[-1]]
    opening = start.rfind("(")
    if opening > max(longest // 2, start.rfind(")")):
        return start[:opening].rstrip()
    return f"{start[: longest - 1].rpartition(' ')[0] or start[: longest - 2]} …"


END_OF_CLAUSE = re.compile(r"[;,:] ")
"""The end of a clause in a sentence."""

VALUES = re.compile(r": [^;:]{0,40}?\d")
"""A colon with values after it."""


def _is_label(text: str, end: int) -> bool:
    """Return whether a text ends, at a position, with the name of values that follow it, or within a list of them."""
    clause = max(0, text.rfind("; ", 0, end))
    colon = text.find(": ", clause, end + 2)
    # The code of a finding is no label.
    return colon > text.find(": ") and VALUES.match(text, colon) is not None


def _finding_lines(number: int, finding: Finding, *, is_told: bool = False) -> list[str]:
    """Return the lines of a numbered finding: its cause, its onset, the figure, related settings and the remedy.

    Args:
        number: Its number in the output.
        finding: The finding.
        is_told: True if the headline has the cause already.
    """
    lines = [f"{number}. {_codes(finding)} ({finding.severity}){'' if is_told else f': {finding.cause}'}"]
    if finding.onset is not None:
        cost = f"; from there on: {finding.cost}" if finding.cost else ""
        lines.append(f"   since step {format_step(finding.onset)}{cost}")
    if finding.evidence:
        lines.append(f"   measured: {finding.evidence}")
    if finding.settings:
        lines.append(f"   configuration: {'; '.join(finding.settings)}")
    lines.append(f"   do: {finding.advice}")
    return lines


def _as_code(text: str) -> str:
    """Return a text as inline code of Markdown. Its characters end neither the code nor a cell of a table."""
    text = printable(text).replace("`", "'").replace("|", "\\|").replace("\n", " ")
    return f"`{text}`"
