"""A process that compares answers with math-verify, one JSON line per request and reply.

`bandpo_lab.evals.grading` runs it as a file, not as a module of the package, so that it does not import torch. An
answer that takes too long or too much memory ends the process, and its parent starts another.
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

sys.path.pop(0)  # the folder of this file, whose modules would shadow other packages

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.grader import is_equation, take_first_relation, take_last_relation
from sympy import (
    Basic,
    Eq,
    Expr,
    Float,
    I,
    Matrix,
    MatrixBase,
    Symbol,
    Tuple,
    nan,
    nsimplify,
    simplify,
    solve,
    zoo,
)

# The configurations of `parse`. Callers put each answer into a box, so that prose is not read as LaTeX.
LATEX = LatexExtractionConfig(boxed_match_priority=0)
BOXED = [LATEX, ExprExtractionConfig()]
# math-verify removes everything from the first \\text to a brace at the end as a unit. `normal_form` has already
# removed the real units.
NO_UNITS = replace(LATEX, normalization_config=replace(LATEX.normalization_config, units=False))
WITH_TEXT = [NO_UNITS, ExprExtractionConfig()]
TEXT = re.compile(r"\\(?:text|mbox|math(?:rm|it|bf))")

DECIMALS = 6
"""The number of decimals that are compared, math-verify's default."""
PRECISION = 9
"""The number of further decimals in the numeric difference of two expressions; 6 + 9 is math-verify's default."""


def parse_answer(text: str) -> list:
    """Parse a text with math-verify.

    Returns:
        The expression and its text, or the text alone if it is not mathematics.
    """
    return parse(
        f"\\boxed{{{text}}}",
        WITH_TEXT if TEXT.search(text) else BOXED,
        # A box is parsed as one expression or not at all, so that a fraction in it is not taken for the answer.
        extraction_mode="first_match",
        # 0 turns off math-verify's timeout, which needs the alarm signal and does not interrupt arithmetic on huge
        # numbers.
        parsing_timeout=0,
    )


def magnitudes(value: object) -> Iterator[float]:
    """Yield the absolute values of the finite numbers other than 0 in an expression, a set or a relation."""
    if isinstance(value, Expr) and value.is_number:
        magnitude = abs(complex(value.doit().evalf(3)))
        if 0 < magnitude < math.inf:
            yield magnitude
    elif isinstance(value, Basic):
        for argument in value.args:
            yield from magnitudes(argument)


def decimals_to_compare(gold: list) -> int:
    """Return the number of decimals to compare: at least four digits of the smallest number.

    With `DECIMALS` alone, 5e-34 would equal 6e-34.
    """
    decimals = [DECIMALS]
    for value in gold:
        decimals += [3 - math.floor(math.log10(magnitude)) for magnitude in magnitudes(value)]
    return max(decimals)


def difference_of_sides(equation: Any) -> Any:
    """Return the left side of an equation minus its right side; None if a side is not an expression, as in x = {1, 2}.

    In a chain such as a = b = c, these are the first and the last side.
    """
    left = take_first_relation(equation).lhs
    right = take_last_relation(equation).rhs
    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        return None
    return left - right


def is_vacuous(answer: Any, gold: Any) -> bool:
    """Return True if an equation such as x = x has no solutions that could be compared with the gold's.

    math-verify compares the solutions of two equations, and if neither has any, it calls the equations equal.
    """
    if not (is_equation(answer) and is_equation(gold)):
        return False
    answer_difference = difference_of_sides(answer)
    gold_difference = difference_of_sides(gold)
    if answer_difference is None or gold_difference is None:
        return False
    if simplify(answer_difference) == 0:
        return True
    if (
        simplify(answer_difference - gold_difference) == 0
        or simplify(answer_difference + gold_difference) == 0
    ):
        return False
    try:
        return not solve(answer_difference, answer_difference.free_symbols)
    except NotImplementedError:  # sympy cannot solve it, so no solutions can be compared
        return False


def is_wrong_equation(answer: Any, gold: Any) -> bool:
    """Return True if the answer is an equation for a gold value, and is false or does not state the value.

    An example of the first is 6 = 5, of the second 2x + 1 = 0. math-verify compares the right side alone.
    """
    if is_equation(gold) or not is_equation(answer):
        return False
    left = take_first_relation(answer).lhs
    right = take_last_relation(answer).rhs
    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        return False
    difference = simplify(left - right)
    if difference.is_number:
        return abs(complex(difference.evalf())) > 10**-DECIMALS
    return right == 0 and not (left.is_Symbol or left.is_Function)


def with_symbols_of(answers: list, golds: list) -> list:
    r"""Return the parsed answer with the gold's symbols of the same names.

    math-verify gives i the assumption that it is real or that it is not, depending on the text. So 4i and 4 \cdot i
    have different symbols, and would differ.
    """
    if not (
        answers and isinstance(answers[0], Basic | MatrixBase) and isinstance(golds[0], Basic | MatrixBase)
    ):
        return answers
    gold_symbols = {symbol.name: symbol for symbol in golds[0].free_symbols if isinstance(symbol, Symbol)}
    changes = [
        (symbol, gold_symbols[symbol.name])
        for symbol in answers[0].free_symbols
        if isinstance(symbol, Symbol) and gold_symbols.get(symbol.name, symbol) != symbol
    ]
    return [answers[0].subs(changes), *answers[1:]] if changes else answers


def has_imaginary_unit(golds: list) -> bool:
    """Return True if i is the only letter of a parsed gold."""
    return (
        bool(golds)
        and isinstance(golds[0], Expr)
        and {str(symbol) for symbol in golds[0].free_symbols} == {"i"}
    )


def with_imaginary_unit(parsed: list) -> list:
    """Return a parsed value with the imaginary unit for i.

    math-verify reads i as a symbol, so that exp(iπ/3) would not be a number.
    """
    if not (parsed and isinstance(parsed[0], Basic)):
        return parsed
    value: Any = parsed[0]
    units = [(symbol, I) for symbol in value.free_symbols if str(symbol) == "i"]
    if isinstance(value, Eq):
        # z = 3 + 4i is not false, although math-verify takes z for real.
        return [Eq(value.lhs.subs(units), value.rhs.subs(units), evaluate=False), *parsed[1:]]
    return [value.subs(units), *parsed[1:]]


def with_form_of(answers: list, golds: list) -> list:
    """Return the parsed answer as a column if the gold is one, and as a tuple if the gold is a tuple.

    The coordinates of a point or a vector are written either way.
    """
    if not (answers and golds):
        return answers
    answer, gold = answers[0], golds[0]
    if isinstance(gold, MatrixBase) and gold.cols == 1 and isinstance(answer, Tuple):
        return [Matrix(list(answer)), *answers[1:]]
    if isinstance(gold, Tuple) and isinstance(answer, MatrixBase) and answer.cols == 1:
        return [Tuple(*answer), *answers[1:]]
    return answers


def canonical(parsed: list) -> str | None:
    """Return the same text for equal values, for majority votes: 27, 27.0 and 54/2 all give 27."""
    if not parsed:
        return None
    value = parsed[0]
    if isinstance(value, Basic) and not value.free_symbols:
        value = value.doit()
        if isinstance(value, Float):
            value = nsimplify(value, rational=True)
    return str(value)


def grade_pair(answer: str, gold: str) -> dict:
    r"""Compare an answer with the gold answer.

    Args:
        answer: The text of the answer.
        gold: The text of the gold answer.

    Returns:
        The fields of `bandpo_lab.evals.grading._Verdict`.
    """
    golds = parse_answer(gold)
    answers = parse_answer(answer)
    if has_imaginary_unit(golds):
        golds = with_imaginary_unit(golds)
        answers = with_imaginary_unit(answers)
    answers = with_symbols_of(answers, golds)
    answers = with_form_of(answers, golds)
    is_mathematics = isinstance(golds[0], Basic | MatrixBase) and not golds[0].has(nan, zoo)
    if answer == gold:  # math-verify refuses some texts that it cannot parse
        return {"right": True, "answer": gold, "is_mathematics": is_mathematics}
    rounding = decimals_to_compare(golds)
    right = bool(answers) and verify(
        golds,
        answers,
        float_rounding=rounding,
        numeric_precision=rounding + PRECISION,
        allow_set_relation_comp=True,  # x <= 0 for (-oo, 0]
        timeout_seconds=0,
    )
    right = right and not is_vacuous(answers[0], golds[0]) and not is_wrong_equation(answers[0], golds[0])
    canonical_answer = None if right else canonical(answers)
    return {"right": bool(right), "answer": canonical_answer, "is_mathematics": is_mathematics}


def limit_time(seconds: float) -> None:
    """End the process after some seconds of its processor time; 0 removes the limit."""
    # Processor time, so that a busy machine does not turn right answers into wrong ones. The signal has no handler, so
    # the system ends the process at any point of the code. Clock time is limited as well, for systems without timers.
    clock_seconds = seconds
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        clock_seconds = 20 * seconds
    if seconds:
        faulthandler.dump_traceback_later(clock_seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Answer the requests on standard input; the arguments are the time limit and the memory limit."""
    time_limit = float(sys.argv[1])
    memory = int(sys.argv[2])
    logging.disable(logging.CRITICAL)
    try:
        import resource
    except ImportError:  # Windows has no such limit
        pass
    else:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # Import all modules now, so that this is not part of the first answer's time.
    grade_pair("\\frac{1}{2}", "0.5")
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        limit_time(question.pop("seconds", time_limit))
        try:
            verdict = grade_pair(**question)
        except Exception:
            verdict = {"right": False, "answer": None, "is_mathematics": False}
        limit_time(0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
