"""Ranks that run two rings forward and backward while one of them meets a fault; what each of them says, and when.

This process hosts the store, as a launcher would. A rank ends by itself or, once all that can have, is ended here.
"""

import hashlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

from ringattn import comm as comm_module
from ringattn import ring_attention
from ringattn.backends import reference
from ringattn.testing import make_inputs

WORLD, LIMIT, TURNS = 4, 4.0, 2
STEPS = {"forward": WORLD, "backward": WORLD + 1}
PAUSE = 1.5


@dataclass(frozen=True)
class Fault:
    """What happens to one rank in the last turn: `kind` at a step of one direction."""

    kind: str
    culprit: int = 0
    direction: str = "forward"
    step: int = 0
    check: str = "header"

    def __str__(self) -> str:
        return f"{self.kind}-rank{self.culprit}-{self.direction}{self.step}"


@dataclass
class Outcome:
    """How a run ended: exit codes and reports by rank, seconds until the last live rank had ended, who never did."""

    codes: dict[int, int | None] = field(default_factory=dict)
    reports: dict[int, dict] = field(default_factory=dict)
    seconds: float = 0.0
    hung: list[int] = field(default_factory=list)


def on_rank(rank: int, port: int, folder: Path, fault: Fault | None) -> None:
    torch.set_num_threads(1)
    report, code = {"text": "", "kind": ""}, 0
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
        report["digest"] = work(rank, folder, fault)
    except BaseException as error:
        report |= {"text": str(error), "kind": type(error).__name__, "culprit": getattr(error, "culprit", rank)}
        code = 3
    report["ended"] = time.time()
    (folder / f"partial{rank}").write_text(json.dumps(report))
    (folder / f"partial{rank}").replace(folder / f"report{rank}")
    if code == 0:  # nobody leaves before all have what they need
        while not all((folder / f"report{peer}").exists() for peer in range(WORLD)):
            time.sleep(0.05)
    os._exit(code)


def work(rank: int, folder: Path, fault: Fault | None) -> str:
    """Two turns of a ring forward and backward; a digest of all that came out."""
    found = hashlib.sha256()
    for turn in range(TURNS):
        q, k, v, do = make_inputs(1, 2, 2, 8, 8, seed=10 * turn + rank)
        if turn == TURNS - 1:
            inject(rank, folder, fault)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = ring_attention(*leaves, check=fault.check if fault else None, backend="reference", schedule="ring")
        out.backward(do)
        for x in (out, *(leaf.grad for leaf in leaves)):
            found.update(x.detach().numpy().tobytes())
    q, k, v, _ = make_inputs(1, 2, 2, 8, 8)  # here learns of it who had ended before, or got a message too many
    ring_attention(q, k, v, backend="reference", schedule="ring")
    return found.hexdigest()


def inject(rank: int, folder: Path, fault: Fault | None) -> None:
    """The culprit's next ring of that direction meets the fault at its step; a wait is limited from here on."""
    comm_module.get_comm(comm_module.group_name(None)).watch.limit = LIMIT
    (folder / f"began{rank}").touch()
    if fault is None or rank != fault.culprit:
        return
    connect = comm_module.Comm.connect

    def faulty(self, *args, **options):
        exchange = connect(self, *args, **options)
        if options["name"] != fault.direction:
            return exchange
        comm_module.Comm.connect = connect
        return Injected(exchange, folder, fault)

    comm_module.Comm.connect = faulty
    if fault.kind == "hang before the ring":
        time.sleep(1000)
    if fault.kind == "other options":
        original = comm_module.Comm.agree
        comm_module.Comm.agree = lambda self, terms, error=None: original(self, FORGED, error)


class Injected:
    """An exchange that does something else at one step."""

    def __init__(self, exchange, folder: Path, fault: Fault) -> None:
        self.exchange, self.folder, self.fault = exchange, folder, fault

    def __enter__(self):
        self.exchange.__enter__()
        return self

    def __exit__(self, *error):
        return self.exchange.__exit__(*error)

    def post(self, sends, recvs, step):
        kind, now = self.fault.kind, step == self.fault.step
        if now and kind in SUDDEN:
            (self.folder / "fault").touch()
            SUDDEN[kind]()
        if now and kind in CHANGED and sends:
            sends = [CHANGED[kind](sends[0]), *sends[1:]]
        if now and kind == "extra send":
            sends = [*sends, sends[0]]
        if now and kind in ON_THE_WAY:
            checked = self.exchange._wire
            checked._wire = OnTheWay(checked._wire, ON_THE_WAY[kind])
        if now and kind == "skipped step":
            return None
        return self.exchange.post(sends, recvs, step)

    def wait(self, pending):
        if pending is not None:
            self.exchange.wait(pending)


class OnTheWay:
    """A wire that alters the next block that is sent, after its header was made."""

    def __init__(self, wire, change) -> None:
        self.wire, self.change = wire, change

    def post(self, sends, recvs, step=0):
        if sends and self.change is not None:
            sends, self.change = [sends[0]._replace(tensor=self.change(sends[0].tensor.clone())), *sends[1:]], None
        return self.wire.post(sends, recvs, step)

    def wait(self, pending):
        self.wire.wait(pending)


def flip(tensor):
    tensor.view(torch.int32)[tensor.numel() // 2] ^= 1 << 3
    return tensor


def poison(tensor):
    tensor[5] = torch.nan
    return tensor


def in_a_visit(error: BaseException):
    """The next call of the backend raises."""

    def fail(*args):
        raise error

    def arm() -> None:
        reference.forward = reference.backward = fail

    return arm


def signalled(number: int):
    return lambda: os.kill(os.getpid(), number)


FORGED = comm_module.Terms({"layout": "spiral"}, comm_module.NEEDS)
SUDDEN = {
    "kill": signalled(signal.SIGKILL),
    "SIGTERM": signalled(signal.SIGTERM),
    "freeze": signalled(signal.SIGSTOP),
    "freeze and thaw": signalled(signal.SIGSTOP),
    "slow": lambda: time.sleep(PAUSE),
    "hang": lambda: time.sleep(1000),
    "exception": in_a_visit(ValueError("a user's bug")),
    "out of memory": in_a_visit(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")),
}
CHANGED = {
    "short send": lambda m: m._replace(tensor=m.tensor[:-8]),
    "long send": lambda m: m._replace(tensor=torch.cat([m.tensor, m.tensor[:8]])),
    "wrong dtype": lambda m: m._replace(tensor=m.tensor.view(torch.bfloat16)),
}
ON_THE_WAY = {"bit flip": flip, "NaN": poison}


SENT = (*CHANGED, *ON_THE_WAY, "extra send", "skipped step")
"""Faults of a step that sends."""

VISITS = ("exception", "out of memory")
"""Faults of a step that computes."""

BENIGN = ("freeze and thaw", "slow")
LOST = ("kill", "SIGTERM", "freeze", "hang", "hang before the ring")
"""The culprit says nothing itself."""


def grid() -> list[Fault]:
    """Every kind, of the first, a middle and the last rank, forward and backward, at first, middle and last step."""
    levels = {"bit flip": "checksum", "NaN": "finite"}
    found = []
    for kind in (*SUDDEN, *SENT):
        for culprit in (0, 1, WORLD - 1):
            for direction, last in STEPS.items():
                last -= (
                    2
                    if (kind in SENT and direction == "forward") or (kind in VISITS and direction == "backward")
                    else 1
                )
                steps = (0, last // 2, last)
                found += [Fault(kind, culprit, direction, step, levels.get(kind, "header")) for step in steps]
    once = [Fault(kind, culprit) for kind in ("hang before the ring", "other options") for culprit in (0, 1, WORLD - 1)]
    return found + once


def sample() -> list[Fault]:
    """One of each kind, so that together they cover roles, directions and steps."""
    kinds: dict[str, list[Fault]] = {}
    for fault in grid():
        kinds.setdefault(fault.kind, []).append(fault)
    return [faults[5 * index % len(faults)] for index, faults in enumerate(kinds.values())]


def judge(fault: Fault, outcome: Outcome, undisturbed: Outcome) -> str:
    """ "ok", or what went wrong: "silent", "hung", "unnamed", or "disturbed" where all should have gone well."""
    same = all(
        outcome.reports.get(rank, {}).get("digest") == report["digest"] for rank, report in undisturbed.reports.items()
    )
    if outcome.hung or outcome.seconds > LIMIT + 5:
        return "hung"
    if fault.kind in BENIGN:
        return "ok" if same and not any(outcome.codes.values()) else "disturbed"
    live = [rank for rank in range(WORLD) if rank != fault.culprit or fault.kind not in LOST]
    if any(outcome.codes[rank] == 0 for rank in live):
        return "silent"
    said = [outcome.reports[rank] for rank in live if rank in outcome.reports]
    named = all(report["culprit"] == fault.culprit for report in said) or fault.kind == "other options"
    return "ok" if named and any(f"rank {fault.culprit} " in report["text"] for report in said) else "unnamed"


def run(folder: Path, fault: Fault | None = None, kill_store: bool = False) -> Outcome:
    """Start the ranks, meet the fault, and wait until every rank that can end has ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "ringattn"])
    ranks = [context.Process(target=on_rank, args=(rank, store.port, folder, fault)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    stopped = frozenset()
    if fault is not None and fault.kind in ("freeze", "hang", "hang before the ring"):
        stopped = frozenset([fault.culprit])
    until(60, lambda: all((folder / f"began{rank}").exists() for rank in range(WORLD)) or gone(ranks, stopped))
    begin = time.time()
    if kill_store:
        del store
    if fault is not None and fault.kind == "freeze and thaw":
        until(20, lambda: (folder / "fault").exists())
        time.sleep(PAUSE)
        os.kill(ranks[fault.culprit].pid, signal.SIGCONT)
    until(LIMIT + 20, lambda: gone(ranks, stopped))
    outcome = Outcome(seconds=time.time() - begin)
    outcome.hung = [rank for rank, process in enumerate(ranks) if process.is_alive() and rank not in stopped]
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
    outcome.codes = {rank: process.exitcode for rank, process in enumerate(ranks)}
    for rank in range(WORLD):
        if (folder / f"report{rank}").exists():
            outcome.reports[rank] = json.loads((folder / f"report{rank}").read_text())
    return outcome


def gone(ranks, stopped: frozenset) -> bool:
    return all(not process.is_alive() for rank, process in enumerate(ranks) if rank not in stopped)


def until(seconds: float, met) -> None:
    deadline = time.time() + seconds
    while time.time() < deadline and not met():
        time.sleep(0.05)
