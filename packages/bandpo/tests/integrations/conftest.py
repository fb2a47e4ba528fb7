"""What the tests of integrations share."""

import functools
import importlib.util

import pytest

from helpers.settings_files import files_of_settings_are_merged_once  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True, scope="session")
def _packages_are_looked_for_once():
    """Keep what accelerate finds out about a package: it reads the package's metadata at each update."""
    if importlib.util.find_spec("accelerate") is None:
        yield
        return
    from accelerate.utils import imports

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imports, "_is_package_available", functools.cache(imports._is_package_available))
        yield
