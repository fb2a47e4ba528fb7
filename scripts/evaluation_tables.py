"""The tables of docs/evaluation.md that measure the evaluation itself.

    python scripts/evaluation_tables.py coverage
    python scripts/evaluation_tables.py leaks TRAIN EVAL [EVAL ...]
    python scripts/evaluation_tables.py hacks EVAL [EVAL ...]

TRAIN and EVAL are names or files, as `bandpo data prepare` takes them.
"""

from __future__ import annotations

import argparse
from itertools import product

import numpy as np

from bandpo_lab.data.sources import load
from bandpo_lab.evals.compare import compare_scores
from bandpo_lab.evals.metrics import estimate, pass_at_k, per_problem, sampling_variance
from bandpo_lab.evals.report import Scores
from bandpo_lab.tables import Table

PROBLEMS = 30
ABILITIES = {
    "even": (1, 1),
    "hard": (0.3, 2),
    "very hard": (0.1, 1.5),
    "easy": (4, 0.6),
    "two kinds": (0.15, 0.15),
}
"""Beta distributions of the chance with which a model solves a problem."""


def coverage() -> str:
    """How often intervals hold the truth, and how often two equal models seem to differ."""
    rng = np.random.default_rng(0)
    rows = []
    for (name, ability), (n, k) in product(
        ABILITIES.items(), ((1, 1), (8, 1), (8, 8), (32, 1), (32, 4), (32, 32))
    ):
        chances = rng.beta(*ability, 10**6)
        others = rng.beta(20 * chances + 0.01, 20 * (1 - chances) + 0.01)
        best, best_of_others = (1 - (1 - p) ** k for p in (chances, others))
        truth, apart = best.mean(), (best - best_of_others).mean()
        held = []
        for _ in range(2000):
            drawn = rng.integers(len(chances), size=PROBLEMS)
            one, two = (pass_at_k(rng.random((PROBLEMS, n)) < p[drawn, None], k) for p in (chances, others))
            mean, difference = estimate(one), estimate(one, minus=two, smooth=k == 1)
            held.append([mean.low <= truth <= mean.high, difference.low <= apart <= difference.high])
        metric = f"mean@{n}" if k == 1 else f"pass@{k} of {n}"
        rows.append([name, metric, f"{truth:.3f}", *(f"{share:.1%}" for share in np.mean(held, axis=0))])
    table = Table(["problems", "metric", "truth", "mean", "difference"], rows)
    return f"{table.markdown()}\n\n{equal_models(rng)}"


def equal_models(rng: np.random.Generator) -> str:
    """How often something is claimed of two models that solve each problem alike."""
    rows = []
    ids = tuple(map(str, range(PROBLEMS)))
    for name, ability in ABILITIES.items():
        claims = []
        for _ in range(1000):
            p = rng.beta(*ability, (PROBLEMS, 1))
            sides = []
            for _ in range(2):
                correct = rng.random((PROBLEMS, 8)) < p
                sides.append([{"set": Scores(ids, per_problem(correct), {}, sampling_variance(correct))}])
            found = compare_scores(*sides)
            alone = any(d.interval.low > 0 or d.interval.high < 0 for d in found)
            claims.append(
                [found[0].p < 0.05, any(d.p < 0.05 for d in found[1:]), any(d.p < 0.05 for d in found), alone]
            )
        rows.append([name, *(f"{share:.1%}" for share in np.mean(claims, axis=0))])
    header = ["two equal models", "primary metric", "a secondary one", "any of them", "any, uncorrected"]
    return Table(header, rows).markdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=("coverage", "leaks", "hacks"))
    parser.add_argument("sets", nargs="*")
    options = parser.parse_args()
    sets = [load(spec).problems for spec in options.sets]
    if options.table == "coverage":
        print(coverage())


if __name__ == "__main__":
    main()
