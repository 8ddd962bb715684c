"""Top-k, top-p and min-p as a cut of each row's tokens in the order (logit descending, id ascending), exact on shards.

Every filter keeps a prefix of that order. Where the candidates that ranks sent hold the end of the prefix, one message
decides the row (`merge`, with a certificate); the others take a radix select of fixed passes (`select`). Masses are
integers, so a cut does not depend on how the vocabulary is split.

chained: min-p, then top-k of what is left, then the smallest prefix with the share top-p of what is left then.
joint: each filter on the full distribution, and the shortest prefix of the three.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from ringattn import noise
from ringattn.keys import ID_BITS, POISON_NAN, POISON_PARAMETER, ids_of, is_token, pack, values_of
from ringattn.vocab import BINS, HEADER, UNIT, Request, Rows, Slice, edited, mass_parts, scores

ENDLESS = 1 << 62
"""Length of a prefix whose end is not among the candidates."""


class Exchange(Protocol):
    """Collectives over slices: each takes what every slice held by this process contributes."""

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """Stacked in the order of ids, (slices, ...)."""

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Elementwise sum."""

    def max(self, parts: Sequence[Tensor]) -> Tensor:
        """Elementwise maximum."""

    def before(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """For each of this process's slices, the sum of the parts of all slices with lower ids."""


@dataclass(frozen=True)
class Merged:
    """What the words of all ranks say.

    Attributes:
        keys: score key of each row's winner (B,); not valid where `certified` is False.
        logits: key of the winner's logit (B,).
        certified: bool (B,).
        candidates: merged keys of the largest logits, descending (B, n).
        top_bin, total: reference of the masses and their sum over the vocabulary (B,).
        floor: smallest logit that min-p keeps (B,), float32.
    """

    keys: Tensor
    logits: Tensor
    certified: Tensor
    candidates: Tensor
    top_bin: Tensor
    total: Tensor
    floor: Tensor

    def __getitem__(self, rows: Tensor) -> "Merged":
        return Merged(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def where(self, keep: Tensor, other: "Merged") -> "Merged":
        """This winner in the rows where `keep`, the other's elsewhere."""
        return replace(
            self, keys=torch.where(keep, self.keys, other.keys), logits=torch.where(keep, self.logits, other.logits)
        )

    def put(self, rows: Tensor, other: "Merged") -> "Merged":
        """The other's winners in these rows, in its order."""
        return replace(
            self, keys=self.keys.index_copy(0, rows, other.keys), logits=self.logits.index_copy(0, rows, other.logits)
        )


def merge(words: Tensor, rows: Rows, request: Request) -> Merged:
    """Decide the rows from the gathered words.

    Args:
        words: int64 (ranks, B, n).
        rows: parameters.
        request: as given to `ringattn.vocab.words`.
    """
    head = HEADER if request.header else 0
    listed = words[:, :, head:]
    candidates = listed.transpose(0, 1).flatten(1).sort(dim=1, descending=True).values
    # Whatever a rank did not list lies below its last candidate; a rank with a 0 there listed all.
    bound = listed[:, :, -1].amax(dim=0)
    known = is_token(candidates) & (candidates >= bound[:, None])
    top_bin, total = _total(words) if head else (mass_parts(candidates[:, :1], rows.temperature)[0][:, 0], None)
    logits = torch.where(known, values_of(candidates), -torch.inf)
    floor = _floor(logits[:, 0], rows)
    kept = _prefix(logits, candidates, known, bound == 0, top_bin, total, floor, rows, request)
    length = known.sum(dim=1)
    certified = kept <= length
    inside = known & (torch.arange(known.shape[1], device=known.device) < kept[:, None])
    drawn = torch.where(inside, pack(scores(logits, ids_of(candidates), rows), ids_of(candidates)), 0)
    best, index = drawn.max(dim=1)
    logit = candidates.gather(1, index[:, None])[:, 0]
    if head:
        free = (rows.top_k == 0) & (rows.top_p >= 1) & (rows.min_p == 0)
        score, owner = words[:, :, 0].max(dim=0)
        best = torch.where(free, score, best)
        logit = torch.where(free, words[:, :, 1].gather(0, owner[None])[0], logit)
        certified |= free
    best = torch.where(candidates[:, 0] == POISON_NAN, POISON_NAN, best)
    best = torch.where(rows.invalid(), POISON_PARAMETER, best)
    certified |= best >= POISON_PARAMETER
    total = torch.zeros_like(top_bin) if total is None else total
    return Merged(best, logit, certified, candidates, top_bin, total, floor)


def _prefix(
    logits: Tensor,
    candidates: Tensor,
    known: Tensor,
    complete: Tensor,
    top_bin: Tensor,
    total: Tensor | None,
    floor: Tensor,
    rows: Rows,
    request: Request,
) -> Tensor:
    """How many of the known candidates the filters keep, int64 (B,); ENDLESS where the end lies beyond them."""
    length = known.sum(dim=1)
    above = (known & (logits >= floor[:, None])).sum(dim=1)
    first = torch.where((above < length) | complete, above, ENDLESS)
    limit = torch.where(rows.top_k > 0, rows.top_k, ENDLESS)
    kept = torch.minimum(first, limit)
    kept = torch.where(complete, torch.minimum(kept, length), kept)
    sums = torch.where(known, _masses(candidates, top_bin, rows), 0).cumsum(dim=1)
    narrowed = torch.zeros_like(complete)
    if request.order == "chained":
        narrowed = (rows.top_k > 0) | (rows.min_p > 0)
    share = sums.gather(1, (kept.clamp(max=sums.shape[1]) - 1).clamp(min=0)[:, None])[:, 0]
    need = share_of(share if total is None else torch.where(narrowed, share, total), rows)
    reached = 1 + (known & (sums < need[:, None])).sum(dim=1)
    reached = torch.where((reached <= length) & ~(narrowed & (kept > length)), reached, ENDLESS)
    kept = torch.where(rows.top_p < 1, torch.minimum(kept, reached), kept)
    kept = torch.where(rows.temperature == 0, 1, kept)
    return torch.where(complete, torch.minimum(kept, length), kept)


def share_of(total: Tensor, rows: Rows) -> Tensor:
    """The integer mass that a top-p prefix must reach: at least 1, so that it holds a token."""
    return torch.ceil(total.to(torch.float64) * rows.top_p.to(torch.float64)).to(torch.int64).clamp(min=1)


def _floor(largest: Tensor, rows: Rows) -> Tensor:
    """`M + T log(min_p)`, -inf where min-p is off."""
    smallest_normal = torch.finfo(torch.float32).tiny
    floor = largest + rows.temperature * noise.log(rows.min_p.clamp(min=smallest_normal, max=1.0))
    return torch.where(rows.min_p > 0, floor, -torch.inf)


def _total(words: Tensor) -> tuple[Tensor, Tensor]:
    """Top bin over all ranks, and the sum of all masses in its unit."""
    top = words[:, :, 2]
    highest = top.amax(dim=0)
    below = (highest - top)[:, :, None] + torch.arange(BINS, device=words.device)
    sums = words.new_zeros(*highest.shape, BINS + 1)
    for rank in range(len(words)):
        sums.scatter_add_(1, below[rank].clamp(max=BINS), words[rank, :, 3:HEADER])
    total = sum(_shift(sums[:, index], UNIT - 8 * index) for index in range(BINS))
    assert isinstance(total, Tensor)
    return highest, total


def _shift(x: Tensor, left: int) -> Tensor:
    return x << left if left >= 0 else x >> -left


def _masses(keys: Tensor, top_bin: Tensor, rows: Rows) -> Tensor:
    """Masses of tokens in the unit of the top bin, int64; 0 for what is too small."""
    bins, mass, _ = mass_parts(keys, rows.temperature)
    left = UNIT - 8 * (top_bin[:, None] - bins)
    return torch.where(left >= 0, mass << left.clamp(0, UNIT), mass >> (-left).clamp(0, 63))


def select(parts: Sequence[Slice], rows: Rows, merged: Merged, request: Request, exchange: Exchange) -> Merged:
    """Decide rows by radix select on the whole vocabulary: 8 passes over 8 bits each, whatever the logits are.

    Args:
        parts: the slices that this process holds.
        rows: parameters of the rows to decide.
        merged: what `merge` said about these rows.
        request: as given to `merge`.
        exchange: the collectives: 8 sums of 2 x 256 words a row, and two gathers of 2 words a row.
    """
    columns = [_Column.of(part, rows, merged) for part in parts]
    by_count = _descend(columns, COUNT, torch.where(rows.top_k > 0, rows.top_k, ENDLESS), exchange)
    total = merged.total
    if request.order == "chained":
        narrowed = (rows.top_k > 0) | (rows.min_p > 0)
        total = torch.where(narrowed, by_count.kept_mass, total)
    by_mass = _descend(columns, MASS, torch.where(rows.top_p < 1, share_of(total, rows), POISON_NAN), exchange)
    cuts = (by_count, by_mass)
    ties = [torch.stack([column.equal(cut).sum(dim=1) for cut in cuts], dim=1) for column in columns]
    best = []
    for part, column, before in zip(parts, columns, exchange.before(ties), strict=True):
        kept = column.tokens.clone()
        for index, cut in enumerate(cuts):
            kept &= column.inside(cut, before[:, index])
        ids = torch.arange(part.start, part.start + kept.shape[1], device=kept.device)[None]
        drawn = torch.where(kept, pack(scores(column.logits, ids, rows), ids), 0)
        best.append(_best(drawn, column.keys))
    gathered = exchange.gather(best)
    score, owner = gathered[:, :, 0].max(dim=0)
    logit = gathered[:, :, 1].gather(0, owner[None])[0]
    return replace(merged, keys=score, logits=logit, certified=torch.ones_like(merged.certified))


def _best(drawn: Tensor, keys: Tensor) -> Tensor:
    if not drawn.shape[1]:
        return drawn.new_zeros(len(drawn), 2)
    score, index = drawn.max(dim=1)
    return torch.stack([score, keys.gather(1, index[:, None])[:, 0]], dim=1)


COUNT, MASS = 0, 1
BUCKETS = 256


@dataclass(frozen=True)
class _Cut:
    """A prefix: everything above `value` and the first `ties` tokens equal to it; everything if not `reached`."""

    value: Tensor
    ties: Tensor
    reached: Tensor
    kept_mass: Tensor


@dataclass(frozen=True)
class _Column:
    """One slice in the terms of the select: which tokens min-p left, the order of their logits, and their masses."""

    logits: Tensor
    keys: Tensor
    tokens: Tensor
    masses: Tensor

    @staticmethod
    def of(part: Slice, rows: Rows, merged: Merged) -> "_Column":
        logits = edited(part, rows)
        keys = pack(logits, torch.arange(part.start, part.start + logits.shape[1], device=logits.device)[None])
        tokens = is_token(keys) & (logits >= merged.floor[:, None])
        return _Column(logits, keys, tokens, torch.where(tokens, _masses(keys, merged.top_bin, rows), 0))

    def equal(self, cut: _Cut) -> Tensor:
        return self.tokens & ((self.keys >> ID_BITS) == cut.value[:, None])

    def inside(self, cut: _Cut, before: Tensor) -> Tensor:
        equal = self.equal(cut)
        first = equal & (before[:, None] + equal.cumsum(dim=1) <= cut.ties[:, None])
        return ~cut.reached[:, None] | ((self.keys >> ID_BITS) > cut.value[:, None]) | first

    def histogram(self, prefix: Tensor, shift: int) -> Tensor:
        """Counts and masses of the next 8 bits of the tokens that begin with `prefix`, int64 (B, 2, BUCKETS)."""
        order = self.keys >> ID_BITS
        here = self.tokens & ((order >> (shift + 8)) == prefix[:, None])
        bucket = (order >> shift) & (BUCKETS - 1)
        sums = self.masses.new_zeros(len(prefix), 2, BUCKETS)
        sums[:, COUNT].scatter_add_(1, bucket, here.to(torch.int64))
        sums[:, MASS].scatter_add_(1, bucket, torch.where(here, self.masses, 0))
        return sums


def _descend(columns: Sequence[_Column], measure: int, target: Tensor, exchange: Exchange) -> _Cut:
    """The shortest prefix whose count or mass reaches the target (B,)."""
    prefix = torch.zeros_like(target)
    skipped = target.new_zeros(len(target), 2)
    for shift in (24, 16, 8, 0):
        sums = exchange.sum([column.histogram(prefix, shift) for column in columns])
        down = sums.flip(2).cumsum(dim=2).flip(2)
        hits = skipped[:, measure, None] + down[:, measure] >= target[:, None]
        if shift == 24:
            reached, everything = hits.any(dim=1), down[:, MASS, 0]
        bucket = (hits.sum(dim=1) - 1).clamp(min=0)
        index = bucket[:, None, None].expand(-1, 2, 1)
        equal = sums.gather(2, index)[:, :, 0]
        skipped = skipped + down.gather(2, index)[:, :, 0] - equal
        prefix = (prefix << 8) | bucket
    each = equal[:, MASS] // equal[:, COUNT].clamp(min=1)  # tokens of one value have one mass
    rest = target - skipped[:, measure]
    ties = rest if measure == COUNT else (rest + each - 1) // each.clamp(min=1)
    return _Cut(prefix, ties, reached, torch.where(reached, skipped[:, MASS] + ties * each, everything))
