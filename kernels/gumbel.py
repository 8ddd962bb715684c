"""One launch draws a token from each row's slice of logits: edits, temperature, noise, key, maximum, decoding.

The result is that of `l + T g` with Gumbel noise g from IEEE operations in a fixed order (`ringattn.noise`, line by
line), so it has the same bits as on CPU. Most of it is never computed: a pass with hardware logarithms gives each score
an upper bound. A program scores the group of four tokens with the largest bound exactly; where that beats the second
largest bound it is done, and where it does not (about 1 program in 1000) all of its tokens are scored exactly.

The pass (H200, 128256 bf16 logits a row) is bound by integer and special-function issue, not by memory: one Philox call
for four tokens and two `lg2.approx` a token.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.config import CompileCase, Launch
from ringattn.kernels.noise import exact_score, lg2, pack, philox
from ringattn.kernels.workspace import zeros

BOUND = tl.constexpr(1e-4)
"""How far an exact Gumbel number may lie above its bound, four times over. lg2.approx errs by 2^-22 (absolute within
(1/2, 2), else relative): 1.05e-5 of E at E = 2^-6, and 1.1e-5 of log(E) at E = 2^-65; rounding 1 - u costs 2e-6, the
exact score errs by 1e-6. Leaving out the low word, and stopping 1 - u at 2^-8, only raise the bound."""

POISON_NAN = tl.constexpr((1 << 63) - 1)
POISON_PARAMETER = tl.constexpr((1 << 63) - 1 - (1 << 31))
NO_TOKEN_BELOW = tl.constexpr(0x00800000 << 31)
"""Keys below this are no token: order(-inf) is 0x007FFFFF."""
ONE = tl.constexpr(1 << 16)
"""What a candidate adds to a program's count, above the number of its group of four."""
MOST_TOKENS = 1 << 17
"""Most tokens a program takes: their groups are numbered below `ONE`."""

WARPS, PIECE = 4, 128
"""Warps of a program, and tokens that it scores exactly at once."""
SMALL, LARGE = (512, 12), (1024, 8)
"""Tokens that a program bounds at once, and programs that a multiprocessor is given before programs take several tiles.
With 16 rows the first took 10.5 us and the second 12.4 (H200); the second is what was measured with 64 and 256 rows."""
SMALL_TOKENS = 1 << 22
"""Up to so many tokens, over all rows, take the first."""


@triton.jit
def edited_logits(
    logits, mask, bias, counts, prompt, column, inside,
    repetition, presence, frequency,
    MASK: tl.constexpr, BIAS: tl.constexpr, COUNTS: tl.constexpr, PROMPT: tl.constexpr,
):  # fmt: skip
    """Logits of columns after penalties, bias and mask, float32; NaN stays; -inf outside. Pointers are to the row."""
    raw = tl.load(logits + column, mask=inside, other=-float("inf")).to(tl.float32)
    value = raw
    if COUNTS or PROMPT:
        seen = inside & False
        if COUNTS:
            count = tl.load(counts + column, mask=inside, other=0)
            seen = seen | (count > 0)
        if PROMPT:
            seen = seen | (tl.load(prompt + column, mask=inside, other=0) != 0)
        divided = tl.where(value > 0, tl.div_rn(value, repetition + value * 0.0), value * repetition)
        value = tl.where(seen, divided, value)
        if COUNTS:
            value = value - frequency * count.to(tl.float32)
            value = tl.where(count > 0, value - presence, value)
    if BIAS:
        value = value + tl.load(bias + column, mask=inside, other=0.0)
    if MASK == 1:
        value = tl.where(tl.load(mask + column, mask=inside, other=0) != 0, value, -float("inf"))
    if MASK == 2:
        word = tl.load(mask + column // 32, mask=inside, other=0)
        value = tl.where(((word >> (column % 32)) & 1) != 0, value, -float("inf"))
    return tl.where(raw != raw, raw, value)


@triton.jit
def _upper(logit, word, slope, CUDA: tl.constexpr):
    """`l + T g` from above, with `slope = -T log(2)`."""
    u = tl.fma(word.to(tl.float32), 2.3283064365386963e-10, 2.710505431213761e-20)  # 2^-32, 2^-65
    series = u * tl.fma(u, tl.fma(u, tl.fma(u, 0.25, 0.33333334), 0.5), 1.0)
    rest = tl.maximum(1.0 - u, 0.00390625)
    e = tl.where(u < 0.015625, series, lg2(rest, CUDA) * -0.6931472)
    return tl.fma(lg2(e, CUDA), slope, logit)


@triton.jit
def _quarter(x, ROWS: tl.constexpr):
    """Columns 0, 1, 2, 3 of a (ROWS, 4) tensor, without leaving registers."""
    even, odd = tl.split(tl.reshape(x, (ROWS, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit(do_not_specialize=["pieces", "programs"])
def draw_kernel(
    logits, mask, bias, counts, prompt,
    seeds, positions, samples, temperatures, repetitions, presences, frequencies,
    keys, arrived, out_keys, out_ids, out_status,
    logits_stride, mask_stride, bias_stride, counts_stride, prompt_stride,
    seed_step, position_step, sample_step, temperature_step, repetition_step, presence_step, frequency_step,
    start, width, pieces, programs,
    TILE: tl.constexpr, PIECE: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, COUNTS: tl.constexpr, PROMPT: tl.constexpr,
    CUDA: tl.constexpr,
):  # fmt: skip
    """A program draws from some tiles of a row; the last of a row decodes it and leaves keys and arrived at 0."""
    row = tl.program_id(0)
    program = tl.program_id(1)
    wide = row.to(tl.int64)
    logits += wide * logits_stride
    mask += wide * mask_stride
    bias += wide * bias_stride
    counts += wide * counts_stride
    prompt += wide * prompt_stride
    seed = tl.load(seeds + wide * seed_step)
    position = tl.load(positions + wide * position_step)
    sample = tl.load(samples + wide * sample_step)
    temperature = tl.load(temperatures + wide * temperature_step)
    repetition = tl.load(repetitions + wide * repetition_step)
    presence = tl.load(presences + wide * presence_step)
    frequency = tl.load(frequencies + wide * frequency_step)

    ROWS: tl.constexpr = TILE // 4
    begin = start // 4 * 4 + program * pieces * TILE
    group = tl.arange(0, ROWS)
    index = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    slope = temperature * -0.6931472
    # For each lane: its largest bound, the piece that it came from, and the second largest.
    best = tl.full((ROWS,), -float("inf"), tl.float32)
    second = best
    at = tl.zeros((ROWS,), tl.int32)
    for piece in range(pieces):
        first = begin + piece * TILE
        column = first - start + index
        value = edited_logits(
            logits, mask, bias, counts, prompt, column, (column >= 0) & (column < width), repetition, presence,
            frequency, MASK, BIAS, COUNTS, PROMPT,
        )  # fmt: skip
        l0, l1, l2, l3 = _quarter(value, ROWS)
        w0, w1, w2, w3 = philox(seed, (first // 4 + group).to(tl.uint32), position, sample, 0)
        s0 = _upper(l0, w0, slope, CUDA)
        s1 = _upper(l1, w1, slope, CUDA)
        s2 = _upper(l2, w2, slope, CUDA)
        s3 = _upper(l3, w3, slope, CUDA)
        left = tl.maximum(s0, s1, propagate_nan=tl.PropagateNan.ALL)
        right = tl.maximum(s2, s3, propagate_nan=tl.PropagateNan.ALL)
        top = tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)
        next_one = tl.maximum(tl.maximum(tl.minimum(s0, s1), tl.minimum(s2, s3)), tl.minimum(left, right))
        second = tl.maximum(second, tl.maximum(next_one, tl.minimum(best, top)))
        at = tl.where(top > best, piece, at)
        best = tl.maximum(best, top, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(best, axis=0)
    is_largest = (best == largest) & (best > -float("inf"))
    others = tl.max(tl.where(is_largest, second, best), axis=0)
    total = tl.sum(tl.where(is_largest, ONE + at * ROWS + group, 0) + tl.where(best != best, 2 * ONE, 0), axis=0)

    key = tl.zeros((), dtype=tl.int64)
    certain = total < 0
    if (total >= ONE) & (total < 2 * ONE):
        four = begin + (total - ONE) * 4 + tl.arange(0, 4)
        column4 = four - start
        logit = edited_logits(
            logits, mask, bias, counts, prompt, column4, (column4 >= 0) & (column4 < width), repetition, presence,
            frequency, MASK, BIAS, COUNTS, PROMPT,
        )  # fmt: skip
        score = exact_score(logit, four, seed, position, sample, temperature)
        key = tl.max(pack(score, four), axis=0)
        certain = tl.max(score, axis=0) > others + (temperature * BOUND + tl.abs(others) * 4.7683716e-07 + 1e-37)
    if (total >= ONE) & (~certain):
        # In pieces, so that the rare path does not set the registers of the common one.
        for offset in range(0, pieces * TILE, PIECE):
            some = begin + offset + tl.arange(0, PIECE)
            far = some - start
            again = edited_logits(
                logits, mask, bias, counts, prompt, far, (far >= 0) & (far < width), repetition, presence, frequency,
                MASK, BIAS, COUNTS, PROMPT,
            )  # fmt: skip
            exact = exact_score(again, some, seed, position, sample, temperature)
            key = tl.maximum(key, tl.max(pack(exact, some), axis=0))
    key = tl.where(key < NO_TOKEN_BELOW, 0, key)
    fine = (temperature >= 0) & (temperature <= 1e30) & (repetition > 0) & (repetition < float("inf"))
    fine = fine & (tl.abs(presence) < float("inf")) & (tl.abs(frequency) < float("inf"))
    fine = fine & (position >= 0) & (position <= 0xFFFFFFFF) & (sample >= 0) & (sample <= 0xFFFFFFFF)
    key = tl.where(fine, key, POISON_PARAMETER)

    tl.atomic_max(keys + row, key, sem="relaxed")
    if tl.atomic_add(arrived + row, 1) == programs - 1:
        winner_key = tl.atomic_xchg(keys + row, 0)
        tl.store(arrived + row, 0)
        tl.store(out_keys + row, winner_key)
        store_decoded(winner_key, out_ids + row, out_status + row)


@triton.jit
def store_decoded(best, out_id, out_status):
    """Id and status of a winning key."""
    token = (best > 0) & (best < POISON_PARAMETER)
    status = tl.where(token, 0, 1)
    status = tl.where(best == POISON_PARAMETER, 3, status)
    status = tl.where(best == POISON_NAN, 2, status)
    tl.store(out_id, tl.where(token, 0x7FFFFFFF - (best & 0x7FFFFFFF), -1))
    tl.store(out_status, status.to(tl.int64))


@triton.jit
def decode_kernel(keys, out_ids, out_status, count, BLOCK: tl.constexpr):
    """Ids and statuses of winning keys."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    best = tl.load(keys + row, mask=row < count, other=0)
    token = (best > 0) & (best < POISON_PARAMETER)
    status = tl.where(best == POISON_NAN, 2, tl.where(best == POISON_PARAMETER, 3, tl.where(token, 0, 1)))
    tl.store(out_ids + row, tl.where(token, 0x7FFFFFFF - (best & 0x7FFFFFFF), -1), mask=row < count)
    tl.store(out_status + row, status.to(tl.int64), mask=row < count)


def tokens(part: Any, rows: Any) -> tuple[Tensor, Tensor]:
    """Ids and statuses (B,), int64, of rows whose whole vocabulary is in `part`: one launch.

    Args:
        part: `ringattn.vocab.Slice`.
        rows: `ringattn.vocab.Rows`.
    """
    _, ids, status = _draw(part, rows)
    return ids, status


def winner(part: Any, rows: Any) -> Tensor:
    """Keys of the winners within the slice, int64 (B,), 0 where there is no token: one launch."""
    return _draw(part, rows)[0]


def decode(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and statuses of keys (B,): one launch."""
    ids, status = torch.empty_like(keys), torch.empty_like(keys)
    if len(keys):
        decode_kernel[(triton.cdiv(len(keys), 256),)](keys, ids, status, len(keys), BLOCK=256, num_warps=4)
    return ids, status


def _draw(part: Any, rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, device = len(part.logits), part.logits.device
    keys, ids, status = torch.empty(3, batch, dtype=torch.int64, device=device)
    if not part.logits.numel():
        keys.copy_(torch.where(rows.invalid(), POISON_PARAMETER.value, 0))
        return keys, *decode(keys)
    draw_launch(part, rows, keys, ids, status)()
    return keys, ids, status


def draw_launch(
    part: Any,
    rows: Any,
    keys: Tensor,
    ids: Tensor,
    status: Tensor,
    tile: int = 0,
    warps: int = WARPS,
    wave: int = 0,
) -> Launch:
    """The launch of `draw_kernel`, as data.

    Args:
        part: `ringattn.vocab.Slice` of at least one row and one column.
        rows: `ringattn.vocab.Rows`.
        keys, ids, status: int64 (B,), written.
        tile: tokens at once, a power of two from 128; 0 for what suits the shape.
        warps: warps a program.
        wave: programs to aim at by giving each enough tiles; 0 for what the device holds at a time.
    """
    (batch, width), cuda = part.logits.shape, keys.device.type == "cuda"
    best_tile, per_processor = SMALL if batch * width <= SMALL_TOKENS else LARGE
    tile = min(tile or best_tile, max(128, triton.next_power_of_2(width)))
    tiles = triton.cdiv(part.start % 4 + width, tile)
    if not wave:
        processors = torch.cuda.get_device_properties(keys.device).multi_processor_count if cuda else 132
        wave = processors * per_processor
    pieces = min(triton.cdiv(batch * tiles, wave), MOST_TOKENS // tile)
    words = zeros(2 * batch, keys.device)
    args: dict[str, Any] = {
        "keys": words[:batch],
        "arrived": words[batch:],
        "out_keys": keys,
        "out_ids": ids,
        "out_status": status,
        "start": part.start,
        "width": width,
        "pieces": pieces,
        "programs": triton.cdiv(tiles, pieces),
        "TILE": tile,
        "PIECE": min(tile, PIECE),
        "CUDA": cuda and torch.version.cuda is not None,
    }
    args |= edit_arguments(part) | row_arguments(rows)
    return Launch(draw_kernel, (batch, args["programs"]), args, options(warps))


def options(warps: int) -> dict[str, Any]:
    """Launch options of the sampler's kernels: no fused multiply-add, which would change bits."""
    return {"num_warps": warps, "enable_fp_fusion": False}


def edit_arguments(part: Any) -> dict[str, Any]:
    """Logits and what edits them, as kernel arguments; rows that share a mask or bias have stride 0."""
    args: dict[str, Any] = {}
    for name in ("logits", "mask", "bias", "counts", "prompt"):
        value = getattr(part, name)
        if value is not None and value.stride(1) != 1 and value.shape[1] > 1:
            value = value.contiguous()
        args[name] = part.logits if value is None else value.view(torch.uint8) if value.dtype == torch.bool else value
        args[f"{name}_stride"] = 0 if value is None or len(value) == 1 else value.stride(0)
    kinds = {torch.bool: 1, torch.int32: 2}
    args["MASK"] = 0 if part.mask is None else kinds[part.mask.dtype]
    return args | {name.upper(): getattr(part, name) is not None for name in ("bias", "counts", "prompt")}


def row_arguments(rows: Any) -> dict[str, Any]:
    """Parameters of rows, as kernel arguments; one value for all rows has step 0."""
    args: dict[str, Any] = {}
    for name in ("seed", "position", "sample", "temperature", "repetition", "presence", "frequency"):
        value = getattr(rows, name)
        plural = "frequencies" if name == "frequency" else f"{name}s"
        args |= {plural: value, f"{name}_step": 0 if len(value) == 1 else value.stride(0)}
    return args


def example(batch: int, dtype: torch.dtype, edits: bool) -> tuple[Any, Any]:
    """A slice and rows for the compile gate."""
    logits = torch.empty(batch, 128256, dtype=dtype)
    part = SimpleNamespace(logits=logits, start=0, mask=None, bias=None, counts=None, prompt=None)
    if edits:
        part.mask = torch.empty(batch, 4008, dtype=torch.int32)
        part.bias = torch.empty(1, 128256)
        part.counts = torch.empty(batch, 128256, dtype=torch.int32)
        part.prompt = torch.empty(batch, 128256, dtype=torch.bool)
    whole = dict.fromkeys(("seed", "position", "sample", "top_k"), torch.empty(batch, dtype=torch.int64))
    shares = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
    return part, SimpleNamespace(**whole, **dict.fromkeys(shares, torch.empty(batch)))


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Both tiles, with and without edits, for the compile gate."""
    for batch in (1, 64):
        for edits in (False, True):
            part, rows = example(batch, torch.bfloat16, edits)
            launch = draw_launch(part, rows, *torch.empty(3, batch, dtype=torch.int64))
            launch.args["CUDA"] = True  # type: ignore[index]
            yield CompileCase(f"draw-{batch}{'-edits' if edits else ''}", launch)
