"""The largest logits of each row's slice, sorted, in three launches.

1. `bound_kernel` reads the row once and keeps maxima of many interleaved groups; the last program of a row finds the
   coarse m-th largest of these. At least m logits reach it, and seldom many more.
2. `collect_kernel` reads the row again and collects what reaches the bound.
3. `sort_kernel` sorts that by counting. Where too many reached the bound (equal logits), it selects exactly instead.

With one slice, 3 also cuts and draws (`ringattn.kernels.decide`). Same bits as `ringattn.vocab.words` for
requests without header.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.config import CompileCase, Launch
from ringattn.kernels.decide import decide, decide_launch, decide_row, filter_arguments
from ringattn.kernels.gumbel import (
    POISON_NAN,
    edit_arguments,
    edited_logits,
    example,
    options,
    row_arguments,
)
from ringattn.kernels.noise import pack
from ringattn.kernels.workspace import zeros

LOWEST = tl.constexpr(-(1 << 31))
"""Order of no token; that of -inf is LOWEST + 0x7FFFFF."""
CHUNK = tl.constexpr(128)
"""Neighbouring columns that a program reads together; programs of a row take turns, so that no cluster of large logits
falls to one."""
CAPACITY = 256
"""Collected logits that are sorted by counting; more take the exact select."""
TILE, WARPS, PIECE = 4096, 8, 1024
"""Tokens a program of the first two launches, its warps, and tokens whose keys are made at once."""


@triton.jit
def _order(values):
    """int32, monotone in the values; a NaN is the largest, -inf and less the lowest."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    signed = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    signed = tl.where(values == -float("inf"), LOWEST, signed)
    return tl.where(values != values, 0x7FFFFFFF, signed)


@triton.jit
def _columns(tile, tiles, TILE: tl.constexpr):
    return _place(tl.arange(0, TILE), tile, tiles)


@triton.jit
def _place(index, tile, tiles):
    return (index // CHUNK * tiles + tile) * CHUNK + index % CHUNK


@triton.jit(do_not_specialize=["tiles", "wanted"])
def bound_kernel(
    logits, mask, bias, counts, prompt, repetitions, presences, frequencies,
    arrived, maxima, bounds,
    logits_stride, mask_stride, bias_stride, counts_stride, prompt_stride,
    repetition_step, presence_step, frequency_step,
    width, tiles, wanted,
    TILE: tl.constexpr, GROUPS: tl.constexpr, ALL: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, COUNTS: tl.constexpr, PROMPT: tl.constexpr,
):  # fmt: skip
    """bounds[row]: an order that at least `wanted` tokens of the row reach, or LOWEST. ALL >= tiles * GROUPS."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    column = _columns(tile, tiles, TILE)
    value = edited_logits(
        logits + row * logits_stride, mask + row * mask_stride, bias + row * bias_stride, counts + row * counts_stride,
        prompt + row * prompt_stride, column, column < width, tl.load(repetitions + row * repetition_step),
        tl.load(presences + row * presence_step), tl.load(frequencies + row * frequency_step),
        MASK, BIAS, COUNTS, PROMPT,
    )  # fmt: skip
    largest = tl.max(tl.reshape(_order(value), (TILE // GROUPS, GROUPS)), axis=0)
    tl.store(maxima + (row * tiles + tile) * GROUPS + tl.arange(0, GROUPS), largest)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1) == tiles - 1:
        tl.store(arrived + row, 0)
        tl.debug_barrier()
        index = tl.arange(0, ALL)
        every = tl.load(maxima + row * tiles * GROUPS + index, mask=index < tiles * GROUPS, other=LOWEST)
        # The upper 14 bits decide nearly as well as all 32 (what lies between is collected as well); two bits a step.
        bound = tl.full((), LOWEST, tl.int32)
        for bit in tl.static_range(30, 16, -2):
            low = bound + (1 << bit)
            middle = low + (1 << bit)
            high = middle + (1 << bit)
            reached = (every >= low).to(tl.int64) + ((every >= middle).to(tl.int64) << 20)
            sums = tl.sum(reached + ((every >= high).to(tl.int64) << 40), axis=0)
            bound = tl.where((sums & 0xFFFFF) >= wanted, low, bound)
            bound = tl.where(((sums >> 20) & 0xFFFFF) >= wanted, middle, bound)
            bound = tl.where((sums >> 40) >= wanted, high, bound)
        tl.store(bounds + row, bound)


@triton.jit(do_not_specialize=["tiles"])
def collect_kernel(
    logits, mask, bias, counts, prompt, repetitions, presences, frequencies,
    found, bounds, collected,
    logits_stride, mask_stride, bias_stride, counts_stride, prompt_stride,
    repetition_step, presence_step, frequency_step,
    start, width, tiles,
    TILE: tl.constexpr, PIECE: tl.constexpr, CAPACITY: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, COUNTS: tl.constexpr, PROMPT: tl.constexpr,
):  # fmt: skip
    """collected[row]: keys of the tokens that reach the bound, in any order, the first CAPACITY of `found`."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    logits += row * logits_stride
    mask += row * mask_stride
    bias += row * bias_stride
    counts += row * counts_stride
    prompt += row * prompt_stride
    repetition = tl.load(repetitions + row * repetition_step)
    presence = tl.load(presences + row * presence_step)
    frequency = tl.load(frequencies + row * frequency_step)
    bound = tl.load(bounds + row)
    column = _columns(tile, tiles, TILE)
    value = edited_logits(
        logits, mask, bias, counts, prompt, column, column < width, repetition, presence, frequency,
        MASK, BIAS, COUNTS, PROMPT,
    )  # fmt: skip
    hit = (_order(value) >= bound) & (_order(value) > LOWEST)
    if tl.max(hit.to(tl.int32), axis=0) > 0:
        for first in range(0, TILE, PIECE):  # in pieces, for the registers that 64-bit keys and places take
            some = _place(first + tl.arange(0, PIECE), tile, tiles)
            again = edited_logits(
                logits, mask, bias, counts, prompt, some, some < width, repetition, presence, frequency,
                MASK, BIAS, COUNTS, PROMPT,
            )  # fmt: skip
            near = (_order(again) >= bound) & (_order(again) > LOWEST)
            if tl.max(near.to(tl.int32), axis=0) > 0:
                place = tl.atomic_add(found + row + tl.zeros_like(some), 1, mask=near, sem="relaxed")
                at = collected + row * CAPACITY + place
                tl.store(at, pack(again, start + some), mask=near & (place < CAPACITY))


@triton.jit(do_not_specialize=["wanted"])
def sort_kernel(
    logits, mask, bias, counts, prompt, repetitions, presences, frequencies,
    found, collected, out,
    seeds, positions, samples, temperatures, top_ks, top_ps, min_ps, out_ids, out_status,
    logits_stride, mask_stride, bias_stride, counts_stride, prompt_stride,
    repetition_step, presence_step, frequency_step, out_stride,
    seed_step, position_step, sample_step, temperature_step, top_k_step, top_p_step, min_p_step,
    start, width, wanted,
    PIECE: tl.constexpr, CAPACITY: tl.constexpr, ALL: tl.constexpr, DECIDE: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, COUNTS: tl.constexpr, PROMPT: tl.constexpr,
):  # fmt: skip
    """out[row]: keys of the `wanted` largest tokens, descending; 0 where there are fewer, all poison with a NaN.

    DECIDE: these are all candidates there are; draw from them. Leaves `found` at 0.
    """
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(found + row).to(tl.int32)
    repetition = tl.load(repetitions + row * repetition_step)
    presence = tl.load(presences + row * presence_step)
    frequency = tl.load(frequencies + row * frequency_step)
    collected += row * CAPACITY
    if number > CAPACITY:
        number = _select(
            logits + row * logits_stride, mask + row * mask_stride, bias + row * bias_stride,
            counts + row * counts_stride, prompt + row * prompt_stride, repetition, presence, frequency,
            collected, start, width, wanted, PIECE, MASK, BIAS, COUNTS, PROMPT,
        )  # fmt: skip
        tl.debug_barrier()
    index = tl.arange(0, CAPACITY)
    keys = tl.load(collected + index, mask=index < number, other=0)
    ranks = tl.zeros_like(index)
    for first in range(0, number, 8):  # one key for all lanes at a time: a lane then needs no other to know its rank
        for next_one in tl.static_range(8):
            other = tl.load(collected + first + next_one, mask=first + next_one < number, other=0)
            ranks += (other > keys).to(tl.int32)
    poisoned = tl.max(keys, axis=0) == POISON_NAN
    out += row * out_stride
    tl.store(out + index, tl.where(poisoned, POISON_NAN, 0), mask=(index < wanted) & (poisoned | (index >= number)))
    tl.store(out + ranks, keys, mask=(ranks < wanted) & (index < number) & ~poisoned)
    tl.store(found + row, 0)
    if DECIDE:
        tl.debug_barrier()
        place = tl.arange(0, ALL)
        decide_row(
            tl.load(out + place, mask=place < wanted, other=0), place,
            tl.load(seeds + row * seed_step), tl.load(positions + row * position_step),
            tl.load(samples + row * sample_step), tl.load(temperatures + row * temperature_step),
            tl.load(top_ks + row * top_k_step), tl.load(top_ps + row * top_p_step),
            tl.load(min_ps + row * min_p_step), repetition, presence, frequency, out_ids + row, out_status + row,
        )  # fmt: skip


@triton.jit
def _select(
    logits, mask, bias, counts, prompt, repetition, presence, frequency, collected, start, width, wanted,
    TILE: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, COUNTS: tl.constexpr, PROMPT: tl.constexpr,
):  # fmt: skip
    """Collect exactly the `wanted` largest tokens of a row (all, if fewer): one program, 34 passes. Returns how many.

    Only for rows in which more than CAPACITY tokens reach the bound: many equal logits, or few allowed ones.
    """
    bound = tl.full((), LOWEST, tl.int32)
    for bit in range(31, -1, -1):
        trial = bound ^ (tl.full((), 1, tl.int32) << bit)
        reached = tl.zeros((), tl.int32)
        for first in range(0, width, TILE):
            column = first + tl.arange(0, TILE)
            value = edited_logits(
                logits, mask, bias, counts, prompt, column, column < width, repetition, presence, frequency,
                MASK, BIAS, COUNTS, PROMPT,
            )  # fmt: skip
            reached += tl.sum((_order(value) >= trial).to(tl.int32), axis=0)
        bound = tl.where(reached >= wanted, trial, bound)
    above = tl.zeros((), tl.int32)
    for first in range(0, width, TILE):
        column = first + tl.arange(0, TILE)
        value = edited_logits(
            logits, mask, bias, counts, prompt, column, column < width, repetition, presence, frequency,
            MASK, BIAS, COUNTS, PROMPT,
        )  # fmt: skip
        above += tl.sum((_order(value) > bound).to(tl.int32), axis=0)
    # Strictly larger ones fill the front, the first equal ones the rest.
    front = tl.zeros((), tl.int32)
    back = above
    for first in range(0, width, TILE):
        column = first + tl.arange(0, TILE)
        value = edited_logits(
            logits, mask, bias, counts, prompt, column, column < width, repetition, presence, frequency,
            MASK, BIAS, COUNTS, PROMPT,
        )  # fmt: skip
        order = _order(value)
        larger = (order > bound).to(tl.int32)
        equal = ((order == bound) & (order > LOWEST)).to(tl.int32)
        place = tl.where(larger > 0, front + tl.cumsum(larger, axis=0) - 1, back + tl.cumsum(equal, axis=0) - 1)
        tl.store(collected + place, pack(value, start + column), mask=(larger + equal > 0) & (place < wanted))
        front += tl.sum(larger, axis=0)
        back += tl.sum(equal, axis=0)
    return tl.minimum(back, wanted)


def listing(part: Any, rows: Any, wanted: int) -> Tensor:
    """Keys of the `wanted` largest tokens of each row of a slice, descending, int64 (B, wanted): three launches.

    Args:
        part: `ringattn.vocab.Slice`.
        rows: `ringattn.vocab.Rows`.
        wanted: at most CAPACITY.
    """
    out = torch.empty(len(part.logits), wanted, dtype=torch.int64, device=part.logits.device)
    if not part.logits.numel():
        return out.zero_()
    for launch in listing_launches(part, rows, out):
        launch()
    return out


def filtered_tokens(part: Any, rows: Any, wanted: int) -> tuple[Tensor, Tensor]:
    """Ids and statuses (B,) where one slice holds the vocabulary, for chained requests with top-k in 1..`wanted`."""
    batch, device = len(part.logits), part.logits.device
    if not part.logits.numel():
        return decide(listing(part, rows, wanted)[None], rows)
    ids, status = torch.empty(2, batch, dtype=torch.int64, device=device)
    for launch in listing_launches(
        part, rows, torch.empty(batch, wanted, dtype=torch.int64, device=device), ids, status
    ):
        launch()
    return ids, status


def listing_launches(
    part: Any,
    rows: Any,
    out: Tensor,
    ids: Tensor | None = None,
    status: Tensor | None = None,
    tile: int = TILE,
    warps: int = WARPS,
) -> list[Launch]:
    """The launches of `listing`, or with ids and status of `filtered_tokens`, as data."""
    (batch, width), wanted, device = part.logits.shape, out.shape[1], out.device
    tile = min(tile, max(1024, triton.next_power_of_2(width)))
    tiles = triton.cdiv(triton.cdiv(width, 128), tile // 128)
    # Eight times as many groups as wanted keep two large logits from often sharing one.
    groups = min(tile // 8, max(16, triton.next_power_of_2(triton.cdiv(8 * wanted, tiles))))
    params = row_arguments(rows)
    words = zeros(2 * batch, device)
    shared = edit_arguments(part) | {"width": width}
    shared |= {name: value for name, value in params.items() if name.startswith(("repetition", "presence", "frequenc"))}
    bounds = torch.empty(batch, dtype=torch.int32, device=device)
    collected = torch.empty(batch, CAPACITY, dtype=torch.int64, device=device)
    bound = {
        "arrived": words[:batch],
        "maxima": torch.empty(batch, tiles * groups, dtype=torch.int32, device=device),
        "bounds": bounds,
        "tiles": tiles,
        "wanted": wanted,
        "TILE": tile,
        "GROUPS": groups,
        "ALL": triton.next_power_of_2(tiles * groups),
    }
    collect = {
        "found": words[batch:],
        "collected": collected,
        "start": part.start,
        "CAPACITY": CAPACITY,
        "PIECE": PIECE,
    }
    sort = collect | filter_arguments(rows) | params
    sort |= {
        "out": out,
        "out_stride": out.stride(0),
        "out_ids": out if ids is None else ids,
        "out_status": out if status is None else status,
        "wanted": wanted,
        "ALL": max(32, triton.next_power_of_2(wanted)),
        "DECIDE": ids is not None,
    }
    collect |= {"bounds": bounds, "tiles": tiles, "TILE": tile}
    return [
        Launch(bound_kernel, (batch, tiles), shared | bound, options(warps)),
        Launch(collect_kernel, (batch, tiles), shared | collect, options(warps)),
        Launch(sort_kernel, (batch,), shared | sort, options(8)),
    ]


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """The launches of a filtered draw, of one slice and of eight, for the compile gate."""
    out, ids, status = torch.empty(16, 64, dtype=torch.int64), *torch.empty(2, 16, dtype=torch.int64)
    for edits in (False, True):
        part, rows = example(16, torch.bfloat16, edits)
        for launch in listing_launches(part, rows, out, ids, status):
            yield CompileCase(f"{launch.kernel.__name__}{'-edits' if edits else ''}", launch)
    for slices in (1, 8):
        launch = decide_launch(torch.empty(slices, 16, 64, dtype=torch.int64), rows, ids, status)
        yield CompileCase(f"decide-{slices}", launch)
