"""For tests that compose verl's settings by the dozen: hydra reads and merges the same files once."""

import functools
import importlib.util
import pickle
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def files_of_settings_are_merged_once() -> Iterator[None]:
    """Keep what hydra makes of verl's and the recipes' files, which takes most of a composition's time.

    Overrides that choose a file take part in what is kept. All others are applied anew, to a copy.
    """
    if importlib.util.find_spec("hydra") is None:
        yield
        return
    import omegaconf.base
    from hydra._internal import config_loader_impl
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins

    Plugins.instance()  # which registers the sources
    loader, source = config_loader_impl.ConfigLoaderImpl, SourcesRegistry.instance().resolve("file")
    list_files, merge, read = (
        config_loader_impl.create_defaults_list,
        loader._compose_config_from_defaults_list,
        source.load_config,
    )
    lists, merged, parsed = {}, {}, {}

    def create_defaults_list(repo, config_name, overrides_list, prepend_hydra, skip_missing):
        of_files = [override for override in overrides_list if repo.group_exists(override.key_or_group)]
        lines = (override.input_line for override in of_files)
        key = (state(repo), config_name, prepend_hydra, skip_missing, *lines)
        if key not in lists:
            lists[key] = list_files(repo, config_name, of_files, prepend_hydra, skip_missing)
        values = [
            override
            for override in overrides_list
            # A dictionary for a folder of files is a value.
            if not override.is_sweep_override()
            and (override not in of_files or isinstance(override.value(), dict))
        ]
        return replace(lists[key], config_overrides=values)

    def compose_from_defaults_list(self, defaults, repo):
        key = (state(repo), *map(astuple, defaults))
        if key not in merged:
            merged[key] = pickle.dumps(merge(self, defaults, repo))
        return pickle.loads(merged[key])  # noqa: S301  (of this process; several times as fast as deepcopy)

    def load_config(self, config_path):
        file = Path(self.path, self._normalize_file_name(config_path))
        if not file.is_file():
            return read(self, config_path)
        key = (file, self.provider, file.stat().st_mtime_ns)
        if key not in parsed:
            parsed[key] = pickle.dumps(read(self, config_path))
        return pickle.loads(parsed[key])  # noqa: S301

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "load_config", load_config)
        patch.setattr(config_loader_impl, "create_defaults_list", create_defaults_list)
        patch.setattr(loader, "_compose_config_from_defaults_list", compose_from_defaults_list)
        # Nothing changes what an interpolation was parsed to.
        patch.setattr(omegaconf.base, "parse", functools.cache(omegaconf.base.parse))
        yield


def state(repository) -> tuple:
    """Return the folders in which hydra looks, in their order, with the time of each file's last change."""
    folders = tuple((source.scheme(), source.path) for source in repository.get_sources())
    files = [file for scheme, path in folders if scheme == "file" for file in Path(path).rglob("*.yaml")]
    return folders, *((file, file.stat().st_mtime_ns) for file in files)
