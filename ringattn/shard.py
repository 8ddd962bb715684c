"""Tensors, positions and labels go into and out of a layout, from the same spans as the plan.

Gradient convention. Every rank computes its own loss, and the loss that is meant is the sum over ranks: with local
losses divided by the *global* number of targets, that sum is the mean over all tokens, and every parameter's true
gradient is the sum over ranks of the local ones (one all-reduce; where a wrapper averages over `world` ranks, multiply
the loss by `world`). `shard` of a tensor that all ranks hold keeps to it without communication: each rank has the part
of the gradient that went through its tokens, zero elsewhere. `unshard` puts the whole sequence on every rank, and there
are two ways to go on. If all ranks compute the *same* loss from it, counted once, each takes its own slice of the
gradient (`grad="slice"`); a parameter used after the `unshard` then has its true gradient on every rank already, and is
the one exception to the sum. If the losses differ, or the same loss is divided by `world`, the gradients of all ranks
are summed (`grad="sum"`), and the rule has no exception. Attention's backward pass communicates, so all ranks have to
enter it: a rank whose loss does not depend on its attention output (no targets there, an empty shard) writes
`loss = tie(loss, output)`, which leaves the loss as it is and lets zero gradients flow to the output.

Every rank of the group calls `unshard`, and its backward pass when `grad="sum"`; the other functions are local.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ringattn.comm import Group, Terms, gather_into, get_comm, group_name, resolve_group
from ringattn.layout import Shard, document_lengths, layout_name, make_shards, shard_size

Documents = Sequence[int] | Tensor | None
GRADS = ("slice", "sum")
"""What `unshard` does with the gradient of the whole sequence."""

# torch 2.13 warns of the old name, torch 2.11 lacks the new one.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def shard(x: Tensor, dim: int, group: Group = None, layout: str = "contiguous", documents: Documents = None) -> Tensor:
    """This rank's tokens of a tensor that every rank holds whole.

    Args:
        x: any shape and dtype; `x.size(dim)` is the length of the sequence, which need not divide by anything.
        dim: the sequence dimension.
        group: process group or one-dimensional mesh that the sequence is spread over; None is the default
            group, or a world of one without torch.distributed.
        layout: name of a layout.
        documents: lengths of the documents that are packed into the sequence, or their running sums from 0 on
            (cu_seqlens), on the CPU; some layouts deal by them.

    Returns:
        A new contiguous tensor with `dim` cut to this rank's tokens, in the layout's order; it may be empty.
        Differentiable: the gradient holds this rank's part, zero elsewhere.

    Raises:
        ValueError: unknown layout, dim out of range, documents that do not add up to the sequence, a group
            that does not fit or that this rank is not in.

    Example:
        >>> shard(torch.arange(6), dim=0).tolist()  # in a world of one
        [0, 1, 2, 3, 4, 5]
    """
    dim = _checked_dim(x, dim)
    return _cut(x, dim, layout_name(layout), _lengths(x.size(dim), documents), group_name(group))


def unshard(
    x: Tensor,
    dim: int,
    group: Group = None,
    layout: str = "contiguous",
    seq_len: int | None = None,
    documents: Documents = None,
    grad: str = "slice",
) -> Tensor:
    """The whole sequence on every rank, from the tokens that each holds: the inverse of `shard`.

    Every rank of the group has to call it, with tensors that differ in `dim` at most.

    Args:
        x: this rank's tokens, `x.size(dim)` of them as the layout says.
        dim: the sequence dimension.
        group: as in `shard`.
        layout: as in `shard`.
        seq_len: length of the whole sequence; None means equal shards, or the sum of `documents`.
        documents: as in `shard`.
        grad: "slice" when every rank goes on to the same loss, counted once; "sum" when the losses differ and
            their sum is meant (one reduce-scatter, in float32 for 16-bit tensors).

    Returns:
        A new contiguous tensor with `dim` grown to `seq_len`.

    Raises:
        ValueError: as `shard`; an unknown grad; `x.size(dim)` is not the layout's length.

    Example:
        >>> unshard(shard(torch.arange(6), dim=0), dim=0).tolist()
        [0, 1, 2, 3, 4, 5]
    """
    dim = _checked_dim(x, dim)
    if grad not in GRADS:
        raise ValueError(f"unknown grad {grad!r}; choose one of {', '.join(GRADS)}")
    resolved = resolve_group(group)
    name, world = ("", 1) if resolved is None else (resolved.group_name, resolved.size())
    if seq_len is None and documents is None:
        seq_len = x.size(dim) * world
    return _gather(x, dim, layout_name(layout), _lengths(seq_len, documents), name, grad == "sum")


def positions(
    seq_len: int,
    group: Group = None,
    layout: str = "contiguous",
    documents: Documents = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Global positions of this rank's tokens, for rotary embeddings and the like.

    Args:
        seq_len: length of the whole sequence.
        group: as in `shard`.
        layout: as in `shard`.
        documents: as in `shard`; positions count on over all of them.
        device: of the result.

    Returns:
        (S_local,), int64.

    Raises:
        ValueError: as `shard`; a negative seq_len.

    Example:
        >>> positions(4, layout="zigzag").tolist()  # in a world of one
        [0, 1, 2, 3]
    """
    return shard(torch.arange(sum(_lengths(seq_len, None)), device=device), 0, group, layout, documents)


def shard_batch(
    batch: Mapping[str, Any],
    group: Group = None,
    layout: str = "contiguous",
    documents: Documents = None,
    dim: int = 1,
    ignore_index: int = -100,
) -> dict[str, Any]:
    """This rank's part of a batch for a causal language model, with the labels shifted *before* the cut.

    Shifting after the cut would lose one target at the end of every piece. The losses' common divisor is the global
    number of targets, not the local one, so it is counted here, where every rank still sees all of them.

    Args:
        batch: what every rank holds whole: "input_ids", optionally "labels" (position i holds token i; shifted here),
            "shift_labels" (position i holds the target of position i already), "position_ids", and any tensors of the
            same length in `dim`. Values that are no tensors pass through.
        group: as in `shard`.
        layout: as in `shard`.
        documents: as in `shard`; the last token of a document has no target then.
        dim: the sequence dimension of all tensors.
        ignore_index: label of positions that have no target.

    Returns:
        The batch, cut. "position_ids" is added where it was missing: (1, ..., S_local) global positions. With
        labels, "num_items_in_batch" is added: the global number of targets, a 0-dimensional int64 tensor.

    Raises:
        ValueError: no "input_ids", both kinds of labels, or a tensor whose length in `dim` is another one.

    Example:
        >>> batch = shard_batch({"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])})
        >>> batch["labels"].tolist(), batch["position_ids"].tolist(), int(batch["num_items_in_batch"])
        ([[6, 7, -100]], [[0, 1, 2]], 2)
    """
    seq_len = _batch_length(batch, dim)
    whole = dict(batch)
    if "labels" in whole:
        whole["labels"] = _shifted(whole["labels"], dim, _lengths(seq_len, documents), ignore_index)
    targets = whole.get("labels", whole.get("shift_labels"))
    if "position_ids" not in whole:
        ids = whole["input_ids"]
        shape = [1] * ids.dim()
        shape[dim] = seq_len
        whole["position_ids"] = torch.arange(seq_len, device=ids.device).view(shape)
    local = {key: shard(x, dim, group, layout, documents) if isinstance(x, Tensor) else x for key, x in whole.items()}
    if targets is not None:
        local["num_items_in_batch"] = (targets != ignore_index).sum()
    return local


def tie(loss: Tensor, *outputs: Tensor) -> Tensor:
    """The loss, unchanged, whose backward pass also reaches every output, with zero gradients.

    For ranks whose loss does not depend on an attention output: the backward pass of ring attention communicates, and
    the other ranks wait for the ones that never enter it.

    Args:
        loss: what `backward` is called on; it need not require a gradient.
        outputs: tensors that the backward pass has to reach, such as attention outputs or hidden states.

    Returns:
        A tensor equal to `loss`, whatever the outputs hold (NaN and inf included).

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> tie(torch.zeros(()), x).backward()
        >>> x.grad.tolist()
        [0.0, 0.0]
    """
    return _tie(loss, outputs)


def _shifted(labels: Tensor, dim: int, lengths: Sequence[int], ignore_index: int) -> Tensor:
    """Labels moved one position to the left; the last position of each document has no target."""
    shifted = labels.roll(-1, dim)
    last = torch.tensor(lengths, device=labels.device).cumsum(0) - 1
    return shifted.index_fill(dim, last, ignore_index) if sum(lengths) else shifted


def _batch_length(batch: Mapping[str, Any], dim: int) -> int:
    """The sequence length that all tensors of a batch share in `dim`."""
    if "input_ids" not in batch:
        raise ValueError(f"the batch must hold 'input_ids', got {', '.join(map(repr, batch)) or 'nothing'}")
    if "labels" in batch and "shift_labels" in batch:
        raise ValueError("give 'labels' (shifted here) or 'shift_labels' (already shifted), not both")
    tensors = {key: x for key, x in batch.items() if isinstance(x, Tensor)}
    lengths = {key: x.size(_checked_dim(x, dim, key)) for key, x in tensors.items()}
    for key, length in lengths.items():
        if length != lengths["input_ids"]:
            raise ValueError(f"{key!r} has length {length} in dim {dim}, but 'input_ids' has {lengths['input_ids']}")
    return lengths["input_ids"]


def _checked_dim(x: Tensor, dim: int, what: str = "the tensor") -> int:
    """`dim` counted from the front."""
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be an int in [-{x.dim()}, {x.dim()}) for {what} of shape {_shape(x)}, got {dim!r}")
    return dim % x.dim()


def _lengths(seq_len: int | None, documents: Documents) -> list[int]:
    """The lengths of the documents, or the sequence as the only one."""
    if seq_len is not None and (
        isinstance(seq_len, bool) or not isinstance(seq_len, int | torch.SymInt) or seq_len < 0
    ):
        raise ValueError(f"seq_len must be a non-negative int, got {seq_len!r}")
    if documents is None:
        if seq_len is None:
            raise ValueError("need seq_len or documents, got None for both")
        return [seq_len]
    lengths = list(document_lengths(documents))
    if seq_len is not None and sum(lengths) != seq_len:
        raise ValueError(f"documents hold {sum(lengths)} tokens in all, but the sequence has {seq_len}")
    return lengths


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _rank_and_shards(layout: str, lengths: Sequence[int], name: str) -> tuple[int, tuple[Shard, ...]]:
    """This rank within the group, and the spans of every rank."""
    group = _resolve_process_group(cast(Any, name)) if name else None
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    return rank, make_shards(layout, tuple(map(int, lengths)), world)


def _pieces(x: Tensor, dim: int, spans: Shard) -> list[Tensor]:
    """Views of the whole sequence, one a span."""
    rows = x.movedim(dim, 0)
    return [rows[span.start : span.last + 1 : span.step] for span in spans]


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    return [*x.shape[:dim], size, *x.shape[dim + 1 :]]


def _write_local(out: Tensor, x: Tensor, dim: int, spans: Shard) -> None:
    """Fill `out`, one rank's tokens in its layout's order, from the whole sequence x."""
    rows = out.movedim(dim, 0)
    for span, piece in zip(spans, _pieces(x, dim, spans), strict=True):
        rows[span.offset : span.offset + span.size] = piece


def _write_whole(out: Tensor, rows: Tensor, dim: int, spans: Shard) -> None:
    """Put one rank's tokens, `rows` with the sequence first, where they belong in the whole sequence `out`."""
    for span, piece in zip(spans, _pieces(out, dim, spans), strict=True):
        piece.copy_(rows[span.offset : span.offset + span.size])


@torch.library.custom_op("ringattn::shard", mutates_args=())
def _cut(x: Tensor, dim: int, layout: str, lengths: Sequence[int], name: str) -> Tensor:
    """This rank's tokens of the whole sequence."""
    rank, shards = _rank_and_shards(layout, lengths, name)
    out = x.new_empty(_resized(x, dim, shard_size(shards[rank])))
    _write_local(out, x, dim, shards[rank])
    return out


@torch.library.custom_op("ringattn::spread", mutates_args=())
def _spread(x: Tensor, dim: int, layout: str, lengths: Sequence[int], name: str) -> Tensor:
    """The whole sequence with this rank's tokens in place and zeros elsewhere."""
    rank, shards = _rank_and_shards(layout, lengths, name)
    out = x.new_zeros(_resized(x, dim, sum(lengths)))
    _write_whole(out, x.movedim(dim, 0), dim, shards[rank])
    return out


@torch.library.custom_op("ringattn::unshard", mutates_args=())
def _gather(x: Tensor, dim: int, layout: str, lengths: Sequence[int], name: str, sum_grads: bool) -> Tensor:
    """The whole sequence from the tokens of every rank, each padded to the largest shard on the way."""
    rank, shards = _rank_and_shards(layout, lengths, name)
    _agree(x, dim, layout, lengths, name, rank, shards)
    rows = x.movedim(dim, 0)
    packed = x.new_zeros([max(map(shard_size, shards)), *rows.shape[1:]])
    packed[: len(rows)] = rows
    gathered = packed.unsqueeze(0)
    if name:
        packed = _to_wire(packed, name)
        gathered = packed.new_empty([len(shards), *packed.shape])
        gather_into(gathered.flatten(0, 1), packed, get_comm(name).group)
    out = x.new_empty(_resized(x, dim, sum(lengths)))
    for spans, of_rank in zip(shards, gathered, strict=True):
        _write_whole(out, of_rank, dim, spans)
    return out


def _agree(
    x: Tensor, dim: int, layout: str, lengths: Sequence[int], name: str, rank: int, shards: tuple[Shard, ...]
) -> None:
    """Raise on every rank if any holds what the layout does not give it, or means another sequence."""
    error = None
    if x.size(dim) != shard_size(shards[rank]):
        error = ValueError(
            f"{x.size(dim)} tokens in dim {dim}, but {layout!r} gives rank {rank} {shard_size(shards[rank])} of"
            f" {sum(lengths)} (by rank: {[shard_size(spans) for spans in shards]})"
        )
    if name and get_comm(name).due(None):
        rest = (*x.shape[:dim], *x.shape[dim + 1 :])
        said = {
            "unshard of shape without dim": rest,
            "dim": dim,
            "layout": layout,
            "lengths": list(lengths),
            "dtype": x.dtype,
        }
        get_comm(name).agree(Terms(said), error)
    if error is not None:
        raise error


def _to_wire(x: Tensor, name: str) -> Tensor:
    """x where the group can move it: on the host for CUDA tensors over gloo."""
    return x.cpu() if get_comm(name).default_transport(x.device) == "host" else x


@torch.library.custom_op("ringattn::unshard_backward", mutates_args=())
def _reduce(x: Tensor, dim: int, layout: str, lengths: Sequence[int], name: str) -> Tensor:
    """This rank's tokens of the sum over ranks of whole sequences; 16-bit tensors are summed in float32."""
    rank, shards = _rank_and_shards(layout, lengths, name)
    sizes = [shard_size(spans) for spans in shards]
    rest = x.movedim(dim, 0).shape[1:]
    dtype = torch.promote_types(x.dtype, torch.float32)
    packed = torch.zeros([len(shards), max(sizes), *rest], dtype=dtype, device=x.device)
    for spans, of_rank in zip(shards, packed, strict=True):
        _write_local(of_rank, x.movedim(dim, 0), 0, spans)
    total = packed[0]
    if name:
        packed = _to_wire(packed, name)
        total = torch.empty_like(packed[0])
        _reduce_scatter(total, packed.flatten(0, 1), group=get_comm(name).group)
    out = x.new_empty(_resized(x, dim, sizes[rank]))
    out.copy_(total[: sizes[rank]].movedim(0, dim))
    return out


@_cut.register_fake
@_reduce.register_fake
def _fake_local(x: Tensor, dim: int, layout: str, lengths: Sequence[int], name: str) -> Tensor:
    rank, shards = _rank_and_shards(layout, lengths, name)
    return x.new_empty(_resized(x, dim, shard_size(shards[rank])))


@_spread.register_fake
def _fake_whole(x: Tensor, dim: int, layout: str, lengths: Sequence[int], name: str) -> Tensor:
    return x.new_empty(_resized(x, dim, sum(lengths)))


@_gather.register_fake
def _fake_gather(x: Tensor, dim: int, layout: str, lengths: Sequence[int], name: str, sum_grads: bool) -> Tensor:
    return x.new_empty(_resized(x, dim, sum(lengths)))


def _keep_where(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.where = inputs[1:]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *where, sum_grads = ctx.where
    return (_reduce if sum_grads else _cut)(grad, *where), None, None, None, None, None


_cut.register_autograd(lambda ctx, grad: (_spread(grad, *ctx.where), None, None, None, None), setup_context=_keep_where)
_spread.register_autograd(lambda ctx, grad: (_cut(grad, *ctx.where), None, None, None, None), setup_context=_keep_where)
_reduce.register_autograd(
    lambda ctx, grad: (_gather(grad, *ctx.where, True), None, None, None, None), setup_context=_keep_where
)
_gather.register_autograd(_gather_backward, setup_context=_keep_where)


@torch.library.custom_op("ringattn::tie", mutates_args=())
def _tie(loss: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    return loss.clone(memory_format=torch.contiguous_format)


@_tie.register_fake
def _fake_tie(loss: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    return loss.new_empty(loss.shape)


def _keep_kind(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.kinds = [(x.shape, x.dtype, x.device) for x in inputs[1]]


def _tie_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    return grad, [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.kinds]


_tie.register_autograd(_tie_backward, setup_context=_keep_kind)
