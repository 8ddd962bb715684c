"""SwiGLU, silu(gate) * up: function, custom ops, and plain torch."""

import torch
from torch import Tensor

from ringattn.kernel_choice import kernels_answer, wide_dtype


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up (Shazeer, GLU Variants Improve Transformer, 2020, arXiv 2002.05202), rounded once.

    Args:
        gate: (..., N), or (..., 2 N), gate before up, as one projection gives them; any strides.
        up: (..., N) in gate's dtype, or None if `gate` holds both. With None, both gradients are written as one
            tensor, and nothing is joined by a copy.

    Returns:
        (..., N), contiguous.

    Raises:
        ValueError: shapes or dtypes that differ, or an odd last dimension where it holds both.

    Example:
        >>> swiglu(torch.tensor([[0.0, 32.0, 5.0, 2.0]])).tolist()
        [[0.0, 64.0]]
    """
    if up is None:
        if not gate.dim() or gate.shape[-1] % 2:
            raise ValueError(f"without up, gate must be (..., 2 N), got shape {tuple(gate.shape)}")
        return run_swiglu_halves(gate)
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.dim():
        raise ValueError(
            f"gate and up must have one shape and dtype, got {tuple(gate.shape)} {gate.dtype} and "
            f"{tuple(up.shape)} {up.dtype}"
        )
    return run_swiglu(gate, up)


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    if kernels_answer(gate):
        from ringattn.kernels.swiglu import swiglu_forward

        return swiglu_forward(gate, up)
    wide = gate.to(wide_dtype(gate))
    return (torch.nn.functional.silu(wide) * up).to(gate.dtype).contiguous()


def _backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    if kernels_answer(gate) and kernels_answer(dy):
        from ringattn.kernels.swiglu import swiglu_backward

        return swiglu_backward(dy, gate, up, dgate, dup)
    grad, wide = dy.to(wide_dtype(gate)), gate.to(wide_dtype(gate))
    share = torch.sigmoid(wide)
    silu = wide * share
    dgate.copy_(grad * up * (share + silu * (1 - share)))
    dup.copy_(grad * silu)


@torch.library.custom_op("ringattn::swiglu", mutates_args=())
def run_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _forward(gate, up)


@run_swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("ringattn::swiglu_backward", mutates_args=())
def run_swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _backward(dy, gate, up, dgate, dup)
    return dgate, dup


@run_swiglu_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


run_swiglu.register_autograd(
    lambda ctx, dy: run_swiglu_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("ringattn::swiglu_halves", mutates_args=())
def run_swiglu_halves(x: Tensor) -> Tensor:
    return _forward(*_halves(x))


@run_swiglu_halves.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@torch.library.custom_op("ringattn::swiglu_halves_backward", mutates_args=())
def run_swiglu_halves_backward(dy: Tensor, x: Tensor) -> Tensor:
    dx = x.new_empty(x.shape)
    _backward(dy, *_halves(x), *_halves(dx))
    return dx


@run_swiglu_halves_backward.register_fake
def _(dy: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


run_swiglu_halves.register_autograd(
    lambda ctx, dy: run_swiglu_halves_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
