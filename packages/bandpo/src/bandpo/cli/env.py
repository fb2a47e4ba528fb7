"""The command `bandpo env`."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import bandpo
from bandpo._adapters import ADAPTERS, Adapter
from bandpo._terminal import printable

COLORS = {"ok": "green", "not tried": "default", "absent": "dim", "fails": "red"}
"""The color of each state of an adapter."""


def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution; ``?`` for a package on the path, which has no metadata."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "?"


def adapter_state(adapter: Adapter, *, imports: bool) -> tuple[str, str, str]:
    """Return the version of an adapter's framework, its state, and a note.

    The state is ``absent`` if the framework is not installed and ``fails`` if the adapter cannot be used. Otherwise it
    is ``ok`` if the adapter was imported, and ``not tried`` otherwise.

    Args:
        adapter: The adapter.
        imports: True to import it, and the framework with it.
    """
    if importlib.util.find_spec(adapter.package) is None:
        return "", "absent", ""
    installed = installed_version(adapter.distribution)
    if imports:
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
    return installed, "ok" if imports else "not tried", note


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


def _print_gpu() -> None:
    """Print the GPU that torch finds."""
    _say_on_terminal("imports torch ...")
    import torch

    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", flush=True)


def env_command(
    imports: Annotated[
        bool,
        typer.Option(
            "--import",
            help="Also import torch, to say which GPU it finds, and each adapter. This takes seconds.",
        ),
    ] = False,
) -> None:
    """List the installed frameworks with their versions, and which of them have an adapter of bandpo.

    Exits with 1 if verl does not load bandpo's plugin, or if an adapter cannot be imported, which --import tries.
    """
    torch_version = "absent" if importlib.util.find_spec("torch") is None else installed_version("torch")
    print(
        f"bandpo {bandpo.__version__}, Python {platform.python_version()}, torch {torch_version}", flush=True
    )
    if imports:
        _print_gpu()
    console = Console()
    console.print("framework  version     adapter", style="bold")
    has_failed = False
    # Importing a framework takes seconds, so each line is printed when it is known.
    for adapter in ADAPTERS:
        if imports and importlib.util.find_spec(adapter.package) is not None:
            _say_on_terminal(f"imports {adapter.framework} and its adapter ...")
        installed, state, note = adapter_state(adapter, imports=imports)
        has_failed |= state == "fails"
        shown = f"[{COLORS[state]}]{state}[/]{f'  {escape(printable(note))}' if note else ''}"
        console.print(f"{adapter.framework:<9}  {installed:<10}  {shown}", highlight=False, soft_wrap=True)
    if not imports:
        print("With --import each adapter is tried, and torch is asked for a GPU.")
    if has_failed:
        sys.exit(1)
