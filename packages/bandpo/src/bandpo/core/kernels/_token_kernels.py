"""The clipped loss of tokens in Triton: one launch forward, a small one for the averages, one backward.

For a token with the old log-probability o = log p, the new one n, and the advantage A, the loss computes

    r = e^(n − o)                         the ratio, and log_r = n − o its logarithm
    high, low                             whether r is outside of the bounds of p
    w = 0 if blocked, else r              blocked: high and A > 0, or low and A < 0, or A < 0 and r > max_ratio
    derivative = −A·w                     of the token's loss with respect to n
    value = −A·(the bound if blocked, else r)

and sums over tokens for the average and the metrics. Forward it reads n, o and the mask, and A once for a sequence, and
writes the derivative: 13 bytes a token with a boolean mask. Backward it multiplies the derivative by the factor of the
average: 8 bytes. Nothing else of the size of the tokens is read or written.

A bound is of one of these kinds, each with a number:

    "fixed"   the distance of the bound from 0 in the log-ratio
    "kl"      the radius of the Kullback-Leibler divergence
    "tv"      the radius of the total variation
    "chi2"    the radius of Pearson's χ²

Functions with ``FAST`` have two variants. The fast one uses the approximate instructions of NVIDIA's cards for 2^x,
log₂ x, 1/x and √x, whose relative error is about 1e−7 (for log₂ near 1 an absolute one). The other uses Triton's own
functions, which its interpreter has too. The two differ in these four functions and in nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._limits import LOGP_SLACK

SLACK = tl.constexpr(LOGP_SLACK)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of float32
LARGEST = tl.constexpr(2.028240838220169e31)  # the largest ratio, `bandpo.core._ranges.largest`
INFINITY = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))
NEWTON_STEPS = tl.constexpr(4)
# Two counts of a block are summed as one integer, as digits of this base; a block has fewer than 2^15 tokens.
BASE = tl.constexpr(2**16)


# Elementary functions


@triton.jit
def _exp(x, FAST: tl.constexpr):
    if FAST:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * LOG2_E], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp(x)
    return y


@triton.jit
def _log(x, FAST: tl.constexpr):
    if FAST:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        y = log2 * LN_2
    else:
        y = tl.log(x)
    return y


@triton.jit
def _inverse(x, FAST: tl.constexpr):
    if FAST:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / x
    return y


@triton.jit
def _sqrt(x, FAST: tl.constexpr):
    if FAST:
        y = tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.sqrt(x)
    return y


@triton.jit
def _expm1(x, exp_x):
    """Return e^x − 1 from x and e^x: near 0 the series, whose first omitted term is below 5e−8 of the result."""
    series = 1 / 24 + x * (1 / 120 + x * (1 / 720))
    series = x * (1.0 + x * (1 / 2 + x * (1 / 6 + x * series)))
    return tl.where(tl.abs(x) < 0.25, series, exp_x - 1.0)


@triton.jit
def _log1p(x, FAST: tl.constexpr):
    """Return log(1 + x) for x ≥ −1: near 0 the series, whose first omitted term is below 1e−7 of the result."""
    series = 1 / 7 + x * (-1 / 8 + x * (1 / 9 + x * (-1 / 10)))
    series = 1 / 3 + x * (-1 / 4 + x * (1 / 5 + x * (-1 / 6 + x * series)))
    series = x * (1.0 + x * (-1 / 2 + x * series))
    return tl.where(tl.abs(x) < 0.25, series, _log(1.0 + x, FAST))


# The clip test of each kind of bound, and the bound


@triton.jit
def _is_outside(KIND: tl.constexpr, o, log_r, change, radius, FAST: tl.constexpr):
    """Return whether the divergence of a ratio is above the radius, on either side of 1.

    With q = 1 − p, the probabilities of all other tokens are scaled by c = (1 − p·r)/q = 1 − p·(r − 1)/q, and the
    divergence is

        "kl"     −(p·log r + q·log c)
        "tv"     p·|r − 1|
        "chi2"   p·(r − 1)²/q

    Args:
        o: The old log-probability, at most 0.
        log_r: The log-ratio.
        change: r − 1.
    """
    if KIND == "kl":
        p = _exp(o, FAST)
        q = tl.maximum(-_expm1(o, p), TINY)
        # c is 0 where the new probability is 1, or above by rounding.
        c_minus_1 = tl.maximum(-p * change * _inverse(q, FAST), -1.0)
        outside = -(p * log_r + q * _log1p(c_minus_1, FAST)) > radius
    else:
        # √p is a normal number for every p that occurs, and p is not. A ratio above 1/p is outside too.
        root = _exp(0.5 * o, FAST)
        if KIND == "tv":
            outside = root * (root * tl.abs(change)) > radius
        else:
            q = -_expm1(o, root * root)
            outside = (root * change) * (root * change) > radius * q
        outside |= log_r > -o
    return outside


@triton.jit
def _is_blocked(KIND: tl.constexpr, toward, o, log_r, change, number, log_cap, FAST: tl.constexpr):
    """Return whether a ratio is outside of the bound that the advantage pushes it to.

    Args:
        toward: The log-ratio where A > 0, and minus the log-ratio where A < 0.
        number: For "fixed" the distance of the bound from 0 in the log-ratio, else the radius.
        log_cap: The largest log-ratio where A > 0.
    """
    if KIND == "fixed":
        blocked = toward > number
    else:
        blocked = (_is_outside(KIND, o, log_r, change, number, FAST) & (toward > 0.0)) | (toward > log_cap)
    return blocked


@triton.jit
def _closed_change(KIND: tl.constexpr, o, up, number, cap, FAST: tl.constexpr):
    """Return r − 1 at the upper bound where ``up``, else at the lower one; 0 for KL, see `_kl_bound`.

        "fixed"  e^±number − 1
        "tv"     ±radius/p
        "chi2"   ±√(radius·q/p)

    A ratio is at least 0, and at most 1/p and the cap.
    """
    if KIND == "kl":
        change = 0.0 * o
    elif KIND == "fixed":
        change = tl.minimum(_exp(tl.where(up, number, -number), FAST) - 1.0, cap - 1.0) + 0.0 * o
    else:
        inverse = _inverse(tl.maximum(_exp(o, FAST), TINY), FAST)
        if KIND == "tv":
            margin = number * inverse
        else:
            margin = _sqrt(number * (-_expm1(o, _exp(o, FAST))) * inverse, FAST)
        change = tl.where(
            up, tl.minimum(tl.minimum(margin, inverse - 1.0), cap - 1.0), tl.maximum(-margin, -1.0)
        )
    return change


@triton.jit
def _kl_bound(o, above, radius, FAST: tl.constexpr):
    """Return the largest ratio with a KL divergence of at most the radius where ``above``, else the smallest.

    One of the events "this token" and "any other token" gains probability: the first for the largest ratio. Let its
    odds be h = p/q or q/p, and its log-ratio g. The constraint gives that of the other event, −t, and from it g anew:

        t = h·g + (1 + h)·radius
        g = log(1 + w)   with   w = (1 − e^−t)/h

    Newton's method for log(1 + w) − g = 0, whose derivative by g is e^−t/(1 + w) − 1, starts above the root: at the
    smaller of the limit log(1 + 1/h) and the root √(2·radius/h) of the quadratic approximation. It stays above it.
    """
    p = tl.maximum(_exp(o, FAST), TINY)
    q = tl.maximum(-_expm1(o, p), TINY)
    gaining = tl.where(above, p, q)
    losing = tl.where(above, q, p)
    odds = gaining * _inverse(losing, FAST)
    inverse = losing * _inverse(gaining, FAST)
    gain = tl.minimum(_log1p(inverse, FAST), _sqrt(2.0 * radius * inverse, FAST))
    constant = (1.0 + odds) * radius
    for _ in tl.static_range(NEWTON_STEPS):
        t = odds * gain + constant
        other = _exp(-t, FAST)
        lost = -_expm1(-t, other)  # 1 − e^−t, the share that the other event loses
        w = lost * inverse
        gain += (_log1p(w, FAST) - gain) * (1.0 + w) * _inverse(w + lost, FAST)
    return _exp(tl.where(above, gain, -(odds * gain + constant)), FAST)


# The kernels


@triton.jit
def forward(
    logp,
    logp_old,
    advantages,
    mask,
    derivative,
    sums,
    counts,
    time,
    blocks,
    lower,
    upper,
    log_cap,
    max_ratio,
    LOWER: tl.constexpr,
    UPPER: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    DUAL: tl.constexpr,
    METRICS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the derivative of each token, and the sums of a block. A program has one block of the tokens of a row.

    Args:
        logp: New log-probabilities, (batch, time); float32 or half precision, like all tensors that are read.
        logp_old: Old log-probabilities, (batch, time).
        advantages: (batch, time) with ``PER_TOKEN``, else (batch,).
        mask: (batch, time), 0 for padding, if ``HAS_MASK``. Another value than 0 and 1 makes the token's loss NaN.
        derivative: Output, (batch, time), float32.
        sums: Output, (3, programs), float32: of the value, of r − 1 and of r − 1 − log r.
        counts: Output, (2, programs), int32: counted tokens + 2^16·those that the dual clip drops, and those blocked
            above + 2^16·those blocked below.
        time: The number of tokens of a row.
        blocks: The number of blocks of a row.
        lower: The number of the lower bound: its radius, or for "fixed" the distance −log r of the bound.
        upper: The number of the upper bound: its radius, or for "fixed" the distance log r of the bound.
        log_cap: The logarithm of the largest ratio of the upper bound.
        max_ratio: The largest ratio of a token with A < 0, the dual clip.
        LOWER: The kind of the lower bound.
        UPPER: The kind of the upper bound.
        DUAL: True for a dual clip.
        METRICS: False to count the tokens alone.
        CHUNK: The number of tokens whose root is solved for at a time.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    row = (program // blocks).to(tl.int64)
    token = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = token < time
    at = row * time + token

    # All quantities of padding are those of n = o = 0: a ratio of 1, which no bound excludes. It is read, because lanes
    # that read four adjacent numbers each take fewer instructions.
    if HAS_MASK:
        mask_value = tl.load(mask + at, inside, other=0)
        counted = mask_value != 0
    else:
        counted = inside
    n = tl.where(counted, tl.load(logp + at, inside, other=0.0).to(tl.float32), 0.0)
    o = tl.where(counted, tl.load(logp_old + at, inside, other=0.0).to(tl.float32), 0.0)
    if PER_TOKEN:
        a = tl.where(counted, tl.load(advantages + at, inside, other=0.0).to(tl.float32), 0.0)
    else:
        a = tl.load(advantages + row).to(tl.float32)
    a = tl.where(tl.abs(a) < INFINITY, a, NAN)
    up = a > 0.0
    down = a < 0.0

    # An invalid value makes n NaN, and so the derivative and the loss. NaN compares as false.
    valid = (tl.maximum(n, o, tl.PropagateNan.ALL) <= SLACK) & (tl.minimum(n, o) > -INFINITY)
    if HAS_MASK and mask.dtype.element_ty != tl.int1:
        valid &= (mask_value == 0) | (mask_value == 1)
    n = tl.where(valid, n, NAN)

    log_r = n - o
    o = tl.minimum(o, 0.0)
    r = tl.minimum(_exp(log_r, FAST), LARGEST, tl.PropagateNan.ALL)
    change = _expm1(log_r, r)

    toward = tl.where(up, log_r, tl.where(down, -log_r, 0.0))
    cap = tl.where(up, log_cap, INFINITY)
    if LOWER == UPPER:
        # One test for both bounds.
        number = tl.where(up, upper, lower)
        blocked = _is_blocked(UPPER, toward, o, log_r, change, number, cap, FAST)
    else:
        is_above = _is_blocked(UPPER, toward, o, log_r, change, upper, cap, FAST)
        is_below = _is_blocked(LOWER, toward, o, log_r, change, lower, INFINITY, FAST)
        blocked = tl.where(up, is_above, is_below)
    dropped = blocked
    if DUAL:
        dual = r > tl.where(down, max_ratio, INFINITY)
        dropped = blocked | dual
    loss_derivative = tl.where(counted, -a * tl.where(dropped, 0.0, r), 0.0)

    if METRICS:
        # r − 1 of what replaces the ratio in the value. Bounds of KL are solved for below.
        largest = tl.minimum(_exp(log_cap, FAST), LARGEST)
        if LOWER == UPPER:
            at_bound = _closed_change(UPPER, o, up, number, largest, FAST)
        else:
            at_upper = _closed_change(UPPER, o, True, upper, largest, FAST)
            at_bound = tl.where(up, at_upper, _closed_change(LOWER, o, False, lower, largest, FAST))
        value = tl.where(blocked, at_bound, change)
        if DUAL:
            value = tl.where(dual, max_ratio - 1.0, value)

        solved = 0.0
        if UPPER == "kl" or LOWER == "kl":
            listed = blocked.to(tl.int32)
            if UPPER != "kl":
                listed = tl.where(up, 0, listed)
            if LOWER != "kl":
                listed = tl.where(up, listed, 0)
            # Few tokens need a root. Their positions are written one after the other to the memory of the block's
            # derivatives, which are not there yet, and the lanes divide them: a root for each token would take more
            # time than everything else.
            first = row * time + (program % blocks) * BLOCK
            tl.store(
                derivative + first + tl.cumsum(listed) - 1, tl.arange(0, BLOCK).to(tl.float32), listed > 0
            )
            tl.debug_barrier()
            number_listed = tl.sum(listed)
            for start in range(0, number_listed, CHUNK):
                entry = start + tl.arange(0, CHUNK)
                is_entry = entry < number_listed
                at_entry = first + tl.load(derivative + first + entry, is_entry, other=0.0).to(tl.int32)
                entry_o = tl.load(logp_old + at_entry, is_entry, other=-1.0).to(tl.float32)
                entry_a = a
                if PER_TOKEN:
                    entry_a = tl.load(advantages + at_entry, is_entry, other=0.0).to(tl.float32)
                entry_up = entry_a > 0.0
                radius = tl.where(entry_up, upper, lower)
                if UPPER != "kl":
                    radius = lower
                if LOWER != "kl":
                    radius = upper
                bound = tl.minimum(_kl_bound(tl.minimum(entry_o, 0.0), entry_up, radius, FAST), largest)
                if PER_TOKEN:
                    solved += tl.sum(tl.where(is_entry, -entry_a * (bound - 1.0), 0.0))
                else:
                    solved += tl.sum(tl.where(is_entry, bound - 1.0, 0.0))
            tl.debug_barrier()

        dropped_once = tl.where(blocked, tl.where(up, 1, BASE), 0)
        tokens = counted.to(tl.int32)
        if DUAL:
            tokens = tl.where(dual, 1 + BASE, tokens)
        tokens = tl.sum(tokens)
        if PER_TOKEN:
            total = tl.sum(-a * (value + 1.0)) + solved
        else:
            # −A·(the sum of r − 1, and of 1), and 0 where all is padding.
            number_counted = tokens % BASE
            total = -a * (tl.sum(value) + solved + number_counted.to(tl.float32))
            total = tl.where(number_counted > 0, total, 0.0)
        tl.store(sums + program, total)
        tl.store(sums + programs + program, tl.sum(change))
        tl.store(sums + 2 * programs + program, tl.sum(change - log_r))
        tl.store(counts + programs + program, tl.sum(dropped_once))
    else:
        tokens = tl.sum(counted.to(tl.int32))
    tl.store(counts + program, tokens)
    tl.store(derivative + at, loss_derivative, inside)


@triton.jit
def average(
    sums,
    counts,
    loss,
    outputs,
    factors,
    normalizer,
    normalizer_number,
    rows,
    blocks,
    PER_SEQUENCE: tl.constexpr,
    OVER: tl.constexpr,
    HAS_NORMALIZER: tl.constexpr,
    METRICS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute the loss and the metrics from the sums of the blocks, in one program.

    The loss is the sum of the values, or of the means of the sequences, divided by a denominator: the normalizer, times
    a number of tokens or sequences. Metrics are means over counted tokens, and NaN if there is none.

    Args:
        sums: Of `forward`.
        counts: Of `forward`.
        loss: Output, a number.
        outputs: Output, (5,): clip_high, clip_low, dual_clip, ratio_mean, approx_kl.
        factors: Output: the derivative of the loss by a token's loss; (batch,) with ``PER_SEQUENCE``, else one number.
        normalizer: A number in memory, if ``HAS_NORMALIZER``.
        normalizer_number: The normalizer otherwise.
        rows: The number of rows.
        blocks: The number of blocks of a row.
        PER_SEQUENCE: True for the mean of each sequence.
        OVER: What is counted for the denominator: ``"tokens"``, ``"sequences"`` with a counted token, or ``"one"``.
        ROWS: Rows that are read at a time.
        BLOCKS: A power of 2, at least ``blocks``.
    """
    programs = rows * blocks
    block = tl.arange(0, BLOCKS)[None, :]
    values = tl.zeros([ROWS], tl.float32)
    changes = tl.zeros([ROWS], tl.float32)
    kls = tl.zeros([ROWS], tl.float32)
    tokens = tl.zeros([ROWS], tl.int32)
    sequences = tl.zeros([ROWS], tl.int32)
    high = tl.zeros([ROWS], tl.int32)
    low = tl.zeros([ROWS], tl.int32)
    dual = tl.zeros([ROWS], tl.int32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        exists = (row < rows) & (block < blocks)
        at = row * blocks + block
        tokens_and_dual = tl.load(counts + at, exists, other=0)
        length = tl.sum(tokens_and_dual % BASE, axis=1)
        tokens += length
        sequences += (length > 0).to(tl.int32)
        if METRICS:
            value = tl.sum(tl.load(sums + at, exists, other=0.0), axis=1)
            if PER_SEQUENCE:
                value = value / tl.maximum(length, 1).to(tl.float32)
            values += value
            changes += tl.sum(tl.load(sums + programs + at, exists, other=0.0), axis=1)
            kls += tl.sum(tl.load(sums + 2 * programs + at, exists, other=0.0), axis=1)
            high_and_low = tl.load(counts + programs + at, exists, other=0)
            dual += tl.sum(tokens_and_dual // BASE, axis=1)
            high += tl.sum(high_and_low % BASE, axis=1)
            low += tl.sum(high_and_low // BASE, axis=1)

    token_count = tl.sum(tokens).to(tl.float32)
    if HAS_NORMALIZER:
        denominator = tl.load(normalizer).to(tl.float32)
    else:
        denominator = normalizer_number
    if OVER == "tokens":
        denominator *= tl.maximum(token_count, 1.0)
    elif OVER == "sequences":
        denominator *= tl.maximum(tl.sum(sequences), 1).to(tl.float32)
    if METRICS:
        tl.store(loss, tl.sum(values) / denominator)
        tl.store(outputs, tl.sum(high).to(tl.float32) / token_count)
        tl.store(outputs + 1, tl.sum(low).to(tl.float32) / token_count)
        tl.store(outputs + 2, tl.sum(dual).to(tl.float32) / token_count)
        tl.store(outputs + 3, 1.0 + tl.sum(changes) / token_count)
        tl.store(outputs + 4, tl.sum(kls) / token_count)
    else:
        tl.store(loss, NAN)

    if PER_SEQUENCE:
        for start in range(0, rows, ROWS):
            row = start + tl.arange(0, ROWS)[:, None]
            exists = (row < rows) & (block < blocks)
            length = tl.sum(tl.load(counts + row * blocks + block, exists, other=0) % BASE, axis=1)
            row = start + tl.arange(0, ROWS)
            factor = 1.0 / (tl.maximum(length, 1).to(tl.float32) * denominator)
            tl.store(factors + row, factor, row < rows)
    else:
        tl.store(factors, 1.0 / denominator)


@triton.jit
def backward(
    upstream,
    derivative,
    factors,
    gradient,
    time,
    blocks,
    PER_SEQUENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply the derivatives by the factor of the average and by the upstream gradient of the loss, one number."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    token = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    at = row * time + token
    factor = tl.load(upstream).to(tl.float32)
    if PER_SEQUENCE:
        factor *= tl.load(factors + row)
    else:
        factor *= tl.load(factors)
    x = tl.load(derivative + at, token < time, other=0.0)
    tl.store(gradient + at, (x * factor).to(gradient.dtype.element_ty), token < time)
