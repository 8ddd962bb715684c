"""The launcher ends ranks that are stuck and says where the culprit was; what ranks did last is there after a crash."""

import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringattn import ring_attention
from ringattn.backends import reference
from ringattn.comm import get_comm, group_name
from ringattn.launch import cli
from ringattn.launch.spawn import RankError, run
from ringattn.launch.watchdog import Watchdog, follow, load_pages
from ringattn.recorder import CAPACITY, Recorder, read_page
from ringattn.testing import make_inputs


def rings(fault: str, culprit: int) -> None:
    """Two rings; in the second the culprit meets the fault as it computes."""
    q, k, v, _ = make_inputs(1, 2, 2, 8, 8)
    ring_attention(q, k, v, backend="reference")
    forward = reference.forward

    def stop(*args) -> None:
        {
            "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "freezes": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "hangs": lambda: time.sleep(1000),
            "raises": lambda: forward(),
        }[fault]()

    if dist.get_rank() == culprit:
        reference.forward = stop
    ring_attention(q, k, v, backend="reference")


@pytest.mark.parametrize("fault", ["dies", "freezes", "hangs", "raises"])
def test_the_culprit_and_its_place_are_named(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(rings, 3, fault, 1, timeout=100, stall=5.0, record=tmp_path)
    assert time.monotonic() - begin < 60
    assert caught.value.rank == 1, caught.value
    place = "in ring 2 (forward), ring step 0 of 3, phase '" + ("failed" if fault == "raises" else "computing")
    assert any(place in line for line in str(caught.value).splitlines() if line.startswith("rank 1 (")), caught.value
    assert cli.main(["trace", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"rank 1: {place}" in shown and "rank 2: in ring 2" in shown


def stuck_outside_python() -> None:
    """Every rank blocks where only the launcher can see it; rank 2 comes last."""
    comm = get_comm(group_name(None))
    if dist.get_rank() == 2:
        time.sleep(1000)
    comm.watch.enter("agreement")
    time.sleep(1000)


def test_the_launcher_sees_what_ranks_cannot() -> None:
    with pytest.raises(
        RankError, match=r"ranks \[0, 1\] waited for more than 5 s; furthest behind is rank 2"
    ) as caught:
        run(stuck_outside_python, 3, timeout=60, stall=2.0)
    assert (caught.value.rank, caught.value.kind) == (2, "stall")


def place(folder: Path, rank: int, phase: str, number: int = 1) -> Recorder:
    recorder = Recorder()
    recorder.attach(folder / f"page{rank}", rank, 100 + rank)
    recorder.mark(0, number, "forward", 1, 4, phase)
    return recorder


def test_who_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [place(tmp_path, 0, "waiting", 2), place(tmp_path, 1, "computing", 2), place(tmp_path, 2, "waiting", 2)]
    watchdog, now = Watchdog(tmp_path, 3, limit=5.0), time.time()
    assert watchdog.stuck() is None
    monkeypatch.setattr(time, "time", lambda: now + 9)
    for recorder in pages:
        recorder.beat()
    culprit, text = watchdog.stuck() or (None, "")
    assert culprit == 1 and "ring 2 (forward), ring step 1 of 4, phase 'computing' for 9.0 s" in text
    pages[1].mark(0, 2, "forward", 1, 4, "waiting")
    pages[2].mark(0, 3, "forward", 0, 4, "waiting")
    assert (watchdog.stuck() or (None,))[0] == 0
    monkeypatch.setattr(time, "time", lambda: now + 20)
    pages[0].beat()
    pages[1].beat()
    culprit, text = watchdog.stuck() or (None, "")
    assert culprit == 2 and "no sign of life" in text
    assert Watchdog(tmp_path, 3, limit=None).stuck() is None


def test_a_page_keeps_the_last_places(tmp_path: Path) -> None:
    recorder = place(tmp_path, 3, "computing")
    for number in range(2 * CAPACITY):
        recorder.mark(7, number, "backward", 2, 5, "waiting")
    page = read_page(tmp_path / "page3")
    assert (page.rank, page.pid, len(page.places)) == (3, 103, CAPACITY)
    assert [p.number for p in page.places] == list(range(CAPACITY, 2 * CAPACITY))
    assert recorder.read() == page


def test_files_that_are_no_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", str(tmp_path)]) == 2
    assert "holds no pages" in capsys.readouterr().err
    (tmp_path / "page0").write_bytes(b"ringrec1" + b"\xff" * 10)
    with pytest.raises(ValueError, match="not a page of the recorder"):
        load_pages(tmp_path)
    place(tmp_path, 0, "computing")
    whole = (tmp_path / "page0").read_bytes()
    for seed in range(50):
        damaged = bytearray(whole)
        for at in torch.randint(0, 96, (4,), generator=torch.Generator().manual_seed(seed)).tolist():
            damaged[at] ^= 0x5A
        (tmp_path / "page0").write_bytes(damaged)
        try:
            load_pages(tmp_path)
        except ValueError:
            pass


def heartbeat(page: str) -> float:
    follow(Path(page), 0)
    time.sleep(1.0)
    return time.time() - read_page(Path(page)).heartbeat


def test_signs_of_life(tmp_path: Path) -> None:
    assert run(heartbeat, 1, str(tmp_path / "page0"), timeout=60)[0] < 0.9


def full_disk() -> None:
    """The rank can write no more: its result cannot be left for the launcher."""
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run(full_disk, 2, timeout=60)
    assert caught.value.rank == 1
