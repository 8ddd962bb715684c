"""Softmax, log-sum-exp and their mergeable state (m, l) over the last dimension: functions, custom ops, plain torch."""

import math

import torch
from torch import Tensor

from ringattn.kernel_choice import kernels_answer, wide_dtype
from ringattn.merge import finite_shift, where_empty


def softmax(x: Tensor, *, mask: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """Softmax of x / temperature over the last dimension, in at least float32, rounded once at the end.

    A row without a finite logit, or all of whose logits are hidden, gives 0 with zero gradients, where torch gives NaN.
    On a GPU rows of any length are read once.

    Args:
        x: (..., N), any strides.
        mask: bool, broadcast to x; false hides a logit.
        temperature: above 0.

    Returns:
        Like x, contiguous.

    Raises:
        ValueError: a mask that is not bool or does not fit, a temperature that is not above 0.

    Example:
        >>> softmax(torch.tensor([[0.0, 0.0, 9.0]]), mask=torch.tensor([True, True, False])).tolist()
        [[0.5, 0.5, 0.0]]
    """
    return run_softmax(x, _checked(x, mask, temperature), float(temperature))


def logsumexp(x: Tensor, *, mask: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """log(sum(exp(x / temperature))) over the last dimension; differentiable.

    Args:
        x, mask, temperature: as in `softmax`.

    Returns:
        (...), float32 (float64 for float64); -inf for a row without a finite logit, with zero gradients.

    Raises:
        ValueError: as `softmax`.

    Example:
        >>> round(logsumexp(torch.zeros(1, 8)).item() / math.log(8), 6)
        1.0
    """
    return run_logsumexp(x, _checked(x, mask, temperature), float(temperature))[0]


def online_softmax_state(x: Tensor, *, mask: Tensor | None = None, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The state of a softmax over a part of a row: m = max(x) / temperature and l = sum(exp(x / temperature - m)).

    States of parts merge into the state of the whole (`merge_softmax_states`), whose softmax is
    exp(x / temperature - m) / l and whose log-sum-exp m + log(l) (Milakov and Gimelshein, Online normalizer calculation
    for softmax, 2018, arXiv 1805.02867). Not differentiable; `logsumexp` is.

    Args:
        x, mask, temperature: as in `softmax`.

    Returns:
        m and l, (...), float32 (float64 for float64); (-inf, 0), the identity, for a row without a finite logit.

    Raises:
        ValueError: as `softmax`.

    Example:
        >>> m, l = online_softmax_state(torch.tensor([[1.0, 1.0]]))
        >>> m.tolist(), l.tolist()
        ([1.0], [2.0])
    """
    _, peak, total = run_logsumexp(x.detach(), _checked(x, mask, temperature), float(temperature))
    return peak / temperature, total


def merge_softmax_states(m: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:  # noqa: E741
    """Merge n states of the same rows over disjoint parts, stacked along the first dimension.

    Args:
        m, l: (n, ...), as `online_softmax_state` gives them.

    Returns:
        The merged m and l, (...).

    Example:
        >>> m, l = merge_softmax_states(torch.tensor([0.0, -torch.inf]), torch.tensor([2.0, 0.0]))
        >>> m.item(), l.item()
        (0.0, 2.0)
    """
    peak = m.amax(dim=0)
    weight = torch.exp(m - finite_shift(peak))
    return peak, torch.where(weight == 0, 0.0, l * weight).sum(dim=0)


def _checked(x: Tensor, mask: Tensor | None, temperature: float) -> Tensor | None:
    """The mask in x's shape, if everything fits."""
    if not x.dim() or not x.is_floating_point():
        raise ValueError(f"x must be a floating-point tensor (..., N), got {x.dtype} of shape {tuple(x.shape)}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a finite number above 0, got {temperature!r}")
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool (true is kept), got {mask.dtype}")
    try:
        return mask.expand(x.shape)
    except RuntimeError:
        raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to x {tuple(x.shape)}") from None


@torch.library.custom_op("ringattn::softmax", mutates_args=())
def run_softmax(x: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
    if kernels_answer(x):
        from ringattn.kernels.softmax import softmax_forward

        return softmax_forward(x, mask, temperature=temperature)
    value, peak, total = _state(x, mask, temperature)
    weight = torch.exp((value - finite_shift(peak).unsqueeze(-1)) / temperature)
    return (weight / where_empty(total, 1.0).unsqueeze(-1)).to(x.dtype).contiguous()


@run_softmax.register_fake
def _(x: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
    return x.new_empty(x.shape)


def _state(x: Tensor, mask: Tensor | None, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, -inf where hidden; their maxima; sums of exp((x - maximum) / temperature))."""
    value = x.to(wide_dtype(x))
    if mask is not None:
        value = torch.where(mask, value, -torch.inf)
    peak = value.amax(-1) if x.shape[-1] else value.new_full(x.shape[:-1], -torch.inf)
    return value, peak, torch.exp((value - finite_shift(peak).unsqueeze(-1)) / temperature).sum(-1)


@torch.library.custom_op("ringattn::softmax_backward", mutates_args=())
def softmax_backward(dy: Tensor, y: Tensor, temperature: float) -> Tensor:
    if kernels_answer(y) and kernels_answer(dy):
        from ringattn.kernels.softmax_bwd import softmax_backward as backward

        return backward(dy, y, temperature=temperature)
    weight = y.to(wide_dtype(y))
    grad = torch.where(weight == 0, 0.0, dy.to(weight.dtype))
    total = (weight * grad).sum(-1, keepdim=True)
    return (torch.where(weight == 0, 0.0, weight * (grad - total)) / temperature).to(y.dtype).contiguous()


@softmax_backward.register_fake
def _(dy: Tensor, y: Tensor, temperature: float) -> Tensor:
    return y.new_empty(y.shape)


def _save_softmax(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output)
    ctx.temperature = inputs[2]


def _differentiate_softmax(ctx, dy):  # type: ignore[no-untyped-def]
    return softmax_backward(dy, *ctx.saved_tensors, ctx.temperature), None, None


run_softmax.register_autograd(_differentiate_softmax, setup_context=_save_softmax)


@torch.library.custom_op("ringattn::logsumexp", mutates_args=())
def run_logsumexp(x: Tensor, mask: Tensor | None, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(log-sum-exp, maximum of x, sum of exp((x - maximum) / temperature))."""
    if kernels_answer(x):
        from ringattn.kernels.softmax import softmax_state

        peak, total = softmax_state(x, mask, temperature=temperature)
    else:
        _, peak, total = _state(x, mask, temperature)
    return finite_shift(peak) / temperature + torch.log(total), peak, total


@run_logsumexp.register_fake
def _(x: Tensor, mask: Tensor | None, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    lse, peak, total = (x.new_empty(x.shape[:-1], dtype=wide_dtype(x)) for _ in range(3))
    return lse, peak, total


@torch.library.custom_op("ringattn::logsumexp_backward", mutates_args=())
def logsumexp_backward(
    dlse: Tensor, x: Tensor, mask: Tensor | None, peak: Tensor, total: Tensor, temperature: float
) -> Tensor:
    if kernels_answer(x):
        from ringattn.kernels.softmax_bwd import logsumexp_backward as backward

        return backward(dlse, x, mask, peak, total, temperature=temperature)
    value = x.to(wide_dtype(x))
    if mask is not None:
        value = torch.where(mask, value, -torch.inf)
    weight = torch.exp((value - finite_shift(peak).unsqueeze(-1)) / temperature)
    factor = dlse / where_empty(total, 1.0) / temperature
    return torch.where(weight == 0, 0.0, weight * factor.unsqueeze(-1)).to(x.dtype).contiguous()


@logsumexp_backward.register_fake
def _(dlse: Tensor, x: Tensor, mask: Tensor | None, peak: Tensor, total: Tensor, temperature: float) -> Tensor:
    return x.new_empty(x.shape)


def _save_logsumexp(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, mask, ctx.temperature = inputs
    _, peak, total = output
    ctx.mark_non_differentiable(peak, total)
    ctx.save_for_backward(x, mask, peak, total)


def _differentiate_logsumexp(ctx, dlse, *_):  # type: ignore[no-untyped-def]
    return logsumexp_backward(dlse, *ctx.saved_tensors, ctx.temperature), None, None


run_logsumexp.register_autograd(_differentiate_logsumexp, setup_context=_save_logsumexp)
