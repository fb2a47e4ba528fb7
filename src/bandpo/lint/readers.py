"""Read the configurations in a file: a Python script, YAML, TOML, or the commands of a shell script.

Nothing that a file names is imported, and nothing in it is executed.
"""

from __future__ import annotations

import codecs
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bandpo.errors import FileProblem, InvalidValue
from bandpo.lint.configuration import Configuration, Setting, Unread
from bandpo.lint.frameworks import FRAMEWORKS
from bandpo.lint.python_script import read_script
from bandpo.lint.scalars import read_scalar
from bandpo.lint.shell import UNKNOWN, Command, Word, read_commands

LARGEST = 2**19
"""Bytes above which a file is no configuration."""
MOST_SETTINGS = 20_000
"""Settings that a file may have, once its aliases are followed."""
DEEPEST = 50
"""Levels of a nested YAML or TOML file."""

PYTHON, YAML, TOML = (".py",), (".yaml", ".yml"), (".toml",)
"""Endings of names of files. A file with another name is read as a shell script."""

VERL_DEFAULTS = ("ppo_trainer", "ppo_megatron_trainer", "ppo_torchtitan_trainer")
"""Configurations of verl whose values the table of defaults has."""

THE_COMMAND = "the command"
"""The name of the setting ``program``, which is no setting."""

Settings = dict[str, Setting]


def read_configurations(path: Path) -> list[Configuration]:
    """Read the configurations of known frameworks in a file, in the order in which they stand there.

    Args:
        path: The file. Its ending tells its format.

    Raises:
        ValueError: if it cannot be read.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "run.yaml"
    >>> _ = file.write_text("num_generations: 8\\nlearning_rate: 1e-6\\n")
    >>> (configuration,) = read_configurations(file)
    >>> configuration.framework, configuration.settings["learning_rate"].line
    ('trl', 2)
    """
    if not path.is_file():
        raise FileProblem(f"{path} is no file")
    with path.open("rb") as file:
        data = file.read(LARGEST + 1)
    return parse_configurations(data, str(path))


def parse_configurations(data: bytes, path: str) -> list[Configuration]:
    """Read the configurations in the bytes of a file.

    Args:
        data: What is in the file.
        path: Its name, by whose ending its format is known.

    Raises:
        ValueError: if the bytes cannot be read.
    """
    if len(data) > LARGEST:
        raise InvalidValue(f"{path} has more than {LARGEST:,} bytes, and is no configuration")
    text = _decoded(data, path)
    ending = Path(path).suffix.lower()
    try:
        if ending in PYTHON:
            configurations = read_script(text, path)
        elif ending in YAML:
            configurations = _read_yaml(text, path)
        elif ending in TOML:
            configurations = _read_toml(text, path)
        else:
            commands = [command for command in read_commands(text) if _framework_of_command(command)]
            configurations = [_of_command(command, path) for command in commands]
    except (RecursionError, MemoryError) as error:
        raise InvalidValue(f"{path} is nested too deeply to be read") from error
    return [_with_newest_names(configuration) for configuration in configurations]


def _decoded(data: bytes, path: str) -> str:
    encoding = "utf-8-sig"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{path} is no text in UTF-8 ({error.reason} at byte {error.start})") from error
    if "\0" in text:
        raise InvalidValue(f"{path} holds the character NUL, and is no configuration")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def framework_of(names: Sequence[str] | Mapping[str, Any]) -> str | None:
    """Return the framework whose settings these names are; None if it is none of the known ones."""
    if "rlhf_type" in names:
        return None  # ms-swift's, which has TRL's names and other defaults
    return next((key for key, framework in FRAMEWORKS.items() if framework.recognises(names)), None)


def _with_newest_names(configuration: Configuration) -> Configuration:
    return replace(configuration, settings=_renamed(configuration.framework, configuration.settings))


def _renamed(framework: str, settings: Mapping[str, Setting]) -> Settings:
    """Return settings under the framework's newest names, beside those under which they stand."""
    older_names = FRAMEWORKS[framework].older_names
    renamed = {older_names[name]: setting for name, setting in settings.items() if name in older_names}
    return {**renamed, **settings}


# Commands


_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w-]*(?:\.[\w-]+)+|model_engine)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)


def _settings_of_command(command: Command) -> tuple[Settings, str]:
    """Return the overrides ``name=value`` and the flags ``--name value`` of a command.

    Beside them, return why there may be others, as a phrase; empty if all words are known.
    """
    settings: Settings = {}
    others = ""
    index = 0
    while index < len(command):
        word = command[index]
        index += 1
        if (override := _OVERRIDE.fullmatch(word.text)) is not None:
            name = override[1]
            settings[name] = Setting(name, _value_of_word(word, override[2]), word.line)
        elif (flag := _FLAG.fullmatch(word.text)) is not None:
            values = [_value_of_word(word, flag[2])] if flag[2] is not None else []
            while flag[2] is None and index < len(command) and not _begins_a_setting(command[index].text):
                values.append(_value_of_word(command[index], command[index].text))
                index += 1
            name = flag[1].replace("-", "_")
            settings[name] = Setting(name, _value_of_flag(values), word.line)
        elif word.unread and settings:
            others = word.unread
    return settings, others


def _value_of_word(word: Word, text: str) -> Any:
    return Unread(word.unread) if UNKNOWN in text else read_scalar(text)


def _begins_a_setting(text: str) -> bool:
    return bool(_FLAG.fullmatch(text) or _OVERRIDE.fullmatch(text)) or text == "--"


def _value_of_flag(values: Sequence[Any]) -> Any:
    if len(values) <= 1:
        return values[0] if values else True
    return next((value for value in values if isinstance(value, Unread)), values)


def _program(command: Command) -> str:
    """Return the module or file that a command runs with Python, or its first word."""
    program = command[0].text
    for index, word in enumerate(command):
        if word.text == "-m" and index + 1 < len(command):
            program = command[index + 1].text
        elif word.text.endswith(".py") and "=" not in word.text and not program.count("."):
            program = word.text
    return program


def _framework_of_command(command: Command) -> str | None:
    words = [word.text for word in command]
    if "swift" in words or words[0] in ("echo", "printf", "cat", "sed", "grep"):
        return None
    return framework_of(_settings_of_command(command)[0])


def _of_command(command: Command, path: str) -> Configuration:
    settings, incomplete = _settings_of_command(command)
    framework = framework_of(settings)
    assert framework is not None
    program = _program(command)
    line = command[0].line
    settings["program"] = Setting(THE_COMMAND, program, line)
    if framework == "trl" and "config" in settings:
        incomplete = "the file that --config names"
    elif framework == "verl":
        _add_engine_of_verl(command, settings)
        incomplete = incomplete or _other_defaults_of_verl(command)
    return Configuration(framework, path, settings, line, incomplete)


def _configuration_name(command: Command) -> str | None:
    """Return the name that ``--config-name`` gives to hydra, without its ending."""
    words = [word.text for word in command]
    for index, text in enumerate(words):
        name, separator, value = text.partition("=")
        if name in ("--config-name", "-cn", "--config_name"):
            value = value if separator else "".join(words[index + 1 : index + 2])
            return value.strip("'\"").removesuffix(".yaml")
    return None


def _other_defaults_of_verl(command: Command) -> str:
    """Return the configuration that a command names in place of verl's own defaults; empty if it names none."""
    name = _configuration_name(command)
    if name is None or name in VERL_DEFAULTS:
        return ""
    return f"the configuration {name.replace(UNKNOWN, '?')} that --config-name names"


def _add_engine_of_verl(command: Command, settings: Settings) -> None:
    """Set the actor's strategy, whose default the engine decides."""
    name = _configuration_name(command) or ""
    engine = settings.get("model_engine")
    if engine is None and "megatron" in name:
        engine = Setting("--config-name", "megatron", command[0].line)
    if engine is not None:
        settings.setdefault("actor_rollout_ref.actor.strategy", engine)


# YAML


def _read_yaml(text: str, path: str) -> list[Configuration]:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise InvalidValue(f"{path} is YAML; install what reads it: pip install PyYAML") from error

    try:
        _refuse_deep_yaml(text, path)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        raise InvalidValue(f"{path}{where}: not YAML, {getattr(error, 'problem', None) or error}") from error
    except ValueError as error:
        raise InvalidValue(f"{path}: not YAML, {error}") from error
    if not isinstance(root, yaml.MappingNode):
        return []

    settings: Settings = {}
    for name, node in _yaml_scalars(root, path):
        settings[name] = Setting(name, _yaml_value(node), node.start_mark.line + 1)
    settings = _without_wrappers(settings)
    framework = framework_of(settings)
    if framework is None:
        return []
    _interpolate(settings)
    incomplete = ""
    if framework == "verl" and any(name == "defaults" for name in settings):
        incomplete = "its list of defaults, or the command that names this file"
    return [Configuration(framework, path, settings, 1, incomplete)]


def _refuse_deep_yaml(text: str, path: str) -> None:
    """Refuse a text whose brackets or indentation are nested too deeply, before a parser that recurses sees it."""
    import yaml

    level = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        kind = type(token).__name__
        if kind.endswith(("MappingStartToken", "SequenceStartToken")):
            level += 1
        elif kind.endswith(("BlockEndToken", "MappingEndToken", "SequenceEndToken")):
            level -= 1
        if level > DEEPEST:
            raise InvalidValue(f"{path} is nested too deeply to be read")


def _yaml_scalars(root: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Read the scalars and lists of a YAML node with their dotted names.

    Merged mappings come before what replaces them.
    """
    import yaml

    pending: list[tuple[str, Any]] = [("", root)]
    count = 0
    while pending:
        prefix, node = pending.pop()
        count += 1
        if count > MOST_SETTINGS:
            raise InvalidValue(f"{path} has more than {MOST_SETTINGS:,} settings, and is no configuration")
        if not isinstance(node, yaml.MappingNode):
            yield prefix, node
            continue
        merged: list[tuple[str, Any]] = []
        named: list[tuple[str, Any]] = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.tag == "tag:yaml.org,2002:merge":
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
                merged += [
                    (prefix, source) for source in reversed(sources) if isinstance(source, yaml.MappingNode)
                ]
            else:
                named.append((f"{prefix}.{key.value}" if prefix else key.value, value))
        # The last of the list is read first, and what is read later replaces it.
        pending += [*reversed(named), *reversed(merged)]


def _yaml_value(node: Any) -> Any:
    import yaml

    if isinstance(node, yaml.SequenceNode):
        items = [item for item in node.value[:100] if isinstance(item, yaml.ScalarNode)]
        return [_yaml_value(item) for item in items]
    if node.style in ("'", '"', "|", ">"):
        return node.value
    return read_scalar(node.value)


def _without_wrappers(settings: Settings) -> Settings:
    """Return the settings of wandb's ``config.yaml`` without the ``value`` under each of its top names."""
    if not settings or not all(
        re.search(r"^[^.]+\.(value|desc)(\.|$)", name) for name in settings if "wandb" not in name
    ):
        return settings
    return {re.sub(r"^([^.]+)\.value", r"\1", name): setting for name, setting in settings.items()}


_INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?([A-Za-z_][\w.]*)(?:,([^{}]*))?\}")


def _interpolate(settings: Settings) -> None:
    """Fill in hydra's ``${name}`` where it stands alone and names a setting of the file; others are unread."""
    for name, setting in list(settings.items()):
        value = setting.value
        for _ in range(10):
            match = _INTERPOLATION.fullmatch(value) if isinstance(value, str) else None
            if match is None:
                break
            if match[1] in settings:
                value = settings[match[1]].value
            elif match[2] is not None:
                value = read_scalar(match[2])
            else:
                break
        if isinstance(value, str) and "${" in value:
            value = Unread(f"the interpolation {value[:60]}")
        settings[name] = Setting(setting.name, value, setting.line)


# TOML


def _read_toml(text: str, path: str) -> list[Configuration]:
    try:
        content = tomllib.loads(text)
    except ValueError as error:
        raise InvalidValue(f"{path}: not TOML, {error}") from error
    lines = _toml_lines(text)
    settings: Settings = {}
    for name, value in _toml_values(content, path):
        settings[name] = Setting(name, value, _toml_line(lines, name))
    # A file of the orchestrator or of the trainer alone has no name before its settings.
    if "group_size" in settings or "rollouts_per_example" in settings:
        settings |= {f"orchestrator.{name}": setting for name, setting in settings.items()}
    elif "optim.lr" in settings and any(name.startswith("loss.") for name in settings):
        settings |= {f"trainer.{name}": setting for name, setting in settings.items()}
        trainer = Configuration("prime-rl", path, settings, 1, "the file of the orchestrator")
        return [trainer.with_defaults("trainer.")]
    framework = framework_of(settings)
    if framework is None:
        return []
    settings = _renamed(framework, settings)
    if framework == "prime-rl":
        _use_smallest_group(content, settings)
    return [Configuration(framework, path, settings, 1)]


def _toml_values(content: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Read the values of nested tables with their dotted names; tables of a list have their number as a name."""
    pending: list[tuple[str, Any]] = [("", content)]
    count = 0
    while pending:
        prefix, value = pending.pop()
        count += 1
        if count > MOST_SETTINGS:
            raise InvalidValue(f"{path} has more than {MOST_SETTINGS:,} settings, and is no configuration")
        if isinstance(value, Mapping):
            pending += [(f"{prefix}.{key}" if prefix else key, item) for key, item in value.items()]
            if not value:
                yield prefix, True  # an empty table turns a part on
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            pending += [(f"{prefix}.{number}", item) for number, item in enumerate(value)]
        else:
            yield prefix, value


def _toml_lines(text: str) -> dict[str, int]:
    """Return the line of each table and each setting, as far as they stand at the beginning of a line."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.split("\n"), 1):
        header = re.match(r"\s*(\[\[?)\s*([\w.\"' -]+?)\s*\]", line)
        if header is not None:
            table = re.sub(r"[\"' ]", "", header[2])
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
            table = _numbered(table, counts)
            lines.setdefault(table, number)
            continue
        key = re.match(r"\s*([\w.-]+)\s*=", line)
        if key is not None:
            lines.setdefault(f"{table}.{key[1]}" if table else key[1], number)
    return lines


def _numbered(table: str, counts: Mapping[str, int]) -> str:
    """Return the name of a table with the number of each list of tables that it stands in."""
    numbered = ""
    name = ""
    for part in table.split("."):
        name = f"{name}.{part}" if name else part
        numbered = f"{numbered}.{part}" if numbered else part
        if name in counts:
            numbered += f".{counts[name]}"
    return numbered


def _toml_line(lines: Mapping[str, int], name: str) -> int | None:
    """Return the line of a setting, or that of the table in which it stands."""
    while name:
        if name in lines:
            return lines[name]
        name = name.rpartition(".")[0]
    return None


def _use_smallest_group(content: Mapping[str, Any], settings: Settings) -> None:
    """Add the smallest group of prime-rl's sources, each of which may have a size of its own."""
    orchestrator = content.get("orchestrator", content)
    smallest = "orchestrator.train.source.group_size"
    if "orchestrator.group_size" in settings:
        settings[smallest] = settings["orchestrator.group_size"]
    train = orchestrator.get("train") if isinstance(orchestrator, Mapping) else None
    sources = train.get("source") if isinstance(train, Mapping) else None
    if not isinstance(sources, list) or not all(isinstance(source, Mapping) for source in sources):
        return
    whole = settings.get("orchestrator.group_size", Setting("orchestrator.group_size", 1))
    groups: list[Setting] = []
    for number in range(len(sources)):
        name = f"orchestrator.train.source.{number}"
        algorithm = settings.get(f"{name}.algo.type", settings.get("orchestrator.algo.type"))
        if algorithm is None or algorithm.value in ("grpo", "max_rl", "echo"):
            groups.append(settings.get(f"{name}.group_size", whole))
    if groups and all(isinstance(group.value, int) for group in groups):
        settings[smallest] = min(groups, key=lambda group: group.value)
    elif sources and not groups:
        # Every source has an algorithm that compares no answers of a group.
        settings[smallest] = Setting("orchestrator.algo.type", None)
