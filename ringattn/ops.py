"""The ring as custom ops, one a direction: opaque to torch.compile, visible to selective checkpointing.

Their schema holds tensors, names and numbers; inside, plan and schedule come from caches. Outputs have the same strides
as their fakes, whatever the strides of the inputs.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn import heads, ring
from ringattn.backends import Problem
from ringattn.comm import Buffers, Comm, Terms, get_comm
from ringattn.dispatch import choose_backend, load_backend
from ringattn.header import code_digest, digest_of
from ringattn.heads import HeadsJob, Neighbours
from ringattn.layout import make_shards, shard_sizes
from ringattn.mask import Band
from ringattn.merge import add_sinks, row_delta, sinks_gradient
from ringattn.ring import Job
from ringattn.schedule import Schedule, make_schedule
from ringattn.transport import Around, Nowhere


class Options(NamedTuple):
    """What a call does, apart from its tensors: the arguments of the custom ops after them."""

    layout: str
    lo: int
    hi: int
    prefix: int
    lengths: tuple[int, ...]
    scale: float
    softcap: float
    schedule: str
    heads_degree: int
    transport: str
    backend: str
    grad_dtype: torch.dtype
    bshd: bool
    group: str
    validate: str
    check: str = ""

    @property
    def band(self) -> Band:
        """The mask."""
        return Band(self.lo, self.hi, self.prefix)

    def terms(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, grad: int) -> Terms:
        """What all ranks must have in common."""
        common = self._asdict()
        for private in ("group", "validate", "lo", "hi", "prefix"):
            del common[private]
        common["lengths"] = tuple(self.lengths)
        common["code"] = f"{code_digest():x}"
        common["mask"] = str(self.band)
        common["shapes"] = f"B={q.shape[0]} H={q.shape[1]} G={k.shape[1]} D={q.shape[3]} Dv={v.shape[3]}"
        common["dtype"], common["device"] = str(q.dtype), q.device.type
        common["sinks"] = "none" if sinks is None else str(sinks.dtype)
        return Terms(common, grad)

    def digest(self) -> int:
        """63 bits of everything that decides the schedule and what is computed on it, the same on every rank."""
        return _digest(self._replace(group="", validate=""))


@lru_cache(maxsize=1024)
def _digest(options: Options) -> int:
    return digest_of(code_digest(), *options)


_KINDS = {
    str: "str",
    int: "SymInt",
    float: "float",
    bool: "bool",
    torch.dtype: "ScalarType",
    tuple[int, ...]: "SymInt[]",
}
_OPTIONS = ", ".join(f"{_KINDS[kind]} {name}" for name, kind in Options.__annotations__.items())


@torch.library.custom_op(
    "ringattn::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, int grad, bool agreed, {_OPTIONS}) -> (Tensor, Tensor)",
)
def run_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, grad: int, agreed: bool, *settings: Any
) -> tuple[Tensor, Tensor]:
    """The output (B, H, S, Dv) in q's dtype, and the LSE.

    Args:
        q, k, v, sinks: as in `ring_attention`, heads before tokens.
        grad: whether gradients are off, on or needed here, as in `ringattn.comm`.
        agreed: the ranks have compared their options already.
        settings: the fields of `Options`.
    """
    options = _complete(Options(*settings), q, k, v)
    comm = get_comm(options.group) if options.group else None
    error = _misfit(options, comm, q.shape[2])
    if comm is not None and not agreed and comm.due(options.validate):
        comm.agree(options.terms(q, k, v, sinks, grad), error)
    if error is not None:
        raise error
    job = _job(options, comm, q, "forward")
    engine = ring if isinstance(job, Job) else heads
    out, lse = _empty(q, v.shape[3], options.bshd), q.new_empty(q.shape[:3], dtype=_sum_dtype(q))
    one_visit = isinstance(job, Job) and sum(len(step.visits) for step in job.schedule.forward) == 1 and sinks is None
    state = out if one_visit or out.dtype == lse.dtype else torch.empty_like(out, dtype=lse.dtype)
    with torch.autocast(q.device.type, enabled=False):  # it would round the products of a backend in torch
        ring.run(engine.forward(job, q, k, v, state, lse), job.transport)
        if sinks is not None:
            add_sinks(state, lse, sinks.to(lse.dtype))
    if state is not out:
        out.copy_(state)
    return out, lse


@run_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, grad: int, agreed: bool, *settings: Any
) -> tuple[Tensor, Tensor]:
    return _empty(q, v.shape[3], Options(*settings).bshd), q.new_empty(q.shape[:3], dtype=_sum_dtype(q))


@torch.library.custom_op(
    "ringattn::attention_backward",
    mutates_args=(),
    schema=f"(Tensor do, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def run_attention_backward(
    do: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and of the sinks (empty without sinks), from those of the output and the LSE."""
    options = _complete(Options(*settings), q, k, v)
    job = _job(options, get_comm(options.group) if options.group else None, q, "backward")
    engine = ring if isinstance(job, Job) else heads
    dq, dk, dv = (_empty(x, x.shape[3], options.bshd) for x in (q, k, v))
    state = dq if dq.dtype == lse.dtype else torch.empty_like(dq, dtype=lse.dtype)
    with torch.autocast(q.device.type, enabled=False):
        delta = getattr(load_backend(options.backend), "row_delta", row_delta)(do, out, dlse)
        ring.run(engine.backward(job, do, q, k, v, out, lse, delta, state, dk, dv), job.transport)
        dsinks = q.new_empty(0) if sinks is None else sinks_gradient(sinks.to(lse.dtype), lse, delta).to(sinks.dtype)
    if state is not dq:
        dq.copy_(state)
    return dq, dk, dv, dsinks


@run_attention_backward.register_fake
def _(
    do: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (_empty(x, x.shape[3], Options(*settings).bshd) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, _, _, *settings = inputs
    ctx.save_for_backward(q, k, v, sinks, *output)
    ctx.settings = settings


def _differentiate(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: under checkpointing, reading again would mean computing again
    sinks = saved[3]
    dq, dk, dv, dsinks = run_attention_backward(do, dlse, *saved, *ctx.settings)
    return (dq, dk, dv, None if sinks is None else dsinks, None, None, *(None for _ in ctx.settings))


run_attention.register_autograd(_differentiate, setup_context=_save)


def _complete(options: Options, q: Tensor, k: Tensor, v: Tensor) -> Options:
    """The options with hashable lengths, and with the backend that a compiled graph leaves open."""
    backend = options.backend or choose_backend(None, q, k, v, options.softcap)
    return options._replace(lengths=tuple(options.lengths), backend=backend)


def _misfit(options: Options, comm: Comm | None, tokens: int) -> ValueError | None:
    """The error of a rank that holds another number of tokens than the layout gives it, found out late by a graph."""
    rank, world = (comm.rank, comm.world) if comm else (0, 1)
    dealt = shard_sizes(options.layout, options.lengths, world)[rank]
    if dealt == tokens:
        return None
    return ValueError(f"rank {rank} of {world} holds {dealt} tokens in layout {options.layout!r}, got {tokens}")


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


def _job(options: Options, comm: Comm | None, q: Tensor, name: str) -> Job | HeadsJob:
    """Everything that the executor needs to go forward or backward, from caches."""
    rank, world = (comm.rank, comm.world) if comm else (0, 1)
    place = (options.layout, options.band, options.lengths, world, rank)
    transport: Any = Nowhere()
    if comm:
        schedule = ring_schedule(options.schedule, *place, options.heads_degree)
        transport = comm.connect(
            options.transport,
            q.device,
            options.check,
            name=name,
            digest=options.digest(),
            steps=len(getattr(schedule, name)),
        )
    return make_job(
        options.schedule,
        *place,
        options.heads_degree,
        problem=Problem(options.scale, options.softcap),
        backend=load_backend(options.backend),
        transport=transport,
        lease=comm.buffers.lease if comm else _local.lease,
        wire_dtype=None if options.grad_dtype == torch.float32 else options.grad_dtype,
    )


def ring_schedule(
    name: str, layout: str, band: Band, lengths: tuple[int, ...], world: int, rank: int, degree: int
) -> Schedule:
    """The schedule of a rank's ring, which with heads swapped among `degree` neighbours has world / degree ranks."""
    return make_schedule(name, layout, band, lengths, world // degree, rank // degree, degree)


def make_job(
    name: str,
    layout: str,
    band: Band,
    lengths: tuple[int, ...],
    world: int,
    rank: int,
    degree: int,
    *,
    transport: Any,
    **settings: Any,
) -> Job | HeadsJob:
    """What one rank runs: a ring, or where heads are swapped among neighbours, a ring of such neighbourhoods.

    Args:
        name, layout, band, lengths, world, rank: as in `ringattn.schedule.make_schedule`.
        degree: neighbours that swap heads for tokens; 1 for none.
        transport: between all ranks.
        settings: the other fields of `ringattn.ring.Job`.
    """
    first, place = rank - rank % degree, rank % degree
    around = Job(
        rank=rank // degree,
        sizes=shard_sizes(layout, lengths, world // degree, degree),
        schedule=ring_schedule(name, layout, band, lengths, world, rank, degree),
        transport=transport if degree == 1 else Around(transport, range(place, world, degree)),
        **settings,
    )
    if degree == 1:
        return around
    neighbours = range(first, first + degree)
    shards = make_shards(layout, lengths, world)
    near = Neighbours(place, tuple(shards[one] for one in neighbours))
    return HeadsJob(near, tuple(neighbours), transport, around)
