"""Schedules are symmetric, match send by send, keep slots intact, and visit every block that is needed once."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.layout import LAYOUTS
from ringattn.mask import CAUSAL, FULL, Band, prefix_lm, window
from ringattn.plan import key_rows, make_plan
from ringattn.schedule import SCHEDULES, Schedule, Step, make_schedule

BANDS = [FULL, CAUSAL, window(0), window(3), window(9, 2), Band(5, 20), Band(-20, -5), prefix_lm(11), Band(0, 4, 9)]
PLACES = st.tuples(
    st.sampled_from(list(SCHEDULES)),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from(BANDS),
    st.lists(st.integers(0, 20), min_size=1, max_size=3).map(tuple),
    st.integers(1, 9),
)


def schedules(place) -> list[Schedule]:
    return [make_schedule(*place, rank) for rank in range(place[-1])]


def kinds(step: Step) -> tuple[int, ...]:
    return len(step.sends), len(step.recvs), len(step.grad_sends), len(step.grad_recvs)


@settings(max_examples=300, deadline=None)
@given(PLACES)
def test_all_ranks_take_the_same_steps(place):
    ranks = schedules(place)
    for direction in ("forward", "backward"):
        shapes = {tuple(kinds(step) for step in getattr(schedule, direction)) for schedule in ranks}
        assert len(shapes) == 1
    assert len({(s.slots, s.grad_slots) for s in ranks}) == 1


@settings(max_examples=300, deadline=None)
@given(PLACES)
def test_each_send_meets_its_receive_in_the_same_step(place):
    ranks = schedules(place)
    for direction in ("forward", "backward"):
        for steps in zip(*(getattr(schedule, direction) for schedule in ranks), strict=True):
            for sends, recvs in (("sends", "recvs"), ("grad_sends", "grad_recvs")):
                sent, received = [], []
                for rank, step in enumerate(steps):
                    assert all(t.peer != rank for t in getattr(step, sends) + getattr(step, recvs))
                    sent += [(rank, t.peer, t.block, t.rows) for t in getattr(step, sends)]
                    received += [(t.peer, rank, t.block, t.rows) for t in getattr(step, recvs)]
                assert Counter(sent) == Counter(received)


@settings(max_examples=300, deadline=None)
@given(PLACES)
def test_slots_hold_what_is_read_and_are_not_overwritten_while_in_use(place):
    for rank, schedule in enumerate(schedules(place)):
        for steps in (schedule.forward, schedule.backward):
            held: dict[int, tuple] = {}
            for step in steps:
                held.update({t.slot: (rank, t.rows) for t in step.sends if t.block == rank})  # packed when sent
                read = [*step.sends, *(visit for visit in step.visits if visit.block != rank)]
                assert all(held[part.slot] == (part.block, part.rows) for part in read)
                slots, landing = {part.slot for part in read}, [t.slot for t in step.recvs]
                assert len(set(landing)) == len(landing) and not slots & set(landing)
                assert all(slot < schedule.slots for slot in (*slots, *landing))
                held.update({t.slot: (t.block, t.rows) for t in step.recvs})


@settings(max_examples=300, deadline=None)
@given(PLACES)
def test_gradients_are_summed_over_all_visits_and_come_home(place):
    """Follow each slot as the set of (visiting rank, block) whose parts it holds."""
    world = place[-1]
    ranks = schedules(place)
    held: list[dict[int, tuple[int, Counter]]] = [{} for _ in range(world)]
    for steps in zip(*(schedule.backward for schedule in ranks), strict=True):
        sent = {}
        for rank, step in enumerate(steps):
            busy = {t.slot for t in step.grad_sends} | {t.slot for t in step.grad_recvs}
            for t in step.grad_sends:
                assert held[rank][t.slot][0] == t.block
                sent[rank, t.peer, t.block] = held[rank][t.slot][1]
            for visit in step.visits:
                assert visit.grad_slot not in busy and visit.grad_slot < ranks[rank].grad_slots
                held[rank][visit.grad_slot] = (visit.block, Counter([rank]))
            sending = {t.slot for t in step.grad_sends}
            assert not sending & {t.slot for t in step.grad_recvs}
        for rank, step in enumerate(steps):
            for t in step.grad_recvs:
                arrived = sent[t.peer, rank, t.block]
                if t.into is None:
                    held[rank][t.slot] = (t.block, arrived)
                else:
                    assert held[rank][t.into][0] == t.block
                    held[rank][t.into] = (t.block, held[rank][t.into][1] + arrived)
    for owner, schedule in enumerate(ranks):
        block, parts = held[owner][schedule.home]
        needed = {rank for rank in range(world) if make_plan(*place[1:], rank)[owner]}
        assert block == owner and max(parts.values()) == 1 and needed <= set(parts)


@settings(max_examples=300, deadline=None)
@given(PLACES)
def test_needed_blocks_are_visited_once(place):
    for rank, schedule in enumerate(schedules(place)):
        plan = make_plan(*place[1:], rank)
        for steps in (schedule.forward, schedule.backward):
            visited = Counter(visit.block for step in steps for visit in step.visits)
            assert max(visited.values()) == 1
            assert {block for block, tiles in enumerate(plan) if tiles} <= set(visited)
            assert steps[0].visits[0].block == rank


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
    assert [step.visits[0].block if step.visits else None for step in schedule.forward] == [3, 2, 4]
    assert [t.peer for step in schedule.forward for t in step.sends] == [4, 1]


def test_a_world_of_one_sends_nothing():
    for name in SCHEDULES:
        schedule = make_schedule(name, "zigzag", CAUSAL, (8,), 1, 0)
        assert all(kinds(step) == (0, 0, 0, 0) for step in schedule.forward + schedule.backward)


def test_slots_do_not_grow_with_the_world():
    small, large = (make_schedule("ring", "zigzag", CAUSAL, (64,), world, 0) for world in (3, 32))
    assert (small.slots, small.grad_slots) == (large.slots, large.grad_slots) == (2, 3)


@settings(max_examples=200, deadline=None)
@given(PLACES)
def test_direct_moves_what_is_needed_and_nothing_else(place):
    """The rows that a rank receives are those that its tiles read, of every block but its own."""
    place = ("direct", *place[1:])
    for rank, schedule in enumerate(schedules(place)):
        moved = {t.block: t.rows for step in schedule.forward for t in step.recvs}
        plan = make_plan(*place[1:], rank)
        assert {block: rows for block, rows in moved.items() if rows} == {
            block: key_rows(tiles) for block, tiles in enumerate(plan) if tiles and block != rank
        }


def test_schedules_are_hashable_and_cached():
    first, again = (make_schedule("ring", "zigzag", CAUSAL, (64,), 4, 1) for _ in range(2))
    assert first is again and hash(first) == hash(again)


def test_unknown_schedule_is_named():
    with pytest.raises(ValueError, match="'tree'.*ring, all_gather, direct"):
        make_schedule("tree", "zigzag", CAUSAL, (64,), 4, 1)
