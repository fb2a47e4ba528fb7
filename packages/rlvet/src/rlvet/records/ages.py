"""The ages of a record's tokens, and how far the policy in training is from the one that sampled them.

The age of a token is the number of versions of the policy between its sampling and its update.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlvet._numbers import format_number
from rlvet.runs.setup import framework_of

if TYPE_CHECKING:
    from numpy import ndarray as Array

    from rlvet.records.record import LossBatch

FIRST_AGES = (0, 1, 2, 3, 5, 8, 17)
"""The smallest age of each class of ages. A table of all these classes has 80 columns."""
CLASSES = ("below 0", "0", "1", "2", "3 to 4", "5 to 7", "8 to 16", "17+")
"""The names of the classes. A token whose version is above that of the weights in training is in the first."""

ROUNDING_DISTANCE = 0.02
"""Largest mean abs log-ratio (nats) between passes of one policy with different kernels; bfloat16 gives up to half of
it."""

LARGEST_LOG_RATIO = 20.0
"""Log-ratio (nats) to which larger ones are reduced for the effective sample size, so that no sum overflows."""

FEWEST_TOKENS = 100
"""Number of tokens of age 0 below which these are not judged."""


def age_classes(ages: Array) -> Array:
    """Return the index in `CLASSES` of each age.

    >>> import numpy as np
    >>> [CLASSES[k] for k in age_classes(np.array([-1, 0, 4, 6, 40]))]
    ['below 0', '0', '3 to 4', '5 to 7', '17+']
    """
    import numpy as np

    return np.searchsorted(FIRST_AGES, ages, side="right")


@dataclass(frozen=True)
class AgeRow:
    """The tokens of one class of ages."""

    name: str
    """The class, one of `CLASSES`."""
    youngest: int
    """The smallest age that occurs in it."""
    oldest: int
    """The largest age that occurs in it."""
    tokens: int
    """Number of counted tokens."""
    spread: float
    """Standard deviation (nats) of the log-ratio around 0; NaN if the record has no log-ratio."""
    effective: float
    """Effective sample size as a share of the tokens, (Σr)²/(n·Σr²); NaN if the record has no log-ratio."""

    @property
    def ages(self) -> str:
        """The ages that occur in the class, in words.

        >>> AgeRow("3 to 4", 3, 3, 480, 0.1, 0.9).ages, AgeRow("17+", 18, 30, 480, 0.1, 0.9).ages
        ('3', '18 to 30')
        """
        return str(self.oldest) if self.youngest == self.oldest else f"{self.youngest} to {self.oldest}"


@dataclass(frozen=True)
class Ages:
    """The tokens of a record by their age."""

    rows: Sequence[AgeRow] = ()
    """The classes that have tokens, the youngest first; empty if no age is known."""
    unknown: int = 0
    """Number of counted tokens without an age."""
    is_upper_bound: bool = False
    """True if versions were read at the start of an answer or a group, so that a token may be younger than it says."""
    unit: str = "versions"
    """What an age counts: ``versions`` of the weights, or in a record of TRL ``updates``."""
    fresh_distance: float = 0.0
    """Mean abs log-ratio (nats) of the tokens of age 0, before an update on their batch where updates are numbered."""
    mean: float = math.nan
    """Mean age of the tokens; NaN if no age is known."""

    @property
    def mismatch(self) -> str:
        """A sentence if ratios are far from 1 though the data is fresh; else empty."""
        if self.fresh_distance <= ROUNDING_DISTANCE:
            return ""
        distance = format_number(self.fresh_distance, 2)
        return (
            f"tokens of age 0 have a mean abs(log r) of {distance} nats already: the sampler's log-probabilities are "
            "not those of the trainer's policy, or its weights changed without a new version. This is no staleness"
        )

    @property
    def meaning(self) -> str:
        """The meaning of the ages, and their mean, in a phrase."""
        bound = ", an upper bound" if self.is_upper_bound else ""
        return f"{self.unit} between sampling and update{bound}; mean {self.mean:.1f}"

    @property
    def unknown_line(self) -> str:
        """A sentence on the tokens whose age the record does not have; empty if it has all."""
        if not self.unknown:
            return ""
        tokens = f"of {self.unknown:,} tokens " if self.rows else ""
        return f"the age {tokens}is unknown: the record has no version of the weights that sampled"

    def lines(self, blocked: Mapping[str, Mapping[str, float]] | None = None) -> list[str]:
        """Return the ages as sentences, the mismatch first.

        Args:
            blocked: The share of the gradient on rare winners that each method blocks, by its name and the class of
                ages, if a replay knows it.
        """
        if not self.rows:
            return []
        lines = [self.mismatch] if self.mismatch else []
        lines.append(f"by age ({self.meaning}): {'; '.join(map(_text, self.rows))}")
        if any(math.isnan(row.spread) for row in self.rows):
            lines.append(
                "the record is from before the update and has no log-probabilities of the policy in training, so the "
                "spread of the ratios by age is unknown"
            )
        ages = {row.name: row.ages for row in self.rows}
        for method, shares in (blocked or {}).items():
            texts = [f"{ages[name]}: {share:.1%}" for name, share in shares.items()]
            lines.append(
                f"{method} blocks of the gradient on rare winners (p < 0.1), by age: {'; '.join(texts)}"
            )
        return [*lines, self.unknown_line] if self.unknown else lines


def _text(row: AgeRow) -> str:
    """Return a class of ages in a phrase."""
    text = f"{row.ages}: {row.tokens:,} tokens"
    if math.isnan(row.spread):
        return text
    spread = f"root mean square of log r {format_number(row.spread, 2)} nats"
    return f"{text}, {spread}, effective sample size {row.effective:.0%}"


def _log_ratio(batch: LossBatch) -> Array | None:
    """Return the log-ratio (nats) of the policy in training to the one that sampled; None if it is not recorded."""
    if batch.has_logp:
        return batch.log_ratio
    # Before the update, the trainer's own log-probabilities are the old ones, unless these are the sampler's.
    if batch.anchor == "trainer" and batch.logp_rollout is not None:
        return batch.logp_old - batch.logp_rollout
    return None


@dataclass
class AgeCollector:
    """A collector that sums the tokens of a record by their age."""

    _sums: Any = None
    """Number of tokens, number with a log-ratio, Σ(log r)², Σr and Σr², each by class, (5, classes)."""
    _tokens_by_age: Counter[int] = field(default_factory=Counter)
    _unknown: int = 0
    _is_upper_bound: bool = False
    _unit: str = "versions"
    _fresh: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Σabs(log r) of the tokens of age 0 before an update on their batch, and their number."""

    def add(self, batch: LossBatch) -> None:
        """Add the tokens of one loss, or of a batch that was recorded before it."""
        import numpy as np

        mask = batch.mask
        if batch.lag is None:
            self._unknown += int(mask.sum())
            return
        self._is_upper_bound |= batch.version_at != "token"
        if framework_of(batch.framework) == "trl":
            self._unit = "updates"
        ages = batch.lag[mask]
        recorded = _log_ratio(batch)
        log_ratio = np.full(len(ages), np.nan) if recorded is None else recorded[mask].astype(np.float64)
        # The sampler may have no log-probability of a token.
        is_known = np.isfinite(log_ratio)
        log_ratio = np.where(is_known, log_ratio, 0.0)
        ratio = np.exp(np.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)) * is_known
        classes = age_classes(ages)
        values = (np.ones_like(ratio), is_known, log_ratio**2, ratio, ratio**2)
        sums = np.stack([np.bincount(classes, x, minlength=len(CLASSES)) for x in values])
        self._sums = sums if self._sums is None else self._sums + sums
        occurring, counts = np.unique(ages, return_counts=True)
        self._tokens_by_age.update(dict(zip(occurring.tolist(), counts.tolist(), strict=True)))
        if not batch.update:
            fresh = np.abs(log_ratio[is_known & (ages == 0)])
            self._fresh = [self._fresh[0] + float(fresh.sum()), self._fresh[1] + len(fresh)]

    def result(self) -> Ages:
        """Return the ages of all tokens that were added."""
        import numpy as np

        rows: list[AgeRow] = []
        tokens_by_age = self._tokens_by_age
        occurring: dict[str, list[int]] = {name: [] for name in CLASSES}
        for age, index in zip(tokens_by_age, age_classes(np.array([*tokens_by_age])).tolist(), strict=True):
            occurring[CLASSES[index]].append(age)
        if self._sums is not None:
            for name, (tokens, known, squares, ratios, squared_ratios) in zip(
                CLASSES, self._sums.T, strict=True
            ):
                spread = float((squares / known) ** 0.5) if known else math.nan
                effective = float(ratios**2 / (known * squared_ratios)) if known else math.nan
                if tokens:
                    ages = occurring[name]
                    rows.append(AgeRow(name, min(ages), max(ages), int(tokens), spread, effective))
        total, count = self._fresh
        distance = total / count if count >= FEWEST_TOKENS else 0.0
        mean = math.nan
        if tokens_by_age:
            mean = sum(age * tokens for age, tokens in tokens_by_age.items()) / tokens_by_age.total()
        return Ages(rows, self._unknown, self._is_upper_bound, self._unit, distance, mean)
