"""Packed documents, sinks, softcap, prefixes and latent heads over gloo equal dense attention in float64."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from ringattn import attention, ring_attention
from ringattn.launch.spawn import run
from ringattn.layout import LAYOUTS, make_shards, shard_positions
from ringattn.mask import as_band
from ringattn.testing import make_inputs

PACKS = [(29,), (1, 28), (10, 10, 9), (9, 1, 1, 1, 17), (4, 5, 20)]
MASKS = {"full": "full", "causal": "causal", "window": ringattn.window(5), "both": ringattn.window(3, 2)}


def dense(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lengths, mask, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention with an S x S matrix and a column for the sinks."""
    band = as_band(mask)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * 0.4
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    i = torch.arange(q.shape[2])
    lag = i.unsqueeze(1) - i
    seen = (lag <= band.hi) & ((lag >= band.lo) | (i < band.prefix)) & (document.unsqueeze(1) == document)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    return weights @ v.repeat_interleave(q.shape[1] // k.shape[1], 1), torch.logsumexp(scores, dim=-1)


def assert_equal(layout: str, lengths, mask, *, with_sinks=False, softcap=None, **options) -> None:
    total = sum(lengths)
    q, k, v, do = make_inputs(1, 4, 2, total, 6, 4, dtype=torch.float64)
    dlse = torch.randn(1, 4, total, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sinks = torch.tensor([5.0, -3.0, 0.0, 1.0], dtype=torch.float64) if with_sinks else None
    rows = shard_positions(make_shards(layout, tuple(lengths), dist.get_world_size())[dist.get_rank()])

    def results(call, tensors, do, dlse):
        leaves = [x.detach().requires_grad_() if x is not None else None for x in tensors]
        torch.autograd.backward(call(*leaves), [do, dlse])
        return [x.grad for x in leaves if x is not None]

    everything = (q, k, v, sinks)
    expected = dense(*everything, lengths, mask, softcap)
    expected_grads = results(lambda *x: dense(*x, lengths, mask, softcap), everything, do, dlse)

    def ring(q, k, v, sinks):
        return ring_attention(
            q,
            k,
            v,
            sinks=sinks,
            layout=layout,
            documents=lengths,
            mask=mask,
            scale=0.4,
            softcap=softcap,
            return_lse=True,
            **options,
        )

    local = [x[:, :, rows] for x in (q, k, v)]
    out, lse = ring(*local, sinks)
    for mine, whole in zip((out, lse), expected, strict=True):
        torch.testing.assert_close(mine, whole[:, :, rows], rtol=1e-11, atol=1e-12)
    grads = results(ring, (*local, sinks), do[:, :, rows], dlse[:, :, rows])
    for mine, whole in zip(grads[:3], expected_grads[:3], strict=True):
        torch.testing.assert_close(mine, whole[:, :, rows], rtol=1e-11, atol=1e-12)
    if with_sinks:
        dist.all_reduce(grads[3])
        torch.testing.assert_close(grads[3], expected_grads[3], rtol=1e-11, atol=1e-12)


def check_documents() -> None:
    for layout, lengths, mask in itertools.product(LAYOUTS, PACKS, MASKS.values()):
        assert_equal(layout, lengths, mask, backend="reference")


@pytest.mark.parametrize("world", [2, 3])
def test_documents(world):
    run(check_documents, world, timeout=240)


def check_the_rest() -> None:
    for layout in LAYOUTS:
        assert_equal(layout, (9, 20), "causal", with_sinks=True, backend="reference")
        assert_equal(layout, (29,), ringattn.window(4), with_sinks=True, softcap=3.0, backend="reference")
        assert_equal(layout, (29,), ringattn.prefix_lm(13), backend="reference")
        for schedule in ("ring", "all_gather", "direct"):
            assert_equal(layout, (3, 15, 11), "causal", with_sinks=True, schedule=schedule)


@pytest.mark.parametrize("world", [1, 4])
def test_sinks_softcap_and_prefixes(world):
    run(check_the_rest, world, timeout=240)


def test_a_sink_for_a_row_without_keys():
    """Its whole weight is on the sink: the output is 0, the log-sum-exp is the sink's score."""
    q, k, v, _ = make_inputs(1, 2, 2, 4, 8)
    sinks = torch.tensor([0.5, -torch.inf])
    out, lse = attention(q, k, v, sinks=sinks, mask=ringattn.Band(lo=1), return_lse=True)
    assert not out[:, :, 0].any() and lse[0, 0, 0] == 0.5 and lse[0, 1, 0] == -torch.inf and not out.isnan().any()


def test_a_very_low_sink_changes_nothing():
    q, k, v, _ = make_inputs(1, 2, 2, 6, 8)
    plain = attention(q, k, v, mask="causal")
    assert torch.equal(attention(q, k, v, mask="causal", sinks=torch.full((2,), -1e9)), plain)


def test_documents_as_running_sums_on_one_device():
    q, k, v, _ = make_inputs(1, 2, 2, 12, 8)
    packed = attention(q, k, v, mask="causal", documents=torch.tensor([0, 5, 12]))
    alone = [attention(*(x[:, :, rows] for x in (q, k, v)), mask="causal") for rows in (slice(0, 5), slice(5, 12))]
    torch.testing.assert_close(packed, torch.cat(alone, dim=2))
