"""The parts of an audit that do not depend on a trainer's loss: logged metrics, the record, the watch, the probe.

`bandpo.integrations.trl.AuditMixin` adds them to the loss of TRL's GRPOTrainer, and `BandAsyncGRPOTrainer` to that of
AsyncGRPOTrainer.
"""

from __future__ import annotations

import logging
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import trl
from transformers import Trainer, TrainerCallback

from bandpo._siblings import NOT_CHECKED, has_rlvet, require_rlvet
from bandpo.audit.closing_lines import describe_rare_winners, short_name
from bandpo.audit.metric_names import DETAIL
from bandpo.audit.metrics import Audit, logged
from bandpo.audit.recorder import Recorder
from bandpo.core.errors import BandWarning, InvalidValue, RunProblem
from bandpo.core.methods import Method
from bandpo.core.text import as_text
from bandpo.integrations.trl.training_faults import naming_checkpoint, unusable_rewards

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo.watch import RunWatch, Watch


_logger = logging.getLogger("bandpo")


def _save_tokenizer(processing_class: Any, folder: Path) -> None:
    """Write the ``tokenizer.json`` of a tokenizer or processor to a record's folder, to decode its ids later.

    A tokenizer without the library tokenizers has no such file.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))


class _LogDetail(TrainerCallback):
    """A callback that adds unlogged metrics to the log history, which `bandpo audit` reads and no tracker does."""

    def __init__(self) -> None:
        self.detail: dict[str, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.detail:
            state.log_history[-1][DETAIL] = self.detail
            self.detail = {}


class _EndOfTraining(TrainerCallback):
    """A callback that calls a function at the end of training, unless there was no optimiser step."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._first_step = state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step > self._first_step:
            self._function()


class RunAudit(Trainer):
    """A base of trainers that logs ``audit/…`` metrics of the loss, records its tokens and diagnoses the run.

    A subclass calls `_start_audit` when TRL has constructed the trainer, `_add_to_audit` and `_check_and_record` in
    each loss, and defines `loss_method` and `_compare_with_method`.
    """

    audit_steps: int = 1
    """Number of optimiser steps from one audited step to the next; 0 to audit none."""
    audit_detail: bool = False
    """True if the console and trackers get all ``audit/…`` metrics."""
    certify: str = "warn"
    """Reaction to a loss whose gradient, on a synthetic batch before training, is not the one of `loss_method`:
    ``warn``, ``stop`` the run, or ``off`` to compare none. A subclass whose loss ends with an error on this batch is
    not compared, also with ``stop``."""
    record: str | None = None
    """Folder to which the tokens of every training loss are written, see `bandpo.audit.Recorder`."""
    watched: str = "warn"
    """Reaction to a failed check of `rlvet diagnose` during training: ``warn``, ``stop`` the run, or ``off`` to check
    nothing. A `bandpo.watch.Watch` among the callbacks is used in place of ``warn``."""

    _probing: bool = False
    """True while the loss of a synthetic batch is computed, which is neither audited nor recorded."""
    _audit_since_log: Audit | None = None
    _audit_of_run: Audit | None = None
    """The audit of all steps that were logged since training began, over all processes."""
    _watch: Watch | None = None
    _recorder: Recorder | None = None
    _stops_without_rewards: bool = False
    """True if a batch in which no answer has a reward ends the run, whatever ``watched`` is."""

    def loss_method(self) -> Method:
        """Return the method of the loss. It is used by the audit and by the probe."""
        raise NotImplementedError

    def audited_method(self) -> Method:
        """Return the method of the loss together with the masks of the trainer."""
        return self.loss_method()

    def _compare_with_method(self) -> str:
        """Compare the gradient of the loss with that of `loss_method` on a synthetic batch, and return a line about it.

        Raises:
            RuntimeError: it is another one.
        """
        raise NotImplementedError

    def _start_audit(self, anchor: str, sampling: Mapping[str, Any], version_at: str = "token") -> None:
        """Add the callbacks of the audit, and open the record.

        Args:
            anchor: As for `bandpo.audit.Recorder`.
            sampling: The settings of the sampler; None for those that are not set.
            version_at: As for `bandpo.audit.Recorder`.
        """
        self._unusable_rewards: set[str] = set()  # the kinds that were announced
        self._log_detail = _LogDetail()
        self.add_callback(self._log_detail)
        self._watch = self._add_watch(anchor)
        self.add_callback(_EndOfTraining(self._end_training))

        if self.record is not None:
            self._recorder = Recorder(
                self.record,
                method=self.audited_method(),
                anchor=anchor,
                process=self.accelerator.process_index,
                framework=f"trl {trl.__version__}",
                sampling={name: value for name, value in sampling.items() if value is not None},
                version_at=version_at,
            )
            if self.accelerator.is_main_process:
                _save_tokenizer(self.processing_class, Path(self.record))

    def _end_training(self) -> None:
        if self._recorder is not None:
            self._recorder.flush()
        if self._audit_of_run is not None:
            self._announce_effect(self._audit_of_run)
            self._audit_of_run = None

    def _announce_effect(self, audit: Audit) -> None:
        """Print what the run's rule did to rare winners, what others would have, and the command that shows more.

        Nothing is printed if the level of the logger ``bandpo`` is above that of warnings.
        """
        if not _logger.isEnabledFor(logging.WARNING):
            return
        for line in describe_rare_winners(audit, self.loss_method(), self._method_name, self._data_age):
            self._announce(line)
        self._announce(f"more: {self._command_for_more}")

    @property
    def _method_name(self) -> str:
        """What the last lines of a run call its method."""
        text = str(getattr(self.args, "method", None) or as_text(self.loss_method().clip))
        return short_name(text)

    @property
    def _data_age(self) -> str:
        """How old the data of an update are, in words; empty if the trainer does not know it."""
        return ""

    @property
    def _command_for_more(self) -> str:
        """The command that shows more of the run: of its record, or of its log."""
        if self.record is not None:
            return f"bandpo audit {shlex.quote(str(self.record))}"
        folder = Path(str(self.args.output_dir))
        if any(any(folder.glob(f"{place}trainer_state.json")) for place in ("", "checkpoint-*/")):
            return f"bandpo audit {shlex.quote(str(folder))}"
        return "bandpo audit FOLDER, of a run with record='FOLDER'"

    def _save_checkpoint(self, *arguments: Any, **kwargs: Any) -> None:
        # A run that is resumed from this checkpoint does not record the losses before it again.
        if self._recorder is not None:
            self._recorder.flush()
        with naming_checkpoint(Path(str(self.args.output_dir)), self.state.global_step):
            super()._save_checkpoint(*arguments, **kwargs)

    def _check_rewards(self, rewards: Tensor, names: Sequence[str]) -> None:
        """Say that rewards of a batch cannot be learnt from: once for each kind, on the main process.

        Args:
            rewards: The rewards of all processes, (sequences, reward functions).
            names: The names of the reward functions.

        Raises:
            RuntimeError: no answer has a reward, and ``watched`` is ``stop`` or `_stops_without_rewards` is set; or a
                reward is infinite or too large, and ``watched`` is ``stop``.
        """
        fault = unusable_rewards(rewards, names, self.state.global_step)
        if fault is None:
            return
        is_stopped = self.watched == "stop" and fault.kind != "some"
        if is_stopped or (fault.kind == "all" and self._stops_without_rewards):
            raise RunProblem(fault.text)
        if self.watched == "off" or fault.kind in self._unusable_rewards:
            return
        self._unusable_rewards.add(fault.kind)
        if fault.kind == "some":
            self._announce(f"{fault.text} (later ones are not printed)")
        elif self.is_world_process_zero():
            warnings.warn(fault.text, BandWarning, stacklevel=2)

    def _add_watch(self, anchor: str) -> Watch | None:
        """Add the callback that diagnoses the run, and return it: the user's `Watch`, or one for ``watched``.

        Args:
            anchor: As for `bandpo.audit.Recorder`.
        """
        if self.watched not in ("warn", "stop", "off"):
            raise InvalidValue(f"watched must be 'warn', 'stop' or 'off', got {self.watched!r}")
        if not has_rlvet():
            if self.watched == "stop":
                require_rlvet("watched='stop'")
            if self.watched == "warn":
                self._announce(NOT_CHECKED)
            return None
        from bandpo.watch import Watch

        callbacks = self.callback_handler.callbacks
        watch = next((callback for callback in callbacks if isinstance(callback, Watch)), None)
        if watch is not None and self.watched != "warn":
            raise InvalidValue(
                f"watched={self.watched!r} contradicts the bandpo.watch.Watch among the callbacks; leave one of them "
                "out"
            )
        if self.watched == "off":
            return None

        if watch is not None:
            # Callbacks run in the order in which they were added, and this one reads the entries of `_LogDetail`.
            self.remove_callback(watch)
        else:
            watch = Watch(stop_on="fix" if self.watched == "stop" else None)
        watch.anchor = anchor
        self.add_callback(watch)
        return watch

    @property
    def training(self) -> bool:
        """True if the model is in training mode, by which TRL too separates training and evaluation metrics."""
        return self.model is not None and self.model.training

    def train(self, *arguments: Any, **kwargs: Any) -> Any:
        # Not at construction, as a subclass may set attributes that its loss reads after super().__init__().
        self._probe_loss()
        return super().train(*arguments, **kwargs)

    def _probe_loss(self) -> None:
        """Compare the gradient of the loss with the method's on a synthetic batch, once.

        Raises:
            RuntimeError: it is another one, and ``certify`` is ``stop``.
        """
        if self.certify == "off":
            return
        try:
            line = self._compare_with_method()
        except RunProblem as problem:
            if self.certify == "stop":
                raise
            warnings.warn(str(problem), BandWarning, stacklevel=3)
            return
        self._announce(line)

    def _due_watch(self, generation: int, update: int, version: Tensor | None) -> RunWatch | None:
        """Return the checks of the run if they are due for the tokens of a loss; None otherwise.

        Args:
            generation: The number of the generated batch.
            update: The number of optimiser steps on that batch so far.
            version: The step of the weights that sampled, one per sequence; None if every batch is sampled with the
                current weights.
        """
        if self._watch is None or not self.is_world_process_zero():
            return None
        # The checks expect a ratio of 1, which data from older weights does not have.
        if version is not None and not bool((version >= self.state.global_step).all()):
            return None
        return self._watch.run_watch if self._watch.run_watch.is_due(generation, update) else None

    def _announce(self, line: str) -> None:
        """Print a line to stderr, on the main process only."""
        self.accelerator.print(f"bandpo: {line}", file=sys.stderr)

    def _audits_this_step(self) -> bool:
        """Return True if the losses of this optimiser step are audited."""
        return (
            self.training
            and not self._probing
            and bool(self.audit_steps)
            and self.state.global_step % self.audit_steps == 0
        )

    def _add_to_audit(self, audit: Audit) -> None:
        """Add an audit to the metrics of the next log."""
        self._audit_since_log = audit if self._audit_since_log is None else self._audit_since_log + audit

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics: dict[str, float] = {}
        if self.training and self._audit_since_log is not None:
            audit = self._reduced(self._audit_since_log)
            self._audit_of_run = audit if self._audit_of_run is None else self._audit_of_run + audit
            metrics = audit.metrics()
            all_metrics = logged(metrics, detail=True)
            shown = logged(metrics, detail=self.audit_detail)
            logs |= shown
            self._log_detail.detail = {
                name: value for name, value in all_metrics.items() if name not in shown
            }
        super().log(logs, start_time)
        if metrics:
            self._audit_since_log = None

    def _reduced(self, audit: Audit) -> Audit:
        """Return an audit over the tokens of all processes, on the CPU."""

        def all_reduce(sums: Tensor) -> Tensor:
            return cast("Tensor", self.accelerator.reduce(sums, reduction="sum"))

        return audit.reduced(all_reduce)

    def _reduce_metrics(self, audit: Audit) -> dict[str, float]:
        """Return the metrics of an audit over the tokens of all processes."""
        return self._reduced(audit).metrics()
