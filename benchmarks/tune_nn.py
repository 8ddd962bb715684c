"""Offline tuner of the model kernels: check and time each tile at the shapes of `bench_nn.py`, print the best ones.

    python benchmarks/tune_nn.py

Run on one GPU; put the winners into `choose_config` of the kernels. Bandwidths count each input read once and each
output written once; the line "copy" is `Tensor.copy_` moving 268 MB in the same run.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import max_errors, measure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from compile_kernels import compile_many  # noqa: E402

from ringattn.kernels import norm, norm_bwd, rope, softmax, softmax_bwd, swiglu  # noqa: E402
from ringattn.kernels.config import CompileCase, Launch  # noqa: E402
from ringattn.kernels.norm import NormConfig  # noqa: E402
from ringattn.kernels.softmax import SoftmaxConfig  # noqa: E402

ROWS = 16384
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Candidate:
    """One tile: how to run it, the launch to compile ahead, and what it writes."""

    config: Any
    run: Callable[[], Any]
    launch: Launch
    results: tuple[Tensor, ...]


def norm_candidates(device: str, columns: int, center: bool, full: bool) -> Iterator[Candidate]:
    """Forward tiles of the norms, with a weight, or with residual and weight."""
    x = torch.randn(ROWS, columns, dtype=BF16, device=device)
    weight = torch.randn(columns, dtype=BF16, device=device)
    residual = torch.randn_like(x) if full else None
    tiles = [
        NormConfig(rows, columns, warps, per, stages)
        for rows in (1, 2, 4)
        for warps in (2, 4, 8, 16)
        for per, stages in ((0, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (4, 2), (4, 3))
        if 16 <= rows * columns // warps // 32 <= 64 and per * warps <= 32
    ]
    for config in tiles:
        y, stats = torch.empty_like(x), torch.empty(ROWS, 3 if center else 1, device=device)
        summed = torch.empty_like(x) if full else None
        launch = norm.forward_launch(
            x, residual, weight, None, y, summed, stats, eps=1e-6, center=center, config=config
        )
        yield Candidate(config, launch, launch, (y,))


def norm_bwd_candidates(device: str, columns: int, center: bool) -> Iterator[Candidate]:
    """Backward tiles of the norms with a weight (LayerNorm: and a bias); the sums of the programs are added too."""
    x, dy = (torch.randn(ROWS, columns, dtype=BF16, device=device) for _ in range(2))
    weight = torch.randn(columns, dtype=BF16, device=device)
    stats = torch.rand(ROWS, 3 if center else 1, device=device)
    tiles = [
        NormConfig(1, columns, warps, per, stages)
        for warps in (4, 8, 16)
        for per, stages in ((1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 2), (5, 1))
        if 8 <= columns // warps // 32 <= 32 and per * warps <= 40
    ]
    for config in tiles:
        programs = 132 * config.per_processor
        dx, sums = torch.empty_like(x), torch.empty(2, programs, columns, device=device)
        dbias = sums[1] if center else None
        launch = norm_bwd.backward_launch(
            dy, None, x, weight, stats, dx, sums[0], dbias, config=config, programs=programs
        )
        run = lambda c=config: norm_bwd.norm_backward(  # noqa: E731
            dy, None, x, weight, stats, bias_dtype=BF16 if center else None, config=c
        )
        yield Candidate(config, run, launch, ())


def softmax_candidates(device: str, rows: int, columns: int, backward: bool) -> Iterator[Candidate]:
    """Tiles of long rows, forward or backward."""
    x, dy = (torch.randn(rows, columns, dtype=BF16, device=device) for _ in range(2))
    if backward and device != "meta":
        x = torch.softmax(x, -1)
    tiles = [
        SoftmaxConfig(1, block, warps)
        for block in (2048, 4096, 8192, 16384, 32768)
        for warps in (4, 8, 16, 32)
        if 8 <= block // warps // 32 <= (32 if backward else 64)
    ]
    for config in tiles:
        if len(softmax.phases(x, config.block)) > 1:
            continue
        out = torch.empty_like(x)
        words = torch.empty(rows * (columns // config.block) + 1, dtype=torch.int64, device=device)
        both: dict[str, Any] = dict(temperature=1.0, config=config, publish=True, write=True)
        if backward:
            launch = softmax_bwd.long_backward_launch(dy, x, out, words, **both)
        else:
            launch = softmax.long_forward_launch(x, None, out, words, **both)

        def run(launch: Launch = launch, words: Tensor = words) -> None:
            words.zero_()
            launch()

        yield Candidate(config, run, launch, (out,))


def rope_candidates(device: str) -> Iterator[Candidate]:
    """Tiles of the rotary embedding of 32 and 8 heads of 128."""
    q, k = (torch.randn(1, ROWS, heads, 128, dtype=BF16, device=device).transpose(1, 2) for heads in (32, 8))
    angles = torch.rand(ROWS, 64, device=device)
    positions = torch.arange(ROWS, device=device).unsqueeze(0)
    for tokens in (4, 8, 16, 32):
        for heads in (2, 4, 8):
            for warps in (2, 4, 8):
                q_out, k_out = torch.empty_like(q), torch.empty_like(k)
                launch = rope.rope_launch(
                    q, k, q_out, k_out, angles, angles, positions, interleaved=False, backward=False,
                    tokens_a_program=tokens, heads_a_program=heads, num_warps=warps,
                )  # fmt: skip
                yield Candidate(f"tokens={tokens} heads={heads} warps={warps}", launch, launch, (q_out, k_out))


def swiglu_candidates(device: str, backward: bool) -> Iterator[Candidate]:
    """Tiles of SwiGLU on halves of (16384, 22016)."""
    gate, up = torch.randn(ROWS, 22016, dtype=BF16, device=device).chunk(2, -1)
    dgate, dup = torch.empty(ROWS, 22016, dtype=BF16, device=device).chunk(2, -1)
    y = torch.randn(ROWS, 11008, dtype=BF16, device=device)
    for tile in (512, 1024, 2048, 4096):
        for warps in (2, 4, 8):
            if not 4 <= tile // warps // 32 <= 32:
                continue
            if backward:
                launch = swiglu.backward_launch(y, gate, up, dgate, dup, tile=tile, num_warps=warps)
            else:
                launch = swiglu.forward_launch(gate, up, y, tile=tile, num_warps=warps)
            yield Candidate(f"tile={tile} warps={warps}", launch, launch, (dgate, dup) if backward else ())


MB = 1 << 20
GROUPS: dict[str, tuple[Callable[[str], Iterator[Candidate]], float]] = {
    "rms fwd 4096": (lambda device: norm_candidates(device, 4096, False, False), 2 * 128 * MB),
    "rms fwd 8192": (lambda device: norm_candidates(device, 8192, False, False), 2 * 256 * MB),
    "add rms fwd 4096": (lambda device: norm_candidates(device, 4096, False, True), 4 * 128 * MB),
    "layer fwd 4096": (lambda device: norm_candidates(device, 4096, True, False), 2 * 128 * MB),
    "layer fwd 8192": (lambda device: norm_candidates(device, 8192, True, False), 2 * 256 * MB),
    "rms bwd 4096": (lambda device: norm_bwd_candidates(device, 4096, False), 3 * 128 * MB),
    "rms bwd 8192": (lambda device: norm_bwd_candidates(device, 8192, False), 3 * 256 * MB),
    "layer bwd 8192": (lambda device: norm_bwd_candidates(device, 8192, True), 3 * 256 * MB),
    "softmax fwd 512x128k": (lambda device: softmax_candidates(device, 512, 1 << 17, False), 2 * 128 * MB),
    "softmax fwd 64x1M": (lambda device: softmax_candidates(device, 64, 1 << 20, False), 2 * 128 * MB),
    "softmax bwd 512x128k": (lambda device: softmax_candidates(device, 512, 1 << 17, True), 3 * 128 * MB),
    "softmax bwd 64x1M": (lambda device: softmax_candidates(device, 64, 1 << 20, True), 3 * 128 * MB),
    "rope": (rope_candidates, 2 * 160 * MB),
    "swiglu fwd": (lambda device: swiglu_candidates(device, False), 3 * 344 * MB),
    "swiglu bwd": (lambda device: swiglu_candidates(device, True), 5 * 344 * MB),
}
"""What is tuned, with the bytes that one call must move."""


def tune(name: str) -> None:
    """Check the tiles of a group against its first one, time them, and print the best six."""
    make, size = GROUPS[name]
    runs: dict[Any, Any] = {}
    expected = None
    for candidate in make("cuda"):
        for result in candidate.results:
            result.fill_(float("nan"))
        try:
            candidate.run()
            results = [result.double() for result in candidate.results]
        except Exception as error:
            print(f"{name} {candidate.config} {type(error).__name__} {error}"[:200])
            continue
        expected = results if expected is None else expected
        if any(max_errors(got, exact)[1] > 1e-2 for got, exact in zip(results, expected, strict=True)):
            print(f"{name} {candidate.config} DIFFERS")
            continue
        runs[candidate.config] = lambda turn, run=candidate.run: run()
    a, b = (torch.randn(64 * MB, dtype=BF16, device="cuda") for _ in range(2))
    runs["copy"] = lambda turn: b.copy_(a)
    times = {n: statistics.median(t) for n, t in measure(runs, "cuda", rounds=3, round_seconds=0.002).items()}
    copied = 2 * 128 * MB / times.pop("copy")
    print(f"{name}: copy {copied / 1e12:.2f} TB/s")
    for candidate in sorted(times, key=lambda n: times[n])[:6]:
        rate = size / times[candidate]
        print(
            f"    {candidate:<64} {times[candidate] * 1e6:7.1f} us {rate / 1e12:.2f} TB/s {rate / copied:.3f} of copy"
        )
    sys.stdout.flush()


def _key(launch: Launch) -> str:
    """What a compiled kernel depends on, nearly."""
    numbers = [(name, x) for name, x in launch.args.items() if not isinstance(x, Tensor)]
    return f"{launch.kernel} {numbers} {launch.options}"


def main() -> None:
    """Compile all candidates on all cores, then check and time them; names on the command line choose groups."""
    chosen = [name for name in GROUPS if not sys.argv[1:] or any(word in name for word in sys.argv[1:])]
    launches = {_key(each.launch): each.launch for name in chosen for each in GROUPS[name][0]("meta")}
    cases = [CompileCase("", launch) for launch in launches.values()]
    spilled = [report for report in compile_many(cases, 90, 16) if report.spill_bytes or report.error]
    print(
        f"{len(cases)} cases, {len(spilled)} spill or fail {[report.error for report in spilled if report.error][:2]}"
    )
    for name in chosen:
        tune(name)


if __name__ == "__main__":
    main()
