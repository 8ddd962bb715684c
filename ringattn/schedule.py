"""A schedule is what one rank does, step by step: which blocks it sends, receives and computes on, and in which slots.

A step posts its transfers, computes its visits while they travel, and then waits. Schedules are plain data, made by
generators (`ring`, `all_gather`, `direct`) and run by the one executor in `ringattn.ring`; a new one is a function in
this file and an entry in `SCHEDULES`.

Every rank of a group takes the same number of steps with transfer lists of the same shape, because point-to-point
batches that differ in shape hang on NCCL. Steps whose blocks no rank needs are left out of all of them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

from ringattn.layout import make_shards, shard_sizes
from ringattn.mask import Band
from ringattn.plan import Plan, Rows, Tiles, in_order, key_rows, make_plan, pick_rows, sees, shift_keys, wanted_rows


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows of one block of keys and values, or of their gradients, to or from a peer.

    Attributes:
        block: rank that owns the block.
        peer: rank at the other end.
        slot: buffer that is sent or received into. A rank's own keys are packed into it when they are sent.
        rows: the rows of the block that travel, one range after the other in the buffer; None for all of them.
        at: rows of the buffer before them.
        into: for a received gradient, the slot to which it is added after the wait, at the same rows of the block; None
            where it is taken as it is.
        into_at: rows before the block in that slot.
    """

    block: int
    peer: int
    slot: int
    rows: Rows | None = None
    at: int = 0
    into: int | None = None
    into_at: int = 0

    def tokens(self, sizes: Sequence[int]) -> int:
        """Number of tokens that travel, given how many each rank holds."""
        return sizes[self.block] if self.rows is None else sum(end - begin for begin, end in self.rows)


@dataclass(frozen=True, slots=True)
class Visit:
    """Compute tiles of one block, or of several that lie one after the other in a slot, in one launch.

    Attributes:
        blocks: ranks that own the keys.
        slot: buffer with the keys; a rank's own block is read from the caller's tensors.
        grad_slot: buffer for the gradients of these keys, which holds nothing yet.
        tiles: what to compute; key rows count within what the slot holds.
        rows: the rows of the one block that the slot holds; None for all rows of all blocks.
    """

    blocks: tuple[int, ...]
    slot: int
    grad_slot: int
    tiles: Tiles
    rows: Rows | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Post all transfers, compute all visits, wait."""

    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()
    grad_sends: tuple[Transfer, ...] = ()
    grad_recvs: tuple[Transfer, ...] = ()
    visits: tuple[Visit, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one rank, forward and backward.

    Attributes:
        forward, backward: the steps.
        slots: number of K/V buffers.
        grad_slots: number of dK/dV buffers.
        home: gradient slot that holds the rank's own dK and dV after the last step.
        stage: blocks that a buffer has room for.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    slots: int
    grad_slots: int
    home: int
    stage: int = 1


@dataclass(frozen=True, slots=True)
class Work:
    """What a generator turns into a schedule.

    Attributes:
        rank, world: ring rank and number of ranks.
        distances: every t for which some rank needs the block of rank - t, ascending, starting with 0.
        plan: this rank's tiles by owner of the keys.
        sizes: tokens of every rank.
        wanted: the rows of this rank's keys that another rank needs, in the order of ranks; computed when asked for.
    """

    rank: int
    world: int
    distances: tuple[int, ...]
    plan: Plan
    sizes: tuple[int, ...]
    wanted: Callable[[], tuple[Rows, ...]]


def ring(work: Work) -> Schedule:
    """K/V blocks rotate past every rank; a hop skips over distances that nobody needs.

    Backward, the gradient of a block follows it one step behind: while a rank computes its part, the sum of the parts
    before it arrives, is added, and is sent on in the next step. After the last visit it goes straight home.

    Source: Liu et al., Ring Attention with Blockwise Transformers, 2023 (arXiv 2310.01889).
    """
    rank, world, distances = work.rank, work.world, work.distances
    blocks = [(rank - distance) % world for distance in distances]
    hops = [after - before for before, after in zip(distances, distances[1:], strict=False)]
    forward, backward = [], []
    for index, block in enumerate(blocks):
        slot, grad_slot = index % 2, index % 3
        keys: dict[str, Any] = {}
        grads: dict[str, Any] = {}
        if index < len(hops):
            hop = hops[index]
            keys["sends"] = (Transfer(block, (rank + hop) % world, slot),)
            keys["recvs"] = (Transfer(blocks[index + 1], (rank - hop) % world, 1 - slot),)
        visited = index == 0 or bool(work.plan[block])
        if index > 0:
            hop = hops[index - 1]
            landing, into = ((index + 1) % 3, grad_slot) if visited else (grad_slot, None)
            grads["grad_sends"] = (Transfer(blocks[index - 1], (rank + hop) % world, (index - 1) % 3),)
            grads["grad_recvs"] = (Transfer(block, (rank - hop) % world, landing, into=into),)
        visits = (Visit((block,), slot, grad_slot, work.plan[block]),) if visited else ()
        forward.append(Step(**keys, visits=visits))
        backward.append(Step(**keys, **grads, visits=visits))
    last = len(blocks) - 1
    if last == 0:
        return Schedule(tuple(forward), tuple(backward), slots=1, grad_slots=1, home=0)
    home = (last + 1) % 3
    farthest = distances[-1]
    going_home = Step(
        grad_sends=(Transfer(blocks[last], blocks[last], last % 3),),
        grad_recvs=(Transfer(rank, (rank + farthest) % world, home),),
    )
    return Schedule(tuple(forward), (*backward, going_home), slots=2, grad_slots=3, home=home)


def staged_ring(work: Work, stage: int) -> Schedule:
    """The ring with `stage` blocks a step: each launch computes on all of them, so that fewer and larger kernels run.

    Block i of a stage hops to the rank that needs it as block i of the next stage. Gradients follow one step behind, a
    sum for each place in the stage, and go home after the last visit; the owner adds them to its own part. Takes three
    K/V and four dK/dV buffers of `stage` blocks each.
    """
    rank, world, others = work.rank, work.world, work.distances[1:]
    stages = [others[first : first + stage] for first in range(0, len(others), stage)]
    own = Visit((rank,), 0, 0, work.plan[rank])
    if not stages:
        return Schedule((Step(visits=(own,)),), (Step(visits=(own,)),), slots=1, grad_slots=1, home=0)
    forward = [Step(**_stage_keys(work, stages, 0), visits=(own,))]
    backward = list(forward)
    for number, distances in enumerate(stages):
        keys = _stage_keys(work, stages, number + 1)
        blocks = tuple((rank - distance) % world for distance in distances)
        tiles = [
            shift_keys(tile, at)
            for block, at in zip(blocks, _places(work, distances), strict=True)
            for tile in work.plan[block]
        ]
        visits = (Visit(blocks, number % 2, 1 + number % 3, in_order(tiles)),)
        forward.append(Step(**keys, visits=visits))
        backward.append(Step(**keys, **_stage_grads(work, stages, number), visits=visits))
    backward.append(Step(**_stage_grads(work, stages, len(stages))))
    return Schedule(tuple(forward), tuple(backward), slots=3, grad_slots=4, home=0, stage=stage)


def _places(work: Work, distances: Sequence[int]) -> list[int]:
    """Where in its slot each block of a stage begins, in rows."""
    sizes = [work.sizes[(work.rank - distance) % work.world] for distance in distances]
    return [0, *accumulate(sizes)][: len(sizes)]


def _stage_keys(work: Work, stages: Sequence[Sequence[int]], number: int) -> dict[str, Any]:
    """The transfers that bring the keys of stage `number`, from the stage before it or, for the first, from owners."""
    if number == len(stages):
        return {}
    rank, world, coming = work.rank, work.world, stages[number]
    leaving, slot = (stages[number - 1], (number - 1) % 2) if number else ([0] * len(coming), 2)
    places = _places(work, leaving) if number else [0] * len(coming)
    sends, recvs = [], []
    for before, after, at, landing in zip(leaving, coming, places, _places(work, coming), strict=False):
        hop = after - before
        sends.append(Transfer((rank - before) % world, (rank + hop) % world, slot, at=at))
        recvs.append(Transfer((rank - after) % world, (rank - hop) % world, number % 2, at=landing))
    return {"sends": tuple(sends), "recvs": tuple(recvs)}


def _stage_grads(work: Work, stages: Sequence[Sequence[int]], number: int) -> dict[str, Any]:
    """The gradients of stage `number - 1` go on to those who compute their blocks in this one, or home."""
    if number == 0:
        return {}
    rank, world, leaving = work.rank, work.world, stages[number - 1]
    coming = stages[number] if number < len(stages) else ()
    slot, into, landing = 1 + (number - 1) % 3, 1 + number % 3, 1 + (number + 1) % 3
    places, sends, recvs = _places(work, coming), [], []
    for lane, (before, at) in enumerate(zip(leaving, _places(work, leaving), strict=True)):
        block = (rank - before) % world
        if lane < len(coming):
            hop, arriving = coming[lane] - before, (rank - coming[lane]) % world
            sends.append(Transfer(block, (rank + hop) % world, slot, at=at))
            place = places[lane]
            recvs.append(Transfer(arriving, (rank - hop) % world, landing, at=place, into=into, into_at=place))
        else:
            sends.append(Transfer(block, block, slot, at=at))
            recvs.append(Transfer(rank, (rank + before) % world, landing, at=lane * max(work.sizes), into=0))
    return {"grad_sends": tuple(sends), "grad_recvs": tuple(recvs)}


def all_gather(work: Work) -> Schedule:
    """Every block is fetched at once from its owner while the own block is computed; O(S) memory, one exchange.

    Backward, each rank returns its part of a block's gradient to the owner, which adds the parts in order of distance.

    Source: the K/V all-gather of Llama 3's context parallelism, 2024 (arXiv 2407.21783).
    """
    rank, world, others = work.rank, work.world, work.distances[1:]
    below = [(rank - distance) % world for distance in others]
    above = [(rank + distance) % world for distance in others]
    fetch = Step(
        sends=tuple(Transfer(rank, peer, 0) for peer in above),
        recvs=tuple(Transfer(peer, peer, slot) for slot, peer in enumerate(below, 1)),
        visits=(Visit((rank,), 0, 0, work.plan[rank]),),
    )
    if not others:
        return Schedule((fetch,), (fetch,), slots=1, grad_slots=1, home=0)
    compute = Step(visits=tuple(Visit((peer,), slot, slot, work.plan[peer]) for slot, peer in enumerate(below, 1)))
    landing = len(others) + 1
    give_back = Step(
        grad_sends=tuple(Transfer(peer, peer, slot) for slot, peer in enumerate(below, 1)),
        grad_recvs=tuple(Transfer(rank, peer, slot, into=0) for slot, peer in enumerate(above, landing)),
    )
    slots = len(others) + 1
    return Schedule((fetch, compute), (fetch, compute, give_back), slots=slots, grad_slots=2 * slots - 1, home=0)


def direct(work: Work) -> Schedule:
    """Each rank fetches the rows that it needs from their owners, one owner a step, and returns their gradients.

    Nothing is passed on for others, so only needed rows travel: the schedule for packed documents and windows. Memory
    is O(S / N) as in the ring. Between hosts a block crosses the link once for each rank that needs it.

    Source: the group-cast of MagiAttention (SandAI, 2025), with one owner a step.
    """
    rank, world, distances = work.rank, work.world, work.distances
    wanted = work.wanted()
    below = [(rank - distance) % world for distance in distances]
    above = [(rank + distance) % world for distance in distances]
    rows = [key_rows(work.plan[peer]) for peer in below]
    outgoing, home, landing = 2, 0, 3
    forward, backward = [], []
    for index, peer in enumerate(below):
        slot, grad_slot = index % 2, 1 + index % 2 if index else home
        held = rows[index] if index else None
        tiles = pick_rows(work.plan[peer], held) if held is not None else work.plan[peer]
        visits = (Visit((peer,), slot, grad_slot, tiles, held),)
        keys: dict[str, Any] = {}
        grads: dict[str, Any] = {}
        if index + 1 < len(below):
            keys["sends"] = (Transfer(rank, above[index + 1], outgoing, wanted[above[index + 1]]),)
            keys["recvs"] = (Transfer(below[index + 1], below[index + 1], 1 - slot, rows[index + 1]),)
        if index > 1:
            grads = _returned(index - 1, below, above, rows, wanted, landing)
        forward.append(Step(**keys, visits=visits))
        backward.append(Step(**keys, **grads, visits=visits))
    last = len(below) - 1
    if last == 0:
        return Schedule(tuple(forward), tuple(backward), slots=1, grad_slots=1, home=home)
    backward.append(Step(**_returned(last, below, above, rows, wanted, landing)))
    return Schedule(tuple(forward), tuple(backward), slots=3, grad_slots=4, home=home)


def _returned(
    index: int, below: list[int], above: list[int], rows: list[Rows], wanted: tuple[Rows, ...], landing: int
) -> dict[str, Any]:
    """The gradients of the visit at `index` go back to the owner; what others computed at theirs is added at home."""
    owner, user, rank = below[index], above[index], below[0]
    return {
        "grad_sends": (Transfer(owner, owner, 1 + index % 2, rows[index]),),
        "grad_recvs": (Transfer(rank, user, landing, wanted[user], into=0),),
    }


SCHEDULES: dict[str, Callable[[Work], Schedule]] = {
    "ring": ring,
    "ring_by_2": partial(staged_ring, stage=2),
    "ring_by_4": partial(staged_ring, stage=4),
    "all_gather": all_gather,
    "direct": direct,
}
"""Every schedule by name."""


def schedule_name(name: str) -> str:
    """The name, if it is a schedule; raises ValueError with the choices otherwise."""
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    return name


@lru_cache(maxsize=4096)
def make_schedule(
    name: str, layout: str, band: Band, lengths: tuple[int, ...], world: int, rank: int, inner: int = 1
) -> Schedule:
    """The schedule of one rank.

    Args:
        name: a name of `SCHEDULES`.
        layout, band, lengths, world, rank, inner: as in `ringattn.plan.make_plan`.

    Returns:
        The steps; the same number on every rank.

    Example:
        >>> len(make_schedule("ring", "contiguous", Band(0, 9), (400,), 4, rank=0).forward)
        2
    """
    work = Work(
        rank=rank,
        world=world,
        distances=_distances(layout, band, lengths, world, inner),
        plan=make_plan(layout, band, lengths, world, rank, inner),
        sizes=shard_sizes(layout, lengths, world, inner),
        wanted=lambda: wanted_rows(layout, band, lengths, world, rank, inner),
    )
    return SCHEDULES[schedule_name(name)](work)


@lru_cache(maxsize=1024)
def _distances(layout: str, band: Band, lengths: tuple[int, ...], world: int, inner: int) -> tuple[int, ...]:
    """The distances that any rank needs, found through the key spans near each query span: 64 ranks in 1-2 ms.

    The last queries are asked first: under a causal mask they alone need every distance.
    """
    shards = make_shards(layout, lengths, world, inner)
    owned = sorted(((span, owner) for owner, shard in enumerate(shards) for span in shard), key=lambda o: o[0].start)
    starts = [span.start for span, _ in owned]
    reach = list(accumulate((span.last for span, _ in owned), max))
    ends = list(accumulate(lengths))
    found = {0}
    for q, rank in reversed(owned):
        end = ends[q.document]
        first = bisect_left(reach, max(q.start - band.hi, end - lengths[q.document]))
        past = bisect_right(starts, min(max(q.last - band.lo, band.prefix - 1), end - 1))
        for k, owner in owned[first:past]:
            if (rank - owner) % world not in found and sees(q, k, band):
                found.add((rank - owner) % world)
        if len(found) == world:
            break
    return tuple(sorted(found))
