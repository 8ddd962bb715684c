"""Gumbel noise as a pure function of (seed, position, sample, global token id), with the same bits on every device.

Rank, row, block, batch and world never enter. Every operation is integer or an IEEE float32 (float64 where said)
operation that is rounded once, in a fixed order and without fused multiply-add, so that this file and
`kernels/gumbel.py`, which repeats it line by line, agree bit for bit. 32-bit words live in int64 tensors, because torch
has no full set of operations on unsigned integers.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011 (Philox4x32-10); the logarithm and the
exponential are the polynomials of Moshier's Cephes library (logf, exp2f).
"""

import math

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85

TAIL = 1 << 31
"""Bit of the fourth counter word that selects the low 32 bits of a uniform."""

TAIL_BELOW = 1 << 16
"""Words below this get their low bits from a second call; above, 32 bits already resolve a uniform to 2^-16."""

LOG_POLYNOMIAL = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
EXP2_POLYNOMIAL = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
)
SQRT_HALF = 0.70710677
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
LOG2E = 1.4426950408889634


def philox(seed: Tensor, counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]) -> tuple[Tensor, ...]:
    """The four words of Philox4x32-10.

    Args:
        seed: int64 keys, all 64 bits used (the low half is the first key word).
        counter: four words in [0, 2^32), as ints or int64 tensors that broadcast against `seed`.

    Returns:
        Four int64 tensors of words in [0, 2^32).

    Example:
        >>> words = philox(torch.zeros(1, dtype=torch.int64), (0, 0, 0, 0))
        >>> [f"{int(word):08x}" for word in words]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    k0, k1 = seed & MASK32, (seed >> 32) & MASK32
    c0, c1, c2, c3 = counter  # an int stays one until it meets the key, so that a graph copies nothing
    for _ in range(10):
        # int64 products wrap modulo 2^64, which keeps every bit of the unsigned product.
        p0, p1 = c0 * ROUND_A, c2 * ROUND_B
        c0, c1, c2, c3 = (
            ((p1 >> 32) & MASK32) ^ c1 ^ k0,
            p1 & MASK32,
            ((p0 >> 32) & MASK32) ^ c3 ^ k1,
            p0 & MASK32,
        )
        k0, k1 = (k0 + KEY_A) & MASK32, (k1 + KEY_B) & MASK32
    return tuple(torch.as_tensor(word) for word in (c0, c1, c2, c3))


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float32 numbers, within 0.8 ulp, by IEEE operations alone."""
    bits = x.view(torch.int32)
    exponent = ((bits >> 23) - 126).to(torch.float32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).view(torch.float32)
    low = mantissa < SQRT_HALF
    exponent = torch.where(low, exponent - 1.0, exponent)
    f = torch.where(low, mantissa + mantissa, mantissa) - 1.0
    z = f * f
    y = torch.full_like(f, LOG_POLYNOMIAL[0])
    for coefficient in LOG_POLYNOMIAL[1:]:
        y = y * f + coefficient
    y = y * f * z
    y = y + exponent * LN2_LOW
    y = y - z * 0.5
    return f + y + exponent * LN2_HIGH


def exponential(high: Tensor, low: Tensor) -> Tensor:
    """A unit exponential from 64 random bits, `-log((2^32 high + low + 1/2) / 2^64)` of their complement's side.

    The smallest bits give the smallest exponential (the largest Gumbel number), which is therefore resolved down to
    2^-65. Relative error below 4e-7 for all words.

    Args:
        high, low: int64 words in [0, 2^32).

    Returns:
        float32, in [2^-65, 22.2].
    """
    u = high.to(torch.float32) * 2.0**-32 + (low.to(torch.float32) * 2.0**-64 + 2.0**-65)
    w = (MASK32 - high).to(torch.float32) * 2.0**-32 + 2.0**-33
    # Kahan's log1p: the rounding error of 1 - u cancels in u / (1 - (1 - u)).
    rest = 1.0 - u
    taken = 1.0 - rest
    small = high < 1 << 31
    e = -log(torch.where(small, rest, w))
    corrected = torch.where(taken == 0.0, u, e * (u / torch.where(taken == 0.0, 1.0, taken)))
    return torch.where(small, corrected, e)


def gumbel(seed: Tensor, position: Tensor, sample: Tensor, ids: Tensor, tag: int = 0) -> Tensor:
    """Standard Gumbel noise of tokens.

    Args:
        seed, position, sample: int64, one per row, shaped to broadcast against `ids`; position and sample in [0, 2^32).
        ids: int64 global token ids in [0, 2^31).
        tag: what the noise is for; 0 draws the target's token.

    Returns:
        float32 in [-3.13, 45.06], broadcast shape.

    Example:
        >>> row = torch.tensor([[7]])
        >>> whole = gumbel(row, row, row * 0, torch.arange(8))
        >>> bool((gumbel(row, row, row * 0, torch.arange(5, 8)) == whole[:, 5:]).all())
        True
    """
    consecutive = len(ids) == 1 and ids.shape[1] > 8 and not ids.is_cuda and bool((ids.diff() == 1).all())
    if consecutive:
        high = _words_of_a_range(seed, position, sample, ids, tag)
    else:
        high = _word(seed, (ids >> 2, position, sample, tag), ids & 3)
    tail = torch.where(high < TAIL_BELOW, 0, TAIL)  # the midpoint, where the low bits do not matter
    if high.is_cuda:  # the host must not wait, and cannot while a graph is captured
        low = _word(seed, (ids >> 2, position, sample, tag | TAIL), ids & 3)
        return -log(exponential(high, torch.where(high < TAIL_BELOW, low, TAIL)))
    rare = (high < TAIL_BELOW).nonzero(as_tuple=True)
    seed, position, sample, ids = (x.expand(high.shape)[rare] for x in (seed, position, sample, ids))
    tail[rare] = _word(seed, (ids >> 2, position, sample, tag | TAIL), ids & 3)
    return -log(exponential(high, tail))


def _words_of_a_range(seed: Tensor, position: Tensor, sample: Tensor, ids: Tensor, tag: int) -> Tensor:
    """Words of consecutive ids (1, n): a quarter of the calls, each for the four ids that share its counter."""
    first, last = int(ids[0, 0]), int(ids[0, -1])
    groups = torch.arange(first >> 2, (last >> 2) + 1)[None]
    words = torch.stack(philox(seed, (groups, position, sample, tag)), dim=-1).flatten(-2)
    return words[:, first & 3 :][:, : ids.shape[1]]


def _word(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, int], index: Tensor) -> Tensor:
    w0, w1, w2, w3 = philox(seed, counter)
    return torch.where(index < 2, torch.where(index == 0, w0, w1), torch.where(index == 2, w2, w3))


def exp2_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """`2^x` as integers: `mantissa * 2^(exponent - 24)` with the mantissa in [2^23.5, 2^24.5].

    Args:
        x: float64, at most 2^40 in magnitude.

    Returns:
        mantissa and exponent, int64.
    """
    exponent = torch.floor(x + 0.5)
    f = (x - exponent).to(torch.float32)
    y = torch.full_like(f, EXP2_POLYNOMIAL[0])
    for coefficient in EXP2_POLYNOMIAL[1:]:
        y = y * f + coefficient
    y = y * f + 1.0
    return (y * 2.0**24).to(torch.int64), exponent.to(torch.int64)


def log2_int(x: Tensor) -> Tensor:
    """Binary logarithm of positive int64 numbers, float64, by IEEE operations alone, within 1e-15 absolute + 2 ulp."""
    value = x.to(torch.float64)
    bits = value.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    high = mantissa > math.sqrt(2.0)
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    exponent = torch.where(high, exponent + 1, exponent)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, 1 / 21)  # atanh(s) / s up to s^20; the rest is below 2e-18 for |s| <= 0.172
    for denominator in range(19, 0, -2):
        series = series * square + 1 / denominator
    return exponent.to(torch.float64) + s * series * (2.0 * LOG2E)
