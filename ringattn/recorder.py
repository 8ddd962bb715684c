"""A recorder keeps the last steps of this process in a page that can be a file, which then survives the process.

The page holds a head (rank, heartbeat, count) and a ring of records of 48 bytes. Writing one takes about a microsecond.
"""

import mmap
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = ("outside", "agreement", "computing", "waiting", "failed")
"""Where a rank is: in user code, comparing options, computing visits, waiting for transfers, or stopped by an error."""

_MAGIC = b"ringrec1"
_HEAD = struct.Struct("<8siidq")  # magic, rank, process id, heartbeat, records written
_RECORD = struct.Struct("<dqqiiiiq")  # time, group, ring number, is backward, step, steps, phase, spare
CAPACITY = 512
_SIZE = _HEAD.size + CAPACITY * _RECORD.size


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        number, name: the ring, as in `ringattn.header.Call`.
        step, steps: of its schedule.
        phase: one of `PHASES`.
        since: seconds of the host's wall clock.
        group: digest of the group's name.
    """

    number: int
    name: str
    step: int
    steps: int
    phase: str
    since: float = 0.0
    group: int = 0

    def order(self) -> tuple[int, int, int]:
        """Sorts places by how far a rank has come."""
        return self.number, self.step, PHASES.index(self.phase)

    def is_past(self, other: "Place") -> bool:
        """Whether a rank here has ended the ring that one there is in."""
        ended = self.number == other.number and self.step == self.steps
        return self.number > other.number or (ended and self.phase in ("outside", "agreement"))

    def __str__(self) -> str:
        if self.phase == "outside":
            return (
                f"outside the ring, after ring {self.number} ({self.name})" if self.name else "outside, before any ring"
            )
        if self.phase == "agreement":
            return f"in the agreement before ring {self.number + 1}"
        return f"in ring {self.number} ({self.name}), ring step {self.step} of {self.steps}, phase {self.phase!r}"


@dataclass(frozen=True)
class Page:
    """What a page holds: of which process, its last sign of life, and its last places, oldest first."""

    rank: int
    pid: int
    heartbeat: float
    places: tuple[Place, ...]


class Recorder:
    """Writes places into a page in memory, or in a file once `attach` was called."""

    def __init__(self) -> None:
        self._page: Any = bytearray(_SIZE)
        self._rank, self._pid, self._count = -1, 0, 0

    def attach(self, path: Path, rank: int, pid: int) -> None:
        """From here on write to a file, on a file system in memory if that matters."""
        with path.open("wb+") as file:
            file.truncate(_SIZE)
            page = mmap.mmap(file.fileno(), _SIZE)
        page[:] = bytes(self._page)
        self._page, self._rank, self._pid = page, rank, pid
        self.beat()

    def beat(self) -> None:
        """A sign of life."""
        _HEAD.pack_into(self._page, 0, _MAGIC, self._rank, self._pid, time.time(), self._count)

    def mark(self, group: int, number: int, name: str, step: int, steps: int, phase: str) -> Place:
        """Write down where this process is."""
        now = time.time()
        at = _HEAD.size + self._count % CAPACITY * _RECORD.size
        code = ("", "forward", "backward").index(name)
        _RECORD.pack_into(self._page, at, now, group, number, code, step, steps, PHASES.index(phase), 0)
        self._count += 1
        _HEAD.pack_into(self._page, 0, _MAGIC, self._rank, self._pid, now, self._count)
        return Place(number, name, step, steps, phase, now, group)

    def read(self) -> Page:
        """What was written so far."""
        return _decode(self._page)


def read_page(path: Path) -> Page:
    """The page that a process wrote, which may still write or be gone.

    Raises:
        ValueError: the file is no such page.
    """
    data = path.read_bytes()
    if len(data) != _SIZE or data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{path} is not a page of the recorder ({len(data)} bytes, expected {_SIZE})")
    return _decode(data)


def _decode(page: Any) -> Page:
    _, rank, pid, heartbeat, written = _HEAD.unpack_from(page, 0)
    if not 0 <= written:
        raise ValueError(f"a page of the recorder cannot hold {written} records")
    places = []
    for index in range(max(0, written - CAPACITY), written):
        now, group, number, code, step, steps, phase, _ = _RECORD.unpack_from(
            page, _HEAD.size + index % CAPACITY * _RECORD.size
        )
        if not (0 <= code < 3 and 0 <= phase < len(PHASES)):
            raise ValueError(f"record {index} of the page is damaged: name {code}, phase {phase}")
        places.append(Place(number, ("", "forward", "backward")[code], step, steps, PHASES[phase], now, group))
    return Page(rank, pid, heartbeat, tuple(places))


def side_by_side(pages: Sequence[Page], last: int = 12) -> str:
    """The last places of several ranks as a table of one row per moment, oldest first."""
    events = sorted((place.since, page.rank, place) for page in pages for place in page.places[-last:])
    if not events:
        return "nothing was recorded"
    begin = events[0][0]
    width = 24
    lines = [f"{'seconds':>9}  " + "".join(f"{f'rank {page.rank}':<{width}}" for page in pages)]
    columns = {page.rank: index for index, page in enumerate(pages)}
    for since, rank, place in events:
        text = f"{place.number}{place.name[:1]} {place.step}/{place.steps} {place.phase}"
        lines.append(f"{since - begin:>9.4f}  " + " " * (width * columns[rank]) + text)
    return "\n".join(lines)


recorder = Recorder()
"""This process's."""
