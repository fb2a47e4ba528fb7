"""`bandpo.watch.Watch`, a callback for TRL's and transformers' trainers that diagnoses a run while it trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bandpo.core.errors import MissingPackage
from bandpo.watch.run_watch import EVERY, RunWatch
from rlvet.checks.findings import Finding
from rlvet.runs.configs import setup_of
from rlvet.runs.setup import Setup

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise MissingPackage("bandpo.watch.Watch needs transformers: pip install transformers") from error

__all__ = ["Watch"]

STATE = "bandpo.Watch"
"""The entry of a trainer's state, and so of ``trainer_state.json``, with the findings that were announced."""

MIN_EQUAL_REWARDS = 500
"""Number of completions with equal rewards from which a constant reward is no coincidence.

If 500 of 500 completions are wrong, the rate of right ones is below 1 in 166 at a confidence of 95 %.
"""


class Watch(TrainerCallback):
    """A callback that diagnoses a run from its log, as `rlvet diagnose` does, and announces each finding once.

    It reads ``state.log_history`` on the main process, and does not change the run unless ``stop_on`` is set. Announced
    findings are saved with checkpoints, so a resumed run does not announce them again.

    Args:
        every: Number of log steps between checks. When the log is longer than ``20 * every``, checks become rarer: the
            next is made when the log has grown by a twentieth.
        stop_on: The severity that ends the run: ``stop``, or ``fix``, which includes ``stop``. Training ends one step
            after two consecutive checks have a finding of this severity. A checkpoint is saved unless
            ``save_strategy`` is ``no``. None never ends the run.
        alerts: Services that are notified of findings with severity ``stop`` or ``fix``: ``wandb``, ``trackio``, or a
            URL that accepts JSON.

    Raises:
        ValueError: if a setting has another value.
        ImportError: if a tracker of ``alerts`` is not installed.

    >>> bandpo.watch.Watch(stop_on="soon")
    Traceback (most recent call last):
    bandpo.core.errors.InvalidValue: stop_on must be 'stop', 'fix' or None, got 'soon'
    """

    def __init__(self, *, every: int = EVERY, stop_on: str | None = None, alerts: Sequence[str] = ()):
        self._settings: dict[str, Any] = {"every": every, "stop_on": stop_on, "alerts": alerts}
        self._can_stop = stop_on is not None
        self._reasons_to_stop: list[Finding] = []
        self.anchor = "trainer"
        """As for `bandpo.audit.Recorder`; `bandpo.integrations.trl.AuditMixin` sets it."""
        # Constructed here to validate the settings, and again in on_train_begin, where the trainer's args are known.
        self.run_watch = RunWatch(**self._settings)
        """The checks of the run."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Read the trainer's arguments, and restore the announced findings of a checkpoint."""
        self._reasons_to_stop = []
        self.run_watch = RunWatch(
            setup_of_arguments(args), anchor=self.anchor, flat_steps=_least_flat_steps(args), **self._settings
        )
        saved = state.stateful_callbacks.get(STATE, {})
        self.run_watch.resume(len(state.log_history), saved.get("attributes", {}))

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check the log if a check is due."""
        if state.is_world_process_zero and state.log_history:
            self._check(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop training on all processes if the main process has a reason to."""
        if not self._can_stop or not _broadcast_flag(bool(self._reasons_to_stop)):
            return
        is_saved = args.save_strategy != "no"
        control.should_training_stop = True
        control.should_save = control.should_save or is_saved

        if self._reasons_to_stop:
            checkpoint = (
                "a checkpoint is saved" if is_saved else "no checkpoint is saved, as save_strategy='no'"
            )
            consequence = f"training ends at step {state.global_step}, {checkpoint}"
            self.run_watch.announce_end(self._reasons_to_stop, consequence)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check the whole log."""
        if state.is_world_process_zero and state.log_history:
            self._check(state, at_the_end=True)

    def _check(self, state: Any, *, at_the_end: bool = False) -> None:
        """Check the log, and save the announced findings in the trainer's state."""
        self._reasons_to_stop += self.run_watch.check_log(state.log_history, at_the_end=at_the_end)
        state.stateful_callbacks[STATE] = {"args": {}, "attributes": dict(self.run_watch.announced)}


def setup_of_arguments(args: Any) -> Setup:
    """Return the setup of a run from the arguments of its trainer.

    Args:
        args: A ``TrainingArguments``, such as TRL's ``GRPOConfig``.
    """
    is_from_trl = any(base.__module__.startswith("trl.") for base in type(args).__mro__)
    return setup_of("trl", vars(args)) if is_from_trl else Setup()


def _least_flat_steps(args: Any) -> float:
    """Return the number of optimiser steps over which equal rewards are a fault.

    These are the steps that generate `MIN_EQUAL_REWARDS` completions; 0 if the arguments do not determine them.
    """
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
    factors: list[Any] = [getattr(args, name, None) for name in names]
    if not all(isinstance(factor, int) and factor > 0 for factor in factors):
        return 0.0
    completions_per_step = math.prod(factors) / (getattr(args, "num_iterations", None) or 1)
    return MIN_EQUAL_REWARDS / completions_per_step


def _broadcast_flag(flag: bool) -> bool:
    """Return the main process's flag on every process."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return flag
    flags = [flag]
    dist.broadcast_object_list(flags, src=0)
    return bool(flags[0])
