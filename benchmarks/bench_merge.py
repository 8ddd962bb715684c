"""The cost of visiting keys in pieces: a ring of 8 simulated on one card against one call over all keys.

    python benchmarks/bench_merge.py [--rows 2048 8192] [--dim 128]

Eight visits merge in the kernels' epilogue into a float32 state; the single call writes its result once. "full" visits
eight blocks of keys with every pair seen. "zigzag" is what the middle rank of a causal zigzag ring computes, visit by
visit, against the same tiles in one launch. "pairs" takes two blocks a launch, as a schedule with fused stages does.
Both are checked against float64 before they are timed.
"""

import argparse

import torch
from common import RESULTS, Benchmark, Work, against
from torch import Tensor

from ringattn.backends import Problem, reference, triton
from ringattn.mask import CAUSAL, FULL, Band
from ringattn.plan import Tile, Tiles, make_plan

WORLD, RANK = 8, 3


def moved(tiles: Tiles, offset: int) -> Tiles:
    """The tiles with their keys `offset` rows further on, as they lie when blocks are side by side."""
    return tuple(
        Tile(t.q_begin, t.q_end, t.k_begin + offset, t.k_end + offset, t.band, t.q_start, t.k_start, t.step)
        for t in tiles
    )


def attend(q: Tensor, k: Tensor, v: Tensor, visits: list[tuple[Tiles, slice]], dtype: torch.dtype) -> Tensor:
    """One launch a visit, over the keys of its slice."""
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:3], device=q.device)
    for number, (tiles, keys) in enumerate(visits):
        problem = Problem(q.shape[3] ** -0.5, first=number == 0)
        triton.forward(problem, tiles, q, k[:, :, keys], v[:, :, keys], out, lse)
    return out


def run_case(bench: Benchmark, name: str, rows: int, dim: int, heads: int) -> None:
    """Time one call, eight visits, and four visits of two blocks."""
    layout, band = ("contiguous", FULL) if name == "full" else ("zigzag", CAUSAL)
    plan = make_plan(layout, Band(band.lo, band.hi), (rows * WORLD,), WORLD, RANK)
    sources = [(RANK - step) % WORLD for step in range(WORLD)]
    q = torch.randn(1, heads, rows, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, heads, rows * WORLD, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    single = [(sum((moved(plan[s], s * rows) for s in range(WORLD)), ()), slice(None))]
    if name == "full":
        single = [((Tile(0, rows, 0, rows * WORLD, None, 0, 0, 1),), slice(None))]
    eight = [(plan[s], slice(s * rows, (s + 1) * rows)) for s in sources]
    pairs = []
    for low in range(0, WORLD, 2):  # two blocks that lie side by side, own pair first
        pairs.append((plan[low] + moved(plan[low + 1], rows), slice(low * rows, (low + 2) * rows)))
    pairs.sort(key=lambda pair: pair[1].start != RANK // 2 * 2 * rows)
    pairs = [(tuple(sorted(tiles, key=lambda t: t.q_begin)), keys) for tiles, keys in pairs]
    wide = [x.double() for x in (q, k, v)]
    exact, lse = torch.empty_like(wide[0]), torch.empty(q.shape[:3], dtype=torch.float64, device="cuda")
    reference.forward(Problem(dim**-0.5, first=True), single[0][0], *wide, exact, lse)
    baseline = attend(q, k, v, single, torch.bfloat16)
    work = Work(flops=4 * dim * heads * sum(t.pairs for tiles, _ in eight for t in tiles))
    bench.compare(
        f"{name} {WORLD} x {rows} keys, H={heads} D={dim}",
        "bfloat16",
        {
            "one call": lambda turn: attend(q, k, v, single, torch.bfloat16),
            "8 visits": lambda turn: attend(q, k, v, eight, torch.float32),
            "4 of 2 blocks": lambda turn: attend(q, k, v, pairs, torch.float32),
        },
        against([exact], [baseline]),
        work=work,
        peer="one call",
        round_seconds=0.03,
    )


def main() -> int:
    """Run both masks at every size and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--results", type=type(RESULTS), default=RESULTS)
    options = parser.parse_args()
    bench = Benchmark("merge", "cuda", options.results)
    for rows in options.rows:
        for name in ("full", "zigzag"):
            run_case(bench, name, rows, options.dim, options.heads)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
