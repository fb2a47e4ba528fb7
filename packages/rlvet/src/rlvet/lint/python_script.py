"""Read the arguments of TRL's ``GRPOConfig`` from a Python script. The script is parsed and never executed."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from rlvet.errors import InvalidValue
from rlvet.runs.configuration import Configuration, Setting, Unresolved
from rlvet.runs.limits import DEEPEST_SCRIPT, MOST_EXPANDED

CONFIGS = ("GRPOConfig", "BandGRPOConfig")
"""Classes whose arguments are read: that of TRL, and that of bandpo's integration, which has the same settings."""
PACKAGES = ("trl", "bandpo", "unsloth")
"""Packages of which a script must import one. AReaL, NeMo-RL and programs for MLX have their own ``GRPOConfig``."""
UNSLOTH = "Unsloth, which changes the defaults of GRPOConfig"
"""The source of settings that a script with Unsloth does not set."""
ADAPTERS = ("LoraConfig", "get_peft_model")
"""Functions and classes that make an adapter."""


def read_script(text: str, path: str) -> list[Configuration]:
    r"""Return a configuration for each call of ``GRPOConfig`` in a script, and for each argument parser of one.

    A value is known if it is a literal, an arithmetic expression of numbers, or a name that is assigned once.

    Args:
        text: The source of the script.
        path: Its path, for messages.

    Raises:
        ValueError: if the script cannot be parsed as Python.

    >>> (configuration,) = read_script("from trl import GRPOConfig\nargs = GRPOConfig(beta=2 * 0.02)", "train.py")
    >>> configuration.settings["beta"]
    Setting(name='beta', value=0.04, line=2)
    """
    if "GRPOConfig" not in text:
        return []
    try:
        with warnings.catch_warnings():
            # Python warns of invalid escapes in the script's strings.
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise InvalidValue(f"{path}{line}: not Python, {getattr(error, 'msg', error)}") from error
    return _Script(tree, path).configurations()


READING_METHODS = ("copy", "get", "items", "keys", "values")
"""Methods of a dictionary that do not change it."""


class _Change(NamedTuple):
    """A statement that may change a dictionary."""

    line: int
    items: Sequence[tuple[str | None, ast.expr]]
    """The items that it sets; a dictionary, if there is no name."""
    block: int | None
    """The identity of the list of statements that contains it."""
    is_known: bool
    """Whether it does nothing else."""


class _Script:
    """The syntax tree of a script, from which configurations are read.

    Args:
        tree: The syntax tree.
        path: The path of the script, for messages.
    """

    def __init__(self, tree: ast.Module, path: str):
        self.path = path
        self.nodes = list(ast.walk(tree))
        self.constants = self._names_assigned_once()
        # The number of settings that were read from dictionaries so far.
        self.expanded = 0
        # The values of the names that were evaluated so far.
        self.values: dict[str, Any] = {}
        self.blocks = self._block_of_statements()
        self.changes = self._changes_of_dictionaries()
        self.assignments = self._assignments_by_value()
        self.attributes = self._assigned_attributes()
        self.config_names = {*CONFIGS}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                self.config_names |= {a.asname for a in node.names if a.name in CONFIGS and a.asname}

    def configurations(self) -> list[Configuration]:
        """Return the configurations in the script, in the order of their lines."""
        if not self._imports_trl():
            return []
        calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        configurations = [self._read_call(call) for call in calls if self._is_config(call.func)]
        for call in calls:
            # TrlParser((ScriptArguments, GRPOConfig, ModelConfig)) reads the command line.
            if "Parser" in _last_name(call.func) and self._has_config_argument(call):
                settings = self._read_trainer()
                source = f"the command line, which {_last_name(call.func)} reads"
                configurations.append(Configuration("trl", self.path, settings, call.lineno, source))
        # If there are several, the one that the trainer uses is not known.
        if len(configurations) == 1:
            (configuration,) = configurations
            settings = {**self._read_trainer(), **configuration.settings}
            configurations = [replace(configuration, settings=settings)]
        configurations = [self._with_possible_adapter(configuration) for configuration in configurations]
        if "unsloth" in self._packages():
            # Unsloth replaces GRPOConfig by a class with other defaults, and enlarges a batch to whole groups.
            configurations = [
                replace(configuration, incomplete=configuration.incomplete or UNSLOTH)
                for configuration in configurations
            ]
        return sorted(configurations, key=lambda configuration: configuration.line or 0)

    def _with_possible_adapter(self, configuration: Configuration) -> Configuration:
        """Return a configuration that says that an adapter may be used, if the script makes one at all."""
        if "use_peft" in configuration.settings or configuration.incomplete:
            return configuration
        for node in self.nodes:
            if isinstance(node, ast.Call) and _last_name(node.func) in ADAPTERS:
                reason = f"open, since line {node.lineno} makes a LoRA adapter that the trainer may get"
                setting = Setting("use_peft", Unresolved(reason), node.lineno)
                return replace(configuration, settings={**configuration.settings, "use_peft": setting})
        return configuration

    def _imports_trl(self) -> bool:
        """Return whether the script imports from one of `PACKAGES`."""
        return not self._packages().isdisjoint(PACKAGES)

    def _packages(self) -> set[str]:
        """Return the packages that the script imports from."""
        modules: list[str] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.append(node.module or "")
        return {module.partition(".")[0] for module in modules}

    def _is_config(self, node: ast.AST) -> bool:
        """Return whether an expression is the name of a configuration class."""
        return isinstance(node, ast.Name | ast.Attribute) and _last_name(node) in self.config_names

    def _has_config_argument(self, call: ast.Call) -> bool:
        """Return whether the positional arguments of a call contain the name of a configuration class."""
        nodes = chain.from_iterable(ast.walk(argument) for argument in call.args)
        return any(self._is_config(node) for node in nodes)

    def _names_assigned_once(self) -> Mapping[str, ast.expr]:
        """Return the value of each name that has a single assignment in the script, and no other definition."""
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
                # Counted twice, since other functions may assign the name.
                names = [*node.names, *node.names]
            for name in names:
                counts[name] = counts.get(name, 0) + 1

            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name):
                    values[target.id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                values[node.target.id] = node.value
        return {name: value for name, value in values.items() if counts[name] == 1}

    def _block_of_statements(self) -> Mapping[int, int]:
        """Return the identity of the list of statements that contains each statement, by the statement's identity."""
        blocks: dict[int, int] = {}
        for node in self.nodes:
            for name in ("body", "orelse", "finalbody"):
                statements = getattr(node, name, None)
                if isinstance(statements, list):
                    blocks.update({id(statement): id(statements) for statement in statements})
        return blocks

    def _value(self, node: ast.expr, depth: int = 0) -> Any:
        """Evaluate an expression of literals, arithmetic and names assigned once; `Unresolved` for any other."""
        if depth > DEEPEST_SCRIPT:
            return Unresolved("a long expression")
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str | None):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.constants:
            # Each name is evaluated once: names of names of lists would take exponential time.
            if node.id not in self.values:
                self.values[node.id] = Unresolved(f"the name {node.id}, whose value refers to itself")
                self.values[node.id] = self._value(self.constants[node.id], depth + 1)
            return self.values[node.id]
        if isinstance(node, ast.List | ast.Tuple):
            values = [self._value(item, depth + 1) for item in node.elts[:100]]
            if any(isinstance(value, list) for value in values):
                return Unresolved("a list of lists")
            return next((value for value in values if isinstance(value, Unresolved)), values)
        operands: list[Any] = []
        if isinstance(node, ast.UnaryOp):
            operands = [self._value(node.operand, depth + 1)]
        elif isinstance(node, ast.BinOp):
            operands = [self._value(node.left, depth + 1), self._value(node.right, depth + 1)]
        result = _compute(node, operands)
        return Unresolved(f"the expression {_source(node)}") if result is None else result

    def _read_call(self, call: ast.Call) -> Configuration:
        """Read the configuration of a call such as ``GRPOConfig(beta=0.1, **defaults)``."""
        settings: dict[str, Setting] = {}
        incomplete = ""
        for keyword in call.keywords:
            if keyword.arg == "generation_kwargs":
                arguments, is_complete = self._read_dictionary(keyword.value, keyword.lineno)
                if is_complete:
                    for name, setting in arguments.items():
                        name = f"generation_kwargs.{name}"
                        settings[name] = Setting(name, setting.value, setting.line)
                    continue
            if keyword.arg is not None:
                settings[keyword.arg] = Setting(keyword.arg, self._value(keyword.value), keyword.lineno)
                continue
            expanded, is_complete = self._read_dictionary(keyword.value, call.lineno)
            settings |= expanded
            if not is_complete:
                incomplete = f"the arguments **{_source(keyword.value)}"
        settings |= self._read_attributes(call)
        return Configuration("trl", self.path, settings, call.lineno, incomplete)

    def _read_dictionary(
        self, node: ast.expr, before: int, depth: int = 0
    ) -> tuple[dict[str, Setting], bool]:
        """Read the settings of a dictionary, and return whether it may have no others.

        Args:
            node: A dictionary, a name of one, or an expression that copies, merges or filters some.
            before: The line at which it is read. Statements below it, in the block of an assignment, change it later.
            depth: The number of expressions that contain it.
        """
        if self.expanded > MOST_EXPANDED or depth > DEEPEST_SCRIPT:
            return {}, False
        if isinstance(node, ast.Name):
            return self._read_named_dictionary(node.id, before, depth)
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return self._read_items([(_text_of(key), value) for key, value in pairs], before, depth)
        if isinstance(node, ast.Call):
            return self._read_dictionary_of_call(node, before, depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self._read_items([(None, node.left), (None, node.right)], before, depth)
        filtered = _filtered(node)
        return ({}, False) if filtered is None else self._read_dictionary(filtered, before, depth + 1)

    def _read_dictionary_of_call(
        self, call: ast.Call, before: int, depth: int
    ) -> tuple[dict[str, Setting], bool]:
        """Read a call of ``dict``, or one that copies a dictionary."""
        name = _last_name(call.func)
        if name == "dict":
            items = [(None, argument) for argument in call.args]
            keywords = [(keyword.arg, keyword.value) for keyword in call.keywords]
            return self._read_items([*items, *keywords], before, depth)
        if name == "copy" and isinstance(call.func, ast.Attribute) and not call.args:
            return self._read_dictionary(call.func.value, before, depth + 1)
        if name in ("copy", "deepcopy") and len(call.args) == 1:
            return self._read_dictionary(call.args[0], before, depth + 1)
        return {}, False

    def _read_items(
        self, items: Sequence[tuple[str | None, ast.expr]], before: int, depth: int
    ) -> tuple[dict[str, Setting], bool]:
        """Read the items of a dictionary. An item without a name is another dictionary, as in ``{**defaults}``."""
        settings: dict[str, Setting] = {}
        is_complete = True
        self.expanded += len(items)
        for name, value in items:
            if name is not None:
                settings[name] = Setting(name, self._value(value), value.lineno)
                continue
            merged, is_whole = self._read_dictionary(value, before, depth + 1)
            settings |= merged
            is_complete &= is_whole
        return settings, is_complete

    def _read_named_dictionary(self, name: str, before: int, depth: int) -> tuple[dict[str, Setting], bool]:
        """Read a dictionary that is assigned to a name, with the items that are set afterwards."""
        if name not in self.constants:
            return {}, False
        value = self.constants[name]
        settings, is_complete = self._read_dictionary(value, value.lineno, depth + 1)
        settings = dict(settings)
        block = self.blocks.get(id(self.assignments.get(id(value))))
        for change in self.changes.get(name, ()):
            if change.block == block is not None and change.line > before:
                continue
            changed, is_whole = self._read_items(change.items, change.line, depth + 1)
            is_complete &= is_whole and change.is_known
            for key, setting in changed.items():
                if change.block != block or block is None:
                    # A statement in another block, such as a branch, may not run.
                    reason = f"set in line {setting.line} to a value that is not known"
                    setting = Setting(key, Unresolved(reason), setting.line)
                settings[key] = setting
        return settings, is_complete

    def _changes_of_dictionaries(self) -> Mapping[str, list[_Change]]:
        """Return the statements that may change the dictionary of each name, in their order."""
        changes: dict[str, list[_Change]] = {}
        known_calls: set[int] = set()
        for node in self.nodes:
            block = self.blocks.get(id(node))
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                        key = _text_of(target.slice)
                        items = [] if key is None else [(key, node.value)]
                        change = _Change(node.lineno, items, block, key is not None)
                        changes.setdefault(target.value.id, []).append(change)
                        known_calls.add(id(target))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                function = node.value.func
                if not isinstance(function, ast.Attribute) or function.attr != "update":
                    continue
                if isinstance(function.value, ast.Name):
                    arguments = [(None, argument) for argument in node.value.args]
                    keywords = [(keyword.arg, keyword.value) for keyword in node.value.keywords]
                    change = _Change(node.lineno, [*arguments, *keywords], block, True)
                    changes.setdefault(function.value.id, []).append(change)
                    known_calls.add(id(function))
        for node in self.nodes:
            if not isinstance(node, ast.Attribute | ast.Subscript) or id(node) in known_calls:
                continue
            is_read = isinstance(node.ctx, ast.Load)
            is_harmless = is_read and (isinstance(node, ast.Subscript) or node.attr in READING_METHODS)
            if isinstance(node.value, ast.Name) and not is_harmless:
                changes.setdefault(node.value.id, []).append(_Change(node.lineno, [], None, False))
        return {name: sorted(found, key=lambda change: change.line) for name, found in changes.items()}

    def _assignments_by_value(self) -> Mapping[int, ast.Assign]:
        """Return the assignments to names that are assigned once, by the identity of the value."""
        assignments: dict[int, ast.Assign] = {}
        for node in self.nodes:
            if not isinstance(node, ast.Assign):
                continue
            target = node.targets[0]
            if isinstance(target, ast.Name) and self.constants.get(target.id) is node.value:
                assignments[id(node.value)] = node
        return assignments

    def _assigned_attributes(self) -> Mapping[str, list[tuple[str, ast.Assign | ast.AugAssign]]]:
        """Return for each name the attributes that are assigned to it, such as ``beta`` of ``args.beta = 0.1``."""
        attributes: dict[str, list[tuple[str, ast.Assign | ast.AugAssign]]] = {}
        for node in self.nodes:
            if not isinstance(node, ast.Assign | ast.AugAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    attributes.setdefault(target.value.id, []).append((target.attr, node))
        return attributes

    def _read_attributes(self, call: ast.Call) -> dict[str, Setting]:
        """Read assignments to attributes of a configuration, such as ``args.beta = 0.1``.

        Args:
            call: The call that creates the configuration.
        """
        settings: dict[str, Setting] = {}
        assignment = self.assignments.get(id(call))
        if assignment is None:
            return settings
        for attribute, statement in self.attributes.get(_last_name(assignment.targets[0]), []):
            value: Any = Unresolved(f"set in line {statement.lineno} to a value that is not known")
            # A statement in another block, such as a branch, may not run.
            same_block = self.blocks.get(id(statement)) == self.blocks.get(id(assignment))
            if isinstance(statement, ast.Assign) and same_block:
                value = self._value(statement.value)
            settings[attribute] = Setting(attribute, value, statement.lineno)
        return settings

    def _read_trainer(self) -> dict[str, Setting]:
        """Read the model, the adapter and the optimizer from the call of ``GRPOTrainer``, if there is just one."""
        trainers = []
        for node in self.nodes:
            if isinstance(node, ast.Call) and _last_name(node.func).endswith("GRPOTrainer"):
                trainers.append(node)
        if len(trainers) != 1:
            return {}
        settings: dict[str, Setting] = {}
        if trainers[0].args and not isinstance(trainers[0].args[0], ast.Starred):
            settings |= self._read_model(trainers[0].args[0])
        for keyword in trainers[0].keywords:
            if keyword.arg in ("optimizers", "optimizer_cls_and_kwargs"):
                value = Unresolved(f"set by {keyword.arg} of the trainer")
                settings["optim"] = Setting("optim", value, keyword.lineno)
            elif keyword.arg == "peft_config":
                value = self._uses_adapter(keyword.value)
                settings["use_peft"] = Setting("peft_config", value, keyword.lineno)
            elif keyword.arg == "model":
                settings |= self._read_model(keyword.value)
        return settings

    def _uses_adapter(self, node: ast.expr) -> bool | Unresolved:
        """Return whether the value of ``peft_config`` is one other than None; `Unresolved` if this is not known."""
        value = self._value(node)
        if not isinstance(value, Unresolved):
            return value is not None
        if isinstance(node, ast.Name) and node.id in self.constants:
            node = self.constants[node.id]
        if isinstance(node, ast.Call) and _last_name(node.func).endswith("Config"):
            ranks = [self._value(keyword.value) for keyword in node.keywords if keyword.arg == "r"]
            return ranks != [0]
        return value

    def _read_model(self, node: ast.expr) -> dict[str, Setting]:
        """Read the settings of the argument ``model``: the model's name, and the adapter that it has."""
        if isinstance(node, ast.Name) and node.id in self.constants:
            node = self.constants[node.id]
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
            setting = Setting("model", Unresolved(f"the expression {_source(node)}"), line)
            return {"model_name_or_path": setting, "model.adapter": setting}
        value = self._value(node)
        settings = {"model_name_or_path": Setting("model", value, line)}
        if isinstance(value, Unresolved):
            settings["model.adapter"] = Setting("model", value, line)
        return settings


def _last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name; an empty text for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


def _text_of(node: ast.expr | None) -> str | None:
    """Return the text that an expression is; None for any other."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _filtered(node: ast.expr) -> ast.expr | None:
    """Return the dictionary that ``{k: v for k, v in dictionary.items() if k in names}`` filters; None for others.

    What a filter by names or by None leaves out is no setting of the configuration, or has its default.
    """
    if not isinstance(node, ast.DictComp) or len(node.generators) != 1:
        return None
    (generator,) = node.generators
    call = generator.iter
    if (
        not isinstance(call, ast.Call)
        or not isinstance(call.func, ast.Attribute)
        or call.func.attr != "items"
    ):
        return None
    names = [ast.unparse(part) for part in (node.key, node.value)]
    if ast.unparse(generator.target).strip("()") != ", ".join(names):
        return None
    tests: list[ast.expr] = []
    for test in generator.ifs:
        tests += test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    for test in tests:
        if not isinstance(test, ast.Compare):
            return None
        if not all(isinstance(operator, ast.In | ast.NotIn | ast.IsNot) for operator in test.ops):
            return None
    return call.func.value


def _source(node: ast.AST) -> str:
    """Return the source of an expression, cut after 60 characters."""
    try:
        return ast.unparse(node)[:60]
    except (RecursionError, ValueError):
        return "of many parts"


def _compute(node: ast.expr, operands: list[Any]) -> Any:
    """Compute an arithmetic operation; return None for other operations, and if a number is too large.

    Args:
        node: The expression with the operator.
        operands: The values of its one or two operands.
    """
    if not operands or not all(isinstance(n, int | float) and abs(n) < 1e18 for n in operands):
        return None
    operator = getattr(node, "op", None)
    try:
        if isinstance(operator, ast.USub):
            return -operands[0]
        if isinstance(operator, ast.Not):
            return not operands[0]
        if isinstance(operator, ast.Add):
            return operands[0] + operands[1]
        if isinstance(operator, ast.Sub):
            return operands[0] - operands[1]
        if isinstance(operator, ast.Mult):
            return operands[0] * operands[1]
        if isinstance(operator, ast.Div):
            return operands[0] / operands[1]
        if isinstance(operator, ast.FloorDiv):
            return operands[0] // operands[1]
        if isinstance(operator, ast.Pow) and abs(operands[0]) <= 1000 and abs(operands[1]) <= 20:
            return operands[0] ** operands[1]
    except (ArithmeticError, ValueError):
        return None
    return None
