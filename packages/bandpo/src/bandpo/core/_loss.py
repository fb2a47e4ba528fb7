"""The parts of the loss of `bandpo.core.methods.Method`: its result, its autograd function and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from .batch import Batch, Tokens


class LossOutputs(NamedTuple):
    """The result of `bandpo.policy_loss`: a loss to call ``backward`` on, and detached scalars to log."""

    loss: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, ""]]


class _WithDerivative(torch.autograd.Function):
    """An autograd function with a precomputed derivative.

    Only the derivative is saved for the backward pass, in place of a graph with its intermediate tensors.
    """

    # With a separate setup_context torch inspects the signature in each call, a tenth of the time on a small batch.
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, derivative: Tensor) -> Tensor:
        ctx.save_for_backward(derivative)
        return values.view_as(values)

    @staticmethod
    @once_differentiable  # the derivative depends on x too, so a second derivative would be wrong
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator's signature)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None, None]:
        return grad_outputs[0] * ctx.saved_tensors[0], None, None


def with_derivative(x: Tensor, values: Tensor, derivative: Tensor) -> Tensor:
    """Return ``values`` as an elementwise function of ``x`` whose derivative is ``derivative``."""
    apply: Callable[[Tensor, Tensor, Tensor], Tensor] = _WithDerivative.apply  # pyright: ignore
    return apply(x, values, derivative)


def loss_metrics(
    batch: Batch, tokens: Tokens, weight: Float[Tensor, "batch time"], level: str
) -> dict[str, Float[Tensor, ""]]:
    """Compute the metrics of `bandpo.policy_loss` from the weight of each token."""
    # Each sum is taken by rows, which torch.compile fuses with the loss, and before the next tensor is computed.
    # One quotient for all sums takes fewer operations than one for each metric.
    #
    # 1 for a dropped token with A > 0, −1 for one with A < 0. These are numbers rather than flags for the same kernel.
    dropped = torch.where(weight > 0, 0.0, batch.advantages.sign())
    by_row = [dropped.sum(-1)]
    negative = dropped.clamp(max=0.0)
    del dropped
    by_row.append(negative.sum(-1))
    by_row.append(torch.where(tokens.above, negative, 0.0).sum(-1))
    del negative
    # r − 1, which is 0 in the padding like the log-ratio.
    excess = tokens.ratio - 1
    if level == "token":
        by_row.append(excess.sum(-1))
    else:
        by_row.append((excess * batch.mask).sum(-1))
        excess = torch.exp(batch.log_ratio) - 1
    by_row.append((excess - batch.log_ratio).sum(-1))
    stacked = torch.stack(by_row)
    sums = stacked.flatten(1).sum(1) if stacked.dim() > 1 else stacked
    dropped_mean, negative_mean, dual_mean, excess_mean, approx_kl = (
        sums / batch.sequences.count_tokens
    ).unbind()
    return {
        "clip_high": dropped_mean - negative_mean,
        "clip_low": dual_mean - negative_mean,
        "dual_clip": -dual_mean,
        "ratio_mean": 1 + excess_mean,
        "approx_kl": approx_kl,
    }
