"""Any method in TRL's GRPOTrainer, and an audit of any GRPOTrainer, by overriding some of its methods.

TRL's loss is ``−min(r·A, clamp(r, 1 − epsilon_low, 1 + epsilon_high)·A)``, where ``torch.clamp`` takes tensors. So the
trainer is handed an interval and an advantage for each token, once the loss has asked for its log-probabilities and
before it uses them. A token that the objective drops beyond a bound gets that bound: TRL clips it, and counts it in
its clip metrics. Every other token gets an open interval and the advantage ``A·w/r``: TRL's gradient ``−r·A`` becomes
``−w·A``. TRL's own KL term, off-policy masks, entropy bonus and averages stay as they are.

TRL's log-probabilities are at sampling temperature and over the full vocabulary, as bounds need them.

A radius of `bandpo.radius` is brought up to date whenever a batch is generated and stays for all updates made on that
batch. Its entropies come from the pass that TRL makes for the old log-probabilities.
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
from bandpo.audit.watch import check_radius
from bandpo.batch import Batch, Tokens, at_level
from bandpo.errors import InvalidType, InvalidValue
from bandpo.integrations._trl_audit import (
    AuditedGRPOTrainer,
    AuditMixin,
    counted_tokens,
    with_trl_masks,
)
from bandpo.integrations._trl_config import BandGRPOConfig
from bandpo.methods import Method
from bandpo.radius import Hold, Radius, TrainingState
from bandpo.rules import bands

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AuditMixin", "AuditedGRPOTrainer", "BandGRPOConfig", "BandGRPOTrainer"]

OLD_ENTROPIES = "old_per_token_entropies"
"""Beside TRL's ``old_per_token_logps`` in a batch, where a radius is set by them."""


@dataclass
class _Batch:
    """What belongs to one generated batch."""

    state: TrainingState
    """When it was generated."""
    audit: Audit | None = None
    """What the rule's controllers will be told of it."""


class BandGRPOTrainer(AuditMixin):
    """`GRPOTrainer` with the method of ``args``; audited as every `AuditMixin`.

    Logs the mean radius of the tokens since the last log as ``radius``. Where it differs among them, logs
    ``radius_min`` and ``radius_max`` too. A band within another rule is logged as ``radius/PATH``, e.g.
    ``radius/upper``.

    Warns at construction where each batch is used for a single update: the old policy is then the current one, the
    ratio is 1, and no clip of any kind does anything.

    Raises:
        TypeError: ``args`` is no `BandGRPOConfig`.
        ValueError: ``anchor="rollout"`` where nothing gives the rollout's log-probabilities.
    """

    args: BandGRPOConfig
    _wanted_entropies: list[Tensor] | None = None
    """Filled while a batch is generated, where a radius needs the old policy's entropies."""

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
        if args.updates_per_batch == 1:
            warnings.warn(
                "each batch is used for one optimiser step, so the ratio is always 1 and no clip rule can act: set "
                "num_iterations > 1, or steps_per_generation to a multiple of gradient_accumulation_steps",
                stacklevel=2,
            )
        self.method, self.record = args.whole_method, args.record
        self.audit_steps, self.audit_detail = args.audit_steps, args.audit_detail
        self._batch = _Batch(TrainingState(progress=0.0, radii={}))
        self._radii: defaultdict[str, list[Tensor]] = defaultdict(list)
        check_radius(self.method.clip)
        super().__init__(model, reward_funcs, args, *arguments, **named)
        if args.anchor == "rollout" and not self.use_vllm and self.rollout_func is None:
            raise InvalidValue(
                "anchor='rollout' needs use_vllm, or a rollout_func that returns log-probabilities: else the trainer's "
                "are the only ones"
            )

    @property
    def _controllers(self) -> bool:
        return any(isinstance(band.radius, Hold) for band in bands(self.method.clip).values())

    @property
    def _held_radii(self) -> dict[str, float]:
        """The radii that controllers have reached: an entry of the state that transformers saves and restores."""
        entries = cast("dict[str, Any]", self.state.stateful_callbacks)
        return entries.setdefault("HeldRadii", {"args": {"held": {}}, "attributes": {}})["args"]["held"]

    def audited_method(self) -> Method:
        """The method for the batch in use, but for what a radius takes from entropies."""
        return with_trl_masks(self._now(), self.args)

    def _now(self, state: TrainingState | None = None) -> Method:
        rule = self.method.clip.resolved(self._batch.state)
        return replace(self.method, clip=rule if state is None else rule.resolved(state))

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.training:
            progress = min(self.state.global_step / max(self.state.max_steps, 1), 1.0)
            radii = dict(self._held_radii) if self._controllers else {}
            self._batch = _Batch(TrainingState(progress=progress, radii=radii), self._batch.audit)
        radii = (band.radius for band in bands(self.method.clip).values())
        if any(isinstance(radius, Radius) and radius.needs == "entropy" for radius in radii):
            self._wanted_entropies = []
        try:
            output = super()._generate_and_score_completions(inputs)
            if self._wanted_entropies and "old_per_token_logps" in output:
                output[OLD_ENTROPIES] = self._wanted_entropies[0]  # shuffled and split with the rest
        finally:
            self._wanted_entropies = None
        return output

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        # The model's first pass is the old policy's. A reference is its second, without the adapter, or another model.
        wanted = self._wanted_entropies == [] and arguments[0] is self.model
        if wanted:
            named["compute_entropy"] = True
        outputs = super()._get_per_token_logps_and_entropies(*arguments, **named)
        if wanted:
            self._wanted_entropies = [outputs[1]]
        return outputs

    def training_step(self, *arguments: Any) -> Tensor:
        loss = super().training_step(*arguments)
        if self._batch.audit is not None and self._step % self.losses_per_batch == 0:
            # After the batch's last loss, on every process and before a checkpoint. Undefined metrics are left out.
            metrics = defaultdict(lambda: math.nan, self._read(self._batch.audit))
            self._held_radii.update(self.method.clip.next_radii(self._held_radii, metrics))
            self._batch.audit = None
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        stock = self.epsilon_low, self.epsilon_high
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.epsilon_low, self.epsilon_high = stock

    def _see(self, inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None) -> None:
        method, batch = self._now(self._entropy_state(inputs, entropy)), self._batch_of(inputs, logp, entropy)
        tokens = method.tokens(batch)
        self._record_all(method, batch, tokens)
        self._steer(inputs, method, tokens)

    def _entropy_state(self, inputs: dict[str, Any], entropy: Tensor | None) -> TrainingState | None:
        """The entropies that a radius of this batch depends on."""
        # A batch without a pass of the old policy takes the current policy's entropies.
        entropy = inputs.get(OLD_ENTROPIES, entropy)
        if entropy is None:
            return None
        mask = counted_tokens(inputs).float()
        entropy = entropy.detach().float().masked_fill(mask == 0, 0.0)
        return TrainingState(entropy=at_level(entropy, mask, self.method.level))

    def _record_all(self, method: Method, batch: Batch, tokens: Tokens) -> None:
        """The audit, the radii that are logged, and what controllers measure."""
        if not self.training:
            return
        for path, band in bands(method.clip).items():
            self._radii[path].append(_spread(band.radius_for(tokens.logp_anchor), tokens.mask))
        run, own = with_trl_masks(method, self.args), None
        if self._audits_this_step():
            seen = Audit.of(batch, run, tokens)
            self._record(seen)
            own = seen.without_counterfactuals
        if self._controllers:
            own = Audit.of(batch, run, tokens, {}) if own is None else own
            self._batch.audit = own if self._batch.audit is None else self._batch.audit + own

    def _steer(self, inputs: dict[str, Any], method: Method, tokens: Tokens) -> None:
        """Hand TRL's loss the interval and the advantages under which its gradient is the method's."""
        weight, ratio, advantages = method.weight(tokens), tokens.ratio, tokens.advantages
        lower = torch.zeros_like(ratio)
        if self.loss_type == "cispo":  # TRL's weight is min(r, epsilon_high)
            upper = tokens.clipped.masked_fill(~tokens.outside.above, math.inf)
            share = weight / ratio.clamp(max=upper)
        else:
            # TRL drops a token by finding its ratio outside of the bounds. Where the rule would have to solve for the
            # bound, one just short of the ratio does the same. The step is larger than the rounding of TRL's
            # 1 + (bound − 1) in float32.
            high, low = tokens.blocked_high & (weight == 0), tokens.blocked_low & (weight == 0)
            limit = tokens.reported
            upper = torch.where(limit < ratio, limit, ratio * (1 - 2**-20)).masked_fill(~high, math.inf)
            lower = torch.where(limit > ratio, limit, ratio * (1 + 2**-20) + 2**-22).masked_fill(~low, 0.0)
            by_trl = high | low
            if self.args.delta is not None:
                by_trl |= (advantages < 0) & (ratio > self.args.delta)
                upper = upper.masked_fill(advantages < 0, 1.0)  # so that delta decides these tokens
            share = (weight / ratio).masked_fill(by_trl, 1.0)
        # TRL 1.8's luspo averages over padding too, where the advantages stay as they are.
        stock = inputs["advantages"] if inputs["advantages"].dim() == 2 else inputs["advantages"].unsqueeze(1)
        scaled = torch.where(tokens.mask > 0, advantages * share, stock)
        if method.level == "sequence" and inputs["advantages"].dim() == 1:
            # One value per sequence, as TRL's ratio has.
            first = tokens.mask.argmax(1, keepdim=True)
            lower, upper, scaled = (x.gather(1, first) for x in (lower, upper, scaled))
            scaled = scaled.squeeze(1)
        # CISPO clamps at epsilon_high itself, the others at 1 + epsilon_high.
        self.epsilon_low, self.epsilon_high = 1 - lower, upper if self.loss_type == "cispo" else upper - 1
        inputs["advantages"] = scaled

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
        super().log(logs, start_time)

    def _anchor(self, inputs: dict[str, Any]) -> Tensor | None:
        if self.args.anchor == "trainer":
            return None
        if "sampling_per_token_logps" not in inputs:
            raise InvalidValue(
                "anchor='rollout', but the rollout gave no log-probabilities; return them from rollout_func, or leave "
                "anchor out"
            )
        sampled = inputs["sampling_per_token_logps"].float()
        own = inputs.get("old_per_token_logps")
        # NaN stands where vLLM could not score a token.
        return sampled if own is None else torch.where(sampled.isnan(), own.float(), sampled)


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
