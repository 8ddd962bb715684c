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
