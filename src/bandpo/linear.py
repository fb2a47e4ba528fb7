"""Log-probabilities straight from hidden states: the logits are never held, so a batch may be larger.

The vocabulary is taken in chunks. A chunk's logits are folded into a running log-sum-exp and forgotten; the backward
pass computes them again. ``torch.compile`` does not look inside: its graph breaks here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from bandpo import _checks
from bandpo.errors import InvalidType, InvalidValue

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["linear_logp"]

LEAST_TILE = 2**24
"""Logits of a chunk, at least: 64 MiB in float32."""


@torch.compiler.disable  # pyright: ignore[reportUnknownMemberType]
def linear_logp(
    hidden: Float[Tensor, "*tokens width"],
    lm_head_weight: Float[Tensor, "vocabulary width"],
    ids: Int[Tensor, "*tokens"],
    *,
    bias: Float[Tensor, " vocabulary"] | None = None,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    chunk: int | None = None,
    entropy: bool = False,
    top: int = 0,
    group: Any = None,
    offset: int = 0,
) -> Any:
    """Log-probabilities (nats) of ``ids`` under ``softmax(softcap(hidden @ lm_head_weight.T + bias) / temperature)``.

    Never more than a chunk of logits is held, in neither pass. Gradients go to ``hidden``, ``lm_head_weight`` and
    ``bias``, each where it is wanted. Tokens to which the loss gives no gradient (masked, blocked, of advantage 0) cost
    nothing in the backward pass; to find them it waits once for an accelerator. Products are those of the inputs' own
    precision, or of autocast's; all else is in float32, or in float64 where the inputs are.

    Args:
        hidden: What the model hands its head, at the position before each id.
        lm_head_weight: The head's weight, whole: of a DTensor its ``full_tensor()``; under DeepSpeed's ZeRO-3 gathered.
        ids: The sampled tokens.
        bias: The head's bias.
        temperature: The sampling temperature.
        logit_softcap: ``c``, where the model's logits are ``c·tanh(x/c)``, as Gemma 2's are.
        chunk: Entries of the vocabulary at a time. By default as many as make a chunk's logits four times the size of
            the hidden states, and at least 64 MiB.
        entropy: Also the entropy (nats) at each token. It has a gradient, which costs nothing where it is not used.
        top: Also the probability of the so many likeliest tokens together; without a gradient.
        group: The process group over which the vocabulary is split. Each rank passes the same ``hidden`` and ``ids``,
            has the rows of ``lm_head_weight`` from ``offset`` on, and gets the same results; its gradient of ``hidden``
            is the whole one.
        offset: The id of the first row of ``lm_head_weight``.

    Returns:
        The log-probabilities; with ``entropy`` or ``top`` a tuple of them and what is asked for, in this order.

    Raises:
        TypeError: ``hidden`` or a weight is not floating-point, or ``ids`` are not integers.
        ValueError: shapes do not fit; a number is out of range; an id is in no rank's vocabulary. Ids are read on the
            CPU only. Elsewhere such a token's log-probability is NaN.

    >>> _ = torch.manual_seed(0)
    >>> hidden, head, ids = torch.randn(2, 3, 8), torch.randn(50, 8), torch.tensor([[1, 2, 3], [4, 5, 6]])
    >>> full = (hidden @ head.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    >>> torch.allclose(linear_logp(hidden, head, ids), full, atol=1e-5)
    True
    >>> loss = policy_loss(linear_logp(hidden, head, ids), full, torch.ones(2), method="GSPO()").loss
    """
    _check(hidden, lm_head_weight, ids, bias)
    _checks.positive("temperature", temperature)
    for name, number in {"logit_softcap": logit_softcap, "chunk": chunk}.items():
        if number is not None:
            _checks.positive(name, number)
    device = hidden.device.type
    dtype = torch.promote_types(hidden.dtype, lm_head_weight.dtype)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    tokens = hidden.flatten(0, -2).to(dtype)
    if chunk is None:
        # A model keeps more than four tensors of this size for the backward pass of each of its layers.
        chunk = max(4 * tokens.numel(), LEAST_TILE) // max(len(tokens), 1)
    settings = _Settings(temperature, logit_softcap, chunk, entropy, top, group, offset)
    apply: Any = _LinearLogp.apply  # pyright: ignore
    bias = None if bias is None else bias.to(dtype)
    found = apply(tokens, lm_head_weight.to(dtype), bias, ids.flatten(), settings)
    asked = tuple(x.view(ids.shape) for x in found if x is not None)
    return asked if len(asked) > 1 else asked[0]


def _check(hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None) -> None:
    tensors = {"hidden": hidden, "lm_head_weight": weight, "bias": bias}
    tensors = {name: _checks.floating(name, x) for name, x in tensors.items() if x is not None}
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise InvalidType(f"ids must be integers, got {ids.dtype}; convert them with ids.long()")
    fits = ids.dim() > 0 and weight.dim() == 2 and hidden.shape == (*ids.shape, weight.shape[1])
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        given = ", ".join(f"{name} {tuple(x.shape)}" for name, x in {**tensors, "ids": ids}.items())
        raise InvalidValue(
            f"shapes do not fit: {given}; hidden must be (…, width), lm_head_weight (vocabulary, width) and gathered "
            "where it is sharded, bias (vocabulary,), and ids (…)"
        )


@dataclass(frozen=True)
class _Settings:
    """The arguments of `linear_logp` of these names."""

    temperature: float
    softcap: float | None
    chunk: int
    entropy: bool
    top: int
    group: Any
    offset: int

    def tiles(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Parts of the vocabulary, their logits, each id's place among them, and whether it is there at all.

        The logits are in one buffer, which the next part overwrites.
        """
        buffer = hidden.new_empty(len(hidden) * min(self.chunk, len(weight)), dtype=_wide(hidden))
        for start in range(0, len(weight), self.chunk):
            part = slice(start, min(start + self.chunk, len(weight)))
            shape = len(hidden), part.stop - start
            logits = buffer[: shape[0] * shape[1]].view(shape)
            _multiply(hidden, weight[part].T, logits)
            if bias is not None:
                logits += bias[part]
            if self.softcap is not None:
                logits.div_(self.softcap).tanh_().mul_(self.softcap)
            if self.temperature != 1:
                logits.div_(self.temperature)
            place = ids - (self.offset + start)
            here = (place >= 0) & (place < shape[1])
            yield part, logits, place.clamp(0, shape[1] - 1)[:, None], here

    def gathered(self, x: Tensor) -> Tensor:
        """Those of all ranks, stacked."""
        if self.group is None:
            return x[None]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, x, group=self.group)  # pyright: ignore[reportUnknownMemberType]
        return torch.stack(parts)


class _LinearLogp(torch.autograd.Function):
    """`linear_logp` of hidden (tokens, width) and ids (tokens,); None for what is not asked for."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, settings: _Settings
    ) -> tuple[Tensor | None, ...]:
        wide, count = _wide(hidden), len(hidden)
        chosen, mass, mean, known = (hidden.new_zeros(count, dtype=wide) for _ in range(4))
        # Not −inf: where all logits so far are (a bias can be), their exponentials must be 0, not NaN.
        greatest = hidden.new_full((count,), torch.finfo(wide).min, dtype=wide)
        best = hidden.new_full((count, settings.top), -torch.inf, dtype=wide)
        for _, logits, place, here in settings.tiles(hidden, weight, bias, ids):
            known += here
            chosen += logits.gather(1, place)[:, 0].masked_fill(~here, 0.0)
            if settings.top:
                best = torch.cat([best, logits], 1).topk(settings.top).values
            before, greatest = greatest, torch.maximum(greatest, logits.amax(1))
            shrunk = (before - greatest).exp()
            if settings.entropy:
                weights = (logits - greatest[:, None]).exp_()
                mean = mean * shrunk + logits.mul_(weights).sum(1)
            else:
                weights = logits.sub_(greatest[:, None]).exp_()
            mass = mass * shrunk + weights.sum(1)
        totals = settings.gathered(greatest + mass.log())
        total = totals.logsumexp(0)
        chosen, known = settings.gathered(chosen).sum(0), settings.gathered(known).sum(0)
        mean = (settings.gathered(mean / mass) * (totals - total).exp()).sum(0)
        if _checks.values_can_be_read(ids) and not known.all():
            raise InvalidValue(
                f"ids hold {ids[known == 0][0].item()}, which no row of lm_head_weight {tuple(weight.shape)} is for; "
                "give tokens that do not count any other id, and a mask to the loss"
            )
        ctx.save_for_backward(hidden, weight, bias, ids, total, mean)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        top = settings.gathered(best).movedim(0, 1).flatten(1).topk(settings.top).values
        top = (top - total[:, None]).exp().sum(1)
        ctx.mark_non_differentiable(top)
        return (
            (chosen - total).masked_fill(known == 0, torch.nan),
            total - mean if settings.entropy else None,
            top if settings.top else None,
        )

    @staticmethod
    @once_differentiable  # a second derivative would need the logits once more
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator's signature)
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        settings: _Settings = ctx.settings
        hidden, weight, bias, ids, total, mean = ctx.saved_tensors
        to_logp, to_entropy = (torch.zeros_like(total) if x is None else x for x in gradients[:2])
        alive = ((to_logp != 0) | (to_entropy != 0)).nonzero()[:, 0]
        rows, ids, total, mean = (x[alive] for x in (hidden, ids, total, mean))
        to_logp, to_entropy = (x[alive, None] / settings.temperature for x in (to_logp, to_entropy))
        summed = torch.zeros_like(rows, dtype=total.dtype)
        of_hidden, of_weight, of_bias = (
            torch.empty_like(x) if wanted else None
            for x, wanted in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        for part, logits, place, here in settings.tiles(rows, weight, bias, ids):
            slope = None
            if settings.softcap is not None:
                slope = 1 - (logits * (settings.temperature / settings.softcap)).square_()
            if gradients[1] is None:
                logits.sub_(total[:, None]).exp_().mul_(-to_logp)
            else:
                p = (logits - total[:, None]).exp_()
                logits.sub_(mean[:, None]).mul_(-to_entropy).sub_(to_logp).mul_(p)
            logits.scatter_add_(1, place, to_logp.masked_fill(~here[:, None], 0.0))
            if slope is not None:
                logits.mul_(slope)
            if of_bias is not None:
                of_bias[part] = logits.sum(0)
            slopes = logits.to(rows.dtype)
            if of_weight is not None:
                torch.mm(slopes.T, rows, out=of_weight[part])
            if of_hidden is not None:
                summed += slopes @ weight[part]
        if of_hidden is not None:
            whole = torch.zeros_like(hidden, dtype=total.dtype).index_copy_(0, alive, summed)
            if settings.group is not None:
                # Each rank knows its own part of the vocabulary.
                dist.all_reduce(whole, group=settings.group)  # pyright: ignore[reportUnknownMemberType]
            of_hidden.copy_(whole)
        return of_hidden, of_weight, of_bias, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``out = a @ b``, rounded to the precision of ``out`` alone where the device can (CUDA with torch 2.8)."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out"):
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(a @ b)
