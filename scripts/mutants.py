"""Change the core at places drawn by chance, one at a time, and say which changes no test fails of.

    python scripts/mutants.py build/mutants --count 60 --seed 1

A mutant is the core with one operator, comparison, number, constant or sign changed. It is *killed* if a test's
assertion fails, also that an error is raised or that an example prints something. A mutant that no assertion notices
but that raises an error in the tests is counted apart: *crashed*. One that passes all tests *survived*, and one that
outlasts four times the time of the tests without a change is *slow*. The tests are the quick ones of the core, with the
examples of its docstrings, and they must pass without a change. They run in a clone of the last commit. Rows are kept,
so the same command goes on after Ctrl-C.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = "packages/bandpo/src/bandpo/core"
SOURCES = (
    "packages/bandpo/src",
    "packages/rlvet/src",
    "packages/bandpo-lab/src",
    "tests",
    "packages/bandpo/tests",
)
TESTS = ("packages/bandpo/tests/core", CORE)
WITHOUT = ("kernels", "errors.py", "_shown.py")
"""Modules without mutants here: kernels have a job of their own, and texts of errors are tested by their gist."""
OPTIONS = ["-q", "-n", "0", "-p", "no:randomly", "-p", "no:cacheprovider", "--maxfail=3"]
QUICK = ("-m", "not slow and not exhaustive")
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
CALLS = {
    "minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "all": "any", "any": "all",
    "exp": "expm1", "log": "log1p",
}  # fmt: skip
ASSERTED = re.compile(r"^FAILED .*? - (?:AssertionError|assert |Failed: |\S*doctest|AssertionError$)", re.M)
DOCTEST = re.compile(r"^FAILED \S+\.py::bandpo\.", re.M)


@dataclass(frozen=True)
class Place:
    """A place of the core that can be changed."""

    file: str
    line: int
    column: int
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.before} → {self.after}"


class Changes(ast.NodeTransformer):
    """Visits the places of a module in order, and changes one of them.

    Args:
        wanted: The number of the place to change; None to change none and list all.
    """

    def __init__(self, wanted: int | None = None) -> None:
        self.wanted = wanted
        self.found: list[tuple[int, int, str, str]] = []

    def _place(self, node: ast.expr, changed: ast.expr) -> ast.expr:
        number = len(self.found)
        self.found.append((node.lineno, node.col_offset, ast.unparse(node), ast.unparse(changed)))
        return ast.copy_location(changed, node) if number == self.wanted else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """Leave docstrings as they are."""
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """Leave the texts of errors as they are."""
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Change a value, and no annotation."""
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Leave annotations as they are."""
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Change defaults and bodies, and no annotation or decorator."""
        node.args = self.visit(node.args)
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        other = COMPARISONS.get(type(node.ops[0]))
        if other is None:
            return node
        return self._place(node, ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators))

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other = OPERATORS.get(type(node.op))
        return node if other is None else self._place(node, ast.BinOp(node.left, other(), node.right))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self._place(node, ast.BoolOp(other, node.values))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return (
            self._place(node, node.operand) if isinstance(node.op, ast.USub | ast.Not | ast.Invert) else node
        )

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        match node.value:
            case bool():
                return self._place(node, ast.Constant(not node.value))
            case int():
                return self._place(node, ast.Constant(node.value + 1))
            case float():
                return self._place(node, ast.Constant(node.value * 1.5 if node.value else 0.5))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value, name) if name in CALLS:
                return self._place(
                    node, ast.Call(ast.Attribute(value, CALLS[name], ast.Load()), node.args, node.keywords)
                )
            case ast.Name(name) if name in CALLS:
                return self._place(
                    node, ast.Call(ast.Name(CALLS[name], ast.Load()), node.args, node.keywords)
                )
        return node


def places_of(core: Path) -> Iterator[tuple[Place, int]]:
    """Yield each place of the core that can be changed, with its number in its file."""
    for path in sorted(core.rglob("*.py")):
        file = path.relative_to(core).as_posix()
        if file.startswith(WITHOUT):
            continue
        changes = Changes()
        changes.visit(ast.parse(path.read_text(encoding="utf-8")))
        for number, (line, column, before, after) in enumerate(changes.found):
            yield Place(file, line, column, before, after), number


def mutant(source: str, number: int) -> str:
    """Return a module with one place changed."""
    return ast.unparse(ast.fix_missing_locations(Changes(number).visit(ast.parse(source))))


def run_tests(clone: Path, limit: float) -> tuple[str, str]:
    """Return what the tests say of a clone: ``passed``, ``killed``, ``crashed`` or ``slow``; and the first failure."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(clone / source) for source in SOURCES)}
    # pytest cuts the reason of a failure at the width of the terminal.
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "1000"}
    command = [sys.executable, "-m", "pytest", *OPTIONS, *QUICK, *TESTS]
    try:
        done = subprocess.run(
            command, cwd=clone, env=environment, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return "slow", ""
    if done.returncode == 0:
        return "passed", ""
    asserted = ASSERTED.search(done.stdout) or DOCTEST.search(done.stdout)
    failures = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.M)
    first = failures[0] if failures else (done.stdout + done.stderr)[-300:]
    return ("killed" if asserted else "crashed"), (asserted.group() if asserted else first)


def clone_in(folder: Path) -> Path:
    """Return the clone of the last commit in a folder, which is made if it is not there."""
    clone = folder / "clone"
    if not clone.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
    return clone


def results_in(rows: Path) -> dict[str, str]:
    """Return the result of each mutant that was tried before, by its name."""
    if not rows.is_file():
        return {}
    lines = rows.read_text(encoding="utf-8").splitlines()
    return {row["name"]: row["result"] for row in map(json.loads, lines)}


def seconds_without_a_change(clone: Path) -> float:
    """Return how long the tests of a clone take.

    Raises:
        SystemExit: if they fail.
    """
    started = time.perf_counter()
    result, failure = run_tests(clone, 3600)
    if result != "passed":
        sys.exit(f"The tests of the clone fail without a change: {failure}")
    return time.perf_counter() - started


def result_of(place: Place, number: int, clone: Path, limit: float) -> tuple[str, str]:
    """Return what the tests say of a mutant, ``survived`` if they pass, and the first failure.

    The module in the clone is afterwards as it was.

    Args:
        place: The place that is changed.
        number: Its number in its file.
        clone: The folder of the clone.
        limit: The largest number of seconds that the tests may take.
    """
    path = clone / CORE / place.file
    source = path.read_text(encoding="utf-8")
    try:
        path.write_text(mutant(source, number), encoding="utf-8")
        result, failure = run_tests(clone, limit)
    finally:
        path.write_text(source, encoding="utf-8")
    return ("survived" if result == "passed" else result), failure


def main() -> None:
    """Draw mutants, run the tests on each, and print the result of each and their counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="the folder of the clone and of the rows")
    parser.add_argument("--count", type=int, default=60, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the draw")
    arguments = parser.parse_args()
    clone = clone_in(arguments.output)
    rows = arguments.output / f"rows-{arguments.seed}.jsonl"
    results = results_in(rows)
    places = list(places_of(clone / CORE))
    drawn = random.Random(arguments.seed).sample(places, arguments.count)
    print(f"{len(places)} places, {len(drawn)} of them drawn, {len(results)} tried before", flush=True)
    seconds = seconds_without_a_change(clone)
    print(f"the tests without a change pass, in {seconds:.0f} s", flush=True)
    for place, number in drawn:
        if place.name in results:
            continue
        result, failure = result_of(place, number, clone, 4 * seconds + 60)
        results[place.name] = result
        row = {"name": place.name, **asdict(place), "result": result, "by": failure}
        with rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(f"{result:9} {place.name}", flush=True)
    counts = Counter(results[place.name] for place, _ in drawn)
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
