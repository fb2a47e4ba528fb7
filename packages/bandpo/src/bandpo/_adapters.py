"""The list of the adapters in `bandpo.integrations`. It is here because that folder imports torch."""

from __future__ import annotations

from dataclasses import dataclass


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
