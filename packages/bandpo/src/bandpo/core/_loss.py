"""The parts of the loss of `bandpo.core.methods.Method`: its result, its autograd function and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ._derivatives import first_derivative_only
from ._ranges import largest
from .errors import InvalidValue
from .sequences import part_sums

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

    # There is no separate setup_context, with which torch inspects the signature in each call: 20 µs more, a twentieth
    # of the time on a small batch. The transforms of torch.func would need it.
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, derivative: Tensor) -> Tensor:
        ctx.save_for_backward(derivative)
        return values.view_as(values)

    @staticmethod
    @first_derivative_only("the policy loss")  # the derivative depends on x too
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return grad_outputs[0] * ctx.saved_tensors[0], None, None


def with_derivative(x: Tensor, values: Tensor, derivative: Tensor) -> Tensor:
    """Return ``values`` as an elementwise function of ``x`` whose derivative is ``derivative``."""
    apply: Callable[[Tensor, Tensor, Tensor], Tensor] = _WithDerivative.apply  # pyright: ignore
    try:
        return apply(x, values, derivative)
    except RuntimeError as error:
        if "setup_context" not in str(error):
            raise
        raise InvalidValue(
            "the loss has no transforms of torch.func, such as grad and jvp; use loss.backward() or torch.autograd.grad"
        ) from error


def loss_metrics(
    batch: Batch,
    tokens: Tokens,
    weight: Float[Tensor, "batch time"],
    slope: Float[Tensor, "batch time"],
    level: str,
) -> dict[str, Float[Tensor, ""]]:
    """Compute the metrics of `bandpo.policy_loss` from the weight of each token, and from −A."""
    # Sums are taken of parts of rows, which torch.compile fuses with the loss, and before the next tensor is computed.
    # One quotient for all sums takes fewer operations than one for each metric.
    #
    # −1 for a dropped token with A > 0, 1 for one with A < 0. These are numbers rather than flags for the same kernel.
    dropped = slope.sign().masked_fill_(weight > 0, 0.0)
    parts = [part_sums(dropped)]
    dropped.clamp_(min=0.0)
    parts.append(part_sums(dropped))
    dropped.mul_(tokens.above)
    parts.append(part_sums(dropped))
    del dropped
    # r − 1, which is 0 in the padding like the log-ratio.
    excess = tokens.ratio - 1
    if level == "token":
        parts.append(part_sums(excess))
    else:
        parts.append(part_sums(excess.mul_(batch.mask)))
        del excess
        excess = torch.exp(batch.log_ratio).clamp_(max=largest(batch.log_ratio.dtype)).sub_(1)
    parts.append(part_sums(excess.sub_(batch.log_ratio)))
    means = torch.stack(parts).flatten(1).sum(1) / batch.sequences.count_tokens
    _, negative_mean, dual_clip, excess_mean, approx_kl = means.unbind()
    # The share of dropped tokens with A < 0, minus the sum of all signs, and minus the share of those with r > 1.
    clip_high, clip_low = (negative_mean - means[:3:2]).unbind()
    return {
        "clip_high": clip_high,
        "clip_low": clip_low,
        "dual_clip": dual_clip,
        "ratio_mean": 1 + excess_mean,
        "approx_kl": approx_kl,
    }
