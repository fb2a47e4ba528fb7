"""The clipped policy-gradient loss, for any clip rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ._loss import LossOutputs
from .batch import Batch
from .layout import Packed, Rows
from .methods import Method
from .rules import ClipRule
from .schedules import TrainingState
from .text import as_method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = ["LossOutputs", "policy_loss"]


def policy_loss(
    logp: Float[Tensor, "batch time"],
    logp_old: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"] | Float[Tensor, "batch 1"] | Float[Tensor, " batch"],
    mask: Tensor | None = None,
    *,
    method: Method | ClipRule | str | None = None,
    layout: Rows | Packed | None = None,
    weights: Float[Tensor, "batch time"] | Float[Tensor, " batch"] | None = None,
    state: TrainingState | None = None,
    aggregation: str | Callable[[Tensor], Tensor] | None = None,
    normalizer: float | Tensor | None = None,
    metrics: bool = True,
) -> LossOutputs:
    """Compute a method's policy-gradient loss from the log-probabilities, advantages and mask of a batch.

    The default is PPO's surrogate ``−min(r·A, clip(r)·A)`` with the ratio ``r = exp(logp − logp_old)`` clipped to the
    bounds of ``Band(KL(), 0.05)``. The value of the loss is minus the method's objective, and its derivative by each
    ``logp`` is ``−(w·A + b)`` with the method's weight ``w`` and bias ``b``.

    All log-probabilities must be those of the distribution that the tokens were sampled from: divided by the sampling
    temperature and normalised over the full vocabulary. Otherwise the bounds are wrong.

    Args:
        logp: Log-probabilities (nats) of the sampled tokens under the policy in training, (batch, time).
        logp_old: The same under the old policy, the denominator of the ratio.
        advantages: One per token, (batch, time), or one per sequence, (batch,) or (batch, 1).
        mask: 1 (or True) for tokens that count, 0 for padding, which is ignored and may contain NaN.
        method: A method such as ``DAPO()``, a clip rule such as ``FixedClip(0.2)``, or the text of one.
        layout: ``Packed(cu_seqlens=…)`` or ``Packed(segments=…)`` if rows hold several sequences. Jagged tensors need
            none. If it is not given, each row is one sequence; ``Rows()`` states that, and skips the check below.
        weights: Importance weights ≥ 0, per token or per sequence, that multiply the loss of each token.
        state: The training state that schedules, rules and objectives may depend on, such as the progress.
        aggregation: See `aggregate`; by default the method's own, else ``token-mean``. Or a function that reduces the
            token losses, (batch, time), to a scalar.
        normalizer: See `aggregate`.
        metrics: False to compute the gradient alone, for less. The loss is then NaN with the same gradient, and there
            are no metrics.

    Without a layout, a method that takes a row for one sequence raises an error for a row that plainly holds several:
    its advantages change, but are equal between at least half of its neighbouring counted tokens. At the level
    ``sequence`` every change is an error. Only advantages per token on the CPU are checked.

    Returns:
        The loss, and metrics that are means over counted tokens (NaN without any; the loss is then 0). A token is
        *dropped* if its weight is 0 or negative: ``clip_high`` is the share of tokens that are dropped with A > 0,
        ``clip_low`` with A < 0 and r < 1, ``dual_clip`` with A < 0 and r > 1. ``ratio_mean`` is the mean of r, and
        ``approx_kl`` that of ``r − 1 − log r`` with token ratios, an estimate of KL(π_old ‖ π) in nats. Ratios are
        limited to 2^104 = e^72.1 (e^693 in float64), so that sums over many tokens are finite.

    Raises:
        TypeError, ValueError: if a tensor is invalid (see `Batch.read`), a row holds several sequences, a text cannot
            be parsed, or a number of the method depends on something that ``state`` lacks.
        RuntimeError: in a backward pass with ``create_graph=True``, as the loss has no second derivative. Within a
            ``torch.compile`` of your own, there is no error, and the second derivative lacks terms.

    To give an anchor or entropies, or to use one batch for more than the loss, see `Batch` and `Method.loss`.

    >>> logp = torch.tensor([[0.2, 0.5]]).log().requires_grad_()
    >>> loss, metrics = policy_loss(logp, torch.tensor([[0.08, 0.5]]).log(), torch.tensor([1.0]), method=FixedClip())
    >>> loss.backward()
    >>> logp.grad, metrics["clip_high"]
    (tensor([[-0.0000, -0.5000]]), tensor(0.5000))
    """
    batch = Batch.read(logp, logp_old, advantages, mask, layout=layout, weights=weights, state=state)
    return as_method(method).loss(batch, aggregation=aggregation, normalizer=normalizer, metrics=metrics)
