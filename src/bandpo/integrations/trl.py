"""Any method in TRL's GRPOTrainer, and an audit of any GRPOTrainer, by overriding some of its methods.

A method that TRL has itself (a fixed clip, GSPO, CISPO, SAPO, VESPO) becomes TRL's own settings, see `BandGRPOConfig`,
and trains bit for bit as the stock trainer does. Every other goes through the hook of TRL's VESPO loss:

1. TRL's loss under ``loss_type="vespo"`` asks ``self.get_gamma_weights`` for a detached weight φ of each token, and is
   ``−φ·A·logp``. So `BandGRPOTrainer` sets this ``loss_type`` while a loss is computed.
2. Once the loss has its log-probabilities, the method gives each token the slope ``w·A + b``. The advantages are
   replaced by their signs, −1 below 0 and else 1, which TRL's off-policy mask still reads as before, and φ is the slope
   times the sign. So the loss has the gradient ``−(w·A + b)·∇logp``, also of a token with ``A = 0`` and a bias ``b``.
3. ``get_gamma_weights`` puts the configured ``loss_type`` back. What follows is TRL's own code: masks, importance
   weights, KL term, average, entropy bonus and metrics.

The reported loss is ``−(w·A + b)·logp``, averaged; its gradient is the method's, its value is not the surrogate's.

TRL's log-probabilities are at sampling temperature and over the full vocabulary, as bounds need them.

A radius of `bandpo.schedules` is updated whenever a batch is generated, and stays the same for all updates made on that
batch.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from bandpo import _checks
from bandpo.audit.metrics import Audit
from bandpo.batch import Batch, Tokens
from bandpo.errors import InvalidType, InvalidValue, RunProblem
from bandpo.integrations._trl_announcements import card_entries, sampling_lines
from bandpo.integrations._trl_audit import AuditedGRPOTrainer, AuditMixin
from bandpo.integrations._trl_config import BandGRPOConfig
from bandpo.integrations._trl_fused import FusedLogits
from bandpo.integrations._trl_gradient_check import by_entropy, warn_of_an_unknown_loss
from bandpo.methods import Method
from bandpo.rules import bands
from bandpo.schedules import Controller, TrainingState

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AuditMixin", "AuditedGRPOTrainer", "BandGRPOConfig", "BandGRPOTrainer"]

HOOK = "vespo"
"""TRL's ``loss_type`` whose loss asks for the weight of each token."""


@dataclass
class _GeneratedBatch:
    """What belongs to one generated batch."""

    state: TrainingState
    """When it was generated."""
    audit: Audit | None = None
    """What the method's controllers measure of it."""


class BandGRPOTrainer(AuditMixin, FusedLogits):
    """`GRPOTrainer` with the method of ``args``; audited as every `AuditMixin`.

    Logs, on CUDA, the peak memory since the last log, in GiB, as ``peak_memory``.
    Logs the mean radius of the tokens since the last log as ``radius``. Where it differs among them, logs
    ``radius_min`` and ``radius_max`` too. A band within another rule is logged as ``radius/PATH``, e.g.
    ``radius/upper``.

    Warns at construction where each batch is used for a single update: the old policy is then the current one, the
    ratio is 1, and no clip of any kind does anything.

    The gradient of the first loss, of the first loss whose ratios have left 1, and of one in a hundred steps after, is
    compared with the method's, see `bandpo.certify`. Where none was compared, a line says so at the end of training.

    Raises:
        TypeError: ``args`` is no `BandGRPOConfig`.
        RuntimeError: while training: the gradient is not the method's.
        ValueError: the bounds surround the rollout's log-probabilities, or the method's ratio refers to them (DPPO,
            IcePop), and nothing gives them.
    """

    args: BandGRPOConfig
    _tag_names = ["trl", "bandpo"]  # noqa: RUF012  (TRL's own attribute)
    _token_weights: Tensor | None = None
    """φ of each token of the loss that is being computed, until TRL has asked for it."""
    _weights_taken = False
    """Whether TRL's loss has asked for φ, since `compute_loss` was called."""
    _configured_loss_type = ""
    """The ``loss_type`` that the hook stands in for while a loss is computed."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: BandGRPOConfig | None = None,
        *arguments: Any,
        **named: Any,
    ):
        args = BandGRPOConfig() if args is None else args
        if not isinstance(args, BandGRPOConfig):
            raise InvalidType(f"args must be a BandGRPOConfig, got {type(args).__name__}")
        self.method = args.whole_method
        self.hooked = args.native_settings is None
        needs_rollout = "rollout" in (args.anchor, self.method.old_policy)
        if not args.ratio_moves and not needs_rollout:
            warnings.warn(
                "each batch is used for one optimiser step, so the ratio is always 1 and no clip rule can act: set "
                "num_iterations > 1, or steps_per_generation to a multiple of gradient_accumulation_steps",
                stacklevel=2,
            )
        warn_of_an_unknown_loss()
        # What the mixin has as attributes of its class, a config has as settings.
        self.certify = args.certify
        self.record = args.record
        self.watched = args.watched
        self.audit_steps = args.audit_steps
        self.audit_detail = args.audit_detail
        self._generated = _GeneratedBatch(TrainingState(progress=0.0, controller_state={}))
        self._radii: defaultdict[str, list[Tensor]] = defaultdict(list)
        super().__init__(model, reward_funcs, args, *arguments, **named)

        if needs_rollout and not self.use_vllm and self.rollout_func is None:
            of_trainer = replace(self.method, old_policy="trainer")
            remedy = "leave anchor out" if of_trainer == self.method else f"write method={str(of_trainer)!r}"
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
        if args.other_average:
            self._announce(f"loss_type={args.loss_type!r} is another average than that of {args.method}")
        for line in sampling_lines(args, self._rollout_setting if needs_rollout else "", self.use_vllm):
            self._announce(line)
        self._settings_at_start = self._clip_settings()

    # The hook, in the order in which a loss goes through it.

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        self._weights_taken = False
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.hooked and not self._weights_taken:
            raise RunProblem(
                f"the loss of {type(self).__name__} is not TRL's, so {self.args.method} cannot act; call "
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
            # A subclass scores tokens outside of TRL's loss.
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
        """Compute φ of each token, and put into ``inputs`` the signs of the advantages in place of the advantages."""
        objective = self.method.objective.resolve(batch.state)
        weight = objective.weight(tokens)
        slope = weight * tokens.advantages
        bias = objective.bias(tokens)
        if bias is not None:
            slope = slope + bias

        signs = torch.where(inputs["advantages"] < 0, -1.0, 1.0).to(inputs["advantages"].dtype)
        inputs["advantages"] = signs
        by_token = signs.dim() == 2
        self._token_weights = slope * (signs if by_token else signs.unsqueeze(1))
        if objective.weights_inside and batch.weights is not None:
            inputs["importance_sampling_ratio"] = torch.ones_like(inputs["importance_sampling_ratio"])

        # TRL's clip metrics count the tokens whose ratio is beyond these bounds, by the sign of the advantage.
        if self._configured_loss_type == "cispo":
            clipped = tokens.clip_mask.clipped_high
        else:
            clipped = (weight == 0) & (tokens.advantages != 0)
        if self.method.level == "sequence" and not by_token:
            first = tokens.mask.argmax(1, keepdim=True)
            clipped = clipped.gather(1, first)
        self.epsilon_low = self.epsilon_high = torch.where(clipped, -math.inf, math.inf)

    def get_gamma_weights(self, *arguments: Any, **named: Any) -> Tensor:
        """Return φ of each token, the slope of the method times the sign that stands for the advantage.

        Where the method is TRL's own VESPO, return TRL's weights.
        """
        if self._token_weights is None:
            return super().get_gamma_weights(*arguments, **named)
        token_weights = self._token_weights
        self._token_weights = None
        self._weights_taken = True
        # From here on the loss averages and reports as without the hook.
        self.loss_type = self._configured_loss_type
        return token_weights

    # What the ratio refers to, and what the bounds surround.

    @property
    def _rollout_setting(self) -> str:
        """The setting that asks for the rollout's log-probabilities."""
        rollout = self.method.old_policy == "rollout"
        return f"method={self.args.method!r}" if rollout else "anchor='rollout'"

    def _logp_old(self, inputs: dict[str, Any], logp: Tensor) -> Tensor:
        if self.method.old_policy == "rollout":
            return self._logp_rollout(inputs, logp)
        return super()._logp_old(inputs, logp)

    def _logp_anchor(self, inputs: dict[str, Any], logp: Tensor) -> Tensor | None:
        return self._logp_rollout(inputs, logp) if self.args.anchor == "rollout" else None

    def _logp_rollout(self, inputs: dict[str, Any], logp: Tensor) -> Tensor:
        """Return the log-probabilities of the engine that sampled; the trainer's where vLLM could not score a token."""
        if "sampling_per_token_logps" not in inputs:
            raise InvalidValue(
                f"{self._rollout_setting}, but the rollout gave no log-probabilities; return them from rollout_func"
            )
        sampled = inputs["sampling_per_token_logps"]
        return torch.where(sampled.isnan(), super()._logp_old(inputs, logp), sampled)

    # Numbers of the method that change during training.

    def loss_method(self) -> Method:
        """Return the method for the batch in use, with the numbers that this batch has."""
        return self.method.resolve(self._generated.state, strict=False)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.training:
            progress = min(self.state.global_step / max(self.state.max_steps, 1), 1.0)
            controller_state = dict(self._controller_state) if self._controllers else {}
            self._generated = _GeneratedBatch(
                TrainingState(progress=progress, controller_state=controller_state), self._generated.audit
            )
        return super()._generate_and_score_completions(inputs)

    def _training_state(self, inputs: dict[str, Any]) -> TrainingState:
        everyone = torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None
        age = None if "version" not in inputs else self.state.global_step - inputs["version"]
        return replace(self._generated.state, age=age, processes=everyone)

    @property
    def _controllers(self) -> bool:
        """Whether a number of the method is set by a controller."""
        return any(isinstance(number, Controller) for number in self.method.varying().values())

    @property
    def _controller_state(self) -> dict[str, float]:
        """The state of the method's controllers, an entry of the state that transformers saves and restores."""
        entries = cast("dict[str, Any]", self.state.stateful_callbacks)
        entry = entries.setdefault("ControllerState", {"args": {"values": {}}, "attributes": {}})
        return entry["args"]["values"]

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        self._refuse_changed_settings()
        loss = super().training_step(*arguments, **named)
        if self._generated.audit is not None and self._step % self.losses_per_batch == 0:
            # After the batch's last loss, on every process and before a checkpoint. Undefined metrics are left out.
            metrics = defaultdict(lambda: math.nan, self._read_metrics(self._generated.audit))
            self._controller_state.update(self.method.update_controllers(self._controller_state, metrics))
            self._generated.audit = None
        return loss

    def _refuse_changed_settings(self) -> None:
        """Refuse a setting that a callback has changed since construction: the method stands in its place.

        Raises:
            ValueError: it would have no effect, or another one than in TRL.
        """
        for name, value in self._clip_settings().items():
            at_start = self._settings_at_start[name]
            if value != at_start:
                raise InvalidValue(
                    f"trainer.{name} was changed from {at_start} to {value} during training; "
                    f"method={self.args.method!r} stands in its place. A bound that changes is written with a "
                    "schedule, as in method='FixedClip(0.2, Linear(0.2, 0.28))'"
                )

    def _clip_settings(self) -> dict[str, Any]:
        """Return the settings of TRL's own loss that a method replaces, with their values now."""
        names = ("epsilon_low", "epsilon_high", "loss_type", "importance_sampling_level")
        return {name: getattr(self, name) for name in names} | {"args.delta": self.args.delta}

    # What is logged.

    def _measure(self, batch: Batch, tokens: Tokens, entropy: Tensor | None) -> None:
        """Collect the radii that are logged, the audit, and what controllers measure."""
        for path, band in bands(tokens.rule).items():
            self._radii[path].append(_spread(band.radius_for(tokens.logp_anchor), tokens.mask))
        audited = self._audits_this_step()
        if not audited and not self._controllers:
            return
        method = self.audited_method()
        counted = by_entropy(self, batch, entropy)
        if audited:
            audit = Audit.of(batch, method, tokens, counted=counted)
            self._add_to_audit(audit)
            of_method = audit.without_counterfactuals
        else:
            of_method = Audit.of(batch, method, tokens, {}, counted)
        if self._controllers:
            earlier = self._generated.audit
            self._generated.audit = of_method if earlier is None else earlier + of_method

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.training:
            for path, radii in self._radii.items():
                of_processes = cast("Tensor", self.accelerator.gather(torch.stack(radii)))
                total, tokens, least, greatest = of_processes.unbind(-1)
                smallest, largest = least.min().item(), greatest.max().item()
                values = {"radius": (total.sum() / tokens.sum()).item()}
                if smallest < largest:
                    values |= {"radius_min": smallest, "radius_max": largest}
                logs |= {f"{name}/{path}".rstrip("/"): value for name, value in values.items()}
            self._radii.clear()
            if self.accelerator.device.type == "cuda":
                logs["peak_memory"] = torch.cuda.max_memory_allocated() / 2**30
                torch.cuda.reset_peak_memory_stats()
        super().log(logs, start_time)

    def create_model_card(self, *arguments: Any, **named: Any) -> None:
        """Write TRL's model card, with the method and its paper in the place of GRPO and DeepSeekMath."""
        self._name, self._paper = card_entries(self.args)
        super().create_model_card(*arguments, **named)


def _spread(radius: float | Tensor, mask: Tensor) -> Tensor:
    """Sum, number, least and greatest of the radii of counted tokens, on their device."""
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
