"""The softmax kernels in Triton's interpreter against float64: whole rows and chunks, masks, temperature, extremes."""

import math
import os

import pytest
import torch
from torch import Tensor

from ringattn.merge import finite_shift

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with the interpreter on", allow_module_level=True)

from ringattn.kernels.softmax import SoftmaxConfig, softmax_forward, softmax_state  # noqa: E402
from ringattn.kernels.softmax_bwd import logsumexp_backward, softmax_backward  # noqa: E402

TILES = {"whole rows": None, "several rows": SoftmaxConfig(4, 256, 4), "chunks": SoftmaxConfig(1, 64, 4)}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(x: Tensor, mask: Tensor | None, temperature: float, config: SoftmaxConfig | None) -> list[Tensor]:
    """Softmax, its gradient, log-sum-exp, its gradient."""
    y = softmax_forward(x, mask, temperature=temperature, config=config)
    dx = softmax_backward(draw(*x.shape, dtype=x.dtype, seed=1), y, temperature=temperature, config=config)
    peak, total = softmax_state(x, mask, temperature=temperature, config=config)
    dlse = draw(*x.shape[:-1], seed=2)
    lse = finite_shift(peak) / temperature + total.log()
    return [y, dx, lse, logsumexp_backward(dlse, x, mask, peak, total, temperature=temperature)]


def exact(x: Tensor, mask: Tensor | None, temperature: float, wide: torch.dtype) -> list[Tensor]:
    """The same by torch and autograd; what its NaN rows should be is 0."""
    leaf = x.to(wide).requires_grad_()
    scores = leaf / temperature
    scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    y, lse = scores.softmax(-1), scores.logsumexp(-1)
    (dx,) = torch.autograd.grad(y, leaf, draw(*x.shape, dtype=x.dtype, seed=1).to(wide), retain_graph=True)
    (dlse,) = torch.autograd.grad(lse, leaf, draw(*x.shape[:-1], seed=2).to(wide))
    return [y.detach().nan_to_num(0.0), dx.nan_to_num(0.0), lse.detach(), dlse.nan_to_num(0.0)]


def hold(x: Tensor, mask: Tensor | None, temperature: float, config: SoftmaxConfig | None) -> None:
    """The error is at most 1.5 times torch's in the same dtype, or a few roundings of float32."""
    x64, x1 = exact(x, mask, temperature, torch.float64), exact(x, mask, temperature, x.dtype)
    for index, (got, expected, single) in enumerate(zip(run(x, mask, temperature, config), x64, x1, strict=True)):
        errors = [torch.where(t.double() == expected, 0.0, t.double() - expected).norm() for t in (got, single)]
        size = expected.nan_to_num(0.0, 0.0, 0.0).norm()
        assert errors[0] <= max(1.5 * errors[1], 4 * torch.finfo(torch.float32).eps * size), index


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("masked", "temperature"), [(False, 1.0), (True, 0.6)])
def test_against_float64(dtype: torch.dtype, tile: str, masked: bool, temperature: float) -> None:
    x = 3 * draw(2, 2, 150, dtype=dtype).transpose(0, 1)
    mask = torch.rand(2, 2, 150, generator=torch.Generator().manual_seed(5)) > 0.3
    mask[0, 1] = False
    hold(x, mask if masked else None, temperature, TILES[tile])


@pytest.mark.parametrize("columns", [1, 64, 65])
@pytest.mark.parametrize("tile", ["whole rows", "chunks"])
def test_lengths_that_do_not_fill_a_tile(columns: int, tile: str) -> None:
    hold(draw(2, columns), None, 2.0, TILES[tile])


@pytest.mark.parametrize("tile", TILES)
def test_broadcast_mask_and_stride_0_gradients(tile: str) -> None:
    x, column = draw(2, 2, 100), torch.arange(100) % 3 > 0
    y = softmax_forward(x, column.expand(2, 2, 100), config=TILES[tile])
    assert torch.equal(y, softmax_forward(x, column.repeat(2, 2, 1), config=TILES[tile]))
    dy = torch.tensor(2.0).expand(2, 2, 100)
    assert softmax_backward(dy, y, config=TILES[tile]).abs().max() <= 1e-6


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy warns of what a GPU does silently
@pytest.mark.parametrize("tile", TILES)
def test_extreme_rows(tile: str) -> None:
    x = torch.zeros(6, 200)
    x[0] = torch.tensor([3e38, -3e38] * 100)
    x[1], x[2], x[3, :199], x[4, 3], x[5, 150] = 5.0, -math.inf, -math.inf, math.nan, math.inf
    y = softmax_forward(x, config=TILES[tile])
    assert torch.equal(y[0], torch.tensor([0.01, 0.0] * 100)) and torch.allclose(y[1], torch.full((200,), 0.005))
    assert not y[2].any() and y[3, 199] == 1 and not y[3, :199].any()
    assert y[4].isnan().all() and y[5].isnan().all()
    peak, total = softmax_state(x, config=TILES[tile])
    assert (peak[2], total[2], peak[3], total[3]) == (-math.inf, 0, 0, 1) and total[4].isnan()
    dy = torch.full_like(y, math.inf)
    assert not softmax_backward(dy, y, config=TILES[tile])[2].any()
    assert not logsumexp_backward(torch.ones(6), x, None, peak, total)[2].any()


def test_the_same_bits_whatever_shares_the_launch() -> None:
    x = draw(3, 150)
    together = softmax_forward(x, config=TILES["chunks"])
    for row in range(3):
        assert torch.equal(softmax_forward(x[row : row + 1], config=TILES["chunks"])[0], together[row])


def test_empty_tensors() -> None:
    assert softmax_forward(torch.zeros(0, 5)).shape == (0, 5)
    peak, total = softmax_state(torch.zeros(2, 0))
    assert peak.tolist() == [-math.inf, -math.inf] and not total.any()
