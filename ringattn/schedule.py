"""A schedule is what one rank does, step by step: which blocks it sends, receives and computes on, and in which slots.

A step posts its transfers, computes its visits while they travel, and then waits. Schedules are plain data, made by
generators (`ring`, `all_gather`) and run by the one executor in `ringattn.ring`; a new one is a function in
this file and an entry in `SCHEDULES`.

Every rank of a group takes the same number of steps with transfer lists of the same shape, because point-to-point
batches that differ in shape hang on NCCL. Steps whose blocks no rank needs are left out of all of them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from ringattn.layout import make_shards
from ringattn.mask import Band
from ringattn.plan import sees


@dataclass(frozen=True, slots=True)
class Transfer:
    """One block of keys and values, or of their gradients, to or from a peer.

    Attributes:
        block: rank that owns the block.
        peer: rank at the other end.
        slot: buffer that is sent or received into.
        into: for a received gradient, the slot to which it is added after the wait; None where it is taken as it is.
    """

    block: int
    peer: int
    slot: int
    into: int | None = None


@dataclass(frozen=True, slots=True)
class Visit:
    """Compute the tiles of one block, whose keys lie in `slot`; its gradients go to `grad_slot`, which is free."""

    block: int
    slot: int
    grad_slot: int


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
        forward, backward: the steps. A rank's own keys are in slot 0 when the first step begins.
        slots: number of K/V buffers.
        grad_slots: number of dK/dV buffers.
        home: gradient slot that holds the rank's own dK and dV after the last step.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    slots: int
    grad_slots: int
    home: int


@dataclass(frozen=True, slots=True)
class Needs:
    """Who needs whose keys, as distances around the ring.

    Attributes:
        distances: every t for which some rank needs the block of rank - t, ascending, starting with 0.
        own: the t that this rank needs itself.
    """

    distances: tuple[int, ...]
    own: frozenset[int]


def ring(rank: int, world: int, needs: Needs) -> Schedule:
    """K/V blocks rotate past every rank; a hop skips over distances that nobody needs.

    Backward, the gradient of a block follows it one step behind: while a rank computes its part, the sum of the parts
    before it arrives, is added, and is sent on in the next step. After the last visit it goes straight home.

    Source: Liu et al., Ring Attention with Blockwise Transformers, 2023 (arXiv 2310.01889).
    """
    distances = needs.distances
    blocks = [(rank - distance) % world for distance in distances]
    hops = [after - before for before, after in zip(distances, distances[1:], strict=False)]
    forward, backward = [], []
    for index, block in enumerate(blocks):
        slot, grad_slot = index % 2, index % 3
        keys: dict[str, tuple[Transfer, ...]] = {}
        grads: dict[str, tuple[Transfer, ...]] = {}
        if index < len(hops):
            hop = hops[index]
            keys["sends"] = (Transfer(block, (rank + hop) % world, slot),)
            keys["recvs"] = (Transfer(blocks[index + 1], (rank - hop) % world, 1 - slot),)
        visited = index == 0 or distances[index] in needs.own
        if index > 0:
            hop = hops[index - 1]
            landing, into = ((index + 1) % 3, grad_slot) if visited else (grad_slot, None)
            grads["grad_sends"] = (Transfer(blocks[index - 1], (rank + hop) % world, (index - 1) % 3),)
            grads["grad_recvs"] = (Transfer(block, (rank - hop) % world, landing, into),)
        visits = (Visit(block, slot, grad_slot),) if visited else ()
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


def all_gather(rank: int, world: int, needs: Needs) -> Schedule:
    """Every block is fetched at once from its owner while the own block is computed; O(S) memory, one exchange.

    Backward, each rank returns its part of a block's gradient to the owner, which adds the parts in order of distance.

    Source: the K/V all-gather of Llama 3's context parallelism, 2024 (arXiv 2407.21783).
    """
    others = needs.distances[1:]
    fetch = Step(
        sends=tuple(Transfer(rank, (rank + distance) % world, 0) for distance in others),
        recvs=tuple(
            Transfer((rank - distance) % world, (rank - distance) % world, slot)
            for slot, distance in enumerate(others, 1)
        ),
        visits=(Visit(rank, 0, 0),),
    )
    compute = Step(
        visits=tuple(Visit((rank - distance) % world, slot, slot) for slot, distance in enumerate(others, 1)),
    )
    landing = len(others) + 1
    give_back = Step(
        grad_sends=tuple(
            Transfer((rank - distance) % world, (rank - distance) % world, slot)
            for slot, distance in enumerate(others, 1)
        ),
        grad_recvs=tuple(
            Transfer(rank, (rank + distance) % world, landing + index, into=0) for index, distance in enumerate(others)
        ),
    )
    if not others:
        return Schedule((fetch,), (fetch,), slots=1, grad_slots=1, home=0)
    slots = len(needs.distances)
    return Schedule((fetch, compute), (fetch, compute, give_back), slots=slots, grad_slots=2 * slots - 1, home=0)


SCHEDULES: dict[str, Callable[[int, int, Needs], Schedule]] = {"ring": ring, "all_gather": all_gather}
"""Every schedule by name."""


def schedule_name(name: str) -> str:
    """The name, if it is a schedule; raises ValueError with the choices otherwise."""
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    return name


@lru_cache(maxsize=4096)
def make_schedule(name: str, layout: str, band: Band, lengths: tuple[int, ...], world: int, rank: int) -> Schedule:
    """The schedule of one rank.

    Args:
        name: a name of `SCHEDULES`.
        layout, band, lengths, world, rank: as in `ringattn.plan.make_plan`.

    Returns:
        The steps; the same number on every rank.

    Example:
        >>> len(make_schedule("ring", "contiguous", Band(0, 9), (400,), 4, rank=0).forward)
        2
    """
    return SCHEDULES[schedule_name(name)](rank, world, _needs(layout, band, lengths, world, rank))


def _needs(layout: str, band: Band, lengths: tuple[int, ...], world: int, rank: int) -> Needs:
    shards = make_shards(layout, lengths, world)
    own = frozenset(distance for distance in range(world) if sees(shards[rank], shards[rank - distance], band))
    return Needs(_distances(layout, band, lengths, world), own)


@lru_cache(maxsize=1024)
def _distances(layout: str, band: Band, lengths: tuple[int, ...], world: int) -> tuple[int, ...]:
    """The distances that any rank needs, found through the key spans near each query span: 64 ranks in 1-2 ms.

    The last queries are asked first: under a causal mask they alone need every distance.
    """
    shards = make_shards(layout, lengths, world)
    owned = sorted(((span, owner) for owner, shard in enumerate(shards) for span in shard), key=lambda o: o[0].start)
    starts = [span.start for span, _ in owned]
    reach = list(accumulate((span.last for span, _ in owned), max))
    found = {0}
    for q, rank in reversed(owned):
        first = bisect_left(reach, q.start - band.hi)
        for k, owner in owned[first : bisect_right(starts, q.last - band.lo)]:
            if (rank - owner) % world not in found and sees((q,), (k,), band):
                found.add((rank - owner) % world)
        if len(found) == world:
            break
    return tuple(sorted(found))
