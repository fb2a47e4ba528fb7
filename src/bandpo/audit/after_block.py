"""Whether tokens stop once a method blocks them.

A blocked token has no gradient of its own. Momentum, and the gradients of other tokens, may carry it on all the same.
Where a batch is used for several epochs, each loss sees the same sequences again, and a record tells by how much.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from bandpo.audit.record import Call
from bandpo.batch import Tokens

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

SIDES = {"raised": 1.0, "lowered": -1.0}
"""Tokens by the sign of their advantage, which says where the loss pushes them."""
SAME_WEIGHTS = 1e-6
"""Nats (float32 rounds finer) that no token of a sequence moved by within a step: then no update lay between, as
between the losses whose gradients are accumulated."""
FORGOTTEN = 1000
"""Calls after which a sequence that was not seen again is forgotten; no batch is used for as many losses."""


class Moves(NamedTuple):
    """Tokens that a look found newly blocked, and that were seen before and after it."""

    tokens: int
    before: float
    """Mean movement (nats) to where the loss pushes, from the look before the block to the one that found it."""
    after: float
    """The same, from there to the next look; negative where tokens went back."""
    onward: float
    """Share of the tokens that went further out."""


@dataclass(frozen=True, eq=False)
class _Look:
    """A sequence as a loss saw it; tensors have one value a token."""

    call: int
    step: int | None
    log_ratio: Tensor
    blocked: Tensor
    before: _Look | None = None
    """The look before this one."""


class AfterBlock:
    """Adds up the movement of blocked tokens over the losses of a record, in their order.

    >>> import tempfile
    >>> from bandpo.audit.replay import replay_record
    >>> folder, logp_old = tempfile.mkdtemp(), torch.tensor([[0.1]]).log()
    >>> with Recorder(folder, clip="FixedClip(0.2)") as recorder:
    ...     for moved in (0.0, 0.3, 0.4):  # the second look finds it above ln 1.2 = 0.18
    ...         recorder.add(logp=logp_old + moved, logp_old=logp_old, advantages=torch.ones(1))
    >>> [(side, m.tokens, round(m.before, 2), round(m.after, 2)) for side, m in replay_record(folder).moves.items()]
    [('raised', 1, 0.3, 0.1)]
    """

    def __init__(self) -> None:
        self._looks: dict[bytes, _Look] = {}
        self._calls = 0
        self._sums = torch.zeros(len(SIDES), 4, dtype=torch.float64)

    def add(self, call: Call, tokens: Tokens, weight: Float[Tensor, "batch time"]) -> None:
        """Take one more loss.

        A sequence is known again by its old log-probabilities and advantages, which no update changes; those that are
        alike in both count as one.

        Args:
            call: The loss.
            tokens: Its view under a method.
            weight: What the method's objective makes of each token; 0 or less blocks it.
        """
        self._calls += 1
        batch, blocked = call.batch, (weight <= 0) & (tokens.advantages != 0)
        for row, length in enumerate(batch.mask.sum(1).int().tolist()):
            advantages = batch.advantages[row, :length]
            if advantages.any():
                key = batch.logp_old[row, :length].numpy().tobytes() + advantages.numpy().tobytes()
                log_ratio = tokens.log_ratio[row, :length]
                self._look(key, call.step, log_ratio, blocked[row, :length], advantages.sign())
        if self._calls % FORGOTTEN == 0:
            oldest = self._calls - FORGOTTEN
            self._looks = {key: look for key, look in self._looks.items() if look.call > oldest}

    def _look(self, key: bytes, step: int | None, log_ratio: Tensor, blocked: Tensor, sign: Tensor) -> None:
        last = self._looks.get(key)
        if last is not None:
            if last.call == self._calls:
                return
            moved = log_ratio - last.log_ratio
            if step is not None and step == last.step and moved.abs().max() <= SAME_WEIGHTS:
                return
            if last.before is not None:
                newly, came = last.blocked & ~last.before.blocked, last.log_ratio - last.before.log_ratio
                for sums, side in zip(self._sums, SIDES.values(), strict=True):
                    these = newly & (sign == side)
                    after = moved[these] * side
                    sums += torch.stack(
                        [these.sum(), (came[these] * side).sum(), after.sum(), (after > 0).sum()]
                    )
            last = replace(last, before=None)
        self._looks[key] = _Look(self._calls, step, log_ratio.clone(), blocked, last)

    def moves(self) -> dict[str, Moves]:
        """Of each side, raised tokens and lowered ones, what was seen; a side without such tokens is left out."""
        found = {}
        for side, (tokens, before, after, onward) in zip(SIDES, self._sums.tolist(), strict=True):
            if tokens:
                found[side] = Moves(int(tokens), before / tokens, after / tokens, onward / tokens)
        return found
