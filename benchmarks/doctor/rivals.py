"""Diagnose the runs of the benchmark with other packages, in an environment of their own.

    PYTHONPATH=benchmarks/doctor python benchmarks/doctor/run.py --seeds 71 --keep build/records
    pip install rldoctor==0.2.0 rlwatch==0.5.1 rlprobe==0.1.0 pyarrow scipy
    PYTHONPATH=src python benchmarks/doctor/rivals.py build/records

The packages read logs, not tokens. Each record is converted to the log that a trainer would have written, with a row
for each loss and the names that each package knows. Thresholds are their defaults. Prints a row for each run.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import rlwatch
from rlprobe.recorder import Recorder

from rlvet.runs.record import read_record


def log_of(record: Path) -> list[dict[str, float]]:
    """Return the metrics that a trainer would log for each batch of a record. KL is missing: there is no reference."""
    rows = []
    for step, batch in enumerate(read_record(record)):
        mask = batch.mask
        spreads = batch.reward.reshape(-1, 8).std(1, ddof=1)
        ratio = np.exp(batch.log_ratio[mask])
        row = {
            "step": step,
            "reward": float(batch.reward.mean()),
            "reward_std": float(spreads.mean()),
            "frac_reward_zero_std": float((spreads == 0).mean()),
            "entropy": float(batch.entropy[mask].mean()),
            "clip_ratio/region_mean": float(((ratio < 0.8) | (ratio > 1.28)).mean()),
            "completions/mean_length": float(mask.sum(1).mean()),
            "completions/clipped_ratio": float(batch.truncated.mean()),
            "advantages_std": float(batch.advantages[mask].std(ddof=1)),
        }
        rows.append(row)
    return rows


def rldoctor_findings(rows: list[dict[str, float]], folder: Path) -> list[str]:
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [Path(sys.executable).parent / "rldoctor", "diagnose", log, "--format", "json"]
    result = subprocess.run(command, capture_output=True, check=False, text=True)
    report = json.loads(result.stdout)
    return sorted({f["detector"] for f in report["findings"] if f["severity"] in ("WARNING", "CRITICAL")})


def rlwatch_findings(rows: list[dict[str, float]], folder: Path) -> list[str]:
    monitor = rlwatch.attach(framework="manual")
    alerts = []
    for row in rows:
        alerts += monitor.log_step(
            row["step"],
            entropy=row["entropy"],
            reward_mean=row["reward"],
            reward_std=row["reward_std"],
            advantage_std=row["advantages_std"],
            clip_fraction=row["clip_ratio/region_mean"],
        )
    return sorted({alert.detector for alert in alerts})


def rlprobe_findings(rows: list[dict[str, float]], folder: Path) -> list[str]:
    with contextlib.closing(Recorder(folder / "run", algorithm="grpo", install_handlers=False)) as recorder:
        for row in rows:
            recorder.log_step(
                row["step"],
                reward_mean=row["reward"],
                reward_std=row["reward_std"],
                entropy_mean=row["entropy"],
                clip_fraction=row["clip_ratio/region_mean"],
                zero_variance_group_frac=row["frac_reward_zero_std"],
                adv_std=row["advantages_std"],
            )
    command = [Path(sys.executable).parent / "rlprobe", "doctor", folder / "run", "--json"]
    result = subprocess.run(command, capture_output=True, check=False, text=True)
    return sorted({finding["signature_id"] for finding in json.loads(result.stdout)})


PACKAGES = (rldoctor_findings, rlwatch_findings, rlprobe_findings)


def main() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for record in sorted(Path(sys.argv[1]).iterdir()):
        rows = log_of(record)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            cells = [", ".join(diagnose(rows, Path(folder))) or "–" for diagnose in PACKAGES]
        print(f"| {record.name.partition(' ')[2]} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
