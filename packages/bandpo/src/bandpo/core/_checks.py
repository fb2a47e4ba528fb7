"""Checks of the arguments of `ratio_bounds`, clip rules and losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ._limits import LOGP_SLACK
from ._ranges import RADII
from .errors import InvalidType, InvalidValue

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

FUNCTORCH: Any = torch._C._functorch  # pyright: ignore
"""The functions of torch that tell of its transformations. They have no public name."""


def is_a(value: object, kind: type) -> bool:
    """Like isinstance, but without narrowing the type for a type checker, which takes the check for unnecessary."""
    return isinstance(value, kind)


def values_can_be_read(x: Tensor) -> bool:
    """Return True if the values of ``x`` can be read without a device synchronisation and without a graph break.

    Under ``torch.vmap`` a tensor stands for many, and has no values of its own.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not _is_batched(x)


def _is_batched(x: Tensor) -> bool:
    """Return True if ``x`` stands for many tensors under ``torch.vmap``, at any level of nested transformations."""
    while FUNCTORCH.is_functorch_wrapped_tensor(x):
        if FUNCTORCH.is_batchedtensor(x):
            return True
        x = FUNCTORCH.get_unwrapped(x)
    return False


def is_transforming() -> bool:
    """Return True within a function that ``torch.vmap`` or a transformation of ``torch.func`` calls."""
    return FUNCTORCH.peek_interpreter_stack() is not None


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype of long sums: float64, or float32 on Apple's MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def as_float(name: str, x: object) -> Tensor:
    """Return ``x`` in at least float32.

    Raises:
        TypeError: if ``x`` is not a floating-point tensor.
    """
    if not isinstance(x, torch.Tensor):
        raise InvalidType(
            f"{name} must be a torch.Tensor, got {type(x).__name__}; wrap it in torch.tensor(...)"
        )
    if not x.is_floating_point():
        raise InvalidType(
            f"{name} must be a floating-point tensor, got {x.dtype}; convert it with {name}.float()"
        )
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_logp(name: str, logp: Float[Tensor, "*shape"]) -> None:
    """Raise ValueError for NaN, or for a value above 0 beyond rounding, if values can be read."""
    if not values_can_be_read(logp) or not logp.numel():
        return
    largest = logp.max()
    if not largest <= LOGP_SLACK:  # also true for NaN
        cause = (
            "is it a negative log-likelihood, with its sign flipped?"
            if largest.isfinite()
            else "see whether logits or weights are NaN or infinite"
        )
        raise InvalidValue(
            f"{name} holds {largest.item():g}, which is not a log-probability (they are ≤ 0, in nats); {cause}"
        )


def as_logp(name: str, logp: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return log-probabilities in at least float32, with values above 0 by rounding set to 0.

    NaN, or a value above 0 beyond rounding, raises ValueError on the CPU. On an accelerator, and under
    ``torch.compile``, values are not read, and such an entry becomes NaN.
    """
    logp = as_float(name, logp)
    check_logp(name, logp)
    return torch.where(logp <= LOGP_SLACK, logp.clamp(max=0.0), math.nan)


def is_number(value: object) -> bool:
    """Return True if a value is a single number of a Python, numpy or torch type, and not a bool.

    >>> is_number(0.2), is_number("0.2"), is_number(True)
    (True, False, False)
    """
    # torch.compile cannot look up attributes of symbolic numbers. Their values were checked before compilation.
    return torch.compiler.is_compiling() or (hasattr(value, "__float__") and not isinstance(value, bool))


def number(name: str, value: Any, must: str, allowed: Callable[[float], bool]) -> None:
    """Raise ValueError unless a setting is an allowed number, or a schedule between allowed numbers.

    Args:
        name: The name of the setting.
        value: A number, or a `bandpo.core.schedules.Radius` in its place.
        must: The condition in words, for the error.
        allowed: The condition.
    """
    if getattr(value, "per_token", False):
        raise InvalidValue(
            f"{name}={value!r} differs from token to token, which only the radius of a Band may"
        )
    for x in getattr(value, "range", (value,)):
        if not (is_number(x) and allowed(x)):
            raise InvalidValue(f"{name} must be {must}, got {value!r}")


def positive(name: str, value: object) -> None:
    """Raise ValueError unless a setting is a finite number above 0."""
    # A tuple of types, because older versions of torch.compile break the graph at a union.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
        raise InvalidValue(f"{name} must be a finite number above 0, got {value!r}")


def check_radius(value: object) -> None:
    """Raise ValueError unless the radius of a trust region is a number within `RADII`."""
    positive("radius", value)
    smallest, largest = RADII
    if not smallest <= value <= largest:  # pyright: ignore[reportOperatorIssue]
        raise InvalidValue(_radius_outside(f"{value!r}"))


def _radius_outside(values: str) -> str:
    """Return the error for a radius outside of `RADII`."""
    return (
        f"radius must be from {RADII[0]:.2g} to {RADII[1]:g}, got {values}; to block every ratio except 1 use "
        "FixedClip(0.0), and to block none Unclipped()"
    )


def broadcasts_to(x: Tensor, shape: torch.Size) -> bool:
    """Return True if ``x`` can be expanded to ``shape``."""
    trailing = shape[len(shape) - x.dim() :]
    return x.dim() <= len(shape) and all(a in (1, b) for a, b in zip(x.shape, trailing, strict=True))


def as_radius(radius: Tensor, logp: Float[Tensor, "*shape"]) -> Tensor:
    """Return a radius per token or per sequence in the dtype and on the device of ``logp``.

    Raises:
        ValueError: if it does not broadcast to ``logp``, or, on the CPU, is not within `RADII` everywhere.
    """
    if not broadcasts_to(radius, logp.shape):
        raise InvalidValue(
            f"radius of shape {tuple(radius.shape)} does not broadcast to logp_old's {tuple(logp.shape)}; "
            "give one per token, or one per sequence with a trailing dimension of 1"
        )
    radius = as_float("radius", radius)
    if values_can_be_read(radius) and radius.numel():
        smallest, largest = (x.item() for x in radius.aminmax())
        if not (smallest > 0 and largest < math.inf):
            raise InvalidValue(
                f"radius must be finite and above 0 everywhere, got values from {smallest:g} to {largest:g}"
            )
        if not (RADII[0] <= smallest and largest <= RADII[1]):
            raise InvalidValue(_radius_outside(f"values from {smallest:g} to {largest:g}"))
    return radius.to(logp)
