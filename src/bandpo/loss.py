"""The clipped policy-gradient loss, for any clip rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from bandpo import _checks
from bandpo._packed import check_unpacked
from bandpo.batch import Batch
from bandpo.errors import InvalidValue
from bandpo.methods import Method
from bandpo.rules import ClipRule
from bandpo.schedules import TrainingState
from bandpo.sequences import Sequences, as_row, read_layout
from bandpo.text import as_method

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["LossOutputs", "aggregate", "policy_loss"]

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "sum")

TRL_LOSS_TYPES = {
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
    normalizer: float | Tensor | None = None,
    segments: Int[Tensor, "batch time"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
) -> Float[Tensor, ""]:
    """Reduce per-token values to one number, as verl's ``loss_agg_mode`` or TRL's ``loss_type`` of that name does.

    The two differ in sequences without a counted token: a mean over sequences leaves them out under verl's names and
    counts them as 0 under TRL's.

    Args:
        values: Per-token values.
        mask: 1 for tokens that count, 0 for the others (whose value may be anything, NaN included).
        aggregation: ``token-mean`` (TRL ``bnpo``, ``dapo``), ``seq-mean-token-mean`` (TRL ``grpo``),
            ``seq-mean-token-sum`` (TRL ``luspo``), ``seq-mean-token-sum-norm`` (TRL ``dr_grpo``), or ``sum``.
        normalizer: Denominator in place of the batch's own; a number, or a tensor of no dimension, which is not read.
            For ``token-mean`` and ``sum`` the number of tokens (of the global batch, say); for ``seq-mean-token-mean``
            and ``seq-mean-token-sum`` the number of sequences; for ``seq-mean-token-sum-norm``, where it is required,
            the maximal completion length.
        segments: In a packed batch the number of each token's sequence, see `policy_loss`.
        cu_seqlens: In a packed batch where each sequence begins, see `policy_loss`.

    Raises:
        ValueError: unknown aggregation, a normalizer missing or not above 0, or sequences that cannot be as given.

    >>> values, mask = torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    >>> aggregate(values, mask, "token-mean"), aggregate(values, mask, "seq-mean-token-mean")
    (tensor(3.), tensor(3.5000))
    """
    layout = read_layout({"values": values, "mask": mask}, segments, cu_seqlens)
    values, mask = layout.tensors["values"], layout.tensors["mask"]
    sequences = Sequences.read(mask.float(), segments=layout.segments, cu_seqlens=layout.cu_seqlens)
    return _aggregate(values.masked_fill(mask == 0, 0.0), sequences, aggregation, normalizer)


def _aggregate(
    kept: Tensor, sequences: Sequences, aggregation: str, normalizer: float | Tensor | None
) -> Tensor:
    """Reduce values that are 0 where the mask is, see `aggregate`."""
    mode = known_aggregation(aggregation)
    if normalizer is not None:
        _check_normalizer(normalizer)
    if mode in ("sum", "token-mean"):
        # A compiler makes one pass of sums of rows, and not of the sum of all.
        count = sequences.mask.sum(-1).sum().clamp(min=1.0) if mode == "token-mean" else 1.0
        return kept.sum(-1).sum() / (count if normalizer is None else normalizer)

    per_sequence = sequences.sum(kept)
    length = sequences.length
    if mode == "seq-mean-token-mean":
        per_sequence = per_sequence / length.clamp(min=1.0)
    elif mode == "seq-mean-token-sum-norm":
        if normalizer is None:
            raise InvalidValue(f"aggregation {aggregation!r} needs normalizer=<maximal completion length>")
        per_sequence = per_sequence / normalizer
        normalizer = None

    total = per_sequence.sum()
    if normalizer is None:
        # TRL's averages count sequences without a counted token, verl's do not.
        if aggregation in TRL_LOSS_TYPES:
            normalizer = sequences.number_with_empty
        else:
            normalizer = (length > 0).sum().clamp(min=1)
    return (total / normalizer).to(kept.dtype)


def average_share(
    sequences: Sequences,
    aggregation: str,
    normalizer: float | Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "batch time"]:
    """Compute what each token's loss counts for: the derivative of `aggregate`, which is linear."""
    with torch.enable_grad():
        losses = torch.zeros_like(sequences.mask, dtype=dtype, requires_grad=True)
        kept = losses.masked_fill(sequences.mask == 0, 0.0)
        return torch.autograd.grad(_aggregate(kept, sequences, aggregation, normalizer), losses)[0]


def known_aggregation(aggregation: str) -> str:
    """The name of an aggregation that is not TRL's alone; refused if there is none of that name."""
    mode = TRL_LOSS_TYPES.get(aggregation, aggregation)
    if mode not in AGGREGATIONS:
        known = ", ".join([*AGGREGATIONS, *TRL_LOSS_TYPES])
        raise InvalidValue(f"unknown aggregation {aggregation!r}; known are {known}")
    return mode


def _check_normalizer(normalizer: float | Tensor) -> None:
    if isinstance(normalizer, torch.Tensor):
        if normalizer.dim():
            raise InvalidValue(f"normalizer must be one number, got shape {tuple(normalizer.shape)}")
        if _checks.values_can_be_read(normalizer):
            _checks.positive("normalizer", float(normalizer))
    else:
        _checks.positive("normalizer", normalizer)


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


def with_slope(x: Tensor, values: Tensor, slope: Tensor) -> Tensor:
    """``values``, whose derivative by ``x`` is ``slope``."""
    apply: Callable[[Tensor, Tensor, Tensor], Tensor] = _WithSlope.apply  # pyright: ignore
    return apply(x, values, slope)


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
    """The policy-gradient loss of any method: any clip rule, any objective, averaged over tokens.

    By default PPO's surrogate ``−min(r·A, clip(r)·A)`` under `Band`. A token's gradient is ``−(w·A + b)·∇logp``, where
    the objective gives the weight ``w`` and the bias ``b``, 0 for most. A backward pass needs no more, so the rest is
    computed without autograd, and bounds are solved for only where the weight needs them. (A clipped token reports
    ``−clip(r)·A``; where its bound has to be solved for, ``−min(r, max_ratio)·A``. Its gradient is 0.)

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
        logp_anchor: Log-probabilities under the policy that the rule's bounds surround, where that is not
            ``logp_old``: the rollout engine's own, say. The new probability is then kept within
            ``[lower(p), upper(p)]·p`` of the anchor's p, while the ratio goes on to refer to ``logp_old``.
        entropy: Entropy (nats) of the policy at each token, for objectives that use it.
        weights: Importance weights ≥ 0 that multiply each token's (or sequence's) loss, as TRL's
            ``importance_sampling_ratio`` and verl's ``rollout_is_weights`` do; truncated by the caller. VESPO has them
            within its own weight.
        state: What else rules and objectives may depend on: a schedule on the progress, say.
        aggregation: See `aggregate`; by default what the method fixes, else ``token-mean``. Or a function that reduces
            the losses of the tokens, (batch, time), to one number.
        normalizer: See `aggregate`.
        segments: In a packed batch, the number of each token's sequence, from 0, of the shape of ``logp``; below 0 for
            tokens of none. With Hugging Face's ``position_ids``: ``(position_ids == 0).cumsum(-1) - 1``.
        cu_seqlens: In a packed batch, where each sequence begins among the flattened tokens, and where the last one
            ends, as for FlashAttention's kernels. Jagged nested tensors need neither.
        packed: False says that each row is one sequence, whatever its advantages: give it for process rewards, or for
            the advantages of a critic at the level ``sequence``. If omitted, and neither ``segments`` nor
            ``cu_seqlens`` is given, rows are checked where the method looks at sequences. At the level ``sequence`` (of
            the ratio or of its bound) a row is refused if its advantages change among counted tokens. Under an average
            over sequences, an objective with ``whole_sequence``, or a number that depends on the position or the
            length, a row is refused if its advantages change, and are equal between at least half of its neighbouring
            counted tokens. So are those of packed sequences, but not those of a critic. Values are read on the CPU
            only, and only where advantages are one per token. Packed sequences that all have the same advantage are not
            noticed.

    A packed batch holds several sequences in a row: tensors are of the shape (1, tokens), (tokens,) or (batch, time),
    or jagged; advantages and weights are one per token, or of the shape (sequences,). Loss, gradient and metrics are
    those of the padded batch.

    Returns:
        The loss, and metrics over counted tokens. Where no token counts the loss is 0, with a gradient of 0, and the
        metrics are NaN. A token is *dropped* where its weight is 0 or negative.
        ``clip_high``: share of tokens dropped with A > 0; ``clip_low``: with A < 0 and r < 1; ``dual_clip``: with A < 0
        and r > 1, as the dual clip does. ``ratio_mean``: mean ratio. ``approx_kl``: mean of ``r − 1 − log r``, an
        estimate of KL(π_old ‖ π) in nats; token by token at any level.

    Raises:
        TypeError: a tensor is not floating-point, or ``method`` is none.
        ValueError: a tensor is refused, see `bandpo.batch.Batch.read`; a row holds several sequences, see ``packed``;
            a text cannot be read; a number of the method depends on what ``state`` lacks.

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
    average = aggregation or chosen.aggregation or "token-mean"
    check_unpacked(batch, advantages, chosen, None if callable(average) else average, packed)
    advantages, mask = batch.advantages, batch.mask
    if batch.sequences.packed:
        logp = as_row(logp)
    with torch.no_grad():
        tokens = chosen.tokens(batch)
        objective = chosen.objective.resolve(batch.state)
        weight = objective.weight(tokens)
        bias = objective.bias(tokens)
        regularizer = objective.regularizer(tokens)
        # The advantage is 0 in the padding, so the slope and the value are 0 there too.
        slope = -advantages * weight
        value = -advantages * objective.surrogate(tokens)
        if bias is not None:
            slope = slope - bias * mask
        if regularizer is not None:
            value = value + regularizer * mask
        token_weights = batch.token_weights
        if token_weights is not None and not objective.weights_inside:
            slope = slope * token_weights
            value = value * token_weights
    values = with_slope(_checks.as_float("logp", logp), value, slope)
    loss = average(values) if callable(average) else _aggregate(values, batch.sequences, average, normalizer)

    with torch.no_grad():
        count = mask.sum(-1).sum()

        def mean(x: Tensor) -> Tensor:
            return x.sum(-1).sum() / count

        # 1 where a token with A > 0 is dropped, −1 with A < 0. (Numbers and sums of rows are compiled into one pass.)
        dropped = torch.where(weight > 0, 0.0, advantages.sign())
        negative = dropped.clamp(max=0.0)
        dual = torch.where(tokens.log_ratio_anchor > 0, negative, 0.0)
        ratio = tokens.ratio if chosen.level == "token" else batch.log_ratio.exp()
        metrics = {
            "clip_high": mean(dropped.clamp(min=0.0)),
            "clip_low": mean(dual) - mean(negative),
            "dual_clip": -mean(dual),
            "ratio_mean": mean(tokens.ratio * mask),
            # 0 where the mask is, as the logarithm is.
            "approx_kl": mean(ratio - 1 - batch.log_ratio),
        }
    return LossOutputs(loss, metrics)
