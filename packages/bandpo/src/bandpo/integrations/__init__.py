"""Integrations with training frameworks: one module per framework, which imports that framework.

No rule or method is defined here: those are in `bandpo.core`, and what adapters share of them is in this folder's own
files.
This package itself imports only torch.
"""

from __future__ import annotations

from bandpo._adapters import ADAPTERS, Adapter
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
