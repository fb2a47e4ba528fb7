"""The layout of a batch: which tokens of its tensors belong to one sequence.

- `Rows`: each row of the tensors is one sequence. This is the layout if none is given.
- `Packed`: a row holds several sequences, whose boundaries the caller passes.
- Jagged nested tensors contain the boundaries, and need no layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from . import _checks
from .errors import InvalidType, InvalidValue

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

__all__ = ["Packed", "Rows"]


@dataclass(frozen=True)
class Rows:
    """A layout with one sequence in each row: the tensors have the shape (batch, time), with padding.

    It is the layout if none is given. Pass it to state it: the rows are then not checked for several sequences, see
    `bandpo.policy_loss`.

    >>> Rows()
    Rows()
    """


@dataclass(frozen=True, eq=False, kw_only=True)
class Packed:
    """A layout with several sequences in a row, given by exactly one of two tensors.

    The batch's tensors have the shape (1, tokens), (tokens,) or (batch, time). Its advantages and weights are one per
    token or have the shape (sequences,). Loss, gradient and metrics equal those of the padded batch.

    Args:
        cu_seqlens: The start of each sequence among the flattened tokens, and the end of the last one, as in
            FlashAttention's kernels: (0, …, N). Tokens from index N on are padding.
        segments: The index of each token's sequence, from 0, in the shape of ``logp``; below 0 for a token of no
            sequence, such as padding. The tokens of a sequence must be adjacent. From Hugging Face's
            ``position_ids``: ``(position_ids == 0).cumsum(-1) - 1``.

    Raises:
        TypeError: if the tensor does not hold integers.
        ValueError: if both or neither are given. Values and shapes are checked with the batch.

    >>> logp, logp_old = torch.tensor([[0.2, 0.5, 0.1]]).log(), torch.tensor([[0.1, 0.5, 0.1]]).log()
    >>> layout = Packed(cu_seqlens=torch.tensor([0, 2, 3]))
    >>> policy_loss(logp, logp_old, torch.tensor([1.0, -1.0]), layout=layout, method="GRPO()").loss
    tensor(-0.0500)
    """

    cu_seqlens: Int[Tensor, " ends"] | None = None
    segments: Int[Tensor, "batch time"] | None = None

    def __post_init__(self) -> None:
        if (self.cu_seqlens is None) == (self.segments is None):
            number = "neither" if self.cu_seqlens is None else "both"
            raise InvalidValue(
                f"Packed takes one of cu_seqlens= and segments=, which have the same meaning; got {number}"
            )
        for name, x in (("cu_seqlens", self.cu_seqlens), ("segments", self.segments)):
            if x is not None:
                _check_integers(name, x)

    def to(self, device: torch.device | str) -> Packed:
        """Return the layout on a device."""
        if self.cu_seqlens is not None:
            return Packed(cu_seqlens=self.cu_seqlens.to(device))
        assert self.segments is not None
        return Packed(segments=self.segments.to(device))


class Dense(NamedTuple):
    """A caller's tensors in dense form, (batch, time), and their layout."""

    tensors: dict[str, Any]
    """The tensors by name; None for those that the caller passed as None."""
    layout: Rows | Packed
    """The layout of the dense tensors."""
    stated: bool
    """False if the caller gave no layout, so that rows are only assumed to be one sequence each."""


def read_layout(tensors: Mapping[str, Any], layout: Rows | Packed | None = None) -> Dense:
    """Return a caller's tensors in dense form. Jagged tensors, and packed ones without a batch dimension, become a row.

    Args:
        tensors: The tensors by name. The first one has a value per token, and determines the form of the others.
        layout: As passed by the caller.

    Raises:
        TypeError: if a tensor is nested but the first is not, if nested tensors are not jagged or are passed with a
            layout, or if ``layout`` is none.
        ValueError: if jagged tensors have rows of different lengths.
    """
    if layout is not None and not isinstance(layout, (Rows, Packed)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidType(
            f"layout must be Rows(), Packed(cu_seqlens=…) or Packed(segments=…), got {layout!r}"
        )
    (leader_name, leader), *_ = tensors.items()
    named = {**tensors, "cu_seqlens": None, "segments": None}
    if isinstance(layout, Packed):
        named |= {"cu_seqlens": layout.cu_seqlens, "segments": layout.segments}
    for name, x in named.items():
        _check_form(name, x, leader_name, leader)
    stated = layout is not None
    if isinstance(leader, torch.Tensor) and leader.is_nested:
        if layout is not None:
            raise InvalidType(
                f"{leader_name} is nested and so contains the boundaries of sequences: leave out layout="
            )
        layout = Packed(cu_seqlens=offsets(leader))
        stated = True
        for name, x in tensors.items():
            if not isinstance(x, torch.Tensor):
                continue
            if x.is_nested and not _same_rows(x, leader):
                raise InvalidValue(f"the rows of {name} and {leader_name} have different lengths")
            if not x.is_nested and x.dim() > 1:
                raise InvalidType(
                    f"{name} is padded, but {leader_name} is nested: pass all tensors per token in one form"
                )
    if not isinstance(layout, Packed):
        return Dense(dict(tensors), Rows(), stated)
    if layout.segments is not None and layout.segments.dim() == 1:
        layout = Packed(segments=layout.segments.unsqueeze(0))
    return Dense({name: _as_tokens(x, leader) for name, x in tensors.items()}, layout, stated)


def as_row(x: Tensor) -> Tensor:
    """Return the tokens of a jagged tensor, or of one without a batch dimension, as one row."""
    dense = x.values() if x.is_nested else x
    return dense.unsqueeze(0) if dense.dim() == 1 else dense


def offsets(x: Tensor) -> Tensor:
    """Return the start of each row of a jagged tensor, and the end of the last one."""
    return cast("Any", x).offsets()


def _as_tokens(x: Any, leader: Tensor) -> Any:
    """Return a tensor per token as (batch, time); other tensors and None unchanged."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.is_nested or (leader.dim() == 1 and x.shape == leader.shape):
        return as_row(x)
    return x


def _same_rows(x: Tensor, leader: Tensor) -> bool:
    """Return True if two jagged tensors have rows of the same lengths, or if that cannot be read."""
    if x.values().shape != leader.values().shape or offsets(x).shape != offsets(leader).shape:
        return False
    return not _checks.values_can_be_read(leader.values()) or torch.equal(offsets(x), offsets(leader))


def _check_integers(name: str, x: Any) -> None:
    """Raise TypeError unless ``x`` is a tensor of integers."""
    if not isinstance(x, torch.Tensor) or x.is_floating_point() or x.dtype == torch.bool:
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise InvalidType(f"{name} must be a tensor of integers, got {kind}")


def _check_form(name: str, x: Any, leader_name: str, leader: Any) -> None:
    """Raise TypeError for a nested tensor that is not jagged, or that is passed with dense tensors per token."""
    if not (isinstance(x, torch.Tensor) and x.is_nested):
        return
    jagged = x.layout == torch.jagged and x.dim() == 2
    if jagged and isinstance(leader, torch.Tensor) and leader.is_nested:
        return
    if jagged:
        raise InvalidType(
            f"{name} is a nested tensor, but {leader_name} is not: pass all tensors per token in one form"
        )
    raise InvalidType(
        f"{name} is a nested tensor that is not jagged with one value per token: create it with layout=torch.jagged"
    )
