"""Log-probabilities straight from hidden states: the logits are never held, so a batch may be larger.

The vocabulary is taken in chunks. A chunk's logits are folded into a running log-sum-exp and forgotten; the backward
pass computes them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from bandpo import _checks
from bandpo.errors import InvalidType, InvalidValue
from bandpo.sequences import offsets

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["linear_logp"]

LEAST_TILE = 2**24  # logits of a chunk by default, at least: 64 MiB in float32


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

    Neither pass holds more than a chunk of logits. Gradients go to ``hidden``, ``lm_head_weight`` and ``bias``, each
    where it is wanted. Tokens to which the loss gives none (masked, blocked, of advantage 0) cost nothing in the
    backward pass; to find them it waits once for an accelerator. Products have the inputs' precision, or autocast's;
    the rest is in float32, or in float64 where the inputs are. A graph of ``torch.compile`` breaks here.

    Args:
        hidden: What the model hands its head, at the position before each id. Of a packed batch it has any shape; a
            jagged one, (batch, jagged, width), goes with jagged ``ids`` and gives jagged results.
        lm_head_weight: The head's weight, gathered where it is sharded: of a DTensor its ``full_tensor()``.
        ids: The sampled tokens.
        bias: The head's bias.
        temperature: The sampling temperature.
        logit_softcap: ``c``, where the model's logits are ``c·tanh(x/c)``, as Gemma 2's are.
        chunk: Entries of the vocabulary at a time; by default for four times as many logits as ``hidden`` has entries.
        entropy: Also the entropy (nats) at each token. It has a gradient, which costs nothing where it is not used.
        top: Also the probability of the so many likeliest tokens together, without a gradient.
        group: The process group over which the vocabulary is split. All ranks pass the same ``hidden`` and ``ids``, and
            get the same results and the whole gradient of ``hidden``; each has the head's rows from ``offset`` on.
        offset: The id of the first row of ``lm_head_weight``.

    Returns:
        The log-probabilities; with ``entropy`` or ``top`` a tuple of them and what is asked for, in this order.

    Raises:
        TypeError: ``hidden`` or a weight is not floating-point, or ``ids`` are not integers.
        ValueError: shapes do not fit; a number is out of range; no row is for an id. Ids are read on the CPU only.
            Elsewhere such a token's log-probability is NaN.

    >>> hidden, head, ids = torch.randn(2, 3, 8), torch.randn(50, 8), torch.tensor([[1, 2, 3], [4, 5, 6]])
    >>> full = (hidden @ head.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    >>> torch.allclose(linear_logp(hidden, head, ids), full, atol=1e-5)
    True
    >>> loss = policy_loss(linear_logp(hidden, head, ids), full, torch.ones(2), method="GSPO()").loss
    """
    ends = None
    if hidden.is_nested or ids.is_nested:
        if not (hidden.is_nested and ids.is_nested) or hidden.values().shape[:-1] != ids.values().shape:
            raise InvalidType(
                "hidden and ids must both be jagged, with rows of the same lengths, or both dense"
            )
        ends = offsets(ids)
        hidden, ids = hidden.values(), ids.values()
    given = {"hidden": hidden, "lm_head_weight": lm_head_weight} | ({} if bias is None else {"bias": bias})
    for name, x in given.items():
        _checks.as_float(name, x[:0])  # none of it, so that nothing is converted
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise InvalidType(f"ids must be integers, got {ids.dtype}; convert them with ids.long()")
    rows, width = lm_head_weight.shape if lm_head_weight.dim() == 2 else (0, 0)
    if not rows or hidden.shape != (*ids.shape, width) or (bias is not None and bias.shape != (rows,)):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in {**given, "ids": ids}.items())
        raise InvalidValue(
            f"{shapes} do not fit; they must be hidden (…, width), lm_head_weight (vocabulary, width), gathered where "
            "it is sharded, bias (vocabulary,), and ids (…)"
        )
    for name, number in {"temperature": temperature, "logit_softcap": logit_softcap, "chunk": chunk}.items():
        if number is not None:
            _checks.positive(name, number)
    dtype = torch.promote_types(hidden.dtype, lm_head_weight.dtype)
    # The meta device has no autocast, and asking for it raises.
    if hidden.device.type != "meta" and torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    tokens = hidden.reshape(-1, width).to(dtype)
    if chunk is None:
        # A model keeps more than four tensors of this size for the backward pass of each of its layers.
        chunk = max(4 * tokens.numel(), LEAST_TILE) // max(len(tokens), 1)
    settings = _Settings(temperature, logit_softcap, min(chunk, rows), entropy, top, group, offset)
    weight, bias = lm_head_weight.to(dtype), None if bias is None else bias.to(dtype)
    apply: Any = torch.compiler.disable(_LinearLogp.apply)  # pyright: ignore
    found = apply(tokens, weight, bias, ids.flatten(), settings)
    asked = [x.view(ids.shape) for x in found if x is not None]
    if ends is not None:
        asked = [torch.nested.nested_tensor_from_jagged(x, ends) for x in asked]
    return tuple(asked) if entropy or top else asked[0]


class _Settings(NamedTuple):
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
        """Parts of the vocabulary, logits that the next part overwrites, ids' places in it, and whether they are."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        buffer = hidden.new_empty(len(hidden) * self.chunk, dtype=wide)
        for start in range(0, len(weight), self.chunk):
            part = slice(start, min(start + self.chunk, len(weight)))
            width = part.stop - start
            logits = buffer[: len(hidden) * width].view(len(hidden), width)
            if wide == hidden.dtype:
                torch.mm(hidden, weight[part].T, out=logits)
            elif hidden.is_cuda and hasattr(
                torch.ops.aten.mm, "dtype_out"
            ):  # torch 2.8: no rounding to bfloat16
                torch.mm(hidden, weight[part].T, out_dtype=wide, out=logits)
            else:
                logits.copy_(hidden @ weight[part].T)
            if bias is not None:
                logits += bias[part]
            if self.softcap is not None:
                logits.div_(self.softcap).tanh_().mul_(self.softcap)
            if self.temperature != 1:
                logits.div_(self.temperature)
            place = ids - (self.offset + start)
            yield part, logits, place.clamp(0, width - 1)[:, None], (place >= 0) & (place < width)

    def of_ranks(self, x: Tensor) -> Tensor:
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
        of_ranks, wide = settings.of_ranks, torch.promote_types(hidden.dtype, torch.float32)
        chosen, mass, mean, known = (hidden.new_zeros(len(hidden), dtype=wide) for _ in range(4))
        # Not −inf: where all logits so far are (a bias can be), their exponentials must be 0, not NaN.
        greatest = torch.full_like(mass, torch.finfo(wide).min)
        best = hidden.new_full((len(hidden), settings.top), -torch.inf, dtype=wide)
        for _, logits, place, here in settings.tiles(hidden, weight, bias, ids):
            known += here
            chosen += logits.gather(1, place)[:, 0].masked_fill(~here, 0.0)
            if settings.top:
                best = torch.cat([best, logits], 1).topk(settings.top).values
            before, greatest = greatest, torch.maximum(greatest, logits.amax(1))
            shrunk = (before - greatest).exp()
            if settings.entropy:
                shares = (logits - greatest[:, None]).exp_()
                mean = mean * shrunk + logits.mul_(shares).sum(1)
            else:
                shares = logits.sub_(greatest[:, None]).exp_()
            mass = mass * shrunk + shares.sum(1)
        totals, known = of_ranks(greatest + mass.log()), of_ranks(known).sum(0)
        total = totals.logsumexp(0)
        mean = (of_ranks(mean / mass) * (totals - total).exp()).sum(0)
        logp = (of_ranks(chosen).sum(0) - total).masked_fill(known == 0, torch.nan)
        best = of_ranks(best).movedim(0, 1).flatten(1).topk(settings.top).values
        top = (best - total[:, None]).exp().sum(1)
        if _checks.values_can_be_read(ids) and not known.all():
            raise InvalidValue(
                f"ids hold {ids[known == 0][0].item()}, which no row of lm_head_weight {tuple(weight.shape)} is for; "
                "give tokens that do not count any other id, and a mask to the loss"
            )
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, bias, ids, total, mean)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(top)
        return logp, total - mean if settings.entropy else None, top if settings.top else None

    @staticmethod
    @once_differentiable  # a second derivative would need the logits once more
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator's signature)
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        settings: _Settings = ctx.settings
        hidden, weight, bias, ids, total, mean = ctx.saved_tensors
        to_logp, to_entropy = (torch.zeros_like(total) if x is None else x for x in gradients[:2])
        alive = ((to_logp != 0) | (to_entropy != 0)).nonzero()[:, 0]
        rows, ids = hidden[alive], ids[alive]
        total, mean = total[alive, None], mean[alive, None]
        to_logp, to_entropy = (x[alive, None] / settings.temperature for x in (to_logp, to_entropy))
        wanted, summed, of_hidden = ctx.needs_input_grad, torch.zeros_like(rows, dtype=total.dtype), None
        of_weight = torch.empty_like(weight) if wanted[1] else None
        of_bias = torch.empty_like(bias) if wanted[2] else None
        for part, logits, place, here in settings.tiles(rows, weight, bias, ids):
            cap = settings.softcap
            slope = None if cap is None else 1 - (logits * (settings.temperature / cap)).square_()
            if gradients[1] is None:
                logits.sub_(total).exp_().mul_(-to_logp)
            else:
                shares = (logits - total).exp_()
                logits.sub_(mean).mul_(-to_entropy).sub_(to_logp).mul_(shares)
            logits.scatter_add_(1, place, to_logp.masked_fill(~here[:, None], 0.0))
            slopes = (logits if slope is None else logits.mul_(slope)).to(rows.dtype)
            if wanted[0]:
                summed += slopes @ weight[part]
            if of_weight is not None:
                torch.mm(slopes.T, rows, out=of_weight[part])
            if of_bias is not None:
                of_bias[part] = logits.sum(0)
        if wanted[0]:
            of_hidden = torch.zeros_like(hidden, dtype=total.dtype).index_copy_(0, alive, summed)
            if settings.group is not None:
                # Each rank knows its own part of the vocabulary.
                dist.all_reduce(of_hidden, group=settings.group)  # pyright: ignore[reportUnknownMemberType]
            of_hidden = of_hidden.to(hidden.dtype)
        return of_hidden, of_weight, of_bias, None, None
