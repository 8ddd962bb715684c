"""`ringattn plan`: a picture of who computes what at which step, how even that is, and the bytes that it sends.

Plain ints from the very plan and schedule that a run would use; no process is started and no tensor is made.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringattn import Band
from ringattn.launch.choose import Constants, Shape, candidates, draw, table, timeline
from ringattn.launch.options import DTYPES, add_sequence_options, make_parser
from ringattn.launch.packs import describe_packs, read_documents
from ringattn.launch.table import plain_lines
from ringattn.layout import Shard, Span, layout_name, make_shards, shard_sizes
from ringattn.mask import OPEN
from ringattn.plan import Plan, Tile, Tiles, make_plan
from ringattn.prove import Proof, prove
from ringattn.schedule import Schedule, Step, Transfer, Visit, make_schedule

ROWS, COLUMNS = 4, 8
"""Characters of a block's picture."""

WIDEST_PICTURE = 8
"""More ranks than this get one character a block."""

SHADES = ".+#"
"""Nothing of a part of a block is seen, some of it, all of it."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank does."""

    rank: int
    shard: Shard
    tiles: Plan
    schedule: Schedule

    @property
    def pairs(self) -> int:
        """(query, key) pairs that it computes."""
        return sum(tile.pairs for tiles in self.tiles for tile in tiles)

    @property
    def launches(self) -> int:
        """Kernel calls, forward: one for each visit that has something to see."""
        return sum(1 for step in self.schedule.forward for visit in step.visits if visit.tiles)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.rank is not None and not 0 <= options.rank < options.world:
        parser.error(f"rank must be in [0, {options.world}), got {options.rank}")
    try:
        options.lengths = (options.seq_len,) if options.documents is None else read_documents(options.documents)
    except (OSError, ValueError) as error:
        parser.error(f"--documents: {error}")
    options.seq_len = sum(options.lengths)
    for name in ("world", "seq_len", "kv_heads", "head_dim", "nodes", "gpus_per_node"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"{name} must be at least 1, got {getattr(options, name)}")
    if options.nodes is not None:
        return _choose(parser, options)
    for line in describe(options):
        print(line)
    return 0


def _choose(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Compare schedules for a machine of several nodes; 2 where none can run."""
    try:
        constants = Constants() if options.calibration is None else Constants.read(options.calibration)
    except (OSError, ValueError) as error:
        parser.error(f"--calibration: {error}")
    shape = Shape(
        nodes=options.nodes,
        cards=options.gpus_per_node,
        seq_len=options.seq_len,
        heads=options.heads or options.kv_heads,
        kv_heads=options.kv_heads,
        dim=options.head_dim,
        itemsize=DTYPES[options.dtype].itemsize,
        layout=layout_name(options.layout),
        band=options.mask,
    )
    if shape.heads % shape.kv_heads:
        parser.error(f"--heads must be a multiple of --kv-heads, got {shape.heads} and {shape.kv_heads}")
    found = candidates(shape, constants, options.memory * 2**30)
    for line in table(shape, constants, found):
        print(line)
    if found[0].reason:
        return 2
    print("", *timeline(found[0]), sep="\n")
    if options.png is not None:
        draw(found, options.png)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("plan", __doc__)
    parser.add_argument("--world", type=int, default=4, metavar="RANKS", help="number of ranks (%(default)s)")
    parser.add_argument("--rank", type=int, metavar="RANK", help="show this rank alone, step by step and tile by tile")
    add_sequence_options(parser, seq_len=4096)
    parser.add_argument(
        "--documents", type=Path, metavar="FILE", help="lengths of packed documents; compares the layouts for them"
    )
    parser.add_argument("--prove", action="store_true", help="prove that the schedules of all ranks are right")
    parser.add_argument("--nodes", type=int, metavar="N", help="compare all schedules for a machine of so many nodes")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="with --nodes (%(default)s)")
    parser.add_argument("--heads", type=int, default=0, metavar="N", help="query heads, with --nodes (--kv-heads)")
    parser.add_argument("--memory", type=float, default=0.0, metavar="GIB", help="most for buffers, with --nodes")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="JSON with measured constants, with --nodes")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the timelines there, with --nodes")
    parser.add_argument("--kv-heads", type=int, default=8, metavar="N", help="K/V heads, for the bytes (%(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, metavar="N", help="size of a head (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of keys and values (%(default)s)")
    return parser


def make_rank_plans(
    layout: str, mask: Band, lengths: tuple[int, ...], world: int, schedule: str, ranks: Sequence[int]
) -> list[RankPlan]:
    """The plans of some ranks.

    Example:
        >>> [plan.pairs for plan in make_rank_plans("zigzag", Band(lo=0), (8,), 2, "ring", range(2))]
        [18, 18]
    """
    shards = make_shards(layout, lengths, world)
    return [
        RankPlan(
            rank,
            shards[rank],
            make_plan(layout, mask, lengths, world, rank),
            make_schedule(schedule, layout, mask, lengths, world, rank),
        )
        for rank in ranks
    ]


def traffic(
    schedule: Schedule, sizes: Sequence[int], width: int, itemsize: int, grad_itemsize: int = 4
) -> tuple[int, int]:
    """Bytes that a rank sends, forward and backward.

    Args:
        schedule: of the rank.
        sizes: tokens of every rank.
        width: elements of keys and values of one token, over the batch and all K/V heads.
        itemsize: bytes of such an element.
        grad_itemsize: bytes of an element of their gradients.

    Returns:
        `(forward, backward)`. With `steps` hops of equal blocks on a ring, that is `steps |KV|` and
        `steps |KV| + (steps + 1) |dKV|`. Where there is nothing to send, one element travels.
    """

    def sent(transfers: Sequence[Transfer], size: int) -> int:
        return sum(size * max(width * transfer.tokens(sizes), 1) for transfer in transfers)

    forward = sum(sent(step.sends, itemsize) for step in schedule.forward)
    backward = sum(sent(step.sends, itemsize) + sent(step.grad_sends, grad_itemsize) for step in schedule.backward)
    return forward, backward


def describe(options: argparse.Namespace) -> Iterator[str]:
    """The lines of the picture."""
    layout = layout_name(options.layout)
    ranks = range(options.world) if options.rank is None else [options.rank]
    plans = make_rank_plans(layout, options.mask, options.lengths, options.world, options.schedule, ranks)
    sizes = shard_sizes(layout, options.lengths, options.world)
    steps = len(plans[0].schedule.forward)
    tokens = f"{options.seq_len} tokens on {options.world} ranks"
    yield f"{layout}, {options.mask}, {tokens}: {options.schedule} of {steps} steps"
    yield ""
    yield from positions_picture(plans, options.seq_len)
    yield ""
    if options.rank is not None:
        yield from steps_picture(plans[0], sizes)
    else:
        yield from blocks_picture(plans, sizes) if options.world <= WIDEST_PICTURE else matrix_picture(plans, sizes)
    yield ""
    yield from summary(plans, sizes, options)
    if options.documents is not None:
        yield ""
        yield from describe_packs(options.mask, options.lengths, options.world)
    if options.prove:
        yield ""
        yield describe_proof(prove(options.schedule, layout, options.mask, options.lengths, options.world))


def describe_proof(proof: Proof) -> str:
    """What was proven, in a line; a schedule that is wrong has raised before."""
    pairs = sum(proof.pairs)
    return (
        f"proven for all {proof.ranks} ranks: {pairs} pairs, each once; {sum(proof.moved.values())} tokens of keys and "
        f"{sum(proof.grads_moved.values())} of gradients over {len(proof.moved)} links, each sent and received; no "
        f"rank waits for ever, no buffer is misused, all gradients come home; buffers of {proof.slots} + "
        f"{proof.grad_slots} tokens a rank"
    )


def positions_picture(plans: Sequence[RankPlan], seq_len: int) -> Iterator[str]:
    """Which positions each rank holds, up to 64 characters wide."""
    width = min(64, seq_len)
    edges = [-(-x * seq_len // width) for x in range(width + 1)]
    yield f"positions held, {-(-seq_len // width)} a character"
    for plan in plans:
        cells = zip(edges, edges[1:], strict=False)
        shades = (_shade(sum(_held(span, *cell) for span in plan.shard), cell[1] - cell[0]) for cell in cells)
        yield f"rank {plan.rank:<3} " + "".join(shades)


def blocks_picture(plans: Sequence[RankPlan], sizes: Sequence[int]) -> Iterator[str]:
    """A row a rank, a column a step: whose keys are visited, and which of them the rank's queries see."""
    yield f"visits: rows are queries, columns keys, in the order in which shards hold them ({_legend()})"
    for plan in plans:
        columns = []
        for number, step in enumerate(plan.schedule.forward):
            for visit in step.visits:
                tiles, keys = _visited(plan, visit, sizes)
                columns.append([f"step {number}: {_names(visit)}", *_grid(tiles, sizes[plan.rank], keys)])
            if not step.visits:
                columns.append([f"step {number}: -", *[""] * ROWS])
        lines = zip(*columns, strict=True)
        for index, cells in enumerate(lines):
            label = f"rank {plan.rank:<3}" if index == 0 else " " * 8
            yield f"{label:8} " + "  ".join(cell.ljust(10) for cell in cells).rstrip()


def matrix_picture(plans: Sequence[RankPlan], sizes: Sequence[int]) -> Iterator[str]:
    """A row a rank, a character a step: how much of the visited block is seen."""
    yield f"visits, a character a step: tenths of the block that are seen, {SHADES[2]} all, {SHADES[0]} nothing"
    for plan in plans:
        yield f"rank {plan.rank:<3} " + "".join(_tenths(plan, step, sizes) for step in plan.schedule.forward)


def steps_picture(plan: RankPlan, sizes: Sequence[int]) -> Iterator[str]:
    """One rank: what it sends, receives and computes at each step, with the picture of each visit."""
    yield f"rank {plan.rank}: rows are its queries, columns the keys of a block ({_legend()})"
    for number, step in enumerate(plan.schedule.forward):
        moves = [f"sends {_part(t)} to {t.peer}" for t in step.sends]
        moves += [f"gets {_part(t)} from {t.peer}" for t in step.recvs]
        yield f"step {number}: " + "; ".join([*moves, *(f"computes on {_names(visit)}" for visit in step.visits)])
        for visit in step.visits:
            tiles, keys = _visited(plan, visit, sizes)
            for line in _grid(tiles, sizes[plan.rank], keys):
                yield f"    {line}"
            for tile in tiles:
                yield f"    queries {tile.q_begin}:{tile.q_end} x keys {tile.k_begin}:{tile.k_end}{_range(tile.band)}"


def summary(plans: Sequence[RankPlan], sizes: Sequence[int], options: argparse.Namespace) -> Iterator[str]:
    """Tokens, kernel calls, pairs, balance and bytes."""
    itemsize, width = DTYPES[options.dtype].itemsize, 2 * options.kv_heads * options.head_dim
    rows: list[tuple[str, ...]] = [("rank", "tokens", "launches", "pairs", "share", "sent fwd", "sent bwd")]
    total, alone = sum(plan.pairs for plan in plans), options.rank is not None
    for plan in plans:
        forward, backward = traffic(plan.schedule, sizes, width, itemsize)
        share = "-" if alone or not total else f"{plan.pairs / total:.1%}"
        counts = (plan.rank, sizes[plan.rank], plan.launches, plan.pairs, share, _bytes(forward), _bytes(backward))
        rows.append(tuple(map(str, counts)))
    yield from plain_lines(rows)
    if total and not alone:
        busiest = max(plan.pairs for plan in plans) * len(plans) / total
        yield f"balance: the busiest rank computes {busiest:.2f} times the mean"
    yield f"bytes: {options.kv_heads} K/V heads of {options.head_dim}, {options.dtype}, gradients float32, batch 1"


def _visited(plan: RankPlan, visit: Visit, sizes: Sequence[int]) -> tuple[Tiles, int]:
    """The tiles of a visit and the number of keys that they are on: whole blocks, also where only some rows travel."""
    if visit.rows is not None:
        return plan.tiles[visit.blocks[0]], sizes[visit.blocks[0]]
    return visit.tiles, sum(sizes[block] for block in visit.blocks)


def _names(visit: Visit) -> str:
    return "+".join(map(str, visit.blocks))


def _grid(tiles: Sequence[Tile], queries: int, keys: int) -> list[str]:
    """A picture of what a rank's queries see of a block, as lines of characters."""
    height, width = min(ROWS, queries), min(COLUMNS, keys)
    lines = []
    for y in range(height):
        top, bottom = y * queries // height, (y + 1) * queries // height
        edges = [x * keys // width for x in range(width + 1)]
        cells = zip(edges, edges[1:], strict=False)
        lines.append("".join(_cell(tiles, top, bottom, left, right) for left, right in cells))
    return lines + [""] * (ROWS - height)


def _cell(tiles: Sequence[Tile], top: int, bottom: int, left: int, right: int) -> str:
    """The shade of queries top..bottom against keys left..right."""
    seen = sum(_seen(tile, top, bottom, left, right) for tile in tiles)
    return _shade(seen, (bottom - top) * (right - left))


def _seen(tile: Tile, top: int, bottom: int, left: int, right: int) -> int:
    """Number of a tile's pairs within a rectangle."""
    top, bottom = max(top, tile.q_begin), min(bottom, tile.q_end)
    left, right = max(left, tile.k_begin), min(right, tile.k_end)
    if top >= bottom or left >= right:
        return 0
    shift = (top - tile.q_begin) - (left - tile.k_begin)
    band = None if tile.band is None else Band(tile.band.lo - shift, tile.band.hi - shift)
    return Tile(0, bottom - top, 0, right - left, band, 0, 0, 1).pairs


def _tenths(plan: RankPlan, step: Step, sizes: Sequence[int]) -> str:
    """How much of what a step visits is seen, as a digit between the shades for nothing and all."""
    seen = sum(tile.pairs for visit in step.visits for tile in visit.tiles)
    whole = sum(sizes[plan.rank] * sizes[block] for visit in step.visits for block in visit.blocks)
    return _shade(seen, whole) if seen in (0, whole) else str(min(9, max(1, round(10 * seen / whole))))


def _held(span: Span, begin: int, end: int) -> int:
    """Number of a span's positions in begin..end."""
    first, last = (min(max(-(-(edge - span.start) // span.step), 0), span.size) for edge in (begin, end))
    return last - first


def _part(transfer: Transfer) -> str:
    """What travels: a block by its number, with the rows if not all do."""
    if transfer.rows is None:
        return str(transfer.block)
    rows = ", ".join(f"{begin}:{end}" for begin, end in transfer.rows)
    return f"{transfer.block}[{rows or 'nothing'}]"


def _range(band: Band | None) -> str:
    """The band as a condition on local indices."""
    if band is None:
        return ""
    low = "" if band.lo <= -OPEN else f"{band.lo} <= "
    return f" where {low}a - b" + ("" if band.hi >= OPEN else f" <= {band.hi}")


def _shade(part: int, whole: int) -> str:
    return SHADES[0] if part == 0 else SHADES[2] if part == whole else SHADES[1]


def _legend() -> str:
    return f"{SHADES[2]} seen, {SHADES[1]} in part, {SHADES[0]} not"


def _bytes(count: int) -> str:
    """A number of bytes in a unit of 1024 that suits it."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


if __name__ == "__main__":
    raise SystemExit(main())
