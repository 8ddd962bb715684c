"""What the attention kernels share on the device: loads of a block of rows, the entries of a table, tanh."""

import triton
import triton.language as tl


@triton.jit
def load_block(
    source,
    batch,
    head,
    row,
    end,
    strides,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Rows `row .. row + BLOCK` of a head, (BLOCK, WIDTH), zero beyond column DIM and, with CHECK, from row `end` on.

    A descriptor reads zeros beyond the tensor, wherever `end` is.
    """
    if DESCRIPTORS:
        block = source.load([batch, head, row, 0]).reshape(BLOCK, WIDTH)
    else:
        pointers = pointers_of(source, batch, head, row, strides, BLOCK, WIDTH)
        inside = (row + tl.arange(0, BLOCK) < end)[:, None]
        columns = (tl.arange(0, WIDTH) < DIM)[None, :]
        if CHECK:
            block = tl.load(pointers, mask=inside & columns, other=0.0)
        elif DIM != WIDTH:
            block = tl.load(pointers, mask=columns, other=0.0)
        else:
            block = tl.load(pointers)
    return block


@triton.jit
def pointers_of(base, batch, head, row, strides, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to rows `row .. row + BLOCK` and columns 0 .. WIDTH of a head."""
    rows = tl.arange(0, BLOCK).to(tl.int64)
    columns = tl.arange(0, WIDTH).to(tl.int64)
    start = base + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]
    return start + rows[:, None] * strides[2] + columns[None, :] * strides[3]


@triton.jit
def load_rows(base, batch, head, row, end, strides, BLOCK: tl.constexpr, other: tl.constexpr):
    """Numbers of rows `row .. row + BLOCK` of a head, (BLOCK,), `other` from row `end` on."""
    rows = row + tl.arange(0, BLOCK)
    at = base + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + rows.to(tl.int64) * strides[2]
    return tl.load(at, mask=rows < end, other=other)


@triton.jit
def program_of(blocks, heads, together, all_heads):
    """(block, batch, head) of this program: `together` heads take turns, block by block."""
    pid = tl.program_id(0)
    lot = pid // (together * blocks)
    here = tl.minimum(together, all_heads - lot * together)
    rest = pid % (together * blocks)
    index = lot * together + rest % here
    return rest // here, index // heads, index % heads


@triton.jit
def key_blocks(a0, tile, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SINGLE: tl.constexpr):
    """How rows `a0 .. a0 + BLOCK_Q` of a tile meet its keys: (first key, blocks, first full block, full blocks).

    Every row sees block i iff it begins at or after key a_last - hi and ends at or before key a_first - lo.
    """
    q_begin, q_end, k_begin, k_end, lo, hi = tile
    rows, keys = q_end - q_begin, k_end - k_begin
    a_first = tl.maximum(a0, 0)
    a_last = tl.minimum(a0 + BLOCK_Q, rows) - 1
    first = tl.maximum(a_first - hi, 0)
    end = tl.minimum(keys, a_last - lo + 1)
    blocks = tl.maximum(tl.cdiv(end - first, BLOCK_K), 0)
    full_from = tl.minimum(tl.cdiv(tl.maximum(a_last - hi - first, 0), BLOCK_K), blocks)
    full_end = tl.maximum(tl.minimum(keys, a_first - lo + 1) - first, 0) // BLOCK_K
    full = tl.maximum(full_end - full_from, 0)
    if not SINGLE:  # rows of other tiles in this block must not see these keys; rows past the only tile are not stored
        full = tl.where((a0 >= 0) & (a0 + BLOCK_Q <= rows), full, 0)
    return first, blocks, full_from, full


@triton.jit
def read_entry(table, entry):
    """One tile of a table: (q_begin, q_end, k_begin, k_end, lo, hi)."""
    at = table + entry * 6
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def tanh(x):
    """tanh to a few units in the last place, without libdevice, so that it runs in the interpreter too.

    1 - 2 / (e^2x + 1) loses small x to cancellation, so below 0.25 the series up to x^9 stands in (its next term is
    below 2e-8 of x there).
    """
    square = x * x
    series = x * (
        1.0
        + square
        * (
            -0.3333333333333333
            + square * (0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203))
        )
    )
    large = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
    return tl.where(tl.abs(x) < 0.25, series, large)
