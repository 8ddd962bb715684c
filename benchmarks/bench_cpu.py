"""Attention on CPU beside torch's SDPA: one rank with two threads, and four ranks with one thread each, on two cores.

    python benchmarks/bench_cpu.py [--tokens 8192] [--short-tokens 4096]

All four ranks live in processes of their own for the whole run; rank 0 tells the others what to run, so that the ring
takes its turn among the other variants. Its time includes that message and a barrier at the end. Zigzag causal, H=8,
D=64; float32 at `--tokens`, bfloat16 at `--short-tokens`, because torch's own bfloat16 backward is slow.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from common import Benchmark, against
from torch import Tensor
from torch.nn import functional as F

from ringattn import attention, ring_attention, shard, unshard
from ringattn.launch.spawn import run
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--short-tokens", type=int, default=4096)
    options = parser.parse_args()
    raise SystemExit(run(main, WORLD, options.tokens, options.short_tokens)[0])
