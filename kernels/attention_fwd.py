"""Forward attention over the tiles of a plan in one launch, merged into the running state of each query row.

The order is FlashAttention-2's (Dao, 2023, arXiv 2307.08691): one program owns a block of query rows, keys stream past
it, the softmax is online and in base 2. A program walks every tile that touches its rows, so one launch serves any
number of tiles, nothing races, and the state is read and written once a launch.

Blocks of keys fall into three classes by closed-form bounds of the band: those that no row sees are not visited, those
that every row sees run in a loop without a mask, the rest in a masked loop. No mask tensor exists.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.blocks import key_blocks, load_block, pointers_of, program_of, read_entry, tanh
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
from ringattn.kernels.tiles import IntTile, cut_rows, descriptors_fit, heads_together, make_descriptor

LOG2E = 1.4426950408889634


@triton.jit
def _keys(
    acc,
    peak,
    total,
    q_block,
    k,
    v,
    batch,
    kv_head,
    a,
    row_ok,
    k_begin,
    keys,
    lo,
    hi,
    first,
    skip_from,
    skip,
    count,
    bend,
    exp_scale,
    k_strides,
    v_strides,
    BLOCK_K: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stream `count` blocks of keys past the rows `a`, leaving out `skip` blocks from number `skip_from` on."""
    for step in tl.range(0, count):
        b0 = first + step * BLOCK_K
        if MASKED:
            b0 += tl.where(step >= skip_from, skip, 0) * BLOCK_K
        k_block = load_block(
            k, batch, kv_head, k_begin + b0, k_begin + keys, k_strides, BLOCK_K, DIM, WIDTH, DESCRIPTORS, MASKED
        )
        scores = tl.dot(q_block, k_block.T, input_precision="ieee")
        if SOFTCAP:
            scores = tanh(scores * bend)
        if MASKED:
            b = b0 + tl.arange(0, BLOCK_K)
            lag = a[:, None] - b[None, :]
            seen = (lag >= lo) & (lag <= hi) & (b < keys)[None, :] & row_ok[:, None]
            scores = tl.where(seen, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = new_peak
        if MASKED:
            shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        if EXACT:
            weights = tl.exp2((scores - shift[:, None]) * exp_scale)
            decay = tl.exp2((peak - shift) * exp_scale)
        else:
            weights = tl.exp2(scores * exp_scale - (shift * exp_scale)[:, None])
            decay = tl.exp2(peak * exp_scale - shift * exp_scale)
        v_block = load_block(
            v, batch, kv_head, k_begin + b0, k_begin + keys, v_strides, BLOCK_K, V_DIM, V_WIDTH, DESCRIPTORS, MASKED
        )
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v_block.dtype), v_block, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit
def _visit(
    acc,
    peak,
    total,
    q_block,
    k,
    v,
    batch,
    kv_head,
    row,
    tile,
    bend,
    exp_scale,
    k_strides,
    v_strides,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Attend rows `row .. row + BLOCK_Q` to one tile."""
    q_begin, q_end, k_begin, k_end, lo, hi = tile
    keys = k_end - k_begin
    a0 = row - q_begin
    a = a0 + tl.arange(0, BLOCK_Q)
    row_ok = (a >= 0) & (a < q_end - q_begin)
    first, blocks, full_from, full = key_blocks(a0, tile, BLOCK_Q, BLOCK_K, SINGLE)
    acc, peak, total = _keys(
        acc, peak, total, q_block, k, v, batch, kv_head, a, row_ok, k_begin, keys, lo, hi, first + full_from * BLOCK_K,
        0, 0, full, bend, exp_scale, k_strides, v_strides, BLOCK_K, DIM, WIDTH, V_DIM, V_WIDTH, DESCRIPTORS, SOFTCAP,
        EXACT, False,
    )  # fmt: skip
    return _keys(
        acc, peak, total, q_block, k, v, batch, kv_head, a, row_ok, k_begin, keys, lo, hi, first,
        full_from, full, blocks - full, bend, exp_scale, k_strides, v_strides, BLOCK_K, DIM, WIDTH, V_DIM, V_WIDTH,
        DESCRIPTORS, SOFTCAP, EXACT, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tile", "shape"])
def _attention_fwd_kernel(
    q,
    k,
    v,
    out,
    lse,
    table,
    tile,
    shape,
    scale,
    bend,
    exp_scale,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    lse_strides,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SINGLE: tl.constexpr,
    MERGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FLIP: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Attention of a block of query rows of one head, merged into its state or written."""
    rows, blocks, backwards, heads, groups, together, all_heads = shape
    block, batch, head = program_of(blocks, heads, together, all_heads)
    kv_head = head // groups
    if SINGLE:
        row = tile[0] + tl.where(backwards != 0, blocks - 1 - block, block) * BLOCK_Q
    else:
        row = tl.load(table + 3 * block)
    q_block = load_block(q, batch, head, row, rows, q_strides, BLOCK_Q, DIM, WIDTH, DESCRIPTORS, True)
    if FLIP:
        q_block = -q_block
    peak = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, V_WIDTH], tl.float32)
    if SINGLE:
        acc, peak, total = _visit(
            acc, peak, total, q_block, k, v, batch, kv_head, row, tile, bend, exp_scale, k_strides, v_strides,
            BLOCK_Q, BLOCK_K, DIM, WIDTH, V_DIM, V_WIDTH, DESCRIPTORS, SOFTCAP, EXACT, SINGLE,
        )  # fmt: skip
    else:
        for entry in tl.range(tl.load(table + 3 * block + 1), tl.load(table + 3 * block + 2)):
            acc, peak, total = _visit(
                acc, peak, total, q_block, k, v, batch, kv_head, row, read_entry(table + 3 * blocks, entry), bend,
                exp_scale, k_strides, v_strides, BLOCK_Q, BLOCK_K, DIM, WIDTH, V_DIM, V_WIDTH, DESCRIPTORS, SOFTCAP,
                EXACT, SINGLE,
            )  # fmt: skip

    seen = total != 0  # not > 0: a NaN must come out
    inside = row + tl.arange(0, BLOCK_Q) < rows
    store = inside[:, None] & (tl.arange(0, V_WIDTH) < V_DIM)[None, :]
    lse_at = lse + batch.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1]
    lse_at += (row + tl.arange(0, BLOCK_Q)).to(tl.int64) * lse_strides[2]
    out_at = pointers_of(out, batch, head, row, out_strides, BLOCK_Q, V_WIDTH)
    row_lse = tl.where(seen, peak * scale + tl.log(tl.where(seen, total, 1.0)), -float("inf"))
    factor = tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)
    if MERGE:
        held = tl.load(lse_at, mask=inside, other=-float("inf"))
        shift = tl.maximum(held, row_lse)
        shift = tl.where(shift == -float("inf"), 0.0, shift)
        keep, add = tl.exp(held - shift), tl.exp(row_lse - shift)
        weight = keep + add
        divisor = tl.where(weight == 0, 1.0, weight)
        before = tl.load(out_at, mask=store & (keep > 0)[:, None], other=0.0)
        acc = acc * (factor * add / divisor)[:, None] + before * (keep / divisor)[:, None]
        row_lse = shift + tl.log(divisor)
        inside = inside & seen
        store = store & seen[:, None]
    else:
        acc = acc * factor[:, None]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=store)
    tl.store(lse_at, row_lse, mask=inside)


def forward_launch(
    tiles: tuple[IntTile, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float,
    *,
    first: bool,
    config: Config,
    descriptors: bool | None = None,
) -> Launch:
    """The launch that attends q to the tiles and merges into (out, lse), or writes them.

    Args:
        tiles: not empty; their bounds clamped by `ringattn.kernels.tiles.clamp`.
        q, k, v: (B, H, M, D), (B, G, N, D), (B, G, N, Dv), any strides, no empty dimension.
        out, lse: (B, H, M, Dv) and (B, H, M); `out` in q's dtype only with `first`.
        scale, softcap, first: as in `ringattn.backends.Problem`.
        config: of the blocks.
        descriptors: whether to load by the copy engine; None where the strides allow it.

    Returns:
        A launch, not yet run.
    """
    if descriptors is None:
        descriptors = descriptors_fit(q, k, v)
    frame = _frame(tiles, geometry(q, k, v, out, lse), q.device, scale, softcap, first, config, descriptors)
    tensors: dict[str, object] = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    if descriptors:
        tensors["q"] = make_descriptor(q, config.block_q, padded(q.shape[3]))
        tensors["k"] = make_descriptor(k, config.block_k, padded(k.shape[3]))
        tensors["v"] = make_descriptor(v, config.block_k, padded(v.shape[3]))
    return frame.fill(tensors, lse)


@lru_cache(maxsize=4096)
def _frame(
    tiles: tuple[IntTile, ...],
    shapes: tuple[Geometry, ...],
    device: torch.device,
    scale: float,
    softcap: float,
    first: bool,
    config: Config,
    descriptors: bool,
) -> Frame:
    """All of a launch but its tensors, whose geometries are those of q, k, v, out and lse."""
    q, k, v, out, lse = shapes
    (batch, heads, count, dim), v_dim = q.shape, v.shape[3]
    groups = heads // k.shape[1]
    rows = cut_rows(tiles, "q", config.block_q, count, first, device)
    together = heads_together(batch * heads, groups, k.shape[2] * (dim + v_dim) * k.dtype.itemsize)
    constants = dict(
        tile=rows.tile,
        shape=(rows.end, rows.blocks, int(rows.backwards), heads, groups, together, batch * heads),
        **score_factors(scale, softcap),
        q_strides=q.strides,
        k_strides=k.strides,
        v_strides=v.strides,
        out_strides=out.strides,
        lse_strides=lse.strides,
        BLOCK_Q=config.block_q,
        BLOCK_K=config.block_k,
        DIM=dim,
        WIDTH=padded(dim),
        V_DIM=v_dim,
        V_WIDTH=padded(v_dim),
        DESCRIPTORS=descriptors,
        SINGLE=rows.table is None,
        MERGE=not first,
        SOFTCAP=softcap != 0,
        FLIP=scale < 0 and softcap == 0,
        EXACT=q.dtype.itemsize == 4,
    )
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True)
    return Frame(_attention_fwd_kernel, (rows.blocks * heads * batch,), constants, options, rows.table)


def score_factors(scale: float, softcap: float) -> dict[str, float]:
    """The factors that take a raw score q.k to the exponent, `exp_scale` of which is base 2 and `scale` natural.

    The largest raw score stays the largest only under a positive factor: a negative scale flips q instead, and 1e-30
    stands for 0, which would turn the -inf of hidden keys into NaN; it leaves every exponential at exactly 1.
    """
    if softcap:
        return {"scale": softcap, "bend": scale / softcap, "exp_scale": softcap * LOG2E}
    scale = max(abs(scale), 1e-30)
    return {"scale": scale, "bend": 0.0, "exp_scale": scale * LOG2E}


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Every shipped config, by head size, dtype, path and epilogue, for the compile gate."""
    for dim, v_dim, dtype, descriptors, table, merge, softcap in shipped_variants(arch):
        q, k = example(dim, dtype, 8), example(dim, dtype, 2)
        v, out = example(v_dim, dtype, 2), example(v_dim, torch.float32 if merge else dtype, 8)
        lse = torch.empty(1, 8, 4096, device="meta")
        tiles: tuple[IntTile, ...] = ((0, 4096, 0, 4096, 0, 4096),)
        if table:
            tiles = ((0, 2048, 0, 2048, 0, 4096), (2048, 4096, 2048, 4096, 0, 4096))
        config = choose("fwd", dim, v_dim, dtype, arch)
        launch = forward_launch(
            tiles,
            q,
            k,
            v,
            out,
            lse,
            scale=0.1,
            softcap=softcap,
            first=not merge,
            config=config,
            descriptors=descriptors,
        )
        name = variant_name(dim, v_dim, dtype, descriptors, table, merge, softcap)
        # With Dv=256 the merge holds two accumulators, once a program; no loop spills (0 bytes without the merge).
        yield CompileCase(name, launch, 512 if v_dim == 256 else 0, dtype.itemsize == 2)
