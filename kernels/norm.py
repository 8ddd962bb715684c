"""RMSNorm and LayerNorm of rows of any length, with an optional residual added before: forward.

Statistics are float32. LayerNorm subtracts the row's rounded mean first and corrects mean and variance by the mean of
what remains (the corrected two-pass algorithm; Chan, Golub and LeVeque, 1983), so a mean of 1e4 does not swallow a
deviation of 1e-2; the correction is kept for the backward pass too, as a float32 mean alone is off by 5e-4 there.

Rows that fit stay in registers and are read once; longer ones are read twice, in blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.config import CompileCase, Launch
from ringattn.kernels.rows import power_of_two, processors, row_starts, rows_of

LONGEST_FORWARD = 16384
LONGEST_BACKWARD = 8192
"""Columns up to which a row stays in registers."""


@triton.jit
def _moments(value, inside, columns, CENTER: tl.constexpr):
    """(deviations from the mean, shift, mean of value - shift, mean square of the deviations) of rows of a tile."""
    count = columns * 1.0
    shift = tl.zeros([value.shape[0]], tl.float32)
    mean = shift
    if CENTER:
        shift = tl.sum(value, 1) / count
        value = tl.where(inside, value - shift[:, None], 0.0)
        mean = tl.sum(value, 1) / count
        square = tl.maximum(tl.sum(value * value, 1) / count - mean * mean, 0.0)
        value -= mean[:, None]
    else:
        square = tl.sum(value * value, 1) / count
    return value, shift, mean, square


@triton.jit
def _store_stats(stats, row, real, shift, mean, rstd, CENTER: tl.constexpr):
    if CENTER:
        tl.store(stats + row * 3, rstd, mask=real)
        tl.store(stats + row * 3 + 1, shift, mask=real)
        tl.store(stats + row * 3 + 2, mean, mask=real)
    else:
        tl.store(stats + row, rstd, mask=real)


@triton.jit
def load_stats(stats, row, real, CENTER: tl.constexpr):
    """(1 / deviation, shift, mean of what remains) of rows."""
    if CENTER:
        rstd = tl.load(stats + row * 3, mask=real, other=0.0)
        return (
            rstd,
            tl.load(stats + row * 3 + 1, mask=real, other=0.0),
            tl.load(stats + row * 3 + 2, mask=real, other=0.0),
        )
    else:
        rstd = tl.load(stats + row, mask=real, other=0.0)
        return rstd, 0.0 * rstd, 0.0 * rstd


@triton.jit
def _norm_fwd_kernel(
    x, residual, weight, bias, y, summed, stats, rows, columns, eps, x_rows, residual_rows, summed_rows,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTER: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of whole rows, every num_programs-th; weight and bias are read once."""
    column = tl.arange(0, BLOCK)
    if WEIGHT:
        scale = tl.load(weight + column, mask=column < columns, other=0.0)
    if BIAS:
        offset = tl.load(bias + column, mask=column < columns, other=0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        real = row < rows
        inside = real[:, None] & (column < columns)[None, :]
        value = tl.load(x + (row_starts(row, x_rows)[:, None] + column[None, :]), mask=inside, other=0.0)
        value = value.to(tl.float32)
        if RESIDUAL:
            before = residual + (row_starts(row, residual_rows)[:, None] + column[None, :])
            total = (value + tl.load(before, mask=inside, other=0.0).to(tl.float32)).to(summed.dtype.element_ty)
            tl.store(summed + (row_starts(row, summed_rows)[:, None] + column[None, :]), total, mask=inside)
            value = total.to(tl.float32)
        value, shift, mean, square = _moments(value, inside, columns, CENTER)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(square + eps))
        value *= rstd[:, None]
        if WEIGHT:
            value *= scale.to(tl.float32)[None, :]
        if BIAS:
            value += offset.to(tl.float32)[None, :]
        at = y + (row.to(tl.int64) * columns)[:, None] + column[None, :]
        tl.store(at, value.to(y.dtype.element_ty), mask=inside)
        _store_stats(stats, row, real, shift, mean, rstd, CENTER)


@triton.jit
def _norm_fwd_long_kernel(
    x, residual, weight, bias, y, summed, stats, rows, columns, eps, x_rows, residual_rows, summed_rows,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTER: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row of any length, in blocks: once for its statistics, once to normalise it.

    Sums of deviations from the mean of the first block lose at most log2(columns / BLOCK) bits of the variance,
    whatever the mean is: a block that differs from the rest makes the variance itself that large.
    """
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    x += row_starts(row, x_rows)
    residual += row_starts(row, residual_rows)
    summed += row_starts(row, summed_rows)
    count = columns * 1.0
    shift = 0.0
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, columns, BLOCK):
        inside = start + lane < columns
        value = tl.load(x + start + lane, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL:
            value += tl.load(residual + start + lane, mask=inside, other=0.0).to(tl.float32)
            kept = value.to(summed.dtype.element_ty)
            tl.store(summed + start + lane, kept, mask=inside)
            value = kept.to(tl.float32)
        if CENTER:
            if start == 0:
                shift = tl.sum(value, 0) / BLOCK
            value = tl.where(inside, value - shift, 0.0)
            total += value
        squares += value * value
    mean = tl.sum(total, 0) / count
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.maximum(tl.sum(squares, 0) / count - mean * mean, 0.0) + eps))
    source = x
    if RESIDUAL:
        tl.debug_barrier()  # what another thread of this program stored is read below
        source = summed
    for start in tl.range(0, columns, BLOCK):
        inside = start + lane < columns
        value = tl.load(source + start + lane, mask=inside, other=0.0).to(tl.float32)
        value = ((value - shift) - mean) * rstd
        if WEIGHT:
            value *= tl.load(weight + start + lane, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            value += tl.load(bias + start + lane, mask=inside, other=0.0).to(tl.float32)
        at = y + row.to(tl.int64) * columns + start + lane
        tl.store(at, value.to(y.dtype.element_ty), mask=inside)
    _store_stats(stats, row, row < rows, shift, mean, rstd, CENTER)


@dataclass(frozen=True, slots=True)
class NormConfig:
    """Rows and columns of a tile, warps, programs a multiprocessor (0: one a tile), tiles in flight in a program."""

    rows: int
    block: int
    num_warps: int
    per_processor: int
    stages: int = 1


def choose_config(x: Tensor, center: bool, backward: bool) -> NormConfig:
    """The tile for rows of x: whole rows up to the longest that fits, blocks of one row beyond.

    The fastest of `benchmarks/tune_nn.py` on an H200 at 4096 and 8192 columns of bfloat16. Two rows at a time hide the
    wait for one another's sums; in float32 they would not fit the registers.
    """
    columns = x.shape[-1]
    block = power_of_two(max(columns, 16))
    if block > (LONGEST_BACKWARD if backward else LONGEST_FORWARD):
        return NormConfig(1, 4096, 8, 0)
    if backward:
        rows = max(1, 1024 // block)
        warps = max(1, min(8 if center else 16, rows * block // 512))
        return NormConfig(rows, block, warps, max(1, 24 // warps if block < 8192 else 1))
    if block in (4096, 8192) and x.dtype.itemsize == 2:
        return NormConfig(2, block, block // 1024, 2 if center and block == 8192 else 0)
    rows = max(1, 2048 // block)
    return NormConfig(rows, block, max(1, min(16, rows * block // 1024)), 0)


def forward_launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    summed: Tensor | None,
    stats: Tensor,
    *,
    eps: float,
    center: bool,
    config: NormConfig | None = None,
) -> Launch:
    """The launch of `norm_forward`; x, residual and summed (..., N) in rows as `rows_of` takes them without a copy."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    config = config or choose_config(x, center, backward=False)
    long = config.block < columns
    tiles = triton.cdiv(rows, config.rows)
    programs = min(tiles, config.per_processor * processors(x)) if config.per_processor else tiles
    x_rows = rows_of(x)[1]
    return Launch(
        _norm_fwd_long_kernel if long else _norm_fwd_kernel,
        (programs,),
        dict(
            x=x,
            residual=x if residual is None else residual,
            weight=x if weight is None else weight,
            bias=x if bias is None else bias,
            y=y,
            summed=y if summed is None else summed,
            stats=stats,
            rows=rows,
            columns=columns,
            eps=eps,
            x_rows=x_rows,
            residual_rows=x_rows if residual is None else rows_of(residual)[1],
            summed_rows=x_rows if summed is None else rows_of(summed)[1],
            ROWS=config.rows,
            BLOCK=config.block,
            CENTER=center,
            RESIDUAL=residual is not None,
            WEIGHT=weight is not None,
            BIAS=bias is not None,
            STAGES=config.stages,
        ),
        dict(num_warps=config.num_warps),
    )


def norm_forward(
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    center: bool,
    summed: Tensor | None = None,
    config: NormConfig | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Normalise the rows of x, or of x + residual.

    Args:
        x: (..., N), fp16, bf16 or fp32, any strides.
        residual: (..., N), any of these dtypes; the sum is rounded to it, and that is what is normalised.
        weight, bias: (N,).
        eps: added to the variance.
        center: subtract the mean (LayerNorm), or not (RMSNorm).
        summed: where to write x + residual, `residual` itself allowed; None allocates.
        config: of the tile.

    Returns:
        y like x, contiguous; the sum, or None without a residual; float32 statistics of the rows, (rows, 3) for
        LayerNorm (1 / deviation, shift, mean - shift) and (rows, 1) for RMSNorm.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual is not None and summed is None:
        summed = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    stats = torch.empty(x.numel() // max(x.shape[-1], 1), 3 if center else 1, dtype=torch.float32, device=x.device)
    if x.numel():
        x, residual = rows_of(x)[0], None if residual is None else rows_of(residual)[0]
        weight, bias = (None if w is None else w.contiguous() for w in (weight, bias))
        target = summed if summed is None else rows_of(summed)[0]
        forward_launch(x, residual, weight, bias, y, target, stats, eps=eps, center=center, config=config)()
        if summed is not None and target is not None and target is not summed:
            summed.copy_(target)
    return y, summed, stats


def norm_variants() -> Iterator[tuple[str, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]]:
    """What the norms are compiled for in the gate: (name, x, residual, weight, bias, statistics).

    Lengths where the tile changes, with all options and with none.
    """
    for columns in (1, 128, 4096, 8192, 16384, 32768):
        for dtype in (torch.bfloat16, torch.float32):
            for center, full in ((False, False), (False, True), (True, True)):
                x = torch.empty(4096, columns, dtype=dtype, device="meta")
                weight = torch.empty(columns, device="meta") if full else None
                stats = torch.empty(4096, 3 if center else 1, device="meta")
                name = f"n{columns}-{str(dtype).removeprefix('torch.')}-{'layer' if center else 'rms'}"
                yield name + "-full" * full, x, x if full else None, weight, weight if center else None, stats


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """The forward kernels for the compile gate."""
    for name, x, residual, weight, bias, stats in norm_variants():
        center = stats.shape[1] == 3
        launch = forward_launch(x, residual, weight, bias, x, residual, stats, eps=1e-6, center=center)
        yield CompileCase(name, launch, spill_bytes=16)  # float32 LayerNorm of the longest row, on sm_100
