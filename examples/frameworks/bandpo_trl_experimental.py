"""Clip rules in TRL's experimental asynchronous trainer, in the way of `bandpo.integrations.trl`.

Anchor: the sampler's log-probabilities, which are the only old ones that it has. TRL's KL, entropy and clip metrics
stay as they are. Written for and tested with trl 1.16.0; TRL changes this trainer without notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from bandpo.integrations import epsilons, read_bounds
from bandpo.integrations._trl_config import MethodSettings
from bandpo.methods import Method

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class BandAsyncGRPOConfig(MethodSettings, AsyncGRPOConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`AsyncGRPOConfig` with a clip rule in place of ``epsilon`` and ``epsilon_high``.

    Attributes:
        method: A clip rule, or a method that is PPO's surrogate on other bounds; the rule's text from then on.

    Raises:
        ValueError: a setting cannot be read; a method that is more than bounds; ``epsilon`` or ``epsilon_high`` given
            too.
    """

    def __post_init__(self) -> None:
        self.settle(Method(read_bounds(method=self.method).clip))
        super().__post_init__()


class BandAsyncGRPOTrainer(AsyncGRPOTrainer):
    """`AsyncGRPOTrainer` whose ratios are bounded by the rule of ``args.method``."""

    args: BandAsyncGRPOConfig

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        counted = inputs["token_index"] >= 0  # TRL's own selection: packed tokens, without padding
        stock = self.epsilon_low, self.epsilon_high
        rule = read_bounds(method=self.args.method).clip
        bounds = epsilons(rule, inputs["old_log_probs"][counted])
        self.epsilon_low, self.epsilon_high = bounds.low, bounds.high
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.epsilon_low, self.epsilon_high = stock
