"""An audit of any GRPOTrainer: what its clip does to tokens, logged with the rest.

TRL computes the log-probabilities inside its loss, so they are caught where the loss asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from trl import GRPOTrainer

from bandpo.audit import COUNTERFACTUALS, Audit
from bandpo.clipping import ClipRule, FixedClip, Unclipped
from bandpo.watch import Watch

if TYPE_CHECKING:
    from torch import Tensor

CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo")


class AuditMixin(GRPOTrainer):
    """Logs what the clip does to tokens, as ``audit/…`` metrics (see docs/audit.md), and warns of what wastes a run.

    Put it before any GRPOTrainer that calls TRL's own loss: ``class Mine(AuditMixin, TheirTrainer): ...``. It costs no
    forward pass: the loss's log-probabilities are seen on their way. Sums are reduced over processes and read once
    per log step. Only training steps are audited.
    """

    audit_steps: int = 1
    """The losses of every so-many-th optimiser step are audited; 0 for none."""

    _inputs: dict[str, Any] | None = None
    _audit: Audit | None = None
    _first: Audit | None = None
    _watch: Watch | None = None

    @property
    def clip_rule(self) -> ClipRule:
        """The rule that is audited: for a stock trainer the interval of its ``epsilon`` and ``epsilon_high``."""
        if self.loss_type not in CLIPPED_LOSS_TYPES:
            return Unclipped()
        if self.loss_type == "cispo":  # its epsilon_high is the bound itself, and below 1 at TRL's default
            return FixedClip(1.0, max(self.epsilon_high - 1, 0.0))
        return FixedClip(min(self.epsilon_low, 1.0), self.epsilon_high)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode; TRL tells training metrics from evaluation's by it too."""
        return self.model is not None and self.model.training

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        self._inputs = dict(inputs)  # a copy: a batch comes back in the next iteration
        try:
            return super().compute_loss(model, self._inputs, return_outputs, num_items_in_batch)
        finally:
            self._inputs = None

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        outputs = super()._get_per_token_logps_and_entropies(*arguments, **named)
        if self._inputs is not None:  # not the old policy's, which TRL computes outside of the loss
            self._see(self._inputs, outputs[0].detach(), outputs[1])
        return outputs

    def _see(self, inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None) -> Audit | None:
        """Called in every loss, once its log-probabilities are known and before they are used; returns its audit."""
        if not self.training or not self.audit_steps or self.state.global_step % self.audit_steps:
            return None
        seen = self._audit_of(inputs, logp, entropy, counterfactuals=COUNTERFACTUALS)
        if self._audit is None and self.state.global_step == 0:
            self._first = seen
        self._audit = seen if self._audit is None else self._audit + seen
        return seen

    def _audit_of(
        self,
        inputs: dict[str, Any],
        logp: Tensor,
        entropy: Tensor | None,
        counterfactuals: Mapping[str, ClipRule],
    ) -> Audit:
        old = inputs.get("old_per_token_logps")
        return Audit.of(
            logp,
            logp if old is None else old,
            inputs["advantages"],
            counted_tokens(inputs),
            clip=self._rule(inputs, entropy),
            level=self.importance_sampling_level,
            logp_anchor=self._anchor(inputs),
            entropy=entropy,
            counterfactuals=counterfactuals,
        )

    def _rule(self, inputs: dict[str, Any], entropy: Tensor | None) -> ClipRule:
        """The rule of one loss; ``entropy`` is the current policy's."""
        return self.clip_rule

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics: dict[str, float] = {}
        if self.training and self._audit is not None:
            metrics = self._read(self._audit)
            logs |= {f"audit/{name}": value for name, value in metrics.items()}
        super().log(logs, start_time)
        if metrics and self.is_world_process_zero():
            self._watch = self._watch or Watch(self.clip_rule)
            if self._first is not None:
                self._watch.before_update(self._first.metrics())
            self._watch(metrics, entropy=logs.get("entropy"), reward=logs.get("reward"))
        if metrics:
            self._audit = self._first = None

    def _read(self, seen: Audit) -> dict[str, float]:
        def over_processes(sums: Tensor) -> Tensor:
            return cast("Tensor", self.accelerator.reduce(sums, reduction="sum"))

        return seen.reduced(over_processes).metrics()

    def _anchor(self, inputs: dict[str, Any]) -> Tensor | None:
        """What the bounds surround, if not the trainer's old log-probabilities."""
        return None


class AuditedGRPOTrainer(AuditMixin):
    """TRL's `GRPOTrainer`, unchanged but for the audit: put its name where GRPOTrainer stood."""


def counted_tokens(inputs: dict[str, Any]) -> Tensor:
    """The tokens that count in TRL's loss."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
