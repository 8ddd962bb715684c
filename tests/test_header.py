"""Every send that does not fit what its receiver expects is an error that names the sender, the ring and the step."""

from collections.abc import Callable

import pytest
import torch

from ringattn import ring
from ringattn.backends import Problem, reference
from ringattn.comm import Buffers
from ringattn.header import Call, Checked, RingError, digest_of, words_sum
from ringattn.mask import FULL
from ringattn.schedule import SCHEDULES, make_schedule
from ringattn.testing import make_inputs
from ringattn.transport import KEYS, Message, Simulated

WORLD, TOKENS = 4, 4


class Faulty:
    """A transport that changes what one rank does in one step, above (`sends`) or below (`wire`) the header."""

    def __init__(self, wire, step: int, change: Callable | None):
        self.wire, self.step, self.change = wire, step, change

    def post(self, sends, recvs, step=0):
        if self.change is not None and step == self.step and sends:
            sends = self.change(list(sends))
        return self.wire.post(sends, recvs, step)

    def wait(self, pending):
        self.wire.wait(pending)


def altered(**changes) -> Callable:
    return lambda sends: [sends[0]._replace(**{k: f(sends[0]) for k, f in changes.items()}), *sends[1:]]


def flipped(message: Message) -> torch.Tensor:
    tensor = message.tensor.clone()
    tensor.view(torch.int32)[tensor.numel() // 2] ^= 1 << 3
    return tensor


# What rank `culprit` sends instead of what it should, and the words of the error.
SENDS = {
    "short": (altered(tensor=lambda m: m.tensor[:-8]), "sends numbers [0-9]+, this rank expects [0-9]+"),
    "long": (
        altered(tensor=lambda m: torch.cat([m.tensor, m.tensor[:8]])),
        "sends numbers [0-9]+, this rank expects [0-9]+",
    ),
    "wrong dtype of equal bytes": (
        altered(tensor=lambda m: m.tensor.view(torch.bfloat16)),
        "sends dtype torch.bfloat16, this rank expects torch.float32",
    ),
    "wrong block": (altered(block=lambda m: m.block + 1), "sends block of rank"),
    "extra": (lambda sends: [*sends, sends[0]], "sends number of messages 2, this rank expects 1|messages 3"),
    "nothing": (lambda sends: [], "sent nothing|rank {culprit} is at ring step"),
}


def drive(culprit: int, step: int, *, direction="forward", schedule="ring", above=None, below=None, level="header"):
    """Run one direction on simulated ranks, one of which is faulty."""
    network, buffers = Simulated(WORLD), Buffers()
    rings = []
    for rank in range(WORLD):
        steps = make_schedule(schedule, "contiguous", FULL, (WORLD * TOKENS,), WORLD, rank)
        wire = network.rank(rank)
        call = Call(rank, 1, direction, digest=7, steps=len(getattr(steps, direction)))
        transport = Faulty(
            Checked(
                Faulty(wire, step, below if rank == culprit else None),
                wire.tagged(1),
                call,
                level=level,
            ),
            step,
            above if rank == culprit else None,
        )
        job = ring.Job(rank, (TOKENS,) * WORLD, steps, Problem(1.0), reference, transport, buffers.lease)
        q, k, v, do = make_inputs(1, 2, 2, TOKENS, 4, seed=rank)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
        if direction == "forward":
            rings.append(ring.forward(job, q, k, v, out, lse))
        else:
            grads = [torch.empty_like(x) for x in (q, k, v)]
            rings.append(ring.backward(job, do, q, k, v, out.zero_(), lse.zero_(), lse, *grads))
    network.run(rings)


@pytest.mark.parametrize("fault", SENDS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_send_that_does_not_fit(fault, direction, schedule):
    """By the first, a middle and the last rank, in every step that sends."""
    change, words = SENDS[fault]
    steps = make_schedule(schedule, "contiguous", FULL, (WORLD * TOKENS,), WORLD, 0)
    run = getattr(steps, direction)
    sending = [n for n, s in enumerate(run) if s.sends or (direction == "backward" and s.grad_sends)]
    assert sending
    for culprit in (0, 1, WORLD - 1):
        for step in sending:
            with pytest.raises(RuntimeError, match=words.format(culprit=culprit)) as caught:
                drive(culprit, step, direction=direction, schedule=schedule, above=change)
            assert f"rank {culprit} " in str(caught.value), caught.value
            if fault != "nothing":
                assert caught.value.culprit == culprit
                assert f"ring 1 ({direction}) at ring step {step} of" in str(caught.value)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_bit_that_flips_on_the_way_fails_the_checksum_alone(direction):
    flip = altered(tensor=flipped)
    for culprit in range(WORLD):
        for step in range(WORLD - 1):
            drive(culprit, step, direction=direction, below=flip)
            with pytest.raises(RingError, match=f"changed on the way from rank {culprit}: checksum") as caught:
                drive(culprit, step, direction=direction, below=flip, level="checksum")
            assert caught.value.culprit == culprit


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_that_are_not_finite_are_found_and_named(direction, value):
    def spoil(sends: list[Message]) -> list[Message]:
        tensor = sends[0].tensor.clone()
        tensor[5] = float(value)
        return [sends[0]._replace(tensor=tensor), *sends[1:]]

    for culprit in range(WORLD):
        words = f"the keys and values of rank {culprit} from rank {culprit} hold {value} as number 5 of 64"
        with pytest.raises(RingError, match=words) as caught:
            drive(culprit, 0, direction=direction, above=spoil, level="finite")
        assert caught.value.culprit == culprit
        drive(culprit, 0, direction=direction, above=spoil)


def test_ranks_at_different_places():
    """A rank that is in another ring, at another step, or runs another schedule is told apart from one that is not."""
    expected = Message(torch.zeros(4), 1, 0, KEYS)

    def meet(call: Call, step: int, taken: int | None = None) -> None:
        network = Simulated(2)
        sender = Checked(network.rank(1), network.rank(1).tagged(1), call)
        receiver = Checked(network.rank(0), network.rank(0).tagged(1), Call(0, 5, "forward", 9, 4))
        if taken is not None:
            sender.post([Message(torch.ones(4), 0, 0, KEYS)], [], taken)
            receiver.wait(receiver.post([], [expected], taken))
        sender.post([Message(torch.ones(4), 0, 0, KEYS)], [], step)
        receiver.wait(receiver.post([], [expected], 2))

    meet(Call(1, 5, "forward", 9, 4), 2)
    assert expected.tensor.tolist() == [1.0] * 4
    for call, step, taken, words, guilty in (
        (Call(1, 5, "forward", 9, 4), 3, None, "rank 1 is at ring step 3, rank 0 at 2: rank 1 skipped", 1),
        (Call(1, 5, "forward", 9, 4), 1, 0, "rank 1 is at ring step 1, rank 0 at 2: rank 0 skipped", 0),
        (Call(1, 5, "forward", 9, 4), 1, 1, "rank 1 is at ring step 1, rank 0 at 2: rank 1 skipped or repeated", 1),
        (Call(1, 6, "forward", 9, 4), 2, None, r"rank 1 is in ring 6 \(forward\) at step 2, rank 0 in ring 5", 1),
        (Call(1, 4, "backward", 9, 4), 2, None, r"rank 1 is in ring 4 \(backward\) at step 2, rank 0 in ring 5", 0),
        (Call(1, 5, "backward", 9, 4), 2, None, r"ring 5 \(backward\)", 1),
        (Call(1, 5, "forward", 8, 4), 2, None, "rank 1 sends schedule 0x8, this rank expects 0x9", 1),
        (Call(0, 5, "forward", 9, 4), 2, None, "not a header of it", 1),
    ):
        with pytest.raises(RingError, match=words) as caught:
            meet(call, step, taken)
        assert caught.value.culprit == guilty


@pytest.mark.parametrize("word", range(12))
def test_a_header_with_any_word_broken_is_refused(word):
    class Breaks(Faulty):
        def post(self, sends, recvs, step=0):
            for message in sends:
                message.tensor[word] ^= 1 << 20
            return self.wire.post(sends, recvs, step)

    network = Simulated(2)
    sender = Checked(
        network.rank(1), Breaks(network.rank(1).tagged(1), 0, None), Call(1, 1, "forward"), level="checksum"
    )
    receiver = Checked(network.rank(0), network.rank(0).tagged(1), Call(0, 1, "forward"), level="checksum")
    sender.post([Message(torch.ones(4), 0)], [])
    with pytest.raises(RingError, match="rank 1"):
        receiver.wait(receiver.post([], [Message(torch.zeros(4), 1)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_bit_counts_in_the_sum(dtype):
    tensor = torch.randn(5, dtype=torch.float64).to(dtype)
    total, raw = words_sum(tensor), tensor.view(torch.uint8)
    for bit in range(8 * raw.numel()):
        raw[bit // 8] ^= 1 << bit % 8
        assert words_sum(tensor) != total
        raw[bit // 8] ^= 1 << bit % 8
    assert words_sum(tensor) == total


def test_digests_do_not_depend_on_the_process():
    assert digest_of("ring", (1, 2), 0.5) == 0x54F4C3C44540CDD0
