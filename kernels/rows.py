"""Tensors of any strides as rows for kernels: up to three leading dimensions are walked by stride, never copied.

A view into a fused projection, a transpose of heads and tokens, a broadcast: all are (outer, middle, inner) rows with a
stride each. Only what has more strides than that, or whose columns are not next to one another, is copied.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

RowShape = tuple[int, int, int, int, int]
"""Inner rows, middle rows, and the strides of outer, middle and inner rows, in elements."""


@triton.jit
def row_starts(row, shape):
    """Offsets of the first elements of rows, int64; `row` is a scalar or a tensor."""
    inner, middle, outer_stride, middle_stride, inner_stride = shape
    block = row // inner
    start = (block // middle).to(tl.int64) * outer_stride + (block % middle).to(tl.int64) * middle_stride
    return start + (row % inner).to(tl.int64) * inner_stride


def rows_of(x: Tensor) -> tuple[Tensor, RowShape]:
    """A tensor (..., N) and how to walk its rows; the tensor is a copy where its strides do not allow that.

    Example:
        >>> rows_of(torch.empty(2, 5, 3, 8).transpose(1, 2))[1]
        (5, 3, 120, 8, 24)
    """
    strides = _collapsed(x)
    if len(strides) > 3 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        x = x.contiguous()
        strides = _collapsed(x)
    (_, outer), (middle, middle_stride), (inner, inner_stride) = [(1, 0)] * (3 - len(strides)) + strides
    return x, (inner, middle, outer, middle_stride, inner_stride)


def _collapsed(x: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the leading dimensions, those merged that one stride walks."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def processors(x: Tensor) -> int:
    """Multiprocessors of the tensor's card; 2 on a CPU, where kernels run in the interpreter, 132 on a meta device."""
    if x.is_cuda:
        return torch.cuda.get_device_properties(x.device).multi_processor_count
    return 132 if x.is_meta else 2
