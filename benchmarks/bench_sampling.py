"""Sampling from 128256 bf16 logits a row on a GPU, as graph replays, beside torch eager, torch.compile, multinomial.

    python benchmarks/bench_sampling.py            # the table of docs/sampling.md
    python benchmarks/bench_sampling.py --sweep    # tiles and warps of the kernels

Each result is checked first: ours must be the tokens of the plain torch definition on the CPU, a peer's must be ids of
its vocabulary. `CALLS` inputs take turns within a graph.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from common import Benchmark, Check, Errors, Variant
from torch import Tensor

from ringattn import sample
from ringattn.kernels import candidates, gumbel
from ringattn.vocab import Rows, Slice

VOCAB = 128256
CALLS = 8
CHECKED = 16
"""Rows of a batch whose tokens are checked: a row does not know its batch."""
BATCHES = (1, 16, 64, 256)
FILTERS = {"top_k": 50, "top_p": 0.9}


def make_logits(batch: int) -> list[Tensor]:
    """Normal logits of deviation 3, `CALLS` of them."""
    generator = torch.Generator(device="cuda").manual_seed(batch)
    shape = (batch, VOCAB)
    return [(torch.randn(shape, generator=generator, device="cuda") * 3).to(torch.bfloat16) for _ in range(CALLS)]


def equals(expected: Tensor) -> Check:
    """The first ids must be exactly these."""

    def check(ids: Tensor) -> Errors:
        wrong = int((ids[: len(expected)].cpu() != expected).sum())
        return Errors(wrong, 0.0, not wrong)

    return check


def are_ids(ids: Tensor) -> Errors:
    """The ids must lie in the vocabulary."""
    return Errors(0.0, 0.0, bool(((ids >= 0) & (ids < VOCAB)).all()))


def eager(logits: Tensor) -> Tensor:
    """The exponential race as serving engines write it."""
    p = torch.softmax(logits.float(), dim=-1)
    return p.div_(torch.empty_like(p).exponential_()).argmax(dim=-1)


def multinomial(logits: Tensor) -> Tensor:
    return torch.multinomial(torch.softmax(logits.float(), dim=-1), 1)[:, 0]


def sorted_filters(logits: Tensor) -> Tensor:
    """Top-k, then top-p of what is left, as in vLLM's and Hugging Face's torch paths."""
    values, ids = logits.float().topk(FILTERS["top_k"])
    p = torch.softmax(values, dim=-1)
    p = torch.where(p.cumsum(dim=-1) - p < FILTERS["top_p"], p, 0.0)
    return ids.gather(1, p.div(torch.empty_like(p).exponential_()).argmax(dim=-1)[:, None])[:, 0]


class Calls:
    """Our calls on one set of inputs, with parameters in device tensors."""

    def __init__(self, batch: int) -> None:
        self.logits = make_logits(batch)
        self.seed = torch.arange(batch, device="cuda") * 977
        self.position = torch.arange(batch, device="cuda")
        self.temperature = torch.full((batch,), 0.9, device="cuda")

    def sample(self, turn: int, **filters: Any) -> Tensor:
        given = {"seed": self.seed, "position": self.position, "temperature": self.temperature}
        return sample(self.logits[turn % CALLS], **given, **filters).ids

    def expected(self, **filters: Any) -> Tensor:
        """Ids of the first rows of turn 0 by the plain torch definition on the CPU."""
        given = {"seed": self.seed, "position": self.position, "temperature": self.temperature}
        given = {name: value[:CHECKED].cpu() for name, value in given.items()}
        return sample(self.logits[0][:CHECKED].cpu(), **given, **filters).ids

    def rows(self) -> Rows:
        batch = len(self.seed)
        one = torch.ones(1, device="cuda").expand(batch)
        zero = torch.zeros(1, dtype=torch.int64, device="cuda").expand(batch)
        top_k, top_p = zero + FILTERS["top_k"], one * FILTERS["top_p"]
        return Rows(
            self.seed, self.position, zero, self.temperature, top_k, top_p, 0 * one, one, 0 * one, 0 * one
        )  # fmt: skip


def compare(bench: Benchmark, batch: int) -> None:
    """The table of one batch size."""
    calls = Calls(batch)
    compiled = torch.compile(eager, dynamic=False)

    def on_logits(function: Callable[[Tensor], Tensor]) -> Variant:
        return lambda turn: function(calls.logits[turn % CALLS])

    plain = {
        "ringattn": calls.sample,
        "torch eager": on_logits(eager),
        "torch.compile": on_logits(compiled),
        "multinomial": on_logits(multinomial),
    }
    checks = {name: are_ids for name in plain} | {"ringattn": equals(calls.expected())}
    bench.compare(f"plain, B={batch}, V={VOCAB}", "bfloat16", plain, checks, peer="torch.compile", graph=CALLS)
    filtered = {
        "ringattn": lambda turn: calls.sample(turn, **FILTERS),
        "torch topk": on_logits(sorted_filters),
    }
    checks = {"ringattn": equals(calls.expected(**FILTERS)), "torch topk": are_ids}
    bench.compare(f"top-k 50 + top-p 0.9, B={batch}", "bfloat16", filtered, checks, peer="torch topk", graph=CALLS)
    for name, filters in {"top-p 0.9": {"top_p": 0.9}, "logprobs 5": {"logprobs": 5}}.items():
        check = equals(calls.expected(**filters))
        variants = {"ringattn": lambda turn, filters=filters: calls.sample(turn, **filters)}
        bench.compare(f"{name}, B={batch}, calls", "bfloat16", variants, check, graph=0)


def sweep(bench: Benchmark, batch: int) -> None:
    """Tiles and warps."""
    calls, rows = Calls(batch), Calls(batch).rows()
    keys, ids, status = torch.empty(3, batch, dtype=torch.int64, device="cuda")
    variants: dict[str, Variant] = {}
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    for tile, warps, each in ((1024, 4, 8), (1024, 4, 12), (512, 4, 12), (2048, 4, 8), (2048, 8, 6)):

        def draw(turn: int, tile: int = tile, warps: int = warps, wave: int = each * processors) -> Tensor:
            gumbel.draw_launch(Slice(calls.logits[turn % CALLS]), rows, keys, ids, status, tile, warps, wave)()
            return ids

        variants[f"draw {tile} {warps} {each}"] = draw
    bench.compare(f"plain, B={batch}", "bfloat16", variants, equals(calls.expected()), graph=CALLS)
    out = torch.empty(batch, 64, dtype=torch.int64, device="cuda")
    variants = {}
    for tile, warps in ((2048, 4), (4096, 8)):

        def listing(turn: int, tile: int = tile, warps: int = warps) -> Tensor:
            part = Slice(calls.logits[turn % CALLS])
            for launch in candidates.listing_launches(part, rows, out, ids, status, tile, warps):
                launch()
            return ids

        variants[f"filters {tile} {warps}"] = listing
    check = equals(calls.expected(**FILTERS))
    bench.compare(f"top-k 50 + top-p 0.9, B={batch}", "bfloat16", variants, check, graph=CALLS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="time tiles and warps instead of peers")
    parser.add_argument("--batch", type=int, nargs="*", default=BATCHES)
    options = parser.parse_args()
    bench = Benchmark("sampling-sweep" if options.sweep else "sampling")
    torch.set_num_threads(os.cpu_count() or 1)
    for batch in options.batch:
        (sweep if options.sweep else compare)(bench, batch)
    return bench.finish(vocab=VOCAB, calls=CALLS)


if __name__ == "__main__":
    raise SystemExit(main())
