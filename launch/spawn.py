"""Run a function on every rank: on torchrun's ranks where there are any, otherwise on processes started here.

A rank that raises ends the run: the other ranks are stopped at once, and the caller gets the first error with the
rank's own traceback. Nothing waits for a peer that is gone, and no rank outlives the process that started it.
"""

import faulthandler
import importlib.util
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from multiprocessing import connection, get_all_start_methods, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ringattn.launch.watchdog import Watchdog, follow

DEVICES = ("cpu", "cuda")


class RankError(RuntimeError):
    """The first rank to fail, with its traceback: `rank`, and `kind`, the exception's class name."""

    def __init__(self, rank: int, kind: str, text: str) -> None:
        super().__init__(f"rank {rank} failed\n\n{text}")
        self.rank, self.kind = rank, kind


def run(
    function: Callable[..., Any],
    nproc: int,
    *args: Any,
    device: str = "cpu",
    timeout: float | None = None,
    stall: float | None = None,
    record: str | Path | None = None,
) -> dict[int, Any]:
    """Call `function(*args)` on every rank of a new default process group.

    The group speaks gloo for CPU tensors and, where every rank has a card of its own, NCCL for CUDA tensors. Where more
    than one rank shares a host, each computes with one thread. A rank on CUDA has its card selected.

    Args:
        function: defined at the top level of a module; what it returns must be picklable.
        nproc: ranks to start. Under torchrun its world size is used instead.
        *args: picklable arguments.
        device: "cpu" or "cuda".
        timeout: seconds after which ranks that have not ended are stopped; None waits for ever. Ignored under torchrun.
        stall: seconds that a rank may wait for another before that is an error; None is two hours.
        record: folder for what every rank did last, if the run fails; `ringattn trace` shows it.

    Returns:
        Results by rank: all of them, or under torchrun this rank's only.

    Raises:
        ValueError: nproc below 1 or an unknown device.
        RankError: a rank raised, died, or held the others up.
        TimeoutError: ranks had not ended; says which, and where they were.

    Example:
        >>> run(os.getpid, 2).keys()
        dict_keys([0, 1])
    """
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r}; choose one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' asked for, but torch sees no CUDA device; choose cpu")
    if under_torchrun():
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if record is not None:
            Path(record).mkdir(parents=True, exist_ok=True)
            follow(Path(record) / f"page{rank}", rank)
        return {rank: _in_group(function, args, rank, world, local, local_world, device, "env://", stall)}
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    with tempfile.TemporaryDirectory(prefix="ringattn-", ignore_cleanup_errors=True) as folder:
        return _start(_Call(function, args, nproc, device, Path(folder), timeout, stall), record)


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun (or another launcher with its variables) started."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"))


def torchrun_rank() -> int:
    """This process's rank under torchrun, 0 where it is the only process so far."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


def world_size(asked: int | None, default: int) -> int:
    """How many ranks `run` will have: torchrun's, else as many as asked for, else the default.

    Raises:
        ValueError: torchrun started another number than was asked for.
    """
    if not under_torchrun():
        return default if asked is None else asked
    world = int(os.environ["WORLD_SIZE"])
    if asked not in (None, world):
        raise ValueError(f"torchrun started {world} ranks, but {asked} were asked for")
    return world


class _Call:
    """What a started rank needs to know, as it travels to it."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        world: int,
        device: str,
        folder: Path,
        timeout: float | None,
        stall: float | None,
    ) -> None:
        self.world, self.device, self.folder, self.timeout, self.stall = world, device, folder, timeout, stall
        self.environment = dict(os.environ)
        self.module = function.__module__
        self.file = getattr(sys.modules.get(self.module), "__file__", None)
        self.payload = pickle.dumps((function, args))

    def load(self) -> tuple[Callable[..., Any], Sequence[Any]]:
        """The function and its arguments; a module that cannot be imported by name, such as a test file, by path."""
        if self.module not in sys.modules and self.file is not None and not _importable(self.module):
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            assert spec is not None and spec.loader is not None
            for package in accumulate(self.module.split(".")[:-1], "{}.{}".format):
                sys.modules.setdefault(package, ModuleType(package))
            sys.modules[self.module] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        return pickle.loads(self.payload)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _start(call: _Call, record: str | Path | None) -> dict[int, Any]:
    """Start all ranks, wait for them, and collect what they left in the call's folder."""
    context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    # Idle threads must sleep: spinning ones took 21 s of processor time for 12 s of work on two busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["torch._dynamo", "ringattn"])  # a rank then starts in 0.1 s instead of 3 s
    ranks = [context.Process(target=_main, args=(call, rank)) for rank in range(call.world)]
    watchdog = Watchdog(call.folder, call.world, call.stall)
    try:
        for process in ranks:
            process.start()
        late = _wait(ranks, call.timeout, watchdog)
        time.sleep(0.2 * any(process.exitcode for process in ranks))  # for the exit code of a rank that died before
        codes = [process.exitcode for process in ranks]
        seen = watchdog.summary()
    finally:
        _stop(ranks)
        if record is not None and any(process.exitcode for process in ranks):
            watchdog.keep(Path(record))
    _raise_first(call, codes, late, seen)
    return {rank: pickle.loads((call.folder / f"result{rank}").read_bytes()) for rank in range(call.world)}


def _wait(ranks: Sequence[BaseProcess], timeout: float | None, watchdog: Watchdog) -> list[int]:
    """Until all ranks have ended, one has failed or is stuck, or time is up; the ranks that time ran out for."""
    deadline = None if timeout is None else time.monotonic() + timeout
    running = dict(enumerate(ranks))
    while running and all(process.exitcode in (None, 0) for process in ranks):
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return list(running)
        stuck = watchdog.stuck()
        if stuck is not None:
            raise RankError(stuck[0], "stall", stuck[1])
        lap = 1.0 if watchdog.limit is not None else None
        limits = [seconds for seconds in (left, lap) if seconds is not None]
        connection.wait([process.sentinel for process in running.values()], min(limits, default=None))
        running = {rank: process for rank, process in running.items() if process.is_alive()}
    return []


def _stop(ranks: Sequence[BaseProcess]) -> None:
    """End the ranks that still run; they were waiting for a peer, or are late."""
    started = [process for process in ranks if process.pid is not None]
    for process in started:
        if process.is_alive():
            process.kill()
    for process in started:
        process.join()


def _raise_first(call: _Call, codes: Sequence[int | None], late: Sequence[int], seen: str) -> None:
    """Raise the cause: a rank that died without a word, or the error that came first. What peers raise comes later."""
    seen = seen and f"\n\nWhere the ranks were:\n{seen}"
    failures = [pickle.loads(path.read_bytes()) for path in call.folder.glob("error*")]
    spoken = {rank for _, rank, _, _, _ in failures}
    for rank, code in enumerate(codes):
        if code and rank not in spoken:
            raise RankError(rank, "exit", f"the process ended with exit code {code} and said no more{seen}")
    if failures:
        _, rank, kind, text, culprit = min(failures, key=lambda said: said[0])
        raise RankError(rank if culprit is None else culprit, kind, text + seen)
    if late:
        stacks = [f"rank {rank}: {(call.folder / f'stack{rank}').read_text()}" for rank in late]
        raise TimeoutError(f"ranks {late} of {call.world} had not ended after {call.timeout} s\n\n" + "\n".join(stacks))


def _main(call: _Call, rank: int) -> None:
    """A started rank, from its first instruction to its last."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    follow(call.folder / f"page{rank}", rank)
    stack = (call.folder / f"stack{rank}").open("w")
    if call.timeout is not None:
        faulthandler.dump_traceback_later(0.9 * call.timeout, file=stack)
    os.environ.clear()
    os.environ.update(call.environment)
    try:
        function, args = call.load()
        store = f"file://{call.folder / 'store'}"
        result = _in_group(function, args, rank, call.world, rank, call.world, call.device, store, call.stall)
        _leave(call.folder / f"result{rank}", result)
    except BaseException as error:
        said = (time.monotonic(), rank, type(error).__name__, traceback.format_exc(), getattr(error, "culprit", None))
        _leave(call.folder / f"error{rank}", said)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a tear-down of the process group could wait for peers


def _leave(path: Path, value: Any) -> None:
    """Write a file that is complete from the moment at which it exists."""
    partial = path.with_name(f"partial-{path.name}")
    partial.write_bytes(pickle.dumps(value))
    partial.replace(path)


def _follow_parent() -> None:
    """End with the process that started this one, however that ended."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _in_group(
    function: Callable[..., Any],
    args: Sequence[Any],
    rank: int,
    world: int,
    local_rank: int,
    local_world: int,
    device: str,
    init_method: str,
    stall: float | None = None,
) -> Any:
    """Call the function as one rank of a process group that lives as long as the call."""
    if local_world > 1:
        torch.set_num_threads(1)
    backend, device_id = "gloo", None
    if device == "cuda":
        card = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(card)
        if local_world <= torch.cuda.device_count():
            backend, device_id = "cpu:gloo,cuda:nccl", card
    limit = timedelta(hours=2) if stall is None else timedelta(seconds=stall)
    dist.init_process_group(backend, init_method, timeout=limit, world_size=world, rank=rank, device_id=device_id)
    result = function(*args)
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early would break the connections of those that still compute
        dist.destroy_process_group()
    return result
