"""Merging is associative, has an identity, and does not read what has no weight."""

import pytest
import torch

from ringattn.merge import merge, merge_into, merge_states, row_delta


def states(count: int, dtype=torch.float64, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    outs = torch.randn(count, 2, 3, 5, 4, dtype=dtype, generator=generator)
    lses = spread * torch.randn(count, 2, 3, 5, dtype=dtype, generator=generator)
    return outs, lses


def test_the_merge_of_parts_is_the_whole():
    scores, values = torch.randn(6, 12, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    parts = [
        (torch.softmax(scores[:, keys], dim=1) @ values[keys], torch.logsumexp(scores[:, keys], dim=1))
        for keys in (slice(0, 5), slice(5, 6), slice(6, 12))
    ]
    out, lse = merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)))
    torch.testing.assert_close(out, torch.softmax(scores, dim=1) @ values, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(lse, torch.logsumexp(scores, dim=1), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("spread", [1.0, 300.0, 1e4])
def test_order_and_grouping_do_not_matter(spread):
    outs, lses = states(4, spread=spread)
    lses[1, 0] = -torch.inf
    pairs = list(zip(outs, lses, strict=True))
    left = merge(*merge(*merge(*pairs[0], *pairs[1]), *pairs[2]), *pairs[3])
    right = merge(*pairs[0], *merge(*pairs[1], *merge(*pairs[2], *pairs[3])))
    mixed = merge(*merge(*pairs[3], *pairs[1]), *merge(*pairs[2], *pairs[0]))
    for other in (right, mixed, merge_states(outs, lses)):
        for a, b in zip(left, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_identity_is_exact_whatever_it_holds():
    outs, lses = states(2)
    outs[1], lses[1] = torch.nan, -torch.inf
    for order in ((0, 1), (1, 0)):
        out, lse = merge_states(outs[list(order)], lses[list(order)])
        assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])


def test_two_empty_states_are_empty():
    out, lse = merge(torch.zeros(2, 3), torch.full((2,), -torch.inf), torch.zeros(2, 3), torch.full((2,), -torch.inf))
    assert torch.equal(out, torch.zeros(2, 3)) and (lse == -torch.inf).all()


def test_nan_with_weight_is_not_hidden():
    out, lse = merge(torch.full((1, 2), torch.nan), torch.zeros(1), torch.ones(1, 2), torch.zeros(1))
    assert out.isnan().all()
    out, lse = merge(torch.ones(1, 2), torch.full((1,), torch.nan), torch.ones(1, 2), torch.zeros(1))
    assert out.isnan().all() and lse.isnan().all()


def test_in_place_equals_the_pure_form_bit_for_bit():
    outs, lses = states(2, dtype=torch.float32)
    lses[0, 0, 0], lses[1, 1, 1], lses[:, 1, 2] = -torch.inf, -torch.inf, -torch.inf
    whole, lse = outs[0].repeat(1, 1, 2, 1), lses[0].repeat(1, 1, 2)
    merge_into(whole[:, :, 5:], lse[:, :, 5:], outs[1], lses[1])
    expected = merge(outs[0], lses[0], outs[1], lses[1])
    assert torch.equal(whole[:, :, 5:], expected[0]) and torch.equal(lse[:, :, 5:], expected[1])
    assert torch.equal(whole[:, :, :5], outs[0])


def test_large_magnitudes_do_not_overflow():
    out, lse = merge(torch.ones(1, 1), torch.tensor([3e38]), torch.zeros(1, 1), torch.tensor([-3e38]))
    assert out.item() == 1.0 and lse.item() == torch.tensor(3e38).item()


def test_row_delta_takes_the_gradient_of_the_lse():
    do, out, dlse = torch.randn(2, 3, 4).half(), torch.randn(2, 3, 4).half(), torch.randn(2, 3)
    expected = (do.double() * out.double()).sum(-1) - dlse
    torch.testing.assert_close(row_delta(do, out, dlse).double(), expected, rtol=1e-5, atol=1e-5)
