"""bandpo: probability-aware ratio bounds for PPO and GRPO, projected from an f-divergence trust region."""

from bandpo.bounds import RatioBounds, ratio_bounds
from bandpo.clipping import Band, Clipped, ClipRule, FixedClip, Unclipped
from bandpo.combinators import Capped, Intersection, Sides, Union
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
from bandpo.notation import parse_divergence, parse_objective, parse_rule
from bandpo.objectives import ClippedWeight, Masked, Objective, Surrogate
from bandpo.radius import (
    ByEntropy,
    BySurprisal,
    Cosine,
    HoldClipRate,
    HoldEntropy,
    HoldKL,
    Linear,
    Moment,
    Radius,
)
from bandpo.rivals import DCPO

__version__ = "0.1.0"
__all__ = [
    "DCPO",
    "KL",
    "AlphaDivergence",
    "Band",
    "ByEntropy",
    "BySurprisal",
    "Capped",
    "ClipRule",
    "Clipped",
    "ClippedWeight",
    "Cosine",
    "Divergence",
    "FDivergence",
    "FixedClip",
    "HoldClipRate",
    "HoldEntropy",
    "HoldKL",
    "Intersection",
    "JensenShannon",
    "Linear",
    "LossOutputs",
    "Masked",
    "Moment",
    "NeymanChi2",
    "Objective",
    "PearsonChi2",
    "Radius",
    "RatioBounds",
    "ReverseKL",
    "Sides",
    "SquaredHellinger",
    "Surrogate",
    "TotalVariation",
    "Unclipped",
    "Union",
    "aggregate",
    "parse_divergence",
    "parse_objective",
    "parse_rule",
    "policy_loss",
    "ratio_bounds",
]
