"""What a call of the ring costs besides its kernels: agreement, a hop of a block, and the executor's own time a step.

python benchmarks/bench_comm.py [--nproc 2]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import Benchmark, Errors

from ringattn import ops
from ringattn.backends import Problem
from ringattn.comm import Terms, get_comm, group_name
from ringattn.launch.spawn import run
from ringattn.mask import FULL
from ringattn.ring import Job, forward
from ringattn.ring import run as drain
from ringattn.schedule import make_schedule
from ringattn.transport import Nowhere

BLOCKS = {"64 KiB": 1 << 16, "4 MiB": 1 << 22, "64 MiB": 1 << 26}
ROUNDS = 7


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds a call, over rounds that all ranks begin together."""
    seconds = []
    for _ in range(ROUNDS):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        seconds.append((time.perf_counter() - begin) / repeats)
    return statistics.median(seconds)


def on_ranks() -> dict[str, float]:
    """Seconds of an agreement, and of a hop of each block size between neighbours; runs on every rank."""
    comm = get_comm(group_name(None))
    terms = Terms({"layout": "zigzag", "lengths": (8192,), "shapes": "B=1 H=8 G=2 D=64 Dv=64"}, grad=0)
    found = {"agreement": timed(lambda: comm.agree(terms), 50)}
    transport = comm.transport("p2p", torch.device("cpu"))
    right, left = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
    for name, size in BLOCKS.items():
        sent, received = torch.full((size // 4,), float(comm.rank)), torch.empty(size // 4)

        def hop(sent: torch.Tensor = sent, received: torch.Tensor = received) -> None:
            transport.wait(transport.post([(sent, right)], [(received, left)]))

        found[f"hop of {name}"] = timed(hop, 1 if size > 1 << 24 else 20)
        assert (received == left).all()
    return found


class NoKernels:
    """A backend that computes nothing, so that what is left is the executor."""

    @staticmethod
    def forward(*arguments: Any) -> None:
        pass


class Unconnected(Nowhere):
    """A transport that drops what is sent."""

    def post(self, sends: Any, recvs: Any, step: int = 0) -> None:
        pass


def executor(steps: int) -> Callable[[int], Any]:
    """One rank's forward ring of `steps` visits, without kernels or peers."""
    place = ("zigzag", FULL, (16 * steps,), steps, 0)
    x = torch.zeros(1, 1, 16, 8)
    transport: Any = Nowhere() if steps == 1 else Unconnected()
    job = Job(
        rank=0,
        sizes=(16,) * steps,
        schedule=make_schedule("ring", *place),
        problem=Problem(1.0),
        backend=NoKernels,
        transport=transport,
        lease=ops._local.lease,
    )
    return lambda turn: drain(forward(job, x, x, x, x, x[..., 0]), transport)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    nproc = parser.parse_args().nproc
    bench = Benchmark("comm", device="cpu")
    ranks = run(on_ranks, nproc)
    worst = {name: max(rank[name] for rank in ranks.values()) for name in ranks[0]}
    for name, seconds in worst.items():
        print(f"{name:<20} {seconds * 1e6:>10.1f} us  ({nproc} ranks over gloo, slowest rank's median of {ROUNDS})")
    done = bench.compare(
        shape="the executor, forward, no kernels",
        dtype="float32",
        variants={"1 step": executor(1), "65 steps": executor(65)},
        check=lambda result: Errors(0.0, 0.0, result is None),
    )
    step = (done["65 steps"] - done["1 step"]) / 64
    print(f"{'executor, a step':<20} {step * 1e6:>10.1f} us")
    return bench.finish(nproc=nproc, seconds=worst, seconds_a_step=step)


if __name__ == "__main__":
    sys.exit(main())
