"""`ringattn verify --sampler`: ranks that split a vocabulary draw the token that one process draws, bit for bit.

Prints a line for each kind of request and world; exit code 0 if all tokens and log-probabilities are equal, 1 if one is
not or a rank fails. Starts its own ranks, or uses torchrun's.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringattn import sample
from ringattn.launch.spawn import DEVICES, RankError, run, torchrun_rank, world_size

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "top-p 0.95": {"top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "top-p 0.999, T = 3 (radix select)": {"top_p": 0.999, "temperature": 3.0},
    "logprobs 5": {"logprobs": 5},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Example:
        >>> main(["--nproc", "2", "--vocab", "100", "--rows", "2"])  # doctest: +SKIP
        0
    """
    parser = argparse.ArgumentParser(prog="ringattn verify --sampler", description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, help="ranks to start (default 4)")
    parser.add_argument("--vocab", type=int, default=50257, help="tokens of the vocabulary")
    parser.add_argument("--rows", type=int, default=8, help="rows of logits")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    options = parser.parse_args(argv)
    if options.vocab < 1 or options.rows < 1:
        parser.error(f"--vocab and --rows must be at least 1, got {options.vocab} and {options.rows}")
    world = world_size(options.nproc, default=4)
    try:
        answers = run(_answers, world, options.vocab, options.rows, options.device, device=options.device, timeout=600)
    except RankError as error:
        print(f"ringattn verify --sampler: {error}", file=sys.stderr)
        return 1
    expected = {name: _sample(options.vocab, options.rows, "cpu", 0, 1, request) for name, request in REQUESTS.items()}
    wrong = 0
    for name in REQUESTS:
        equal = [_equal(answer[name], expected[name]) for answer in answers.values()]
        wrong += not all(equal)
        if not torchrun_rank():
            verdict = "equal" if all(equal) else f"differ on ranks {[r for r, same in enumerate(equal) if not same]}"
            print(f"{name:<36} world {world} against 1, {options.rows} rows of {options.vocab}: {verdict}")
    return int(wrong > 0)


def _answers(vocab: int, rows: int, device: str) -> dict[str, list[torch.Tensor]]:
    """What this rank of the default group draws, by request."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {name: _sample(vocab, rows, device, rank, world, request) for name, request in REQUESTS.items()}


def _sample(vocab: int, rows: int, device: str, rank: int, world: int, request: dict[str, Any]) -> list[torch.Tensor]:
    """Draws from the rank's slice of logits that every rank makes alike; slices grow with the rank."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3
    edges = [round(vocab * (r / world) ** 2) for r in range(world + 1)]
    part = logits[:, edges[rank] : edges[rank + 1]].to(device)
    seed = torch.arange(rows, device=device)
    result = sample(part, seed=seed, position=7, vocab_start=edges[rank], vocab_size=vocab, **request)
    return [tensor.cpu() for tensor in (result.ids, result.status, *(result.logprobs or ()))]


def _equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
