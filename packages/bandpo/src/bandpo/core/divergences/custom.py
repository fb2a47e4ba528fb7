"""The f-divergence of a user's convex function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .._checks import is_transforming
from ..divergences.base import Divergence
from ..errors import InvalidType, InvalidValue

__all__ = ["FDivergence"]


@dataclass(frozen=True, init=False)
class FDivergence(Divergence):
    """The f-divergence of a convex function of your own, with ``f(1) = 0``.

    ``f`` is called with tensors of ``u = π/π_old ≥ 0`` and must be elementwise. Around ``u = 1`` a formula in ``u`` has
    cancellation, so it is evaluated in float64; bounds in float32 are then as exact as those of the other divergences.
    On devices without float64 they are less exact. For these devices, or for a divergence with a text form, subclass
    `Divergence` instead. If the constraint holds at an edge of the simplex (``f(0)`` or ``f(1/p)`` is small enough),
    the bound is that edge.

    Args:
        f: The function. Adding a multiple of ``u − 1`` to it does not change the divergence.
        derivative: The derivative ``f'(u)``; computed by autograd if not given.

    Raises:
        TypeError: if ``f`` or ``derivative`` does not map a tensor to one of equal shape.
        ValueError: if ``f(1)`` is not 0, or ``f`` is not convex, not finite, or linear around 1.

    >>> triangular = FDivergence(lambda u: (u - 1) ** 2 / (u + 1))  # Vincze and Le Cam
    >>> bounds = ratio_bounds(torch.tensor([0.08, 0.5]).log(), triangular, radius=0.05)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [2.346, 1.312]
    """

    f_of_u: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor] | None

    def __init__(
        self, f: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        object.__setattr__(self, "f_of_u", f)
        object.__setattr__(self, "derivative", derivative)
        self._check()

    def _check(self) -> None:
        """Check ``f`` and its derivative on a grid of ratios from 1e−9 to 1e9."""
        points = [torch.logspace(-9, 9, 721, dtype=torch.float64), torch.linspace(0.5, 2, 301).double()]
        u = cast("Tensor", torch.cat(points).unique())  # pyright: ignore[reportUnknownMemberType]
        for name, function in (("f", self.f_of_u), ("derivative", self._slope)):
            values = function(u)
            if not isinstance(values, Tensor) or values.shape != u.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidType(
                    f"{name} must map a tensor to one of equal shape, elementwise; got {values!r}"
                )
        at_one = self.f_of_u(torch.ones((), dtype=torch.float64)).item()
        if not abs(at_one) <= 1e-9:
            raise InvalidValue(f"f(1) must be 0, got {at_one:g}; subtract it from f")
        values = self.f_of_u(u)
        if not values.isfinite().all():
            at = u[~values.isfinite()][0]
            raise InvalidValue(f"f must be finite for u > 0, got f({at:g}) = {self.f_of_u(at):g}")

        # The slopes between neighbouring points of a convex function increase, up to the rounding of the values.
        gap = u.diff()
        slopes = values.diff() / gap
        noise = 8 * torch.finfo(torch.float64).eps * (values[1:].abs() + values[:-1].abs() + u[1:]) / gap
        falls = slopes.diff() < -(noise[1:] + noise[:-1])
        if falls.any():
            raise InvalidValue(f"f must be convex, but its slope falls around u = {u[1:-1][falls][0]:g}")
        if not self._normalised(torch.tensor([0.5, 2.0], dtype=torch.float64)).min() > 0:
            raise InvalidValue("f is linear around u = 1, so it puts no bound on the ratio")

    @property
    def curvature(self) -> float:
        step = 1e-4
        around = self._normalised(torch.tensor([1 - step, 1 + step], dtype=torch.float64))
        return around.sum().item() / step**2

    @property
    def default_radius(self) -> float:
        # The radius with the upper bound of KL 0.05 at p = ½. Unlike the curvature it is also defined for an f with a
        # kink.
        up = torch.tensor(math.log(1.3085), dtype=torch.float64)
        return self.divergence_of_ratio(up, torch.tensor(math.log(0.5), dtype=torch.float64)).item()

    def f(self, log_u: Tensor) -> Tensor:
        u = _linear(log_u)
        return torch.where(u == math.inf, math.inf, self._normalised(u)).to(log_u.dtype)

    def df(self, log_u: Tensor) -> Tensor:
        u = _linear(log_u)
        return (u * (self._slope(u) - self._slope(torch.ones_like(u)))).to(log_u.dtype)

    def _normalised(self, u: Tensor) -> Tensor:
        """Compute ``f`` plus the multiple of ``u − 1`` that moves its minimum to 1."""
        return (self.f_of_u(u) - self._slope(torch.ones_like(u)) * (u - 1)).clamp(min=0.0)

    def _slope(self, u: Tensor) -> Tensor:
        """Compute the derivative of ``f`` with respect to u."""
        if self.derivative is not None:
            return self.derivative(u)
        if torch.compiler.is_compiling() or is_transforming():
            return torch.func.vjp(self.f_of_u, u)[1](torch.ones_like(u))[0]
        # As f is elementwise, the gradient of the sum has the derivatives. Where it can be had this is preferred,
        # because the first use of torch.func loads torch's compiler, which takes two seconds.
        with torch.inference_mode(False), torch.enable_grad():
            u = u.detach().clone().requires_grad_()
            total = self.f_of_u(u).sum()
            return torch.autograd.grad(total, u)[0] if total.requires_grad else torch.zeros_like(u)


def _linear(log_u: Tensor) -> Tensor:
    """Compute ``u`` in float64 if the device has it. It is positive, so that ``0·log 0`` in ``f`` cannot occur."""
    wide = log_u if log_u.device.type == "mps" else log_u.double()
    return wide.exp().clamp(min=torch.finfo(wide.dtype).tiny)
