"""`ring_attention` and `attention`: check the arguments on all ranks, choose a backend, and call the custom op.

`attention` is the ring in a world of one, which sends nothing.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.comm import NEEDS, OFF, ON, TRANSPORTS, VALIDATE, Group, Terms, get_comm, group_name, ring_place
from ringattn.dispatch import check_choice, choose_backend
from ringattn.header import CHECKS
from ringattn.heads import check_heads
from ringattn.layout import document_lengths, layout_name, shard_sizes
from ringattn.mask import FULL, Band, as_band
from ringattn.ops import Options, run_attention
from ringattn.schedule import schedule_name

FORMATS = ("bhsd", "bshd")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GRAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

REPLACED = {
    "is_causal": "mask='causal'",
    "causal": "mask='causal'",
    "attn_mask": "mask= with a band of lags: 'full', 'causal' or window(left, right)",
    "window_size": "mask=window(left, right)",
    "softmax_scale": "scale=",
    "enable_gqa": "nothing: grouped heads are seen from the shapes",
    "dropout_p": "nothing: dropout on attention weights is not supported",
}
"""Keywords of other libraries, and what takes their place."""


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group = None,
    layout: str = "contiguous",
    mask: Band | str = FULL,
    seq_len: int | None = None,
    documents: Sequence[int] | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    schedule: str | None = None,
    heads_degree: int = 1,
    transport: str | None = None,
    backend: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    qkv_format: str = "bhsd",
    validate: str | None = None,
    check: str | None = None,
    return_lse: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over one sequence that is sharded over the ranks of a group.

    Every rank calls it with its shard, and gets the attention of its queries over the keys of all ranks. Keys and
    values move between ranks while blocks that have arrived are computed, and partial results merge by their
    log-sum-exp (Liu et al., Ring Attention, 2023, arXiv 2310.01889; Dao, FlashAttention-2, 2023, arXiv 2307.08691).
    Differentiable, also through the LSE; the backward pass communicates, so all ranks must run it.

    Args:
        query: (B, H, S, D), this rank's queries in the order of the layout, any strides.
        key: (B, G, S, D); G divides H, and K/V head g serves query heads g * H / G onwards.
        value: (B, G, S, Dv).
        group: ProcessGroup or one-dimensional DeviceMesh; None is the default group, or a world of one without any.
        layout: how the sequence is sharded: "contiguous", "zigzag" (or "headtail"), "striped", and for packed documents
            "balanced" or "per_document".
        mask: a `Band` of lags or its name: "full", "causal", `window(left, right)`, `prefix_lm(length)`; in global
            positions.
        seq_len: tokens of the whole sequence; None means that all shards are equal.
        documents: lengths of the documents that are packed into the sequence, or their running sums from 0 on
            (cu_seqlens), on the CPU. Tokens of different documents do not see each other.
        scale: factor of the scores; None is 1 / sqrt(D).
        softcap: scores become `softcap * tanh(score / softcap)`; None leaves them alone.
        sinks: (H,), a learned score a head that takes weight and gives no value; added once, after the last merge. Its
            gradient is this rank's part, as for every parameter.
        schedule: "ring"; "ring_by_2" and "ring_by_4", with so many blocks a launch; "direct", where only needed rows
            move, straight from their owners; "all_gather", one exchange with O(S) memory where the others take
            O(S / N). None is "ring", or "direct" for packed documents.
        heads_degree: so many neighbours swap heads for tokens before the ring and back after it (Ulysses; USP with a
            ring around). It divides the ranks and H, and divides G or is a multiple of it; 1 swaps nothing.
        transport: "p2p", or "host" (through host memory over gloo); None chooses by device and group.
        backend: "triton", "cpu" or "reference"; None takes the first that can.
        grad_dtype: dtype in which gradients of keys and values travel. They are summed in float32 (float64 for
            float64 inputs) whatever it is; float32 means the dtype of the sum.
        qkv_format: "bhsd", or "bshd" for (B, S, H, D) tensors, which are read and written without a copy.
        validate: "always" compares options over the ranks before every call, "sampled" before some; None is "always",
            on NCCL "sampled".
        check: what is compared before a block of another rank is used: "header" (who sent it, at which step, of which
            block, dtype and length), "checksum" (also the sum of its words), "finite" (also that no number is NaN or
            infinite), or "off"; None is "header" over gloo and "off" over NCCL.
        return_lse: also return the log-sum-exp.

    Returns:
        (B, H, S, Dv) in query's dtype, or (B, S, H, Dv) for "bshd". With `return_lse`, also (B, H, S) in float32
        (float64 for float64 inputs), the natural logarithm, -inf for a query that sees no key.

    Raises:
        ValueError: on every rank, for shapes, dtypes, devices, names or lengths that do not fit, and for ranks that
            disagree on them.
        RingError: on every rank that lives, once blocks move: a rank died, hung, failed or sent what does not fit.
        NotImplementedError: on every rank, for what other libraries do and this one does not.

    Example:
        >>> q, k, v = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)
        >>> ring_attention(q, k, v, layout="zigzag", mask="causal").shape
        torch.Size([1, 4, 16, 8])
    """
    return _attend(
        (query, key, value),
        sinks,
        group_name(group),
        unknown,
        layout=layout,
        mask=mask,
        seq_len=seq_len,
        documents=documents,
        scale=scale,
        softcap=softcap,
        schedule=schedule,
        heads_degree=heads_degree,
        transport=transport,
        backend=backend,
        grad_dtype=grad_dtype,
        qkv_format=qkv_format,
        validate=validate,
        check=check,
        return_lse=return_lse,
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Band | str = FULL,
    documents: Sequence[int] | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
    qkv_format: str = "bhsd",
    return_lse: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention on one device, by the kernels that `ring_attention` runs: what a ring is compared with.

    Args:
        query, key, value, mask, documents, scale, softcap, sinks, backend, qkv_format, return_lse: as in
            `ring_attention`.

    Returns:
        As `ring_attention` in a world of one.

    Raises:
        ValueError, NotImplementedError: as `ring_attention`.

    Example:
        >>> q = torch.randn(1, 2, 16, 8)
        >>> out, lse = attention(q, q, q, mask="causal", return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 2, 16, 8]), torch.Size([1, 2, 16]))
    """
    return _attend(
        (query, key, value),
        sinks,
        "",
        unknown,
        mask=mask,
        documents=documents,
        scale=scale,
        softcap=softcap,
        backend=backend,
        qkv_format=qkv_format,
        return_lse=return_lse,
    )


def _attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    group: str,
    unknown: dict[str, Any],
    *,
    qkv_format: str,
    return_lse: bool,
    **settings: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Check the arguments; let the other ranks know if they are wrong; run the op."""
    comm = get_comm(group) if group and not torch.compiler.is_compiling() else None
    grad = _grad_state((*qkv, sinks))
    try:
        query, key, value = _check_tensors(qkv, qkv_format, unknown)
        _check_sinks(sinks, query)
        check_choice("return_lse", return_lse, (False, True))
        options = _check_options(query, key, value, group=group, bshd=qkv_format == "bshd", **settings)
    except (ValueError, NotImplementedError) as error:
        validate = settings.get("validate")
        if comm is not None and comm.due(validate if validate in VALIDATE else ""):
            comm.agree(Terms(grad=grad), error)
        raise
    agreed = False
    if comm is not None and grad == ON:
        # Nothing here requires a gradient, but if something on another rank does, the ring runs backward on all.
        agreed = True
        if comm.due(options.validate) and comm.agree(options.terms(query, key, value, sinks, grad)):
            query = query.detach().requires_grad_()
    out, lse = run_attention(query, key, value, sinks, grad, agreed, *options)
    out = out.transpose(1, 2) if options.bshd else out
    return (out, lse) if return_lse else out


def _grad_state(tensors: Sequence[Any]) -> int:
    if not torch.is_grad_enabled():
        return OFF
    return NEEDS if any(isinstance(x, Tensor) and x.requires_grad for x in tensors) else ON


def _check_tensors(
    qkv: tuple[Tensor, Tensor, Tensor], qkv_format: str, unknown: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as (B, H, S, D) views, if they fit one another."""
    for name in unknown:
        if name in REPLACED:
            raise NotImplementedError(f"{name}={unknown[name]!r} is not taken; use {REPLACED[name]}")
        raise ValueError(f"unknown keyword {name!r} ({unknown[name]!r})")
    check_choice("qkv_format", qkv_format, FORMATS)
    for name, x in zip(("query", "key", "value"), qkv, strict=True):
        if not isinstance(x, Tensor) or x.ndim != 4:
            what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor of four dimensions ({qkv_format}), got {what}")
    query, key, value = _autocast(qkv)
    if len({x.dtype for x in (query, key, value)}) > 1 or query.dtype not in DTYPES:
        raise ValueError(
            f"query, key and value must have one dtype of {', '.join(map(str, DTYPES))}; got {query.dtype}, "
            f"{key.dtype}, {value.dtype}"
        )
    if len({x.device for x in (query, key, value)}) > 1:
        raise ValueError(
            f"query, key and value must be on one device, got {query.device}, {key.device}, {value.device}"
        )
    if qkv_format == "bshd":
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    (batch, heads, tokens, dim), groups = query.shape, key.shape[1]
    if key.shape != (batch, groups, tokens, dim) or value.shape[:3] != (batch, groups, tokens) or not dim:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(
            f"need query (B, H, S, D), key (B, G, S, D), value (B, G, S, Dv) with D > 0; got (bhsd) {shapes}"
        )
    if not groups or heads % groups:
        raise ValueError(
            f"the number of query heads must be a multiple of that of key heads, got H={heads}, G={groups}"
        )
    return query, key, value


def _check_sinks(sinks: Any, query: Tensor) -> None:
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or sinks.shape != query.shape[1:2] or not sinks.is_floating_point():
        what = f"{sinks.dtype} of shape {tuple(sinks.shape)}" if isinstance(sinks, Tensor) else repr(sinks)
        raise ValueError(f"sinks must be a floating tensor of shape (H,) = ({query.shape[1]},), got {what}")
    if sinks.device != query.device:
        raise ValueError(f"sinks must be on query's device {query.device}, got {sinks.device}")


def _autocast(qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors in autocast's dtype, if autocast is on for their device; float64 is left alone, as torch does."""
    device = qkv[0].device.type
    if not torch.is_autocast_enabled(device) or any(x.dtype == torch.float64 for x in qkv):
        return qkv
    query, key, value = (x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() else x for x in qkv)
    return query, key, value


def _check_options(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Band | str,
    scale: float | None,
    softcap: float | None,
    backend: str | None,
    bshd: bool,
    group: str,
    layout: str = "contiguous",
    seq_len: int | None = None,
    documents: Sequence[int] | Tensor | None = None,
    schedule: str | None = None,
    heads_degree: int = 1,
    transport: str | None = None,
    grad_dtype: torch.dtype = torch.float32,
    validate: str | None = None,
    check: str | None = None,
) -> Options:
    """The settings of a call, each checked."""
    band = as_band(mask)
    softcap = 0.0 if softcap is None else _number("softcap", softcap)
    lengths = _lengths(query.shape[2], layout, seq_len, documents, group)
    if isinstance(heads_degree, bool) or not isinstance(heads_degree, int) or heads_degree < 1:
        raise ValueError(f"heads_degree must be an int of at least 1, got {heads_degree!r}")
    if heads_degree > 1:
        check_heads(query.shape[1], key.shape[1], heads_degree, ring_place(group)[1])
    return Options(
        layout=layout_name(layout),
        lo=band.lo,
        hi=band.hi,
        prefix=band.prefix,
        lengths=lengths,
        scale=1 / math.sqrt(query.shape[3]) if scale is None else _number("scale", scale),
        softcap=softcap,
        schedule=schedule_name(("ring" if len(lengths) == 1 else "direct") if schedule is None else schedule),
        heads_degree=heads_degree,
        transport=check_choice("transport", transport, (None, *TRANSPORTS)) or "",
        backend=_backend_now(backend, query, key, value, softcap),
        grad_dtype=check_choice("grad_dtype", grad_dtype, GRAD_DTYPES),
        bshd=bshd,
        group=group,
        validate=check_choice("validate", validate, (None, *VALIDATE)) or "",
        check=check_choice("check", check, (None, *CHECKS)) or "",
    )


def _backend_now(name: str | None, q: Tensor, k: Tensor, v: Tensor, softcap: float) -> str:
    """The backend's name; in a compiled graph the choice, which imports modules, is left to the op."""
    return name or "" if torch.compiler.is_compiling() else choose_backend(name, q, k, v, softcap)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return float(value)


def _lengths(tokens: int, layout: str, seq_len: int | None, documents: Any, group: str) -> tuple[int, ...]:
    """The lengths of documents over all ranks, if this rank holds what the layout deals it."""
    rank, world = ring_place(group)
    if seq_len is None and documents is None:
        return (tokens * world,)
    if seq_len is not None and (isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 0):
        raise ValueError(f"seq_len must be a non-negative int, got {seq_len!r}")
    lengths = document_lengths(documents) if documents is not None else (seq_len or 0,)
    total = sum(lengths)
    if seq_len is not None and seq_len != total:
        raise ValueError(f"documents hold {total} tokens in all, but seq_len={seq_len}")
    if torch.compiler.is_compiling():
        return lengths  # how spans are dealt cannot be traced, and lengths may be symbols: the op compares
    dealt = shard_sizes(layout_name(layout), lengths, world)[rank]
    if dealt != tokens:
        raise ValueError(f"rank {rank} of {world} holds {dealt} tokens of {total} in layout {layout!r}, got {tokens}")
    return lengths
