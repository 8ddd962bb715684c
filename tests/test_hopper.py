"""The Hopper tier without a GPU: what it takes, what fits, and which rows and keys its programs visit.

The order of items and blocks is device code of plain integers, so it runs here too, with Python's in place of Gluon's.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.backends import Problem

pytest.importorskip("triton.experimental.gluon")
if not hasattr(pytest.importorskip("ringattn.kernels.hopper.items", exc_type=ImportError).item_of, "fn"):
    pytest.skip("Triton's interpreter does not run Gluon", allow_module_level=True)

from ringattn.kernels.config import SHARED_MEMORY  # noqa: E402
from ringattn.kernels.hopper import attention_fwd, items  # noqa: E402
from ringattn.kernels.hopper.config import choose  # noqa: E402
from ringattn.kernels.tiles import clamp, cut_rows  # noqa: E402

DIMS = [(8, 8), (64, 64), (80, 80), (64, 128), (128, 128), (192, 128), (192, 192), (256, 64), (256, 256)]


class Integers:
    """Stands for `gl` in device code: a program's number and arithmetic on ints and integer tensors."""

    def __init__(self, program: int = 0, programs: int = 1) -> None:
        self.program_id, self.num_programs = (lambda axis: program), (lambda axis: programs)

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Any:
        return torch.where(condition, x, y) if isinstance(condition, Tensor) else x if condition else y

    @staticmethod
    def minimum(x: Any, y: Any) -> Any:
        return torch.clamp(x, max=y) if isinstance(x, Tensor) else min(x, y)

    @staticmethod
    def maximum(x: Any, y: Any) -> Any:
        return torch.clamp(x, min=y) if isinstance(x, Tensor) else max(x, y)

    @staticmethod
    def cdiv(x: int, y: int) -> int:
        return -(-x // y)

    @staticmethod
    def arange(begin: int, end: int, layout: Any) -> Tensor:
        return torch.arange(begin, end)

    @staticmethod
    def NVMMADistributedLayout(*args: Any) -> None: ...

    @staticmethod
    def SliceLayout(*args: Any) -> None: ...


@pytest.fixture
def device_code(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The functions of `items` as Python functions; `device_code.run_as(program, programs)` says who runs them."""
    for name in ("number_of", "rounds_of", "item_of", "key_blocks", "block_at", "limits_of"):
        monkeypatch.setattr(items, name, getattr(items, name).fn)
    monkeypatch.setattr(items, "gl", Integers())
    return SimpleNamespace(run_as=lambda *who: monkeypatch.setattr(items, "gl", Integers(*who)))


@pytest.mark.parametrize("dims", DIMS, ids=lambda x: f"{x[0]}v{x[1]}")
def test_builds_fit(dims: tuple[int, int]) -> None:
    config = choose(*dims)
    assert config.width + config.extra >= dims[0] and config.v_width >= dims[1]
    assert config.shared_bytes + 2048 <= SHARED_MEMORY[90] * 1024
    assert config.turn + config.consumers <= 16, "the hardware has 16 named barriers"


def example(rows: int = 128, dim: int = 64, dtype: torch.dtype = torch.bfloat16, last: int = 1) -> Tensor:
    return torch.empty_strided((1, 4, rows, dim), (4 * rows * dim, rows * dim, dim, last), dtype=dtype, device="meta")


@pytest.mark.parametrize(
    "problem, q, out, why",
    [
        (Problem(0.1), example(dtype=torch.float32), example(), "float32"),
        (Problem(0.1), example(rows=63), example(), "at least 64 query rows, got 63"),
        (Problem(-0.1), example(), example(), "positive scale, got -0.1"),
        (Problem(0.1), example(dim=60), example(), "16 bytes"),
        (Problem(0.1), example(last=2), example(), "contiguous rows"),
        (Problem(0.1), example(), example(last=2), "output with contiguous rows"),
        (Problem(-0.1, softcap=20.0), example(), example(), None),
        (Problem(0.1), example(), example(), None),
    ],
)
def test_refusals(problem: Problem, q: Tensor, out: Tensor, why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_fwd, "_is_hopper", lambda device: True)
    reason = attention_fwd.refusal(problem, (), q, q, q, out)
    assert reason is None if why is None else reason is not None and why in reason


def test_other_devices_are_refused() -> None:
    x = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16)
    assert "compute capability 9.0" in (attention_fwd.refusal(Problem(0.1), (), x, x, x, x) or "")


@pytest.mark.parametrize(
    "batch, heads, groups, rows, causal", [(1, 3, 1, 700, True), (2, 8, 4, 300, False), (1, 40, 2, 500, True)]
)
@pytest.mark.parametrize("programs", [1, 7, 132])
def test_every_item_is_taken_once(
    batch: int, heads: int, groups: int, rows: int, causal: bool, programs: int, device_code: Any
) -> None:
    q = torch.empty(batch, heads, rows, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, heads // groups, rows, 64, dtype=torch.bfloat16, device="meta")
    out, lse = torch.empty_like(q), torch.empty(batch, heads, rows, device="meta")
    tiles = clamp([(0, rows, 0, rows, 0 if causal else None, None)])
    launch = attention_fwd.forward_launch(tiles, q, k, k, out, lse, 0.1, 0.0, first=True, programs=programs)
    names = ("items", "rounds", "blocks", "backwards", "heads", "groups", "together", "all_heads")
    sizes = tuple(launch.args[name] for name in names)
    taken = []
    for program in range(launch.grid[0]):
        device_code.run_as(program, launch.grid[0])
        taken += [items.item_of(round, sizes) for round in range(items.rounds_of(sizes))]
    want = [(b, h, h // groups, block) for b in range(batch) for h in range(heads) for block in range(-(-rows // 128))]
    assert sorted(taken) == sorted(want)
    assert launch.grid[0] in (min(programs, len(want)), len(want))


BANDS = [(None, None), (0, None), (0, 90), (-40, 130), (130, None), (None, -60), (-3, 3)]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("begin, single", [(0, True), (70, True), (70, False)])
def test_every_visible_pair_is_met_once(
    band: tuple[int | None, int | None], head_dim: int, begin: int, single: bool, device_code: Any
) -> None:
    """Blocks without a mask hold visible pairs alone; in the others a row's limits say what it sees."""
    rows, keys = 333, 410
    tile = clamp([(begin, begin + rows, 25, 25 + keys, *band)])[0]
    lo, hi = tile[4:]
    C = SimpleNamespace(value=SimpleNamespace(single=single, block_q=128, block_k=choose(head_dim, head_dim).block_k))
    lag = torch.arange(rows).unsqueeze(1) - torch.arange(keys)
    seen, met = (lag >= lo) & (lag <= hi), torch.zeros(rows, keys, dtype=torch.int64)
    blocks = cut_rows((tile,), "q", 128, begin + rows, False, torch.device("cpu"))
    firsts = [blocks.begin + 128 * block for block in range(blocks.blocks)] if single else range(0, begin + rows, 128)
    for row in firsts:
        span = items.key_blocks(row, tile, C)
        for half in (0, 64):
            least, count = items.limits_of(row + half, tile, span, C)
            for step in range(span[1]):
                start = items.block_at(step, span) * C.value.block_k
                column = start + torch.arange(C.value.block_k)
                visible = (column >= least.unsqueeze(1)) & (column < (least + count).unsqueeze(1))
                if step >= span[1] - span[3]:
                    visible[:] = True
                for a in range(64):
                    local = row + half + a - tile[0]
                    if 0 <= local < rows:
                        met[local, span[0] + column[visible[a]]] += 1
    assert torch.equal(met, seen.long())
