"""Any method in TRL's GRPOTrainer, and an audit of any GRPOTrainer, by overriding some of its methods.

TRL's loss is ``−min(r·A, clamp(r, 1 − epsilon_low, 1 + epsilon_high)·A)``, where ``torch.clamp`` takes tensors. So the
trainer is handed an interval for each token, once the loss has asked for its log-probabilities and before it uses them.
Where TRL's clip on this interval gives the method's weight, that is all. For every other token the interval lies below
each ratio, so TRL's own gradient is 0 and its loss is ``A`` times what it makes the token count for: its masks, its
importance weight, its average. The derivative by ``A`` tells this share, and ``−(w·A + b)·share`` is added to the
gradient. Advantages and ratios stay true, so TRL's KL term, masks, entropy bonus and averages stay as they are.

TRL's log-probabilities are at sampling temperature and over the full vocabulary, as bounds need them.

A radius of `bandpo.schedules` is updated whenever a batch is generated, and stays the same for all updates made on that
batch.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from bandpo import _checks
from bandpo.audit.metrics import Audit
from bandpo.batch import Batch, Tokens, reduce_to_level
from bandpo.errors import InvalidType, InvalidValue, RunProblem
from bandpo.integrations._trl_announcements import card_entries, sampling_lines
from bandpo.integrations._trl_audit import AuditedGRPOTrainer, AuditMixin
from bandpo.integrations._trl_config import BandGRPOConfig
from bandpo.integrations._trl_fused import FusedLogits
from bandpo.integrations._trl_gradient_check import by_entropy, warn_of_an_unknown_loss
from bandpo.loss import with_slope
from bandpo.methods import Method
from bandpo.rules import bands
from bandpo.schedules import Controller, TrainingState

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AuditMixin", "AuditedGRPOTrainer", "BandGRPOConfig", "BandGRPOTrainer"]

SWITCHED_OFF = -1.0
"""A bound below every ratio: TRL's clamps pass no gradient there, and its clip metrics count nothing."""


@dataclass
class _Batch:
    """What belongs to one generated batch."""

    state: TrainingState
    """When it was generated."""
    audit: Audit | None = None
    """What the rule's controllers will be told of it."""


@dataclass
class _Added:
    """What the trainer adds to TRL's loss, for the tokens whose gradient TRL's clip cannot give."""

    advantages: Tensor
    """As TRL's loss gets them, per token or per sequence, with a gradient."""
    logp: Tensor
    """At the level of the method, with a gradient."""
    tokens: Tensor
    """Which tokens, or sequences, these are."""
    slope: Tensor
    """The derivative of a token's loss by its log-probability."""
    value: Tensor
    """A token's loss, less TRL's own."""

    def to(self, loss: Tensor) -> Tensor:
        """The loss with what is added.

        Raises:
            RuntimeError: the loss does not depend on the advantages that it was given.
        """
        if not loss.requires_grad:
            return loss
        # This walks back from the loss to the advantages, never into the model.
        (share,) = torch.autograd.grad(loss, self.advantages, retain_graph=True, allow_unused=True)
        if share is None:
            raise RunProblem(
                "the trainer's loss does not use the advantages that it is given; is it replaced, or are they detached?"
            )
        share, slope, value = (x.masked_fill(~self.tokens, 0.0) for x in (share, self.slope, self.value))
        return loss + with_slope(self.logp, share * value, share * slope).sum()


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
    _added: _Added | None = None
    """Of the loss that is being computed."""

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
        self.method, self.record = args.whole_method, args.record
        engine = "rollout" in (args.anchor, self.method.old_policy)
        if not args.ratio_moves and not engine:
            warnings.warn(
                "each batch is used for one optimiser step, so the ratio is always 1 and no clip rule can act: set "
                "num_iterations > 1, or steps_per_generation to a multiple of gradient_accumulation_steps",
                stacklevel=2,
            )
        self.certify = args.certify
        warn_of_an_unknown_loss()
        self.audit_steps, self.audit_detail, self.watched = args.audit_steps, args.audit_detail, args.watched
        self._batch = _Batch(TrainingState(progress=0.0, controller_state={}))
        self._radii: defaultdict[str, list[Tensor]] = defaultdict(list)
        super().__init__(model, reward_funcs, args, *arguments, **named)
        if engine and not self.use_vllm and self.rollout_func is None:
            own = replace(self.method, old_policy="trainer")
            remedy = f"write method={str(own)!r}" if own != self.method else "leave anchor out"
            raise InvalidValue(
                f"{self._of_rollout} needs use_vllm, or a rollout_func that returns log-probabilities: else the "
                f"trainer's are the only ones, and to use these {remedy}"
            )
        if self.method.old_policy == "rollout" and self.use_vllm and self.vllm_importance_sampling_correction:
            self.vllm_importance_sampling_correction = False
            self._say(
                f"vllm_importance_sampling_correction is off: {self._of_rollout} has vLLM's log-probabilities in its "
                "ratio already"
            )
        if args.other_average:
            self._say(f"loss_type={args.loss_type!r} is another average than that of {args.method}")
        for line in sampling_lines(args, self._of_rollout if engine else "", self.use_vllm):
            self._say(line)
        self._stock_settings = self._clip_settings()

    @property
    def _of_rollout(self) -> str:
        """The setting that asks for the rollout's log-probabilities."""
        rollout = self.method.old_policy == "rollout"
        return f"method={self.args.method!r}" if rollout else "anchor='rollout'"

    def _clip_settings(self) -> dict[str, Any]:
        """Settings of TRL's own loss that a method replaces, with their values now."""
        names = ("epsilon_low", "epsilon_high", "loss_type", "importance_sampling_level")
        return {name: getattr(self, name) for name in names} | {"args.delta": self.args.delta}

    def _refuse_changed_settings(self) -> None:
        """Refuse a setting that a callback has changed since construction: the method stands in its place.

        Raises:
            ValueError: it would have no effect, or another one than in TRL.
        """
        for name, value in self._clip_settings().items():
            if value != self._stock_settings[name]:
                raise InvalidValue(
                    f"trainer.{name} was changed from {self._stock_settings[name]} to {value} during training; "
                    f"method={self.args.method!r} stands in its place. A bound that changes is written with a "
                    "schedule, as in method='FixedClip(0.2, Linear(0.2, 0.28))'"
                )

    def create_model_card(self, *arguments: Any, **named: Any) -> None:
        """Write TRL's model card, with the method and its paper in the place of GRPO and DeepSeekMath."""
        self._name, self._paper = card_entries(self.args)
        super().create_model_card(*arguments, **named)

    @property
    def _controllers(self) -> bool:
        return any(isinstance(number, Controller) for number in self.method.varying().values())

    @property
    def _controller_state(self) -> dict[str, float]:
        """The state of the method's controllers, an entry of the state that transformers saves and restores."""
        entries = cast("dict[str, Any]", self.state.stateful_callbacks)
        return entries.setdefault("ControllerState", {"args": {"values": {}}, "attributes": {}})["args"][
            "values"
        ]

    def loss_method(self) -> Method:
        """Return the method for the batch in use, with the numbers that this batch has."""
        return self.method.resolve(self._batch.state, strict=False)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.training:
            progress = min(self.state.global_step / max(self.state.max_steps, 1), 1.0)
            controller_state = dict(self._controller_state) if self._controllers else {}
            self._batch = _Batch(
                TrainingState(progress=progress, controller_state=controller_state), self._batch.audit
            )
        return super()._generate_and_score_completions(inputs)

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        self._refuse_changed_settings()
        loss = super().training_step(*arguments, **named)
        if self._batch.audit is not None and self._step % self.losses_per_batch == 0:
            # After the batch's last loss, on every process and before a checkpoint. Undefined metrics are left out.
            metrics = defaultdict(lambda: math.nan, self._read(self._batch.audit))
            self._controller_state.update(self.method.update_controllers(self._controller_state, metrics))
            self._batch.audit = None
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        # Where a subclass has a loss of its own in place of TRL's, `_compute_loss` below is not called.
        return self._steered(super().compute_loss, model, inputs, return_outputs, num_items_in_batch)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return self._steered(super()._compute_loss, model, inputs)

    def _steered(self, compute: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Return the loss that ``compute`` returns, with what `_steer` adds to it, and take its bounds back."""
        args: Any = self.args  # TRL's clip takes tensors
        stock = self.epsilon_low, self.epsilon_high, args.delta
        try:
            loss = compute(*arguments)
            added = self._added
        finally:
            self.epsilon_low, self.epsilon_high, args.delta = stock
            self._added = None
        return loss if added is None else added.to(loss)

    def _see(self, inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None) -> None:
        batch = self._batch_of(inputs, logp, entropy)
        if self.method.old_policy == "rollout":
            inputs["old_per_token_logps"] = batch.logp_old
        self._watch_gradient(inputs, batch, logp, entropy)
        tokens = self.method.tokens(batch)
        self._record_all(batch, tokens, entropy)
        self._steer(inputs, batch, tokens, logp)

    def _state(self, inputs: dict[str, Any]) -> TrainingState:
        everyone = torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None
        age = None if "version" not in inputs else self.state.global_step - inputs["version"]
        return replace(self._batch.state, age=age, processes=everyone)

    def _record_all(self, batch: Batch, tokens: Tokens, entropy: Tensor | None) -> None:
        """The audit, the radii that are logged, and what controllers measure."""
        if not self.training:
            return
        for path, band in bands(tokens.rule).items():
            self._radii[path].append(_spread(band.radius_for(tokens.logp_anchor), tokens.mask))
        if not (self._audits_this_step() or self._controllers):
            return
        run, own, counted = self.audited_method(), None, by_entropy(self, batch, entropy)
        if self._audits_this_step():
            seen = Audit.of(batch, run, tokens, counted=counted)
            self._record(seen)
            own = seen.without_counterfactuals
        if self._controllers:
            own = Audit.of(batch, run, tokens, {}, counted) if own is None else own
            self._batch.audit = own if self._batch.audit is None else self._batch.audit + own

    def _steer(self, inputs: dict[str, Any], batch: Batch, tokens: Tokens, logp: Tensor) -> None:
        """Hand TRL's loss the bounds under which its gradient is the method's, and note what is to be added."""
        level = self.method.level
        ratio = tokens.ratio
        above = tokens.clip_mask.clipped_high
        each_row = level == "sequence" and inputs["advantages"].dim() == 1
        first = tokens.mask.argmax(1, keepdim=True)

        def shaped(x: Tensor) -> Tensor:
            """One value per sequence where TRL's ratio and advantages are."""
            return x.gather(1, first) if each_row else x

        if self.loss_type == "cispo":  # TRL's weight is min(r, epsilon_high), which is the bound itself here
            bound = tokens.clipped.masked_fill(~above, math.inf)
            self.epsilon_high = bound.gather(1, first) if level == "sequence" else bound
            return
        # TRL drops a token by finding its ratio outside of the bounds. Where the rule would have to solve for the
        # bound, one just short of the ratio does the same. The step is larger than the rounding of TRL's
        # 1 + (bound − 1) in float32. The sign of A is left to TRL's minimum.
        limit, delta = tokens.reported_ratio, self.args.delta or math.inf
        upper = torch.where(limit < ratio, limit, ratio * (1 - 2**-20)).masked_fill(~above, math.inf)
        lower = torch.where(limit > ratio, limit, ratio * (1 + 2**-20) + 2**-22)
        lower = lower.masked_fill(~tokens.clip_mask.clipped_low, 0.0)
        blocked = tokens.blocked | ((ratio > delta) & ((tokens.advantages > 0) | above))
        objective = self.method.objective.resolve(batch.state)
        bias, regularizer = objective.bias(tokens), objective.regularizer(tokens)
        weight, value = objective.weight(tokens), objective.surrogate(tokens)
        ours = (weight != ratio.masked_fill(blocked, 0.0)) | ((value != ratio) & ~blocked)
        slope, value = -weight * tokens.advantages, -value * tokens.advantages
        if bias is not None:
            slope, ours = slope - bias, ours | (bias != 0)
        if regularizer is not None:
            value = value + regularizer
        if objective.weights_inside and batch.weights is not None:
            inputs["importance_sampling_ratio"] = torch.ones_like(inputs["importance_sampling_ratio"])
        # An evaluation has no gradient to give, and its ratio is 1.
        ours = ours & (tokens.mask > 0) & logp.requires_grad
        stock = inputs["advantages"] if inputs["advantages"].dim() == 2 else inputs["advantages"].unsqueeze(1)
        advantages = shaped(torch.where(tokens.mask > 0, tokens.advantages, stock)).requires_grad_()
        lower, upper, ours = shaped(lower), shaped(upper), shaped(ours)
        self.epsilon_low = 1 - lower.masked_fill(ours, SWITCHED_OFF)
        self.epsilon_high = upper.masked_fill(ours, SWITCHED_OFF) - 1
        args: Any = self.args
        args.delta = torch.full_like(lower, delta).masked_fill(ours, SWITCHED_OFF)
        with torch.enable_grad():
            around = shaped(reduce_to_level(logp, tokens.mask, level))
        inputs["advantages"] = advantages
        value = shaped(value) - advantages.detach()
        self._added = _Added(advantages, around, ours, shaped(slope), value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.training:
            for path, seen in self._radii.items():
                everywhere = cast("Tensor", self.accelerator.gather(torch.stack(seen)))
                total, tokens, least, greatest = everywhere.unbind(-1)
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

    def _old(self, inputs: dict[str, Any], logp: Tensor) -> Tensor:
        return (
            self._rollout(inputs, logp) if self.method.old_policy == "rollout" else super()._old(inputs, logp)
        )

    def _anchor(self, inputs: dict[str, Any], logp: Tensor) -> Tensor | None:
        return self._rollout(inputs, logp) if self.args.anchor == "rollout" else None

    def _rollout(self, inputs: dict[str, Any], logp: Tensor) -> Tensor:
        """The log-probabilities of the engine that sampled; the trainer's where vLLM could not score a token."""
        if "sampling_per_token_logps" not in inputs:
            raise InvalidValue(
                f"{self._of_rollout}, but the rollout gave no log-probabilities; return them from rollout_func"
            )
        sampled = inputs["sampling_per_token_logps"].float()
        return torch.where(sampled.isnan(), super()._old(inputs, logp).float(), sampled)


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
