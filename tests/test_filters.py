"""Filters against a brute force over Python integers: kept sets and tokens are equal, however the row is split."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from ringattn import noise
from ringattn.draw import Ranks, draw
from ringattn.filters import merge, select
from ringattn.keys import is_token, pack, values_of
from ringattn.vocab import BINS, UNIT, Request, Rows, Slice, mass_parts, masses_by_bin, scores, words


def make_rows(batch: int, **values: float | torch.Tensor) -> Rows:
    """Parameters of `batch` rows: seeds 0, 1, ..., position 3, everything else neutral unless given."""
    defaults = dict(
        seed=torch.arange(batch), position=3, sample=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0,
        repetition=1.0, presence=0.0, frequency=0.0,
    )  # fmt: skip
    whole = ("seed", "position", "sample", "top_k")
    return Rows(
        **{
            name: torch.as_tensor(value, dtype=torch.int64 if name in whole else torch.float32).expand(batch)
            for name, value in (defaults | values).items()
        }
    )


def split(logits: torch.Tensor, cuts: list[int]) -> list[Slice]:
    edges = [0, *sorted(cuts), logits.shape[1]]
    return [Slice(logits[:, a:b], a) for a, b in itertools.pairwise(edges)]


def quantised(batch: int, width: int, step: float, seed: int = 0) -> torch.Tensor:
    """Normal logits of deviation 2 on a grid, so that many are equal, with every seventh column -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.round(torch.randn(batch, width, generator=generator) * 2 / step) * step
    logits[:, 6::7] = -torch.inf
    return logits


def kept_by_brute_force(logits: torch.Tensor, rows: Rows, row: int, order: str) -> list[int]:
    """Ids that the filters keep, from the definition, in Python integers."""
    line = logits[row]
    keys = pack(line, torch.arange(len(line)))[None]
    bins, mass, _ = (x[0].tolist() for x in mass_parts(keys, rows.temperature[row : row + 1]))
    ids = sorted((i for i in range(len(line)) if line[i] > -math.inf), key=lambda i: (-float(line[i]), i))
    if float(rows.temperature[row]) == 0:
        return ids[:1]
    top = bins[ids[0]]
    by_bin = {top - b: sum(mass[i] for i in ids if bins[i] == b) for b in {bins[i] for i in ids}}

    def shifted(value: int, below: int) -> int:
        left = UNIT - 8 * below
        return value << left if left >= 0 else value >> -left

    total = sum(shifted(value, below) for below, value in by_bin.items() if below < BINS)
    fixed = {i: shifted(mass[i], top - bins[i]) for i in ids}
    k, p, min_p = int(rows.top_k[row]), float(rows.top_p[row]), rows.min_p[row]
    floor = line[ids[0]] + rows.temperature[row] * noise.log(min_p[None])[0] if min_p > 0 else torch.tensor(-math.inf)
    first = [i for i in ids if line[i] >= floor]
    second = first[:k] if k else first

    def nucleus(candidates: list[int], whole: int) -> list[int]:
        if p >= 1:
            return candidates
        need, reached = max(1, math.ceil(float(whole) * p)), 0
        for length, i in enumerate(candidates, 1):
            reached += fixed[i]
            if reached >= need:
                return candidates[:length]
        return candidates

    if order == "joint":
        return second[: len(nucleus(ids, total))]
    return nucleus(second, sum(fixed[i] for i in second) if k or min_p > 0 else total)


GRID = list(itertools.product((0, 1, 2, 40, 299, 300, 1000), (0.0, 1e-6, 0.5, 0.9, 1 - 1e-7, 1.0), (0.0, 0.02, 1.0)))


def grid_rows(temperature: float) -> Rows:
    """A row for every combination of filters."""
    k, p, m = (torch.tensor(column) for column in zip(*GRID, strict=True))
    return make_rows(len(GRID), top_k=k, top_p=p, min_p=m, temperature=temperature)


@pytest.mark.parametrize("order", ["chained", "joint"])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
def test_every_combination_keeps_what_brute_force_keeps(order: str, temperature: float) -> None:
    logits = quantised(1, 300, 0.25).expand(len(GRID), -1)
    rows = grid_rows(temperature)
    ids = torch.arange(300)[None]
    keys = pack(scores(logits, ids, rows), ids)
    expected = []
    for row in range(len(GRID)):
        kept = kept_by_brute_force(logits, rows, row, order)
        expected.append(kept[int(keys[row, kept].argmax())])
    for cuts, candidates in (([], 16), ([], 300), ([7, 7, 150], 16), ([1, 2, 3, 200, 260, 299, 300], 64)):
        got = draw(split(logits, cuts), rows, Request(candidates, order=order), Ranks(None))
        assert got.ids.tolist() == expected, f"cuts {cuts}, {candidates} candidates"


@pytest.mark.parametrize("order", ["chained", "joint"])
def test_the_radix_select_alone_gives_the_same(order: str) -> None:
    logits = quantised(1, 300, 0.25, seed=1).expand(len(GRID), -1)
    rows, request = grid_rows(0.8), Request(16, order=order)
    parts = split(logits, [100, 101, 222])
    ranks = Ranks(None)
    merged = merge(ranks.gather([words(part, rows, request) for part in parts]), rows, request)
    chosen = select(parts, rows, merged, request, ranks)
    assert merged.certified.any() and not merged.certified.all()
    same = (chosen.keys == merged.keys) & (chosen.logits == merged.logits)
    assert same[merged.certified & (rows.temperature > 0)].all()


def test_a_certificate_is_never_given_wrongly() -> None:
    logits = quantised(1, 300, 0.25, seed=2).expand(len(GRID), -1)
    rows = grid_rows(1.3)
    ids = torch.arange(300)[None]
    keys = pack(scores(logits, ids, rows), ids)
    certified = 0
    for candidates in (1, 2, 4, 8, 32, 128):
        request = Request(candidates)
        parts = split(logits, [60, 120, 180])
        merged = merge(torch.stack([words(part, rows, request) for part in parts]), rows, request)
        for row in merged.certified.nonzero()[:, 0].tolist():
            kept = kept_by_brute_force(logits, rows, row, "chained")
            assert merged.keys[row] == keys[row, kept].max(), (candidates, GRID[row])
        certified += int(merged.certified.sum())
    assert 0.3 < certified / (6 * len(GRID)) < 0.95


def test_requests_without_header_decide_by_candidates() -> None:
    logits = quantised(1, 300, 0.25, seed=3).expand(len(GRID), -1)
    rows = grid_rows(0.8)
    narrowed = ((rows.top_k > 0) | (rows.min_p > 0)).nonzero()[:, 0]
    rows, logits = rows[narrowed], logits[narrowed]
    expected = draw(split(logits, [99]), rows, Request(16), Ranks(None))
    for cuts in ([], [99], [3, 280]):
        assert torch.equal(draw(split(logits, cuts), rows, Request(16, header=False), Ranks(None)).ids, expected.ids)


def test_masses_are_exponentials() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.cat([torch.randn(1, 20000, generator=generator) * 8, torch.tensor([[30.0, 88.0, -103.0]])], dim=1)
    keys = pack(logits, torch.arange(logits.shape[1])[None])
    for temperature in (0.05, 1.0, 7.0):
        bins, mass, power = mass_parts(keys, torch.tensor([temperature]))
        exact = torch.exp2(logits.double() * noise.LOG2E / torch.tensor(temperature).double() - 8.0 * bins + 24)
        assert ((mass - exact).abs() / exact).max() < 3e-7
        assert torch.equal(power, logits.double() * (noise.LOG2E / torch.tensor(temperature).double()))


def test_bins_do_not_depend_on_the_split() -> None:
    logits = quantised(4, 5000, 0.01)
    keys = pack(logits, torch.arange(5000)[None])
    temperature = torch.tensor([0.1, 0.5, 1.0, 4.0])
    whole = masses_by_bin(keys, temperature)
    tokens = is_token(keys)
    bins, mass, _ = mass_parts(keys, temperature)
    assert torch.equal(whole[:, 0], bins.amax(1))
    for below in range(BINS):
        assert torch.equal(whole[:, 1 + below], torch.where(tokens & (bins == whole[:, :1] - below), mass, 0).sum(1))
    rows = replace(make_rows(4), temperature=temperature)
    totals = []
    for cuts in ([], [2500], [1, 4000, 4999]):
        request = Request(4)
        totals.append(merge(torch.stack([words(part, rows, request) for part in split(logits, cuts)]), rows, request))
    assert all(torch.equal(totals[0].total, other.total) for other in totals)
    exact = torch.logsumexp(logits.double() / temperature.double()[:, None], dim=1) / math.log(2)
    log2 = noise.log2_int(totals[0].total) + 8 * totals[0].top_bin - UNIT - 24
    assert (log2 - exact).abs().max() < 3e-7
    assert (values_of(totals[0].candidates[:, 0]) == logits.amax(1)).all()
