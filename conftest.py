"""Names that docstring examples can use without an import, modules that pytest ignores, and the shared fixtures."""

import gc
import importlib.util
import os
from contextlib import suppress
from pathlib import Path

import pytest

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # no warning from trl.experimental
# rlvet reads in the process of the tests, without limits. Tests of the limits set this variable again.
os.environ.setdefault("RLVET_LIMITS", "off")

FRAMEWORKS = ("trl", "verl", "skyrl", "tinker")
"""The frameworks that the examples of the folder or module of this name in `bandpo.integrations` need."""


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None):
        return  # the workers of pytest-xdist run the tests
    with suppress(ImportError):  # some environments of scripts/matrix.py have no hypothesis
        from hypothesis import settings

        # No deadlines: on a busy machine an example may take long.
        settings.register_profile("untimed", deadline=None)
        settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at what the tests' imports made: accelerate has one for each training."""
    gc.freeze()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore modules, other than tests, that have no examples or whose framework is not installed."""
    if collection_path.suffix != ".py" or collection_path.name.startswith("test_"):
        return None
    names = (collection_path.parent.name, collection_path.stem)
    absent = any(name in FRAMEWORKS and importlib.util.find_spec(name) is None for name in names)
    return absent or ">>>" not in collection_path.read_text(encoding="utf-8") or None


@pytest.fixture(autouse=True, scope="session")
def _doctest_names(doctest_namespace):
    import torch

    import bandpo
    from bandpo.core import batch, errors, objectives, rules, schedules, sequences, text

    for module in (batch, errors, objectives, rules, schedules, sequences, text, bandpo):
        doctest_namespace.update({name: getattr(module, name) for name in module.__all__})
    doctest_namespace.update(bandpo=bandpo, torch=torch, did_you_mean=errors.did_you_mean)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder with the real AIME, AMC and GSM8K files."""
    folder = os.environ.get("BANDPO_TEST_DATA")
    if not folder:
        pytest.skip("BANDPO_TEST_DATA, the folder of the real evaluation sets, is not set")
    return Path(folder)
