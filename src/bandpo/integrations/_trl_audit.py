"""An audit of any GRPOTrainer: what its loss does to tokens, logged with the rest.

TRL computes the log-probabilities inside its loss, so they are caught where the loss asks for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import trl
from transformers import Trainer, TrainerCallback
from trl import GRPOTrainer

from bandpo.audit.metrics import Audit, logged
from bandpo.audit.recorder import Recorder
from bandpo.batch import Batch
from bandpo.errors import InvalidType, InvalidValue, MissingPackage, RunProblem
from bandpo.integrations._trl_announcements import sampling_settings
from bandpo.integrations._trl_gradient_check import Certifier, by_entropy
from bandpo.integrations._trl_parameter_check import Scoring
from bandpo.integrations._watch import Watch
from bandpo.methods import METHODS, Method
from bandpo.objectives import SequenceMask
from bandpo.runs.configs import trl_method
from bandpo.runs.quantities import DETAIL
from bandpo.schedules import TrainingState
from bandpo.text import parse

if TYPE_CHECKING:
    from torch import Tensor


OLDEST = (1, 10)
"""The oldest version of TRL whose averages are those that its documentation names."""


def refuse_an_old_version(version: str) -> None:
    """Refuse a version of TRL whose averages are others.

    Raises:
        ImportError: it is too old.
    """
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise MissingPackage(
            f"bandpo.integrations.trl needs trl 1.10 or later, and this is {version}, which multiplies the loss of "
            "loss_type='dapo' and 'cispo' by gradient_accumulation_steps / steps_per_generation and averages "
            "'luspo' over padding; pip install 'trl>=1.10'"
        )


refuse_an_old_version(trl.__version__)

REWARD = "bandpo_reward"
"""The entry of a batch for each sequence's whole reward."""
TRUNCATED = "bandpo_truncated"
"""The entry of a batch for whether a sequence was cut off at the length limit."""


@dataclass
class _Loss:
    """One call of `compute_loss`, or of `_compute_loss` within it."""

    inputs: dict[str, Any]
    """The object that the loss reads: what is put into it, the loss takes."""
    scoring: Scoring | None = None
    """How it asked for the log-probabilities, where its gradient may be compared."""
    asked: bool = False
    """Whether TRL has asked for the log-probabilities."""
    returned: bool = False
    """Whether `_compute_loss` has returned: log-probabilities that are asked for after are of another term."""


class _LogDetail(TrainerCallback):
    """Puts what is not logged into the log's history, where `bandpo audit` finds it, and no console or tracker does."""

    def __init__(self) -> None:
        self.detail: dict[str, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.detail:
            state.log_history[-1][DETAIL] = self.detail
            self.detail = {}


class _EndOfTraining(TrainerCallback):
    """Calls a function at the end of a training that has made an optimiser step."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._first_step = state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step > self._first_step:
            self._function()


class AuditMixin(GRPOTrainer):
    """Logs what the loss does to tokens, as ``audit/…`` metrics (see docs/record.md), and warns of what wastes a run.

    The log shows the metrics of `bandpo.audit.metrics.LOGGED`. The others are kept in ``state.log_history``, and so
    in ``trainer_state.json``, under the one key ``audit_detail``.

    Put it before any GRPOTrainer that calls TRL's own loss: ``class Mine(AuditMixin, TheirTrainer): ...``. It costs no
    forward pass: the loss's log-probabilities are seen on their way. Sums are reduced over processes and read once
    per log step. Only training steps are audited.

    Raises:
        TypeError: the class derives from a trainer other than TRL's GRPOTrainer.
        RuntimeError: the loss never asked for log-probabilities, or got none, so nothing can be audited.
    """

    audit_steps: int = 1
    """The losses of every so-many-th optimiser step are audited; 0 for none."""
    audit_detail: bool = False
    """Whether the console and trackers get all ``audit/…`` metrics."""
    certify: str = "warn"
    """What follows if the loss's gradient is not that of `loss_method`: ``warn``, ``stop``, or ``off``: no look."""
    record: str | None = None
    """Folder to which the tokens of every training loss are written, see `bandpo.Recorder`."""
    watched: str = "warn"
    """What happens where the tests of `bandpo diagnose` find something wrong: ``warn``, ``stop`` or ``off``. A
    `bandpo.Watch` among the callbacks is used in place of ``warn``."""

    hooked: bool = False
    """Whether TRL's loss is handed the weight of each token, see `bandpo.integrations.trl`."""

    _loss: _Loss | None = None
    _rewards: Tensor | None = None
    """What each reward function gave each sequence of the batch that is being made, in all processes."""
    _audit_since_log: Audit | None = None
    _watch: Watch | None = None
    _recorder: Recorder | None = None

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        for base in cls.__mro__:  # a mixin of Trainer has no loss of its own; TRL's trainers have
            other = base.__module__.startswith("trl.") and issubclass(base, Trainer)
            if other and not issubclass(base, GRPOTrainer) and base not in GRPOTrainer.__mro__:
                raise InvalidType(
                    f"{cls.__name__} derives from {base.__name__}, which is no GRPOTrainer; AuditMixin and "
                    "BandGRPOTrainer know the loss of GRPOTrainer alone"
                )
            own_loss = base is not GRPOTrainer and "_compute_loss" in vars(base)
            if own_loss and base.__module__.startswith("trl."):
                name = base.__name__.removesuffix("Trainer")
                remedy = (
                    f"train BandGRPOTrainer with method='{name}()'" if name in METHODS else "use it alone"
                )
                raise InvalidType(
                    f"{cls.__name__} derives from {base.__name__}, whose loss is its own and none of GRPOTrainer's; "
                    f"{remedy}"
                )

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *arguments: Any, **named: Any):
        if any("unsloth" in f"{cls.__module__}.{cls.__name__}".lower() for cls in type(self).__mro__):
            raise InvalidValue(
                "Unsloth was imported before TRL, and its GRPOTrainer gives this class no log-probabilities; import "
                "bandpo.integrations.trl before unsloth, or train without it"
            )
        self._certifier = Certifier(self.certify)
        if args is not None and args.use_liger_kernel and hasattr(GRPOTrainer, "compute_liger_loss"):
            raise InvalidValue(
                "use_liger_kernel=True computes the loss in a fused kernel of this TRL version, which knows epsilon "
                "alone; leave it out, or use BandGRPOConfig(fused_logits=True)"
            )
        super().__init__(model, reward_funcs, args, *arguments, **named)
        sampler = self.loss_method().old_policy == "rollout"
        anchor = "rollout" if sampler else getattr(self.args, "anchor", "trainer")
        self._log_detail = _LogDetail()
        self.add_callback(self._log_detail)
        self._watch = self._add_watch(anchor)
        self.add_callback(_EndOfTraining(self._announce_if_nothing_was_compared))
        if self.record is not None:
            self._recorder = Recorder(
                self.record,
                method=self.audited_method(),
                anchor=anchor,
                process=self.accelerator.process_index,
                framework=f"trl {trl.__version__}",
                sampling={name: x for name, x in sampling_settings(self.args).items() if x is not None},
            )

    def _add_watch(self, anchor: str) -> Watch | None:
        """Return the callback that watches the run: the user's own, or one that does what ``watched`` says.

        Args:
            anchor: As for `bandpo.Recorder`.
        """
        if self.watched not in ("warn", "stop", "off"):
            raise InvalidValue(f"watched must be 'warn', 'stop' or 'off', got {self.watched!r}")
        callbacks = self.callback_handler.callbacks
        watch = next((callback for callback in callbacks if isinstance(callback, Watch)), None)
        if watch is not None and self.watched != "warn":
            raise InvalidValue(
                f"watched={self.watched!r} and a bandpo.Watch among the callbacks both say what is watched; leave one "
                "out"
            )
        if self.watched == "off":
            return None
        if watch is not None:
            # Callbacks are called in their order, and this one reads what `_LogDetail` adds to the log.
            self.remove_callback(watch)
        else:
            watch = Watch(stop_on="fix" if self.watched == "stop" else None)
        watch.anchor = anchor
        self.add_callback(watch)
        return watch

    def loss_method(self) -> Method:
        """The loss's method: of a stock trainer what its ``loss_type``, ``epsilon`` and ``delta`` make of a token."""
        # The loss reads these from the trainer, where a callback may have changed them.
        of_trainer = {
            "loss_type": self.loss_type,
            "importance_sampling_level": self.importance_sampling_level,
            "epsilon": self.epsilon_low,
            "epsilon_high": self.epsilon_high,
        }
        return parse(trl_method(vars(self.args) | of_trainer))

    def audited_method(self) -> Method:
        """What is audited: the loss's method, with TRL's off-policy mask.

        The mask's drift is measured from the anchor. TRL measures it from the rollout engine's log-probabilities, which
        are others only with vLLM.
        """
        method, threshold = self.loss_method(), cast("Any", self.args).off_policy_mask_threshold
        if threshold is None:
            return method
        return replace(method, objective=SequenceMask(threshold, method.objective))

    @property
    def training(self) -> bool:
        """Whether the model is in training mode; TRL tells training metrics from evaluation's by it too."""
        return self.model is not None and self.model.training

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        # A subclass may compute a loss of its own here, without TRL's `_compute_loss`.
        inputs = dict(inputs)  # a batch comes back in the next iteration
        with self._logps_of(inputs):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        # A subclass may hand on another object than `compute_loss` got. This one is what TRL's loss reads.
        inputs = dict(inputs)
        with self._logps_of(inputs):
            return super()._compute_loss(model, inputs)

    @contextmanager
    def _logps_of(self, inputs: dict[str, Any]) -> Generator[None, None, None]:
        """Take the log-probabilities that a loss asks for to be those of ``inputs``.

        Raises:
            RuntimeError: the loss did not ask for log-probabilities.
        """
        outer, loss = self._loss, _Loss(inputs)
        self._loss = loss
        try:
            yield
        finally:
            self._loss = outer
        if not loss.asked:
            raise RunProblem(
                "the loss was computed without asking for log-probabilities, so neither a clip rule nor the audit could"
                " act; is the trainer's loss replaced by a fused one?"
            )
        if outer is not None:
            outer.asked = outer.returned = True

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        # The old policy's log-probabilities are computed outside of the loss.
        loss = self._loss
        if loss is None or loss.returned:
            return super()._get_per_token_logps_and_entropies(*arguments, **named)
        loss.scoring = self._certifier.scoring(self, arguments, named)
        outputs = super()._get_per_token_logps_and_entropies(*arguments, **named)
        if outputs[0] is None:
            raise RunProblem(
                "the trainer's loss gets no log-probabilities (Unsloth, imported before TRL, returns none), so "
                "neither a clip rule nor the audit can act; train without it"
            )
        loss.asked = True
        if self.training:
            self._test_and_record(loss.inputs, outputs[0], outputs[1])
        with torch.no_grad():
            self._on_logps(loss.inputs, outputs[0], outputs[1])
        return outputs

    def _test_and_record(self, inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None) -> None:
        """Test the tokens of a loss, and record them, as they are before anything steers it."""
        generation, losses = divmod(self._step, self.losses_per_batch)
        update = losses // cast("Any", self.args).gradient_accumulation_steps
        step, version = self.state.global_step, inputs.get("version")
        run_watch = None
        if self._watch is not None and self.is_world_process_zero():
            is_due = self._watch.run_watch.is_due(generation, update)
            # Of data that are known to be stale no ratio is 1.
            if is_due and (version is None or bool((version >= step).all())):
                run_watch = self._watch.run_watch
        # Most losses are neither tested nor recorded: they are not to wait for their groups.
        if run_watch is None and self._recorder is None:
            return
        tokens = {
            "logp": logp,
            "logp_old": self._logp_old(inputs, logp),
            "logp_rollout": inputs.get("sampling_per_token_logps"),
            "advantages": inputs["advantages"],
            "mask": counted_tokens(inputs),
            "entropy": entropy,
            "tokens": inputs["completion_ids"],
            "group": torch.unique(inputs["prompt_ids"], dim=0, return_inverse=True)[1],
            "reward": inputs.get(REWARD),
            "truncated": inputs.get(TRUNCATED),
            "generation": generation,
            "update": update,
        }
        if run_watch is not None:
            run_watch.check_batch(**tokens)
        if self._recorder is not None:
            self._recorder.add(**tokens, step=step, version=version, method=self.audited_method())

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Tensor:
        rewards = cast("Tensor", super()._calculate_rewards(*arguments, **named))
        self._rewards = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._rewards = None
        outputs = super()._generate_and_score_completions(inputs)
        if self.training and (self._watch is not None or self._recorder is not None):
            self._add_what_is_recorded(outputs)
        return outputs

    def _add_what_is_recorded(self, outputs: dict[str, Any]) -> None:
        """Put each sequence's reward, and whether it was cut off, into a batch, which TRL shuffles and splits."""
        mask, ids = outputs["completion_mask"], outputs["completion_ids"]
        rows = len(mask)
        # Where functions are normalised one by one, no single reward orders the advantages.
        one_reward = self.multi_objective_aggregation == "sum_then_normalize"
        if self._rewards is not None and one_reward:
            # As TRL adds them up; a sequence that no function scored has none.
            unknown = self._rewards.isnan().all(dim=1)
            weights = self.reward_weights.to(self._rewards)
            total = (self._rewards * weights).nansum(dim=1).masked_fill(unknown, torch.nan)
            # Rewards are those of all processes, one process after the other.
            first = self.accelerator.process_index * rows
            outputs[REWARD] = total[first : first + rows]
        tokenizer = self._tokenizer
        ends = getattr(self, "eos_token_ids", [tokenizer.eos_token_id])  # TRL before 1.16 has one
        ends = torch.tensor([*ends, tokenizer.pad_token_id], device=ids.device)
        last = ids.gather(1, (mask.sum(1, keepdim=True) - 1).clamp(min=0))
        # TRL's mask_truncated_completions leaves no token of a sequence that was cut off.
        outputs[TRUNCATED] = ~torch.isin(last.squeeze(1), ends) | (mask.sum(1) == 0)

    def _on_logps(self, inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None) -> None:
        """Called in every loss, once its log-probabilities are known and before they are used."""
        batch = self._batch_of(inputs, logp, entropy)
        self._watch_gradient(inputs, batch, logp, entropy)
        if self._audits_this_step():
            method = self.audited_method()
            counted = by_entropy(self, batch, entropy)
            self._add_to_audit(Audit.of(batch, method, method.tokens(batch), counted=counted))

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        loss = super().training_step(*arguments, **named)
        # After the backward pass, to which subclasses may have added, and before the optimiser's step.
        for line in self._certifier.settle(self, self.loss_method()):
            self._announce(line)
        return loss

    def _watch_gradient(
        self, inputs: dict[str, Any], batch: Batch, logp: Tensor, entropy: Tensor | None
    ) -> None:
        """Have the gradient of a loss compared after its backward pass, if it is time."""
        scoring = None if self._loss is None else self._loss.scoring
        self._certifier.watch(self, inputs, batch, logp, entropy, scoring)

    def _announce_if_nothing_was_compared(self) -> None:
        """Say at the end of training if no gradient was compared with the method's."""
        line = self._certifier.summary(self, self.loss_method())
        if line:
            self._announce(line)

    def _announce(self, line: str) -> None:
        self.accelerator.print(f"bandpo: {line}", file=sys.stderr)

    def _audits_this_step(self) -> bool:
        return self.training and bool(self.audit_steps) and self.state.global_step % self.audit_steps == 0

    def _batch_of(self, inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None) -> Batch:
        """The batch as the loss gets it."""
        return Batch.read(
            logp,
            self._logp_old(inputs, logp),
            inputs["advantages"],
            counted_tokens(inputs),
            logp_anchor=self._logp_anchor(inputs, logp),
            entropy=entropy,
            weights=inputs.get("importance_sampling_ratio"),
            state=self._training_state(inputs),
        )

    def _add_to_audit(self, audit: Audit) -> None:
        """Add an audit to what the next log shows."""
        self._audit_since_log = audit if self._audit_since_log is None else self._audit_since_log + audit

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics: dict[str, float] = {}
        if self.training and self._audit_since_log is not None:
            metrics = self._read_metrics(self._audit_since_log)
            everything, shown = logged(metrics, detail=True), logged(metrics, detail=self.audit_detail)
            logs |= shown
            self._log_detail.detail = {name: value for name, value in everything.items() if name not in shown}
        super().log(logs, start_time)
        if metrics:
            self._audit_since_log = None

    @property
    def losses_per_batch(self) -> int:
        """Losses that each process makes of one generated batch."""
        return (cast("Any", self.args).steps_per_generation or 1) * self.num_iterations

    def _read_metrics(self, audit: Audit) -> dict[str, float]:
        """Return the metrics of an audit, summed over processes."""

        def over_processes(sums: Tensor) -> Tensor:
            return cast("Tensor", self.accelerator.reduce(sums, reduction="sum"))

        return audit.reduced(over_processes).metrics()

    def _logp_old(self, inputs: dict[str, Any], logp: Tensor) -> Tensor:
        """The log-probabilities that the ratio refers to; TRL leaves them out where they are the current ones."""
        old = inputs.get("old_per_token_logps")
        return logp.detach() if old is None else old

    def _logp_anchor(self, inputs: dict[str, Any], logp: Tensor) -> Tensor | None:
        """What the bounds surround, if not what the ratio refers to."""
        return None

    def _training_state(self, inputs: dict[str, Any]) -> TrainingState | None:
        """What numbers of the method may depend on."""
        return None


class AuditedGRPOTrainer(AuditMixin):
    """TRL's `GRPOTrainer`, unchanged but for the audit: put its name where GRPOTrainer stood."""


def counted_tokens(inputs: dict[str, Any]) -> Tensor:
    """The tokens that count in TRL's loss."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
