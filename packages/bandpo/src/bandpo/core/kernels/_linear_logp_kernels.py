"""The two kernels of `linear_logp`: each reads the logits of a chunk of the vocabulary once.

The matrix product of hidden states and a chunk of the head leaves one number x for each token and vocabulary entry. The
logit is

    z = c·tanh((x + bias) / c) / T          with a cap c,
    z = (x + bias) / T                      without one,

where T is the temperature.

`Statistics` is the forward pass. For each token and each block of columns it stores

    m = max z,        s = Σ exp(z − m),        w = Σ z·exp(z − m)

and the logit of the token's id. The log-sum-exp of a block is m + log s, its mean logit w / s. No block needs the
result of another one, so that the blocks of a token run in parallel, and the few numbers of all blocks are combined at
the end.

`gradient_by_products` is the backward pass. With the probability p = exp(z − logsumexp), the log-probability of the id
and the entropy H have the derivatives

    d logp / dz = 1[the column is the id's] − p,        dH / dz = −p·(z − mean logit),

and dz/dx is (1 − tanh²((x + bias) / c)) / T. The result has the precision of the hidden states, in which the matrix
products that follow read it.

Memory traffic: the forward pass reads 4 bytes a logit. The backward pass reads 4 and writes 2 (4 for float32 inputs).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 2048
"""The number of columns of one program: 16 for each of its threads."""
COMPILATION = {"num_warps": 4, "enable_fp_fusion": True}
"""The compiler's options: 128 threads a program, and a·b + c as one instruction, whatever Triton's default is."""


@triton.jit
def _tanh(x):
    """Compute tanh(x) with a relative error below 3e-7.

    Near 0 the formula with exp would lose digits, so a polynomial takes its place: tanh(x) = x + x³·P(x²), fitted for
    |x| < 0.6, with a relative error of 8e-8.
    """
    square = x * x
    polynomial = 0.020794617 + square * -0.0058939452
    polynomial = -0.053783293 + square * polynomial
    polynomial = 0.13331915 + square * polynomial
    polynomial = -0.33333299 + square * polynomial
    near_zero = x + x * (square * polynomial)
    decay = tl.exp(-2 * tl.abs(x))
    magnitude = (1 - decay) / (1 + decay)
    elsewhere = tl.where(x < 0, -magnitude, magnitude)
    return tl.where(tl.abs(x) < 0.6, near_zero, elsewhere)


@triton.jit
def _biased_products(products, bias, row, columns, width, HAS_BIAS: tl.constexpr):
    """Load x + bias of a token in some columns of its row of products; 0 beyond the row."""
    inside = columns < width
    x = tl.load(products + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _capped(x, inverse_cap, HAS_CAP: tl.constexpr):
    """Return the share tanh(x / c) of the cap, and x itself without a cap."""
    if HAS_CAP:
        return _tanh(x * inverse_cap)
    return x


@triton.jit
def _statistics_kernel(
    products,  # (tokens, width): the products x of this chunk
    bias,  # (width,)
    id_column,  # (tokens,): the column of each token's id in this chunk; outside of 0 to width − 1 if it is not here
    maximum,  # (blocks, tokens): the statistics, from this chunk's first block on
    exp_sum,
    weighted_sum,
    id_logit,  # (tokens,)
    tokens,
    width,
    inverse_cap,  # 1/c
    scale,  # c/T with a cap, 1/T without
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the statistics of one token's logits in one block of columns."""
    row = tl.program_id(0).to(tl.int64)  # row · width can exceed 32 bits
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    z = _capped(_biased_products(products, bias, row, columns, width, HAS_BIAS), inverse_cap, HAS_CAP)
    if HAS_SCALE:
        z *= scale
    z = tl.where(columns < width, z, -float("inf"))

    # The smallest finite number in place of −inf: if all logits are −inf (by the bias), exp must give 0, not NaN.
    m = tl.maximum(tl.max(z, axis=0), -3.4028234663852886e38)
    exponentials = tl.exp(z - m)
    place = block.to(tl.int64) * tokens + row
    tl.store(maximum + place, m)
    tl.store(exp_sum + place, tl.sum(exponentials, axis=0))
    if HAS_ENTROPY:
        # A logit of −inf adds nothing, where −inf · 0 would be NaN.
        weighted = tl.where(exponentials > 0, z, 0.0) * exponentials
        tl.store(weighted_sum + place, tl.sum(weighted, axis=0))

    # One program for each token has its id.
    column = tl.load(id_column + row)
    first = block * BLOCK
    is_here = (column >= first) & (column < first + BLOCK) & (column < width)
    if is_here:
        z_id = _capped(_biased_products(products, bias, row, column, width, HAS_BIAS), inverse_cap, HAS_CAP)
        if HAS_SCALE:
            z_id *= scale
        tl.store(id_logit + row, z_id)


@triton.jit
def _gradient_kernel(
    products,  # (tokens, width): the products x of this chunk
    bias,  # (width,)
    id_column,  # (tokens,): the column of each token's id in this chunk
    logsumexp,  # (tokens,): over the whole vocabulary
    mean_logit,
    grad_logp,  # (tokens,): the derivative of the loss by the token's log-probability
    grad_entropy,  # (tokens,): the derivative of the loss by the token's entropy
    gradient,  # (tokens, width): the result
    width,
    inverse_cap,  # 1/c
    scale,  # c/T with a cap, 1/T without
    inverse_temperature,  # 1/T
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the derivative of the loss by the products x of one token in one block of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    capped = _capped(_biased_products(products, bias, row, columns, width, HAS_BIAS), inverse_cap, HAS_CAP)
    z = capped
    if HAS_SCALE:
        z *= scale
    p = tl.exp(z - tl.load(logsumexp + row))

    # g·(1[id] − p) − h·p·(z − mean logit)
    g = tl.load(grad_logp + row) * inverse_temperature
    factor = -g
    if HAS_ENTROPY:
        h = tl.load(grad_entropy + row) * inverse_temperature
        # A logit of −inf adds nothing, where −inf · 0 would be NaN.
        factor -= h * tl.where(p > 0, z - tl.load(mean_logit + row), 0.0)
    derivative = p * factor
    derivative += tl.where(columns == tl.load(id_column + row), g, 0.0)
    if HAS_CAP:
        derivative *= 1 - capped * capped
    tl.store(gradient + row * width + columns, derivative.to(gradient.dtype.element_ty), mask=columns < width)


class LogitSettings(NamedTuple):
    """The numbers that make logits of products."""

    temperature: float
    softcap: float | None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the kernels."""
        scale = (self.softcap or 1.0) / self.temperature
        return {
            "inverse_cap": 1 / (self.softcap or 1.0),
            "scale": scale,
            "HAS_CAP": self.softcap is not None,
            "HAS_SCALE": scale != 1,
        }


class Statistics:
    """The forward pass: the statistics of each token's logits, by blocks of columns.

    Args:
        tokens: The number of tokens.
        vocabulary: The number of rows of the head.
        chunk: The number of rows of each chunk but the last, which has the rest.
        settings: The cap and the temperature.
        entropy: True to compute the mean logits.
        device: The device of the products.
    """

    def __init__(
        self,
        tokens: int,
        vocabulary: int,
        chunk: int,
        settings: LogitSettings,
        *,
        entropy: bool,
        device: torch.device,
    ) -> None:
        whole_chunks, rest = divmod(vocabulary, chunk)
        blocks = whole_chunks * triton.cdiv(chunk, BLOCK) + triton.cdiv(rest, BLOCK)
        self.settings = settings
        self.entropy = entropy
        self.id_logit = torch.zeros(tokens, dtype=torch.float32, device=device)
        self.maximum = torch.empty(blocks, tokens, dtype=torch.float32, device=device)
        self.exp_sum = torch.empty_like(self.maximum)
        self.weighted_sum = torch.empty_like(self.maximum) if entropy else self.maximum
        self._block = 0

    def add(self, products: Tensor, bias: Tensor | None, id_column: Tensor) -> None:
        """Read the products of the next chunk.

        Args:
            products: The products, (tokens, width), in float32.
            bias: The head's bias in these columns, (width,).
            id_column: The column of each token's id, (tokens,); outside of 0 to width − 1 if it is in another chunk.
        """
        tokens, width = products.shape
        blocks = triton.cdiv(width, BLOCK)
        if tokens:
            with torch.cuda.device_of(products):  # Triton launches on the current device
                _statistics_kernel[tokens, blocks](
                    products,
                    products if bias is None else bias.contiguous(),
                    id_column,
                    self.maximum[self._block :],
                    self.exp_sum[self._block :],
                    self.weighted_sum[self._block :],
                    self.id_logit,
                    tokens,
                    width,
                    HAS_BIAS=bias is not None,
                    HAS_ENTROPY=self.entropy,
                    BLOCK=BLOCK,
                    **COMPILATION,
                    **self.settings.arguments(),
                )
        self._block += blocks

    def combine(self) -> tuple[Tensor, Tensor]:
        """Return the log-sum-exp and the mean logit of each token, (tokens,).

        The mean logits are 0 unless they were requested.
        """
        maximum = self.maximum.amax(0)
        factor = (self.maximum - maximum).exp()
        exp_sum = (self.exp_sum * factor).sum(0)
        logsumexp = maximum + exp_sum.log()
        if not self.entropy:
            return logsumexp, torch.zeros_like(logsumexp)
        return logsumexp, (self.weighted_sum * factor).sum(0) / exp_sum


def gradient_by_products(
    products: Tensor,
    bias: Tensor | None,
    id_column: Tensor,
    logsumexp: Tensor,
    mean_logit: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    dtype: torch.dtype,
    settings: LogitSettings,
) -> Tensor:
    """Compute the derivative of the loss by the products of one chunk; the backward pass.

    Args:
        products: The products, (tokens, width), in float32.
        bias: The head's bias in these columns, (width,).
        id_column: The column of each token's id, (tokens,); outside of 0 to width − 1 if it is in another chunk.
        logsumexp: The log-sum-exp over the whole vocabulary, (tokens,).
        mean_logit: The mean logit over the whole vocabulary, (tokens,).
        grad_logp: The derivative of the loss by the log-probabilities, (tokens,).
        grad_entropy: The derivative of the loss by the entropies, (tokens,); None if there is none.
        dtype: The precision of the result.
        settings: The cap and the temperature.

    Returns:
        The derivative, (tokens, width).
    """
    tokens, width = products.shape
    gradient = torch.empty(tokens, width, dtype=dtype, device=products.device)
    if tokens:
        with torch.cuda.device_of(products):
            _gradient_kernel[tokens, triton.cdiv(width, BLOCK)](
                products,
                products if bias is None else bias.contiguous(),
                id_column,
                logsumexp,
                mean_logit,
                grad_logp,
                grad_logp if grad_entropy is None else grad_entropy,
                gradient,
                width,
                inverse_temperature=1 / settings.temperature,
                HAS_BIAS=bias is not None,
                HAS_ENTROPY=grad_entropy is not None,
                BLOCK=BLOCK,
                **COMPILATION,
                **settings.arguments(),
            )
    return gradient
