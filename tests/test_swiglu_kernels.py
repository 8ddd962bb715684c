"""The SwiGLU kernels in Triton's interpreter against float64: halves of one tensor, strides, tiles, extremes."""

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with the interpreter on", allow_module_level=True)

from ringattn.kernels.swiglu import forward_launch, swiglu_backward, swiglu_forward  # noqa: E402


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [1, 70, 1100])
def test_both_directions_on_halves_of_one_tensor(dtype: torch.dtype, columns: int) -> None:
    x, dy = 3 * draw(3, 2, 2 * columns, dtype=dtype).transpose(0, 1), draw(2, 3, columns, dtype=dtype, seed=1)
    dx = torch.full(x.shape, torch.nan, dtype=dtype)
    y = swiglu_forward(*x.chunk(2, -1))
    swiglu_backward(dy, *x.chunk(2, -1), *dx.chunk(2, -1))
    leaf = x.double().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    exact = F.silu(gate) * up
    (exact_dx,) = torch.autograd.grad(exact, leaf, dy.double())
    for got, expected in ((y, exact), (dx, exact_dx)):
        assert (got.double() - expected).norm() <= torch.finfo(dtype).eps * expected.norm()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy warns of what a GPU does silently
def test_extreme_gates() -> None:
    gate = torch.tensor([[1e4, -1e4, 0.0, 88.0, -88.0, -3e38, 3e38, 1e-30]])
    y, dgate, dup = swiglu_forward(gate, torch.ones_like(gate)), torch.empty_like(gate), torch.empty_like(gate)
    swiglu_backward(torch.ones_like(gate), gate, torch.ones_like(gate), dgate, dup)
    assert torch.allclose(y, F.silu(gate.double()).float(), rtol=1e-6, atol=1e-30)
    assert (
        torch.allclose(dup, y, rtol=1e-6, atol=0.0)
        and dgate.isfinite().all()
        and dgate[0, :3].tolist() == [1.0, 0.0, 0.5]
    )


def test_every_tile_gives_the_same_bits() -> None:
    gate, up = draw(5, 130), draw(5, 130, seed=1)
    expected = swiglu_forward(gate, up)
    for tile in (64, 512, 4096):
        y = torch.full_like(gate, torch.nan)
        forward_launch(gate, up, y, tile=tile)()
        assert torch.equal(y, expected)
