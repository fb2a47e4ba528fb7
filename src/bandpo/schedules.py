"""Numbers of a setting that vary over training: schedules and controllers.

The radius of a `bandpo.Band` is a number, a tensor, or one of these. Any other number of a rule or an objective may be
a schedule or a controller too: ``DualClip(Linear(10, 3))``. They are settings and hold no state: ``resolve(state)`` of
a rule, an objective or a method replaces them by numbers. The state of controllers is plain data, which the training
loop keeps.

| radius | is | depends on |
|---|---|---|
| ``0.05`` | constant | |
| a tensor | one per token (batch, time), or per sequence (batch, 1) | |
| `Linear` | a schedule over training | ``TrainingState(progress=…)`` |
| `ClipRateController` | adjusted after each batch | ``TrainingState(controller_state=…)`` |

In a loop of your own (`BandGRPOTrainer` does this for you):

>>> rule = Band(KL(), ClipRateController(target=0.01, start=0.05))
>>> controller_state = {}
>>> for batch in range(3):
...     method = rule.resolve(TrainingState(progress=batch / 3, controller_state=controller_state))
...     metrics = {"clip_high": 0.01, "clip_low": 0.02}  # of policy_loss(..., method=method), over the whole batch
...     controller_state = rule.update_controllers(controller_state, metrics)
>>> {name: round(radius, 4) for name, radius in controller_state.items()}
{'ClipRateController(target=0.01, start=0.05, gain=0.1, min_radius=0.005, max_radius=0.5)': 0.0581}

A radius of your own is a frozen dataclass that derives from `Radius`; its text form is readable once it is imported.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from bandpo import _checks
from bandpo.errors import InvalidValue

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from bandpo.sequences import Sequences

__all__ = [
    "ClipRateController",
    "Controller",
    "Linear",
    "Radius",
    "TrainingState",
]


@dataclass(frozen=True, eq=False)
class TrainingState:
    """The quantities that numbers, rules and objectives may depend on beside the log-probabilities.

    Tensors are of the loss's own batch, so a micro-batch has its own. Every field is optional.

    Args:
        progress: Share of the training done, in [0, 1].
        controller_state: What ``update_controllers`` returned after the last batch; ``{}`` before the first.
        group: Index of each sequence's prompt, (batch,); sequences of one prompt have the same. In a packed batch of
            the shape (sequences,).
        age: Number of versions that the sampling weights were behind, per sequence as ``group``, or (batch, time).
        sequences: Which tokens form a sequence; `bandpo.Batch` fills it in.
        processes: The ``torch.distributed`` group over whose batches sums of the batch run; None for this process.

    Raises:
        ValueError: ``progress`` outside of [0, 1].

    >>> from bandpo.sequences import Sequences
    >>> TrainingState(sequences=Sequences(torch.tensor([[0.0, 1.0, 1.0]]))).position
    tensor([[0., 0., 1.]])
    """

    progress: float | None = None
    controller_state: Mapping[str, float] | None = None
    group: Int[Tensor, " batch"] | None = None
    age: Tensor | None = None
    sequences: Sequences | None = None
    processes: Any = None

    @property
    def position(self) -> Float[Tensor, "batch time"] | None:
        """Number of counted tokens of the sequence before each token; None where sequences are not known."""
        return None if self.sequences is None else self.sequences.position

    @property
    def length(self) -> Float[Tensor, "batch time"] | None:
        """Number of counted tokens of each token's sequence; None where sequences are not known."""
        return None if self.sequences is None else self.sequences.token_length

    def __post_init__(self) -> None:
        if self.progress is not None and not 0 <= self.progress <= 1:
            raise InvalidValue(
                f"progress must be in [0, 1], the share of training done, got {self.progress!r}"
            )


class Radius(ABC):
    """A number of a setting, such as the size of a trust region, as a function of the training state."""

    needs: ClassVar[str]
    """The field or property of `TrainingState` that the value depends on."""
    each_token: ClassVar[bool] = False
    """Whether the value differs from token to token; only the radius of a `bandpo.Band` may."""

    @property
    @abstractmethod
    def range(self) -> tuple[float, float]:
        """The smallest and the greatest possible value."""

    def resolve(self, state: TrainingState) -> float | Tensor | Radius:
        """Return the value in ``state``, or the radius itself if the state lacks what it depends on."""
        return self

    def unknown(self) -> InvalidValue:
        """Return the error for a radius whose value the state lacks."""
        return InvalidValue(
            f"{self!r} depends on the training state: give policy_loss state=TrainingState({self.needs}=...), or use "
            "a trainer that does so, such as BandGRPOTrainer"
        )


V = TypeVar("V", bound="Varies")


class Varies:
    """A setting whose numbers, and those of settings within it, may vary: a rule, an objective or a method."""

    def varying(self, within: str = "") -> dict[str, Radius]:
        """Return every number that varies, by the path of fields that leads to it.

        >>> TwoSided(FixedClip(0.2), Band(KL(), Linear(0.05, 0.01))).varying()
        {'upper.radius': Linear(start=0.05, end=0.01)}
        """
        radii: dict[str, Radius] = {}
        for name, value in self.parts().items():
            path = f"{within}.{name}".lstrip(".")
            if isinstance(value, Radius):
                radii[path] = value
            elif isinstance(value, Varies):
                radii |= value.varying(path)
        return radii

    def resolve(self: V, state: TrainingState, strict: bool = True) -> V:
        """Return the setting with its varying numbers replaced by their values in ``state``.

        Args:
            state: The training state.
            strict: Whether to raise an error for a number that depends on what the state lacks. If not, the number
                stays as it is.

        Raises:
            ValueError: if ``strict`` and a number depends on what the state lacks.

        >>> Band(KL(), Linear(0.05, 0.01)).resolve(TrainingState(progress=1.0))
        Band(divergence=KL(), radius=0.01, max_ratio=10.0)
        """
        changed: dict[str, Any] = {}
        for name, part in self.parts().items():
            if isinstance(part, Varies):
                value = part.resolve(state, strict)
            elif isinstance(part, Radius):
                value = part.resolve(state)
                if strict and isinstance(value, Radius):
                    raise value.unknown()
            else:
                continue
            if value is not part:
                changed[name] = value
        return replace(cast("Any", self), **changed) if changed else self

    def update_controllers(
        self, controller_state: Mapping[str, float], metrics: Mapping[str, Any]
    ) -> dict[str, float]:
        """Return the numbers that the setting's controllers choose after a batch.

        The result is plain data, keyed by the controllers' text forms, to be saved with a checkpoint; empty without a
        controller.

        Args:
            controller_state: The numbers of the batch; ``{}`` for the first.
            metrics: The metrics of `bandpo.Audit` or `bandpo.policy_loss` over the batch.

        Raises:
            ValueError: if the metrics lack what a controller measures.
        """
        controllers = [number for number in self.varying().values() if isinstance(number, Controller)]
        updated: dict[str, float] = {}
        for controller in controllers:
            name = repr(controller)
            try:
                measured = controller.measured(metrics)
            except KeyError as error:
                raise InvalidValue(
                    f"{self!r} measures {error}, which the metrics lack; those of bandpo.Audit have it"
                ) from None
            updated[name] = controller.update(controller_state.get(name, controller.start), measured)
        return updated

    def parts(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(cast("Any", self)) if f.init}


def _between(start: float, end: float, share: Any) -> Any:
    """Return the value at ``share`` of the way from ``start`` (share 0) to ``end`` (share 1), exact at both."""
    return start * (1 - share) + end * share


@dataclass(frozen=True)
class Linear(Radius):
    """A number that changes in a straight line over training, from ``start`` to ``end``.

    The paper's authors tried a linear decay of the radius. Known from ``TrainingState(progress=…)``.

    Args:
        start: Value at the start of training.
        end: Value at the end of training.

    >>> Band(KL(), Linear(0.04, 0.02)).resolve(TrainingState(progress=0.5)).radius
    0.03
    """

    start: float
    end: float

    needs = "progress"

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            _checks.number(name, getattr(self, name), "a finite number", lambda x: -math.inf < x < math.inf)

    @property
    def range(self) -> tuple[float, float]:
        return min(self.start, self.end), max(self.start, self.end)

    def resolve(self, state: TrainingState) -> float | Radius:
        if state.progress is None:
            return self
        return _between(self.start, self.end, state.progress)


@dataclass(frozen=True)
class Controller(Radius):
    """A number that is adjusted after each batch so that a measured quantity approaches a target.

        radius ← radius·exp(gain·(measured − target)/(measured + target)),  within [min_radius, max_radius]

    The fraction lies in [−1, 1], so one batch changes the radius by at most the factor ``e^gain``. What is measured is
    defined by a subclass.

    Args:
        target: Target of the measured quantity, > 0.
        start: Radius of the first batch.
        gain: Speed; with 0.1 the radius changes by at most 10 % a batch. With a positive gain a quantity above the
            target widens the radius, with a negative one it narrows it.
        min_radius: Smallest radius; a tenth of ``start`` by default.
        max_radius: Greatest radius; ten times ``start`` by default.
    """

    target: float
    start: float
    gain: float = 0.1
    min_radius: float = None  # pyright: ignore[reportAssignmentType]  (filled in below)
    max_radius: float = None  # pyright: ignore[reportAssignmentType]

    needs = "controller_state"

    def __post_init__(self) -> None:
        if _checks.is_a(self.min_radius, NoneType):
            object.__setattr__(self, "min_radius", self.start / 10)
        if _checks.is_a(self.max_radius, NoneType):
            object.__setattr__(self, "max_radius", self.start * 10)
        for name in ("target", "start", "min_radius", "max_radius"):
            _checks.positive(name, getattr(self, name))
        if not self.min_radius <= self.start <= self.max_radius:
            raise InvalidValue(
                f"start={self.start} must lie between min_radius={self.min_radius} and max_radius={self.max_radius}"
            )
        if self.gain == 0 or not math.isfinite(self.gain):
            raise InvalidValue(f"gain must be a finite number other than 0, got {self.gain!r}")

    @property
    def range(self) -> tuple[float, float]:
        return self.min_radius, self.max_radius

    def resolve(self, state: TrainingState) -> float | Radius:
        return self if state.controller_state is None else state.controller_state.get(repr(self), self.start)

    def update(self, radius: float, measured: float) -> float:
        """Return the next radius, after a batch with ``radius`` in which ``measured`` (≥ 0) was measured.

        A quantity that is not finite (a mean over no tokens, a ratio that overflowed) leaves the radius unchanged.

        >>> round(ClipRateController(target=0.01, start=0.05).update(0.05, measured=0.03), 6)
        0.052564
        """
        if not math.isfinite(measured):
            return radius
        if measured < 0:
            raise InvalidValue(
                f"{type(self).__name__} was given {measured!r}, but what it measures is never negative"
            )
        error = (measured - self.target) / (measured + self.target)
        return min(max(radius * math.exp(self.gain * error), self.min_radius), self.max_radius)

    @abstractmethod
    def measured(self, metrics: Mapping[str, Any]) -> float:
        """Return the measured quantity, from the metrics of `bandpo.audit.metrics`."""


class ClipRateController(Controller):
    """A controller of the clip rate: the share of tokens whose gradient the clip drops.

    The rate is ``clip_high + clip_low`` over all losses of a batch. The first loss, before any update, clips nothing. A
    rate above the target widens the radius.
    """

    def measured(self, metrics: Mapping[str, Any]) -> float:
        return float(metrics["clip_high"]) + float(metrics["clip_low"])
