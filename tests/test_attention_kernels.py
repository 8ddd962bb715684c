"""The attention kernels in Triton's interpreter, on tiny tensors: every mask, path and epilogue against float64."""

import os
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.backends import Problem, reference
from ringattn.layout import Span
from ringattn.mask import OPEN, Band, window
from ringattn.plan import Tile, Tiles, make_tiles
from ringattn.testing import gate, make_inputs, simulate

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with the interpreter on", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, in hidden pairs

from ringattn.backends import triton  # noqa: E402
from ringattn.kernels import attention_bwd, attention_fwd  # noqa: E402
from ringattn.kernels.config import Config  # noqa: E402

SMALL = Config(block_q=32, block_k=32, num_warps=4, num_stages=2)


def tile(q_begin: int, q_end: int, k_begin: int, k_end: int, lo: int | None = None, hi: int | None = None) -> Tile:
    band = None if lo is None and hi is None else Band(-OPEN if lo is None else lo, OPEN if hi is None else hi)
    return Tile(q_begin, q_end, k_begin, k_end, band, 0, 0, 1)


CASES: dict[str, Tiles] = {
    "full": (tile(0, 70, 0, 90),),
    "causal": (tile(0, 70, 0, 70, lo=0),),
    "causal later": (tile(0, 70, 0, 90, lo=-20),),
    "strictly causal, first rows empty": (tile(0, 70, 0, 90, lo=7),),
    "window": (tile(0, 70, 0, 90, lo=0, hi=9),),
    "window both sides": (tile(0, 70, 0, 90, lo=-5, hi=40),),
    "only the future": (tile(0, 70, 0, 90, hi=-3),),
    "band of one lag": (tile(0, 70, 0, 90, lo=4, hi=4),),
    "part of the rows, part of the keys": (tile(17, 60, 11, 83, lo=-30, hi=35),),
    "one row, one key": (tile(5, 6, 8, 9),),
    "documents": (tile(0, 20, 0, 20, lo=0), tile(20, 45, 20, 45, lo=0), tile(45, 70, 45, 90, lo=-20)),
    "two tiles on the same rows": (tile(0, 64, 0, 40), tile(0, 64, 64, 90, lo=0)),
    "whole blocks of keys for half a block of rows": (tile(0, 20, 0, 10), tile(20, 70, 0, 90)),
    "whole blocks of rows for half a block of keys": (tile(0, 10, 0, 20), tile(0, 70, 20, 90)),
    "rows without tiles between": (tile(0, 10, 0, 90), tile(60, 70, 0, 30, lo=0)),
}


def run(
    tiles: Tiles,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    problem: Problem,
    *,
    config: Config = SMALL,
    descriptors: bool | None = None,
    seed: int = 0,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(kernels', float64's, same-dtype reference's) results on the same random state, or on poison with `first`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"out": do.shape, "lse": do.shape[:3], "dq": q.shape, "dk": k.shape, "dv": v.shape}
    fresh = {name: problem.first_kv if name in ("dk", "dv") else problem.first for name in shapes}
    start = {
        name: torch.full(shape, torch.nan) if fresh[name] else torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    if not problem.first:
        start["lse"][:, :, ::3] = -torch.inf
        start["out"][:, :, ::3] = 0.0

    def compute(dtype: torch.dtype, saved: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        state = {name: x.to(dtype).clone() for name, x in start.items()}
        inputs = [x.to(dtype) for x in (q, k, v)]
        reference.forward(problem, tiles, *inputs, state["out"], state["lse"])
        lse, delta = saved or (state["lse"], (do.to(dtype) * state["out"]).sum(-1))
        grads = [state[name] for name in ("dq", "dk", "dv")]
        reference.backward(problem, tiles, do.to(dtype), *inputs, state["out"], lse, delta, *grads)
        return state

    exact = compute(torch.float64)
    lse, delta = exact["lse"].float(), (do.double() * exact["out"]).sum(-1).float()
    single = compute(torch.float32, (lse, delta))
    exact["rounding"] = 8 * torch.finfo(torch.float32).eps * _product(do, v) * max(q.abs().max(), k.abs().max())
    ours = {name: x.clone() for name, x in start.items()}
    ints = triton.int_tiles(tiles)
    options = {"config": config, "descriptors": descriptors}
    factors = problem.scale, problem.softcap
    attention_fwd.forward_launch(ints, q, k, v, ours["out"], ours["lse"], *factors, first=problem.first, **options)()
    grads = ours["dk"], ours["dv"]
    attention_bwd.dkv_launch(ints, do, q, k, v, lse, delta, *grads, *factors, first=problem.first_kv, **options)()
    attention_bwd.dq_launch(ints, do, q, k, v, lse, delta, ours["dq"], *factors, first=problem.first, **options)()
    return ours, exact, single


def _product(do: Tensor, v: Tensor) -> Tensor:
    """The size of do @ v.mT, whose difference from delta is the gradient of a score."""
    return do.double().norm(dim=-1).max() * v.double().norm(dim=-1).max()


def hold(ours: dict[str, Tensor], exact: dict[str, Tensor], single: dict[str, Tensor], names: Sequence[str]) -> None:
    """float32 results are as good as torch's: an error norm within 1.1 of it, or 8 units of rounding.

    Gradients of rows with one key are differences of equal numbers: there the rounding is that of the numbers.
    """
    for name in names:
        verdict = gate(ours[name], single[name], exact[name])
        cancelled = name in ("dq", "dk") and verdict.errors.max_abs <= exact["rounding"]
        assert verdict.ok or cancelled, f"{name}: {verdict}"
    assert torch.equal(ours["lse"] == -torch.inf, exact["lse"] == -torch.inf)
    assert torch.equal(ours["out"][ours["lse"] == -torch.inf], exact["out"][exact["lse"] == -torch.inf].float())


ALL = ("out", "lse", "dq", "dk", "dv")


@pytest.mark.parametrize("first", [True, False], ids=["write", "accumulate"])
@pytest.mark.parametrize("tiles", CASES.values(), ids=CASES.keys())
def test_tiles(tiles: Tiles, first: bool) -> None:
    """Every class of tile, written and merged, through descriptors and pointers."""
    q, _, _, do = make_inputs(1, 2, 1, tokens=70, dim=16)
    _, k, v, _ = make_inputs(1, 2, 1, tokens=90, dim=16, seed=1)
    hold(*run(tiles, q, k, v, do, Problem(0.25, first=first, first_kv=first), descriptors=first), ALL)


@pytest.mark.parametrize("dim, v_dim", [(16, 16), (40, 40), (80, 24), (64, 128), (20, 36)])
def test_head_sizes(dim: int, v_dim: int) -> None:
    """Sizes that are no power of two are padded inside, on both paths."""
    q, k, v, do = make_inputs(1, 2, 1, tokens=50, dim=dim, v_dim=v_dim)
    for descriptors in (None, False):
        problem = Problem(dim**-0.5, first=True, first_kv=True)
        hold(*run((tile(0, 50, 0, 50, lo=0),), q, k, v, do, problem, descriptors=descriptors), ALL)


@pytest.mark.parametrize("config", [Config(16, 64, 4, 1), Config(64, 16, 4, 3), Config(128, 32, 8, 2)], ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (6, 2), (4, 1)])
def test_blocks_and_groups(config: Config, heads: int, kv_heads: int) -> None:
    q, k, v, do = make_inputs(1, heads, kv_heads, tokens=75, dim=16)
    hold(
        *run((tile(0, 75, 0, 75, lo=0, hi=40),), q, k, v, do, Problem(0.25, first=True, first_kv=True), config=config),
        ALL,
    )


@pytest.mark.parametrize("scale, softcap", [(0.25, 2.0), (0.25, 50.0), (-0.3, 0.0), (-0.3, 5.0), (0.0, 0.0)])
def test_scores(scale: float, softcap: float) -> None:
    """Softcap, and scales of any sign."""
    q, k, v, do = make_inputs(1, 2, 2, tokens=40, dim=16)
    for first in (True, False):
        problem = Problem(scale, softcap, first, first)
        hold(*run((tile(0, 40, 0, 40, lo=-3),), q, k, v, do, problem), ALL)


@pytest.mark.parametrize("kind", ["huge of both signs", "equal", "huge keys on one side", "one token"])
def test_extreme_inputs(kind: str) -> None:
    q, k, v, do = make_inputs(1, 1, 1, tokens=1 if kind == "one token" else 50, dim=16)
    if kind == "huge of both signs":
        q, k = q * 100, k * 100
    elif kind == "equal":
        q, k = torch.ones_like(q), torch.ones_like(k)
    elif kind == "huge keys on one side":
        k = k.abs() * 1000
    rows = q.shape[2]
    for first in (True, False):
        hold(*run((tile(0, rows, 0, rows, lo=0),), q, k, v, do, Problem(1.0, 0.0, first, first)), ALL)


def test_strides() -> None:
    """Views of a fused projection, transposes, columns apart, and a gradient of stride 0."""
    fused = torch.randn(2, 40, 3, 2, 16)
    q, k, v = fused.permute(2, 0, 3, 1, 4)
    columns = torch.randn(2, 2, 16, 40).mT
    problem = Problem(0.25, first=True, first_kv=True)
    tiles = (tile(0, 40, 0, 40, lo=0),)
    for x, do in ((q, torch.randn(2, 2, 40, 16)), (columns, torch.ones(1, 1, 1, 1).expand(2, 2, 40, 16))):
        hold(*run(tiles, x, k, v, do, problem), ALL)


def test_float16_rounding() -> None:
    """16-bit inputs: at most twice the error of torch in the same dtype (FlashAttention's rule)."""
    q, k, v, do = make_inputs(1, 2, 1, tokens=100, dim=32, dtype=torch.float16)
    problem = Problem(32**-0.5, first=True, first_kv=True)
    ours, exact, _ = run((tile(0, 100, 0, 100, lo=0),), q, k, v, do, problem)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = (leaves[0] @ leaves[1].repeat_interleave(2, 1).mT) * problem.scale
    scores = scores.masked_fill(torch.ones(100, 100).triu(1).bool(), -torch.inf)
    peer = torch.softmax(scores, -1) @ leaves[2].repeat_interleave(2, 1)
    results = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(peer, leaves, do), strict=True), out=peer)
    for name, x in results.items():
        error, allowed = (y.double() - exact[name] for y in (ours[name].half(), x))
        assert error.abs().max() <= 2 * allowed.abs().max(), name


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    lo=st.integers(-20, 10),
    width=st.integers(0, 40),
    shift=st.integers(-40, 40),
    first=st.booleans(),
)
def test_random_documents(lengths: list[int], lo: int, width: int, shift: int, first: bool) -> None:
    """Tables as a plan makes them: documents against a block of keys that lies `shift` positions away."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    queries = tuple(Span(start, 0, size, 1, n) for n, (start, size) in enumerate(zip(starts, lengths, strict=True)))
    keys = tuple(Span(s.offset, max(0, shift), s.size, 1, s.document) for s in queries)
    queries = tuple(Span(s.offset, max(0, -shift), s.size, 1, s.document) for s in queries)
    tiles = make_tiles(queries, keys, Band(lo, lo + width))
    if not tiles:
        return
    q, k, v, do = make_inputs(1, 2, 1, tokens=sum(lengths), dim=16)
    hold(*run(tiles, q, k, v, do, Problem(0.25, 0.0, first, first)), ALL)


@pytest.mark.parametrize("layout, mask", [("zigzag", "causal"), ("striped", "causal"), ("contiguous", window(10, 3))])
def test_ring(layout: str, mask: Band | str) -> None:
    """The backend in a simulated ring against float64; under a causal zigzag exactly one launch a visited block."""
    inputs = make_inputs(1, 2, 1, tokens=35, dim=16)
    dlse = torch.randn(1, 2, 35)
    options = {"layout": layout, "mask": mask}
    exact = simulate(*(x.double() for x in inputs), dlse.double(), world=1, backend="reference", **options)
    single = simulate(*inputs, dlse, world=1, backend="triton", **options)
    ring = simulate(*inputs, dlse, world=3, backend="triton", **options)
    for name in ALL:
        verdict = gate(getattr(ring, name), getattr(single, name), getattr(exact, name))
        assert verdict.ok, f"{name}: {verdict}"
    if layout == "zigzag":
        assert ring.launches_forward == [3, 3, 3]


def test_final_dtype_in_one_call() -> None:
    """A call that is the only visit may write 16-bit results."""
    q, k, v, do = make_inputs(1, 2, 1, tokens=40, dim=16, dtype=torch.float16)
    tiles, problem = (tile(0, 40, 0, 40, lo=0),), Problem(0.25, first=True, first_kv=True)
    ours, _, _ = run(tiles, q, k, v, do, problem)
    out, lse = torch.empty_like(do), torch.empty(1, 2, 40)
    triton.forward(problem, tiles, q, k, v, out, lse)
    torch.testing.assert_close(out, ours["out"].half(), rtol=2e-3, atol=2e-3)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    delta = triton.row_delta(do, out, None)
    triton.backward(problem, tiles, do, q, k, v, out, lse, delta, *grads)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        torch.testing.assert_close(grad, ours[name].half(), rtol=2e-2, atol=2e-2)


def test_rows_without_keys_give_zeros() -> None:
    """A row whose final LSE is -inf has zero gradients, and gives none."""
    q, k, v, do = make_inputs(1, 1, 1, tokens=40, dim=16)
    tiles, problem = (tile(0, 40, 0, 40),), Problem(0.25, first=True, first_kv=True)
    lse = torch.zeros(1, 1, 40)
    lse[:, :, 10:20] = -torch.inf
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    triton.backward(problem, tiles, do, q, k, v, do, lse, torch.zeros(1, 1, 40), *grads)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][:, :, 10:20].any()


def test_nan_comes_out() -> None:
    """A NaN in the inputs of a row is not hidden as a row without keys."""
    q, k, v, _ = make_inputs(1, 1, 1, tokens=40, dim=16)
    q[:, :, 7] = torch.nan
    out, lse = torch.zeros(1, 1, 40, 16), torch.zeros(1, 1, 40)
    triton.forward(Problem(0.25, first=True), (tile(0, 40, 0, 40, lo=0),), q, k, v, out, lse)
    assert out[:, :, 7].isnan().all() and not out[:, :, :7].isnan().any() and not out[:, :, 8:].isnan().any()


def test_poisoned_state_of_empty_rows_is_not_read() -> None:
    """Where the state's LSE is -inf its output never matters (0 * NaN)."""
    q, k, v, _ = make_inputs(1, 1, 1, tokens=40, dim=16)
    out, lse = torch.full((1, 1, 40, 16), torch.nan), torch.full((1, 1, 40), -torch.inf)
    triton.forward(Problem(0.25), (tile(0, 40, 0, 40, lo=0),), q, k, v, out, lse)
    assert out.isfinite().all()


@pytest.mark.parametrize("rows, keys, batch", [(0, 8, 1), (8, 0, 1), (8, 8, 0), (8, 8, 1)])
def test_nothing_to_do(rows: int, keys: int, batch: int) -> None:
    q, k = torch.randn(batch, 2, rows, 16), torch.randn(batch, 2, keys, 16)
    out, lse = torch.full_like(q, torch.nan), torch.full((batch, 2, rows), torch.nan)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, k)]
    problem = Problem(0.25, first=True, first_kv=True)
    triton.forward(problem, (), q, k, k, out, lse)
    assert (out == 0).all() and (lse == -torch.inf).all()
    triton.backward(problem, (), out, q, k, k, out, lse, triton.row_delta(out, out, lse.exp()), *grads)
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_dlse", [True, False])
def test_row_delta(dtype: torch.dtype, with_dlse: bool) -> None:
    do, out = torch.randn(2, 3, 50, 24, dtype=dtype), torch.randn(2, 50, 3, 24).transpose(1, 2)
    dlse = torch.randn(3, 2, 50).transpose(0, 1) if with_dlse else None
    exact = (do.double() * out.double()).sum(-1) - (dlse.double() if with_dlse else 0.0)
    torch.testing.assert_close(triton.row_delta(do, out, dlse).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda q, k, v: (q.bfloat16(), k.bfloat16(), v.bfloat16()), "bfloat16"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "float16, bfloat16, float32"),
        (lambda q, k, v: (q.half(), k, v), "one dtype"),
        (lambda q, k, v: (q, k, v.repeat(1, 1, 1, 17)), "1 to 256, got a head size of v of 272"),
    ],
)
def test_refusals(change: object, words: str) -> None:
    q, k, v, _ = make_inputs(1, 1, 1, tokens=8, dim=16)
    q, k, v = change(q, k, v)
    with pytest.raises(ValueError, match=words):
        triton.forward(Problem(1.0, first=True), (), q, k, v, torch.empty_like(q), torch.empty(1, 1, 8))


def test_tanh_is_accurate() -> None:
    """The softcap's tanh against torch's, through one row of scores: q picks one column of k."""
    points = torch.cat([torch.linspace(-12, 12, 97), torch.logspace(-6, 0, 31)])
    q = torch.zeros(1, 1, 1, 16)
    q[..., 0] = 1.0
    for x in points[::4]:
        k = torch.zeros(1, 1, 1, 16)
        k[..., 0] = x
        out, lse = torch.empty(1, 1, 1, 16), torch.empty(1, 1, 1)
        triton.forward(Problem(1.0, 1.0, first=True), (tile(0, 1, 0, 1),), q, k, k, out, lse)
        exact = torch.tanh(x.double())
        assert abs(lse.item() - exact) <= 4 * torch.finfo(torch.float32).eps * abs(exact), x
