"""The ring as custom ops, one a direction: opaque to torch.compile, visible to selective checkpointing.

Their schema holds tensors, names and numbers; inside, plan and schedule come from caches. Outputs have the same strides
as their fakes, whatever the strides of the inputs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.backends import Problem
from ringattn.comm import Buffers, Comm, Nowhere, Terms, get_comm
from ringattn.dispatch import choose_backend, load_backend
from ringattn.layout import shard_sizes
from ringattn.mask import Band
from ringattn.merge import row_delta
from ringattn.ring import Job, backward, forward, run
from ringattn.schedule import make_schedule


class Options(NamedTuple):
    """What a call does, apart from its tensors: the arguments of the custom ops after them."""

    layout: str
    lo: int
    hi: int
    lengths: tuple[int, ...]
    scale: float
    softcap: float
    schedule: str
    transport: str
    backend: str
    grad_dtype: torch.dtype
    bshd: bool
    group: str
    validate: str

    def terms(self, q: Tensor, k: Tensor, v: Tensor, grad: int) -> Terms:
        """What all ranks must have in common."""
        common = self._asdict()
        for private in ("group", "validate", "lo", "hi"):
            del common[private]
        common["lengths"] = tuple(self.lengths)
        common["mask"] = str(Band(self.lo, self.hi))
        common["shapes"] = f"B={q.shape[0]} H={q.shape[1]} G={k.shape[1]} D={q.shape[3]} Dv={v.shape[3]}"
        common["dtype"], common["device"] = str(q.dtype), q.device.type
        return Terms(common, grad)


@torch.library.custom_op("ringattn::attention", mutates_args=())
def run_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: int,
    agreed: bool,
    layout: str,
    lo: int,
    hi: int,
    lengths: Sequence[int],
    scale: float,
    softcap: float,
    schedule: str,
    transport: str,
    backend: str,
    grad_dtype: torch.dtype,
    bshd: bool,
    group: str,
    validate: str,
) -> tuple[Tensor, Tensor]:
    backend = backend or choose_backend(None, q, k, v, softcap)
    options = Options(
        layout, lo, hi, tuple(lengths), scale, softcap, schedule, transport, backend, grad_dtype, bshd, group, validate
    )
    comm = get_comm(group) if group else None
    if comm is not None and not agreed and comm.due(validate):
        comm.agree(options.terms(q, k, v, grad))
    job = _job(options, comm, q)
    out, lse = _empty(q, v.shape[3], bshd), q.new_empty(q.shape[:3], dtype=_sum_dtype(q))
    one_visit = sum(len(step.visits) for step in job.schedule.forward) == 1
    state = out if one_visit or out.dtype == lse.dtype else torch.empty_like(out, dtype=lse.dtype)
    with torch.autocast(q.device.type, enabled=False):  # it would round the products of a backend in torch
        run(forward(job, q, k, v, state, lse))
    if state is not out:
        out.copy_(state)
    return out, lse


@run_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, grad: int, agreed: bool, *options: Any) -> tuple[Tensor, Tensor]:
    return _empty(q, v.shape[3], Options(*options).bshd), q.new_empty(q.shape[:3], dtype=_sum_dtype(q))


@torch.library.custom_op("ringattn::attention_backward", mutates_args=())
def _attention_backward(
    do: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: str,
    lo: int,
    hi: int,
    lengths: Sequence[int],
    scale: float,
    softcap: float,
    schedule: str,
    transport: str,
    backend: str,
    grad_dtype: torch.dtype,
    bshd: bool,
    group: str,
    validate: str,
) -> tuple[Tensor, Tensor, Tensor]:
    backend = backend or choose_backend(None, q, k, v, softcap)
    options = Options(
        layout, lo, hi, tuple(lengths), scale, softcap, schedule, transport, backend, grad_dtype, bshd, group, validate
    )
    job = _job(options, get_comm(group) if group else None, q)
    dq, dk, dv = (_empty(x, x.shape[3], bshd) for x in (q, k, v))
    state = dq if dq.dtype == lse.dtype else torch.empty_like(dq, dtype=lse.dtype)
    with torch.autocast(q.device.type, enabled=False):
        delta = getattr(job.backend, "row_delta", row_delta)(do, out, dlse)
        run(backward(job, do, q, k, v, out, lse, delta, state, dk, dv))
    if state is not dq:
        dq.copy_(state)
    return dq, dk, dv


@_attention_backward.register_fake
def _(
    do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    bshd = Options(*options).bshd
    return _empty(q, q.shape[3], bshd), _empty(k, k.shape[3], bshd), _empty(v, v.shape[3], bshd)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, _, _, *options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = options


def _differentiate(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    gradients = _attention_backward(do, dlse, *ctx.saved_tensors, *ctx.options)
    return (*gradients, None, None, *(None for _ in ctx.options))


run_attention.register_autograd(_differentiate, setup_context=_save)


def _sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype of LSE and of everything that is summed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _empty(like: Tensor, dim: int, bshd: bool) -> Tensor:
    """An empty (B, H, S, dim) tensor, contiguous in the order that the caller uses."""
    batch, heads, tokens, _ = like.shape
    if bshd:
        return like.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    return like.new_empty(batch, heads, tokens, dim)


_local = Buffers()
"""Buffers of calls in a world of one."""


def _job(options: Options, comm: Comm | None, q: Tensor) -> Job:
    """Everything that the executor needs, from caches."""
    rank, world = (comm.rank, comm.world) if comm else (0, 1)
    place = (options.layout, Band(options.lo, options.hi), options.lengths, world, rank)
    return Job(
        rank=rank,
        sizes=shard_sizes(options.layout, options.lengths, world),
        schedule=make_schedule(options.schedule, *place),
        problem=Problem(options.scale, options.softcap),
        backend=load_backend(options.backend),
        transport=comm.transport(options.transport or None, q.device) if comm else Nowhere(),
        lease=comm.buffers.lease if comm else _local.lease,
        wire_dtype=None if options.grad_dtype == torch.float32 else options.grad_dtype,
    )
