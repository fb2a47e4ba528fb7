"""The sequences of a batch: which tokens belong together, and sums over them, in padded and in packed batches alike.

A padded batch holds one sequence in each row. A packed batch holds several sequences one after the other in a row; its
caller says where they lie, by one of these:

- ``segments``, the number of each token's sequence, of the shape of the tokens;
- ``cu_seqlens``, where each sequence begins among the flattened tokens, and where the last one ends;
- jagged nested tensors, which hold the same.

Rules and objectives ask the one object `Sequences`, so they are written once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from bandpo import _checks
from bandpo._lazy import lazy_property
from bandpo.errors import InvalidType, InvalidValue

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

__all__ = ["Sequences"]


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a batch, and sums over them.

    A tensor *per sequence* has the shape (batch, 1) in a padded batch. In a packed one it has the shape
    (sequences + 1,), whose last entry belongs to tokens of no sequence. `at_tokens` gives each token its sequence's
    entry in both.

    Sums of packed sequences are accumulated in float64 where the device has it.

    >>> padded = Sequences(torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    >>> padded.length
    tensor([[2.],
            [1.]])
    >>> packed = Sequences.read(torch.ones(1, 3), cu_seqlens=torch.tensor([0, 2, 3]))
    >>> packed.mean(torch.tensor([[1.0, 3.0, 5.0]]))
    tensor([[2., 2., 5.]])
    """

    mask: Float[Tensor, "batch time"]
    """1 for tokens that count, else 0."""
    index: Int[Tensor, " tokens"] | None = None
    """The sequence of each flattened token, ``count`` for a token of none; None where each row is a sequence."""
    count: int = 0
    """Of a packed batch, the number of entries per sequence, which is at least the number of sequences."""
    number: int | Tensor = 0
    """Of a packed batch, the number of sequences."""

    @classmethod
    def read(
        cls,
        mask: Float[Tensor, "batch time"],
        *,
        segments: Int[Tensor, "batch time"] | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
        count: int | None = None,
    ) -> Sequences:
        """Return the sequences of a batch whose caller has said where they lie.

        Args:
            mask: 1 for tokens that count, else 0.
            segments: The number of each token's sequence, from 0; below 0 for a token of none, as padding is. Tokens of
                a sequence stand next to each other.
            cu_seqlens: The place of each sequence's first token among the flattened tokens, and the place after the
                last one: (0, …, N). What lies behind it is padding.
            count: The number of sequences, where another tensor has one entry for each.

        Raises:
            TypeError: if ``segments`` or ``cu_seqlens`` are not integers.
            ValueError: if both are given, shapes do not fit, a sequence is torn, numbers are out of range, or a token
                that counts is in no sequence. Values are read on the CPU only.
        """
        if segments is None and cu_seqlens is None:
            return cls(mask)
        if segments is not None and cu_seqlens is not None:
            raise InvalidValue("segments= and cu_seqlens= say the same: give one of them")
        if cu_seqlens is not None:
            _check_integers("cu_seqlens", cu_seqlens)
            count, index = _index_of_starts(cu_seqlens, mask)
            number: int | Tensor = count
        else:
            assert segments is not None
            _check_integers("segments", segments)
            if segments.shape != mask.shape:
                raise InvalidValue(
                    f"segments have the shape {tuple(segments.shape)}, logp {tuple(mask.shape)}; they must be equal"
                )
            index = segments.flatten().long()
            if _checks.values_can_be_read(index):
                _check_segments(segments.long(), count)
            # Without another tensor that tells it, no more than one sequence for each token.
            count = mask.numel() if count is None else count
            index = torch.where(index < 0, count, index)
            number = _number_of_segments(index, count)
        sequences = cls(mask, index, count, number)
        if _checks.values_can_be_read(index):
            lost = sequences.lost
            if lost.any():
                token = int(lost.flatten().nonzero()[0])
                raise InvalidValue(
                    f"token {token} of the flattened batch counts but is in no sequence: give it a segment, or a mask "
                    "of 0"
                )
        return sequences

    @property
    def packed(self) -> bool:
        """Whether the batch is packed: sequences lie where its caller has said, not one in each row."""
        return self.index is not None

    @property
    def lost(self) -> Bool[Tensor, "batch time"]:
        """Tokens of a packed batch that count and are in no sequence."""
        assert self.index is not None
        return (self.index == self.count).view(self.mask.shape) & (self.mask != 0)

    def sum(self, x: Float[Tensor, "batch time"]) -> Tensor:
        """Compute the sum of ``x`` over all tokens of each sequence, counted or not; a tensor per sequence."""
        if self.index is None:
            return x.sum(-1, keepdim=True)
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
        """The number of counted tokens of each sequence; a tensor per sequence."""
        return self.sum(self.mask)

    @property
    def token_length(self) -> Float[Tensor, "batch time"]:
        """The number of counted tokens of each token's sequence."""
        return self.at_tokens(self.length).to(self.mask.dtype)

    def mean(self, x: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
        """Compute the mean of ``x`` over the counted tokens of each sequence, at each of its tokens.

        It is 0 for a sequence without a counted token.
        """
        return self.at_tokens(self.sum(x * self.mask) / self.length.clamp(min=1.0)).to(x.dtype)

    def values(self, name: str, x: Tensor) -> Tensor:
        """Return a caller's tensor per token as it is, and one per sequence in the form that other methods give it.

        Raises:
            ValueError: the shape is neither; the message calls the tensor by ``name``.
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
            # The last entry is of tokens that are in no sequence.
            return torch.cat([x, x.new_zeros(1)])
        rows = tokens[:-1]
        if x.shape == rows:
            return x.unsqueeze(-1)
        # Broadcasting alone would also spread the values of one sequence over all of them.
        if x.shape != (*rows, 1):
            raise InvalidValue(
                f"{name} of shape {tuple(x.shape)} fit neither the tokens {tuple(tokens)} nor the sequences "
                f"{tuple(rows)}"
            )
        return x

    def at_tokens(self, x: Tensor) -> Float[Tensor, "batch time"]:
        """Return at each token its sequence's entry of a tensor per sequence; a tensor per token stays as it is."""
        if x.shape == self.mask.shape:
            return x
        if self.index is None:
            return x.expand(self.mask.shape)
        return x[self.index].view(self.mask.shape)

    def ahead(self, x: Float[Tensor, "batch time"], distance: int) -> Float[Tensor, "batch time"]:
        """Return the value of ``x`` that lies ``distance`` tokens later in the sequence; 0 beyond its end."""
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

        >>> packed = Sequences.read(torch.ones(1, 4), cu_seqlens=torch.tensor([0, 3, 4]))
        >>> packed.before(torch.tensor([[1.0, 2.0, 4.0, 8.0]]))
        tensor([[0., 1., 3., 0.]])
        """
        counted = (x * self.mask).to(_checks.widest_float(x.device))
        if self.index is None:
            return (counted.cumsum(-1) - counted).to(x.dtype)
        counted = counted.flatten()
        before = counted.cumsum(0) - counted
        place = torch.arange(len(counted), device=x.device)
        first = place.new_zeros(self.count + 1).scatter_reduce(
            0, self.index, place, "amin", include_self=False
        )
        return (before - before[first[self.index]]).view(x.shape).to(x.dtype)

    def quantile(self, x: Float[Tensor, "batch time"], share: float) -> Tensor:
        """Compute the quantile of ``x`` over the counted tokens of each sequence; a tensor per sequence.

        Between two values it is interpolated, as `torch.quantile` does. It is 0 for a sequence without a counted token.

        >>> Sequences(torch.tensor([[1.0, 1.0, 0.0]])).quantile(torch.tensor([[1.0, 3.0, 9.0]]), 0.25)
        tensor([[1.5000]])
        """
        length = self.length
        place = share * (length - 1).clamp(min=0.0)
        lower = place.floor()
        upper = place.ceil()
        if self.index is None:
            ascending, _ = x.masked_fill(self.mask == 0, math.inf).sort(-1)
            start = torch.zeros_like(lower)
        else:
            # Sorted by value, then by sequence. What does not count comes last, with the tokens of no sequence.
            index = self.index.masked_fill(self.mask.flatten() == 0, self.count)
            values = x.flatten()
            order = values.argsort(stable=True)
            order = order[index[order].argsort(stable=True)]
            ascending = values[order]
            start = length.cumsum(0) - length
        last = ascending.shape[-1] - 1
        smaller = ascending.gather(-1, (start + lower).long().clamp(max=last))
        greater = ascending.gather(-1, (start + upper).long().clamp(max=last))
        quantile = smaller.lerp(greater, (place - lower).to(x.dtype))
        return torch.where(length > 0, quantile, 0.0)

    @property
    def position(self) -> Float[Tensor, "batch time"]:
        """The number of counted tokens of the sequence before each token."""
        # A token that does not count has the position of the last one before it that does.
        return (self.before(torch.ones_like(self.mask)) + self.mask - 1).clamp(min=0.0)

    @property
    def number_with_empty(self) -> int | Tensor:
        """The number of sequences, those without a counted token included."""
        return self.mask.shape[:-1].numel() if self.index is None else self.number

    def place(self, token: int) -> str:
        """Return where one of the flattened tokens stands, in words, counted from 1."""
        if self.index is None:
            row, column = divmod(token, self.mask.shape[-1])
            return f"sequence {row + 1}, token {column + 1}"
        sequence = int(self.index[token])
        first = int((self.index == sequence).nonzero()[0])
        return f"sequence {sequence + 1}, token {token - first + 1}"

    def to_rows(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Return a tensor per token with one row for each sequence, filled up at the end; reads the lengths.

        >>> packed = Sequences.read(torch.ones(1, 3), cu_seqlens=torch.tensor([0, 2, 3]))
        >>> packed.to_rows(torch.tensor([[1.0, 3.0, 5.0]]))
        tensor([[1., 3.],
                [5., 0.]])
        """
        if self.index is None:
            return x
        index = self.index[self.index < self.count]
        values = x.flatten()[self.index < self.count]
        rows = self.count if isinstance(self.number, int) else int(index.max()) + 1 if len(index) else 0
        sizes = torch.bincount(index, minlength=rows)
        # The flattened tokens may hold the sequences in any order.
        order = index.argsort(stable=True)
        start = sizes.cumsum(0) - sizes
        index = index[order]
        column = torch.arange(len(index), device=index.device) - start[index]
        longest = int(sizes.max()) if rows else 0
        table = values.new_full((rows, longest), fill)
        table[index, column] = values[order]
        return table

    def of_rows(self, x: Float[Tensor, "rows 1"]) -> Float[Tensor, "batch time"]:
        """Return at each token the entry of its row in a table that `to_rows` has made."""
        if self.index is None:
            return x.expand(self.mask.shape)
        # The numbers that occur are 0, 1, …; the tokens of no sequence get the last row's entry.
        return x.squeeze(-1)[self.index.clamp(max=len(x) - 1)].view(self.mask.shape)


def _check_integers(name: str, x: Any) -> None:
    """Refuse what is not a tensor of integers."""
    if not isinstance(x, torch.Tensor) or x.is_floating_point() or x.dtype == torch.bool:
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise InvalidType(f"{name} must be a tensor of integers, got {kind}")


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
    place = torch.arange(mask.numel(), device=mask.device)
    # The number of sequences that end at or before a token; all of them behind the last one.
    return count, torch.searchsorted(cu_seqlens[1:].to(place).contiguous(), place, right=True)


def _check_segments(segments: Tensor, count: int | None) -> None:
    """Refuse numbers out of range, and a number that stands in two places or in two rows."""
    highest = int(segments.max()) if segments.numel() else -1
    if count is None and highest >= segments.numel():
        raise InvalidValue(
            f"segments hold {highest}, but there are {segments.numel()} tokens: number them from 0"
        )
    if count is not None and highest != count - 1:
        raise InvalidValue(
            f"segments number the sequences from 0 to {highest}, but advantages or weights are given for {count}"
        )
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
    runs = segments[starts]
    runs = runs[runs >= 0]
    runs, _ = runs.sort()
    repeated = runs[1:][runs[1:] == runs[:-1]]
    if len(repeated):
        torn = int(repeated[0])
        raise InvalidValue(
            f"segment {torn} stands in several places: the tokens of a sequence must be next to each other, and "
            "numbers must differ between rows (where they begin anew in each row, add the number of sequences before)"
        )


def _number_of_segments(index: Tensor, count: int) -> Tensor:
    """Return how many numbers occur."""
    present = index.new_zeros(count + 1).index_fill(0, index, 1)
    return present[:count].sum()


class Layout(NamedTuple):
    """How the caller's tensors hold tokens, and the tensors as (batch, time)."""

    tensors: dict[str, Any]
    """The tensors by name, dense; None where they were."""
    segments: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def packed(self) -> bool:
        """Whether the caller has said where sequences lie."""
        return self.segments is not None or self.cu_seqlens is not None


def read_layout(
    tensors: Mapping[str, Any], segments: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Layout:
    """Return a caller's tensors in dense form: jagged ones and packed ones without a batch dimension become one row.

    Args:
        tensors: The tensors by name. The first is one per token, and tells the form of the others.
        segments: As the caller has given it, see `Sequences.read`.
        cu_seqlens: As the caller has given it, see `Sequences.read`.

    Raises:
        TypeError: if some tensors are nested where the first is not, if nested tensors are not jagged, or if they are
            given with ``segments`` or ``cu_seqlens``.
        ValueError: if jagged tensors have rows of other lengths.
    """
    (leader_name, leader), *_ = tensors.items()
    for name, x in {**tensors, "segments": segments, "cu_seqlens": cu_seqlens}.items():
        _check_form(name, x, leader_name, leader)
    if isinstance(leader, torch.Tensor) and leader.is_nested:
        if segments is not None or cu_seqlens is not None:
            raise InvalidType(
                f"{leader_name} is nested, so it says itself where sequences lie: leave segments out"
            )
        cu_seqlens = offsets(leader)
        for name, x in tensors.items():
            if not isinstance(x, torch.Tensor):
                continue
            if x.is_nested and not _same_rows(x, leader):
                raise InvalidValue(f"the rows of {name} and {leader_name} have other lengths")
            if not x.is_nested and x.dim() > 1:
                raise InvalidType(
                    f"{name} is padded, but {leader_name} is nested: give all tensors per token in one form"
                )
    if segments is None and cu_seqlens is None:
        return Layout(dict(tensors), None, None)
    rows = {name: _as_tokens(x, leader) for name, x in tensors.items()}
    if isinstance(segments, torch.Tensor) and segments.dim() == 1:
        segments = segments.unsqueeze(0)
    return Layout(rows, segments, cu_seqlens)


def unpack(
    tensors: Mapping[str, Any], segments: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> dict[str, Any]:
    """Return a caller's tensors with one row for each sequence, filled up at the end where the mask is 0.

    Args:
        tensors: The tensors by name, as for `read_layout`; ``mask`` is one of them, or None where all tokens count.
        segments: As the caller has given it, see `Sequences.read`.
        cu_seqlens: As the caller has given it, see `Sequences.read`.

    Raises:
        TypeError, ValueError: as `read_layout` and `Sequences.read` do.
    """
    layout = read_layout(tensors, segments, cu_seqlens)
    if not layout.packed:
        return layout.tensors
    leader, *_ = layout.tensors.values()
    mask = layout.tensors["mask"]
    mask = torch.ones(leader.shape) if mask is None else mask.detach().float().cpu()
    sequences = Sequences.read(
        mask,
        segments=None if layout.segments is None else layout.segments.cpu(),
        cu_seqlens=None if layout.cu_seqlens is None else layout.cu_seqlens.cpu(),
    )
    rows: dict[str, Any] = {}
    for name, x in (layout.tensors | {"mask": mask}).items():
        per_token = isinstance(x, torch.Tensor) and x.shape == leader.shape
        rows[name] = sequences.to_rows(x.detach().cpu()) if per_token else x
    return rows


def as_row(x: Tensor) -> Tensor:
    """Return the tokens of a jagged tensor, or of one without a batch dimension, as one row."""
    dense = x.values() if x.is_nested else x
    return dense.unsqueeze(0) if dense.dim() == 1 else dense


def _as_tokens(x: Any, leader: Tensor) -> Any:
    """Return a tensor per token as (batch, time); another, or None, as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.is_nested or (leader.dim() == 1 and x.shape == leader.shape):
        return as_row(x)
    return x


def _numbers(x: Tensor) -> list[int]:
    """Return the values of a tensor."""
    return cast("list[int]", cast("Any", x).tolist())


def offsets(x: Tensor) -> Tensor:
    """Return where each row of a jagged tensor begins, and where the last one ends."""
    return cast("Any", x).offsets()


def _same_rows(x: Tensor, leader: Tensor) -> bool:
    """Check whether two jagged tensors have rows of the same lengths, as far as that can be read."""
    if x.values().shape != leader.values().shape or offsets(x).shape != offsets(leader).shape:
        return False
    return not _checks.values_can_be_read(leader.values()) or torch.equal(offsets(x), offsets(leader))


def _check_form(name: str, x: Any, leader_name: str, leader: Any) -> None:
    """Refuse a nested tensor that is not jagged, or that stands beside dense tokens."""
    if not (isinstance(x, torch.Tensor) and x.is_nested):
        return
    jagged = x.layout == torch.jagged and x.dim() == 2
    if jagged and isinstance(leader, torch.Tensor) and leader.is_nested:
        return
    if jagged:
        raise InvalidType(
            f"{name} is a nested tensor, but {leader_name} is not: give all tensors per token in one form"
        )
    raise InvalidType(
        f"{name} is a nested tensor that is not jagged with one value a token: make it with layout=torch.jagged"
    )
