"""Read the settings that a log holds beside its metrics, such as the arguments that transformers gives TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlvet.errors import InvalidValue
from rlvet.runs.files import check_regular
from rlvet.runs.formats import HeldSettings
from rlvet.runs.limits import LARGEST_CONFIG
from rlvet.runs.log_files import format_of

MODEL_NAME = "_name_or_path"
"""The name of a model in its configuration, which is no argument of a trainer."""

MODEL_CONFIG = "model_config"
"""The name under which the shape of a model stands among the settings of its run."""

SHAPE = {
    "model_type": ("model_type",),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "vocab_size": ("vocab_size",),
    "dtype": ("dtype", "torch_dtype"),
}
"""The names of what tells the shapes of two models apart, each with those that configurations of models use for it."""

QUANTIZATION = "quantization"
"""The name of a model's quantization in its shape, which a model that is not quantized lacks."""

LONGEST_REASON = 120
"""The largest number of characters of the reason why settings were not read."""


class Held(NamedTuple):
    """Settings that a log holds."""

    file: Path
    name: str
    """The name under which the file holds them."""
    settings: Mapping[str, Any]
    """The settings, nested."""
    is_of_folder: bool
    """True if they are of the log in the folder above."""


def read_held_settings(file: Path, unread: list[str], run_name: str | None = None) -> Iterator[Held]:
    """Yield the settings that a file of a log holds, the newest first.

    Args:
        file: The file.
        unread: The list to which a sentence is added for each that cannot be read.
        run_name: The name of the run in a file of several. Without it, nothing is read of such a file.
    """
    known = format_of(file)
    if known is None or known.settings is None:
        return
    try:
        check_regular(file, "it")
        held = list(known.settings(file))
    except MemoryError:
        raise
    except Exception as error:  # the file is damaged, but the log may still be diagnosed
        unread.append(f"the settings in {file.name} were not read: {_reason(error, file)}")
        return
    if run_name is None and len({one.run for one in held}) > 1:
        return
    model: dict[str, Any] = {}
    found: list[Held] = []
    for one in held:
        if run_name is not None and one.run not in ("", run_name):
            continue
        try:
            settings = _parse(one)
        except MemoryError:
            raise
        except Exception as error:
            unread.append(f"{one.name} of {file.name} was not read: {_reason(error, file)}")
            continue
        if one.is_of_model:
            model = _model_settings(settings)
        else:
            found.append(Held(file, one.name, settings, one.is_of_folder))
    for one in reversed(found):
        yield one._replace(settings={**model, **one.settings})


def _model_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the name and the shape of a model, of its configuration in transformers' format.

    >>> _model_settings({"n_embd": 768, "text_config": {"n_layer": 12}, "quantization_config": {"load_in_4bit": True}})
    {'model_config': {'hidden_size': 768, 'num_hidden_layers': 12, 'quantization': '4 bits'}}
    """
    # A model of texts and images has that of texts as a part.
    inner = config.get("text_config")
    parts = [config, inner] if isinstance(inner, Mapping) else [config]
    shape = {}
    for name, names in SHAPE.items():
        values = [part[one] for part in parts for one in names if isinstance(part.get(one), int | str)]
        if values:
            shape[name] = values[0]
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        bits = 4 if quantization.get("load_in_4bit") else 8 if quantization.get("load_in_8bit") else None
        bits = bits or quantization.get("bits")
        method = quantization.get("quant_method")
        texts = [f"{bits} bits" if bits else "", str(method) if method else ""]
        shape[QUANTIZATION] = " by ".join(filter(None, texts)) or "quantized"
    settings: dict[str, Any] = {}
    if config.get(MODEL_NAME) is not None:
        settings[MODEL_NAME] = config[MODEL_NAME]
    if shape:
        settings[MODEL_CONFIG] = shape
    return settings


def _parse(held: HeldSettings) -> dict[str, Any]:
    """Return settings as nested dictionaries.

    Raises:
        ValueError: if they are no object of JSON, or too large.
    """
    if held.problem:
        raise InvalidValue(held.problem)
    if not isinstance(held.content, str):
        return _nested(held.content)
    if len(held.content) > LARGEST_CONFIG:
        raise InvalidValue(f"it has more than {LARGEST_CONFIG:,} characters")
    # Some writers put it into a block of Markdown or HTML.
    start = held.content.find("{")
    if start < 0:
        raise InvalidValue("it is no object of JSON")
    settings = json.loads(held.content[start : held.content.rfind("}") + 1])
    if not isinstance(settings, dict):
        raise InvalidValue("it is no object of JSON")
    return settings


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under dotted names as nested dictionaries.

    A name that goes on after that of a value is left out.

    >>> _nested({"policy.lr": 1e-6, "policy.model": "m", "seed": 1, "seed.of": 2})
    {'policy': {'lr': 1e-06, 'model': 'm'}, 'seed': 1}
    """
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        level = nested
        *outer, last = name.split(".")
        for part in outer:
            inner = level.setdefault(part, {})
            if not isinstance(inner, dict):
                break
            level = inner
        else:
            level.setdefault(last, value)
    return nested


def _reason(error: Exception, file: Path) -> str:
    """Return the text of an error in one line, without the path of the file."""
    text = str(error).replace(str(file), file.name)
    return " ".join(text.split())[:LONGEST_REASON] or type(error).__name__
