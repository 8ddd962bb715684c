"""The definition of correct: attention over tiles in plain torch, blockwise, on any device, in float32 or float64.

16-bit inputs are computed in float32. Memory beyond the arguments is one block of scores, so O(S) however long the
sequence is. The algorithm is FlashAttention-2's (Dao, 2023, arXiv 2307.08691) with torch operations for a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn.backends import Problem
from ringattn.merge import finite_shift, merge_into, where_empty
from ringattn.plan import Tile, Tiles

BLOCK_ROWS, BLOCK_KEYS = 256, 4096
"""Block of scores. Whole rows of up to 4096 keys need no merge, which keeps the reference at one rounding a row."""


def refusal(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> str | None:
    """Nothing is refused: any device, head size, strides and floating dtype that torch can multiply."""
    return None


def forward(problem: Problem, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Accumulate the attention of `tiles` into the state (out, lse); the contract is in `ringattn.backends`."""
    state = out if out.dtype == lse.dtype else torch.empty_like(out, dtype=lse.dtype)
    if problem.first:
        state.zero_()
        lse.fill_(-torch.inf)
    for block in _blocks(tiles):
        scores, _ = _scores(problem, block, q, k, lse.dtype)
        shift = finite_shift(scores.amax(dim=-1))
        weights = torch.exp(scores - shift.unsqueeze(-1))
        total = weights.sum(dim=-1)
        mean = _per_group(weights, k) @ v[:, :, block.keys].to(lse.dtype)
        mean = mean.view(*scores.shape[:-1], v.shape[-1]) / where_empty(total, 1.0).unsqueeze(-1)
        merge_into(state[:, :, block.rows], lse[:, :, block.rows], mean, shift + torch.log(total))
    if state is not out:
        out.copy_(state)


def backward(
    problem: Problem,
    tiles: Tiles,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Accumulate the gradients of `tiles` into dq, dk and dv; the contract is in `ringattn.backends`."""
    if problem.first:
        dq.zero_()
    if problem.first_kv:
        dk.zero_()
        dv.zero_()
    for block in _blocks(tiles):
        rows, keys = block.rows, block.keys
        scores, slope = _scores(problem, block, q, k, lse.dtype)
        row_lse = lse[:, :, rows].unsqueeze(-1)
        weights = torch.where(row_lse == -torch.inf, 0.0, torch.exp(scores - row_lse))
        grad_out = _per_group(do[:, :, rows].to(lse.dtype), k)
        dv[:, :, keys] += _per_group(weights, k).mT @ grad_out
        dweights = (grad_out @ v[:, :, keys].to(lse.dtype).mT).view_as(weights)
        dscores = weights * (dweights - delta[:, :, rows].unsqueeze(-1)) * problem.scale
        if slope is not None:
            dscores *= slope
        dscores = _per_group(dscores, k)
        dq[:, :, rows] += (dscores @ k[:, :, keys].to(lse.dtype)).view_as(dq[:, :, rows])
        dk[:, :, keys] += dscores.mT @ _per_group(q[:, :, rows].to(lse.dtype), k)


@dataclass(frozen=True, slots=True)
class _Block:
    """A rectangle of scores: rows of q, rows of k, and the local band `lo <= a - b <= hi` if it cuts the rectangle."""

    rows: slice
    keys: slice
    band: tuple[int, int] | None


def _blocks(tiles: Tiles) -> Iterator[_Block]:
    for tile in tiles:
        for row in range(0, tile.q_end - tile.q_begin, BLOCK_ROWS):
            yield from _row_blocks(tile, row, min(row + BLOCK_ROWS, tile.q_end - tile.q_begin))


def _row_blocks(tile: Tile, row: int, row_end: int) -> Iterator[_Block]:
    """The blocks of tile rows `row..row_end` that hold a visible pair."""
    lo, hi = (tile.band.lo, tile.band.hi) if tile.band else (-tile.k_end, tile.q_end)
    first, end = max(0, row - hi), min(tile.k_end - tile.k_begin, row_end - lo)
    for key in range(first, end, BLOCK_KEYS):
        key_end = min(key + BLOCK_KEYS, end)
        cut = tile.band is not None and not (lo <= row - (key_end - 1) and row_end - 1 - key <= hi)
        yield _Block(
            rows=slice(tile.q_begin + row, tile.q_begin + row_end),
            keys=slice(tile.k_begin + key, tile.k_begin + key_end),
            band=(lo - row + key, hi - row + key) if cut else None,
        )


def _scores(problem: Problem, block: _Block, q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scores (B, H, m, n) of a block, -inf where hidden, and the slope of the softcap, if there is one."""
    rows = q[:, :, block.rows].to(dtype)
    keys = k[:, :, block.keys].to(dtype)
    scores = (_per_group(rows, k) @ keys.mT).view(*rows.shape[:-1], keys.shape[2])
    scores *= problem.scale
    slope = None
    if problem.softcap:
        bent = torch.tanh(scores / problem.softcap)
        scores, slope = problem.softcap * bent, 1 - bent * bent
    if block.band is not None:
        lo, hi = block.band
        m, n = scores.shape[-2:]
        lag = torch.arange(m, device=q.device).unsqueeze(-1) - torch.arange(n, device=q.device)
        scores = scores.masked_fill_((lag < lo) | (lag > hi), -torch.inf)
    return scores, slope


def _per_group(x: Tensor, k: Tensor) -> Tensor:
    """(B, H, m, n) as (B, G, H / G * m, n): the query heads of a K/V head share one matrix product."""
    batch, heads, rows, columns = x.shape
    groups = k.shape[1]
    return x.reshape(batch, groups, heads // groups * rows, columns)
