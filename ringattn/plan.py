"""A plan is, for each source of keys, the tiles that one rank computes on that source's block: plain ints, cached.

Because a layout is spans of positions and a mask is a band of lags, every layout x mask pair becomes the same local
problem: attention of a slice of q rows over a slice of k rows under a band of *local* indices. Tiles that one rectangle
with one band covers exactly are joined, so that under a causal mask a visited block costs one kernel call in every
layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ringattn.layout import Shard, Span, make_shards
from ringattn.mask import OPEN, Band


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows `q_begin..q_end` of q against rows `k_begin..k_end` of a block of keys, under a band of local indices.

    With a and b counted from q_begin and k_begin, row a sees key b iff `band is None or band.lo <= a - b <= band.hi`.
    Every row and every key of the rectangle takes part in at least one such pair.

    Attributes:
        q_begin, q_end: rows of the rank's q, end excluded.
        k_begin, k_end: rows of the source's k and v, end excluded.
        band: the local band; None when every pair is seen.
        q_start, k_start: global positions of row q_begin and key k_begin.
        step: distance between neighbouring rows in global positions, where the tile was not joined over a gap.
    """

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    band: Band | None
    q_start: int
    k_start: int
    step: int

    @property
    def q(self) -> slice:
        return slice(self.q_begin, self.q_end)

    @property
    def k(self) -> slice:
        return slice(self.k_begin, self.k_end)

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs that are seen: the tile's work."""
        rows, keys = self.q_end - self.q_begin, self.k_end - self.k_begin
        if self.band is None:
            return rows * keys
        return _pairs_from(rows, keys, self.band.lo) - _pairs_from(rows, keys, self.band.hi + 1)


Tiles = tuple[Tile, ...]
Plan = tuple[Tiles, ...]
"""The tiles of one rank, indexed by the rank that owns the keys; an empty entry is a block that it need not see."""


@lru_cache(maxsize=4096)
def make_plan(layout: str, band: Band, lengths: tuple[int, ...], world: int, rank: int, inner: int = 1) -> Plan:
    """The tiles that a rank computes, by source of keys.

    Args:
        layout: name of a layout.
        band: the mask, in global positions.
        lengths: tokens of each document.
        world: number of ranks.
        rank: whose queries.
        inner: as in `ringattn.layout.make_shards`.

    Returns:
        A tuple of `world` tuples of tiles, each ordered by rows.

    Example:
        >>> [len(tiles) for tiles in make_plan("zigzag", Band(lo=0), (16,), 4, rank=1)]
        [1, 1, 1, 1]
    """
    shards = _documents_of_shards(layout, lengths, world, inner)
    return tuple(_tiles(shards[rank], keys, band) for keys in shards)


def wanted_rows(
    layout: str, band: Band, lengths: tuple[int, ...], world: int, rank: int, inner: int = 1
) -> tuple["Rows", ...]:
    """The rows of this rank's keys that each rank needs; arguments as in `make_plan`."""
    shards = _documents_of_shards(layout, lengths, world, inner)
    return tuple(key_rows(_tiles(queries, shards[rank], band)) for queries in shards)


def make_tiles(queries: Shard, keys: Shard, band: Band) -> Tiles:
    """The tiles of one shard of queries on one shard of keys, joined where possible, ordered by rows."""
    return _tiles(_documents(queries), _documents(keys), band)


Documents = dict[int, list[Span]]
"""The spans of a shard by document."""


def _documents(shard: Shard) -> Documents:
    spans: Documents = {}
    for span in shard:
        spans.setdefault(span.document, []).append(span)
    return spans


@lru_cache(maxsize=64)
def _documents_of_shards(layout: str, lengths: tuple[int, ...], world: int, inner: int) -> tuple[Documents, ...]:
    return tuple(_documents(shard) for shard in make_shards(layout, lengths, world, inner))


def _tiles(queries: Documents, keys: Documents, band: Band) -> Tiles:
    tiles = [
        tile
        for document in queries.keys() & keys.keys()
        for part, part_band in _by_prefix(keys[document], band)
        for tile in _cover(queries[document], part, part_band)
    ]
    return in_order(tiles)


def sees(q: Span, k: Span, band: Band) -> bool:
    """Whether any query of one span sees any key of the other."""
    return q.document == k.document and any(
        _visible(q, part, part_band) for parts, part_band in _by_prefix((k,), band) for part in parts
    )


Rows = tuple[tuple[int, int], ...]
"""Ranges `(begin, end)` of rows of a block, ascending and apart."""


def key_rows(tiles: Tiles) -> Rows:
    """The rows of a block of keys that its tiles read, in as few ranges as possible."""
    rows: list[tuple[int, int]] = []
    for begin, end in sorted((tile.k_begin, tile.k_end) for tile in tiles):
        if rows and begin <= rows[-1][1]:
            rows[-1] = (rows[-1][0], max(rows[-1][1], end))
        else:
            rows.append((begin, end))
    return tuple(rows)


def pick_rows(tiles: Tiles, rows: Rows) -> Tiles:
    """The tiles on a block of which only these rows are there, one range after the other."""
    picked: list[Tile] = []
    offset = 0
    for begin, end in rows:
        inside = [tile for tile in tiles if begin <= tile.k_begin and tile.k_end <= end]
        picked += [shift_keys(tile, offset - begin) for tile in inside]
        offset += end - begin
    assert len(picked) == len(tiles), "a tile reads rows that are not there"
    return in_order(picked)


def shift_keys(tile: Tile, rows: int) -> Tile:
    """The tile on keys that lie `rows` rows later."""
    return replace(tile, k_begin=tile.k_begin + rows, k_end=tile.k_end + rows)


def in_order(tiles: Sequence[Tile]) -> Tiles:
    """The tiles ordered by rows of q, then of keys, as backends expect them."""
    return tuple(sorted(tiles, key=lambda tile: (tile.q_begin, tile.k_begin)))


def _by_prefix(keys: Sequence[Span], band: Band) -> list[tuple[Sequence[Span], Band]]:
    """Keys inside and beyond the band's prefix, each with the band that they are under."""
    if not band.prefix:
        return [(keys, band)]
    inside, beyond = [], []
    for span in keys:
        count = min(max(-(-(band.prefix - span.start) // span.step), 0), span.size)
        if count:
            inside.append(replace(span, size=count))
        if count < span.size:
            first = span.start + count * span.step
            beyond.append(replace(span, offset=span.offset + count, start=first, size=span.size - count))
    return [(inside, band.over_prefix()), (beyond, Band(band.lo, band.hi))]


def _visible(q: Span, k: Span, band: Band) -> bool:
    lo, hi = band.localize(q.start - k.start, _step(q, k))
    return lo <= hi and lo < q.size and hi > -k.size


def _step(q: Span, k: Span) -> int:
    """The common step of two spans; a single token fits any step."""
    if q.size == 1 or k.size == 1:
        return max(q.step if q.size > 1 else 1, k.step if k.size > 1 else 1)
    assert q.step == k.step, f"a layout must give spans of one step, got {q.step} and {k.step}"
    return q.step


def _cover(queries: Sequence[Span], keys: Sequence[Span], band: Band) -> list[Tile]:
    """Tiles that cover the visible pairs of these spans: one if it can be, else those of the halves."""
    queries = _strip([(q, any(_visible(q, k, band) for k in keys)) for q in queries])
    keys = _strip([(k, any(_visible(q, k, band) for q in queries)) for k in keys])
    if not queries:
        return []
    tile = _join(queries, keys, band)
    if tile is not None:
        return [tile]
    if len(queries) >= len(keys):
        middle = len(queries) // 2
        return _cover(queries[:middle], keys, band) + _cover(queries[middle:], keys, band)
    middle = len(keys) // 2
    return _cover(queries, keys[:middle], band) + _cover(queries, keys[middle:], band)


def _strip(spans: list[tuple[Span, bool]]) -> list[Span]:
    """The spans from the first to the last one that is wanted."""
    wanted = [index for index, (_, flag) in enumerate(spans) if flag]
    return [span for span, _ in spans[wanted[0] : wanted[-1] + 1]] if wanted else []


def _join(queries: Sequence[Span], keys: Sequence[Span], band: Band) -> Tile | None:
    """One tile with one local band over the rectangle of these spans, or None where no band says the same.

    Each pair of spans bounds the two sides of the joint band: a side that cuts the pair fixes it, a side that does not
    leaves an interval, and a hidden pair needs one side beyond it.
    """
    row0, key0 = queries[0].offset, keys[0].offset
    lo_least, lo_most, hi_least, hi_most = -OPEN, OPEN, -OPEN, OPEN
    for q in queries:
        for k in keys:
            shift = (q.offset - row0) - (k.offset - key0)
            lo, hi = band.localize(q.start - k.start, _step(q, k))
            if lo > hi:
                return None
            if lo >= q.size:
                lo_least = max(lo_least, shift + q.size)
            elif hi <= -k.size:
                hi_most = min(hi_most, shift - k.size)
            else:
                lo_most = min(lo_most, shift + max(lo, 1 - k.size))
                hi_least = max(hi_least, shift + min(hi, q.size - 1))
                if lo > 1 - k.size:
                    lo_least = max(lo_least, shift + lo)
                if hi < q.size - 1:
                    hi_most = min(hi_most, shift + hi)
    if lo_least > lo_most or hi_least > hi_most:
        return None
    return _trimmed(queries, keys, lo_most, hi_least)


def _trimmed(queries: Sequence[Span], keys: Sequence[Span], lo: int, hi: int) -> Tile:
    """The smallest tile that holds every pair of the rectangle under the local band (lo, hi)."""
    row0, key0 = queries[0].offset, keys[0].offset
    rows = queries[-1].offset + queries[-1].size - row0
    count = keys[-1].offset + keys[-1].size - key0
    a0, a1 = max(0, lo), min(rows - 1, count - 1 + hi)
    b0, b1 = max(0, a0 - hi), min(count - 1, a1 - lo)
    lo, hi = lo - a0 + b0, hi - a0 + b0
    open_lo, open_hi = lo <= -(b1 - b0), hi >= a1 - a0
    band = None if open_lo and open_hi else Band(-OPEN if open_lo else lo, OPEN if open_hi else hi)
    return Tile(
        q_begin=row0 + a0,
        q_end=row0 + a1 + 1,
        k_begin=key0 + b0,
        k_end=key0 + b1 + 1,
        band=band,
        q_start=_position(queries, row0 + a0),
        k_start=_position(keys, key0 + b0),
        step=_step(queries[0], keys[0]),
    )


def _position(spans: Sequence[Span], offset: int) -> int:
    """Global position of a local row."""
    span = next(span for span in reversed(spans) if span.offset <= offset)
    return span.start + (offset - span.offset) * span.step


def _pairs_from(rows: int, keys: int, lag: int) -> int:
    """Number of pairs with `a - b >= lag`, for 0 <= a < rows and 0 <= b < keys."""
    lag = min(max(lag, 1 - keys), rows)
    first = max(lag, 0)  # rows below it see nothing
    growing = max(min(rows, keys - 1 + lag) - first, 0)  # rows that see a - lag + 1 keys
    full = rows - first - growing
    return growing * (2 * (first - lag + 1) + growing - 1) // 2 + full * keys
