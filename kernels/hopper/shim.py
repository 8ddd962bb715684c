"""What Gluon lacks, or names differently between Triton 3.6 and 3.8, so that one kernel source serves all of them.

Named barriers are barriers of the hardware that Triton does not hand out: `named_sync` waits until THREADS threads have
come, `named_arrive` counts the caller's threads without waiting. Triton's warp specialisation uses the low numbers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import constexpr_function
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["TensorDescriptor", "exp2", "exp2_partly_on_fma", "named_arrive", "named_sync", "tma_load"]

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Copy a block of a tensor descriptor to shared memory; renamed after Triton 3.7."""


@gluon.jit
def exp2(x):
    """2 to the power x by the hardware's unit, without the steps that keep denormal results exact."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@constexpr_function
def _exp2_asm(of, on_fma):
    """Assembly for `of` elements; the last `on_fma` of them by Cody and Waite's reduction and a minimax cubic.

    Adding 1.5 * 2**23 rounds x to an integer, whose low bits then go to the exponent of the cubic's value. x below -126
    gives about 2**-126.
    """
    lines = [f"ex2.approx.ftz.f32 ${i}, ${of + i};" for i in range(of - on_fma)]
    for i in range(of - on_fma, of):
        lines.append(
            f"max.f32 a, ${of + i}, 0fC2FC0000; add.rn.f32 n, a, 0f4B400000; mov.b32 e, n;"
            "sub.rn.f32 n, n, 0f4B400000; sub.rn.f32 a, a, n; fma.rn.f32 p, a, c3, c2; fma.rn.f32 p, p, a, c1;"
            f"fma.rn.f32 p, p, a, c0; shl.b32 e, e, 23; mov.b32 f, p; add.s32 e, e, f; mov.b32 ${i}, e;"
        )
    constants = "".join(f"mov.f32 c{i}, 0f{bits};" for i, bits in enumerate(_CUBIC))
    return "{.reg .f32 a, n, p, c0, c1, c2, c3; .reg .b32 e, f;" + constants + "".join(lines) + "}"


@constexpr_function
def _constraints(of):
    return ",".join(["=f"] * of + ["f"] * of)


_CUBIC = ("3F7FFB49", "3F31798D", "3E786F0D", "3D61FBB0")
"""Bits of the cubic that is nearest 2**x on [-1/2, 1/2] by relative error: 7.5e-5 at most."""


@gluon.jit
def exp2_partly_on_fma(x, ON_FMA: gl.constexpr, OF: gl.constexpr):
    """2 to the power x for x <= 0: ON_FMA of every OF elements by a cubic, the others by the hardware's unit.

    The units for exponentials do 16 elements a cycle, those for multiply-add 128; FlashAttention-4 divides the work so
    on Blackwell. The cubic's relative error, 7.5e-5, is small beside the rounding of weights to bfloat16 (2e-3).
    """
    ASM: gl.constexpr = _exp2_asm(OF, ON_FMA)
    CONSTRAINTS: gl.constexpr = _constraints(OF)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [x], gl.float32, is_pure=True, pack=OF)


@constexpr_function
def _barrier_asm(verb, threads):
    return "bar.%s $1, %d; mov.b32 $0, $1;" % (verb, threads)


@gluon.jit
def sync_at(barrier, THREADS: gl.constexpr):
    """Wait until THREADS threads have come to a named barrier; for a partition of four warps."""
    ASM: gl.constexpr = _barrier_asm("sync", THREADS)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.full([128], barrier, gl.int32, layout)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_at(barrier, THREADS: gl.constexpr):
    """Count the caller's 128 threads at a named barrier of THREADS threads, without waiting."""
    ASM: gl.constexpr = _barrier_asm("arrive", THREADS)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.full([128], barrier, gl.int32, layout)], gl.int32, is_pure=False, pack=1)


@constexpr_function
def _if_asm(threads):
    return "{.reg .pred now; setp.ne.b32 now, $1, 0; @now bar.arrive $2, %d; mov.b32 $0, $2;}" % threads


@gluon.jit
def arrive_if(condition, barrier, THREADS: gl.constexpr):
    """`arrive_at`, if the condition holds."""
    ASM: gl.constexpr = _if_asm(THREADS)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    conditions = gl.full([128], gl.to_tensor(condition).to(gl.int32), gl.int32, layout)
    barriers = gl.full([128], barrier, gl.int32, layout)
    gl.inline_asm_elementwise(ASM, "=r,r,r", [conditions, barriers], gl.int32, is_pure=False, pack=1)


@constexpr_function
def _after_asm(threads):
    return (
        "{.reg .pred never, last; .reg .b32 id; .reg .f32 x; add.f32 x, $2, $3; setp.lt.f32 never, x, 0f00000000;"
        "selp.b32 id, 15, $4, never; bar.arrive id, %d; setp.ne.b32 last, $6, 0; @last bar.arrive $8, 256;"
        "mov.b32 $0, id; mov.b32 $1, id;}" % threads
    )


@gluon.jit
def arrive_after(x, barrier, THREADS: gl.constexpr, last, last_barrier):
    """Arrive at a barrier, and if `last` at another of 256 threads, once x is computed.

    x holds two numbers a thread, of which none is negative: the barrier's number depends on them in a way that the
    assembler cannot see through, so nothing that they need can move behind it.
    """
    ASM: gl.constexpr = _after_asm(THREADS)
    barriers = gl.full(x.shape, barrier, gl.int32, x.type.layout)
    lasts = gl.full(x.shape, gl.to_tensor(last).to(gl.int32), gl.int32, x.type.layout)
    last_barriers = gl.full(x.shape, last_barrier, gl.int32, x.type.layout)
    gl.inline_asm_elementwise(
        ASM, "=r,=r,f,f,r,r,r,r,r,r", [x, barriers, lasts, last_barriers], gl.int32, is_pure=False, pack=2
    )


@gluon.jit
def keep_below(scores, distance, span):
    """scores where 0 <= distance < span, -inf elsewhere: one comparison an element, which LLVM would make four of."""
    return gl.inline_asm_elementwise(
        "{.reg .pred seen; setp.lt.u32 seen, $2, $3; selp.f32 $0, $1, 0fFF800000, seen;}",
        "=f,f,r,r", [scores, distance, span], gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def pack_pairs(x, BFLOAT16: gl.constexpr):
    """Neighbouring elements of a row as two numbers of a 16-bit dtype in one int32."""
    low, high = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    if BFLOAT16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, is_pure=True, pack=1)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_pairs(x, BFLOAT16: gl.constexpr):
    """The inverse of `pack_pairs`."""
    if BFLOAT16:
        low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], (gl.bfloat16, gl.bfloat16), is_pure=True, pack=1)
    else:
        low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], (gl.float16, gl.float16), is_pure=True, pack=1)
    return gl.join(low, high).reshape([x.shape[0], 2 * x.shape[1]])
