"""The executor gives on N simulated ranks what one rank gives: every layout, mask, world, grouping and schedule."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.backends import reference
from ringattn.layout import LAYOUTS, shard_sizes
from ringattn.mask import CAUSAL, FULL, Band, prefix_lm, window
from ringattn.plan import key_rows, make_plan
from ringattn.schedule import SCHEDULES, make_schedule
from ringattn.testing import Simulation, gate, make_inputs, simulate

MASKS = {
    "full": FULL,
    "causal": CAUSAL,
    "window": window(9),
    "both_sides": window(7, 4),
    "past_only": Band(lo=3),
    "future": Band(-12, -2),
    "prefix": prefix_lm(7),
}
WORLDS = [1, 2, 3, 4, 8]
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
TENSORS = ("out", "lse", "dq", "dk", "dv")


def run(world: int, inputs, dlse, **options) -> Simulation:
    return simulate(*inputs, dlse, world=world, backend="reference", **options)


def assert_same(many: Simulation, one: Simulation) -> None:
    for name in TENSORS:
        torch.testing.assert_close(
            getattr(many, name), getattr(one, name), rtol=1e-11, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_the_grid(world, layout, mask, heads):
    inputs = make_inputs(1, *heads, 24, 8, 6, dtype=torch.float64)
    dlse = torch.randn(1, heads[0], 24, dtype=torch.float64)
    one = run(1, inputs, dlse, mask=mask)
    for schedule in SCHEDULES:
        assert_same(run(world, inputs, dlse, layout=layout, mask=mask, schedule=schedule), one)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from(list(SCHEDULES)),
    st.lists(st.integers(0, 13), min_size=1, max_size=4),
    st.integers(1, 7),
    st.tuples(st.integers(-8, 8), st.integers(-8, 8)).map(lambda pair: Band(min(pair), max(pair))),
)
def test_any_length_and_documents(layout, schedule, lengths, world, mask):
    """Uneven and empty shards, fewer tokens than ranks, documents that end anywhere."""
    inputs = make_inputs(1, 2, 1, sum(lengths), 4, dtype=torch.float64)
    dlse = torch.randn(1, 2, sum(lengths), dtype=torch.float64)
    options = {"mask": mask, "lengths": lengths}
    many = run(world, inputs, dlse, layout=layout, schedule=schedule, **options)
    assert_same(many, run(1, inputs, dlse, **options))
    alone = [
        run(1, [x.split(lengths, 2)[i] for x in inputs], dlse.split(lengths, 2)[i], mask=mask)
        for i in range(len(lengths))
    ]
    for name in TENSORS:
        torch.testing.assert_close(
            getattr(many, name), torch.cat([getattr(x, name) for x in alone], 2), rtol=1e-11, atol=1e-12
        )


@pytest.mark.parametrize("width", [7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_around_the_shard_size(width, layout):
    inputs = make_inputs(1, 2, 2, 32, 4, dtype=torch.float64)
    dlse = torch.zeros(1, 2, 32, dtype=torch.float64)
    mask = window(width - 1)
    assert_same(run(4, inputs, dlse, layout=layout, mask=mask), run(1, inputs, dlse, mask=mask))


@pytest.mark.parametrize("softcap", [2.0])
def test_softcap(softcap):
    inputs = make_inputs(1, 2, 2, 30, 4, dtype=torch.float64)
    dlse = torch.randn(1, 2, 30, dtype=torch.float64)
    options = {"softcap": softcap, "mask": CAUSAL, "scale": 3.0}
    assert_same(run(4, inputs, dlse, layout="zigzag", **options), run(1, inputs, dlse, **options))


def test_bytes_are_those_of_the_formula():
    """Forward steps * |KV|; backward steps * |KV| + (steps + 1) * |dKV|, of uneven blocks too."""
    inputs = make_inputs(2, 4, 2, 40, 8, 6)
    for world, mask, length in ((4, CAUSAL, 40), (4, window(3), 40), (3, FULL, 40), (1, FULL, 40)):
        many = simulate(*inputs, world=world, layout="contiguous", mask=mask, backend="reference", schedule="ring")
        steps = len(make_schedule("ring", "contiguous", mask, (length,), world, 0).forward) - 1
        kv = [2 * 2 * size * (8 + 6) * 4 for size in shard_sizes("contiguous", (length,), world)]
        gradient_steps = steps + 1 if world > 1 else 0
        for rank in range(world):
            passed = [kv[(rank - distance) % world] for distance in range(steps)]
            assert many.sent_forward[rank] == sum(passed)
            back = [kv[(rank - distance) % world] for distance in range(gradient_steps)]
            assert many.sent_backward[rank] == sum(passed) + sum(back)


def test_direct_sends_the_needed_rows_alone():
    inputs, lengths, world = make_inputs(1, 2, 2, 60, 8), (7, 30, 1, 22), 5
    for layout in LAYOUTS:
        many = simulate(
            *inputs, world=world, layout=layout, mask="causal", lengths=lengths, schedule="direct", backend="reference"
        )
        plans = [make_plan(layout, CAUSAL, lengths, world, rank) for rank in range(world)]
        empty = 4  # a message of no rows holds one number
        for rank in range(world):
            others = [plan[rank] for number, plan in enumerate(plans) if number != rank]
            needed = sum(2 * (8 + 8) * 4 * (end - begin) for tiles in others for begin, end in key_rows(tiles))
            spare = empty * sum(not tiles for tiles in others)
            assert needed <= many.sent_forward[rank] <= needed + spare
            fetched = [tiles for number, tiles in enumerate(plans[rank]) if number != rank]
            returned = sum(2 * (8 + 8) * 4 * (end - begin) for tiles in fetched for begin, end in key_rows(tiles))
            assert needed + returned <= many.sent_backward[rank] <= needed + returned + 2 * empty * world


def test_gradients_may_travel_in_fewer_bytes():
    inputs = make_inputs(1, 2, 2, 32, 8)
    exact, small = (
        simulate(*inputs, world=4, mask="causal", backend="reference", wire_dtype=dtype)
        for dtype in (None, torch.bfloat16)
    )
    half = [(b - f) // 2 for b, f in zip(exact.sent_backward, exact.sent_forward, strict=True)]
    assert [s - f for s, f in zip(small.sent_backward, small.sent_forward, strict=True)] == half
    torch.testing.assert_close(small.dk, exact.dk, rtol=2e-2, atol=2e-2)
    assert not torch.equal(small.dk, exact.dk) and torch.equal(small.dq, exact.dq)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_one_launch_a_visited_block(layout):
    inputs = make_inputs(1, 2, 2, 64, 4)
    many = simulate(*inputs, world=8, layout=layout, mask="causal", backend="reference")
    if layout == "contiguous":
        assert many.launches_forward == list(range(1, 9))
    else:
        assert many.launches_forward == [8] * 8


def test_repeats_are_bitwise_equal():
    inputs = make_inputs(1, 4, 2, 48, 8)
    first, again = (simulate(*inputs, world=4, layout="zigzag", mask="causal", backend="reference") for _ in range(2))
    assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in TENSORS)


class RoundedState:
    """The reference with its running sums kept in bfloat16: the fault that the gate must see."""

    @staticmethod
    def forward(problem, tiles, q, k, v, out, lse):
        reference.forward(problem, tiles, q, k, v, out, lse)
        out.copy_(out.bfloat16())

    @staticmethod
    def backward(problem, tiles, do, q, k, v, out, lse, delta, dq, dk, dv):
        reference.backward(problem, tiles, do, q, k, v, out, lse, delta, dq, dk, dv)
        dq.copy_(dq.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("world", [2, 4, 8, 16])
def test_the_gate(world, dtype):
    """Error is flat in the world for 16-bit inputs and within rounding for float32."""
    inputs = make_inputs(1, 4, 2, 256, 16, dtype=dtype)
    options = {"mask": "causal", "backend": "reference"}
    exact = simulate(*(x.double() for x in inputs), world=1, **options)
    one = simulate(*inputs, world=1, **options)
    many = simulate(*inputs, world=world, layout="zigzag", **options)
    for name in TENSORS:
        verdict = gate(getattr(many, name), getattr(one, name), getattr(exact, name))
        assert verdict.ok, (name, verdict)
        if dtype == torch.bfloat16 and name != "lse":
            assert 0.97 < verdict.ratio < 1.03, (name, verdict)


@pytest.mark.parametrize("world", [4, 8, 16])
def test_bfloat16_sums_fail_the_gate(world):
    inputs = make_inputs(1, 4, 2, 256, 16, dtype=torch.bfloat16)
    options = {"mask": "full"}
    exact = simulate(*(x.double() for x in inputs), world=1, backend="reference", **options)
    one = simulate(*inputs, world=1, backend="reference", **options)
    many = simulate(*inputs, world=world, layout="zigzag", backend=RoundedState, **options)
    for name in ("out", "dq"):
        assert not gate(getattr(many, name), getattr(one, name), getattr(exact, name)).ok, name
