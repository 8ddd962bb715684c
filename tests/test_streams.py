"""Buffers are read after their wait and reused after it, never before: late and poisoned transfers change no bit."""

import pytest
import torch

from ringattn import testing
from ringattn.schedule import SCHEDULES
from ringattn.testing import make_inputs, simulate
from ringattn.transport import Simulated

TENSORS = ("out", "lse", "dq", "dk", "dv")


class Late(Simulated):
    """A simulated world in which data move as late as they may: when the sender or the receiver waits for them.

    What is received into holds NaN until then, and what was sent is read as it is by then.
    """

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self._ranks = [LateRank(rank, self._mail) for rank in range(world)]


class LateRank:
    def __init__(self, rank: int, mail) -> None:
        self.number, self.mail, self.sent_bytes = rank, mail, 0

    def post(self, sends, recvs, step=0):
        letters = [[message.tensor, None] for message in sends]
        for letter, message in zip(letters, sends, strict=True):
            self.mail.setdefault((self.number, message.peer), []).append(letter)
        for message in recvs:
            message.tensor.fill_(torch.nan)
        return letters, recvs

    def wait(self, pending) -> None:
        letters, recvs = pending
        for letter in letters:
            if letter[1] is None:
                letter[1] = letter[0].clone()
        for message in recvs:
            live, kept = letter = self.mail[message.peer, self.number].pop(0)
            if kept is None:
                letter[1] = live.clone()
            message.tensor.copy_(letter[1])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_late_and_poisoned_transfers(schedule, world, mask, wire_dtype, monkeypatch):
    inputs = make_inputs(1, 4, 2, 27, 8)
    options = {"world": world, "mask": mask, "schedule": schedule, "backend": "reference", "wire_dtype": wire_dtype}
    for layout in ("contiguous", "zigzag"):
        expected = simulate(*inputs, layout=layout, **options)
        with monkeypatch.context() as patch:
            patch.setattr(testing, "Simulated", Late)
            late = simulate(*inputs, layout=layout, **options)
        for name in TENSORS:
            assert torch.equal(getattr(late, name), getattr(expected, name)), (layout, name)
