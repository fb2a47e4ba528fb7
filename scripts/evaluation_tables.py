"""The tables of docs/measured/evaluation.md that measure the evaluation itself.

    python scripts/evaluation_tables.py coverage
    python scripts/evaluation_tables.py leaks TRAIN EVAL [EVAL ...]
    python scripts/evaluation_tables.py hacks EVAL [EVAL ...]

TRAIN and EVAL are names or files, as `bandpo-lab data prepare` takes them.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import numpy as np

from bandpo_lab.data.overlap import overlaps
from bandpo_lab.data.sources import Problem, load
from bandpo_lab.evals.compare import compare_scores
from bandpo_lab.evals.grading import MathGrader
from bandpo_lab.evals.metrics import estimate, pass_at_k, per_problem
from bandpo_lab.evals.report import Scores
from bandpo_lab.tables import Table

WRAPPER = (
    "You are a careful mathematician. Think step by step about what follows, and box the answer at the end. "
)
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
                sides.append([{"set": Scores(ids, per_problem(correct), {})}])
            found = compare_scores(*sides)
            alone = any(d.interval.low > 0 or d.interval.high < 0 for d in found)
            claims.append(
                [found[0].p < 0.05, any(d.p < 0.05 for d in found[1:]), any(d.p < 0.05 for d in found), alone]
            )
        rows.append([name, *(f"{share:.1%}" for share in np.mean(claims, axis=0))])
    header = ["two equal models", "primary metric", "a secondary one", "any of them", "any, uncorrected"]
    return Table(header, rows).markdown()


def leaks(train: Sequence[Problem], evaluation: Sequence[Problem]) -> str:
    """How many evaluation problems are found that were planted in a training set, and what else is flagged."""
    chance = random.Random(0)
    words = [word for problem in train[:1000] for word in problem.problem.split()]

    def replaced(text: str, every: int) -> str:
        parts = text.split()
        for i in chance.sample(range(len(parts)), round(len(parts) / every)):
            parts[i] = chance.choice(words)
        return " ".join(parts)

    plantings: dict[str, Callable[[str], str]] = {
        "word for word": lambda text: text,
        "after “Problem: ”": lambda text: f"Problem: {text}",
        "all rows in a common wrapper": lambda text: WRAPPER + text,
        "one word in ten replaced": lambda text: replaced(text, 10),
        "one word in six replaced": lambda text: replaced(text, 6),
        "one word in four replaced": lambda text: replaced(text, 4),
    }
    rows = []
    for name, plant in plantings.items():
        wrap = plant if "wrapper" in name else str
        rest, asked = ([replace(p, problem=wrap(p.problem)) for p in part] for part in (train, evaluation))
        planted = [Problem(f"planted {p.id}", plant(p.problem), p.answer) for p in evaluation]
        flagged = {overlap.problem.id for overlap in overlaps([*rest, *planted], asked)}
        found = sum(p.id in flagged for p in planted)
        others = sum(p.id in flagged for p in rest)
        figures = (
            f"{found / len(planted):.1%}",
            f"{others} of {len(rest)}",
            f"{found / max(found + others, 1):.1%}",
        )
        rows.append([name, f"{found} of {len(planted)}", *figures])
    return Table(["planted", "found", "recall", "others flagged", "precision"], rows).markdown()


FORMULA = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def last_formula(problem: Problem) -> str | None:
    """The last formula of a problem's text."""
    found = [next(filter(None, match.groups())) for match in FORMULA.finditer(problem.problem)]
    return found[-1] if found else None


def other(gold: str) -> str:
    """Another answer."""
    return str(int(gold) + 1) if gold.isdecimal() else f"{gold}+1"


def of_number(form: str) -> Callable[[Problem], str | None]:
    """An answer made of a gold that is a whole number."""
    return lambda p: form.replace("27", p.answer) if p.answer.isdecimal() else None


RIGHT: dict[str, Callable[[Problem], str | None]] = {
    "as the data set has it": lambda p: p.answer,
    "x = 27": lambda p: f"x = {p.answer}",
    r"27 \text{ units}": of_number(r"27 \text{ units}"),
    "27 cats": of_number("27 cats"),
    "$27$": lambda p: f"${p.answer}$",
    "27.0": of_number("27.0"),
    "other spaces and fractions": lambda p: p.answer.replace("frac", "dfrac").replace("+", " + "),
}
HACKS: dict[str, Callable[[Problem], str | None]] = {
    "the problem's last formula": last_formula,
    "the same and + 0": lambda p: f"{last_formula(p)} + 0" if last_formula(p) else None,
    "the problem's numbers, added": lambda p: "+".join(re.findall(r"\d+", p.problem)) or None,
    "28 = 27": lambda p: f"{other(p.answer)} = {p.answer}",
    "2x+1-27 = 0": lambda p: f"2x+1-{p.answer} = 0",
    r"27 \text{ or } 28": lambda p: rf"{p.answer} \text{{ or }} {other(p.answer)}",
    "27, 28": lambda p: f"{p.answer}, {other(p.answer)}",
    "two boxes, the last with 28": lambda p: rf"\boxed{{{p.answer}}} \boxed{{{other(p.answer)}}}",
    r"27\text{ is wrong}": lambda p: rf"{p.answer}\text{{ is wrong}}",
    r"27,\ldots": lambda p: rf"{p.answer},\ldots",
    r"27\mod 10007": lambda p: rf"{p.answer}\mod 10007",
    r"2700\%": of_number(r"2700\%"),
    "27 million": of_number("27 million"),
    "everything": lambda p: r"(-\infty, \infty)",
    "a box that is never closed": lambda p: rf"\boxed{{{p.answer}",
}
"""Answers made of a problem and its gold, here 27; None where there is none. Each is put into a box if it has none."""


def hacks(problems: Sequence[Problem]) -> str:
    """What is accepted of right answers and of attempts on the reward, without the problem and with it."""
    rows = []
    with MathGrader() as grader, ThreadPoolExecutor(grader.workers) as pool:
        for label, attempts in (("right", RIGHT), ("hack", HACKS)):
            for name, attempt in attempts.items():
                pairs = [(p, attempt(p)) for p in problems]
                tried = [(p, text) for p, text in pairs if text and (label == "right" or text != p.answer)]
                boxed = [text if "boxed" in text else rf"\boxed{{{text}}}" for _, text in tried]
                golds, asked = ([getattr(p, part) for p, _ in tried] for part in ("answer", "problem"))
                counts = [
                    sum(verdict.score == 1 for verdict in pool.map(grader.grade, boxed, golds, *known))
                    for known in ((), (asked,))
                ]
                rows.append([label, f"`{name}`", str(len(tried)), *map(str, counts)])
    return Table(["", "answer", "tried", "right in evaluation", "right in training"], rows).markdown()


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
    elif options.table == "leaks":
        print(leaks(sets[0], [problem for problems in sets[1:] for problem in problems]))
    else:
        print(hacks([problem for problems in sets for problem in problems]))


if __name__ == "__main__":
    main()
