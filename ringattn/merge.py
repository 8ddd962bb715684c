"""Attention states `(O, LSE)` merge associatively, with `(0, -inf)` as the identity.

A state of a query row is the softmax-weighted mean of the values seen (O) and the natural logarithm of the sum of their
exponentiated scores (LSE). Merging two states of disjoint keys gives the state of all of them (Milakov and
Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al., FlashAttention, 2022).

The form is the shift by the larger LSE with one division, the most accurate of those in use. A term of zero weight is
selected away and not multiplied, so that what an empty state holds never matters (0 * NaN is NaN), and two empty states
give an empty state, where the usual formulas give NaN.
"""

import torch
from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two states of the same query rows over disjoint keys.

    Args:
        out_a, out_b: (..., M, D).
        lse_a, lse_b: (..., M), natural log; -inf for a row that has seen no key.

    Returns:
        The merged `(out, lse)`.

    Example:
        >>> out, lse = merge(torch.ones(1, 2), torch.zeros(1), torch.zeros(1, 2), torch.full((1,), -torch.inf))
        >>> out.tolist(), lse.tolist()
        ([[1.0, 1.0]], [0.0])
    """
    return merge_states(torch.stack([out_a, out_b]), torch.stack([lse_a, lse_b]))


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge n states, stacked along the first dimension: outs (n, ..., M, D), lses (n, ..., M)."""
    shift = finite_shift(lses.amax(dim=0))
    weights = torch.exp(lses - shift)
    total = weights.sum(dim=0)
    out = torch.where(weights.unsqueeze(-1) == 0, 0.0, weights.unsqueeze(-1) * outs).sum(dim=0)
    return out / where_empty(total, 1.0).unsqueeze(-1), shift + torch.log(total)


def merge_into(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Merge the state (out_b, lse_b) into (out, lse), in place; shapes as in `merge`, views welcome."""
    shift = finite_shift(torch.maximum(lse, lse_b))
    weight, weight_b = torch.exp(lse - shift), torch.exp(lse_b - shift)
    total = weight + weight_b
    divisor = where_empty(total, 1.0)
    kept = torch.where((weight == 0).unsqueeze(-1), 0.0, weight.unsqueeze(-1) * out)
    added = torch.where((weight_b == 0).unsqueeze(-1), 0.0, weight_b.unsqueeze(-1) * out_b)
    out.copy_(kept.add_(added).div_(divisor.unsqueeze(-1)))
    lse.copy_(shift + torch.log(total))


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add one more score a head, that of a sink with value 0, to final states, in place.

    Args:
        out, lse: (B, H, M, D) and (B, H, M).
        sinks: (H,), in the dtype of lse.

    Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023 (arXiv 2309.17453), with a
    learned score in place of the first tokens, as in gpt-oss.
    """
    total = torch.logaddexp(lse, sinks.unsqueeze(-1))
    out.mul_(torch.exp(lse - finite_shift(total)).unsqueeze(-1))
    lse.copy_(total)


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of the sinks' scores, (H,), from the final lse and the row term delta, both (B, H, M)."""
    weights = torch.where(lse == -torch.inf, 0.0, torch.exp(sinks.unsqueeze(-1) - lse))
    return -(weights * delta).sum(dim=(0, 2))


def finite_shift(largest: Tensor) -> Tensor:
    """The largest exponent of a row, or 0 where there is none, so that subtracting it never makes -inf - -inf."""
    return torch.where(largest == -torch.inf, 0.0, largest)


def where_empty(total: Tensor, value: float) -> Tensor:
    """The sum of weights, with `value` in rows where nothing was summed."""
    return torch.where(total == 0, value, total)


def row_delta(do: Tensor, out: Tensor, dlse: Tensor) -> Tensor:
    """`rowsum(do * out) - dlse`, the row term of the softmax gradient.

    Args:
        do, out: (..., M, Dv), gradient and value of the final output.
        dlse: (..., M), gradient of the final LSE. Since dLSE/dscore is the probability, it enters here alone.

    Returns:
        (..., M), in float32, or float64 for float64 inputs.
    """
    return (do.to(dlse.dtype) * out.to(dlse.dtype)).sum(dim=-1).sub_(dlse)
