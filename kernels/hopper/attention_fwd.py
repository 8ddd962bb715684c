# ruff: noqa
"""Forward attention over the tiles of a plan on sm_90, warp specialised: same contract as the portable kernel.

wip
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ringattn.kernels.attention_fwd import score_factors
from ringattn.kernels.config import Launch
from ringattn.kernels.hopper.config import Forward, choose
from ringattn.kernels.tiles import clamp, cut_rows
from ringattn.kernels.hopper.shim import (
    TensorDescriptor,
    arrive_after,
    arrive_if,
    arrive_at,
    exp2,
    exp2_partly_on_fma,
    keep_below,
    pack_pairs,
    sync_at,
    tma_load,
    unpack_pairs,
)

@gluon.jit
def _number(round):
    """Number of this program's item in a round: forth in even rounds, back in odd ones, which evens out falling work."""
    programs = gl.num_programs(0)
    lane = gl.program_id(0)
    return round * programs + gl.where(round % 2 == 0, lane, programs - 1 - lane)


@gluon.jit
def _item(round, sizes):
    """(batch, head, kv_head, block) of this program's item in a round.

    Falling work goes block by block over all heads, the longest first; even work head by head, which the L2 cache
    likes better.
    """
    items, rounds, blocks, falling, backwards, heads, groups, all_heads = sizes
    number = _number(round)
    inner = gl.where(falling != 0, all_heads, blocks)
    outer = number // inner
    rest = number - outer * inner
    block = gl.where(falling != 0, outer, rest)
    index = gl.where(falling != 0, rest, outer)
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
    slot = number % C.value.v_stages
    if number >= C.value.v_stages:
        sync_at(C.value.v_free + slot, C.value.threads)
    mbarrier.expect(v_ready.index(slot), C.value.block_k * C.value.v_width * 2)
    tma_load(v_desc, [at[0], at[1], at[2], 0], v_ready.index(slot), v_smem.index(slot))


@gluon.jit
def _load_queries(descs, smem, q_ready, round, batch, head, row, C: gl.constexpr):
    CONSUMERS: gl.constexpr = C.value.consumers
    for wg in gl.static_range(CONSUMERS):
        slot = wg * C.value.q_stages + round % C.value.q_stages
        if round >= C.value.q_stages:
            sync_at(C.value.q_free + slot, 256)
        mbarrier.expect(q_ready.index(slot), 64 * (C.value.width + C.value.extra) * 2)
        tma_load(descs[0], [batch, head, row + 64 * wg, 0], q_ready.index(slot), smem[0].index(slot))
        if C.value.extra:
            tma_load(descs[1], [batch, head, row + 64 * wg, C.value.width], q_ready.index(slot), smem[1].index(slot))


@gluon.jit
def _producer(descs, smem, bars, table, tile, sizes, C: gl.constexpr):
    """Load q of each item and its blocks of keys and values, K of a block before V of the block before it."""
    q_desc, q_extra, k_desc, k_extra, v_desc = descs
    q_smem, q_smem_extra, k_smem, k_smem_extra, v_smem = smem
    q_ready, k_ready, v_ready = bars
    number = 0  # of the block of keys, over all items
    at = (0, 0, 0)
    for round in range(_rounds(sizes)):
        batch, head, kv_head, block = _item(round, sizes)
        row, entry_begin, entry_end = _entries(block, table, tile, C)
        for entry in range(entry_begin, entry_end):
            here = _tile(entry, table, tile, sizes[2], C)
            span = _key_blocks(row, here, C)
            for step in range(span[1]):
                slot = number % C.value.k_stages
                key = here[2] + span[0] + _block_at(step, span) * C.value.block_k
                if number >= C.value.k_stages:
                    sync_at(C.value.k_free + slot, C.value.threads)
                mbarrier.expect(k_ready.index(slot), C.value.block_k * (C.value.width + C.value.extra) * 2)
                tma_load(k_desc, [batch, kv_head, key, 0], k_ready.index(slot), k_smem.index(slot))
                if C.value.extra:
                    tma_load(k_extra, [batch, kv_head, key, C.value.width], k_ready.index(slot), k_smem_extra.index(slot))
                if number > 0:
                    _load_values(v_desc, v_smem, v_ready, at, number - 1, C)
                if (step == 0) & (entry == entry_begin):
                    _load_queries(descs, smem, q_ready, round, batch, head, row, C)
                at = (batch, kv_head, key)
                number += 1
    _load_values(v_desc, v_smem, v_ready, at, number - 1, C)


@gluon.jit
def _partial_sum(x):
    """Sums of what each thread holds of a row, (64, 4), in a tree: short chains of additions, no shuffles."""
    x = gl.sum(x.reshape([64, x.shape[1] // 8, 4, 2]), 3)
    x = gl.sum(x.reshape([64, x.shape[1] // 4, 4, 4]), 2)
    return gl.sum(x, 1)


@gluon.jit
def _row_max(x):
    """Largest element of each row of (64, BLOCK_K / 8, 4, 2), in a tree."""
    most = gl.max(x, 3)
    if most.shape[1] == 16:
        most = gl.max(most.reshape([64, 8, 2, 4]), 2)
    most = gl.max(most.reshape([64, 4, 2, 4]), 2)
    most = gl.max(most.reshape([64, 2, 2, 4]), 2)
    return gl.max(gl.max(most, 1), 1)


@gluon.jit
def _hide(x, limits, b0):
    """Scores (64, BLOCK_K / 8, 4, 2) of keys from b0 on, -inf where a row does not see the key."""
    layout: gl.constexpr = x.type.layout
    by_four: gl.constexpr = gl.SliceLayout(3, layout)
    by_eight: gl.constexpr = gl.SliceLayout(2, by_four)
    least, count = limits
    rows: gl.constexpr = gl.SliceLayout(1, by_eight)
    eights = gl.arange(0, x.shape[1], gl.SliceLayout(0, by_eight)) * 8
    twos = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, by_four))) * 2
    ones = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, layout))))
    offset = gl.convert_layout(b0 - least, rows)[:, None][:, :, None] + twos[None, :][None, :, :]
    distance = offset[:, :, :, None] + (eights[None, :][:, :, None][:, :, :, None] + ones[None, :][None, :, :][None, :, :, :])
    return keep_below(x, distance, gl.convert_layout(count, rows)[:, None][:, :, None][:, :, :, None])


@gluon.jit
def _peaks(scores, peak, limits, b0, factors, MASKED: gl.constexpr, C: gl.constexpr):
    """(scores, new peak, its place in the exponent, decay of what came before) of a block of raw scores."""
    layout: gl.constexpr = scores.type.layout
    if C.value.softcap:
        scores = 1.0 - 2.0 / (exp2(scores * factors[0]) + 1.0)
    fours = scores.reshape([64, C.value.block_k // 8, 4, 2])
    if MASKED:
        fours = _hide(fours, limits, b0)
        scores = gl.convert_layout(fours.reshape([64, C.value.block_k]), layout)
    new_peak = gl.maximum(peak, gl.convert_layout(_row_max(fours), gl.SliceLayout(1, layout)))
    shift = new_peak
    if MASKED:
        shift = gl.where(new_peak == -float("inf"), 0.0, new_peak)
    scaled = shift * factors[1]
    return scores, new_peak, scaled, exp2(peak * factors[1] - scaled)


@gluon.jit
def _weights(scores, scaled, factors, MASKED: gl.constexpr, C: gl.constexpr):
    x = scores * factors[1] - scaled[:, None]
    if C.value.on_fma > 0 and not MASKED:
        return exp2_partly_on_fma(x, C.value.on_fma, C.value.of)
    else:
        return exp2(x)


@gluon.jit
def _carried(weights, dtype: gl.constexpr, C: gl.constexpr):
    if C.value.packed:
        return pack_pairs(weights, dtype == gl.bfloat16)
    else:
        return weights


@gluon.jit
def _operand(p, dtype: gl.constexpr, C: gl.constexpr):
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.v_width, 16])
    if C.value.packed:
        p = unpack_pairs(p, dtype == gl.bfloat16)
    else:
        p = p.to(dtype)
    return gl.convert_layout(p, gl.DotOperandLayout(0, o_layout, 2))


@gluon.jit
def _issue_scores(q, k, slots, C: gl.constexpr):
    """Issue the product of a slot of q and one of k."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.block_k, 16])
    zero = gl.full([64, C.value.block_k], 0.0, gl.float32, s_layout)
    rows = q[0].index(slots[0]).reshape([64, C.value.width])
    keys = k[0].index(slots[1]).reshape([C.value.block_k, C.value.width]).permute([1, 0])
    scores = warpgroup_mma(rows, keys, zero, use_acc=False, is_async=True)
    if C.value.extra:
        rows = q[1].index(slots[0]).reshape([64, C.value.extra])
        keys = k[1].index(slots[1]).reshape([C.value.block_k, C.value.extra]).permute([1, 0])
        scores = warpgroup_mma(rows, keys, scores, is_async=True)
    return scores


@gluon.jit
def _step(
    state, smem, bars, number, round, last, more, limits, b0, factors, WG: gl.constexpr, MASKED: gl.constexpr,
    FRESH: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Weights of one block beside the weighted sum of the block before it and scores of this one, or of the next.

    With FRESH the block is the first of an item: peak and total begin anew, and acc, then complete, is that of the
    item before. The first block of all multiplies weights of zero by values not yet there; nobody uses the result.
    """
    acc, p, ready, peak, total, held = state
    q_smem, q_smem_extra, k_smem, k_smem_extra, v_smem = smem
    q_ready, k_ready, v_ready = bars
    v_number = number + C.value.v_stages - 1  # one less, and not negative
    v_slot = v_number % C.value.v_stages
    q_slot = WG * C.value.q_stages + round % C.value.q_stages
    if C.value.ahead:
        k_number, q_round = number + 1, gl.where(last, round + 1, round)
        wanted = more | (last == 0)
        k_slot = k_number % C.value.k_stages
        next_slot = WG * 2 + q_round % 2
        mbarrier.wait(q_ready.index(next_slot), q_round // 2 & 1, pred=wanted & last)
        mbarrier.wait(k_ready.index(k_slot), k_number // C.value.k_stages & 1, pred=wanted)
    else:
        k_slot = number % C.value.k_stages
        next_slot = q_slot
        if FRESH:
            mbarrier.wait(q_ready.index(q_slot), round & 1)
        mbarrier.wait(k_ready.index(k_slot), number // C.value.k_stages & 1)
    if C.value.turns:
        sync_at(C.value.turn + WG, 256)
    scores = _issue_scores((q_smem, q_smem_extra), (k_smem, k_smem_extra), (next_slot, k_slot), C)
    if FRESH:
        mbarrier.wait(v_ready.index(v_slot), v_number // C.value.v_stages & 1 ^ 1, pred=number > 0)
    else:
        mbarrier.wait(v_ready.index(v_slot), v_number // C.value.v_stages & 1 ^ 1)
    # The sum of the weights of the block before is taken here, where the tensor cores are busy with the scores.
    if C.value.packed:
        held = total
    else:
        held = total + _partial_sum(p)
    operand = _operand(p, q_smem.dtype, C)
    v = v_smem.index(v_slot).reshape([C.value.block_k, C.value.v_width])
    acc = warpgroup_mma(operand, v, acc, is_async=True)
    if C.value.turns:
        arrive_at(C.value.turn + (WG + 1) % C.value.consumers, 256)
    slot = number % C.value.k_stages
    if not C.value.ahead:
        ready = warpgroup_mma_wait(1, deps=[scores])
        if C.value.order == 1:
            arrive_at(C.value.k_free + slot, C.value.threads)
            arrive_if(last, C.value.q_free + q_slot, 256)
    if FRESH:
        peak = gl.full([64], -float("inf"), gl.float32, peak.type.layout)
    ready, peak, scaled, decay = _peaks(ready, peak, limits, b0, factors, MASKED, C)
    if C.value.order == 3:
        weights = _weights(ready, scaled, factors, MASKED, C)
    decay_of: gl.constexpr = gl.SliceLayout(1, held.type.layout)
    if FRESH:
        total = gl.full(held.shape, 0.0, gl.float32, held.type.layout)
    else:
        total = held * gl.convert_layout(decay, decay_of)[:, None]
    if C.value.order == 3:
        if C.value.packed:
            total += _partial_sum(weights)
        arrive_after(total, C.value.k_free + slot, C.value.threads, last, C.value.q_free + q_slot)
    if C.value.ahead:
        acc, operand, next_ready = warpgroup_mma_wait(0, deps=[acc, operand, scores])
    else:
        acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    if FRESH:
        arrive_if(number > 0, C.value.v_free + v_slot, C.value.threads)
    else:
        arrive_at(C.value.v_free + v_slot, C.value.threads)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    if C.value.order == 1:
        if C.value.ahead:
            arrive_at(C.value.k_free + slot, C.value.threads)
            arrive_if(last, C.value.q_free + q_slot, 256)
        weights = _weights(ready, scaled, factors, MASKED, C)
        if C.value.packed:
            total += _partial_sum(weights)
    p = _carried(weights, q_smem.dtype, C)
    if C.value.ahead:
        ready = next_ready
    return acc, p, ready, peak, total, held


@gluon.jit
def _close(state, v_smem, v_ready, number, C: gl.constexpr):
    """The weighted sum of the last block of a program."""
    slot = number % C.value.v_stages
    operand = _operand(state[1], v_smem.dtype, C)
    mbarrier.wait(v_ready.index(slot), number // C.value.v_stages & 1)
    v = v_smem.index(slot).reshape([C.value.block_k, C.value.v_width])
    acc = warpgroup_mma(operand, v, state[0], is_async=True)
    acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    if C.value.packed:
        return acc, state[4]
    else:
        return acc, state[4] + _partial_sum(state[1])


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
    """Attend 64 rows of each item; see the module."""
    q_smem, q_smem_extra, k_smem, k_smem_extra, v_smem = smem
    q_ready, k_ready, v_ready = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.block_k, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.v_width, 16])
    if C.value.turns and WG == C.value.consumers - 1:
        arrive_at(C.value.turn, 256)
    rounds = _rounds(sizes)
    number = 0
    ready = gl.full([64, C.value.block_k], 0.0, gl.float32, s_layout)
    acc = gl.full([64, C.value.v_width], 0.0, gl.float32, o_layout)
    peak = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    state = (acc, _carried(ready, q_smem.dtype, C), ready, peak, _partial_sum(ready), _partial_sum(ready))
    if C.value.ahead:
        mbarrier.wait(q_ready.index(WG * 2), 0)
        mbarrier.wait(k_ready.index(0), 0)
        scores = _issue_scores((q_smem, q_smem_extra), (k_smem, k_smem_extra), (WG * 2, 0), C)
        scores = warpgroup_mma_wait(0, deps=[scores])
        state = (state[0], state[1], scores, state[3], state[4], state[5])
    at = (0, 0, 0)  # batch, head, first row of the item that the state holds
    for round in range(rounds):
        batch, head, kv_head, block = _item(round, sizes)
        row, entry_begin, entry_end = _entries(block, table, tile, C)
        row0 = row + 64 * WG
        more = round < rounds - 1
        for entry in range(entry_begin, entry_end):
            here = _tile(entry, table, tile, sizes[2], C)
            span = _key_blocks(row, here, C)
            first, count, full_from, full = span
            limits = _limits(row0, here, span, C)
            masked = gl.maximum(count - full, 1)
            b0 = _block_at(0, span) * C.value.block_k
            end = number + count - 1
            if C.value.single:
                stop = end
            else:
                stop = gl.where(entry == entry_end - 1, end, -1)
            if entry == entry_begin:
                held_peak = state[3]
                state = _step(state, smem, bars, number, round, number == stop, more, limits, b0, factors, WG, True, True, C)
                if round > 0:
                    _write(state[0], held_peak, state[5], out, lse, at, rows, factors[2], out_strides, lse_strides, C)
                acc = gl.full([64, C.value.v_width], 0.0, gl.float32, o_layout)
                state = (acc, state[1], state[2], state[3], state[4], state[5])
            else:
                state = _step(state, smem, bars, number, round, number == stop, more, limits, b0, factors, WG, True, False, C)
            at = (batch, head, row0)
            for index in range(number + 1, number + masked):
                b0 = _block_at(index - number, span) * C.value.block_k
                state = _step(state, smem, bars, index, round, index == stop, more, limits, b0, factors, WG, True, False, C)
            if C.value.unroll:
                for index in range(number + masked, number + count - 1, 2):
                    state = _step(state, smem, bars, index, round, False, more, limits, 0, factors, WG, False, False, C)
                    state = _step(state, smem, bars, index + 1, round, index + 1 == stop, more, limits, 0, factors, WG, False, False, C)
                if (count - masked) % 2 == 1:
                    state = _step(state, smem, bars, number + count - 1, round, number + count - 1 == stop, more, limits, 0, factors, WG, False, False, C)
            else:
                for index in range(number + masked, number + count):
                    state = _step(state, smem, bars, index, round, index == stop, more, limits, 0, factors, WG, False, False, C)
            number += count
    acc, total = _close(state, v_smem, v_ready, number - 1, C)
    _write(acc, state[3], total, out, lse, at, rows, factors[2], out_strides, lse_strides, C)
    if C.value.turns and WG == 0:
        sync_at(C.value.turn, 256)


@gluon.jit
def _write(acc, peak, total, out, lse, at, rows, scale, out_strides, lse_strides, C: gl.constexpr):
    """Normalise 64 rows and write them, or merge them into the running state."""
    layout: gl.constexpr = acc.type.layout
    batch, head, row = at
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


SCALARS = [
    "q_begin", "q_end", "k_begin", "k_end", "lo", "hi", "items", "rounds", "blocks", "falling", "backwards", "heads",
    "groups", "all_heads", "rows", "lse_batch", "lse_head", "lse_row",
]  # fmt: skip


@gluon.jit(do_not_specialize=SCALARS)
def _attention_fwd_kernel(
    q, q_extra, k, k_extra, v, out, lse, table, q_begin, q_end, k_begin, k_end, lo, hi, items, rounds, blocks,
    falling, backwards, heads, groups, all_heads, rows, bend, exp_scale, scale, out_batch, out_head, out_row, lse_batch,
    lse_head, lse_row, C: gl.constexpr,
):  # fmt: skip
    tile = (q_begin, q_end, k_begin, k_end, lo, hi)
    sizes = (items, rounds, blocks, falling, backwards, heads, groups, all_heads)
    factors = (bend, exp_scale, scale)
    out_strides = (out_batch, out_head, out_row)
    lse_strides = (lse_batch, lse_head, lse_row)
    QS: gl.constexpr = C.value.consumers * C.value.q_stages
    KS: gl.constexpr = C.value.k_stages
    VS: gl.constexpr = C.value.v_stages
    q_smem = gl.allocate_shared_memory(q.dtype, [QS, 1, 1, 64, C.value.width], q.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [KS, 1, 1, C.value.block_k, C.value.width], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [VS, 1, 1, C.value.block_k, C.value.v_width], v.layout)
    if C.value.extra:
        q_smem_extra = gl.allocate_shared_memory(q.dtype, [QS, 1, 1, 64, C.value.extra], q_extra.layout)
        k_smem_extra = gl.allocate_shared_memory(k.dtype, [KS, 1, 1, C.value.block_k, C.value.extra], k_extra.layout)
    else:
        q_smem_extra = q_smem
        k_smem_extra = k_smem
    q_ready = gl.allocate_shared_memory(gl.int64, [QS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [KS, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [VS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(QS):
        mbarrier.init(q_ready.index(slot), count=1)
    for slot in gl.static_range(KS):
        mbarrier.init(k_ready.index(slot), count=1)
    for slot in gl.static_range(VS):
        mbarrier.init(v_ready.index(slot), count=1)
    descs = (q, q_extra, k, k_extra, v)
    smem = (q_smem, q_smem_extra, k_smem, k_smem_extra, v_smem)
    bars = (q_ready, k_ready, v_ready)
    if C.value.consumers == 2:
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


def refusal(problem, tiles, q, k, v, out):
    """Why this tier leaves a call to the portable kernel, or None."""
    if not 64 <= 128 * q.shape[2]:
        return "no"
    return None


def forward(problem, tiles, q, k, v, out, lse, config=None, programs=None):
    ints = int_tiles(tiles)
    first = problem.first
    if first and not _covers(ints, q.shape[2]):
        out.zero_()
        lse.fill_(-torch.inf)
        first = False
    if not ints:
        return
    if config is None:
        config = choose(q.shape[3], v.shape[3])
    if programs is None:
        programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    forward_launch(ints, q, k, v, out, lse, problem.scale, problem.softcap, first=first, config=config, programs=programs)()


@lru_cache(maxsize=4096)
def int_tiles(tiles):
    return clamp([(t.q_begin, t.q_end, t.k_begin, t.k_end, *((t.band.lo, t.band.hi) if t.band else (None, None))) for t in tiles])


def _covers(tiles, rows):
    """Whether a lone tile holds every row, so that the kernel writes each of them."""
    return len(tiles) == 1 and tiles[0][0] == 0 and tiles[0][1] == rows


def forward_launch(tiles, q, k, v, out, lse, scale, softcap, *, first, config, programs=None):
    batch, heads, count, dim = q.shape
    v_dim, groups = v.shape[3], heads // k.shape[1]
    rows = cut_rows(tiles, "q", config.block_q, count, first, q.device)
    config = replace(config, v_dim=v_dim, single=rows.table is None, merge=not first, softcap=softcap != 0)
    items = rows.blocks * heads * batch
    if programs is None:
        programs = items
    programs = min(programs, items)
    factors = score_factors(scale, softcap)
    # A table is in the order of falling work already; a lone tile's first and last rows tell.
    falling = int(rows.table is not None or rows.backwards or _falls(rows.tile))
    q_desc, k_desc = _descriptor(q, 64, config.width), _descriptor(k, config.block_k, config.width)
    q_extra, k_extra = q_desc, k_desc
    if config.extra:
        q_extra, k_extra = _descriptor(q, 64, config.extra), _descriptor(k, config.block_k, config.extra)
    return Launch(
        _attention_fwd_kernel,
        (programs,),
        dict(
            q=q_desc, q_extra=q_extra, k=k_desc, k_extra=k_extra, v=_descriptor(v, config.block_k, config.v_width),
            out=out, lse=lse, table=lse if rows.table is None else rows.table,
            **dict(zip(("q_begin", "q_end", "k_begin", "k_end", "lo", "hi"), rows.tile)), items=items,
            rounds=-(-items // programs), blocks=rows.blocks, falling=falling, backwards=int(rows.backwards), heads=heads, groups=groups,
            all_heads=batch * heads, rows=rows.end, bend=factors["bend"] * 2.8853900817779268,
            exp_scale=factors["exp_scale"], scale=factors["scale"],
            **dict(zip(("out_batch", "out_head", "out_row"), out.stride())),
            **dict(zip(("lse_batch", "lse_head", "lse_row"), lse.stride())), C=config,
        ),
        dict(num_warps=4, enable_fp_fusion=True),
    )


def _falls(tile):
    """Whether the first rows of a tile meet more keys than its last."""
    q_begin, q_end, k_begin, k_end, lo, hi = tile
    keys, last = k_end - k_begin, q_end - q_begin - 1
    return min(keys, 1 - lo) - max(0, -hi) > min(keys, last + 1 - lo) - max(0, last - hi)


def _descriptor(x, rows, width):
    strides, below = list(x.stride()), x.shape[3]
    for dim in (2, 1, 0):
        if x.shape[dim] == 1:
            strides[dim] = -(-below * x.itemsize // 16) * 16 // x.itemsize
        below = max(below, strides[dim] * x.shape[dim])
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], dtype)
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, width], layout)
