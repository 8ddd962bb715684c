"""What Gluon lacks, or names differently between Triton 3.6 and 3.8, so that one kernel source serves all of them.

Named barriers are barriers of the hardware that Triton does not hand out. A partition of four warps arrives at one
without waiting, which Triton's own `mbarrier.arrive` cannot: it first makes the partition's threads wait for one
another. Triton numbers its barriers from 0, one for each partition and one to start them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import constexpr_function
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["TensorDescriptor", "arrive_at", "arrive_if", "exp2", "keep_below", "sync_at", "tma_load"]

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Copy a block of a tensor descriptor to shared memory; renamed after Triton 3.7."""


@constexpr_function
def _barrier_asm(verb, threads):
    return f"bar.{verb} $1, {threads}; mov.b32 $0, $1;"


@constexpr_function
def _arrive_if_asm(threads):
    return f"{{.reg .pred now; setp.ne.b32 now, $1, 0; @now bar.arrive $2, {threads}; mov.b32 $0, $2;}}"


@gluon.jit
def _each_thread(x):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.full([128], gl.to_tensor(x).to(gl.int32), gl.int32, layout)


@gluon.jit
def sync_at(barrier, THREADS: gl.constexpr):
    """Wait until THREADS threads have come to a named barrier; for a partition of four warps."""
    ASM: gl.constexpr = _barrier_asm("sync", THREADS)
    gl.inline_asm_elementwise(ASM, "=r,r", [_each_thread(barrier)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_at(barrier, THREADS: gl.constexpr):
    """Count the caller's 128 threads at a named barrier of THREADS threads, without waiting."""
    ASM: gl.constexpr = _barrier_asm("arrive", THREADS)
    gl.inline_asm_elementwise(ASM, "=r,r", [_each_thread(barrier)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_if(condition, barrier, THREADS: gl.constexpr):
    """`arrive_at`, if the condition holds, without a branch."""
    ASM: gl.constexpr = _arrive_if_asm(THREADS)
    args = [_each_thread(condition), _each_thread(barrier)]
    gl.inline_asm_elementwise(ASM, "=r,r,r", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def exp2(x):
    """2 to the power x by the hardware's unit: one instruction, where Triton's own makes four to keep denormals."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def keep_below(scores, distance, count):
    """scores where `0 <= distance < count`, -inf elsewhere, by one unsigned comparison an element.

    LLVM turns the same test written with tensors into bit masks that cost four instructions an element.
    """
    return gl.inline_asm_elementwise(
        "{.reg .pred seen; setp.lt.u32 seen, $2, $3; selp.f32 $0, $1, 0fFF800000, seen;}",
        "=f,f,r,r",
        [scores, distance, count],
        gl.float32,
        is_pure=True,
        pack=1,
    )
