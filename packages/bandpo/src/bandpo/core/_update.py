"""Values of all tokens of an update, for rules and objectives that rank or threshold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from .token_data import TokenData


class UpdateTokens:
    """The tokens of an update: those of this process's batch, or of the batches of all processes of a group.

    A method that ranks or thresholds all tokens of an update computes on the flattened tensors of `gather`, which are
    equal in all processes, and reads the result for its own tokens with `own`. The batches may differ in size. The
    group is ``TrainingState(processes=…)``, and each of its processes must make the same calls.

    Args:
        tokens: The tokens of this process.

    >>> batch = Batch.read(torch.tensor([[-1.0, -2.0]]), torch.full((1, 2), -1.5), torch.ones(1))
    >>> update = UpdateTokens(batch.tokens(FixedClip()))
    >>> largest = update.gather(batch.log_ratio).argmax()
    >>> update.own(torch.arange(2) == largest)
    tensor([[ True, False]])
    """

    def __init__(self, tokens: TokenData) -> None:
        self._processes: Any = tokens.state.processes
        self._shape = tokens.mask.shape
        self._size = tokens.mask.numel()
        """The number of tokens that a process contributes, with padding: that of the largest batch."""
        if self._processes is not None:
            size = torch.tensor(self._size, device=tokens.mask.device)
            torch.distributed.all_reduce(size, torch.distributed.ReduceOp.MAX, group=self._processes)  # pyright: ignore
            self._size = int(size)
        self.counted: Bool[Tensor, " update"] = self.gather(tokens.mask) > 0
        """True for the tokens that count."""

    def gather(self, x: Float[Tensor, "batch time"]) -> Float[Tensor, " update"]:
        """Return the values of all tokens of the update, process after process, with 0 where a batch is smaller."""
        flat = x.flatten()
        if self._processes is None:
            return flat
        padded = torch.cat([flat, flat.new_zeros(self._size - len(flat))])
        count = torch.distributed.get_world_size(self._processes)  # pyright: ignore
        parts = [torch.empty_like(padded) for _ in range(count)]
        torch.distributed.all_gather(parts, padded, group=self._processes)  # pyright: ignore
        return torch.cat(parts)

    def own(self, x: Tensor) -> Tensor:
        """Return the values of this process's tokens, (batch, time), from a tensor over all tokens of the update."""
        if self._processes is None:
            return x.view(self._shape)
        start = torch.distributed.get_rank(self._processes) * self._size  # pyright: ignore
        return x[start : start + self._shape.numel()].view(self._shape)
