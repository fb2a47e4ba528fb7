"""A process that compares answers with math-verify: a JSON line in, one out; started by
`bandpo_lab.evals.grading`.

Run as a file, not as a module of the package, so that it need not load torch. An answer that takes too long
or too much memory ends the process, whatever it is stuck in, and its parent starts another.
"""

import faulthandler
import json
import logging
import math
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

sys.path.pop(0)  # this folder, whose modules would shadow other packages

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.grader import is_equation, take_first_relation, take_last_relation
from sympy import Basic, Expr, Float, MatrixBase, nan, nsimplify, simplify, solve, zoo

# Callers put each answer into a box, so that prose is not read as LaTeX.
LATEX = LatexExtractionConfig(boxed_match_priority=0)
BOXED = [LATEX, ExprExtractionConfig()]
# math-verify takes everything from the first \\text to a brace at the end for a unit. `normal_form` has removed real
# units by then.
NO_UNITS = replace(LATEX, normalization_config=replace(LATEX.normalization_config, units=False))
WITH_TEXT = [NO_UNITS, ExprExtractionConfig()]
ANYWHERE = [replace(NO_UNITS, boxed_match_priority=-1), ExprExtractionConfig()]
TEXT = re.compile(r"\\(?:text|mbox|math(?:rm|it|bf))")

DECIMALS = 6
"""To which decimals are compared, and to how many more the numeric difference of two expressions (both
math-verify's own)."""
PRECISION = 9


def read(text: str, boxed: bool) -> list:
    """What math-verify reads: an expression and its text, or the text alone where it is no mathematics."""
    config = ANYWHERE
    if boxed:
        config = WITH_TEXT if TEXT.search(text) else BOXED
        number = text.removesuffix("\\%")
        # math-verify reads a per cent sign after the box only.
        text = f"\\boxed{{{text}}}" if number == text else f"$\\boxed{{{number}}}$\\%"
    return parse(
        text,
        config,
        # A box is read whole or not at all; else one fraction in it might be taken for the answer.
        extraction_mode="first_match" if boxed else "any_match",
        # 0 is no timeout: math-verify's needs the alarm signal, and does not interrupt arithmetic on huge numbers.
        parsing_timeout=0,
    )


def numbers(value: object) -> Iterator[float]:
    """The finite numbers other than 0 in an expression, a set or a relation."""
    if isinstance(value, Expr) and value.is_number:
        size = abs(complex(value.doit().evalf(3)))
        if 0 < size < math.inf:
            yield size
    elif isinstance(value, Basic):
        for part in value.args:
            yield from numbers(part)


def decimals(gold: list) -> int:
    """Decimals to compare: at least four digits of the smallest number, so that 5e-34 is not 6e-34."""
    sizes = [size for value in gold for size in numbers(value)]
    return max([DECIMALS, *(3 - math.floor(math.log10(size)) for size in sizes)])


def says_nothing(answer: Any, gold: Any) -> bool:
    """Whether an equation has no solution that could be compared with the gold's, such as x = x.

    math-verify compares the solutions of two equations, and where neither has any, it calls them equal.
    """
    if not (is_equation(answer) and is_equation(gold)):
        return False
    sides: list[tuple[Any, Any]] = [
        (take_first_relation(equation).lhs, take_last_relation(equation).rhs) for equation in (answer, gold)
    ]
    if not all(isinstance(side, Expr) for pair in sides for side in pair):  # x = {1, 2}
        return False
    ours, golds = (left - right for left, right in sides)
    if simplify(ours) == 0:
        return True
    if simplify(ours - golds) == 0 or simplify(ours + golds) == 0:
        return False
    try:
        return not solve(ours, ours.free_symbols)
    except NotImplementedError:  # sympy cannot solve it, so no solutions can be compared
        return False


def untrue(answer: Any, gold: Any) -> bool:
    """Whether an equation that is given for a bare value is false, as 6 = 5, or leaves it open, as 2x + 1 = 0.

    math-verify compares the right side alone.
    """
    if is_equation(gold) or not is_equation(answer):
        return False
    left, right = take_first_relation(answer).lhs, take_last_relation(answer).rhs
    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        return False
    apart = simplify(left - right)
    if apart.is_number:
        return abs(complex(apart.evalf())) > 10**-DECIMALS
    return right == 0 and not (left.is_Symbol or left.is_Function)


def canonical(parsed: list) -> str | None:
    """One text per value: 27, 27.0 and 54/2 all vote for 27."""
    if not parsed:
        return None
    value = parsed[0]
    if isinstance(value, Basic) and not value.free_symbols:
        value = value.doit()
        if isinstance(value, Float):
            value = nsimplify(value, rational=True)
    return str(value)


def grade_pair(answer: str, boxed: bool, gold: str) -> dict:
    golds, answers = read(gold, True), read(answer, boxed)
    understood = isinstance(golds[0], Basic | MatrixBase) and not golds[0].has(nan, zoo)
    if golds[-1:] == answers[-1:]:  # the same text
        return {"right": True, "answer": gold, "read": understood}
    rounding = decimals(golds)
    right = bool(answers) and verify(
        golds,
        answers,
        float_rounding=rounding,
        numeric_precision=rounding + PRECISION,
        allow_set_relation_comp=True,  # x <= 0 for (-oo, 0]
        timeout_seconds=0,
    )
    right = right and not says_nothing(answers[0], golds[0]) and not untrue(answers[0], golds[0])
    return {"right": bool(right), "answer": None if right else canonical(answers), "read": understood}


def limit_time(seconds: float) -> None:
    """Ends the process after so many seconds of its own processor time; 0 lifts the limit."""
    # Processor time, so that a busy machine does not turn right answers into wrong ones. The signal has no handler:
    # the system itself ends the process, whatever it is stuck in.
    wall = seconds
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        wall = 20 * seconds
    if seconds:
        faulthandler.dump_traceback_later(wall, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    time_limit, memory = float(sys.argv[1]), int(sys.argv[2])
    logging.disable(logging.CRITICAL)
    try:
        import resource
    except ImportError:  # Windows has no such limit
        pass
    else:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    grade_pair("\\frac{1}{2}", True, "0.5")  # loads modules that the first answer's time should not include
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        limit_time(question.pop("seconds", time_limit))
        try:
            verdict = grade_pair(**question)
        except Exception:
            verdict = {"right": False, "answer": None, "read": False}
        limit_time(0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
