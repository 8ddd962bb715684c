"""A layout says which global positions each rank holds, as a few spans of plain ints.

Everything that depends on how a sequence is sharded (plans, positions, shards of tensors, buffer sizes) is
derived from these spans, so a new layout is one function in this file and one entry in `LAYOUTS`.

Every function takes the lengths of the documents that make up the sequence (one length when nothing is packed) and
the world size. Lengths need not divide by anything: the first ranks (or chunks) are one token longer, as in
`torch.tensor_split`, and a rank may hold nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate


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


LAYOUTS: dict[str, Layout] = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
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
def make_shards(layout: str, lengths: tuple[int, ...], world: int) -> tuple[Shard, ...]:
    """The spans of every rank.

    Args:
        layout: a name of `LAYOUTS` or an alias.
        lengths: tokens of each document, in order; `(seq_len,)` when nothing is packed.
        world: number of ranks.

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
    return LAYOUTS[layout_name(layout)](lengths, world)


def shard_size(shard: Shard) -> int:
    """Number of tokens in a rank's shard."""
    return sum(span.size for span in shard)


def shard_sizes(layout: str, lengths: tuple[int, ...], world: int) -> tuple[int, ...]:
    """Number of tokens that each rank holds."""
    return tuple(shard_size(shard) for shard in make_shards(layout, lengths, world))


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
        for document, document_end in enumerate(ends):
            stop = min(end, document_end)
            if position < stop:
                size = -(-(stop - position) // step)
                spans.append(Span(offset, position, size, step, document))
                offset += size
                position += size * step
    return tuple(spans)
