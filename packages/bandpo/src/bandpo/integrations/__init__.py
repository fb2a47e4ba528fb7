"""Integrations with training frameworks: one module per framework, which imports that framework.

No rule or method is defined here: those are in `bandpo.core`, and what adapters share of them is in this folder's own
files.
This package itself imports only torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from bandpo.integrations._adapt import (
    Epsilons,
    check_anchor,
    describe_anchor,
    dual_clip_of,
    epsilons,
    read_bounds,
    read_method,
    record,
)
from bandpo.integrations._settings import check_settings

__all__ = [
    "ADAPTERS",
    "Adapter",
    "Epsilons",
    "check_anchor",
    "check_settings",
    "describe_anchor",
    "dual_clip_of",
    "epsilons",
    "read_bounds",
    "read_method",
    "record",
]


@dataclass(frozen=True)
class Adapter:
    """The description of an integration, for `bandpo env` and the test matrix."""

    framework: str
    """The framework's name in prose."""
    distribution: str
    """The name of its distribution on PyPI."""
    package: str
    """The name of its Python package."""
    module: str
    """The integration's module in `bandpo.integrations`."""
    tested: str
    """The framework's version in the tests."""


ADAPTERS = (
    Adapter("TRL", "trl", "trl", "trl", "1.16.0"),
    Adapter("verl", "verl", "verl", "verl", "0.9.1"),
    Adapter("Tinker", "tinker", "tinker", "tinker", "0.38.0"),
    Adapter("SkyRL", "skyrl", "skyrl", "skyrl", "0.3.0"),
)
