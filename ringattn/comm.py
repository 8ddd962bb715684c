"""Everything between ranks: process groups, buffers, agreement before a call, and the exchange of blocks in it.

There is one `Comm` per process group, made on first use by all of its ranks together and dropped with the group.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from ringattn.control import Control, Exchange, Helper
from ringattn.header import HEADER_TAG, Call, Checked, RingError, Unchecked, digest_of
from ringattn.transport import P2P, HostStaged, PeerLost, Transport

logger = logging.getLogger(__name__)

Group = ProcessGroup | DeviceMesh | None
TRANSPORTS = ("p2p", "host")
"""Names of the transports between processes."""

VALIDATE = ("always", "sampled")
SLACK = timedelta(seconds=60)  # gloo's own timeout comes after ours, which names who is to blame
SAMPLED_FIRST, SAMPLED_EVERY = 8, 1024
"""`validate="sampled"` agrees on the first calls of a group and then on every 1024th: the same calls on every rank."""


def resolve_group(group: Group) -> ProcessGroup | None:
    """The process group that a caller means, or None for a world of one.

    Args:
        group: a ProcessGroup that this rank is in, a one-dimensional DeviceMesh, or None for the default group if
            torch.distributed is initialised and a world of one otherwise.

    Raises:
        ValueError: a mesh of several dimensions, a group without this rank or one that was destroyed.
    """
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a one-dimensional mesh, got {group}; pass a slice such as mesh['cp']")
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        what = (
            "this rank is not in it" if group is dist.GroupMember.NON_GROUP_MEMBER else "no ProcessGroup or DeviceMesh"
        )
        raise ValueError(f"cannot use group {group!r}: {what}")
    if not torch.compiler.is_compiling():
        _check_alive(group.group_name)
    return group


def group_name(group: Group) -> str:
    """The name by which custom ops know a group; "" for a world of one."""
    resolved = resolve_group(group)
    return "" if resolved is None else resolved.group_name


def _check_alive(name: str) -> ProcessGroup:
    try:
        return c10d._resolve_process_group(cast(Any, name))
    except RuntimeError as error:
        raise ValueError(f"process group {name!r} is not there any more: was it destroyed?") from error


def ring_place(name: str) -> tuple[int, int]:
    """Ring rank and world size of a group by name; a constant to torch.compile."""
    if not name:
        return 0, 1
    comm = get_comm(name)
    return comm.rank, comm.world


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo: 3 s, and triton with it.
ring_place._dynamo_marked_constant = True  # type: ignore[attr-defined]


_comms: dict[str, "Comm"] = {}


def get_comm(name: str) -> "Comm":
    """The Comm of a group; all ranks of the group make it together, on first use."""
    group = _check_alive(name)
    comm = _comms.get(name)
    if comm is None or comm.group is not group:
        for stale in [other for other, old in _comms.items() if not old.alive()]:
            del _comms[stale]
        comm = _comms[name] = Comm(group)
    return comm


class Comm:
    """State of one process group: its control group, transports and buffers.

    Attributes:
        group: the caller's group.
        ranks: its global ranks; position in it is the ring rank.
        rank, world: this process's ring rank, and the number of ranks.
        control: a private gloo group for agreement, also the data group of transports over gloo.
        calls: how many calls were started, the same on every rank.
        rings: how many runs of a schedule were started, the same on every rank.
        watch: finds who is to blame when something fails.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.world = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.calls = self.rings = 0
        self.buffers = Buffers()
        self.control = self._private_group("gloo")
        name, limit = str(group.group_name), _timeout(group).total_seconds()
        self.watch = Control(c10d._get_default_store(), f"{name}/{self.ranks}", self.rank, self.world, limit)
        self.helper = Helper(self.watch.lap)
        self._wires: dict[tuple[str, torch.device], P2P] = {}

    def alive(self) -> bool:
        """Whether the caller's group still exists."""
        try:
            return _check_alive(self.group.group_name) is self.group
        except ValueError:
            return False

    def _private_group(self, backend: str) -> ProcessGroup:
        """A group of the same ranks in the same order, made by them alone.

        `dist.new_group(use_local_synchronization=True)` names a group by how many groups this process knows, which
        collides once one was destroyed and differs between ranks of several groups. Its helper takes a name.
        """
        made, _ = c10d._new_process_group_helper(
            self.world,
            self.rank,
            self.ranks,
            dist.Backend(backend),
            c10d._get_default_store(),
            group_name=cast(Any, f"{self.group.group_name}/ringattn-{backend}"),
            timeout=_timeout(self.group) + SLACK,
            group_desc="ringattn",
        )
        c10d._world.pg_group_ranks[made] = {rank: position for position, rank in enumerate(self.ranks)}
        return made

    def default_transport(self, device: torch.device) -> str:
        """ "host" where the caller's group cannot move tensors of this device between its ranks, "p2p" otherwise."""
        if device.type != "cuda" or _backend_for(self.group, device) == "nccl":
            return "p2p"
        return "host"

    def transport(self, name: str | None, device: torch.device) -> Transport:
        """The transport of that name for tensors on that device; all ranks must ask for it together the first time."""
        chosen = name or self.default_transport(device)
        if (chosen, device) not in self._wires:
            group = self.control
            if chosen == "host":
                logger.info("ranks %s exchange %s tensors through host memory", self.ranks, device.type)
            elif device.type == "cuda":
                group = self._private_group("nccl")
            self._wires[chosen, device] = P2P(group, self.ranks)
        wire = self._wires[chosen, device]
        return HostStaged(wire) if chosen == "host" else wire

    def connect(
        self, transport: str | None, device: torch.device, check: str | None, *, name: str, digest: int, steps: int
    ) -> Exchange:
        """The transport of one run of a schedule.

        Args:
            transport, device: as in `transport`.
            check: one of `ringattn.header.CHECKS`, or nothing for "header" over gloo and "off" over NCCL.
            name, digest, steps: as in `ringattn.header.Call`.

        Raises:
            RingError: the group failed before.
        """
        self.watch.check()
        self.rings += 1
        self.transport(transport, device)
        chosen = transport or self.default_transport(device)
        wire, nccl = self._wires[chosen, device], chosen != "host" and device.type == "cuda"
        level = check or ("off" if nccl else "header")
        if nccl and level not in ("off", "header"):
            raise NotImplementedError(f"check={level!r} is not there over NCCL; choose off, header or transport='host'")
        call = Call(self.rank, self.rings, name, digest, steps)
        guarded: Any = wire
        if level != "off":
            headers = P2P(self.control, self.ranks, HEADER_TAG)
            guarded = Checked(wire, headers, call, level=level, submit=self.helper.submit, eager=nccl)
        elif not nccl:
            guarded = Unchecked(wire, self.helper.submit)
        return Exchange(HostStaged(guarded) if chosen == "host" else guarded, self.watch, call)

    def due(self, validate: str | None = None) -> bool:
        """Count a call, and say whether its ranks must agree first.

        Args:
            validate: "always", "sampled", or nothing for always, except where blocks travel over NCCL.
        """
        call, self.calls = self.calls, self.calls + 1
        if not validate:
            validate = "sampled" if "nccl" in str(dist.get_backend(self.group)) else "always"
        return validate == "always" or call < SAMPLED_FIRST or call % SAMPLED_EVERY == 0

    def agree(self, terms: "Terms", error: Exception | None = None) -> bool:
        """All ranks compare what they are about to do, before any block moves.

        Args:
            terms: what this rank is about to do.
            error: why this rank cannot; every rank then raises it.

        Returns:
            Whether any rank needs gradients.

        Raises:
            ValueError: the ranks disagree; names the term and what each rank said.
            ValueError, NotImplementedError: a rank's own error, on every rank.
        """
        record = torch.tensor([0 if error is None else 1, terms.fingerprint(), terms.grad], dtype=torch.int64)
        records = torch.empty(self.world * len(record), dtype=torch.int64)
        self._together(lambda: gather_into(records, record, self.control))
        failed, fingerprints, grads = records.view(self.world, -1).unbind(dim=1)
        if failed.any() or (fingerprints != fingerprints[0]).any() or (grads.max() == NEEDS and grads.min() == OFF):
            self._explain(terms, error)
        return bool((grads == NEEDS).any())

    def _together(self, collective: Callable[[], None]) -> None:
        """Run a collective of the control group; a rank that does not come to it is named."""
        self.watch.check()
        self.watch.enter("agreement")
        try:
            self.helper.submit(collective).result()
        except RuntimeError as error:
            cause = self.watch.failed(error if isinstance(error, RingError) else PeerLost(None, error))
            raise cause from error
        self.watch.enter("outside")

    def _explain(self, terms: "Terms", error: Exception | None) -> None:
        answers: list[Any] = [None] * self.world
        failure = error and (type(error).__name__, str(error))
        said = (terms.terms, terms.grad, failure)
        self._together(lambda: dist.all_gather_object(answers, said, self.control))
        for rank, (_, _, failure) in enumerate(answers):
            if failure:
                if error is not None:
                    raise error
                kind = NotImplementedError if failure[0] == "NotImplementedError" else ValueError
                raise kind(f"rank {rank}: {failure[1]}")
        options, grads, _ = zip(*answers, strict=True)
        differing = [key for key in options[0] if len({str(terms.get(key)) for terms in options}) > 1]
        if not differing:
            off = [rank for rank, grad in enumerate(grads) if grad == OFF]
            raise ValueError(f"ranks {off} run without gradients (torch.no_grad) where others need them")
        lines = [
            f"{key}: " + ", ".join(f"rank {rank} has {terms.get(key)!r}" for rank, terms in enumerate(options))
            for key in differing
        ]
        raise ValueError("ranks disagree on " + "; ".join(lines))


OFF, ON, NEEDS = 0, 1, 2
"""Gradients on a rank: grad mode is off, it is on but nothing here requires any, or they are required."""


@dataclass(frozen=True)
class Terms:
    """What a rank is about to do: everything that must be equal on all ranks, by name, and its need of gradients."""

    terms: dict[str, Any] = field(default_factory=dict)
    grad: int = OFF

    def fingerprint(self) -> int:
        """63 bits that are equal for equal terms."""
        return digest_of(*sorted(self.terms.items()))


def gather_into(output: Tensor, part: Tensor, group: ProcessGroup) -> None:
    """All-gather equal parts into one tensor, under the name that this version of torch gives the call."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(output, part, group=group)


def _timeout(group: ProcessGroup) -> timedelta:
    """How long a caller's group waits for a peer: the `timeout` that it was made with."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout
    return c10d._get_default_timeout(dist.Backend("gloo"))


def _backend_for(group: ProcessGroup, device: torch.device) -> str | None:
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        return None


class Buffers:
    """Flat buffers that grow, leased for the length of a call and kept between calls.

    Two calls in flight get different buffers. On CUDA a buffer is reused by the stream that gave it back alone, so that
    stream order protects it.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = {}

    @contextmanager
    def lease(self, number: int, numel: int, dtype: torch.dtype, device: torch.device) -> Iterator[list[Tensor]]:
        """`number` one-dimensional tensors of `numel` elements; what they hold is undefined."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        free = self._free.setdefault((dtype, device, stream), [])
        whole = [self._take(free, numel, dtype, device) for _ in range(number)]
        try:
            yield [buffer[:numel] for buffer in whole]
        finally:
            free.extend(whole)

    @staticmethod
    def _take(free: list[Tensor], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        for index, buffer in enumerate(free):
            if buffer.numel() >= numel:
                return free.pop(index)
        if free:
            free.pop()  # too small for what is asked now: the new one takes its place
        return torch.empty(numel, dtype=dtype, device=device)

    def nbytes(self) -> int:
        """Bytes of all buffers that are not leased."""
        return sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)
