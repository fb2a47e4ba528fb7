"""Controllers: radii that move from batch to batch until a measured quantity stays at its target."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar

from bandpo import _checks
from bandpo.radius import Radius, TrainingState

__all__ = ["HoldClipRate", "HoldEntropy", "HoldKL"]


@dataclass(frozen=True)
class Hold(Radius):
    """A controller: from batch to batch it moves the radius so that a measured quantity stays at a target.

        radius ← radius·exp(± gain·(measured − target)/(measured + target)),  within [min_radius, max_radius]

    The fraction lies in [−1, 1], so one batch moves the radius by no more than the factor ``e^gain``.

    Args:
        target: What the quantity should be, > 0.
        start: Radius of the first batch.
        gain: Speed; 0.1 is 10 % a batch at most. A negative one turns the direction around.
        min_radius: Least radius; a tenth of ``start`` by default.
        max_radius: Greatest radius; ten times ``start`` by default.
    """

    target: float
    start: float
    gain: float = 0.1
    min_radius: float = None  # pyright: ignore[reportAssignmentType]  (filled in below)
    max_radius: float = None  # pyright: ignore[reportAssignmentType]

    needs = "radii"
    _sign: ClassVar[int] = -1
    """1 where too much of the quantity calls for a wider radius, −1 where it calls for a narrower one."""

    def __post_init__(self) -> None:
        if _checks.is_a(self.min_radius, NoneType):
            object.__setattr__(self, "min_radius", self.start / 10)
        if _checks.is_a(self.max_radius, NoneType):
            object.__setattr__(self, "max_radius", self.start * 10)
        for name in ("target", "start", "min_radius", "max_radius"):
            _checks.positive(name, getattr(self, name))
        if not self.min_radius <= self.start <= self.max_radius:
            raise ValueError(
                f"start={self.start} must lie between min_radius={self.min_radius} and max_radius={self.max_radius}"
            )
        if self.gain == 0 or not math.isfinite(self.gain):
            raise ValueError(f"gain must be a finite number other than 0, got {self.gain!r}")

    @property
    def range(self) -> tuple[float, float]:
        return self.min_radius, self.max_radius

    def resolved(self, state: TrainingState) -> float | Radius:
        return self if state.radii is None else state.radii.get(repr(self), self.start)

    def update(self, radius: float, measured: float) -> float:
        """The radius after a batch with ``radius`` in which ``measured ≥ 0`` was found.

        A quantity that is not finite (a mean over no tokens, a ratio that overflowed) leaves the radius as it is.

        >>> round(HoldKL(target=0.002, start=0.05).update(0.05, measured=0.006), 6)
        0.047561
        """
        if not math.isfinite(measured):
            return radius
        if measured < 0:
            raise ValueError(
                f"{type(self).__name__} was given {measured!r}, but what it measures is never negative"
            )
        error = (measured - self.target) / (measured + self.target)
        return min(max(radius * math.exp(self._sign * self.gain * error), self.min_radius), self.max_radius)

    @abstractmethod
    def measured(self, metrics: Mapping[str, Any]) -> float:
        """The quantity, from the metrics of `bandpo.diagnostics.audit`."""


class HoldClipRate(Hold):
    """Hold the share of tokens whose gradient the clip drops, ``clip_high + clip_low``; wider when it is too large.

    It is the share over all losses of a batch, the first of which, before any update, clips nothing.
    """

    _sign = 1

    def measured(self, metrics: Mapping[str, Any]) -> float:
        return float(metrics["clip_high"]) + float(metrics["clip_low"])


class HoldKL(Hold):
    """Hold the mean of KL(π_old ‖ π) in nats per token, ``approx_kl``; narrower when it is too large.

    It is the mean over all losses of a batch, the first of which, before any update, has 0. The radius bounds what one
    token may spend, so it is one lever among others (learning rate, updates per batch) on the mean.
    """

    def measured(self, metrics: Mapping[str, Any]) -> float:
        return float(metrics["approx_kl"])


class HoldEntropy(Hold):
    """Hold the policy's mean entropy in nats per token, ``entropy``; wider when it is too small.

    A wide *upper* side lets rare tokens rise, which keeps entropy; a wide lower side lets them vanish. So use it above
    a fixed lower side: ``Sides(FixedClip(0.2), Band(KL(), HoldEntropy(0.3, 0.05)))``. Entropy answers to a clip slowly
    and weakly, if at all.
    """

    def measured(self, metrics: Mapping[str, Any]) -> float:
        return float(metrics["entropy"])
