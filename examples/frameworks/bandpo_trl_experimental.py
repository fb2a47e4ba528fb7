"""Clip rules in TRL's experimental asynchronous trainer.

The old log-probabilities are the sampler's, as this trainer has no others. TRL's KL, entropy and clip metrics are
unchanged. With ``record`` the tokens of every loss are written to a folder, see `bandpo.audit.Recorder`. TRL has
rewards, prompts and the versions of the weights on its first process, and does not pass them to the loss.

Written for and tested with trl 1.16.0. TRL may change this trainer without notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from bandpo import Packed
from bandpo.core.methods import Method
from bandpo.integrations import epsilons, read_bounds, record
from bandpo.integrations.trl.config import MethodSettings

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class BandAsyncGRPOConfig(MethodSettings, AsyncGRPOConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`AsyncGRPOConfig` with a clip rule in place of ``epsilon`` and ``epsilon_high``.

    Attributes:
        method: A clip rule, or a method that is PPO's surrogate with other bounds; it becomes the text of the rule.
        record: Folder to which the tokens of every loss are written; None to write none.

    Raises:
        ValueError: a setting cannot be read; the method is not PPO's surrogate; or ``epsilon`` or ``epsilon_high`` is
            set as well.
    """

    record: str | None = None

    def __post_init__(self) -> None:
        self.set_method(Method(read_bounds(method=self.method).clip))
        super().__post_init__()


class BandAsyncGRPOTrainer(AsyncGRPOTrainer):
    """`AsyncGRPOTrainer` whose ratios are bounded by the rule of ``args.method``."""

    args: BandAsyncGRPOConfig

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        method = read_bounds(method=self.args.method)
        # TRL selects the same tokens: packed, without padding.
        counted = inputs["token_index"] >= 0
        bounds = epsilons(method.clip, inputs["old_log_probs"][counted])

        def model_with_record(**kwargs: Any) -> Any:
            outputs = model(**kwargs)
            self._record(method, inputs, outputs, kwargs["shift_labels"])
            return outputs

        # The loss reads its epsilons from the trainer, and accepts tensors of the shape of the ratio.
        configured = self.epsilon_low, self.epsilon_high
        self.epsilon_low, self.epsilon_high = bounds.low, bounds.high
        called: Any = model_with_record if self.args.record else model
        try:
            return super().compute_loss(called, inputs, return_outputs, num_items_in_batch)
        finally:
            self.epsilon_low, self.epsilon_high = configured

    def _record(self, method: Method, inputs: dict[str, Any], outputs: Any, labels: Any) -> None:
        """Write the tokens of a packed micro-batch to the record."""
        counted = inputs["token_index"] >= 0
        positions = inputs["token_index"][counted]
        logp_old = inputs["old_log_probs"][counted]
        # A single row, in which each sequence is a segment.
        record(
            self.args.record,
            "trl-async",
            method,
            outputs.log_probs.flatten()[positions][None],
            logp_old[None],
            inputs["advantages"][counted][None],
            ~logp_old.isnan()[None],
            old_is_rollout=True,
            sampling={name: getattr(self.args, name, None) for name in ("temperature", "top_p", "top_k")},
            entropy=outputs.entropy.flatten()[positions][None],
            tokens=labels.flatten()[positions][None],
            layout=Packed(segments=inputs["segment_id"][counted][None]),
            step=self.state.global_step,
        )
