"""Softmax and its mergeable state (m, l) of rows from one column to millions, masked, at a temperature: forward.

A row with m its maximum and l = sum exp((x - m) / T) has log-sum-exp m / T + log(l); two states of parts of a row merge
into the state of both (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, arXiv 1805.02867). A
row without a finite logit has m = -inf, l = 0 and softmax 0.

Rows that fit stay in the registers of one program. Longer rows are cut into chunks, one a program. Each publishes its
state as one 64-bit word that is never 0, waits for the words of its row's other chunks, merges all of them in the same
order and writes: x is read once, and results do not vary. A chunk is numbered by the order in which programs start, so
at most the newest row waits for programs that have not started yet; where fewer programs fit on the card than a row
has chunks, or nothing runs at the same time (the interpreter), the two halves are two launches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.config import CompileCase, Launch
from ringattn.kernels.rows import power_of_two, processors, row_starts, rows_of

LOG2E = 1.4426950408889634
LONGEST_FORWARD = 16384
LONGEST_BACKWARD = 8192
"""Columns up to which a row stays in the registers of one program."""

MOST_CHUNKS = 64
"""Chunks of a row that wait for one another on a card of 132 multiprocessors (`phases`)."""


@triton.jit
def load_logits(x, mask, inside, MASKED: tl.constexpr):
    """Float32 logits at pointers, -inf where `mask` is false or nothing is."""
    value = tl.load(x, mask=inside, other=-float("inf")).to(tl.float32)
    if MASKED:
        value = tl.where(tl.load(mask, mask=inside, other=0) != 0, value, -float("inf"))
    return value


@triton.jit
def _pack(peak, total):
    high = peak.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return high | (total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def wait_for_words(at, inside):
    """Words at pointers, once none is 0."""
    words = tl.load(at, mask=inside, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), 0) == 0:
        words = tl.load(at, mask=inside, other=1, volatile=True)
    return words


@triton.jit
def _merge(words, inside, exp_scale):
    """(maximum, sum) of a row from the words of its chunks."""
    peaks = tl.where(inside, (words >> 32).to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    totals = tl.where(inside, words.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    peak = tl.max(peaks, 0)
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    weight = tl.exp2((peaks - shift) * exp_scale)
    return peak, tl.sum(tl.where(weight == 0, 0.0, totals * weight), 0)


@triton.jit
def _softmax_fwd_kernel(
    x, mask, y, rows, columns, exp_scale, x_rows, mask_rows,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x += row_starts(row, x_rows)[:, None] + column[None, :]
    mask += row_starts(row, mask_rows)[:, None] + column[None, :]
    value = load_logits(x, mask, inside, MASKED)
    peak = tl.max(value, 1)
    weight = tl.exp2((value - tl.where(peak == -float("inf"), 0.0, peak)[:, None]) * exp_scale)
    total = tl.sum(weight, 1)
    result = weight * (1.0 / tl.where(total == 0, 1.0, total))[:, None]
    at = y + (row.to(tl.int64) * columns)[:, None] + column[None, :]
    tl.store(at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_long_fwd_kernel(
    x, mask, y, words, columns, chunks, exp_scale, x_rows, mask_rows,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, MASKED: tl.constexpr, PUBLISH: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """A chunk of a row: publish its state, write its softmax, or both in one launch."""
    if PUBLISH and WRITE:
        item = tl.atomic_add(words + tl.num_programs(0), 1, sem="relaxed").to(tl.int32)
    else:
        item = tl.program_id(0)
    row = item // chunks
    column = (item % chunks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = load_logits(
        x + row_starts(row, x_rows) + column, mask + row_starts(row, mask_rows) + column, inside, MASKED
    )
    if PUBLISH:
        peak = tl.max(value, 0)
        weight = tl.exp2((value - tl.where(peak == -float("inf"), 0.0, peak)) * exp_scale)
        tl.atomic_xchg(words + item, _pack(peak, tl.sum(weight, 0)), sem="relaxed")
    if WRITE:
        word = tl.arange(0, WORDS)
        peak, total = _merge(wait_for_words(words + row * chunks + word, word < chunks), word < chunks, exp_scale)
        weight = tl.exp2((value - tl.where(peak == -float("inf"), 0.0, peak)) * exp_scale)
        result = weight / tl.where(total == 0, 1.0, total)
        tl.store(y + row.to(tl.int64) * columns + column, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _merge_kernel(words, peaks, totals, chunks, exp_scale, WORDS: tl.constexpr):
    """The state of a row, from those of its chunks."""
    row = tl.program_id(0)
    word = tl.arange(0, WORDS)
    words += row.to(tl.int64) * chunks
    peak, total = _merge(tl.load(words + word, mask=word < chunks, other=1), word < chunks, exp_scale)
    tl.store(peaks + row, peak)
    tl.store(totals + row, total)


@dataclass(frozen=True, slots=True)
class SoftmaxConfig:
    """Rows and columns of a tile, and warps."""

    rows: int
    block: int
    num_warps: int


def choose_config(columns: int, backward: bool) -> SoftmaxConfig:
    """Whole rows up to the longest that fits one program, chunks of a row beyond.

    The chunks are the fastest of `benchmarks/tune_nn.py` on an H200 at 128k columns, and at 1M columns, where smaller
    ones are too many to wait for one another.
    """
    longest = LONGEST_BACKWARD if backward else LONGEST_FORWARD
    if columns > longest:
        if backward:
            return SoftmaxConfig(1, 4096, 4) if columns <= 4096 * MOST_CHUNKS else SoftmaxConfig(1, 16384, 16)
        return SoftmaxConfig(1, 8192, 4) if columns <= 8192 * MOST_CHUNKS else SoftmaxConfig(1, 16384, 8)
    block = power_of_two(max(columns, 16))
    rows = max(1, (1024 if backward else 2048) // block)
    return SoftmaxConfig(rows, block, max(1, min(16, rows * block // (512 if backward else 1024))))


def phases(x: Tensor, block: int) -> tuple[tuple[bool, bool], ...]:
    """What the launches over chunks do, as (publish, write): one does both where a row's chunks run at the same time.

    With room for twice as many programs as a row has chunks, one on each multiprocessor, they do.
    """
    if not x.is_cpu and 2 * triton.cdiv(x.shape[-1], block) <= processors(x):
        return ((True, True),)
    return ((True, False), (False, True))


def forward_launch(
    x: Tensor, mask: Tensor | None, y: Tensor, *, temperature: float, config: SoftmaxConfig | None = None
) -> Launch:
    """The launch of `softmax_forward` for rows that fit one program."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    config = config or choose_config(columns, backward=False)
    x_rows = rows_of(x)[1]
    return Launch(
        _softmax_fwd_kernel,
        (triton.cdiv(rows, config.rows),),
        dict(
            x=x,
            mask=x if mask is None else mask,
            y=y,
            rows=rows,
            columns=columns,
            exp_scale=LOG2E / temperature,
            x_rows=x_rows,
            mask_rows=x_rows if mask is None else rows_of(mask)[1],
            ROWS=config.rows,
            BLOCK=config.block,
            MASKED=mask is not None,
        ),
        dict(num_warps=config.num_warps),
    )


def long_forward_launch(
    x: Tensor,
    mask: Tensor | None,
    y: Tensor,
    words: Tensor,
    *,
    temperature: float,
    config: SoftmaxConfig,
    publish: bool,
    write: bool,
) -> Launch:
    """The launch over chunks of rows that publishes states, writes the softmax, or does both at once."""
    columns = x.shape[-1]
    chunks = triton.cdiv(columns, config.block)
    x_rows = rows_of(x)[1]
    return Launch(
        _softmax_long_fwd_kernel,
        (x.numel() // columns * chunks,),
        dict(
            x=x,
            mask=x if mask is None else mask,
            y=y,
            words=words,
            columns=columns,
            chunks=chunks,
            exp_scale=LOG2E / temperature,
            x_rows=x_rows,
            mask_rows=x_rows if mask is None else rows_of(mask)[1],
            BLOCK=config.block,
            WORDS=power_of_two(chunks),
            MASKED=mask is not None,
            PUBLISH=publish,
            WRITE=write,
        ),
        dict(num_warps=config.num_warps),
    )


def softmax_forward(
    x: Tensor, mask: Tensor | None = None, *, temperature: float = 1.0, config: SoftmaxConfig | None = None
) -> Tensor:
    """Softmax of the rows of x / temperature.

    Args:
        x: (..., N), fp16, bf16 or fp32, any strides.
        mask: bool of the same shape (strides of 0 allowed); false hides a logit.
        temperature: above 0.
        config: of the tile.

    Returns:
        Like x, contiguous; 0 in rows without a finite logit.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    x, mask = rows_of(x)[0], None if mask is None else rows_of(mask)[0]
    config = config or choose_config(x.shape[-1], backward=False)
    if config.block >= x.shape[-1]:
        forward_launch(x, mask, y, temperature=temperature, config=config)()
        return y
    words = new_words(x, config.block)
    for publish, write in phases(x, config.block):
        long_forward_launch(x, mask, y, words, temperature=temperature, config=config, publish=publish, write=write)()
    return y


def new_words(x: Tensor, block: int) -> Tensor:
    """A zero for each chunk of each row, and one for the count of programs that have started."""
    columns = x.shape[-1]
    return torch.zeros(x.numel() // columns * triton.cdiv(columns, block) + 1, dtype=torch.int64, device=x.device)


def softmax_state(
    x: Tensor, mask: Tensor | None = None, *, temperature: float = 1.0, config: SoftmaxConfig | None = None
) -> tuple[Tensor, Tensor]:
    """The state (m, l) of rows: their maxima, not divided by the temperature, and sums of exp((x - m) / temperature).

    Args:
        x, mask, temperature, config: as in `softmax_forward`.

    Returns:
        Two float32 tensors of x's shape without the last dimension.
    """
    peaks, totals = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    if not x.numel():
        return peaks.fill_(-torch.inf), totals.zero_()
    x, mask = rows_of(x)[0], None if mask is None else rows_of(mask)[0]
    config = config or choose_config(x.shape[-1], backward=False)
    words = new_words(x, config.block)
    long_forward_launch(x, mask, x, words, temperature=temperature, config=config, publish=True, write=False)()
    chunks = triton.cdiv(x.shape[-1], config.block)
    _merge_kernel[(peaks.numel(),)](
        words, peaks, totals, chunks, LOG2E / temperature, WORDS=power_of_two(chunks), num_warps=1
    )
    return peaks, totals


def softmax_variants() -> Iterator[tuple[str, Tensor, Tensor | None, SoftmaxConfig, SoftmaxConfig]]:
    """What the softmax is compiled for in the gate: (name, x, mask, forward config, backward config)."""
    for columns in (16, 16384, 1 << 20):
        for dtype in (torch.bfloat16, torch.float32):
            for masked in (False, True):
                x = torch.empty(64, columns, dtype=dtype, device="meta")
                name = f"n{columns}-{str(dtype).removeprefix('torch.')}" + "-mask" * masked
                mask = torch.empty(64, columns, dtype=torch.bool, device="meta") if masked else None
                yield name, x, mask, choose_config(columns, False), choose_config(columns, True)


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """The forward kernels for the compile gate."""
    for name, x, mask, config, _ in softmax_variants():
        if config.block >= x.shape[1]:
            yield CompileCase(name, forward_launch(x, mask, x, temperature=1.0))
            continue
        words = torch.empty(1, dtype=torch.int64, device="meta")
        for publish, write in ((True, True), (True, False), (False, True)):
            launch = long_forward_launch(
                x, mask, x, words, temperature=1.0, config=config, publish=publish, write=write
            )
            label = f"{name}{'-publish' * publish}{'-write' * write}"
            yield CompileCase(label, launch, spill_bytes=16)  # with a mask, on sm_80
