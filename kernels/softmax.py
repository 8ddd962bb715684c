"""Softmax and its mergeable state (m, l) of rows from one column to millions, masked, at a temperature: forward.

A row with m its maximum and l = sum exp((x - m) / T) has log-sum-exp m / T + log(l); two states of parts of a row merge
into the state of both (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, arXiv 1805.02867). A
row without a finite logit has m = -inf, l = 0 and softmax 0.

Rows that fit stay in the registers of one program. Longer rows are cut into chunks. A program takes a chunk, publishes
its state as one 64-bit word that is never 0, takes and publishes the next one, and only then waits for the words of the
first one's row, merges them in a fixed order and writes: x is read once, the wait is short, and results do not vary.

That must not hang. Chunks are taken in order and published without a wait, so a program waits only for chunks of the
newest row that nobody has taken yet. Each program holds two, so at most half as many programs as a row has chunks
wait for those; any other takes them. Where fewer programs run at once than a row has chunks, or one at a time (the
interpreter), publishing and writing are two launches.
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
def next_item(words, items):
    """The number of the next chunk that no program has taken; the count follows the words."""
    return tl.atomic_add(words + items, 1, sem="relaxed").to(tl.int32)


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
def _publish(value, words, item, exp_scale):
    """Store the state of a chunk as a word."""
    peak = tl.max(value, 0)
    weight = tl.exp2((value - tl.where(peak == -float("inf"), 0.0, peak)) * exp_scale)
    tl.atomic_xchg(words + item, _pack(peak, tl.sum(weight, 0)), sem="relaxed")


@triton.jit
def _write(value, y, words, item, columns, chunks, exp_scale, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """Store the softmax of a chunk, once its row's other chunks have published."""
    row = item // chunks
    column = (item % chunks) * BLOCK + tl.arange(0, BLOCK)
    word = tl.arange(0, WORDS)
    peak, total = _merge(wait_for_words(words + row * chunks + word, word < chunks), word < chunks, exp_scale)
    weight = tl.exp2((value - tl.where(peak == -float("inf"), 0.0, peak)) * exp_scale)
    result = weight / tl.where(total == 0, 1.0, total)
    tl.store(y + row.to(tl.int64) * columns + column, result.to(y.dtype.element_ty), mask=column < columns)


@triton.jit
def _load_chunk(x, mask, item, columns, chunks, x_rows, mask_rows, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    row = item // chunks
    column = (item % chunks) * BLOCK + tl.arange(0, BLOCK)
    x += row_starts(row, x_rows) + column
    return load_logits(x, mask + row_starts(row, mask_rows) + column, column < columns, MASKED)


@triton.jit
def _softmax_chunk_fwd_kernel(
    x, mask, y, words, items, columns, chunks, exp_scale, x_rows, mask_rows,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, MASKED: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """A chunk of a row: publish its state or, in a later launch, write its softmax."""
    item = tl.program_id(0)
    value = _load_chunk(x, mask, item, columns, chunks, x_rows, mask_rows, BLOCK, MASKED)
    if WRITE:
        _write(value, y, words, item, columns, chunks, exp_scale, BLOCK, WORDS)
    else:
        _publish(value, words, item, exp_scale)


@triton.jit
def _softmax_long_fwd_kernel(
    x, mask, y, words, items, columns, chunks, exp_scale, x_rows, mask_rows,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Chunks of rows, taken one after another; the next is read and published before the last is waited for."""
    item = next_item(words, items)
    if item < items:
        value = _load_chunk(x, mask, item, columns, chunks, x_rows, mask_rows, BLOCK, MASKED)
        _publish(value, words, item, exp_scale)
        while item < items:
            later = next_item(words, items)
            later_value = value
            if later < items:
                later_value = _load_chunk(x, mask, later, columns, chunks, x_rows, mask_rows, BLOCK, MASKED)
                _publish(later_value, words, later, exp_scale)
            _write(value, y, words, item, columns, chunks, exp_scale, BLOCK, WORDS)
            item = later
            value = later_value


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
    """Rows and columns of a tile, warps, and for long rows programs a multiprocessor."""

    rows: int
    block: int
    num_warps: int
    per_processor: int = 1


def choose_config(columns: int, backward: bool) -> SoftmaxConfig:
    """Whole rows up to the longest that fits one program, chunks of a row beyond."""
    longest = LONGEST_BACKWARD if backward else LONGEST_FORWARD
    block = min(power_of_two(max(columns, 16)), longest)
    rows = max(1, (1024 if backward else 2048) // block)
    return SoftmaxConfig(rows, block, max(1, min(16, rows * block // (512 if backward else 1024))))


def programs_at_once(x: Tensor, config: SoftmaxConfig) -> int:
    """How many programs share the chunks of long rows in one launch; 0 where publishing and writing must be two.

    At 128 registers a thread a multiprocessor runs 16 warps at once, so many that a row's chunks can wait for another.
    """
    running = processors(x) * max(1, 16 // config.num_warps)
    if x.is_cpu or triton.cdiv(x.shape[-1], config.block) > running:
        return 0
    return processors(x) * config.per_processor


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
    programs: int = 0,
    write: bool = False,
) -> Launch:
    """The launch over chunks of rows: by so many programs at once, or one that publishes states or writes."""
    columns = x.shape[-1]
    chunks = triton.cdiv(columns, config.block)
    items = x.numel() // columns * chunks
    x_rows = rows_of(x)[1]
    args = dict(
        x=x,
        mask=x if mask is None else mask,
        y=y,
        words=words,
        items=items,
        columns=columns,
        chunks=chunks,
        exp_scale=LOG2E / temperature,
        x_rows=x_rows,
        mask_rows=x_rows if mask is None else rows_of(mask)[1],
        BLOCK=config.block,
        WORDS=power_of_two(chunks),
        MASKED=mask is not None,
    )
    if programs:
        return Launch(_softmax_long_fwd_kernel, (min(programs, items),), args, dict(num_warps=config.num_warps))
    return Launch(_softmax_chunk_fwd_kernel, (items,), args | {"WRITE": write}, dict(num_warps=config.num_warps))


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
    words, programs = new_words(x, config.block), programs_at_once(x, config)
    for write in (False,) if programs else (False, True):
        long_forward_launch(x, mask, y, words, temperature=temperature, config=config, programs=programs, write=write)()
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
    long_forward_launch(x, mask, x, words, temperature=temperature, config=config)()
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
        for suffix, programs, write in (("", 264, False), ("-publish", 0, False), ("-write", 0, True)):
            launch = long_forward_launch(
                x, mask, x, words, temperature=1.0, config=config, programs=programs, write=write
            )
            yield CompileCase(name + suffix, launch)
