"""bandpo: probability-aware ratio bounds for PPO and GRPO, projected from an f-divergence trust region.

The loss, the methods, the clip rules and the divergences are imported from here, and torch with the first of them. The
rest is in modules: `bandpo.core.objectives`, `bandpo.core.schedules`, `bandpo.core.token_rules`, `bandpo.core.errors`,
`bandpo.audit`, `bandpo.watch`, `bandpo.testing` and `bandpo.integrations`.
"""

# Before all other imports.
from bandpo import _current_folder  # noqa: F401

# isort: split
from importlib import import_module as _import_module
from importlib import metadata as _metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_MODULES = (
    "bandpo.core.divergences",
    "bandpo.core.bounds",
    "bandpo.core.rules",
    "bandpo.core.layout",
    "bandpo.core.linear",
    "bandpo.core.aggregation",
    "bandpo.core.batch",
    "bandpo.core.importance",
    "bandpo.core.methods",
    "bandpo.core.text",
    "bandpo.core.loss",
    "bandpo.core.compiled",
    "bandpo.core.rule_check",
    "bandpo.certificate.plain",
)
"""The modules whose names are offered here, each behind those that it imports."""

# Type checkers read the imports above. With a `__getattr__` they would accept every name.
if not TYPE_CHECKING:

    def __getattr__(name):
        """Return a name of `__all__` on its first use, from the module that defines it.

        So commands that need no tensors do not wait for torch.
        """
        if name in __all__:
            for module in map(_import_module, _MODULES):
                if name in module.__all__:
                    value = globals()[name] = getattr(module, name)
                    return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        """Return the names of the package, with those that were not used yet."""
        return sorted({*globals(), *__all__})
