"""The aggregation of per-token values to one number, under the names that verl and TRL have for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import _checks
from .errors import InvalidValue
from .layout import Packed, Rows, read_layout
from .sequences import Sequences, part_sums

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = ["aggregate"]

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "sum")

TRL_LOSS_TYPES = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}
"""The aggregation that each TRL ``loss_type`` stands for (``dapo`` normalizes by the tokens of the global batch)."""


def aggregate(
    values: Float[Tensor, "batch time"],
    mask: Float[Tensor, "batch time"],
    aggregation: str = "token-mean",
    *,
    normalizer: float | Tensor | None = None,
    layout: Rows | Packed | None = None,
) -> Float[Tensor, ""]:
    """Reduce per-token values to a scalar, as verl's ``loss_agg_mode`` or TRL's ``loss_type`` of the same name.

    The two frameworks treat sequences without a counted token differently: under verl's names a mean over sequences
    leaves them out, under TRL's names it counts them as 0.

    Args:
        values: Per-token values, (batch, time).
        mask: 1 for tokens that count, 0 for padding. Values in the padding are ignored and may be NaN.
        aggregation: ``token-mean`` (TRL ``bnpo``, ``dapo``), ``seq-mean-token-mean`` (TRL ``grpo``),
            ``seq-mean-token-sum`` (TRL ``luspo``), ``seq-mean-token-sum-norm`` (TRL ``dr_grpo``), or ``sum``.
        normalizer: Denominator that replaces the batch's own: a number or a 0-dimensional tensor, whose value is
            checked on the CPU only. For ``token-mean`` and ``sum`` it is a number of tokens, such as that of the global
            batch. For ``seq-mean-token-mean`` and ``seq-mean-token-sum`` it is a number of sequences. For
            ``seq-mean-token-sum-norm``, which requires it, it is the maximal completion length.
        layout: The layout of the batch, as for `policy_loss`.

    Returns:
        A scalar that is differentiable with respect to ``values``.

    Raises:
        ValueError: if the aggregation is unknown, a normalizer is missing or not above 0, or the layout does not fit
            the batch.

    >>> values, mask = torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    >>> aggregate(values, mask, "token-mean"), aggregate(values, mask, "seq-mean-token-mean")
    (tensor(3.), tensor(3.5000))
    """
    dense = read_layout({"values": values, "mask": mask}, layout)
    values = dense.tensors["values"]
    mask = dense.tensors["mask"]
    sequences = Sequences.read(mask.float(), dense.layout)
    return aggregate_sequences(values.masked_fill(mask == 0, 0.0), sequences, aggregation, normalizer)


def aggregate_sequences(
    values: Tensor, sequences: Sequences, aggregation: str, normalizer: float | Tensor | None
) -> Tensor:
    """Reduce per-token values, which must be 0 in the padding, to a scalar; see `aggregate`."""
    mode = canonical_aggregation(aggregation)
    if normalizer is not None:
        _check_normalizer(normalizer)

    if mode in ("sum", "token-mean"):
        total = part_sums(values).sum()
        if normalizer is None:
            normalizer = sequences.count_tokens.clamp(min=1.0) if mode == "token-mean" else 1.0
        return total / normalizer

    per_sequence = sequences.sum(values)
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
        # TRL's means count sequences without a counted token, verl's do not.
        if aggregation in TRL_LOSS_TYPES:
            normalizer = sequences.number_with_empty
        else:
            normalizer = (length > 0).sum().clamp(min=1)
    return (total / normalizer).to(values.dtype)


def aggregation_weights(
    sequences: Sequences,
    aggregation: str,
    normalizer: float | Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "batch time"]:
    """Compute the weight of each token's loss in `aggregate`, which is linear: its derivative.

    Args:
        sequences: The sequences of the batch.
        aggregation: See `aggregate`.
        normalizer: See `aggregate`.
        dtype: The dtype of the result.
    """
    with torch.enable_grad():
        losses = torch.zeros_like(sequences.mask, dtype=dtype, requires_grad=True)
        counted_losses = losses.masked_fill(sequences.mask == 0, 0.0)
        total = aggregate_sequences(counted_losses, sequences, aggregation, normalizer)
        return torch.autograd.grad(total, losses)[0]


def canonical_aggregation(aggregation: str) -> str:
    """Return the name in `AGGREGATIONS` of an aggregation that is named as in verl or as in TRL.

    Raises:
        ValueError: if there is no such aggregation.
    """
    mode = TRL_LOSS_TYPES.get(aggregation, aggregation)
    if mode not in AGGREGATIONS:
        names = ", ".join([*AGGREGATIONS, *TRL_LOSS_TYPES])
        raise InvalidValue(f"unknown aggregation {aggregation!r}; known are {names}")
    return mode


def _check_normalizer(normalizer: float | Tensor) -> None:
    """Raise ValueError unless the normalizer is a number above 0; a tensor's value is read on the CPU only."""
    if isinstance(normalizer, torch.Tensor):
        if normalizer.dim():
            raise InvalidValue(f"normalizer must be one number, got shape {tuple(normalizer.shape)}")
        if _checks.values_can_be_read(normalizer):
            _checks.positive("normalizer", float(normalizer))
    else:
        _checks.positive("normalizer", normalizer)
