"""Measure how often `bandpo_lab.compare` calls two equal methods different, under each optimizer.

    PYTHONPATH=research python -m studies.equal_methods research/results/equal_methods.json

One method is simulated with 2,560 seeds. In each of 200 sets, 64 of them are taken as one method and 64 others as
another, and compared as `compare` does with its default settings. The methods are equal, so every gain or loss is
false. At most 5 % of the sets may have one under an optimizer.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from bandpo import FixedClip
from bandpo_lab.comparison import WORLD, Case, Comparison
from bandpo_lab.study.bandits import Outcome, simulate
from bandpo_lab.study.optimizers import OPTIMIZERS
from bandpo_lab.study.provenance import commit, machine, now

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

SETS = 200
SEEDS = 64
"""The seeds of a method in `compare`, by default."""
POOL = 2560
LAGS = (0, 4)
"""The ages of data in `compare`, by default."""
METHODS = ("one", "another")


def of_seeds(outcome: Outcome, seeds: Int[Tensor, " some"]) -> Outcome:
    """Return the outcome of some of the seeds."""
    return Outcome(
        outcome.rewards[:, seeds],
        outcome.right[:, seeds],
        outcome.entropy[:, seeds],
        outcome.blocked[:, seeds],
        outcome.luck[:, seeds],
    )


def false_differences(pools: dict[tuple[str, int], Outcome], sets: int, seeds: int) -> Counter[str]:
    """Count the sets with a false gain or loss under each optimizer.

    Args:
        pools: The outcomes of all seeds, by optimizer and lag.
        sets: The number of sets.
        seeds: The number of seeds of a method.
    """
    rng = np.random.default_rng(0)
    counts: Counter[str] = Counter()
    rates = {name: OPTIMIZERS[name].rates for name in dict.fromkeys(name for name, _ in pools)}
    pool_size = next(iter(pools.values())).rewards.shape[1]
    for _ in range(sets):
        outcomes = {}
        for (optimizer, lag), pool in pools.items():
            chosen = torch.from_numpy(rng.permutation(pool_size)[: 2 * seeds])
            for method, of_method in zip(METHODS, chosen.split(seeds), strict=True):
                outcomes[Case(lag, optimizer, method)] = of_seeds(pool, of_method)
        table = Comparison(METHODS[1], rates, outcomes).table
        differing = {
            row["optimizer"]
            for row in table
            if row["method"] == METHODS[0] and row["verdict"] in ("gains", "loses")
        }
        counts.update(differing)
    return counts


def main(output: Path) -> None:
    """Simulate, count, and write the counts."""
    torch.set_num_threads(1)
    pools = {}
    for optimizer, lag in product(OPTIMIZERS, LAGS):
        pools[optimizer, lag] = simulate(
            WORLD,
            FixedClip(0.2),
            OPTIMIZERS[optimizer].rates,
            seeds=POOL,
            epochs=1,
            lag=lag,
            optimizer=optimizer,
        )
        print(f"simulated {optimizer} at lag {lag}", flush=True)
    counts = false_differences(pools, SETS, SEEDS)
    result = {
        "sets": SETS,
        "seeds": SEEDS,
        "pool": POOL,
        "differing": {name: counts[name] for name in OPTIMIZERS},
        "commit": commit(),
        "time": now(),
        "machine": machine(),
    }
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(result["differing"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
