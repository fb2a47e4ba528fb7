"""What the tests of recipes share."""

import functools
import importlib.util
from copy import deepcopy
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def _files_of_settings_are_parsed_once():
    """Keep what hydra has read of verl's and the recipes' files: to parse them takes most of a composition's time."""
    if importlib.util.find_spec("hydra") is None:
        yield
        return
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins

    Plugins.instance()  # which registers them
    source = SourcesRegistry.instance().resolve("file")
    read = source.load_config

    @functools.cache
    def parsed(folder: str, name: str, changed: int):
        return read(source("tests", folder), name)

    def load_config(self, config_path):
        file = Path(self.path, self._normalize_file_name(config_path))
        if not file.is_file():
            return read(self, config_path)
        result = deepcopy(parsed(self.path, config_path, file.stat().st_mtime_ns))
        result.provider = self.provider
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "load_config", load_config)
        yield
