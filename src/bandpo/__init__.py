"""bandpo: probability-aware ratio bounds for PPO and GRPO, projected from an f-divergence trust region."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bandpo import (
    _rule_check,
    bounds,
    clipping,
    combinators,
    controllers,
    dcpo,
    divergences,
    losses,
    methods,
    notation,
    objectives,
    radius,
    tokens,
)
from bandpo._rule_check import *
from bandpo.bounds import *
from bandpo.clipping import *
from bandpo.combinators import *
from bandpo.controllers import *
from bandpo.dcpo import *
from bandpo.divergences import *
from bandpo.losses import *
from bandpo.methods import *
from bandpo.notation import *
from bandpo.objectives import *
from bandpo.radius import *
from bandpo.tokens import *

if TYPE_CHECKING:
    from bandpo.diagnostics.audit import Audit
    from bandpo.diagnostics.recorder import Recorder

__version__ = "0.1.0"
__all__ = ["Audit", "Recorder"]  # and what the modules of the core define
__all__ += _rule_check.__all__
__all__ += bounds.__all__
__all__ += clipping.__all__
__all__ += combinators.__all__
__all__ += controllers.__all__
__all__ += dcpo.__all__
__all__ += divergences.__all__
__all__ += losses.__all__
__all__ += methods.__all__
__all__ += notation.__all__
__all__ += objectives.__all__
__all__ += radius.__all__
__all__ += tokens.__all__

LAZY = {"Audit": "bandpo.diagnostics.audit", "Recorder": "bandpo.diagnostics.recorder"}
"""What is imported when it is first asked for, so that `import bandpo` loads the core alone."""


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
