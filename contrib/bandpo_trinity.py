"""Band, and every other method, as a policy loss of Trinity-RFT: settings only, no code.

    algorithm:
      algorithm_type: grpo
      policy_loss_fn: bandpo_trinity.BandPolicyLossFn
      policy_loss_fn_args:
        method: SAPO(1.0, 1.05)

``clip`` is another name of ``method``; without both it is ``Band(KL(), 0.05)``.

Anchor: Trinity's ``old_logprob``, which by default (``bypass_old_logprobs: true``) are the sampler's log-probabilities,
otherwise the trainer's own at the start of the step. Trinity does not tell the loss which: leave it at the default
for ``DPPO()`` and ``IcePop()``, which refer to the sampler's.

Trinity's registry takes the dotted path; bandpo must be installed where the trainer runs. ``policy_loss_fn_args``
replaces the defaults as a whole. Written for and tested with trinity-rft 0.6.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn
from trinity.algorithm.utils import aggregate_loss

from bandpo.integrations._adapt import averaged, numbers, read_method, with_dual_clip
from bandpo.loss import policy_loss

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class BandPolicyLossFn(PolicyLossFn):
    """Trinity's ``ppo`` with a method in place of ``clip_range``, ``clip_range_low`` and ``clip_range_high``.

    Args:
        backend: Given by Trinity: the trainer whose names the batch uses.
        method: A clip rule or a method in its text form, see `bandpo.parse`; ``Band(KL(), 0.05)`` by default.
        clip: Another name of ``method``.
        clip_ratio_c: Trinity's dual clip, beside a clip rule alone; ``inf`` for none. A whole method brings its own.
        loss_agg_mode: Trinity's aggregation; by default the method's own, else ``token-mean``. Trinity does it.

    Raises:
        ValueError: a setting cannot be read, or both names are given.
    """

    def __init__(
        self,
        backend: str = "verl",
        *,
        method: str | None = None,
        clip: str | None = None,
        clip_ratio_c: float = 3.0,
        loss_agg_mode: str | None = None,
    ) -> None:
        super().__init__(backend=backend)
        prefix = "algorithm.policy_loss_fn_args."
        self.method = with_dual_clip(read_method(prefix, method, clip), clip_ratio_c, f"{prefix}clip_ratio_c")
        self.loss_agg_mode = loss_agg_mode or self.method.aggregation or "token-mean"

    # Trinity reads this signature: the names are the batch's keys, and the catch-all must be called kwargs.
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        logprob: Float[Tensor, "batch time"],
        old_logprob: Float[Tensor, "batch time"],
        action_mask: Float[Tensor, "batch time"],
        advantages: Float[Tensor, "batch time"],
        **kwargs: Any,
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        """The loss of a micro-batch, and metrics: those of `bandpo.policy_loss`, and Trinity's own ``pg_*``.

        Raises:
            ValueError: see `bandpo.policy_loss`.
        """
        loss, metrics = policy_loss(
            logprob,
            old_logprob,
            advantages,
            action_mask,
            method=self.method,
            aggregation=averaged(
                lambda losses: aggregate_loss(losses, action_mask, self.loss_agg_mode), action_mask
            ),
        )
        scalars = numbers(metrics)
        return loss, scalars | {
            "pg_clipfrac": scalars["clip_high"] + scalars["clip_low"],
            "pg_clipfrac_lower": scalars["dual_clip"],
            "pg_loss": loss.item(),
        }

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}
