"""Transports move blocks between ranks: two functions, `post(sends, recvs, step)` and `wait(pending)`.

Between the two the caller computes. P2P and HostStaged connect processes, Simulated ranks of one process.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

KEYS, GRADS, HEADS = "keys and values", "gradients of keys and values", "heads"


class Message(NamedTuple):
    """A contiguous tensor to or from a ring rank; on both sides in the same order.

    Attributes:
        tensor: what is sent, or received into.
        peer: ring rank at the other end.
        block: ring rank that owns the block.
        kind: KEYS, GRADS or HEADS.
    """

    tensor: Tensor
    peer: int
    block: int = 0
    kind: str = KEYS


Messages = Sequence[Message]


class Transport(Protocol):
    """Moves blocks between ranks; counts what it sends."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of blocks posted so far."""

    def post(self, sends: Messages, recvs: Messages, step: int = 0) -> Any:
        """Start all transfers of a step and return a token for `wait`."""

    def wait(self, pending: Any) -> None:
        """Return once received tensors may be read and sent ones overwritten; on CUDA, by later work of this stream."""


class PeerLost(RuntimeError):
    """A transfer failed; `peer` is the ring rank at its other end, None where that is not known."""

    def __init__(self, peer: int | None, cause: Exception) -> None:
        super().__init__(str(cause).rpartition("pp:")[2].partition("] ")[2].partition(". ")[0] or str(cause))
        self.peer = peer


class P2P:
    """Blocks travel by one batch of point-to-point operations a step, over NCCL or gloo.

    Args:
        group: moves the tensors.
        ranks: global rank of every ring rank.
        tag: messages meet receivers of the same tag only; gloo's alone.
    """

    def __init__(self, group: ProcessGroup, ranks: Sequence[int], tag: int = 0) -> None:
        self.group, self.ranks, self.tag, self.sent_bytes = group, ranks, tag, 0

    def post(self, sends: Messages, recvs: Messages, step: int = 0) -> list[tuple[dist.Work, int | None]]:
        operations = [self._operation(dist.isend, *message) for message in sends]
        operations += [self._operation(dist.irecv, *message) for message in recvs]
        self.sent_bytes += sum(tensor.nbytes for tensor, *_ in sends)
        peers: list[int | None] = [peer for _, peer, *_ in (*sends, *recvs)]
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise PeerLost(peers[0] if len(peers) == 1 else None, error) from error
        return list(zip(works, peers if len(works) == len(peers) else [None] * len(works), strict=True))

    def wait(self, pending: Iterable[tuple[dist.Work, int | None]]) -> None:
        for work, peer in pending:
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLost(peer, error) from error

    def _operation(self, call: Any, tensor: Tensor, peer: int, *_: Any) -> dist.P2POp:
        return dist.P2POp(call, tensor, self.ranks[peer], self.group, self.tag)


class HostStaged:
    """Blocks of CUDA tensors travel through pinned host memory, so that several ranks can share one card.

    Args:
        wire: the transport for host memory.
    """

    def __init__(self, wire: Transport) -> None:
        self._wire = wire

    @property
    def sent_bytes(self) -> int:
        return self._wire.sent_bytes

    def post(self, sends: Messages, recvs: Messages, step: int = 0) -> Any:
        staged = [Message(part[0].to("cpu", non_blocking=True), *part[1:]) for part in sends]
        landing = [Message(torch.empty_like(part[0], device="cpu", pin_memory=True), *part[1:]) for part in recvs]
        if sends:
            torch.cuda.current_stream(sends[0][0].device).synchronize()
        return self._wire.post(staged, landing, step), landing, [tensor for tensor, *_ in recvs], staged

    def wait(self, pending: Any) -> None:
        works, landing, targets, _ = pending
        self._wire.wait(works)
        for (arrived, *_), target in zip(landing, targets, strict=True):
            target.copy_(arrived, non_blocking=True)


class Nowhere:
    """The transport of a world of one: there is nobody to send to."""

    sent_bytes = 0

    def __enter__(self) -> "Nowhere":
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def post(self, sends: Messages, recvs: Messages, step: int = 0) -> None:
        assert not sends and not recvs, "a world of one sends nothing"

    def wait(self, pending: None) -> None:
        pass


class Around:
    """The transport of a ring of some ranks, every one that `ranks` names.

    Args:
        wire: the transport between all ranks.
        ranks: which of them each rank of the smaller ring is.
    """

    def __init__(self, wire: Transport, ranks: Sequence[int]) -> None:
        self._wire, self._ranks = wire, ranks

    @property
    def sent_bytes(self) -> int:
        return self._wire.sent_bytes

    def post(self, sends: Messages, recvs: Messages, step: int = 0) -> Any:
        return self._wire.post(self._renamed(sends), self._renamed(recvs), step)

    def wait(self, pending: Any) -> None:
        self._wire.wait(pending)

    def _renamed(self, messages: Messages) -> list[Message]:
        ranks = self._ranks
        return [one._replace(peer=ranks[one.peer], block=ranks[one.block]) for one in messages]


class Simulated:
    """All ranks of a group in one process, in lockstep: for tests, and for one card that plays many.

    Example:
        >>> world = Simulated(2)
        >>> a, b = torch.ones(1), torch.zeros(1)
        >>> tokens = world.rank(0).post([Message(a, 1)], []), world.rank(1).post([], [Message(b, 0)])
        >>> world.rank(1).wait(tokens[1])
        >>> b.item()
        1.0
    """

    def __init__(self, world: int) -> None:
        self._mail: dict[tuple[int, int, int], deque[Tensor]] = {}
        self._ranks = [_SimulatedRank(rank, self._mail) for rank in range(world)]

    def rank(self, rank: int) -> "_SimulatedRank":
        """The transport of one rank."""
        return self._ranks[rank]

    @staticmethod
    def run(rings: Iterable[Iterator[None]]) -> None:
        """Drive the executors of all ranks, step by step."""
        live = list(rings)
        while live:
            live = [ring for ring in live if next(ring, count) is not count]


class _SimulatedRank:
    def __init__(self, rank: int, mail: dict[tuple[int, int, int], deque[Tensor]], tag: int = 0) -> None:
        self.number, self._mail, self.tag, self.sent_bytes = rank, mail, tag, 0

    def tagged(self, tag: int) -> "_SimulatedRank":
        """This rank's transport of messages that never meet those of another tag."""
        return _SimulatedRank(self.number, self._mail, tag)

    def post(self, sends: Messages, recvs: Messages, step: int = 0) -> list[tuple[Tensor, int]]:
        for tensor, peer, *_ in sends:
            self._mail.setdefault((self.tag, self.number, peer), deque()).append(tensor.clone())
            self.sent_bytes += tensor.nbytes
        return [(tensor, peer) for tensor, peer, *_ in recvs]

    def wait(self, pending: list[tuple[Tensor, int]]) -> None:
        for tensor, peer in pending:
            waiting = self._mail.get((self.tag, peer, self.number))
            if not waiting:
                raise PeerLost(peer, RuntimeError(f"rank {peer} sent nothing"))
            arrived = waiting.popleft()
            assert arrived.shape == tensor.shape and arrived.dtype == tensor.dtype
            tensor.copy_(arrived)
