"""Objectives: what a policy-gradient loss makes of a clip rule.

A token's gradient is ``−(w·A + b)·∇logp``. An objective is the function that gives the *weight* ``w`` (and the bias
``b``, where there is one) from one view of the tokens (`bandpo.Tokens`). The view has the ratio ``r = π/π_old``, the
side on which it lies outside of the rule's interval, the advantage ``A``, and means over a token's sequence. It has the
interval itself for those that ask.

An objective of your own is a frozen dataclass with one method:

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Tempered(Objective):
...     power: float = 0.5
...
...     def weight(self, tokens):
...         return tokens.ratio**self.power
>>> mine, logp = Method(FixedClip(0.2), Tempered()), torch.tensor([[0.32]]).log().requires_grad_()
>>> policy_loss(logp, torch.tensor([[0.08]]).log(), torch.tensor([1.0]), method=mine).loss.backward()
>>> logp.grad
tensor([[-2.]])

`bandpo.methods` has the names that papers give to combinations of a rule and an objective.
"""

from bandpo.objectives import base, caps, clipped, covariance, drift, future, penalties, smooth, unweighted
from bandpo.objectives.base import *
from bandpo.objectives.caps import *
from bandpo.objectives.clipped import *
from bandpo.objectives.covariance import *
from bandpo.objectives.drift import *
from bandpo.objectives.future import *
from bandpo.objectives.penalties import *
from bandpo.objectives.smooth import *
from bandpo.objectives.unweighted import *

__all__: list[str] = []
__all__ += base.__all__
__all__ += caps.__all__
__all__ += clipped.__all__
__all__ += covariance.__all__
__all__ += drift.__all__
__all__ += future.__all__
__all__ += penalties.__all__
__all__ += smooth.__all__
__all__ += unweighted.__all__
