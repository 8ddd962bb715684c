"""Whatever is passed to a public function, it answers, or raises ValueError or NotImplementedError that says why."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringattn
from ringattn import attention, positions, ring_attention, shard, unshard
from ringattn.layout import LAYOUTS, document_lengths, make_shards, shard_positions
from ringattn.mask import as_band, prefix_lm, window
from ringattn.schedule import SCHEDULES, make_schedule

REFUSALS = (ValueError, NotImplementedError)

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**70), 0.0, -0.5, 1e308, math.nan, math.inf, -math.inf, 1j,
    "", "full", "causal", "zigzag", "ring", "\x00", "é" * 50, b"ring", [], [0], [3, 3], [6, -1, 1], [1.5], ["a"],
    (), {}, {"a": 1}, {1, 2}, object(), int, len, range(3), torch.float32, torch.int8, torch.zeros(0), torch.zeros(6),
    torch.tensor(2), torch.tensor([2, 4]), torch.tensor([math.nan]), torch.zeros(2, 2, 6, 4), torch.device("cpu"),
    window(2, 1), prefix_lm(3),
]  # fmt: skip
odd = st.sampled_from(ODD)

KEYWORDS = (
    "mask", "documents", "scale", "softcap", "sinks", "backend", "qkv_format", "return_lse",
)  # fmt: skip
RING_KEYWORDS = (
    *KEYWORDS, "group", "layout", "seq_len", "schedule", "transport", "grad_dtype", "validate", "check",
)  # fmt: skip


def tensors(tokens: int = 6) -> list[torch.Tensor]:
    return [torch.randn(1, 2, tokens, 4) for _ in range(3)]


def answers(call, *args: Any, **options: Any) -> Any:
    """What the call returns; None for a refusal that says something."""
    try:
        return call(*args, **options)
    except REFUSALS as error:
        assert str(error)
        return None


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(RING_KEYWORDS), odd)
def test_one_odd_keyword(name: str, value: Any) -> None:
    got = answers(ring_attention, *tensors(), **{name: value})
    if got is not None:
        assert (got[0] if isinstance(got, tuple) else got).shape == (1, 2, 6, 4)
    if name in KEYWORDS:
        answers(attention, *tensors(), **{name: value})


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(RING_KEYWORDS), odd, min_size=2, max_size=5))
def test_several_odd_keywords(options: dict[str, Any]) -> None:
    answers(ring_attention, *tensors(), **options)


@settings(max_examples=200, deadline=None)
@given(st.lists(odd, min_size=3, max_size=3))
def test_odd_positional_arguments(qkv: list[Any]) -> None:
    answers(ring_attention, *qkv)
    q, k, v = tensors()
    for mixed in ((qkv[0], k, v), (q, qkv[1], v), (q, k, qkv[2])):
        answers(attention, *mixed)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=5), min_size=3, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_any_shapes(shapes: list[list[int]], dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(shape, dtype=torch.float32).to(dtype) for shape in shapes)
    out = answers(attention, q, k, v)
    if out is not None:
        assert out.shape == (*q.shape[:3], v.shape[3]) and out.dtype == dtype


@settings(max_examples=200, deadline=None)
@given(odd, odd, odd)
def test_masks_layouts_and_schedules(a: Any, b: Any, c: Any) -> None:
    answers(as_band, a)
    answers(window, a, b)
    answers(prefix_lm, a)
    answers(document_lengths, a)
    answers(ringattn.Band, a, b)


@settings(max_examples=200, deadline=None)
@given(odd, odd, odd)
def test_shards(a: Any, b: Any, c: Any) -> None:
    x = torch.randn(1, 6, 4)
    answers(shard, x, dim=1, layout=a)
    answers(shard, x, dim=a, layout="zigzag")
    answers(unshard, x, dim=a, layout="zigzag")
    if not isinstance(a, int) or a < 1 << 20:  # 2^31 positions are 16 GB, which is what was asked for
        answers(positions, a)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 9),
    st.sampled_from(sorted(SCHEDULES)),
)
def test_every_token_has_one_owner(layout: str, lengths: list[int], world: int, schedule: str) -> None:
    owned = [p for part in make_shards(layout, tuple(lengths), world) for p in shard_positions(part)]
    assert sorted(owned) == list(range(sum(lengths)))
    steps = [make_schedule(schedule, layout, as_band("causal"), tuple(lengths), world, rank) for rank in range(world)]
    assert len({len(s.forward) for s in steps}) == len({len(s.backward) for s in steps}) == 1


@pytest.mark.parametrize("name", RING_KEYWORDS)
def test_no_odd_value_is_taken_silently_for_another(name: str) -> None:
    """What is not refused gives the numbers of a plain call, or those of a value that means something."""
    meant = {
        "mask": ("full", "causal", window(2, 1), prefix_lm(3)),
        "documents": ([3, 3], [0], torch.tensor([2, 4])),
        "scale": (0, 1, 0.0, 2**31, 1e308, 2**63),
        "softcap": (1, 1e308, 2**31, 2**63),
        "sinks": (),
        "return_lse": ODD,
    }.get(name, ())
    torch.manual_seed(0)
    qkv = tensors()
    plain = attention(*qkv)
    for value in ODD:
        if any(repr(value) == repr(known) for known in meant):
            continue
        got = answers(ring_attention, *qkv, **{name: value})
        if got is not None:
            torch.testing.assert_close(got[0] if isinstance(got, tuple) else got, plain, msg=f"{name}={value!r}")
