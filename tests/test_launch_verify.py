"""`ringattn verify` passes what is right, fails what is not, and says so in its table, its JSON and its exit code."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from ringattn import CAUSAL
from ringattn.launch import comparison, verify
from ringattn.launch.comparison import Job, compare_ranks
from ringattn.launch.model import Config
from ringattn.launch.plan import make_rank_plans, traffic
from ringattn.launch.spawn import run
from ringattn.layout import shard_sizes

SMALL = ["--dim", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "8"]
PARAMETERS = 1 + 2 * 6 + 2  # embedding, two blocks, norm and head


def tensors(layers: int) -> set[str]:
    """Everything that the issue of a transformer's exactness comes down to, apart from parameters."""
    return {"logits", "loss"} | {f"layer {n} {x}" for n in range(layers) for x in ("O", "LSE", "dQ", "dK", "dV")}


def verified(path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    code = verify.main([*SMALL, "--json", str(path), *options])
    return code, json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (4, ["--seq-len", "250"]),
        (1, ["--seq-len", "64"]),
        (3, ["--seq-len", "100", "--layout", "striped", "--mask", "window:9,3", "--schedule", "all_gather"]),
        (2, ["--seq-len", "96", "--layout", "contiguous", "--mask", "full", "--dtype", "bfloat16", "--layers", "1"]),
    ],
)
def test_many_ranks_give_what_one_gives(world: int, options: list[str], tmp_path: Path) -> None:
    code, result = verified(tmp_path / "result.json", "--nproc", str(world), *options)
    assert (code, result["ok"], result["error"], result["world"]) == (0, True, None, world)
    ranks: dict[str, list[int | None]] = {}
    for row in result["rows"]:
        assert row["ok"] and set(row) == {
            *("tensor", "rank", "max_abs", "max_rel", "rel_norm", "single_rank_rel_norm", "ratio", "ok")
        }
        ranks.setdefault(row["tensor"], []).append(row["rank"])
    layers = 1 if "--layers" in options else 2
    reduced = {name for name in ranks if name.startswith("d ")} | {"loss"}
    assert set(ranks) - reduced | {"loss"} == tensors(layers) and len(reduced) == PARAMETERS - 6 * (2 - layers) + 1
    assert all(ranks[name] == ([None] if name in reduced else [*range(world)]) for name in ranks)
    assert result["seconds"]["total"] > 0


def test_bytes_are_those_of_the_plan(tmp_path: Path) -> None:
    _, result = verified(tmp_path / "result.json", "--nproc", "3", "--seq-len", "100")
    sizes = shard_sizes("zigzag", (100,), 3)
    plans = make_rank_plans("zigzag", CAUSAL, (100,), 3, "ring", range(3))
    width = 2 * 2 * 8  # keys and values, two heads of 8
    assert result["bytes_sent"] == [2 * sum(traffic(plan.schedule, sizes, width, 4)) for plan in plans]


def lossy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Attention that rounds what travels: what a 16-bit accumulator does."""
    rounded = [x + (x.bfloat16().to(x.dtype) - x).detach() for x in (key, value)]
    return ringattn.ring_attention(query, *rounded, **options)


def forgetful(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Attention whose rank 1 loses the gradient of its values."""
    return ringattn.ring_attention(query, key, value.detach() if dist.get_rank() == 1 else value, **options)


def with_broken_ring(name: str, job: Job) -> Any:
    comparison.ring_attention = globals()[name]
    return compare_ranks(job, verify._say)


@pytest.mark.parametrize(
    ("broken", "fails", "passes"),
    [("lossy", ("layer 0 O", 0), ("loss", None)), ("forgetful", ("layer 1 dV", 1), ("layer 1 dV", 0))],
)
def test_what_is_wrong_fails(broken: str, fails: tuple[str, int], passes: tuple[str, int | None]) -> None:
    job = Job(Config(32, 2, 4, 2, 8), 64, "zigzag", CAUSAL, torch.float32, "cpu")
    report = run(with_broken_ring, 2, broken, job, timeout=100)[0]
    verdicts = {(row.tensor, row.rank): row.ok for row in report.rows}
    assert not verdicts[fails] and verdicts[passes]


def test_a_failed_comparison_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    row = comparison.Row("layer 0 O", 1, math.nan, math.inf, 1.0, 0.0, math.inf, False)
    monkeypatch.setattr(verify, "run", lambda *_, **__: {0: comparison.Report([row], [1, 2])})
    code, result = verified(tmp_path / "result.json")
    assert (code, result["ok"]) == (1, False)
    assert result["rows"][0] | {"ok": None} == {
        **dict.fromkeys(("max_abs", "max_rel", "ratio", "ok")),
        **{"tensor": "layer 0 O", "rank": 1, "rel_norm": 1.0, "single_rank_rel_norm": 0.0},
    }
    assert "FAIL: 1 of 1 comparisons; bytes sent by rank: 1, 2" in capsys.readouterr().out


def fails_on_rank_1(job: Job, say: Any) -> None:
    if dist.get_rank() == 1:
        raise ValueError("out of sorts")
    dist.barrier()


def test_a_rank_that_fails_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(verify, "compare_ranks", fails_on_rank_1)
    code, result = verified(tmp_path / "result.json", "--nproc", "2")
    assert (code, result["ok"], result["rows"]) == (1, False, [])
    assert "rank 1 failed" in result["error"] and "out of sorts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "3"], r"heads \(3\) must be a multiple of kv_heads \(2\)"),
        (["--head-dim", "7"], "head_dim must be even for rotary embeddings, got 7"),
        (["--layers", "0"], "layers must be at least 1, got 0"),
        (["--nproc", "0"], "nproc must be at least 1, got 0"),
        (["--seq-len", "15"], "seq-len must be at least 4 tokens a rank, 16 on 4, got 15"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    code, result = verified(tmp_path / "result.json", *options)
    assert code == 2 and not result["ok"]
    with pytest.raises(ValueError, match=message):
        raise ValueError(result["error"])
    assert result["error"] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speed", "9"], "unrecognized arguments: --speed 9"),
        (["--seq", "64"], "unrecognized arguments: --seq 64"),
        (["--layout", "spiral"], "invalid choice: 'spiral' .*zigzag"),
        (["--mask", "window:a"], "unknown mask 'window:a'; choose full, causal, window:LEFT or window:LEFT,RIGHT"),
        (["--mask", "window:-2"], "unknown mask 'window:-2'"),
        (["--transport", "pigeon"], "invalid choice: 'pigeon'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_unknown_options_are_refused(options: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        verify.main(options)
    with pytest.raises(ValueError, match=message):
        raise ValueError(capsys.readouterr().err)


def test_torchrun_starts_it_too(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "ringattn.launch.verify", *SMALL, "--seq-len", "64", "--json", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["ok"] and done.stdout.count("errors against float64") == 1
