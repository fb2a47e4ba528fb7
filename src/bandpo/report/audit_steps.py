"""The audit of each step of a run, as the page's figures on rules take it, with the standard library alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from bandpo.doctor.course import rows_of_each_layout
from bandpo.runs.quantities import Row

MOST_STEPS = 600
"""Steps of an audit that a page holds; those of a longer one are put together."""

AUDIT = "audit/"

COUNTS = re.compile(r"^(tokens|mass|calls)")
"""Names of the metrics that add up over steps."""

OVER = {
    r"clip_high(/.+)": r"tokens_positive\1",
    r"clip_low(/.+)": r"tokens_negative\1",
    r"clip_high_below_(.+)": r"tokens_positive_below_\1",
    r"blocked_mass_below_(.+)": r"mass_positive_below_\1",
    r"clip_(high|low)": "tokens",
}
"""For each share, what it is of."""


def audit_table(rows: Sequence[Row], *, most_steps: int = MOST_STEPS) -> dict[str, Any]:
    """Return the steps of an audit, and each of its metrics at each step; None where a step lacks it.

    Args:
        rows: The rows of a run, of which several may be of one step.
        most_steps: Steps from which on neighbours are put together, so that sums over steps stay the same.
    """
    names = {name for row in rows_of_each_layout(rows) for name in row if name.startswith(AUDIT)}
    by_step: defaultdict[float, dict[str, float]] = defaultdict(dict)
    for row in rows if names else ():
        audited = {name: row[name] for name in names if name in row}
        if audited:
            by_step[row["step"]] |= audited
    steps = sorted(by_step)
    audits: list[Mapping[str, float]] = [by_step[step] for step in steps]
    together = -(-len(steps) // most_steps)
    if together > 1:
        audits = [_together(audits[k : k + together]) for k in range(0, len(audits), together)]
        steps = steps[::together]
    columns = {name: [audit.get(name) for audit in audits] for name in sorted(names)}
    return {"steps": steps, "columns": columns, "together": max(1, together)}


def _together(audits: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the audit of several steps: counts are added up, and shares are of what is added up."""
    result = {}
    for name in {name for audit in audits for name in audit}:
        having = [audit for audit in audits if name in audit]
        values = [audit[name] for audit in having]
        if COUNTS.match(name.removeprefix(AUDIT)):
            result[name] = sum(values)
            continue
        over = _over(name, having[0])
        weights = [audit.get(over, 0.0) for audit in having]
        if not sum(weights):
            weights = [1.0] * len(having)
        weighted = sum(value * weight for value, weight in zip(values, weights, strict=True))
        result[name] = weighted / sum(weights)
    return result


def _over(name: str, audit: Mapping[str, float]) -> str:
    """Return the metric that a share is of; an empty name if that is not known."""
    match = re.match(r"audit/(if/.+?/)?((?:clip|blocked)_.+)$", name)
    if match is None:
        return ""
    rule, share = match[1] or "", match[2]
    for pattern, replacement in OVER.items():
        if re.fullmatch(pattern, share):
            over = re.sub(pattern, replacement, share)
            return AUDIT + rule + over if AUDIT + rule + over in audit else AUDIT + over
    return ""
