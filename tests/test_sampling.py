"""`sample`: the same bits over worlds, batches and dtypes; real ranks; degenerate rows; bad input; mutations."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringattn import draw as draw_module
from ringattn import keys, noise, vocab
from ringattn.draw import Ranks, Sample, draw
from ringattn.keys import Status
from ringattn.launch.spawn import run
from ringattn.sampling import sample
from ringattn.vocab import Request, Rows, Slice

WORLDS = (1, 2, 3, 4, 8)


def make_rows(batch: int, **values: Any) -> Rows:
    defaults = dict(
        seed=torch.arange(batch) * 97 - 5, position=torch.arange(batch) + 3, sample=0,
        temperature=torch.tensor([1.0, 0.7, 0.0, 1.5])[torch.arange(batch) % 4],
        top_k=0, top_p=1.0, min_p=0.0, repetition=1.0, presence=0.0, frequency=0.0,
    )  # fmt: skip
    whole = ("seed", "position", "sample", "top_k")
    return Rows(
        **{
            name: torch.as_tensor(value, dtype=torch.int64 if name in whole else torch.float32).expand(batch)
            for name, value in (defaults | values).items()
        }
    )


def make_logits(batch: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(seed)) * 3


def even(logits: torch.Tensor, world: int) -> list[Slice]:
    """Slices as `torch.tensor_split` cuts: uneven where the width does not divide, empty where it is too small."""
    parts = logits.tensor_split(world, dim=1)
    starts = itertools.accumulate((part.shape[1] for part in parts), initial=0)
    return [Slice(part, start) for part, start in zip(parts, starts, strict=False)]


def same(a: Sample, b: Sample) -> bool:
    tensors = zip((a.ids, a.status, *(a.logprobs or ())), (b.ids, b.status, *(b.logprobs or ())), strict=True)
    return all(torch.equal(x.nan_to_num(nan=7.0), y.nan_to_num(nan=7.0)) for x, y in tensors)


@pytest.mark.parametrize("width", [1, 3, 17, 1000, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_the_world(width: int, dtype: torch.dtype) -> None:
    logits, rows = make_logits(4, width).to(dtype), make_rows(4, top_p=torch.tensor([1.0, 0.9, 1.0, 0.95]))
    for request in (Request(), Request(16, logprobs=5)):
        whole = draw([Slice(logits)], rows, request, Ranks(None))
        assert (whole.status == 0).all() and same(whole, draw([Slice(logits.float())], rows, request, Ranks(None)))
        for world in WORLDS[1:]:
            assert same(whole, draw(even(logits, world), rows, request, Ranks(None))), f"world {world}"
        for collective in ("all_reduce", "all_gather"):
            other = draw(even(logits, 3), rows, request, Ranks(None), collective)
            assert torch.equal(other.ids, whole.ids)


@pytest.mark.slow
@pytest.mark.parametrize("width", [128256, 151936])
def test_bits_do_not_depend_on_the_world_in_real_vocabularies(width: int) -> None:
    test_bits_do_not_depend_on_the_world(width, torch.bfloat16)


def test_rows_do_not_depend_on_their_batch() -> None:
    logits, rows = make_logits(8, 1000), make_rows(8, top_k=torch.tensor([0, 3] * 4))
    whole = draw([Slice(logits)], rows, Request(16, logprobs=2), Ranks(None))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    mixed = draw([Slice(logits[order])], rows[order], Request(16, logprobs=2), Ranks(None))
    assert torch.equal(mixed.ids, whole.ids[order]) and torch.equal(mixed.logprobs.token, whole.logprobs.token[order])
    halves = [draw([Slice(logits[h])], rows[h], Request(16, logprobs=2), Ranks(None)) for h in (order[:3], order[3:])]
    assert torch.equal(torch.cat([half.ids for half in halves]), whole.ids[order])


def test_padding_is_never_drawn() -> None:
    logits = make_logits(64, 100)
    padded = torch.cat([logits, torch.full((64, 28), 90.0)], dim=1)
    plain = sample(logits, seed=torch.arange(64), position=0)
    assert torch.equal(sample(padded, seed=torch.arange(64), position=0, vocab_size=100).ids, plain.ids)
    assert torch.equal(sample(padded, seed=torch.arange(64), position=0, vocab_size=100, top_k=200).ids, plain.ids)


# What each guarantee rests on, broken on purpose.


def _local_ids(part: Slice) -> torch.Tensor:
    return torch.arange(part.logits.shape[1])[None]


def _half_scores(logits: torch.Tensor, ids: torch.Tensor, rows: Rows) -> torch.Tensor:
    return REAL_SCORES(logits, ids, rows).to(torch.bfloat16).float()


def _highest_id_on_ties(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return REAL_PACK(values, keys.MAX_ID - ids)


def _float_masses(keys_: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    bins, mass, _ = vocab.mass_parts(keys_, temperature)
    top = bins.amax(dim=1, keepdim=True)
    sums = [torch.where(bins == top - b, mass, 0).float().sum(dim=1).long() for b in range(vocab.BINS)]
    return torch.cat([top, torch.stack(sums, dim=1)], dim=1)


def _rank_in_key(seed: torch.Tensor, position: torch.Tensor, sample_: torch.Tensor, ids: torch.Tensor, tag: int = 0):
    return REAL_GUMBEL(seed + int(ids[0, 0]), position, sample_, ids, tag)


REAL_SCORES, REAL_PACK, REAL_GUMBEL = vocab.scores, keys.pack, noise.gumbel
MUTATIONS = {
    "local id": (vocab, "_ids", _local_ids),
    "rank in the key": (noise, "gumbel", _rank_in_key),
    "bfloat16 scores": (vocab, "scores", _half_scores),
    "float sums": (vocab, "masses_by_bin", _float_masses),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_changes_bits(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows, request = make_logits(64, 5000), make_rows(64, temperature=1.0), Request(16, logprobs=1)
    whole = draw([Slice(logits)], rows, request, Ranks(None))
    monkeypatch.setattr(*MUTATIONS[mutation])
    mutated = draw([Slice(logits)], rows, request, Ranks(None))
    split = draw(even(logits, 3), rows, request, Ranks(None))
    assert not (same(split, mutated) and torch.equal(split.ids, whole.ids))


def test_ties_go_to_the_lowest_id_and_a_mutation_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(1, 40)
    logits[0, [7, 30]] = 5.0
    assert sample(logits, seed=0, position=0, temperature=0.0).ids.tolist() == [7]
    monkeypatch.setattr(vocab, "pack", _highest_id_on_ties)
    assert sample(logits, seed=0, position=0, temperature=0.0).ids.tolist() != [7]


def test_greedy_top_k_one_and_cold_rows_agree() -> None:
    logits = torch.round(make_logits(256, 500))
    greedy = sample(logits, seed=1, position=0, temperature=0.0).ids
    assert (
        torch.equal(greedy, logits.argmax(dim=1)) or (logits.gather(1, greedy[:, None])[:, 0] == logits.amax(1)).all()
    )
    first = (logits == logits.amax(1, keepdim=True)).int().argmax(dim=1)
    assert torch.equal(greedy, first)
    assert torch.equal(sample(logits, seed=1, position=0, top_k=1).ids, greedy)
    assert torch.equal(sample(logits, seed=1, position=0, top_p=0.0).ids, greedy)
    distinct = make_logits(256, 500)
    cold = sample(distinct, seed=torch.arange(256), position=0, temperature=1e-30).ids
    assert torch.equal(cold, distinct.argmax(dim=1))


def test_neutral_filters_and_larger_logits_leave_a_token_alone() -> None:
    logits, seed = make_logits(64, 500), torch.arange(64)
    plain = sample(logits, seed=seed, position=2).ids
    for filters in ({"top_k": 500}, {"min_p": 1e-30}, {"top_k": 256, "top_p": 1.0}, {"logprobs": 1}):
        if filters.get("top_k") != 256:
            assert torch.equal(sample(logits, seed=seed, position=2, **filters).ids, plain)
    raised = logits.scatter_add(1, plain[:, None], torch.full((64, 1), 0.5))
    assert torch.equal(sample(raised, seed=seed, position=2).ids, plain)


@pytest.mark.parametrize("width", [7, 64, 512])
def test_frequencies_are_those_of_the_softmax(width: int) -> None:
    logits = make_logits(1, width, seed=3) * 0.7
    draws = {7: 100_000, 64: 50_000, 512: 10_000}[width]
    p = torch.softmax(logits.double()[0] / 0.8, dim=0)
    ids = []
    for first in range(0, draws, 10_000):
        seeds = torch.arange(first, first + 10_000)
        ids.append(sample(logits.expand(10_000, -1), seed=seeds, position=1, temperature=0.8).ids)
    counts, expected = torch.bincount(torch.cat(ids), minlength=width).double(), p * draws
    rare = expected < 5
    if rare.any():  # one bin of all rare tokens, kept
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    chi2, degrees = float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
    assert abs(chi2 - degrees) / math.sqrt(2 * degrees) < 4


@pytest.mark.slow
def test_mass_of_the_tail_is_drawn() -> None:
    """One token of 0.99 and 131072 that share 0.01: noise on a 2^-24 grid draws half of the tail or less."""
    width, draws = 131_073, 20_000
    logits = torch.full((1, width), math.log(0.01 / 131_072))
    logits[0, 777] = math.log(0.99)
    tail = sum(
        int((sample(logits.expand(50, -1), seed=torch.arange(i, i + 50), position=0).ids != 777).sum())
        for i in range(0, draws, 50)
    )
    p = float(1 - torch.softmax(logits.double(), dim=1)[0, 777])
    assert abs(tail - draws * p) / math.sqrt(draws * p * (1 - p)) < 4


def test_logprobs_and_rank() -> None:
    logits = make_logits(32, 3000)
    result = sample(logits, seed=torch.arange(32), position=0, temperature=0.6, top_p=0.8, logprobs=4)
    exact = torch.log_softmax(logits.double() / torch.tensor(0.6).double(), dim=1)
    assert (result.logprobs.token - exact.gather(1, result.ids[:, None])[:, 0]).abs().max() < 1e-5
    top = exact.topk(4)
    assert torch.equal(result.logprobs.top_ids, top.indices)
    assert (result.logprobs.top - top.values).abs().max() < 1e-5
    ranks = 1 + (logits > logits.gather(1, result.ids[:, None])).sum(dim=1)
    assert torch.equal(result.logprobs.rank, ranks)
    few = sample(logits[:, :2], seed=0, position=0, logprobs=4)
    assert (few.logprobs.top_ids[:, 2:] == -1).all() and (few.logprobs.top[:, 2:] == -torch.inf).all()


INF, NAN = math.inf, math.nan
ROWS = {
    "all -inf": ([-INF] * 6, Status.NO_TOKEN, None),
    "one finite": ([-INF, -INF, -5.0, -INF, -INF, -INF], Status.OK, 2),
    "+inf": ([0.0, 1.0, 2.0, 3.0, INF, 4.0], Status.OK, 4),
    "two +inf": ([0.0, INF, 2.0, INF, 3.0, 4.0], Status.OK, 1),
    "NaN": ([0.0, 1.0, 2.0, 3.0, 4.0, NAN], Status.NAN, None),
    "all NaN": ([NAN] * 6, Status.NAN, None),
    "NaN and +inf": ([NAN, INF, 0.0, 0.0, 0.0, 0.0], Status.NAN, None),
    "subnormal": ([1e-45, 0.0, 0.0, 0.0, 0.0, 0.0], Status.OK, None),
    "largest": ([3.4e38, -3.4e38, 0.0, 0.0, 0.0, 0.0], Status.OK, 0),
}


FILTERS = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 2}, {"temperature": 0.0}]


@pytest.mark.parametrize("filters", FILTERS)
def test_degenerate_rows(filters: dict[str, Any]) -> None:
    logits = torch.tensor([row for row, _, _ in ROWS.values()])
    got = [sample(logits, seed=3, position=0, **filters)]
    given = {key: value for key, value in filters.items() if key != "logprobs"}
    request = Request(4, logprobs=filters.get("logprobs", 0)) if filters.keys() - {"temperature"} else Request()
    rows = make_rows(len(ROWS), seed=3, position=0, **{"temperature": 1.0} | given)
    got += [draw(even(logits, world), rows, request, Ranks(None)) for world in (2, 8)]
    for result in got:
        for index, (name, (_, status, expected)) in enumerate(ROWS.items()):
            assert int(result.status[index]) == status, name
            assert (int(result.ids[index]) == -1) == (status != Status.OK), name
            assert expected is None or int(result.ids[index]) == expected, name
        assert all(torch.equal(result.ids, other.ids) for other in got)
        if result.logprobs:
            bad = result.status != Status.OK
            assert result.logprobs.token[bad].isnan().all() and not result.logprobs.rank[bad].any()


def test_no_rows_and_no_columns() -> None:
    assert sample(torch.zeros(0, 5), seed=0, position=0).ids.shape == (0,)
    assert sample(torch.zeros(0, 5), seed=0, position=0, top_k=2, logprobs=2).ids.shape == (0,)
    assert sample(torch.zeros(2, 0), seed=0, position=0).status.tolist() == [Status.NO_TOKEN] * 2
    assert sample(torch.zeros(2, 0), seed=0, position=0, top_p=0.5).status.tolist() == [Status.NO_TOKEN] * 2


def test_mask_bias_and_penalties() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = make_logits(16, 70)
    mask = torch.rand(16, 70, generator=generator) < 0.3
    counts = torch.randint(0, 3, (16, 70), generator=generator, dtype=torch.int32)
    prompt = torch.rand(16, 70, generator=generator) < 0.2
    bias = torch.randn(70, generator=generator)
    edited = torch.where((counts > 0) | prompt, torch.where(logits > 0, logits / 1.3, logits * 1.3), logits)
    edited = edited - 0.25 * counts - 0.5 * (counts > 0) + bias
    edited = torch.where(mask, edited, -torch.inf)
    words = (torch.nn.functional.pad(mask, (0, 26)).view(16, 3, 32).long() << torch.arange(32)).sum(dim=-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    given = dict(bias=bias, counts=counts, prompt=prompt)
    given |= dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    for more in ({}, {"top_k": 5}, {"top_p": 0.7}):
        expected = sample(edited, seed=torch.arange(16), position=0, **more).ids
        for form in (mask, words):
            assert torch.equal(
                sample(logits, seed=torch.arange(16), position=0, mask=form, **given, **more).ids, expected
            )
    assert sample(logits, seed=0, position=0, mask=torch.zeros(70, dtype=torch.bool)).status.tolist() == [1] * 16


def test_device_tensors_out_of_range_give_statuses() -> None:
    logits = make_logits(4, 50)
    bad = dict(temperature=torch.tensor([1.0, -1.0, NAN, INF]))
    assert sample(logits, seed=0, position=0, **bad).status.tolist() == [0, 3, 3, 3]
    result = sample(logits, seed=0, position=0, top_p=torch.tensor([0.5, 1.5, -0.1, NAN]), top_k=3)
    assert result.status.tolist() == [0, 3, 3, 3] and result.ids.tolist()[1:] == [-1] * 3
    with pytest.raises(ValueError, match="BAD_PARAMETER"):
        sample(logits, seed=0, position=0, check=True, **bad)


BAD = {
    "seed": (torch.zeros(4, dtype=torch.int32), "seed must be torch.int64"),
    "position": (-1, "position must be an int in"),
    "temperature": (-0.5, "temperature must be a number in"),
    "temperature ": (NAN, "temperature must be a number in"),
    "top_p": (1.01, "top_p must be a number in"),
    "min_p": (-0.1, "min_p must be a number in"),
    "top_k": (1.5, "top_k must be an int"),
    "top_k ": (torch.zeros(4), "top_k must be torch.int64 or torch.int32"),
    "order": ("sorted", "choose one of"),
    "collective": ("broadcast", "choose one of"),
    "validate": ("never", "choose one of"),
    "mask": (torch.ones(4, 51, dtype=torch.bool), r"mask must be \(4, 50\)"),
    "mask ": (torch.ones(4, 3, dtype=torch.int32), r"mask must be \(4, 2\)"),
    "bias": (torch.zeros(50, dtype=torch.float64), "bias must be torch.float32"),
    "counts": (torch.zeros(50, dtype=torch.int32), r"counts must be \(4, 50\)"),
    "vocab_size": (0, "vocab_size must be an int"),
    "logprobs": (1000, "logprobs must be an int"),
    "repetition_penalty": (0.0, "repetition_penalty must be a number"),
    "logits": (torch.zeros(4, 50, dtype=torch.float64), "logits must be float32"),
    "logits ": (torch.zeros(50), "logits must be a tensor"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_named(name: str) -> None:
    value, message = BAD[name]
    arguments: dict[str, Any] = {"logits": make_logits(4, 50), "seed": 0, "position": 0, name.strip(): value}
    with pytest.raises(ValueError, match=message):
        sample(arguments.pop("logits"), **arguments)


# Real ranks.


def on_ranks(filters: dict[str, Any]) -> tuple[list[Any], int, int]:
    """This rank's results for a few requests, uneven slices; messages and bytes of the last."""
    rank, world = dist.get_rank(), dist.get_world_size()
    logits = make_logits(8, 1000)
    edges = [0, *(round(1000 * ((r + 1) / world) ** 2) for r in range(world))]
    mine = logits[:, edges[rank] : edges[rank + 1]]
    made: list[Ranks] = []
    original = draw_module.Ranks.__init__

    def recording(self: Ranks, comm: Any) -> None:
        original(self, comm)
        made.append(self)

    draw_module.Ranks.__init__ = recording  # type: ignore[method-assign]
    results = []
    for start in (None, edges[rank]):
        for collective in ("all_reduce", "all_gather"):
            result = sample(
                mine,
                seed=torch.arange(8),
                position=5,
                vocab_start=start,
                vocab_size=1000,
                collective=collective,
                **filters,
            )
            results.append((result.ids, result.status, *(result.logprobs or ())))
    return results, made[-1].messages, made[-1].sent_bytes


SENT = {
    (): (1, 8 * 8),
    (("top_k", 50), ("top_p", 0.9)): (1, 8 * 64 * 8),
    (("top_p", 0.3),): (1, 8 * (9 + 128) * 8),
    (("top_p", 0.99), ("temperature", 9.0)): (11, None),
    (("logprobs", 3), ("min_p", 0.05)): (2, 8 * (9 + 128) * 8 + 8 * 8),
}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_real_ranks_agree_with_one_process_and_send_little(world: int) -> None:
    for filters, (messages, sent) in SENT.items():
        expected = sample(make_logits(8, 1000), seed=torch.arange(8), position=5, **dict(filters))
        wanted = (expected.ids, expected.status, *(expected.logprobs or ()))
        for results, messages_here, sent_here in run(on_ranks, world, dict(filters), timeout=120).values():
            for result in results:
                assert all(torch.equal(a, b) for a, b in zip(result, wanted, strict=True))
            if world > 1:
                assert messages_here == messages and sent in (None, sent_here)


def disagree(change: str) -> None:
    rank = dist.get_rank()
    logits = make_logits(4, 60)[:, rank * 20 : rank * 20 + 20]
    arguments: dict[str, Any] = {"seed": 1, "position": 0, "vocab_start": rank * 20}
    if rank == 1:
        arguments |= {
            "seed": {"seed": 2},
            "temperature": {"temperature": 0.5},
            "range": {"top_p": 1.5},
            "gap": {"vocab_start": 21},
            "overlap": {"vocab_start": 19},
        }.get(change, {})
    if change == "short":
        arguments["vocab_size"] = 61
    sample(logits, **arguments)


DISAGREEMENTS = {
    "seed": "ranks disagree on seed: rank 0 has 1, rank 1 has 2",
    "temperature": "temperature",
    "range": "top_p must be a number in",
    "gap": "slice of rank 1 starts at 21 and leaves a gap",
    "overlap": "slice of rank 1 starts at 19 and overlaps",
    "short": "fewer than vocab_size=61",
}


def every_error(change: str) -> str:
    try:
        disagree(change)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("change", DISAGREEMENTS)
def test_ranks_that_disagree_all_raise(change: str) -> None:
    errors = run(every_error, 3, change, timeout=60)
    assert all(DISAGREEMENTS[change] in error for error in errors.values()), errors


def subgroup() -> list[int] | None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    logits = make_logits(4, 101)
    mine = logits.tensor_split(2, dim=1)[mesh["tp"].get_local_rank()]
    by_mesh = sample(mine, seed=torch.arange(4), position=0, group=mesh["tp"], top_k=5).ids
    pair = dist.new_group([1, 3])
    if rank not in (1, 3):
        return [by_mesh.tolist()]
    mine = logits.tensor_split(2, dim=1)[rank // 2]
    return [by_mesh.tolist(), sample(mine, seed=torch.arange(4), position=0, group=pair, top_k=5).ids.tolist()]


def test_meshes_and_groups_of_some_ranks() -> None:
    expected = sample(make_logits(4, 101), seed=torch.arange(4), position=0, top_k=5).ids.tolist()
    for results in run(subgroup, 4, timeout=60).values():
        assert all(ids == expected for ids in results)


@pytest.mark.gpu
def test_a_graph_follows_device_tensors() -> None:
    logits = make_logits(4, 5000).cuda()
    position, temperature = torch.zeros(4, dtype=torch.int64).cuda(), torch.full((4,), 1.0).cuda()
    seed, top_k = torch.arange(4).cuda(), torch.full((4,), 20).cuda()
    requests: list[dict[str, Any]] = [{}, {"top_k": 50, "top_p": 0.9}, {"top_k": top_k}, {"top_p": 0.9, "logprobs": 2}]
    for request in requests:
        call = functools.partial(sample, logits, seed=seed, position=position, temperature=temperature, **request)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
            position.add_(1)
        position.zero_()
        seen = []
        for step in range(100):
            graph.replay()
            given = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in request.items()}
            expected = sample(logits.cpu(), seed=torch.arange(4), position=step, temperature=temperature.cpu(), **given)
            assert torch.equal(out.ids.cpu(), expected.ids)
            if out.logprobs is not None:
                assert torch.equal(out.logprobs.token.cpu(), expected.logprobs.token)
            seen.append(tuple(out.ids.tolist()))
        assert len(set(seen)) > 90
        temperature.mul_(0.9)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 3, 17, 1000, 50257, 128256, 151936])
def test_gpu_and_cpu_give_the_same_bits(width: int) -> None:
    requests: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.95}, {"min_p": 0.02}, {"logprobs": 5},
        {"top_k": 40, "top_p": 0.8, "order": "joint"}, {"top_p": 0.999, "temperature": 3.0},
    ]  # fmt: skip
    for dtype, request in itertools.product((torch.bfloat16, torch.float32, torch.float16), requests):
        if width > 1000 and dtype != torch.bfloat16 and request:
            continue  # the reference takes seconds
        logits = make_logits(6, width, seed=width).to(dtype)
        seed = torch.arange(6) * 12345678901
        expected = sample(logits, seed=seed, position=7, **request)
        got = sample(logits.cuda(), seed=seed.cuda(), position=7, **request)
        got = Sample(
            got.ids.cpu(), got.status.cpu(), got.logprobs and type(got.logprobs)(*(x.cpu() for x in got.logprobs))
        )
        assert same(got, expected), (dtype, request)
