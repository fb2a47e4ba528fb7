"""Read the arguments of TRL's ``GRPOConfig`` from a Python script, which is parsed and never executed."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from bandpo.errors import InvalidValue
from bandpo.lint.configuration import Configuration, Setting, Unread

CONFIGS = ("GRPOConfig", "BandGRPOConfig")
"""Classes whose arguments are read: TRL's, and that of bandpo's adapter, which has the same settings."""
DEEPEST = 20
"""Levels of an expression that is read."""


def read_script(text: str, path: str) -> list[Configuration]:
    """Return a configuration for each ``GRPOConfig`` of a script, and for each parser that reads one.

    A value is read where it is a literal, a sum or product of numbers, or a name that is assigned once.

    Raises:
        ValueError: if the script is no Python.

    >>> (configuration,) = read_script("from trl import GRPOConfig\\nargs = GRPOConfig(beta=2 * 0.02)", "train.py")
    >>> configuration.settings["beta"]
    Setting(name='beta', value=0.04, line=2)
    """
    if "GRPOConfig" not in text:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the script's own strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise InvalidValue(f"{path}{where}: not Python, {getattr(error, 'msg', error)}") from error
    return _Script(tree, path).configurations()


class _Script:
    def __init__(self, tree: ast.Module, path: str):
        self.path = path
        self.nodes = list(ast.walk(tree))
        self.assigned = self._names_assigned_once()
        self.blocks = self._blocks()
        self.changed = self._names_that_change()
        self.makers = self._statements_by_value()
        self.attributes = self._assigned_attributes()
        self.config_names = {*CONFIGS}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                self.config_names |= {a.asname for a in node.names if a.name in CONFIGS and a.asname}

    def configurations(self) -> list[Configuration]:
        calls = [node for node in self.nodes if isinstance(node, ast.Call) and self._is_config(node.func)]
        configurations = [self._of_call(call) for call in calls]
        for node in self.nodes:
            # TrlParser((ScriptArguments, GRPOConfig, ModelConfig)) reads the command line.
            if isinstance(node, ast.Call) and "Parser" in _name(node.func):
                classes = [item for argument in node.args for item in ast.walk(argument)]
                if any(self._is_config(item) for item in classes):
                    settings = self._of_trainer()
                    reason = f"the command line, which {_name(node.func)} reads"
                    configurations.append(Configuration("trl", self.path, settings, node.lineno, reason))
        if len(configurations) == 1:
            (one,) = configurations
            settings = {**self._of_trainer(), **one.settings}
            configurations = [Configuration("trl", self.path, settings, one.line, one.incomplete)]
        return sorted(configurations, key=lambda configuration: configuration.line or 0)

    def _is_config(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name | ast.Attribute) and _name(node) in self.config_names

    def _names_assigned_once(self) -> Mapping[str, ast.expr]:
        """Return the values of names that have one assignment in the whole script, and are no argument."""
        values: dict[str, ast.expr] = {}
        counts: dict[str, int] = {}
        for node in self.nodes:
            names: list[str] = []
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
                names = [node.id]
            elif isinstance(node, ast.arg):
                names = [node.arg]
            elif isinstance(node, ast.alias):
                names = [(node.asname or node.name).partition(".")[0]]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Global | ast.Nonlocal):
                names = [*node.names, *node.names]
            for name in names:
                counts[name] = counts.get(name, 0) + 1
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)
            ):
                values[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                values[node.target.id] = node.value
        return {name: value for name, value in values.items() if counts[name] == 1}

    def _blocks(self) -> Mapping[int, int]:
        """Return for each statement, by its identity, the list of statements in which it stands."""
        blocks: dict[int, int] = {}
        for node in self.nodes:
            for name in ("body", "orelse", "finalbody"):
                statements = getattr(node, name, None)
                if isinstance(statements, list):
                    blocks.update({id(statement): id(statements) for statement in statements})
        return blocks

    def _value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of an expression; `Unread` where it takes more than literals and names assigned once."""
        if depth > DEEPEST:
            return Unread("a long expression")
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str | None):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.assigned:
            return self._value(self.assigned[node.id], depth + 1)
        if isinstance(node, ast.List | ast.Tuple):
            values = [self._value(item, depth + 1) for item in node.elts[:100]]
            return next((value for value in values if isinstance(value, Unread)), values)
        numbers: list[Any] = []
        if isinstance(node, ast.UnaryOp):
            numbers = [self._value(node.operand, depth + 1)]
        elif isinstance(node, ast.BinOp):
            numbers = [self._value(node.left, depth + 1), self._value(node.right, depth + 1)]
        result = _computed(node, numbers)
        return Unread(f"the expression {_source(node)}") if result is None else result

    def _of_call(self, call: ast.Call) -> Configuration:
        settings: dict[str, Setting] = {}
        incomplete = ""
        for keyword in call.keywords:
            if keyword.arg is not None:
                settings[keyword.arg] = Setting(keyword.arg, self._value(keyword.value), keyword.lineno)
                continue
            expanded = self._of_dictionary(keyword.value)
            if expanded is None:
                incomplete = f"the arguments **{_source(keyword.value)}"
            else:
                settings |= expanded
        for name, setting in self._of_attributes(call):
            settings[name] = setting
        return Configuration("trl", self.path, settings, call.lineno, incomplete)

    def _of_dictionary(self, node: ast.expr) -> dict[str, Setting] | None:
        """Return the settings of a dictionary whose items are all known; None if they are not."""
        if isinstance(node, ast.Name):
            name = node.id
            if name not in self.assigned or name in self.changed:
                return None
            node = self.assigned[name]
        settings: dict[str, Setting] = {}
        if isinstance(node, ast.Call) and _name(node.func) == "dict" and not node.args:
            for keyword in node.keywords:
                if keyword.arg is None:
                    return None
                settings[keyword.arg] = Setting(keyword.arg, self._value(keyword.value), keyword.lineno)
            return settings
        if not isinstance(node, ast.Dict):
            return None
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                return None
            settings[key.value] = Setting(key.value, self._value(value), value.lineno)
        return settings

    def _names_that_change(self) -> set[str]:
        """Return the names whose items or methods are used, by which a dictionary may change."""
        objects: list[ast.expr] = []
        for node in self.nodes:
            is_item = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
            if isinstance(node, ast.Subscript | ast.Attribute) and (
                is_item or isinstance(node, ast.Attribute)
            ):
                objects.append(node.value)
        return {node.id for node in objects if isinstance(node, ast.Name)}

    def _statements_by_value(self) -> Mapping[int, ast.Assign]:
        """Return the assignments to names that are assigned once, by the identity of the value."""
        return {
            id(node.value): node
            for node in self.nodes
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and self.assigned.get(node.targets[0].id) is node.value
        }

    def _assigned_attributes(self) -> Mapping[str, list[tuple[str, ast.Assign | ast.AugAssign]]]:
        """Return for each name the attributes that are assigned to it, such as ``beta`` of ``args.beta = 0.1``."""
        attributes: dict[str, list[tuple[str, ast.Assign | ast.AugAssign]]] = {}
        for node in self.nodes:
            if not isinstance(node, ast.Assign | ast.AugAssign):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    attributes.setdefault(target.value.id, []).append((target.attr, node))
        return attributes

    def _of_attributes(self, call: ast.Call) -> Iterator[tuple[str, Setting]]:
        """Read assignments such as ``args.beta = 0.1`` to the name of a configuration."""
        made = self.makers.get(id(call))
        if made is None:
            return
        for attribute, statement in self.attributes.get(_name(made.targets[0]), []):
            value: Any = Unread(f"what line {statement.lineno} makes of it")
            same_block = self.blocks.get(id(statement)) == self.blocks.get(id(made))
            if isinstance(statement, ast.Assign) and same_block:
                value = self._value(statement.value)
            yield attribute, Setting(attribute, value, statement.lineno)

    def _of_trainer(self) -> dict[str, Setting]:
        """Return what the call of ``GRPOTrainer`` says of the model: its name, and whether an adapter is trained."""
        trainers = [
            n for n in self.nodes if isinstance(n, ast.Call) and _name(n.func).endswith("GRPOTrainer")
        ]
        if len(trainers) != 1:
            return {}
        settings: dict[str, Setting] = {}
        for keyword in trainers[0].keywords:
            if keyword.arg == "peft_config":
                value = self._value(keyword.value)
                if isinstance(value, Unread):
                    made = (
                        self.assigned.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else None
                    )
                    config = keyword.value if made is None else made
                    if isinstance(config, ast.Call) and _name(config.func) == "LoraConfig":
                        value = True
                else:
                    value = value is not None
                settings["use_peft"] = Setting("peft_config", value, keyword.lineno)
            elif keyword.arg == "model":
                settings |= self._of_model(keyword.value)
        return settings

    def _of_model(self, node: ast.expr) -> dict[str, Setting]:
        if isinstance(node, ast.Name) and node.id in self.assigned:
            node = self.assigned[node.id]
        line = node.lineno
        if isinstance(node, ast.Call):
            source = _source(node.func)
            arguments = node.args
            if source.endswith(("PeftModel.from_pretrained", "AutoPeftModelForCausalLM.from_pretrained")):
                adapter = Setting("model", True, line)
                return {"model.adapter": adapter, "use_peft": adapter}
            if source.endswith("get_peft_model"):
                return {"use_peft": Setting("model", True, line)}
            if source.endswith("from_pretrained") and arguments:
                return {"model_name_or_path": Setting("model", self._value(arguments[0]), line)}
            return {"model.adapter": Setting("model", Unread(f"the expression {_source(node)}"), line)}
        value = self._value(node)
        settings = {"model_name_or_path": Setting("model", value, line)}
        if isinstance(value, Unread):
            settings["model.adapter"] = Setting("model", value, line)
        return settings


def _name(node: ast.AST) -> str:
    """Return the last name of a dotted one."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _source(node: ast.AST) -> str:
    try:
        return ast.unparse(node)[:60]
    except (RecursionError, ValueError):
        return "of many parts"


def _computed(node: ast.expr, numbers: list[Any]) -> Any:
    """Compute an operation on numbers; None if it is none, or its result is too large."""
    if not numbers or not all(isinstance(n, int | float) and abs(n) < 1e18 for n in numbers):
        return None
    operator = getattr(node, "op", None)
    try:
        if isinstance(operator, ast.USub):
            return -numbers[0]
        if isinstance(operator, ast.Not):
            return not numbers[0]
        if isinstance(operator, ast.Add):
            return numbers[0] + numbers[1]
        if isinstance(operator, ast.Sub):
            return numbers[0] - numbers[1]
        if isinstance(operator, ast.Mult):
            return numbers[0] * numbers[1]
        if isinstance(operator, ast.Div):
            return numbers[0] / numbers[1]
        if isinstance(operator, ast.FloorDiv):
            return numbers[0] // numbers[1]
        if isinstance(operator, ast.Pow) and abs(numbers[0]) <= 1000 and abs(numbers[1]) <= 20:
            return numbers[0] ** numbers[1]
    except (ArithmeticError, ValueError):
        return None
    return None
