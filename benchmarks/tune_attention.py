"""Offline tuner: time every config of the attention kernels that `config_error` allows, and print the best ones.

    python benchmarks/tune_attention.py --dims 64 128 --kinds fwd dkv dq --masks full causal

Run on one GPU; put the winners into `ringattn.kernels.config`. Each config's result is checked against the float64
reference before it is timed.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import against, measure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from compile_kernels import compile_many  # noqa: E402

from ringattn.backends import Problem, reference  # noqa: E402
from ringattn.kernels import attention_bwd, attention_fwd  # noqa: E402
from ringattn.kernels.config import CompileCase, Config, Kind, config_error  # noqa: E402
from ringattn.mask import CAUSAL  # noqa: E402
from ringattn.plan import Tile  # noqa: E402

TILE_OF_MASK = {"full": (0, None), "causal": (0, 0)}


def candidates(kind: Kind, dim: int, dtype: torch.dtype, arch: int) -> Iterator[Config]:
    """Configs that are worth a try: 16 rows of the kept block a warp or more, streaming blocks of 32 to 128."""
    for kept in (64, 128):
        for streamed in (32, 64, 128):
            for warps in (4, 8):
                for stages in (1, 2, 3):
                    rows = (streamed, kept) if kind == "dkv" else (kept, streamed)
                    config = Config(*rows, warps, stages)
                    wasteful = kept < 16 * warps and dim < 256
                    spilling = dim >= 128 and kept > 16 * warps and kind != "fwd"
                    useless = spilling or (kind == "fwd" and stages == 1) or (streamed == 32 and dim == 64)
                    fits = config_error(kind, config, dim, dim, dtype, arch) is None
                    if fits and not wasteful and not useless:
                        yield config


def make_launch(kind: Kind, config: Config, mask: str, tensors: dict[str, Tensor]) -> Any:
    """The launch of one kernel over the whole of the tensors."""
    q, k, v, do, lse, delta = (tensors[name] for name in ("q", "k", "v", "do", "lse", "delta"))
    rows, keys = q.shape[2], k.shape[2]
    tiles = ((0, rows, 0, keys, 0 if mask == "causal" else -keys, rows),)
    scale = q.shape[3] ** -0.5
    if kind == "fwd":
        arguments = (tiles, q, k, v, tensors["out"], tensors["lse_out"], scale, 0.0)
        return attention_fwd.forward_launch(*arguments, first=True, config=config)
    if kind == "dkv":
        arguments = (tiles, do, q, k, v, lse, delta, tensors["dk"], tensors["dv"], scale, 0.0)
        return attention_bwd.dkv_launch(*arguments, first=True, config=config)
    return attention_bwd.dq_launch(tiles, do, q, k, v, lse, delta, tensors["dq"], scale, 0.0, first=True, config=config)


def make_tensors(dim: int, rows: int, batch: int, heads: int, kv_heads: int, dtype: torch.dtype, device: str) -> Any:
    """Random inputs, and room for the results in the inputs' dtype."""

    def draw(count: int) -> Tensor:
        return torch.randn(batch, count, rows, dim, device=device).to(dtype)

    tensors = {"q": draw(heads), "k": draw(kv_heads), "v": draw(kv_heads), "do": draw(heads)}
    for name, like in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        tensors[name] = torch.full_like(tensors[like], float("nan"))
    for name in ("lse", "delta", "lse_out"):
        tensors[name] = torch.zeros(batch, heads, rows, device=device)
    return tensors


def exact_results(tensors: dict[str, Tensor], mask: str) -> dict[str, Tensor]:
    """float64 results, by name; fills lse and delta as the backward kernels want them."""
    q, k, v, do = (tensors[name].double() for name in ("q", "k", "v", "do"))
    rows, keys = q.shape[2], k.shape[2]
    tiles = (Tile(0, rows, 0, keys, CAUSAL if mask == "causal" else None, 0, 0, 1),)
    problem = Problem(q.shape[3] ** -0.5, first=True, first_kv=True)
    out, lse = torch.empty_like(do), torch.empty(q.shape[:3], dtype=q.dtype, device=q.device)
    reference.forward(problem, tiles, q, k, v, out, lse)
    delta = (do * out).sum(-1)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    reference.backward(problem, tiles, do, q, k, v, out, lse, delta, dq, dk, dv)
    tensors["lse"].copy_(lse)
    tensors["delta"].copy_(delta)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


RESULTS_OF: dict[Kind, tuple[str, ...]] = {"fwd": ("out",), "dkv": ("dk", "dv"), "dq": ("dq",)}
PRODUCTS: dict[Kind, int] = {"fwd": 2, "dkv": 4, "dq": 3}


def main() -> None:
    """Compile all candidates on all cores, then check and time them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--kinds", nargs="+", default=["fwd", "dkv", "dq"])
    parser.add_argument("--masks", nargs="+", default=["full", "causal"])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--max-spill", type=int, default=256, help="leave out configs that spill more bytes")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    jobs = [
        (dim, kind, config)
        for dim in options.dims
        for kind in options.kinds
        for config in candidates(kind, dim, dtype, 90)
    ]
    cases = []
    for dim, kind, config in jobs:
        meta = make_tensors(dim, options.rows, options.batch, 2048 // dim, 2048 // dim, dtype, "meta")
        cases.append(CompileCase("", make_launch(kind, config, "causal", meta)))
    reports = compile_many(cases, 90, options.jobs)
    for dim in options.dims:
        for mask in options.masks:
            tensors = make_tensors(dim, options.rows, options.batch, 2048 // dim, 2048 // dim, dtype, "cuda")
            exact = exact_results(tensors, mask)
            for kind in options.kinds:
                mine = [
                    (config, report)
                    for (d, n, config), report in zip(jobs, reports, strict=True)
                    if (d, n) == (dim, kind) and not report.error and report.spill_bytes <= options.max_spill
                ]
                time_configs(kind, mask, dim, mine, tensors, exact)


def time_configs(kind: Kind, mask: str, dim: int, configs: Any, tensors: dict[str, Tensor], exact: Any) -> None:
    """Check and time these configs, and print the best eight."""
    runs, notes = {}, {}
    for config, report in configs:
        launch = make_launch(kind, config, mask, tensors)
        for name in RESULTS_OF[kind]:
            tensors[name].fill_(float("nan"))
        try:
            launch()
            errors = against([exact[name] for name in RESULTS_OF[kind]], slack=0.02)(
                [tensors[n] for n in RESULTS_OF[kind]]
            )
        except Exception as error:
            print(f"{kind} {config} {type(error).__name__} {error}"[:200])
            continue
        if not errors.ok:
            print(f"{kind} d{dim} {mask} {config} WRONG {errors}")
            continue
        runs[config] = lambda turn, launch=launch: launch()
        notes[config] = f"{report.registers} regs {report.spill_bytes} spill max_rel {errors.max_rel:.1e}"
    times = measure(runs, "cuda", rounds=3, round_seconds=0.004)
    q, k = tensors["q"], tensors["k"]
    pairs = q.shape[2] * k.shape[2] * (0.5 if mask == "causal" else 1.0)
    flops = 2 * PRODUCTS[kind] * pairs * q.shape[0] * q.shape[1] * dim
    for config in sorted(times, key=lambda config: statistics.median(times[config]))[:8]:
        seconds = statistics.median(times[config])
        shape = f"q{config.block_q} k{config.block_k} w{config.num_warps} s{config.num_stages}"
        print(f"{kind} d{dim} {mask:<6} {shape:<16} {flops / seconds / 1e12:6.1f} TFLOP/s  {notes[config]}", flush=True)


if __name__ == "__main__":
    main()
