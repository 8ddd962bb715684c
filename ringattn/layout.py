"""A layout says which global positions each rank holds, as a few spans of plain ints.

Everything that depends on how a sequence is sharded (plans, positions, shards of tensors, buffer sizes) is
derived from these spans, so a new layout is one function in this file and one entry in `LAYOUTS`.

Every function takes the lengths of the documents that make up the sequence (one length when nothing is packed) and
the world size. Lengths need not divide by anything: the first ranks (or chunks) are one token longer, as in
`torch.tensor_split`, and a rank may hold nothing.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """`size` tokens of one document at `start, start + step, ...`, held at `offset` of a rank's shard.

    Attributes:
        offset: index of the first token within the rank's shard.
        start: its global position, counted over all documents.
        size: number of tokens, at least 1.
        step: distance between neighbouring tokens in global positions.
        document: index of the document that all of them belong to.
    """

    offset: int
    start: int
    size: int
    step: int = 1
    document: int = 0

    @property
    def last(self) -> int:
        """Global position of the last token."""
        return self.start + (self.size - 1) * self.step


Shard = tuple[Span, ...]
"""The spans of one rank, in the order in which its tensors hold them."""

Layout = Callable[[tuple[int, ...], int], tuple[Shard, ...]]


def contiguous(lengths: tuple[int, ...], world: int) -> tuple[Shard, ...]:
    """Rank r holds the r-th of `world` consecutive pieces."""
    return _shards([[piece] for piece in _pieces(sum(lengths), world)], lengths)


def zigzag(lengths: tuple[int, ...], world: int) -> tuple[Shard, ...]:
    """Rank r holds pieces r and 2 * world - 1 - r of 2 * world, so that causal work is even (also called head-tail).

    Source: zhuzilin/ring-flash-attention issue 2; Megatron-LM's context parallelism uses the same order.
    """
    pieces = _pieces(sum(lengths), 2 * world)
    return _shards([[pieces[r], pieces[2 * world - 1 - r]] for r in range(world)], lengths)


def striped(lengths: tuple[int, ...], world: int) -> tuple[Shard, ...]:
    """Rank r holds positions r, r + world, r + 2 * world, ...

    Source: Brandon et al., Striped Attention, 2023 (arXiv 2311.09431).
    """
    total = sum(lengths)
    return _shards([[(r, total, world)] for r in range(world)], lengths)


def per_document(lengths: tuple[int, ...], world: int) -> tuple[Shard, ...]:
    """Each document is dealt in zigzag order, from a rank that moves on with every document.

    All ranks share in all documents, so causal work is even, but almost all keys have to move.
    """
    starts = [0, *accumulate(lengths)]
    ranges: list[list[tuple[int, int, int]]] = [[] for _ in range(world)]
    for document, length in enumerate(lengths):
        pieces = [(starts[document] + a, starts[document] + b, step) for a, b, step in _pieces(length, 2 * world)]
        for place in range(world):
            ranges[(place + document) % world] += [pieces[place], pieces[2 * world - 1 - place]]
    return _shards(ranges, lengths)


CHUNK, LEAST_CHUNKS = 1024, 8
"""The balanced layout deals chunks of about 1024 tokens, and at least 8 of them to a rank."""

WHOLE = 1.02
"""A document is kept on one rank where that rank then has at most 1.02 times the mean work."""


def balanced(lengths: tuple[int, ...], world: int) -> tuple[Shard, ...]:
    """Chunks dealt by causal work, the same number to each rank; documents that fit stay whole.

    Largest first, each to the rank with the least work that has room (longest processing time first; Graham, 1969).
    Work is as even as in `per_document`, while documents shorter than a shard need not move.
    """
    total = sum(lengths)
    share = max(1, min(total // world, max(LEAST_CHUNKS, -(-total // (CHUNK * world)))))
    pieces = _pieces(total, share * world)
    work, home = _piece_work(pieces, lengths)
    together: dict[int, list[int]] = {}
    for piece, document in enumerate(home):
        together.setdefault(document, []).append(piece)
    waiting = [(-sum(work[piece] for piece in group), group) for group in together.values()]
    heapify(waiting)
    loads = [(0, rank) for rank in range(world)]
    dealt: list[list[int]] = [[] for _ in range(world)]
    while waiting:
        negative, group = heappop(waiting)
        passed = []
        while loads and share - len(dealt[loads[0][1]]) < len(group):
            passed.append(heappop(loads))
        if not loads or (len(group) > 1 and (loads[0][0] - negative) * world > WHOLE * sum(work)):
            for piece in group:
                heappush(waiting, (-work[piece], [piece]))
        else:
            load, rank = heappop(loads)
            dealt[rank] += group
            passed.append((load - negative, rank))
        for entry in passed:
            if len(dealt[entry[1]]) < share:
                heappush(loads, entry)
    return _shards([[pieces[piece] for piece in sorted(own)] for own in dealt], lengths)


def _piece_work(pieces: list[tuple[int, int, int]], lengths: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Causal (query, key) pairs of each piece, and the document of its first token."""
    ends = list(accumulate(lengths))
    work, home = [], []
    for begin, end, _ in pieces:
        first = document = bisect_right(ends, begin)
        pairs = 0
        while begin < end:
            start, stop = ends[document] - lengths[document], min(end, ends[document])
            pairs += (stop - begin) * (begin + stop + 1 - 2 * start) // 2
            begin, document = stop, document + 1
        work.append(pairs)
        home.append(first)
    return work, home


LAYOUTS: dict[str, Layout] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
    "per_document": per_document,
    "balanced": balanced,
}
"""Every layout by name."""

ALIASES = {"headtail": "zigzag"}
"""Other names that the field uses for a layout."""


def layout_name(name: str) -> str:
    """The canonical name of a layout; raises ValueError with the choices for an unknown one."""
    canonical = ALIASES.get(name, name) if isinstance(name, str) else None
    if canonical not in LAYOUTS:
        raise ValueError(f"unknown layout {name!r}; choose one of {', '.join([*LAYOUTS, *ALIASES])}")
    return canonical


@lru_cache(maxsize=1024)
def make_shards(layout: str, lengths: tuple[int, ...], world: int, inner: int = 1) -> tuple[Shard, ...]:
    """The spans of every rank.

    Args:
        layout: a name of `LAYOUTS` or an alias.
        lengths: tokens of each document, in order; `(seq_len,)` when nothing is packed.
        world: number of ranks.
        inner: each "rank" stands for so many neighbours, who hold their shards together, sorted by position.

    Returns:
        One tuple of `Span` a rank; together they hold each global position exactly once.

    Raises:
        ValueError: unknown layout, no document, a negative length or a world below 1.

    Example:
        >>> [[(s.start, s.size) for s in shard] for shard in make_shards("zigzag", (8,), 2)]
        [[(0, 2), (6, 2)], [(2, 2), (4, 2)]]
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}")
    if not lengths or min(lengths) < 0:
        raise ValueError(f"lengths must be one or more non-negative document lengths, got {lengths}")
    shards = LAYOUTS[layout_name(layout)](lengths, world * inner)
    return shards if inner == 1 else tuple(join_shards(shards[i : i + inner]) for i in range(0, len(shards), inner))


def document_lengths(documents: Any) -> tuple[int, ...]:
    """The lengths of packed documents.

    Args:
        documents: lengths, or their running sums from 0 on (`cu_seqlens`), as ints in a sequence or a CPU tensor.

    Raises:
        ValueError: anything else; a document without tokens; a CUDA tensor, which could not be read without waiting.

    Example:
        >>> document_lengths([3, 5]), document_lengths([0, 3, 8])
        ((3, 5), (3, 5))
    """
    if getattr(documents, "is_cuda", False):
        raise ValueError("documents must be on the CPU: a CUDA tensor would make every call wait for the device")
    given = documents.tolist() if hasattr(documents, "tolist") else documents
    if not isinstance(given, list | tuple) or not given or not all(type(entry) is int for entry in given):
        raise ValueError(f"documents must be one or more lengths, or cu_seqlens, as ints; got {documents!r}")
    lengths = [after - before for before, after in zip(given, given[1:], strict=False)] if given[0] == 0 else given
    if not lengths or min(lengths) < 1:
        raise ValueError(f"each document must have at least one token, got lengths {list(lengths)}")
    return tuple(lengths)


def shard_size(shard: Shard) -> int:
    """Number of tokens in a rank's shard."""
    return sum(span.size for span in shard)


def shard_sizes(layout: str, lengths: tuple[int, ...], world: int, inner: int = 1) -> tuple[int, ...]:
    """Number of tokens that each rank holds; arguments as in `make_shards`."""
    return tuple(shard_size(shard) for shard in make_shards(layout, lengths, world, inner))


def join_shards(shards: tuple[Shard, ...]) -> Shard:
    """All spans of some ranks as one shard, sorted by position."""
    spans, offset = [], 0
    for span in sorted((span for shard in shards for span in shard), key=lambda span: span.start):
        spans.append(replace(span, offset=offset))
        offset += span.size
    return tuple(spans)


def shard_positions(shard: Shard) -> list[int]:
    """Global positions of a rank's tokens, in the order in which its tensors hold them."""
    return [position for span in shard for position in range(span.start, span.last + 1, span.step)]


def _pieces(total: int, count: int) -> list[tuple[int, int, int]]:
    """`count` consecutive ranges `(begin, end, step)` of `total` positions; the first ones are one longer."""
    size, longer = divmod(total, count)
    edges = [piece * size + min(piece, longer) for piece in range(count + 1)]
    return [(begin, end, 1) for begin, end in zip(edges, edges[1:], strict=False)]


def _shards(ranges: list[list[tuple[int, int, int]]], lengths: tuple[int, ...]) -> tuple[Shard, ...]:
    """Cut each rank's ranges of positions at document ends and number the tokens locally."""
    ends = list(accumulate(lengths))
    return tuple(_shard(rank_ranges, ends) for rank_ranges in ranges)


def _shard(ranges: list[tuple[int, int, int]], ends: list[int]) -> Shard:
    spans: list[Span] = []
    offset = 0
    for position, end, step in ranges:
        while position < end:
            document = bisect_right(ends, position)
            size = -(-(min(end, ends[document]) - position) // step)
            spans.append(Span(offset, position, size, step, document))
            offset += size
            position += size * step
    return tuple(spans)
