"""bandpo: probability-aware ratio bounds for PPO and GRPO, projected from an f-divergence trust region.

The loss, the methods, the clip rules and the divergences are imported from here. The rest is in modules:
`bandpo.core.objectives`, `bandpo.core.schedules`, `bandpo.core.token_rules`, `bandpo.core.errors`, `bandpo.audit`,
`bandpo.watch`, `bandpo.testing` and `bandpo.integrations`.
"""

# Before all other imports.
from bandpo import _current_folder  # noqa: F401

# isort: split
from importlib import metadata as _metadata

from bandpo.certificate.plain import certify
from bandpo.core.aggregation import aggregate
from bandpo.core.batch import Batch
from bandpo.core.bounds import (
    RatioBounds,
    ratio_bounds,
)
from bandpo.core.compiled import compile_loss
from bandpo.core.divergences import (
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
from bandpo.core.importance import rollout_weights
from bandpo.core.layout import Packed, Rows
from bandpo.core.linear import linear_logp
from bandpo.core.loss import policy_loss
from bandpo.core.methods import (
    ASPO,
    BAPO,
    CEGPPO,
    CISPO,
    CPPO,
    DAPO,
    DGPO,
    DPPO,
    DRO,
    DRPO,
    FIPO,
    GMPO,
    GPG,
    GPPO,
    GRPO,
    GSPO,
    IPO,
    M2PO,
    MASPO,
    MHPO,
    PPO,
    PSPO,
    SAPO,
    SPO,
    TOPR,
    TRM,
    UPGRPO,
    VESPO,
    BandAbove,
    BandPO,
    ClipCov,
    DeepSeekV32,
    IcePop,
    KLCov,
    Method,
    MiniRL,
    PrimeRL,
    TokenTOPR,
)
from bandpo.core.rule_check import check
from bandpo.core.rules import (
    DCPO,
    Band,
    ClipRule,
    FixedClip,
    Loosest,
    TwoSided,
    Unclipped,
)
from bandpo.core.text import parse

__all__ = [
    "ASPO",
    "BAPO",
    "CEGPPO",
    "CISPO",
    "CPPO",
    "DAPO",
    "DCPO",
    "DGPO",
    "DPPO",
    "DRO",
    "DRPO",
    "FIPO",
    "GMPO",
    "GPG",
    "GPPO",
    "GRPO",
    "GSPO",
    "IPO",
    "KL",
    "M2PO",
    "MASPO",
    "MHPO",
    "PPO",
    "PSPO",
    "SAPO",
    "SPO",
    "TOPR",
    "TRM",
    "UPGRPO",
    "VESPO",
    "AlphaDivergence",
    "Band",
    "BandAbove",
    "BandPO",
    "Batch",
    "ClipCov",
    "ClipRule",
    "DeepSeekV32",
    "Divergence",
    "FDivergence",
    "FixedClip",
    "IcePop",
    "JensenShannon",
    "KLCov",
    "Loosest",
    "Method",
    "MiniRL",
    "NeymanChi2",
    "Packed",
    "PearsonChi2",
    "PrimeRL",
    "RatioBounds",
    "ReverseKL",
    "Rows",
    "SquaredHellinger",
    "TokenTOPR",
    "TotalVariation",
    "TwoSided",
    "Unclipped",
    "aggregate",
    "certify",
    "check",
    "compile_loss",
    "linear_logp",
    "parse",
    "policy_loss",
    "ratio_bounds",
    "rollout_weights",
]


try:
    # The newest tag, and the commits since then.
    __version__ = _metadata.version("bandpo")
except _metadata.PackageNotFoundError:
    # The package is on the path, and not installed.
    __version__ = "0+unknown"
