"""Print the tables of research/reports/evaluation.md that measure the evaluation itself.

    python scripts/evaluation_tables.py coverage
    python scripts/evaluation_tables.py leaks TRAIN EVAL [EVAL ...]
    python scripts/evaluation_tables.py hacks EVAL [EVAL ...]
    python scripts/evaluation_tables.py pairs

TRAIN and EVAL are names or files as for `bandpo-lab data prepare`.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import math_verify
import numpy as np

from bandpo_lab.data.overlap import overlaps
from bandpo_lab.data.sources import Problem, load
from bandpo_lab.evals.compare import compare_scores
from bandpo_lab.evals.grading import MathGrader
from bandpo_lab.evals.metrics import estimate, pass_at_k, per_problem
from bandpo_lab.evals.report import Scores
from bandpo_lab.output.tables import Table

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
"""Beta distributions of the probability that a model solves a problem."""


def coverage() -> str:
    """Measure how often intervals contain the true value, and how often two equal models seem to differ.

    The model's chance on each problem is drawn from a beta distribution, the second model's from one around it.
    """
    rng = np.random.default_rng(0)
    rows = []
    sample_counts = ((1, 1), (8, 1), (8, 8), (32, 1), (32, 4), (32, 32))
    for (name, ability), (n, k) in product(ABILITIES.items(), sample_counts):
        chances = rng.beta(*ability, 10**6)
        second_chances = rng.beta(20 * chances + 0.01, 20 * (1 - chances) + 0.01)
        pass_rates = 1 - (1 - chances) ** k
        second_pass_rates = 1 - (1 - second_chances) ** k
        true_mean = pass_rates.mean()
        true_difference = (pass_rates - second_pass_rates).mean()
        covered = []
        for _ in range(2000):
            drawn = rng.integers(len(chances), size=PROBLEMS)
            scores = pass_at_k(rng.random((PROBLEMS, n)) < chances[drawn, None], k)
            second_scores = pass_at_k(rng.random((PROBLEMS, n)) < second_chances[drawn, None], k)
            mean = estimate(scores)
            difference = estimate(scores, minus=second_scores, smooth=k == 1)
            covered.append(
                [mean.low <= true_mean <= mean.high, difference.low <= true_difference <= difference.high]
            )
        metric = f"mean@{n}" if k == 1 else f"pass@{k} of {n}"
        rows.append(
            [name, metric, f"{true_mean:.3f}", *(f"{share:.1%}" for share in np.mean(covered, axis=0))]
        )
    table = Table(["problems", "metric", "truth", "mean", "difference"], rows)
    return f"{table.markdown()}\n\n{equal_models(rng)}"


def equal_models(rng: np.random.Generator) -> str:
    """Measure how often a difference is reported between two models with the same chances on each problem."""
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
            primary, *secondary = compare_scores(*sides)
            comparisons = [primary, *secondary]
            claims.append(
                [
                    primary.p < 0.05,
                    any(d.p < 0.05 for d in secondary),
                    any(d.p < 0.05 for d in comparisons),
                    any(d.interval.low > 0 or d.interval.high < 0 for d in comparisons),
                ]
            )
        rows.append([name, *(f"{share:.1%}" for share in np.mean(claims, axis=0))])
    header = ["two equal models", "primary metric", "a secondary one", "any of them", "any, uncorrected"]
    return Table(header, rows).markdown()


def leaks(train: Sequence[Problem], evaluation: Sequence[Problem]) -> str:
    """Measure the detection of evaluation problems that are planted in a training set.

    Args:
        train: The training problems, without leaks.
        evaluation: The evaluation problems, which are planted with different changes.
    """
    chance = random.Random(0)
    words = [word for problem in train[:1000] for word in problem.problem.split()]

    def replace_words(text: str, every: int) -> str:
        changed = text.split()
        for i in chance.sample(range(len(changed)), round(len(changed) / every)):
            changed[i] = chance.choice(words)
        return " ".join(changed)

    plantings: dict[str, Callable[[str], str]] = {
        "word for word": lambda text: text,
        "after “Problem: ”": lambda text: f"Problem: {text}",
        "all rows in a common wrapper": lambda text: WRAPPER + text,
        "one word in ten replaced": lambda text: replace_words(text, 10),
        "one word in six replaced": lambda text: replace_words(text, 6),
        "one word in four replaced": lambda text: replace_words(text, 4),
    }
    rows = []
    for name, plant in plantings.items():
        wrap = plant if "wrapper" in name else str
        clean = [replace(p, problem=wrap(p.problem)) for p in train]
        asked = [replace(p, problem=wrap(p.problem)) for p in evaluation]
        planted = [Problem(f"planted {p.id}", plant(p.problem), p.answer) for p in evaluation]
        flagged = {overlap.problem.id for overlap in overlaps([*clean, *planted], asked)}
        hits = sum(p.id in flagged for p in planted)
        false_alarms = sum(p.id in flagged for p in clean)
        figures = (
            f"{hits / len(planted):.1%}",
            f"{false_alarms} of {len(clean)}",
            f"{hits / max(hits + false_alarms, 1):.1%}",
        )
        rows.append([name, f"{hits} of {len(planted)}", *figures])
    return Table(["planted", "found", "recall", "others flagged", "precision"], rows).markdown()


FORMULA = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def last_formula(problem: Problem) -> str | None:
    """Return the last formula of a problem's text, or None."""
    formulas = [next(filter(None, match.groups())) for match in FORMULA.finditer(problem.problem)]
    return formulas[-1] if formulas else None


def wrong_answer(gold: str) -> str:
    """Return an answer that differs from the reference answer."""
    return str(int(gold) + 1) if gold.isdecimal() else f"{gold}+1"


def from_integer(form: str) -> Callable[[Problem], str | None]:
    """Return a function that puts an integer answer in place of 27 in a text; None if the answer is no integer."""
    return lambda p: form.replace("27", p.answer) if p.answer.isdecimal() else None


RIGHT: dict[str, Callable[[Problem], str | None]] = {
    "as the data set has it": lambda p: p.answer,
    "x = 27": lambda p: f"x = {p.answer}",
    r"27 \text{ units}": from_integer(r"27 \text{ units}"),
    "27 cats": from_integer("27 cats"),
    "$27$": lambda p: f"${p.answer}$",
    "27.0": from_integer("27.0"),
    "other spaces and fractions": lambda p: p.answer.replace("frac", "dfrac").replace("+", " + "),
}
HACKS: dict[str, Callable[[Problem], str | None]] = {
    "the problem's last formula": last_formula,
    "the same and + 0": lambda p: f"{last_formula(p)} + 0" if last_formula(p) else None,
    "the problem's numbers, added": lambda p: "+".join(re.findall(r"\d+", p.problem)) or None,
    "28 = 27": lambda p: f"{wrong_answer(p.answer)} = {p.answer}",
    "2x+1-27 = 0": lambda p: f"2x+1-{p.answer} = 0",
    r"27 \text{ or } 28": lambda p: rf"{p.answer} \text{{ or }} {wrong_answer(p.answer)}",
    "27, 28": lambda p: f"{p.answer}, {wrong_answer(p.answer)}",
    "two boxes, the last with 28": lambda p: rf"\boxed{{{p.answer}}} \boxed{{{wrong_answer(p.answer)}}}",
    r"27\text{ is wrong}": lambda p: rf"{p.answer}\text{{ is wrong}}",
    r"27,\ldots": lambda p: rf"{p.answer},\ldots",
    r"27\mod 10007": lambda p: rf"{p.answer}\mod 10007",
    r"2700\%": from_integer(r"2700\%"),
    "27 million": from_integer("27 million"),
    "everything": lambda p: r"(-\infty, \infty)",
    "a box that is never closed": lambda p: rf"\boxed{{{p.answer}",
}
"""Attempts to obtain the reward with a wrong answer, made from a problem and its reference answer, here 27.

A function returns None if its attempt does not apply. Each answer is put into a box unless it has one.
"""


def hacks(problems: Sequence[Problem]) -> str:
    """Count the accepted answers among right ones and among hacks, graded without the problem and with it."""
    rows = []
    with MathGrader() as grader, ThreadPoolExecutor(grader.workers) as pool:
        for label, attempts in (("right", RIGHT), ("hack", HACKS)):
            for name, attempt in attempts.items():
                pairs = [(p, attempt(p)) for p in problems]
                tried = [(p, text) for p, text in pairs if text and (label == "right" or text != p.answer)]
                boxed = [text if "boxed" in text else rf"\boxed{{{text}}}" for _, text in tried]
                golds = [p.answer for p, _ in tried]
                asked = [p.problem for p, _ in tried]
                counts = [
                    sum(verdict.score == 1 for verdict in pool.map(grader.grade, boxed, golds, *known))
                    for known in ((), (asked,))
                ]
                rows.append([label, f"`{name}`", str(len(tried)), *map(str, counts)])
    return Table(["", "answer", "tried", "right in evaluation", "right in training"], rows).markdown()


PAIRS = Path(__file__).parents[1] / "packages/bandpo-lab/tests/evals/pairs.jsonl"


def pairs() -> str:
    """Count the accepted answers of each set of `PAIRS`, by this grader and by math-verify alone."""
    logging.disable(logging.CRITICAL)  # math-verify reports what it cannot parse
    lines = PAIRS.read_text(encoding="utf-8").splitlines()
    counts: dict[tuple[str, bool], list[int]] = {}
    with MathGrader(workers=1) as grader:
        for pair in map(json.loads, lines):
            gold, completion = pair["gold"], pair["completion"]
            count = counts.setdefault((pair["set"], pair["is_right"]), [0, 0, 0])
            count[0] += 1
            count[1] += grader.grade(completion, gold).score == 1
            parsed_gold = math_verify.parse(rf"\boxed{{{gold}}}")
            count[2] += bool(math_verify.verify(parsed_gold, math_verify.parse(completion)))
    rows = [
        [name, "right" if is_right else "wrong", *map(str, count)]
        for (name, is_right), count in counts.items()
    ]
    return Table(["set", "answers", "number", "accepted", "accepted by math-verify alone"], rows).markdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=("coverage", "leaks", "hacks", "pairs"))
    parser.add_argument("sets", nargs="*")
    options = parser.parse_args()
    sets = [load(spec).problems for spec in options.sets]
    if options.table == "coverage":
        print(coverage())
    elif options.table == "pairs":
        print(pairs())
    elif options.table == "leaks":
        print(leaks(sets[0], [problem for problems in sets[1:] for problem in problems]))
    else:
        print(hacks([problem for problems in sets for problem in problems]))


if __name__ == "__main__":
    main()
