"""`ringattn verify`: many ranks give what one rank gives, forward and backward, on a real text through a transformer.

Errors are against float64, beside those that one rank makes in the same dtype; the verdict is `ringattn.testing.gate`.
Exit code 0 if every tensor passes on every rank, 1 if one does not or a rank fails, 2 for options that do not fit.
Starts its own ranks, or uses torchrun's: `torchrun --nproc-per-node 4 -m ringattn.launch.verify`.
"""

import argparse
import json
import math
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ringattn.comm import TRANSPORTS
from ringattn.dispatch import BACKENDS
from ringattn.launch.comparison import Job, Report, Row, compare_ranks
from ringattn.launch.model import Config
from ringattn.launch.options import DTYPES, add_sequence_options, make_parser
from ringattn.launch.spawn import DEVICES, RankError, run, torchrun_rank, world_size
from ringattn.launch.table import print_table
from ringattn.layout import layout_name

FEWEST_TOKENS = 4
"""Tokens a rank below which a ratio of error norms says nothing: one token alone has a dQ of pure rounding."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parser().parse_args(argv)
    path = options.json if not torchrun_rank() else None
    result: dict[str, Any] = {"ok": False, "error": "did not finish", "rows": []}
    code = 1
    try:
        _write(path, result)
    except OSError as error:
        print(f"ringattn verify: {error}", file=sys.stderr)
        return 2
    try:
        result["options"] = {name: str(value) for name, value in vars(options).items() if value is not None}
        world = world_size(options.nproc, default=4)
        code = _verify(_job(options, world), world, result)
    except ValueError as error:
        result["error"], code = str(error), 2
    except RankError as error:
        result["error"] = str(error)
    except Exception:
        result["error"] = traceback.format_exc()
    if result["error"]:
        print(f"ringattn verify: {result['error']}", file=sys.stderr)
    _write(path, result)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("verify", __doc__)
    parser.add_argument(
        "--nproc", type=int, metavar="RANKS", help="ranks to start, 4 by default; under torchrun, its world"
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="where the ranks compute; several may share a card (%(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of parameters and activations (%(default)s)"
    )
    add_sequence_options(parser, seq_len=8192)
    parser.add_argument("--transport", choices=TRANSPORTS, help="by default chosen by device and group")
    backends = sorted({name for names in BACKENDS.values() for name in names})
    parser.add_argument("--backend", choices=backends, help="on one rank and on many; by default the first that can")
    for name, default in (("dim", 128), ("layers", 2), ("heads", 4), ("kv-heads", 2), ("head-dim", 32), ("seed", 0)):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{name} of the model (%(default)s)"
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the result, also of a failure")
    return parser


def _job(options: argparse.Namespace, world: int) -> Job:
    if options.seq_len < FEWEST_TOKENS * world:
        least = f"{FEWEST_TOKENS} tokens a rank, {FEWEST_TOKENS * world} on {world}"
        raise ValueError(f"seq-len must be at least {least}, got {options.seq_len}")
    return Job(
        config=Config(options.dim, options.layers, options.heads, options.kv_heads, options.head_dim),
        seq_len=options.seq_len,
        layout=layout_name(options.layout),
        mask=options.mask,
        dtype=DTYPES[options.dtype],
        device=options.device,
        schedule=options.schedule,
        transport=options.transport,
        backend=options.backend,
        seed=options.seed,
    )


def _verify(job: Job, world: int, result: dict[str, Any]) -> int:
    """Run and print a comparison, and fill in the result."""
    began = time.perf_counter()
    report = run(compare_ranks, world, job, _say, device=job.device).get(0)
    if report is None:
        result["error"] = None
        return 0  # one of torchrun's other ranks; rank 0 speaks for all
    report.seconds["total"] = time.perf_counter() - began
    ok = all(row.ok for row in report.rows)
    result.update(
        ok=ok,
        error=None,
        rows=[asdict(row) for row in report.rows],
        world=world,
        bytes_sent=report.bytes_sent,
        seconds=report.seconds,
        python=platform.python_version(),
        torch=torch.__version__,
    )
    _print(job, world, report)
    return 0 if ok else 1


def _print(job: Job, world: int, report: Report) -> None:
    """Each tensor's worst rank, every failure, and what it took."""
    tensors: dict[str, list[Row]] = {}
    for row in report.rows:
        tensors.setdefault(row.tensor, []).append(row)
    shown = []
    for rows in tensors.values():
        failed = [row for row in rows if not row.ok]
        shown += failed or [max(rows, key=lambda row: row.ratio or 0.0)]
    title = (
        f"errors against float64, on the worst of {world} ranks and on one rank ({job.layout}, {job.mask}, {job.dtype})"
    )
    header = ("tensor", "rank", "max abs", "max rel", "rel norm", "one rank", "ratio", "verdict")
    print_table(title, header, [_cells(row) for row in shown])
    failures = sum(not row.ok for row in report.rows)
    verdict = f"FAIL: {failures} of {len(report.rows)}" if failures else f"ok: all {len(report.rows)}"
    print(f"{verdict} comparisons; bytes sent by rank: {', '.join(map(str, report.bytes_sent))}")
    print("seconds: " + ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in report.seconds.items()))


def _cells(row: Row) -> tuple[str, ...]:
    rank = "sum" if row.rank is None else str(row.rank)
    errors = (row.max_abs, row.max_rel, row.rel_norm, row.single_rank_rel_norm)
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    return (row.tensor, rank, *(f"{error:.1e}" for error in errors), ratio, "ok" if row.ok else "FAIL")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _write(path: Path | None, result: dict[str, Any]) -> None:
    """Write the file whole or not at all; what is not finite becomes null, which JSON has no other word for."""
    if path is None:
        return
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(_finite(result), indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    raise SystemExit(main())
