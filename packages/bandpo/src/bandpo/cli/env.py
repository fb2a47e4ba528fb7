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
from rich.markup import escape

import bandpo
from bandpo._terminal import printable

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


def _say_on_terminal(line: str) -> None:
    """Print on standard error what is being done, if a terminal shows it."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def env_command() -> None:
    """List the installed frameworks with their versions, and check that bandpo's adapter for each can be imported.

    Exits with 1 if the adapter of an installed framework cannot be imported.
    """
    # Importing torch and the frameworks takes seconds, so each line is printed when it is known.
    print(
        f"bandpo {bandpo.__version__}, Python {platform.python_version()}, torch {version('torch')}",
        flush=True,
    )
    _say_on_terminal("imports torch ...")
    import torch

    from bandpo.integrations import ADAPTERS

    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", flush=True)
    console = Console()
    console.print("framework  version     adapter", style="bold")
    has_failed = False
    for adapter in ADAPTERS:
        if importlib.util.find_spec(adapter.package) is not None:
            _say_on_terminal(f"imports {adapter.framework} and its adapter ...")
        installed, state, note = adapter_state(adapter)
        has_failed |= state == "fails"
        color = {"ok": "green", "absent": "dim", "fails": "red"}[state]
        shown = f"[{color}]{state}[/]{f'  {escape(printable(note))}' if note else ''}"
        console.print(f"{adapter.framework:<9}  {installed:<10}  {shown}", highlight=False, soft_wrap=True)
    if has_failed:
        sys.exit(1)
