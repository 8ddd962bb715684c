"""Device functions of the sampler: Philox, the exact logarithm and exponential, scores and keys, bit for bit as on CPU.

Repeats `ringattn.noise` and `ringattn.keys` operation by operation. Kernels that call these must be launched with
`enable_fp_fusion=False`: a fused multiply-add rounds once where the definition rounds twice.
"""

import triton
import triton.language as tl

TAIL = tl.constexpr(1 << 31)
TAIL_BELOW = tl.constexpr(1 << 16)


@triton.jit
def philox(seed, c0, c1, c2, tag: tl.constexpr):
    """Four words of Philox4x32-10; c0 is uint32 of any shape, the rest scalars, which stay scalars while they can."""
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c1 = c1.to(tl.uint32)
    c2 = c2.to(tl.uint32)
    c3 = tl.full((), tag, tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def lg2(x, CUDA: tl.constexpr):
    """A fast logarithm to base 2: the hardware's, with an error of 2^-22, or the library's elsewhere."""
    if CUDA:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def log(x):
    """Natural logarithm of positive normal float32 numbers (Cephes logf)."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 126).to(tl.float32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    low = mantissa < 0.70710677
    exponent = tl.where(low, exponent - 1.0, exponent)
    f = tl.where(low, mantissa + mantissa, mantissa) - 1.0
    z = f * f
    y = f * 7.0376836292e-2 + -1.1514610310e-1
    y = y * f + 1.1676998740e-1
    y = y * f + -1.2420140846e-1
    y = y * f + 1.4249322787e-1
    y = y * f + -1.6668057665e-1
    y = y * f + 2.0000714765e-1
    y = y * f + -2.4999993993e-1
    y = y * f + 3.3333331174e-1
    y = y * f * z
    y = y + exponent * -2.12194440e-4
    y = y - z * 0.5
    return f + y + exponent * 0.693359375


@triton.jit
def exponential(high, low):
    """A unit exponential from 64 random bits."""
    u = high.to(tl.float32) * 2.3283064365386963e-10 + (
        low.to(tl.float32) * 5.421010862427522e-20 + 2.710505431213761e-20
    )
    w = (high ^ 0xFFFFFFFF).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    rest = 1.0 - u
    taken = 1.0 - rest
    small = high < 0x80000000
    e = -log(tl.where(small, rest, w))
    corrected = tl.where(taken == 0.0, u, e * tl.div_rn(u, tl.where(taken == 0.0, 1.0, taken)))
    return tl.where(small, corrected, e)


@triton.jit
def _word(seed, ids, position, sample, tag: tl.constexpr):
    w0, w1, w2, w3 = philox(seed, (ids >> 2).to(tl.uint32), position, sample, tag)
    which = ids & 3
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))


@triton.jit
def exact_score(logit, ids, seed, position, sample, temperature):
    """`l + T g` by IEEE operations."""
    high = _word(seed, ids, position, sample, 0)
    low = tl.where(high < TAIL_BELOW, _word(seed, ids, position, sample, TAIL), TAIL)
    return logit + temperature * -log(exponential(high, low))


@triton.jit
def pack(values, ids):
    """int64 keys: the larger value, then the lower id, is the larger; NaN is the largest."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    signed = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = ((signed.to(tl.int64) + 0x80000000) << 31) | (0x7FFFFFFF - ids).to(tl.int64)
    return tl.where(values != values, 0x7FFFFFFFFFFFFFFF, key)


@triton.jit
def exp2_parts(x):
    """`2^x` of float64 as `mantissa * 2^(exponent - 24)`, int64 both (Cephes exp2f)."""
    exponent = tl.floor(x + 0.5)
    f = (x - exponent).to(tl.float32)
    y = f * 1.535336188319500e-4 + 1.339887440266574e-3
    y = y * f + 9.618437357674640e-3
    y = y * f + 5.550332471162809e-2
    y = y * f + 2.402264791363012e-1
    y = y * f + 6.931472028550421e-1
    y = y * f + 1.0
    return (y * 16777216.0).to(tl.int64), exponent.to(tl.int64)
