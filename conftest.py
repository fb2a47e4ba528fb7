"""What the docstring examples of the core may use without importing it, and where no examples are looked for."""

import importlib.util
import os

import pytest

from bandpo.integrations import ADAPTERS

collect_ignore = [
    # Loaded by verl's own processes only: importing them takes verl's workers along, and their warnings.
    "src/bandpo/lab/rehearsal/cpu.py",
    "src/bandpo/lab/rehearsal/rollout.py",
    # An adapter's module needs its framework.
    *(
        f"src/bandpo/integrations/{adapter.module}.py"
        for adapter in ADAPTERS
        if importlib.util.find_spec(adapter.package) is None
    ),
]

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # trl.experimental announces itself by a warning


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    import torch

    import bandpo

    doctest_namespace.update({name: getattr(bandpo, name) for name in bandpo.__all__}, torch=torch)
