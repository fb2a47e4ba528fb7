"""Objectives, which compute each token's weight in the policy gradient from its ratio, its advantage and a clip rule.

The gradient of a token's loss is ``−(w·A + b)·∇logp``. An objective computes the weight ``w``, and the bias ``b`` if it
has one, from the tokens of a batch (`bandpo.core.batch.Tokens`): their ratios ``r = π/π_old``, their advantages ``A``,
the rule's clip masks and bounds, and means over a token's sequence.

To define an objective of your own, write a frozen dataclass with one method:

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

`bandpo.core.methods` has the combinations of a rule and an objective that papers have published.
"""

from . import base, caps, clipped, covariance, drift, future, penalties, smooth, unweighted
from .base import *
from .caps import *
from .clipped import *
from .covariance import *
from .drift import *
from .future import *
from .penalties import *
from .smooth import *
from .unweighted import *

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
