"""Elementary functions at full relative precision, for arguments at which the plain formula has cancellation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

LOG2 = math.log(2)


def expm1(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute ``e^x − 1``.

    On the CPU torch.compile replaces torch.expm1 by ``exp(x) − 1``, which has no correct digit at x = 1e−8 (fixed after
    torch 2.13, pytorch/pytorch#190533).
    """
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        # For |x| ≥ 1/8 the difference loses at most three bits. A series for more of the range would cost more.
        return torch.where(x.abs() < 0.125, x + _expm1_minus_series(x, 0.125), torch.exp(x) - 1)
    return torch.expm1(x)


def log1mexp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute ``log(1 − exp(x))`` for ``x ≤ 0``."""
    # Two forms are exact on one side of −log 2 each. The clamps make a form constant on its other side, which is faster
    # than torch.where in eager mode.
    below = torch.log1p(-torch.exp(x)).clamp(min=-LOG2)
    above = (torch.log(-expm1(x)) + LOG2).clamp(max=0.0)
    return below + above


def expm1_minus(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute ``e^x − 1 − x``."""
    return torch.where(x.abs() < 0.5, _expm1_minus_series(x.clamp(-0.5, 0.5), 0.5), torch.expm1(x) - x)


def _expm1_minus_series(x: Tensor, limit: float) -> Tensor:
    """Compute ``e^x − 1 − x`` for ``|x| ≤ limit`` by its series, with as many terms as the dtype has digits."""
    last = 2
    while 2 * limit ** (last - 1) > math.factorial(last + 1) * torch.finfo(x.dtype).eps:
        last += 1
    series = torch.full_like(x, 1 / math.factorial(last))
    for k in range(last - 1, 1, -1):
        series = series * x + 1 / math.factorial(k)
    return x * x * series


def scaled_expm1(log_scale: Float[Tensor, "*shape"], x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute ``e^a·(e^x − 1)`` for ``a = log_scale``, also where one factor overflows or is 0 but the product is not.

    With ``a = log p`` and ``x = log r`` it is the change of a token's probability.
    """
    scale = torch.exp(log_scale)
    return torch.where(x > 1, torch.exp(log_scale + x) - scale, scale * expm1(x))


def one_minus_exp(logp: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute ``1 − p``, at least the smallest normal number, so that quotients by it are finite for ``p = 1``."""
    return (-expm1(logp)).clamp(min=torch.finfo(logp.dtype).tiny)
