"""The two sums hold for every mask, grouping and dtype; lost, doubled and stale blocks break them."""

import pytest
import torch
import torch.distributed as dist

from ringattn import Band, attention, ring_attention
from ringattn.canary import LIMITS, check_gradients
from ringattn.header import RingError
from ringattn.launch.spawn import run
from ringattn.testing import make_inputs


def gradients(dtype=torch.float32, heads=(4, 2), sharp=1.0, **options):
    q, k, v, do = (x.to(dtype) for x in make_inputs(2, *heads, 96, 16))
    leaves = [x.detach().requires_grad_() for x in (q * sharp, k, v)]
    out, lse = attention(*leaves, return_lse=True, **options)
    return do, lse, *torch.autograd.grad(out, leaves[1:], do)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("sharp", [1.0, 6.0])
def test_no_false_alarm(dtype, mask, sharp):
    do, _, dk, dv = gradients(dtype, mask=mask, sharp=sharp)
    found = check_gradients(do, dk, dv)
    assert max(found) < LIMITS[dtype] / 2


@pytest.mark.parametrize("dtype", LIMITS)
def test_lost_doubled_and_missing(dtype):
    do, _, dk, dv = gradients(dtype, mask="causal")
    for factor in (0, 2, float("nan")):
        for which, name in ((0, "sum dK"), (1, "sum dV")):
            grads = [dk.clone(), dv.clone()]
            grads[which][:, :, 24:48] *= factor
            with pytest.raises(RingError, match=f"{name}.* of the norm"):
                check_gradients(do, *grads)


def test_queries_that_see_no_key():
    do, lse, dk, dv = gradients(mask=Band(lo=3))
    check_gradients(do, dk, dv, empty=lse.isneginf())
    with pytest.raises(RingError, match="sum dV"):
        check_gradients(do, dk, dv)


def test_sums_that_do_not_hold_are_not_compared():
    do, _, dk, dv = gradients(softcap=2.0)
    found = check_gradients(do, dk, dv, softcap=True)
    assert found.dv < 1e-4 and found.dk != found.dk
    do, _, dk, dv = gradients(sinks=torch.ones(4))
    assert all(value != value for value in check_gradients(do, dk, dv, sinks=True))
    with pytest.raises(RingError):
        check_gradients(do, dk, dv)


def check_ring() -> None:
    q, k, v, do = make_inputs(1, 4, 2, 12, 8, seed=dist.get_rank())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ring_attention(*leaves, mask="causal").backward(do)
    check_gradients(do, k.grad, v.grad)
    if dist.get_rank() == 1:
        v.grad[:, :, :6] = 0
    with pytest.raises(RingError, match="sum dV"):
        check_gradients(do, k.grad, v.grad)


def test_over_ranks_one_of_which_lost_something():
    run(check_ring, 3, timeout=60)
