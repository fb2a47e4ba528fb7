"""The batches on which a loss is compared with a method."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

SHAPE = (128, 40)
"""Number of sequences and of tokens, large enough that some ratio lies between 1.2 and 1.21."""
EMPTY_ROW = 3
"""The sequence without a counted token."""
DISTANCES = {"near": 0.01, "usual": 0.5, "far": math.inf}
"""The standard deviation of log r in each batch; infinite if both policies are drawn independently."""


@dataclass(frozen=True, eq=False)
class LossBatch:
    """The arguments of a policy loss."""

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


def loss_batches(
    *,
    weighted: bool = False,
    token_advantages: bool = False,
    max_log_ratio: float = 40.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Iterator[LossBatch]:
    """Generate a batch for each of `DISTANCES`, the same ones in every run.

    Advantages have both signs. Lengths are from 1 up, and one sequence has no counted token.

    Args:
        weighted: True for batches with importance weights.
        token_advantages: True for advantages that vary within a sequence.
        max_log_ratio: The largest |log r|, in the batch ``far``.
        dtype: The dtype of the tensors.
        device: The device of the tensors.
    """
    for seed, (name, distance) in enumerate(DISTANCES.items()):
        random = torch.Generator().manual_seed(seed)
        uniform = torch.rand((3, *SHAPE), generator=random)
        normal = torch.randn((3, *SHAPE), generator=random)
        rarest = max_log_ratio if distance == math.inf else 8.0
        # With the square, most tokens are likely ones, as in text.
        old, independent = -rarest * uniform[:2] ** 2 - 1e-3
        perturbed = (old + distance * normal[0]).clamp(max=-1e-3)
        logp = independent if distance == math.inf else perturbed

        lengths = (1 + uniform[2, :, :1] * SHAPE[1]).int()
        lengths[EMPTY_ROW] = 0
        mask = (torch.arange(SHAPE[1]) < lengths).float()
        # Both policies are equal in the padding, because frameworks have importance weights of 1 there.
        rollout = (old + 0.2 * mask * normal[1]).clamp(max=-1e-3)
        weights = (old - rollout).exp().clamp(max=2.0) if weighted else None
        advantages = normal[2] if token_advantages else normal[2, :, :1].expand(SHAPE)
        tensors = (logp, old, rollout, advantages, mask, weights)
        converted = [None if tensor is None else tensor.to(device, dtype) for tensor in tensors]
        yield LossBatch(name, *converted)  # pyright: ignore[reportArgumentType]  (only weights may be None)
