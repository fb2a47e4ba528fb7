"""Tests for other projects: `assert_is` of a policy loss, `check_record` of a writer of records.

`assert_is` compares the gradient that a loss gives each token's log-probability with that of the method that it is
named after. Values are not compared: two losses that train alike may report different numbers. `check_record` compares
what is read of a record with the losses that its writer was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from bandpo import _checks
from bandpo.errors import InvalidType, InvalidValue
from bandpo.gradient_check import TOLERANCE
from bandpo.loss import known_aggregation
from bandpo.methods import Method
from bandpo.rules import ClipRule
from bandpo.testing._batches import LossBatch, loss_batches
from bandpo.testing._differences import Variant, compare_loss
from bandpo.testing._records import check_record
from bandpo.text import as_method

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["assert_is", "check_record"]


def assert_is(
    loss: Callable[..., Tensor],
    method: Method | ClipRule | str,
    *,
    weights: bool = False,
    rollout: bool = False,
    token_advantages: bool = False,
    aggregation: str | None = None,
    normalizer: float | None = None,
    max_log_ratio: float = 40.0,
    tolerance: float = TOLERANCE,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Check that a loss has a method's gradient at every token.

    Three batches are tried: a policy that hardly moved, one that moved as in training, and two policies that have
    nothing in common. Advantages have both signs, lengths are from 1 up, and one sequence has no counted token. The
    batches are the same in every run.

    Args:
        loss: Called as ``loss(logp, logp_old, advantages, mask)``, once per batch. ``logp`` carries the gradient. All
            tensors have the shape (batch, time) and the same dtype, but ``advantages``: (batch,). The mask is 1 for
            tokens that count, else 0. Returns a tensor with one number.
        method: What the loss should be, as for `bandpo.policy_loss`: ``"DAPO()"``.
        weights: Whether the loss takes importance weights, (batch, time), as the keyword ``weights``.
        rollout: Whether the loss takes the log-probabilities under the rollout engine's policy as the keyword
            ``logp_rollout``. Methods whose paper refers the ratio to that policy, as `bandpo.DPPO`, are then compared
            with the ratio to it; all others, and all without this keyword, with the ratio to ``logp_old``.
        token_advantages: Whether to give one advantage per token, (batch, time), different within a sequence.
        aggregation: See `bandpo.aggregate`; by default the method's. ``"grpo"`` is the mean over sequences that counts
            those without a counted token, as TRL's does.
        normalizer: See `bandpo.aggregate`. For ``seq-mean-token-sum-norm`` the default is the width of the batch.
        max_log_ratio: The largest \\|log r\\|. Some losses clamp it at ±20, which shows beyond 20 only.
        tolerance: The largest difference that counts as rounding, relative to the gradient or to what a token with a
            weight of 1 counts for.
        dtype: Of the tensors. A loss that takes bfloat16 has to compute in float32, as a method here does; a
            ``tolerance`` of 0.01 allows for the rounding of its gradient.
        device: Of the tensors, for losses that need an accelerator.

    Raises:
        AssertionError: the gradient is another; the message names the first tokens that differ, both numbers, and the
            likely difference.
        TypeError: the loss does not return a tensor with one number, or ``method`` is none.
        ValueError: an option is refused, or the method needs what the batches lack.

    >>> def dapo(logp, logp_old, advantages, mask):
    ...     ratio, advantages = (logp - logp_old).exp(), advantages[:, None]
    ...     objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    ...     return -(objective * mask).sum() / mask.sum()
    >>> assert_is(dapo, "DAPO()")
    >>> assert_is(dapo, "GRPO(0.2, 0.28)")
    Traceback (most recent call last):
    AssertionError: the loss does not have the gradient of GRPO(low=0.2, high=0.28): ...
      batch 'near', sequence 1, token 1: ...
    Likely difference: averages over tokens.
    """
    chosen = as_method(method)
    if aggregation is not None:
        known_aggregation(aggregation)
    _checks.positive("tolerance", tolerance)
    _checks.positive("max_log_ratio", max_log_ratio)
    if not dtype.is_floating_point:
        raise InvalidValue(f"dtype must be floating-point, got {dtype}")

    def called(batch: LossBatch) -> Tensor:
        advantages = batch.advantages if token_advantages else batch.advantages[:, 0]
        extra: dict[str, Any] = {}
        if weights:
            extra["weights"] = batch.weights
        if rollout:
            extra["logp_rollout"] = batch.logp_rollout
        value = loss(batch.logp, batch.logp_old, advantages, batch.mask, **extra)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            kind = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise InvalidType(f"the loss must return a tensor with one number, got {kind}")
        return value.reshape(())

    of_rollout = rollout and chosen.old_policy == "rollout"
    expected = Variant(chosen, aggregation, normalizer, of_rollout)
    batches = loss_batches(
        weighted=weights,
        token_advantages=token_advantages,
        max_log_ratio=max_log_ratio,
        dtype=dtype,
        device=device,
    )
    comparison = compare_loss(called, expected, list(batches), tolerance=tolerance)
    if not comparison.equal:
        raise AssertionError(str(comparison))
