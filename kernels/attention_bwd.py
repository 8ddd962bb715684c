"""Gradients of attention over the tiles of a plan, accumulated into dq, dk and dv without atomics.

Probabilities are recomputed from the final log-sum-exp (FlashAttention-2, Dao, 2023, arXiv 2307.08691), so a tile
needs nothing but q, k, v, do, lse and delta. Two kernels mirror the forward one: a program of the first owns a block of
keys and streams queries past it (dk, dv), one of the second owns queries and streams keys past them (dq). That is seven
matrix products where a fused kernel has five, but each sum has one owner and one order: the same bits every run.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.blocks import key_blocks, load_block, load_rows, pointers_of, program_of, read_entry, tanh
from ringattn.kernels.config import (
    CompileCase,
    Config,
    Frame,
    Geometry,
    Launch,
    choose,
    example,
    geometry,
    padded,
    shipped_variants,
    variant_name,
)
from ringattn.kernels.tiles import IntTile, Rows, cut_rows, descriptors_fit, heads_together, make_descriptor

SPILL_BYTES = 256
"""Most that a shipped config may spill: the fastest dk/dv blocks of the sweep spill 8 to 224 bytes."""

LOG2E = 1.4426950408889634
TO_BASE_2 = tl.constexpr(LOG2E)


@triton.jit
def _probabilities(scores, row_lse, scale, EXACT: tl.constexpr):
    """exp(score * scale - lse), with one rounding fewer for float32."""
    if EXACT:
        return tl.exp2((scores * scale - row_lse) * TO_BASE_2)
    else:
        return tl.exp2(scores * (scale * TO_BASE_2) - row_lse * TO_BASE_2)


@triton.jit
def _stream_queries(
    dk, dv, k_block, v_block, q, do, lse, delta, batch, kv_head, groups, b, b_ok, tile, first, skip_from, skip, count,
    bend, scale, q_strides, do_strides, lse_strides, delta_strides,
    BLOCK_Q: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Stream `count` blocks of queries of each head of the group past the keys `b`, leaving out `skip` blocks."""
    q_begin, q_end, k_begin, k_end, lo, hi = tile
    # LLVM may take a division as proof that the divisor is not 0, drop the test of an empty loop, and never end.
    blocks = tl.maximum(count, 1)
    for step in tl.range(0, count * groups):
        head = kv_head * groups + step // blocks
        block = step % blocks
        if MASKED:
            block += tl.where(block >= skip_from, skip, 0)
        a0 = first + block * BLOCK_Q
        row = q_begin + a0
        q_block = load_block(q, batch, head, row, q_end, q_strides, BLOCK_Q, DIM, WIDTH, DESCRIPTORS, True)
        row_lse = load_rows(lse, batch, head, row, q_end, lse_strides, BLOCK_Q, float("inf"))
        row_lse = tl.where(row_lse == -float("inf"), float("inf"), row_lse)  # rows without keys weigh nothing
        scores = tl.dot(k_block, q_block.T, input_precision="ieee")
        if SOFTCAP:
            scores = tanh(scores * bend)
        weights = _probabilities(scores, row_lse[None, :], scale, EXACT)
        if MASKED:
            lag = (a0 + tl.arange(0, BLOCK_Q))[None, :] - b[:, None]
            weights = tl.where((lag >= lo) & (lag <= hi) & b_ok[:, None], weights, 0.0)
        do_block = load_block(do, batch, head, row, q_end, do_strides, BLOCK_Q, V_DIM, V_WIDTH, DESCRIPTORS, True)
        dv = tl.dot(weights.to(do_block.dtype), do_block, dv, input_precision="ieee")
        dweights = tl.dot(v_block, do_block.T, input_precision="ieee")
        row_delta = load_rows(delta, batch, head, row, q_end, delta_strides, BLOCK_Q, 0.0)
        dscores = weights * (dweights - row_delta[None, :])
        if SOFTCAP:
            dscores *= 1.0 - scores * scores
        dk = tl.dot(dscores.to(q_block.dtype), q_block, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _visit_queries(
    dk, dv, k_block, v_block, q, do, lse, delta, batch, kv_head, groups, row, tile, bend, scale, q_strides, do_strides,
    lse_strides, delta_strides,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr, DESCRIPTORS: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Add what the queries of one tile give to the keys `row .. row + BLOCK_K`."""
    q_begin, q_end, k_begin, k_end, lo, hi = tile
    rows, keys = q_end - q_begin, k_end - k_begin
    b0 = row - k_begin
    b = b0 + tl.arange(0, BLOCK_K)
    b_ok = (b >= 0) & (b < keys)
    b_first = tl.maximum(b0, 0)
    b_last = tl.minimum(b0 + BLOCK_K, keys) - 1
    first = tl.maximum(b_first + lo, 0)
    end = tl.minimum(rows, b_last + hi + 1)
    blocks = tl.maximum(tl.cdiv(end - first, BLOCK_Q), 0)
    # Every key is seen by all of block i iff it begins at or after row b_last + lo and ends at or before b_first + hi;
    # rows past the tile have lse = inf and weigh nothing, so the last block needs no mask for them.
    full_from = tl.minimum(tl.cdiv(tl.maximum(b_last + lo - first, 0), BLOCK_Q), blocks)
    full_end = tl.where(b_first + hi >= rows - 1, blocks, tl.maximum(b_first + hi + 1 - first, 0) // BLOCK_Q)
    full = tl.maximum(full_end - full_from, 0)
    if not SINGLE:  # keys of other tiles in this block must not meet these queries
        full = tl.where((b0 >= 0) & (b0 + BLOCK_K <= keys), full, 0)
    dk, dv = _stream_queries(
        dk, dv, k_block, v_block, q, do, lse, delta, batch, kv_head, groups, b, b_ok, tile, first + full_from * BLOCK_Q,
        0, 0, full, bend, scale, q_strides, do_strides, lse_strides, delta_strides,
        BLOCK_Q, DIM, WIDTH, V_DIM, V_WIDTH, DESCRIPTORS, SOFTCAP, EXACT, False,
    )  # fmt: skip
    return _stream_queries(
        dk, dv, k_block, v_block, q, do, lse, delta, batch, kv_head, groups, b, b_ok, tile, first,
        full_from, full, blocks - full, bend, scale, q_strides, do_strides, lse_strides, delta_strides,
        BLOCK_Q, DIM, WIDTH, V_DIM, V_WIDTH, DESCRIPTORS, SOFTCAP, EXACT, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tile", "shape"])
def _attention_dkv_kernel(
    q, k, v, do, lse, delta, dk, dv, table, tile, shape, bend, scale, dk_scale, q_strides, k_strides, v_strides,
    do_strides, lse_strides, delta_strides, dk_strides, dv_strides,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr, DESCRIPTORS: tl.constexpr, SINGLE: tl.constexpr, ADD: tl.constexpr, SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys of one K/V head, summed over the query heads that share it."""
    rows, blocks, backwards, heads, groups, together, all_heads = shape
    block, batch, kv_head = program_of(blocks, heads, together, all_heads)
    if SINGLE:
        row = tile[2] + tl.where(backwards != 0, blocks - 1 - block, block) * BLOCK_K
    else:
        row = tl.load(table + 3 * block)
    k_block = load_block(k, batch, kv_head, row, rows, k_strides, BLOCK_K, DIM, WIDTH, DESCRIPTORS, True)
    v_block = load_block(v, batch, kv_head, row, rows, v_strides, BLOCK_K, V_DIM, V_WIDTH, DESCRIPTORS, True)
    dk_block = tl.zeros([BLOCK_K, WIDTH], tl.float32)
    dv_block = tl.zeros([BLOCK_K, V_WIDTH], tl.float32)
    if SINGLE:
        dk_block, dv_block = _visit_queries(
            dk_block, dv_block, k_block, v_block, q, do, lse, delta, batch, kv_head, groups, row, tile, bend, scale,
            q_strides, do_strides, lse_strides, delta_strides,
            BLOCK_Q, BLOCK_K, DIM, WIDTH, V_DIM, V_WIDTH, DESCRIPTORS, SOFTCAP, EXACT, SINGLE,
        )  # fmt: skip
    else:
        for entry in tl.range(tl.load(table + 3 * block + 1), tl.load(table + 3 * block + 2)):
            dk_block, dv_block = _visit_queries(
                dk_block, dv_block, k_block, v_block, q, do, lse, delta, batch, kv_head, groups, row,
                read_entry(table + 3 * blocks, entry), bend, scale, q_strides, do_strides, lse_strides, delta_strides,
                BLOCK_Q, BLOCK_K, DIM, WIDTH, V_DIM, V_WIDTH, DESCRIPTORS, SOFTCAP, EXACT, SINGLE,
            )  # fmt: skip
    dk_block *= dk_scale
    inside = (row + tl.arange(0, BLOCK_K) < rows)[:, None]
    dk_at = pointers_of(dk, batch, kv_head, row, dk_strides, BLOCK_K, WIDTH)
    dk_ok = inside & (tl.arange(0, WIDTH) < DIM)[None, :]
    if ADD:
        dk_block += tl.load(dk_at, mask=dk_ok, other=0.0)
    tl.store(dk_at, dk_block.to(dk.dtype.element_ty), mask=dk_ok)
    dv_at = pointers_of(dv, batch, kv_head, row, dv_strides, BLOCK_K, V_WIDTH)
    dv_ok = inside & (tl.arange(0, V_WIDTH) < V_DIM)[None, :]
    if ADD:
        dv_block += tl.load(dv_at, mask=dv_ok, other=0.0)
    tl.store(dv_at, dv_block.to(dv.dtype.element_ty), mask=dv_ok)


@triton.jit
def _stream_keys(
    dq, q_block, do_block, row_lse, row_delta, k, v, batch, kv_head, a, a_ok, tile, first, skip_from, skip, count, bend,
    scale, k_strides, v_strides,
    BLOCK_K: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Stream `count` blocks of keys past the queries `a`, leaving out `skip` blocks from number `skip_from` on."""
    q_begin, q_end, k_begin, k_end, lo, hi = tile
    for step in tl.range(0, count):
        b0 = first + step * BLOCK_K
        if MASKED:
            b0 += tl.where(step >= skip_from, skip, 0) * BLOCK_K
        row = k_begin + b0
        k_block = load_block(k, batch, kv_head, row, k_end, k_strides, BLOCK_K, DIM, WIDTH, DESCRIPTORS, MASKED)
        v_block = load_block(v, batch, kv_head, row, k_end, v_strides, BLOCK_K, V_DIM, V_WIDTH, DESCRIPTORS, MASKED)
        scores = tl.dot(q_block, k_block.T, input_precision="ieee")
        dweights = tl.dot(do_block, v_block.T, input_precision="ieee")
        if SOFTCAP:
            scores = tanh(scores * bend)
        weights = _probabilities(scores, row_lse[:, None], scale, EXACT)
        if MASKED:
            b = b0 + tl.arange(0, BLOCK_K)
            lag = a[:, None] - b[None, :]
            seen = (lag >= lo) & (lag <= hi) & (b < k_end - k_begin)[None, :] & a_ok[:, None]
            weights = tl.where(seen, weights, 0.0)
        dscores = weights * (dweights - row_delta[:, None])
        if SOFTCAP:
            dscores *= 1.0 - scores * scores
        dq = tl.dot(dscores.to(k_block.dtype), k_block, dq, input_precision="ieee")
    return dq


@triton.jit
def _visit_keys(
    dq, q_block, do_block, row_lse, row_delta, k, v, batch, kv_head, row, tile, bend, scale, k_strides, v_strides,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr, DESCRIPTORS: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Add what the keys of one tile give to the queries `row .. row + BLOCK_Q`."""
    a0 = row - tile[0]
    a = a0 + tl.arange(0, BLOCK_Q)
    a_ok = (a >= 0) & (a < tile[1] - tile[0])
    first, blocks, full_from, full = key_blocks(a0, tile, BLOCK_Q, BLOCK_K, SINGLE)
    dq = _stream_keys(
        dq, q_block, do_block, row_lse, row_delta, k, v, batch, kv_head, a, a_ok, tile, first + full_from * BLOCK_K,
        0, 0, full, bend, scale, k_strides, v_strides,
        BLOCK_K, DIM, WIDTH, V_DIM, V_WIDTH, DESCRIPTORS, SOFTCAP, EXACT, False,
    )  # fmt: skip
    return _stream_keys(
        dq, q_block, do_block, row_lse, row_delta, k, v, batch, kv_head, a, a_ok, tile, first,
        full_from, full, blocks - full, bend, scale, k_strides, v_strides,
        BLOCK_K, DIM, WIDTH, V_DIM, V_WIDTH, DESCRIPTORS, SOFTCAP, EXACT, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tile", "shape"])
def _attention_dq_kernel(
    q, k, v, do, lse, delta, dq, table, tile, shape, bend, scale, dq_scale, q_strides, k_strides, v_strides, do_strides,
    lse_strides, delta_strides, dq_strides,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr, DESCRIPTORS: tl.constexpr, SINGLE: tl.constexpr, ADD: tl.constexpr, SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries of one head."""
    rows, blocks, backwards, heads, groups, together, all_heads = shape
    block, batch, head = program_of(blocks, heads, together, all_heads)
    kv_head = head // groups
    if SINGLE:
        row = tile[0] + tl.where(backwards != 0, blocks - 1 - block, block) * BLOCK_Q
    else:
        row = tl.load(table + 3 * block)
    q_block = load_block(q, batch, head, row, rows, q_strides, BLOCK_Q, DIM, WIDTH, DESCRIPTORS, True)
    do_block = load_block(do, batch, head, row, rows, do_strides, BLOCK_Q, V_DIM, V_WIDTH, DESCRIPTORS, True)
    row_lse = load_rows(lse, batch, head, row, rows, lse_strides, BLOCK_Q, float("inf"))
    row_lse = tl.where(row_lse == -float("inf"), float("inf"), row_lse)  # rows without keys weigh nothing
    row_delta = load_rows(delta, batch, head, row, rows, delta_strides, BLOCK_Q, 0.0)
    dq_block = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    if SINGLE:
        dq_block = _visit_keys(
            dq_block, q_block, do_block, row_lse, row_delta, k, v, batch, kv_head, row, tile, bend, scale, k_strides,
            v_strides, BLOCK_Q, BLOCK_K, DIM, WIDTH, V_DIM, V_WIDTH, DESCRIPTORS, SOFTCAP, EXACT, SINGLE,
        )  # fmt: skip
    else:
        for entry in tl.range(tl.load(table + 3 * block + 1), tl.load(table + 3 * block + 2)):
            dq_block = _visit_keys(
                dq_block, q_block, do_block, row_lse, row_delta, k, v, batch, kv_head, row,
                read_entry(table + 3 * blocks, entry), bend, scale, k_strides, v_strides,
                BLOCK_Q, BLOCK_K, DIM, WIDTH, V_DIM, V_WIDTH, DESCRIPTORS, SOFTCAP, EXACT, SINGLE,
            )  # fmt: skip
    dq_block *= dq_scale
    dq_at = pointers_of(dq, batch, head, row, dq_strides, BLOCK_Q, WIDTH)
    dq_ok = (row + tl.arange(0, BLOCK_Q) < rows)[:, None] & (tl.arange(0, WIDTH) < DIM)[None, :]
    if ADD:
        dq_block += tl.load(dq_at, mask=dq_ok, other=0.0)
    tl.store(dq_at, dq_block.to(dq.dtype.element_ty), mask=dq_ok)


@triton.jit(do_not_specialize=["blocks", "heads", "rows"])
def _row_delta_kernel(
    do, out, dlse, delta, blocks, heads, rows, do_strides, out_strides, dlse_strides, delta_strides,
    BLOCK: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """rowsum(do * out) - dlse of a block of rows."""
    pid = tl.program_id(0)
    row, index = (pid % blocks) * BLOCK, pid // blocks
    batch, head = index // heads, index % heads
    do_block = load_block(do, batch, head, row, rows, do_strides, BLOCK, V_DIM, V_WIDTH, False, True)
    out_block = load_block(out, batch, head, row, rows, out_strides, BLOCK, V_DIM, V_WIDTH, False, True)
    total = tl.sum(do_block.to(tl.float32) * out_block.to(tl.float32), 1)
    if HAS_DLSE:
        total -= load_rows(dlse, batch, head, row, rows, dlse_strides, BLOCK, 0.0).to(tl.float32)
    at = delta + batch.to(tl.int64) * delta_strides[0] + head.to(tl.int64) * delta_strides[1]
    at += (row + tl.arange(0, BLOCK)).to(tl.int64) * delta_strides[2]
    tl.store(at, total, mask=row + tl.arange(0, BLOCK) < rows)


def dkv_launch(
    tiles: tuple[IntTile, ...],
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
    softcap: float,
    *,
    first: bool,
    config: Config,
    descriptors: bool | None = None,
) -> Launch:
    """The launch that adds the tiles' share to (dk, dv), or with `first` writes it.

    Args:
        tiles: not empty; their bounds clamped by `ringattn.kernels.tiles.clamp`.
        do, q, k, v: (B, H, M, Dv), (B, H, M, D), (B, G, N, D), (B, G, N, Dv) of one dtype, any strides.
        lse, delta: (B, H, M), final log-sum-exp and `row_delta`.
        dk, dv: as k and v; float32 unless `first`.
        scale, softcap: as in `ringattn.backends.Problem`; `first` is its `first_kv`.
        config: of the blocks.
        descriptors: whether to load by the copy engine; None where the strides allow it.

    Returns:
        A launch, not yet run.
    """
    if descriptors is None:
        descriptors = descriptors_fit(q, k, v, do)
    shapes = geometry(q, k, v, do, lse, delta, dk, dv)
    frame = _dkv_frame(tiles, shapes, q.device, scale, softcap, first, config, descriptors)
    return frame.fill({**_sources(q, k, v, do, lse, delta, config, descriptors), "dk": dk, "dv": dv}, lse)


def dq_launch(
    tiles: tuple[IntTile, ...],
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    scale: float,
    softcap: float,
    *,
    first: bool,
    config: Config,
    descriptors: bool | None = None,
) -> Launch:
    """The launch that adds the tiles' share to dq, or with `first` writes it; arguments as in `dkv_launch`."""
    if descriptors is None:
        descriptors = descriptors_fit(q, k, v, do)
    shapes = geometry(q, k, v, do, lse, delta, dq)
    frame = _dq_frame(tiles, shapes, q.device, scale, softcap, first, config, descriptors)
    return frame.fill({**_sources(q, k, v, do, lse, delta, config, descriptors), "dq": dq}, lse)


def row_delta_launch(do: Tensor, out: Tensor, dlse: Tensor | None, delta: Tensor) -> Launch:
    """The launch that writes delta = rowsum(do * out) - dlse, (B, H, M) float32; do and out are (B, H, M, Dv)."""
    batch, heads, rows, v_dim = do.shape
    block = max(16, 4096 // padded(v_dim))
    blocks = triton.cdiv(rows, block)
    return Launch(
        _row_delta_kernel,
        (blocks * batch * heads,),
        dict(
            do=do,
            out=out,
            dlse=delta if dlse is None else dlse,
            delta=delta,
            blocks=blocks,
            heads=heads,
            rows=rows,
            do_strides=do.stride(),
            out_strides=out.stride(),
            dlse_strides=delta.stride() if dlse is None else dlse.stride(),
            delta_strides=delta.stride(),
            BLOCK=block,
            V_DIM=v_dim,
            V_WIDTH=padded(v_dim),
            HAS_DLSE=dlse is not None,
        ),
        dict(num_warps=4, enable_fp_fusion=True),
    )


def _sources(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, config: Config, descriptors: bool
) -> dict[str, object]:
    """The tensors that both kernels read."""
    if not descriptors:
        return {"q": q, "k": k, "v": v, "do": do, "lse": lse, "delta": delta}
    width, v_width = padded(q.shape[3]), padded(v.shape[3])
    return {
        "q": make_descriptor(q, config.block_q, width),
        "k": make_descriptor(k, config.block_k, width),
        "v": make_descriptor(v, config.block_k, v_width),
        "do": make_descriptor(do, config.block_q, v_width),
        "lse": lse,
        "delta": delta,
    }


@lru_cache(maxsize=4096)
def _dkv_frame(
    tiles: tuple[IntTile, ...],
    shapes: tuple[Geometry, ...],
    device: torch.device,
    scale: float,
    softcap: float,
    first: bool,
    config: Config,
    descriptors: bool,
) -> Frame:
    """All of a dk and dv launch but its tensors, whose geometries are those of q, k, v, do, lse, delta, dk and dv."""
    q, k, v, *_, dk, dv = shapes
    (batch, heads, count, dim), (_, kv_heads, keys, _) = q.shape, k.shape
    rows, group = cut_rows(tiles, "k", config.block_k, keys, first, device), heads // kv_heads
    together = heads_together(batch * kv_heads, 1, group * count * (dim + v.shape[3]) * q.dtype.itemsize)
    constants = dict(
        _constants(shapes, rows, config, descriptors, scale, softcap),
        shape=(rows.end, rows.blocks, int(rows.backwards), kv_heads, group, together, batch * kv_heads),
        dk_scale=scale,
        dk_strides=dk.strides,
        dv_strides=dv.strides,
        ADD=not first,
    )
    return Frame(_attention_dkv_kernel, (rows.blocks * kv_heads * batch,), constants, _options(config), rows.table)


@lru_cache(maxsize=4096)
def _dq_frame(
    tiles: tuple[IntTile, ...],
    shapes: tuple[Geometry, ...],
    device: torch.device,
    scale: float,
    softcap: float,
    first: bool,
    config: Config,
    descriptors: bool,
) -> Frame:
    """All of a dq launch but its tensors, whose geometries are those of q, k, v, do, lse, delta and dq."""
    q, k, v, *_, dq = shapes
    (batch, heads, count, dim), (_, kv_heads, keys, _) = q.shape, k.shape
    rows, group = cut_rows(tiles, "q", config.block_q, count, first, device), heads // kv_heads
    together = heads_together(batch * heads, group, keys * (dim + v.shape[3]) * k.dtype.itemsize)
    constants = dict(
        _constants(shapes, rows, config, descriptors, scale, softcap),
        shape=(rows.end, rows.blocks, int(rows.backwards), heads, group, together, batch * heads),
        dq_scale=scale,
        dq_strides=dq.strides,
        ADD=not first,
    )
    return Frame(_attention_dq_kernel, (rows.blocks * heads * batch,), constants, _options(config), rows.table)


def _constants(
    shapes: tuple[Geometry, ...], rows: Rows, config: Config, descriptors: bool, scale: float, softcap: float
) -> dict[str, object]:
    """The arguments that both kernels share, but for tensors."""
    q, k, v, do, lse, delta = shapes[:6]
    return dict(
        tile=rows.tile,
        bend=scale / softcap if softcap else 0.0,
        scale=softcap or scale,
        q_strides=q.strides,
        k_strides=k.strides,
        v_strides=v.strides,
        do_strides=do.strides,
        lse_strides=lse.strides,
        delta_strides=delta.strides,
        BLOCK_Q=config.block_q,
        BLOCK_K=config.block_k,
        DIM=q.shape[3],
        WIDTH=padded(q.shape[3]),
        V_DIM=v.shape[3],
        V_WIDTH=padded(v.shape[3]),
        DESCRIPTORS=descriptors,
        SINGLE=rows.table is None,
        SOFTCAP=softcap != 0,
        EXACT=q.dtype.itemsize == 4,
    )


def _options(config: Config) -> dict[str, object]:
    return dict(num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True)


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Every shipped config of both kernels, for the compile gate."""
    for dim, v_dim, dtype, descriptors, table, add, softcap in shipped_variants(arch):
        q, k, v = example(dim, dtype, 8), example(dim, dtype, 2), example(v_dim, dtype, 2)
        do, lse = example(v_dim, dtype, 8), torch.empty(1, 8, 4096, device="meta")
        dq, dk, dv = (example(x.shape[3], torch.float32, x.shape[1]) for x in (q, k, v))
        tiles: tuple[IntTile, ...] = ((0, 4096, 0, 4096, 0, 4096),)
        if table:
            tiles = ((0, 2048, 0, 2048, 0, 4096), (2048, 4096, 2048, 4096, 0, 4096))
        name, wgmma = variant_name(dim, v_dim, dtype, descriptors, table, add, softcap), dtype.itemsize == 2
        config = choose("dkv", dim, v_dim, dtype, arch)
        launch = dkv_launch(
            tiles, do, q, k, v, lse, lse, dk, dv, 0.1, softcap, first=not add, config=config, descriptors=descriptors
        )
        yield CompileCase(f"dkv-{name}", launch, SPILL_BYTES, wgmma)
        config = choose("dq", dim, v_dim, dtype, arch)
        launch = dq_launch(
            tiles, do, q, k, v, lse, lse, dq, 0.1, softcap, first=not add, config=config, descriptors=descriptors
        )
        yield CompileCase(f"dq-{name}", launch, SPILL_BYTES, wgmma)
