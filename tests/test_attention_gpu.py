"""The kernels as shipped, on a GPU: head sizes, dtypes, masks, rings, repeats, and sequences past int32."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ringattn.backends import Problem, reference
from ringattn.mask import CAUSAL, FULL, Band, window
from ringattn.plan import Tile, Tiles
from ringattn.testing import compare, gate, make_inputs, simulate

triton = pytest.importorskip("ringattn.backends.triton", exc_type=ImportError)
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning:torch")]


@pytest.fixture(autouse=True, params=["hopper", "portable"])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test with the Hopper tier where the device has one, and with the portable kernels alone."""
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the device gets the portable kernels, which the other half tests")
    monkeypatch.setattr(triton, "HOPPER_ANSWERS", request.param == "hopper")
    return request.param


BANDS = {"full": FULL, "causal": CAUSAL, "window": window(100, 20), "strict": Band(lo=9)}
ALL = ("out", "dq", "dk", "dv")


def tiles_of(band: Band, rows: int, keys: int) -> Tiles:
    return (Tile(0, rows, 0, keys, None if band == FULL else band, 0, 0, 1),)


def ours(tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, do: Tensor, problem: Problem) -> dict[str, Tensor]:
    """One visit that writes the inputs' dtype, on poisoned outputs."""
    out, lse = torch.full_like(do, torch.nan), torch.full(q.shape[:3], torch.nan, device=q.device)
    triton.forward(problem, tiles, q, k, v, out, lse)
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    triton.backward(problem, tiles, do, q, k, v, out, lse, triton.row_delta(do, out, None), dq, dk, dv)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def exact(tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, do: Tensor, problem: Problem) -> dict[str, Tensor]:
    """The same in float64."""
    q, k, v, do = (x.double() for x in (q, k, v, do))
    out, lse = torch.empty_like(do), torch.empty_like(q[..., 0])
    reference.forward(problem, tiles, q, k, v, out, lse)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    reference.backward(problem, tiles, do, q, k, v, out, lse, (do * out).sum(-1), dq, dk, dv)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def naive(band: Band, q: Tensor, k: Tensor, v: Tensor, do: Tensor, problem: Problem) -> dict[str, Tensor]:
    """Attention written with torch operations in the inputs' dtype: whose error FlashAttention's rule doubles."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    scores = (leaves[0] @ leaves[1].repeat_interleave(group, 1).mT) * problem.scale
    lag = torch.arange(q.shape[2], device=q.device).unsqueeze(1) - torch.arange(k.shape[2], device=q.device)
    hidden = (lag < band.lo) | (lag > band.hi)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    out = torch.where(hidden.all(1, keepdim=True), 0.0, weights).nan_to_num(0.0) @ leaves[2].repeat_interleave(group, 1)
    return dict(zip(ALL, (out, *torch.autograd.grad(out, leaves, do)), strict=True))


def hold(got: dict[str, Tensor], want: dict[str, Tensor], peer: dict[str, Tensor], names: Sequence[str] = ALL) -> None:
    """At most twice the peer's largest error (1e-6 of the largest value where the peer makes none)."""
    for name in names:
        error, allowed = compare(got[name], want[name]).max_abs, compare(peer[name].nan_to_num(0.0), want[name]).max_abs
        assert error <= 2 * allowed + 1e-6 * want[name].abs().max().item(), f"{name}: {error} against {allowed}"
    empty = want["lse"] == -torch.inf
    assert torch.equal(got["lse"] == -torch.inf, empty)
    assert not got["out"][empty].any() and not got["dq"][empty].any()
    torch.testing.assert_close(got["lse"][~empty].double(), want["lse"][~empty], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda x: str(x)[6:])
@pytest.mark.parametrize(
    "dim, v_dim", [(16, 16), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
)
def test_head_sizes(dim: int, v_dim: int, dtype: torch.dtype) -> None:
    """Every head size and mask, grouped heads, lengths that no block divides."""
    if dtype == torch.float16 and dim not in (64, 128):
        pytest.skip("float16 differs from bfloat16 in nothing but the rounding")
    q, k, v, do = make_inputs(2, 4, 2, tokens=333, dim=dim, v_dim=v_dim, dtype=dtype, device="cuda")
    k, v = k[:, :, :301], v[:, :, :301]
    for band in BANDS.values():
        problem = Problem(dim**-0.5, first=True, first_kv=True)
        tiles = tiles_of(band, 333, 301)
        hold(ours(tiles, q, k, v, do, problem), exact(tiles, q, k, v, do, problem), naive(band, q, k, v, do, problem))


@pytest.mark.parametrize("softcap, scale", [(20.0, 0.3), (0.0, -0.2)])
def test_scores(softcap: float, scale: float) -> None:
    q, k, v, do = make_inputs(1, 2, 2, tokens=260, dim=64, dtype=torch.bfloat16, device="cuda")
    problem, tiles = Problem(scale, softcap, first=True, first_kv=True), tiles_of(CAUSAL, 260, 260)
    peer = naive(CAUSAL, q, k, v, do, problem)
    hold(ours(tiles, q, k, v, do, problem), exact(tiles, q, k, v, do, problem), peer, ALL if not softcap else ("out",))


@pytest.mark.parametrize("dim", [64, 128])
def test_strides(dim: int) -> None:
    """Descriptors on a fused projection, pointers on columns apart and on a gradient of stride 0."""
    fused = torch.randn(2, 300, 3, 4, dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = fused.permute(2, 0, 3, 1, 4)
    columns = torch.randn(2, 4, dim, 300, device="cuda", dtype=torch.bfloat16).mT
    ones = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(2, 4, 300, dim)
    problem, tiles = Problem(dim**-0.5, first=True, first_kv=True), tiles_of(CAUSAL, 300, 300)
    for x, do in ((q, torch.randn_like(q)), (columns, ones)):
        hold(ours(tiles, x, k, v, do, problem), exact(tiles, x, k, v, do, problem), naive(CAUSAL, x, k, v, do, problem))


@pytest.mark.parametrize("layout, mask", [("zigzag", "causal"), ("contiguous", "full"), ("striped", window(500, 0))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda x: str(x)[6:])
def test_ring(layout: str, mask: Band | str, dtype: torch.dtype) -> None:
    """Rings of 2 to 64 ranks, simulated, pass the gate against one rank; in bfloat16 the ratio stays at 1."""
    inputs = make_inputs(1, 4, 2, tokens=2048 + 37, dim=64, dtype=dtype, device="cuda")
    options = {"layout": layout, "mask": mask}
    want = simulate(*(x.double() for x in inputs), world=1, backend="reference", **options)
    single = simulate(*inputs, world=1, backend="triton", **options)
    for world in (2, 3, 8, 64):
        ring = simulate(*inputs, world=world, backend="triton", **options)
        for name in ALL:
            verdict = gate(getattr(ring, name), getattr(single, name), getattr(want, name))
            assert verdict.ok, f"{name} on {world} ranks: {verdict}"
        if layout == "zigzag":
            assert ring.launches_forward == [world] * world


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_repeats_are_bitwise_equal(dim: int) -> None:
    q, k, v, do = make_inputs(2, 8, 4, tokens=1100, dim=dim, dtype=torch.bfloat16, device="cuda")
    problem, tiles = Problem(dim**-0.5, first=True, first_kv=True), tiles_of(CAUSAL, 1100, 1100)
    first = ours(tiles, q, k, v, do, problem)
    for _ in range(50):
        again = ours(tiles, q, k, v, do, problem)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_memory() -> None:
    """Nothing is allocated beyond the results and delta, apart from what the caller holds."""
    q, k, v, do = make_inputs(1, 8, 8, tokens=4096, dim=128, dtype=torch.bfloat16, device="cuda")
    problem, tiles = Problem(128**-0.5, first=True, first_kv=True), tiles_of(CAUSAL, 4096, 4096)
    ours(tiles, q, k, v, do, problem)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = ours(tiles, q, k, v, do, problem)
    held = sum(x.numel() * x.element_size() for x in results.values()) + results["lse"].numel() * 4
    assert torch.cuda.max_memory_allocated() - before <= held + (1 << 20)


@pytest.mark.slow
def test_past_int32() -> None:
    """262,144 tokens of 64 heads of 128 as views of a fused projection of 6.4e9 elements, checked on sampled rows."""
    tokens, heads, dim = 262_144, 64, 128
    fused = torch.randn(tokens, 3, heads, dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = (fused[:, part].transpose(0, 1).unsqueeze(0) for part in range(3))
    do = torch.randn(1, heads, tokens, dim, device="cuda", dtype=torch.bfloat16)
    problem, tiles = Problem(dim**-0.5, first=True, first_kv=True), tiles_of(CAUSAL, tokens, tokens)
    got = ours(tiles, q, k, v, do, problem)
    assert all(x.isfinite().all() for x in got.values())
    for head in (0, 63):
        index = torch.cat([torch.randint(0, tokens, (1020,)), torch.tensor([0, 1, tokens - 2, tokens - 1])]).cuda()
        qh, kh, vh, dh = (x[0, head].double() for x in (q, k, v, do))
        scores = (qh[index] @ kh.T) * problem.scale
        hidden = index.unsqueeze(1) < torch.arange(tokens, device="cuda")
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
        out = weights @ vh
        delta = (dh[index] * out).sum(-1, keepdim=True)
        dq = (weights * (dh[index] @ vh.T - delta)) @ kh * problem.scale
        # Of the sampled keys, dk and dv need every row's LSE and delta: the kernel's own, whose rows were just checked.
        lse, all_delta = got["lse"][0, head].double(), (dh * got["out"][0, head].double()).sum(-1)
        weights = torch.exp((kh[index] @ qh.T) * problem.scale - lse).masked_fill(hidden.logical_not_().logical_and_(
            index.unsqueeze(1) != torch.arange(tokens, device="cuda")), 0.0)  # fmt: skip
        dv = weights @ dh
        dk = (weights * (vh[index] @ dh.T - all_delta)) @ qh * problem.scale
        for name, want in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv)):
            errors = compare(got[name][0, head, index], want)
            assert errors.rel_norm < 8e-3, f"{name} of head {head}: {errors}"
