"""Results of the doctor's checks, and the part of a record that they cover.

This module needs only the standard library, so it also runs without numpy, as in a browser.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlvet._numbers import format_number, format_share


@dataclass(frozen=True)
class Kind:
    """All that is known of one kind of finding: its condition, severity, evidence, remedy, source and page text.

    An object stands in the file of its subject, with the check that reports it and the thresholds of that check. The
    printed finding, its JSON and the sections of docs/diagnose.md are made from it.

    >>> tiny = Kind("tiny", "fix", "answers are tiny", "all have one token", "allow more", ("length",), "an example")
    >>> Finding("ok", True, "answers have words").failed(tiny, "every answer has one token").code
    'tiny'
    """

    code: str
    """The code in headlines and in JSON."""
    severity: str
    """One of `rlvet._severities.SEVERITIES`, unless the check sets another one."""
    meaning: str
    """The fault in a few words."""
    condition: str
    """The values that a log or a record must have for this finding, in words, with the limits."""
    remedy: str
    """The change to make. Each ``{NAME}`` becomes the name of that setting in the run's framework, and each
    ``[ALTERNATIVE|TEXT]`` is left out if the run's settings exclude it, see `rlvet.runs.setup.Setup.fill`."""
    evidence: tuple[str, ...]
    """The quantities of a log, as in `rlvet.runs.quantities.QUANTITIES`, or the columns of a record, from which it is
    concluded."""
    source: str
    """Where the fault was seen, and the limits were chosen: public issues, logs of other people, or simulated runs."""
    settings: tuple[str, ...] = ()
    """The settings whose values are shown with it: keys of `rlvet.runs.Setup.values`."""
    is_effect_of_large_steps: bool = False
    """True if a learning rate that is too large may cause it. A high rate is then shown with it."""
    is_in_the_weights: bool = False
    """True if the policy or the critic itself is damaged, so that every checkpoint since the onset has the fault.
    One of the data, the rewards, the engine or the settings ends with its cause, and no checkpoint has it."""
    scenarios: tuple[str, ...] = ()
    """The names of runs of ``benchmarks/doctor`` that have this fault."""
    no_scenario: str = ""
    """The reason if no run of ``benchmarks/doctor`` has it."""
    resume: str = ""
    """What joins the remedy with the advice to resume from an earlier checkpoint, such as ``, or``; empty without this
    advice."""

    def __str__(self) -> str:
        return self.code

    def resumption(self, checkpoint: str) -> str:
        """Return the end of the remedy that needs a checkpoint from before the run broke; empty if there is none.

        Args:
            checkpoint: The checkpoint, in words such as ``before step 40``.
        """
        return f"{self.resume} resume from a checkpoint {checkpoint}" if self.resume else ""


class Finding(NamedTuple):
    """Result of one check. Passes by default.

    >>> from rlvet.checks.log.numbers import NOT_A_NUMBER
    >>> finding = Finding("ok", True, "values are numbers", n=64)
    >>> finding.failed(NOT_A_NUMBER, "3 of 64 sequences hold NaN").ok
    False
    """

    code: str
    """``ok``, or the code of the fault. docs/diagnose.md lists the codes."""
    ok: bool | None
    """True if the check passed, False if it failed; None for a remark, or if the run does not record enough."""
    tested: str
    """The property of a correct run that was checked."""
    figure: float | None = None
    """The measured quantity."""
    error: float | None = None
    """Standard error of ``figure``, from its values per batch."""
    n: int = 0
    """Number of tokens, sequences or log steps that ``figure`` was computed from."""
    cause: str = ""
    """The fault, in a sentence; empty if the check passed."""
    or_else: tuple[str, ...] = ()
    """Codes of other faults that this check cannot tell from it."""
    advice: str = ""
    """The remedy; for a check that could not run, the data to record for it."""
    severity: str = ""
    """One of `rlvet._severities.SEVERITIES`; empty if the check passed or could not run."""
    onset: float | None = None
    """The first step at which the run shows the fault; None if no such step is known."""
    is_near: bool = False
    """True of a check that decided nothing as its figure is near its limit."""
    half_by: float | None = None
    """The step by which half of the change of its metric was over; None if that was not before the onset."""
    steps: tuple[float, float] | None = None
    """The first and the last step of the rows that ``figure`` was computed from."""
    cost: str = ""
    """The time, or the number of log steps, since the onset."""
    settings: tuple[str, ...] = ()
    """Settings of the run's configuration that are related to the fault, with their values and their file."""
    quantities: tuple[str, ...] = ()
    """The quantities of the log that show the fault, the clearest first, under their names in
    `rlvet.runs.quantities.QUANTITIES`. A component of the reward is named ``rewards/NAME``."""
    measure: str = ""
    """The name of ``figure``, such as ``share of answers cut off``; empty without a figure."""
    kind: Kind | None = None
    """The kind of a fault or remark; None if the check passed or could not run."""
    subject: str = ""
    """The name of the check in the output, such as ``entropy of the policy``. Each check has a name of its own, which
    docs/diagnose.md explains."""

    @property
    def codes(self) -> tuple[str, ...]:
        """The code, and those of other faults that this check cannot tell from it."""
        return (self.code, *self.or_else)

    @property
    def first_sign(self) -> float:
        """The onset, or the step by which half of the change of its metric was over; infinity if neither is known."""
        steps = [step for step in (self.onset, self.half_by) if step is not None]
        return min(steps, default=math.inf)

    @classmethod
    def of(cls, tested: str, by_batch: Iterable[float], n: int, measure: str = "") -> Finding:
        """Return a passed check of a quantity that was measured in each batch.

        Args:
            tested: The property of a correct run that was checked.
            by_batch: The quantity in each batch, at least one value; may be a one-dimensional array.
            n: Total number of tokens or sequences in the batches.
            measure: The name of the quantity.
        """
        figures = [float(figure) for figure in by_batch]
        mean = sum(figures) / len(figures)
        if len(figures) < 2:
            return cls("ok", True, tested, mean, None, n, measure=measure)

        # Plain sums, since `statistics.stdev` raises an error for NaN and infinity.
        squares = [(figure - mean) * (figure - mean) for figure in figures]
        variance = sum(squares) / (len(figures) - 1)
        error = math.sqrt(variance / len(figures))
        return cls("ok", True, tested, mean, error, n, measure=measure)

    @property
    def evidence(self) -> str:
        """The measured quantity with its standard error and sample size, in words; empty without a figure.

        It names the quantity and not the property that was checked, so that it does not read as if the check passed.

        >>> Finding("ok", True, "answers are finished", 0.996, 0.004, 25, measure="share of answers cut off").evidence
        'share of answers cut off: 99.6% ± 0.4% (standard error; over 25)'
        """
        if self.figure is None or not self.n or not self.measure:
            return ""
        if self.measure.startswith("share"):
            figure = format_share(self.figure)
            spread = "" if self.error is None else f" ± {format_number(100 * self.error, 2)}%"
        else:
            figure = format_number(self.figure)
            spread = "" if self.error is None else f" ± {format_number(self.error, 2)}"
        unit = ""
        if self.steps is not None:
            unit = " log step" if self.n == 1 else " log steps"
        kind = "" if self.error is None else "standard error; "
        return f"{self.measure}: {figure}{spread} ({kind}over {self.n:,}{unit})"

    def failed(
        self,
        kind: Kind,
        cause: str,
        *alternatives: Kind,
        severity: str | None = None,
        onset: float | None = None,
        quantities: Sequence[str] = (),
    ) -> Finding:
        """Return this check with a fault or a remark, and the remedy of its kind.

        The severities ``stop`` and ``fix`` are faults (``ok`` is False), ``look`` and ``note`` are remarks (None).

        Args:
            kind: The kind of the finding.
            cause: The fault, in a sentence.
            *alternatives: Kinds of other faults that this check cannot tell from it.
            severity: One of `rlvet._severities.SEVERITIES`; by default that of the kind.
            onset: The first step at which the run shows the fault.
            quantities: The quantities of the log that show the fault, the clearest first.
        """
        if severity is None:
            severity = kind.severity
        return self._replace(
            code=kind.code,
            ok=False if severity in ("stop", "fix") else None,
            cause=cause,
            or_else=tuple(alternative.code for alternative in alternatives),
            advice=kind.remedy,
            severity=severity,
            onset=onset,
            quantities=tuple(quantities),
            kind=kind,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the finding as a dictionary for JSON."""
        values = self._asdict()
        del values["kind"], values["half_by"], values["is_near"]
        return values


class Coverage(NamedTuple):
    """The part of a record that the checks read.

    A token counts once, even if several losses contain it. Tokens of sequences that contain NaN do not count.

    >>> str(Coverage(12288, 12288, 8, 8))
    'looked at all 12,288 tokens of 8 batches'
    >>> str(Coverage(1_048_576, 61_300_000, 1000, 1000))
    'looked at 1,048,576 of 61,300,000 tokens (1.7%), in all 1,000 batches'
    >>> str(Coverage(1_048_576, 610_000_000, 1001, 10_000))
    'looked at 1,048,576 of 610,000,000 tokens (0.17%), in 1,001 of 10,000 batches from first to last'
    """

    tokens: int = 0
    """Number of tokens that were checked."""
    total_tokens: int = 0
    """Number of tokens in the record."""
    batches: int = 0
    """Number of generated batches with checked tokens. The first and the last batch always have some."""
    total_batches: int = 0
    """Number of generated batches in the record."""

    @property
    def complete(self) -> bool:
        """True if every token was checked."""
        return self.tokens == self.total_tokens

    @property
    def part(self) -> str:
        """The checked part of the record, as a phrase; empty if every token was checked."""
        if self.complete:
            return ""
        return f"{format_number(100 * self.tokens / self.total_tokens, 2)}% of the tokens"

    def __str__(self) -> str:
        """Return the counts as a phrase."""
        if self.complete:
            batches = "1 batch" if self.total_batches == 1 else f"{self.total_batches:,} batches"
            return f"looked at all {self.tokens:,} tokens of {batches}"
        share = f"{format_number(100 * self.tokens / self.total_tokens, 2)}%"
        if self.batches < self.total_batches:
            batches = f"in {self.batches:,} of {self.total_batches:,} batches from first to last"
        elif self.total_batches == 1:
            batches = "in its one batch"
        else:
            batches = f"in all {self.total_batches:,} batches"
        return f"looked at {self.tokens:,} of {self.total_tokens:,} tokens ({share}), {batches}"

    def as_json(self) -> dict[str, int]:
        """Return the four counts by name."""
        return self._asdict()
