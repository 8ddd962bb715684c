"""Inputs, error budgets and simulated worlds: what tests, benchmarks and `ringattn verify` measure exactness with.

The gate compares three results: x, the one under test; x1, the same computation in the same dtype on one rank; and x64,
the float64 result. x passes if its error is at most 1.1 times that of x1, or, in float32 and float64, within 8 units of
rounding of x64. It is a ratio of norms, so it can neither hide behind a loose tolerance nor fail by a rare element.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ringattn import heads, ring
from ringattn.backends import Problem
from ringattn.comm import Buffers
from ringattn.dispatch import choose_backend, load_backend
from ringattn.layout import make_shards, shard_positions
from ringattn.mask import FULL, Band, as_band
from ringattn.merge import row_delta
from ringattn.ops import make_job
from ringattn.transport import Simulated

MOST_RATIO = 1.1
MOST_EPS = 8


def make_inputs(
    batch: int = 1,
    heads: int = 4,
    kv_heads: int | None = None,
    tokens: int = 64,
    dim: int = 16,
    v_dim: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standard normal query (B, H, S, D), key (B, G, S, D), value (B, G, S, Dv) and output gradient (B, H, S, Dv).

    Example:
        >>> [tuple(x.shape) for x in make_inputs(1, 4, 2, 8, 16)]
        [(1, 4, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16), (1, 4, 8, 16)]
    """
    kv_heads, v_dim = kv_heads or heads, v_dim or dim
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim)]
    q, k, v, do = (
        torch.randn(batch, h, tokens, d, generator=generator, device=device, dtype=torch.float32).to(dtype)
        for h, d in shapes
    )
    return q, k, v, do


@dataclass(frozen=True)
class Errors:
    """How far a tensor is from a reference; equal infinities count as no difference.

    Attributes:
        max_abs: largest absolute difference.
        max_rel: largest difference relative to the reference's element, over elements that are not 0.
        norm: 2-norm of the difference.
        rel_norm: that norm relative to the reference's.
    """

    max_abs: float
    max_rel: float
    norm: float
    rel_norm: float


def compare(x: Tensor, reference: Tensor) -> Errors:
    """The errors of a tensor against a reference of the same shape, computed in float64."""
    x, reference = x.detach().double(), reference.detach().double()
    if x.shape != reference.shape:
        raise ValueError(f"cannot compare shapes {tuple(x.shape)} and {tuple(reference.shape)}")
    if not x.numel():
        return Errors(0.0, 0.0, 0.0, 0.0)
    difference = torch.where(x == reference, 0.0, x - reference).abs()
    scale = torch.where(reference.isinf(), 0.0, reference).abs()
    relative = torch.where(difference == 0, 0.0, difference / scale)
    norm, size = difference.norm().item(), scale.norm().item()
    return Errors(
        max_abs=difference.max().item(),
        max_rel=relative[(scale > 0) | relative.isnan()].max().item() if (scale > 0).any() else 0.0,
        norm=norm,
        rel_norm=norm / size if size else (0.0 if norm == 0 else math.inf),
    )


@dataclass(frozen=True)
class Verdict:
    """Whether a tensor passes the gate.

    Attributes:
        ok: it does.
        errors: of the tensor under test.
        single: of the same computation on one rank.
        ratio: of the two norms; None where both are 0.
    """

    ok: bool
    errors: Errors
    single: Errors
    ratio: float | None


def gate(x: Tensor, x1: Tensor, x64: Tensor) -> Verdict:
    """Judge a result by the error that one rank makes in the same dtype.

    Args:
        x: result under test; its dtype decides whether the rule for rounding applies.
        x1: the same in the same dtype on one rank.
        x64: the float64 result.

    Returns:
        The verdict; NaN never passes.
    """
    errors, single = compare(x, x64), compare(x1, x64)
    if errors.norm == 0:
        ratio = None if single.norm == 0 else 0.0
    else:
        ratio = errors.norm / single.norm if single.norm else math.inf
    rounding = MOST_EPS * torch.finfo(x.dtype).eps if x.dtype in (torch.float32, torch.float64) else 0.0
    ok = ratio is None or ratio <= MOST_RATIO or errors.rel_norm <= rounding
    return Verdict(ok, errors, single, ratio)


@dataclass
class Simulation:
    """Results of a simulated world, in global order, and what it took.

    Attributes:
        out, lse, dq, dk, dv: whole tensors; gradients are None without `do`.
        sent_forward, sent_backward: bytes that each rank sent.
        launches_forward, launches_backward: calls of the backend on each rank.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    sent_forward: list[int] = field(default_factory=list)
    sent_backward: list[int] = field(default_factory=list)
    launches_forward: list[int] = field(default_factory=list)
    launches_backward: list[int] = field(default_factory=list)


def simulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
    *,
    world: int,
    layout: str = "contiguous",
    mask: Band | str = FULL,
    lengths: Sequence[int] | None = None,
    schedule: str = "ring",
    heads_degree: int = 1,
    backend: ModuleType | Any | str | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    wire_dtype: torch.dtype | None = None,
) -> Simulation:
    """Run the real executor on every rank of a world within this process.

    Args:
        q, k, v: whole tensors, (B, H, S, D), (B, G, S, D), (B, G, S, Dv).
        do, dlse: gradients of the output and of the LSE; without `do`, forward only.
        world, layout, mask, schedule, heads_degree, scale, softcap: as in `ring_attention`.
        lengths: of documents, by default one of S tokens.
        backend: a name, or an object with `forward` and `backward`.
        wire_dtype: in which gradients travel.

    Returns:
        A `Simulation`.

    Example:
        >>> q, k, v, do = make_inputs(tokens=16)
        >>> simulate(q, k, v, do, world=4, layout="zigzag", mask="causal").launches_forward
        [4, 4, 4, 4]
    """
    lengths = (q.shape[2],) if lengths is None else tuple(lengths)
    shards = make_shards(layout, lengths, world)
    rows = [torch.tensor(shard_positions(shard), dtype=torch.int64, device=q.device) for shard in shards]
    if backend is None or isinstance(backend, str):
        backend = load_backend(choose_backend(backend, q, k, v, softcap))
    counted = [_Counted(backend) for _ in range(world)]
    network, buffers = Simulated(world), Buffers()
    place = (schedule, layout, as_band(mask), lengths, world)
    engine = ring if heads_degree == 1 else heads
    jobs = [
        make_job(
            *place,
            rank,
            heads_degree,
            problem=Problem(1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap),
            backend=counted[rank],
            transport=network.rank(rank),
            lease=buffers.lease,
            wire_dtype=wire_dtype,
        )
        for rank in range(world)
    ]
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    parts = [[x[:, :, index] for x in (q, k, v)] for index in rows]
    states = [
        (q.new_empty(*p[0].shape[:3], v.shape[3], dtype=sums), q.new_empty(p[0].shape[:3], dtype=sums)) for p in parts
    ]
    for state in (x for pair in states for x in pair):
        state.fill_(torch.nan)
    network.run(
        engine.forward(job, q, k, v, out, lse) for job, (q, k, v), (out, lse) in zip(jobs, parts, states, strict=True)
    )
    outs = [out.to(q.dtype) for out, _ in states]
    result = Simulation(_whole(outs, rows), _whole([lse for _, lse in states], rows))
    result.sent_forward = [network.rank(rank).sent_bytes for rank in range(world)]
    result.launches_forward = [backend.launches for backend in counted]
    if do is None:
        return result
    dlse = torch.zeros_like(result.lse) if dlse is None else dlse
    grads = [[torch.full_like(x, torch.nan, dtype=sums) for x in part] for part in parts]
    rings = []
    for rank, index in enumerate(rows):
        lse, local = states[rank][1], do[:, :, index]
        delta = getattr(backend, "row_delta", row_delta)(local, outs[rank], dlse[:, :, index].to(sums))
        (q, k, v), (dq, dk, dv) = parts[rank], grads[rank]
        rings.append(engine.backward(jobs[rank], local, q, k, v, outs[rank], lse, delta, dq, dk, dv))
    network.run(rings)
    result.dq, result.dk, result.dv = (_whole([g[i].to(q.dtype) for g in grads], rows) for i in range(3))
    result.sent_backward = [network.rank(rank).sent_bytes - result.sent_forward[rank] for rank in range(world)]
    result.launches_backward = [
        backend.launches - result.launches_forward[rank] for rank, backend in enumerate(counted)
    ]
    return result


def _whole(parts: Iterable[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """Shards back in global order along dimension 2."""
    whole = torch.cat(list(parts), dim=2)
    return whole[:, :, torch.argsort(torch.cat(list(rows)))]


class _Counted:
    """A backend that counts its calls."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.launches = backend, 0

    def forward(self, *args: Any) -> None:
        self.launches += 1
        self._backend.forward(*args)

    def backward(self, *args: Any) -> None:
        self.launches += 1
        self._backend.backward(*args)
