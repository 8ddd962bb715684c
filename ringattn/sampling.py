"""`sample`: the exact next token from a vocabulary that is split over ranks, the same token on any number of ranks.

This file checks and completes what a caller gives, has the ranks agree, and calls `ringattn.draw`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ringattn.comm import Comm, Group, Terms, gather_into, get_comm, group_name
from ringattn.draw import COLLECTIVES, Ranks, Sample, draw
from ringattn.keys import MAX_ID, Status
from ringattn.noise import MASK32
from ringattn.vocab import MAX_TEMPERATURE, MAX_VOCAB, Request, Rows, Slice

ORDERS = ("chained", "joint")
MOST_CANDIDATES = 256
"""A top_k up to this is decided by one message."""
CANDIDATES = 128
"""Logits that each rank sends where top_k does not say how many are needed; nuclei of language models are smaller."""

INTEGERS = {
    "seed": (-(1 << 63), (1 << 63) - 1),
    "position": (0, MASK32),
    "sample_index": (0, MASK32),
    "top_k": (0, MAX_ID),
}
FLOATS = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max),
    "presence_penalty": (-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max),
    "frequency_penalty": (-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max),
}


def sample(
    logits: Tensor,
    *,
    seed: Tensor | int,
    position: Tensor | int,
    group: Group = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    sample_index: Tensor | int = 0,
    temperature: Tensor | float = 1.0,
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
    min_p: Tensor | float = 0.0,
    logprobs: int = 0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    counts: Tensor | None = None,
    prompt: Tensor | None = None,
    repetition_penalty: Tensor | float = 1.0,
    presence_penalty: Tensor | float = 0.0,
    frequency_penalty: Tensor | float = 0.0,
    order: str = "chained",
    collective: str | None = None,
    validate: str | None = None,
    check: bool = False,
) -> Sample:
    """Draw one token a row from softmax(logits / temperature), with logits split over the ranks of a group.

    The token is a function of the row's seed, position and logits alone: it does not change with the number of ranks,
    the other rows, or the device, given equal logits. Plain sampling sends 8 bytes a row; filters and log-probabilities
    send one longer message, and more only where that does not decide a row.

    A parameter that may be a Tensor or a number is one value for all rows, or a tensor (B,) on the logits' device.
    Tensors are read on the device, so a captured CUDA graph follows them; numbers are frozen at capture.

    Args:
        logits: (B, V_local), float32, bfloat16 or float16: this rank's slice of the vocabulary. Slices follow one
            another in the order of ranks; they may be uneven or empty.
        seed: 64-bit key of each request (int64). Equal seeds at equal positions give equal noise.
        position: index of the token to draw, in [0, 2^32).
        group: ProcessGroup or one-dimensional DeviceMesh over which the vocabulary is split; None for the default group
            if torch.distributed is initialised, and one process otherwise.
        vocab_start: id of the first local token. None asks the other ranks in every call: give it in a hot loop.
        vocab_size: size of the vocabulary; columns beyond it are padding. None when there is no padding.
        sample_index: which of several draws at one position, in [0, 2^32).
        temperature: 0 takes the largest logit, the lowest id among equals.
        top_k: keep the k largest logits; 0 keeps all. Ties at the end go to the lowest ids.
        top_p: keep the smallest set of the largest logits that holds this share of the probability; 1 keeps all.
        min_p: keep tokens of at least this share of the largest probability; 0 keeps all.
        logprobs: n > 0 returns the log-probability and rank of the token and the n largest log-probabilities.
        mask: allowed tokens of the slice: bool (V_local,) or (B, V_local), or int32 words (..., ceil(V_local / 32))
            whose bit i % 32 of word i // 32 stands for local token i.
        bias: float32 (V_local,) or (B, V_local), added to the logits.
        counts: int32 (B, V_local), how often each token was generated; for the penalties.
        prompt: bool (B, V_local), tokens of the prompt; for the repetition penalty.
        repetition_penalty: divides positive and multiplies negative logits of tokens generated or in the prompt.
        presence_penalty: subtracted from the logits of generated tokens.
        frequency_penalty: subtracted once for each time a token was generated.
        order: "chained" takes min-p, then top-k, then top-p of what is left; "joint" takes each on the full
            distribution and keeps what all three keep.
        collective: "all_reduce" or "all_gather" of the keys in plain sampling; None for the first.
        validate: "always" or "sampled": when ranks compare their arguments before they draw. None for always, except
            over NCCL.
        check: raise for rows without a token (reads the statuses on the host).

    Returns:
        `Sample(ids, status, logprobs)`. A row that is all masked or -inf, or that holds a NaN on any rank, has id -1;
        its status says why (`ringattn.keys.Status`). So has a row whose device tensors hold values out of range.

    Raises:
        ValueError: a number out of range, a tensor of the wrong shape, dtype or device, slices that overlap or leave
            gaps, ranks that disagree: on every rank. With `check`, rows without a token.

    Source:
        Gumbel-max over counter noise, see docs/sampling.md; top-p: Holtzman et al., 2020; min-p: Nguyen et al., 2024.

    Example:
        >>> logits = torch.tensor([[0.0, 4.0, 2.0, 1.0]])
        >>> sample(logits, seed=1, position=0, temperature=0.0).ids.tolist()
        [1]
    """
    given = dict(locals())
    name = group_name(group)
    comm = get_comm(name) if name else None
    error, prepared = None, None
    try:
        prepared = _prepare(given)
    except (ValueError, TypeError) as failure:
        error = failure if isinstance(failure, ValueError) else ValueError(str(failure))
    start = vocab_start or 0
    if comm is not None and comm.world > 1:
        if comm.due(validate or "") or vocab_start is None:
            comm.agree(Terms({"call": "sample", **{key: _describe(key, value) for key, value in given.items()}}), error)
            start, total = agree_on_slices(comm, logits.shape[1], vocab_start, vocab_size)
            error = error or _too_large(total, prepared)
    if error is not None:
        raise error
    assert prepared is not None
    rows, request, part = prepared
    part = _without_padding(part, start, vocab_size)
    ranks = Ranks(comm if comm is not None and comm.world > 1 else None)
    result = draw([part], rows, request, ranks, collective or "all_reduce")
    if check and bool((result.status != Status.OK).any()):
        failed = {row: Status(code).name for row, code in enumerate(result.status.tolist()) if code}
        raise ValueError(f"rows without a token: {failed}")
    return result


def _describe(name: str, value: Any) -> Any:
    """What of an argument must be equal on all ranks."""
    if name in ("group", "vocab_start", "mask", "bias", "counts", "prompt"):
        return value is None
    if name == "logits":
        return (len(value), str(value.dtype))
    return (str(value.dtype), tuple(value.shape)) if isinstance(value, Tensor) else value


def _prepare(given: dict[str, Any]) -> tuple[Rows, Request, Slice]:
    """Check everything that this rank alone can check."""
    logits = given["logits"]
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise ValueError(f"logits must be a tensor (B, V_local), got {_what(logits)}")
    if type(logits) is not Tensor and hasattr(logits, "to_local"):
        raise ValueError("logits is a DTensor; pass logits.to_local() and the group of its mesh dimension")
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"logits must be float32, bfloat16 or float16, got {logits.dtype}")
    for key, choices in (
        ("order", ORDERS),
        ("collective", (*COLLECTIVES, None)),
        ("validate", ("always", "sampled", None)),
    ):
        if given[key] not in choices:
            raise ValueError(f"unknown {key} {given[key]!r}; choose one of {choices}")
    for key, least in (("vocab_start", 0), ("vocab_size", 1)):
        value = given[key]
        if value is not None and not (type(value) is int and least <= value <= MAX_ID):
            raise ValueError(f"{key} must be an int in [{least}, {MAX_ID}] or None, got {value!r}")
    _check_number("logprobs", given["logprobs"], 0, CANDIDATES, int)
    batch, device = len(logits), logits.device
    values = {key: _rows(key, given[key], batch, device) for key in (*INTEGERS, *FLOATS)}
    rows = Rows(
        values["seed"],
        values["position"],
        values["sample_index"],
        values["temperature"],
        values["top_k"],
        values["top_p"],
        values["min_p"],
        values["repetition_penalty"],
        values["presence_penalty"],
        values["frequency_penalty"],
    )
    edits = {key: _edit(key, given[key], logits) for key in ("mask", "bias", "counts", "prompt")}
    prepared = rows, _request(given), Slice(logits.detach(), 0, **edits)
    if error := _too_large(given["vocab_size"] or logits.shape[1], prepared):
        raise error
    return prepared


def _too_large(total: int, prepared: tuple[Rows, Request, Slice] | None) -> ValueError | None:
    if prepared is None or not prepared[1].candidates or total <= MAX_VOCAB:
        return None
    return ValueError(f"filters and logprobs take vocabularies of up to {MAX_VOCAB} tokens, got {total}")


def _what(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)


def _check_number(name: str, value: Any, least: float, most: float, kind: type) -> None:
    number = type(value) is int or (kind is float and isinstance(value, float))
    if not number or math.isnan(value) or not least <= value <= most:
        raise ValueError(
            f"{name} must be {'an int' if kind is int else 'a number'} in [{least}, {most}], got {value!r}"
        )


def _rows(name: str, value: Any, batch: int, device: torch.device) -> Tensor:
    """A parameter as a tensor (B,)."""
    whole = name in INTEGERS
    dtype = torch.int64 if whole else torch.float32
    if not isinstance(value, Tensor):
        least, most = (INTEGERS if whole else FLOATS)[name]
        _check_number(name, value, least, most, int if whole else float)
        return _constant(value, dtype, device).expand(batch)
    allowed = (torch.int64,) if name == "seed" else (torch.int64, torch.int32)
    if whole and value.dtype not in allowed or not whole and not value.dtype.is_floating_point:
        raise ValueError(
            f"{name} must be {' or '.join(map(str, allowed)) if whole else 'floating point'}, got {value.dtype}"
        )
    if value.device != device or value.shape not in ((), (1,), (batch,)):
        raise ValueError(f"{name} must be ({batch},) on {device}, got {_what(value)} on {value.device}")
    return value.to(dtype).expand(batch)


_constants: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}
MOST_CONSTANTS = 512


def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One value on the device, kept: a fill for each of seven numbers took 6 us of a graph's 10 us for one row."""
    known = _constants.get((value, dtype, device))
    if known is not None:
        return known
    made = torch.full((1,), value, dtype=dtype, device=device)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if not capturing and len(_constants) < MOST_CONSTANTS:  # a graph's memory is not ours to keep
        _constants[value, dtype, device] = made
    return made


def _edit(name: str, value: Tensor | None, logits: Tensor) -> Tensor | None:
    """Check a tensor that edits the logits, and give it two dimensions."""
    if value is None:
        return None
    dtypes = {
        "mask": (torch.bool, torch.int32),
        "bias": (torch.float32,),
        "counts": (torch.int32,),
        "prompt": (torch.bool,),
    }
    if not isinstance(value, Tensor) or value.dtype not in dtypes[name] or value.device != logits.device:
        choices = " or ".join(map(str, dtypes[name]))
        raise ValueError(f"{name} must be {choices} on {logits.device}, got {_what(value)}")
    shared = name in ("mask", "bias")
    rows = value[None] if shared and value.dim() == 1 else value
    width = (logits.shape[1] + 31) // 32 if value.dtype == torch.int32 and name == "mask" else logits.shape[1]
    if rows.dim() != 2 or rows.shape[1] != width or len(rows) not in ((1, len(logits)) if shared else (len(logits),)):
        raise ValueError(
            f"{name} must be ({len(logits)}, {width}) for logits {tuple(logits.shape)}, got {_what(value)}"
        )
    return rows


def _request(given: dict[str, Any]) -> Request:
    """What the host knows of the filters; a tensor may hold anything."""
    top_k, top_p, min_p, logprobs = (given[key] for key in ("top_k", "top_p", "min_p", "logprobs"))
    may_filter = any(isinstance(value, Tensor) for value in (top_k, top_p, min_p)) or top_k or top_p < 1 or min_p
    if not may_filter and not logprobs:
        return Request()
    known_k = type(top_k) is int and 0 < top_k <= MOST_CANDIDATES
    candidates = max(16, 1 << (max(top_k, logprobs) - 1).bit_length()) if known_k else CANDIDATES
    chained = given["order"] == "chained"
    narrowed = type(top_k) is int and top_k > 0 or not isinstance(min_p, Tensor) and min_p > 0
    return Request(
        candidates,
        header=bool(logprobs) or not (chained and narrowed),
        certain=known_k and chained or not may_filter,
        order=given["order"],
        logprobs=logprobs,
    )


def agree_on_slices(comm: Comm, width: int, start: int | None, vocab_size: int | None) -> tuple[int, int]:
    """Start of this rank's slice and end of all; raises alike on all ranks where slices do not tile the vocabulary."""
    mine = torch.tensor([-1 if start is None else start, width])
    everyone = torch.empty(comm.world * 2, dtype=torch.int64)
    gather_into(everyone, mine, comm.control)
    starts, widths = everyone.view(-1, 2).T.tolist()
    expected = [sum(widths[:rank]) for rank in range(comm.world)]
    total = sum(widths)
    for rank, (given, needed) in enumerate(zip(starts, expected, strict=True)):
        if given not in (-1, needed):
            what = "leaves a gap after" if given > needed else "overlaps"
            raise ValueError(
                f"slice of rank {rank} starts at {given} and {what} the slices before it, which end at {needed}"
            )
    if vocab_size is not None and total < vocab_size:
        raise ValueError(f"slices hold {total} tokens, fewer than vocab_size={vocab_size}")
    if total > MAX_ID:
        raise ValueError(f"slices hold {total} tokens, more than {MAX_ID}")
    return expected[comm.rank], vocab_size or total


def _without_padding(part: Slice, start: int, vocab_size: int | None) -> Slice:
    width = part.logits.shape[1]
    if vocab_size is not None:
        width = max(0, min(width, vocab_size - start))

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, :width]

    words = part.mask is not None and part.mask.dtype == torch.int32
    mask = part.mask if words else cut(part.mask)
    return Slice(part.logits[:, :width], start, mask, cut(part.bias), cut(part.counts), cut(part.prompt))
