"""bandpo: probability-aware ratio bounds for PPO and GRPO, projected from an f-divergence trust region.

Methods, clip rules, divergences, objectives and schedules are imported from here, and so are the functions that use
them. Each name is loaded on first access, so ``import bandpo`` imports no torch. Submodules are attributes too:
`bandpo.audit`, `bandpo.errors`, `bandpo.integrations`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from bandpo import audit as audit
    from bandpo import batch as batch
    from bandpo import bounds as bounds
    from bandpo import cli as cli
    from bandpo import divergences as divergences
    from bandpo import doctor as doctor
    from bandpo import errors as errors
    from bandpo import gradient_check as gradient_check
    from bandpo import integrations as integrations
    from bandpo import linear as linear
    from bandpo import loss as loss
    from bandpo import methods as methods
    from bandpo import objectives as objectives
    from bandpo import report as report
    from bandpo import rule_check as rule_check
    from bandpo import rules as rules
    from bandpo import runs as runs
    from bandpo import schedules as schedules
    from bandpo import testing as testing
    from bandpo import text as text
    from bandpo.audit.metrics import Audit
    from bandpo.audit.recorder import Recorder
    from bandpo.batch import (
        Batch,
        Tokens,
    )
    from bandpo.bounds import (
        RatioBounds,
        ratio_bounds,
    )
    from bandpo.compiled import compile_loss
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
    from bandpo.gradient_check import (
        GradientCheck,
        certify,
    )
    from bandpo.importance import rollout_weights
    from bandpo.integrations._watch import Watch
    from bandpo.linear import linear_logp
    from bandpo.loss import (
        LossOutputs,
        aggregate,
        policy_loss,
    )
    from bandpo.methods import (
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
        METHODS,
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
    from bandpo.objectives import (
        ClippedWeight,
        CovarianceMask,
        CovariancePenalty,
        DecoupledDecay,
        DropOutside,
        DualClip,
        FutureKL,
        GammaWeight,
        GeometricMean,
        HazardGate,
        InverseRatio,
        KeepBound,
        LogRatioPenalty,
        MassAdaptiveGate,
        Objective,
        ProbabilityPenalty,
        Quadratic,
        RatioCap,
        RolloutSurrogate,
        SelfAnchored,
        SequenceMask,
        SequenceProduct,
        SigmoidGate,
        Smoothed,
        Surrogate,
        Unweighted,
    )
    from bandpo.rule_check import check
    from bandpo.rules import (
        DCPO,
        Band,
        ClipMask,
        ClipRule,
        FixedClip,
        LogClip,
        Loosest,
        Tightest,
        TokenRule,
        TwoSided,
        Unclipped,
    )
    from bandpo.schedules import (
        ClipRateController,
        Controller,
        Linear,
        Radius,
        TrainingState,
    )
    from bandpo.text import (
        as_method,
        as_text,
        parse,
    )
    from bandpo.token_data import TokenData
    from bandpo.token_rules import (
        BalancedBounds,
        PrefixBudget,
        SecondMoment,
    )


_MODULES = {
    "Audit": "bandpo.audit.metrics",
    "Recorder": "bandpo.audit.recorder",
    "Batch": "bandpo.batch",
    "Tokens": "bandpo.batch",
    "RatioBounds": "bandpo.bounds",
    "ratio_bounds": "bandpo.bounds",
    "compile_loss": "bandpo.compiled",
    "KL": "bandpo.divergences",
    "AlphaDivergence": "bandpo.divergences",
    "Divergence": "bandpo.divergences",
    "FDivergence": "bandpo.divergences",
    "JensenShannon": "bandpo.divergences",
    "NeymanChi2": "bandpo.divergences",
    "PearsonChi2": "bandpo.divergences",
    "ReverseKL": "bandpo.divergences",
    "SquaredHellinger": "bandpo.divergences",
    "TotalVariation": "bandpo.divergences",
    "GradientCheck": "bandpo.gradient_check",
    "certify": "bandpo.gradient_check",
    "rollout_weights": "bandpo.importance",
    "Watch": "bandpo.integrations._watch",
    "linear_logp": "bandpo.linear",
    "LossOutputs": "bandpo.loss",
    "aggregate": "bandpo.loss",
    "policy_loss": "bandpo.loss",
    "ASPO": "bandpo.methods",
    "BAPO": "bandpo.methods",
    "CEGPPO": "bandpo.methods",
    "CISPO": "bandpo.methods",
    "CPPO": "bandpo.methods",
    "DAPO": "bandpo.methods",
    "DGPO": "bandpo.methods",
    "DPPO": "bandpo.methods",
    "DRO": "bandpo.methods",
    "DRPO": "bandpo.methods",
    "FIPO": "bandpo.methods",
    "GMPO": "bandpo.methods",
    "GPG": "bandpo.methods",
    "GPPO": "bandpo.methods",
    "GRPO": "bandpo.methods",
    "GSPO": "bandpo.methods",
    "IPO": "bandpo.methods",
    "M2PO": "bandpo.methods",
    "MASPO": "bandpo.methods",
    "METHODS": "bandpo.methods",
    "MHPO": "bandpo.methods",
    "PPO": "bandpo.methods",
    "PSPO": "bandpo.methods",
    "SAPO": "bandpo.methods",
    "SPO": "bandpo.methods",
    "TOPR": "bandpo.methods",
    "TRM": "bandpo.methods",
    "UPGRPO": "bandpo.methods",
    "VESPO": "bandpo.methods",
    "BandAbove": "bandpo.methods",
    "BandPO": "bandpo.methods",
    "ClipCov": "bandpo.methods",
    "DeepSeekV32": "bandpo.methods",
    "IcePop": "bandpo.methods",
    "KLCov": "bandpo.methods",
    "Method": "bandpo.methods",
    "MiniRL": "bandpo.methods",
    "PrimeRL": "bandpo.methods",
    "TokenTOPR": "bandpo.methods",
    "ClippedWeight": "bandpo.objectives",
    "CovarianceMask": "bandpo.objectives",
    "CovariancePenalty": "bandpo.objectives",
    "DecoupledDecay": "bandpo.objectives",
    "DropOutside": "bandpo.objectives",
    "DualClip": "bandpo.objectives",
    "FutureKL": "bandpo.objectives",
    "GammaWeight": "bandpo.objectives",
    "GeometricMean": "bandpo.objectives",
    "HazardGate": "bandpo.objectives",
    "InverseRatio": "bandpo.objectives",
    "KeepBound": "bandpo.objectives",
    "LogRatioPenalty": "bandpo.objectives",
    "MassAdaptiveGate": "bandpo.objectives",
    "Objective": "bandpo.objectives",
    "ProbabilityPenalty": "bandpo.objectives",
    "Quadratic": "bandpo.objectives",
    "RatioCap": "bandpo.objectives",
    "RolloutSurrogate": "bandpo.objectives",
    "SelfAnchored": "bandpo.objectives",
    "SequenceMask": "bandpo.objectives",
    "SequenceProduct": "bandpo.objectives",
    "SigmoidGate": "bandpo.objectives",
    "Smoothed": "bandpo.objectives",
    "Surrogate": "bandpo.objectives",
    "Unweighted": "bandpo.objectives",
    "check": "bandpo.rule_check",
    "DCPO": "bandpo.rules",
    "Band": "bandpo.rules",
    "ClipMask": "bandpo.rules",
    "ClipRule": "bandpo.rules",
    "FixedClip": "bandpo.rules",
    "LogClip": "bandpo.rules",
    "Loosest": "bandpo.rules",
    "Tightest": "bandpo.rules",
    "TokenRule": "bandpo.rules",
    "TwoSided": "bandpo.rules",
    "Unclipped": "bandpo.rules",
    "ClipRateController": "bandpo.schedules",
    "Controller": "bandpo.schedules",
    "Linear": "bandpo.schedules",
    "Radius": "bandpo.schedules",
    "TrainingState": "bandpo.schedules",
    "as_method": "bandpo.text",
    "as_text": "bandpo.text",
    "parse": "bandpo.text",
    "TokenData": "bandpo.token_data",
    "BalancedBounds": "bandpo.token_rules",
    "PrefixBudget": "bandpo.token_rules",
    "SecondMoment": "bandpo.token_rules",
}
"""The module of each public name. ``python tests/public_names.py`` writes this, the imports above and ``__all__``."""

_SUBMODULES = (
    "audit",
    "batch",
    "bounds",
    "cli",
    "compiled",
    "doctor",
    "divergences",
    "errors",
    "gradient_check",
    "importance",
    "integrations",
    "linear",
    "lint",
    "loss",
    "methods",
    "objectives",
    "report",
    "rule_check",
    "rules",
    "runs",
    "schedules",
    "sequences",
    "testing",
    "text",
    "token_data",
    "token_rules",
)
"""The public submodules."""

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
    "METHODS",
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
    "Audit",
    "BalancedBounds",
    "Band",
    "BandAbove",
    "BandPO",
    "Batch",
    "ClipCov",
    "ClipMask",
    "ClipRateController",
    "ClipRule",
    "ClippedWeight",
    "Controller",
    "CovarianceMask",
    "CovariancePenalty",
    "DecoupledDecay",
    "DeepSeekV32",
    "Divergence",
    "DropOutside",
    "DualClip",
    "FDivergence",
    "FixedClip",
    "FutureKL",
    "GammaWeight",
    "GeometricMean",
    "GradientCheck",
    "HazardGate",
    "IcePop",
    "InverseRatio",
    "JensenShannon",
    "KLCov",
    "KeepBound",
    "Linear",
    "LogClip",
    "LogRatioPenalty",
    "Loosest",
    "LossOutputs",
    "MassAdaptiveGate",
    "Method",
    "MiniRL",
    "NeymanChi2",
    "Objective",
    "PearsonChi2",
    "PrefixBudget",
    "PrimeRL",
    "ProbabilityPenalty",
    "Quadratic",
    "Radius",
    "RatioBounds",
    "RatioCap",
    "Recorder",
    "ReverseKL",
    "RolloutSurrogate",
    "SecondMoment",
    "SelfAnchored",
    "SequenceMask",
    "SequenceProduct",
    "SigmoidGate",
    "Smoothed",
    "SquaredHellinger",
    "Surrogate",
    "Tightest",
    "TokenData",
    "TokenRule",
    "TokenTOPR",
    "Tokens",
    "TotalVariation",
    "TrainingState",
    "TwoSided",
    "Unclipped",
    "Unweighted",
    "Watch",
    "aggregate",
    "as_method",
    "as_text",
    "certify",
    "check",
    "compile_loss",
    "linear_logp",
    "parse",
    "policy_loss",
    "ratio_bounds",
    "rollout_weights",
]


def _version() -> str:
    """Return the version of the installed distribution, which is the newest tag and the commits since then."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("bandpo")
    except PackageNotFoundError:
        return "0+unknown"  # the package is on the path, and not installed


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _SUBMODULES:
        return import_module(f"bandpo.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        missing = import_module("bandpo.errors").MissingPackage
        raise missing(f"bandpo.{name} needs torch: in a clone of bandpo, pip install '.[torch]'") from error
    # The next access finds the name without this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_SUBMODULES, "__version__"]
