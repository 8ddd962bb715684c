"""The executor: runs one rank's schedule, forward and backward, as mirror images. It holds no mathematics.

Both functions are generators that pause once a step, when its transfers are posted and its visits computed, so that all
ranks of a simulation can run in one process; `run` drives one rank to its end. Nothing here depends on layout, mask,
schedule or backend.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Job:
    """What one rank runs.

    Attributes:
        rank: ring rank.
        sizes: tokens of every rank.
        plan: tiles by owner of the keys.
        schedule: steps, slots.
        problem: scale and the like, passed to the backend.
        backend: module with `forward` and `backward`.
        transport: object with `post` and `wait`.
        lease: `(number, numel, dtype, device)` to a context of flat buffers.
        wire_dtype: dtype in which gradients of keys and values travel; None for the one they are summed in.
    """

    rank: int
    sizes: tuple[int, ...]
    plan: Sequence[Any]
    schedule: Any
    problem: Any
    backend: Any
    transport: Any
    lease: Callable[[int, int, torch.dtype, torch.device], AbstractContextManager[list[Tensor]]]
    wire_dtype: torch.dtype | None = None


def run(ring: Iterator[None]) -> None:
    """Drive one rank to the end of its schedule."""
    for _ in ring:
        pass


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Iterator[None]:
    """Write the attention of this rank's queries over all keys into out and lse.

    Args:
        job: what to run.
        q, k, v: (B, H, M, D), (B, G, M, D), (B, G, M, Dv), this rank's, any strides.
        out, lse: (B, H, M, Dv) and (B, H, M), written; dtypes as in the backend contract.
    """
    steps, blocks = job.schedule.forward, _Blocks(job.sizes, k, v)
    moving = any(step.sends for step in steps)
    with job.lease(job.schedule.slots if moving else 0, blocks.capacity, k.dtype, k.device) as slots:
        if moving:
            blocks.pack(slots[0], job.rank, k, v)
        problem = replace(job.problem, first=True)
        for step in steps:
            pending = job.transport.post(
                [(blocks.flat(slots[t.slot], t.block), t.peer) for t in step.sends],
                [(blocks.flat(slots[t.slot], t.block), t.peer) for t in step.recvs],
            )
            for visit in step.visits:
                tiles = job.plan[visit.block]
                if tiles or problem.first:
                    keys, values = (k, v) if visit.block == job.rank else blocks.views(slots[visit.slot], visit.block)
                    job.backend.forward(problem, tiles, q, keys, values, out, lse)
                    problem = job.problem
            yield
            job.transport.wait(pending)


def backward(
    job: Job,
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
    """Write the gradients of this rank's queries, keys and values.

    Args:
        job: what to run.
        do: (B, H, M, Dv), gradient of out.
        q, k, v, out, lse: as in `forward`; out and lse are final.
        delta: (B, H, M), `rowsum(do * out) - dlse`.
        dq, dk, dv: written; shapes of q, k, v. dq has delta's dtype, in which dk and dv are summed as well.
    """
    steps, blocks = job.schedule.backward, _Blocks(job.sizes, k, v)
    moving = any(step.sends for step in steps)
    wire = job.wire_dtype or delta.dtype
    with (
        job.lease(job.schedule.slots if moving else 0, blocks.capacity, k.dtype, k.device) as slots,
        job.lease(job.schedule.grad_slots, blocks.capacity, delta.dtype, k.device) as grads,
    ):
        if moving:
            blocks.pack(slots[0], job.rank, k, v)
        problem = replace(job.problem, first=True, first_kv=True)
        following = replace(job.problem, first_kv=True)
        for step in steps:
            leaving = [blocks.flat(grads[t.slot], t.block).to(wire) for t in step.grad_sends]
            landing = [_as_dtype(blocks.flat(grads[t.slot], t.block), wire) for t in step.grad_recvs]
            pending = job.transport.post(
                [(blocks.flat(slots[t.slot], t.block), t.peer) for t in step.sends]
                + [(part, t.peer) for part, t in zip(leaving, step.grad_sends, strict=True)],
                [(blocks.flat(slots[t.slot], t.block), t.peer) for t in step.recvs]
                + [(part, t.peer) for part, t in zip(landing, step.grad_recvs, strict=True)],
            )
            for visit in step.visits:
                keys, values = (k, v) if visit.block == job.rank else blocks.views(slots[visit.slot], visit.block)
                dkeys, dvalues = blocks.views(grads[visit.grad_slot], visit.block)
                tiles = job.plan[visit.block]
                job.backend.backward(problem, tiles, do, q, keys, values, out, lse, delta, dq, dkeys, dvalues)
                problem = following
            yield
            job.transport.wait(pending)
            for part, t in zip(landing, step.grad_recvs, strict=True):
                if t.into is not None:
                    blocks.flat(grads[t.into], t.block).add_(part)
                elif part.dtype != delta.dtype:
                    blocks.flat(grads[t.slot], t.block).copy_(part)
        for target, total in zip((dk, dv), blocks.views(grads[job.schedule.home], job.rank), strict=True):
            target.copy_(total)


def _as_dtype(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """The buffer itself, or an empty one of another dtype for what arrives in that."""
    return buffer if buffer.dtype == dtype else torch.empty_like(buffer, dtype=dtype)


class _Blocks:
    """How keys and values of one source lie in a flat buffer: K, then V, contiguous, of that source's own length."""

    def __init__(self, sizes: tuple[int, ...], k: Tensor, v: Tensor) -> None:
        self._sizes = sizes
        self._batch, self._groups, _, self._k_dim = k.shape
        self._v_dim = v.shape[-1]
        rows = [self._batch * self._groups * size for size in sizes]
        # A transfer of nothing would leave transfer lists of unequal shape, so an empty block is one element long.
        self._numel = [max(count * (self._k_dim + self._v_dim), 1) for count in rows]
        self.capacity = max(self._numel)

    def flat(self, buffer: Tensor, block: int) -> Tensor:
        """The part of a buffer that a block fills: what travels."""
        return buffer[: self._numel[block]]

    def views(self, buffer: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """(B, G, N, D) and (B, G, N, Dv) views of a block in a buffer."""
        size, k_dim, v_dim = self._sizes[block], self._k_dim, self._v_dim
        rows = self._groups * size
        keys = buffer.as_strided((self._batch, self._groups, size, k_dim), (rows * k_dim, size * k_dim, k_dim, 1))
        values = buffer.as_strided(
            (self._batch, self._groups, size, v_dim),
            (rows * v_dim, size * v_dim, v_dim, 1),
            buffer.storage_offset() + self._batch * rows * k_dim,
        )
        return keys, values

    def pack(self, buffer: Tensor, block: int, k: Tensor, v: Tensor) -> None:
        """Copy keys and values of any strides into a buffer."""
        for target, source in zip(self.views(buffer, block), (k, v), strict=True):
            target.copy_(source)
