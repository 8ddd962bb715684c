"""Every layout holds each position exactly once, for any length over any world."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringattn.layout import LAYOUTS, make_shards, shard_positions, shard_sizes

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=5).map(tuple)


@given(st.sampled_from(list(LAYOUTS)), LENGTHS, st.integers(1, 9))
def test_each_position_once(layout, lengths, world):
    shards = make_shards(layout, lengths, world)
    assert sorted(p for shard in shards for p in shard_positions(shard)) == list(range(sum(lengths)))
    assert [len(shard_positions(shard)) for shard in shards] == list(shard_sizes(layout, lengths, world))


@given(st.sampled_from(list(LAYOUTS)), LENGTHS, st.integers(1, 9))
def test_spans_stay_inside_their_document_and_follow_one_another(layout, lengths, world):
    edges = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    for shard in make_shards(layout, lengths, world):
        offset = 0
        for span in shard:
            assert span.size > 0 and span.offset == offset
            assert edges[span.document] <= span.start <= span.last < edges[span.document + 1]
            offset += span.size


@given(st.sampled_from(list(LAYOUTS)), st.integers(0, 50), st.integers(1, 9))
def test_shards_are_even_to_a_few_tokens(layout, length, world):
    sizes = shard_sizes(layout, (length,), world)
    assert max(sizes) - min(sizes) <= (2 if layout == "zigzag" else 1)


def test_known_shards():
    assert [shard_positions(s) for s in make_shards("contiguous", (5,), 2)] == [[0, 1, 2], [3, 4]]
    assert [shard_positions(s) for s in make_shards("zigzag", (8,), 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [shard_positions(s) for s in make_shards("striped", (5,), 2)] == [[0, 2, 4], [1, 3]]
    assert make_shards("headtail", (8,), 2) == make_shards("zigzag", (8,), 2)
    assert make_shards("zigzag", (1,), 3)[1:] == ((), ())


@pytest.mark.parametrize(
    ("layout", "lengths", "world", "words"),
    [
        ("spiral", (8,), 2, "'spiral'.*contiguous, zigzag, striped, headtail"),
        (None, (8,), 2, "None"),
        ("zigzag", (8,), 0, "at least 1, got 0"),
        ("zigzag", (8, -1), 2, "-1"),
        ("zigzag", (), 2, "one or more"),
    ],
)
def test_bad_input_is_named(layout, lengths, world, words):
    with pytest.raises(ValueError, match=words):
        make_shards(layout, lengths, world)
