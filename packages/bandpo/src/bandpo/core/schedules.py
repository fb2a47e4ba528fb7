"""Schedules and controllers: numbers of a rule, an objective or a method that vary over training.

The radius of a `bandpo.Band` is a number, a tensor, a schedule or a controller. Any other number of a rule or an
objective may be a schedule or a controller too: ``DualClip(Linear(10, 3))``. Schedules and controllers have no state:
``resolve(state)`` of a rule, an objective or a method replaces them by numbers. The training loop stores the state of
controllers, a plain dict.

| radius | value | depends on |
|---|---|---|
| ``0.05`` | constant | |
| a tensor | one per token (batch, time), or per sequence (batch, 1) | |
| `Linear` | a schedule over training | ``TrainingState(progress=…)`` |
| `ClipRateController` | adjusted after each batch | ``TrainingState(controller_state=…)`` |

In a training loop of your own (`BandGRPOTrainer` does this itself):

>>> rule = Band(KL(), ClipRateController(target=0.01, start=0.05))
>>> controller_state = {}
>>> for batch in range(3):
...     method = rule.resolve(TrainingState(progress=batch / 3, controller_state=controller_state))
...     metrics = {"clip_high": 0.01, "clip_low": 0.02}  # from policy_loss(..., method=method), over the whole batch
...     controller_state = rule.update_controllers(controller_state, metrics)
>>> {name: round(radius, 4) for name, radius in controller_state.items()}
{'ClipRateController(target=0.01, start=0.05, gain=0.1, min_radius=0.005, max_radius=0.5)': 0.0581}

To define a schedule of your own, write a frozen dataclass that derives from `Radius`. Its text form can be parsed once
its module is imported.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from . import _checks
from .errors import InvalidValue

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from .sequences import Sequences

__all__ = [
    "ClipRateController",
    "Controller",
    "Linear",
    "Radius",
    "TrainingState",
]


@dataclass(frozen=True, eq=False)
class TrainingState:
    """The quantities, beside the tensors of a batch, that schedules, rules and objectives may depend on.

    Tensors belong to the batch of one loss, so each micro-batch has its own. All fields are optional.

    Args:
        progress: Share of the training that is done, in [0, 1].
        controller_state: The result of ``update_controllers`` after the last batch; ``{}`` before the first.
        group: Index of each sequence's prompt, (batch,), or (sequences,) in a packed batch.
        age: Number of versions by which the weights that sampled were behind, per sequence like ``group``, or per token
            (batch, time).
        sequences: The assignment of tokens to sequences. `bandpo.core.batch.Batch` sets it.
        processes: The ``torch.distributed`` group whose batches are summed by rules that depend on the whole batch;
            None for this process only.

    Raises:
        ValueError: if ``progress`` is outside of [0, 1].

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
        """Number of counted tokens of the sequence before each token; None if sequences are not known."""
        return None if self.sequences is None else self.sequences.position

    @property
    def length(self) -> Float[Tensor, "batch time"] | None:
        """Number of counted tokens of each token's sequence; None if sequences are not known."""
        return None if self.sequences is None else self.sequences.token_length

    def __post_init__(self) -> None:
        if self.progress is not None and not 0 <= self.progress <= 1:
            raise InvalidValue(
                f"progress must be in [0, 1], the share of the training that is done, got {self.progress!r}"
            )


class Radius(ABC):
    """A number that depends on the training state, such as the size of a trust region."""

    needs: ClassVar[str]
    """The field or property of `TrainingState` that the value depends on."""
    per_token: ClassVar[bool] = False
    """True if the value may differ from token to token, which only the radius of a `bandpo.Band` may."""

    @property
    @abstractmethod
    def range(self) -> tuple[float, float]:
        """The smallest and the largest possible value."""

    def resolve(self, state: TrainingState) -> float | Tensor | Radius:
        """Return the value for a training state, or the radius itself if the state lacks what it depends on."""
        return self

    def unknown(self) -> InvalidValue:
        """Return the error for a radius whose value is not known from the training state."""
        return InvalidValue(
            f"{self!r} depends on the training state: pass state=TrainingState({self.needs}=...) to policy_loss, or "
            "use a trainer that does so, such as BandGRPOTrainer"
        )


V = TypeVar("V", bound="Varies")


class Varies:
    """Base of rules, objectives and methods, whose numbers may be schedules or controllers."""

    def varying(self, within: str = "") -> dict[str, Radius]:
        """Return all schedules and controllers by the path of fields that leads to them.

        >>> TwoSided(FixedClip(0.2), Band(KL(), Linear(0.05, 0.01))).varying()
        {'upper.radius': Linear(start=0.05, end=0.01)}
        """
        radii: dict[str, Radius] = {}
        for name, value in self.arguments().items():
            path = f"{within}.{name}".lstrip(".")
            if isinstance(value, Radius):
                radii[path] = value
            elif isinstance(value, Varies):
                radii |= value.varying(path)
        return radii

    def resolve(self: V, state: TrainingState, strict: bool = True) -> V:
        """Return the rule, objective or method with schedules and controllers replaced by their values.

        Args:
            state: The training state.
            strict: True to raise an error for a number that depends on something that the state lacks, False to leave
                it in place.

        Raises:
            ValueError: if ``strict`` and a number depends on something that the state lacks.

        >>> Band(KL(), Linear(0.05, 0.01)).resolve(TrainingState(progress=1.0))
        Band(divergence=KL(), radius=0.01, max_ratio=10.0)
        """
        changed: dict[str, Any] = {}
        for name, argument in self.arguments().items():
            if isinstance(argument, Varies):
                value = argument.resolve(state, strict)
            elif isinstance(argument, Radius):
                value = argument.resolve(state)
                if strict and isinstance(value, Radius):
                    raise value.unknown()
            else:
                continue
            if value is not argument:
                changed[name] = value
        return replace(cast("Any", self), **changed) if changed else self

    def update_controllers(
        self, controller_state: Mapping[str, float], metrics: Mapping[str, Any]
    ) -> dict[str, float]:
        """Return the state of the controllers after a batch.

        It is a dict from each controller's text form to its new value, to be saved with a checkpoint; empty if there is
        no controller.

        Args:
            controller_state: The state before the batch; ``{}`` for the first batch.
            metrics: The metrics of `bandpo.audit.Audit` or `bandpo.policy_loss` over the batch.

        Raises:
            ValueError: if the metrics lack the quantity that a controller measures.
        """
        controllers = [number for number in self.varying().values() if isinstance(number, Controller)]
        updated: dict[str, float] = {}
        for controller in controllers:
            name = repr(controller)
            try:
                measured = controller.measured(metrics)
            except KeyError as error:
                raise InvalidValue(
                    f"{self!r} measures {error}, which the metrics lack; those of bandpo.audit.Audit have it"
                ) from None
            updated[name] = controller.update(controller_state.get(name, controller.start), measured)
        return updated

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the constructor by name."""
        return {f.name: getattr(self, f.name) for f in fields(cast("Any", self)) if f.init}


def _between(start: float, end: float, share: Any) -> Any:
    """Return the value at ``share`` of the way from ``start`` (share 0) to ``end`` (share 1), exact at both."""
    return start * (1 - share) + end * share


@dataclass(frozen=True)
class Linear(Radius):
    """A number that changes linearly over training, from ``start`` to ``end``.

    It depends on ``TrainingState(progress=…)``. The paper's authors tried a linear decay of the radius.

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

    The fraction is in [−1, 1], so one batch changes the radius by at most the factor ``e^gain``. A subclass defines
    the measured quantity.

    Args:
        target: Target of the measured quantity, > 0.
        start: Radius of the first batch.
        gain: Step size; with 0.1 the radius changes by at most 10 % per batch. With a positive gain, a quantity above
            the target increases the radius; with a negative gain it decreases it.
        min_radius: Smallest radius; a tenth of ``start`` by default.
        max_radius: Largest radius; ten times ``start`` by default.
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
        """Return the radius of the next batch.

        Args:
            radius: The radius of the batch.
            measured: The measured quantity, ≥ 0. The radius is unchanged if it is not finite, as for a mean over no
                tokens.

        >>> round(ClipRateController(target=0.01, start=0.05).update(0.05, measured=0.03), 6)
        0.052564
        """
        if not math.isfinite(measured):
            return radius
        if measured < 0:
            raise InvalidValue(
                f"{type(self).__name__} measures a quantity that is never negative, but got {measured!r}"
            )
        error = (measured - self.target) / (measured + self.target)
        # The exponential of a larger number overflows, and no radius grows by more.
        factor = math.exp(min(self.gain * error, 700.0))
        return min(max(radius * factor, self.min_radius), self.max_radius)

    @abstractmethod
    def measured(self, metrics: Mapping[str, Any]) -> float:
        """Return the measured quantity, from the metrics of `bandpo.audit.metrics`."""


class ClipRateController(Controller):
    """A controller of the clip rate: the share of tokens whose gradient the clip drops.

    The rate is ``clip_high + clip_low`` over all losses of a batch. The first loss, before any update, clips nothing.
    With a positive gain, a rate above the target increases the radius.
    """

    def measured(self, metrics: Mapping[str, Any]) -> float:
        return float(metrics["clip_high"]) + float(metrics["clip_low"])
