"""The report of an evaluation: metrics with intervals for each data source, and the endings of completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from bandpo_lab.errors import InvalidValue
from bandpo_lab.evals.generate import REFUSED
from bandpo_lab.evals.golds import BadGold
from bandpo_lab.evals.metrics import Estimate, Values, estimate, per_problem
from bandpo_lab.evals.run import Sample
from bandpo_lab.output.tables import Table


@dataclass(frozen=True)
class Scores:
    """The results of one data source, one value per problem and metric.

    Attributes:
        problems: The ids of the problems, in the order of the values.
        values: The metrics by name (see `bandpo_lab.evals.metrics.per_problem`), each of shape (problems,).
        endings: The shares of all samples with ``no answer``, ``cut`` at the token limit, with a ``timeout`` of
            grading, and ``refused`` by a server; and ``tokens``, the mean length.
        kept_golds: The golds that cannot be used but were kept, as reasons by id. Right answers may score 0 there.
        dropped_golds: The golds that cannot be used and were left out, as reasons by id.
    """

    problems: tuple[str, ...]
    values: Mapping[str, Values]
    endings: Mapping[str, float]
    kept_golds: Mapping[str, str] = field(default_factory=dict)
    dropped_golds: Mapping[str, str] = field(default_factory=dict)

    def estimates(self) -> dict[str, Estimate]:
        """Compute each metric with its interval at 95 % over problems."""
        return {name: estimate(values) for name, values in self.values.items()}


def score(
    samples: Sequence[Sample], kept_golds: Sequence[BadGold] = (), dropped_golds: Sequence[BadGold] = ()
) -> dict[str, Scores]:
    """Compute the scores of an evaluation by data source.

    Args:
        samples: The samples, as `bandpo_lab.evals.run.evaluate` returns them.
        kept_golds: The golds that cannot be used but were kept.
        dropped_golds: The golds that cannot be used and were left out.

    Raises:
        ValueError: Problems differ in their number of samples.
    """
    ordered = sorted(samples, key=lambda sample: (sample.data_source, sample.problem, sample.sample))
    scores = {}
    for source, group in groupby(ordered, key=lambda sample: sample.data_source):
        source_samples = list(group)
        # One row of n samples per problem.
        rows = [list(row) for _, row in groupby(source_samples, key=lambda sample: sample.problem)]
        if len({len(row) for row in rows}) > 1:
            raise InvalidValue(f"{source}: problems differ in their number of samples: finish the run first")
        correct = [[sample.score for sample in row] for row in rows]
        answers = [[sample.answer for sample in row] for row in rows]
        scores[source] = Scores(
            problems=tuple(row[0].problem for row in rows),
            values=per_problem(correct, answers),
            endings=_endings(source_samples),
            kept_golds={bad.gold.id: bad.reason for bad in kept_golds if bad.gold.data_source == source},
            dropped_golds={
                bad.gold.id: bad.reason for bad in dropped_golds if bad.gold.data_source == source
            },
        )
    return scores


def _endings(samples: Sequence[Sample]) -> dict[str, float]:
    """Compute the shares of samples by their ending, and the mean length in tokens."""
    lengths = [sample.tokens for sample in samples if sample.tokens is not None]
    return {
        "no answer": float(np.mean([sample.answer is None for sample in samples])),
        "cut": float(np.mean([sample.finish == "length" for sample in samples])),
        "timeout": float(np.mean([sample.reason == "timeout" for sample in samples])),
        "refused": float(np.mean([sample.finish.startswith(REFUSED) for sample in samples])),
        "tokens": float(np.mean(lengths or [0])),
    }


def as_json(scores: Mapping[str, Scores]) -> dict[str, Any]:
    """Return the report as plain dictionaries."""
    report = {}
    for source, source_scores in scores.items():
        metrics = {
            name: {"mean": e.value, "low": e.low, "high": e.high}
            for name, e in source_scores.estimates().items()
        }
        report[source] = {
            "problems": len(source_scores.problems),
            "metrics": metrics,
            "samples": dict(source_scores.endings),
            "unreadable golds": {
                "kept": dict(source_scores.kept_golds),
                "dropped": dict(source_scores.dropped_golds),
            },
        }
    return report


def as_markdown(scores: Mapping[str, Scores]) -> str:
    """Return the report as a Markdown table, with intervals at 95 % over problems, and notes below it."""
    rows = []
    notes = []
    for source, source_scores in scores.items():
        problems = str(len(source_scores.problems))
        for name, e in source_scores.estimates().items():
            rows.append([source, problems, name, f"{e.value:.4f}", f"{e.low:.4f} to {e.high:.4f}"])
        endings = source_scores.endings
        notes.append(
            f"{source}: {endings['no answer']:.1%} of samples without an answer, "
            f"{endings['cut']:.1%} cut at the token limit, {endings['timeout']:.1%} not graded in time, "
            f"{endings['refused']:.1%} refused by the server; "
            f"{endings['tokens']:.0f} tokens on average."
        )
        kept = source_scores.kept_golds
        dropped = source_scores.dropped_golds
        if kept or dropped:
            notes.append(
                f"{source}: {len(kept) + len(dropped)} golds cannot be used, {len(kept)} kept (right answers "
                f"may score 0 there) and {len(dropped)} left out: {', '.join([*kept, *dropped])}."
            )
    table = Table(["data", "problems", "metric", "value", "95 % interval"], rows, prose=True)
    return "\n\n".join([table.markdown(), *notes]) + "\n"
