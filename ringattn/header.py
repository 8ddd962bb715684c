"""A header of 128 bytes travels before every block, and what does not fit it is a named error instead of wrong numbers.

Gloo and NCCL compare neither size nor dtype of point-to-point messages: a short one leaves the end of the buffer as it
was, one of another dtype with as many bytes is reinterpreted, and a long one ends the receiving process.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ringattn.transport import GRADS, HEADS, KEYS, Message, Messages, Transport

CHECKS = ("off", "header", "checksum", "finite")
"""What is compared before a block is used: nothing, its header, or also the sum of its words or that all are finite."""

WORDS, SUM = 16, 10
MAGIC = 0x72696E6761747431  # "ringatt1"
HEADER_TAG = 1
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NAMES = ("forward", "backward")
KINDS = (KEYS, GRADS, HEADS)


class RingError(RuntimeError):
    """A ring could not go on. Every live rank of its group raises one, or the error that is the cause.

    Attributes:
        culprit: ring rank that is to blame.
    """

    def __init__(self, message: str, culprit: int | None = None) -> None:
        super().__init__(message)
        self.culprit = culprit


@dataclass(frozen=True)
class Call:
    """One run of a schedule by one rank.

    Attributes:
        rank: this ring rank.
        number: how many rings of this group ran before, the same on every rank.
        name: "forward" or "backward".
        digest: 63 bits of the schedule, the same on every rank.
        steps: of the schedule.
    """

    rank: int
    number: int
    name: str
    digest: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return f"ring {self.number} ({self.name})"


class Pending(Protocol):
    """What was started and can be waited for."""

    def result(self) -> Any:
        """Its value, or the error that it raised."""


class Later:
    """Runs when its result is asked for: where all ranks share one thread."""

    def __init__(self, task: Callable[[], Any]) -> None:
        self.result = task


class Unchecked:
    """A transport whose waits for peers run where `submit` puts them.

    Args:
        wire: moves blocks.
        submit: as in `Checked`.
    """

    def __init__(self, wire: Transport, submit: Callable[[Callable[[], Any]], Pending]) -> None:
        self._wire, self._submit = wire, submit

    @property
    def sent_bytes(self) -> int:
        return self._wire.sent_bytes

    def post(self, sends: Messages, recvs: Messages, step: int = 0) -> Pending:
        pending = self._wire.post(sends, recvs, step)
        return self._submit(lambda: self._wire.wait(pending))

    def wait(self, pending: Pending) -> None:
        pending.result()


class Checked:
    """A transport that sends a header with every block and posts a receive once the header fits it.

    Args:
        wire: moves blocks.
        headers: moves headers between the same ranks.
        call: what the headers say of the ring.
        level: of `CHECKS`, other than "off".
        submit: runs a task that waits for peers, such as on another thread, and returns what stands for its result.
        eager: post receives at once, without waiting for the header: NCCL starts a batch as a whole.
    """

    def __init__(
        self,
        wire: Transport,
        headers: Transport,
        call: Call,
        *,
        level: str = "header",
        submit: Callable[[Callable[[], Any]], Pending] = Later,
        eager: bool = False,
    ) -> None:
        self._wire, self._headers, self._call, self._level = wire, headers, call, level
        self._submit, self._eager = submit, eager
        self._taken: dict[int, int] = {}

    @property
    def sent_bytes(self) -> int:
        return self._wire.sent_bytes

    def post(self, sends: Messages, recvs: Messages, step: int = 0) -> Any:
        described = [Message(self._describe(message, sends, step), message.peer) for message in sends]
        landing = [Message(torch.zeros(WORDS, dtype=torch.int64), message.peer) for message in recvs]
        announced = self._headers.post(described, [])
        awaited = [(header.tensor, self._headers.post([], [header])) for header in landing]
        data = self._wire.post(sends, recvs if self._eager else [], step)
        task = self._submit(lambda: self._receive(recvs, awaited, step, announced, data))
        return task, data, described

    def wait(self, pending: Any) -> None:
        task, data, _ = pending
        task.result()
        if self._eager:
            self._wire.wait(data)

    def _receive(
        self, recvs: Messages, awaited: list[tuple[Tensor, Any]], step: int, announced: Any, data: Any
    ) -> None:
        arriving = []
        for message, (header, pending) in zip(recvs, awaited, strict=True):
            self._headers.wait(pending)
            self.verify(header.tolist(), message, recvs, step)
            if not self._eager:
                arriving.append(self._wire.post([], [message], step))
        for pending in arriving:
            self._wire.wait(pending)
        if not self._eager:
            for message, (header, _) in zip(recvs, awaited, strict=True):
                self._inspect(message, int(header[SUM]), step)
        self._headers.wait(announced)
        if not self._eager:
            self._wire.wait(data)

    def _describe(self, message: Message, sends: Messages, step: int) -> Tensor:
        """The words of a header; its shape is a count, since blocks travel flat."""
        call, tensor = self._call, message.tensor
        about = (call.rank, call.number, NAMES.index(call.name), step, call.digest)
        block = (message.block, KINDS.index(message.kind), tensor.numel(), DTYPES.index(tensor.dtype))
        total = words_sum(tensor) if self._level == "checksum" else 0
        said = (MAGIC, *about, *block, total, sum(message.peer == other.peer for other in sends))
        return torch.tensor((*said, *[0] * (WORDS - len(said))), dtype=torch.int64)

    def verify(self, header: list[int], message: Message, recvs: Messages, step: int) -> None:
        """Compare a header with what this rank expects.

        Raises:
            RingError: they differ; says in what.
        """
        magic, source, number, name, at, digest, block, kind, numel, dtype, _, messages, *_ = header
        call, peer = self._call, message.peer
        where = f"in {call} at ring step {step} of {call.steps}"
        if magic != MAGIC or source != peer:
            raise RingError(f"{where}: what arrived from rank {peer} is not a header of it (begins {header[:2]})", peer)
        if (number, name) != (call.number, NAMES.index(call.name)):
            there = Call(peer, number, _named(NAMES, name))
            guilty = peer if number >= call.number else call.rank
            raise RingError(
                f"{where}: rank {peer} is in {there} at step {at}, rank {call.rank} in {call}: desync", guilty
            )
        if at != step:
            # Messages of a rank arrive in order: one from an earlier step that was not taken yet was skipped here.
            guilty = call.rank if self._taken.get(peer, -1) < at < step else peer
            ahead = f"rank {guilty} skipped or repeated a step"
            raise RingError(f"{where}: rank {peer} is at ring step {at}, rank {call.rank} at {step}: {ahead}", guilty)
        self._taken[peer] = step
        expected = sum(peer == other.peer for other in recvs)
        said = {
            "schedule": (f"{digest:#x}", f"{call.digest:#x}"),
            "number of messages": (messages, expected),
            "block of rank": (block, message.block),
            "contents": (_named(KINDS, kind), message.kind),
            "dtype": (_named(DTYPES, dtype), message.tensor.dtype),
            "numbers": (numel, message.tensor.numel()),
        }
        for what, (sent, wanted) in said.items():
            if sent != wanted:
                raise RingError(f"{where}: rank {peer} sends {what} {sent}, this rank expects {wanted}", peer)

    def _inspect(self, message: Message, sent: int, step: int) -> None:
        """Look at the numbers that arrived, as far as the level says."""
        what, culprit = f"the {message.kind} of rank {message.block}", message.peer
        if self._level == "checksum" and (arrived := words_sum(message.tensor)) != sent:
            trouble = f"changed on the way from rank {culprit}: checksum {sent:#x} sent, {arrived:#x} arrived"
        elif self._level == "finite" and not (finite := message.tensor.isfinite()).all():
            first = int(finite.logical_not().nonzero()[0])
            trouble = (  # whoever passed the block on had found it finite
                f"from rank {culprit} hold {message.tensor[first].item()} as number {first} of {finite.numel()} "
                "(all keys, then all values)"
            )
        else:
            return
        raise RingError(f"in {self._call} at ring step {step} of {self._call.steps}: {what} {trouble}", culprit)


def _named(names: tuple[Any, ...], code: int) -> Any:
    return names[code] if 0 <= code < len(names) else f"unknown code {code}"


def words_sum(tensor: Tensor) -> int:
    """Sum of the 32-bit words of a contiguous tensor, modulo 2^64; a last half word counts by itself.

    Example:
        >>> words_sum(torch.tensor([1.0, 2.0])) == 0x3F800000 + 0x40000000
        True
    """
    flat = tensor.reshape(-1).view(torch.uint8)
    whole = flat.numel() // 4 * 4
    total = flat[:whole].view(torch.int32).sum(dtype=torch.int64)
    return int(total + flat[whole:].sum(dtype=torch.int64))


@lru_cache(maxsize=1)
def code_digest() -> int:
    """63 bits of the source that makes schedules: ranks with another version of it would not fit one another."""
    folder = Path(__file__).parent
    return digest_of(*((folder / f"{name}.py").read_bytes() for name in ("layout", "mask", "plan", "ring", "schedule")))


def digest_of(*parts: Any) -> int:
    """63 bits that are equal for equal parts, in every process.

    Example:
        >>> digest_of("ring", 4) == digest_of("ring", 4) != digest_of("ring", 5)
        True
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1
