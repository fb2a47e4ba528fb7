"""f-divergences: the trust regions that bounds are derived from. One class each; `base` says what a new one needs."""

from bandpo.divergences._exact import expm1, expm1_minus, log1mexp
from bandpo.divergences.base import Divergence
from bandpo.divergences.closed import NeymanChi2, PearsonChi2, SquaredHellinger, TotalVariation
from bandpo.divergences.custom import FDivergence
from bandpo.divergences.family import AlphaDivergence, JensenShannon
from bandpo.divergences.kl import KL, ReverseKL

__all__ = [
    "KL",
    "AlphaDivergence",
    "Divergence",
    "FDivergence",
    "JensenShannon",
    "NeymanChi2",
    "PearsonChi2",
    "ReverseKL",
    "SquaredHellinger",
    "TotalVariation",
    "expm1",
    "expm1_minus",
    "log1mexp",
]
