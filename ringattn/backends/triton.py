"""The GPU backend: portable Triton kernels, one launch for any number of tiles, the state merged in the epilogue.

On compute capability 9.0 the forward pass can go to the Hopper tier (`ringattn.kernels.hopper`, `HOPPER_ANSWERS`) where
that takes the call; a debug line of the logger `ringattn.backends.triton` says which ran and why.

Runs on CUDA devices of compute capability 8.0 and above, and on CPU tensors in Triton's interpreter
(`TRITON_INTERPRET=1`, set before this module is first imported). The contract is in `ringattn.backends`; here `dq`,
`dk` and `dv` may also be in q's dtype where the call writes them (`problem.first`, `problem.first_kv`), which saves a
cast. The same inputs give the same bits, run after run: no atomics.
"""

import contextlib
import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from ringattn.backends import Problem
from ringattn.kernels import attention_bwd, attention_fwd
from ringattn.kernels.config import DTYPES, MAX_HEAD_DIM, SHARED_MEMORY, Kind, choose
from ringattn.kernels.tiles import IntTile, clamp
from ringattn.plan import Tiles

_LOG = logging.getLogger(__name__)

INTERPRETED = isinstance(attention_fwd._attention_fwd_kernel, InterpretedFunction)
"""Whether the kernels run in Triton's interpreter, which was decided when they were imported."""


def refusal(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> str | None:
    """Why the kernels cannot take these tensors, or None."""
    if len({q.dtype, k.dtype, v.dtype}) > 1 or q.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return f"triton takes q, k and v of one dtype of {names}, got {q.dtype}, {k.dtype}, {v.dtype}"
    for name, dim in (("head size", q.shape[-1]), ("head size of v", v.shape[-1])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            return f"triton takes head sizes from 1 to {MAX_HEAD_DIM}, got a {name} of {dim}"
    if INTERPRETED:
        if q.dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 products wrongly; take float16 or float32"
        return None
    if q.device.type != "cuda":
        return f"triton takes CUDA tensors (CPU ones with TRITON_INTERPRET=1), got device {q.device}"
    if architecture(q.device) is None:
        known = ", ".join(f"sm_{arch}" for arch in SHARED_MEMORY)
        return f"triton supports {known}, and this device is sm_{_capability(q.device)}"
    return None


def forward(problem: Problem, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """Accumulate the attention of `tiles` into the state (out, lse); one launch."""
    _require(q, k, v, problem.softcap)
    if not lse.numel():
        return
    if not tiles:
        if problem.first:
            out.zero_()
            lse.fill_(-torch.inf)
        return
    reason = hopper_refusal(problem, tiles, q, k, v, out)
    _LOG.debug("forward %s x %s: %s", tuple(q.shape), tuple(k.shape), reason or "the Hopper kernel")
    if reason is None:
        _hopper().forward(problem, tiles, q, k, v, out, lse)
        return
    config = _choose("fwd", q.shape[3], v.shape[3], q.dtype, q.device)
    launch = attention_fwd.forward_launch(
        int_tiles(tiles), q, k, v, out, lse, problem.scale, problem.softcap, first=problem.first, config=config
    )
    with _on_device(q):
        launch()


def backward(
    problem: Problem,
    tiles: Tiles,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Accumulate the gradients of `tiles` into dq, dk and dv; two launches."""
    _require(q, k, v, problem.softcap)
    if not tiles or not lse.numel():
        for grad, fresh in ((dq, problem.first), (dk, problem.first_kv), (dv, problem.first_kv)):
            if fresh:
                grad.zero_()
        return
    do = do.to(q.dtype)
    dims = q.shape[3], v.shape[3], q.dtype, q.device
    dkv = attention_bwd.dkv_launch(
        int_tiles(tiles),
        *(do, q, k, v, lse, delta, dk, dv, problem.scale, problem.softcap),
        first=problem.first_kv,
        config=_choose("dkv", *dims),
    )
    dq_only = attention_bwd.dq_launch(
        int_tiles(tiles),
        *(do, q, k, v, lse, delta, dq, problem.scale, problem.softcap),
        first=problem.first,
        config=_choose("dq", *dims),
    )
    with _on_device(q):
        dkv()
        dq_only()


def row_delta(do: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """`rowsum(do * out) - dlse` in float32, (B, H, M); do and out are (B, H, M, Dv) of any dtype and strides."""
    delta = torch.empty(do.shape[:3], dtype=torch.float32, device=do.device)
    if not do.numel():
        return delta.zero_() if dlse is None else delta.copy_(-dlse)
    with _on_device(do):
        attention_bwd.row_delta_launch(do, out, dlse, delta)()
    return delta


HOPPER_ANSWERS = False
"""Whether the Hopper tier answers. Its revision of commit 9a947c4 was right on an H200 in every case tried; what came
after compiles and passes its tests without a GPU, but has not run on one: tests/test_attention_gpu.py there decides."""


def hopper_refusal(problem: Problem, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> str | None:
    """Why the portable kernel answers a forward call, or None where the Hopper tier does."""
    if q.device.type != "cuda" or _capability(q.device) != 90:
        return "the portable kernel: the device is no sm_90"
    if not HOPPER_ANSWERS:
        return "the portable kernel: the Hopper tier awaits its tests on a card (HOPPER_ANSWERS)"
    try:
        tier = _hopper()
    except (ImportError, AttributeError) as error:  # Gluon is experimental, and a later Triton may rename what it needs
        return f"the portable kernel: this Triton cannot build the Hopper kernel ({error})"
    reason = tier.refusal(problem, tiles, q, k, v, out)
    return None if reason is None else f"the portable kernel: {reason}"


@lru_cache
def _hopper() -> Any:
    from ringattn.kernels.hopper import attention_fwd as tier

    return tier


@lru_cache(maxsize=4096)
def int_tiles(tiles: Tiles) -> tuple[IntTile, ...]:
    """The tiles as the kernels take them."""
    return clamp(
        [
            (
                *(tile.q_begin, tile.q_end, tile.k_begin, tile.k_end),
                *((tile.band.lo, tile.band.hi) if tile.band else (None, None)),
            )
            for tile in tiles
        ]
    )


def architecture(device: torch.device) -> int | None:
    """The compute capability whose configs a device takes: its own, or the nearest one below of its generation."""
    if INTERPRETED:
        return 80
    capability = _capability(device)
    return max((arch for arch in SHARED_MEMORY if arch // 10 == capability // 10 and arch <= capability), default=None)


@lru_cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache
def _choose(kind: Kind, head_dim: int, v_dim: int, dtype: torch.dtype, device: torch.device) -> Any:
    arch = architecture(device)
    assert arch is not None
    return choose(kind, head_dim, v_dim, dtype, arch)


def _require(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> None:
    reason = refusal(q, k, v, softcap)
    if reason is not None:
        raise ValueError(reason)


def _on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
