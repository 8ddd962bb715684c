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

from ringattn.transport import GRADS, KEYS, Message


@dataclass(frozen=True)
class Job:
    """What one rank runs.

    Attributes:
        rank: ring rank.
        sizes: tokens of every rank.
        schedule: steps, slots.
        problem: scale and the like, passed to the backend.
        backend: module with `forward` and `backward`.
        transport: as in `ringattn.transport`, and a context that is open while the ring runs.
        lease: `(number, numel, dtype, device)` to a context of flat buffers.
        wire_dtype: dtype in which gradients of keys and values travel; None for the one they are summed in.
    """

    rank: int
    sizes: tuple[int, ...]
    schedule: Any
    problem: Any
    backend: Any
    transport: Any
    lease: Callable[[int, int, torch.dtype, torch.device], AbstractContextManager[list[Tensor]]]
    wire_dtype: torch.dtype | None = None


def run(ring: Iterator[None], transport: AbstractContextManager[Any]) -> None:
    """Drive one rank to the end of its schedule; the transport learns how that ended."""
    with transport:
        for _ in ring:
            pass


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Iterator[None]:
    """Write the attention of this rank's queries over all keys into out and lse.

    Args:
        job: what to run.
        q, k, v: (B, H, M, D), (B, G, M, D), (B, G, M, Dv), this rank's, any strides.
        out, lse: (B, H, M, Dv) and (B, H, M), written; dtypes as in the backend contract.
    """
    blocks = _Blocks(job.sizes, job.schedule.stage, k, v)
    with job.lease(_slots(job.schedule.forward, job.schedule.slots), blocks.capacity, k.dtype, k.device) as slots:
        problem = replace(job.problem, first=True)
        for number, step in enumerate(job.schedule.forward):
            _pack_own(job, blocks, step, slots, k, v)
            pending = job.transport.post(
                [_keys(blocks.flat(slots[t.slot], t), t) for t in step.sends],
                [_keys(blocks.flat(slots[t.slot], t), t) for t in step.recvs],
                number,
            )
            for visit in step.visits:
                if visit.tiles or problem.first:
                    keys, values = (k, v) if job.rank in visit.blocks else blocks.views(slots[visit.slot], visit)
                    job.backend.forward(problem, visit.tiles, q, keys, values, out, lse)
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
    blocks = _Blocks(job.sizes, job.schedule.stage, k, v)
    wire = job.wire_dtype or delta.dtype
    with (
        job.lease(_slots(job.schedule.backward, job.schedule.slots), blocks.capacity, k.dtype, k.device) as slots,
        job.lease(job.schedule.grad_slots, blocks.capacity, delta.dtype, k.device) as grads,
    ):
        problem = replace(job.problem, first=True, first_kv=True)
        following = replace(job.problem, first_kv=True)
        for number, step in enumerate(job.schedule.backward):
            _pack_own(job, blocks, step, slots, k, v)
            leaving = [blocks.flat(grads[t.slot], t).to(wire) for t in step.grad_sends]
            landing = [_as_dtype(blocks.flat(grads[t.slot], t), wire) for t in step.grad_recvs]
            pending = job.transport.post(
                [_keys(blocks.flat(slots[t.slot], t), t) for t in step.sends]
                + [_grads(part, t) for part, t in zip(leaving, step.grad_sends, strict=True)],
                [_keys(blocks.flat(slots[t.slot], t), t) for t in step.recvs]
                + [_grads(part, t) for part, t in zip(landing, step.grad_recvs, strict=True)],
                number,
            )
            for visit in step.visits:
                keys, values = (k, v) if job.rank in visit.blocks else blocks.views(slots[visit.slot], visit)
                dkeys, dvalues = blocks.views(grads[visit.grad_slot], visit)
                job.backend.backward(problem, visit.tiles, do, q, keys, values, out, lse, delta, dq, dkeys, dvalues)
                problem = following
            yield
            job.transport.wait(pending)
            for part, t in zip(landing, step.grad_recvs, strict=True):
                if t.into is not None:
                    blocks.add(grads[t.into], part, t)
                elif part.dtype != delta.dtype:
                    blocks.flat(grads[t.slot], t).copy_(part)
        for target, total in zip((dk, dv), blocks.whole(grads[job.schedule.home], job.rank), strict=True):
            target.copy_(total)


def _keys(part: Tensor, transfer: Any) -> Message:
    return Message(part, transfer.peer, transfer.block, KEYS)


def _grads(part: Tensor, transfer: Any) -> Message:
    return Message(part, transfer.peer, transfer.block, GRADS)


def _slots(steps: Sequence[Any], slots: int) -> int:
    """How many K/V buffers these steps use: none where nothing is sent, since own keys are read where they are."""
    return slots if any(step.sends for step in steps) else 0


def _pack_own(job: Job, blocks: "_Blocks", step: Any, slots: list[Tensor], k: Tensor, v: Tensor) -> None:
    """Copy this rank's keys and values, which may have any strides, into the slots that they are sent from."""
    own = {t.slot: t for t in step.sends if t.block == job.rank}
    for slot, transfer in own.items():
        blocks.pack(slots[slot], transfer, k, v)


def _as_dtype(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """The buffer itself, or an empty one of another dtype for what arrives in that."""
    return buffer if buffer.dtype == dtype else torch.empty_like(buffer, dtype=dtype)


class _Blocks:
    """How keys and values of a source lie in a flat buffer: token by token, its K of all heads and then its V.

    Rows of a block are then one contiguous run, and blocks one after the other are one block of all their rows.
    """

    def __init__(self, sizes: tuple[int, ...], stage: int, k: Tensor, v: Tensor) -> None:
        self._sizes = sizes
        self._k_shape = (k.shape[0], k.shape[1], k.shape[3])
        self._v_shape = (v.shape[0], v.shape[1], v.shape[3])
        self._k_width = k.shape[0] * k.shape[1] * k.shape[3]
        self._width = self._k_width + v.shape[0] * v.shape[1] * v.shape[3]
        self.capacity = stage * max(sizes) * self._width + 1

    def flat(self, buffer: Tensor, transfer: Any) -> Tensor:
        """What a transfer moves, of a buffer. Instead of nothing, which would leave transfer lists of unequal shape, it
        moves the buffer's last element, which no block reaches."""
        numel = self._rows(transfer.block, transfer.rows) * self._width
        begin = transfer.at * self._width
        return buffer[begin : begin + numel] if numel else buffer[-1:]

    def views(self, buffer: Tensor, visit: Any) -> tuple[Tensor, Tensor]:
        """(B, G, N, D) and (B, G, N, Dv) views of what a visit computes on."""
        return self._split(buffer, sum(self._rows(block, visit.rows) for block in visit.blocks))

    def whole(self, buffer: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Views as in `views`, of all rows of the block at the begin of a buffer."""
        return self._split(buffer, self._sizes[block])

    def pack(self, buffer: Tensor, transfer: Any, k: Tensor, v: Tensor) -> None:
        """Copy the rows of a transfer from keys and values of any strides into a buffer."""
        keys, values = self._split(buffer, self._rows(transfer.block, transfer.rows))
        for (begin, end), at in self._ranges(transfer):
            keys[:, :, at : at + end - begin].copy_(k[:, :, begin:end])
            values[:, :, at : at + end - begin].copy_(v[:, :, begin:end])

    def add(self, total: Tensor, arrived: Tensor, transfer: Any) -> None:
        """Add what a transfer brought, in a buffer of its own, to the block in the buffer that it is meant for."""
        width = self._width
        block = total[transfer.into_at * width :]
        for (begin, end), at in self._ranges(transfer):
            block[begin * width : end * width] += arrived[at * width : (at + end - begin) * width]

    def _rows(self, block: int, rows: Any) -> int:
        return self._sizes[block] if rows is None else sum(end - begin for begin, end in rows)

    def _ranges(self, transfer: Any) -> Iterator[tuple[tuple[int, int], int]]:
        """Ranges of rows of the block, each with its place in what travels."""
        at = 0
        for begin, end in ((0, self._sizes[transfer.block]),) if transfer.rows is None else transfer.rows:
            yield (begin, end), at
            at += end - begin

    def _split(self, buffer: Tensor, count: int) -> tuple[Tensor, Tensor]:
        rows = buffer[: count * self._width].view(count, self._width)
        keys, values = rows[:, : self._k_width], rows[:, self._k_width :]
        return (
            keys.unflatten(1, self._k_shape).permute(1, 2, 0, 3),
            values.unflatten(1, self._v_shape).permute(1, 2, 0, 3),
        )
