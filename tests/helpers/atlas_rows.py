"""Rows of the atlas, measured anew with mutations of the framework's loss."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

import conformance
from atlas import Atlas, Candidate, random_batches, recorded_batches
from bandpo.certificate.tokens import LossBatch
from conformance import Line

Loss = Callable[[LossBatch], Tensor]
RESULTS = json.loads(conformance.RESULTS.read_text())
BATCHES = ("usual", "far", "sequences near", "sequences apart", "record verl")
"""The batches that are measured anew."""
SEEN = 2e-4
"""A change of a share that is seen: less than one token of the smallest batch."""


@cache
def few_batches() -> Atlas:
    """Return an atlas of `BATCHES`."""
    batches = {batch.name: batch for batch in (*random_batches(), *recorded_batches())}
    return Atlas([batches[name] for name in BATCHES])


def rows(framework: str) -> list[Line]:
    """Return the rows of a framework."""
    return [line for line in conformance.lines_of_losses() if line.framework == framework]


def committed(line: Line) -> dict[str, float]:
    """Return the committed shares of agreement with the nearest method."""
    agree = RESULTS[line.framework]["losses"][line.name]["nearest"]["agree"]
    return {name: agree[name] for name in BATCHES}


def measured(line: Line, loss: Loss) -> dict[str, float]:
    """Return the shares of agreement of a loss with the row's nearest method."""
    found = RESULTS[line.framework]["losses"][line.name]["nearest"]
    atlas = few_batches()
    gradient = atlas.gradient(loss)
    candidate = Candidate(found["method"], found["engine"])
    return atlas.compared(gradient, candidate, found["average"], found["factor"])["agree"]


def framework_loss(line: Line, **changed: Any) -> Loss:
    """Return the loss of a row, with changed settings."""
    settings = conformance.read_settings(line.settings) | changed
    return conformance.FRAMEWORKS[line.framework].loss(**settings)


def mutations(line: Line) -> Iterator[tuple[str, Loss]]:
    """Yield the row's loss with each mutation, by its name."""
    loss = framework_loss(line)

    def favours_winners(batch: LossBatch) -> Tensor:
        advantages = batch.advantages * (1 + 0.01 * (batch.advantages > 0))
        return loss(replace(batch, advantages=advantages))

    def leaves_out(batch: LossBatch) -> Tensor:
        ratio = (batch.logp - batch.logp_old).detach().exp()
        return loss(
            replace(batch, logp=batch.logp.where((ratio < 0.9) | (ratio > 0.95), batch.logp.detach()))
        )

    def other_policy(batch: LossBatch) -> Tensor:
        shifted = {name: (getattr(batch, name) - 0.1).detach() for name in ("logp_old", "logp_rollout")}
        return loss(replace(batch, **shifted))

    yield "1.01 times the loss", lambda batch: 1.01 * loss(batch)
    yield "the other sign", lambda batch: -loss(batch)
    yield "winners weigh 1.01 times as much", favours_winners
    yield "tokens with r from 0.9 to 0.95 have no gradient", leaves_out
    if RESULTS[line.framework]["losses"][line.name]["nearest"]["old_policy"] != "any":
        yield "all old log-probabilities are lower by 0.1", other_policy
    for name, value in conformance.read_settings(line.settings).items():
        if isinstance(value, float):
            factor = FACTORS.get(name, 0.8)
            yield f"{name} is {factor} of {value}", framework_loss(line, **{name: factor * value})


FACTORS = {"clip_cov_ratio": 0.05}
"""The factors of settings of which 0.8 times the value has the same gradient: fewer tokens can be dropped than that."""


class Mutants(ast.NodeTransformer):
    """Change the n-th place of a function: an operator, a comparison, a clamp, a minimum, or a number."""

    SWAPPED = {  # noqa: RUF012
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Div,
        ast.Lt: ast.GtE,
        ast.LtE: ast.Gt,
        ast.Gt: ast.LtE,
        ast.GtE: ast.Lt,
    }
    NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "exp": "sigmoid"}  # noqa: RUF012

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.places = 0
        self.line = 0

    def _here(self, node: ast.AST) -> bool:
        self.places += 1
        if self.places - 1 == self.wanted:
            self.line = getattr(node, "lineno", 0)
            return True
        return False

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        swapped = self.SWAPPED.get(type(node.op))
        if swapped and self._here(node):
            node.op = swapped()
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        swapped = self.SWAPPED.get(type(node.ops[0]))
        if swapped and self._here(node):
            node.ops[0] = swapped()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.USub) and self._here(node):
            return node.operand
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr in self.NAMES and self._here(node):
            node.attr = self.NAMES[node.attr]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, float) and self._here(node):
            return ast.copy_location(ast.Constant(1.5 * node.value + 0.1), node)
        return node


def mutants(function: Callable[..., Any]) -> Iterator[tuple[int, Callable[..., Any]]]:
    """Yield a function with one place of its source changed, and the line of the place, for each place."""
    source = textwrap.dedent(inspect.getsource(function))
    wanted = 0
    while True:
        tree = ast.parse(source)
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list = []
        mutation = Mutants(wanted)
        for index, statement in enumerate(definition.body):
            definition.body[index] = mutation.visit(statement)
        if wanted >= mutation.places:
            return
        names = dict(vars(inspect.getmodule(function)))
        exec(compile(ast.fix_missing_locations(tree), "mutant", "exec"), names)
        yield mutation.line, names[function.__name__]
        wanted += 1


def unseen(
    line: Line, function: Callable[..., Any], install: Callable[[Callable[..., Any]], None]
) -> tuple[int, list[int]]:
    """Run a row's loss with each mutant of a function of the framework.

    Args:
        line: The row.
        function: The framework's function.
        install: Puts a mutant in the place of the function.

    Returns:
        The number of mutants with another gradient, and the lines of those that do not change the row.
    """
    atlas = few_batches()
    loss = framework_loss(line)
    gradient = atlas.gradient(loss)
    other = 0
    lines: list[int] = []
    for number, mutant in mutants(function):
        install(mutant)
        try:
            changed = atlas.gradient(loss)
        except Exception:  # a mutant that stops the loss is seen by everyone
            other += 1
            continue
        if not atlas.different(changed, gradient).any():
            continue
        other += 1
        if measured(line, loss) == pytest.approx(committed(line), abs=SEEN):
            lines.append(number)
    return other, lines
