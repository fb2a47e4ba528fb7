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
        near = x.clamp(-0.5, 0.5)
        return torch.where(x.abs() < 0.5, near + _minus_near_0(near), torch.exp(x) - 1)
    return torch.expm1(x)


def log1mexp(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``log(1 − exp(x))`` for ``x ≤ 0``."""
    # Each form counts on its side of −log 2 alone, where it is exact. Without a compiler a branch would cost more.
    return torch.log1p(-torch.exp(x)).clamp(min=-LOG2) + (torch.log(-expm1(x)) + LOG2).clamp(max=0.0)


def expm1_minus(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``e^x − 1 − x``."""
    return torch.where(x.abs() < 0.5, _minus_near_0(x.clamp(-0.5, 0.5)), torch.expm1(x) - x)


def _minus_near_0(x: Tensor) -> Tensor:
    """``e^x − 1 − x`` for ``|x| ≤ ½``, by its series."""
    series = torch.ones_like(x)
    for k in range(14 if x.dtype == torch.float64 else 8, 2, -1):
        series = 1 + x * (1 / k) * series  # when compiled, a division would cost more than the rest
    return x * x / 2 * series


def one_minus_exp(logp: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``1 − p``, kept above 0 so that ``p = 1`` divides to finite numbers."""
    return (-expm1(logp)).clamp(min=torch.finfo(logp.dtype).tiny)
