"""The clipped policy-gradient loss, for any clip rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from . import _checks
from ._packed import check_unpacked
from .aggregation import aggregate_sequences
from .batch import Batch, Tokens
from .methods import Method
from .rules import ClipRule
from .schedules import TrainingState
from .sequences import as_row
from .text import as_method

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["LossOutputs", "policy_loss"]


class LossOutputs(NamedTuple):
    """The result of `policy_loss`: a loss to call ``backward`` on, and detached scalars to log."""

    loss: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, ""]]


class _WithDerivative(torch.autograd.Function):
    """An autograd function with a precomputed derivative.

    Only the derivative is saved for the backward pass, in place of a graph with its intermediate tensors.
    """

    @staticmethod
    def forward(x: Tensor, values: Tensor, derivative: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    @once_differentiable  # the derivative depends on x too, so a second derivative would be wrong
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator's signature)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None, None]:
        return grad_outputs[0] * ctx.saved_tensors[0], None, None


def with_derivative(x: Tensor, values: Tensor, derivative: Tensor) -> Tensor:
    """Return ``values`` as an elementwise function of ``x`` whose derivative is ``derivative``."""
    apply: Callable[[Tensor, Tensor, Tensor], Tensor] = _WithDerivative.apply  # pyright: ignore
    return apply(x, values, derivative)


def policy_loss(
    logp: Float[Tensor, "batch time"],
    logp_old: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"] | Float[Tensor, "batch 1"] | Float[Tensor, " batch"],
    mask: Tensor | None = None,
    *,
    method: Method | ClipRule | str | None = None,
    logp_anchor: Float[Tensor, "batch time"] | None = None,
    entropy: Float[Tensor, "batch time"] | None = None,
    weights: Float[Tensor, "batch time"] | Float[Tensor, " batch"] | None = None,
    state: TrainingState | None = None,
    aggregation: str | Callable[[Tensor], Tensor] | None = None,
    normalizer: float | Tensor | None = None,
    segments: Int[Tensor, "batch time"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    packed: bool | None = None,
) -> LossOutputs:
    """Compute a method's policy-gradient loss from the log-probabilities, advantages and mask of a batch.

    Takes tensors of shape (batch, time), one value per sampled token. Returns ``(loss, metrics)``: a scalar to call
    ``backward`` on, and a dict of detached scalars to log.

    The default is PPO's surrogate ``−min(r·A, clip(r)·A)`` with the ratio ``r = exp(logp − logp_old)`` clipped to the
    bounds of `Band`. In general the derivative of a token's loss with respect to its ``logp`` is ``−(w·A + b)``. The
    method's objective defines the weight ``w`` and the bias ``b``, which is 0 for most methods. This derivative is
    computed directly and handed to autograd, so no graph is built over the ratios, and a bound without a closed form is
    solved for only if the weight needs it. A clipped token has the gradient 0; its value in the loss is ``−clip(r)·A``,
    or ``−min(r, max_ratio)·A`` if its bound has no closed form.

    All log-probabilities must be those of the distribution that the tokens were sampled from: divided by the sampling
    temperature and normalised over the full vocabulary. Otherwise the bounds are wrong.

    Args:
        logp: Log-probabilities (nats) of the sampled tokens under the policy in training; carries the gradient.
        logp_old: Log-probabilities (nats) of the same tokens under the old policy, the denominator of the ratio.
        advantages: One per token, (batch, time), or one per sequence, (batch,) or (batch, 1).
        mask: 1 (or True) for tokens that count, 0 for padding. Padding is ignored in all tensors and may contain NaN.
            All tokens count if not given.
        method: A method such as ``DAPO()``, a clip rule such as ``FixedClip(0.2)``, a `Method` made of a rule and an
            objective, or the text of one: ``"SAPO(1.0, 1.05)"``. By default PPO's surrogate with
            ``Band(KL(), 0.05)``. For ratios per sequence, as in `bandpo.GSPO`, see docs/which-method.md.
        logp_anchor: Log-probabilities (nats) under the policy that the rule's bounds surround, if that is not
            ``logp_old``: the rollout engine's, for instance. The new probability is then kept within
            ``[lower(p), upper(p)]·p`` of the anchor's probability p. The ratio still refers to ``logp_old``.
        entropy: Entropy (nats) of the policy at each token, for objectives that use it.
        weights: Importance weights ≥ 0, per token or per sequence, that multiply the loss of each token, as TRL's
            ``importance_sampling_ratio`` and verl's ``rollout_is_weights`` do. Truncate them before the call. VESPO
            includes them in its own weight.
        state: The training state that schedules, rules and objectives may depend on, such as the progress.
        aggregation: See `aggregate`; by default the method's own, else ``token-mean``. It may be a function that
            reduces the token losses, (batch, time), to a scalar.
        normalizer: See `aggregate`.
        segments: For a packed batch: the index of each token's sequence, from 0, in the shape of ``logp``; below 0
            for tokens of no sequence. From Hugging Face's ``position_ids``: ``(position_ids == 0).cumsum(-1) - 1``.
        cu_seqlens: For a packed batch: the start of each sequence among the flattened tokens and the end of the last
            one, as in FlashAttention's kernels.
        packed: False states that each row is one sequence, and skips the check for packed rows. Pass it with process
            rewards, or with a critic's advantages at the level ``sequence``. By default, if neither ``segments`` nor
            ``cu_seqlens`` is given, rows are checked if the method takes a row for one sequence. If the ratio or its
            bound is at the level ``sequence``, advantages that change among the counted tokens of a row raise an error.
            If the method has a mean over sequences, an objective with ``whole_sequence``, or a number that depends on
            position or length, a row raises an error if its advantages change but are equal between at least half of
            its neighbouring counted tokens. This detects packed sequences and accepts a critic's advantages. The check
            needs advantages per token on the CPU, and cannot detect packed sequences that share one advantage.

    A packed batch holds several sequences in a row. Its tensors have the shape (1, tokens), (tokens,) or (batch, time),
    with ``segments`` or ``cu_seqlens``, or they are jagged nested tensors, which need neither. Advantages and weights
    are one per token or have the shape (sequences,). Loss, gradient and metrics equal those of the padded batch.

    Returns:
        The loss, and metrics that are means over counted tokens. If no token counts, the loss and its gradient are 0
        and the metrics are NaN. A token is *dropped* if its weight is 0 or negative.

        - ``clip_high``: share of tokens that are dropped with A > 0.
        - ``clip_low``: share of tokens that are dropped with A < 0 and r < 1.
        - ``dual_clip``: share of tokens that are dropped with A < 0 and r > 1, as by a dual clip.
        - ``ratio_mean``: mean ratio.
        - ``approx_kl``: mean of ``r − 1 − log r`` with token ratios, an estimate of KL(π_old ‖ π) in nats.

    Raises:
        TypeError: if a tensor is not floating-point, or ``method`` is not a method.
        ValueError: if a tensor is invalid (see `bandpo.core.batch.Batch.read`), a row holds several sequences (see
            ``packed``), a text cannot be parsed, or a number of the method depends on something that ``state`` lacks.

    >>> logp = torch.tensor([[0.2, 0.5]]).log().requires_grad_()
    >>> loss, metrics = policy_loss(logp, torch.tensor([[0.08, 0.5]]).log(), torch.tensor([1.0]), method=FixedClip())
    >>> loss.backward()
    >>> logp.grad, metrics["clip_high"]
    (tensor([[-0.0000, -0.5000]]), tensor(0.5000))
    """
    chosen = as_method(method)
    batch = Batch.read(
        logp,
        logp_old,
        advantages,
        mask,
        logp_anchor=logp_anchor,
        entropy=entropy,
        weights=weights,
        state=state,
        segments=segments,
        cu_seqlens=cu_seqlens,
    )
    reduction = aggregation or chosen.aggregation or "token-mean"
    check_unpacked(batch, advantages, chosen, None if callable(reduction) else reduction, packed)
    if batch.sequences.packed:
        logp = as_row(logp)

    # The value of each token's loss and its derivative with respect to logp, both (batch, time).
    with torch.no_grad():
        advantages = batch.advantages
        mask = batch.mask
        tokens = chosen.tokens(batch)
        objective = chosen.objective.resolve(batch.state)
        weight = objective.weight(tokens)
        bias = objective.bias(tokens)
        regularizer = objective.regularizer(tokens)
        # The advantage is 0 in the padding, so the derivative and the value are 0 there too.
        derivative = -advantages * weight
        value = -advantages * objective.surrogate(tokens)
        if bias is not None:
            derivative = derivative - bias * mask
        if regularizer is not None:
            value = value + regularizer * mask
        token_weights = batch.token_weights
        if token_weights is not None and not objective.weights_inside:
            derivative = derivative * token_weights
            value = value * token_weights
    token_losses = with_derivative(_checks.as_float("logp", logp), value, derivative)

    if callable(reduction):
        loss = reduction(token_losses)
    else:
        loss = aggregate_sequences(token_losses, batch.sequences, reduction, normalizer)
    with torch.no_grad():
        metrics = _loss_metrics(batch, tokens, weight, chosen.level)
    return LossOutputs(loss, metrics)


def _loss_metrics(
    batch: Batch, tokens: Tokens, weight: Float[Tensor, "batch time"], level: str
) -> dict[str, Float[Tensor, ""]]:
    """Compute the metrics of `policy_loss` from the weight of each token."""
    count = batch.mask.sum(-1).sum()

    def mean(x: Tensor) -> Tensor:
        return x.sum(-1).sum() / count

    # 1 for a dropped token with A > 0, −1 for one with A < 0. As numbers rather than flags, and summed by rows, the
    # metrics are compiled into the same kernel as the loss.
    dropped = torch.where(weight > 0, 0.0, batch.advantages.sign())
    negative = dropped.clamp(max=0.0)
    dual = torch.where(tokens.log_ratio_anchor > 0, negative, 0.0)
    token_ratio = tokens.ratio if level == "token" else batch.log_ratio.exp()
    return {
        "clip_high": mean(dropped.clamp(min=0.0)),
        "clip_low": mean(dual) - mean(negative),
        "dual_clip": -mean(dual),
        "ratio_mean": mean(tokens.ratio * batch.mask),
        # The log-ratio is 0 in the padding, so this is 0 there too.
        "approx_kl": mean(token_ratio - 1 - batch.log_ratio),
    }
