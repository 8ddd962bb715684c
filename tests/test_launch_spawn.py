"""Ranks that are started: results come back, errors and hangs surface with their traceback, nobody is left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringattn.launch.spawn import RankError, run, under_torchrun


@dataclass
class Payload:
    """Pickled by reference to this file, which no started rank can import by name."""

    value: int


def summed(payload: Payload) -> tuple[int, int, int, Payload]:
    total = torch.tensor(payload.value + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_world_size(), int(total), torch.get_num_threads(), Payload(dist.get_rank())


def environment(name: str) -> str | None:
    return os.environ.get(name)


def fails(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} is out of sorts")
    dist.barrier()


def dies(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def hangs(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_back_by_rank(world: int) -> None:
    results = run(summed, world, Payload(10), timeout=60)
    total = 10 * world + sum(range(world))
    threads = torch.get_num_threads() if world == 1 else 1
    assert {rank: result[:2] for rank, result in results.items()} == dict.fromkeys(range(world), (world, total))
    assert [result[3] for result in results.values()] == [Payload(rank) for rank in range(world)]
    assert world == 1 or {result[2] for result in results.values()} == {threads}


def test_ranks_see_the_environment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("one", "two"):
        monkeypatch.setenv("RINGATTN_TEST", value)
        assert run(environment, 2, "RINGATTN_TEST", timeout=60) == {0: value, 1: value}


@pytest.mark.parametrize("rank", [0, 2])
def test_the_first_error_surfaces_with_its_traceback(rank: int) -> None:
    began = time.monotonic()
    with pytest.raises(
        RankError, match=f"(?s)rank {rank} failed.*in fails.*ValueError: rank {rank} is out of sorts"
    ) as info:
        run(fails, 3, rank, timeout=60)
    assert (info.value.rank, info.value.kind) == (rank, "ValueError")
    assert time.monotonic() - began < 30


def test_a_rank_that_dies_silently_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 failed") as info:
        run(dies, 2, 1, timeout=60)
    assert info.value.rank == 1


def test_a_hang_ends_and_says_where() -> None:
    with pytest.raises(TimeoutError, match=r"(?s)ranks \[0, 1\] of 2 .*rank 1: .*in hangs"):
        run(hangs, 2, 1, timeout=5)


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "from ringattn.launch.spawn import run\n"
        "def leave_pid(folder):\n"
        "    open(f'{folder}/pid{os.getpid()}', 'w').close()\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    run(leave_pid, 2, sys.argv[1])\n"
    )
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
    try:
        until(lambda: len(list(tmp_path.glob("pid*"))) == 2)
    finally:
        parent.kill()
        parent.wait()
    pids = [path.name.removeprefix("pid") for path in tmp_path.glob("pid*")]
    until(lambda: not any(Path("/proc", pid).exists() for pid in pids))


def until(condition: Callable[[], bool], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("nproc", "device"), [(0, "cpu"), (2, "tpu")])
def test_bad_arguments_are_refused(nproc: int, device: str) -> None:
    with pytest.raises(
        ValueError, match="nproc must be at least 1, got 0|unknown device 'tpu'; choose one of cpu, cuda"
    ):
        run(summed, nproc, Payload(0), device=device)


def test_torchrun_ranks_are_used(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import torch.distributed as dist\n"
        "from ringattn.launch.spawn import run\n"
        "def rank():\n    return dist.get_rank(), dist.get_world_size()\n"
        "((number, answer),) = run(rank, 7).items()\n"
        "assert answer == (number, 2)\n"
        f"open(r'{tmp_path}/done' + str(number), 'w').close()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(worker)]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert sorted(path.name for path in tmp_path.glob("done*")) == ["done0", "done1"]
    assert not under_torchrun()
