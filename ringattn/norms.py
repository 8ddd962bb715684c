"""RMSNorm and LayerNorm, with the residual added before if there is one: functions, custom ops, and plain torch."""

import torch
from torch import Tensor

from ringattn.kernel_choice import kernels_answer, wide_dtype


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    inplace: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Divide rows by their root mean square (Zhang and Sennrich, 2019, arXiv 1910.07467).

    `x / sqrt(mean(x^2) + eps) * weight + bias`, in at least float32, rounded once at the end. With a residual, the rows
    are those of `x + residual`, rounded to the residual's dtype; both results come from one pass. Squares overflow
    float32 above 1.8e19, as in torch. Gradients of weight and bias are summed in a fixed order.

    Args:
        x: (..., N), any strides.
        weight, bias: (N,) or None, in any dtype, such as float32 beside bfloat16 inputs.
        residual: (..., N), such as a residual stream in float32.
        eps: added to the mean square.
        inplace: write the sum over the residual; without gradients only.

    Returns:
        (..., N) in x's dtype; with a residual, the pair of that and the sum, in the residual's dtype.

    Raises:
        ValueError: shapes that do not fit, `inplace` without a residual or with gradients.

    Example:
        >>> rms_norm(torch.tensor([[3.0, -3.0]])).round(decimals=3).tolist()
        [[1.0, -1.0]]
    """
    return _normalize(x, weight, bias, residual, eps, inplace, center=False)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    inplace: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Subtract the mean of rows and divide by their deviation (Ba et al., Layer Normalization, 2016, arXiv 1607.06450).

    Mean and variance are exact to float32 however far the mean is from 0: a mean of 1e4 with a deviation of 1e-2 is
    no special case, forward or backward.

    Args:
        x, weight, bias, residual, eps, inplace: as in `rms_norm`.

    Returns:
        As `rms_norm`.

    Raises:
        ValueError: as `rms_norm`.

    Example:
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0).tolist()
        [[-1.0, 1.0]]
    """
    return _normalize(x, weight, bias, residual, eps, inplace, center=True)


def _normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    inplace: bool,
    center: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    if not x.dim() or not x.is_floating_point():
        raise ValueError(f"x must be a floating-point tensor (..., N), got {x.dtype} of shape {tuple(x.shape)}")
    for name, w in (("weight", weight), ("bias", bias)):
        if w is not None and w.shape != x.shape[-1:]:
            raise ValueError(f"{name} must have shape ({x.shape[-1]},), got {tuple(w.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")
    if not inplace:
        y, summed, _ = norm(x, residual, weight, bias, eps, center)
        return y if residual is None else (y, summed)
    if residual is None:
        raise ValueError("inplace=True needs a residual to write to")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, residual, weight, bias)):
        raise ValueError("inplace=True overwrites what gradients need; use it under torch.no_grad()")
    return norm_inplace(x, residual, weight, bias, eps, center), residual


@torch.library.custom_op("ringattn::norm", mutates_args=())
def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised, sum or nothing, statistics (rows, 1 or 3))."""
    y, summed, stats = _forward(x, residual, weight, bias, eps, center, None)
    return y, x.new_empty(0) if summed is None else summed, stats


@norm.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    summed = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    return x.new_empty(x.shape), summed, x.new_empty(_stats_shape(x, center), dtype=wide_dtype(x))


@torch.library.custom_op("ringattn::norm_inplace", mutates_args=("residual",))
def norm_inplace(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool
) -> Tensor:
    """The normalised sum, which is written over the residual."""
    return _forward(x, residual, weight, bias, eps, center, residual)[0]


@norm_inplace.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool) -> Tensor:
    return x.new_empty(x.shape)


def _stats_shape(x: Tensor, center: bool) -> tuple[int, int]:
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return rows, 3 if center else 1


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    target: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    if kernels_answer(x) and (residual is None or kernels_answer(residual)) and x.shape[-1]:
        from ringattn.kernels.norm import norm_forward

        return norm_forward(x, residual, weight, bias, eps=eps, center=center, summed=target)
    wide, summed = x.to(wide_dtype(x)), None
    if residual is not None:
        summed = torch.empty(x.shape, dtype=residual.dtype, device=x.device) if target is None else target
        summed.copy_(wide + residual)
        wide = summed.to(wide.dtype)
    stats = wide.new_empty(_stats_shape(x, center))
    if not x.numel():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device), summed, stats
    if center:
        shift = wide.mean(-1, keepdim=True)
        mean = (wide - shift).mean(-1, keepdim=True)
        wide = (wide - shift) - mean
        stats[:, 1], stats[:, 2] = shift.flatten(), mean.flatten()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    stats[:, 0] = rstd.flatten()
    y = wide * rstd
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype).contiguous(), summed, stats


@torch.library.custom_op("ringattn::norm_backward", mutates_args=())
def norm_backward(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what was normalised, of the weight and of the bias, the last two empty without one."""
    if kernels_answer(x) and kernels_answer(dy) and x.shape[-1]:
        from ringattn.kernels.norm_bwd import norm_backward as backward

        dx, dweight, dbias = backward(dy, dsummed, x, weight, stats, bias_dtype=None if bias is None else bias.dtype)
    else:
        dx, dweight, dbias = _backward(dy, dsummed, x, weight, bias, stats)
    return dx, x.new_empty(0) if dweight is None else dweight, x.new_empty(0) if dbias is None else dbias


@norm_backward.register_fake
def _(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dweight, dbias = (x.new_empty(0) if w is None else w.new_empty(w.shape) for w in (weight, bias))
    return x.new_empty(x.shape), dweight, dbias


def _backward(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`norm_backward` in torch."""
    grad, value = dy.to(stats.dtype), x.to(stats.dtype)
    rows = tuple(range(x.dim() - 1))
    columns = [column.view(*x.shape[:-1], 1) for column in stats.unbind(1)]
    if len(columns) == 3:
        value = (value - columns[1]) - columns[2]
    value = value * columns[0]
    dbias = None if bias is None else grad.sum(rows).to(bias.dtype)
    dweight = None
    if weight is not None:
        dweight = (grad * value).sum(rows).to(weight.dtype)
        grad = grad * weight
    result = grad - value * (grad * value).mean(-1, keepdim=True) if x.numel() else grad
    if len(columns) == 3 and x.numel():
        result = result - grad.mean(-1, keepdim=True)
    result = result * columns[0]
    if dsummed is not None:
        result = result + dsummed
    return result.to(x.dtype).contiguous(), dweight, dbias


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, residual, weight, bias, _, _ = inputs
    _, summed, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.save_for_backward(x if residual is None else summed, weight, bias, stats)
    ctx.residual, ctx.dtype = residual is not None, x.dtype


def _differentiate(ctx, dy, dsummed, _):  # type: ignore[no-untyped-def]
    x, weight, bias, stats = ctx.saved_tensors
    dx, dweight, dbias = norm_backward(dy, dsummed if ctx.residual else None, x, weight, bias, stats)
    dresidual = dx if ctx.residual else None
    return (
        dx.to(ctx.dtype),
        dresidual,
        None if weight is None else dweight,
        None if bias is None else dbias,
        None,
        None,
    )


norm.register_autograd(_differentiate, setup_context=_save)
