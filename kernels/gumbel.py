"""One launch draws a token from each row's slice of logits: edits, temperature, noise, key, maximum, decoding.

The result is that of `l + T g` with Gumbel noise g from IEEE operations in a fixed order (`ringattn.noise`, line by
line), so it has the same bits as on CPU. Most of it is never computed: a pass with hardware logarithms gives each score
an upper bound that is within `BOUND` T of it, and only what comes that near to the largest is scored exactly. A tile
where one token alone does is done after one scalar score; the others (about 1 in 100) are scored exactly as a whole.

The pass (H200, 128256 bf16 logits a row) is bound by integer and special-function issue, not by memory: one Philox call
for four tokens and two `lg2.approx` a token.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.config import Launch
from ringattn.kernels.noise import TAIL_BELOW, exact_score, lg2, pack, philox
from ringattn.kernels.workspace import zeros

BOUND = tl.constexpr(1e-4)
"""Twice the largest |fast - exact| of a Gumbel number, 2.5e-5, and as much again. For words from 2^16 to 2^32 - 2^24:
lg2.approx errs by 2^-22 (absolute within (1/2, 2), else relative), so 1.05e-5 at E = 2^-6 and 2.8e-6 in log(E); the
rounding of 1 - u 2e-6; leaving out the low word 7.6e-6; the exact score 1e-6."""
HIGH_WORDS = tl.constexpr(0xFF000000)
"""Words from here on have 1 - u below 2^-8, where the fast pass only bounds the score from above."""

POISON_NAN = tl.constexpr((1 << 63) - 1)
POISON_PARAMETER = tl.constexpr((1 << 63) - 1 - (1 << 31))
NO_TOKEN_BELOW = tl.constexpr(0x00800000 << 31)
"""Keys below this are no token: order(-inf) is 0x007FFFFF."""
ONE = tl.constexpr(1 << 16)
"""What a candidate adds to a tile's count, above its index."""

TILE, WARPS, PIECE = 4096, 4, 512
"""Tokens a program, its warps, and tokens that it scores exactly at once."""


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


@triton.jit
def draw_kernel(
    logits, mask, bias, counts, prompt,
    seeds, positions, samples, temperatures, repetitions, presences, frequencies,
    keys, arrived, out_keys, out_ids, out_status,
    logits_stride, mask_stride, bias_stride, counts_stride, prompt_stride,
    seed_step, position_step, sample_step, temperature_step, repetition_step, presence_step, frequency_step,
    start, width, tiles,
    TILE: tl.constexpr, PIECE: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, COUNTS: tl.constexpr, PROMPT: tl.constexpr,
    CUDA: tl.constexpr,
):  # fmt: skip
    """One program draws from a tile of a row; the last of a row decodes it and leaves keys and arrived at 0."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
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
    first = start // 4 * 4 + tile * TILE
    group = tl.arange(0, ROWS)
    index = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    column = first - start + index
    inside = (column >= 0) & (column < width)
    value = edited_logits(
        logits, mask, bias, counts, prompt, column, inside, repetition, presence, frequency,
        MASK, BIAS, COUNTS, PROMPT,
    )  # fmt: skip
    l0, l1, l2, l3 = _quarter(value, ROWS)
    w0, w1, w2, w3 = philox(seed, (first // 4 + group).to(tl.uint32), position, sample, 0)
    slope = temperature * -0.6931472
    s0 = _upper(l0, w0, slope, CUDA)
    s1 = _upper(l1, w1, slope, CUDA)
    s2 = _upper(l2, w2, slope, CUDA)
    s3 = _upper(l3, w3, slope, CUDA)
    largest = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), axis=0)
    near = largest - (temperature * BOUND + tl.abs(largest) * 4.7683716e-07 + 1e-37)
    near = tl.where(near < -3.4028234e38, -3.4028234e38, near)
    # A NaN is not below anything, so it counts.
    at = group * 4 + ONE
    found = tl.where(s0 < near, 0, at) + tl.where(s1 < near, 0, at + 1)
    found += tl.where(s2 < near, 0, at + 2) + tl.where(s3 < near, 0, at + 3)
    total = tl.sum(found, axis=0)

    key = tl.zeros((), dtype=tl.int64)
    certain = total < 0
    if (total >= ONE) & (total < 2 * ONE):
        only = first + total - ONE
        near_column = only - start
        logit = edited_logits(
            logits, mask, bias, counts, prompt, near_column, near_column >= 0, repetition, presence, frequency,
            MASK, BIAS, COUNTS, PROMPT,
        )  # fmt: skip
        score, word = exact_score(logit, only, seed, position, sample, temperature)
        key = pack(score, only)
        certain = (word >= TAIL_BELOW) & (word < HIGH_WORDS)
    if (total >= ONE) & (~certain):
        # In pieces, so that the rare path does not set the registers of the common one.
        for piece in range(0, TILE, PIECE):
            some = piece + tl.arange(0, PIECE)
            far = first - start + some
            again = edited_logits(
                logits, mask, bias, counts, prompt, far, (far >= 0) & (far < width), repetition, presence, frequency,
                MASK, BIAS, COUNTS, PROMPT,
            )  # fmt: skip
            exact, _ = exact_score(again, first + some, seed, position, sample, temperature)
            key = tl.maximum(key, tl.max(pack(exact, first + some), axis=0))
    key = tl.where(key < NO_TOKEN_BELOW, 0, key)
    fine = (temperature >= 0) & (temperature <= 1e30) & (repetition > 0) & (repetition < float("inf"))
    fine = fine & (tl.abs(presence) < float("inf")) & (tl.abs(frequency) < float("inf"))
    fine = fine & (position >= 0) & (position <= 0xFFFFFFFF) & (sample >= 0) & (sample <= 0xFFFFFFFF)
    key = tl.where(fine, key, POISON_PARAMETER)

    tl.atomic_max(keys + row, key, sem="relaxed")
    if tl.atomic_add(arrived + row, 1) == tiles - 1:
        best = tl.atomic_xchg(keys + row, 0)
        tl.store(arrived + row, 0)
        tl.store(out_keys + row, best)
        store_decoded(best, out_ids + row, out_status + row)


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
    part: Any, rows: Any, keys: Tensor, ids: Tensor, status: Tensor, tile: int = TILE, warps: int = WARPS
) -> Launch:
    """The launch of `draw_kernel`, as data.

    Args:
        part: `ringattn.vocab.Slice` of at least one row and one column.
        rows: `ringattn.vocab.Rows`.
        keys, ids, status: int64 (B,), written.
        tile: tokens a program, a power of two from 128.
        warps: warps a program.
    """
    batch, width = part.logits.shape
    tile = min(tile, max(128, triton.next_power_of_2(width)))
    tiles = triton.cdiv(part.start % 4 + width, tile)
    words = zeros(2 * batch, keys.device)
    args: dict[str, Any] = {
        "keys": words[:batch],
        "arrived": words[batch:],
        "out_keys": keys,
        "out_ids": ids,
        "out_status": status,
        "start": part.start,
        "width": width,
        "tiles": tiles,
        "TILE": tile,
        "PIECE": min(tile, PIECE),
        "CUDA": keys.device.type == "cuda" and torch.version.cuda is not None,
    }
    args |= edit_arguments(part) | row_arguments(rows)
    return Launch(draw_kernel, (batch, tiles), args, options(warps))


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
