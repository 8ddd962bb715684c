"""Heads swapped for tokens around a ring give what one rank gives, for every layout and schedule."""

import itertools

import pytest
import torch
import torch.distributed as dist

from ringattn import attention, ring_attention
from ringattn.heads import check_heads
from ringattn.launch.spawn import run
from ringattn.layout import LAYOUTS, make_shards, shard_positions
from ringattn.schedule import SCHEDULES
from ringattn.testing import make_inputs, simulate

DEGREES = [(2, 2), (4, 2), (6, 3)]
HEADS = [(6, 6), (6, 2), (6, 1)]


def fits(heads: tuple[int, int], degree: int) -> bool:
    return heads[0] % degree == 0 and (heads[1] % degree == 0 or degree % heads[1] == 0)


CASES = [(*pair, heads) for pair, heads in itertools.product(DEGREES, HEADS) if fits(heads, pair[1])]


@pytest.mark.parametrize(("world", "degree", "heads"), CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_grid(world, degree, heads, layout):
    inputs = make_inputs(1, *heads, 17, 4, 6, dtype=torch.float64)
    dlse = torch.randn(1, heads[0], 17, dtype=torch.float64)
    one = simulate(*inputs, dlse, world=1, mask="causal", backend="reference")
    for schedule in SCHEDULES if layout == "zigzag" else ("ring", "direct"):
        options = {"layout": layout, "schedule": schedule, "heads_degree": degree, "mask": "causal"}
        many = simulate(*inputs, dlse, world=world, backend="reference", **options)
        for name in ("out", "lse", "dq", "dk", "dv"):
            torch.testing.assert_close(getattr(many, name), getattr(one, name), rtol=1e-11, atol=1e-12)


def test_fewer_tokens_than_ranks_and_documents():
    inputs = make_inputs(1, 4, 2, 5, 4, dtype=torch.float64)
    dlse = torch.zeros(1, 4, 5, dtype=torch.float64)
    options = {"lengths": (3, 2), "mask": "causal", "backend": "reference"}
    one = simulate(*inputs, dlse, world=1, **options)
    many = simulate(*inputs, dlse, world=8, heads_degree=4, schedule="direct", **options)
    for name in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(many, name), getattr(one, name), rtol=1e-11, atol=1e-12)


def test_all_heads_swapped_sends_each_token_once():
    """Ulysses alone: q, k, v there and out, lse back, of the other ranks' heads; nothing goes around a ring."""
    inputs = make_inputs(1, 4, 4, 32, 8)
    many = simulate(*inputs, world=4, heads_degree=4, backend="reference")
    there = 3 * 3 * 8 * 8 * 4  # q, k and v: 3 peers get 1 head each of 8 tokens of 8 floats
    back = 3 * 8 * (8 + 1) * 4  # out and lse
    assert many.sent_forward == [there + back] * 4


def check_over_gloo() -> None:
    q, k, v, do = make_inputs(2, 4, 2, 21, 8, dtype=torch.float64)
    rank, world = dist.get_rank(), dist.get_world_size()
    for layout, degree in (("zigzag", 2), ("striped", 4), ("contiguous", 1)):
        rows = shard_positions(make_shards(layout, (21,), world)[rank])
        grads = []
        for call, part, options in (
            (attention, slice(None), {}),
            (ring_attention, rows, {"layout": layout, "seq_len": 21, "heads_degree": degree}),
        ):
            leaves = [x[:, :, part].detach().requires_grad_() for x in (q, k, v)]
            out = call(*leaves, mask="causal", **options)
            out.backward(do[:, :, part])
            grads.append([out.detach(), *(x.grad for x in leaves)])
        for whole, mine in zip(*grads, strict=True):
            torch.testing.assert_close(mine, whole[:, :, rows], rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match=r"heads_degree=3 does not divide the 4 ranks; choose one of \[1, 2, 4\]"):
        ring_attention(q, k, v, heads_degree=3)


def test_over_gloo():
    run(check_over_gloo, 4, timeout=240)


def test_what_cannot_be_shared_out_is_named():
    with pytest.raises(ValueError, match=r"6 query and 4 key heads; choose one of \[1, 2\]"):
        check_heads(6, 4, 4, 8)
    check_heads(8, 2, 4, 8)
