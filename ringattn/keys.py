"""One int64 holds a (value, token id) pair so that the integer maximum is the largest value, then the lowest id.

`key = order(value) << 31 | (2^31 - 1 - id)`, with `order` the float32 bits made unsigned and monotone. Keys of real
tokens are positive and below the poison keys; 0 is the identity of the maximum: no token at all. Non-negative int64 is
what every backend of torch.distributed can reduce (gloo refuses uint64), and 0 is how fresh counters come.
"""

from enum import IntEnum

import torch
from torch import Tensor

ID_BITS = 31
MAX_ID = (1 << ID_BITS) - 1
POISON_NAN = (1 << 63) - 1
"""Key of a row that holds a NaN: above +inf, so that the maximum carries it to all ranks."""
POISON_PARAMETER = POISON_NAN - (1 << ID_BITS)
"""Key of a row with an invalid parameter in a device tensor."""
NEGATIVE_INFINITY = 0x007FFFFF
"""`order(-inf)`; nothing at or below it is a token."""


class Status(IntEnum):
    """What became of a row; anything but OK comes with id -1."""

    OK = 0
    NO_TOKEN = 1
    """Every token is masked or -inf, or the row is empty."""
    NAN = 2
    """A logit is NaN on some rank."""
    BAD_PARAMETER = 3
    """A value in a device tensor is out of range: temperature, top_k, top_p, min_p, a penalty."""


def order(values: Tensor) -> Tensor:
    """float32 to int64 in [0, 2^32), strictly monotone; both zeros are one value and every NaN is 2^32 - 1."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    signed = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return torch.where(values != values, 0xFFFFFFFF, signed + (1 << 31))


def pack(values: Tensor, ids: Tensor) -> Tensor:
    """Keys of float32 values and int64 ids in [0, 2^31); NaN gives the poison key.

    Example:
        >>> keys = pack(torch.tensor([1.0, 2.0, 2.0]), torch.arange(3))
        >>> int(ids_of(keys.max()))
        1
    """
    return torch.where(values != values, POISON_NAN, (order(values) << ID_BITS) | (MAX_ID - ids))


def values_of(keys: Tensor) -> Tensor:
    """The float32 values of keys; meaningless for 0 and the poison keys."""
    signed = ((keys >> ID_BITS) - (1 << 31)).to(torch.int32)
    return (signed ^ ((signed >> 31) & 0x7FFFFFFF)).view(torch.float32)


def ids_of(keys: Tensor) -> Tensor:
    """The int64 ids of keys; meaningless for 0 and the poison keys."""
    return MAX_ID - (keys & MAX_ID)


def is_token(keys: Tensor) -> Tensor:
    """Whether keys stand for a token that may be drawn: above -inf and no poison."""
    return ((keys >> ID_BITS) > NEGATIVE_INFINITY) & (keys < POISON_PARAMETER)


def decode(keys: Tensor) -> tuple[Tensor, Tensor]:
    """ids (-1 where there is no token) and statuses, both int64, of the winning keys of rows."""
    token = is_token(keys)
    status = torch.where(token, int(Status.OK), int(Status.NO_TOKEN))
    status = torch.where(keys == POISON_PARAMETER, int(Status.BAD_PARAMETER), status)
    status = torch.where(keys == POISON_NAN, int(Status.NAN), status)
    return torch.where(token, ids_of(keys), -1), status
