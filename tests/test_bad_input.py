"""A fault on one rank is a named error on every rank, at once, and the group works afterwards."""

import math
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from ringattn import Band, attention, ring_attention
from ringattn.launch.spawn import run
from ringattn.testing import make_inputs

FAULTY = 1
WORLD = 3


def tensors(**changes: Any) -> tuple[torch.Tensor, ...]:
    return make_inputs(**{"batch": 1, "heads": 4, "kv_heads": 2, "tokens": 6, "dim": 8, **changes})[:3]


def with_key(change) -> tuple[torch.Tensor, ...]:
    q, k, v = tensors()
    return q, change(k), v


# On the faulty rank alone: these tensors, these options, and the words of the error.
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "heads": (lambda: tensors(heads=3), {}, "multiple.*H=3, G=2"),
    "tokens of key": (lambda: with_key(lambda k: k[:, :, :5]), {}, r"\(1, 2, 5, 8\)"),
    "head size": (lambda: with_key(lambda k: k[..., :4]), {}, r"\(1, 2, 6, 4\)"),
    "dimensions": (lambda: with_key(lambda k: k[0]), {}, r"key must.*four.*\(2, 6, 8\)"),
    "no tensor": (lambda: with_key(lambda k: None), {}, "key must.*NoneType"),
    "mixed dtypes": (lambda: with_key(torch.Tensor.half), {}, "torch.float16"),
    "integers": (lambda: tuple(x.int() for x in tensors()), {}, "torch.int32"),
    "mixed devices": (lambda: with_key(lambda k: k.to("meta")), {}, "meta"),
    "nan scale": (tensors, {"scale": math.nan}, "scale.*nan"),
    "scale of text": (tensors, {"scale": "big"}, "scale.*'big'"),
    "softcap": (tensors, {"softcap": -1.0}, "softcap.*-1.0"),
    "layout": (tensors, {"layout": "spiral"}, "'spiral'.*zigzag"),
    "mask": (tensors, {"mask": "diagonal"}, "'diagonal'.*causal"),
    "schedule": (tensors, {"schedule": "tree"}, "'tree'.*ring"),
    "backend": (tensors, {"backend": "abacus"}, "'abacus'.*reference"),
    "transport": (tensors, {"transport": "pigeon"}, "'pigeon'.*p2p"),
    "grad_dtype": (tensors, {"grad_dtype": torch.int8}, "torch.int8.*torch.float32"),
    "qkv_format": (tensors, {"qkv_format": "sbhd"}, "'sbhd'.*bhsd"),
    "validate": (tensors, {"validate": "never"}, "'never'.*always"),
    "keyword": (tensors, {"sliding": 3}, "'sliding'"),
    "is_causal": (tensors, {"is_causal": True}, "is_causal.*mask='causal'"),
    "dropout": (tensors, {"dropout_p": 0.1}, "dropout_p=0.1"),
    "attn_mask": (tensors, {"attn_mask": None}, "attn_mask.*mask="),
    "length": (tensors, {"seq_len": 13}, "4 tokens of 13 .*got 6"),
    "length of text": (tensors, {"seq_len": "18"}, "seq_len.*'18'"),
    "documents that do not add up": (tensors, {"seq_len": 18, "documents": [5, 12]}, "17 tokens.*seq_len=18"),
    "empty document": (tensors, {"documents": [6, 0, 12]}, r"\[6, 0, 12\]"),
    "sinks of the wrong shape": (tensors, {"sinks": torch.zeros(2)}, r"sinks.*\(4,\).*\(2,\)"),
    "sinks of ints": (tensors, {"sinks": torch.zeros(4, dtype=torch.int32)}, "sinks.*torch.int32"),
}

# Nothing is wrong with any rank alone: they do not fit one another.
DISAGREEMENTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "layouts": (tensors, {"layout": "zigzag"}, "layout: rank 0 has 'contiguous', rank 1 has 'zigzag'"),
    "masks": (tensors, {"mask": Band(0, 3)}, r"mask: rank 0 has 'full', rank 1 has 'band\(0, 3\)'"),
    "scales": (tensors, {"scale": 0.5}, "scale: rank 0 has 0.35.*rank 1 has 0.5"),
    "schedules": (tensors, {"schedule": "all_gather"}, "schedule: rank 0 has 'ring', rank 1 has 'all_gather'"),
    "dtypes": (
        lambda: tensors(dtype=torch.bfloat16),
        {},
        "dtype: rank 0 has 'torch.float32', rank 1 has 'torch.bfloat16'",
    ),
    "shards": (lambda: tensors(tokens=5), {}, r"lengths: rank 0 has \(18,\), rank 1 has \(15,\)"),
    "batches": (lambda: tensors(batch=2), {}, "shapes: rank 0 has 'B=1.*rank 1 has 'B=2"),
    "documents": (tensors, {"documents": [9, 9]}, r"lengths: rank 0 has \(18,\), rank 1 has \(9, 9\)"),
    "sinks": (tensors, {"sinks": torch.zeros(4)}, "sinks: rank 0 has 'none', rank 1 has 'torch.float32'"),
    "heads of keys": (lambda: tensors(kv_heads=1), {}, "rank 1 has 'B=1 H=4 G=1"),
}


def check_cases() -> None:
    rank = dist.get_rank()
    for name, (make, options, words) in (CASES | DISAGREEMENTS).items():
        qkv = make() if rank == FAULTY else tensors()
        start = time.monotonic()
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            ring_attention(*qkv, **(options if rank == FAULTY else {}))
        assert re.search(words, str(caught.value)), (name, str(caught.value))
        if rank != FAULTY and name in CASES:
            assert "rank 1" in str(caught.value), (name, str(caught.value))
        assert time.monotonic() - start < 10
        assert ring_attention(*tensors()).shape == (1, 4, 6, 8)


def test_a_fault_on_one_rank_is_an_error_on_all():
    run(check_cases, WORLD, timeout=120)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CASES
        if name not in ("length", "transport", "schedule", "layout", "documents that do not add up")
    ],
)
def test_one_device_names_it_too(name):
    make, options, words = CASES[name]
    if name in ("grad_dtype", "validate", "length of text"):
        words = f"unknown keyword '{next(iter(options))}'"
    with pytest.raises((ValueError, NotImplementedError), match=words):
        attention(*make(), **options)


def check_gradient_modes() -> None:
    rank = dist.get_rank()
    q, k, v = tensors()
    with torch.set_grad_enabled(rank != FAULTY), pytest.raises(ValueError, match=r"ranks \[1\] run without gradients"):
        ring_attention(q.requires_grad_(), k, v)


def test_gradients_on_some_ranks_only_where_others_cannot_follow():
    run(check_gradient_modes, 2, timeout=60)


def check_meshes() -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "cp"))
    with pytest.raises(ValueError, match="one-dimensional"):
        ring_attention(*tensors(), group=mesh)
    with pytest.raises(ValueError, match="'world'"):
        ring_attention(*tensors(), group="world")


def test_meshes_of_several_dimensions():
    run(check_meshes, 4, timeout=60)


def test_a_backend_that_cannot_take_the_dtype(monkeypatch):
    from ringattn.backends import reference

    monkeypatch.setattr(reference, "refusal", lambda q, k, v, softcap: f"it does not take {q.dtype}")
    with pytest.raises(ValueError, match="'reference' cannot take this: it does not take torch.float32; choose"):
        attention(*tensors(), backend="reference")
