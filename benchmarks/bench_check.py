"""What the checks of a ring cost on CPU: headers, checksums, a look for NaN, beside bare transfers; wall and processor.

python benchmarks/bench_check.py [--nproc 2] [--tokens 512] [--rounds 15]

Variants are interleaved. "bare" has neither header, nor helper thread, nor recorder: blocks go straight to gloo.
Processor time is that of the process, all threads; it is the steadier figure on a busy machine.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from ringattn import comm, ring_attention
from ringattn.header import CHECKS
from ringattn.launch.spawn import run
from ringattn.testing import make_inputs
from ringattn.transport import P2P, Nowhere


class Bare(Nowhere):
    """A wire without what watches over it."""

    def __init__(self, wire: P2P) -> None:
        self.post, self.wait = wire.post, wire.wait  # type: ignore[method-assign]


def on_ranks(tokens: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Median wall and processor seconds of a forward and backward ring, by variant, on this rank."""
    q, k, v, do = make_inputs(1, 4, 2, tokens, 64, seed=dist.get_rank())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    connect = comm.Comm.connect

    def bare(self: comm.Comm, transport: str | None, device: torch.device, *_: Any, **__: Any) -> Bare:
        return Bare(self.transport(transport, device))  # type: ignore[arg-type]

    found: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds + 2):
        results = {}
        for variant in ("bare", *CHECKS):
            comm.Comm.connect = bare if variant == "bare" else connect  # type: ignore[assignment, method-assign]
            check = None if variant == "bare" else variant
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            out = ring_attention(*leaves, check=check)
            results[variant] = torch.autograd.grad(out, leaves, do)
            spent = time.perf_counter() - wall, time.process_time() - processor
            if turn > 1:
                found.setdefault(variant, []).append(spent)
        assert all(torch.equal(a, b) for grads in results.values() for a, b in zip(grads, results["off"], strict=True))
    return {
        variant: (statistics.median(w for w, _ in times), statistics.median(p for _, p in times))
        for variant, times in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512, help="of each rank")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    ranks = run(on_ranks, arguments.nproc, arguments.tokens, arguments.rounds)
    print(f"{arguments.nproc} ranks, {arguments.tokens} tokens each, H=4 G=2 D=64 float32, forward and backward")
    print(f"{'check':<10} {'wall':>10} {'of bare':>8} {'processor':>10} {'of bare':>8}")
    base = [max(rank["bare"][i] for rank in ranks.values()) for i in range(2)]
    for variant in ranks[0]:
        wall, processor = (max(rank[variant][i] for rank in ranks.values()) for i in range(2))
        print(
            f"{variant:<10} {wall * 1e3:>7.2f} ms {wall / base[0]:>8.3f} "
            f"{processor * 1e3:>7.2f} ms {processor / base[1]:>8.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
