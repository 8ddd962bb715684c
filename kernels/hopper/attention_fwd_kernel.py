"""The forward kernel for sm_90: one producer and two consumers, which stream keys past blocks of 128 query rows.

FlashAttention-3's structure (Shah et al., 2024, arXiv 2407.08608) in Gluon. A producer partition copies queries, keys
and values to shared memory by the copy engine; two consumer partitions of 64 query rows each multiply them. A consumer
issues the scores of one block beside the weighted sum of the block before it, and the two take turns at issuing, so
that one computes exponentials while the tensor cores work for the other.

The blocks of all items of a program are one stream: the first block of an item is scored beside the last weighted sum
of the item before, so the tensor cores do not idle between items. Buffers are handed back by named barriers, at which
a consumer arrives without waiting. Blocks that the mask cuts come first, the others run in a loop without mask code.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ringattn.kernels.hopper.config import REGISTERS
from ringattn.kernels.hopper.items import block_at, entries_of, item_of, key_blocks, limits_of, rounds_of, tile_of
from ringattn.kernels.hopper.shim import arrive_at, arrive_if, exp2, keep_below, sync_at, tma_load

_REGISTERS = gl.constexpr(REGISTERS)


@gluon.jit
def _load_queries(descs, smem, q_ready, round, batch, head, row, C: gl.constexpr):
    CONSUMERS: gl.constexpr = C.value.consumers
    for wg in gl.static_range(CONSUMERS):
        if round > 0:
            sync_at(C.value.q_free + wg, 256)
        ready = q_ready.index(wg)
        mbarrier.expect(ready, 64 * (C.value.width + C.value.extra) * 2)
        tma_load(descs[0], [batch, head, row + 64 * wg, 0], ready, smem[0].index(wg))
        if C.value.extra:
            tma_load(descs[1], [batch, head, row + 64 * wg, C.value.width], ready, smem[1].index(wg))


@gluon.jit
def _load_keys(descs, smem, k_ready, batch, head, key, number, C: gl.constexpr):
    slot = number % C.value.k_stages
    if number >= C.value.k_stages:
        sync_at(C.value.k_free + slot, C.value.threads)
    ready = k_ready.index(slot)
    mbarrier.expect(ready, C.value.block_k * (C.value.width + C.value.extra) * 2)
    tma_load(descs[2], [batch, head, key, 0], ready, smem[2].index(slot))
    if C.value.extra:
        tma_load(descs[3], [batch, head, key, C.value.width], ready, smem[3].index(slot))


@gluon.jit
def _load_values(descs, smem, v_ready, at, number, C: gl.constexpr):
    slot = number % C.value.v_stages
    if number >= C.value.v_stages:
        sync_at(C.value.v_free + slot, C.value.threads)
    mbarrier.expect(v_ready.index(slot), C.value.block_k * C.value.v_width * 2)
    tma_load(descs[4], [at[0], at[1], at[2], 0], v_ready.index(slot), smem[4].index(slot))


@gluon.jit
def _producer(descs, smem, bars, table, tile, sizes, C: gl.constexpr):
    """Load the keys of each block before the values of the block before it, and the queries with an item's first."""
    q_ready, k_ready, v_ready = bars
    number = 0  # of the block, over all items
    at = (0, 0, 0)  # batch, head and first key of the block whose values are due
    for round in range(rounds_of(sizes)):
        batch, head, kv_head, block = item_of(round, sizes)
        row, entry_begin, entry_end = entries_of(block, table, tile, C)
        for entry in range(entry_begin, entry_end):
            here = tile_of(entry, table, tile, sizes[2], C)
            span = key_blocks(row, here, C)
            for step in range(span[1]):
                key = here[2] + span[0] + block_at(step, span) * C.value.block_k
                _load_keys(descs, smem, k_ready, batch, kv_head, key, number, C)
                if number > 0:
                    _load_values(descs, smem, v_ready, at, number - 1, C)
                if (step == 0) & (entry == entry_begin):
                    _load_queries(descs, smem, q_ready, round, batch, head, row, C)
                at = (batch, kv_head, key)
                number += 1
    _load_values(descs, smem, v_ready, at, number - 1, C)


@gluon.jit
def _partial_sum(x):
    """Sums of what each thread holds of a row of (64, n), as (64, 4): short chains of additions, no shuffles."""
    x = gl.sum(x.reshape([64, x.shape[1] // 8, 4, 2]), 3)
    x = gl.sum(x.reshape([64, x.shape[1] // 4, 4, 4]), 2)
    return gl.sum(x, 1)


@gluon.jit
def _row_max(x):
    """Largest element of each row of (64, n, 4, 2), as a tree of short chains."""
    most = gl.max(x, 3)
    if most.shape[1] == 16:
        most = gl.max(most.reshape([64, 8, 2, 4]), 2)
    most = gl.max(most.reshape([64, 4, 2, 4]), 2)
    most = gl.max(most.reshape([64, 2, 2, 4]), 2)
    return gl.max(gl.max(most, 1), 1)


@gluon.jit
def _hide(x, limits, b0):
    """Scores (64, n, 4, 2) of keys from b0 on, -inf where a row does not see the key.

    Columns are counted along the axes of the tile, so that a thread adds constants to one number a row.
    """
    layout: gl.constexpr = x.type.layout
    by_four: gl.constexpr = gl.SliceLayout(3, layout)
    by_eight: gl.constexpr = gl.SliceLayout(2, by_four)
    rows: gl.constexpr = gl.SliceLayout(1, by_eight)
    least, count = limits
    eights = gl.arange(0, x.shape[1], gl.SliceLayout(0, by_eight)) * 8
    twos = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, by_four))) * 2
    ones = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, layout))))
    start = gl.convert_layout(b0 - least, rows)[:, None][:, :, None] + twos[None, :][None, :, :]
    column = eights[None, :][:, :, None][:, :, :, None] + ones[None, :][None, :, :][None, :, :, :]
    seen = gl.convert_layout(count, rows)[:, None][:, :, None][:, :, :, None]
    return keep_below(x, start[:, :, :, None] + column, seen)


@gluon.jit
def _peaks(scores, peak, limits, b0, factors, MASKED: gl.constexpr, C: gl.constexpr):
    """(scores, new peak, the peak's place in the exponent, decay of what came before) of a block of raw scores."""
    layout: gl.constexpr = scores.type.layout
    if C.value.softcap:
        scores = 1.0 - 2.0 / (exp2(scores * factors[0]) + 1.0)
    parts = scores.reshape([64, C.value.block_k // 8, 4, 2])
    if MASKED:
        parts = _hide(parts, limits, b0)
        scores = gl.convert_layout(parts.reshape([64, C.value.block_k]), layout)
    new_peak = gl.maximum(peak, gl.convert_layout(_row_max(parts), gl.SliceLayout(1, layout)))
    shift = new_peak
    if MASKED:
        shift = gl.where(new_peak == -float("inf"), 0.0, new_peak)
    place = shift * factors[1]
    return scores, new_peak, place, exp2(peak * factors[1] - place)


@gluon.jit
def _issue_scores(smem, wg: gl.constexpr, slot, C: gl.constexpr):
    """Issue the product of a consumer's queries and a slot of keys."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.block_k, 16])
    zero = gl.full([64, C.value.block_k], 0.0, gl.float32, layout)
    rows = smem[0].index(wg).reshape([64, C.value.width])
    keys = smem[2].index(slot).reshape([C.value.block_k, C.value.width]).permute([1, 0])
    scores = warpgroup_mma(rows, keys, zero, use_acc=False, is_async=True)
    if C.value.extra:
        rows = smem[1].index(wg).reshape([64, C.value.extra])
        keys = smem[3].index(slot).reshape([C.value.block_k, C.value.extra]).permute([1, 0])
        scores = warpgroup_mma(rows, keys, scores, is_async=True)
    return scores


@gluon.jit
def _issue_values(weights, acc, v_smem, slot, C: gl.constexpr):
    """Issue the weighted sum of a slot of values; the weights stay alive in registers until it is done."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    operand = gl.convert_layout(weights.to(v_smem.dtype), layout)
    values = v_smem.index(slot).reshape([C.value.block_k, C.value.v_width])
    return warpgroup_mma(operand, values, acc, is_async=True), operand


@gluon.jit
def _step(
    state, smem, bars, number, round, last, limits, b0, factors, WG: gl.constexpr, MASKED: gl.constexpr,
    FRESH: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Scores and weights of a block beside the weighted sum of the block before it.

    The state is (acc, weights of the block before, peak, total without those weights, total of the item before). With
    FRESH the block is the first of an item: peak and total begin anew, and acc, then complete, is that of the item
    before. The first block of all multiplies weights of 0 by values not there yet, and nobody uses that.
    """
    acc, weights, peak, total, held = state
    q_ready, k_ready, v_ready = bars
    slot = number % C.value.k_stages
    v_number = number + C.value.v_stages - 1  # of the block before, kept from being negative
    v_slot = v_number % C.value.v_stages
    if FRESH:
        mbarrier.wait(q_ready.index(WG), round & 1)
    mbarrier.wait(k_ready.index(slot), number // C.value.k_stages & 1)
    sync_at(C.value.turn + WG, 256)
    scores = _issue_scores(smem, WG, slot, C)
    if FRESH:
        mbarrier.wait(v_ready.index(v_slot), v_number // C.value.v_stages & 1 ^ 1, pred=number > 0)
    else:
        mbarrier.wait(v_ready.index(v_slot), v_number // C.value.v_stages & 1 ^ 1)
    held = total + _partial_sum(weights)  # here, where the tensor cores are busy with the scores
    acc, operand = _issue_values(weights, acc, smem[4], v_slot, C)
    arrive_at(C.value.turn + (WG + 1) % C.value.consumers, 256)
    scores = warpgroup_mma_wait(1, deps=[scores])
    arrive_at(C.value.k_free + slot, C.value.threads)
    arrive_if(last, C.value.q_free + WG, 256)
    if FRESH:
        peak = gl.full([64], -float("inf"), gl.float32, peak.type.layout)
    scores, peak, place, decay = _peaks(scores, peak, limits, b0, factors, MASKED, C)
    acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    # From here to the end nothing fences, so that the exponentials fill the gaps between the other instructions.
    if FRESH:
        total = gl.full(held.shape, 0.0, gl.float32, held.type.layout)
        arrive_if(number > 0, C.value.v_free + v_slot, C.value.threads)
    else:
        total = held * gl.convert_layout(decay, gl.SliceLayout(1, held.type.layout))[:, None]
        arrive_at(C.value.v_free + v_slot, C.value.threads)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    weights = exp2(scores * factors[1] - place[:, None])
    return acc, weights, peak, total, held


@gluon.jit
def _write(acc, peak, total, out, lse, at, rows, scale, out_strides, lse_strides, C: gl.constexpr):
    """Normalise 64 rows and write them, or merge them into the running state."""
    layout: gl.constexpr = acc.type.layout
    batch, head, row = at
    peak = gl.convert_layout(peak, gl.SliceLayout(1, layout))
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, layout))
    local = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, C.value.v_width, gl.SliceLayout(0, layout))
    batch, head, wide = batch.to(gl.int64), head.to(gl.int64), row.to(gl.int64)
    lse_at = lse + batch * lse_strides[0] + head * lse_strides[1] + (wide + local) * lse_strides[2]
    out_row = out + batch * out_strides[0] + head * out_strides[1] + wide * out_strides[2]
    out_at = out_row + (local.to(gl.int64) * out_strides[2])[:, None] + column[None, :]
    seen = total != 0  # not > 0: a NaN must come out
    inside = row + local < rows
    total = gl.where(seen, total, 1.0)
    row_lse = gl.where(seen, peak * scale + gl.log(total), -float("inf"))
    factor = gl.where(seen, 1.0 / total, 0.0)
    if C.value.merge:
        inside = inside & seen
    store = inside[:, None]
    if C.value.v_dim != C.value.v_width:
        store = store & (column < C.value.v_dim)[None, :]
    if C.value.merge:
        held = gl.load(lse_at, mask=inside, other=-float("inf"))
        shift = gl.maximum(held, row_lse)
        shift = gl.where(shift == -float("inf"), 0.0, shift)
        keep, add = gl.exp(held - shift), gl.exp(row_lse - shift)
        weight = keep + add
        weight = gl.where(weight == 0, 1.0, weight)
        before = gl.load(out_at, mask=store & (keep > 0)[:, None], other=0.0)
        acc = acc * (factor * add / weight)[:, None] + before * (keep / weight)[:, None]
        row_lse = shift + gl.log(weight)
    else:
        acc = acc * factor[:, None]
    gl.store(out_at, acc.to(out.dtype.element_ty), mask=store)
    gl.store(lse_at, row_lse, mask=inside)


@gluon.jit
def _steps(
    state, smem, bars, number, begin, span, round, last, limits, factors, WG: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """The blocks of a tile from step `begin` on, those with a mask first; `last`: no tile of the item comes after."""
    first, count, full_from, full = span
    masked = gl.maximum(count - full, begin)
    stop = gl.where(last, count - 1, -1)  # the item's last block, after which its queries may be overwritten
    for step in range(begin, masked):
        b0 = block_at(step, span) * C.value.block_k
        state = _step(state, smem, bars, number + step, round, step == stop, limits, b0, factors, WG, True, False, C)
    for step in range(masked, count):
        state = _step(state, smem, bars, number + step, round, step == stop, limits, 0, factors, WG, False, False, C)
    return state


@gluon.jit
def _consumer(
    smem, bars, out, lse, table, tile, sizes, rows, factors, out_strides, lse_strides, WG: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Attend 64 rows of each item."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.block_k, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.v_width, 16])
    if WG == C.value.consumers - 1:
        arrive_at(C.value.turn, 256)
    number = 0
    weights = gl.full([64, C.value.block_k], 0.0, gl.float32, s_layout)
    acc = gl.full([64, C.value.v_width], 0.0, gl.float32, o_layout)
    peak = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    state = (acc, weights, peak, _partial_sum(weights), _partial_sum(weights))
    at = (0, 0, 0)  # batch, head and first row of the item that the state holds
    for round in range(rounds_of(sizes)):
        batch, head, kv_head, block = item_of(round, sizes)
        row, entry, end = entries_of(block, table, tile, C)
        here = tile_of(entry, table, tile, sizes[2], C)
        span = key_blocks(row, here, C)
        limits = limits_of(row + 64 * WG, here, span, C)
        b0 = block_at(0, span) * C.value.block_k
        only = (entry == end - 1) & (span[1] == 1)
        done = state[2]
        state = _step(state, smem, bars, number, round, only, limits, b0, factors, WG, True, True, C)
        if round > 0:
            _write(state[0], done, state[4], out, lse, at, rows, factors[2], out_strides, lse_strides, C)
        acc = gl.full([64, C.value.v_width], 0.0, gl.float32, o_layout)
        state = (acc, state[1], state[2], state[3], state[4])
        at = (batch, head, row + 64 * WG)
        state = _steps(state, smem, bars, number, 1, span, round, entry == end - 1, limits, factors, WG, C)
        number += span[1]
        if not C.value.single:
            for later in range(entry + 1, end):
                here = tile_of(later, table, tile, sizes[2], C)
                span = key_blocks(row, here, C)
                limits = limits_of(row + 64 * WG, here, span, C)
                state = _steps(state, smem, bars, number, 0, span, round, later == end - 1, limits, factors, WG, C)
                number += span[1]
    slot = (number - 1) % C.value.v_stages
    mbarrier.wait(bars[2].index(slot), (number - 1) // C.value.v_stages & 1)
    acc, operand = _issue_values(state[1], state[0], smem[4], slot, C)
    acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    total = state[3] + _partial_sum(state[1])
    _write(acc, state[2], total, out, lse, at, rows, factors[2], out_strides, lse_strides, C)
    if WG == 0:
        sync_at(C.value.turn, 256)


_UNSPECIALIZED = [
    "q_begin", "q_end", "k_begin", "k_end", "lo", "hi", "items", "rounds", "blocks", "backwards", "heads", "groups",
    "together", "all_heads", "rows", "lse_batch", "lse_head", "lse_row",
]  # fmt: skip
"""Numbers that a new shape changes: scalars one by one, since Triton specialises what a tuple holds."""


@gluon.jit(do_not_specialize=_UNSPECIALIZED)
def attention_fwd_kernel(
    q, q_extra, k, k_extra, v, out, lse, table, q_begin, q_end, k_begin, k_end, lo, hi, items, rounds, blocks,
    backwards, heads, groups, together, all_heads, rows, bend, exp_scale, scale, out_batch, out_head, out_row,
    lse_batch, lse_head, lse_row, C: gl.constexpr,
):  # fmt: skip
    QS: gl.constexpr = C.value.consumers
    KS: gl.constexpr = C.value.k_stages
    VS: gl.constexpr = C.value.v_stages
    q_smem = gl.allocate_shared_memory(q.dtype, [QS, 1, 1, 64, C.value.width], q.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [KS, 1, 1, C.value.block_k, C.value.width], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [VS, 1, 1, C.value.block_k, C.value.v_width], v.layout)
    q_smem_extra, k_smem_extra = q_smem, k_smem
    if C.value.extra:
        q_smem_extra = gl.allocate_shared_memory(q.dtype, [QS, 1, 1, 64, C.value.extra], q_extra.layout)
        k_smem_extra = gl.allocate_shared_memory(k.dtype, [KS, 1, 1, C.value.block_k, C.value.extra], k_extra.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [QS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [KS, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [VS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(QS):
        mbarrier.init(q_ready.index(slot), count=1)
    for slot in gl.static_range(KS):
        mbarrier.init(k_ready.index(slot), count=1)
    for slot in gl.static_range(VS):
        mbarrier.init(v_ready.index(slot), count=1)
    tile = (q_begin, q_end, k_begin, k_end, lo, hi)
    sizes = (items, rounds, blocks, backwards, heads, groups, together, all_heads)
    factors = (bend, exp_scale, scale)
    out_strides = (out_batch, out_head, out_row)
    lse_strides = (lse_batch, lse_head, lse_row)
    descs = (q, q_extra, k, k_extra, v)
    smem = (q_smem, q_smem_extra, k_smem, k_smem_extra, v_smem)
    bars = (q_ready, k_ready, v_ready)
    gl.warp_specialize(
        [
            (_producer, (descs, smem, bars, table, tile, sizes, C)),
            (_consumer, (smem, bars, out, lse, table, tile, sizes, rows, factors, out_strides, lse_strides, 0, C)),
            (_consumer, (smem, bars, out, lse, table, tile, sizes, rows, factors, out_strides, lse_strides, 1, C)),
        ],
        [4, 4],
        [_REGISTERS, _REGISTERS],
    )
