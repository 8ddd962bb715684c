"""Which layout suits packed documents: how even the work is, and how many keys have to move, for each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringattn.layout import LAYOUTS, document_lengths
from ringattn.mask import Band
from ringattn.plan import key_rows, make_plan

EVEN = 1.1
"""A layout whose busiest rank has at most this much of the mean work counts as even; of those, the fewest moves win."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one layout.

    Attributes:
        layout: its name.
        work: the busiest rank's (query, key) pairs over the mean.
        moved: share of all keys of other ranks that have to reach a rank, mean over ranks.
        tiles: most tiles that a rank computes on one block.
    """

    layout: str
    work: float
    moved: float
    tiles: int


def read_documents(path: Path) -> tuple[int, ...]:
    """The lengths in a file: whole numbers apart by white space or commas, lengths or their running sums from 0 on."""
    words = path.read_text().replace(",", " ").split()
    if not all(word.isdigit() for word in words):
        wrong = next(word for word in words if not word.isdigit())
        raise ValueError(f"{path.name}: {wrong!r} is no whole number")
    return document_lengths([int(word) for word in words])


def figures(layout: str, mask: Band, lengths: tuple[int, ...], world: int) -> Figures:
    """Measure a layout on its plans.

    Example:
        >>> figures("zigzag", Band(lo=0), (64,), 4).work
        1.0
    """
    work, moved, tiles = [], 0, 0
    for rank in range(world):
        plan = make_plan(layout, mask, lengths, world, rank)
        work.append(sum(tile.pairs for block in plan for tile in block))
        moved += sum(end - begin for owner, block in enumerate(plan) if owner != rank for begin, end in key_rows(block))
        tiles = max(tiles, *(len(block) for block in plan))
    others = (world - 1) * sum(lengths)
    return Figures(
        layout, max(work) * world / sum(work) if sum(work) else 1.0, moved / others if others else 0.0, tiles
    )


def recommend(candidates: Sequence[Figures]) -> Figures:
    """Of the even layouts the one that moves least, of uneven ones the most even."""
    return min(
        candidates,
        key=lambda found: (found.work > EVEN and found.work, found.moved if found.work <= EVEN else math.inf),
    )


def describe_packs(mask: Band, lengths: tuple[int, ...], world: int) -> list[str]:
    """A line a layout, with the one that is recommended."""
    candidates = [figures(layout, mask, lengths, world) for layout in LAYOUTS]
    best = recommend(candidates)
    lines = [f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens, {mask}, {world} ranks"]
    lines.append(f"{'layout':<14}{'work max/mean':>14}{'keys moved':>12}{'tiles a block':>15}")
    for found in candidates:
        mark = "  recommended" if found is best else ""
        lines.append(f"{found.layout:<14}{found.work:>14.3f}{found.moved:>12.1%}{found.tiles:>15}{mark}")
    return lines
