"""`bandpo doctor`."""

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
    """The framework's installed version, ``ok``, ``absent`` or ``fails``, and what to know or do about it."""
    if importlib.util.find_spec(adapter.package) is None:
        return "", "absent", ""
    try:
        found = version(adapter.distribution)
    except PackageNotFoundError:  # on the path without metadata: a checkout
        found = "?"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the frameworks' own
            import_module(f"bandpo.integrations.{adapter.module}")
    except Exception as error:  # whatever a framework's import can raise is what the user wants to know
        return found, "fails", f"{type(error).__name__}: {error}"
    if adapter.module == "verl" and (why := _verl_does_not_load_it()):
        return found, "fails", why
    return found, "ok", "" if found in ("?", adapter.tested) else f"tested with {adapter.tested}"


def _verl_does_not_load_it() -> str:
    """verl finds the loss by an entry point, and says nothing where that is missing or filtered out."""
    if not any(point.value == "bandpo.integrations.verl" for point in entry_points(group="verl.plugins")):
        return "bandpo is on the path but not installed, so verl does not see its plugin: in a clone, pip install ."
    wanted = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if wanted != "auto" and "bandpo" not in wanted.split(","):
        return f"VERL_USE_EXTERNAL_PLUGINS={wanted} keeps the plugin out: add bandpo to it"
    return ""


def doctor_command() -> None:
    """Say what runs here, which installed frameworks Band works in, at which version, and why not.

    Exits with 1 if a framework is installed and its adapter does not load. `--gpu`, of bandpo-lab: one step with verl.
    """
    import torch

    from bandpo.integrations import ADAPTERS

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    here = f"Python {platform.python_version()}, torch {torch.__version__}, {device}"
    print(f"bandpo {bandpo.__version__}, {here}", flush=True)  # at once; the frameworks take their time
    table = Table("framework", "version", "adapter", "")
    states = []
    for adapter in ADAPTERS:
        found, state, note = adapter_state(adapter)
        states.append(state)
        color = {"ok": "green", "absent": "dim", "fails": "red"}[state]
        table.add_row(adapter.framework, found, f"[{color}]{state}[/]", note)
    Console().print(table)
    if "fails" in states:
        sys.exit(1)
