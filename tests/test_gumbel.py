"""The sampling kernels against the plain torch definition, bit for bit, in Triton's interpreter or on a GPU."""

import importlib
import os

import pytest
import torch

from ringattn import vocab
from ringattn.filters import merge
from ringattn.keys import decode
from ringattn.vocab import Request, Rows, Slice

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="runs in a process with the interpreter on",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, where inf - inf is the NaN that is wanted
]


def on(device: str, value: object) -> object:
    """Slices, rows and tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (Slice, Rows)):
        return type(value)(**{name: on(device, getattr(value, name)) for name in value.__dataclass_fields__})
    return value


def make_rows(batch: int, **values: object) -> Rows:
    defaults = dict(
        seed=torch.arange(batch) - 1, position=3, sample=0, temperature=torch.tensor([1.0, 0.3, 0.0, 2.5])[:batch],
        top_k=0, top_p=1.0, min_p=0.0, repetition=1.0, presence=0.0, frequency=0.0,
    )  # fmt: skip
    whole = ("seed", "position", "sample", "top_k")
    return Rows(
        **{
            name: torch.as_tensor(value, dtype=torch.int64 if name in whole else torch.float32).expand(batch)
            for name, value in (defaults | values).items()
        }
    )


def make_slice(width: int, start: int = 0, dtype: torch.dtype = torch.float32, kind: str = "random") -> Slice:
    """Three rows of logits."""
    generator = torch.Generator().manual_seed(width + start)
    logits = torch.randn(3, width, generator=generator) * 3
    if kind == "ties":
        logits = torch.round(logits)
    if kind == "flat":
        logits = torch.ones(3, width)
    if kind == "peaked":
        logits[:, width // 2] = 60.0
    if kind == "degenerate":
        logits[0] = -torch.inf
        logits[1, width // 3] = torch.nan
        logits[2, ::2] = torch.inf
    if kind == "huge":
        logits = logits * 1e37
    if kind == "tiny":
        logits = logits * 1e-41
    return Slice(logits.to(dtype), start)


def kernels() -> tuple[object, object]:
    return importlib.import_module("ringattn.kernels.gumbel"), importlib.import_module("ringattn.kernels.candidates")


CASES = [(1, 0), (3, 5), (1000, 6), (2099, 128)]
KINDS = ["random", "ties", "flat", "peaked", "degenerate", "huge", "tiny"]


@pytest.mark.parametrize(("width", "start"), CASES)
def test_winners_have_the_same_keys(width: int, start: int) -> None:
    gumbel, _ = kernels()
    dtype = torch.float16 if start == 6 else torch.float32
    part, rows = make_slice(width, start, dtype), make_rows(3)
    assert torch.equal(gumbel.winner(on(DEVICE, part), on(DEVICE, rows)).cpu(), vocab.winner(part, rows))


@pytest.mark.parametrize("kind", KINDS)
def test_winners_of_unusual_rows(kind: str) -> None:
    gumbel, _ = kernels()
    part, rows = make_slice(300, 3, kind=kind), make_rows(3)
    expected = vocab.winner(part, rows)
    assert torch.equal(gumbel.winner(on(DEVICE, part), on(DEVICE, rows)).cpu(), expected)
    ids, status = gumbel.tokens(on(DEVICE, part), on(DEVICE, rows))
    assert torch.equal(torch.stack([ids, status]).cpu(), torch.stack(decode(expected)))
    assert torch.equal(torch.stack(gumbel.decode(on(DEVICE, expected))).cpu(), torch.stack(decode(expected)))


@pytest.mark.parametrize("tile", [128, 1024])
def test_tiles_do_not_matter(tile: int) -> None:
    gumbel, _ = kernels()
    part, rows = make_slice(500, 5), make_rows(3)
    keys, ids, status = torch.full((3, 3), -7, device=DEVICE)
    for wave in (1000, 6, 3):
        gumbel.draw_launch(on(DEVICE, part), on(DEVICE, rows), keys, ids, status, tile, wave=wave)()
        assert torch.equal(keys.cpu(), vocab.winner(part, rows)), wave
        keys.fill_(-7)


@pytest.mark.parametrize("words", [False, True])
def test_edits_of_the_logits(words: bool) -> None:
    gumbel, candidates = kernels()
    generator = torch.Generator().manual_seed(0)
    part = make_slice(1001, 7)
    mask = torch.rand(3, 1001, generator=generator) < 0.5
    packed = torch.nn.functional.pad(mask, (0, 23)).view(3, -1, 32).long() << torch.arange(32)
    packed = (packed.sum(-1) + (1 << 31)) % (1 << 32) - (1 << 31)
    part = Slice(
        part.logits, 7,
        mask=packed.to(torch.int32) if words else mask,
        bias=torch.randn(1, 1001, generator=generator),
        counts=torch.randint(0, 3, (3, 1001), generator=generator, dtype=torch.int32),
        prompt=torch.rand(3, 1001, generator=generator) < 0.3,
    )  # fmt: skip
    rows = make_rows(
        3, repetition=torch.tensor([1.3, 0.7, 1.0]), presence=0.4, frequency=torch.tensor([0.1, -0.2, 0.0])
    )
    assert torch.equal(gumbel.winner(on(DEVICE, part), on(DEVICE, rows)).cpu(), vocab.winner(part, rows))
    got = candidates.listing(on(DEVICE, part), on(DEVICE, rows), 16).cpu()
    assert torch.equal(got, vocab.words(part, rows, Request(16, header=False)))


@pytest.mark.parametrize(("width", "kind"), [(3, "degenerate"), *((600, kind) for kind in KINDS)])
def test_candidates_and_decisions(kind: str, width: int) -> None:
    _, candidates = kernels()
    part = make_slice(width, 9, kind=kind)
    rows = make_rows(
        3, top_k=torch.tensor([5, 64, 40]), top_p=torch.tensor([0.9, 1.0, 0.5]), min_p=torch.tensor([0.0, 0.01, 0.0]),
        temperature=torch.tensor([1.0, 0.3, 0.7]),
    )  # fmt: skip
    request = Request(64, header=False)
    expected = vocab.words(part, rows, request)
    assert torch.equal(candidates.listing(on(DEVICE, part), on(DEVICE, rows), 64).cpu(), expected)
    other = vocab.words(Slice(part.logits * 0.9, 9 + width), rows, request)
    for words in (expected[None], torch.stack([expected, other])):
        got = torch.stack(candidates.decide(on(DEVICE, words), on(DEVICE, rows))).cpu()
        assert torch.equal(got, torch.stack(decode(merge(words, rows, request).keys)))
    alone = torch.stack(candidates.filtered_tokens(on(DEVICE, part), on(DEVICE, rows), 64)).cpu()
    assert torch.equal(alone, torch.stack(decode(merge(expected[None], rows, request).keys)))


def test_bad_parameters_are_statuses() -> None:
    gumbel, candidates = kernels()
    part = make_slice(500)
    for bad in (
        {"temperature": torch.tensor([-1.0, torch.nan, torch.inf])}, {"position": torch.tensor([-1, 1 << 32, 5])},
        {"repetition": torch.tensor([0.0, torch.inf, 1.0])}, {"presence": torch.tensor([torch.nan, torch.inf, 0.0])},
    ):  # fmt: skip
        rows = make_rows(3, **bad)
        assert torch.equal(gumbel.winner(on(DEVICE, part), on(DEVICE, rows)).cpu(), vocab.winner(part, rows))
        rows = make_rows(3, top_k=4, **bad)
        words = vocab.words(part, rows, Request(16, header=False))[None]
        got = torch.stack(candidates.decide(on(DEVICE, words), on(DEVICE, rows))).cpu()
        assert torch.equal(got, torch.stack(decode(merge(words, rows, Request(16, header=False)).keys)))


def test_state_is_left_at_zero() -> None:
    gumbel, candidates = kernels()
    part, rows = on(DEVICE, make_slice(1100)), on(DEVICE, make_rows(3))
    keys, ids, status = torch.zeros(3, 3, dtype=torch.int64, device=DEVICE)
    out = torch.zeros(3, 16, dtype=torch.int64, device=DEVICE)
    for launches in (
        [gumbel.draw_launch(part, rows, keys, ids, status, tile=512)],
        candidates.listing_launches(part, rows, out, tile=1024),
    ):
        results = []
        for _ in range(2):
            for launch in launches:
                launch()
            for launch in launches:
                state = [launch.args[name] for name in ("keys", "arrived", "found") if name in launch.args]
                assert all(not int(x.abs().sum()) for x in state)
            results.append(torch.cat([keys.flatten(), ids.flatten(), out.flatten()]))
        assert torch.equal(*results)
