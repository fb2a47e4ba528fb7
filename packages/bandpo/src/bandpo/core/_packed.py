"""The check that each row of a batch is one sequence, for methods that treat rows as sequences.

Trainers with packing put several sequences into one row. Without ``segments`` or ``cu_seqlens``, a sequence's ratio,
mean or sum would then be computed over several sequences. The advantages often reveal packed rows: they change where
the next sequence begins, and are constant within each sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from . import _checks
from .aggregation import canonical_aggregation
from .errors import InvalidValue

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from .batch import Batch
    from .methods import Method

REMEDY = "If it holds several sequences, pass segments= (the index of each token's sequence) or cu_seqlens="


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


def check_unpacked(
    batch: Batch, advantages: Tensor, method: Method, aggregation: str | None, packed: bool | None
) -> None:
    """Raise ValueError if a row seems to hold several sequences and the method takes each row for one.

    At the level ``sequence`` a row raises an error if its advantages change among counted tokens. Other methods that
    treat rows as sequences (by their aggregation, their objective, or a number that depends on position or length)
    raise an error if the advantages of a row change but are equal between at least half of its neighbouring counted
    tokens.

    No values are read if advantages are one per sequence, on an accelerator, or under ``torch.compile``.

    Args:
        batch: The batch.
        advantages: The advantages as passed by the caller: their shape shows if they can change within a row.
        method: The method.
        aggregation: The name of the aggregation; None if it is unknown or does not matter.
        packed: The caller's argument of this name, see `bandpo.policy_loss`.

    Raises:
        ValueError: if a row seems to be packed, or ``packed`` contradicts the batch.
    """
    if packed is not None and packed != batch.sequences.packed:
        if packed:
            raise InvalidValue(
                "packed=True needs segments= or cu_seqlens=, which give the sequences of a row"
            )
        raise InvalidValue("packed=False means one sequence per row: leave out segments= and cu_seqlens=")
    if packed is not None or batch.sequences.packed:
        return
    if not _checks.values_can_be_read(batch.mask) or _constant_by_shape(advantages, batch.mask):
        return
    has_sequence_level = "sequence" in (method.level, method.bound_level)
    if has_sequence_level:
        reason = "the level 'sequence'"
    else:
        reason = _reason_of_sequences(method, aggregation)
    if reason is None:
        return

    # Most batches have one advantage per row, which a few operations show.
    if not _any_changes(batch.advantages, batch.mask):
        return
    pairs = _pairs(batch.advantages, batch.mask)
    if has_sequence_level:
        _refuse_change(pairs)
    else:
        _refuse_runs(pairs, reason)


def _constant_by_shape(advantages: Tensor, mask: Tensor) -> bool:
    """Return True if the advantages are one per sequence, expanded to the tokens or not."""
    if advantages.dim() < mask.dim() or advantages.shape[-1] <= 1:
        return True
    return advantages.stride(-1) == 0


def _reason_of_sequences(method: Method, aggregation: str | None) -> str | None:
    """Return the part of a method with token ratios that takes a row for one sequence; None if there is none."""
    if aggregation is not None and canonical_aggregation(aggregation).startswith("seq-"):
        return f"the average {aggregation!r}"
    if method.clip.whole_sequence:
        return f"the clip rule {method.clip!r}"
    if method.objective.whole_sequence:
        return f"the objective {method.objective!r}"
    for number in method.varying().values():
        if number.needs in ("position", "length"):
            return f"{number!r}, which depends on the {number.needs},"
    return None


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
        "advantages change from token to token, pass packed=False"
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
        "whose advantages change at some tokens, as with process rewards, pass packed=False"
    )


def _describe_change(pairs: _Pairs, pair: int) -> str:
    """Describe the change of the advantages in a pair, for an error."""
    return f"change from {pairs.before[pair]:g} to {pairs.after[pair]:g} at token {int(pairs.token[pair])}"
