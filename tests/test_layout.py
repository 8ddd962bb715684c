"""Every layout holds each position exactly once, for any length over any world."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.layout import (
    CHUNK,
    LAYOUTS,
    LEAST_CHUNKS,
    document_lengths,
    make_shards,
    shard_positions,
    shard_sizes,
)
from ringattn.mask import CAUSAL
from ringattn.plan import key_rows, make_plan

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


@given(st.sampled_from(["contiguous", "zigzag", "striped", "per_document"]), st.integers(0, 50), st.integers(1, 9))
def test_shards_are_even_to_a_few_tokens(layout, length, world):
    sizes = shard_sizes(layout, (length,), world)
    assert max(sizes) - min(sizes) <= (2 if layout == "zigzag" else 1)


def lognormal_pack(tokens: int, seed: int) -> tuple[int, ...]:
    """Lengths as in a real mix of documents: log-normal, mean about 4k."""
    draw, lengths = random.Random(seed), []
    while sum(lengths) < tokens:
        lengths.append(min(max(1, int(draw.lognormvariate(7.6, 1.2))), tokens // 4, tokens - sum(lengths)))
    return tuple(lengths)


def figures(layout: str, lengths: tuple[int, ...], world: int) -> tuple[float, float]:
    """Largest work over the mean, and the share of remote keys that have to move, under a causal mask."""
    plans = [make_plan(layout, CAUSAL, lengths, world, rank) for rank in range(world)]
    work = [sum(tile.pairs for tiles in plan for tile in tiles) for plan in plans]
    moved = [
        end - begin
        for rank, plan in enumerate(plans)
        for tiles in plan[:rank] + plan[rank + 1 :]
        for begin, end in key_rows(tiles)
    ]
    return max(work) * world / sum(work), sum(moved) / ((world - 1) * sum(lengths))


@pytest.mark.parametrize("world", [4, 8, 16])
def test_balanced_is_even_and_moves_less(world):
    lengths = lognormal_pack(world * 8192, seed=world)
    work, moved = figures("balanced", lengths, world)
    assert work < 1.1 < figures("zigzag", lengths, world)[0]
    assert moved < 0.8 * figures("per_document", lengths, world)[1]
    assert figures("per_document", lengths, world)[0] < 1.01


@given(LENGTHS, st.integers(1, 9))
def test_balanced_deals_equal_counts_of_chunks(lengths, world):
    """Shards differ by at most one token a chunk."""
    sizes = shard_sizes("balanced", lengths, world)
    assert max(sizes) - min(sizes) <= max(LEAST_CHUNKS, -(-sum(lengths) // (CHUNK * world)))


def test_document_lengths():
    for given_form in ((3, 5), [3, 5], [0, 3, 8], torch.tensor([3, 5]), torch.tensor([0, 3, 8], dtype=torch.int32)):
        assert document_lengths(given_form) == (3, 5)


@pytest.mark.parametrize(
    "documents", [(), (3, 0), (3, -1), [0], [0, 3, 3], (1.5,), 7, "ab", torch.tensor([[3]]), torch.tensor([1.0])]
)
def test_bad_documents_are_named(documents):
    with pytest.raises(ValueError, match="document"):
        document_lengths(documents)


def test_known_shards():
    assert [shard_positions(s) for s in make_shards("contiguous", (5,), 2)] == [[0, 1, 2], [3, 4]]
    assert [shard_positions(s) for s in make_shards("zigzag", (8,), 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [shard_positions(s) for s in make_shards("striped", (5,), 2)] == [[0, 2, 4], [1, 3]]
    assert make_shards("headtail", (8,), 2) == make_shards("zigzag", (8,), 2)
    assert make_shards("zigzag", (1,), 3)[1:] == ((), ())


@pytest.mark.parametrize(
    ("layout", "lengths", "world", "words"),
    [
        ("spiral", (8,), 2, "'spiral'.*contiguous, zigzag, striped, per_document, balanced, headtail"),
        (None, (8,), 2, "None"),
        ("zigzag", (8,), 0, "at least 1, got 0"),
        ("zigzag", (8, -1), 2, "-1"),
        ("zigzag", (), 2, "one or more"),
    ],
)
def test_bad_input_is_named(layout, lengths, world, words):
    with pytest.raises(ValueError, match=words):
        make_shards(layout, lengths, world)
