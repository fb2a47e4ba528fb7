"""Read the configurations in a file: a Python script, a notebook, YAML, JSON, TOML, or a shell script with commands.

Nothing in a file is imported or executed.
"""

from __future__ import annotations

import codecs
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from rlvet._numbers import is_number
from rlvet.errors import FileProblem, InvalidValue, OtherFormat
from rlvet.lint.framework import Framework
from rlvet.lint.known import FRAMEWORKS
from rlvet.lint.names import MOST_UNKNOWN, names_of
from rlvet.lint.notebook import read_notebook
from rlvet.lint.other_frameworks import may_configure, named
from rlvet.lint.python_script import read_script
from rlvet.lint.shell import UNKNOWN, Command, Word, read_commands
from rlvet.runs import gate
from rlvet.runs.config_limits import check_toml, check_yaml
from rlvet.runs.config_lines import line_of, toml_lines, yaml_scalars
from rlvet.runs.configs import with_unknown_adapter
from rlvet.runs.configuration import Configuration, Setting, Unresolved
from rlvet.runs.console_settings import ENDINGS as OUTPUTS
from rlvet.runs.consoles import printed_trainings
from rlvet.runs.consoles.trl import has_training_metric
from rlvet.runs.files import check_regular, is_leaf
from rlvet.runs.limits import LARGEST_LINTED, LARGEST_NOTEBOOK, MOST_SETTINGS
from rlvet.runs.scalars import read_scalar

PYTHON = (".py",)
YAML = (".yaml", ".yml")
JSON = (".json",)
TOML = (".toml",)
NOTEBOOKS = (".ipynb",)
SHELL = (".sh", ".bash", ".sbatch", ".slurm")
# Files with other suffixes may be in any of these formats, but for notebooks. A shell script is looked for first.

VERL_DEFAULTS = (
    "ppo_trainer",
    "ppo_megatron_trainer",
    "ppo_torchtitan_trainer",
    "fully_async_ppo_trainer",
    "fully_async_ppo_megatron_trainer",
    "one_step_off_ppo_trainer",
    "one_step_off_ppo_megatron_trainer",
)
"""Configurations of verl that have the defaults of `rlvet.lint.known.verl.VERL`, and of its programs."""

THE_COMMAND = "the command"
"""The name, in messages, of the entry ``program``, which is not a setting."""

Settings = dict[str, Setting]


def read_configurations(path: Path) -> list[Configuration]:
    r"""Read the configurations of known frameworks in a file, in the order of the file.

    Args:
        path: The file. Its suffix determines the format.

    Raises:
        ValueError: if it cannot be read.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "run.yaml"
    >>> _ = file.write_text("num_generations: 8\nlearning_rate: 1e-6\nmax_completion_length: 512\n")
    >>> (configuration,) = read_configurations(file)
    >>> configuration.framework, configuration.settings["learning_rate"].line
    ('trl', 2)
    """
    if not is_leaf(path):
        raise FileProblem(f"{path} is no file")
    check_regular(path)
    with path.open("rb") as file:
        data = file.read(_largest(str(path)) + 1)
    return parse_configurations(data, str(path))


def parse_configurations(data: bytes, path: str) -> list[Configuration]:
    """Read the configurations in the bytes of a file.

    Args:
        data: The contents of the file.
        path: The path of the file. Its suffix determines the format.

    Raises:
        ValueError: if the bytes cannot be read, or are a configuration of a framework that is not read.
    """
    if len(data) > _largest(path):
        raise InvalidValue(f"{path} has more than {_largest(path):,} bytes, and is no configuration")
    text = _decode(data, path)
    try:
        if Path(path).suffix.lower() in NOTEBOOKS:
            configurations = _read_notebook(text, path)
        else:
            configurations = _read_text(text, path, path)
    except (RecursionError, MemoryError) as error:
        raise InvalidValue(f"{path} is nested too deeply to be read") from error
    return [_with_newest_names(configuration) for configuration in configurations]


def _largest(path: str) -> int:
    """Return the largest size of a file. A notebook contains the output of its cells too."""
    return LARGEST_NOTEBOOK if Path(path).suffix.lower() in NOTEBOOKS else LARGEST_LINTED


def _read_text(text: str, name: str, path: str) -> list[Configuration]:
    """Read the configurations in a text.

    Args:
        text: The text.
        name: A name of which the suffix determines the format.
        path: The path of the file that contains the text, for messages.
    """
    suffix = Path(name).suffix.lower()
    if suffix in PYTHON:
        configurations = read_script(text, path)
    elif suffix in YAML:
        configurations = _read_yaml(text, path)
    elif suffix in JSON:
        configurations = _read_json(text, path)
    elif suffix in TOML:
        configurations = _read_toml(text, path)
    else:
        if suffix in OUTPUTS and any(
            map(has_training_metric, chain.from_iterable(printed_trainings(text)[0]))
        ):
            reading = f"`rlvet diagnose {path}` reads it, and checks its configuration if it prints one"
            raise OtherFormat(f"{path} is the output of a run: {reading}")
        configurations = _read_shell(text, path)
        if not configurations and suffix not in SHELL and may_configure(text):
            configurations = _read_any(text, path)
    other = None if configurations else named(text, name)
    if other is not None:
        raise OtherFormat(f"{path} is for {other.title}, which `rlvet lint` does not read: {other.instead}")
    return configurations


def _read_any(text: str, path: str) -> list[Configuration]:
    """Read the configurations in a text of which no suffix tells the format, in the first one in which it has some."""
    for reader in (_read_json if text.lstrip().startswith("{") else _read_yaml, _read_toml, read_script):
        # A text in another format is an error of most readers.
        with suppress(InvalidValue):
            configurations = reader(text, path)
            if configurations:
                return configurations
    return []


def _read_notebook(text: str, path: str) -> list[Configuration]:
    """Read the configurations in the cells of a notebook, with the lines of its file."""
    configurations: list[Configuration] = []
    errors: list[InvalidValue] = []
    for part in read_notebook(text, path):
        if len(part.text) > LARGEST_LINTED:
            raise InvalidValue(
                f"{path} has more than {LARGEST_LINTED:,} bytes of code, and is no configuration"
            )
        try:
            found = _read_text(part.text, part.name, path)
        except InvalidValue as error:
            errors.append(error)
        else:
            configurations += [_with_lines_of(configuration, part.lines) for configuration in found]
    if errors and not configurations:
        raise errors[0]
    return configurations


def _with_lines_of(configuration: Configuration, lines: Sequence[int | None]) -> Configuration:
    """Return a configuration of a part of a file, with the line of the file for each line of the part."""

    def line_of(line: int | None) -> int | None:
        return None if line is None else lines[min(line, len(lines)) - 1]

    # A setting with several names stays one.
    moved = {id(one): replace(one, line=line_of(one.line)) for one in configuration.settings.values()}
    settings = {name: moved[id(one)] for name, one in configuration.settings.items()}
    return replace(configuration, settings=settings, line=line_of(configuration.line))


def read_in_limits(reader: Callable[..., list[Configuration]], *arguments: Any) -> list[Configuration]:
    """Return the configurations that a reader finds, which runs in a process with limits, see `rlvet.runs.gate`.

    Args:
        reader: `read_configurations` or `parse_configurations`.
        arguments: Its arguments.

    Raises:
        ValueError: as the reader, and if a limit is met.
    """
    return gate.answer_of(reader, *arguments, types=(Configuration, Setting, Unresolved))


def _decode(data: bytes, path: str) -> str:
    """Decode the bytes of a file, with line feeds as the only line ends."""
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


def framework_of(names: Mapping[str, Any], path: str, program: str = "") -> Framework | None:
    """Identify the framework of setting names; return None if no framework has a mark among them.

    Args:
        names: The dotted names of settings.
        path: The path of the file, for messages.
        program: The module or file that a command runs.

    Raises:
        ValueError: if several frameworks have a mark among the names.
    """
    # ms-swift has TRL's names with other defaults.
    if "rlhf_type" in names:
        return None
    marks = {key: framework.mark_in(names, program) for key, framework in FRAMEWORKS.items()}
    found = [key for key, mark in marks.items() if mark]
    if len(found) > 1:
        texts = [f"{FRAMEWORKS[key].title} ({marks[key]})" for key in found]
        raise InvalidValue(
            f"{path} has settings of {' and '.join(texts)}, and which of these it configures is not known: "
            "put the settings of each into a file of its own"
        )
    return FRAMEWORKS[found[0]] if found else None


def _with_newest_names(configuration: Configuration) -> Configuration:
    """Return a configuration with its settings also under the framework's newest names."""
    settings = _add_newest_names(FRAMEWORKS[configuration.framework], configuration.settings)
    return replace(configuration, settings=settings)


def _add_newest_names(framework: Framework, settings: Mapping[str, Setting]) -> Settings:
    """Return the settings that are in effect, those with older names also under the newest names."""
    older_names = framework.older_names
    renamed = {older_names[name]: setting for name, setting in settings.items() if name in older_names}
    return framework.in_effect({**renamed, **settings})


# Commands


_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w-]*(?:\.[\w-]++)++|model_engine)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)


def _read_shell(text: str, path: str) -> list[Configuration]:
    """Read the configurations of the commands in a shell script."""
    configurations = []
    for command in read_commands(text):
        configuration = _read_command(command, path)
        if configuration is not None:
            configurations.append(configuration)
    return configurations


def _settings_of_command(command: Command) -> tuple[Settings, str]:
    """Read the overrides ``name=value`` and the flags ``--name value`` of a command.

    Returns:
        The settings; and a description of the words that may be further settings, empty if all words are known.
    """
    settings: Settings = {}
    incomplete = ""
    index = 0
    while index < len(command):
        word = command[index]
        index += 1
        override = _OVERRIDE.fullmatch(word.text)
        flag = _FLAG.fullmatch(word.text)
        if override is not None:
            name = override[1]
            settings[name] = Setting(name, _value_of_word(word, override[2]), word.line)
        elif flag is not None:
            values = []
            if flag[2] is not None:
                # --name=value
                values.append(_value_of_word(word, flag[2]))
            else:
                # --name value value …
                while index < len(command) and not _begins_a_setting(command[index].text):
                    values.append(_value_of_word(command[index], command[index].text))
                    index += 1
            name = flag[1].replace("-", "_")
            settings[name] = Setting(name, _value_of_flag(values), word.line)
        elif word.unread and settings:
            incomplete = word.unread
    return settings, incomplete


def _value_of_word(word: Word, text: str) -> Any:
    """Return the value of a text that is a part of a word; `Unresolved` if it has an unknown part."""
    if UNKNOWN in text:
        return Unresolved(word.unread, text.replace(UNKNOWN, ""))
    return read_scalar(text)


def _begins_a_setting(text: str) -> bool:
    """Return whether a word begins a flag or an override, or ends the flags."""
    return bool(_FLAG.fullmatch(text) or _OVERRIDE.fullmatch(text)) or text == "--"


def _value_of_flag(values: Sequence[Any]) -> Any:
    """Return the value of a flag: True without a value, a single value, or a list; `Unresolved` if one is not known."""
    if not values:
        return True
    if len(values) == 1:
        return values[0]
    return next((value for value in values if isinstance(value, Unresolved)), values)


def _program(command: Command) -> str:
    """Return the module or file that a command runs with Python, or else its first word; ``trl grpo`` for TRL's."""
    program = command[0].text
    for index, word in enumerate(command):
        if word.text == "-m" and index + 1 < len(command):
            program = command[index + 1].text
        elif word.text.endswith(".py") and "=" not in word.text and not program.count("."):
            program = word.text
        elif word.text == "grpo" and index and command[index - 1].text == "trl":
            program = "trl grpo"
    return program


def _script(command: Command) -> str:
    """Return the shell script that a command runs with settings of its own; an empty text if it runs none."""
    words = [word.text for word in command]
    if words[0] in ("bash", "sh", "source", "."):
        words = words[1:]
    return words[0] if words and words[0].endswith(".sh") else ""


def _read_command(command: Command, path: str) -> Configuration | None:
    """Read the configuration of a command; return None if it runs no known framework."""
    words = [word.text for word in command]
    if "swift" in words or words[0] in ("echo", "printf", "cat", "sed", "grep"):
        return None
    settings, incomplete = _settings_of_command(command)
    program = _program(command)
    framework = framework_of(settings, path, program) if settings else None
    if framework is None:
        return None
    line = command[0].line
    settings["program"] = Setting(THE_COMMAND, program, line)
    script = _script(command)
    if script:
        incomplete = incomplete or f"the script {script.replace(UNKNOWN, '?')}"
    if framework.key == "trl" and "config" in settings:
        incomplete = "the file that --config names"
    elif framework.key == "verl":
        _add_verl_strategy(command, settings)
        incomplete = incomplete or _custom_verl_configuration(command)
    defaults = framework.defaults_of(program, settings)
    if defaults is None:
        incomplete = incomplete or f"the defaults of {program.replace(UNKNOWN, '?')}"
    configuration = Configuration(framework.key, path, settings, line, incomplete, defaults or {})
    return _with_defaults_of_its_version(configuration, command)


def _with_defaults_of_its_version(configuration: Configuration, command: Command) -> Configuration:
    """Return a configuration that says which defaults are not known, if it sets what the framework does not have."""
    framework = FRAMEWORKS[configuration.framework]
    overrides = [_OVERRIDE.fullmatch(word.text) for word in command if not word.text.startswith("+")]
    names = [override[1] for override in overrides if override]
    known = names_of(framework)
    unknown = [name for name in names if framework.unknown_setting([name])][:MOST_UNKNOWN]
    misspelt = {name for name in unknown if known.meant(name)}
    names = [name for name in names if name not in misspelt]
    fork_setting = framework.unknown_setting([name for name in names if name not in framework.early_settings])
    if fork_setting and not configuration.incomplete:
        newest = f"{framework.title} {framework.version}"
        version = f"the version or fork that has {fork_setting}, which {newest} does not have"
        return replace(configuration, incomplete=f"the defaults of {version}")
    if framework.unknown_setting(names):
        return replace(configuration, absent=framework.defaults.keys() - framework.stable)
    return configuration


def _configuration_name(command: Command) -> str | None:
    """Return the value of hydra's ``--config-name`` without the suffix ``.yaml``; None if it is not set."""
    words = [word.text for word in command]
    for index, text in enumerate(words):
        name, separator, value = text.partition("=")
        if name in ("--config-name", "-cn", "--config_name"):
            if not separator:
                value = "".join(words[index + 1 : index + 2])
            return value.strip("'\"").removesuffix(".yaml")
    return None


def _custom_verl_configuration(command: Command) -> str:
    """Describe the configuration that a command uses in place of verl's defaults; empty if it uses verl's."""
    name = _configuration_name(command)
    if name is None or name in VERL_DEFAULTS:
        return ""
    return f"the configuration {name.replace(UNKNOWN, '?')} that --config-name names"


def _add_verl_strategy(command: Command, settings: Settings) -> None:
    """Set the actor's strategy to the engine that the command chooses, unless the command sets it."""
    name = _configuration_name(command) or ""
    engine = settings.get("model_engine")
    if engine is None and "megatron" in name:
        engine = Setting("--config-name", "megatron", command[0].line)
    if engine is not None:
        settings.setdefault("actor_rollout_ref.actor.strategy", engine)


# YAML


def _read_json(text: str, path: str) -> list[Configuration]:
    """Read the configuration in a JSON file, if it is one of a known framework."""
    # JSON is YAML, but for tabs between values. Within a text of JSON there is none.
    return _read_yaml(text.replace("\t", " "), path, "JSON")


def _read_yaml(text: str, path: str, language: str = "YAML") -> list[Configuration]:
    """Read the configuration in a YAML file, if it is one of a known framework.

    Args:
        text: The text.
        path: The path of the file, for messages.
        language: The name of its language, for messages.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise InvalidValue(f"{path} is {language}, which needs PyYAML: pip install PyYAML") from error

    try:
        check_yaml(text, path)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise InvalidValue(f"{path}{line}: not {language}, {problem}") from error
    except InvalidValue:
        raise
    except ValueError as error:
        raise InvalidValue(f"{path}: not {language}, {error}") from error
    if not isinstance(root, yaml.MappingNode):
        return []

    settings: Settings = {}
    for name, node in yaml_scalars(root, path):
        settings[name] = Setting(name, _yaml_value(node), node.start_mark.line + 1)
    settings = _without_wandb_wrappers(settings)
    framework = framework_of(settings, path)
    if framework is None:
        return _read_commands_in_yaml(root, path)
    _interpolate(settings)
    incomplete = ""
    if framework.key == "verl" and "defaults" in settings:
        incomplete = "its list of defaults, or the command that names this file"
    elif framework.key in ("verl", "skyrl"):
        incomplete = "the defaults of the program that reads this file"
    configuration = Configuration(framework.key, path, settings, 1, incomplete)
    if MASKED in settings and settings[MASKED].value == f"<{MASKED.upper()}>":
        configuration = replace(with_unknown_adapter(configuration), is_saved=True)
    return [configuration]


MASKED = "hub_token"
"""The setting in whose place transformers writes its name in capitals, where it saves the arguments of a run."""


def _read_commands_in_yaml(root: Any, path: str) -> list[Configuration]:
    """Read the configurations of the shell scripts in a YAML file, such as ``run: |`` of a job for a cluster."""
    import yaml

    configurations: list[Configuration] = []
    for _, node in yaml_scalars(root, path):
        if isinstance(node, yaml.ScalarNode) and node.style == "|":
            first_line = node.start_mark.line + 2
            lines = range(first_line, first_line + node.value.count("\n") + 1)
            configurations += [_with_lines_of(one, lines) for one in _read_shell(node.value, path)]
    return configurations


def _yaml_value(node: Any) -> Any:
    """Return the value of a YAML scalar or list. Quoted scalars are texts."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        items = [item for item in node.value[:100] if isinstance(item, yaml.ScalarNode)]
        return [_yaml_value(item) for item in items]
    if node.style in ("'", '"', "|", ">"):
        return node.value
    return read_scalar(node.value)


_WANDB_WRAPPER = re.compile(r"^[^.]+\.(value|desc)(\.|$)")


def _without_wandb_wrappers(settings: Settings) -> Settings:
    """Return the settings without the key ``value`` that wandb's ``config.yaml`` has under each top-level name."""
    names = [name for name in settings if "wandb" not in name]
    if not settings or not all(_WANDB_WRAPPER.search(name) for name in names):
        return settings
    return {
        re.sub(r"^([^.]+)\.value", r"\1", name): setting
        for name, setting in settings.items()
        if not re.fullmatch(r"[^.]+\.desc", name)
    }


_INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?([A-Za-z_][\w.]*)(?:,([^{}]*))?\}")


def _interpolate(settings: Settings) -> None:
    """Replace hydra's interpolations ``${name}`` of settings of the same file; mark all others as `Unresolved`.

    An interpolation is replaced only if it is the whole value.
    """
    for name, setting in list(settings.items()):
        value = setting.value
        # An interpolation may refer to another one.
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
            value = Unresolved(f"the interpolation {value[:60]}")
        settings[name] = Setting(setting.name, value, setting.line)


# TOML

PRIME_RL_LOSSES = ("default", "custom")
"""Values of prime-rl's ``loss.type``, a name that programs for supervised training have too."""
NO_LOSS = Setting("loss.type", None)


def _read_toml(text: str, path: str) -> list[Configuration]:
    """Read the configuration in a TOML file, if it is one of a known framework."""
    check_toml(text, path)
    try:
        content = tomllib.loads(text)
    except ValueError as error:
        raise InvalidValue(f"{path}: not TOML, {error}") from error
    lines = toml_lines(text)
    settings: Settings = {}
    for name, value in _toml_values(content, path):
        settings[name] = Setting(name, value, line_of(lines, name))
    # Of the frameworks, only prime-rl has files in this format.
    framework = FRAMEWORKS["prime-rl"]
    is_trainer = "optim.lr" in settings and settings.get("loss.type", NO_LOSS).value in PRIME_RL_LOSSES
    defaults = framework.defaults
    is_orchestrator = "group_size" in settings and all(
        f"orchestrator.{name}" in defaults for name in settings
    )
    if framework_of(settings, path) is not framework and not is_trainer and not is_orchestrator:
        return []
    # In prime-rl's files for only the orchestrator or the trainer, settings have no prefix.
    if "group_size" in settings or "rollouts_per_example" in settings:
        settings |= {f"orchestrator.{name}": setting for name, setting in settings.items()}
    elif "optim.lr" in settings:
        settings |= {f"trainer.{name}": setting for name, setting in settings.items()}
        settings = {**framework.default_settings("trainer."), **settings}
        return [Configuration(framework.key, path, settings, 1, "the file of the orchestrator")]
    settings = _add_newest_names(framework, settings)
    _add_smallest_group(content, settings)
    return [Configuration(framework.key, path, settings, 1)]


def _toml_values(content: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables with their dotted names. A table in a list has its index as its name."""
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
                # An empty table enables a part of the configuration.
                yield prefix, True
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            pending += [(f"{prefix}.{index}", item) for index, item in enumerate(value)]
        else:
            yield prefix, value


def _add_smallest_group(content: Mapping[str, Any], settings: Settings) -> None:
    """Add the smallest group size of prime-rl's sources. Each source may set its own.

    Args:
        content: The tables of the file.
        settings: The settings, to which ``orchestrator.train.source.group_size`` is added.
    """
    orchestrator = content.get("orchestrator", content)
    smallest_group = "orchestrator.train.source.group_size"
    if "orchestrator.group_size" in settings:
        settings[smallest_group] = settings["orchestrator.group_size"]
    train = orchestrator.get("train") if isinstance(orchestrator, Mapping) else None
    sources = train.get("source") if isinstance(train, Mapping) else None
    if not isinstance(sources, list) or not all(isinstance(source, Mapping) for source in sources):
        return

    default = settings.get("orchestrator.group_size", Setting("orchestrator.group_size", 1))
    sizes: list[Setting] = []
    for index in range(len(sources)):
        name = f"orchestrator.train.source.{index}"
        algorithm = settings.get(f"{name}.algo.type", settings.get("orchestrator.algo.type"))
        if algorithm is None or algorithm.value in ("grpo", "max_rl", "echo"):
            sizes.append(settings.get(f"{name}.group_size", default))
    if sizes and all(is_number(size.value) for size in sizes):
        settings[smallest_group] = min(sizes, key=lambda size: size.value)
    elif sources and not sizes:
        # No source has an algorithm that compares the answers of a group, so the size does not matter.
        settings[smallest_group] = Setting("orchestrator.algo.type", None)
