"""bandpo: probability-aware ratio bounds for PPO and GRPO, projected from an f-divergence trust region.

Here is what a user types. The rest is in its module: `bandpo.rules`, `bandpo.methods`, `bandpo.objectives`,
`bandpo.divergences`, `bandpo.schedules`, `bandpo.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bandpo.audit.metrics import Audit
    from bandpo.audit.recorder import Recorder
    from bandpo.batch import Tokens
    from bandpo.bounds import RatioBounds, ratio_bounds
    from bandpo.divergences import KL, Divergence, FDivergence, TotalVariation
    from bandpo.gradient_check import certify
    from bandpo.linear import linear_logp
    from bandpo.loss import aggregate, policy_loss
    from bandpo.methods import DAPO, GRPO, GSPO, BandAbove, BandPO, Method
    from bandpo.objectives import DropOutside, DualClip, Objective, Surrogate
    from bandpo.rule_check import check
    from bandpo.rules import DCPO, Band, ClipRule, FixedClip, Loosest, TwoSided, Unclipped
    from bandpo.schedules import Linear, TrainingState
    from bandpo.text import as_text, parse

__version__ = "0.1.0"

__all__ = [
    "DAPO",
    "DCPO",
    "GRPO",
    "GSPO",
    "KL",
    "Audit",
    "Band",
    "BandAbove",
    "BandPO",
    "ClipRule",
    "Divergence",
    "DropOutside",
    "DualClip",
    "FDivergence",
    "FixedClip",
    "Linear",
    "Loosest",
    "Method",
    "Objective",
    "RatioBounds",
    "Recorder",
    "Surrogate",
    "Tokens",
    "TotalVariation",
    "TrainingState",
    "TwoSided",
    "Unclipped",
    "aggregate",
    "as_text",
    "certify",
    "check",
    "linear_logp",
    "parse",
    "policy_loss",
    "ratio_bounds",
]  # fmt: skip

MODULES = (
    "methods", "schedules", "rules", "objectives", "divergences", "bounds", "batch", "loss", "linear", "text",
    "gradient_check", "rule_check", "errors", "audit.metrics", "audit.recorder",
)  # fmt: skip
"""Where the names are. They are imported when one is first asked for: `bandpo --help` does not wait for torch."""


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return import_module(f"bandpo.{name}")
    if name in __all__:
        modules = (import_module(f"bandpo.{module}") for module in MODULES)
        found = globals()[name] = next(getattr(module, name) for module in modules if hasattr(module, name))
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
