"""The assignment of a batch's tokens to sequences, and sums over sequences, for padded and packed batches.

A padded batch has one sequence in each row. A packed batch has several sequences one after the other in a row, see
`bandpo.core.layout`. Rules and objectives use `Sequences` for both kinds of batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from . import _checks
from ._lazy import lazy_property
from .errors import InvalidValue
from .layout import Packed, Rows, read_layout

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

__all__ = ["Sequences"]

PART = 1024
"""The number of tokens of a part of a row, see `part_sums`."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a batch, and sums over them.

    A tensor *per sequence* has the shape (batch, 1) in a padded batch. In a packed batch it has the shape
    (sequences + 1,); the last entry is for tokens of no sequence. `at_tokens` expands it to the tokens in both cases.

    Sums of packed sequences are accumulated in float64 where the device has it.

    >>> padded = Sequences(torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    >>> padded.length
    tensor([[2.],
            [1.]])
    >>> packed = Sequences.read(torch.ones(1, 3), Packed(cu_seqlens=torch.tensor([0, 2, 3])))
    >>> packed.mean(torch.tensor([[1.0, 3.0, 5.0]]))
    tensor([[2., 2., 5.]])
    """

    mask: Float[Tensor, "batch time"]
    """1 for tokens that count, 0 for padding."""
    index: Int[Tensor, " tokens"] | None = None
    """The sequence of each flattened token, ``count`` for a token of no sequence; None if each row is a sequence."""
    count: int = 0
    """For a packed batch: the length of tensors per sequence, without their last entry; at least `number`."""
    number: int | Tensor = 0
    """For a packed batch: the number of sequences."""

    @classmethod
    def read(
        cls, mask: Float[Tensor, "batch time"], layout: Rows | Packed, *, count: int | None = None
    ) -> Sequences:
        """Return the sequences of a batch with a layout.

        Args:
            mask: 1 for tokens that count, 0 for padding.
            layout: The layout of the batch.
            count: The number of sequences, if it is known from another tensor with one entry for each.

        Raises:
            ValueError: if shapes do not fit, the tokens of a sequence are not adjacent, an index is out of range, or a
                token that counts is in no sequence. Values are read on the CPU only.
        """
        if isinstance(layout, Rows):
            return cls(mask)
        if layout.cu_seqlens is not None:
            count, index = _index_of_starts(layout.cu_seqlens, mask)
            number: int | Tensor = count
        else:
            segments = layout.segments
            assert segments is not None
            if segments.shape != mask.shape:
                raise InvalidValue(
                    f"segments have the shape {tuple(segments.shape)}, logp {tuple(mask.shape)}; they must be equal"
                )
            index = segments.flatten().long()
            if _checks.values_can_be_read(index):
                _check_segments(segments.long(), count)
            # If the number of sequences is unknown, it is at most the number of tokens.
            count = mask.numel() if count is None else count
            index = torch.where(index < 0, count, index)
            number = _number_of_segments(index, count)
        sequences = cls(mask, index, count, number)
        if _checks.values_can_be_read(index):
            unassigned = sequences.unassigned
            if unassigned.any():
                token = int(unassigned.flatten().nonzero()[0])
                raise InvalidValue(
                    f"token {token} of the flattened batch counts but is in no sequence: give it a segment, or a mask "
                    "of 0"
                )
        return sequences

    @property
    def packed(self) -> bool:
        """True if the batch is packed, False if each row is a sequence."""
        return self.index is not None

    @property
    def unassigned(self) -> Bool[Tensor, "batch time"]:
        """The tokens of a packed batch that count and are in no sequence."""
        assert self.index is not None
        return (self.index == self.count).view(self.mask.shape) & (self.mask != 0)

    def sum(self, x: Float[Tensor, "batch time"]) -> Tensor:
        """Compute the sum of ``x`` over all tokens of each sequence, counted or not; a tensor per sequence."""
        if self.index is None:
            parts = part_sums(x)
            return parts if parts.shape[-1] == 1 else parts.sum(-1, keepdim=True)
        wide = x.flatten().to(_checks.widest_float(x.device))
        return wide.new_zeros(self.count + 1).index_add(0, self.index, wide)

    def max(self, x: Float[Tensor, "batch time"]) -> Tensor:
        """Compute the maximum of ``x`` over all tokens of each sequence; a tensor per sequence, 0 where it has none."""
        if self.index is None:
            return x.amax(-1, keepdim=True)
        flat = x.flatten()
        return flat.new_zeros(self.count + 1).scatter_reduce(0, self.index, flat, "amax", include_self=False)

    @lazy_property
    def length(self) -> Tensor:
        """Compute the number of counted tokens of each sequence; a tensor per sequence."""
        return self.sum(self.mask)

    @lazy_property
    def count_tokens(self) -> Float[Tensor, ""]:
        """Compute the number of counted tokens of the batch."""
        return self.length.sum() if self.index is None else part_sums(self.mask).sum()

    @property
    def token_length(self) -> Float[Tensor, "batch time"]:
        """The number of counted tokens of each token's sequence."""
        return self.at_tokens(self.length).to(self.mask.dtype)

    def mean(self, x: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
        """Compute the mean of ``x`` over the counted tokens of each sequence, at each of its tokens.

        The mean is 0 for a sequence without a counted token.
        """
        return self.at_tokens(self.sum(x * self.mask) / self.length.clamp(min=1.0)).to(x.dtype)

    def values(self, name: str, x: Tensor) -> Tensor:
        """Return a caller's tensor unchanged if it is per token; if it is per sequence, in the form of this class.

        Raises:
            ValueError: if the shape fits neither. The message calls the tensor ``name``.
        """
        tokens = self.mask.shape
        if x.shape == tokens:
            return x
        if self.packed:
            if x.shape != (self.count,):
                raise InvalidValue(
                    f"{name} of shape {tuple(x.shape)} fit neither the tokens {tuple(tokens)} nor the sequences "
                    f"({self.count},)"
                )
            # The last entry is for tokens of no sequence.
            return torch.cat([x, x.new_zeros(1)])
        rows = tokens[:-1]
        if x.shape == rows:
            return x.unsqueeze(-1)
        # (1,) and (1, time) would broadcast over all sequences, so they are errors.
        if x.shape != (*rows, 1):
            raise InvalidValue(
                f"{name} of shape {tuple(x.shape)} fit neither the tokens {tuple(tokens)} nor the sequences "
                f"{tuple(rows)}"
            )
        return x

    def at_tokens(self, x: Tensor) -> Float[Tensor, "batch time"]:
        """Return at each token its sequence's entry of a tensor per sequence; a tensor per token is unchanged."""
        if x.shape == self.mask.shape:
            return x
        if self.index is None:
            return x.expand(self.mask.shape)
        return x[self.index].view(self.mask.shape)

    def ahead(self, x: Float[Tensor, "batch time"], distance: int) -> Float[Tensor, "batch time"]:
        """Return the value of ``x`` that is ``distance`` tokens later in the sequence; 0 beyond its end."""
        flat = x if self.index is None else x.flatten()
        length = flat.shape[-1]
        later = torch.arange(length, device=x.device) + distance
        inside = later < length
        later = later.clamp(max=length - 1)
        if self.index is not None:
            inside = inside & (self.index[later] == self.index)
        return (flat[..., later] * inside).view(x.shape)

    def before(self, x: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
        """Compute the sum of ``x`` over the counted tokens of the sequence before each token.

        >>> packed = Sequences.read(torch.ones(1, 4), Packed(cu_seqlens=torch.tensor([0, 3, 4])))
        >>> packed.before(torch.tensor([[1.0, 2.0, 4.0, 8.0]]))
        tensor([[0., 1., 3., 0.]])
        """
        counted = (x * self.mask).to(_checks.widest_float(x.device))
        if self.index is None:
            return (counted.cumsum(-1) - counted).to(x.dtype)
        counted = counted.flatten()
        # The sum over all earlier tokens of the batch, minus that at the first token of the sequence.
        before = counted.cumsum(0) - counted
        positions = torch.arange(len(counted), device=x.device)
        first = positions.new_zeros(self.count + 1)
        first = first.scatter_reduce(0, self.index, positions, "amin", include_self=False)
        return (before - before[first[self.index]]).view(x.shape).to(x.dtype)

    def quantile(self, x: Float[Tensor, "batch time"], share: float) -> Tensor:
        """Compute the quantile of ``x`` over the counted tokens of each sequence; a tensor per sequence.

        It is interpolated linearly, as by `torch.quantile`, and 0 for a sequence without a counted token.

        >>> Sequences(torch.tensor([[1.0, 1.0, 0.0]])).quantile(torch.tensor([[1.0, 3.0, 9.0]]), 0.25)
        tensor([[1.5000]])
        """
        length = self.length
        # The fractional index of the quantile among the sorted values of a sequence.
        rank = share * (length - 1).clamp(min=0.0)
        lower = rank.floor()
        upper = rank.ceil()
        if self.index is None:
            ascending, _ = x.masked_fill(self.mask == 0, math.inf).sort(-1)
            start = torch.zeros_like(lower)
        else:
            # Sort by value, then by sequence. Tokens that do not count come last, with the tokens of no sequence.
            index = self.index.masked_fill(self.mask.flatten() == 0, self.count)
            values = x.flatten()
            order = values.argsort(stable=True)
            order = order[index[order].argsort(stable=True)]
            ascending = values[order]
            start = length.cumsum(0) - length
        last = ascending.shape[-1] - 1
        smaller = ascending.gather(-1, (start + lower).long().clamp(max=last))
        greater = ascending.gather(-1, (start + upper).long().clamp(max=last))
        quantile = smaller.lerp(greater, (rank - lower).to(x.dtype))
        return torch.where(length > 0, quantile, 0.0)

    @property
    def position(self) -> Float[Tensor, "batch time"]:
        """The number of counted tokens of the sequence before each token."""
        # A token that does not count has the position of the last counted token before it.
        return (self.before(torch.ones_like(self.mask)) + self.mask - 1).clamp(min=0.0)

    @property
    def number_with_empty(self) -> int | Tensor:
        """The number of sequences, including those without a counted token."""
        return self.mask.shape[:-1].numel() if self.index is None else self.number

    def to(self, device: torch.device | str) -> Sequences:
        """Return the sequences on a device."""
        index = None if self.index is None else self.index.to(device)
        number = self.number.to(device) if isinstance(self.number, torch.Tensor) else self.number
        return Sequences(self.mask.to(device), index, self.count, number)

    def describe_position(self, token: int) -> str:
        """Return the position of a token in words, counted from 1.

        Args:
            token: The index of the token in the flattened batch.
        """
        if self.index is None:
            row, column = divmod(token, self.mask.shape[-1])
            return f"sequence {row + 1}, token {column + 1}"
        sequence = int(self.index[token])
        first = int((self.index == sequence).nonzero()[0])
        return f"sequence {sequence + 1}, token {token - first + 1}"

    def to_rows(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Return a tensor per token with one row for each sequence, padded with ``fill``. This reads the lengths.

        >>> packed = Sequences.read(torch.ones(1, 3), Packed(cu_seqlens=torch.tensor([0, 2, 3])))
        >>> packed.to_rows(torch.tensor([[1.0, 3.0, 5.0]]))
        tensor([[1., 3.],
                [5., 0.]])
        """
        if self.index is None:
            return x
        index = self.index[self.index < self.count]
        values = x.flatten()[self.index < self.count]
        if isinstance(self.number, int):
            rows = self.count
        elif len(index):
            rows = int(index.max()) + 1
        else:
            rows = 0
        sizes = torch.bincount(index, minlength=rows)
        # The sequences may be in any order among the flattened tokens.
        order = index.argsort(stable=True)
        start = sizes.cumsum(0) - sizes
        index = index[order]
        column = torch.arange(len(index), device=index.device) - start[index]
        longest = int(sizes.max()) if rows else 0
        table = values.new_full((rows, longest), fill)
        table[index, column] = values[order]
        return table

    def from_rows(self, x: Float[Tensor, "rows 1"]) -> Float[Tensor, "batch time"]:
        """Return at each token the entry of its sequence in a tensor with the rows of `to_rows`."""
        if self.index is None:
            return x.expand(self.mask.shape)
        # Sequences are numbered from 0 without gaps. Tokens of no sequence get the last row's entry.
        return x.squeeze(-1)[self.index.clamp(max=len(x) - 1)].view(self.mask.shape)


def part_sums(x: Float[Tensor, "batch time"]) -> Float[Tensor, "batch parts"]:
    """Compute the sums over the parts of each row. A row is one part, or several under ``torch.compile``.

    For a sum over all elements the compiler writes a kernel of its own, which reads all tensors again, unless it knows
    the shape and can divide it. It fuses sums over rows with the loss. On a GPU it then starts a program for each row,
    so long rows are summed in parts of 1,024 tokens if they can be divided.
    """
    if torch.compiler.is_compiling():
        length = x.shape[-1]
        if length > PART and length % PART == 0:
            return x.reshape(*x.shape[:-1], length // PART, PART).sum(-1)
    return x.sum(-1, keepdim=True)


def _index_of_starts(cu_seqlens: Tensor, mask: Tensor) -> tuple[int, Tensor]:
    """Return the number of sequences, and the sequence of each flattened token."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise InvalidValue(
            f"cu_seqlens must hold 0 and the end of each sequence, got the shape {tuple(cu_seqlens.shape)}"
        )
    count = len(cu_seqlens) - 1
    if _checks.values_can_be_read(cu_seqlens):
        rises = bool((cu_seqlens[1:] >= cu_seqlens[:-1]).all())
        if int(cu_seqlens[0]) != 0 or not rises or int(cu_seqlens[-1]) > mask.numel():
            raise InvalidValue(
                f"cu_seqlens must rise from 0 to at most the number of tokens, {mask.numel()}; got "
                f"{_numbers(cu_seqlens)}"
            )
    positions = torch.arange(mask.numel(), device=mask.device)
    # The index is the number of sequences that end at or before the token: ``count`` after the last sequence.
    ends = cu_seqlens[1:].to(positions).contiguous()
    return count, torch.searchsorted(ends, positions, right=True)


def _check_segments(segments: Tensor, count: int | None) -> None:
    """Raise ValueError if an index is out of range, or occurs at tokens that are not adjacent.

    Args:
        segments: The index of each token's sequence, (batch, time).
        count: The number of sequences, if known from another tensor.
    """
    highest = int(segments.max()) if segments.numel() else -1
    if count is None and highest >= segments.numel():
        raise InvalidValue(
            f"segments hold {highest}, but there are {segments.numel()} tokens: number them from 0"
        )
    if count is not None and highest != count - 1:
        raise InvalidValue(
            f"segments number the sequences from 0 to {highest}, but advantages or weights are given for {count}"
        )
    # The index of each run of adjacent tokens must be unique.
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
    runs = segments[starts]
    runs = runs[runs >= 0]
    runs, _ = runs.sort()
    repeated = runs[1:][runs[1:] == runs[:-1]]
    if len(repeated):
        raise InvalidValue(
            f"segment {int(repeated[0])} occurs at tokens that are not adjacent: the tokens of a sequence must be next "
            "to each other, and indices must differ between rows (if they start at 0 in each row, add the number of "
            "sequences in the rows before)"
        )


def _number_of_segments(index: Tensor, count: int) -> Tensor:
    """Return the number of different indices below ``count``."""
    present = index.new_zeros(count + 1).index_fill(0, index, 1)
    return present[:count].sum()


def unpack(tensors: Mapping[str, Any], layout: Rows | Packed | None = None) -> dict[str, Any]:
    """Return a caller's tensors as a padded batch, with one row for each sequence.

    Args:
        tensors: The tensors by name, as for `read_layout`. One is ``mask``, which may be None if all tokens count.
        layout: As passed by the caller.

    Raises:
        TypeError, ValueError: see `read_layout` and `Sequences.read`.
    """
    dense = read_layout(tensors, layout)
    if isinstance(dense.layout, Rows):
        return dense.tensors
    leader, *_ = dense.tensors.values()
    mask = dense.tensors["mask"]
    mask = torch.ones(leader.shape) if mask is None else mask.detach().float().cpu()
    sequences = Sequences.read(mask, dense.layout.to("cpu"))
    rows: dict[str, Any] = {}
    for name, x in (dense.tensors | {"mask": mask}).items():
        per_token = isinstance(x, torch.Tensor) and x.shape == leader.shape
        rows[name] = sequences.to_rows(x.detach().cpu()) if per_token else x
    return rows


def _numbers(x: Tensor) -> list[int]:
    """Return the values of a tensor."""
    return cast("list[int]", cast("Any", x).tolist())
