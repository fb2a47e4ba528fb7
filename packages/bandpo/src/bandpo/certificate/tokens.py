"""The synthetic tokens on which a loss is certified: the same in every run, and without a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bandpo.core import _checks

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

SHAPE = (128, 40)
"""Number of sequences and of tokens, large enough that some ratio lies between 1.2 and 1.21."""
TRAINER_SHAPE = (32, 24)
"""The same for a trainer's loss, which is computed several times before each training."""
EMPTY_ROW = 3
"""The sequence without a counted token."""
DISTANCES = {"near": 0.01, "usual": 0.5, "far": math.inf, "wide": 0.8}
"""The standard deviation of log r in each batch; infinite if both policies are drawn independently. A trainer's loss is
computed on ``wide``: with ratios beyond the bounds of every method, and none that a trainer's clamps change."""


@dataclass(frozen=True, eq=False)
class LossBatch:
    """The arguments of a policy loss.

    Advantages have both signs. Lengths are from 1 up, and one sequence has no counted token. Some tokens are almost
    certain.
    """

    name: str
    """The name of the batch in `DISTANCES`."""
    logp: Float[Tensor, "batch time"]
    """Log-probabilities (nats) under the policy in training."""
    logp_old: Float[Tensor, "batch time"]
    """The same under the trainer's old policy."""
    logp_rollout: Float[Tensor, "batch time"]
    """The same under the rollout engine's policy."""
    advantages: Float[Tensor, "batch time"]
    mask: Float[Tensor, "batch time"]
    """1 for tokens that count, else 0."""
    weights: Float[Tensor, "batch time"] | None = None
    """Importance weights, if there are any."""

    # What a trainer's loss has beside these.

    @property
    def used(self) -> Float[Tensor, "batch time"]:
        """The mask, with 0 for a fifth of the tokens, as of those that tools wrote."""
        rows, columns = self.mask.shape
        number = torch.arange(rows)[:, None] + torch.arange(columns)
        return self.mask * (number % 5 != 4).to(self.mask)

    @property
    def entropy(self) -> Float[Tensor, "batch time"]:
        """Entropies (nats)."""
        return 0.2 - self.logp

    @property
    def logp_reference(self) -> Float[Tensor, "batch time"]:
        """Log-probabilities (nats) under the reference policy, which is neither the old one nor the current one."""
        return self.logp_old - 0.25

    @property
    def sequence_advantages(self) -> Float[Tensor, " batch"]:
        """The advantage of each sequence."""
        return self.advantages[:, 0]


def loss_batch(
    name: str,
    shape: tuple[int, int] = SHAPE,
    *,
    weighted: bool = False,
    token_advantages: bool = False,
    max_log_ratio: float = 40.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LossBatch:
    """Return one of the batches of `DISTANCES`, the same in every run.

    Args:
        name: Its name.
        shape: The number of sequences and of tokens.
        weighted: True for a batch with importance weights.
        token_advantages: True for advantages that vary within a sequence.
        max_log_ratio: The largest |log r|, in the batch ``far``.
        dtype: The dtype of the tensors.
        device: The device of the tensors.

    >>> batch = loss_batch("usual")
    >>> batch.logp.shape, int(batch.mask.sum())
    (torch.Size([128, 40]), 2575)
    """
    distance = DISTANCES[name]
    random = torch.Generator().manual_seed([*DISTANCES].index(name))
    uniform = torch.rand((3, *shape), generator=random)
    normal = torch.randn((3, *shape), generator=random)
    rarest = max_log_ratio if distance == math.inf else 8.0
    # With the square, most tokens are likely ones, as in text.
    old, independent = -rarest * uniform[:2] ** 2 - 1e-3
    perturbed = (old + distance * normal[0]).clamp(max=-1e-3)
    logp = independent if distance == math.inf else perturbed

    lengths = (1 + uniform[2, :, :1] * shape[1]).int()
    lengths[EMPTY_ROW] = 0
    mask = (torch.arange(shape[1]) < lengths).float()
    # Both policies are equal in the padding, because frameworks have importance weights of 1 there.
    rollout = (old + 0.2 * mask * normal[1]).clamp(max=-1e-3)
    weights = (old - rollout).exp().clamp(max=2.0) if weighted else None
    advantages = normal[2] if token_advantages else normal[2, :, :1].expand(shape)
    tensors = (logp, old, rollout, advantages, mask, weights)
    converted = [None if tensor is None else tensor.to(device, dtype) for tensor in tensors]
    return LossBatch(name, *converted)  # pyright: ignore[reportArgumentType]  (only weights may be None)


def loss_batches(
    *,
    weighted: bool = False,
    token_advantages: bool = False,
    max_log_ratio: float = 40.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Iterator[LossBatch]:
    """Generate the batches ``near``, ``usual`` and ``far``, see `loss_batch`."""
    for name in ("near", "usual", "far"):
        yield loss_batch(
            name,
            weighted=weighted,
            token_advantages=token_advantages,
            max_log_ratio=max_log_ratio,
            dtype=dtype,
            device=device,
        )


def trainer_batch(device: torch.device) -> LossBatch:
    """Return the batch of a trainer's loss, with importance weights, in the widest floating-point type of a device."""
    dtype = _checks.widest_float(device)
    return loss_batch("wide", TRAINER_SHAPE, weighted=True, dtype=dtype, device=device)
