"""Adapters: one module for each framework, loaded when it is imported. This package itself loads torch alone."""

from __future__ import annotations

from dataclasses import dataclass

from bandpo.integrations._adapt import Epsilons, dual_clip_of, epsilons, read_bounds, read_method, record
from bandpo.integrations._settings import check_settings

__all__ = [
    "ADAPTERS",
    "Adapter",
    "Epsilons",
    "check_settings",
    "dual_clip_of",
    "epsilons",
    "read_bounds",
    "read_method",
    "record",
]


@dataclass(frozen=True)
class Adapter:
    """Description of an adapter for `bandpo env` and the matrix of tests."""

    framework: str
    """Its name in prose."""
    distribution: str
    """Its name in the metadata of an environment, which tells the version."""
    package: str
    """What one imports."""
    module: str
    """The adapter, in `bandpo.integrations`."""
    tested: str
    """The version that the adapter is tested with."""


ADAPTERS = (
    Adapter("TRL", "trl", "trl", "trl", "1.16.0"),
    Adapter("verl", "verl", "verl", "verl", "0.9.1"),
    Adapter("Tinker", "tinker", "tinker", "tinker", "0.38.0"),
    Adapter("SkyRL", "skyrl", "skyrl", "skyrl", "0.3.0"),
)
