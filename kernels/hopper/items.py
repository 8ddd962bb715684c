"""Which rows and keys a program of the sm_90 kernels visits, in which order: device functions, plain int32 arithmetic.

An item is a block of query rows of one head. A program takes one item a round. `sizes` is (items, rounds, blocks,
backwards, heads, groups, together, all_heads): heads come in lots of `together`, within a lot block by block over its
heads. A tile is (q_begin, q_end, k_begin, k_end, lo, hi), as in `ringattn.kernels.tiles`; `C` a config of
`ringattn.kernels.hopper.config`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def number_of(round):
    """This program's item in a round: forth in even rounds, back in odd ones, which evens out falling work."""
    programs = gl.num_programs(0)
    lane = gl.program_id(0)
    return round * programs + gl.where(round % 2 == 0, lane, programs - 1 - lane)


@gluon.jit
def rounds_of(sizes):
    """How many items this program has."""
    return sizes[1] - gl.where(number_of(sizes[1] - 1) < sizes[0], 0, 1)


@gluon.jit
def item_of(round, sizes):
    """(batch, head, kv_head, block) of this program's item in a round."""
    items, rounds, blocks, backwards, heads, groups, together, all_heads = sizes
    number = number_of(round)
    lot = number // (together * blocks)
    here = gl.minimum(together, all_heads - lot * together)
    rest = number - lot * together * blocks
    block = rest // here
    index = lot * together + rest - block * here
    batch = index // heads
    head = index - batch * heads
    return batch, head, head // groups, gl.where(backwards != 0, blocks - 1 - block, block)


@gluon.jit
def entries_of(block, table, tile, C: gl.constexpr):
    """(first row, first entry, end of entries) of a block of rows."""
    if C.value.single:
        return tile[0] + block * C.value.block_q, 0, 1
    else:
        return gl.load(table + 3 * block), gl.load(table + 3 * block + 1), gl.load(table + 3 * block + 2)


@gluon.jit
def tile_of(entry, table, tile, blocks, C: gl.constexpr):
    """The tile of an entry of the table, or the only one."""
    if C.value.single:
        return tile
    else:
        at = table + 3 * blocks + entry * 6
        return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4), gl.load(at + 5)


@gluon.jit
def key_blocks(row, tile, C: gl.constexpr):
    """How rows from `row` on meet the keys of a tile: (first key, blocks, first full block, full blocks).

    Every row sees block i iff it begins at or after key a_last - hi and ends at or before key a_first - lo. There is at
    least one block: where no row sees a key, all of it is hidden.
    """
    q_begin, q_end, k_begin, k_end, lo, hi = tile
    rows, keys, a0 = q_end - q_begin, k_end - k_begin, row - q_begin
    a_first = gl.maximum(a0, 0)
    a_last = gl.minimum(a0 + C.value.block_q, rows) - 1
    first = gl.maximum(a_first - hi, 0)
    end = gl.minimum(keys, a_last - lo + 1)
    blocks = gl.maximum(gl.cdiv(end - first, C.value.block_k), 1)
    full_from = gl.minimum(gl.cdiv(gl.maximum(a_last - hi - first, 0), C.value.block_k), blocks)
    full_end = gl.maximum(gl.minimum(keys, a_first - lo + 1) - first, 0) // C.value.block_k
    full = gl.maximum(full_end - full_from, 0)
    if not C.value.single:
        full = gl.where((a0 >= 0) & (a0 + C.value.block_q <= rows), full, 0)
    return first, blocks, full_from, full


@gluon.jit
def block_at(step, span):
    """The block that is taken in a step: those with a mask from the right, then the others from the right."""
    first, blocks, full_from, full = span
    right = blocks - 1 - step
    masked = gl.where(right < full_from + full, right - full, right)
    return gl.where(step < blocks - full, masked, full_from + blocks - 1 - step)


@gluon.jit
def limits_of(row, tile, span, C: gl.constexpr):
    """Of each of 64 rows the first key that it sees, counted from the first one visited, and how many it sees."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.value.block_k, 16])
    q_begin, q_end, k_begin, k_end, lo, hi = tile
    a = row - q_begin + gl.arange(0, 64, gl.SliceLayout(1, layout))
    least = gl.maximum(a - hi, 0)
    count = gl.maximum(gl.minimum(a - lo, k_end - k_begin - 1) - least + 1, 0)
    if not C.value.single:
        count = gl.where((a >= 0) & (a < q_end - q_begin), count, 0)
    return least - span[0], count
