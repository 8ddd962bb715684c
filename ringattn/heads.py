"""Neighbours swap heads for tokens: each then holds the tokens of all of them, for its share of the heads.

Around the ring of `ringattn.ring` this makes the two-dimensional schedule of USP: heads are exchanged among `inner`
neighbours, keys travel around a ring of `world / inner` such neighbourhoods.

Source: Jacobs et al., DeepSpeed Ulysses, 2023 (arXiv 2309.14509); Fang and Zhao, USP, 2024 (arXiv 2405.07719).
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ringattn import ring
from ringattn.layout import Shard, join_shards, shard_size
from ringattn.transport import HEADS, Message


@dataclass(frozen=True)
class Neighbours:
    """The ranks that swap heads for tokens.

    Attributes:
        place: which of them this rank is.
        shards: the spans of each of them.
        joined: all their spans, in the order of the exchanged tensors.
    """

    place: int
    shards: tuple[Shard, ...]

    @property
    def joined(self) -> Shard:
        return join_shards(self.shards)

    @property
    def tokens(self) -> int:
        """Tokens that each of them holds after the exchange."""
        return sum(shard_size(shard) for shard in self.shards)

    def rows(self, place: int) -> list[tuple[slice, slice]]:
        """Where the spans of one of them lie in its own shard, and in the joined one."""
        at = {span.start: span.offset for span in self.joined}
        return [
            (slice(span.offset, span.offset + span.size), slice(at[span.start], at[span.start] + span.size))
            for span in self.shards[place]
        ]

    def heads(self, place: int, count: int) -> slice:
        """The share of `count` heads that one of them computes; fewer heads than ranks are held by several."""
        inner = len(self.shards)
        if count % inner == 0:
            return slice(place * count // inner, (place + 1) * count // inner)
        return slice(place * count // inner, place * count // inner + 1)


@dataclass(frozen=True)
class HeadsJob:
    """What one rank runs where neighbours swap heads for tokens around a ring.

    Attributes:
        near: the neighbours.
        peers: ring rank of each of them.
        transport: between all ranks.
        around: the ring that this rank's share of heads goes around.
    """

    near: Neighbours
    peers: tuple[int, ...]
    transport: Any
    around: ring.Job


def forward(job: HeadsJob, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Iterator[None]:
    """As `ringattn.ring.forward`; out has the dtype of lse."""
    near, swap = job.near, len(job.around.schedule.forward)
    q_far, k_far, v_far = yield from gather_tokens(near, job.transport, job.peers, (q, k, v), swap)
    out_far, lse_far = out.new_empty(*q_far.shape[:3], v.shape[3]), lse.new_empty(q_far.shape[:3])
    yield from ring.forward(job.around, q_far, k_far, v_far, out_far, lse_far)
    heads = (q.shape[1], q.shape[1])
    results = yield from return_tokens(near, job.transport, job.peers, (out_far, lse_far), heads, swap + 1)
    for target, result in zip((out, lse), results, strict=True):
        target.copy_(result)


def backward(
    job: HeadsJob,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> Iterator[None]:
    """As `ringattn.ring.backward`."""
    near, swap = job.near, len(job.around.schedule.backward)
    inputs = (do.to(q.dtype), q, k, v, out.to(q.dtype))
    do_far, q_far, k_far, v_far, out_far = yield from gather_tokens(near, job.transport, job.peers, inputs, swap)
    lse_far, delta_far = yield from gather_tokens(near, job.transport, job.peers, (lse, delta), swap + 1)
    far = [torch.empty_like(x, dtype=delta.dtype) for x in (q_far, k_far, v_far)]
    yield from ring.backward(job.around, do_far, q_far, k_far, v_far, out_far, lse_far, delta_far, *far)
    heads = (q.shape[1], k.shape[1], v.shape[1])
    results = yield from return_tokens(near, job.transport, job.peers, far, heads, swap + 2)
    for target, result in zip((dq, dk, dv), results, strict=True):
        target.copy_(result)


def check_heads(heads: int, kv_heads: int, inner: int, world: int) -> None:
    """Whether heads can be shared out; raises ValueError that says what would do."""
    if world % inner:
        fits = [degree for degree in range(1, world + 1) if world % degree == 0]
        raise ValueError(f"heads_degree={inner} does not divide the {world} ranks; choose one of {fits}")
    if heads % inner or (kv_heads % inner and inner % kv_heads):
        fits = [
            degree
            for degree in range(1, world + 1)
            if world % degree == 0 and heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)
        ]
        raise ValueError(
            f"heads_degree={inner} does not share out {heads} query and {kv_heads} key heads; choose one of {fits}"
        )


def gather_tokens(
    near: Neighbours, transport: Any, peers: Sequence[int], tensors: Sequence[Tensor], step: int
) -> Generator[None, None, list[Tensor]]:
    """This rank's share of heads for the tokens of all neighbours, as a generator that pauses while parts travel.

    Args:
        near: who they are.
        transport: posts and waits.
        peers: ring rank of each neighbour.
        tensors: (B, H, S, ...) each, all of one dtype; S is this rank's tokens, H may differ.
        step: number of the step, for the transport.

    Returns:
        The tensors as (B, share of H, tokens of all, ...).
    """

    def part(x: Tensor, place: int) -> Tensor:
        return x[:, near.heads(place, x.shape[1])]

    def shape(x: Tensor, place: int) -> tuple[int, ...]:
        share = near.heads(near.place, x.shape[1])
        return (x.shape[0], share.stop - share.start, shard_size(near.shards[place]), *x.shape[3:])

    arrived = yield from _swap(near, transport, peers, tensors, part, shape, step)
    whole = [x.new_empty(*shape(x, near.place)[:2], near.tokens, *x.shape[3:]) for x in tensors]
    for place, parts in enumerate(arrived):
        for local, joined in near.rows(place):
            for target, source in zip(whole, parts, strict=True):
                target[:, :, joined] = source[:, :, local]
    return whole


def return_tokens(
    near: Neighbours,
    transport: Any,
    peers: Sequence[int],
    tensors: Sequence[Tensor],
    heads: Sequence[int],
    step: int,
) -> Generator[None, None, list[Tensor]]:
    """The inverse of `gather_tokens`; what several neighbours hold of one head is summed, in their order.

    Args:
        tensors: (B, share of H, tokens of all, ...) each.
        heads: H of each.

    Returns:
        The tensors as (B, H, S, ...).
    """

    def part(x: Tensor, place: int) -> Tensor:
        return torch.cat([x[:, :, joined] for _, joined in near.rows(place)] or [x[:, :, :0]], dim=2)

    def shape(x: Tensor, place: int) -> tuple[int, ...]:
        return (*x.shape[:2], shard_size(near.shards[near.place]), *x.shape[3:])

    arrived = yield from _swap(near, transport, peers, tensors, part, shape, step)
    local = shard_size(near.shards[near.place])
    whole = [x.new_zeros(x.shape[0], count, local, *x.shape[3:]) for x, count in zip(tensors, heads, strict=True)]
    for place, parts in enumerate(arrived):
        for target, source in zip(whole, parts, strict=True):
            target[:, near.heads(place, target.shape[1])] += source
    return whole


def _swap(
    near: Neighbours, transport: Any, peers: Sequence[int], tensors: Sequence[Tensor], part: Any, shape: Any, step: int
) -> Generator[None, None, list[list[Tensor]]]:
    """Every neighbour gets `part(x, its place)` of each tensor x, as one message; what arrives has `shape(x, place)`.

    Returns:
        By place, the parts that this neighbour sent, of each tensor.
    """
    others = [place for place in range(len(near.shards)) if place != near.place]
    leaving = {place: _flat([part(x, place) for x in tensors]) for place in others}
    shapes = {place: [shape(x, place) for x in tensors] for place in range(len(near.shards))}
    landing = {place: tensors[0].new_empty(max(sum(map(prod, shapes[place])), 1)) for place in others}
    pending = transport.post(
        [Message(leaving[place], peers[place], peers[near.place], HEADS) for place in others],
        [Message(landing[place], peers[place], peers[place], HEADS) for place in others],
        step,
    )
    yield
    transport.wait(pending)
    arrived = []
    for place in range(len(near.shards)):
        if place == near.place:
            arrived.append([part(x, place) for x in tensors])
            continue
        sizes = [prod(one) for one in shapes[place]]
        pieces = landing[place][: sum(sizes)].split(sizes)
        arrived.append([piece.view(one) for piece, one in zip(pieces, shapes[place], strict=True)])
    return arrived


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """The parts one after the other; one element where they hold nothing, so that transfer lists keep their shape."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    return flat if flat.numel() else flat.new_zeros(1)
