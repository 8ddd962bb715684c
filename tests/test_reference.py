"""The reference backend is dense attention in float64, forward and backward, for every tile."""

import math

import pytest
import torch
from torch import Tensor

from ringattn.backends import Problem, reference
from ringattn.layout import make_shards
from ringattn.mask import CAUSAL, FULL, Band, window
from ringattn.merge import row_delta
from ringattn.plan import make_plan, make_tiles
from ringattn.testing import make_inputs

BANDS = [FULL, CAUSAL, window(6, 2), window(0), Band(3, 9), Band(-9, -3), Band(30, 40)]


def dense(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Differentiable attention with an S x S matrix; rows without keys are (0, -inf)."""
    ratio = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(ratio, 1).mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    lag = torch.arange(q.shape[2]).unsqueeze(1) - torch.arange(k.shape[2])
    seen = (lag >= band.lo) & (lag <= band.hi)
    weights = torch.where(seen, torch.exp(scores), 0.0)
    total = weights.sum(-1)
    out = weights @ v.repeat_interleave(ratio, 1) / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return out, torch.where(total == 0, -torch.inf, torch.log(torch.where(total == 0, 1.0, total)))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Tiles of the tests span several blocks, with tails."""
    monkeypatch.setattr(reference, "BLOCK_ROWS", 5)
    monkeypatch.setattr(reference, "BLOCK_KEYS", 7)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_equals_dense_attention(band, kv_heads, softcap):
    q, k, v, do = make_inputs(2, 4, kv_heads, 23, 8, 6, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected, expected_lse = dense(*inputs, band, 0.5, softcap)
    dlse = torch.randn_like(expected_lse)
    objective = (expected * do).sum() + torch.where(expected_lse.isinf(), 0.0, expected_lse * dlse).sum()
    grads = torch.autograd.grad(objective, inputs)

    problem = Problem(0.5, softcap, first=True, first_kv=True)
    tiles = make_plan("contiguous", band, (23,), 1, 0)[0]
    q, k, v = (x.detach() for x in inputs)
    out, lse = torch.full_like(do, torch.nan), torch.full_like(dlse, torch.nan)
    reference.forward(problem, tiles, q, k, v, out, lse)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse.detach(), rtol=1e-12, atol=1e-13)
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    dlse = torch.where(expected_lse.detach().isinf(), 0.0, dlse)
    reference.backward(problem, tiles, do, q, k, v, out, lse, row_delta(do, out, dlse), dq, dk, dv)
    for mine, theirs in zip((dq, dk, dv), grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_visits_accumulate():
    q, k, v, do = make_inputs(1, 2, 1, 24, 8, dtype=torch.float64)
    whole = make_plan("contiguous", CAUSAL, (24,), 1, 0)[0]
    pieces = [
        make_tiles(make_shards("contiguous", (24,), 1)[0], keys, CAUSAL) for keys in make_shards("zigzag", (24,), 3)
    ]
    results = []
    for visits in ([(whole, None)], list(zip(pieces, make_shards("zigzag", (24,), 3), strict=True))):
        out, lse, dq = torch.empty_like(q), torch.empty(1, 2, 24, dtype=q.dtype), torch.empty_like(q)
        for number, (tiles, shard) in enumerate(visits):
            rows = slice(None) if shard is None else [p for s in shard for p in range(s.start, s.last + 1)]
            reference.forward(Problem(1.0, first=number == 0), tiles, q, k[:, :, rows], v[:, :, rows], out, lse)
        delta = row_delta(do, out, torch.zeros_like(lse))
        dk = torch.zeros_like(k)
        for number, (tiles, shard) in enumerate(visits):
            rows = slice(None) if shard is None else [p for s in shard for p in range(s.start, s.last + 1)]
            keys, values = k[:, :, rows], v[:, :, rows]
            part, dv = torch.ones_like(keys), torch.ones_like(values)
            problem = Problem(1.0, first=number == 0, first_kv=False)
            reference.backward(problem, tiles, do, q, keys, values, out, lse, delta, dq, part, dv)
            dk[:, :, rows] = part - 1
        results.append((out, lse, dq, dk))
    for one, many in zip(*results, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_inputs_are_rounded_once(dtype):
    q, k, v, _ = make_inputs(1, 2, 2, 40, 16, dtype=dtype)
    expected, _ = dense(q.double(), k.double(), v.double(), CAUSAL, 0.25, 0.0)
    out, lse = torch.empty_like(q), torch.empty(1, 2, 40)
    reference.forward(Problem(0.25, first=True), make_plan("contiguous", CAUSAL, (40,), 1, 0)[0], q, k, v, out, lse)
    rounding = (expected.to(dtype).double() - expected).norm()
    floor = 4 * torch.finfo(torch.float32).eps * expected.norm()
    assert (out.double() - expected).norm() <= 1.02 * rounding + floor


def test_strides_do_not_matter():
    q, k, v, do = make_inputs(2, 4, 2, 19, 8, 6, dtype=torch.float64)
    odd = [x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2) for x in (q, k, v)]
    tiles = make_plan("contiguous", window(5, 1), (19,), 1, 0)[0]
    problem = Problem(0.3, first=True, first_kv=True)
    out, lse = torch.empty_like(do), torch.empty(2, 4, 19, dtype=q.dtype)
    out_odd, lse_odd = torch.empty(19, 2, 6, 4, dtype=q.dtype).permute(1, 3, 0, 2), torch.empty_like(lse)
    reference.forward(problem, tiles, q, k, v, out, lse)
    reference.forward(problem, tiles, *odd, out_odd, lse_odd)
    torch.testing.assert_close(out, out_odd, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(lse, lse_odd, rtol=1e-13, atol=1e-14)
    flat = torch.ones(1, 1, 1, 1, dtype=q.dtype).expand_as(do)
    grads = [[torch.empty_like(x) for x in (q, k, v)] for _ in range(2)]
    delta = row_delta(flat, out, torch.zeros_like(lse))
    reference.backward(problem, tiles, flat, q, k, v, out, lse, delta, *grads[0])
    reference.backward(problem, tiles, flat, *odd, out_odd, lse_odd, delta, *grads[1])
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_stay_exact(sign):
    q, k, v, _ = make_inputs(1, 1, 1, 12, 4, dtype=torch.float64)
    out, lse = torch.empty_like(q), torch.empty(1, 1, 12, dtype=q.dtype)
    tiles = make_plan("contiguous", FULL, (12,), 1, 0)[0]
    reference.forward(Problem(1e4, first=True), tiles, sign * q.abs(), k.abs(), v, out, lse)
    scores = sign * q.abs() @ k.abs().mT * 1e4
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ v)


def test_nothing_to_see():
    q, k, v, do = make_inputs(1, 2, 1, 4, 8)
    out, lse = torch.full_like(do, torch.nan), torch.full((1, 2, 4), torch.nan)
    reference.forward(Problem(1.0, first=True), (), q, k[:, :, :0], v[:, :, :0], out, lse)
    assert torch.equal(out, torch.zeros_like(out)) and (lse == -math.inf).all()
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    problem = Problem(1.0, first=True, first_kv=True)
    reference.backward(problem, (), do, q, k, v, out, lse, torch.zeros_like(lse), *grads)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in grads)
