"""A plan computes exactly the pairs that the mask allows, in as few tiles as possible."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.layout import LAYOUTS, make_shards, shard_positions
from ringattn.mask import CAUSAL, FULL, Band, prefix_lm, window
from ringattn.plan import Tile, key_rows, make_plan, pick_rows, sees

BANDS = st.one_of(
    st.builds(prefix_lm, st.integers(0, 30)),
    st.builds(lambda width, prefix: Band(0, width, prefix), st.integers(0, 9), st.integers(1, 30)),
    st.sampled_from([FULL, CAUSAL, window(0)]),
    st.builds(window, st.integers(-1, 12), st.integers(-1, 12)),
    st.tuples(st.integers(-12, 12), st.integers(-12, 12)).map(lambda pair: Band(min(pair), max(pair))),
)
LENGTHS = st.lists(st.integers(0, 10), min_size=1, max_size=4).map(tuple)


def pairs_of(tile: Tile) -> list[tuple[int, int]]:
    return [
        (tile.q_begin + a, tile.k_begin + b)
        for a in range(tile.q_end - tile.q_begin)
        for b in range(tile.k_end - tile.k_begin)
        if tile.band is None or tile.band.sees(a, b)
    ]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(LAYOUTS)), BANDS, LENGTHS, st.integers(1, 6))
def test_each_allowed_pair_once_and_no_other(layout, band, lengths, world):
    shards = make_shards(layout, lengths, world)
    documents = [[span.document for span in shard for _ in range(span.size)] for shard in shards]
    positions = [shard_positions(shard) for shard in shards]
    for rank in range(world):
        for source, tiles in enumerate(make_plan(layout, band, lengths, world, rank)):
            computed = [pair for tile in tiles for pair in pairs_of(tile)]
            allowed = {
                (a, b)
                for a, i in enumerate(positions[rank])
                for b, j in enumerate(positions[source])
                if band.sees(i, j) and documents[rank][a] == documents[source][b]
            }
            assert len(computed) == len(set(computed)) and set(computed) == allowed
            assert any(sees(q, k, band) for q in shards[rank] for k in shards[source]) == bool(allowed)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(LAYOUTS)), BANDS, LENGTHS, st.integers(1, 6))
def test_tiles_are_tight_and_know_their_work_and_place(layout, band, lengths, world):
    positions = [shard_positions(shard) for shard in make_shards(layout, lengths, world)]
    for rank in range(world):
        for source, tiles in enumerate(make_plan(layout, band, lengths, world, rank)):
            assert list(tiles) == sorted(tiles, key=lambda tile: (tile.q_begin, tile.k_begin))
            for tile in tiles:
                pairs = pairs_of(tile)
                rows, keys = {a for a, _ in pairs}, {b for _, b in pairs}
                assert (min(rows), max(rows) + 1) == (tile.q_begin, tile.q_end)
                assert (min(keys), max(keys) + 1) == (tile.k_begin, tile.k_end)
                assert len(pairs) == tile.pairs
                assert tile.q_start == positions[rank][tile.q_begin]
                assert tile.k_start == positions[source][tile.k_begin]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "per_document"])
@pytest.mark.parametrize("mask", [FULL, CAUSAL])
@pytest.mark.parametrize("length", [64, 61, 5])
def test_a_visited_block_is_one_tile(layout, mask, length):
    for world in (1, 2, 3, 4, 8):
        for rank in range(world):
            for tiles in make_plan(layout, mask, (length,), world, rank):
                assert len(tiles) <= 1


def test_a_tile_without_hidden_pairs_has_no_band():
    tile = make_plan("contiguous", CAUSAL, (8,), 2, 1)[0][0]
    assert tile.band is None and (tile.q, tile.k) == (slice(0, 4), slice(0, 4)) and tile.pairs == 16


def test_plans_are_hashable_and_cached():
    first, again = (make_plan("zigzag", CAUSAL, (64,), 4, 1) for _ in range(2))
    assert first is again and hash(first) == hash(again)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(LAYOUTS)), BANDS, LENGTHS, st.integers(1, 6))
def test_tiles_on_the_rows_that_they_read(layout, band, lengths, world):
    for rank in range(world):
        for tiles in make_plan(layout, band, lengths, world, rank):
            rows = key_rows(tiles)
            there = [row for begin, end in rows for row in range(begin, end)]
            assert all(end < begin for (_, end), (begin, _) in zip(rows, rows[1:], strict=False))
            assert set(there) == {b for tile in tiles for b in range(tile.k_begin, tile.k_end)}
            moved = sorted((a, there[b]) for tile in pick_rows(tiles, rows) for a, b in pairs_of(tile))
            assert moved == sorted(pair for tile in tiles for pair in pairs_of(tile))
