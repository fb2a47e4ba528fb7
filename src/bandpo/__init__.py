"""bandpo: probability-aware ratio bounds for PPO and GRPO, projected from an f-divergence trust region."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bandpo import batch, bounds, divergences, loss, methods, objectives, radius, rule_check, rules, text
from bandpo.batch import *
from bandpo.bounds import *
from bandpo.divergences import *
from bandpo.loss import *
from bandpo.methods import *
from bandpo.objectives import *
from bandpo.radius import *
from bandpo.rule_check import *
from bandpo.rules import *
from bandpo.text import *

if TYPE_CHECKING:
    from bandpo.audit.metrics import Audit
    from bandpo.audit.recorder import Recorder

__version__ = "0.1.0"
__all__ = ["Audit", "Recorder"]  # and what the modules of the core define
for module in (batch, bounds, divergences, loss, methods, objectives, radius, rule_check, rules, text):
    __all__ += module.__all__

LAZY = {"Audit": "bandpo.audit.metrics", "Recorder": "bandpo.audit.recorder"}
"""What is imported when it is first asked for, so that `import bandpo` loads the core alone."""


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
