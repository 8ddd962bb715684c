"""Packed keys: order of values, ties to the lowest id, round trips, and what is no token."""

import torch

from ringattn.keys import POISON_NAN, POISON_PARAMETER, Status, decode, ids_of, is_token, order, pack, values_of


def random_floats(count: int, seed: int = 0) -> torch.Tensor:
    """Random bit patterns, so every exponent, subnormals, infinities and NaNs, and the specials."""
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 3.4028235e38, -3.4028235e38])
    return torch.cat([special, bits.view(torch.float32)])


def test_order_is_strictly_that_of_the_values() -> None:
    x = random_floats(1_000_000)
    x = x[~x.isnan()]
    y = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    assert torch.equal(order(x) > order(y), x > y)
    assert torch.equal(order(x) == order(y), x == y)


def test_round_trip() -> None:
    x = random_floats(1_000_000)
    x = x[~x.isnan()]
    ids = torch.randint(0, 1 << 31, (len(x),), generator=torch.Generator().manual_seed(2))
    keys = pack(x, ids)
    assert torch.equal(ids_of(keys), ids) and torch.equal(values_of(keys), x + 0.0)
    assert (keys > 0).all() and (keys < POISON_PARAMETER).all()


def test_equal_values_go_to_the_lowest_id() -> None:
    keys = pack(torch.tensor([0.0, -0.0, 0.0, -1.0]), torch.tensor([9, 4, (1 << 31) - 1, 0]))
    assert int(ids_of(keys.max())) == 4


def test_a_nan_of_either_sign_wins_over_everything() -> None:
    nan = torch.tensor([torch.nan])
    negative = (nan.view(torch.int32) | -(1 << 31)).view(torch.float32)
    assert pack(torch.cat([nan, negative]), torch.tensor([3, 5])).tolist() == [POISON_NAN] * 2
    assert (order(negative) > order(torch.tensor([torch.inf]))).all()


def test_decode_names_what_is_no_token() -> None:
    keys = pack(torch.tensor([-torch.inf, -3.4e38, torch.inf]), torch.tensor([7, 7, 7]))
    keys = torch.cat([keys, torch.tensor([0, POISON_NAN, POISON_PARAMETER])])
    ids, status = decode(keys)
    assert ids.tolist() == [-1, 7, 7, -1, -1, -1]
    assert [Status(code).name for code in status.tolist()] == [
        "NO_TOKEN",
        "OK",
        "OK",
        "NO_TOKEN",
        "NAN",
        "BAD_PARAMETER",
    ]
    assert is_token(keys).tolist() == [False, True, True, False, False, False]
