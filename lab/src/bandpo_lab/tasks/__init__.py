"""Tasks with a verifiable reward that come with the package, and how a run finds one."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from bandpo.text import importable_current_folder

EMBEDDED = "multiplication"
"""The task, and the model, that a run takes when none is named."""


def task_module(name: str) -> ModuleType | None:
    """The module of a task: `EMBEDDED`, or the import path of any module with ``dataset(split, n)``.

    None for any other ``dataset_name``, such as that of a data set on a hub.

    >>> task_module("multiplication").dataset("train", 2).column_names
    ['prompt', 'answer']
    >>> task_module("trl-lib/DeepMath-103K")
    """
    path = f"{__name__}.{name}" if name == EMBEDDED else name
    if "." not in path or not all(part.isidentifier() for part in path.split(".")):
        return None
    with importable_current_folder():
        try:
            spec = importlib.util.find_spec(path)
        except ModuleNotFoundError:  # a package of the path does not exist
            spec = None
        module = importlib.import_module(path) if spec else None
    return module if hasattr(module, "dataset") else None
