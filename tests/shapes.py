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

CORE = ["_checks", "rule_check", "bounds", "rules", "audit.metrics", "divergences"]
CORE += ["loss", "methods", "objectives", "schedules", "batch"]

import bandpo  # noqa: E402

typing.TYPE_CHECKING = True
with install_import_hook([f"bandpo.{module}" for module in CORE], "shapes.checked"):
    import bandpo.audit.metrics
    import bandpo.core.loss
    import bandpo.core.methods
    import bandpo.core.rule_check  # noqa: F401
typing.TYPE_CHECKING = False
