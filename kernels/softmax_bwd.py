"""Softmax of rows of any length: backward, from the softmax itself; and the gradient of a log-sum-exp.

The mirror image of `ringattn.kernels.softmax`: chunks of a row that does not fit one program publish their sums of
y * dy as words, wait for those of their row, and write.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.config import CompileCase, Launch
from ringattn.kernels.rows import power_of_two, row_starts, rows_of
from ringattn.kernels.softmax import (
    LOG2E,
    SoftmaxConfig,
    choose_config,
    load_logits,
    new_words,
    phases,
    softmax_variants,
    wait_for_words,
)


@triton.jit
def _softmax_bwd_kernel(
    dy, y, dx, rows, columns, scale, dy_rows, y_rows, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    weight = tl.load(y + row_starts(row, y_rows)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + row_starts(row, dy_rows)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    grad = tl.where(weight == 0, 0.0, grad)  # what has no weight has no gradient, whatever dy is there
    total = tl.sum(weight * grad, 1)
    result = tl.where(weight == 0, 0.0, weight * (grad - total[:, None]) * scale)
    at = dx + (row.to(tl.int64) * columns)[:, None] + column[None, :]
    tl.store(at, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_long_bwd_kernel(
    dy, y, dx, words, columns, chunks, scale, dy_rows, y_rows,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, PUBLISH: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """A chunk of a row: publish its sum, write its gradient, or both in one launch."""
    if PUBLISH and WRITE:
        item = tl.atomic_add(words + tl.num_programs(0), 1, sem="relaxed").to(tl.int32)
    else:
        item = tl.program_id(0)
    row = item // chunks
    column = (item % chunks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    weight = tl.load(y + row_starts(row, y_rows) + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + row_starts(row, dy_rows) + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.where(weight == 0, 0.0, grad)
    if PUBLISH:
        bits = tl.sum(weight * grad, 0).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        tl.atomic_xchg(words + item, bits | (1 << 32), sem="relaxed")
    if WRITE:
        word = tl.arange(0, WORDS)
        seen = wait_for_words(words + row * chunks + word, word < chunks)
        total = tl.sum(tl.where(word < chunks, seen.to(tl.int32).to(tl.float32, bitcast=True), 0.0), 0)
        result = tl.where(weight == 0, 0.0, weight * (grad - total) * scale)
        tl.store(dx + row.to(tl.int64) * columns + column, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _logsumexp_bwd_kernel(
    dlse, x, mask, peaks, totals, dx, columns, chunks, scale, exp_scale, x_rows, mask_rows,
    BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dlse times the softmax of a chunk of a row, from the row's state."""
    row = tl.program_id(0) // chunks
    column = (tl.program_id(0) % chunks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = load_logits(
        x + row_starts(row, x_rows) + column, mask + row_starts(row, mask_rows) + column, inside, MASKED
    )
    peak = tl.load(peaks + row)
    total = tl.load(totals + row)
    factor = tl.load(dlse + row) * scale / tl.where(total == 0, 1.0, total)
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    result = tl.exp2((value - shift) * exp_scale) * factor
    tl.store(dx + row.to(tl.int64) * columns + column, result.to(dx.dtype.element_ty), mask=inside)


def backward_launch(
    dy: Tensor, y: Tensor, dx: Tensor, *, temperature: float, config: SoftmaxConfig | None = None
) -> Launch:
    """The launch of `softmax_backward` for rows that fit one program."""
    columns = y.shape[-1]
    rows = y.numel() // columns
    config = config or choose_config(columns, backward=True)
    return Launch(
        _softmax_bwd_kernel,
        (triton.cdiv(rows, config.rows),),
        dict(
            dy=dy,
            y=y,
            dx=dx,
            rows=rows,
            columns=columns,
            scale=1.0 / temperature,
            dy_rows=rows_of(dy)[1],
            y_rows=rows_of(y)[1],
            ROWS=config.rows,
            BLOCK=config.block,
        ),
        dict(num_warps=config.num_warps),
    )


def long_backward_launch(
    dy: Tensor,
    y: Tensor,
    dx: Tensor,
    words: Tensor,
    *,
    temperature: float,
    config: SoftmaxConfig,
    publish: bool,
    write: bool,
) -> Launch:
    """The launch over chunks of rows that publishes their sums, writes the gradient, or does both at once."""
    columns = y.shape[-1]
    chunks = triton.cdiv(columns, config.block)
    return Launch(
        _softmax_long_bwd_kernel,
        (y.numel() // columns * chunks,),
        dict(
            dy=dy,
            y=y,
            dx=dx,
            words=words,
            columns=columns,
            chunks=chunks,
            scale=1.0 / temperature,
            dy_rows=rows_of(dy)[1],
            y_rows=rows_of(y)[1],
            BLOCK=config.block,
            WORDS=power_of_two(chunks),
            PUBLISH=publish,
            WRITE=write,
        ),
        dict(num_warps=config.num_warps),
    )


def softmax_backward(dy: Tensor, y: Tensor, *, temperature: float = 1.0, config: SoftmaxConfig | None = None) -> Tensor:
    """Gradient of `softmax_forward` in x.

    Args:
        dy: (..., N), any strides.
        y: the softmax.
        temperature: as in the forward pass.
        config: of the tile.

    Returns:
        Like y, contiguous; 0 where y is.
    """
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if not y.numel():
        return dx
    dy, y = rows_of(dy)[0], rows_of(y)[0]
    config = config or choose_config(y.shape[-1], backward=True)
    if config.block >= y.shape[-1]:
        backward_launch(dy, y, dx, temperature=temperature, config=config)()
        return dx
    words = new_words(y, config.block)
    for publish, write in phases(y, config.block):
        long_backward_launch(dy, y, dx, words, temperature=temperature, config=config, publish=publish, write=write)()
    return dx


def logsumexp_launch(
    dlse: Tensor,
    x: Tensor,
    mask: Tensor | None,
    peaks: Tensor,
    totals: Tensor,
    dx: Tensor,
    *,
    temperature: float,
    config: SoftmaxConfig,
) -> Launch:
    """The launch of `logsumexp_backward`."""
    columns = x.shape[-1]
    chunks = triton.cdiv(columns, config.block)
    x_rows = rows_of(x)[1]
    return Launch(
        _logsumexp_bwd_kernel,
        (x.numel() // columns * chunks,),
        dict(
            dlse=dlse,
            x=x,
            mask=x if mask is None else mask,
            peaks=peaks,
            totals=totals,
            dx=dx,
            columns=columns,
            chunks=chunks,
            scale=1.0 / temperature,
            exp_scale=LOG2E / temperature,
            x_rows=x_rows,
            mask_rows=x_rows if mask is None else rows_of(mask)[1],
            BLOCK=config.block,
            MASKED=mask is not None,
        ),
        dict(num_warps=config.num_warps),
    )


def logsumexp_backward(
    dlse: Tensor, x: Tensor, mask: Tensor | None, peaks: Tensor, totals: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Gradient in x of the log-sum-exp of x / temperature: dlse / temperature times the softmax.

    Args:
        dlse: like `peaks`.
        x, mask, temperature: as in `softmax_state`.
        peaks, totals: the state that it gave.

    Returns:
        Like x, contiguous.
    """
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        x, mask = rows_of(x)[0], None if mask is None else rows_of(mask)[0]
        config = choose_config(x.shape[-1], backward=False)
        logsumexp_launch(dlse.contiguous(), x, mask, peaks, totals, dx, temperature=temperature, config=config)()
    return dx


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """The backward kernels for the compile gate."""
    words = torch.empty(1, dtype=torch.int64, device="meta")
    for name, x, mask, config, backward in softmax_variants():
        peaks = torch.empty(x.shape[0], device="meta")
        if x.dtype == torch.bfloat16:
            launch = logsumexp_launch(peaks, x, mask, peaks, peaks, x, temperature=1.0, config=config)
            yield CompileCase(f"logsumexp-{name}", launch)
        if mask is not None:
            continue
        if backward.block >= x.shape[1]:
            yield CompileCase(name, backward_launch(x, x, x, temperature=1.0))
            continue
        for publish, write in ((True, True), (True, False), (False, True)):
            launch = long_backward_launch(
                x, x, x, words, temperature=1.0, config=backward, publish=publish, write=write
            )
            yield CompileCase(f"{name}{'-publish' * publish}{'-write' * write}", launch)
