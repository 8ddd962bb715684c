"""The training loss over a vocabulary that is split over ranks: from logits, or from hidden states without logits.

This file checks what a caller gives and reduces the losses of the rows; `ringattn.loss_ops` computes them.

Every rank of the group calls, with the same targets (and hidden states), and gets the same loss. It is one loss,
counted once: its gradients are true as they are, those of the logits and the weight for this rank's slice, that of the
hidden states whole and equal on all ranks.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ringattn.comm import VALIDATE, Group, Terms, get_comm, group_name
from ringattn.keys import MAX_ID
from ringattn.loss_ops import Options, run_cross_entropy, run_linear_cross_entropy

REDUCTIONS = ("mean", "sum", "none")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    group: Group = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_items: Tensor | int | None = None,
    chunk: int | None = None,
    validate: str | None = None,
) -> Tensor:
    """Cross entropy of logits whose vocabulary (last) dimension is split over the ranks of a group.

    A row's loss is `lse - (1 - s) x[target] - s mean(x) + z lse^2` with s the smoothing, z the weight of the z-loss and
    the mean over the whole vocabulary. The ranks exchange 12 bytes a row (16 with smoothing, twice that in float64), in
    one gather; the backward pass sends nothing.

    Args:
        logits: (..., V_local), floating point: this rank's slice. Slices follow one another in the order of ranks; they
            may be uneven or empty.
        targets: (...), int64 or int32 global ids, equal on all ranks.
        group: ProcessGroup or one-dimensional DeviceMesh over which the vocabulary is split; None for the default group
            if torch.distributed is initialised, and one process otherwise.
        vocab_start: id of the first local token. With None here or in vocab_size the ranks compare in every call.
        vocab_size: size of the vocabulary; columns beyond it are padding. None when there is no padding.
        ignore_index: target of rows without a loss; what their logits hold, NaN included, does not matter.
        label_smoothing: share of the target that is spread over the vocabulary, in [0, 1].
        z_loss: weight of the squared log-sum-exp, at least 0.
        reduction: "mean" over the rows that are not ignored, "sum" or "none".
        num_items: what "mean" divides by instead, such as the "num_items_in_batch" of `shard_batch` where the sequence
            is split too.
        chunk: rows that are worked on at a time; None for as many as have 2^27 local logits.
        validate: "always" or "sampled": when ranks compare their arguments, and targets are checked. None for always,
            except over NCCL and, in one process, on CUDA. A target outside the vocabulary that is not looked for makes
            its row NaN.

    Returns:
        float32 (float64 for float64): a number, or with "none" the losses (...). Where all targets are ignored, "mean"
        and "sum" are 0 and so are all gradients, where torch's mean is NaN.

    Raises:
        ValueError: targets outside the vocabulary, slices that overlap or leave gaps, shapes or dtypes that do not fit,
            a value out of range, ranks that disagree: on every rank.

    Source:
        Shoeybi et al., Megatron-LM, 2019 (arXiv 1909.08053), section 3; z-loss: de Brebisson and Vincent, 2016
        (arXiv 1604.08859).

    Example:
        >>> loss = cross_entropy(torch.zeros(2, 8), torch.tensor([3, -100]))
        >>> round(loss.item() / math.log(8), 6)
        1.0
    """
    given = dict(locals())
    options = _options(given, logits, targets, _misfit(given, logits, "logits") or _no_rows_alike(logits, targets))
    losses, _, _ = run_cross_entropy(_flat(logits), targets.reshape(-1).long(), *options)
    return _reduced(losses, targets, ignore_index, reduction, num_items)


def linear_cross_entropy(
    hidden: Tensor,
    weight_shard: Tensor,
    targets: Tensor,
    *,
    group: Group = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_items: Tensor | int | None = None,
    chunk: int | None = None,
    validate: str | None = None,
) -> Tensor:
    """`cross_entropy(hidden @ weight_shard.T, targets)` that holds the logits of one chunk of rows at a time.

    The backward pass computes the logits anew, and sums the gradient of the hidden states over the group once, in
    float32 for 16-bit inputs. Logits are never rounded to 16 bits.

    Args:
        hidden: (..., H), equal on all ranks.
        weight_shard: (V_local, H), this rank's rows of the output embedding, in hidden's dtype. Under autocast both are
            cast to its dtype.
        targets, group, vocab_start, vocab_size, ignore_index, label_smoothing, z_loss, reduction, num_items, chunk,
        validate: as in `cross_entropy`.

    Returns:
        As `cross_entropy`.

    Raises:
        ValueError: as `cross_entropy`; hidden sizes that do not match; hidden states that need a gradient on some ranks
            only.

    Example:
        >>> loss = linear_cross_entropy(torch.ones(2, 4), torch.zeros(8, 4), torch.tensor([3, -100]))
        >>> round(loss.item() / math.log(8), 6)
        1.0
    """
    given = dict(locals())
    error = _misfit(given, hidden, "hidden") or _no_rows_alike(hidden, targets) or _no_product(hidden, weight_shard)
    options = _options(given, hidden, targets, error)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight_shard = hidden.to(dtype), weight_shard.to(dtype)
    losses, _, _ = run_linear_cross_entropy(_flat(hidden), weight_shard, targets.reshape(-1).long(), *options)
    return _reduced(losses, targets, ignore_index, reduction, num_items)


def _misfit(given: dict[str, Any], x: Any, name: str) -> ValueError | None:
    """What is wrong with one argument alone, if anything."""
    if not isinstance(x, Tensor) or not x.dim() or x.dtype not in DTYPES:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return ValueError(f"{name} must be a tensor of at least one dimension in {dtypes}, got {_what(x)}")
    targets = given["targets"]
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
        return ValueError(f"targets must be an int64 or int32 tensor, got {_what(targets)}")
    several: dict[str, tuple[str | None, ...]] = {"reduction": REDUCTIONS, "validate": (*VALIDATE, None)}
    for key, choices in several.items():
        if given[key] not in choices:
            return ValueError(f"unknown {key} {given[key]!r}; choose one of {', '.join(map(str, choices))}")
    for key, least in (("vocab_start", 0), ("vocab_size", 1), ("chunk", 1)):
        value = given[key]
        if value is not None and not (type(value) is int and least <= value <= MAX_ID):
            return ValueError(f"{key} must be an int in [{least}, {MAX_ID}] or None, got {value!r}")
    items = given["num_items"]
    if items is not None and not (isinstance(items, Tensor) and items.numel() == 1) and type(items) is not int:
        return ValueError(f"num_items must be an int or a tensor of one, or None, got {_what(items)}")
    if type(given["ignore_index"]) is not int:
        return ValueError(f"ignore_index must be an int, got {given['ignore_index']!r}")
    for key, most in (("label_smoothing", 1.0), ("z_loss", torch.finfo(torch.float32).max)):
        value = given[key]
        if type(value) not in (int, float) or not 0 <= value <= most:
            return ValueError(f"{key} must be a number in [0, {most}], got {value!r}")
    return None


def _no_rows_alike(x: Tensor, targets: Tensor) -> ValueError | None:
    for tensor in (x, targets):
        if hasattr(tensor, "to_local"):
            return ValueError("got a DTensor; pass its to_local() and the group of its mesh dimension")
    if x.shape[:-1] == targets.shape and x.device == targets.device:
        return None
    return ValueError(
        f"targets must be {tuple(x.shape[:-1])} on {x.device} for {tuple(x.shape)}, got {_what(targets)} on"
        f" {targets.device}"
    )


def _no_product(hidden: Tensor, weight: Any) -> ValueError | None:
    if not isinstance(weight, Tensor) or weight.dim() != 2 or hasattr(weight, "to_local"):
        return ValueError(f"weight_shard must be a plain tensor (V_local, H), got {_what(weight)}")
    if weight.shape[1] != hidden.shape[-1]:
        return ValueError(
            f"weight_shard {tuple(weight.shape)} takes hidden states of size {weight.shape[1]}, got {hidden.shape[-1]}"
        )
    if weight.device != hidden.device:
        return ValueError(f"weight_shard is on {weight.device}, but hidden on {hidden.device}")
    if weight.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
        return ValueError(f"hidden and weight_shard must have one dtype, got {hidden.dtype} and {weight.dtype}")
    return None


def _what(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)


def _options(given: dict[str, Any], x: Tensor, targets: Tensor, error: ValueError | None) -> Options:
    """The arguments of the custom ops, where no rank has an error."""
    name = group_name(given["group"])
    if error is not None:
        if name and not torch.compiler.is_compiling() and get_comm(name).world > 1:
            _tell(given, name, error)
        raise error
    return Options(
        -1 if given["vocab_start"] is None else given["vocab_start"],
        -1 if given["vocab_size"] is None else given["vocab_size"],
        given["ignore_index"],
        float(given["label_smoothing"]),
        float(given["z_loss"]),
        name,
        given["validate"] or "",
        given["chunk"] or -1,
        "weight_shard" in given and torch.is_grad_enabled() and x.requires_grad,
        given["reduction"],
    )


def _tell(given: dict[str, Any], name: str, error: ValueError) -> None:
    """Raise this rank's error on every rank, if they compare in this call."""
    validate = given["validate"] if given["validate"] in VALIDATE else None
    comm = get_comm(name)
    if comm.due(validate) or given["vocab_start"] is None or given["vocab_size"] is None:
        comm.agree(Terms(), error)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _reduced(
    losses: Tensor, targets: Tensor, ignore_index: int, reduction: str, num_items: Tensor | int | None
) -> Tensor:
    if reduction == "none":
        return losses.reshape(targets.shape)
    if reduction == "sum":
        return losses.sum()
    items = (
        (targets != ignore_index).sum()
        if num_items is None
        else torch.as_tensor(num_items, device=losses.device).reshape(())
    )
    return losses.sum() / items.clamp(min=1)
