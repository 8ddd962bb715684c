"""Schedules are symmetric, match send by send, keep slots intact, and visit every block that is needed once."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.layout import LAYOUTS
from ringattn.mask import CAUSAL, FULL, Band, prefix_lm, window
from ringattn.plan import key_rows, make_plan
from ringattn.prove import ScheduleError, check, prove
from ringattn.schedule import SCHEDULES, Schedule, Step, Transfer, Visit, make_schedule

BANDS = [FULL, CAUSAL, window(0), window(3), window(9, 2), Band(5, 20), Band(-20, -5), prefix_lm(11), Band(0, 4, 9)]
PLACES = st.tuples(
    st.sampled_from(list(SCHEDULES)),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from(BANDS),
    st.lists(st.integers(0, 20), min_size=1, max_size=3).map(tuple),
    st.integers(1, 9),
)


@settings(max_examples=400, deadline=None)
@given(PLACES)
def test_every_schedule_is_proven(place):
    name, layout, band, lengths, world = place
    prove(name, layout, band, lengths, world)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("world", [16, 33, 64])
def test_larger_worlds(name, world):
    for layout, band in (("zigzag", CAUSAL), ("contiguous", window(700, 30))):
        prove(name, layout, band, (world * 256 + 3,), world)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("world", [2, 4, 7])
def test_windows_leave_steps_out(size, world):
    """A window of W keys visits 1 + ceil((W - 1) / C) blocks of C; zigzag at most 1 + 2 ceil((W - 1) / (C / 2))."""
    for width in (1, 2, size // 2 + 1, size, size + 1, size + 2, 2 * size + 1, 3 * size):
        steps = {
            layout: len(make_schedule("ring", layout, window(width - 1), (size * world,), world, 0).forward)
            for layout in ("contiguous", "zigzag")
        }
        assert steps["contiguous"] == min(world, -(-(width - 1) // size) + 1)
        assert steps["zigzag"] <= min(world, 1 + 2 * -(-(width - 1) // (size // 2)))


def test_a_step_that_nobody_needs_is_left_out_of_the_middle():
    schedule = make_schedule("ring", "zigzag", window(3), (64,), 8, 3)
    assert [step.visits[0].blocks for step in schedule.forward] == [(3,), (2,), (4,)]
    assert [t.peer for step in schedule.forward for t in step.sends] == [4, 1]


def test_a_world_of_one_sends_nothing():
    for name in SCHEDULES:
        schedule = make_schedule(name, "zigzag", CAUSAL, (8,), 1, 0)
        assert len(schedule.forward) == len(schedule.backward) == 1
        assert not any(
            (step.sends, step.recvs, step.grad_sends, step.grad_recvs) != ((),) * 4 for step in schedule.backward
        )


def test_slots_do_not_grow_with_the_world():
    small, large = (make_schedule("ring", "zigzag", CAUSAL, (64,), world, 0) for world in (3, 32))
    assert (small.slots, small.grad_slots) == (large.slots, large.grad_slots) == (2, 3)


@settings(max_examples=200, deadline=None)
@given(PLACES)
def test_direct_moves_what_is_needed_and_nothing_else(place):
    """The rows that a rank receives are those that its tiles read, of every block but its own."""
    place = place[1:]
    for rank in range(place[-1]):
        schedule, plan = make_schedule("direct", *place, rank), make_plan(*place, rank)
        moved = {t.block: t.rows for step in schedule.forward for t in step.recvs}
        needed = {block: key_rows(tiles) for block, tiles in enumerate(plan) if tiles and block != rank}
        assert {block: rows for block, rows in moved.items() if rows} == needed


def test_schedules_are_hashable_and_cached():
    first, again = (make_schedule("ring", "zigzag", CAUSAL, (64,), 4, 1) for _ in range(2))
    assert first is again and hash(first) == hash(again)


def test_unknown_schedule_is_named():
    with pytest.raises(ValueError, match="'tree'.*ring, ring_by_2, ring_by_4, all_gather, direct"):
        make_schedule("tree", "zigzag", CAUSAL, (64,), 4, 1)


WORLD = 4
PLACE = ("zigzag", CAUSAL, (64,), WORLD)


def spoil(direction: str, number: int, **changes) -> dict[int, Schedule]:
    """Schedules of which rank 1's step `number` is changed: each change maps a step's field to a function of it."""
    schedules = {rank: make_schedule("ring", *PLACE, rank) for rank in range(WORLD)}
    steps = list(getattr(schedules[1], direction))
    steps[number] = replace(
        steps[number], **{name: change(getattr(steps[number], name)) for name, change in changes.items()}
    )
    schedules[1] = replace(schedules[1], **{direction: tuple(steps)})
    return schedules


def narrower(visits):
    tile = visits[0].tiles[0]
    return (replace(visits[0], tiles=(replace(tile, q_end=tile.q_end - 1),)),)


def without_band(visits):
    return (replace(visits[0], tiles=(replace(visits[0].tiles[0], band=None),)),)


def twice(visits):
    return (replace(visits[0], tiles=visits[0].tiles * 2),)


SPOILED = {
    "a pair is missing": (("forward", 0, {"visits": narrower}), "pairs of"),
    "a pair is not allowed": (("forward", 0, {"visits": without_band}), "does not say what the mask says"),
    "a pair is computed twice": (("forward", 1, {"visits": twice}), "again in"),
    "a block is visited twice": (("forward", 1, {"visits": lambda v: v * 2}), "more than once"),
    "a block is not visited": (("backward", 1, {"visits": lambda v: ()}), "pairs of"),
    "a send has no receive": (("forward", 0, {"sends": lambda t: t * 2}), "different shape"),
    "the wrong peer": (("forward", 0, {"sends": lambda t: (replace(t[0], peer=3),)}), "expects"),
    "the wrong block": (("forward", 0, {"recvs": lambda t: (replace(t[0], block=3),)}), "should hold|expects"),
    "fewer rows": (("forward", 0, {"sends": lambda t: (replace(t[0], rows=((0, 8),)),)}), "expects"),
    "itself": (("forward", 0, {"sends": lambda t: (replace(t[0], peer=1),)}), "to itself"),
    "a slot is overwritten while it is sent": (("forward", 0, {"recvs": lambda t: (replace(t[0], slot=0),)}), "in use"),
    "a slot is overwritten while it is read": (("forward", 1, {"recvs": lambda t: (replace(t[0], slot=1),)}), "in use"),
    "a slot that is not there": (("forward", 0, {"recvs": lambda t: (replace(t[0], slot=2),)}), "does not fit"),
    "a slot holds something else": (("forward", 1, {"visits": lambda v: (replace(v[0], slot=0),)}), "should hold"),
    "a gradient is not added": (
        ("backward", 1, {"grad_recvs": lambda t: (replace(t[0], into=None),)}),
        "not in its slot|parts of",
    ),
    "a gradient lands on another": (("backward", 1, {"grad_recvs": lambda t: (replace(t[0], slot=0),)}), "being sent"),
    "a gradient is computed over one that is sent": (
        ("backward", 1, {"visits": lambda v: (replace(v[0], grad_slot=0),)}),
        "while it is sent",
    ),
}


@pytest.mark.parametrize(("fault", "words"), SPOILED.values(), ids=SPOILED)
def test_a_spoiled_schedule_is_caught(fault, words):
    direction, number, changes = fault
    check({rank: make_schedule("ring", *PLACE, rank) for rank in range(WORLD)}, *PLACE)
    with pytest.raises(ScheduleError, match=words):
        check(spoil(direction, number, **changes), *PLACE)


def test_ranks_that_wait_for_each_other_are_caught():
    """Rank 0 sends in its first step what rank 1 takes in its second, and the other way round."""

    def schedule(rank: int) -> Schedule:
        send, recv = Transfer(rank, 1 - rank, 0), Transfer(1 - rank, 1 - rank, 1)
        own = Visit((rank,), 0, 0, make_plan("contiguous", FULL, (8,), 2, rank)[rank])
        other = Visit((1 - rank,), 1, 1, make_plan("contiguous", FULL, (8,), 2, rank)[1 - rank])
        steps = (Step(sends=(send,), visits=(own,)), Step(recvs=(recv,)), Step(visits=(other,)))
        return Schedule(steps, steps, slots=2, grad_slots=2, home=0)

    with pytest.raises(ScheduleError, match="waits for ever at step 0"):
        check({0: schedule(0), 1: schedule(1)}, "contiguous", FULL, (8,), 2)


def test_a_gradient_that_stays_away_is_caught():
    schedules = {rank: make_schedule("ring", *PLACE, rank) for rank in range(WORLD)}
    schedules[2] = replace(schedules[2], home=(schedules[2].home + 1) % 3)
    with pytest.raises(ScheduleError, match="gradient of block 2 comes home"):
        check(schedules, *PLACE)


def test_tokens_over_each_link():
    """A ring passes world - 1 blocks on to its neighbour, and as many gradients and one of them home."""
    proof = prove("ring", "contiguous", FULL, (64,), 4)
    assert set(proof.moved) == {(rank, (rank + 1) % 4) for rank in range(4)} and set(proof.moved.values()) == {
        2 * 3 * 16
    }
    assert sum(proof.grads_moved.values()) == 4 * 4 * 16
    assert proof.pairs == [64 * 16] * 4 and proof.balance == 1.0


def test_a_sample_of_thousands():
    proof = prove("ring", "zigzag", CAUSAL, (1024 * 8,), 1024, ranks=[0, 1, 511, 512])
    assert proof.ranks == 4 and proof.steps == (1024, 1025)
