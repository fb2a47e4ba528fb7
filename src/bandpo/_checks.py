"""What may enter the operator, and the error for what may not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from bandpo._limits import LOGP_SLACK
from bandpo.errors import InvalidType, InvalidValue

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def is_a(value: object, kind: type) -> bool:
    """`isinstance`, of what a caller without a type checker may have passed."""
    return isinstance(value, kind)


def values_can_be_read(x: Tensor) -> bool:
    """Whether looking at ``x`` costs no device synchronisation and no graph break."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def widest_float(device: torch.device) -> torch.dtype:
    """The float that long sums are kept in; Apple's MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def as_float(name: str, x: object) -> Tensor:
    """``x`` in at least float32; refuses what is not a floating-point tensor."""
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
    """Refuse a NaN, or a value above 0 beyond rounding, where values can be read."""
    if values_can_be_read(logp) and logp.numel() and not (worst := logp.max()) <= LOGP_SLACK:
        raise InvalidValue(
            f"{name} holds {worst.item():g}, which is not a log-probability (they are ≤ 0, in nats); "
            "check for NaN logits, or for a negative log-likelihood passed with its sign flipped"
        )


def as_logp(name: str, logp: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Log-probabilities in at least float32, at most 0.

    On the CPU a NaN or a value above 0 beyond rounding raises. Elsewhere, and under ``torch.compile``, the
    values are not read; such an entry becomes NaN, so it cannot pass for a bound.
    """
    logp = as_float(name, logp)
    check_logp(name, logp)
    return torch.where(logp <= LOGP_SLACK, logp.clamp(max=0.0), math.nan)


def is_number(value: object) -> bool:
    """Whether a setting is one number, of Python's, numpy's or torch's types.

    >>> is_number(0.2), is_number("0.2"), is_number(True)
    (True, False, False)
    """
    # A compiler cannot ask a symbol for its attributes; the value was checked before.
    return torch.compiler.is_compiling() or (hasattr(value, "__float__") and not isinstance(value, bool))


def number(name: str, value: Any, must: str, allowed: Callable[[float], bool]) -> None:
    """Refuse a setting that is not the number it must be, or that varies beyond such numbers.

    Args:
        name: What it is called.
        value: A number, or a `bandpo.schedules.Radius` that stands for one.
        must: What it must be, for the error.
        allowed: Whether a number is that.
    """
    if getattr(value, "each_token", False):
        raise InvalidValue(
            f"{name}={value!r} differs from token to token, which only the radius of a Band may"
        )
    for x in getattr(value, "range", (value,)):
        if not (is_number(x) and allowed(x)):
            raise InvalidValue(f"{name} must be {must}, got {value!r}")


def positive(name: str, value: object) -> None:
    """Refuse a setting that is not a finite number above 0."""
    # A tuple: older compilers break the graph at a union.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
        raise InvalidValue(f"{name} must be a finite number above 0, got {value!r}")


def broadcasts_to(x: Tensor, shape: torch.Size) -> bool:
    """Whether ``x`` can be expanded to ``shape``."""
    trailing = shape[len(shape) - x.dim() :]
    return x.dim() <= len(shape) and all(a in (1, b) for a, b in zip(x.shape, trailing, strict=True))


def as_radius(radius: Tensor, logp: Float[Tensor, "*shape"]) -> Tensor:
    """A radius per token or per sequence, in the dtype and on the device of ``logp``, in at least float32."""
    if not broadcasts_to(radius, logp.shape):
        raise InvalidValue(
            f"radius of shape {tuple(radius.shape)} does not broadcast to logp_old's {tuple(logp.shape)}; "
            "give one per token, or one per sequence with a trailing dimension of 1"
        )
    radius = as_float("radius", radius).to(logp)
    if values_can_be_read(radius) and radius.numel() and not (radius.min() > 0 and radius.max() < math.inf):
        raise InvalidValue(
            f"radius must be finite and above 0 everywhere, got values from {radius.min():g} to {radius.max():g}"
        )
    return radius
