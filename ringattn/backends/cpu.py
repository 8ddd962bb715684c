"""Attention over tiles by torch's own CPU flash kernel and its backward: the default where there is no GPU.

The kernel (`aten._scaled_dot_product_flash_attention_for_cpu`) computes FlashAttention-2 (Dao, 2023, arXiv 2307.08691)
on a rectangle of pairs. Tiles are cut into pieces that it can take, none of them with a row that sees no key: the
kernel gives such rows an LSE of 0 where -inf is true. 16-bit inputs are computed in float32: without matrix
instructions for them the kernel's own 16-bit backward is several times slower (`benchmarks/bench_cpu.py`).

The kernel's backward takes the ring's final LSE as it is, but computes delta itself, as rowsum(do * out). It is given
another `out`, with which that sum is the delta of the contract: see `_with_delta`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.backends import Problem
from ringattn.merge import merge_into
from ringattn.plan import Tile, Tiles

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_ROWS = 128
"""Rows of a strip of a window; 64 below 1024 keys. A visible pair costs 1.5 times what it does in full attention at a
window of 1024 keys, 1.7 at 512, 2.5 at 256; strips of 256 rows 1.7, 2.1 and 2.7 (docs/findings/cpu.md)."""
SLAB_KEYS = 1536
"""Keys up to which a strip is one masked piece. One piece without a mask for what all its rows see, and two masked ones
for the edges, cost 1.8 times full attention at 1024 keys, 2.7 at 512."""
SAFE_LAG = 80.0
"""Difference of two LSEs up to which exp of its negative is a normal float32 (1.8e-35)."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def refusal(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> str | None:
    """Why these tensors cannot be taken: another device, a softcap, or a dtype that the kernel does not know."""
    if q.device.type != "cpu":
        return f"it computes CPU tensors, got {q.device.type}"
    if softcap:
        return f"torch's CPU kernel has no softcap, got {softcap}; 'reference' has"
    if q.dtype not in DTYPES:
        return f"dtype must be one of {', '.join(map(str, DTYPES))}, got {q.dtype}"
    return None


def forward(problem: Problem, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Accumulate the attention of `tiles` into the state (out, lse); the contract is in `ringattn.backends`."""
    assert not problem.softcap
    state = out if out.dtype == lse.dtype else torch.empty_like(out, dtype=lse.dtype)
    if problem.first:
        state.zero_()
        lse.fill_(-torch.inf)
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (_prepared(x, lse.dtype, width) for x in (q, k, v))
    masks = _Masks(lse.dtype)
    untouched = 0 if problem.first else q.shape[2]
    for piece in _pieces(tiles, q):
        rows, keys = piece.rows, piece.keys
        part, part_lse = _flash(
            q[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            is_causal=piece.causal,
            attn_mask=masks(piece),
            scale=problem.scale,
        )
        part = part[..., : out.shape[-1]]
        if rows.start >= untouched:
            state[:, :, rows].copy_(part)
            lse[:, :, rows].copy_(part_lse)
        else:
            _merge(state[:, :, rows], lse[:, :, rows], part, part_lse)
        untouched = max(untouched, rows.stop)
    if state is not out:
        out.copy_(state)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """`merge_into` for rows whose weights do not vanish, which is the rule: nothing to select away, no temporaries.

    Fresh memory is what costs: at 2048 rows, 8 heads and D = 64 this takes 0.6 ms, `merge_into` 14 ms.
    """
    if not (lse - part_lse).abs().amax() < SAFE_LAG:
        return merge_into(out, lse, part, part_lse)
    shift = torch.maximum(lse, part_lse)
    weight, part_weight = torch.exp(lse - shift), torch.exp(part_lse - shift)
    total = weight + part_weight
    out.mul_(weight.unsqueeze(-1)).addcmul_(part, part_weight.unsqueeze(-1)).div_(total.unsqueeze(-1))
    lse.copy_(shift.add_(total.log_()))


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
    assert not problem.softcap
    if problem.first:
        dq.zero_()
    if problem.first_kv:
        dk.zero_()
        dv.zero_()
    dim, v_dim = q.shape[-1], v.shape[-1]
    do, v, own_out = _with_delta(do.to(lse.dtype), v.to(lse.dtype), delta, dim)
    q, k, v, do = (_prepared(x, lse.dtype, v.shape[-1]) for x in (q, k, v, do))
    # Rows that no rank has a key for have an LSE of -inf; exp(score - inf) is their probability, 0.
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    masks = _Masks(lse.dtype)
    for piece in _pieces(tiles, q):
        rows, keys = piece.rows, piece.keys
        grads = _flash_backward(
            do[:, :, rows],
            q[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            own_out[:, :, rows],
            lse[:, :, rows],
            0.0,
            piece.causal,
            attn_mask=masks(piece),
            scale=problem.scale,
        )
        dq[:, :, rows] += grads[0][..., :dim]
        dk[:, :, keys] += grads[1][..., :dim]
        dv[:, :, keys] += grads[2][..., :v_dim]


def _with_delta(do: Tensor, v: Tensor, delta: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(do, v, out) for which the kernel's own rowsum(do * out) is `delta` and everything else stays as it is.

    Where v is as wide as q, `out` is sign(do) * delta / |do|_1: a sum without cancellation, good to a few roundings. A
    row whose do is (nearly) zero has no such `out` unless its delta is zero too. Then, and where v has to be padded to
    the width of q anyway, one column does it exactly: do = [do, 1], v = [v, 0], out = [0, delta]. It is not the rule,
    because the odd width costs 12% at D = 64.
    """
    if v.shape[-1] >= dim:
        factor = delta / torch.linalg.vector_norm(do, ord=1, dim=-1)
        factor = torch.where(delta == 0, 0.0, factor)
        if factor.isfinite().all():
            return do, v, do.sign().mul_(factor.unsqueeze(-1))
    width = max(v.shape[-1] + 1, dim)
    out = do.new_zeros(*do.shape[:-1], width)
    out[..., v.shape[-1]] = delta
    do = F.pad(do, (0, width - v.shape[-1]))
    do[..., v.shape[-1]] = 1.0
    return do, F.pad(v, (0, width - v.shape[-1])), out


def _prepared(x: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """x as the kernel's matrix products need it: of one dtype and head size, with rows that do not overlap."""
    x = x.to(dtype)
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    if x.stride(-1) != 1 or x.stride(-2) < x.shape[-1]:
        return x.clone(memory_format=torch.contiguous_format)
    return x


@dataclass(frozen=True, slots=True)
class _Piece:
    """A rectangle of pairs of which every row sees a key.

    Attributes:
        rows, keys: of q and k.
        causal: row a sees key b iff a >= b, counted from their first; there are at least as many rows as keys.
        band: row a sees key b iff lo <= a - b <= hi; None when all pairs are seen (unless causal).
    """

    rows: slice
    keys: slice
    causal: bool = False
    band: tuple[int, int] | None = None


def _pieces(tiles: Tiles, q: Tensor) -> Iterator[_Piece]:
    if q.numel():  # without heads the kernel divides by zero and ends the process, as without rows or keys
        for tile in tiles:
            yield from _cut(tile)


@lru_cache(maxsize=1024)
def _cut(tile: Tile) -> tuple[_Piece, ...]:
    """The pieces that hold each visible pair of a tile once: few and large ones without a mask, small ones with one."""
    rows, keys = tile.q_end - tile.q_begin, tile.k_end - tile.k_begin
    if tile.band is None:
        return (_piece(tile, 0, rows, 0, keys),)
    lo, hi = max(tile.band.lo, 1 - keys), min(tile.band.hi, rows - 1)
    if hi == rows - 1:
        triangle = _piece(tile, 0, rows, -lo, keys, causal=True)
        return (_piece(tile, 0, rows, 0, -lo), triangle) if lo else (triangle,)
    height = _strip_rows(hi - lo + 1)
    strips = [_strip(tile, row, min(row + height, rows), keys, lo, hi) for row in range(0, rows, height)]
    return tuple(piece for strip in strips for piece in strip)


def _strip_rows(width: int) -> int:
    """Rows of a strip of a window of that many keys."""
    return min(MAX_ROWS, max(64, width // 8))


def _strip(tile: Tile, row: int, row_end: int, keys: int, lo: int, hi: int) -> list[_Piece]:
    """The pieces of a few rows of a tile: those keys that all of them see, and the two edges of the band."""
    begin, end = max(0, row - hi), min(keys, row_end - lo)
    full_begin, full_end = max(0, row_end - 1 - hi), min(keys, row - lo + 1)
    if full_begin >= full_end or end - begin <= SLAB_KEYS:
        return [_piece(tile, row, row_end, begin, end, band=(lo, hi))]
    pieces = [_piece(tile, row, row_end, full_begin, full_end)]
    if begin < full_begin:
        pieces.append(_piece(tile, row, min(row_end, full_begin + hi), begin, full_begin, band=(lo, hi)))
    if full_end < end:
        pieces.append(_piece(tile, max(row, full_end + lo), row_end, full_end, end, band=(lo, hi)))
    return pieces


def _piece(
    tile: Tile,
    row: int,
    row_end: int,
    key: int,
    key_end: int,
    causal: bool = False,
    band: tuple[int, int] | None = None,
) -> _Piece:
    """A piece from indices and a band that count from the tile's first row and key."""
    return _Piece(
        rows=slice(tile.q_begin + row, tile.q_begin + row_end),
        keys=slice(tile.k_begin + key, tile.k_begin + key_end),
        causal=causal,
        band=band and (band[0] - row + key, band[1] - row + key),
    )


class _Masks:
    """The masks of a call's pieces, each made once; most strips of a window share theirs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._made: dict[tuple[int, int, tuple[int, int]], Tensor] = {}

    def __call__(self, piece: _Piece) -> Tensor | None:
        if piece.band is None:
            return None
        rows, keys = piece.rows.stop - piece.rows.start, piece.keys.stop - piece.keys.start
        kind = rows, keys, piece.band
        if kind not in self._made:
            lag = torch.arange(rows).unsqueeze(-1) - torch.arange(keys)
            hidden = (lag < piece.band[0]) | (lag > piece.band[1])
            self._made[kind] = torch.zeros(rows, keys, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return self._made[kind]
