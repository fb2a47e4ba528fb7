"""What the docstring examples of the core may use without importing it, and where no examples are looked for."""

import importlib.util
import os
from contextlib import suppress
from pathlib import Path

import pytest

from bandpo.integrations import ADAPTERS

collect_ignore = [
    # Loaded by verl's own processes only: importing them takes verl's workers along, and their warnings.
    "lab/src/bandpo_lab/rehearsal/cpu.py",
    "lab/src/bandpo_lab/rehearsal/rollout.py",
    # To import one of these is to run it.
    "lab/src/bandpo_lab/rehearsal/preloaded.py",
    "lab/src/bandpo_lab/rehearsal/stand_in.py",
    # An adapter's module needs its framework.
    *(
        f"src/bandpo/integrations/{adapter.module}.py"
        for adapter in ADAPTERS
        if importlib.util.find_spec(adapter.package) is None
    ),
]

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # trl.experimental announces itself by a warning

with suppress(ImportError):  # not every environment of the matrix has it
    from hypothesis import settings

    # How long an example takes says how busy the machine is.
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    import torch

    import bandpo

    doctest_namespace.update(
        {name: getattr(bandpo, name) for name in bandpo.__all__}, bandpo=bandpo, torch=torch
    )


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder with the real AIME, AMC and GSM8K files."""
    folder = os.environ.get("BANDPO_TEST_DATA")
    if not folder:
        pytest.skip("BANDPO_TEST_DATA, the folder of the real evaluation sets, is not set")
    return Path(folder)
