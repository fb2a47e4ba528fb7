"""What an evaluation found: metrics with intervals for each data source, and how its completions ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from bandpo.errors import InvalidValue
from bandpo_lab.evals.generate import REFUSED
from bandpo_lab.evals.golds import BadGold
from bandpo_lab.evals.metrics import Estimate, Values, estimate, per_problem
from bandpo_lab.evals.run import Sample
from bandpo_lab.tables import Table


@dataclass(frozen=True)
class Scores:
    """One data source's results, one value per problem and metric.

    Attributes:
        problems: Ids, in the order of the values.
        values: Metrics by name (see `bandpo_lab.evals.metrics.per_problem`), each of shape (problems,).
        endings: Shares of all samples: ``no answer``, ``cut`` at the limit, ``timeout`` of grading, ``refused`` by a
            server; and ``tokens``, their mean length.
        kept: Reasons by id of the golds that cannot be used and were kept: right answers may score 0 there.
        dropped: Those of the golds that were left out.
    """

    problems: tuple[str, ...]
    values: Mapping[str, Values]
    endings: Mapping[str, float]
    kept: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)

    def estimates(self) -> dict[str, Estimate]:
        """Each metric with its interval over problems, at 95 %."""
        return {name: estimate(values) for name, values in self.values.items()}


def score(
    samples: Sequence[Sample], kept: Sequence[BadGold] = (), dropped: Sequence[BadGold] = ()
) -> dict[str, Scores]:
    """Scores by data source of what `bandpo_lab.evals.run.evaluate` returns, and which golds cannot be used.

    Raises:
        ValueError: Problems differ in their number of samples.
    """
    ordered = sorted(samples, key=lambda s: (s.data_source, s.problem, s.sample))
    scores = {}
    for source, group in groupby(ordered, key=lambda s: s.data_source):
        rows = [list(row) for _, row in groupby(group, key=lambda s: s.problem)]
        if len({len(row) for row in rows}) > 1:
            raise InvalidValue(f"{source}: problems differ in their number of samples: finish the run first")
        flat = [sample for row in rows for sample in row]
        scores[source] = Scores(
            problems=tuple(row[0].problem for row in rows),
            values=per_problem(
                [[s.score for s in row] for row in rows], [[s.answer for s in row] for row in rows]
            ),
            endings={
                "no answer": float(np.mean([s.answer is None for s in flat])),
                "cut": float(np.mean([s.finish == "length" for s in flat])),
                "timeout": float(np.mean([s.reason == "timeout" for s in flat])),
                "refused": float(np.mean([s.finish.startswith(REFUSED) for s in flat])),
                "tokens": float(np.mean([s.tokens for s in flat if s.tokens is not None] or [0])),
            },
            kept={bad.gold.id: bad.reason for bad in kept if bad.gold.data_source == source},
            dropped={bad.gold.id: bad.reason for bad in dropped if bad.gold.data_source == source},
        )
    return scores


def as_json(scores: Mapping[str, Scores]) -> dict[str, Any]:
    """The report as plain dictionaries."""
    return {
        source: {
            "problems": len(s.problems),
            "metrics": {
                name: {"mean": e.value, "low": e.low, "high": e.high} for name, e in s.estimates().items()
            },
            "samples": dict(s.endings),
            "unreadable golds": {"kept": dict(s.kept), "dropped": dict(s.dropped)},
        }
        for source, s in scores.items()
    }


def as_markdown(scores: Mapping[str, Scores]) -> str:
    """The report as a table in Markdown, intervals at 95 % over problems."""
    rows, notes = [], []
    for source, s in scores.items():
        for name, e in s.estimates().items():
            rows.append(
                [source, str(len(s.problems)), name, f"{e.value:.4f}", f"{e.low:.4f} to {e.high:.4f}"]
            )
        notes.append(
            f"{source}: {s.endings['no answer']:.1%} of samples without an answer, "
            f"{s.endings['cut']:.1%} cut at the token limit, {s.endings['timeout']:.1%} not graded in time, "
            f"{s.endings['refused']:.1%} refused by the server; "
            f"{s.endings['tokens']:.0f} tokens on average."
        )
        if s.kept or s.dropped:
            notes.append(
                f"{source}: {len(s.kept) + len(s.dropped)} golds cannot be used, {len(s.kept)} kept (right answers "
                f"may score 0 there) and {len(s.dropped)} left out: {', '.join([*s.kept, *s.dropped])}."
            )
    table = Table(["data", "problems", "metric", "value", "95 % interval"], rows, prose=True)
    return "\n\n".join([table.markdown(), *notes]) + "\n"
