"""An audit of any GRPOTrainer: metrics of how its loss treats the tokens, logged with TRL's own.

TRL computes the log-probabilities inside its loss, ``_compute_loss``. It calls
``_get_per_token_logps_and_entropies`` for them, and uses them when that has returned. `AuditMixin` overrides both
functions:

1. ``_compute_loss`` gives TRL's loss a copy of the batch, and keeps both as ``_loss`` until the loss asks for its
   log-probabilities.
2. ``_get_per_token_logps_and_entropies`` passes log-probabilities on. If ``_loss`` is there, they are those of the
   loss: it checks and records them, and calls ``_prepare_loss``, which audits the loss. `BandGRPOTrainer` overrides
   ``_prepare_loss`` to change the copy that TRL's loss reads next.

All other calls of the second function are for other purposes, and ``_loss`` is None: the old policy and the reference
at generation, and a term that a subclass computes before or after TRL's loss.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import trl
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer

from bandpo.audit.metrics import Audit
from bandpo.core.batch import Batch
from bandpo.core.errors import InvalidType, InvalidValue, MissingPackage, RunProblem
from bandpo.core.methods import METHODS, Method
from bandpo.core.objectives import SequenceMask
from bandpo.core.schedules import TrainingState
from bandpo.core.text import parse
from bandpo.integrations.stock_methods import trl_method
from bandpo.integrations.trl.announcements import sampling_settings
from bandpo.integrations.trl.probe import high_entropy_mask, probe_loss
from bandpo.integrations.trl.run_audit import RunAudit
from bandpo.integrations.trl.training_faults import UserFunctions, naming_weights
from bandpo.integrations.trl.trl_names import GRPO

if TYPE_CHECKING:
    from torch import Tensor

_logger = logging.getLogger("bandpo")


OLDEST = (1, 10)
"""The oldest version of TRL whose loss aggregations are as documented."""


def check_trl_version(version: str) -> None:
    """Check that a version of TRL aggregates its losses as documented.

    Raises:
        ImportError: it is too old.
    """
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise MissingPackage(
            f"bandpo.integrations.trl needs trl 1.10 or later, and this is {version}, which multiplies the loss of "
            "loss_type='dapo' and 'cispo' by gradient_accumulation_steps / steps_per_generation and averages "
            "'luspo' over padding; pip install 'trl>=1.10'"
        )


check_trl_version(trl.__version__)

REWARD = "bandpo_reward"
"""The key, in a batch of TRL, of each sequence's total reward."""
TRUNCATED = "bandpo_truncated"
"""The key, in a batch of TRL, of the flag of each sequence that was cut off at the length limit."""
GROUP = "bandpo_group"
"""The key, in a batch of TRL, of the number of each sequence's group in the generated batch of all processes."""


class _Loss(NamedTuple):
    """The batch of a loss in progress."""

    batch: dict[str, Any]
    """The batch that the trainer was given, which is never changed: TRL uses it again in the next iteration."""
    inputs: dict[str, Any]
    """The copy that TRL's loss reads. Changes to its entries change the loss."""


class AuditMixin(RunAudit, GRPOTrainer):
    """A mixin for GRPOTrainers that logs ``audit/…`` metrics of the loss and diagnoses the run while it trains.

    The log has the metrics of `bandpo.audit.metrics.LOGGED`. The others are in ``state.log_history``, and so in
    ``trainer_state.json``, under the single key ``audit_detail``. docs/audit.md describes all of them.

    Put it before any GRPOTrainer that calls TRL's own loss: ``class Mine(AuditMixin, TheirTrainer): ...``. It needs no
    forward pass of its own, as it reads the loss's log-probabilities. Sums are reduced over processes and read from the
    device once per log step. Only training steps are audited.

    Before training it compares the gradient of the loss with that of `loss_method` on a synthetic batch, see
    ``certify``. The loss of a subclass may end with an error on this batch, if it reads inputs that only its own
    generation adds. It is then not compared, whatever ``certify`` is, and a line on stderr says so.

    If a loss ends with an exception, the batch and all settings are as before. What the loss has added until then
    stays: its metrics, the sums of the audit, and the recorded rows. If it is computed again, these count it twice.

    Raises:
        TypeError: the class derives from a trainer other than TRL's GRPOTrainer.
        RuntimeError: at construction: the installed TRL lacks a name of `bandpo.integrations.trl.trl_names`. In
            training: the loss is not TRL's, or never asked for log-probabilities, or got none, so nothing can be
            audited.
    """

    _loss: _Loss | None = None
    """The loss in progress, until it asks for its log-probabilities; None otherwise."""
    _has_loss: bool = False
    """True once TRL's loss has returned, since the last call of `compute_loss`."""
    _rewards: Tensor | None = None
    """The rewards of the batch that is being generated, in all processes; shape (sequences, reward functions)."""
    _first_generation: int | None = None
    """The number of the first batch that this process trains on; None before its first loss."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            is_from_trl = base.__module__.startswith("trl.")
            is_grpo = issubclass(base, GRPOTrainer) or base in GRPOTrainer.__mro__
            if is_from_trl and issubclass(base, Trainer) and not is_grpo:
                raise InvalidType(
                    f"{cls.__name__} derives from {base.__name__}, which is no GRPOTrainer; AuditMixin and "
                    "BandGRPOTrainer only support the loss of GRPOTrainer (for AsyncGRPOTrainer, train "
                    "BandAsyncGRPOTrainer)"
                )
            # Some subclasses of GRPOTrainer in TRL replace its loss.
            replaces_loss = base is not GRPOTrainer and "_compute_loss" in vars(base)
            if is_from_trl and replaces_loss:
                name = base.__name__.removesuffix("Trainer")
                remedy = (
                    f"train BandGRPOTrainer with method='{name}()'" if name in METHODS else "use it alone"
                )
                raise InvalidType(
                    f"{cls.__name__} derives from {base.__name__}, which replaces the loss of GRPOTrainer; {remedy}"
                )

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: Any = None, *arguments: Any, **kwargs: Any
    ):
        if any("unsloth" in f"{cls.__module__}.{cls.__name__}".lower() for cls in type(self).__mro__):
            raise InvalidValue(
                "Unsloth was imported before TRL, and its GRPOTrainer gives this class no log-probabilities; import "
                "bandpo.integrations.trl before unsloth, or train without it"
            )
        GRPO.check_config(GRPOConfig)
        GRPO.check_class(GRPOTrainer)
        if args is not None and args.use_liger_kernel and hasattr(GRPOTrainer, "compute_liger_loss"):
            raise InvalidValue(
                "use_liger_kernel=True computes the loss in a fused kernel of this TRL version, which only supports "
                "epsilon; leave it out, and use TRL 1.15 or newer, which stores no logits"
            )
        super().__init__(model, reward_funcs, args, *arguments, **kwargs)
        GRPO.check_trainer(self)
        self._user_functions = UserFunctions()
        if self.loss_method().old_policy == "rollout":
            anchor = "rollout"
        else:
            anchor = getattr(self.args, "anchor", "trainer")
        self._start_audit(anchor, sampling_settings(self.args))

    def loss_method(self) -> Method:
        """Return the method of the loss; for a stock trainer, the one of its ``loss_type``, ``epsilon`` and ``delta``.

        It is used by the audit and by the probe.
        """
        # The loss reads these from the trainer, where a callback may have changed them.
        current = {
            "loss_type": self.loss_type,
            "importance_sampling_level": self.importance_sampling_level,
            "epsilon": self.epsilon_low,
            "epsilon_high": self.epsilon_high,
        }
        return parse(trl_method(vars(self.args) | current))

    def audited_method(self) -> Method:
        """Return the method of the loss together with TRL's off-policy mask.

        The mask's drift is measured from the anchor. TRL measures it from the rollout engine's log-probabilities, which
        only differ from the anchor with vLLM.
        """
        method = self.loss_method()
        threshold = cast("Any", self.args).off_policy_mask_threshold
        if threshold is None:
            return method
        return replace(method, objective=SequenceMask(threshold, method.objective))

    @property
    def _withholds_advantages(self) -> bool:
        """True if TRL's loss only gets its advantages from `_prepare_loss`, and has none before."""
        return False

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        self._has_loss = False
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not self._has_loss:
            raise RunProblem(
                f"the loss of {type(self).__name__} is not TRL's, so neither a clip rule nor the audit can act; call "
                "super()._compute_loss, or leave the loss to TRL"
            )
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        batch = inputs
        inputs = dict(batch)
        if self._withholds_advantages:
            inputs.pop("advantages", None)
        self._loss = _Loss(batch, inputs)
        try:
            loss = super()._compute_loss(model, inputs)
            has_logps = self._loss is None
        finally:
            self._loss = None
        if not has_logps:
            raise RunProblem(
                "the loss was computed without asking for log-probabilities, so neither a clip rule nor the audit could"
                " act; is the trainer's loss replaced by a fused one?"
            )
        self._has_loss = True
        return loss

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **kwargs: Any) -> Any:
        outputs = super()._get_per_token_logps_and_entropies(*arguments, **kwargs)
        if self._loss is None:  # not for TRL's loss, or not the first time in it
            return outputs

        batch, inputs = self._loss
        self._loss = None
        if outputs[0] is None:
            raise RunProblem(
                "the trainer's loss gets no log-probabilities (Unsloth, imported before TRL, returns none), so "
                "neither a clip rule nor the audit can act; train without it"
            )
        logp, entropy, *_ = outputs
        if self.training and not self._probing:
            self._check_and_record(batch, logp, entropy)
        with torch.no_grad(), naming_weights(self.model, logp, self.state.global_step):
            self._prepare_loss(batch, inputs, logp, entropy)
        return outputs

    def _prepare_loss(
        self, batch: dict[str, Any], inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None
    ) -> None:
        """Audit a loss whose log-probabilities are known, before TRL computes it from them.

        Subclasses override it to change what TRL's loss reads next.

        Args:
            batch: The batch of the loss, with tensors of shape (sequences, tokens).
            inputs: The copy of it that TRL's loss reads. Changes to its entries change the loss.
            logp: The log-probabilities of the loss, (sequences, tokens), in nats, with their graph.
            entropy: The entropies of the same tokens; None if the loss needs none.
        """
        if self._audits_this_step():
            read = self._batch_of(batch, logp, entropy)
            method = self.audited_method()
            counted = high_entropy_mask(self, read, entropy)
            self._add_to_audit(Audit.of(read, method, method.tokens(read), counted=counted))

    def _compare_with_method(self) -> str:
        return probe_loss(self)

    def _check_and_record(self, inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None) -> None:
        """Check and record the tokens of a loss."""
        step = self.state.global_step
        losses_per_update = cast("Any", self.args).gradient_accumulation_steps
        batches, loss_of_batch = divmod(self._step, self.losses_per_batch)
        update = loss_of_batch // losses_per_update
        if self._first_generation is None:
            # A resumed run counts its losses from 0, and begins with a new batch.
            self._first_generation = math.ceil(step * losses_per_update / self.losses_per_batch)
        generation = self._first_generation + batches
        version = inputs.get("version")

        run_watch = self._due_watch(generation, update, version)
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
            "group": inputs.get(GROUP),
            "reward": inputs.get(REWARD),
            "truncated": inputs.get(TRUNCATED),
            "generation": generation,
            "update": update,
        }
        if run_watch is not None:
            run_watch.check_batch(**tokens)
        if self._recorder is not None:
            self._recorder.add(**tokens, step=step, version=version, method=self.audited_method())

    def _calculate_rewards(self, *arguments: Any, **kwargs: Any) -> Tensor:
        rewards = cast("Tensor", super()._calculate_rewards(*arguments, **kwargs))
        self._rewards = rewards
        self._check_rewards(rewards, self.reward_func_names)
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._rewards = None
        with self._user_functions.watching(self):
            outputs = super()._generate_and_score_completions(inputs)
        if self.training:
            outputs[GROUP] = self._groups_of(outputs["prompt_ids"])
            if self._watch is not None or self._recorder is not None:
                self._add_reward_and_truncated(outputs)
        return outputs

    def _has_rewards_of(self, rows: int) -> bool:
        """Return whether the rewards are those of a batch with this number of rows in each process.

        They are not if a subclass has left answers out after scoring them, or has added some.
        """
        return self._rewards is not None and len(self._rewards) == rows * self.accelerator.num_processes

    def _groups_of(self, prompt_ids: Tensor) -> Tensor:
        """Return the number of the group of each sequence in a generated batch.

        TRL shuffles the batch and splits it into the batches of several losses, so a number from one of these would be
        another group's in the next.

        Args:
            prompt_ids: The prompts of this process, (sequences, tokens).
        """
        rows = len(prompt_ids)
        if self._has_rewards_of(rows):
            # TRL takes consecutive answers as a group, over the processes in their order.
            first = self.accelerator.process_index * rows
            answers = torch.arange(first, first + rows, device=prompt_ids.device)
            return answers // cast("int", self.num_generations)
        of_process = torch.unique(prompt_ids, dim=0, return_inverse=True)[1]
        return of_process * self.accelerator.num_processes + self.accelerator.process_index

    def _add_reward_and_truncated(self, outputs: dict[str, Any]) -> None:
        """Add each sequence's reward and truncation flag to a batch, so that TRL shuffles and splits them with it."""
        mask = outputs["completion_mask"]
        ids = outputs["completion_ids"]
        rows = len(mask)

        # With other aggregations each reward function is normalised by itself, so there is no single reward.
        has_total = self.multi_objective_aggregation == "sum_then_normalize"
        if self._rewards is not None and self._has_rewards_of(rows) and has_total:
            # The same weighted sum as TRL's, but NaN for a sequence without any score.
            is_unscored = self._rewards.isnan().all(dim=1)
            weights = self.reward_weights.to(self._rewards)
            total = (self._rewards * weights).nansum(dim=1).masked_fill(is_unscored, torch.nan)
            # The rewards are gathered from all processes, in the order of the processes.
            first = self.accelerator.process_index * rows
            outputs[REWARD] = total[first : first + rows]

        tokenizer = self._tokenizer
        eos_ids = getattr(
            self, "eos_token_ids", [tokenizer.eos_token_id]
        )  # older versions of TRL have a single one
        end_ids = torch.tensor([*eos_ids, tokenizer.pad_token_id], device=ids.device)
        last_position = (mask.sum(1, keepdim=True) - 1).clamp(min=0)
        last_token = ids.gather(1, last_position).squeeze(1)
        # mask_truncated_completions=True masks every token of a truncated sequence.
        is_masked = mask.sum(1) == 0
        outputs[TRUNCATED] = ~torch.isin(last_token, end_ids) | is_masked

    def _batch_of(self, inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None) -> Batch:
        """Return the tokens of a loss as a `Batch`."""
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

    @property
    def losses_per_batch(self) -> int:
        """The number of losses that each process computes on one generated batch."""
        return (cast("Any", self.args).steps_per_generation or 1) * self.num_iterations

    @property
    def _data_age(self) -> str:
        updates = self.losses_per_batch // cast("Any", self.args).gradient_accumulation_steps
        return "each batch served one update" if updates == 1 else f"each batch served {updates} updates"

    def _logp_old(self, inputs: dict[str, Any], logp: Tensor) -> Tensor:
        """Return the log-probabilities in the denominator of the ratio.

        TRL omits them from a batch where they are equal to the current ones.
        """
        old = inputs.get("old_per_token_logps")
        return logp.detach() if old is None else old

    def _logp_anchor(self, inputs: dict[str, Any], logp: Tensor) -> Tensor | None:
        """Return the log-probabilities from which the bounds are computed; None if they are those of the ratio."""
        return None

    def _training_state(self, inputs: dict[str, Any]) -> TrainingState | None:
        """Return the training state of a loss; None if nothing of it is known."""
        return TrainingState(group=inputs[GROUP]) if GROUP in inputs else None


class AuditedGRPOTrainer(AuditMixin):
    """TRL's `GRPOTrainer` with an audit: a drop-in replacement that trains identically."""


def counted_tokens(inputs: dict[str, Any]) -> Tensor:
    """Return a mask of the tokens that count in TRL's loss: completion tokens that no tool wrote."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
