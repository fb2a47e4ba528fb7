"""Clip rules in Liger-Kernel's chunked GRPO loss, which never holds the logits of more than a chunk of sequences.

    loss_fn = BandFusedLinearGRPOLoss("Band(KL(), 0.05)", beta=0.0, use_ref_model=False)
    loss, metrics = loss_fn(hidden, lm_head.weight, ids, mask, advantages, old_per_token_logps=logp_old)

The bounds are computed inside the chunked function, from the chunk's own old log-probabilities. (Tensors handed to
Liger's own loss as ``epsilon_low`` are not chunked and broadcast silently against the wrong sequences.)

Anchor: ``old_per_token_logps``, whatever the training loop gives; without them the ratio is 1 and no rule acts.

For hand-written loops: TRL 1.16 does not use this loss. Liger's Triton kernel, another loss, takes its epsilons as
compile-time constants and cannot be given a rule. Written for and tested with liger-kernel 0.8.5, on the CPU.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction, LigerFusedLinearGRPOLoss

from bandpo.errors import InvalidValue
from bandpo.integrations._adapt import epsilons, read_rule
from bandpo.loss import TRL_LOSS_TYPES
from bandpo.methods import Method
from bandpo.rules import ClipRule

if TYPE_CHECKING:
    from torch import Tensor

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")


class _BandFunction(LigerFusedLinearGRPOFunction):
    """Liger hands ``epsilon_low`` through to `ppo_loss_fn` as it is: here it carries the rule."""

    @staticmethod
    def ppo_loss_fn(  # pyright: ignore[reportIncompatibleMethodOverride]
        per_token_logps: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        full_attention_mask: Tensor,
        *,
        epsilon_low: ClipRule,
        epsilon_high: None,
        loss_type: str,
        old_per_token_logps: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, list[Tensor]]:
        logp_old = per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps
        clean, low, high = epsilons(epsilon_low, logp_old, attention_mask)
        return LigerFusedLinearGRPOFunction.ppo_loss_fn(
            per_token_logps,
            attention_mask,
            advantages,
            full_attention_mask,
            epsilon_low=low,
            # CISPO clamps at epsilon_high itself, the others at 1 + epsilon_high.
            epsilon_high=1 + high if loss_type == "cispo" else high,
            loss_type=loss_type,
            old_per_token_logps=clean,
            **arguments,
        )


class BandFusedLinearGRPOLoss(LigerFusedLinearGRPOLoss):
    """`LigerFusedLinearGRPOLoss` with a clip rule in place of ``epsilon_low`` and ``epsilon_high``.

    Args:
        method: A clip rule, or a method that is PPO's surrogate on other bounds, such as ``DAPO()``; or its text form.
            ``Band(KL(), 0.05)`` by default.
        clip: Another name of ``method``.
        loss_type: Liger's aggregation, one of `LOSS_TYPES`. It stands in the place of a method's own: for ``GRPO()``
            write ``loss_type="grpo"``.
        importance_sampling_level: ``"token"``; taken so that anything else is refused here.
        arguments: Liger's other settings (``beta``, ``chunk_size``, ``temperature``, ``compiled``, …).

    Raises:
        ValueError: a setting cannot be read, a method that is more than bounds, another ``loss_type``, sequence-level
            ratios, or ``epsilon_low`` or ``epsilon_high`` given too.
    """

    def __init__(
        self,
        method: Method | ClipRule | str | None = None,
        *,
        clip: Method | ClipRule | str | None = None,
        loss_type: str = "dapo",
        importance_sampling_level: str = "token",
        **arguments: Any,
    ) -> None:
        if loss_type not in LOSS_TYPES:
            raise InvalidValue(
                f"loss_type={loss_type!r} is not one of {', '.join(LOSS_TYPES)}; sapo and vespo clip no ratio, and "
                "Liger's luspo counts padding, where the bounds mean nothing"
            )
        if importance_sampling_level != "token":
            raise InvalidValue(
                f"importance_sampling_level={importance_sampling_level!r}: the bounds are per token and would "
                "broadcast over sequence ratios without an error; set it to 'token'"
            )
        if given := {"epsilon_low", "epsilon_high"} & arguments.keys():
            raise InvalidValue(
                f"{', '.join(sorted(given))} would have no effect beside clip; use clip='FixedClip(…)'"
            )
        super().__init__(loss_type=loss_type, **arguments)
        average = TRL_LOSS_TYPES.get(loss_type, "token-mean")  # CISPO's
        self.epsilon_low, self.epsilon_high = read_rule(method=method, clip=clip, average=average), None

    def forward(self, *arguments: Any, **named: Any) -> tuple[Tensor, list[Tensor]]:
        """Liger's forward, argument for argument."""
        call = inspect.signature(LigerFusedLinearGRPOLoss.forward).bind(self, *arguments, **named)
        call.apply_defaults()
        given = {**call.arguments, "weight": call.arguments["lin_weight"]}
        # The autograd function takes 31 arguments by position; its signature says in which order.
        _, *names = inspect.signature(LigerFusedLinearGRPOFunction.forward).parameters
        return _BandFunction.apply(*(given[n] if n in given else getattr(self, n) for n in names))  # pyright: ignore
