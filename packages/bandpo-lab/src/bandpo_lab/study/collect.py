"""Collect the results of a study from the folders of its runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo_lab.files.validation import read_yaml, validate_as
from rlvet.runs import gate
from rlvet.runs.logs import UnreadableLog, read_log
from rlvet.runs.metric_names import BINS, RARE
from rlvet.runs.quantities import Row

SOLVED = 0.5
"""The training reward at which half of the completions are right."""
WINDOW = 3
"""The number of batches over which that reward is averaged: one batch of few prompts is a noisy estimate."""
RARE_BINS = BINS[: RARE["below_0.1"]]

CURVES: Mapping[str, Callable[[Row], float | None]] = {
    "reward": lambda row: row.get("reward"),
    "entropy": lambda row: row.get("entropy"),
    "clip_high": lambda row: row.get("clip_high"),
    "clip_low": lambda row: row.get("clip_low"),
    "rare_wins": lambda row: _share(
        row, [f"audit/tokens_positive/{name}" for name in RARE_BINS], "audit/tokens"
    ),
    "rare_blocked": lambda row: row.get("audit/blocked_mass_below_0.1"),
}
"""The quantities that are kept for every batch, by name.

They are the mean reward; the entropy (nats per token); the shares of tokens clipped; the share of tokens with p < 0.1
and a positive advantage; and the share of the gradient on these tokens that the rule blocked.
"""


def _share(row: Row, numerators: Sequence[str], denominator: str) -> float | None:
    """Return the sum of some metrics divided by another; None if that is 0 or missing."""
    if not row.get(denominator):
        return None
    return sum(row.get(name, 0.0) for name in numerators) / row[denominator]


@dataclass(frozen=True)
class RunResult:
    """The results of one run, from which the report can be written without the run's folder."""

    experiment: str
    arm: str
    seed: int
    tuning: Mapping[str, Any] | None
    seconds: float
    """The wall-clock time of the process, in seconds."""
    before: Mapping[str, float]
    """The scores before training: mean@k, pass@k, mean reward."""
    after: Mapping[str, float]
    """The scores after training."""
    curves: Mapping[str, Sequence[float | None]]
    """One value per batch for each of `CURVES`."""
    by_bin: Mapping[str, tuple[float, float]]
    """The number of tokens with positive advantage and the share of them clipped, by bin of old probability."""

    def metric(self, name: str) -> float:
        """Return a metric of the run: one of `METRICS`, or a score after training."""
        return METRICS[name](self) if name in METRICS else self.after[name]


def batches_to_half(run: RunResult) -> float:
    """Return the number of batches until the reward, averaged over three batches, reaches one half.

    A run that never reaches it counts as one batch more than it has.
    """
    rewards = [reward or 0.0 for reward in run.curves["reward"]]
    for end in range(WINDOW, len(rewards) + 1):
        if sum(rewards[end - WINDOW : end]) / WINDOW >= SOLVED:
            return end
    return len(rewards) + 1


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean of the values that were logged; 0 if there are none."""
    logged = [value for value in values if value is not None]
    return sum(logged) / len(logged) if logged else 0.0


METRICS: Mapping[str, Callable[[RunResult], float]] = {
    "batches to half": batches_to_half,
    "AUC": lambda run: _mean(run.curves["reward"]),
    "mean entropy": lambda run: _mean(run.curves["entropy"]),
    "entropy midway": lambda run: _mean(run.curves["entropy"][len(run.curves["entropy"]) // 2 :][:1]),
    "entropy at end": lambda run: _mean(run.curves["entropy"][-1:]),
    "clip high": lambda run: _mean(run.curves["clip_high"]),
    "clip low": lambda run: _mean(run.curves["clip_low"]),
    "rare wins": lambda run: _mean(run.curves["rare_wins"]),
    "rare blocked": lambda run: _mean(run.curves["rare_blocked"]),
}
"""The metrics of one run, in addition to the scores of its evaluation (``mean@32``, ``pass@32``)."""


def collect_run(folder: Path) -> dict[str, Any]:
    """Return the curves and scores of a finished run, in a form that JSON can hold.

    The files are read in the process with limits of `rlvet.runs.gate`.

    Args:
        folder: The folder of a run that logged once per batch.
    """
    return gate.answer_of(_collect, folder, types=[UnreadableLog])


def _collect(folder: Path) -> dict[str, Any]:
    rows = [
        row for row in read_log(folder).rows if "reward" in row
    ]  # other rows hold the scores of evaluations
    scores = {}
    evaluation = folder / "evaluation.json"
    if evaluation.exists():
        scores = json.loads(evaluation.read_text(encoding="utf-8"))

    # Sum tokens and clipped tokens over the run, for each bin of old probability.
    by_bin: dict[str, tuple[float, float]] = {}
    for name in BINS:
        tokens = 0.0
        clipped = 0.0
        for row in rows:
            row_tokens = row.get(f"audit/tokens_positive/{name}", 0.0)
            tokens += row_tokens
            clipped += row_tokens * row.get(f"audit/clip_high/{name}", 0.0)
        if tokens:
            by_bin[name] = (tokens, _rounded(clipped / tokens))

    return {
        "before": scores.get("before", {}),
        "after": scores.get("after", {}),
        "curves": {name: [_rounded(value(row)) for row in rows] for name, value in CURVES.items()},
        "by_bin": by_bin,
    }


def _rounded(value: float | None) -> Any:
    """Round a value to six significant digits."""
    return None if value is None else float(f"{value:.6g}")


def versions(folder: Path) -> dict[str, str]:
    """Return the versions of the packages that a run used."""
    file = folder / "config.yaml"
    return validate_as(
        dict[str, str], read_yaml(file.read_bytes(), str(file)).get("versions"), f"{file}: versions"
    )
