"""SwiGLU, silu(gate) * up (Shazeer, 2020, arXiv 2002.05202), in one pass forward and one backward, in float32.

Gate and up may be the halves of one projection's output, and their gradients the halves of its gradient: both kernels
take rows by stride, so nothing is cut or joined by a copy.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.config import CompileCase, Launch
from ringattn.kernels.rows import RowShape, power_of_two, row_starts, rows_of


@triton.jit
def _swiglu_fwd_kernel(
    gate, up, y, rows, columns, gate_rows, up_rows, y_rows, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = ((tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    opening = tl.load(gate + row_starts(row, gate_rows)[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(up + row_starts(row, up_rows)[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    result = opening / (1.0 + tl.exp(-opening)) * value
    tl.store(y + row_starts(row, y_rows)[:, None] + column, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_bwd_kernel(
    dy, gate, up, dgate, dup, rows, columns, dy_rows, gate_rows, up_rows, dgate_rows, dup_rows,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = ((tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    grad = tl.load(dy + row_starts(row, dy_rows)[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + row_starts(row, gate_rows)[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(up + row_starts(row, up_rows)[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-opening))
    silu = opening * share
    slope = share + silu * (1.0 - share)
    at = dgate + row_starts(row, dgate_rows)[:, None] + column
    tl.store(at, (grad * value * slope).to(dgate.dtype.element_ty), mask=inside)
    at = dup + row_starts(row, dup_rows)[:, None] + column
    tl.store(at, (grad * silu).to(dup.dtype.element_ty), mask=inside)


FORWARD_TILE, BACKWARD_TILE = 2048, 1024
"""Numbers of each tensor that a program takes: the fastest of `benchmarks/tune_nn.py` on an H200."""


def _launch(kernel: object, tensors: dict[str, Tensor], tile: int, num_warps: int) -> Launch:
    columns = tensors["gate"].shape[-1]
    rows = tensors["gate"].numel() // columns
    block = min(power_of_two(max(columns, 16)), tile)
    shapes: dict[str, RowShape] = {f"{name}_rows": rows_of(x)[1] for name, x in tensors.items()}
    args = dict(tensors, rows=rows, columns=columns, **shapes, ROWS=tile // block, BLOCK=block)
    programs = triton.cdiv(rows, tile // block) * triton.cdiv(columns, block)
    return Launch(kernel, (programs,), args, dict(num_warps=num_warps))


def forward_launch(gate: Tensor, up: Tensor, y: Tensor, *, tile: int = FORWARD_TILE, num_warps: int = 4) -> Launch:
    """The launch of `swiglu_forward`; all tensors (..., N) in rows as `rows_of` takes them without a copy."""
    return _launch(_swiglu_fwd_kernel, {"gate": gate, "up": up, "y": y}, tile, num_warps)


def backward_launch(
    dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, *, tile: int = BACKWARD_TILE, num_warps: int = 4
) -> Launch:
    """The launch of `swiglu_backward`."""
    tensors = {"dy": dy, "gate": gate, "up": up, "dgate": dgate, "dup": dup}
    return _launch(_swiglu_bwd_kernel, tensors, tile, num_warps)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of tensors of one shape (..., N), any strides; contiguous, in gate's dtype."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel():
        forward_launch(rows_of(gate)[0], rows_of(up)[0], y)()
    return y


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Write the gradients of gate and up into dgate and dup, which may be the halves of one tensor."""
    if gate.numel():
        backward_launch(rows_of(dy)[0], rows_of(gate)[0], rows_of(up)[0], dgate, dup)()


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Both kernels, on halves of one tensor, for the compile gate."""
    for columns in (100, 11008):
        for dtype in (torch.bfloat16, torch.float32):
            gate, up = torch.empty(4096, 2 * columns, dtype=dtype, device="meta").chunk(2, dim=-1)
            y = torch.empty(4096, columns, dtype=dtype, device="meta")
            name = f"n{columns}-{str(dtype).removeprefix('torch.')}"
            yield CompileCase(f"fwd-{name}", forward_launch(gate, up, y))
            yield CompileCase(f"bwd-{name}", backward_launch(y, gate, up, gate, up))
