"""Train any method with TRL's GRPOTrainer, and audit any GRPOTrainer.

A method that TRL implements itself (a fixed clip, GSPO, CISPO, SAPO, VESPO) becomes TRL's own settings, see
`BandGRPOConfig`, and trains bit for bit as the stock trainer does. Every other method uses the hook of TRL's VESPO
loss:

1. Under ``loss_type="vespo"`` TRL's loss calls ``self.get_gamma_weights`` for a detached weight φ of each token, and is
   ``−φ·A·logp``. `BandGRPOTrainer` sets this ``loss_type`` while a loss is computed.
2. The gradient of a method is ``−(w·A + b)·∇logp``, with a weight ``w`` and a bias ``b`` per token. When the loss has
   computed its log-probabilities, the trainer computes ``w·A + b``, replaces the advantages by their signs (−1 below 0,
   else 1) and sets φ to ``(w·A + b)·sign``. The product φ·sign is then ``w·A + b``, also for a token with ``A = 0`` and
   a bias. TRL's off-policy mask only reads the sign of the advantages, so it is unchanged.
3. ``get_gamma_weights`` restores the configured ``loss_type``. The remainder is TRL's own code: masks, importance
   weights, KL term, loss aggregation, entropy bonus and metrics.

The reported loss is the aggregated ``−(w·A + b)·logp``. Its gradient is the method's, but its value is not that of the
method's surrogate.

TRL's log-probabilities are at sampling temperature and over the full vocabulary, as bounds need them.

Schedules and controllers of `bandpo.core.schedules` are updated whenever a batch is generated. Their values are
constant for all updates on that batch.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from bandpo.audit.metrics import Audit
from bandpo.core import _checks
from bandpo.core.batch import Batch, Tokens
from bandpo.core.errors import InvalidType, InvalidValue, RunProblem
from bandpo.core.methods import Method
from bandpo.core.rules import bands
from bandpo.core.schedules import Controller, TrainingState
from bandpo.integrations.trl.announcements import card_entries, sampling_lines
from bandpo.integrations.trl.audit import AuditedGRPOTrainer, AuditMixin
from bandpo.integrations.trl.config import BandGRPOConfig
from bandpo.integrations.trl.fused_logits import FusedLogits
from bandpo.integrations.trl.gradient_check import check_trl_loss, high_entropy_mask

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AuditMixin", "AuditedGRPOTrainer", "BandGRPOConfig", "BandGRPOTrainer"]

HOOK = "vespo"
"""The ``loss_type`` under which TRL's loss calls a method of the trainer for the weight of each token."""


@dataclass
class _GeneratedBatch:
    """The state of one generated batch, during all updates on it."""

    state: TrainingState
    """The training state at its generation."""
    audit: Audit | None = None
    """The sums for the method's controllers, over the losses so far."""


class BandGRPOTrainer(AuditMixin, FusedLogits):
    """A `GRPOTrainer` with the method of ``args`` and the audit of `AuditMixin`.

    It logs the mean radius of the tokens since the last log as ``radius``, and ``radius_min`` and ``radius_max`` if it
    differs among tokens. A band within another rule is logged as ``radius/PATH``, such as ``radius/upper``. On CUDA it
    logs the peak memory since the last log in GiB as ``peak_memory``.

    It warns at construction if each batch is used for a single update: the old policy is then the current one, every
    ratio is 1, and no clip has any effect.

    It compares the gradient of the first loss, of the first losses with ratios other than 1, and of one in ten steps
    after that with the method's, see `bandpo.certify`. If no gradient was compared, it prints a line at the end of
    training.

    Raises:
        TypeError: ``args`` is no `BandGRPOConfig`.
        RuntimeError: while training: the gradient is not the method's.
        ValueError: the bounds or the method's ratio (DPPO, IcePop) need the rollout's log-probabilities, and there are
            none.
    """

    args: BandGRPOConfig
    _tag_names = ["trl", "bandpo"]  # noqa: RUF012  (TRL's own attribute)
    _token_weights: Tensor | None = None
    """φ of each token of the loss that is being computed, until TRL's loss takes it; shape (sequences, tokens)."""
    _weights_taken = False
    """True if TRL's loss has taken φ since `compute_loss` was called."""
    _configured_loss_type = ""
    """The user's ``loss_type``, which is replaced while a loss is computed."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: BandGRPOConfig | None = None,
        *arguments: Any,
        **kwargs: Any,
    ):
        args = BandGRPOConfig() if args is None else args
        if not isinstance(args, BandGRPOConfig):
            raise InvalidType(f"args must be a BandGRPOConfig, got {type(args).__name__}")
        self.method = args.effective_method
        self.hooked = args.native_settings is None
        needs_rollout_logps = "rollout" in (args.anchor, self.method.old_policy)
        if not args.ratio_moves and not needs_rollout_logps:
            warnings.warn(
                "each batch is used for one optimiser step, so the ratio is always 1 and no clip rule can act: set "
                "num_iterations > 1, or steps_per_generation to a multiple of gradient_accumulation_steps",
                stacklevel=2,
            )
        check_trl_loss()
        # The settings of AuditMixin are class attributes; here they come from the config.
        self.certify = args.certify
        self.record = args.record
        self.watched = args.watched
        self.audit_steps = args.audit_steps
        self.audit_detail = args.audit_detail
        self._generated = _GeneratedBatch(TrainingState(progress=0.0, controller_state={}))
        self._radii: defaultdict[str, list[Tensor]] = defaultdict(list)
        super().__init__(model, reward_funcs, args, *arguments, **kwargs)

        if needs_rollout_logps and not self.use_vllm and self.rollout_func is None:
            trainer_method = replace(self.method, old_policy="trainer")
            if trainer_method == self.method:
                remedy = "leave anchor out"
            else:
                remedy = f"write method={str(trainer_method)!r}"
            raise InvalidValue(
                f"{self._rollout_setting} needs use_vllm, or a rollout_func that returns log-probabilities: else the "
                f"trainer's are the only ones, and to use these {remedy}"
            )
        if self.method.old_policy == "rollout" and self.use_vllm and self.vllm_importance_sampling_correction:
            self.vllm_importance_sampling_correction = False
            self._announce(
                f"vllm_importance_sampling_correction is off: {self._rollout_setting} has vLLM's log-probabilities in "
                "its ratio already"
            )
        if args.overrides_aggregation:
            self._announce(
                f"loss_type={args.loss_type!r} replaces the loss aggregation of {args.method} by another one"
            )
        rollout_setting = self._rollout_setting if needs_rollout_logps else ""
        for line in sampling_lines(args, rollout_setting, self.use_vllm):
            self._announce(line)
        self._settings_at_start = self._clip_settings()

    # The hook into TRL's loss, in the order of the calls.

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        self._weights_taken = False
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.hooked and not self._weights_taken:
            raise RunProblem(
                f"the loss of {type(self).__name__} is not TRL's, so {self.args.method} has no effect; call "
                "super()._compute_loss, or leave the loss to TRL"
            )
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if not self.hooked:
            return super()._compute_loss(model, inputs)
        configured = self.epsilon_low, self.epsilon_high, self.loss_type
        self._configured_loss_type = self.loss_type
        self.loss_type = HOOK
        try:
            loss = super()._compute_loss(model, inputs)
            if self._token_weights is not None:
                raise RunProblem(
                    f"TRL's loss did not ask get_gamma_weights for the weights of {self.args.method}: this version "
                    "of TRL is not supported, or a subclass replaces get_gamma_weights"
                )
        finally:
            self.epsilon_low, self.epsilon_high, self.loss_type = configured
            self._token_weights = None
        return loss

    def _on_logps(self, inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None) -> None:
        if self.hooked and self.loss_type != HOOK:
            # A subclass computes log-probabilities outside of TRL's loss.
            return
        batch = self._batch_of(inputs, logp, entropy)
        if self.method.old_policy == "rollout":
            inputs["old_per_token_logps"] = batch.logp_old
        self._watch_gradient(inputs, batch, logp, entropy)
        tokens = self.method.tokens(batch)
        if self.training:
            self._measure(batch, tokens, entropy)
        if self.hooked:
            self._set_token_weights(inputs, batch, tokens)

    def _set_token_weights(self, inputs: dict[str, Any], batch: Batch, tokens: Tokens) -> None:
        """Compute φ of each token, and replace the advantages in ``inputs`` by their signs; see the module docstring.

        Args:
            inputs: The batch that TRL's loss reads. Its advantages have shape (sequences,) or (sequences, tokens).
            batch: The tokens of the loss.
            tokens: The same, as the method sees them.
        """
        objective = self.method.objective.resolve(batch.state)
        weight = objective.weight(tokens)
        slope = weight * tokens.advantages
        bias = objective.bias(tokens)
        if bias is not None:
            slope = slope + bias

        signs = torch.where(inputs["advantages"] < 0, -1.0, 1.0).to(inputs["advantages"].dtype)
        inputs["advantages"] = signs
        is_per_token = signs.dim() == 2
        self._token_weights = slope * (signs if is_per_token else signs.unsqueeze(1))

        # Some objectives contain the importance weights, which TRL must not multiply by again.
        if objective.weights_inside and batch.weights is not None:
            inputs["importance_sampling_ratio"] = torch.ones_like(inputs["importance_sampling_ratio"])

        # TRL's clip metrics count the tokens whose ratio is beyond these bounds, by the sign of the advantage.
        if self._configured_loss_type == "cispo":
            clipped = tokens.clip_mask.clipped_high
        else:
            clipped = (weight == 0) & (tokens.advantages != 0)
        if self.method.level == "sequence" and not is_per_token:
            # TRL then expects one value per sequence: that of the first token that counts.
            first = tokens.mask.argmax(1, keepdim=True)
            clipped = clipped.gather(1, first)
        epsilon = torch.where(clipped, -math.inf, math.inf)
        self.epsilon_low = epsilon
        self.epsilon_high = epsilon

    def get_gamma_weights(self, *arguments: Any, **kwargs: Any) -> Tensor:
        """Return the weights that the hook computed in place of TRL's; TRL's own if the method is TRL's VESPO."""
        if self._token_weights is None:
            return super().get_gamma_weights(*arguments, **kwargs)
        token_weights = self._token_weights
        self._token_weights = None
        self._weights_taken = True
        # TRL's loss calls this before it reads loss_type for the aggregation and the metrics, so the user's loss_type
        # is set again.
        self.loss_type = self._configured_loss_type
        return token_weights

    # The log-probabilities of the ratio and of the bounds.

    @property
    def _rollout_setting(self) -> str:
        """The setting that requires the rollout's log-probabilities."""
        if self.method.old_policy == "rollout":
            return f"method={self.args.method!r}"
        return "anchor='rollout'"

    def _logp_old(self, inputs: dict[str, Any], logp: Tensor) -> Tensor:
        if self.method.old_policy == "rollout":
            return self._logp_rollout(inputs, logp)
        return super()._logp_old(inputs, logp)

    def _logp_anchor(self, inputs: dict[str, Any], logp: Tensor) -> Tensor | None:
        return self._logp_rollout(inputs, logp) if self.args.anchor == "rollout" else None

    def _logp_rollout(self, inputs: dict[str, Any], logp: Tensor) -> Tensor:
        """Return the sampler's log-probabilities, and the trainer's where vLLM has none for a token."""
        if "sampling_per_token_logps" not in inputs:
            raise InvalidValue(
                f"{self._rollout_setting}, but the rollout gave no log-probabilities; return them from rollout_func"
            )
        sampled = inputs["sampling_per_token_logps"]
        return torch.where(sampled.isnan(), super()._logp_old(inputs, logp), sampled)

    # Schedules and controllers.

    def loss_method(self) -> Method:
        """Return the method with the current values of its schedules and controllers."""
        return self.method.resolve(self._generated.state, strict=False)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.training:
            progress = min(self.state.global_step / max(self.state.max_steps, 1), 1.0)
            controller_state = dict(self._controller_state) if self._has_controllers else {}
            state = TrainingState(progress=progress, controller_state=controller_state)
            self._generated = _GeneratedBatch(state, self._generated.audit)
        return super()._generate_and_score_completions(inputs)

    def _training_state(self, inputs: dict[str, Any]) -> TrainingState:
        process_group = torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None
        age = None if "version" not in inputs else self.state.global_step - inputs["version"]
        return replace(self._generated.state, age=age, processes=process_group)

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

    def training_step(self, *arguments: Any, **kwargs: Any) -> Tensor:
        self._check_unchanged_settings()
        loss = super().training_step(*arguments, **kwargs)
        if self._generated.audit is not None and self._step % self.losses_per_batch == 0:
            # After the batch's last loss, on every process, and before a checkpoint is saved. Metrics that are not
            # defined are missing from the audit's, and NaN here.
            metrics = defaultdict(lambda: math.nan, self._reduce_metrics(self._generated.audit))
            self._controller_state.update(self.method.update_controllers(self._controller_state, metrics))
            self._generated.audit = None
        return loss

    def _check_unchanged_settings(self) -> None:
        """Check that no callback has changed a setting of the clip, which the method replaces.

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
        names = ("epsilon_low", "epsilon_high", "loss_type", "importance_sampling_level")
        return {name: getattr(self, name) for name in names} | {"args.delta": self.args.delta}

    # Logging.

    def _measure(self, batch: Batch, tokens: Tokens, entropy: Tensor | None) -> None:
        """Add the tokens of a loss to the logged radii, to the audit and to the sums for the controllers."""
        for path, band in bands(tokens.rule).items():
            radius = band.radius_for(tokens.logp_anchor)
            self._radii[path].append(_radius_statistics(radius, tokens.mask))

        is_audited = self._audits_this_step()
        if not is_audited and not self._has_controllers:
            return
        method = self.audited_method()
        counted = high_entropy_mask(self, batch, entropy)
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
