"""Tables of tiles: which block of rows a program owns, and which tiles it walks, as plain ints or one int32 tensor.

A tile is six ints, `(q_begin, q_end, k_begin, k_end, lo, hi)`: rows of q against rows of k, where with a and b counted
from q_begin and k_begin row a sees key b iff `lo <= a - b <= hi`. Rows are those of q, or, for the gradients of keys
and values, those of k ("side" below).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

IntTile = tuple[int, int, int, int, int, int]
Side = Literal["q", "k"]

OPEN = 1 << 30
"""A bound of a band that no lag of int32 rows reaches."""

L2_BYTES = 24 << 20
"""Keys and values that programs in flight may share: half of the 50 to 60 MB of an H100's or H200's cache."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The blocks of rows of a launch.

    Attributes:
        table: None for one tile, which `tile` then holds. Otherwise int32: for each block its first row and the range
            of its entries, three numbers a block; then the entries, six numbers each.
        tile: the only tile, or zeros.
        blocks: number of blocks, each one program a head.
        begin, end: rows that the launch writes, in the one-tile case cut from `begin` on.
        backwards: take the blocks from the last to the first, since later ones have more to do.
    """

    table: Tensor | None
    tile: IntTile
    blocks: int
    begin: int
    end: int
    backwards: bool


@lru_cache(maxsize=1024)
def cut_rows(
    tiles: tuple[IntTile, ...], side: Side, block: int, rows: int, write_all: bool, device: torch.device
) -> Rows:
    """Cut the rows of a side into blocks.

    Args:
        tiles: what to visit.
        side: "q" or "k".
        block: rows of a block.
        rows: rows of the tensor.
        write_all: whether rows that no tile touches need a program too, which then writes the empty state.
        device: of the table.

    Returns:
        The blocks. One tile that covers all rows to be written needs no table.
    """
    axis = 0 if side == "q" else 2
    if len(tiles) == 1:
        begin, end = tiles[0][axis : axis + 2]
        if not write_all or (begin == 0 and end == rows):
            growing = _work(tiles[0], side, 0, 1) < _work(tiles[0], side, end - begin - 1, end - begin)
            return Rows(None, tiles[0], -(-(end - begin) // block), begin, end, growing)
    entries: dict[int, list[IntTile]] = {number: [] for number in range(-(-rows // block))} if write_all else {}
    work: dict[int, int] = {}
    for tile in tiles:
        begin, end = tile[axis : axis + 2]
        for number in range(begin // block, -(-end // block)):
            entries.setdefault(number, []).append(tile)
            first, last = max(number * block, begin) - begin, min((number + 1) * block, end) - begin
            work[number] = work.get(number, 0) + _work(tile, side, first, last)
    order = sorted(entries, key=lambda number: (-work.get(number, 0), number))
    heads: list[int] = []
    body: list[int] = []
    for number in order:
        heads += [number * block, len(body) // 6, len(body) // 6 + len(entries[number])]
        for tile in entries[number]:
            body += tile
    table = torch.tensor(heads + body, dtype=torch.int32, device=device)
    return Rows(table, (0, 0, 0, 0, 0, 0), len(order), 0, rows, False)


def _work(tile: IntTile, side: Side, first: int, end: int) -> int:
    """Rows of the other side that rows `first..end` of a tile meet."""
    q_begin, q_end, k_begin, k_end, lo, hi = tile
    if side == "q":
        return max(0, min(k_end - k_begin, end - lo) - max(0, first - hi))
    return max(0, min(q_end - q_begin, end + hi) - max(0, first + lo))


def heads_together(heads: int, groups: int, bytes_of_head: int) -> int:
    """Heads whose blocks are taken in turn, so that the K/V which their programs stream stays in the L2 cache.

    Taking many heads together puts the longest blocks of all of them first, which evens out the end of a launch
    (FlashAttention-4's longest-processing-time order); too many, and their keys and values push each other out.

    Args:
        heads: heads of q in the batch.
        groups: query heads that share one K/V head.
        bytes_of_head: of the two streaming operands of one head.

    Returns:
        At least 1 and at most `heads`.
    """
    sharing = max(1, L2_BYTES // max(1, bytes_of_head))
    return max(1, min(heads, sharing * groups))


def descriptors_fit(*tensors: Tensor) -> bool:
    """Whether the copy engine can read these (B, H, M, D) views: rows contiguous, everything else on 16 bytes."""
    return all(x.data_ptr() % 16 == 0 and _strides_fit(x.shape, x.stride(), x.itemsize) for x in tensors)


@lru_cache(maxsize=4096)
def _strides_fit(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if strides[3] != 1 or min(shape) == 0:
        return False
    outer = [stride * itemsize for size, stride in zip(shape[:3], strides[:3], strict=True) if size > 1]
    return all(0 < stride < 1 << 40 and stride % 16 == 0 for stride in outer)


def make_descriptor(x: Tensor, block: int, width: int) -> TensorDescriptor:
    """A descriptor of blocks of `block` rows and `width` columns of a head; columns beyond the tensor read as 0."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.__dict__.update(_blank_descriptor(x.shape, x.stride(), x.dtype, block, width).__dict__, base=x)
    return descriptor


@lru_cache(maxsize=4096)
def _blank_descriptor(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, block: int, width: int
) -> TensorDescriptor:
    """A descriptor without a tensor, checked once for its geometry: its checks cost 3 us a descriptor on the host."""
    steps, below = list(strides), shape[3]
    for dim in (2, 1, 0):  # a dimension of one element may have any stride in torch, but not in the copy engine
        if shape[dim] == 1:
            steps[dim] = -(-below * dtype.itemsize // 16) * 16 // dtype.itemsize
        below = max(below, steps[dim] * shape[dim])
    return TensorDescriptor(torch.empty(0, dtype=dtype, device="meta"), list(shape), steps, [1, 1, block, width])


def clamp(tiles: Sequence[tuple[int, int, int, int, int | None, int | None]]) -> tuple[IntTile, ...]:
    """Tiles with every bound clamped to what their rectangle can reach, so that all of them are int32."""
    clamped = []
    for q_begin, q_end, k_begin, k_end, lo, hi in tiles:
        least, most = -(k_end - k_begin), q_end - q_begin
        clamped.append(
            (
                q_begin,
                q_end,
                k_begin,
                k_end,
                least if lo is None else max(lo, least),
                most if hi is None else min(hi, most),
            )
        )
    return tuple(clamped)
