"""The launcher's view of its ranks: pages in shared memory that outlive them, and who holds the others up.

A rank writes its place into its page at every step, and a sign of life four times a second. Ranks that can, name the
culprit themselves; this sees those that cannot: a frozen one, or all of them stuck outside the reach of Python.
"""

import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ringattn.recorder import Page, Place, read_page, recorder, side_by_side

BEAT = 0.25
GRACE = 3.0
"""Seconds beyond the limit in which ranks may find the culprit themselves, with more to say than is seen from here."""

BLOCKED = ("waiting", "agreement")


def follow(page: Path, rank: int) -> None:
    """Write this process's places and signs of life into a page from here on."""
    recorder.attach(page, rank, os.getpid())
    threading.Thread(target=_beat, name="heartbeat", daemon=True).start()


def _beat() -> None:
    while True:
        time.sleep(BEAT)
        recorder.beat()


class Watchdog:
    """Reads the pages of ranks.

    Args:
        folder: holds `page0`, `page1`, ...
        world: how many.
        limit: seconds that a rank may wait for another, or be without a sign of life; None watches nothing.
    """

    def __init__(self, folder: Path, world: int, limit: float | None) -> None:
        self._folder, self._world, self.limit = folder, world, limit

    def pages(self) -> list[Page]:
        """The pages that are there."""
        found = [self._folder / f"page{rank}" for rank in range(self._world)]
        return [read_page(path) for path in found if path.exists()]

    def stuck(self) -> tuple[int, str] | None:
        """The rank that the others wait for, and why it is thought so; None while all is well."""
        if self.limit is None:
            return None
        now, limit = time.time(), self.limit + GRACE
        pages = self.pages()
        frozen = [page for page in pages if now - page.heartbeat > limit]
        if frozen:
            return frozen[0].rank, f"rank {frozen[0].rank} gives no sign of life; {self.where(frozen[0])}"
        last = {page.rank: _last(page) for page in pages}
        late = [rank for rank, place in last.items() if place.phase in BLOCKED and now - place.since > limit]
        if not late:
            return None
        free = [rank for rank, place in last.items() if place.phase not in BLOCKED]
        culprit = min(free or last, key=lambda rank: last[rank].order())
        page = next(page for page in pages if page.rank == culprit)
        return culprit, f"ranks {late} waited for more than {limit:g} s; furthest behind is {self.where(page)}"

    @staticmethod
    def where(page: Page) -> str:
        """Where a rank was last seen, and when."""
        now, place = time.time(), _last(page)
        return (
            f"rank {page.rank} (process {page.pid}) {place} for {now - place.since:.1f} s, "
            f"last sign of life {now - page.heartbeat:.1f} s ago"
        )

    def summary(self) -> str:
        """Where every rank was last seen; empty if none ran a ring."""
        pages = self.pages()
        return "\n".join(map(self.where, pages)) if any(page.places for page in pages) else ""

    def keep(self, folder: Path) -> None:
        """Copy the pages, for `ringattn trace`."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self._world):
            if (self._folder / f"page{rank}").exists():
                shutil.copyfile(self._folder / f"page{rank}", folder / f"page{rank}")


def _last(page: Page) -> Place:
    return page.places[-1] if page.places else Place(0, "", 0, 0, "outside", page.heartbeat)


def load_pages(folder: Path) -> list[Page]:
    """The pages in a folder, by rank.

    Raises:
        ValueError: there are none, or one is damaged.
    """
    paths = sorted(folder.glob("page*"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise ValueError(f"{folder} holds no pages of a recorder (page0, page1, ...)")
    return [read_page(path) for path in paths]


def table(pages: Sequence[Page], last: int) -> str:
    """The last places of all ranks side by side, and where each one ended."""
    ends = "\n".join(f"rank {page.rank}: {_last(page)}" for page in pages)
    return f"{side_by_side(pages, last)}\n\n{ends}"
