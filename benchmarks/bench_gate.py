"""How the error of the ring grows with the number of ranks, as a ratio to one rank's error in the same dtype.

bfloat16 is flat, because sums and what travels are float32. float32 grows by the rounding of the merges alone. The
third table keeps the running sums in bfloat16, as some libraries do: the gate refuses it.

    python benchmarks/bench_gate.py [--tokens 4096]
"""

import argparse
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import RESULTS, describe

from ringattn import attention, ring_attention
from ringattn.backends import reference
from ringattn.launch.spawn import run
from ringattn.layout import make_shards, shard_positions
from ringattn.testing import MOST_RATIO, gate, make_inputs, simulate

SIMULATED, OVER_GLOO = (2, 4, 8, 16, 32, 64), (2, 3, 4, 8)
TENSORS = ("out", "dq", "dk", "dv")


def round_sums(function: Any) -> Any:
    """A backend function that leaves its running sums rounded to bfloat16, and gradients of keys as they travel too."""

    def rounded(problem: Any, tiles: Any, *tensors: torch.Tensor) -> None:
        function(problem, tiles, *tensors)
        for state in tensors[3:4] if function is reference.forward else tensors[7:]:
            state.copy_(state.bfloat16())

    return rounded


ROUNDED = SimpleNamespace(forward=round_sums(reference.forward), backward=round_sums(reference.backward))


def simulated(tokens: int, dtype: torch.dtype, backend: Any, wire_dtype: torch.dtype | None) -> list[dict[str, Any]]:
    inputs = make_inputs(1, 4, 2, tokens, 32, dtype=dtype)
    exact = simulate(*(x.double() for x in inputs), world=1, mask="causal", backend="reference")
    one = simulate(*inputs, world=1, mask="causal", backend="reference")
    rows = []
    for world in SIMULATED:
        many = simulate(*inputs, world=world, layout="zigzag", mask="causal", backend=backend, wire_dtype=wire_dtype)
        verdicts = {name: gate(getattr(many, name), getattr(one, name), getattr(exact, name)) for name in TENSORS}
        rows.append(
            {
                "world": world,
                **{name: v.ratio for name, v in verdicts.items()},
                "ok": all(v.ok for v in verdicts.values()),
            }
        )
    return rows


def over_gloo(tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """The worst ratio of all ranks, with real processes; runs on every rank."""
    inputs = make_inputs(1, 4, 2, tokens, 32, dtype=dtype)
    exact, one = ((results(attention, [x.to(kind) for x in inputs])) for kind in (torch.float64, dtype))
    rows = torch.tensor(shard_positions(make_shards("zigzag", (tokens,), dist.get_world_size())[dist.get_rank()]))
    mine = results(ring_attention, [x[:, :, rows] for x in inputs], layout="zigzag", seq_len=tokens)
    verdicts = [gate(x, x1[:, :, rows], x64[:, :, rows]) for x, x1, x64 in zip(mine, one, exact, strict=True)]
    return {**{name: v.ratio for name, v in zip(TENSORS, verdicts, strict=True)}, "ok": all(v.ok for v in verdicts)}


def results(call: Any, inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    out = call(q, k, v, mask="causal", backend="reference", **options)
    out.backward(inputs[3])
    return [out.detach(), q.grad, k.grad, v.grad]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n{'world':>6}" + "".join(f"{name:>8}" for name in TENSORS) + "  gate")
    for row in rows:
        print(
            f"{row['world']:>6}"
            + "".join(f"{row[name]:>8.3f}" for name in TENSORS)
            + f"  {'pass' if row['ok'] else 'FAIL'}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    tokens = parser.parse_args().tokens
    tables: dict[str, list[dict[str, Any]]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        tables[f"{name}, simulated"] = simulated(tokens, dtype, "reference", None)
        rows = []
        for world in OVER_GLOO:
            ranks = run(over_gloo, world, tokens, dtype).values()
            worst = {key: max(rank[key] for rank in ranks) for key in TENSORS}
            rows.append({"world": world, **worst, "ok": all(rank["ok"] for rank in ranks)})
        tables[f"{name}, over gloo, worst rank"] = rows
    broken = simulated(tokens, torch.bfloat16, ROUNDED, torch.bfloat16)
    tables["bfloat16 with sums kept in bfloat16 (must fail from 4 ranks on)"] = broken
    for title, rows in tables.items():
        show(title, rows)
    sound = all(row["ok"] for title, rows in tables.items() for row in rows if rows is not broken)
    seen = all(not row["ok"] for row in broken if row["world"] >= 4)
    facts = describe(torch.device("cpu"))
    path = RESULTS / f"gate_{facts['card']}_{facts['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": "gate", **facts, "most_ratio": MOST_RATIO, "tables": tables}, indent=1) + "\n")
    print(f"\nsaved {path.name}; " + ("as it must be" if sound and seen else "NOT as it must be"))
    return int(not (sound and seen))


if __name__ == "__main__":
    sys.exit(main())
