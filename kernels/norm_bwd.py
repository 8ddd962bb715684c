"""RMSNorm and LayerNorm of rows of any length, with an optional residual added before: backward.

The gradients of weight and bias are sums over rows. Each program adds up the rows that it owns, and a second kernel
adds the partial sums in a fixed order: no atomics, so the same inputs give the same bits.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.config import CompileCase, Launch
from ringattn.kernels.norm import NormConfig, choose_config, load_stats, norm_variants
from ringattn.kernels.rows import power_of_two, processors, row_starts, rows_of


@triton.jit
def _norm_bwd_kernel(
    dy, dsummed, x, weight, stats, dx, dweight, dbias, rows, columns, dy_rows, dsummed_rows, x_rows,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTER: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of tiles of whole rows, every num_programs-th, and this program's sums over its rows for dweight and dbias."""
    column = tl.arange(0, BLOCK)
    if WEIGHT:
        scale = tl.load(weight + column, mask=column < columns, other=0.0)
        weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    if BIAS:
        bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    count = columns * 1.0
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        real = row < rows
        inside = real[:, None] & (column < columns)[None, :]
        grad = tl.load(dy + (row_starts(row, dy_rows)[:, None] + column[None, :]), mask=inside, other=0.0)
        value = tl.load(x + (row_starts(row, x_rows)[:, None] + column[None, :]), mask=inside, other=0.0)
        rstd, shift, mean = load_stats(stats, row, real, CENTER)
        grad, value = grad.to(tl.float32), value.to(tl.float32)
        if CENTER:
            value = tl.where(inside, (value - shift[:, None]) - mean[:, None], 0.0)
        value *= rstd[:, None]
        if BIAS:
            bias_sum += grad
        if WEIGHT:
            weight_sum += grad * value
            grad *= scale.to(tl.float32)[None, :]
        along = tl.sum(grad * value, 1) / count
        result = grad - value * along[:, None]
        if CENTER:
            result -= (tl.sum(grad, 1) / count)[:, None]
        result *= rstd[:, None]
        if RESIDUAL:
            passed = dsummed + (row_starts(row, dsummed_rows)[:, None] + column[None, :])
            result += tl.load(passed, mask=inside, other=0.0).to(tl.float32)
        at = dx + (row.to(tl.int64) * columns)[:, None] + column[None, :]
        tl.store(at, result.to(dx.dtype.element_ty), mask=inside)
    program = tl.program_id(0).to(tl.int64) * columns
    if WEIGHT:
        tl.store(dweight + program + column, tl.sum(weight_sum, 0), mask=column < columns)
    if BIAS:
        tl.store(dbias + program + column, tl.sum(bias_sum, 0), mask=column < columns)


@triton.jit
def _norm_bwd_long_kernel(
    dy, dsummed, x, weight, stats, dx, dweight, dbias, rows, columns, dy_rows, dsummed_rows, x_rows,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTER: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of one row of any length, in blocks: once for the two means, once for the result."""
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    dy += row_starts(row, dy_rows)
    x += row_starts(row, x_rows)
    dsummed += row_starts(row, dsummed_rows)
    rstd, shift, mean = load_stats(stats, row, row < rows, CENTER)
    count = columns * 1.0
    products = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, columns, BLOCK):
        inside = start + lane < columns
        grad = tl.load(dy + start + lane, mask=inside, other=0.0).to(tl.float32)
        if WEIGHT:
            grad *= tl.load(weight + start + lane, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + start + lane, mask=inside, other=0.0).to(tl.float32)
        products += grad * (((value - shift) - mean) * rstd)
        total += grad
    along = tl.sum(products, 0) / count
    level = tl.sum(total, 0) / count
    for start in tl.range(0, columns, BLOCK):
        inside = start + lane < columns
        grad = tl.load(dy + start + lane, mask=inside, other=0.0).to(tl.float32)
        if WEIGHT:
            grad *= tl.load(weight + start + lane, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + start + lane, mask=inside, other=0.0).to(tl.float32)
        result = grad - ((value - shift) - mean) * rstd * along
        if CENTER:
            result -= level
        result *= rstd
        if RESIDUAL:
            result += tl.load(dsummed + start + lane, mask=inside, other=0.0).to(tl.float32)
        at = dx + row.to(tl.int64) * columns + start + lane
        tl.store(at, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _norm_sums_kernel(
    dy, x, stats, dweight, dbias, rows, columns, dy_rows, x_rows,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Sums of dy and dy * normalised over every num_programs-th tile of rows, for a block of columns of long rows."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        grad = tl.load(dy + (row_starts(row, dy_rows)[:, None] + column[None, :]), mask=inside, other=0.0)
        grad = grad.to(tl.float32)
        bias_sum += grad
        if WEIGHT:
            value = tl.load(x + (row_starts(row, x_rows)[:, None] + column[None, :]), mask=inside, other=0.0)
            rstd, shift, mean = load_stats(stats, row, row < rows, CENTER)
            value = ((value.to(tl.float32) - shift[:, None]) - mean[:, None]) * rstd[:, None]
            weight_sum += grad * value
    at = tl.program_id(1).to(tl.int64) * columns + column
    if WEIGHT:
        tl.store(dweight + at, tl.sum(weight_sum, 0), mask=column < columns)
    if BIAS:
        tl.store(dbias + at, tl.sum(bias_sum, 0), mask=column < columns)


@triton.jit
def _add_partials_kernel(partials, out, count, columns, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Columns' sums over the partial sums of programs, in an order that depends on their number alone."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([COUNT, BLOCK], tl.float32)
    for start in tl.range(0, count, COUNT):
        program = start + tl.arange(0, COUNT)
        inside = (program < count)[:, None] & (column < columns)[None, :]
        at = partials + program.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(at, mask=inside, other=0.0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < columns)


def backward_launch(
    dy: Tensor,
    dsummed: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    dx: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    *,
    config: NormConfig,
    programs: int,
) -> Launch:
    """The launch that writes dx and, where a row fits, the partial sums (programs, N) of the other gradients."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    dy_rows = rows_of(dy)[1]
    return Launch(
        _norm_bwd_long_kernel if config.block < columns else _norm_bwd_kernel,
        (programs,),
        dict(
            dy=dy,
            dsummed=dy if dsummed is None else dsummed,
            x=x,
            weight=x if weight is None else weight,
            stats=stats,
            dx=dx,
            dweight=stats if dweight is None else dweight,
            dbias=stats if dbias is None else dbias,
            rows=rows,
            columns=columns,
            dy_rows=dy_rows,
            dsummed_rows=dy_rows if dsummed is None else rows_of(dsummed)[1],
            x_rows=rows_of(x)[1],
            ROWS=config.rows,
            BLOCK=config.block,
            CENTER=stats.shape[1] == 3,
            RESIDUAL=dsummed is not None,
            WEIGHT=weight is not None,
            BIAS=dbias is not None,
            STAGES=config.stages,
        ),
        dict(num_warps=config.num_warps),
    )


def norm_backward(
    dy: Tensor,
    dsummed: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    *,
    bias_dtype: torch.dtype | None = None,
    config: NormConfig | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `norm_forward`.

    Args:
        dy: (..., N), gradient of y, any strides.
        dsummed: (..., N), gradient of the sum, which passes through.
        x: what was normalised: x, or the sum.
        weight: as in the forward pass.
        stats: from it.
        bias_dtype: of the bias, where there was one.
        config: of the tile.

    Returns:
        dx like `x`, contiguous; the gradient of the weight and of the bias, or None.
    """
    columns = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        zeros = torch.zeros(columns, dtype=torch.float32, device=x.device)
        dweight = None if weight is None else zeros.to(weight.dtype)
        return dx, dweight, None if bias_dtype is None else zeros.to(bias_dtype)
    dy, x = rows_of(dy)[0], rows_of(x)[0]
    dsummed = None if dsummed is None else rows_of(dsummed)[0]
    weight = None if weight is None else weight.contiguous()
    config = config or choose_config(x, stats.shape[1] == 3, backward=True)
    rows = x.numel() // columns
    tiles, long = triton.cdiv(rows, config.rows), config.block < columns
    most = processors(x)
    programs = tiles if long else min(tiles, most * config.per_processor)
    parts = min(triton.cdiv(rows, 16), max(1, 4 * most // triton.cdiv(columns, 512))) if long else programs
    sums = torch.empty(2, parts, columns, dtype=torch.float32, device=x.device)
    dweight, dbias = None if weight is None else sums[0], None if bias_dtype is None else sums[1]
    backward_launch(dy, dsummed, x, weight, stats, dx, dweight, dbias, config=config, programs=programs)()
    if long and (weight is not None or bias_dtype is not None):
        sums_launch(dy, x, stats, dweight, dbias, parts)()
    if weight is not None:
        dweight = _add_partials(sums[0], weight.dtype)
    if bias_dtype is not None:
        dbias = _add_partials(sums[1], bias_dtype)
    return dx, dweight, dbias


def sums_launch(
    dy: Tensor, x: Tensor, stats: Tensor, dweight: Tensor | None, dbias: Tensor | None, parts: int
) -> Launch:
    """The launch that writes partial sums (parts, N) for rows too long to be held."""
    columns = x.shape[-1]
    return Launch(
        _norm_sums_kernel,
        (triton.cdiv(columns, 512), parts),
        dict(
            dy=dy,
            x=x,
            stats=stats,
            dweight=stats if dweight is None else dweight,
            dbias=stats if dbias is None else dbias,
            rows=x.numel() // columns,
            columns=columns,
            dy_rows=rows_of(dy)[1],
            x_rows=rows_of(x)[1],
            ROWS=4,
            BLOCK=512,
            CENTER=stats.shape[1] == 3,
            WEIGHT=dweight is not None,
            BIAS=dbias is not None,
        ),
        dict(num_warps=4),
    )


def add_launch(partials: Tensor, out: Tensor) -> Launch:
    """The launch that adds partial sums (programs, N) to `out` (N,)."""
    count, columns = partials.shape
    return Launch(
        _add_partials_kernel,
        (triton.cdiv(columns, 32),),
        dict(partials=partials, out=out, count=count, columns=columns, COUNT=min(64, power_of_two(count)), BLOCK=32),
        dict(num_warps=4),
    )


def _add_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(partials.shape[1], dtype=dtype, device=partials.device)
    add_launch(partials, out)()
    return out


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """The backward kernels for the compile gate."""
    for name, x, residual, weight, bias, stats in norm_variants():
        columns = x.shape[1]
        sums = torch.empty(256, columns, device="meta")
        dweight, dbias = None if weight is None else sums, None if bias is None else sums
        config = choose_config(x, stats.shape[1] == 3, backward=True)
        launch = backward_launch(x, residual, x, weight, stats, x, dweight, dbias, config=config, programs=256)
        yield CompileCase(name, launch, spill_bytes=16)  # float32 LayerNorm of the longest row, on sm_100
        if config.block < columns and weight is not None:
            yield CompileCase(f"sums-{name}", sums_launch(x, x, stats, dweight, dbias, 64))
    yield CompileCase("add", add_launch(torch.empty(264, 4096, device="meta"), torch.empty(4096, device="meta")))
