"""The check that each row of a batch is one sequence, for methods that treat rows as sequences.

Trainers with packing put several sequences into one row. Without a layout, a sequence's ratio, mean or sum would then
be computed over several sequences. A row is plainly packed if its advantages are constant over sequences: they change
within the row, but not at most of its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .errors import InvalidValue

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from .batch import Batch

REMEDY = (
    "If it holds several sequences, pass layout=Packed(segments=…), with the index of each token's sequence, or "
    "layout=Packed(cu_seqlens=…)"
)


class _Pairs(NamedTuple):
    """All pairs of neighbouring counted tokens in the rows of a batch."""

    row: Int[Tensor, " pairs"]
    """The row of the pair."""
    token: Int[Tensor, " pairs"]
    """The position of the second token."""
    before: Float[Tensor, " pairs"]
    """The advantage of the first token."""
    after: Float[Tensor, " pairs"]
    """The advantage of the second token."""

    @property
    def changed(self) -> Bool[Tensor, " pairs"]:
        """True if the two advantages differ."""
        return self.before != self.after


def check_rows(batch: Batch, has_sequence_level: bool, reason: str | None) -> None:
    """Raise ValueError if a row plainly holds several sequences and the method takes each row for one.

    At the level ``sequence`` that is a row whose advantages change among its counted tokens. For other methods it is a
    row whose advantages change, but are equal between at least half of its neighbouring counted tokens.

    Nothing is checked if the caller gave a layout, if advantages are one per sequence, on an accelerator, or under
    ``torch.compile``.

    Args:
        batch: The batch.
        has_sequence_level: True if the method's ratio or its bounds are at the level ``sequence``.
        reason: The part of the method that takes a row for one sequence; None if there is none.

    Raises:
        ValueError: if a row plainly holds several sequences.
    """
    if not batch.rows_assumed or not (has_sequence_level or reason):
        return
    # Most batches have one advantage per row, which a few operations show.
    if not _any_changes(batch.advantages, batch.mask):
        return
    pairs = _pairs(batch.advantages, batch.mask)
    if has_sequence_level:
        _refuse_change(pairs)
    else:
        _refuse_runs(pairs, str(reason))


def _any_changes(advantages: Tensor, mask: Tensor) -> bool:
    """Return True if the advantages change among the counted tokens of some row."""
    first = advantages.gather(-1, mask.argmax(-1, keepdim=True))
    return bool(((advantages != first) & (mask != 0)).any())


def _pairs(advantages: Tensor, mask: Tensor) -> _Pairs:
    """Return the neighbouring counted tokens of each row. Padding between two counted tokens is skipped."""
    # A one-dimensional batch is one row.
    width = mask.shape[-1]
    counted = mask.flatten().nonzero().squeeze(-1)
    values = advantages.flatten()[counted]
    row = torch.div(counted, width, rounding_mode="floor")
    pairs = (row[1:] == row[:-1]).nonzero().squeeze(-1)
    return _Pairs(row[pairs], counted[pairs + 1] % width, values[pairs], values[pairs + 1])


def _refuse_change(pairs: _Pairs) -> None:
    """Raise ValueError for the first row whose advantages change."""
    first = int(pairs.changed.nonzero()[0])
    raise InvalidValue(
        f"the advantages of row {int(pairs.row[first])} {_describe_change(pairs, first)}, but the level 'sequence' "
        f"takes a row for one sequence with one ratio and one advantage. {REMEDY}. If each row is one sequence whose "
        "advantages change from token to token, pass layout=Rows()"
    )


def _refuse_runs(pairs: _Pairs, reason: str) -> None:
    """Raise ValueError for the first row whose advantages change but are equal between half of its pairs or more."""
    rows = int(pairs.row[-1]) + 1
    changes = torch.bincount(pairs.row, weights=pairs.changed.double(), minlength=rows)
    neighbours = torch.bincount(pairs.row, minlength=rows)
    looks_packed = (changes > 0) & (2 * changes <= neighbours)
    if not looks_packed.any():
        return
    row = int(looks_packed.nonzero()[0])
    first = int((pairs.changed & (pairs.row == row)).nonzero()[0])
    raise InvalidValue(
        f"row {row} looks packed: its advantages {_describe_change(pairs, first)} and are equal between at least half "
        f"of its neighbouring tokens, but {reason} takes a row for one sequence. {REMEDY}. If each row is one sequence "
        "whose advantages change at some tokens, as with process rewards, pass layout=Rows()"
    )


def _describe_change(pairs: _Pairs, pair: int) -> str:
    """Describe the change of the advantages in a pair, for an error."""
    return f"change from {pairs.before[pair]:g} to {pairs.after[pair]:g} at token {int(pairs.token[pair])}"
