"""bandpo: probability-aware ratio bounds for PPO and GRPO, projected from an f-divergence trust region."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bandpo._deprecated import MovedModules, warn
from bandpo._rule_check import check
from bandpo.bounds import RatioBounds, ratio_bounds
from bandpo.clipping import Band, ClipRule, FixedClip, Outside, Unclipped
from bandpo.combinators import Capped, Intersection, Sides, Union
from bandpo.dcpo import DCPO
from bandpo.divergences import (
    KL,
    AlphaDivergence,
    Divergence,
    FDivergence,
    JensenShannon,
    NeymanChi2,
    PearsonChi2,
    ReverseKL,
    SquaredHellinger,
    TotalVariation,
)
from bandpo.losses import LossOutputs, aggregate, policy_loss
from bandpo.methods import (
    ASPO,
    BAPO,
    CEGPPO,
    CISPO,
    DAPO,
    DPPO,
    DRPO,
    GMPO,
    GPG,
    GPPO,
    GRPO,
    GSPO,
    SAPO,
    SPO,
    UPGRPO,
    VESPO,
    BandPO,
    IcePop,
    Method,
    Parts,
)
from bandpo.notation import as_text, parse_divergence, parse_method, parse_objective, parse_rule
from bandpo.objectives import (
    Balanced,
    ClippedWeight,
    DualClip,
    GammaWeight,
    GeometricMean,
    InverseRatio,
    KeepBound,
    Masked,
    MiddleTanh,
    Objective,
    ProbabilityPenalty,
    Quadratic,
    Rollback,
    SelfAnchored,
    SequenceMask,
    SigmoidGate,
    SoftClip,
    Surrogate,
    Unweighted,
)
from bandpo.radius import (
    ByEntropy,
    BySurprisal,
    Cosine,
    HoldClipRate,
    HoldEntropy,
    HoldKL,
    Linear,
    Polynomial,
    Radius,
    Restarts,
    TrainingState,
)
from bandpo.tokens import Tokens

if TYPE_CHECKING:
    from bandpo.diagnostics.audit import Audit

__version__ = "0.1.0"
__all__ = [
    "ASPO",
    "BAPO",
    "CEGPPO",
    "CISPO",
    "DAPO",
    "DCPO",
    "DPPO",
    "DRPO",
    "GMPO",
    "GPG",
    "GPPO",
    "GRPO",
    "GSPO",
    "KL",
    "SAPO",
    "SPO",
    "UPGRPO",
    "VESPO",
    "AlphaDivergence",
    "Audit",
    "Balanced",
    "Band",
    "BandPO",
    "ByEntropy",
    "BySurprisal",
    "Capped",
    "ClipRule",
    "ClippedWeight",
    "Cosine",
    "Divergence",
    "DualClip",
    "FDivergence",
    "FixedClip",
    "GammaWeight",
    "GeometricMean",
    "HoldClipRate",
    "HoldEntropy",
    "HoldKL",
    "IcePop",
    "Intersection",
    "InverseRatio",
    "JensenShannon",
    "KeepBound",
    "Linear",
    "LossOutputs",
    "Masked",
    "Method",
    "MiddleTanh",
    "NeymanChi2",
    "Objective",
    "Outside",
    "Parts",
    "PearsonChi2",
    "Polynomial",
    "ProbabilityPenalty",
    "Quadratic",
    "Radius",
    "RatioBounds",
    "Restarts",
    "ReverseKL",
    "Rollback",
    "SelfAnchored",
    "SequenceMask",
    "Sides",
    "SigmoidGate",
    "SoftClip",
    "SquaredHellinger",
    "Surrogate",
    "Tokens",
    "TotalVariation",
    "TrainingState",
    "Unclipped",
    "Union",
    "Unweighted",
    "aggregate",
    "as_text",
    "check",
    "parse_divergence",
    "parse_method",
    "parse_objective",
    "parse_rule",
    "policy_loss",
    "ratio_bounds",
]

LAZY = {"Audit": "bandpo.diagnostics.audit"}
"""What is imported when it is first asked for, so that `import bandpo` loads the core alone."""


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    if name == "Moment":
        warn("bandpo.Moment", "bandpo.TrainingState")
        return TrainingState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sys.meta_path.insert(
    0, MovedModules()
)  # the usual finders would load a second copy of what lies in a package
