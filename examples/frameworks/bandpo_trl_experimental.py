"""Clip rules in TRL's experimental asynchronous trainer, in the way of `bandpo.integrations.trl`.

Anchor: the sampler's log-probabilities, which are the only old ones that it has. TRL's KL, entropy and clip metrics
stay as they are. ``record`` is the folder to which the tokens of every loss are written, see `bandpo.Recorder`; TRL
keeps rewards, prompts and the versions of the weights on its first process, and does not hand them to the loss. Written
for and tested with trl 1.16.0; TRL changes this trainer without notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from bandpo.integrations import epsilons, read_bounds, record
from bandpo.integrations._trl_config import MethodSettings
from bandpo.methods import Method

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class BandAsyncGRPOConfig(MethodSettings, AsyncGRPOConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`AsyncGRPOConfig` with a clip rule in place of ``epsilon`` and ``epsilon_high``.

    Attributes:
        method: A clip rule, or a method that is PPO's surrogate on other bounds; the rule's text from then on.
        record: Folder to which the tokens of every loss are written; nothing is written without it.

    Raises:
        ValueError: a setting cannot be read; a method that is more than bounds; ``epsilon`` or ``epsilon_high`` given
            too.
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
        counted = inputs["token_index"] >= 0  # TRL's own selection: packed tokens, without padding
        stock = self.epsilon_low, self.epsilon_high
        method = read_bounds(method=self.args.method)
        bounds = epsilons(method.clip, inputs["old_log_probs"][counted])
        self.epsilon_low, self.epsilon_high = bounds.low, bounds.high

        def watched_model(**named: Any) -> Any:
            outputs = model(**named)
            self._record(method, inputs, outputs, named["shift_labels"])
            return outputs

        called: Any = watched_model if self.args.record else model
        try:
            return super().compute_loss(called, inputs, return_outputs, num_items_in_batch)
        finally:
            self.epsilon_low, self.epsilon_high = stock

    def _record(self, method: Method, inputs: dict[str, Any], outputs: Any, labels: Any) -> None:
        """Write the tokens of a packed micro-batch to the record."""
        counted = inputs["token_index"] >= 0
        place = inputs["token_index"][counted]
        old, advantages = inputs["old_log_probs"][counted], inputs["advantages"][counted]
        # One row, of which each sequence is a segment.
        tensors = [x[None] for x in (outputs.log_probs.flatten()[place], old, advantages, old == old)]
        record(
            self.args.record,
            "trl-async",
            method,
            *tensors,
            old_is_rollout=True,
            sampling={name: getattr(self.args, name, None) for name in ("temperature", "top_p", "top_k")},
            entropy=outputs.entropy.flatten()[place][None],
            tokens=labels.flatten()[place][None],
            segments=inputs["segment_id"][counted][None],
            step=self.state.global_step,
        )
