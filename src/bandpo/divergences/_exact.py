"""Elementary functions to full relative precision where the plain formula cancels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

LOG2 = math.log(2)


def expm1(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``e^x − 1``.

    For the CPU torch.compile makes ``exp(x) − 1`` of torch.expm1 (mended after torch 2.13, pytorch/pytorch#190533),
    which has no digit left at x = 1e−8.
    """
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        # From 1/8 on the difference loses three binary digits; a wider series would cost more than the rest.
        return torch.where(x.abs() < 0.125, x + _minus_near_0(x, 0.125), torch.exp(x) - 1)
    return torch.expm1(x)


def log1mexp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``log(1 − exp(x))`` for ``x ≤ 0``."""
    # Each form counts on its side of −log 2 alone, where it is exact. Without a compiler a branch would cost more.
    return torch.log1p(-torch.exp(x)).clamp(min=-LOG2) + (torch.log(-expm1(x)) + LOG2).clamp(max=0.0)


def expm1_minus(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``e^x − 1 − x``."""
    return torch.where(x.abs() < 0.5, _minus_near_0(x.clamp(-0.5, 0.5), 0.5), torch.expm1(x) - x)


def _minus_near_0(x: Tensor, limit: float) -> Tensor:
    """``e^x − 1 − x`` for ``|x| ≤ limit``, by as many terms of its series as the dtype has digits."""
    last = 2
    while 2 * limit ** (last - 1) > math.factorial(last + 1) * torch.finfo(x.dtype).eps:
        last += 1
    series = torch.full_like(x, 1 / math.factorial(last))
    for k in range(last - 1, 1, -1):
        series = series * x + 1 / math.factorial(k)
    return x * x * series


def one_minus_exp(logp: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``1 − p``, kept above 0 so that ``p = 1`` divides to finite numbers."""
    return (-expm1(logp)).clamp(min=torch.finfo(logp.dtype).tiny)
