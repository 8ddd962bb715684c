"""Cross entropy over a split vocabulary as custom ops: statistics of a slice, one gather of them, its gradients.

Logits are walked in chunks of rows, from a tensor or from the product of hidden states and a slice of the weight, which
is then computed anew on the way back. What a rank sends of a row is (maximum, sum of exponentials, target logit) and,
for label smoothing, the sum of its logits.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.comm import Comm, Terms, get_comm
from ringattn.draw import Ranks
from ringattn.kernel_choice import wide_dtype
from ringattn.merge import finite_shift
from ringattn.sampling import agree_on_slices

CHUNK_LOGITS = 1 << 27
"""Logits of a chunk where the caller does not say how many rows it has: 512 MiB in float32."""

WEIGHT_ROWS = 1 << 15
"""Rows of the weight's gradient that one product makes: 512 MiB in float32 at a hidden size of 4096."""

Logits = Callable[[slice], Tensor]
"""The local logits of some rows, in the dtype of the statistics."""


class Options(NamedTuple):
    """What a call does, apart from its tensors: the arguments of the custom ops after them; -1 for "not said"."""

    vocab_start: int
    vocab_size: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    group: str
    validate: str
    chunk: int
    needs_hidden: bool = False
    reduction: str = "none"

    def comm(self) -> Comm | None:
        """The group, None where this process holds the whole vocabulary."""
        comm = get_comm(self.group) if self.group else None
        return comm if comm is not None and comm.world > 1 else None

    def terms(self, call: str, x: Tensor, targets: Tensor) -> Terms:
        """What all ranks must have in common."""
        common = self._asdict() | {"call": call, "dtype": str(x.dtype), "device": x.device.type}
        for private in ("group", "validate", "chunk"):
            del common[private]
        common["vocab_start"] = self.vocab_start < 0
        common["tokens"] = len(targets)
        if call == "linear_cross_entropy":
            common["hidden size"] = x.shape[1]
        weights = torch.arange(1, len(targets) + 1, device=targets.device)
        common["sum of the targets, each times its row"] = int((weights * targets).sum())
        return Terms(common)


class Place(NamedTuple):
    """Where a slice lies: its first id, its columns that are no padding, and the tokens of the whole vocabulary."""

    start: int
    width: int
    total: int


def _place(options: Options, call: str, x: Tensor, targets: Tensor, columns: int) -> Place:
    """Agree with the other ranks, and check that slices tile the vocabulary and hold all targets."""
    comm, start, total = options.comm(), options.vocab_start, options.vocab_size
    if comm is None:
        if start > 0 or total > columns:
            raise ValueError(
                f"one process holds the tokens from {max(start, 0)} to {max(start, 0) + columns} and no group holds the"
                f" others; the vocabulary starts at 0{f' and has {total}' if total >= 0 else ''}"
            )
        start, total = 0, total if total >= 0 else columns
        check = options.validate == "always" or not targets.is_cuda
    else:
        check = comm.due(options.validate) or start < 0 or total < 0
        if check:
            comm.agree(options.terms(call, x, targets))
            start, total = agree_on_slices(comm, columns, None if start < 0 else start, None if total < 0 else total)
    if check:
        _check_targets(targets, total, options.ignore_index)
    return Place(start, max(0, min(columns, total - start)), total)


def _outside(targets: Tensor, total: int, ignore_index: int) -> Tensor:
    return ((targets < 0) | (targets >= total)) & (targets != ignore_index)


def _check_targets(targets: Tensor, total: int, ignore_index: int) -> None:
    rows = _outside(targets, total, ignore_index).nonzero()[:, 0]
    if len(rows):
        raise ValueError(
            f"targets must lie in [0, {total}) or be ignore_index={ignore_index}, got {int(targets[rows[0]])} in row"
            f" {int(rows[0])} ({len(rows)} such rows)"
        )


def _chunks(rows: int, chunk: int, columns: int) -> Iterator[slice]:
    size = chunk if chunk > 0 else max(1, CHUNK_LOGITS // max(1, columns))
    return (slice(first, min(first + size, rows)) for first in range(0, rows, size))


def _owned(targets: Tensor, place: Place) -> tuple[Tensor, Tensor]:
    """(whether a row's target is in the slice, its column or any other), for a slice that is not empty."""
    column = targets - place.start
    return (column >= 0) & (column < place.width), column.clamp(0, place.width - 1)[:, None]


def _statistics(logits: Logits, like: Tensor, targets: Tensor, place: Place, options: Options) -> Tensor:
    """What this rank sends: (maximum, sum of exponentials, target logit[, sum of logits]) of each row, (3 or 4, T)."""
    words = 4 if options.label_smoothing else 3
    stats = like.new_zeros(words, len(targets), dtype=wide_dtype(like))
    if not place.width:
        stats[0] = -torch.inf
        return stats
    for rows in _chunks(len(targets), options.chunk, place.width):
        x = logits(rows)
        peak = x.amax(1)
        owned, column = _owned(targets[rows], place)
        stats[0, rows] = peak
        stats[1, rows] = torch.exp(x - finite_shift(peak)[:, None]).sum(1)
        stats[2, rows] = torch.where(owned, x.gather(1, column)[:, 0], 0.0)
        if words == 4:
            stats[3, rows] = x.sum(1)
    return stats


def _losses(stats: Tensor, targets: Tensor, place: Place, options: Options) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exps of the rows, from the statistics of all ranks, (ranks, 3 or 4, T).

    The log-sum-exp stays in two parts, (2, T): the maximum, and the logarithm of the sum of exponentials below it. At
    logits of 3e4 their float32 sum is off by 1e-3, and so would be every probability.
    """
    peaks, totals, logits, *sums = stats.unbind(1)
    peak = peaks.amax(0)
    rest = torch.log((totals * torch.exp(peaks - finite_shift(peak))).sum(0))
    rest = torch.where(_outside(targets, place.total, options.ignore_index), torch.nan, rest)
    target = logits.sum(0)
    if sums:
        smooth = options.label_smoothing
        target = (1 - smooth) * target + smooth * (sums[0].sum(0) / place.total)
    loss = rest + (peak - target)
    if options.z_loss:
        loss = loss + options.z_loss * (peak + rest).square()
    return torch.where(targets == options.ignore_index, 0.0, loss), torch.stack([peak, rest])


def _slope(x: Tensor, lse: Tensor, grad: Tensor, targets: Tensor, place: Place, options: Options) -> Tensor:
    """Gradient of the local logits x of some rows."""
    peak, rest = lse
    slope = torch.exp(x.sub(peak[:, None]).sub_(rest[:, None]))
    if options.z_loss:
        slope *= (1 + 2 * options.z_loss * (peak + rest))[:, None]
    if options.label_smoothing:
        slope -= options.label_smoothing / place.total
    owned, column = _owned(targets, place)
    slope.scatter_add_(1, column, torch.zeros_like(grad).masked_fill_(owned, options.label_smoothing - 1.0)[:, None])
    slope *= grad[:, None]
    return slope.masked_fill_((targets == options.ignore_index)[:, None], 0.0)


def _solve(
    call: str, logits: Callable[[Place], Logits], x: Tensor, targets: Tensor, columns: int, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """(losses, log-sum-exps, place as a tensor) of the rows."""
    place = _place(options, call, x, targets, columns)
    with torch.autocast(x.device.type, enabled=False):  # it would round the products
        stats = _statistics(logits(place), x, targets, place, options)
        everyone = Ranks(options.comm()).gather([stats]) if len(targets) else stats[None]
        loss, lse = _losses(everyone, targets, place, options)
    return loss, lse, torch.tensor(place)


def _fake_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loss, lse = (x.new_empty(*rows, x.shape[0], dtype=wide_dtype(x)) for rows in ((), (2,)))
    return loss, lse, torch.empty(3, dtype=torch.int64)


_KINDS = {str: "str", int: "int", float: "float", bool: "bool"}
_OPTIONS = ", ".join(f"{_KINDS[kind]} {name}" for name, kind in Options.__annotations__.items())


@torch.library.custom_op(
    "ringattn::cross_entropy",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor targets, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def run_cross_entropy(logits: Tensor, targets: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (T,), log-sum-exps (2, T) and the place of the slice, for logits (T, V_local)."""

    def local(place: Place) -> Logits:
        return lambda rows: logits[rows, : place.width].to(wide_dtype(logits))

    return _solve("cross_entropy", local, logits, targets, logits.shape[1], Options(*settings))


@run_cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_rows(logits)


@torch.library.custom_op(
    "ringattn::cross_entropy_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor logits, Tensor targets, Tensor lse, Tensor place, {_OPTIONS}) -> Tensor",
)
def run_cross_entropy_backward(
    grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, place: Tensor, *settings: Any
) -> Tensor:
    """The gradient of the local logits; no other rank is needed."""
    options, where = Options(*settings), Place(*place.tolist())
    out = logits.new_zeros(logits.shape)
    if where.width:
        for rows in _chunks(len(targets), options.chunk, where.width):
            x = logits[rows, : where.width].to(wide_dtype(logits))
            out[rows, : where.width] = _slope(x, lse[:, rows], grad[rows], targets[rows], where, options)
    return out


@run_cross_entropy_backward.register_fake
def _(grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, place: Tensor, *settings: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, targets, *ctx.settings = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(logits, targets, *output[1:])


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    dlogits = run_cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return dlogits, None, *(None for _ in ctx.settings)


run_cross_entropy.register_autograd(_differentiate, setup_context=_save)


def _operand(x: Tensor) -> Tensor:
    """x as a factor of `_product`: CUDA multiplies 16-bit numbers into float32, the CPU would round the result."""
    return x if x.is_cuda else x.to(wide_dtype(x))


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.element_size() == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def _rows_of(hidden: Tensor, targets: Tensor, rows: slice, ignore_index: int) -> Tensor:
    """Hidden states of a chunk; 0 in ignored rows, so that a NaN there meets no product."""
    return _operand(hidden[rows]).masked_fill((targets[rows] == ignore_index)[:, None], 0.0)


@torch.library.custom_op(
    "ringattn::linear_cross_entropy",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor targets, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def run_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (T,), log-sum-exps (2, T) and the place of the slice, for the logits hidden @ weight.T."""
    options = Options(*settings)

    def local(place: Place) -> Logits:
        across = _operand(weight[: place.width]).T
        return lambda rows: _product(_rows_of(hidden, targets, rows, options.ignore_index), across)

    return _solve("linear_cross_entropy", local, hidden, targets, len(weight), options)


@run_linear_cross_entropy.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_rows(hidden)


@torch.library.custom_op(
    "ringattn::linear_cross_entropy_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor hidden, Tensor weight, Tensor targets, Tensor lse, Tensor place, bool for_hidden, "
    f"bool for_weight, {_OPTIONS}) -> (Tensor, Tensor)",
)
def run_linear_cross_entropy_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    place: Tensor,
    for_hidden: bool,
    for_weight: bool,
    *settings: Any,
) -> tuple[Tensor, Tensor]:
    """The gradients of the hidden states, summed over ranks, and of the slice of the weight; empty where not asked."""
    options, where = Options(*settings), Place(*place.tolist())
    wide = wide_dtype(hidden)
    comm = options.comm()
    dhidden = hidden.new_zeros(hidden.shape if for_hidden else 0, dtype=wide if comm else hidden.dtype)
    dweight = weight.new_zeros(weight.shape if for_weight else 0, dtype=wide)
    scale = grad.abs().amax().clamp(min=torch.finfo(wide).tiny) if hidden.dtype == torch.float16 and len(grad) else 1.0
    unit = grad / scale  # slopes are rounded to float16 on CUDA, and a mean over 10^5 tokens is below its range
    with torch.autocast(hidden.device.type, enabled=False):
        local = _operand(weight[: where.width])
        for rows in _chunks(len(targets), options.chunk, where.width) if where.width else ():
            x = _rows_of(hidden, targets, rows, options.ignore_index)
            slope = _slope(_product(x, local.T), lse[:, rows], unit[rows], targets[rows], where, options).to(x.dtype)
            if for_hidden:
                dhidden[rows] = _product(slope, local) * scale
            for first in range(0, where.width if for_weight else 0, WEIGHT_ROWS):
                some = slice(first, min(first + WEIGHT_ROWS, where.width))
                dweight[some] += _product(slope[:, some].T, x)
        if comm is not None and for_hidden and len(targets):
            dhidden = Ranks(comm).sum([dhidden])
    return dhidden.to(hidden.dtype), dweight.mul_(scale).to(weight.dtype)


@run_linear_cross_entropy_backward.register_fake
def _(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    place: Tensor,
    for_hidden: bool,
    for_weight: bool,
    *settings: Any,
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape if for_hidden else 0), weight.new_empty(weight.shape if for_weight else 0)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, targets, *ctx.settings = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(hidden, weight, targets, *output[1:])


def _differentiate_linear(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    for_hidden, for_weight = ctx.needs_input_grad[:2]
    dhidden, dweight = run_linear_cross_entropy_backward(
        grad, *ctx.saved_tensors, for_hidden, for_weight, *ctx.settings
    )
    return dhidden if for_hidden else None, dweight if for_weight else None, None, *(None for _ in ctx.settings)


run_linear_cross_entropy.register_autograd(_differentiate_linear, setup_context=_save_linear)
