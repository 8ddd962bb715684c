# ruff: noqa
"""Forward attention over the tiles of a plan on sm_90, warp specialised: same contract as the portable kernel.

wip
"""

from dataclasses import replace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ringattn.kernels.attention_fwd import score_factors
from ringattn.kernels.config import Launch
from ringattn.kernels.hopper.config import Forward
from ringattn.kernels.hopper.shim import (
    TensorDescriptor,
    arrive_after,
    arrive_also,
    arrive_at,
    exp2,
    exp2_partly_on_fma,
    keep_below,
    pack_pairs,
    sync_at,
    tma_load,
    unpack_pairs,
)

TURN = gl.constexpr(5)
K_FREE = gl.constexpr(8)
V_FREE = gl.constexpr(10)
Q_FREE = gl.constexpr(12)


@gluon.jit
def _number(round):
    """Number of this program's item in a round: forth in even rounds, back in odd ones, which evens out falling work."""
    programs = gl.num_programs(0)
    lane = gl.program_id(0)
    return round * programs + gl.where(round % 2 == 0, lane, programs - 1 - lane)


@gluon.jit
def _item(round, sizes):
    """(batch, head, kv_head, block) of this program's item in a round: all heads of a block, then the next block."""
    items, rounds, blocks, backwards, heads, groups, all_heads = sizes
    number = _number(round)
    block = number // all_heads
    index = number - block * all_heads
    batch = index // heads
    head = index - batch * heads
    return batch, head, head // groups, gl.where(backwards != 0, blocks - 1 - block, block)


@gluon.jit
def _rounds(sizes):
    """Number of items of this program."""
    return sizes[1] - gl.where(_number(sizes[1] - 1) < sizes[0], 0, 1)


@gluon.jit
def _entries(block, table, tile, C: gl.constexpr):
    """(first row, first entry, end of entries) of a block of rows."""
    if C.value.single:
        return tile[0] + block * C.value.block_q, 0, 1
    else:
        return gl.load(table + 3 * block), gl.load(table + 3 * block + 1), gl.load(table + 3 * block + 2)


@gluon.jit
def _tile(entry, table, tile, blocks, C: gl.constexpr):
    if C.value.single:
        return tile
    else:
        at = table + 3 * blocks + entry * 6
        return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4), gl.load(at + 5)


@gluon.jit
def _key_blocks(row, tile, C: gl.constexpr):
    """How rows of a program meet the keys of a tile: (first key, blocks, first full block, full blocks)."""
    q_begin, q_end, k_begin, k_end, lo, hi = tile
    rows, keys, a0 = q_end - q_begin, k_end - k_begin, row - q_begin
    a_first = gl.maximum(a0, 0)
    a_last = gl.minimum(a0 + C.value.block_q, rows) - 1
    first = gl.maximum(a_first - hi, 0)
    end = gl.minimum(keys, a_last - lo + 1)
    blocks = gl.maximum(gl.cdiv(end - first, C.value.block_k), 1)
    full_from = gl.minimum(gl.cdiv(gl.maximum(a_last - hi - first, 0), C.value.block_k), blocks)
    full_end = gl.maximum(gl.minimum(keys, a_first - lo + 1) - first, 0) // C.value.block_k
    full = gl.maximum(full_end - full_from, 0)
    if not C.value.single:
        full = gl.where((a0 >= 0) & (a0 + C.value.block_q <= rows), full, 0)
    return first, blocks, full_from, full


@gluon.jit
def _block_at(step, span):
    """Number of the block that is taken in a step: those with a mask from the right, then the others from the right."""
    first, blocks, full_from, full = span
    right = blocks - 1 - step
    masked = gl.where(right < full_from + full, right - full, right)
    return gl.where(step < blocks - full, masked, full_from + blocks - 1 - step)


@gluon.jit
def _load_values(v_desc, v_smem, v_ready, at, number, C: gl.constexpr):
    THREADS: gl.constexpr = 128 * C.value.consumers + 128
    slot = number % C.value.stages
    if number >= C.value.stages:
        sync_at(slot, V_FREE, THREADS)
    mbarrier.expect(v_ready.index(slot), C.value.block_k * C.value.v_width * 2)
    tma_load(v_desc, [at[0], at[1], at[2], 0], v_ready.index(slot), v_smem.index(slot))


@gluon.jit
def _producer(descs, smem, bars, table, tile, sizes, C: gl.constexpr):
    """Load q of each item and its blocks of keys and values, K of a block before V of the block before it."""
    q_desc, q_extra, k_desc, k_extra, v_desc = descs
    q_smem, q_smem_extra, k_smem, k_smem_extra, v_smem = smem
    q_ready, k_ready, v_ready = bars
    THREADS: gl.constexpr = 128 * C.value.consumers + 128
    CONSUMERS: gl.constexpr = C.value.consumers
    number = 0  # of the block of keys, over all items
    at = (0, 0, 0)
    for round in range(_rounds(sizes)):
        batch, head, kv_head, block = _item(round, sizes)
        row, entry_begin, entry_end = _entries(block, table, tile, C)
        for entry in range(entry_begin, entry_end):
            here = _tile(entry, table, tile, sizes[2], C)
            span = _key_blocks(row, here, C)
            for step in range(span[1]):
                slot = number % C.value.stages
                key = here[2] + span[0] + _block_at(step, span) * C.value.block_k
                if number >= C.value.stages:
                    sync_at(slot, K_FREE, THREADS)
                mbarrier.expect(k_ready.index(slot), C.value.block_k * (C.value.width + C.value.extra) * 2)
                tma_load(k_desc, [batch, kv_head, key, 0], k_ready.index(slot), k_smem.index(slot))
                if C.value.extra:
                    tma_load(k_extra, [batch, kv_head, key, C.value.width], k_ready.index(slot), k_smem_extra.index(slot))
                if number > 0:
                    _load_values(v_desc, v_smem, v_ready, at, number - 1, C)
                if (step == 0) & (entry == entry_begin):
                    for wg in gl.static_range(CONSUMERS):
                        if round > 0:
                            sync_at(wg, Q_FREE, 256)
                        mbarrier.expect(q_ready.index(wg), 64 * (C.value.width + C.value.extra) * 2)
                        tma_load(q_desc, [batch, head, row + 64 * wg, 0], q_ready.index(wg), q_smem.index(wg))
                        if C.value.extra:
                            tma_load(q_extra, [batch, head, row + 64 * wg, C.value.width], q_ready.index(wg), q_smem_extra.index(wg))
                at = (batch, kv_head, key)
                number += 1
    _load_values(v_desc, v_smem, v_ready, at, number - 1, C)


@gluon.jit
def _partial_sum(x, C: gl.constexpr):
    """Sums of the elements of a row that one thread holds, (64, 4), or all of them, (64,)."""
    if C.value.partial:
        return gl.sum(gl.sum(x.reshape([64, C.value.block_k // 8, 4, 2]), 3), 1)
    else:
        return gl.sum(x, 1)


@gluon.jit
def _row_max(x, C: gl.constexpr):
    if C.value.partial:
        most = gl.max(gl.max(gl.max(x.reshape([64, C.value.block_k // 8, 4, 2]), 3), 1), 1)
        return gl.convert_layout(most, gl.SliceLayout(1, x.type.layout))
    else:
        return gl.max(x, 1)


@gluon.jit
def _softmax(scores, peak, limits, b0, factors, MASKED: gl.constexpr, C: gl.constexpr):
    """Weights of a block of scores: (weights, new peak, decay of what came before)."""
    if C.value.softcap:
        scores = 1.0 - 2.0 / (exp2(scores * factors[0]) + 1.0)
    if MASKED:
        least, count = limits
        b = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        scores = keep_below(scores, b[None, :] - (least - b0)[:, None], count[:, None])
    new_peak = gl.maximum(peak, _row_max(scores, C))
    shift = new_peak
    if MASKED:
        shift = gl.where(new_peak == -float("inf"), 0.0, new_peak)
    scaled = shift * factors[1]
    x = scores * factors[1] - scaled[:, None]
    if C.value.on_fma > 0 and not MASKED:
        weights = exp2_partly_on_fma(x, C.value.on_fma, C.value.of)
    else:
        weights = exp2(x)
    return weights, new_peak, exp2(peak * factors[1] - scaled)


@gluon.jit
def _carried(weights, dtype: gl.constexpr, C: gl.constexpr):
    if C.value.carry == 1:
        return pack_pairs(weights, dtype == gl.bfloat16)
    else:
        return weights


@gluon.jit
def _operand(p, dtype: gl.constexpr, C: gl.constexpr):
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.v_width, 16])
    if C.value.carry == 1:
        p = unpack_pairs(p, dtype == gl.bfloat16)
    else:
        p = p.to(dtype)
    return gl.convert_layout(p, gl.DotOperandLayout(0, o_layout, 2))


@gluon.jit
def _scores(q, q_extra, k_smem, k_smem_extra, slot, C: gl.constexpr):
    """Issue the product of q and a block of keys."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.block_k, 16])
    zero = gl.full([64, C.value.block_k], 0.0, gl.float32, s_layout)
    k = k_smem.index(slot).reshape([C.value.block_k, C.value.width]).permute([1, 0])
    scores = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    if C.value.extra:
        k = k_smem_extra.index(slot).reshape([C.value.block_k, C.value.extra]).permute([1, 0])
        scores = warpgroup_mma(q_extra, k, scores, is_async=True)
    return scores


@gluon.jit
def _grown(total, decay, weights, C: gl.constexpr):
    """The sum of weights after a block."""
    new = _partial_sum(weights, C)
    if C.value.partial:
        return total * gl.convert_layout(decay, gl.SliceLayout(1, new.type.layout))[:, None] + new
    else:
        return total * decay + new


@gluon.jit
def _open(q, smem, bars, number, last, limits, b0, factors, WG: gl.constexpr, C: gl.constexpr):
    """The first block of a program: scores alone."""
    q_smem, q_smem_extra, k_smem, k_smem_extra, v_smem = smem
    q_ready, k_ready, v_ready = bars
    THREADS: gl.constexpr = 128 * C.value.consumers + 128
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.block_k, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.v_width, 16])
    slot = number % C.value.stages
    mbarrier.wait(k_ready.index(slot), number // C.value.stages & 1)
    scores = _scores(q[0], q[1], k_smem, k_smem_extra, slot, C)
    scores = warpgroup_mma_wait(0, deps=[scores])
    peak = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
    weights, peak, decay = _softmax(scores, peak, limits, b0, factors, True, C)
    total = _partial_sum(weights, C)
    arrive_after(total, slot, last, WG, K_FREE, Q_FREE, THREADS)
    acc = gl.full([64, C.value.v_width], 0.0, gl.float32, o_layout)
    return acc, _carried(weights, q_smem.dtype, C), peak, total


@gluon.jit
def _step(
    state, q, smem, bars, number, last, limits, b0, factors, WG: gl.constexpr, MASKED: gl.constexpr,
    FRESH: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Scores of one block beside the weighted sum of the block before it.

    With FRESH the block is the first of an item: the state's peak and total begin anew, and acc, then complete, is
    that of the item before.
    """
    acc, p, peak, total = state
    q_smem, q_smem_extra, k_smem, k_smem_extra, v_smem = smem
    q_ready, k_ready, v_ready = bars
    THREADS: gl.constexpr = 128 * C.value.consumers + 128
    STAGES: gl.constexpr = C.value.stages
    slot = number % STAGES
    v_slot = (number - 1) % STAGES
    mbarrier.wait(k_ready.index(slot), number // STAGES & 1)
    if C.value.turns:
        sync_at(WG, TURN, 256)
    scores = _scores(q[0], q[1], k_smem, k_smem_extra, slot, C)
    operand = _operand(p, q_smem.dtype, C)
    mbarrier.wait(v_ready.index(v_slot), (number - 1) // STAGES & 1)
    acc = warpgroup_mma(operand, v_smem.index(v_slot).reshape([C.value.block_k, C.value.v_width]), acc, is_async=True)
    if C.value.turns:
        arrive_at((WG + 1) % C.value.consumers, TURN, 256)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if FRESH:
        peak = gl.full([64], -float("inf"), gl.float32, peak.type.layout)
    weights, peak, decay = _softmax(scores, peak, limits, b0, factors, MASKED, C)
    if FRESH:
        total = _partial_sum(weights, C)
    else:
        total = _grown(total, decay, weights, C)
    if C.value.order == 3:
        arrive_after(total, slot, last, WG, K_FREE, Q_FREE, THREADS)
    else:
        arrive_also(slot, last, WG, K_FREE, Q_FREE, THREADS)
    p = _carried(weights, q_smem.dtype, C)
    acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    arrive_at(v_slot, V_FREE, THREADS)
    if not FRESH:
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, p, peak, total


@gluon.jit
def _close(acc, p, smem, bars, number, C: gl.constexpr):
    """The weighted sum of the last block of a program."""
    v_smem = smem[4]
    v_ready = bars[2]
    slot = number % C.value.stages
    operand = _operand(p, v_smem.dtype, C)
    mbarrier.wait(v_ready.index(slot), number // C.value.stages & 1)
    v = v_smem.index(slot).reshape([C.value.block_k, C.value.v_width])
    acc = warpgroup_mma(operand, v, acc, is_async=True)
    acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    return acc


@gluon.jit
def _limits(row, tile, span, C: gl.constexpr):
    """For each of 64 rows the first key that it sees, counted from the first one visited, and how many."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.block_k, 16])
    q_begin, q_end, k_begin, k_end, lo, hi = tile
    a = row - q_begin + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    least = gl.maximum(a - hi, 0)
    seen = gl.maximum(gl.minimum(a - lo, k_end - k_begin - 1) - least + 1, 0)
    if not C.value.single:
        seen = gl.where((a >= 0) & (a < q_end - q_begin), seen, 0)
    return least - span[0], seen


@gluon.jit
def _consumer(
    smem, bars, out, lse, table, tile, sizes, rows, factors, out_strides, lse_strides, WG: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    q_smem, q_smem_extra, k_smem, k_smem_extra, v_smem = smem
    q_ready, k_ready, v_ready = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.block_k, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.v_width, 16])
    if C.value.turns and WG == C.value.consumers - 1:
        arrive_at(0, TURN, 256)
    q = q_smem.index(WG).reshape([64, C.value.width])
    if C.value.extra:
        q_extra = q_smem_extra.index(WG).reshape([64, C.value.extra])
    else:
        q_extra = q
    rounds = _rounds(sizes)
    number = 0
    zeros = gl.full([64, C.value.block_k], 0.0, gl.float32, s_layout)
    acc = gl.full([64, C.value.v_width], 0.0, gl.float32, o_layout)
    peak = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    state = (acc, _carried(zeros, q_smem.dtype, C), peak, _partial_sum(zeros, C))
    at = (0, 0, 0)  # batch, head, first row of the item that the state holds
    for round in range(rounds):
        batch, head, kv_head, block = _item(round, sizes)
        row, entry_begin, entry_end = _entries(block, table, tile, C)
        row0 = row + 64 * WG
        for entry in range(entry_begin, entry_end):
            here = _tile(entry, table, tile, sizes[2], C)
            span = _key_blocks(row, here, C)
            first, count, full_from, full = span
            limits = _limits(row0, here, span, C)
            masked = gl.maximum(count - full, 1)
            b0 = _block_at(0, span) * C.value.block_k
            is_last = entry == entry_end - 1
            last = is_last & (count == 1)
            if entry == entry_begin:
                mbarrier.wait(q_ready.index(WG), round & 1)
                if round == 0:
                    state = _open((q, q_extra), smem, bars, number, last, limits, b0, factors, WG, C)
                else:
                    held_peak, held_total = state[2], state[3]
                    state = _step(state, (q, q_extra), smem, bars, number, last, limits, b0, factors, WG, True, True, C)
                    _write(state[0], held_peak, held_total, out, lse, at, rows, factors[2], out_strides, lse_strides, C)
                    acc = gl.full([64, C.value.v_width], 0.0, gl.float32, o_layout)
                    state = (acc, state[1], state[2], state[3])
            else:
                state = _step(state, (q, q_extra), smem, bars, number, last, limits, b0, factors, WG, True, False, C)
            at = (batch, head, row0)
            for step in range(1, masked):
                b0 = _block_at(step, span) * C.value.block_k
                last = is_last & (step == count - 1)
                state = _step(state, (q, q_extra), smem, bars, number + step, last, limits, b0, factors, WG, True, False, C)
            for step in range(masked, count):
                last = is_last & (step == count - 1)
                state = _step(state, (q, q_extra), smem, bars, number + step, last, limits, 0, factors, WG, False, False, C)
            number += count
    acc = _close(state[0], state[1], smem, bars, number - 1, C)
    _write(acc, state[2], state[3], out, lse, at, rows, factors[2], out_strides, lse_strides, C)
    if C.value.turns and WG == 0:
        sync_at(0, TURN, 256)


@gluon.jit
def _write(acc, peak, total, out, lse, at, rows, scale, out_strides, lse_strides, C: gl.constexpr):
    """Normalise 64 rows and write them, or merge them into the running state."""
    layout: gl.constexpr = acc.type.layout
    batch, head, row = at
    if C.value.partial:
        total = gl.sum(total, 1)
    peak = gl.convert_layout(peak, gl.SliceLayout(1, layout))
    total = gl.convert_layout(total, gl.SliceLayout(1, layout))
    local = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, C.value.v_width, gl.SliceLayout(0, layout))
    seen = total != 0  # not > 0: a NaN must come out
    inside = row + local < rows
    batch, head, wide = batch.to(gl.int64), head.to(gl.int64), row.to(gl.int64)
    lse_at = lse + batch * lse_strides[0] + head * lse_strides[1] + wide * lse_strides[2] + local * lse_strides[2]
    out_row = out + batch * out_strides[0] + head * out_strides[1] + wide * out_strides[2]
    out_at = out_row + (local.to(gl.int64) * out_strides[2])[:, None] + column[None, :]
    store = inside[:, None]
    if C.value.v_dim != C.value.v_width:
        store = store & (column < C.value.v_dim)[None, :]
    total = gl.where(seen, total, 1.0)
    row_lse = gl.where(seen, peak * scale + gl.log(total), -float("inf"))
    factor = gl.where(seen, 1.0 / total, 0.0)
    if C.value.merge:
        held = gl.load(lse_at, mask=inside, other=-float("inf"))
        shift = gl.maximum(held, row_lse)
        shift = gl.where(shift == -float("inf"), 0.0, shift)
        keep, add = gl.exp(held - shift), gl.exp(row_lse - shift)
        weight = keep + add
        divisor = gl.where(weight == 0, 1.0, weight)
        inside = inside & seen
        store = store & seen[:, None]
        before = gl.load(out_at, mask=store & (keep > 0)[:, None], other=0.0)
        acc = acc * (factor * add / divisor)[:, None] + before * (keep / divisor)[:, None]
        row_lse = shift + gl.log(divisor)
    else:
        acc = acc * factor[:, None]
    gl.store(out_at, acc.to(out.dtype.element_ty), mask=store)
    gl.store(lse_at, row_lse, mask=inside)


@gluon.jit(do_not_specialize=["tile", "sizes", "rows"])
def _attention_fwd_kernel(
    q, q_extra, k, k_extra, v, out, lse, table, tile, sizes, rows, factors, out_strides, lse_strides, C: gl.constexpr
):
    WGS: gl.constexpr = C.value.consumers
    STAGES: gl.constexpr = C.value.stages
    q_smem = gl.allocate_shared_memory(q.dtype, [WGS, 1, 1, 64, C.value.width], q.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C.value.block_k, C.value.width], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, C.value.block_k, C.value.v_width], v.layout)
    if C.value.extra:
        q_smem_extra = gl.allocate_shared_memory(q.dtype, [WGS, 1, 1, 64, C.value.extra], q_extra.layout)
        k_smem_extra = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, C.value.block_k, C.value.extra], k_extra.layout)
    else:
        q_smem_extra = q_smem
        k_smem_extra = k_smem
    q_ready = gl.allocate_shared_memory(gl.int64, [WGS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for wg in gl.static_range(WGS):
        mbarrier.init(q_ready.index(wg), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(slot), count=1)
        mbarrier.init(v_ready.index(slot), count=1)
    descs = (q, q_extra, k, k_extra, v)
    smem = (q_smem, q_smem_extra, k_smem, k_smem_extra, v_smem)
    bars = (q_ready, k_ready, v_ready)
    if WGS == 2:
        gl.warp_specialize(
            [
                (_producer, (descs, smem, bars, table, tile, sizes, C)),
                (_consumer, (smem, bars, out, lse, table, tile, sizes, rows, factors, out_strides, lse_strides, 0, C)),
                (_consumer, (smem, bars, out, lse, table, tile, sizes, rows, factors, out_strides, lse_strides, 1, C)),
            ],
            [4, 4],
            [C.value.registers, C.value.registers],
        )
    else:
        gl.warp_specialize(
            [
                (_producer, (descs, smem, bars, table, tile, sizes, C)),
                (_consumer, (smem, bars, out, lse, table, tile, sizes, rows, factors, out_strides, lse_strides, 0, C)),
                (_consumer, (smem, bars, out, lse, table, tile, sizes, rows, factors, out_strides, lse_strides, 1, C)),
                (_consumer, (smem, bars, out, lse, table, tile, sizes, rows, factors, out_strides, lse_strides, 2, C)),
            ],
            [4, 4, 4],
            [C.value.registers, C.value.registers, C.value.registers],
        )


def forward_launch(tiles, q, k, v, out, lse, scale, softcap, *, first, config, programs=None):
    from ringattn.kernels.tiles import cut_rows
    batch, heads, count, dim = q.shape
    v_dim, groups = v.shape[3], heads // k.shape[1]
    rows = cut_rows(tiles, "q", config.block_q, count, first, q.device)
    config = replace(config, v_dim=v_dim, single=rows.table is None, merge=not first, softcap=softcap != 0)
    items = rows.blocks * heads * batch
    if programs is None:
        programs = items
    programs = min(programs, items)
    factors = score_factors(scale, softcap)
    q_desc, k_desc = _descriptor(q, 64, config.width), _descriptor(k, config.block_k, config.width)
    q_extra, k_extra = q_desc, k_desc
    if config.extra:
        q_extra, k_extra = _descriptor(q, 64, config.extra), _descriptor(k, config.block_k, config.extra)
    return Launch(
        _attention_fwd_kernel,
        (programs,),
        dict(
            q=q_desc, q_extra=q_extra, k=k_desc, k_extra=k_extra, v=_descriptor(v, config.block_k, config.v_width),
            out=out, lse=lse, table=lse if rows.table is None else rows.table, tile=rows.tile,
            sizes=(items, -(-items // programs), rows.blocks, int(rows.backwards), heads, groups, batch * heads),
            rows=rows.end, factors=(factors["bend"] * 2.8853900817779268, factors["exp_scale"], factors["scale"]),
            out_strides=out.stride()[:3], lse_strides=lse.stride(), C=config,
        ),
        dict(num_warps=4, enable_fp_fusion=True),
    )


def _descriptor(x, rows, width):
    strides, below = list(x.stride()), x.shape[3]
    for dim in (2, 1, 0):
        if x.shape[dim] == 1:
            strides[dim] = -(-below * x.itemsize // 16) * 16 // x.itemsize
        below = max(below, strides[dim] * x.shape[dim])
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], dtype)
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, width], layout)
