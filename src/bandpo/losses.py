# pyright: reportUnnecessaryIsInstance=false, reportUnnecessaryComparison=false
"""The clipped policy-gradient loss, for any clip rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch

from bandpo import _checks
from bandpo.clipping import Band, ClipRule
from bandpo.objectives import Objective, Surrogate

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "sum"
]

Level = Literal["token", "sequence"]

# Here, because older compilers break the graph at get_args.
AGGREGATIONS, LEVELS = get_args(Aggregation), get_args(Level)

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
        raise ValueError(f"unknown aggregation {aggregation!r}; known are {known}")
    if normalizer is not None:
        if mode not in ("token-mean", "seq-mean-token-sum-norm"):
            raise ValueError(f"aggregation {aggregation!r} takes no normalizer, got {normalizer!r}")
        _checks.positive("normalizer", normalizer)
    if mode == "sum":
        return kept.sum()
    if mode == "token-mean":
        return kept.sum() / (mask.sum().clamp(min=1.0) if normalizer is None else normalizer)
    per_sequence = kept.sum(-1)
    if mode == "seq-mean-token-mean":
        per_sequence = per_sequence / mask.sum(-1).clamp(min=1.0)
    elif mode == "seq-mean-token-sum-norm":
        if normalizer is None:
            raise ValueError(f"aggregation {aggregation!r} needs normalizer=<maximal completion length>")
        per_sequence = per_sequence / normalizer
    return per_sequence.mean()


class _WithSlope(torch.autograd.Function):
    """Values whose derivative by ``x`` is known when they are: one buffer waits for the backward pass, no graph."""

    @staticmethod
    def forward(x: Tensor, values: Tensor, slope: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return grad_outputs[0] * ctx.saved_tensors[0], None, None


class Judged(NamedTuple):
    """What a rule says of each token."""

    logp_anchor: Float[Tensor, "batch time"]
    """The log-probability that the rule's bounds belong to."""
    log_ratio: Float[Tensor, "batch time"]
    ratio: Float[Tensor, "batch time"]
    """``π/π_old``, of the token or of its sequence; finite."""
    clipped: Float[Tensor, "batch time"]
    """The ratio after the rule."""
    below: Bool[Tensor, "batch time"]
    above: Bool[Tensor, "batch time"]
    low: Bool[Tensor, "batch time"]
    """Below, with a negative advantage."""
    high: Bool[Tensor, "batch time"]
    """Above, with a positive advantage."""

    def apply(self, of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Float[Tensor, "batch time"]:
        """`Objective.weight` or `Objective.value` of these tokens."""
        return of(self.ratio, self.clipped, self.low | self.high)


@torch.no_grad()
def judge(
    logp: Float[Tensor, "batch time"],
    logp_old: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    *,
    clip: ClipRule,
    objective: Objective = Surrogate(),
    level: str = "token",
    logp_anchor: Float[Tensor, "batch time"] | None = None,
) -> Judged:
    """The part of `policy_loss` before any averaging; its arguments, with log-probabilities finite everywhere."""
    anchor = logp_old if logp_anchor is None else logp_anchor
    now, before, anchor = (at_level(x, mask, level) for x in (logp, logp_old, anchor))
    log_ratio = now - before
    # The rule compares the token's probability with the anchor's; the ratio that it leaves is to the old one.
    to_anchor = log_ratio if logp_anchor is None else now - anchor
    clipped_log_ratio, below, above = objective.clip(clip, to_anchor, anchor)
    largest = torch.finfo(log_ratio.dtype).max  # so that a weight of 0 times the ratio is 0
    ratio = log_ratio.exp().clamp(max=largest)
    if clipped_log_ratio is to_anchor:  # as Band leaves it
        clipped = ratio
    else:
        clipped = (clipped_log_ratio + (anchor - before)).exp().clamp(max=largest)
    return Judged(
        anchor,
        log_ratio,
        ratio,
        clipped,
        below,
        above,
        below & (advantages < 0),
        above & (advantages > 0),
    )


def policy_loss(
    logp: Float[Tensor, "batch time"],
    logp_old: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"] | Float[Tensor, " batch"],
    mask: Tensor | None = None,
    *,
    clip: ClipRule = Band(),
    objective: Objective = Surrogate(),
    level: Level = "token",
    logp_anchor: Float[Tensor, "batch time"] | None = None,
    weights: Float[Tensor, "batch time"] | Float[Tensor, " batch"] | None = None,
    dual_clip: float | None = None,
    aggregation: str = "token-mean",
    normalizer: float | None = None,
) -> LossOutputs:
    """PPO's surrogate ``−min(r·A, clip(r)·A)`` with any clip rule, or another objective, averaged over tokens.

    A token's gradient is ``−w·A·∇logp``, where the objective gives the weight ``w``: ``r``, or 0 where the rule puts
    ``r`` outside on the side that ``A`` pushes to. That is all a backward pass needs, so everything else is computed
    without autograd, and `Band` decides membership without solving for its bounds. (The reported *value* of a token
    that `Band` clips is therefore ``−r·A``, as for an unclipped one; its gradient is 0. Other rules report
    ``−clip(r)·A``.)

    All log-probabilities must be those of the distribution that was sampled from: divided by the sampling
    temperature, and normalised over the full vocabulary. A band computed from another p is another band.

    Args:
        logp: Log-probabilities (nats) of the sampled tokens under the policy in training; carries the gradient.
        logp_old: The same under the policy that the ratio refers to.
        advantages: One per token, or one per sequence.
        mask: 1 (or True) for tokens that count. What stands elsewhere in the other tensors has no effect, NaN
            included. All tokens count if omitted.
        clip: The clip rule.
        objective: What becomes of clipped tokens, see `bandpo.objectives`.
        level: ``token``, or ``sequence`` for GSPO (arXiv 2507.18071): every token of a sequence has the ratio
            ``(π(y)/π_old(y))^(1/|y|)``, the geometric mean of its tokens'. ``p`` is then the geometric mean of the old
            token probabilities; as the ratio of two such means stays below ``1/p``, a band is well defined. It is
            the band of a typical token, not a trust region of the distribution over sequences.
        logp_anchor: Log-probabilities under the policy that the rule's bounds surround, where that is not
            ``logp_old``: the rollout engine's own, say. The new probability is then kept within
            ``[lower(p), upper(p)]·p`` of the anchor's p, while the ratio goes on to refer to ``logp_old``.
        weights: Importance weights ≥ 0 that multiply each token's (or sequence's) loss, as TRL's
            ``importance_sampling_ratio`` and verl's ``rollout_is_weights`` do; truncated by the caller.
        dual_clip: If given, c > 1: tokens with ``A < 0`` and ``r > c`` get no gradient and the loss ``−c·A`` (Ye et
            al., arXiv 1912.09729).
        aggregation: See `aggregate`.
        normalizer: See `aggregate`.

    Returns:
        The loss, and metrics over counted tokens: ``clip_high`` and ``clip_low`` (share of tokens that lie outside
        the rule's upper or lower side and are pushed further by their advantage: `Surrogate` drops their gradient),
        ``dual_clip`` (share that the dual clip alone drops), ``ratio_mean``, and ``approx_kl`` (mean of
        ``r − 1 − log r``, an estimate of KL(π_old ‖ π) in nats).

    Raises:
        TypeError: a tensor is not floating-point, or ``clip`` or ``objective`` is none.
        ValueError: shapes differ, the mask counts no token, a counted log-probability is NaN, infinite or above 0,
            a weight is negative or NaN, ``dual_clip`` ≤ 1, or ``level`` is unknown. (Values are read on the CPU
            only; on an accelerator they turn the loss NaN.)

    >>> logp = torch.tensor([[0.2, 0.5]]).log().requires_grad_()
    >>> loss, metrics = policy_loss(logp, torch.tensor([[0.08, 0.5]]).log(), torch.tensor([1.0]), clip=FixedClip())
    >>> loss.backward()
    >>> logp.grad, metrics["clip_high"]
    (tensor([[-0.0000, -0.5000]]), tensor(0.5000))
    """
    mask = _full_mask(logp, mask)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip!r}")
    if not isinstance(clip, ClipRule):
        raise TypeError(f"clip must be a ClipRule such as Band(KL(), 0.05), got {clip!r}")
    if not isinstance(objective, Objective):
        raise TypeError(f"objective must be an Objective such as Surrogate(), got {objective!r}")
    counted, logp_old = (
        _counted_logp(name, x, mask) for name, x in (("logp", logp.detach()), ("logp_old", logp_old))
    )
    advantages = _per_token("advantages", advantages, mask)
    if weights is not None:
        advantages = advantages * _checked_weights(_per_token("weights", weights, mask))

    if logp_anchor is not None:
        logp_anchor = _counted_logp("logp_anchor", logp_anchor, mask)
    judged = judge(
        counted,
        logp_old,
        advantages,
        mask,
        clip=clip,
        objective=objective,
        level=level,
        logp_anchor=logp_anchor,
    )
    log_ratio, ratio, low, high = judged.log_ratio, judged.ratio, judged.low, judged.high
    with torch.no_grad():
        weight, value = judged.apply(objective.weight), judged.apply(objective.value)
        dual = torch.zeros_like(low)
        if dual_clip is not None:
            dual = (advantages < 0) & (ratio > dual_clip)
            weight, value = weight.masked_fill(dual, 0.0), value.masked_fill(dual, dual_clip)
    # Where the mask is 0 the advantage is, and so are value and slope.
    with_slope: Callable[[Tensor, Tensor, Tensor], Tensor] = _WithSlope.apply  # pyright: ignore
    values = with_slope(_checks.as_float("logp", logp), -advantages * value, -advantages * weight)
    loss = _aggregate(values, mask, aggregation, normalizer)

    with torch.no_grad():
        tokens = mask.sum()
        metrics = {
            "clip_high": (high * mask).sum() / tokens,
            "clip_low": (low * mask).sum() / tokens,
            "dual_clip": (dual & ~(low | high)).mul(mask).sum() / tokens,
            "ratio_mean": (ratio * mask).sum() / tokens,
            "approx_kl": ((ratio - 1 - log_ratio) * mask).sum() / tokens,
        }
    return LossOutputs(loss, metrics)


def at_level(
    logp: Float[Tensor, "batch time"], mask: Float[Tensor, "batch time"], level: str
) -> Float[Tensor, "batch time"]:
    """Log-probabilities at the level that ratios are formed on.

    ``token`` leaves them alone; ``sequence`` gives every token its sequence's mean over counted tokens, the logarithm
    of the geometric mean probability.

    Raises:
        ValueError: another level.

    >>> at_level(torch.tensor([[-1.0, -3.0, -9.0]]), torch.tensor([[1.0, 1.0, 0.0]]), "sequence")
    tensor([[-2., -2., -2.]])
    """
    if level not in LEVELS:
        raise ValueError(f"level must be 'token' or 'sequence', got {level!r}")
    if level == "token":
        return logp
    mean = (logp * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)
    return mean.expand_as(logp).contiguous()


def _full_mask(logp: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones_like(logp, dtype=torch.float32)
    if mask.shape != logp.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, logp {tuple(logp.shape)}; they must be equal")
    if _checks.values_can_be_read(mask) and not mask.any():
        raise ValueError("mask counts no token (it is 0 everywhere); drop such a batch before the loss")
    return mask.float()


def _counted_logp(name: str, logp: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities in at least float32, 0 where the mask is."""
    if logp.shape != mask.shape:
        raise ValueError(
            f"{name} has shape {tuple(logp.shape)}, logp {tuple(mask.shape)}; they must be equal"
        )
    logp = _checks.as_float(name, logp).masked_fill(mask == 0, 0.0)
    _checks.check_logp(name, logp.detach())
    if _checks.values_can_be_read(logp) and torch.isneginf(worst := logp.min()):
        raise ValueError(f"{name} holds {worst.item()} at a counted token, but a sampled token has p > 0")
    return logp


def _per_token(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """Advantages or weights, one per token, 0 where the mask is."""
    x = _checks.as_float(name, x)
    given = tuple(x.shape)
    if x.dim() == mask.dim() - 1:
        x = x.unsqueeze(-1)
    if x.dim() != mask.dim() or not _checks.broadcasts_to(x, mask.shape):
        raise ValueError(
            f"{name} of shape {given} fit neither the tokens {tuple(mask.shape)} "
            f"nor the sequences {tuple(mask.shape[:-1])}"
        )
    return x.expand_as(mask).masked_fill(mask == 0, 0.0)


def _checked_weights(weights: Tensor) -> Tensor:
    if _checks.values_can_be_read(weights) and not weights.min() >= 0:
        raise ValueError(f"weights must be at least 0 at counted tokens, got {weights.min().item():g}")
    return weights
