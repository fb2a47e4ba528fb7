"""Log-probabilities from hidden states without storing all logits, which allows larger batches.

The vocabulary is processed in chunks. The logits of a chunk update a running log-sum-exp and are then discarded; the
backward pass computes them again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from . import _checks
from ._derivatives import first_derivative_only
from .errors import InvalidType, InvalidValue
from .layout import offsets

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

__all__ = ["LinearLogp", "linear_logp"]

SMALLEST_CHUNK = 2**24
"""Smallest default number of logits in a chunk: 64 MiB in float32."""
KERNEL_ALIGNMENT = 256
"""The kernels' default number of vocabulary entries of a chunk is a multiple of this, so that rows are aligned."""
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The precisions of hidden states for which there are kernels."""
TRIAL_TOKENS = 256
"""The number of tokens whose results with and without kernels are compared."""


class LinearLogp(NamedTuple):
    """The result of `linear_logp`, in the shape of ``ids``."""

    logp: Float[Tensor, "*tokens"]
    """The log-probabilities (nats)."""
    entropy: Float[Tensor, "*tokens"] | None = None
    """The entropies (nats), with a gradient; None if not requested."""
    top: Float[Tensor, "*tokens"] | None = None
    """The total probabilities of the most likely tokens, without a gradient; None if not requested."""


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
    kernels: bool = False,
) -> LinearLogp:
    """Compute the log-probabilities (nats) of ``ids`` from the last hidden states of a model.

    They are those under ``softmax(softcap(hidden @ lm_head_weight.T + bias) / temperature)``. Neither the forward nor
    the backward pass stores more than a chunk of logits. ``hidden``, ``lm_head_weight`` and ``bias`` get a gradient if
    they require one. The backward pass skips tokens whose gradient is 0 (masked, blocked, or with A = 0), for which it
    synchronises once with an accelerator. Matrix products have the precision of the inputs or of autocast; everything
    else is in float32, or in float64 for float64 inputs. A graph of ``torch.compile`` breaks at this function.

    Some models multiply their logits by a scale s, before a cap. For Cohere s is ``config.logit_scale``, for Granite
    ``1 / config.logits_scaling``. For these, pass ``temperature / s``, and ``logit_softcap / s`` if there is a cap.

    Args:
        hidden: Hidden states at the position before each id, (..., width): the input of the model's head. With jagged
            ``ids``, a jagged tensor (batch, jagged, width).
        lm_head_weight: The head's weight, (vocabulary, width). Gather it if it is sharded: pass ``full_tensor()`` of a
            DTensor.
        ids: Ids of the sampled tokens, (...).
        bias: The head's bias, (vocabulary,).
        temperature: The sampling temperature.
        logit_softcap: ``c`` for a model whose logits are ``c·tanh(x/c)``, such as Gemma 2.
        chunk: Number of vocabulary entries per chunk; by default such that a chunk has four times as many logits as
            ``hidden`` has entries, or eight times as many with kernels.
        entropy: True to compute the entropies as well. They are differentiable, at no cost if unused.
        top: If above 0, also compute the total probability of this many most likely tokens.
        group: The process group over which the vocabulary is split. Each rank passes the same ``hidden`` and ``ids``
            and its own rows of the head, and gets the same results and the whole gradient of ``hidden``.
        offset: The id of the first row of ``lm_head_weight``.
        kernels: Experimental, as no card has run them. True to read each chunk of logits once on a CUDA device, with
            kernels in Triton. The results are equal but for rounding; the bias's gradient is a sum of numbers in the
            precision of ``hidden``. The first results are compared with those without kernels. If they differ, or
            without Triton, with ``top``, ``group`` or float64, a `BandWarning` gives the reason, and the results are
            those without kernels.

    Returns:
        The log-probabilities, and the entropies and total probabilities if requested.

    Raises:
        TypeError: if ``hidden`` or a weight is not floating-point, or ``ids`` are not integers.
        ValueError: if shapes do not fit, a number is out of range, or an id has no row in the head. Ids are read on the
            CPU only; on an accelerator the log-probability of such a token is NaN.

    >>> hidden, head, ids = torch.randn(2, 3, 8), torch.randn(50, 8), torch.tensor([[1, 2, 3], [4, 5, 6]])
    >>> full = (hidden @ head.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    >>> logp, entropy, _ = linear_logp(hidden, head, ids, entropy=True)
    >>> torch.allclose(logp, full, atol=1e-5)
    True
    >>> scaled = (0.25 * hidden @ head.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    >>> torch.allclose(linear_logp(hidden, head, ids, temperature=1 / 0.25).logp, scaled, atol=1e-5)
    True
    >>> loss = policy_loss(logp, full, torch.ones(2), method="GSPO()").loss
    """
    ends = None
    if hidden.is_nested or ids.is_nested:
        if not (hidden.is_nested and ids.is_nested) or hidden.values().shape[:-1] != ids.values().shape:
            raise InvalidType(
                "hidden and ids must both be jagged, with rows of the same lengths, or both dense"
            )
        ends = offsets(ids)
        hidden = hidden.values()
        ids = ids.values()
    _check_head(hidden, lm_head_weight, bias, ids)
    for name, number in {"temperature": temperature, "logit_softcap": logit_softcap, "chunk": chunk}.items():
        if number is not None:
            _checks.positive(name, number)

    dtype = torch.promote_types(hidden.dtype, lm_head_weight.dtype)
    # torch.is_autocast_enabled raises an error for the meta device.
    if hidden.device.type != "meta" and torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    vocabulary, width = lm_head_weight.shape
    tokens = hidden.reshape(-1, width).to(dtype)
    if chunk is None:
        # Four tensors of the size of ``hidden`` are less than a model stores for the backward pass of one layer.
        chunk = max(4 * tokens.numel(), SMALLEST_CHUNK) // max(len(tokens), 1)
        # The kernels need no temporary tensors beside the products and their gradient. Twice the entries leave the
        # peak memory far below that of full logits, and larger products of matrices use a GPU better.
        kernel_chunk = math.ceil(2 * chunk / KERNEL_ALIGNMENT) * KERNEL_ALIGNMENT
    else:
        kernel_chunk = chunk
    settings = _Settings(temperature, logit_softcap, min(chunk, vocabulary), entropy, top, group, offset)
    kernel_settings = None
    if kernels:
        kernel_settings = settings._replace(kernels=True, chunk=min(kernel_chunk, vocabulary))
    weight = lm_head_weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    apply: Any = torch.compiler.disable(_apply)  # pyright: ignore[reportUnknownMemberType]
    outputs = apply(tokens, weight, bias, ids.flatten(), settings, kernel_settings)

    results: list[Any] = []
    for x in outputs:
        shaped = None if x is None else x.view(ids.shape)
        if shaped is not None and ends is not None:
            shaped = torch.nested.nested_tensor_from_jagged(shaped, ends)
        results.append(shaped)
    return LinearLogp(*results)


def _check_head(hidden: Tensor, lm_head_weight: Tensor, bias: Tensor | None, ids: Tensor) -> None:
    """Check the types and shapes of the tensors of `linear_logp`.

    Raises:
        TypeError: if ``hidden`` or a weight is not floating-point, or ``ids`` are not integers.
        ValueError: if shapes do not fit.
    """
    weights = {"hidden": hidden, "lm_head_weight": lm_head_weight}
    if bias is not None:
        weights["bias"] = bias
    for name, x in weights.items():
        _checks.as_float(name, x[:0])  # a slice without elements, so that nothing is converted
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise InvalidType(f"ids must be integers, got {ids.dtype}; convert them with ids.long()")

    vocabulary, width = lm_head_weight.shape if lm_head_weight.dim() == 2 else (0, 0)
    bias_fits = bias is None or bias.shape == (vocabulary,)
    if not vocabulary or hidden.shape != (*ids.shape, width) or not bias_fits:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in {**weights, "ids": ids}.items())
        raise InvalidValue(
            f"{shapes} do not fit; they must be hidden (…, width), lm_head_weight (vocabulary, width), gathered if it "
            "is sharded, bias (vocabulary,), and ids (…)"
        )


class _Chunk(NamedTuple):
    """The products of hidden states and one chunk of the vocabulary."""

    rows: slice
    """The chunk's rows of the head's weight."""
    products: Float[Tensor, "tokens chunk"]
    """The products. The next chunk overwrites them."""
    id_column: Int[Tensor, " tokens"]
    """The column of each token's id; outside of 0 to chunk − 1 if it is in another chunk."""

    def find_ids(self) -> tuple[Int[Tensor, "tokens 1"], Bool[Tensor, " tokens"]]:
        """Return a column for each token, and whether it is its id's."""
        last = self.products.shape[1] - 1
        return self.id_column.clamp(0, last)[:, None], (self.id_column >= 0) & (self.id_column <= last)


class _Settings(NamedTuple):
    """The arguments of `linear_logp` that are not tensors."""

    temperature: float
    softcap: float | None
    chunk: int
    entropy: bool
    top: int
    group: Any
    offset: int
    kernels: bool = False

    def chunks(self, hidden: Tensor, weight: Tensor, ids: Tensor) -> Iterator[_Chunk]:
        """Multiply hidden states (tokens, width) with one chunk of the vocabulary after the other."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        buffer = hidden.new_empty(len(hidden) * self.chunk, dtype=wide)
        for start in range(0, len(weight), self.chunk):
            rows = slice(start, min(start + self.chunk, len(weight)))
            width = rows.stop - start
            products = buffer[: len(hidden) * width].view(len(hidden), width)
            if wide == hidden.dtype:
                torch.mm(hidden, weight[rows].T, out=products)
            elif hidden.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out"):
                # From torch 2.8 on the product is not rounded to the inputs' half precision.
                torch.mm(hidden, weight[rows].T, out_dtype=wide, out=products)
            else:
                products.copy_(hidden @ weight[rows].T)
            yield _Chunk(rows, products, ids - (self.offset + start))

    def logits(self, chunk: _Chunk, bias: Tensor | None) -> Tensor:
        """Overwrite the products of a chunk with its logits, and return them."""
        logits = chunk.products
        if bias is not None:
            logits += bias[chunk.rows]
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1:
            logits.div_(self.temperature)
        return logits

    def gather_ranks(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked along a new first dimension."""
        if self.group is None:
            return x[None]
        tensors = [torch.empty_like(x) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(tensors, x, group=self.group)  # pyright: ignore[reportUnknownMemberType]
        return torch.stack(tensors)


class _TokenStatistics(NamedTuple):
    """The statistics of each token's logits over the rows of the head of one rank."""

    id_logit: Float[Tensor, " tokens"]
    """The logit of the token's id; 0 if its row is on another rank."""
    logsumexp: Float[Tensor, " tokens"]
    mean_logit: Float[Tensor, " tokens"]
    """The mean logit; without a meaning if no entropy is requested."""
    highest: Float[Tensor, "tokens top"]
    """The highest logits."""


def _statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, settings: _Settings
) -> _TokenStatistics:
    """Compute the statistics of the logits of hidden states (tokens, width)."""
    if settings.kernels:
        return _statistics_with_kernels(hidden, weight, bias, ids, settings)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    # Per token: the logit of its id, the running maximum of the logits, the sums of exp(logit − maximum) and of
    # logit·exp(logit − maximum), and the highest logits.
    id_logit = hidden.new_zeros(len(hidden), dtype=wide)
    exp_sum = torch.zeros_like(id_logit)
    weighted_sum = torch.zeros_like(id_logit)
    # The smallest finite number instead of −inf: if all logits so far are −inf (by the bias), their exponentials
    # must be 0, not NaN.
    maximum = torch.full_like(exp_sum, torch.finfo(wide).min)
    highest = hidden.new_full((len(hidden), settings.top), -torch.inf, dtype=wide)
    for chunk in settings.chunks(hidden, weight, ids):
        logits = settings.logits(chunk, bias)
        column, has_id = chunk.find_ids()
        id_logit += logits.gather(1, column)[:, 0].masked_fill(~has_id, 0.0)
        if settings.top:
            highest = torch.cat([highest, logits], 1).topk(settings.top).values
        previous_maximum = maximum
        maximum = torch.maximum(maximum, logits.amax(1))
        rescale = (previous_maximum - maximum).exp()
        if settings.entropy:
            exponentials = (logits - maximum[:, None]).exp_()
            weighted = logits.mul_(exponentials)
            if bias is not None:
                # An entry that the bias rules out (a logit of −inf) adds nothing, and −inf · 0 is NaN.
                weighted.masked_fill_(exponentials == 0, 0.0)
            weighted_sum = weighted_sum * rescale + weighted.sum(1)
        else:
            exponentials = logits.sub_(maximum[:, None]).exp_()
        exp_sum = exp_sum * rescale + exponentials.sum(1)
    return _TokenStatistics(id_logit, maximum + exp_sum.log(), weighted_sum / exp_sum, highest)


def _statistics_with_kernels(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, settings: _Settings
) -> _TokenStatistics:
    """Compute the same as `_statistics`, reading the products of each chunk once."""
    from .kernels._linear_logp_kernels import LogitSettings, Statistics

    statistics = Statistics(
        len(hidden),
        len(weight),
        settings.chunk,
        LogitSettings(settings.temperature, settings.softcap),
        entropy=settings.entropy,
        device=hidden.device,
    )
    for chunk in settings.chunks(hidden, weight, ids):
        statistics.add(chunk.products, None if bias is None else bias[chunk.rows], chunk.id_column)
    logsumexp, mean_logit = statistics.combine()
    return _TokenStatistics(statistics.id_logit, logsumexp, mean_logit, logsumexp.new_empty(len(hidden), 0))


class _Gradients(NamedTuple):
    """The gradients of the tensors of `linear_logp`; None for those that were not requested."""

    hidden: Float[Tensor, "tokens width"] | None
    """Of the hidden states, not yet rounded to their precision."""
    weight: Float[Tensor, "vocabulary width"] | None
    bias: Float[Tensor, " vocabulary"] | None


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    logsumexp: Tensor,
    mean_logit: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    settings: _Settings,
    needs: tuple[bool, bool, bool],
) -> _Gradients:
    """Compute the gradients by hidden states (tokens, width), head and bias.

    Args:
        hidden: The hidden states.
        weight: The head's weight.
        bias: The head's bias.
        ids: The ids.
        logsumexp: The log-sum-exp of the logits, (tokens,).
        mean_logit: The mean logits, (tokens,).
        grad_logp: The derivatives of the loss by the log-probabilities, (tokens,).
        grad_entropy: The derivatives of the loss by the entropies, (tokens,); None if it has none.
        settings: The settings.
        needs: True for each of hidden, weight and bias whose gradient is requested.
    """
    needs_hidden, needs_weight, needs_bias = needs
    grad_hidden = torch.zeros_like(hidden, dtype=logsumexp.dtype) if needs_hidden else None
    grad_weight = torch.empty_like(weight) if needs_weight else None
    grad_bias = torch.empty_like(bias) if bias is not None and needs_bias else None
    for chunk in settings.chunks(hidden, weight, ids):
        if settings.kernels:
            from .kernels._linear_logp_kernels import LogitSettings, gradient_by_products

            grad_products = gradient_by_products(
                chunk.products,
                None if bias is None else bias[chunk.rows],
                chunk.id_column,
                logsumexp,
                mean_logit,
                grad_logp,
                grad_entropy,
                hidden.dtype,
                LogitSettings(settings.temperature, settings.softcap),
            )
        else:
            grad_products = _gradient_by_products(
                settings, chunk, bias, logsumexp, mean_logit, grad_logp, grad_entropy
            )
        rounded = grad_products.to(hidden.dtype)
        if grad_hidden is not None:
            grad_hidden += rounded @ weight[chunk.rows]
        if grad_weight is not None:
            torch.mm(rounded.T, hidden, out=grad_weight[chunk.rows])
        if grad_bias is not None:
            grad_bias[chunk.rows] = grad_products.sum(0, dtype=logsumexp.dtype)
        del grad_products, rounded  # before the next chunk allocates its own
    return _Gradients(grad_hidden, grad_weight, grad_bias)


def _gradient_by_products(
    settings: _Settings,
    chunk: _Chunk,
    bias: Tensor | None,
    logsumexp: Tensor,
    mean_logit: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Overwrite the products of a chunk with the derivative of the loss by them, and return it."""
    logits = settings.logits(chunk, bias)
    column, has_id = chunk.find_ids()
    by_logp = grad_logp[:, None] / settings.temperature
    softcap_derivative = None
    if settings.softcap is not None:
        # d/dx c·tanh(x/c) = 1 − tanh²(x/c); logits are c·tanh(x/c)/temperature.
        softcap_derivative = 1 - (logits * (settings.temperature / settings.softcap)).square_()

    if grad_entropy is None:
        logits.sub_(logsumexp[:, None]).exp_().mul_(-by_logp)
    else:
        by_entropy = grad_entropy[:, None] / settings.temperature
        probabilities = (logits - logsumexp[:, None]).exp_()
        logits.sub_(mean_logit[:, None]).mul_(-by_entropy).sub_(by_logp).mul_(probabilities)
        if bias is not None:
            logits.masked_fill_(probabilities == 0, 0.0)
    logits.scatter_add_(1, column, by_logp.masked_fill(~has_id[:, None], 0.0))
    if softcap_derivative is not None:
        logits.mul_(softcap_derivative)
    return logits


@functools.cache
def _trial() -> Any:
    """Return the verdicts on the kernels of this process."""
    from .kernels._trial import Trial

    return Trial("linear_logp(…, kernels=True)")


def _kernels_agree(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, settings: _Settings, kernels: _Settings
) -> bool:
    """Return True if the kernels can run, and their first results are those without kernels; warn otherwise.

    Args:
        hidden: The hidden states, (tokens, width).
        weight: The head's weight.
        bias: The head's bias.
        ids: The ids.
        settings: The settings without kernels.
        kernels: The settings with kernels.
    """
    from .kernels._trial import reason_against

    reason = reason_against(hidden, weight, bias, ids)
    if settings.top:
        reason = f"the kernels do not compute top={settings.top}"
    elif settings.group is not None:
        reason = "the kernels do not combine the results of a group"
    elif hidden.dtype not in KERNEL_DTYPES:
        reason = f"hidden is {hidden.dtype}, and the kernels compute in float32"
    if reason is not None:
        _trial().refuse(reason)
        return False
    if not len(hidden):
        return False

    sample = slice(0, TRIAL_TOKENS)

    def results(settings: _Settings) -> dict[str, Tensor]:
        """Compute what the kernels compute: the statistics, and gradients for some derivatives of a loss."""
        tokens = hidden[sample].detach()
        statistics = _statistics(tokens, weight, bias, ids[sample], settings)
        by_logp = torch.linspace(-1.0, 1.0, len(tokens), device=tokens.device)
        by_entropy = by_logp.flip(0) if settings.entropy else None
        gradients = _gradients(
            tokens,
            weight,
            bias,
            ids[sample],
            statistics.logsumexp,
            statistics.mean_logit,
            by_logp,
            by_entropy,
            settings,
            (True, False, bias is not None),
        )
        named = {
            "log-sum-exp": statistics.logsumexp,
            # −inf, of an id that the bias rules out, has no difference from itself.
            "logit of the id": statistics.id_logit.nan_to_num(math.nan, neginf=0.0),
            "mean logit": statistics.mean_logit if settings.entropy else None,
            "gradient of hidden": gradients.hidden,
            "gradient of bias": gradients.bias,
        }
        return {name: x for name, x in named.items() if x is not None}

    rounding = torch.finfo(hidden.dtype).eps
    tolerances = {"log-sum-exp": 1e-5, "logit of the id": 1e-5, "mean logit": 1e-5}
    tolerances |= {"gradient of hidden": max(4 * rounding, 1e-4), "gradient of bias": max(4 * rounding, 1e-4)}
    # Triton compiles a kernel for each of these, and for numbers that are multiples of 16.
    variant = (
        hidden.device,
        hidden.dtype,
        bias is None,
        settings.softcap is None,
        settings.temperature == 1,
        settings.entropy,
        kernels.chunk % 16 == 0,
        len(weight) % 16 == 0,
    )
    with torch.no_grad():
        return _trial().passed(variant, lambda: results(kernels), lambda: results(settings), tolerances)


def _apply(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    settings: _Settings,
    kernel_settings: _Settings | None,
) -> tuple[Tensor | None, ...]:
    """Apply `_LinearLogp` with kernels, if their settings are given and their results agree, or without."""
    if kernel_settings is not None and _kernels_agree(hidden, weight, bias, ids, settings, kernel_settings):
        settings = kernel_settings
    return _LinearLogp.apply(hidden, weight, bias, ids, settings)  # pyright: ignore


class _LinearLogp(torch.autograd.Function):
    """The autograd function of `linear_logp`, for hidden states (tokens, width) and ids (tokens,).

    It returns the log-probabilities, the entropies and the total probabilities of the most likely tokens, with None for
    those that were not requested.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, settings: _Settings
    ) -> tuple[Tensor | None, ...]:
        statistics = _statistics(hidden, weight, bias, ids, settings)
        row = ids - settings.offset
        has_row = ((row >= 0) & (row < len(weight))).to(statistics.logsumexp.dtype)

        # Combine the ranks: log-sum-exp, mean logit, and the results.
        gather_ranks = settings.gather_ranks
        rank_logsumexp = gather_ranks(statistics.logsumexp)
        id_count = gather_ranks(has_row).sum(0)
        logsumexp = rank_logsumexp.logsumexp(0)
        mean_logit = (gather_ranks(statistics.mean_logit) * (rank_logsumexp - logsumexp).exp()).sum(0)
        id_logit = gather_ranks(statistics.id_logit).sum(0)
        logp = (id_logit - logsumexp).masked_fill(id_count == 0, torch.nan)
        highest = gather_ranks(statistics.highest).movedim(0, 1).flatten(1).topk(settings.top).values
        top = (highest - logsumexp[:, None]).exp().sum(1)
        if _checks.values_can_be_read(ids) and not id_count.all():
            raise InvalidValue(
                f"ids hold {ids[id_count == 0][0].item()}, which has no row in lm_head_weight {tuple(weight.shape)}; "
                "pass another id for tokens that do not count, and a mask to the loss"
            )

        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, bias, ids, logsumexp, mean_logit)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(top)
        entropy = logsumexp - mean_logit if settings.entropy else None
        return logp, entropy, top if settings.top else None

    @staticmethod
    @first_derivative_only("linear_logp")  # a second derivative would need the logits once more
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        settings: _Settings = ctx.settings
        hidden, weight, bias, ids, logsumexp, mean_logit = ctx.saved_tensors
        grad_logp, grad_entropy = (torch.zeros_like(logsumexp) if x is None else x for x in gradients[:2])

        # Only tokens with a gradient are computed.
        active = ((grad_logp != 0) | (grad_entropy != 0)).nonzero()[:, 0]
        computed = _gradients(
            hidden[active],
            weight,
            bias,
            ids[active],
            logsumexp[active],
            mean_logit[active],
            grad_logp[active],
            None if gradients[1] is None else grad_entropy[active],
            settings,
            ctx.needs_input_grad[:3],
        )
        grad_hidden = None
        if computed.hidden is not None:
            grad_hidden = torch.zeros_like(hidden, dtype=logsumexp.dtype).index_copy_(
                0, active, computed.hidden
            )
            if settings.group is not None:
                # Each rank has the gradient of its own rows of the vocabulary.
                dist.all_reduce(grad_hidden, group=settings.group)  # pyright: ignore[reportUnknownMemberType]
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, computed.weight, computed.bias, None, None
