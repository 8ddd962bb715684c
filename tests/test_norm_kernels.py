"""The norm kernels in Triton's interpreter against the float64 formulas: every tile, option, stride and extreme."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.norms import _backward, _forward

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with the interpreter on", allow_module_level=True)

from ringattn.kernels.norm import NormConfig, norm_forward  # noqa: E402
from ringattn.kernels.norm_bwd import norm_backward  # noqa: E402
from ringattn.kernels.rows import rows_of  # noqa: E402

WHOLE = {"whole rows": None, "two rows, one program": NormConfig(2, 256, 4, 1)}
CUT = {"blocks": NormConfig(1, 64, 4, 0)}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    center: bool,
    config: NormConfig | None,
) -> dict[str, Tensor]:
    """All results by name."""
    y, summed, stats = norm_forward(x, residual, weight, bias, eps=1e-6, center=center, config=config)
    dy, ds = draw(*x.shape, dtype=x.dtype, seed=3), draw(*x.shape, dtype=x.dtype, seed=4)
    dx, dweight, dbias = norm_backward(
        dy, None if summed is None else ds, x if summed is None else summed, weight, stats,
        bias_dtype=None if bias is None else bias.dtype, config=config,
    )  # fmt: skip
    return named(y, summed, dx, dweight, dbias)


def exact(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, center: bool, wide: torch.dtype
) -> dict[str, Tensor]:
    """The formulas in torch; the sum is rounded to the inputs' dtype, which the kernels do too."""

    def widened(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(wide)

    summed = None if residual is None else x + residual
    base = widened(x if summed is None else summed)
    assert base is not None
    y, _, stats = _forward(base, None, widened(weight), widened(bias), 1e-6, center, None)
    dy, ds = draw(*x.shape, dtype=x.dtype, seed=3), draw(*x.shape, dtype=x.dtype, seed=4)
    gradients = _backward(dy.to(wide), None if summed is None else ds.to(wide), base, widened(weight), bias, stats)
    return named(y, widened(summed), *gradients)


def named(*tensors: Tensor | None) -> dict[str, Tensor]:
    names = ("y", "summed", "dx", "dweight", "dbias")
    return {name: t for name, t in zip(names, tensors, strict=True) if t is not None}


def hold(inputs: tuple[Any, ...], center: bool, config: NormConfig | None) -> None:
    """The error is at most 1.5 times that of torch in float32 (rounded to the inputs' dtype), or a few roundings."""
    got, x64 = run(*inputs, center, config), exact(*inputs, center, torch.float64)
    x32 = exact(*inputs, center, torch.float32)
    for name, x in got.items():
        single = (x32[name].to(x.dtype).double() - x64[name]).norm().item()
        rounding = 4 * torch.finfo(torch.float32).eps * x64[name].norm().item()
        assert (x.double() - x64[name]).norm().item() <= max(1.5 * single, rounding), name
    assert got.keys() == x64.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tile", [*WHOLE, *CUT])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_against_float64(dtype: torch.dtype, tile: str, center: bool, full: bool) -> None:
    x = draw(2, 3, 200, dtype=dtype).transpose(0, 1)
    residual = draw(3, 2, 200, dtype=dtype, seed=1) if full else None
    weight, bias = (draw(200, seed=2), draw(200, seed=5)) if full else (None, None)
    hold((x, residual, weight, bias), center, (WHOLE | CUT)[tile])


@pytest.mark.parametrize("columns", [1, 2, 17, 64, 129])
@pytest.mark.parametrize("center", [False, True])
def test_lengths_that_do_not_fill_a_tile(columns: int, center: bool) -> None:
    config = None if columns < 100 else NormConfig(1, 64, 4, 0)
    hold((draw(3, columns), None, draw(columns, seed=1), None), center, config)


@pytest.mark.parametrize("config", [None, NormConfig(1, 64, 4, 0)])
def test_a_small_deviation_beside_a_large_mean(config: NormConfig | None) -> None:
    x, dy = 1e4 + 1e-2 * draw(3, 200), draw(3, 200, seed=3)
    y, _, stats = norm_forward(x, eps=1e-6, center=True, config=config)
    dx, _, _ = norm_backward(dy, None, x, None, stats, config=config)
    wide, _, wide_stats = _forward(x.double(), None, None, None, 1e-6, True, None)
    expected, _, _ = _backward(dy.double(), None, x.double(), None, None, wide_stats)
    assert (y - wide).norm() <= 1e-6 * wide.norm() and (dx - expected).norm() <= 1e-6 * expected.norm()


def test_extreme_rows() -> None:
    row = torch.tensor([1e15, -1e15] * 20)
    x = torch.stack([row, torch.full_like(row, 7.0), torch.zeros_like(row), row * 1e-30])
    for config in (None, NormConfig(1, 16, 4, 0)):
        for center in (False, True):
            y, _, stats = norm_forward(x, eps=1e-6, center=center, config=config)
            assert torch.equal(y[0], torch.sign(row)) and not y[2].any() and y.isfinite().all()
            assert torch.allclose(y[1], torch.full_like(row, 0.0 if center else 1.0), atol=1e-6)
            assert norm_backward(y, None, x, None, stats, config=config)[0].isfinite().all()


@pytest.mark.parametrize("config", [None, NormConfig(1, 64, 4, 0)])
def test_sum_in_place_over_a_strided_residual(config: NormConfig | None) -> None:
    x, fused = draw(4, 2, 100), draw(2, 4, 3, 100, seed=1)
    residual = fused[:, :, 1].transpose(0, 1)
    expected, kept = x + residual, fused[:, :, 0].clone()
    y, summed, _ = norm_forward(x, residual, eps=1e-6, center=False, summed=residual, config=config)
    assert summed is residual and torch.equal(residual, expected) and torch.equal(fused[:, :, 0], kept)
    assert torch.allclose(y, torch.nn.functional.rms_norm(expected, (100,), eps=1e-6), atol=1e-6)


def test_empty_tensors() -> None:
    y, _, stats = norm_forward(torch.zeros(0, 8), eps=1e-6, center=True)
    dx, dweight, dbias = norm_backward(y, None, y, torch.ones(8), stats, bias_dtype=torch.float32)
    assert y.shape == dx.shape == (0, 8) and dweight is not None and dbias is not None
    assert not dweight.any() and not dbias.any()


def test_rows_of_walks_views_and_copies_only_what_it_cannot() -> None:
    fused = torch.arange(2 * 3 * 4 * 5 * 6).view(2, 3, 4, 5, 6)
    for view, copied in (
        (fused, False),
        (fused[:, :, 1:3, :, 1:4], False),
        (fused[:, :2, 1:3, 1:4], True),
        (fused[0].transpose(0, 1), False),
        (fused.transpose(0, 2), True),
        (fused.transpose(0, 3)[..., :2], False),
        (fused.transpose(-1, -2), True),
        (fused[0, 0, 0, :1, :1], False),
        (fused[:1, :, 0].expand(7, 3, 5, 6), False),
    ):
        x, (inner, middle, *strides) = rows_of(view)
        assert (x is not view) == copied
        base, rows = x.flatten() if copied else fused.flatten(), x.numel() // x.shape[-1]
        for row, expected in enumerate(view.reshape(rows, -1)):
            block = row // inner
            at = block // middle * strides[0] + block % middle * strides[1] + row % inner * strides[2]
            at += 0 if copied else view.storage_offset()
            assert torch.equal(base[at : at + view.shape[-1]], expected)
