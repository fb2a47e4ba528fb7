"""What the docstring examples of the core may use without importing it, and where no examples are looked for."""

import importlib.util
import os
from contextlib import suppress
from pathlib import Path

import pytest

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # trl.experimental announces itself by a warning

FRAMEWORKS = {"_trl_config": "trl", "verl": "verl"}
"""Adapters with examples, and what they need. Others need no framework, or have no examples."""


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None):
        return  # its workers collect and run the tests
    with suppress(ImportError):  # not every environment of the matrix has it
        from hypothesis import settings

        # How long an example takes says how busy the machine is.
        settings.register_profile("untimed", deadline=None)
        settings.load_profile("untimed")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Beside tests, a module is imported for its examples: one without any is not, nor one without its framework."""
    if collection_path.suffix != ".py" or collection_path.name.startswith("test_"):
        return None
    framework = FRAMEWORKS.get(collection_path.stem)
    absent = framework is not None and importlib.util.find_spec(framework) is None
    return absent or ">>>" not in collection_path.read_text(encoding="utf-8") or None


@pytest.fixture(autouse=True, scope="session")
def _doctest_names(doctest_namespace):
    import torch

    import bandpo
    from bandpo import batch, divergences, loss, methods, objectives, rules, schedules, text

    for module in (batch, divergences, loss, methods, objectives, rules, schedules, text):
        doctest_namespace.update({name: getattr(module, name) for name in module.__all__})
    doctest_namespace.update(
        # Watch needs transformers, which is not everywhere; its examples name it bandpo.Watch.
        {name: getattr(bandpo, name) for name in bandpo.__all__ if name != "Watch"},
        bandpo=bandpo,
        torch=torch,
    )


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder with the real AIME, AMC and GSM8K files."""
    folder = os.environ.get("BANDPO_TEST_DATA")
    if not folder:
        pytest.skip("BANDPO_TEST_DATA, the folder of the real evaluation sets, is not set")
    return Path(folder)
