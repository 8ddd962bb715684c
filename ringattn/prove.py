"""Proof that schedules are right, before they run: each allowed pair once, each message met, no buffer misused.

All of it is about plain ints, so thousands of ranks fit into one process. The plan is not trusted: allowed pairs are
counted from spans and mask alone, and each tile is compared with the mask piece by piece.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from ringattn.layout import Shard, Span, make_shards, shard_sizes
from ringattn.mask import OPEN, Band
from ringattn.plan import Rows, Tile
from ringattn.schedule import Schedule, Step, Transfer, Visit, make_schedule

KINDS = (("sends", "recvs"), ("grad_sends", "grad_recvs"))


class ScheduleError(ValueError):
    """A schedule that would compute something wrong, or hang; says which rank, step and transfer."""


@dataclass
class Proof:
    """What was proven, and what it showed.

    Attributes:
        world: number of ranks.
        ranks: how many of them were looked at; all that follows is about these.
        steps: forward and backward steps of a rank.
        pairs: (query, key) pairs computed by each rank, forward.
        moved: tokens of keys and values sent over each link (rank, peer), forward and backward together.
        grads_moved: tokens of gradients of keys and values sent over each link.
        slots, grad_slots: buffers of a rank, in tokens.
    """

    world: int
    ranks: int
    steps: tuple[int, int] = (0, 0)
    pairs: list[int] = field(default_factory=list)
    moved: Counter[tuple[int, int]] = field(default_factory=Counter)
    grads_moved: Counter[tuple[int, int]] = field(default_factory=Counter)
    slots: int = 0
    grad_slots: int = 0

    @property
    def balance(self) -> float:
        """Largest work of a rank over the mean."""
        total = sum(self.pairs)
        return max(self.pairs) * len(self.pairs) / total if total else 1.0


def prove(
    schedule: str,
    layout: str,
    band: Band,
    lengths: tuple[int, ...],
    world: int,
    ranks: Iterable[int] | None = None,
) -> Proof:
    """Prove the schedules of a world.

    Args:
        schedule, layout, band, lengths, world: as in `ringattn.schedule.make_schedule`.
        ranks: look at these alone, and at messages between two of them; None looks at all, and follows gradients.

    Returns:
        What it showed.

    Raises:
        ScheduleError: a pair that is missing, computed twice or not allowed; a message without its other end; ranks
            that would wait for each other; a buffer that is read without holding what is meant, or overwritten while
            it is in use; a gradient that is lost, counted twice or not brought home.

    Example:
        >>> prove("ring", "zigzag", Band(lo=0), (64,), 4).balance
        1.0
    """
    chosen = range(world) if ranks is None else sorted(set(ranks))
    return check(
        {rank: make_schedule(schedule, layout, band, lengths, world, rank) for rank in chosen},
        layout,
        band,
        lengths,
        world,
    )


def check(schedules: dict[int, Schedule], layout: str, band: Band, lengths: tuple[int, ...], world: int) -> Proof:
    """Prove given schedules by rank; arguments and errors as in `prove`."""
    shards, sizes = make_shards(layout, lengths, world), shard_sizes(layout, lengths, world)
    first = next(iter(schedules.values()))
    proof = Proof(world, len(schedules), (len(first.forward), len(first.backward)))
    proof.slots = first.slots * first.stage * max(sizes)
    proof.grad_slots = first.grad_slots * first.stage * max(sizes)
    for rank, schedule in schedules.items():
        for steps in (schedule.forward, schedule.backward):
            _check_slots(rank, schedule, steps, sizes)
            pairs = _check_pairs(rank, steps, shards, sizes, band)
            for step in steps:
                for t in step.sends:
                    proof.moved[rank, t.peer] += _tokens(t, sizes)
                for t in step.grad_sends:
                    proof.grads_moved[rank, t.peer] += _tokens(t, sizes)
        proof.pairs.append(pairs)
    for direction in ("forward", "backward"):
        by_rank = {rank: getattr(schedule, direction) for rank, schedule in schedules.items()}
        _check_shapes(by_rank)
        _check_messages(by_rank)
    if len(schedules) == world:
        _check_gradients(schedules, shards, band)
    return proof


def _tokens(part: Transfer | Visit, sizes: Sequence[int]) -> int:
    if part.rows is not None:
        return sum(end - begin for begin, end in part.rows)
    return sum(sizes[block] for block in part.blocks) if isinstance(part, Visit) else sizes[part.block]


def _check_shapes(steps: dict[int, tuple[Step, ...]]) -> None:
    """All ranks take the same number of steps with the same numbers of transfers."""
    shapes = {
        rank: tuple(tuple(len(getattr(step, kind)) for pair in KINDS for kind in pair) for step in mine)
        for rank, mine in steps.items()
    }
    first = next(iter(shapes))
    for rank, shape in shapes.items():
        if shape != shapes[first]:
            raise ScheduleError(f"ranks {first} and {rank} take steps of different shape")


def _check_messages(steps: dict[int, tuple[Step, ...]]) -> None:
    """The messages of each link, in order, are those that its other end expects, and no rank waits for ever."""
    sent, expected = _links(steps, 0), _links(steps, 1)
    needs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for link in sent.keys() | expected.keys():
        source, target = link
        for (at, message), (at_target, awaited) in zip_longest(
            sent.get(link, []), expected.get(link, []), fillvalue=(-1, None)
        ):
            if message != awaited:
                raise ScheduleError(
                    f"rank {source} sends {message} to rank {target} at step {at}, which expects {awaited} at step "
                    f"{at_target}"
                )
            needs.setdefault((source, at), []).append((target, at_target))
            needs.setdefault((target, at_target), []).append((source, at))
    _check_progress(steps, needs)


def _links(
    steps: dict[int, tuple[Step, ...]], end: int
) -> dict[tuple[int, int], list[tuple[int, tuple[str, int, Rows | None]]]]:
    """By link (source, target): the step and the content of each message, as its source (0) or target (1) has it."""
    links: dict[tuple[int, int], list[tuple[int, tuple[str, int, Rows | None]]]] = {}
    for rank, mine in steps.items():
        for at, step in enumerate(mine):
            for pair in KINDS:
                for t in getattr(step, pair[end]):
                    if t.peer == rank:
                        raise ScheduleError(f"rank {rank} sends to itself at step {at}")
                    if t.peer in steps:
                        link = (t.peer, rank) if end else (rank, t.peer)
                        links.setdefault(link, []).append((at, (pair[0], t.block, t.rows)))
    return links


def _check_progress(steps: dict[int, tuple[Step, ...]], needs: dict[tuple[int, int], list[tuple[int, int]]]) -> None:
    """Let ranks end their steps as soon as the other ends of all their messages were posted, until all are through."""
    at = dict.fromkeys(steps, 0)
    waiting = {rank for rank, mine in steps.items() if mine}
    while waiting:
        through = {rank for rank in waiting if all(at[peer] >= step for peer, step in needs.get((rank, at[rank]), []))}
        if not through:
            rank = min(waiting)
            raise ScheduleError(f"rank {rank} waits for ever at step {at[rank]}, for {needs[rank, at[rank]]}")
        for rank in through:
            at[rank] += 1
        waiting -= {rank for rank in through if at[rank] == len(steps[rank])}


def _check_slots(rank: int, schedule: Schedule, steps: tuple[Step, ...], sizes: tuple[int, ...]) -> None:
    """K/V slots hold what is sent or computed on, and nothing arrives where something is in use."""
    held: dict[int, dict[tuple[int, int], Rows | None]] = {}
    room = schedule.stage * max(sizes)
    for number, step in enumerate(steps):
        where = f"rank {rank}, step {number}"
        for t in step.sends:
            if t.block == rank and not t.at:
                held[t.slot] = {(0, rank): t.rows}  # packed when it is sent
        used: dict[int, list[tuple[int, int]]] = {}
        for t in step.sends:
            _expect(held, t.slot, (t.at, t.block), t.rows, where)
            used.setdefault(t.slot, []).append((t.at, t.at + _tokens(t, sizes)))
        for visit in step.visits:
            if rank in visit.blocks:
                continue
            at = 0
            for block in visit.blocks:
                _expect(held, visit.slot, (at, block), visit.rows, where)
                at += sizes[block]
            used.setdefault(visit.slot, []).append((0, _tokens(visit, sizes)))
        for t in step.recvs:
            begin, end = t.at, t.at + _tokens(t, sizes)
            if t.slot >= schedule.slots or end > room:
                raise ScheduleError(f"{where}: {t} does not fit into {schedule.slots} slots of {room} tokens")
            if any(begin < last and first < end for first, last in used.get(t.slot, [])):
                raise ScheduleError(f"{where}: {t} arrives where a buffer is in use")
            used.setdefault(t.slot, []).append((begin, end))
        for t in step.recvs:
            contents = held.setdefault(t.slot, {})
            begin, end = t.at, t.at + _tokens(t, sizes)
            for (at, block), rows in list(contents.items()):
                if at < end and begin < at + _tokens(Transfer(block, 0, 0, rows), sizes):
                    del contents[at, block]
            contents[t.at, t.block] = t.rows


def _expect(
    held: dict[int, dict[tuple[int, int], Rows | None]],
    slot: int,
    place: tuple[int, int],
    rows: Rows | None,
    where: str,
) -> None:
    contents = held.get(slot, {})
    if place not in contents or contents[place] != rows:
        raise ScheduleError(
            f"{where}: slot {slot} should hold {rows or 'all'} of (at, block) {place}, but holds {contents}"
        )


Sums = dict[int, dict[tuple[int, int], Counter[int]]]
"""By slot, and by place and block in it: the ranks whose parts of the block's gradient are summed there."""


def _check_pairs(
    rank: int, steps: tuple[Step, ...], shards: tuple[Shard, ...], sizes: tuple[int, ...], band: Band
) -> int:
    """The visits compute each allowed pair of this rank's queries once, and no other; returns how many."""
    computed = 0
    visited: Counter[int] = Counter()
    for step in steps:
        for visit in step.visits:
            visited.update(visit.blocks)
            keys = _spans_in_slot(visit, shards, sizes)
            for tile in visit.tiles:
                _check_tile(rank, tile, shards[rank], keys, band)
                computed += tile.pairs
            _check_apart(rank, visit.tiles)
    if any(count > 1 for count in visited.values()):
        raise ScheduleError(f"rank {rank} visits block {visited.most_common(1)[0][0]} more than once")
    allowed = sum(
        _allowed(q, k, band) for q in shards[rank] for shard in shards for k in shard if k.document == q.document
    )
    if computed != allowed:
        raise ScheduleError(f"rank {rank} computes {computed} pairs of {allowed} that the mask allows")
    return computed


def _spans_in_slot(visit: Visit, shards: tuple[Shard, ...], sizes: tuple[int, ...]) -> list[Span]:
    """The spans of keys that a visit computes on, with offsets within its slot."""
    spans, begin = [], 0
    for block in visit.blocks:
        for first, last in visit.rows if visit.rows is not None else ((0, sizes[block]),):
            for span in shards[block]:
                low, high = max(first, span.offset), min(last, span.offset + span.size)
                if low < high:
                    start = span.start + (low - span.offset) * span.step
                    spans.append(Span(begin + low - first, start, high - low, span.step, span.document))
            begin += last - first
    return spans


def _check_tile(rank: int, tile: Tile, queries: Iterable[Span], keys: Iterable[Span], band: Band) -> None:
    """On each pair of spans that a tile covers, its band says what the mask says."""
    mine = _cut(queries, tile.q_begin, tile.q_end)
    theirs = [part for span in _cut(keys, tile.k_begin, tile.k_end) for part in _cut_prefix(span, band)]
    for q in mine:
        for k, k_band in theirs:
            step = q.step if q.size > 1 else k.step
            lo, hi = k_band.localize(q.start - k.start, step) if q.document == k.document else (1, 0)
            shift = (q.offset - tile.q_begin) - (k.offset - tile.k_begin)
            local = tile.band or Band()
            said = _clip(
                local.lo - shift if local.lo > -OPEN else -OPEN, local.hi - shift if local.hi < OPEN else OPEN, q, k
            )
            if said != _clip(lo, hi, q, k):
                raise ScheduleError(f"rank {rank}: {tile} does not say what the mask says of {q} and {k}")


def _clip(lo: int, hi: int, q: Span, k: Span) -> tuple[int, int] | None:
    """The lags that a band keeps of those that occur between two spans; None for none."""
    low, high = max(lo, 1 - k.size), min(hi, q.size - 1)
    return (low, high) if low <= high else None


def _cut(spans: Iterable[Span], begin: int, end: int) -> list[Span]:
    """The parts of spans at rows begin..end."""
    parts = []
    for span in spans:
        low, high = max(begin, span.offset), min(end, span.offset + span.size)
        if low < high:
            start = span.start + (low - span.offset) * span.step
            parts.append(Span(low, start, high - low, span.step, span.document))
    return parts


def _cut_prefix(span: Span, band: Band) -> list[tuple[Span, Band]]:
    """The parts of a span of keys inside and beyond the mask's prefix, with the band that each is under."""
    inside = min(max(-(-(band.prefix - span.start) // span.step), 0), span.size)
    parts = _cut([span], span.offset, span.offset + inside)
    beyond = _cut([span], span.offset + inside, span.offset + span.size)
    return [(part, Band(-OPEN, band.hi)) for part in parts] + [(part, Band(band.lo, band.hi)) for part in beyond]


def _check_apart(rank: int, tiles: Sequence[Tile]) -> None:
    """No two tiles of a visit share a rectangle of pairs."""
    ordered = sorted(tiles, key=lambda tile: tile.q_begin)
    for index, tile in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other.q_begin >= tile.q_end:
                break
            if other.k_begin < tile.k_end and tile.k_begin < other.k_end:
                raise ScheduleError(f"rank {rank} computes pairs of {tile} again in {other}")


def _allowed(q: Span, k: Span, band: Band) -> int:
    """Number of pairs of two spans of one document that the mask allows."""
    count = 0
    for part, part_band in _cut_prefix(k, band):
        lo, hi = part_band.localize(q.start - part.start, q.step if q.size > 1 else part.step)
        lags = _clip(lo, hi, q, part)
        if lags is not None:
            count += Tile(0, q.size, 0, part.size, Band(*lags), 0, 0, 1).pairs
    return count


def _check_gradients(schedules: dict[int, Schedule], shards: tuple[Shard, ...], band: Band) -> None:
    """Follow gradients through slots and over links, to the owners' homes."""
    held: dict[int, Sums] = {rank: {} for rank in schedules}
    sizes = tuple(sum(span.size for span in shard) for shard in shards)
    for number in range(max(len(schedule.backward) for schedule in schedules.values())):
        travelling: dict[tuple[int, int], deque[Counter[int]]] = {}
        for rank, schedule in schedules.items():
            _compute_gradients(rank, number, schedule.backward[number], held[rank], travelling, sizes)
        for rank, schedule in schedules.items():
            for t in schedule.backward[number].grad_recvs:
                parts = travelling[t.peer, rank].popleft()
                if t.into is None:
                    held[rank].setdefault(t.slot, {})[t.at, t.block] = parts
                    continue
                before = held[rank].get(t.into, {}).get((t.into_at, t.block))
                if before is None:
                    raise ScheduleError(f"rank {rank}, step {number}: {t} is added where its block is not")
                held[rank][t.into][t.into_at, t.block] = before + parts
    for rank, schedule in schedules.items():
        parts = held[rank].get(schedule.home, {}).get((0, rank), Counter())
        users = (
            user
            for user in schedules
            if any(_allowed(q, k, band) for q in shards[user] for k in shards[rank] if q.document == k.document)
        )
        if any(parts[user] != 1 for user in users) or any(count > 1 for count in parts.values()):
            raise ScheduleError(f"the gradient of block {rank} comes home with the parts of ranks {dict(parts)}")


def _compute_gradients(
    rank: int,
    number: int,
    step: Step,
    held: Sums,
    travelling: dict[tuple[int, int], deque[Counter[int]]],
    sizes: Sequence[int],
) -> None:
    """A rank's own part of a step: what it sends of its slots, and the parts that its visits leave in them."""
    where = f"rank {rank}, step {number}"
    sent, arriving = {t.slot for t in step.grad_sends}, {t.slot for t in step.grad_recvs}
    for t in step.grad_sends:
        if (t.at, t.block) not in held.get(t.slot, {}):
            raise ScheduleError(f"{where}: {t} is not in its slot, which holds {list(held.get(t.slot, {}))}")
        travelling.setdefault((rank, t.peer), deque()).append(held[t.slot][t.at, t.block])
    if sent & arriving:
        raise ScheduleError(f"{where}: gradients arrive in a slot that is being sent")
    for visit in step.visits:
        if visit.grad_slot in sent | arriving:
            raise ScheduleError(f"{where}: slot {visit.grad_slot} is computed into while it is sent or received")
        held[visit.grad_slot] = {}
        at = 0
        for block in visit.blocks:
            held[visit.grad_slot][at, block] = Counter([rank])
            at += sizes[block]
