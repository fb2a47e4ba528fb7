"""The tasks with a verifiable reward that come with the package, and the lookup of tasks by name.

How a model is trained or evaluated on a task is not here.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

EMBEDDED = "multiplication"
"""The default task and model of a run."""


def task_module(name: str) -> ModuleType | None:
    """Return the module of a task: that of `EMBEDDED`, or any module with a function ``dataset(split, n)``.

    Args:
        name: The name `EMBEDDED`, or the import path of a module.

    Returns:
        The module, or None if the name is another one, such as that of a data set on a hub.

    >>> task_module("multiplication").dataset("train", 2).column_names
    ['prompt', 'answer']
    >>> task_module("trl-lib/DeepMath-103K")
    """
    path = f"{__name__}.{name}" if name == EMBEDDED else name
    if "." not in path or not all(name.isidentifier() for name in path.split(".")):
        return None
    from bandpo.core.text import importable_current_folder

    with importable_current_folder():
        try:
            spec = importlib.util.find_spec(path)
        except ModuleNotFoundError:  # a package of the path does not exist
            spec = None
        module = importlib.import_module(path) if spec else None
    return module if hasattr(module, "dataset") else None
