"""Objectives: what a policy-gradient loss makes of a clip rule.

A token's gradient is always ``−w·A·∇logp``. An objective is the function that gives the *weight* ``w``, from one view
of the tokens (`bandpo.Tokens`): the ratio ``r = π/π_old``, the side on which it lies outside of the rule's
interval, the interval itself where it is asked for, the advantage ``A``, and means over a token's sequence.

An objective of your own is a frozen dataclass with one method:

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Tempered(Objective):
...     power: float = 0.5
...
...     def weight(self, tokens):
...         return tokens.ratio**self.power
>>> logp = torch.tensor([[0.32]]).log().requires_grad_()
>>> policy_loss(logp, torch.tensor([[0.08]]).log(), torch.tensor([1.0]), objective=Tempered()).loss.backward()
>>> logp.grad
tensor([[-2.]])

`bandpo.methods` has the names that papers give to combinations of a rule and an objective.
"""

from bandpo.objectives.base import Objective
from bandpo.objectives.clipped import ClippedWeight, GeometricMean, InverseRatio, KeepBound, Masked, Surrogate
from bandpo.objectives.selective import Balanced, DualClip, SelfAnchored, SequenceMask, Unweighted
from bandpo.objectives.smooth import GammaWeight, ProbabilityPenalty, Quadratic, SigmoidGate
from bandpo.objectives.softclip import MiddleTanh, Rollback, SoftClip

__all__ = [
    "Balanced",
    "ClippedWeight",
    "DualClip",
    "GammaWeight",
    "GeometricMean",
    "InverseRatio",
    "KeepBound",
    "Masked",
    "MiddleTanh",
    "Objective",
    "ProbabilityPenalty",
    "Quadratic",
    "Rollback",
    "SelfAnchored",
    "SequenceMask",
    "SigmoidGate",
    "SoftClip",
    "Surrogate",
    "Unweighted",
]
