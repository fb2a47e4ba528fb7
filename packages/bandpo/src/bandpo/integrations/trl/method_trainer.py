"""The parts of bandpo's trainers that do not depend on how TRL computes its loss: schedules, controllers, metrics."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from bandpo.audit.metrics import Audit
from bandpo.core import _checks
from bandpo.core.batch import Batch, Tokens
from bandpo.core.errors import InvalidValue
from bandpo.core.methods import Method
from bandpo.core.rules import bands
from bandpo.core.schedules import Controller, TrainingState
from bandpo.core.sequences import Sequences
from bandpo.integrations.trl.announcements import card_entries
from bandpo.integrations.trl.run_audit import RunAudit
from bandpo.integrations.trl.trl_names import TrainerNames

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo.core.objectives import Objective


@dataclass
class _GeneratedBatch:
    """The state of one generated batch, during all updates on it."""

    state: TrainingState
    """The training state at its generation."""
    audit: Audit | None = None
    """The sums for the method's controllers, over the losses so far."""


class ClippedTokens(NamedTuple):
    """The tokens, or sequences, that a method clips in a loss."""

    low: Tensor
    """1 if counted and clipped with a negative advantage, (batch, time), or (sequences, 1) for whole sequences."""
    high: Tensor
    """1 if counted and clipped with a positive advantage, of the same shape."""
    sequences: Sequences
    """The sequences of the entries."""

    @classmethod
    def of(cls, is_clipped: Tensor, tokens: Tokens) -> ClippedTokens:
        """Return the counted tokens of those that are clipped."""
        counted = is_clipped * tokens.mask
        return cls(counted * (tokens.advantages < 0), counted * (tokens.advantages > 0), tokens.sequences)


class MethodTrainer(RunAudit):
    """A base of trainers that train the method of their config: its schedules and controllers, and what is logged.

    A subclass calls `_read_settings` before and `_start_audit` after TRL constructs the trainer, `_begin_batch` and
    `_end_batch` around the losses of a generated batch, and `_measure` and `_log_objective` in each loss.
    """

    args: Any
    _settings_at_start: dict[str, Any]
    """The values of `_clip_settings` at construction."""
    method: Method
    """The method of the config, with its schedules and controllers."""
    _tag_names = ["trl", "bandpo"]  # noqa: RUF012  (TRL's own attribute)
    _trl_names: TrainerNames
    """The names of TRL on which the trainer depends."""
    _clips: ClippedTokens | None = None
    """The tokens that the method clips in the last loss."""

    def _read_settings(self, args: Any) -> None:
        """Set the attributes that a config determines.

        Args:
            args: A config with bandpo's settings.
        """
        self.method = args.effective_method
        # The settings of RunAudit are class attributes; here they come from the config.
        self.certify = args.certify
        self.record = args.record
        self.watched = args.watched
        self.audit_steps = args.audit_steps
        self.audit_detail = args.audit_detail
        self._generated = _GeneratedBatch(TrainingState(progress=0.0, controller_state={}))
        self._radii: defaultdict[str, list[Tensor]] = defaultdict(list)

    # Schedules and controllers.

    def loss_method(self) -> Method:
        """Return the method with the current values of its schedules and controllers."""
        return self.method.resolve(self._generated.state, strict=False)

    def _begin_batch(self) -> None:
        """Set the values of schedules and controllers for all updates on the next batch."""
        progress = min(self.state.global_step / max(self.state.max_steps, 1), 1.0)
        controller_state = dict(self._controller_state) if self._has_controllers else {}
        state = TrainingState(progress=progress, controller_state=controller_state)
        self._generated = _GeneratedBatch(state, self._generated.audit)

    def _end_batch(self) -> None:
        """Update the controllers, on every process, after the last loss of a batch and before a checkpoint is saved."""
        if self._generated.audit is None:
            return
        # Metrics that are not defined are missing from the audit's, and NaN here.
        metrics = defaultdict(lambda: math.nan, self._reduce_metrics(self._generated.audit))
        self._controller_state.update(self.method.update_controllers(self._controller_state, metrics))
        self._generated.audit = None

    def _state_of_loss(self, age: Tensor | None, group: Tensor | None = None) -> TrainingState:
        """Return the training state of a loss.

        Args:
            age: The number of updates by which the weights that sampled are behind, per sequence; None if unknown.
            group: The number of each sequence's group; None if unknown.
        """
        process_group = torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None
        return replace(self._generated.state, age=age, group=group, processes=process_group)

    @property
    def _has_controllers(self) -> bool:
        """True if a number of the method is set by a controller."""
        return any(isinstance(number, Controller) for number in self.method.varying().values())

    @property
    def _controller_state(self) -> dict[str, float]:
        """The state of the method's controllers, in the part of the trainer's state that checkpoints contain."""
        entries = cast("dict[str, Any]", self.state.stateful_callbacks)
        entry = entries.setdefault("ControllerState", {"args": {"values": {}}, "attributes": {}})
        return entry["args"]["values"]

    def _check_unchanged_settings(self) -> None:
        """Check that no callback has changed a setting of the clip, which the method replaces.

        This includes methods that TRL implements, as the audit and the probe read the method and not the settings.

        Raises:
            ValueError: a setting has changed, which would have no effect or another one than in TRL.
        """
        for name, value in self._clip_settings().items():
            at_start = self._settings_at_start[name]
            if value != at_start:
                raise InvalidValue(
                    f"trainer.{name} was changed from {at_start} to {value} during training; "
                    f"method={self.args.method!r} replaces it. A bound that changes is written with a schedule, as in "
                    "method='FixedClip(0.2, Linear(0.2, 0.28))'"
                )

    def _clip_settings(self) -> dict[str, Any]:
        """Return the current values of the settings of TRL's loss that a method replaces."""
        return {name: getattr(self, name) for name in ("epsilon_low", "epsilon_high")}

    # Logging.

    @property
    def _loss_metrics(self) -> dict[str, list[Any]]:
        """TRL's metrics of the next log, to which a loss adds its own."""
        return cast("Any", self)._metrics["train" if self.training else "eval"]

    @property
    def _clip_metric_names(self) -> tuple[str, ...]:
        """The names of TRL's clip metrics."""
        return tuple(
            f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
        )

    @contextmanager
    def _own_clip_metrics(self) -> Generator[None, None, None]:
        """Replace the clip metrics that TRL's loss logs in the block by those of `_clips`.

        Raises:
            RuntimeError: TRL's loss logs none of these names.
        """
        metrics = self._loss_metrics
        counts = {name: len(metrics.get(name, ())) for name in self._clip_metric_names}
        yield
        for name, value in zip(counts, self._clip_metrics(), strict=True):
            if len(metrics.get(name, ())) != counts[name] + 1:
                raise self._trl_names.missing(
                    f"metric {name!r} in its loss", "counts what the clip blocks, which bandpo replaces"
                )
            metrics[name][-1] = value

    def _clip_metrics(self) -> list[float]:
        """Return the values of TRL's clip metrics of the last loss, over the tokens of all processes."""
        assert self._clips is not None
        low, high, sequences = self._clips
        sums = torch.stack([low.sum(), high.sum(), sequences.mask.sum()])
        low_sum, high_sum, count = cast("Tensor", self.accelerator.reduce(sums, reduction="sum")).tolist()
        low_mean = low_sum / max(count, 1.0)
        high_mean = high_sum / max(count, 1.0)

        # The share of each sequence, NaN without a counted token. Processes may have different numbers of sequences.
        low_share = (sequences.sum(low) / sequences.length).flatten()
        high_share = (sequences.sum(high) / sequences.length).flatten()
        extremes = torch.stack(
            [low_share.nan_to_num(nan=math.inf).min(), -high_share.nan_to_num(nan=-math.inf).max()]
        )
        gathered = cast("Tensor", self.accelerator.gather(extremes.unsqueeze(0)))
        low_min, minus_high_max = gathered.amin(0).tolist()
        high_max = -minus_high_max
        if math.isinf(low_min):
            low_min = high_max = math.nan
        return [low_mean, high_mean, low_mean + high_mean, low_min, high_max]

    def _log_objective(self, batch: Batch, tokens: Tokens, objective: Objective) -> None:
        """Log the mean of the method's objective over the counted tokens of all processes."""
        value = batch.advantages * objective.surrogate(tokens)
        regularizer = objective.regularizer(tokens)
        if regularizer is not None:
            value = value - regularizer * batch.mask
        if batch.token_weights is not None and not objective.weights_inside:
            value = value * batch.token_weights
        sums = torch.stack([value.sum(), batch.mask.sum().to(value)])
        total, count = cast("Tensor", self.accelerator.reduce(sums, reduction="sum")).tolist()
        self._loss_metrics["objective"].append(total / max(count, 1.0))

    def _counted_by_audit(self, batch: Batch, entropy: Tensor | None) -> Tensor:
        """Return 1 for the tokens that have a gradient.

        Args:
            batch: The tokens of the loss.
            entropy: Their entropies, if the loss needs them.
        """
        return batch.mask

    def _measure(self, batch: Batch, tokens: Tokens, entropy: Tensor | None = None) -> None:
        """Add the tokens of a loss to the logged radii, to the audit and to the sums for the controllers."""
        for path, band in bands(tokens.rule).items():
            radius = band.radius_for(tokens.logp_anchor)
            self._radii[path].append(_radius_statistics(radius, tokens.mask))

        is_audited = self._audits_this_step()
        if not is_audited and not self._has_controllers:
            return
        method = self.audited_method()
        counted = self._counted_by_audit(batch, entropy)
        if is_audited:
            audit = Audit.of(batch, method, tokens, counted=counted)
            self._add_to_audit(audit)
            controller_audit = audit.without_counterfactuals
        else:
            controller_audit = Audit.of(batch, method, tokens, {}, counted)

        if self._has_controllers:
            previous = self._generated.audit
            self._generated.audit = controller_audit if previous is None else previous + controller_audit

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.training:
            for path, statistics in self._radii.items():
                # Shape (losses of all processes, 4).
                gathered = cast("Tensor", self.accelerator.gather(torch.stack(statistics)))
                sums, counts, minima, maxima = gathered.unbind(-1)
                smallest = minima.min().item()
                largest = maxima.max().item()
                values = {"radius": (sums.sum() / counts.sum()).item()}
                if smallest < largest:
                    values |= {"radius_min": smallest, "radius_max": largest}
                logs |= {f"{name}/{path}".rstrip("/"): value for name, value in values.items()}
            self._radii.clear()
            if self.accelerator.device.type == "cuda":
                logs["peak_memory"] = torch.cuda.max_memory_allocated() / 2**30
                torch.cuda.reset_peak_memory_stats()
        super().log(logs, start_time)

    def create_model_card(self, *arguments: Any, **kwargs: Any) -> None:
        """Write TRL's model card with the method's name and paper instead of GRPO's."""
        self._name, self._paper = card_entries(self.args)
        super().create_model_card(*arguments, **kwargs)


def _radius_statistics(radius: float | Tensor, mask: Tensor) -> Tensor:
    """Return sum, number, minimum and maximum of the radii of counted tokens, as a tensor of 4 on their device."""
    dtype = _checks.widest_float(mask.device)
    radius = torch.as_tensor(radius, dtype=dtype, device=mask.device).expand_as(mask)
    counted = mask != 0
    return torch.stack(
        [
            (radius * mask).sum(),
            mask.sum().to(radius),
            radius.masked_fill(~counted, math.inf).min(),
            radius.masked_fill(~counted, -math.inf).max(),
        ]
    )
