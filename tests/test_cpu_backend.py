"""The CPU backend is the reference, and torch's flash kernel never sees what it would get wrong."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from ringattn import attention
from ringattn.backends import Problem, cpu, reference
from ringattn.layout import LAYOUTS, make_shards
from ringattn.mask import CAUSAL, FULL, OPEN, Band, window
from ringattn.merge import row_delta
from ringattn.plan import Tile, make_plan, make_tiles
from ringattn.testing import make_inputs

BANDS = [
    FULL,
    CAUSAL,
    Band(1),
    Band(-5),
    Band(-OPEN, 0),
    Band(-OPEN, 9),
    Band(-OPEN, -4),
    window(0),
    window(6, 2),
    window(40),
    window(12, 12),
    Band(3, 9),
    Band(-9, -3),
    Band(66, 68),
    Band(80, 90),
]
TOKENS = 70


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Strips of 8 rows and masked pieces of up to 20 keys, so that every kind of piece occurs."""
    monkeypatch.setattr(cpu, "MAX_ROWS", 8)
    monkeypatch.setattr(cpu, "SLAB_KEYS", 20)
    monkeypatch.setattr(cpu, "_cut", cpu._cut.__wrapped__)


def run(backend, problem: Problem, visits, q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None):
    """(out, lse, dq, dk, dv) of visits `(tiles, key rows)`, with outputs poisoned before."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.full(do.shape, math.nan, dtype=wide)
    lse = torch.full(do.shape[:-1], math.nan, dtype=wide)
    for number, (tiles, rows) in enumerate(visits):
        backend.forward(problem_of(problem, number), tiles, q, k[:, :, rows], v[:, :, rows], out, lse)
    delta = row_delta(do, out, torch.zeros_like(lse) if dlse is None else dlse)
    dq = torch.full(q.shape, math.nan, dtype=wide)
    dk, dv = torch.zeros(k.shape, dtype=wide), torch.zeros(v.shape, dtype=wide)
    for number, (tiles, rows) in enumerate(visits):
        keys, values = k[:, :, rows], v[:, :, rows]
        parts = torch.full(keys.shape, math.nan, dtype=wide), torch.full(values.shape, math.nan, dtype=wide)
        backend.backward(problem_of(problem, number), tiles, do, q, keys, values, out, lse, delta, dq, *parts)
        dk[:, :, rows] += parts[0]
        dv[:, :, rows] += parts[1]
    return out, lse, dq, dk, dv


def problem_of(problem: Problem, number: int) -> Problem:
    return Problem(problem.scale, first=number == 0, first_kv=True)


def one_visit(band: Band, tokens: int = TOKENS):
    return [(make_plan("contiguous", band, (tokens,), 1, 0)[0], slice(None))]


def assert_equal(found, expected, tolerance: float = 1e-12) -> None:
    for index, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(x.isinf(), y.isinf()), index
        error, size = torch.where(x == y, 0.0, x - y).norm(), torch.where(y.isinf(), 0.0, y).norm()
        assert error <= tolerance * size, f"result {index}: {error / size:.2e}"


@pytest.mark.parametrize("dims", [(8, 8), (8, 5), (5, 8), (1, 1)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_equals_the_reference(band, kv_heads, dims):
    q, k, v, do = make_inputs(2, 4, kv_heads, TOKENS, *dims, dtype=torch.float64)
    dlse = torch.randn(2, 4, TOKENS, dtype=torch.float64)
    runs = [run(backend, Problem(0.5), one_visit(band), q, k, v, do, dlse) for backend in (cpu, reference)]
    assert_equal(*runs)


@pytest.mark.parametrize("band", [CAUSAL, FULL, window(11), window(5, 30)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [(TOKENS,), (23, 1, 46)], ids=str)
def test_visits_accumulate(lengths, layout, band):
    q, k, v, do = make_inputs(1, 2, 1, TOKENS, 8, dtype=torch.float64)
    for rank in range(3):
        queries = make_shards(layout, lengths, 3)[rank]
        mine = [p for s in queries for p in range(s.start, s.last + 1, s.step)]
        visits = [
            (make_tiles(queries, keys, band), [p for s in keys for p in range(s.start, s.last + 1, s.step)])
            for keys in make_shards(layout, lengths, 3)
        ]
        arguments = (Problem(0.3), visits, q[:, :, mine], k, v, do[:, :, mine], None)
        assert_equal(run(cpu, *arguments), run(reference, *arguments))


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_pieces_hold_each_pair_once_and_no_empty_row(band):
    for rows, keys in ((TOKENS, TOKENS), (TOKENS, 9), (9, TOKENS), (1, 1)):
        seen = torch.zeros(rows, keys, dtype=torch.int64)
        queries, sources = make_shards("contiguous", (rows,), 1)[0], make_shards("contiguous", (keys,), 1)[0]
        for tile in make_tiles(queries, sources, band):
            for piece in cpu._cut(tile):
                part = seen[piece.rows, piece.keys]
                lag = torch.arange(part.shape[0]).unsqueeze(-1) - torch.arange(part.shape[1])
                lo, hi = piece.band or (0 if piece.causal else -OPEN, OPEN)
                pairs = (lag >= lo) & (lag <= hi)
                assert pairs.any(dim=1).all(), "the kernel gives rows without keys an LSE of 0"
                assert piece.band is None or part.shape[0] <= cpu.MAX_ROWS and part.shape[1] <= cpu.SLAB_KEYS + 8
                part += pairs
        lag = torch.arange(rows).unsqueeze(-1) - torch.arange(keys)
        assert torch.equal(seen, ((lag >= band.lo) & (lag <= band.hi)).long())


def test_a_causal_tile_is_one_call():
    assert len(cpu._cut(make_plan("contiguous", CAUSAL, (8192,), 1, 0)[0][0])) == 1
    assert len(cpu._cut(Tile(0, 64, 0, 100, Band(-36), 0, 0, 1))) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_errors_are_those_of_the_reference(dtype):
    q, k, v, do = make_inputs(1, 4, 2, 300, 64, dtype=dtype)
    visits = one_visit(window(100), 300)
    exact = run(reference, Problem(0.125), visits, *(x.double() for x in (q, k, v, do)), None)
    single, found = (run(backend, Problem(0.125), visits, q, k, v, do, None) for backend in (reference, cpu))
    for name, x, x1, x64 in zip(("out", "lse", "dq", "dk", "dv"), found, single, exact, strict=True):
        assert x.dtype == torch.float32
        floor = 8 * torch.finfo(torch.float32).eps * x64.norm()
        assert (x - x64).norm() <= max(1.1 * (x1 - x64).norm(), floor), name


def test_sixteen_bit_out_is_rounded_once():
    q, k, v, _ = make_inputs(1, 2, 2, TOKENS, 16, dtype=torch.bfloat16)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        out, lse = torch.full(q.shape, math.nan, dtype=dtype), torch.full(q.shape[:-1], math.nan)
        cpu.forward(Problem(0.25, first=True), one_visit(window(9))[0][0], q, k, v, out, lse)
        results.append(out)
    assert torch.equal(results[0].bfloat16(), results[1])


def test_strides_do_not_matter():
    q, k, v, do = make_inputs(2, 4, 2, 19, 8, 6, dtype=torch.float64)
    odd = [x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2) for x in (q, k, v, do)]
    bshd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, do)]
    expected = run(reference, Problem(0.3), one_visit(window(5, 1), 19), q, k, v, do, None)
    for inputs in (odd, bshd):
        assert_equal(run(cpu, Problem(0.3), one_visit(window(5, 1), 19), *inputs, None), expected)
    flat = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(2, 4, 19, 6), q[:1, :1].expand(2, 4, 19, 8)
    runs = [run(kind, Problem(0.3), one_visit(CAUSAL, 19), flat[1], k, v, flat[0], None) for kind in (cpu, reference)]
    assert_equal(*runs)
    # Strides of dimensions of size 1 are arbitrary, and matrix products refuse some of them.
    single = [x[:, :, :1].transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v, do)]
    runs = [run(kind, Problem(0.3), one_visit(CAUSAL, 1), *single, None) for kind in (cpu, reference)]
    assert_equal([runs[0][0], runs[0][1], runs[0][4]], [runs[1][0], runs[1][1], runs[1][4]])


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-42, 0.0])
def test_delta_of_rows_with_tiny_output_gradients(size):
    """Where do is (nearly) zero, delta is -dlse and no `out` of the kernel's own width can express it."""
    q, k, v, do = make_inputs(1, 2, 2, TOKENS, 8)
    do[:, :, ::3] *= size
    dlse = torch.randn(1, 2, TOKENS)
    exact = run(reference, Problem(0.5), one_visit(CAUSAL), *(x.double() for x in (q, k, v, do)), dlse.double())
    assert_equal(run(cpu, Problem(0.5), one_visit(CAUSAL), q, k, v, do, dlse), exact, tolerance=2e-6)


def test_ordinary_gradients_take_no_column_more():
    q, k, v, do = make_inputs(1, 2, 2, TOKENS, 8)
    delta = torch.randn(1, 2, TOKENS)
    same_do, same_v, out = cpu._with_delta(do, v, delta, 8)
    assert same_do is do and same_v is v
    assert ((do * out).sum(-1) - delta).abs().max() <= 4 * torch.finfo(torch.float32).eps * delta.abs().max()


def test_rows_without_any_key_get_nothing():
    """Also in the backward, where an LSE of -inf would turn every gradient into NaN."""
    q, k, v, do = make_inputs(1, 2, 1, 16, 8)
    tiles = (Tile(4, 16, 0, 16, None, 4, 0, 1),)
    out, lse, dq, dk, dv = run(cpu, Problem(1.0), [(tiles, slice(None))], q, k, v, do, None)
    assert not out[:, :, :4].any() and (lse[:, :, :4] == -math.inf).all() and not dq[:, :, :4].any()
    expected = run(reference, Problem(1.0), [(tiles, slice(None))], q, k, v, do, None)
    assert_equal((out, lse, dq, dk, dv), expected, tolerance=1e-5)
    # A tile may also hold rows whose final LSE is -inf, when all their scores are.
    lse[:, :, 4:8] = -math.inf
    delta = torch.zeros_like(lse)
    grads = [torch.full_like(x, math.nan) for x in (q, k, v)]
    cpu.backward(Problem(1.0, first=True, first_kv=True), tiles, do, q, k, v, out, lse, delta, *grads)
    assert not grads[0][:, :, :8].any() and all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("shape", [(1, 2, 0, 4), (1, 2, 4, 0), (0, 2, 4, 4), (1, 0, 4, 4)])
def test_nothing_to_see(shape):
    """Empty slices end the process inside the kernel (SIGFPE), and so does a tensor without heads."""
    batch, heads, rows, keys = shape
    q, do = torch.randn(batch, heads, rows, 8), torch.randn(batch, heads, rows, 8)
    k, v = torch.randn(batch, heads, keys, 8), torch.randn(batch, heads, keys, 8)
    tiles = () if not rows * keys else (Tile(0, rows, 0, keys, None, 0, 0, 1),)
    out, lse, dq, dk, dv = run(cpu, Problem(1.0), [(tiles, slice(None))], q, k, v, do, None)
    assert not out.any() and (lse == -math.inf).all() and not any(x.any() for x in (dq, dk, dv))


@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_stay_exact(sign):
    q, k, v, do = make_inputs(1, 1, 1, TOKENS, 4, dtype=torch.float64)
    arguments = (Problem(1e4), one_visit(window(20)), sign * q.abs(), k.abs(), v, do, None)
    found, expected = (run(backend, *arguments) for backend in (cpu, reference))
    assert_equal(
        found[:2] + found[4:], expected[:2] + expected[4:], tolerance=1e-11
    )  # dq and dk are zero but for rounding
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("band", [CAUSAL, window(3, 1)], ids=str)
def test_gradients_through_the_public_call(band):
    q, k, v, _ = (x.requires_grad_() for x in make_inputs(1, 2, 1, 9, 4, 3, dtype=torch.float64))
    call = partial(attention, mask=band, backend="cpu", return_lse=True)
    assert torch.autograd.gradcheck(call, (q, k, v))
    assert torch.equal(attention(q, k, v), attention(q, k, v, backend="cpu"))
    with pytest.raises(ValueError, match="backend 'cpu' cannot take this.*no softcap, got 2.0"):
        attention(q, k, v, softcap=2.0, backend="cpu")
    assert torch.equal(attention(q, k, v, softcap=2.0), attention(q, k, v, softcap=2.0, backend="reference"))


def test_refusals_name_what_is_wrong():
    q, k, v, _ = make_inputs(1, 1, 1, 4, 4)
    assert cpu.refusal(q, k, v, 0.0) is None
    assert "softcap, got 30.0; 'reference' has" in cpu.refusal(q, k, v, 30.0)
    assert "got meta" in cpu.refusal(q.to("meta"), k, v, 0.0)
    assert "torch.float32" in cpu.refusal(q.to(torch.complex64), k, v, 0.0)
