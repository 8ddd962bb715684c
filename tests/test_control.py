"""What ranks tell one another when a ring stops, and who is to blame."""

import threading
import time

import pytest
import torch.distributed as dist

from ringattn.control import Control, Helper, StoreLost
from ringattn.header import Call, RingError
from ringattn.transport import PeerLost


def group(world: int = 3, limit: float = 5.0) -> list[Control]:
    store = dist.HashStore()
    return [Control(store, "g", rank, world, limit) for rank in range(world)]


def ring(rank: int, number: int) -> Call:
    return Call(rank, number, "forward", 7, 4)


def test_the_first_cause_is_told_once_and_read_by_all():
    first, second, third = group()
    first.mark(ring(0, 2), 1, "computing")
    error = ValueError("a user's bug")
    assert first.failed(error) is error
    with pytest.raises(
        RingError, match="rank 0 failed first, in ring 2 .*step 1 of 4.*ValueError: a user's bug"
    ) as told:
        second.lap(1.0)
    assert told.value.culprit == 0
    late = third.failed(RingError("rank 1 sends numbers 3, this rank expects 4", 1))
    assert late.culprit == 0 and "a user's bug" in str(late)
    for control in (first, second, third):
        with pytest.raises(RingError, match="failed before and cannot be used again"):
            control.check()


def test_a_rank_without_a_sign_is_blamed_and_otherwise_the_one_that_is_behind():
    first, second, third = group()
    first.mark(ring(0, 5), 2, "waiting")
    second.mark(ring(1, 5), 2, "waiting")
    second.lap(2.0)
    with pytest.raises(RingError, match="no sign of rank 2 .host .*process") as caught:
        first.lap(6.0)
    assert caught.value.culprit == 2

    first, second, third = group()
    for control, step in ((first, 2), (second, 1), (third, 2)):
        control.mark(ring(control.rank, 5), step, "waiting")
        control.lap(2.0)
    with pytest.raises(RingError, match=r"furthest behind is rank 1.*ring step 1 of 4") as caught:
        third.lap(6.0)
    assert caught.value.culprit == 1

    first, second, third = group()
    first.mark(ring(0, 5), 3, "waiting", (1,))
    second.mark(ring(1, 5), 4, "waiting")
    second.enter("agreement")
    third.mark(ring(2, 5), 3, "waiting", (0,))
    for control in (first, second, third):
        control.lap(2.0)
    with pytest.raises(
        RingError, match="rank 1 .*went on, in the agreement before ring 6, without.*rank 0 needs"
    ) as caught:
        third.lap(6.0)
    assert caught.value.culprit == 1

    everyone = group()
    for control in everyone:
        control.mark(ring(control.rank, 5), 1, "waiting")
        control.lap(2.0)
    with pytest.raises(RingError, match="network") as caught:
        everyone[0].lap(6.0)
    assert caught.value.culprit is None


def test_a_lost_connection_is_blamed_on_its_other_end_unless_a_cause_is_told():
    first, second, _ = group()
    found = first.failed(PeerLost(2, RuntimeError("Connection closed by peer")))
    assert isinstance(found, RingError) and found.culprit == 2
    assert second.failed(PeerLost(0, RuntimeError("Connection closed by peer"))).culprit == 2


def test_without_a_store_the_ring_goes_on(monkeypatch):
    control = group()[0]
    monkeypatch.setattr(control, "_ask", lambda call: (_ for _ in ()).throw(StoreLost("gone")))
    control.mark(ring(0, 1), 0, "waiting", (2,))
    control.lap(2.0)
    with pytest.raises(RingError, match="something from rank 2") as caught:
        control.lap(6.0)
    assert caught.value.culprit == 2


def test_a_group_that_is_made_again_does_not_fail_of_the_past():
    store = dist.HashStore()
    old = Control(store, "g", 0, 1, 5.0)
    old.failed(ValueError("past"))
    Control(store, "g", 0, 1, 5.0).lap(1.0)


def test_helpers_end_with_their_owner():
    before = threading.active_count()
    helpers = [Helper() for _ in range(5)]
    assert [helper.submit(lambda: 7).result() for helper in helpers] == [7] * 5
    with pytest.raises(KeyError):
        helpers[0].submit(lambda: {}[0]).result()
    del helpers
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before  # helpers of earlier tests may end here too
