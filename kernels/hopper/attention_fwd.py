"""Forward attention on sm_90 beside FlashAttention-3: the portable kernel's contract, for 16-bit inputs.

`refusal` says which calls it leaves to the portable kernel; the kernel itself is in `attention_fwd_kernel`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ringattn.kernels.attention_fwd import score_factors
from ringattn.kernels.config import CompileCase, Launch, example, variant_name
from ringattn.kernels.hopper.attention_fwd_kernel import attention_fwd_kernel
from ringattn.kernels.hopper.config import choose
from ringattn.kernels.hopper.shim import TensorDescriptor
from ringattn.kernels.tiles import IntTile, Rows, clamp, cut_rows, descriptors_fit, heads_together

FEWEST_ROWS = 64
"""Query rows below which most of a block of 128 would be padding."""

SHARING = 4
"""Programs for each K/V head from which on all heads may take their longest blocks at once: fewer, and each reads its
keys from memory alone (D=128, causal, 2,048 rows, 128 heads: 0.62 of FlashAttention-3, with lots of heads 0.76)."""

_TILE = ("q_begin", "q_end", "k_begin", "k_end", "lo", "hi")


def refusal(problem: Any, tiles: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> str | None:
    """Why a call is left to the portable kernel, or None.

    Args:
        problem, tiles, q, k, v, out: as in `ringattn.backends`; not empty.
    """
    if not _is_hopper(q.device):
        return "the Hopper kernel needs a device of compute capability 9.0"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"the Hopper kernel takes float16 and bfloat16, got {q.dtype}"
    if q.shape[2] < FEWEST_ROWS:
        return f"the Hopper kernel takes at least {FEWEST_ROWS} query rows, got {q.shape[2]}"
    if not problem.softcap and problem.scale <= 0:
        return f"the Hopper kernel needs a positive scale, got {problem.scale}"
    if not descriptors_fit(q, k, v):
        return "the Hopper kernel needs contiguous rows, and everything else on 16 bytes"
    if out.stride(3) != 1:
        return "the Hopper kernel needs an output with contiguous rows"
    return None


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def forward(problem: Any, tiles: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Accumulate the attention of `tiles` into (out, lse) in one launch, for a call that `refusal` lets through."""
    ints, first = _int_tiles(tiles), problem.first
    if first and not (len(ints) == 1 and ints[0][:2] == (0, q.shape[2])):
        out.zero_()
        lse.fill_(-torch.inf)
        first = False  # the kernel visits only the rows of tiles
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    launch = forward_launch(ints, q, k, v, out, lse, problem.scale, problem.softcap, first=first, programs=programs)
    with torch.cuda.device(q.device):
        launch()


def forward_launch(
    tiles: tuple[IntTile, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float,
    *,
    first: bool,
    programs: int,
) -> Launch:
    """The launch that attends q to the tiles and merges into (out, lse), or writes them.

    Args:
        tiles: not empty, clamped; with `first`, one tile that holds every row.
        q, k, v, out, lse, scale, softcap: as in `ringattn.kernels.attention_fwd.forward_launch`.
        first: write instead of merge.
        programs: multiprocessors of the device, each of which runs one program at a time.

    Returns:
        A launch, not yet run.
    """
    batch, heads, count, dim = q.shape
    v_dim, groups = v.shape[3], heads // k.shape[1]
    config = choose(dim, v_dim)
    rows = cut_rows(tiles, "q", config.block_q, count, False, q.device)
    config = replace(config, single=rows.table is None, merge=not first, softcap=softcap != 0)
    items, together = rows.blocks * heads * batch, 1
    if _uneven(rows):
        together = batch * heads
        if programs * groups < SHARING * together:
            lot = heads_together(together, groups, k.shape[2] * (dim + v_dim) * k.itemsize)
            together, programs = math.ceil(together / math.ceil(together / lot)), items
    programs = min(programs, items)
    factors = score_factors(scale, softcap)
    descs = {"q": _descriptor(q, 64, config.width), "k": _descriptor(k, config.block_k, config.width)}
    extra = config.extra or config.width
    return Launch(
        attention_fwd_kernel,
        (programs,),
        dict(
            descs,
            q_extra=_descriptor(q, 64, extra),
            k_extra=_descriptor(k, config.block_k, extra),
            v=_descriptor(v, config.block_k, config.v_width),
            out=out,
            lse=lse,
            table=lse if rows.table is None else rows.table,
            **dict(zip(_TILE, rows.tile, strict=True)),
            items=items,
            rounds=math.ceil(items / programs),
            blocks=rows.blocks,
            backwards=int(rows.backwards),
            heads=heads,
            groups=groups,
            together=together,
            all_heads=batch * heads,
            rows=rows.end,
            bend=factors["bend"] * 2 / math.log(2),
            exp_scale=factors["exp_scale"],
            scale=factors["scale"],
            **dict(zip(("out_batch", "out_head", "out_row"), out.stride(), strict=False)),
            **dict(zip(("lse_batch", "lse_head", "lse_row"), lse.stride(), strict=True)),
            C=config,
        ),
        dict(num_warps=4, enable_fp_fusion=True),
    )


@lru_cache(maxsize=4096)
def _int_tiles(tiles: Any) -> tuple[IntTile, ...]:
    """The tiles of a plan as the kernel takes them."""
    bounds = [(tile.band.lo, tile.band.hi) if tile.band else (None, None) for tile in tiles]
    return clamp(
        [(tile.q_begin, tile.q_end, tile.k_begin, tile.k_end, *band) for tile, band in zip(tiles, bounds, strict=True)]
    )


def _uneven(rows: Rows) -> bool:
    """Whether the first rows of a launch meet more or fewer keys than its last, or a table sorts them."""
    if rows.table is not None:
        return True
    q_begin, q_end, k_begin, k_end, lo, hi = rows.tile
    keys, last = k_end - k_begin, q_end - q_begin - 1
    return min(keys, 1 - lo) - max(0, -hi) != min(keys, last + 1 - lo) - max(0, last - hi)


def _descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """A descriptor of blocks of `rows` rows and `width` columns of a head; beyond the tensor it reads 0."""
    strides, below = list(x.stride()), x.shape[3]
    for dim in (2, 1, 0):  # a dimension of one element may have any stride in torch, but not in the copy engine
        if x.shape[dim] == 1:
            strides[dim] = -(-below * x.itemsize // 16) * 16 // x.itemsize
        below = max(below, strides[dim] * x.shape[dim])
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], dtype)
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, width], layout)


SPILL_BYTES = 1700
"""Most bytes of registers that a build may spill: all of it between items, none in the loops over blocks of keys."""


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Every shipped build by head size, and each other choice alone, for the compile gate."""
    if arch != 90:
        return
    plain = [(dim, dim, torch.bfloat16, False, True, 0.0) for dim in (64, 96, 128, 256)]
    others = [
        (192, 128, torch.bfloat16, False, True, 0.0),
        (128, 128, torch.bfloat16, False, False, 0.0),
        (128, 128, torch.float16, False, True, 0.0),
        (128, 128, torch.bfloat16, True, True, 0.0),
        (64, 64, torch.bfloat16, True, True, 0.0),
        (128, 128, torch.bfloat16, False, True, 30.0),
    ]
    for dim, v_dim, dtype, table, merge, softcap in plain + others:
        q, k, v = example(dim, dtype, 8), example(dim, dtype, 2), example(v_dim, dtype, 2)
        out, lse = example(v_dim, torch.float32 if merge else dtype, 8), torch.empty(1, 8, 4096, device="meta")
        tiles: tuple[IntTile, ...] = ((0, 4096, 0, 4096, 0, 4096),)
        if table:
            tiles = ((0, 2048, 0, 2048, 0, 4096), (2048, 4096, 2048, 4096, 0, 4096))
        launch = forward_launch(tiles, q, k, v, out, lse, 0.1, softcap, first=not merge, programs=132)
        name = variant_name(dim, v_dim, dtype, True, table, merge, softcap)
        yield CompileCase(name, launch, spill_bytes=SPILL_BYTES, wgmma=True)
