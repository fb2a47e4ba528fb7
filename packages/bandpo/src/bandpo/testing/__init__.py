"""Checks for the tests of other projects: `assert_is` for a policy loss, `check_record` for a writer of records.

Nothing here is used by the package itself.
`assert_is` compares a loss with a method of bandpo by the gradient with respect to each token's log-probability. Values
are not compared, because losses with equal gradients may report different numbers. `check_record` reads a record and
compares it with the losses that were passed to its writer. It is that of `rlvet.records.writer_check`, imported when it
is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from bandpo._siblings import require_rlvet
from bandpo.certificate.gradient import TOLERANCE
from bandpo.certificate.plain import compare_loss
from bandpo.certificate.tokens import LossBatch, loss_batches
from bandpo.certificate.variants import Variant
from bandpo.core import _checks
from bandpo.core.aggregation import canonical_aggregation
from bandpo.core.errors import InvalidType, InvalidValue
from bandpo.core.methods import Method
from bandpo.core.rules import ClipRule
from bandpo.core.text import as_method

if TYPE_CHECKING:
    from torch import Tensor

    from rlvet.records.writer_check import check_record

__all__ = ["assert_is", "check_record"]


def __getattr__(name: str) -> Any:
    """Return `check_record`, which needs rlvet."""
    if name != "check_record":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_rlvet("check_record")
    from rlvet.records.writer_check import check_record

    return check_record


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
    r"""Check that a loss has a method's gradient at every token.

    The loss is evaluated on three batches: one with a policy close to the old one, one with changes as in training, and
    one with two unrelated policies. Advantages have both signs, lengths start at 1, and one sequence has no counted
    token. The batches are the same in every run.

    Args:
        loss: A function that is called as ``loss(logp, logp_old, advantages, mask)``, once per batch, and returns a
            tensor with one number. ``logp`` carries the gradient. All tensors have the same dtype and the shape
            (batch, time), except for ``advantages``, (batch,). The mask is 1 for tokens that count, 0 for padding.
        method: The method that the loss should equal, as for `bandpo.policy_loss`: ``"DAPO()"``.
        weights: True if the loss takes importance weights, (batch, time), as the keyword ``weights``.
        rollout: True if the loss takes the log-probabilities under the rollout engine's policy as the keyword
            ``logp_rollout``. The ratio of methods that refer to that policy by their paper, as `bandpo.DPPO`, is then
            the ratio to it. Otherwise the ratio is that to ``logp_old``.
        token_advantages: True to pass one advantage per token, (batch, time), which vary within a sequence.
        aggregation: See `bandpo.aggregate`; by default the method's. ``"grpo"`` is the mean over sequences that counts
            sequences without a counted token, as TRL's does.
        normalizer: See `bandpo.aggregate`. For ``seq-mean-token-sum-norm`` the default is the width of the batch.
        max_log_ratio: The largest \|log r\|. Some losses clamp it at ±20, which only larger values reveal.
        tolerance: The largest difference that counts as rounding, relative to the gradient or to that of a token with
            A = w = 1, whichever is larger.
        dtype: The dtype of the tensors. A loss that takes bfloat16 must compute in float32, as bandpo does; a
            ``tolerance`` of 0.01 allows for the rounding of its gradient.
        device: The device of the tensors, for losses that need an accelerator.

    Raises:
        AssertionError: if the gradients differ. The message names the tokens that differ most, both numbers, the
            likely difference, and the published method that the loss is, if there is one.
        TypeError: if the loss does not return a tensor with one number, or ``method`` is not a method.
        ValueError: if an option is invalid, or the method depends on something that the batches lack.

    >>> def dapo(logp, logp_old, advantages, mask):
    ...     ratio, advantages = (logp - logp_old).exp(), advantages[:, None]
    ...     objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    ...     return -(objective * mask).sum() / mask.sum()
    >>> assert_is(dapo, "DAPO()")
    >>> assert_is(dapo, "GRPO(0.2, 0.28)")
    Traceback (most recent call last):
    AssertionError: the loss does not have the gradient of GRPO(low=0.2, high=0.28): ...
      batch 'near', sequence 41, token 2: ...
    Likely difference: averages over tokens.
    It has the gradient of DAPO(low=0.2, high=0.28).
    """
    chosen = as_method(method)
    if aggregation is not None:
        canonical_aggregation(aggregation)
    _checks.positive("tolerance", tolerance)
    _checks.positive("max_log_ratio", max_log_ratio)
    if not dtype.is_floating_point:
        raise InvalidValue(f"dtype must be floating-point, got {dtype}")

    def loss_of_batch(batch: LossBatch) -> Tensor:
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
    comparison = compare_loss(loss_of_batch, expected, list(batches), tolerance=tolerance, finds=True)
    if not comparison.equal:
        raise AssertionError(str(comparison))
