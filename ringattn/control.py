"""Who is to blame when a ring cannot go on: what ranks tell one another over the store, never over broken connections.

While all is well nothing is sent. A rank that has waited for a second writes down where it is; the first to fail writes
why, once; every waiting rank reads that within half a second. A rank that wrote nothing when time is up is dead or
frozen; otherwise the one that has come least far is behind. Who times out first says nothing.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from torch.distributed import Store

from ringattn.header import Call, RingError, digest_of
from ringattn.recorder import Place, recorder
from ringattn.transport import PeerLost

logger = logging.getLogger(__name__)

LAP = 0.2  # seconds between two looks at the store, while waiting
ASK_AFTER, TELL_AFTER = 0.4, 1.0
GRACE = 1.5  # a lost connection is often a consequence: time for the cause to be told
ANSWER = 3.0  # the store must answer within


class StoreLost(RuntimeError):
    """The store does not answer; who is to blame can then be told from the connections alone."""


class Task:
    """A call on the helper's thread."""

    def __init__(self, call: Callable[[], Any], lap: Callable[[float], None] | None) -> None:
        self._call, self._lap = call, lap
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # whoever asks for the result gets it
            self._error = error
        self._done.set()

    def finished(self, seconds: float) -> bool:
        """Whether it has ended, after waiting for that long at most."""
        return self._done.wait(seconds)

    def result(self) -> Any:
        """Its value or error; calls `lap(seconds waited)` now and then until there is one."""
        begin = time.monotonic()
        while not self._done.wait(LAP):
            if self._lap is not None:
                self._lap(time.monotonic() - begin)
        if self._error is not None:
            raise self._error
        return self._value


class Helper:
    """A thread for calls that wait for other ranks, one after the other, so that no waiting rank is out of reach."""

    def __init__(self, lap: Callable[[float], None] | None = None) -> None:
        self._lap = lap
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._started = False

    def submit(self, call: Callable[[], Any]) -> Task:
        """Run the call on the thread."""
        if not self._started:
            self._started = True
            threading.Thread(target=_serve, args=(self._queue,), name="ringattn", daemon=True).start()
        task = Task(call, self._lap)
        self._queue.put(task)
        return task

    def __del__(self) -> None:
        self._queue.put(None)


def _serve(queue: "SimpleQueue[Task | None]") -> None:
    while (task := queue.get()) is not None:
        task.run()
        del task


class Control:
    """The part of one rank in finding out why a ring stopped.

    Args:
        store: shared by the ranks of the group.
        group: its name.
        rank, world: this ring rank and how many there are.
        limit: seconds after which a wait for a peer is an error.
    """

    def __init__(self, store: Store, group: str, rank: int, world: int, limit: float) -> None:
        self.rank, self.world, self.limit = rank, world, limit
        self.broken: RingError | None = None
        made = store.add(
            f"ringattn/{group}/made/{rank}", 1
        )  # a group of that name may have failed on this store before
        self._store, self._prefix, self._group = store, f"ringattn/{group}/{made}/", digest_of(group)
        self._told = self._alone = False
        self._awaited: tuple[int, ...] = ()
        self._asking = Helper()
        self._call = Call(rank, 0, "")
        self._place = Place(0, "", 0, 0, "outside", time.time())
        store.set(f"{self._prefix}name/{rank}", f"rank {rank} (host {socket.gethostname()}, process {os.getpid()})")

    def mark(self, call: Call, step: int, phase: str, awaited: tuple[int, ...] | None = None) -> None:
        """Write down where this rank is, and what ranks it now needs something from."""
        self._call = call
        self._awaited = self._awaited if awaited is None else awaited
        self._place = recorder.mark(self._group, call.number, call.name, step, call.steps, phase)
        self._told = False

    def enter(self, phase: str) -> None:
        """Write down that this rank is past its last ring, in "agreement" or "outside"."""
        self.mark(self._call, self._call.steps, phase)

    def lap(self, waited: float) -> None:
        """Called while this rank waits for others.

        Raises:
            RingError: another rank failed, or time is up.
        """
        try:
            if waited > ASK_AFTER and not self._alone:
                self._raise_if_told()
                if waited > TELL_AFTER and not self._told:
                    self._tell_place()
        except StoreLost as error:
            logger.warning("%s; the ring goes on without it", error)
            self._alone = True
        if waited > self.limit:
            raise self._settle(self._behind(f"rank {self.rank} waited for {waited:.1f} s (limit {self.limit:g} s)"))

    def failed(self, error: BaseException) -> BaseException:
        """Tell the other ranks why this one cannot go on, and return what it raises."""
        if isinstance(error, PeerLost):
            error = self._lost(error)
        elif not isinstance(error, RingError):
            place = self._place
            self._settle((self.rank, f"rank {self.rank} failed first, {place}: {type(error).__name__}: {error}"))
            self.broken = RingError(f"{type(error).__name__}: {error}", self.rank)
        elif self.broken is None:
            error = self._settle((error.culprit, str(error)))
        recorder.mark(self._group, self._place.number, self._place.name, self._place.step, self._place.steps, "failed")
        return error

    def check(self) -> None:
        """Raise what this group failed of before, if it did: its connections may hold what belongs to no ring."""
        if self.broken is not None:
            raise RingError(f"this group failed before and cannot be used again: {self.broken}", self.broken.culprit)

    def _lost(self, error: PeerLost) -> RingError:
        """A connection broke: what the cause was, if a rank says it, and otherwise who is gone."""
        begin = time.monotonic()
        try:
            self._tell_place()
            while time.monotonic() - begin < GRACE:
                self._raise_if_told()
                time.sleep(LAP)
        except StoreLost:
            self._alone = True
        except RingError as told:
            return told
        what = f"rank {self.rank} lost a connection"
        if error.peer is None:
            return self._settle(self._behind(f"{what} ({error})"))
        return self._settle((error.peer, f"{what} to {self._who(error.peer)}, which died or left ({error})"))

    def _behind(self, what: str) -> tuple[int | None, str]:
        """Who holds the others up, from what they wrote."""
        try:
            told = {rank: self._get(f"place/{rank}") for rank in range(self.world) if rank != self.rank}
        except StoreLost as error:
            ranks = ", ".join(map(str, self._awaited)) or "all"
            return (self._awaited or (None,))[0], f"{what} for something from rank {ranks} ({error})"
        said = {rank: json.loads(text) for rank, text in told.items() if text is not None}
        awaited = {rank: entry.pop("awaited") for rank, entry in said.items()} | {self.rank: self._awaited}
        places = {rank: Place(**entry) for rank, entry in said.items()} | {self.rank: self._place}
        silent = [rank for rank in range(self.world) if rank not in places]
        if silent:
            names = ", ".join(self._who(rank) for rank in silent)
            return silent[0], f"{what}, and there is no sign of {names}: dead, frozen, or busy outside the ring"
        for rank, place in places.items():
            for peer in awaited[rank] if place.phase == "waiting" else ():
                if places[peer].is_past(place):
                    left = f"{self._who(peer)} went on, {places[peer]}, without sending what rank {rank} needs, {place}"
                    return peer, f"{what}; {left}"
        last = min(places, key=lambda rank: places[rank].order())
        if all(place.order() == places[last].order() for place in places.values()):
            return None, f"{what}, as every rank does: is the network between them down?"
        return last, f"{what}; furthest behind is {self._who(last)}, {places[last]}"

    def _settle(self, found: tuple[int | None, str]) -> RingError:
        """Make this the cause for all ranks, unless another was named before; the error to raise."""
        culprit, text = found
        text = f"{text}. Rank {self.rank} was {self._place}"
        record = json.dumps({"culprit": culprit, "text": text, "by": self.rank})
        try:
            record = self._ask(lambda: self._store.compare_set(f"{self._prefix}abort", "", record)).decode()
        except StoreLost as lost:
            text = f"{text} ({lost})"
            record = json.dumps({"culprit": culprit, "text": text, "by": self.rank})
        return self._error(json.loads(record))

    def _raise_if_told(self) -> None:
        record = self._get("abort")
        if record is not None:
            raise self._error(json.loads(record))

    def _error(self, record: dict[str, Any]) -> RingError:
        said = (
            "" if record["by"] == self.rank else f" (said by rank {record['by']}; rank {self.rank} was {self._place})"
        )
        self.broken = RingError(f"{record['text']}{said}", record["culprit"])
        return self.broken

    def _tell_place(self) -> None:
        said = json.dumps(vars(self._place) | {"awaited": self._awaited})
        self._ask(lambda: self._store.set(f"{self._prefix}place/{self.rank}", said))
        self._told = True

    def _who(self, rank: int) -> str:
        try:
            return self._get(f"name/{rank}") or f"rank {rank}"
        except StoreLost:
            return f"rank {rank}"

    def _get(self, key: str) -> str | None:
        key = self._prefix + key

        def get() -> str | None:
            return self._store.get(key).decode() if self._store.check([key]) else None

        return self._ask(get)

    def _ask(self, call: Callable[[], Any]) -> Any:
        """The store's answer.

        Raises:
            StoreLost: it gave none, or none in time.
        """
        task = self._asking.submit(call)
        if not task.finished(ANSWER):
            self._asking = Helper()
            raise StoreLost(f"the store of the process group did not answer rank {self.rank} within {ANSWER} s")
        try:
            return task.result()
        except RuntimeError as error:
            raise StoreLost(f"rank {self.rank} lost the store of the process group ({error})") from error


class Exchange:
    """The transport of one ring: it records phases, and names whoever is to blame for what fails.

    Args:
        wire: moves the blocks.
        control: of the group.
        call: the ring.
    """

    def __init__(self, wire: Any, control: Control, call: Call) -> None:
        self._wire, self._control, self._call = wire, control, call

    @property
    def sent_bytes(self) -> int:
        return self._wire.sent_bytes

    def post(self, sends: Any, recvs: Any, step: int = 0) -> Any:
        self._control.mark(self._call, step, "computing", tuple(sorted({message.peer for message in recvs})))
        return step, self._wire.post(sends, recvs, step)

    def wait(self, pending: Any) -> None:
        step, token = pending
        self._control.mark(self._call, step, "waiting")
        self._wire.wait(token)

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Note the end of the ring; an error is told to the others, and replaced by its cause if that is theirs."""
        if error is None:
            self._control.mark(self._call, self._call.steps, "outside")
        elif (cause := self._control.failed(error)) is not error:
            raise cause from error
