"""`bandpo.Watch`: a callback that diagnoses a run of TRL, or of another trainer of transformers, while it trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bandpo.audit.online import EVERY, RunWatch
from bandpo.doctor.findings import Finding
from bandpo.errors import MissingPackage
from bandpo.runs.configs import setup_of
from bandpo.runs.setup import Setup

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise MissingPackage("bandpo.Watch needs transformers: pip install transformers") from error

__all__ = ["Watch"]

STATE = "bandpo.Watch"
"""The entry of a trainer's state, and so of ``trainer_state.json``, that holds what was announced."""

FEWEST_EQUAL_REWARDS = 500
"""Answers with equal rewards that are no accident: of 500 wrong ones, fewer than 1 in 166 are right at 95 %."""


class Watch(TrainerCallback):
    """Diagnoses a run from its log while it trains, as `bandpo diagnose` does, and announces each finding once.

    It reads ``state.log_history`` at the main process, and changes nothing in the run unless ``stop_on`` is set. What
    was announced is saved with checkpoints, so that a resumed run does not announce it again.

    Args:
        every: Log steps from one check to the next. In a log of more than 20 times as many, a check is made when the
            log has grown by a twentieth.
        stop_on: Ends the run, after the step that follows, where two checks in a row have a finding of this severity:
            ``stop``, or ``fix``, which includes ``stop``. A checkpoint is saved unless ``save_strategy`` is ``no``.
            None never ends it.
        alerts: Ways to tell people of faults (``stop`` and ``fix``): ``wandb``, ``trackio``, an address for JSON.

    Raises:
        ValueError: if a setting is none of these.
        ImportError: if a tracker of ``alerts`` is not installed.

    >>> bandpo.Watch(stop_on="soon")
    Traceback (most recent call last):
    bandpo.errors.InvalidValue: stop_on must be 'stop', 'fix' or None, got 'soon'
    """

    def __init__(self, *, every: int = EVERY, stop_on: str | None = None, alerts: Sequence[str] = ()):
        self._settings: dict[str, Any] = {"every": every, "stop_on": stop_on, "alerts": alerts}
        self._stops = stop_on is not None
        self._reasons: list[Finding] = []
        self.anchor = "trainer"
        """As for `bandpo.Recorder`; `bandpo.integrations.trl.AuditMixin` sets it."""
        # Settings are refused here, and the setup is known when training begins.
        self.run_watch = RunWatch(**self._settings)
        """What judges the run."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the configuration, and what was announced before a checkpoint from which the run goes on."""
        self._reasons = []
        self.run_watch = RunWatch(
            setup_of_arguments(args), anchor=self.anchor, flat_steps=_flat_steps(args), **self._settings
        )
        saved = state.stateful_callbacks.get(STATE, {})
        self.run_watch.resume(len(state.log_history), saved.get("attributes", {}))

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check the log if it is time."""
        if state.is_world_process_zero and state.log_history:
            self._check(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop on all processes, if the main process found a reason."""
        if not self._stops or not _from_main_process(bool(self._reasons)):
            return
        is_saved = args.save_strategy != "no"
        control.should_training_stop = True
        control.should_save = control.should_save or is_saved
        if self._reasons:
            checkpoint = (
                "a checkpoint is saved" if is_saved else "no checkpoint is saved, as save_strategy='no'"
            )
            self.run_watch.announce_end(
                self._reasons, f"training ends at step {state.global_step}, {checkpoint}"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check the whole log."""
        if state.is_world_process_zero and state.log_history:
            self._check(state, at_the_end=True)

    def _check(self, state: Any, *, at_the_end: bool = False) -> None:
        self._reasons += self.run_watch.check_log(state.log_history, at_the_end=at_the_end)
        state.stateful_callbacks[STATE] = {"args": {}, "attributes": dict(self.run_watch.announced)}


def setup_of_arguments(args: Any) -> Setup:
    """Return what the arguments of a trainer say of a run.

    Args:
        args: A ``TrainingArguments``, such as TRL's ``GRPOConfig``.
    """
    is_of_trl = any(base.__module__.startswith("trl.") for base in type(args).__mro__)
    return setup_of("trl", vars(args)) if is_of_trl else Setup()


def _flat_steps(args: Any) -> float:
    """Return the optimiser steps in which `FEWEST_EQUAL_REWARDS` answers are generated; 0 if that is not known."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
    factors: list[Any] = [getattr(args, name, None) for name in names]
    if not all(isinstance(factor, int) and factor > 0 for factor in factors):
        return 0.0
    answers = math.prod(factors) / (getattr(args, "num_iterations", None) or 1)
    return FEWEST_EQUAL_REWARDS / answers


def _from_main_process(flag: bool) -> bool:
    """Return a flag of the main process, on every process."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return flag
    flags = [flag]
    dist.broadcast_object_list(flags, src=0)
    return bool(flags[0])
