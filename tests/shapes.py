"""Checks the shape annotations of bandpo as it runs: a pytest plugin.

    pytest -p shapes packages/bandpo/tests/core/test_loss.py

The annotations are imported for type checkers alone, since the core needs torch alone. Here they are imported
for good, and each function is wrapped in beartype's check; so this is for a process of its own, before bandpo is.
"""

import typing

import torch.func  # noqa: F401  (this and beartype before anything is told that it is being type-checked)
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as type checkers have it

MODULES = [
    f"bandpo.core.{name}" for name in ("_checks", "rule_check", "bounds", "rules", "divergences", "loss")
]
MODULES += [f"bandpo.core.{name}" for name in ("aggregation", "methods", "objectives", "schedules", "batch")]

typing.TYPE_CHECKING = True
with install_import_hook([*MODULES, "bandpo.audit.metrics"], "shapes.checked"):
    import bandpo.audit.metrics  # noqa: F401
typing.TYPE_CHECKING = False
