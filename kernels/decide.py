"""The filtered draw from the largest logits of all slices: merge the lists, cut by min-p, top-k and top-p, draw.

Same bits as `ringattn.filters.merge` for requests without header whose top-k is within what each slice lists.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.config import Launch
from ringattn.kernels.gumbel import (
    NO_TOKEN_BELOW,
    POISON_NAN,
    POISON_PARAMETER,
    options,
    row_arguments,
    store_decoded,
)
from ringattn.kernels.noise import exact_score, exp2_parts, log, pack

UNIT = tl.constexpr(11)
"""Shift of the masses of the top bin, as `ringattn.vocab.UNIT`."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def values_of(keys):
    signed = ((keys >> 31) - 0x80000000).to(tl.int32)
    return (signed ^ ((signed >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def decide_kernel(
    words, seeds, positions, samples, temperatures, top_ks, top_ps, min_ps, repetitions, presences, frequencies,
    out_ids, out_status, merged,
    seed_step, position_step, sample_step, temperature_step, top_k_step, top_p_step, min_p_step,
    repetition_step, presence_step, frequency_step,
    slices, batch, wanted,
    ALL: tl.constexpr, SORT: tl.constexpr,
):  # fmt: skip
    """Ids and statuses from the candidates (slices, B, wanted) of all slices, for chained requests."""
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds + row * seed_step)
    position = tl.load(positions + row * position_step)
    sample = tl.load(samples + row * sample_step)
    temperature = tl.load(temperatures + row * temperature_step)
    top_k = tl.load(top_ks + row * top_k_step)
    top_p = tl.load(top_ps + row * top_p_step)
    min_p = tl.load(min_ps + row * min_p_step)
    repetition = tl.load(repetitions + row * repetition_step)
    presence = tl.load(presences + row * presence_step)
    frequency = tl.load(frequencies + row * frequency_step)

    index = tl.arange(0, ALL)
    listed = index < slices * wanted
    keys = tl.load(words + (index // wanted * batch + row) * wanted + index % wanted, mask=listed, other=0)
    if SORT:
        merged += row * ALL
        ranks = tl.zeros_like(index)
        STEP: tl.constexpr = 32
        for piece in range(0, ALL, STEP):
            at = piece + tl.arange(0, STEP)
            others = tl.load(
                words + (at // wanted * batch + row) * wanted + at % wanted, mask=at < slices * wanted, other=0
            )
            before = (others[None, :] > keys[:, None]) | (
                (others[None, :] == keys[:, None]) & (at[None, :] < index[:, None])
            )
            ranks += tl.sum(before.to(tl.int32), axis=1)
        tl.store(merged + ranks, keys)
        tl.debug_barrier()
        keys = tl.load(merged + index)
    decide_row(
        keys, index, seed, position, sample, temperature, top_k, top_p, min_p, repetition, presence, frequency,
        out_ids + row, out_status + row,
    )  # fmt: skip


@triton.jit
def decide_row(
    keys, index, seed, position, sample, temperature, top_k, top_p, min_p, repetition, presence, frequency,
    out_id, out_status,
):  # fmt: skip
    """Cut the sorted candidates of a row, and draw from what is left."""
    # Every row has a top-k within what each slice lists, so the first top-k of the merged list are those of the whole.
    known = (keys >= NO_TOKEN_BELOW) & (keys < POISON_PARAMETER)
    values = tl.where(known, values_of(keys), -float("inf"))
    largest = tl.max(values, axis=0)
    floor = largest + temperature * log(tl.minimum(tl.maximum(min_p, 1.1754943508222875e-38), 1.0))
    floor = tl.where(min_p > 0, floor, -float("inf"))
    kept = tl.minimum(tl.sum((known & (values >= floor)).to(tl.int64), axis=0), top_k)

    scale = LOG2E / tl.where(temperature == 0, 1.0, temperature).to(tl.float64)
    power = tl.where(known, values, 0.0).to(tl.float64) * scale
    power = tl.minimum(tl.maximum(power, -549755813888.0), 549755813888.0)
    mantissa, exponent = exp2_parts(power)
    bins = tl.where(known, exponent >> 3, -(1 << 40))
    left = UNIT - 8 * (tl.max(bins, axis=0) - bins)
    mass = tl.where(known, mantissa << (exponent & 7), 0)
    mass = tl.where(
        left >= 0, mass << tl.minimum(tl.maximum(left, 0), UNIT), mass >> tl.minimum(tl.maximum(-left, 0), 63)
    )
    sums = tl.cumsum(mass, axis=0)
    total = tl.sum(tl.where(index < kept, mass, 0), axis=0)
    need = tl.maximum(tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)
    reached = 1 + tl.sum((known & (sums < need)).to(tl.int64), axis=0)
    kept = tl.where(top_p < 1, tl.minimum(kept, reached), kept)
    kept = tl.where(temperature == 0, 1, kept)

    ids = (0x7FFFFFFF - (keys & 0x7FFFFFFF)).to(tl.int32)
    score = exact_score(values, ids, seed, position, sample, temperature)
    best = tl.max(tl.where(known & (index < kept), pack(score, ids), 0), axis=0)
    best = tl.where(best < NO_TOKEN_BELOW, 0, best)
    fine = (temperature >= 0) & (temperature <= 1e30) & (repetition > 0) & (repetition < float("inf"))
    fine = fine & (tl.abs(presence) < float("inf")) & (tl.abs(frequency) < float("inf"))
    fine = fine & (position >= 0) & (position <= 0xFFFFFFFF) & (sample >= 0) & (sample <= 0xFFFFFFFF)
    fine = fine & (top_k >= 0) & (top_p >= 0) & (top_p <= 1) & (min_p >= 0) & (min_p <= 1)
    best = tl.where(tl.max(keys, axis=0) == POISON_NAN, POISON_NAN, best)
    best = tl.where(fine, best, POISON_PARAMETER)
    store_decoded(best, out_id, out_status)


def filter_arguments(rows: Any) -> dict[str, Any]:
    """Filters of rows, as kernel arguments."""
    args: dict[str, Any] = {}
    for name in ("top_k", "top_p", "min_p"):
        value = getattr(rows, name)
        args |= {f"{name}s": value, f"{name}_step": 0 if len(value) == 1 else value.stride(0)}
    return args


def decide(words: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
    """Ids and statuses (B,) from candidates (slices, B, wanted), for chained requests with top-k in 1..`wanted`."""
    ids, status = torch.empty(2, words.shape[1], dtype=torch.int64, device=words.device)
    if words.shape[1]:
        decide_launch(words, rows, ids, status)()
    return ids, status


def decide_launch(words: Tensor, rows: Any, ids: Tensor, status: Tensor) -> Launch:
    """The launch of `decide` as data."""
    slices, batch, wanted = words.shape
    everything = max(32, triton.next_power_of_2(slices * wanted))
    args = {
        "words": words,
        "out_ids": ids,
        "out_status": status,
        "merged": torch.empty(batch, everything, dtype=torch.int64, device=words.device) if slices > 1 else words,
        "slices": slices,
        "batch": batch,
        "wanted": wanted,
        "ALL": everything,
        "SORT": slices > 1,
    }
    args |= row_arguments(rows) | filter_arguments(rows)
    return Launch(decide_kernel, (batch,), args, options(4 if everything <= 256 else 8))
