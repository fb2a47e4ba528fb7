"""The audit of each step of a run, for the report's figures about clip rules. Needs only the standard library."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rlvet.runs.compact_rows import layouts_of
from rlvet.runs.quantities import OF_AUDIT, Row

MOST_STEPS = 600
"""The largest number of steps of an audit in a page. Longer audits are merged."""

COUNTS = re.compile(r"^(tokens|mass|calls)")
"""Metrics that are sums over steps."""

DENOMINATORS = {
    r"clip_high(/.+)": r"tokens_positive\1",
    r"clip_low(/.+)": r"tokens_negative\1",
    r"clip_high_below_(.+)": r"tokens_positive_below_\1",
    r"blocked_mass_below_(.+)": r"mass_positive_below_\1",
    r"clip_(high|low)": "tokens",
}
"""The denominator of each share, by patterns."""


def audit_table(rows: Sequence[Row], *, most_steps: int = MOST_STEPS) -> dict[str, Any]:
    """Return the audit's metrics as a table with one row per step.

    Args:
        rows: The rows of a run, of which several may be of one step.
        most_steps: The largest number of rows in the table. If there are more steps, consecutive ones are merged, and
            sums over all steps stay the same.

    Returns:
        ``steps``, the first step of each row; ``columns``, the values of each metric, with None where a step does not
        have it; and ``steps_per_row``.
    """
    keys: set[str] = set().union(*layouts_of(rows))
    names = {key for key in keys if key.startswith(OF_AUDIT)}
    by_step: defaultdict[float, dict[str, float]] = defaultdict(dict)
    for row in rows if names else ():
        audit = {name: row[name] for name in names if name in row}
        if audit:
            by_step[row["step"]] |= audit
    steps = sorted(by_step)
    audits: list[Mapping[str, float]] = [by_step[step] for step in steps]

    steps_per_row = max(1, math.ceil(len(steps) / most_steps))
    if steps_per_row > 1:
        starts = range(0, len(audits), steps_per_row)
        audits = [_merge_steps(audits[start : start + steps_per_row]) for start in starts]
        steps = steps[::steps_per_row]
    columns = {name: [audit.get(name) for audit in audits] for name in sorted(names)}
    return {"steps": steps, "columns": columns, "steps_per_row": steps_per_row}


def _merge_steps(audits: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the audit of several steps: the sums of counts, and the means of shares weighted by their denominators."""
    result = {}
    for name in set().union(*audits):
        audits_with_name = [audit for audit in audits if name in audit]
        values = [audit[name] for audit in audits_with_name]
        if COUNTS.match(name.removeprefix(OF_AUDIT)):
            result[name] = sum(values)
            continue
        denominator = _denominator(name, audits_with_name[0])
        weights = [audit.get(denominator, 0.0) for audit in audits_with_name]
        if not sum(weights):
            weights = [1.0] * len(values)
        weighted = sum(value * weight for value, weight in zip(values, weights, strict=True))
        result[name] = weighted / sum(weights)
    return result


def _denominator(name: str, audit: Mapping[str, float]) -> str:
    """Return the metric that is the denominator of a share; empty if it is not known."""
    match = re.match(r"audit/(if/.+?/)?((?:clip|blocked)_.+)$", name)
    if match is None:
        return ""
    rule = match[1] or ""
    share = match[2]
    for pattern, replacement in DENOMINATORS.items():
        if re.fullmatch(pattern, share):
            denominator = re.sub(pattern, replacement, share)
            # A counterfactual rule without a denominator of its own has that of the run's method.
            of_rule = f"{OF_AUDIT}{rule}{denominator}"
            return of_rule if of_rule in audit else f"{OF_AUDIT}{denominator}"
    return ""
