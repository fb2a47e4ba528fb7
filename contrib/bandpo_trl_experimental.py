"""Clip rules in two of TRL's experimental trainers, in the way of `bandpo.integrations.trl`.

- `BandAsyncGRPOTrainer`. Anchor: the sampler's log-probabilities, which are the only old ones that it has.
- `BandSDPOTrainer`. Anchor: the trainer's own log-probabilities at generation time, without temperature. The rule acts
  on the policy-gradient part of the loss, of weight ``1 − distillation_weight``.

TRL's KL, entropy and clip metrics stay as they are. Written for and tested with trl 1.16.0; TRL changes these
trainers without notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from bandpo.errors import InvalidValue
from bandpo.integrations._adapt import clamping_at, epsilons, read_rule
from bandpo.integrations._trl_config import MethodSettings
from bandpo.methods import Method

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class BandAsyncGRPOConfig(MethodSettings, AsyncGRPOConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`AsyncGRPOConfig` with a clip rule in place of ``epsilon`` and ``epsilon_high``.

    Attributes:
        method: A clip rule, or a method that is PPO's surrogate on other bounds; the rule's text from then on.
        clip: Another name of ``method``.

    Raises:
        ValueError: a setting cannot be read; a method that is more than bounds; ``epsilon`` or ``epsilon_high`` given
            too.
    """

    def __post_init__(self) -> None:
        self.settle(Method(read_rule(method=self.method, clip=self.clip)))
        super().__post_init__()


class BandAsyncGRPOTrainer(AsyncGRPOTrainer):
    """`AsyncGRPOTrainer` whose ratios are bounded by the rule of ``args.method``."""

    args: BandAsyncGRPOConfig

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        counted = inputs["token_index"] >= 0  # TRL's own selection: packed tokens, without padding
        _, low, high = epsilons(read_rule(method=self.args.method), inputs["old_log_probs"][counted])
        with clamping_at(self, low, high):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@dataclass
class BandSDPOConfig(MethodSettings, SDPOConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`SDPOConfig` with a clip rule in place of ``epsilon`` and ``epsilon_high``.

    Attributes:
        method: A clip rule, or a method that is PPO's surrogate on other bounds; the rule's text from then on.
        clip: Another name of ``method``.

    Raises:
        ValueError: a setting cannot be read; a method that is more than bounds; sequence-level ratios;
            ``distillation_weight=1``, TRL's default, under which nothing is clipped; ``epsilon`` or ``epsilon_high``
            given too.
    """

    def __post_init__(self) -> None:
        self.settle(Method(read_rule(method=self.method, clip=self.clip)))
        if self.importance_sampling_level != "token":
            raise InvalidValue(
                f"importance_sampling_level={self.importance_sampling_level!r}: the bounds are per token and would "
                "broadcast over sequence ratios without an error; set it to 'token'"
            )
        if self.distillation_weight == 1:
            raise InvalidValue(
                "distillation_weight=1 is distillation alone, which clips nothing; set it below 1 for a policy loss"
            )
        super().__post_init__()


class BandSDPOTrainer(SDPOTrainer):
    """`SDPOTrainer` whose ratios in the policy-gradient part are bounded by the rule of ``args.method``."""

    args: BandSDPOConfig

    def _compute_policy_loss(self, inputs: dict[str, Any], student_logits: Tensor) -> Tensor:
        logp_old = inputs.get("old_per_token_logps")
        if logp_old is None:  # the current policy is the old one
            return super()._compute_policy_loss(inputs, student_logits)
        old, low, high = epsilons(read_rule(method=self.args.method), logp_old, inputs["completion_mask"])
        with clamping_at(self, low, high):
            return super()._compute_policy_loss({**inputs, "old_per_token_logps": old}, student_logits)
