"""One training step of a model on one rank in float64, on one rank, and on all ranks, compared tensor by tensor.

What is compared is kept on the host with one row a token, so that a rank's rows are an index.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ringattn import Band, attention, ring_attention
from ringattn.comm import get_comm, group_name
from ringattn.launch.model import Config, Transformer
from ringattn.launch.text import stdlib_text
from ringattn.layout import make_shards, shard_positions
from ringattn.shard import shard_batch
from ringattn.testing import MOST_EPS, gate

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One comparison: what every rank needs to know."""

    config: Config
    seq_len: int
    layout: str
    mask: Band
    dtype: torch.dtype
    device: str
    schedule: str = "ring"
    transport: str | None = None
    backend: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """The errors of one tensor on one rank (None: after reduction over ranks) against float64."""

    tensor: str
    rank: int | None
    max_abs: float
    max_rel: float
    rel_norm: float
    single_rank_rel_norm: float
    ratio: float | None
    ok: bool


@dataclass
class Step:
    """What one training step gave.

    Attributes:
        tokens: tensors with one row a token.
        gradients: of every parameter.
        loss: the mean over all targets.
    """

    tokens: dict[str, Tensor]
    gradients: dict[str, Tensor]
    loss: Tensor


@dataclass
class Report:
    """What rank 0 found; `bytes_sent` is by rank, `seconds` by phase."""

    rows: list[Row] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def compare_ranks(job: Job, say: Say = print) -> Report | None:
    """Run the step three times in the default process group: twice on rank 0 while the others sleep, once on all.

    Args:
        job: what to run.
        say: told on rank 0 what was done.

    Returns:
        The report on rank 0, None elsewhere.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    name = str(job.dtype).removeprefix("torch.")
    report = Report()
    if rank == 0:
        with _all_threads():
            with _timed(report, "float64", "float64 on one rank", say):
                exact = single_step(job, torch.float64)
            with _timed(report, "one_rank", f"{name} on one rank", say):
                single = single_step(job, job.dtype)
    _barrier()
    with _timed(report, "all_ranks", f"{name} on {world} ranks", say if rank == 0 else _silent):
        step, sent = ring_step(job)
        _barrier()
    parts: list[tuple[dict[str, Tensor], int]] | None = [({}, 0)] * world if rank == 0 else None
    dist.gather_object((step.tokens, sent), parts)
    if parts is None:
        return None
    report.rows = [
        *_token_rows(job, [tokens for tokens, _ in parts], exact, single),
        *_reduced_rows(job, step, exact, single),
    ]
    report.bytes_sent = [sent for _, sent in parts]
    return report


def single_step(job: Job, dtype: torch.dtype) -> Step:
    """The step on one rank. In float64 by the reference backend, with parameters that are exact in the job's dtype."""
    backend = "reference" if dtype == torch.float64 else job.backend
    tokens = stdlib_text(job.seq_len).unsqueeze(0)
    batch = {
        "input_ids": tokens,
        "labels": F.pad(tokens[:, 1:], (0, 1), value=-100),
        "position_ids": torch.arange(job.seq_len),
        "num_items_in_batch": torch.tensor(job.seq_len - 1),
    }
    return _step(job, dtype, partial(attention, mask=job.mask, backend=backend, return_lse=True), batch)


def ring_step(job: Job) -> tuple[Step, int]:
    """This rank's part of the step on all ranks, with gradients and loss summed over them, and the bytes it sent."""
    options = {name: getattr(job, name) for name in ("layout", "mask", "seq_len", "schedule", "transport", "backend")}
    tokens = stdlib_text(job.seq_len).unsqueeze(0)
    batch = shard_batch({"input_ids": tokens, "labels": tokens}, layout=job.layout)
    step = _step(job, job.dtype, partial(ring_attention, **options, return_lse=True), batch)
    flat = torch.cat([step.loss.flatten(), *(gradient.flatten() for gradient in step.gradients.values())])
    dist.all_reduce(flat)
    loss, *gradients = flat.split([1, *(gradient.numel() for gradient in step.gradients.values())])
    for name, total in zip(step.gradients, gradients, strict=True):
        step.gradients[name] = total.view_as(step.gradients[name])
    step.loss = loss.squeeze()
    return step, get_comm(group_name(None)).transport(job.transport, _device(job)).sent_bytes


def _step(job: Job, dtype: torch.dtype, call: Callable[..., Any], batch: dict[str, Tensor]) -> Step:
    """Forward and backward of the model on a batch; gradients and loss come back in at least float32."""
    model = Transformer(job.config, job.seed).to(job.dtype).to(dtype).to(_device(job))
    batch = {name: x.to(_device(job)) for name, x in batch.items()}
    layers: list[tuple[Tensor, ...]] = []

    def recording(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for x in (query, key, value):
            x.retain_grad()
        out, lse = call(query, key, value)
        layers.append((query, key, value, out, lse))
        return out

    logits = model(batch["input_ids"], batch["position_ids"], recording)
    wide = torch.promote_types(dtype, torch.float32)
    losses = F.cross_entropy(logits.flatten(0, 1).to(wide), batch["labels"].flatten(), reduction="none")
    loss = losses.sum() / batch["num_items_in_batch"]
    loss.backward()
    rows = {"logits": logits.detach()[0].cpu()}
    for number, (query, key, value, out, lse) in enumerate(layers):
        named = {"O": out, "LSE": lse, "dQ": _gradient(query), "dK": _gradient(key), "dV": _gradient(value)}
        rows |= {f"layer {number} {name}": _by_token(x) for name, x in named.items()}
    gradients = {name: _gradient(weight).to(wide).cpu() for name, weight in model.named_parameters()}
    return Step(rows, gradients, loss.detach().cpu())


def _gradient(x: Tensor) -> Tensor:
    """The gradient that arrived; none is the same as zero, and what is compared with float64 then."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def _by_token(x: Tensor) -> Tensor:
    """(1, H, S, ...) as (S, H, ...) on the host."""
    return x.detach()[0].movedim(1, 0).cpu()


def _token_rows(job: Job, parts: list[dict[str, Tensor]], exact: Step, single: Step) -> Iterator[Row]:
    shards = make_shards(job.layout, (job.seq_len,), len(parts))
    for tensor, reference in exact.tokens.items():
        for rank, (part, shard) in enumerate(zip(parts, shards, strict=True)):
            held = torch.tensor(shard_positions(shard), dtype=torch.int64)
            yield _row(tensor, rank, part[tensor], single.tokens[tensor][held], reference[held])


def _reduced_rows(job: Job, step: Step, exact: Step, single: Step) -> Iterator[Row]:
    loss = _row("loss", None, step.loss, single.loss, exact.loss)
    yield replace(loss, ok=loss.rel_norm <= MOST_EPS * torch.finfo(job.dtype).eps)
    for name, reference in exact.gradients.items():
        yield _row(f"d {name}", None, step.gradients[name], single.gradients[name], reference)


def _row(tensor: str, rank: int | None, x: Tensor, x1: Tensor, x64: Tensor) -> Row:
    verdict = gate(x, x1, x64)
    errors = verdict.errors
    return Row(
        tensor,
        rank,
        errors.max_abs,
        errors.max_rel,
        errors.rel_norm,
        verdict.single.rel_norm,
        verdict.ratio,
        verdict.ok,
    )


def _device(job: Job) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if job.device == "cuda" else torch.device(job.device)


def _barrier() -> None:
    """Wait for all ranks over gloo, which sleeps, where NCCL's barrier would keep a core and the card busy."""
    dist.all_reduce(torch.zeros(1))


@contextmanager
def _all_threads() -> Iterator[None]:
    """All of this process's cores, while the other ranks wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _timed(report: Report, phase: str, what: str, say: Say) -> Iterator[None]:
    began = time.perf_counter()
    yield
    report.seconds[phase] = time.perf_counter() - began
    say(f"{what}: {report.seconds[phase]:.1f} s")


def _silent(text: str) -> None:
    """Say nothing, on ranks other than 0."""
