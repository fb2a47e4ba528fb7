"""Read the method and settings of a run from the configuration files that its framework wrote.

No class or function that these files name is imported or called. So a method is returned as its text, an expression
such as ``"Method(FixedClip(0.2), DualClip(3.0))"``, which `bandpo.core.text.parse` parses when it is needed.
"""

from __future__ import annotations

import json
import math
import tomllib
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rlvet.errors import InvalidValue
from rlvet.runs.config_limits import check_toml, check_yaml
from rlvet.runs.config_lines import line_of, toml_lines, yaml_scalars
from rlvet.runs.configuration import Configuration, Setting, Unresolved, title_of
from rlvet.runs.console_settings import ENDINGS, read_console_settings
from rlvet.runs.files import check_regular, is_leaf, load_table, read_pickle, reading_in
from rlvet.runs.formats import FORMATS
from rlvet.runs.held_settings import Held, read_held_settings
from rlvet.runs.keys import FAMILIES, framework_of
from rlvet.runs.limits import LARGEST_CONFIG, MOST_FILES, MOST_NODES
from rlvet.runs.log_files import format_of
from rlvet.runs.scalars import read_scalar
from rlvet.runs.setup import Setup, Value

Config = Mapping[str, Any]
"""The settings of a configuration file, nested."""

FRAMEWORKS: Mapping[str, Mapping[str, Any]] = load_table("frameworks")
"""A description of each framework. Settings are named by their dotted path.

- ``settings``: settings of which a configuration of the framework has at least one, and that of no other has any
- ``older_settings``: settings that its older versions, without these, have together
- ``method_prefix``: the prefix of the setting ``method`` of bandpo's integration
- ``updates``: the number of optimiser steps on each batch, as a product of settings divided by a setting
- ``values``: the settings that findings refer to, by quantity
"""

ADAPTER_FILE = "adapter_config.json"
"""The file that peft writes beside the weights of an adapter."""

WEIGHTS = ("model.safetensors", "model-*.safetensors")
"""The files of a model's weights beside its configuration, in one file or in several."""


class Saved(NamedTuple):
    """The settings of a run, as far as its files say them."""

    configuration: Configuration | None
    """The configuration of a known framework that the log holds, or the newest one in the run's folder or beside its
    log."""
    setup: Setup
    """The framework, the method and the settings that findings refer to, as far as it says them."""
    unread: tuple[str, ...]
    """For each configuration that cannot be read, a sentence with the reason."""


class Found(NamedTuple):
    """A configuration of a run, as a file has it."""

    framework: str
    content: Content
    file: Path
    part: str = ""
    """Its name in a file that holds more than it, see `Configuration.part`."""
    is_of_log: bool = False
    """True if a log holds or prints it, with nothing that is not an argument of the trainer."""


class Adapter(NamedTuple):
    """A file that peft wrote beside the weights of an adapter."""

    file: Path
    settings: Config
    """The content of the file, with the LoRA rank."""


def _saved_values(found: Found, folder: Path, adapter: Adapter | None) -> dict[str, Value]:
    """Return the settings that findings refer to, as far as a configuration, an adapter or weights have them."""
    file = found.file
    values = _values(found.framework, found.content.settings, title_of(_relative(file, folder), found.part))
    if adapter is not None:
        name = _relative(adapter.file, folder)
        values["LoRA rank"] = Value("r", adapter.settings.get("r"), name)
        base_model = str(adapter.settings.get("base_model_name_or_path"))
        values.setdefault("model", Value("base_model_name_or_path", base_model, name))
    if "model" not in values:
        size = _size_of_weights(file.parent)
        if size is not None:
            values["model"] = Value("model.safetensors", size, _relative(file.parent, folder))
    return values


def _relative(file: Path, folder: Path) -> str:
    """Return the path of a file relative to a folder, if it is in it."""
    return str(file.relative_to(folder)) if file.is_relative_to(folder) else str(file)


def _size_of_weights(folder: Path) -> str | None:
    """Return the most parameters that the model in a folder can have, as text; None without weights.

    A parameter takes at least two bytes.
    """
    files = {file for pattern in WEIGHTS for file in folder.glob(pattern) if is_leaf(file)}
    if not files:
        return None
    billions = sum(file.stat().st_size for file in files) / 2e9
    return (
        f"at most {billions:.3f}B parameters"
        if billions >= 1
        else f"at most {billions * 1e3:.3f}M parameters"
    )


def _values(framework: str, config: Config, file: str = "") -> dict[str, Value]:
    """Return the settings that findings refer to, as far as a configuration has them."""
    values = {}
    for quantity, name in FRAMEWORKS[framework].get("values", {}).items():
        value = lookup(config, name)
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            values[quantity] = Value(name, _parse_number(value), file)
    return values


def _parse_number(value: float | str) -> float | str:
    """Return a text as a number if it is one, such as ``1e-6``, which YAML 1.1 reads as a text."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def read_setup(
    path: Path,
    keys: Iterable[str],
    method: str | None = None,
    saved: Saved | None = None,
) -> Setup:
    """Return the setup of a run from the keys of its log and the configuration beside it.

    Args:
        path: The run's folder, or its log.
        keys: The keys of the log, which may show the framework.
        method: The text of the method, used if no configuration names one, such as ``"GSPO()"``.
        saved: The newest configuration of the run, if it was read already.

    >>> read_setup(Path("steps.jsonl"), ["step", "actor/pg_clipfrac"], "GSPO()").framework
    'verl'
    """
    logged_framework = _framework_of_log(keys)
    setup = read_configuration(path, method, saved)
    if logged_framework in (None, setup.framework):
        return setup
    # The configuration beside the log belongs to another program.
    return Setup(logged_framework, method)


def _framework_of_log(keys: Iterable[str]) -> str | None:
    """Return the framework that a log's keys belong to; None if they belong to no known one."""
    framework = framework_of(frozenset(keys))
    if framework not in FRAMEWORKS:
        framework = FAMILIES.get(framework, framework)
    return framework if framework in FRAMEWORKS else None


def read_configuration(path: Path, method: str | None = None, saved: Saved | None = None) -> Setup:
    """Return the setup of a run from the newest configuration in its folder, or beside its log.

    Args:
        path: The folder, or the log.
        method: The text of the method, used if no configuration names one.
        saved: The newest configuration of the run, if it was read already.

    >>> import tempfile
    >>> run = Path(tempfile.mkdtemp())
    >>> _ = (run / "config.yaml").write_text("loss_fn: {ratio_clip_min: 0.2, ratio_clip_max: 0.28, ratio_clip_c: null}")
    >>> read_configuration(run).method
    'FixedClip(0.2, 0.28)'
    """
    if path.suffix == ".jsonl" and path.is_file():
        # bandpo's integration with verl writes the method into the first line of verl's file logger.
        with (
            suppress(OSError, StopIteration, ValueError, RecursionError),
            path.open(encoding="utf-8") as lines,
        ):
            text = lookup(json.loads(next(lines)), "data.bandpo.method")
            if isinstance(text, str):
                return Setup("verl", text)

    setup = (saved or newest_configuration(path)).setup
    return replace(setup, method=method) if setup.method is None else setup


def newest_configuration(path: Path, files: Sequence[str] = (), run_name: str | None = None) -> Saved:
    """Return what the configuration of a run says.

    One that the log holds belongs to the run for sure, and comes first. It is followed by the newest one of a known
    framework in the run's folder or beside its log.

    Args:
        path: The folder, or the log.
        files: The files of the log, if it was read.
        run_name: The name of the run in a log of several.
    """
    folder = path if path.is_dir() else path.parent
    unread: list[str] = []
    adapter = _newest_adapter(path, unread)
    for found in _configurations(path, files, run_name, unread):
        framework, content = found.framework, found.content
        try:
            configuration = configuration_of(framework, content.settings, str(found.file), content.lines)
        except InvalidValue as error:
            unread.append(f"{title_of(found.file.name, found.part)} was not read: {error}")
            continue
        configuration = replace(configuration, part=found.part)
        values = _saved_values(found, folder, adapter)
        if framework == "trl":
            configuration = _with_adapter_and_model(configuration, values)
            if found.is_of_log:
                # A checkpoint has the file of its adapter beside it, and a log has none.
                configuration = with_unknown_adapter(configuration)
        setup = replace(setup_of(framework, content.settings), values=values)
        return Saved(configuration, setup, tuple(unread))
    return Saved(None, Setup(), tuple(unread))


def _configurations(
    path: Path, files: Sequence[str], run_name: str | None, unread: list[str]
) -> Iterator[Found]:
    """Yield each configuration of a run: those that its log holds, files, those of consoles, and of other logs."""
    own = [Path(file) for file in files] or ([path] if is_leaf(path) else [])
    for file in reversed(own):
        yield from _held_configurations(read_held_settings(file, unread, run_name), unread)
    for file in _configuration_files(path, READERS):
        content = _read_config(file, unread)
        if content is None:
            continue
        framework = _framework_of_settings(content.settings)
        if framework is not None:
            yield Found(framework, content, file)
    for file in _console_files(path):
        printed = read_console_settings(file)
        if printed is not None:
            yield Found(printed.framework, Content(printed.settings, {}), file, is_of_log=True)
    for file in own:
        for beside in _files_of_settings(file):
            held = read_held_settings(beside, unread)
            # The folder may also be that of another run, which holds its own.
            yield from _held_configurations((one for one in held if one.is_of_folder), unread)
    for file in _other_logs(path, own):
        # Nothing is said of what cannot be read of a log that may be another run's.
        yield from _held_configurations(read_held_settings(file, []), [])


def _held_configurations(held: Iterable[Held], unread: list[str]) -> Iterator[Found]:
    """Yield the configurations among the settings that logs hold.

    Args:
        held: The settings.
        unread: The list to which a sentence is added for those of no known framework.
    """
    for one in held:
        framework = _framework_of_settings(one.settings)
        if framework is None:
            unread.append(f"{one.name} of {one.file.name} was not read: it is of no known framework")
        else:
            yield Found(framework, Content(one.settings, {}), one.file, one.name, is_of_log=True)


def _framework_of_settings(settings: Config) -> str | None:
    """Return the framework whose settings these are; None if it is no known one."""
    return next((name for name in _STOCK_METHODS if _is_configuration_of(name, settings)), None)


def _files_of_settings(log: Path) -> list[Path]:
    """Return the files beside a log that may hold its settings, the newest first."""
    known = format_of(log)
    if known is None or not known.settings_beside:
        return []
    files = [file for file in log.parent.glob(known.settings_beside) if is_leaf(file)]
    return _newest_first(file for file in files if file.stat().st_size <= LARGEST_CONFIG)


HOLDING = tuple(
    pattern for known in FORMATS.values() if known.settings is not None for pattern in known.patterns
)
"""The names of logs that may hold settings."""


def _other_logs(path: Path, own: Collection[Path]) -> list[Path]:
    """Return the logs in a folder that may hold settings, but for the run's own, the newest first."""
    if not path.is_dir():
        return []
    files = [file for pattern in HOLDING for file in path.rglob(pattern)]
    return _newest_first(file for file in files[:MOST_FILES] if is_leaf(file) and file not in own)


def _newest_first(files: Iterable[Path]) -> list[Path]:
    """Return files in the order of their times, those of one time in that of their names."""
    return sorted(files, key=lambda file: (file.stat().st_mtime, file.name), reverse=True)


def configuration_of(
    framework: str, nested: Config, path: str = "", lines: Mapping[str, int] | None = None
) -> Configuration:
    """Return the configuration of the settings that a run saved.

    Args:
        framework: The key of the framework.
        nested: The settings, in nested mappings as in the framework's file.
        path: The path of the file.
        lines: The lines of settings and tables by their dotted names, if they are known.

    Raises:
        ValueError: if there are more settings than `MOST_NODES`.

    >>> configuration = configuration_of("verl", {"data": {"train_batch_size": 64, "train_files": "${files}"}})
    >>> configuration.settings["data.train_batch_size"].value
    64
    >>> configuration.settings["data.train_files"].value
    Unresolved(reason='the interpolation ${files}', known_part='')
    """
    # A file of prime-rl has only the settings of the trainer, without a prefix.
    prefix = "trainer." if framework == "prime-rl" else ""
    settings: dict[str, Setting] = {}
    for name, value in _flattened(nested):
        if len(settings) == MOST_NODES:
            raise InvalidValue(f"it has more than {MOST_NODES:,} settings, and is no configuration")
        if isinstance(value, str):
            value = _value_of_text(value)
        settings[f"{prefix}{name}"] = Setting(f"{prefix}{name}", value, line_of(lines or {}, name))
    incomplete = "the file of the orchestrator" if framework == "prime-rl" else ""
    return Configuration(framework, path, settings, incomplete=incomplete, is_saved=True)


def _flattened(nested: Config) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their dotted names; an empty mapping is a value."""
    pending: list[tuple[str, Config]] = [("", nested)]
    while pending:
        prefix, mapping = pending.pop()
        for key, value in mapping.items():
            if isinstance(value, Mapping) and value:
                pending.append((f"{prefix}{key}.", value))
            else:
                yield f"{prefix}{key}", value


def _value_of_text(text: str) -> Any:
    """Return the value of a text: `Unresolved` with an interpolation, else that of the scalar that it spells."""
    return Unresolved(f"the interpolation {text[:60]}") if "${" in text else read_scalar(text)


def _with_adapter_and_model(configuration: Configuration, values: Mapping[str, Value]) -> Configuration:
    """Return a configuration of TRL with the adapter and the model, which stand in other files than its arguments."""
    settings = dict(configuration.settings)
    if "LoRA rank" in values and _is_unset(settings.get("use_peft"), False):
        settings["use_peft"] = Setting("use_peft", True)
    if "model" in values and _is_unset(settings.get("model_name_or_path"), None):
        settings["model_name_or_path"] = Setting("model_name_or_path", str(values["model"].value))
    return replace(configuration, settings=settings)


def with_unknown_adapter(configuration: Configuration) -> Configuration:
    """Return the arguments of TRL's trainer, to which an adapter is given beside them, as ones that do not tell it."""
    is_told = "use_peft" in configuration.settings
    return configuration if is_told else replace(configuration, unsaid=("use_peft",))


def _is_unset(setting: Setting | None, default: object) -> bool:
    """Return whether a setting is missing, has its default, or is an empty mapping."""
    return setting is None or setting.value in (default, {})


def read_configuration_of(path: Path) -> Saved:
    """Return what `newest_configuration` does, and raise an error for a link out of the run's folder.

    Args:
        path: The folder, or the log.
    """
    with reading_in(path):
        return newest_configuration(path)


def _is_configuration_of(framework: str, config: Config) -> bool:
    """Return whether a file has the settings of a framework, in its present version or in an older one."""
    description = FRAMEWORKS[framework]
    if any(lookup(config, name) is not None for name in description["settings"]):
        return True
    older = description.get("older_settings", ())
    return bool(older) and all(lookup(config, name) is not None for name in older)


def _console_files(path: Path) -> list[Path]:
    """Return the files that may have the output of a run's console: the log itself, or those in its folder."""
    if path.is_file():
        return [path] if path.suffix in ENDINGS and is_leaf(path) else []
    return [file for file in sorted(path.glob("*")) if file.suffix in ENDINGS and is_leaf(file)]


def _newest_adapter(path: Path, unread: list[str]) -> Adapter | None:
    """Return the newest `ADAPTER_FILE` with a LoRA rank; None without one."""
    for file in _configuration_files(path, [ADAPTER_FILE]):
        content = _read_config(file, unread)
        if content is not None and isinstance(content.settings.get("r"), int):
            return Adapter(file, content.settings)
    return None


class Content(NamedTuple):
    """The content of a configuration file."""

    settings: Config
    """The settings, nested."""
    lines: Mapping[str, int]
    """Their lines by dotted names; empty if the format has none."""


def _read_config(file: Path, unread: list[str]) -> Content | None:
    """Read a configuration file. If that fails, return None, and add a sentence with the reason to ``unread``."""
    if file.stat().st_size > LARGEST_CONFIG:
        unread.append(f"{file.name} was not read: it has more than {LARGEST_CONFIG:,} bytes")
        return None
    try:
        check_regular(file, "it")
        content = READERS.get(file.name, _read_json)(file)
    except MemoryError:
        raise
    except Exception as error:  # the file is damaged or another program's, but the log can still be diagnosed
        # A long path would leave no room for the reason.
        text = str(error).replace(str(file), file.name)
        reason = " ".join(text.split())[:120] or type(error).__name__
        unread.append(f"{file.name} was not read: {reason}")
        return None
    return content if isinstance(content.settings, Mapping) else Content({}, {})


def _configuration_files(path: Path, names: Iterable[str]) -> list[Path]:
    """Return the files with these names in a folder, or beside a log, the newest first."""
    files: list[Path] = []
    for name in names:
        if path.is_dir():
            files += path.rglob(name)
        else:
            # Hydra and wandb write their configuration into a folder beside the log.
            files += [path.parent / name, path.parent / ".hydra" / name, path.parent / "files" / name]
    files = [file for file in files if is_leaf(file)]
    return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)


def setup_of(framework: str, config: Config, method: str | None = None) -> Setup:
    """Return the setup of a run from the configuration of its framework.

    Args:
        framework: The framework, such as ``trl``.
        config: The settings, nested.
        method: The text of the method, used if the configuration names none.

    >>> setup_of("trl", {"num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 4}).updates
    2.0
    """
    level = lookup(config, "importance_sampling_level") if framework == "trl" else None
    # Only configurations of `bandpo-lab train` have the setting lag.
    stale = bool(config.get("lag")) if framework == "trl" else None
    prefix = FRAMEWORKS[framework]["method_prefix"]
    text = lookup(config, f"{prefix}method")
    if not isinstance(text, str):
        try:
            text = _STOCK_METHODS[framework](config) or method
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # A setting is missing, has another type, or belongs to another version of the framework.
            text = method
    return Setup(
        framework=framework,
        method=text,
        level=level if isinstance(level, str) else None,
        updates=_updates(framework, config),
        stale=stale,
        values=_values(framework, config),
    )


def lookup(config: Config, name: str) -> Any:
    """Return a setting by its dotted path; None if there is none."""
    value: Any = config
    for level in name.split("."):
        value = value.get(level) if isinstance(value, Mapping) else None
    return value


def _updates(framework: str, config: Config) -> float | None:
    """Return the number of optimiser steps on each batch; None if a setting is missing."""
    product, _, divisor_name = FRAMEWORKS[framework]["updates"].partition(" / ")
    names = [*product.split(" * "), divisor_name]
    values = [lookup(config, name) for name in names]
    # A boolean is an instance of int.
    if not all(type(value) is int and value > 0 for value in values):
        return None
    *factors, divisor = values
    try:
        updates = math.prod(factors) / divisor
    except OverflowError:
        return None
    # A batch that is smaller than a mini-batch gets one update for each pass. TRL accumulates it with the next one.
    return updates if framework == "trl" else max(1.0, updates)


def _read_yaml(file: Path) -> Content:
    """Read a ``config.yaml`` of hydra, NeMo-RL, `bandpo-lab train` or wandb."""
    import yaml

    data = file.read_bytes()
    check_yaml(data)
    # libyaml's loader, where it is installed, is ten times faster.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(data)
    try:
        root = loader.get_single_node()
        if root is None:
            return Content({}, {})
        lines = _lines_of(root)
        content = loader.construct_document(root)
    finally:
        loader.dispose()
    if not isinstance(content, Mapping):
        return Content({}, {})
    if "arguments" in content:
        # `bandpo-lab train` has the settings under "arguments".
        content = content["arguments"]
        prefix = "arguments."
        lines = {name.removeprefix(prefix): line for name, line in lines.items() if name.startswith(prefix)}
    # wandb has each setting in an object, under "value".
    wrapped = {name for name, value in content.items() if isinstance(value, Mapping) and "value" in value}
    settings = {name: value["value"] if name in wrapped else value for name, value in content.items()}
    return Content(settings, {_unwrapped(name, wrapped): line for name, line in lines.items()})


def _lines_of(root: Any) -> dict[str, int]:
    """Return the line of each setting under a YAML node; empty if there are too many, since a log needs none."""
    try:
        return {name: node.start_mark.line + 1 for name, node in yaml_scalars(root, "it")}
    except InvalidValue:
        return {}


def _unwrapped(name: str, wrapped: Collection[str]) -> str:
    """Return the dotted name of a setting without the ``value`` after its first part, if that is a wrapped object.

    >>> _unwrapped("lr.value", {"lr"}), _unwrapped("optim.value.lr", {"optim"}), _unwrapped("optim.value.lr", {})
    ('lr', 'optim.lr', 'optim.value.lr')
    """
    first, _, rest = name.partition(".")
    is_value = rest == "value" or rest.startswith("value.")
    return f"{first}{rest.removeprefix('value')}" if first in wrapped and is_value else name


def _read_training_args(file: Path) -> Content:
    """Read transformers' ``training_args.bin``, a pickle in a zip archive, without importing the classes in it."""
    with zipfile.ZipFile(file) as archive:
        entry = next(entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
        # The size in the archive's directory may be forged, so the limit applies while decompressing.
        with archive.open(entry) as stream:
            data = stream.read(LARGEST_CONFIG + 1)
        if len(data) > LARGEST_CONFIG:
            raise InvalidValue(f"it holds more than {LARGEST_CONFIG:,} bytes")
        return Content(read_pickle(data, file).state, {})


def _read_json(file: Path) -> Content:
    """Read a configuration in JSON."""
    return Content(json.loads(file.read_bytes()), {})


def _read_toml(file: Path) -> Content:
    """Read a configuration in TOML."""
    text = file.read_text("utf-8")
    check_toml(text)
    return Content(tomllib.loads(text), toml_lines(text))


READERS: Mapping[str, Callable[[Path], Content]] = {
    "training_args.bin": _read_training_args,
    "config.yaml": _read_yaml,
    "trainer.json": _read_json,  # prime-rl's
    "trainer.toml": _read_toml,
}
"""The reader for each name of a configuration file."""


def method_text(clip: str, objective: str | None = None, level: str = "token") -> str:
    """Return the text of a method from the texts of its parts.

    >>> method_text("FixedClip(0.2)"), method_text("FixedClip(0.2)", "DualClip(3.0)")
    ('FixedClip(0.2)', 'Method(FixedClip(0.2), DualClip(3.0))')
    """
    arguments = [clip]
    if objective is not None:
        arguments.append(objective)
    if level != "token":
        arguments.append(f"level={level!r}")
    return clip if len(arguments) == 1 else f"Method({', '.join(arguments)})"


def call_text(name: str, *numbers: Any) -> str:
    """Return the text of a class or method with numbers as arguments.

    Raises:
        TypeError: if an argument is not a number, as in a damaged configuration or one of another version.

    >>> call_text("FixedClip", 0.2, 0.28)
    'FixedClip(0.2, 0.28)'
    """
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"{name} takes numbers, got {number!r}")
    return f"{name}({', '.join(map(repr, numbers))})"


def fixed_clip(low: float, high: float | None) -> str:
    """Return the text of a clip. A ``low`` above 1 is the same as 1, since ratios are positive."""
    return call_text("FixedClip", min(low, 1.0), low if high is None else high)


TRL_CLIPS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""TRL's ``loss_type``s that clamp the ratio."""


def trl_method(config: Config) -> str:
    """Return the text of the method of a stock GRPOTrainer with these arguments."""
    loss_type = config.get("loss_type", "grpo")
    # Versions before these settings had the loss of GRPO with ratios of tokens.
    level = config.get("importance_sampling_level", "token")
    low = config["epsilon"]
    high = config.get("epsilon_high")
    if not isinstance(loss_type, str) or not isinstance(level, str):
        raise TypeError(f"loss_type and importance_sampling_level are texts, got {loss_type!r} and {level!r}")
    if loss_type in TRL_CLIPS:
        delta = config.get("delta")
        objective = None if delta is None else call_text("RatioCap", delta)
        return method_text(fixed_clip(low, high), objective, level)
    if loss_type == "cispo":
        # For CISPO, epsilon_high is the bound itself, not its distance from 1.
        return method_text("Unclipped()", call_text("ClippedWeight", low if high is None else high), level)
    if loss_type == "sapo":
        gate = call_text("SigmoidGate", config["sapo_temperature_pos"], config["sapo_temperature_neg"])
        return method_text("Unclipped()", gate, level)
    if loss_type == "vespo":
        names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        weight = call_text("GammaWeight", *(config[f"vespo_{name}"] for name in names))
        return method_text("Unclipped()", weight)
    return method_text("Unclipped()", "Surrogate()", level)


def verl_method(loss_mode: str, actor: Any) -> str | None:
    """Return the text of the method that equals one of verl's policy losses; None if bandpo has no such method.

    There is none for ``clip_cov``, since it draws the tokens that it drops at random. `ClipCov` drops the same share of
    tokens, but not the same tokens.

    Args:
        loss_mode: The loss's name in verl's registry.
        actor: The settings of ``actor_rollout_ref.actor``, and those of its ``policy_loss``.
    """
    low = actor["clip_ratio"] if actor["clip_ratio_low"] is None else actor["clip_ratio_low"]
    high = actor["clip_ratio"] if actor["clip_ratio_high"] is None else actor["clip_ratio_high"]
    if loss_mode == "vanilla":
        return method_text(fixed_clip(low, high), call_text("DualClip", actor["clip_ratio_c"]))
    if loss_mode in ("dppo_tv", "dppo_kl"):
        divergence = "TotalVariation()" if loss_mode == "dppo_tv" else "KL()"
        lower = f"Band({divergence}, {low}, inf)"
        upper = f"Band({divergence}, {high}, inf)"
        clip = lower if low == high else f"TwoSided({lower}, {upper})"
        return method_text(clip, call_text("DropOutside", actor["clip_ratio_c"]))
    if loss_mode == "gspo":
        return call_text("GSPO", low, high)
    if loss_mode == "sapo":
        return call_text("SAPO", actor["tau_pos"], actor["tau_neg"])
    if loss_mode == "gpg":
        return "GPG()"
    if loss_mode == "geo_mean":
        # verl's bounds of this loss are distances of log r from 0: convert them to distances of r from 1.
        return method_text(call_text("FixedClip", -math.expm1(-low), math.expm1(high)), "GeometricMean()")
    if loss_mode == "cispo":
        return call_text("CISPO", low, high)
    return None


def _verl_stock_method(config: Config) -> str | None:
    """Return the text of the method that equals verl's configured loss; None if bandpo has no such method."""
    actor = lookup(config, "actor_rollout_ref.actor")
    loss = actor["policy_loss"]
    return verl_method(loss.get("audited") or loss["loss_mode"], actor)


def _skyrl_stock_method(config: Config) -> str | None:
    """Return the text of the method of SkyRL's own loss; None if bandpo has no such method.

    There is none for ``cross_entropy``, and none for ``clip_cov``, which draws the tokens that it drops: `ClipCov`
    drops the same share of them, but other tokens.
    """
    settings = lookup(config, "trainer.algorithm")
    epsilons = (settings["eps_clip_low"], settings["eps_clip_high"])
    loss_type = settings["policy_loss_type"]
    if loss_type == "regular":
        return call_text("FixedClip", *epsilons)
    if loss_type == "dual_clip":
        return method_text(call_text("FixedClip", *epsilons), call_text("DualClip", settings["clip_ratio_c"]))
    if loss_type == "gspo":
        return call_text("GSPO", *epsilons)
    if loss_type == "sapo":
        return call_text("SAPO", settings["sapo"]["tau_pos"], settings["sapo"]["tau_neg"])
    if loss_type == "cispo":
        cispo = settings["cispo"]
        return call_text("CISPO", cispo["cispo_eps_clip_low"], cispo["cispo_eps_clip_high"])
    if loss_type == "rollout_is":
        return call_text("IcePop", *epsilons)
    if loss_type == "dppo":
        return _skyrl_dppo(settings["dppo"])
    if loss_type == "kl_cov":
        return call_text("KLCov", settings["kl_cov"]["kl_cov_frac"], settings["kl_cov"]["ppo_kl_coef"])
    if loss_type == "importance_sampling":
        return "Unclipped()"
    return None


def _skyrl_dppo(settings: Config) -> str:
    """Return the text of SkyRL's DPPO, whose ratio is not truncated."""
    divergence = "TotalVariation()" if settings["dppo_type"] == "binary_tv" else "KL()"
    low = settings["delta_low"]
    high = settings["delta_high"]
    if low == high:
        return f"DPPO({divergence}, {high}, inf)"
    clip = f"TwoSided(Band({divergence}, {low}, inf), Band({divergence}, {high}, inf))"
    return f"Method({clip}, DropOutside(inf), old_policy='rollout')"


def _nemo_rl_stock_method(config: Config) -> str | None:
    """Return the text of the method that equals NeMo-RL's own loss; None if bandpo has no such method."""
    loss = config["loss_fn"]
    if loss.get("use_cispo") or loss.get("disable_ppo_ratio"):
        return None
    clip = call_text("FixedClip", loss["ratio_clip_min"], loss["ratio_clip_max"])
    objective = None if loss["ratio_clip_c"] is None else call_text("DualClip", loss["ratio_clip_c"])
    level = "sequence" if loss.get("sequence_level_importance_ratios") else "token"
    return method_text(clip, objective, level)


def _prime_rl_stock_method(config: Config) -> str | None:
    """Return the text of the method that equals prime-rl's own loss; None if bandpo has no such method."""
    loss = config["loss"]
    if loss["type"] == "ipo":
        radius = loss["eps"] if "eps" in loss else loss["ipo_threshold"]  # its name until August 2026
        return call_text("IPO", radius, loss["kl_tau"])
    if loss["dppo_mask_low"] != loss["dppo_mask_high"]:
        return None
    return call_text("PrimeRL", loss["dppo_mask_low"], loss["kl_tau"])


_STOCK_METHODS: Mapping[str, Callable[[Config], str | None]] = {
    "trl": trl_method,
    "verl": _verl_stock_method,
    "skyrl": _skyrl_stock_method,
    "nemo-rl": _nemo_rl_stock_method,
    "prime-rl": _prime_rl_stock_method,
}
"""For each framework, the function that returns the text of its own loss's method from a configuration."""
