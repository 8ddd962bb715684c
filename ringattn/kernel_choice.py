"""Whether Triton kernels answer for a tensor, or plain torch does."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def kernels_answer(x: Tensor) -> bool:
    """Whether the model kernels take this tensor: on a GPU, in at most float32, with Triton installed."""
    return x.is_cuda and x.dtype in KERNEL_DTYPES and _have_triton()


@cache
def _have_triton() -> bool:
    return find_spec("triton") is not None


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of statistics and sums: float64 for float64, float32 for all others."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
