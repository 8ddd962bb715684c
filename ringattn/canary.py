"""Two sums that gradients of attention must keep, whatever the numbers: an alarm for blocks lost, doubled or stale.

For each K/V head, over the whole sequence, the rows of dV add up to those of dO, and the rows of dK to zero: every
query's probabilities add up to 1, and those of its scores to 0. One flipped element is too small to be seen.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.comm import Group, get_comm, group_name
from ringattn.header import RingError

LIMITS = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 0.005, torch.bfloat16: 0.04}
"""Largest residual that rounding explains; measured at 256 keys on 4 ranks: 1.3e-15, 7e-7, 8e-4 up to float16, and a
lost block of a quarter of the keys 0.2."""


class Canary(NamedTuple):
    """Residuals of the two sums, relative to the norm of what is added up; the largest over K/V heads.

    Attributes:
        dv: of `sum dV - sum dO`, relative to the norm of dO.
        dk: of `sum dK`, relative to the norm of dK.
    """

    dv: float
    dk: float


def check_gradients(
    do: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    group: Group = None,
    empty: Tensor | None = None,
    softcap: bool = False,
    sinks: bool = False,
    dlse: bool = False,
) -> Canary:
    """Compare the sums over all ranks of a group, by one all-reduce of 2 G (D + Dv) numbers.

    Args:
        do: (B, H, S, Dv), gradient of this rank's output.
        dk, dv: (B, G, S, D) and (B, G, S, Dv), gradients of this rank's keys and values.
        group: as in `ring_attention`.
        empty: (B, H, S), true for queries that see no key, whose dO counts for nothing.
        softcap, sinks, dlse: whether the scores were capped, there were sinks, or the LSE has a gradient. What does
            not hold then is not compared, and its residual is NaN: dK with each of them, dV with sinks.

    Raises:
        RingError: a residual is larger than rounding explains, or not a number.

    Source: the sums follow from Dao et al., FlashAttention, 2022 (arXiv 2205.14135), appendix B.2.

    Example:
        >>> from ringattn import attention
        >>> q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
        >>> do = torch.randn(1, 2, 8, 4)
        >>> attention(q, k, v).backward(do)
        >>> check_gradients(do, k.grad, v.grad).dv < 1e-3
        True
    """
    groups = dk.shape[1]
    do = do.double() if empty is None else do.double().masked_fill(empty[..., None], 0)
    rows = do.unflatten(1, (groups, do.shape[1] // groups))
    sums = [dv.double().sum((0, 2)) - rows.sum((0, 2, 3)), dk.double().sum((0, 2))]
    squares = [rows.square().sum((0, 2, 3, 4)), dk.double().square().sum((0, 2, 3))]
    packed = torch.cat([part.flatten() for part in (*sums, *squares)]).cpu()
    name = group_name(group)
    if name:
        dist.all_reduce(packed, group=get_comm(name).control)
    dv_sum, dk_sum, do_square, dk_square = packed.split([part.numel() for part in (*sums, *squares)])
    tiny = torch.finfo(torch.float64).tiny
    residuals = [  # NaN anywhere makes a residual NaN, which no limit holds
        (total.view(groups, -1).norm(dim=1) / square.sqrt().clamp_min(tiny)).max().item()
        for total, square in ((dv_sum, do_square), (dk_sum, dk_square))
    ]
    limit, nan = LIMITS[dk.dtype], float("nan")
    found = Canary(nan if sinks else residuals[0], nan if softcap or sinks or dlse else residuals[1])
    compared = {"sum dV - sum dO": (found.dv, not sinks), "sum dK": (found.dk, not (softcap or sinks or dlse))}
    wrong = [
        f"{what} is {value:.3g} of the norm" for what, (value, on) in compared.items() if on and not value <= limit
    ]
    if wrong:
        raise RingError(f"gradients lost or doubled something: {'; '.join(wrong)} (limit {limit:g} for {dk.dtype})")
    return found
