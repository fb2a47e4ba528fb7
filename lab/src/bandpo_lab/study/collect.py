"""From run folders to the study's data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bandpo.runs.logs import read_log
from bandpo.runs.metric_names import BINS, RARE
from bandpo.runs.quantities import Row

SOLVED = 0.5
"""Training reward from which half of the prompts' completions are right."""
WINDOW = 3
"""Batches over which that reward is averaged: one batch of few prompts is a noisy estimate."""
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
"""What is kept of every batch: mean reward; entropy (nats per token); shares of tokens clipped; share of tokens that
had p < 0.1 and a positive advantage; share of the gradient on them that the rule blocked; share of the radius spent."""


def _share(row: Row, parts: Sequence[str], whole: str) -> float | None:
    return sum(row.get(part, 0.0) for part in parts) / row[whole] if row.get(whole) else None


@dataclass(frozen=True)
class RunResult:
    """What is kept of one run, enough to make the whole report again."""

    experiment: str
    arm: str
    seed: int
    tuning: Mapping[str, Any] | None
    seconds: float
    """Wall-clock, start of the process to its end."""
    before: Mapping[str, float]
    """Scores before training: mean@k, pass@k, mean reward."""
    after: Mapping[str, float]
    curves: Mapping[str, Sequence[float | None]]
    """For each of `CURVES` one value per batch."""
    by_bin: Mapping[str, tuple[float, float]]
    """For each bin of old probability: positive-advantage tokens over the run, and the share of them clipped."""

    def metric(self, name: str) -> float:
        """One figure for the run; see `METRICS`."""
        return METRICS[name](self) if name in METRICS else self.after[name]


def batches_to_half(run: RunResult) -> float:
    """Batches until the reward, averaged over the last three, reached a half; one more than all if it never did."""
    rewards = [reward or 0.0 for reward in run.curves["reward"]]
    for last in range(WINDOW, len(rewards) + 1):
        if sum(rewards[last - WINDOW : last]) / WINDOW >= SOLVED:
            return last
    return len(rewards) + 1


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


METRICS: Mapping[str, Callable[[RunResult], float]] = {
    "batches to half": batches_to_half,
    "AUC": lambda run: _mean(run.curves["reward"]),
    "mean entropy": lambda run: _mean(run.curves["entropy"]),
    "entropy midway": lambda run: _mean(run.curves["entropy"][len(run.curves["entropy"]) // 2 :][:1]),
    "entropy at end": lambda run: _mean(run.curves["entropy"][-1:]),
    **{
        name.replace("_", " "): lambda run, name=name: _mean(run.curves[name])
        for name in ("clip_high", "clip_low", "rare_wins", "rare_blocked")
    },
}
"""Figures of one run beside the scores of its evaluation (``mean@32``, ``pass@32``)."""


def collect_run(folder: Path) -> dict[str, Any]:
    """The log and scores of one finished run, which logged once per batch, as JSON can hold them."""
    rows = [row for row in read_log(folder).rows if "reward" in row]  # other rows hold scores of evaluations
    scores = (
        json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        if (folder / "evaluation.json").exists()
        else {}
    )
    by_bin: dict[str, tuple[float, float]] = {}
    for name in BINS:
        positive = sum(row.get(f"audit/tokens_positive/{name}", 0.0) for row in rows)
        clipped = sum(
            row.get(f"audit/tokens_positive/{name}", 0.0) * row.get(f"audit/clip_high/{name}", 0.0)
            for row in rows
        )
        if positive:
            by_bin[name] = (positive, _rounded(clipped / positive))
    return {
        "before": scores.get("before", {}),
        "after": scores.get("after", {}),
        "curves": {name: [_rounded(value(row)) for row in rows] for name, value in CURVES.items()},
        "by_bin": by_bin,
    }


def _rounded(value: float | None) -> Any:
    return None if value is None else float(f"{value:.6g}")


def versions(folder: Path) -> dict[str, str]:
    """What one run was made with."""
    return yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["versions"]
