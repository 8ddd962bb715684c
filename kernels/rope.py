"""Rotary embedding of queries and keys in one launch, from cosines and sines that positions look up.

Pairs of a head's first 2 R numbers are turned by the angles of their token (Su et al., RoFormer, 2021, arXiv
2104.09864), (d, d + R) or, interleaved, (2 d, 2 d + 1); the rest passes through. The backward pass turns the other way.
A program keeps the cosines and sines of its tokens in registers for several heads. A position outside of the tables
gives NaN.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.config import CompileCase, Launch
from ringattn.kernels.rows import power_of_two

HEADS = 4
"""Heads a program turns one after another, with all their loads in flight."""


@triton.jit
def _turn(
    x, y, cos, sin, batch, head, token, real, x_strides, y_strides, pairs, dim,
    PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Turn one head of a block of tokens."""
    row = x + batch.to(tl.int64) * x_strides[0] + head.to(tl.int64) * x_strides[1]
    row += (token.to(tl.int64) * x_strides[2])[:, None]
    out = y + batch.to(tl.int64) * y_strides[0] + head.to(tl.int64) * y_strides[1]
    out += (token.to(tl.int64) * y_strides[2])[:, None]
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        inside = real[:, None] & (column < 2 * pairs)
        both = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (both.shape[0], PAIRS, 2)))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        turned = tl.reshape(turned, (both.shape[0], 2 * PAIRS))
        tl.store(out + column, turned.to(y.dtype.element_ty), mask=inside)
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        inside = real[:, None] & (pair < pairs)
        first = tl.load(row + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(row + pairs + pair, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + pair, (first * cos - second * sin).to(y.dtype.element_ty), mask=inside)
        tl.store(out + pairs + pair, (second * cos + first * sin).to(y.dtype.element_ty), mask=inside)
    if REST:
        column = 2 * pairs + tl.arange(0, REST)[None, :]
        inside = real[:, None] & (column < dim)
        tl.store(out + column, tl.load(row + column, mask=inside, other=0.0), mask=inside)


@triton.jit
def _rope_kernel(
    q, k, q_out, k_out, cos, sin, positions, tokens, table_rows, heads, kv_heads, pairs, dim,
    q_strides, k_strides, q_out_strides, k_out_strides, position_strides,
    TOKENS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    LOOK_UP: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """A block of tokens of some heads of q, or of some of k."""
    q_groups = tl.cdiv(heads, HEADS)
    groups = q_groups + tl.cdiv(kv_heads, HEADS)
    group = tl.program_id(0) % groups
    batch = tl.program_id(1)
    token = (tl.program_id(0) // groups) * TOKENS + tl.arange(0, TOKENS)
    real = token < tokens
    position = token.to(tl.int64)
    if LOOK_UP:
        at = positions + batch.to(tl.int64) * position_strides[0] + position * position_strides[1]
        position = tl.load(at, mask=real, other=0).to(tl.int64)
    known = (position >= 0) & (position < table_rows)
    pair = tl.arange(0, PAIRS)[None, :]
    at = position[:, None] * pairs + pair
    turn_cos = tl.load(cos + at, mask=known[:, None] & (pair < pairs), other=float("nan"))
    turn_sin = tl.load(sin + at, mask=known[:, None] & (pair < pairs), other=float("nan"))
    if BACKWARD:
        turn_sin = -turn_sin
    if group < q_groups:
        for index in tl.static_range(HEADS):
            head = group * HEADS + index
            _turn(
                q, q_out, turn_cos, turn_sin, batch, head, token, real & (head < heads), q_strides, q_out_strides,
                pairs, dim, PAIRS, REST, INTERLEAVED,
            )  # fmt: skip
    else:
        for index in tl.static_range(HEADS):
            head = (group - q_groups) * HEADS + index
            _turn(
                k, k_out, turn_cos, turn_sin, batch, head, token, real & (head < kv_heads), k_strides, k_out_strides,
                pairs, dim, PAIRS, REST, INTERLEAVED,
            )  # fmt: skip


def rope_launch(
    q: Tensor,
    k: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    *,
    interleaved: bool,
    backward: bool,
    tokens_a_program: int | None = None,
    heads_a_program: int = HEADS,
    num_warps: int = 4,
) -> Launch:
    """The launch of `rope`; the last dimensions of q, k and the outputs are contiguous."""
    batch, heads, tokens, dim = q.shape
    pairs = cos.shape[1]
    width = power_of_two(pairs)
    block = tokens_a_program or max(1, 1024 // width)
    groups = triton.cdiv(heads, heads_a_program) + triton.cdiv(k.shape[1], heads_a_program)
    return Launch(
        _rope_kernel,
        (groups * triton.cdiv(tokens, block), batch),
        dict(
            q=q,
            k=k,
            q_out=q_out,
            k_out=k_out,
            cos=cos,
            sin=sin,
            positions=cos if positions is None else positions,
            tokens=tokens,
            table_rows=cos.shape[0],
            heads=heads,
            kv_heads=k.shape[1],
            pairs=pairs,
            dim=dim,
            q_strides=q.stride()[:3],
            k_strides=k.stride()[:3],
            q_out_strides=q_out.stride()[:3],
            k_out_strides=k_out.stride()[:3],
            position_strides=(0, 0) if positions is None else positions.stride(),
            TOKENS=block,
            PAIRS=width,
            REST=power_of_two(dim - 2 * pairs) if dim > 2 * pairs else 0,
            HEADS=heads_a_program,
            INTERLEAVED=interleaved,
            LOOK_UP=positions is not None,
            BACKWARD=backward,
        ),
        dict(num_warps=num_warps),
    )


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """Turn the heads of q and k by the angles of their tokens.

    Args:
        q: (B, H, S, D), any strides. k: (B, G, S, D), any strides; G = 0 is allowed.
        cos, sin: (P, R) float32 tables, 2 R <= D.
        positions: (B or 1, S) integers, the row of the tables for each token; None takes row s for token s.
        interleaved: pairs are (2 d, 2 d + 1) instead of (d, d + R).
        backward: turn back: gradients of the outputs to those of the inputs.

    Returns:
        Tensors like q and k, in the same order of dimensions in memory.
    """
    q, k = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (q, k))
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    if positions is not None:
        positions = positions.expand(q.shape[0], -1)
    if q.numel() or k.numel():
        rope_launch(
            q, k, q_out, k_out, cos.contiguous(), sin.contiguous(), positions,
            interleaved=interleaved, backward=backward,
        )()  # fmt: skip
    return q_out, k_out


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Both styles, whole and partial, by dtype, for the compile gate."""
    for dim, pairs in ((64, 32), (128, 64), (256, 128), (80, 16)):
        for dtype in (torch.bfloat16, torch.float32):
            for interleaved in (False, True):
                q = torch.empty(1, 4096, 32, dim, dtype=dtype, device="meta").transpose(1, 2)
                table = torch.empty(8192, pairs, device="meta")
                positions = torch.empty(1, 4096, dtype=torch.int64, device="meta")
                launch = rope_launch(
                    q, q[:, :8], q, q, table, table, positions, interleaved=interleaved, backward=False
                )
                name = f"d{dim}r{pairs}-{str(dtype).removeprefix('torch.')}" + "-interleaved" * interleaved
                yield CompileCase(name, launch, spill_bytes=8)  # float32 interleaved, on sm_80
