"""The rotary kernel in Triton's interpreter against complex multiplication in float64: styles, parts, strides."""

import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with the interpreter on", allow_module_level=True)

from ringattn.kernels.rope import rope, rope_launch  # noqa: E402


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x (B, H, S, D) with its pairs turned by angles (B, S, R), in float64."""
    pairs, wide = angles.shape[-1], x.double()
    lane = torch.arange(pairs)
    first, second = (2 * lane, 2 * lane + 1) if interleaved else (lane, lane + pairs)
    spin = torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double()).unsqueeze(1)
    spun, out = torch.complex(wide[..., first], wide[..., second]) * spin, wide.clone()
    out[..., first], out[..., second] = spun.real, spun.imag
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "pairs"), [(16, 8), (2, 1), (20, 6), (12, 5), (24, 12)])
def test_both_directions_at_random_positions(dtype: torch.dtype, interleaved: bool, dim: int, pairs: int) -> None:
    fused = draw(2, 11, 7 * dim, dtype=dtype).unflatten(-1, (7, dim)).transpose(1, 2)
    query, key = fused[:, :5], fused[:, 5:]
    table = draw(50, pairs, seed=1)
    positions = torch.randint(0, 50, (2, 11), generator=torch.Generator().manual_seed(2))
    outputs = rope(query, key, table.cos(), table.sin(), positions, interleaved=interleaved)
    angles = table[positions]
    for x, y in zip((query, key), outputs, strict=True):
        expected = turned(x, angles, interleaved)
        assert (y.double() - expected).norm() <= 0.6 * torch.finfo(dtype).eps * expected.norm()
        assert torch.equal(y[..., 2 * pairs :], x[..., 2 * pairs :]) and y.stride() == torch.empty_like(x).stride()
    backward = rope(query, key, table.cos(), table.sin(), positions, interleaved=interleaved, backward=True)
    expected = turned(query, -angles, interleaved)
    assert (backward[0].double() - expected).norm() <= 0.6 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_positions_by_row_one_for_all_or_none(kind: torch.dtype) -> None:
    query, key, table = draw(3, 2, 9, 8), draw(3, 1, 9, 8, seed=1), draw(9, 4, seed=2)
    rows = torch.arange(9, dtype=kind)
    expected = rope(query, key, table.cos(), table.sin())
    for positions in (rows[None], rows.expand(3, 9), rows.repeat(3, 1)):
        assert all(map(torch.equal, rope(query, key, table.cos(), table.sin(), positions), expected))


def test_position_outside_of_the_tables_gives_nan() -> None:
    query, table = draw(1, 2, 4, 8), draw(9, 4, seed=2)
    turned_query, _ = rope(query, query[:, :1], table.cos(), table.sin(), torch.tensor([[8, 9, -1, 0]]))
    assert turned_query[0, :, 1:3].isnan().all() and turned_query[0, :, [0, 3]].isfinite().all()


def test_every_number_is_written_by_every_tile() -> None:
    query, key, table = draw(1, 5, 9, 12), draw(1, 3, 9, 12, seed=1), draw(9, 5, seed=2)
    expected = rope(query, key, table.cos(), table.sin())
    for tokens, heads in ((2, 1), (8, 2), (64, 8)):
        outputs = torch.full_like(query, torch.nan), torch.full_like(key, torch.nan)
        rope_launch(
            query, key, *outputs, table.cos(), table.sin(), None, interleaved=False, backward=False,
            tokens_a_program=tokens, heads_a_program=heads,
        )()  # fmt: skip
        assert all(map(torch.equal, outputs, expected))


def test_stride_0_gradients_and_no_tokens() -> None:
    table = draw(4, 2)
    grad = torch.ones(()).expand(1, 2, 4, 4)
    assert torch.equal(rope(grad, grad, table, table)[0], rope(grad.contiguous(), grad, table, table)[0])
    empty = torch.zeros(1, 2, 0, 4)
    assert rope(empty, empty, table[:0], table[:0])[0].shape == empty.shape
