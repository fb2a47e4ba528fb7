"""Figures of a record per batch, and limits that several checks of tokens share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlvet._numbers import format_step
from rlvet.checks.findings import Finding
from rlvet.records.first_pass import FirstPass
from rlvet.records.recorded_advantages import Flags, Floats

Z_LIMIT = 4.0
"""Standard errors above which a mean is significant. With six checks of skewed sums, fewer than 1 run in 20 then gets a
false alarm."""

LATE_Z_LIMIT = 5.0
"""Standard errors above which the mean of a part of the tokens is significant, if several parts are tested."""

REMAINDER = 0.2
"""Largest share of a distance that may be left when its cause is removed, as by the right shift. Rounding leaves a few
hundredths."""

NEGLIGIBLE = 0.01
"""Distance of a mean weight from 1, and share of tokens, up to which a difference does not matter."""

MAJORITY = 0.5
"""Share above which a property counts as that of most tokens, or of most batches."""

FEWEST_TOKENS = 20
"""Number of tokens below which two groups of them are not compared."""

FEWEST_FAR_TOKENS = 3
"""Number of tokens that differ by a nat below which no cause is named."""

FEWEST_BATCHES = 3
"""Number of batches from which a trend over batches is judged."""

UNSURE = 0.9
"""Probability below which a token shows whether its logits differ."""

MODERATE_KL = 0.01
"""KL divergence (nats per token) up to which an engine that sometimes routes to other experts is only worth a look."""

LOG_WEIGHT_LIMIT = 20.0
"""Absolute log-weight (nats) at which weights are clamped, to avoid overflow."""


@dataclass(frozen=True, eq=False)
class Trend:
    """A figure per batch, and the batch at which it becomes wrong and stays wrong."""

    values: Floats
    """The figure of each batch, in the order of the batches, (batches,)."""
    start: int
    """Index of the first batch whose figure is wrong; 0 if it always is."""
    tokens: Flags
    """True for the tokens of this batch and the later ones, (tokens,)."""
    step: float | None
    """The step of that batch; None if the figure is always wrong."""
    limit: float = math.inf
    """The largest figure of a correct batch."""

    @property
    def figure(self) -> float:
        """The mean figure of the batches from `start` on."""
        return float(self.values[self.start :].mean())

    @property
    def since(self) -> str:
        """The onset, as the end of a sentence; empty without one."""
        return "" if self.step is None else f"; before step {format_step(self.step)} they agree"

    @property
    def grows_from_the_start(self) -> bool:
        """True if the figure grows from the first batch on, even while it is below the limit."""
        # The correct batches but the first one, in which weights have not drifted apart yet.
        before = self.values[1 : self.start]
        if not len(before):
            return False
        mean = float(before.mean())
        # A figure far below the limit is due to rounding.
        return mean > REMAINDER * self.limit and float(self.values[0]) < REMAINDER * mean

    @property
    def grows(self) -> bool:
        """True if the figure begins near 0 and grows, like the distance of weights that drift apart."""
        # The last correct batch, if any, and all wrong ones.
        values = self.values[max(0, self.start - 1) :]
        if len(values) < 2:
            return False
        begins_low = float(values[0]) < min(REMAINDER * float(values.max()), self.limit)
        # A fault that begins within the run has its full size in the first wrong batch, unlike weights that drift
        # apart. If that is the second batch of the run, both look alike: a large first update may move the weights as
        # far.
        is_sudden = self.start > 1 and float(values[1]) > MAJORITY * float(np.median(values[1:]))
        return begins_low and not (is_sudden and len(values) > FEWEST_BATCHES)


def find_trend(first_pass: FirstPass, values: Floats, tokens: Flags, limit: float) -> Trend:
    """Compute a figure per batch, and find the batch after which it stays above a limit.

    Args:
        first_pass: The first pass.
        values: The quantity whose mean is the figure, (tokens,).
        tokens: True for tokens to average, (tokens,).
        limit: The largest figure of a correct batch.
    """
    numbers, batch_index = np.unique(first_pass.batch, return_inverse=True)
    token_batches = batch_index[first_pass.sequence]
    counts = np.bincount(token_batches[tokens], minlength=len(numbers))
    sums = np.bincount(token_batches[tokens], weights=values[tokens], minlength=len(numbers))
    recorded = np.flatnonzero(counts)
    means = sums[recorded] / counts[recorded]
    numbers = numbers[recorded]

    # Split the batches so that the fewest are on the wrong side: correct ones before the start, wrong ones after it. Of
    # several such splits, take the earliest.
    wrong = means > limit
    correct_before = np.concatenate([[0], (~wrong).cumsum()])
    wrong_after = wrong.sum() - np.concatenate([[0], wrong.cumsum()])
    start = int((correct_before + wrong_after)[:-1].argmax()) if len(means) else 0
    # There is no onset if the figure is also high, though lower, before it.
    if not wrong[start:].any() or (start and means[:start].mean() > REMAINDER * means[start:].mean()):
        start = 0
    from_start = tokens & np.isin(first_pass.batch, numbers[start:])[first_pass.sequence]
    # If weights drift apart from the start, the second batch is the first wrong one. This is no onset within the run.
    step = first_pass.first_step.get(int(numbers[start])) if start > 1 else None
    return Trend(means, start, from_start, step, limit)


def untested(finding: Finding, advice: str = "") -> Finding:
    """Return a finding as that of a check that could not run, for an effect of another fault.

    Args:
        finding: The effect.
        advice: The change that would let the check run.
    """
    return finding._replace(code="ok", ok=None, cause="", or_else=(), severity="", onset=None, advice=advice)


def mean_or_zero(values: Floats | Flags) -> float:
    """Compute the mean of values; 0 if there are none."""
    return float(values.mean()) if len(values) else 0.0
