"""The check that each row of a batch holds one sequence, where a method looks at rows as sequences.

Trainers that pack put several sequences into one row. A sequence's ratio, average or sum is then taken over several
sequences at once, and nothing else in the tensors tells. The advantages often do: they are those of one sequence up to
a token and those of the next from there on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from bandpo import _checks
from bandpo.errors import InvalidValue

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from bandpo.batch import Batch
    from bandpo.methods import Method

REMEDY = (
    "If it holds several sequences, say where they lie: segments= (the number of each token's sequence) or "
    "cu_seqlens="
)


class _Pairs(NamedTuple):
    """Every two neighbouring counted tokens of a row."""

    row: Int[Tensor, " pairs"]
    """The row that they stand in."""
    token: Int[Tensor, " pairs"]
    """The position of the second of them."""
    before: Float[Tensor, " pairs"]
    """The advantage of the first."""
    after: Float[Tensor, " pairs"]
    """The advantage of the second."""

    @property
    def changed(self) -> Bool[Tensor, " pairs"]:
        """Whether the two advantages differ."""
        return self.before != self.after


def check_unpacked(
    batch: Batch, advantages: Tensor, method: Method, aggregation: str | None, packed: bool | None
) -> None:
    """Refuse a batch whose rows hold several sequences, where the method takes each row for one.

    At the level ``sequence`` a row is refused if its advantages change among counted tokens. A method that otherwise
    looks at sequences (by its average, its objective, or a number that depends on the position or the length) refuses a
    row whose advantages change, and are equal between at least half of its neighbouring counted tokens.

    Nothing is read where advantages are one per sequence, on an accelerator, or under ``torch.compile``.

    Args:
        batch: The batch.
        advantages: As the caller has given them: their shape tells whether they can change within a row.
        method: The method.
        aggregation: The name of the average; None where it is not known or does not matter.
        packed: What the caller says of the rows; None for nothing.

    Raises:
        ValueError: a row is refused, or ``packed`` contradicts the batch.
    """
    if packed is not None and packed != batch.sequences.packed:
        if packed:
            raise InvalidValue(
                "packed=True does not say where the sequences lie: give segments= or cu_seqlens="
            )
        raise InvalidValue(
            "packed=False says that each row is one sequence: leave out segments= and cu_seqlens="
        )
    if (
        packed is not None
        or batch.sequences.packed
        or not _checks.values_can_be_read(batch.mask)
        or _constant_by_shape(advantages, batch.mask)
    ):
        return
    level = "sequence" in (method.level, method.bound_level)
    reason = "the level 'sequence'" if level else _looks_at_sequences(method, aggregation)
    if reason is None:
        return
    # Most batches have one advantage in a row. This sees it in a few operations.
    if not _any_changes(batch.advantages, batch.mask):
        return
    pairs = _changes(batch.advantages, batch.mask)
    if level:
        _refuse_change(pairs)
    else:
        _refuse_runs(pairs, reason)


def _constant_by_shape(advantages: Tensor, mask: Tensor) -> bool:
    """Whether the advantages are one per sequence, expanded or not."""
    if advantages.dim() < mask.dim() or advantages.shape[-1] <= 1:
        return True
    return advantages.stride(-1) == 0


def _looks_at_sequences(method: Method, aggregation: str | None) -> str | None:
    """What of a method at the level of tokens takes a row for one sequence; None if nothing does."""
    # Imported here, as the loss imports this module.
    from bandpo.loss import known_aggregation

    if aggregation is not None and known_aggregation(aggregation).startswith("seq-"):
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
    """Whether the advantages change among the counted tokens of some row."""
    first = advantages.gather(-1, mask.argmax(-1, keepdim=True))
    return bool(((advantages != first) & (mask != 0)).any())


def _changes(advantages: Tensor, mask: Tensor) -> _Pairs:
    """The neighbouring counted tokens of each row, without the tokens between them that do not count."""
    # A batch without a dimension of its own is one row.
    width = mask.shape[-1]
    counted = mask.flatten().nonzero().squeeze(-1)
    values = advantages.flatten()[counted]
    row = torch.div(counted, width, rounding_mode="floor")
    pairs = (row[1:] == row[:-1]).nonzero().squeeze(-1)
    return _Pairs(row[pairs], counted[pairs + 1] % width, values[pairs], values[pairs + 1])


def _refuse_change(pairs: _Pairs) -> None:
    """Refuse the first row whose advantages change."""
    first = int(pairs.changed.nonzero()[0])
    raise InvalidValue(
        f"the advantages of row {int(pairs.row[first])} {_step(pairs, first)}, but the level 'sequence' gives a row "
        f"one ratio, as if it were one sequence with one advantage. {REMEDY}. If each row is one sequence "
        "whose advantages change from token to token, say so with packed=False"
    )


def _refuse_runs(pairs: _Pairs, reason: str) -> None:
    """Refuse the first row whose advantages change, and are equal between half of its neighbours or more."""
    rows = int(pairs.row[-1]) + 1
    changes = torch.bincount(pairs.row, weights=pairs.changed.double(), minlength=rows)
    neighbours = torch.bincount(pairs.row, minlength=rows)
    looks_packed = (changes > 0) & (2 * changes <= neighbours)
    if not looks_packed.any():
        return
    row = int(looks_packed.nonzero()[0])
    first = int((pairs.changed & (pairs.row == row)).nonzero()[0])
    raise InvalidValue(
        f"row {row} looks packed: its advantages {_step(pairs, first)} and are equal between at least half of its "
        f"neighbouring tokens, but {reason} takes a row for one sequence. {REMEDY}. If each row is one sequence whose "
        "advantages change at some tokens, as rewards of steps do, say so with packed=False"
    )


def _step(pairs: _Pairs, pair: int) -> str:
    """Where advantages change, and from what to what."""
    return f"change from {pairs.before[pair]:g} to {pairs.after[pair]:g} at token {int(pairs.token[pair])}"
