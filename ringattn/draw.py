"""Draw one token a row from slices of a vocabulary: local words, one collective, a decision that every rank repeats.

The slices may all lie in this process (a simulated world, for tests) or one on each rank of a group; nothing here
depends on which. On CUDA the local parts come from `ringattn.vocab_triton`, with the same bits.
"""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import noise, vocab
from ringattn.comm import P2P, Comm, gather_into
from ringattn.filters import Merged, merge, select
from ringattn.keys import Status, decode, ids_of, is_token
from ringattn.vocab import UNIT, Request, Rows, Slice

COLLECTIVES = ("all_reduce", "all_gather")
"""How the keys of plain sampling meet: a maximum of 8 bytes a row, or a gather of them."""


class Logprobs(NamedTuple):
    """Log-probabilities under softmax(edited logits / temperature) of the whole vocabulary, before filters.

    Attributes:
        token: of the drawn token, float32 (B,); NaN for rows without one.
        rank: its place in the order (logit descending, id ascending), from 1; 0 for rows without one. int64 (B,).
        top: the largest, descending, float32 (B, n); -inf where the vocabulary has fewer tokens.
        top_ids: their ids, int64 (B, n); -1 where there is none.
    """

    token: Tensor
    rank: Tensor
    top: Tensor
    top_ids: Tensor


class Sample(NamedTuple):
    """One token a row, equal on all ranks.

    Attributes:
        ids: global token ids, int64 (B,); -1 where the status is not OK.
        status: int64 (B,), values of `ringattn.keys.Status`.
        logprobs: None unless asked for.
    """

    ids: Tensor
    status: Tensor
    logprobs: Logprobs | None = None


class Ranks:
    """Collectives over the slices of a group, or of this process alone; counts messages and the bytes a rank puts in.

    Attributes:
        comm: the group; None when every slice is in this process.
        messages, sent_bytes: what was sent so far.
    """

    def __init__(self, comm: Comm | None) -> None:
        self.comm, self.messages, self.sent_bytes = comm, 0, 0

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """Stacked in the order of ids, (slices, ...)."""
        self._count(parts)
        if self.comm is None:
            return torch.stack(list(parts))
        (part,) = parts
        group, device = self._wire(part)
        part = part.to(device).contiguous()
        output = part.new_empty(self.comm.world, *part.shape)
        gather_into(output.flatten(), part.flatten(), group)
        return output.to(parts[0].device)

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Elementwise sum."""
        self._count(parts)
        return torch.stack(list(parts)).sum(dim=0) if self.comm is None else self._reduce(parts, dist.ReduceOp.SUM)

    def max(self, parts: Sequence[Tensor]) -> Tensor:
        """Elementwise maximum."""
        self._count(parts)
        return torch.stack(list(parts)).amax(dim=0) if self.comm is None else self._reduce(parts, dist.ReduceOp.MAX)

    def before(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """For each of this process's slices, the sum of the parts of all slices with lower ids."""
        gathered = self.gather(parts)
        exclusive = gathered.cumsum(dim=0) - gathered
        return list(exclusive) if self.comm is None else [exclusive[self.comm.rank]]

    def _count(self, parts: Sequence[Tensor]) -> None:
        if self.comm is not None or len(parts) > 1:
            self.messages += 1
            self.sent_bytes += parts[0].numel() * parts[0].element_size()

    def _reduce(self, parts: Sequence[Tensor], operation: dist.ReduceOp.RedOpType) -> Tensor:
        (part,) = parts
        group, device = self._wire(part)
        output = part.to(device, copy=True).contiguous()
        dist.all_reduce(output, operation, group=group)
        return output.to(part.device)

    def _wire(self, part: Tensor) -> tuple[dist.ProcessGroup, torch.device]:
        """The private group that carries such a tensor, and the device on which it must lie for that."""
        assert self.comm is not None
        transport = self.comm.transport(None, part.device)
        if isinstance(transport, P2P):
            return transport.group, part.device
        return self.comm.control, torch.device("cpu")


def draw(parts: Sequence[Slice], rows: Rows, request: Request, ranks: Ranks, collective: str = "all_reduce") -> Sample:
    """One token a row.

    Args:
        parts: the slices that this process holds, in the order of ids.
        rows: parameters, equal on all ranks.
        request: what is wanted, equal on all ranks.
        ranks: the collectives.
        collective: one of `COLLECTIVES`; both give the same tokens.
    """
    local = _local(parts[0].logits.device)
    if not request.candidates:
        if len(parts) == 1 and ranks.comm is None:
            return Sample(*local.tokens(parts[0], rows))
        keys = [local.winner(part, rows) for part in parts]
        best = ranks.max(keys) if collective == "all_reduce" else ranks.gather(keys).amax(dim=0)
        return Sample(*local.decode(best))
    sure = request.certain and not request.header
    if sure and len(parts) == 1 and ranks.comm is None:
        return Sample(*local.filtered_tokens(parts[0], rows, request.candidates))
    words = ranks.gather([local.words(part, rows, request) for part in parts])
    if sure:
        return Sample(*local.decide(words, rows))
    merged = merge(words, rows, request)
    if not request.certain:
        merged = _finish(parts, rows, merged, request, ranks)
    ids, status = decode(merged.keys)
    return Sample(ids, status, _logprobs(parts, rows, merged, status, request, ranks) if request.logprobs else None)


class Local:
    """The parts of a draw that need no other rank, in plain torch: the definition."""

    decode = staticmethod(decode)
    winner = staticmethod(vocab.winner)
    words = staticmethod(vocab.words)

    @staticmethod
    def tokens(part: Slice, rows: Rows) -> tuple[Tensor, Tensor]:
        """Ids and statuses where one slice holds the whole vocabulary."""
        return decode(vocab.winner(part, rows))

    @staticmethod
    def filtered_tokens(part: Slice, rows: Rows, candidates: int) -> tuple[Tensor, Tensor]:
        """The same where top-k is within `candidates` in every row."""
        return Local.decide(vocab.words(part, rows, Request(candidates, header=False))[None], rows)

    @staticmethod
    def decide(words: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Ids and statuses where the candidates are sure to decide."""
        return decode(merge(words, rows, Request(words.shape[2], header=False)).keys)


def _local(device: torch.device) -> Any:
    """Who computes the local parts for tensors of this device; the bits do not depend on it."""
    if device.type != "cuda" or find_spec("triton") is None:
        return Local
    from ringattn import vocab_triton

    return vocab_triton


def _finish(parts: Sequence[Slice], rows: Rows, merged: Merged, request: Request, ranks: Ranks) -> Merged:
    """Take the rows that the candidates did not decide through the radix select.

    Every rank has the same certificates, so all of them come here together. While a CUDA graph is captured the host
    cannot look at them: all rows go.
    """
    if merged.certified.is_cuda and torch.cuda.is_current_stream_capturing():
        selected = select(parts, rows, merged, request, ranks)
        return merged.where(merged.certified, selected)
    left = (~merged.certified).nonzero()[:, 0]
    if not len(left):
        return merged
    selected = select([part[left] for part in parts], rows[left], merged[left], request, ranks)
    return merged.put(left, selected)


def _logprobs(
    parts: Sequence[Slice], rows: Rows, merged: Merged, status: Tensor, request: Request, ranks: Ranks
) -> Logprobs:
    fine = status == Status.OK
    before = [_before(part, rows, merged.logits) for part in parts]
    top = merged.candidates[:, : request.logprobs]
    listed = is_token(top)
    everything = noise.log2_int(merged.total.clamp(min=1)) + (8 * merged.top_bin - UNIT - 24).to(torch.float64)

    def logprob(keys: Tensor) -> Tensor:
        power = vocab.mass_parts(keys, rows.temperature)[2]
        return ((power - everything[:, None]) * math.log(2.0)).to(torch.float32)

    return Logprobs(
        torch.where(fine, logprob(merged.logits[:, None])[:, 0], torch.nan),
        torch.where(fine, 1 + ranks.sum(before), 0),
        torch.where(listed, logprob(top), -torch.inf),
        torch.where(listed, ids_of(top), -1),
    )


def _before(part: Slice, rows: Rows, logit: Tensor) -> Tensor:
    keys = vocab.logit_keys(part, rows)
    return (is_token(keys) & (keys > logit[:, None])).sum(dim=1)
