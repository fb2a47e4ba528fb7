"""The clipped policy-gradient loss, for any clip rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch.autograd.function import once_differentiable

from bandpo import _checks
from bandpo.batch import Batch
from bandpo.errors import InvalidValue
from bandpo.methods import Method
from bandpo.rules import ClipRule
from bandpo.text import as_method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = ["LossOutputs", "aggregate", "policy_loss"]

Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "sum"
]

AGGREGATIONS = get_args(Aggregation)  # here, because older compilers break the graph at get_args

TRL_LOSS_TYPES: dict[str, Aggregation] = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}
"""TRL's ``loss_type`` names for the same aggregations (``dapo`` takes its denominator over the global batch)."""


class LossOutputs(NamedTuple):
    """A loss to call ``backward`` on, and detached scalars that describe it."""

    loss: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, ""]]


def aggregate(
    values: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    aggregation: str = "token-mean",
    *,
    normalizer: float | None = None,
) -> Float[Tensor, ""]:
    """Reduce per-token values to one number, as verl's ``loss_agg_mode`` or TRL's ``loss_type`` of that name does.

    The two differ in sequences without a counted token: a mean over sequences leaves them out under verl's names and
    counts them as 0 under TRL's.

    Args:
        values: Per-token values.
        mask: 1 for tokens that count, 0 for the others (whose value may be anything, NaN included).
        aggregation: ``token-mean`` (TRL ``bnpo``, ``dapo``), ``seq-mean-token-mean`` (TRL ``grpo``),
            ``seq-mean-token-sum`` (TRL ``luspo``), ``seq-mean-token-sum-norm`` (TRL ``dr_grpo``), or ``sum``.
        normalizer: Denominator in place of the batch's own: for ``token-mean`` the number of tokens (of the global
            batch, say); for ``seq-mean-token-sum-norm``, where it is required, the maximal completion length.

    Raises:
        ValueError: unknown aggregation, or a normalizer missing, not positive or without use.

    >>> values, mask = torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    >>> aggregate(values, mask, "token-mean"), aggregate(values, mask, "seq-mean-token-mean")
    (tensor(3.), tensor(3.5000))
    """
    return _aggregate(values.masked_fill(mask == 0, 0.0), mask, aggregation, normalizer)


def _aggregate(kept: Tensor, mask: Tensor, aggregation: str, normalizer: float | None) -> Tensor:
    """`aggregate` of values that are 0 where the mask is."""
    mode = TRL_LOSS_TYPES.get(aggregation, aggregation)
    if mode not in AGGREGATIONS:
        known = ", ".join([*AGGREGATIONS, *TRL_LOSS_TYPES])
        raise InvalidValue(f"unknown aggregation {aggregation!r}; known are {known}")
    if normalizer is not None:
        if mode not in ("token-mean", "seq-mean-token-sum-norm"):
            raise InvalidValue(f"aggregation {aggregation!r} takes no normalizer, got {normalizer!r}")
        _checks.positive("normalizer", normalizer)
    if mode == "sum":
        return kept.sum()
    if mode == "token-mean":
        return kept.sum() / (mask.sum().clamp(min=1.0) if normalizer is None else normalizer)
    per_sequence, counted = kept.sum(-1), mask.sum(-1)
    if mode == "seq-mean-token-mean":
        per_sequence = per_sequence / counted.clamp(min=1.0)
    elif mode == "seq-mean-token-sum-norm":
        if normalizer is None:
            raise InvalidValue(f"aggregation {aggregation!r} needs normalizer=<maximal completion length>")
        per_sequence = per_sequence / normalizer
    if aggregation in TRL_LOSS_TYPES:
        return per_sequence.mean()
    return per_sequence.sum() / (counted > 0).sum().clamp(min=1)


class _WithSlope(torch.autograd.Function):
    """Values whose derivative by ``x`` is known when they are: one buffer waits for the backward pass, no graph."""

    @staticmethod
    def forward(x: Tensor, values: Tensor, slope: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    @once_differentiable  # a second derivative would miss how the slope depends on x, so it is refused
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator's signature)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None, None]:
        return grad_outputs[0] * ctx.saved_tensors[0], None, None


def policy_loss(
    logp: Float[Tensor, "batch time"],
    logp_old: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"] | Float[Tensor, "batch 1"] | Float[Tensor, " batch"],
    mask: Tensor | None = None,
    *,
    method: Method | ClipRule | str | None = None,
    clip: Method | ClipRule | str | None = None,
    logp_anchor: Float[Tensor, "batch time"] | None = None,
    entropy: Float[Tensor, "batch time"] | None = None,
    weights: Float[Tensor, "batch time"] | Float[Tensor, " batch"] | None = None,
    aggregation: str | None = None,
    normalizer: float | None = None,
) -> LossOutputs:
    """The policy-gradient loss of any method: any clip rule, any objective, averaged over tokens.

    By default PPO's surrogate ``−min(r·A, clip(r)·A)`` under `Band`. A token's gradient is ``−w·A·∇logp``, where the
    objective gives the weight ``w``. A backward pass needs no more, so the rest is computed without autograd, and
    bounds are solved for only where the weight needs them. (The reported *value* of a token that `Band` clips is
    ``−r·A``, as for an unclipped one; its gradient is 0. Rules in closed form report ``−clip(r)·A``.)

    All log-probabilities must be those of the distribution that was sampled from: divided by the sampling
    temperature, and normalised over the full vocabulary. A band computed from another p is another band.

    Args:
        logp: Log-probabilities (nats) of the sampled tokens under the policy in training; carries the gradient.
        logp_old: The same under the policy that the ratio refers to.
        advantages: One per token, or one per sequence.
        mask: 1 (or True) for tokens that count, else 0. What stands elsewhere in the other tensors has no effect, NaN
            included. All tokens count if omitted.
        method: A method of `bandpo.methods`, a clip rule alone, or a `Method` made of a rule and an objective. It may
            be given as text: ``"SAPO(1.0, 1.05)"``. By default PPO's surrogate under ``Band(KL(), 0.05)``. At the level
            ``sequence``, as in GSPO (arXiv 2507.18071), every token of a sequence has the ratio
            ``(π(y)/π_old(y))^(1/|y|)``, the geometric mean of its tokens'. ``p`` is then the geometric mean of the old
            token probabilities; as the ratio of two such means stays below ``1/p``, a band is well defined. It is
            the band of a typical token, not a trust region of the distribution over sequences.
        clip: Another name of ``method``.
        logp_anchor: Log-probabilities under the policy that the rule's bounds surround, where that is not
            ``logp_old``: the rollout engine's own, say. The new probability is then kept within
            ``[lower(p), upper(p)]·p`` of the anchor's p, while the ratio goes on to refer to ``logp_old``.
        entropy: Entropy (nats) of the policy at each token, for objectives that use it.
        weights: Importance weights ≥ 0 that multiply each token's (or sequence's) loss, as TRL's
            ``importance_sampling_ratio`` and verl's ``rollout_is_weights`` do; truncated by the caller.
        aggregation: See `aggregate`; by default what the method fixes, else ``token-mean``.
        normalizer: See `aggregate`.

    Returns:
        The loss, and metrics over counted tokens. A token is *dropped* where its weight is 0 or negative.
        ``clip_high``: share of tokens dropped with A > 0; ``clip_low``: with A < 0 and r < 1; ``dual_clip``: with A < 0
        and r > 1, as the dual clip does. ``ratio_mean``: mean ratio. ``approx_kl``: mean of ``r − 1 − log r``, an
        estimate of KL(π_old ‖ π) in nats.

    Raises:
        TypeError: a tensor is not floating-point, or ``method`` is none.
        ValueError: a tensor is refused, see `bandpo.batch.Batch.read`; the mask counts no token; a text cannot be
            read; both ``method`` and ``clip`` are given. (Values are read on the CPU only.)

    >>> logp = torch.tensor([[0.2, 0.5]]).log().requires_grad_()
    >>> loss, metrics = policy_loss(logp, torch.tensor([[0.08, 0.5]]).log(), torch.tensor([1.0]), clip=FixedClip())
    >>> loss.backward()
    >>> logp.grad, metrics["clip_high"]
    (tensor([[-0.0000, -0.5000]]), tensor(0.5000))
    """
    chosen = as_method(method, clip)
    batch = Batch.read(
        logp, logp_old, advantages, mask, logp_anchor=logp_anchor, entropy=entropy, weights=weights
    )
    advantages, mask = batch.advantages, batch.mask
    if _checks.values_can_be_read(mask) and not mask.any():
        raise InvalidValue("mask counts no token (it is 0 everywhere); drop such a batch before the loss")
    with torch.no_grad():
        tokens = batch.tokens(chosen.clip, chosen.level)
        weight, value = chosen.objective.weight(tokens), chosen.objective.value(tokens)
    # Where the mask is 0 the advantage is 0 too, and so are value and slope.
    with_slope: Callable[[Tensor, Tensor, Tensor], Tensor] = _WithSlope.apply  # pyright: ignore
    values = with_slope(_checks.as_float("logp", logp), -advantages * value, -advantages * weight)
    loss = _aggregate(values, mask, aggregation or chosen.aggregation or "token-mean", normalizer)

    with torch.no_grad():
        count, dropped = mask.sum(), weight <= 0
        positive, negative = dropped & (advantages > 0), dropped & (advantages < 0)
        risen = negative & (tokens.log_ratio_anchor > 0)
        metrics = {
            "clip_high": positive.count_nonzero() / count,
            "clip_low": (negative.count_nonzero() - risen.count_nonzero()) / count,
            "dual_clip": risen.count_nonzero() / count,
            "ratio_mean": (tokens.ratio * mask).sum() / count,
            "approx_kl": ((tokens.ratio - 1 - tokens.log_ratio) * mask).sum() / count,
        }
    return LossOutputs(loss, metrics)
