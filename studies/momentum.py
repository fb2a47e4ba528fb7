"""Does a network's token stop where a clip blocks it, with Adam's momentum and without?

    python -m studies.momentum FOLDER    # eight runs of about a CPU minute; again, it resumes

Each run is one of the network study's world “plenty” under clip 0.2, recorded, with Adam's β1 as it is there or at 0.
FOLDER is one of that study, for its prepared models; `results/momentum.json` takes what was found.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bandpo.audit.after_block import SIDES
from bandpo.audit.replay import replay_record
from bandpo_lab.study.collect import collect_run
from bandpo_lab.study.execute import options_in
from bandpo_lab.study.jobs import Job, on_cores
from bandpo_lab.study.plan import Run, parse_study

RESULTS = Path(__file__).parents[1] / "results" / "momentum.json"
EXPERIMENT = "plenty, learning_rate 0.00014"
MOMENTA = (0.9, 0.0)


def planned() -> list[tuple[float, Run]]:
    """β1 and the run, of every run."""
    study = parse_study((Path(__file__).parent / "network.yaml").read_text())
    runs = [r for r in study.reported({}) if r.experiment == EXPERIMENT and r.arm == study.baseline]
    return [(beta1, run) for beta1 in MOMENTA for run in runs]


def make(folder: Path) -> list[dict[str, Any]]:
    """Train what has not been trained, and measure."""
    places = {}
    for beta1, run in planned():
        place = folder / "momentum" / f"beta1-{beta1}-seed-{run.seed}"
        options = options_in(folder, run)
        options |= {"adam_beta1": beta1, "record": str(place / "tokens"), "output_dir": str(place)}
        place.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{place}.yaml").write_text(yaml.safe_dump(options))
        places[place] = {"beta1": beta1, "seed": run.seed}
    jobs = [
        Job("bandpo", ["train", "--config", f"{place}.yaml", "--resume"], Path(f"{place}.log"))
        for place in places
        if not (place / "model").exists()
    ]
    for number, outcome in on_cores(jobs, workers=os.cpu_count() or 1):
        print(f"{jobs[number].log}: {outcome.seconds:.0f} s", flush=True)
        if outcome.code:
            sys.exit(f"error: a run failed, see {jobs[number].log}")
    return [
        said
        | {"reward": float(np.mean(collect_run(place)["curves"]["reward"]))}
        | {side: m._asdict() for side, m in replay_record(place / "tokens", {}).moves.items()}
        for place, said in places.items()
    ]


def rows(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """For each β1 and side: tokens, and means over seeds with their least and greatest."""

    def over(values: Sequence[float]) -> str:
        return f"{np.mean(values):+.2f} ({min(values):+.2f} to {max(values):+.2f})"

    return [
        [
            f"{beta1:g}",
            side,
            f"{sum(run[side]['tokens'] for run in these):,}",
            *(over([run[side][name] for run in these]) for name in ("before", "after")),
            f"{np.mean([run[side]['onward'] for run in these]):.0%}",
        ]
        for beta1 in MOMENTA
        for side in SIDES
        if (these := [run for run in found if run["beta1"] == beta1])
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the runs, keep what was found, and print it."""
    [folder] = map(Path, sys.argv[1:] if arguments is None else arguments)
    found = make(folder.absolute())
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    for row in rows(found):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
