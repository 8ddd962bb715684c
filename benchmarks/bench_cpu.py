"""Attention on CPU beside torch's SDPA: one rank with two threads, and four ranks with one thread each, on two cores.

    python benchmarks/bench_cpu.py [--tokens 8192] [--short-tokens 4096]
    python benchmarks/bench_cpu.py --strips

All four ranks live in processes of their own for the whole run; rank 0 tells the others what to run, so that the ring
takes its turn among the other variants. Its time includes that message and a barrier at the end. Zigzag causal, H=8,
D=64; float32 at `--tokens`, bfloat16 at `--short-tokens`, because torch's own bfloat16 backward is slow.

`--strips` compares the heights of the strips into which the backend cuts a sliding window, and says what a visible pair
costs relative to full attention: docs/findings/cpu.md.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from common import Benchmark, against
from torch import Tensor
from torch.nn import functional as F

from ringattn import FULL, attention, ring_attention, shard, unshard, window
from ringattn.backends import Problem, cpu
from ringattn.launch.spawn import run
from ringattn.plan import Tiles, make_plan
from ringattn.testing import make_inputs

WORLD, THREADS, HEADS, DIM = 4, 2, 8, 64
STOP, INPUTS, FORWARD, BACKWARD, COLLECT = range(5)
Result = tuple[Tensor, ...]


class Rank:
    """One rank of the ring: its shards, and what each command does with them."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.out = self.do = torch.empty(0)

    def run(self, command: int, tokens: int, half: int) -> Result:
        torch.set_num_threads(1)
        if command == INPUTS:
            *inputs, do = inputs_of(tokens, bool(half))
            self.inputs = [shard(x, 2, layout="zigzag").requires_grad_() for x in inputs]
            self.do = shard(do, 2, layout="zigzag")
            self.out = self.attend()
        if command == FORWARD:
            with torch.no_grad():
                return (self.attend(),)
        if command == BACKWARD:
            return torch.autograd.grad(self.out, self.inputs, self.do, retain_graph=True)
        if command == COLLECT:
            parts = self.out.detach(), *self.run(BACKWARD, tokens, half)
            return tuple(unshard(x, 2, layout="zigzag", seq_len=tokens) for x in parts)
        return ()

    def attend(self) -> Tensor:
        return ring_attention(*self.inputs, layout="zigzag", mask="causal")

    def together(self, command: int, tokens: int = 0, half: int = 0) -> Result:
        """Run rank 0's command on all ranks, and return this rank's result when the last one is done."""
        message = torch.tensor([command, tokens, half])
        dist.broadcast(message, 0)
        self.last = int(message[0])
        result = self.run(*message.tolist())
        dist.barrier()
        return result


def inputs_of(tokens: int, half: bool) -> list[Tensor]:
    return list(make_inputs(1, HEADS, HEADS, tokens, DIM, dtype=torch.bfloat16 if half else torch.float32))


def alone(attend: Callable[..., Tensor], inputs: Sequence[Tensor], do: Tensor) -> tuple[Callable, Callable]:
    """Forward and backward variants of one process with two threads."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)

    def forward(turn: int) -> Result:
        torch.set_num_threads(THREADS)
        with torch.no_grad():
            return (attend(*inputs),)

    def backward(turn: int) -> Result:
        torch.set_num_threads(THREADS)
        return torch.autograd.grad(out, leaves, do, retain_graph=True)

    return forward, backward


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def one_rank(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, mask="causal")


def measure(bench: Benchmark, ring: Rank, tokens: int, half: bool) -> None:
    """Three rows each for forward and backward: torch, one rank, four ranks."""
    torch.set_num_threads(THREADS)
    *inputs, do = inputs_of(tokens, half)
    exact_forward, exact_backward = alone(sdpa, [x.double() for x in inputs], do.double())
    exact = [*exact_forward(0), *exact_backward(0)]
    variants = {"sdpa": alone(sdpa, inputs, do), "one rank": alone(one_rank, inputs, do)}
    trusted = [*variants["sdpa"][0](0), *variants["sdpa"][1](0)]
    ring.together(INPUTS, tokens, half)
    collected = ring.together(COLLECT, tokens, half)
    shape, dtype = f"zigzag causal S={tokens} H={HEADS} D={DIM}", "bf16" if half else "fp32"
    directions = ("forward", FORWARD, slice(0, 1)), ("backward", BACKWARD, slice(1, 4))
    for index, (name, command, part) in enumerate(directions):
        check = against(exact[part], trusted[part])
        bench.compare(
            f"{name}, {shape}",
            dtype,
            {
                **{variant: calls[index] for variant, calls in variants.items()},
                "four ranks": lambda turn, command=command: ring.together(command, tokens, half),
            },
            {"sdpa": check, "one rank": check, "four ranks": lambda _, check=check, part=part: check(collected[part])},
            peer="sdpa",
        )


def main(tokens: int, short_tokens: int) -> int:
    """What every rank runs: rank 0 measures, the others follow."""
    ring = Rank()
    if dist.get_rank():
        ring.last = INPUTS
        while ring.last != STOP:
            ring.together(STOP)
        return 0
    bench = Benchmark("cpu", device="cpu")
    measure(bench, ring, tokens, half=False)
    measure(bench, ring, short_tokens, half=True)
    ring.together(STOP)
    return bench.finish(world=WORLD, threads=THREADS)


def cut_by(rows: int, slab: int, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, turn: int) -> Tensor:
    """Forward over tiles whose windows are cut into strips of that many rows and masked pieces of that many keys."""
    cpu._strip_rows, cpu.SLAB_KEYS = (lambda width: rows), slab
    cpu._cut.cache_clear()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    cpu.forward(Problem(DIM**-0.5, first=True), tiles, q, k, v, out, lse)
    return out


def strips(tokens: int = 4096) -> int:
    """Forward of a window by rows of a strip and largest masked piece, beside full attention; one thread."""
    torch.set_num_threads(1)
    bench = Benchmark("cpu_strips", device="cpu")
    q, k, v, _ = make_inputs(1, 4, 4, tokens, DIM)
    everything = make_plan("contiguous", FULL, (tokens,), 1, 0)[0]
    heights, slabs = (32, 64, 128, 256), (0, 768, 1536)
    for width in (256, 512, 1024, 2048):
        tiles = make_plan("contiguous", window(width - 1), (tokens,), 1, 0)[0]
        exact = attention(q.double(), k.double(), v.double(), mask=window(width - 1), backend="reference")
        whole = attention(q.double(), k.double(), v.double(), backend="reference")
        variants = {
            f"{rows} x {slab}": partial(cut_by, rows, slab, tiles, q, k, v) for rows in heights for slab in slabs
        }
        checks = {name: against([exact], slack=1e-5) for name in variants} | {"full": against([whole], slack=1e-5)}
        variants["full"] = partial(cut_by, 64, 0, everything, q, k, v)
        medians = bench.compare(f"window {width}, S={tokens} H=4 D={DIM}", "fp32", variants, checks, peer="full")
        share = sum(tile.pairs for tile in tiles) / tokens**2
        a_pair = medians.pop("full") * share
        print("of full attention's time a pair:", {name: round(time / a_pair, 2) for name, time in medians.items()})
    return bench.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--short-tokens", type=int, default=4096)
    parser.add_argument("--strips", action="store_true", help="compare how windows are cut instead")
    options = parser.parse_args()
    if options.strips:
        raise SystemExit(strips())
    raise SystemExit(run(main, WORLD, options.tokens, options.short_tokens)[0])
