"""Clip rules in TRL's GRPOTrainer, and an audit of any GRPOTrainer, by overriding some of its methods.

TRL's loss clamps the ratio with ``torch.clamp(ratio, 1 − self.epsilon_low, 1 + self.epsilon_high)``, and
``torch.clamp`` takes tensors: handing it the bounds of the batch turns every clipped loss type of TRL into its Band
form, with TRL's own KL term, clip metrics, off-policy masks and entropy bonus as they are. An objective that is no
clamp (`Masked`, say) needs the new log-probabilities, which TRL computes inside its loss: they are taken from
``_get_per_token_logps_and_entropies``, as the audit's are, and the advantage is scaled so that TRL's unclipped
gradient ``−r·A`` becomes ``−w·A``.

TRL's log-probabilities are at sampling temperature and over the full vocabulary, as bounds need them.

A radius of `bandpo.radius` is brought up to date whenever a batch is generated and stays for all updates made on that
batch. Its entropies come from the pass that TRL makes for the old log-probabilities.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from trl import GRPOConfig

from bandpo.audit import Audit
from bandpo.clipping import Band, ClipRule, bands
from bandpo.integrations._trl_audit import (
    CLIPPED_LOSS_TYPES,
    AuditedGRPOTrainer,
    AuditMixin,
    counted_tokens,
)
from bandpo.losses import at_level, judge
from bandpo.notation import parse_objective, parse_rule
from bandpo.objectives import Objective, Surrogate
from bandpo.radius import Hold, Moment, Radius
from bandpo.watch import check_radius

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["AuditMixin", "AuditedGRPOTrainer", "BandGRPOConfig", "BandGRPOTrainer", "HeldRadii"]

OLD_ENTROPIES = "old_per_token_entropies"
"""Beside TRL's ``old_per_token_logps`` in a batch, where a radius is set by them."""


@dataclass
class BandGRPOConfig(GRPOConfig):
    """`GRPOConfig` with a clip rule in place of ``epsilon`` and ``epsilon_high``.

    Attributes:
        clip: The rule, as text (``"Band(KL(), 0.05)"``, ``"FixedClip(0.2, 0.28)"``) or as a `ClipRule`. Its radius may
            be one of `bandpo.radius`. With ``importance_sampling_level="sequence"`` it bounds GSPO's ratio, see
            `bandpo.policy_loss`.
        objective: What becomes of clipped tokens, as text or as an `Objective`; see `bandpo.objectives`.
        anchor: Whose log-probabilities the bounds surround: ``trainer`` (its own at generation time, to which the
            ratio refers too) or ``rollout`` (vLLM's; needs ``use_vllm``).
        audit_steps: The losses of every so-many-th optimiser step are audited; 0 for none.

    Raises:
        ValueError: the text names no rule; a ``loss_type`` that clips no ratio; a combination that cannot work;
            ``epsilon`` or ``epsilon_high`` given too.

    >>> BandGRPOConfig("out", clip="FixedClip(0.2, 0.28)", bf16=False, use_cpu=True).clip
    'FixedClip(low=0.2, high=0.28)'
    """

    clip: str = field(
        default=repr(Band()),
        metadata={
            "help": "Clip rule, e.g. 'Band(KL(), 0.05)', 'Band(KL(), Linear(0.05, 0.01))', 'FixedClip(0.2, 0.28)', "
            "'DCPO', 'Unclipped()'."
        },
    )
    objective: str = field(
        default=repr(Surrogate()),
        metadata={
            "help": "What becomes of clipped tokens: 'Surrogate()' (PPO), 'Surrogate(0.1)' (soft clip), 'Masked(20)' "
            "(DPPO), 'ClippedWeight()' (CISPO)."
        },
    )
    anchor: str = field(
        default="trainer",
        metadata={"help": "Whose log-probabilities the bounds surround: 'trainer', or 'rollout' (vLLM's)."},
    )

    audit_steps: int = field(
        default=1,
        metadata={"help": "Audit the losses of every so-many-th optimiser step; 0 for none."},
    )

    def __post_init__(self) -> None:
        if self.audit_steps < 0:
            raise ValueError(f"audit_steps must be at least 0 (no audit), got {self.audit_steps}")
        self.clip = repr(parse_rule(str(self.clip)))
        objective = self.objective
        objective = objective if isinstance(objective, Objective) else parse_objective(objective)
        self.objective = repr(objective)
        super().__post_init__()
        if self.loss_type not in CLIPPED_LOSS_TYPES:
            raise ValueError(
                f"loss_type={self.loss_type!r} clips no ratio, so a clip rule has no effect on it; "
                f"choose one of {', '.join(CLIPPED_LOSS_TYPES)}"
            )
        if objective != Surrogate() and (self.loss_type == "cispo" or self.delta is not None):
            other = "loss_type='cispo'" if self.loss_type == "cispo" else f"delta={self.delta}"
            raise ValueError(f"objective={self.objective!r} and {other} both say how to clip; leave one out")
        if self.anchor not in ("trainer", "rollout"):
            raise ValueError(f"anchor must be 'trainer' or 'rollout', got {self.anchor!r}")
        if self.anchor == "rollout" and not self.use_vllm:
            raise ValueError(
                "anchor='rollout' needs use_vllm: without an engine the trainer's are the only log-probabilities"
            )
        if (self.epsilon, self.epsilon_high) != (0.2, None):
            raise ValueError(
                f"epsilon={self.epsilon}, epsilon_high={self.epsilon_high} have no effect beside clip={self.clip!r}; "
                "write the interval as clip='FixedClip(low, high)'"
            )

    @property
    def updates_per_batch(self) -> int:
        """Optimiser steps made on each generated batch. With 1 the ratio is always 1 and no rule can act."""
        return max(
            1, (self.steps_per_generation or 1) * self.num_iterations // self.gradient_accumulation_steps
        )


class HeldRadii(TrainerCallback, ExportableState):
    """What the rule's controllers have arrived at; transformers writes it into each checkpoint's trainer_state.json."""

    def __init__(self, held: dict[str, float] | None = None):
        self.held = held or {}

    def state(self) -> dict[str, Any]:
        return {"args": {"held": self.held}, "attributes": {}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # By itself transformers restores it only with restore_callback_states_from_checkpoint.
        stored = cast("dict[str, Any]", state.stateful_callbacks)
        self.held = dict(stored.setdefault(type(self).__name__, self.state())["args"]["held"])


class BandGRPOTrainer(AuditMixin):
    """`GRPOTrainer` whose ratios are bounded by ``args.clip``, audited as every `AuditMixin`.

    Logs the mean radius of the tokens since the last log as ``radius``, and where it differs among them ``radius_min``
    and ``radius_max`` too; of a band within another rule as ``radius/PATH``, e.g. ``radius/upper``.

    Warns at construction where each batch is used for a single update: the old policy is then the current one, the
    ratio is 1, and no clip of any kind does anything.
    """

    args: BandGRPOConfig
    _moment = Moment(progress=0.0, held={})
    """When the batch in use was generated."""
    _batch: Audit | None = None
    """What the controllers will be told of it."""
    _old_entropies: list[Tensor] | None = None
    """Those caught while a batch is generated, if they are wanted."""

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: BandGRPOConfig | None = None, **arguments: Any
    ):
        args = BandGRPOConfig() if args is None else args
        if not isinstance(args, BandGRPOConfig):
            raise TypeError(f"args must be a BandGRPOConfig, got {type(args).__name__}")
        if args.updates_per_batch == 1:
            warnings.warn(
                "each batch is used for one optimiser step, so the ratio is always 1 and no clip rule can act: set "
                "num_iterations > 1, or steps_per_generation to a multiple of gradient_accumulation_steps",
                stacklevel=2,
            )
        self.clip, self.objective = parse_rule(args.clip), parse_objective(args.objective)
        self._anchored_at, self.audit_steps = args.anchor, args.audit_steps
        self._radii: defaultdict[str, list[Tensor]] = defaultdict(list)
        check_radius(self.clip)
        super().__init__(model, reward_funcs, args, **arguments)
        self.add_callback(HeldRadii())

    @property
    def clip_rule(self) -> ClipRule:
        """The rule for the batch in use, but for what a radius takes from entropies."""
        return self.clip.at(self._moment)

    @property
    def _held(self) -> HeldRadii:
        # Looked up, because transformers may have put another in its place.
        return next(c for c in self.callback_handler.callbacks if isinstance(c, HeldRadii))

    def _rule(self, inputs: dict[str, Any], entropy: Tensor | None = None) -> ClipRule:
        # Without an old policy of its own, the batch has the current one's entropies.
        entropy = inputs.get(OLD_ENTROPIES, entropy)
        if entropy is None:
            return self.clip_rule
        mask = counted_tokens(inputs).float()
        entropy = entropy.detach().float().masked_fill(mask == 0, 0.0)
        return self.clip_rule.at(Moment(entropy=at_level(entropy, mask, self.importance_sampling_level)))

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.training:
            progress = min(self.state.global_step / max(self.state.max_steps, 1), 1.0)
            self._moment = Moment(progress=progress, held=self._held.held)
        needs = {band.radius.needs for band in bands(self.clip).values() if isinstance(band.radius, Radius)}
        self._old_entropies = [] if "entropy" in needs else None
        output = super()._generate_and_score_completions(inputs)
        if self._old_entropies and "old_per_token_logps" in output:
            output[OLD_ENTROPIES] = self._old_entropies[0]  # shuffled and split with the rest
        self._old_entropies = None
        return output

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        # The old policy's pass comes before one without its adapter, as reference. A reference model is another.
        wanted = self._old_entropies == [] and arguments[0] is self.model
        if wanted:
            named["compute_entropy"] = True
        outputs = super()._get_per_token_logps_and_entropies(*arguments, **named)
        if wanted:
            self._old_entropies = [outputs[1]]
        return outputs

    def training_step(self, *arguments: Any) -> Tensor:
        loss = super().training_step(*arguments)
        per_batch = (self.args.steps_per_generation or 1) * self.num_iterations
        if self._batch is not None and self._step % per_batch == 0:
            # The batch's last loss: on every process, and before a checkpoint. The audit leaves out what is undefined.
            metrics = defaultdict(lambda: math.nan, self._read(self._batch))
            self._held.held = self.clip.updated(self._held.held, metrics)
            self._batch = None
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        logp_old = inputs.get("old_per_token_logps")
        if logp_old is None:  # the current policy is the old one
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        stock = self.epsilon_low, self.epsilon_high
        lower, upper = self._interval(inputs, logp_old)
        self.epsilon_low = 1 - lower
        # CISPO clamps at epsilon_high itself, the others at 1 + epsilon_high.
        self.epsilon_high = upper if self.loss_type == "cispo" else upper - 1
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.epsilon_low, self.epsilon_high = stock

    def _interval(self, inputs: dict[str, Any], logp_old: Tensor) -> tuple[Any, Any]:
        """What TRL's clamp is given: bounds of shape (batch, time), or (batch, 1) for sequence-level ratios."""
        if self.objective != Surrogate():
            return 0.0, torch.inf  # `_see` acts on the advantages instead
        old, anchor = self._at_level(inputs, logp_old)
        bounds = self._rule(inputs).bounds(anchor)
        lower, upper = (
            (log_bound + (anchor - old)).exp() for log_bound in (bounds.log_lower, bounds.log_upper)
        )
        per_sequence = self.importance_sampling_level == "sequence"
        return (lower[:, :1], upper[:, :1]) if per_sequence else (lower, upper)

    def _at_level(self, inputs: dict[str, Any], logp_old: Tensor) -> tuple[Tensor, Tensor]:
        """The old log-probabilities, and those that the bounds surround, at the level of the ratios."""
        # What stands at padding is arbitrary, and 0·NaN would still be NaN in TRL's masked sums.
        mask = counted_tokens(inputs).float()
        old = at_level(logp_old.float().masked_fill(mask == 0, 0.0), mask, self.importance_sampling_level)
        anchor = self._anchor(inputs)
        return old, old if anchor is None else at_level(anchor, mask, self.importance_sampling_level)

    def _see(self, inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None) -> Audit | None:
        seen = super()._see(inputs, logp, entropy)
        rule, logp_old = self._rule(inputs, entropy), inputs.get("old_per_token_logps")
        mask = counted_tokens(inputs).float()
        if self.training:
            _, anchor = self._at_level(inputs, logp if logp_old is None else logp_old)
            for path, band in bands(rule).items():
                self._radii[path].append(_spread(band.radius_for(anchor), mask))
            if any(isinstance(band.radius, Hold) for band in bands(self.clip).values()):
                own = self._audit_of(inputs, logp, entropy, {}) if seen is None else seen.own
                self._batch = own if self._batch is None else self._batch + own
        if self.objective == Surrogate() or logp_old is None:
            return seen
        advantages = inputs["advantages"]
        advantages = (advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(logp)
        judged = judge(
            logp.float().masked_fill(mask == 0, 0.0),
            logp_old.float().masked_fill(mask == 0, 0.0),
            advantages,
            mask,
            clip=rule,
            objective=self.objective,
            level=self.importance_sampling_level,
            logp_anchor=self._anchor(inputs),
        )
        smallest = torch.finfo(judged.ratio.dtype).tiny
        inputs["advantages"] = (
            advantages * judged.apply(self.objective.weight) / judged.ratio.clamp(min=smallest)
        )
        return seen

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.training:
            for path, seen in self._radii.items():
                everywhere = cast("Tensor", self.accelerator.gather(torch.stack(seen)))
                total, tokens, least, greatest = everywhere.unbind(-1)
                low, high = least.min().item(), greatest.max().item()
                values = {"radius": (total.sum() / tokens.sum()).item()}
                if low < high:
                    values |= {"radius_min": low, "radius_max": high}
                logs |= {f"{name}/{path}".rstrip("/"): value for name, value in values.items()}
            self._radii.clear()
        super().log(logs, start_time)

    def _anchor(self, inputs: dict[str, Any]) -> Tensor | None:
        logp_old = inputs.get("old_per_token_logps")
        if self._anchored_at == "trainer" or logp_old is None:
            return None
        sampled = inputs["sampling_per_token_logps"].float()
        sampled = torch.where(sampled.isnan(), logp_old.float(), sampled)  # tokens that vLLM could not score
        return sampled.masked_fill(counted_tokens(inputs) == 0, 0.0)


def _spread(radius: float | Tensor, mask: Tensor) -> Tensor:
    """Sum, number, least and greatest of the radii of counted tokens, on their device."""
    radius = torch.as_tensor(radius, dtype=torch.float64, device=mask.device).expand_as(mask)
    counted = mask != 0
    return torch.stack(
        [
            (radius * mask).sum(),
            mask.sum().double(),
            radius.masked_fill(~counted, math.inf).min(),
            radius.masked_fill(~counted, -math.inf).max(),
        ]
    )
