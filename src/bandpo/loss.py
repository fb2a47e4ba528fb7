"""The clipped policy-gradient loss, for any clip rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch.autograd.function import once_differentiable

from bandpo import _checks
from bandpo.batch import Level, Tokens
from bandpo.errors import InvalidValue
from bandpo.methods import Method
from bandpo.objectives import Objective
from bandpo.rules import ClipRule
from bandpo.text import as_parts

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
    clip: ClipRule | str | None = None,
    objective: Objective | str | None = None,
    level: Level | None = None,
    logp_anchor: Float[Tensor, "batch time"] | None = None,
    entropy: Float[Tensor, "batch time"] | None = None,
    weights: Float[Tensor, "batch time"] | Float[Tensor, " batch"] | None = None,
    dual_clip: float | None = None,
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
        method: A method of `bandpo.methods`, or a clip rule, in place of ``clip``, ``objective`` and ``level``. Like
            every rule and objective here it may be given as text: ``"SAPO(1.0, 1.05)"``.
        clip: The clip rule; ``Band(KL(), 0.05)`` by default.
        objective: What the loss makes of the rule, see `bandpo.objectives`; `Surrogate` by default.
        level: ``token``, or ``sequence`` for GSPO (arXiv 2507.18071): every token of a sequence has the ratio
            ``(π(y)/π_old(y))^(1/|y|)``, the geometric mean of its tokens'. ``p`` is then the geometric mean of the old
            token probabilities; as the ratio of two such means stays below ``1/p``, a band is well defined. It is
            the band of a typical token, not a trust region of the distribution over sequences.
        logp_anchor: Log-probabilities under the policy that the rule's bounds surround, where that is not
            ``logp_old``: the rollout engine's own, say. The new probability is then kept within
            ``[lower(p), upper(p)]·p`` of the anchor's p, while the ratio goes on to refer to ``logp_old``.
        entropy: Entropy (nats) of the policy at each token, for objectives that use it.
        weights: Importance weights ≥ 0 that multiply each token's (or sequence's) loss, as TRL's
            ``importance_sampling_ratio`` and verl's ``rollout_is_weights`` do; truncated by the caller.
        dual_clip: If given, c > 1: the objective is put into `DualClip(c, ...)`.
        aggregation: See `aggregate`; by default what the method's paper fixes, else ``token-mean``.
        normalizer: See `aggregate`.

    Returns:
        The loss, and metrics over counted tokens. A token is *dropped* where its weight is 0 or negative.
        ``clip_high``: share of tokens dropped with A > 0; ``clip_low``: with A < 0 and r < 1; ``dual_clip``: with A < 0
        and r > 1, as the dual clip does. ``ratio_mean``: mean ratio. ``approx_kl``: mean of ``r − 1 − log r``, an
        estimate of KL(π_old ‖ π) in nats.

    Raises:
        TypeError: a tensor is not floating-point, or ``clip``, ``objective`` or ``method`` is none.
        ValueError: shapes differ. The mask counts no token, or holds another value than 0 and 1. A counted
            log-probability is NaN, infinite or above 0. A weight is negative or NaN. ``dual_clip`` ≤ 1. ``level`` is
            unknown. A text cannot be read. ``method`` stands beside what it fixes. (Values are read on the CPU only;
            on an accelerator they turn the loss NaN.)

    >>> logp = torch.tensor([[0.2, 0.5]]).log().requires_grad_()
    >>> loss, metrics = policy_loss(logp, torch.tensor([[0.08, 0.5]]).log(), torch.tensor([1.0]), clip=FixedClip())
    >>> loss.backward()
    >>> logp.grad, metrics["clip_high"]
    (tensor([[-0.0000, -0.5000]]), tensor(0.5000))
    """
    parts = as_parts(method, clip=clip, objective=objective, level=level, dual_clip=dual_clip)
    mask = _full_mask(logp, mask)
    padding = mask == 0
    counted, logp_old = (
        _counted_logp(name, x, padding) for name, x in (("logp", logp.detach()), ("logp_old", logp_old))
    )
    advantages = _per_token("advantages", advantages, padding)
    if weights is not None:
        advantages = advantages * _checked_weights(_per_token("weights", weights, padding))
    if logp_anchor is not None:
        logp_anchor = _counted_logp("logp_anchor", logp_anchor, padding)
    if entropy is not None:
        entropy = _per_token("entropy", entropy, padding)
    with torch.no_grad():
        tokens = Tokens.build(
            counted,
            logp_old,
            advantages,
            mask,
            rule=parts.clip,
            level=parts.level,
            logp_anchor=logp_anchor,
            entropy=entropy,
        )
        weight, value = parts.objective.weight(tokens), parts.objective.value(tokens)
    # Where the mask is 0 the advantage is 0 too, and so are value and slope.
    with_slope: Callable[[Tensor, Tensor, Tensor], Tensor] = _WithSlope.apply  # pyright: ignore
    values = with_slope(_checks.as_float("logp", logp), -advantages * value, -advantages * weight)
    loss = _aggregate(values, mask, aggregation or parts.aggregation, normalizer)

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


def _full_mask(logp: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones_like(logp, dtype=torch.float32)
    if mask.shape != logp.shape:
        raise InvalidValue(
            f"mask has shape {tuple(mask.shape)}, logp {tuple(logp.shape)}; they must be equal"
        )
    if not _checks.values_can_be_read(mask):
        return (mask != 0).float()
    if not mask.any():
        raise InvalidValue("mask counts no token (it is 0 everywhere); drop such a batch before the loss")
    if mask.dtype != torch.bool and not torch.equal(mask, mask * mask):
        other = mask[mask != mask * mask][0].item()
        raise InvalidValue(
            f"mask holds {other:g}, but a token counts (1) or not (0); put shares into weights="
        )
    return mask.float()


def _counted_logp(name: str, logp: Tensor, padding: Tensor) -> Tensor:
    """Log-probabilities in at least float32, 0 where the mask is."""
    if logp.shape != padding.shape:
        raise InvalidValue(
            f"{name} has shape {tuple(logp.shape)}, logp {tuple(padding.shape)}; they must be equal"
        )
    logp = _checks.as_float(name, logp).masked_fill(padding, 0.0)
    _checks.check_logp(name, logp.detach())
    if _checks.values_can_be_read(logp) and torch.isneginf(worst := logp.min()):
        raise InvalidValue(f"{name} holds {worst.item()} at a counted token, but a sampled token has p > 0")
    return logp


def _per_token(name: str, x: Tensor, padding: Tensor) -> Tensor:
    """Advantages or weights, one per token, 0 where the mask is."""
    x = _checks.as_float(name, x)
    given = tuple(x.shape)
    if x.dim() == padding.dim() - 1:
        x = x.unsqueeze(-1)
    if x.dim() != padding.dim() or not _checks.broadcasts_to(x, padding.shape):
        raise InvalidValue(
            f"{name} of shape {given} fit neither the tokens {tuple(padding.shape)} "
            f"nor the sequences {tuple(padding.shape[:-1])}"
        )
    return x.expand_as(padding).masked_fill(padding, 0.0)


def _checked_weights(weights: Tensor) -> Tensor:
    if _checks.values_can_be_read(weights) and not weights.min() >= 0:
        raise InvalidValue(f"weights must be at least 0 at counted tokens, got {weights.min().item():g}")
    return weights
