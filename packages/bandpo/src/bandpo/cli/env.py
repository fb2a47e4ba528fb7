"""The command `bandpo env`."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

import bandpo

if TYPE_CHECKING:
    from bandpo.integrations import Adapter


def adapter_state(adapter: Adapter) -> tuple[str, str, str]:
    """Return the version of an adapter's framework, its state (``ok``, ``absent`` or ``fails``), and a note."""
    if importlib.util.find_spec(adapter.package) is None:
        return "", "absent", ""
    try:
        installed = version(adapter.distribution)
    except PackageNotFoundError:
        # A package on the path that is not installed has no metadata.
        installed = "?"
    try:
        with warnings.catch_warnings():
            # The frameworks print warnings of their own.
            warnings.simplefilter("ignore")
            import_module(f"bandpo.integrations.{adapter.module}")
    except Exception as error:
        # Importing a framework can raise errors of any type.
        return installed, "fails", f"{type(error).__name__}: {error}"
    problem = _verl_plugin_problem() if adapter.module == "verl" else ""
    if problem:
        return installed, "fails", problem
    note = "" if installed in ("?", adapter.tested) else f"tested with {adapter.tested}"
    return installed, "ok", note


def _verl_plugin_problem() -> str:
    """Return the reason why verl does not load bandpo's plugin; empty if it does.

    verl finds plugins by entry points, and prints nothing if one is missing or excluded.
    """
    if not any(point.value == "bandpo.integrations.verl" for point in entry_points(group="verl.plugins")):
        return "bandpo is on the path but not installed, so verl does not see its plugin: in a clone, pip install ."
    plugins = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if plugins != "auto" and "bandpo" not in plugins.split(","):
        return f"VERL_USE_EXTERNAL_PLUGINS={plugins} keeps the plugin out: add bandpo to it"
    return ""


def env_command() -> None:
    """List the installed frameworks with their versions, and check that bandpo's adapter for each can be imported.

    Exits with 1 if the adapter of an installed framework cannot be imported.
    """
    # Importing torch and the frameworks takes seconds, so the versions are printed before.
    print(
        f"bandpo {bandpo.__version__}, Python {platform.python_version()}, torch {version('torch')}",
        flush=True,
    )
    if sys.stderr.isatty():
        print("imports torch and the adapters of the installed frameworks ...", file=sys.stderr, flush=True)
    import torch

    from bandpo.integrations import ADAPTERS

    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", flush=True)
    table = Table("framework", "version", "adapter", "")
    states = []
    for adapter in ADAPTERS:
        installed, state, note = adapter_state(adapter)
        states.append(state)
        color = {"ok": "green", "absent": "dim", "fails": "red"}[state]
        table.add_row(adapter.framework, installed, f"[{color}]{state}[/]", note)
    Console().print(table)
    if "fails" in states:
        sys.exit(1)
