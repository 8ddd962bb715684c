"""The model kernels beside torch eager, torch.compile and a copy of the same bytes, each checked first.

    python benchmarks/bench_nn.py

On a GPU at the shapes of a long-context model in bfloat16, on a CPU (where plain torch answers) at small ones. Forward
and backward are timed as the custom ops that autograd calls. Rates count each input read once and each output
written once; "copy" is `Tensor.copy_` moving as many bytes.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from common import Benchmark, Work, against
from torch import Tensor
from torch.nn import functional as F

from ringattn import norms, rotary, softmax, swiglu

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16
ROWS = 16384 if CUDA else 64
EPS = 1e-6

Function = Callable[..., Any]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def compiled(function: Function) -> Function:
    return torch.compile(function, fullgraph=True, dynamic=False)


def compare(
    bench: Benchmark, shape: str, variants: Mapping[str, Function], inputs: list[Tensor], size: int, exact: Function
) -> None:
    """Check against `exact` of float64 inputs, with eager as the baseline, and time; a copy moves `size` bytes."""
    variants = {name: run for name, run in variants.items() if CUDA or name != "compiled"}
    expected = listed(exact(*(x.double() if x.is_floating_point() else x for x in inputs)))
    baseline = listed(variants["eager"](*inputs))
    source, target = (torch.empty(size // 4, dtype=DTYPE, device=DEVICE).normal_() for _ in range(2))
    runs = {name: lambda turn, run=run: run(*inputs) for name, run in variants.items()}
    checks = dict.fromkeys(variants, against(expected, baseline, factor=1.5, slack=1e-6))
    bench.compare(
        shape,
        "bfloat16",
        runs | {"copy": lambda turn: target.copy_(source)},
        checks | {"copy": against([source.double()], slack=0.0)},
        work=Work(bytes=size),
        peer="compiled" if "compiled" in variants else "eager",
        graph=4 if CUDA else 0,
        round_seconds=0.004,
    )


def listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def bench_norm(bench: Benchmark, columns: int, center: bool, add: bool) -> None:
    """Forward: x, and weight (and bias); or x and residual."""
    name = ("add + " if add else "") + ("LayerNorm" if center else "RMSNorm")
    inputs = [draw(ROWS, columns), *([draw(ROWS, columns)] if add else []), draw(columns)]
    inputs += [draw(columns)] if center else []

    def ours(x: Tensor, *rest: Tensor) -> Any:
        residual, weight, bias = split(rest)
        y, summed, _ = norms.norm(x, residual, weight, bias, EPS, center)
        return (y, summed) if add else y

    def split(rest: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor, Tensor | None]:
        residual, rest = (rest[0], rest[1:]) if add else (None, rest)
        return residual, rest[0], rest[1] if center else None

    def peer(x: Tensor, *rest: Tensor) -> Any:
        residual, weight, bias = split(rest)
        total = x if residual is None else x + residual
        if center:
            y = F.layer_norm(total, (columns,), weight, bias, EPS)
        else:
            y = F.rms_norm(total, (columns,), weight, EPS)
        return (y, total) if add else y

    def exact(x: Tensor, *rest: Tensor) -> Any:
        if not add:
            return peer(x, *rest)
        total = (x.to(DTYPE) + rest[0].to(DTYPE)).double()  # the sum is rounded before it is normalised
        return peer(total, torch.zeros_like(total), *rest[1:])

    variants = {"ringattn": ours, "eager": peer, "compiled": compiled(peer)}
    size = (4 if add else 2) * ROWS * columns * DTYPE.itemsize
    compare(bench, f"{name} fwd {ROWS} x {columns}", variants, inputs, size, exact)


def bench_norm_backward(bench: Benchmark, columns: int, center: bool) -> None:
    """dx, dweight (and dbias) from dy, x, weight and the saved statistics."""
    name = "LayerNorm" if center else "RMSNorm"
    dy, x, weight, bias = draw(ROWS, columns), draw(ROWS, columns), draw(columns), draw(columns)
    stats = norms.norm(x, None, weight, None, EPS, center)[2]
    native = (stats[:, 1:].sum(1, keepdim=True), stats[:, :1])  # mean and 1 / deviation
    outputs = 3 if center else 2

    def ours(dy: Tensor, x: Tensor, weight: Tensor) -> Any:
        return norms.norm_backward(dy, None, x, weight, bias if center else None, stats)[:outputs]

    def formula(dy: Tensor, x: Tensor, weight: Tensor) -> Any:
        wide = torch.promote_types(x.dtype, torch.float32)
        grad, value = dy.to(wide), x.to(wide)
        value = (value - native[0] if center else value) * native[1]
        scaled = grad * weight
        dx = scaled - value * (scaled * value).mean(-1, keepdim=True)
        dx = (dx - scaled.mean(-1, keepdim=True) if center else dx) * native[1]
        return [dx.to(x.dtype), (grad * value).sum(0).to(x.dtype), grad.sum(0).to(x.dtype)][:outputs]

    def eager(dy: Tensor, x: Tensor, weight: Tensor) -> Any:
        if not CUDA:
            return formula(dy, x, weight)
        if center:
            return torch.ops.aten.native_layer_norm_backward(dy, x, [columns], *native, weight, bias, [True] * 3)
        return torch.ops.aten._fused_rms_norm_backward(dy, x, [columns], native[1], weight, [True, True])

    def exact(dy: Tensor, x: Tensor, weight: Tensor) -> Any:
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias.double())]
        if center:
            y = F.layer_norm(leaves[0], (columns,), *leaves[1:], EPS)
        else:
            y = F.rms_norm(leaves[0], (columns,), leaves[1], EPS)
        return torch.autograd.grad(y, leaves[:outputs], dy)

    variants = {"ringattn": ours, "eager": eager, "compiled": compiled(formula)}
    size = 3 * ROWS * columns * DTYPE.itemsize
    compare(bench, f"{name} bwd {ROWS} x {columns}", variants, [dy, x, weight], size, exact)


def bench_softmax(bench: Benchmark, rows: int, columns: int) -> None:
    """Softmax of long rows, forward and backward."""
    x, dy = draw(rows, columns), draw(rows, columns)
    size = x.numel() * DTYPE.itemsize

    def peer(x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    variants = {"ringattn": lambda x: softmax.run_softmax(x, None, 1.0), "eager": peer, "compiled": compiled(peer)}
    compare(bench, f"softmax fwd {rows} x {columns}", variants, [x], 2 * size, peer)
    y = peer(x)

    def ours(dy: Tensor, y: Tensor) -> Tensor:
        return softmax.softmax_backward(dy, y, 1.0)

    def eager(dy: Tensor, y: Tensor) -> Tensor:
        return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)

    def formula(dy: Tensor, y: Tensor) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        grad, weight = dy.to(wide), y.to(wide)
        return (weight * (grad - (grad * weight).sum(-1, keepdim=True))).to(y.dtype)

    variants = {"ringattn": ours, "eager": eager, "compiled": compiled(formula)}
    compare(bench, f"softmax bwd {rows} x {columns}", variants, [dy, y], 3 * size, formula)


def bench_rotary(bench: Benchmark, tokens: int, heads: int, kv_heads: int, dim: int) -> None:
    """Queries and keys as a projection leaves them, at positions looked up in tables of twice as many."""
    query, key = (draw(1, tokens, n, dim).transpose(1, 2) for n in (heads, kv_heads))
    positions = torch.randperm(2 * tokens, device=DEVICE)[:tokens].unsqueeze(0)
    frequencies = torch.tensor(rotary.rotary_frequencies(dim)[0], dtype=torch.float64, device=DEVICE)
    cos, sin = rotary.rotary_tables(torch.arange(2 * tokens, device=DEVICE), frequencies)

    def ours(query: Tensor, key: Tensor, positions: Tensor) -> Any:
        return rotary.run_rotary(query, key, cos, sin, positions, False, False)

    def peer(query: Tensor, key: Tensor, positions: Tensor) -> Any:
        c, s = (table[positions].unsqueeze(1) for table in (cos, sin))
        outputs = []
        for x in (query, key):
            first, second = x.chunk(2, -1)
            outputs.append(torch.cat([first * c - second * s, second * c + first * s], -1).to(x.dtype))
        return outputs

    variants = {"ringattn": ours, "eager": peer, "compiled": compiled(peer)}
    shape = f"RoPE {tokens} x ({heads} + {kv_heads}) x {dim}"
    size = 2 * tokens * (heads + kv_heads) * dim * DTYPE.itemsize
    compare(bench, shape, variants, [query, key, positions], size, peer)


def bench_swiglu(bench: Benchmark, columns: int) -> None:
    """Halves of one projection's output, forward and backward."""
    x, dy = draw(ROWS, 2 * columns), draw(ROWS, columns)
    size = dy.numel() * DTYPE.itemsize

    def wide(x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def peer(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    variants = {"ringattn": swiglu.run_swiglu_halves, "eager": peer, "compiled": compiled(peer)}
    compare(bench, f"SwiGLU fwd {ROWS} x {columns}", variants, [x], 3 * size, peer)

    def formula(dy: Tensor, x: Tensor) -> Tensor:
        (gate, up), grad = (wide(half) for half in x.chunk(2, -1)), wide(dy)
        share = torch.sigmoid(gate)
        silu = gate * share
        return torch.cat([grad * up * (share + silu * (1 - share)), grad * silu], -1).to(x.dtype)

    variants = {"ringattn": swiglu.run_swiglu_halves_backward, "eager": formula, "compiled": compiled(formula)}
    compare(bench, f"SwiGLU bwd {ROWS} x {columns}", variants, [dy, x], 5 * size, formula)


def main() -> int:
    """Everything, or what the command line names: norm, softmax, rotary, swiglu."""
    torch.manual_seed(0)
    bench = Benchmark("nn", DEVICE)
    chosen = sys.argv[1:] or ["norm", "softmax", "rotary", "swiglu"]
    if "norm" in chosen:
        for columns in (4096, 8192) if CUDA else (256,):
            for center in (False, True):
                bench_norm(bench, columns, center, add=False)
                bench_norm(bench, columns, center, add=True)
                bench_norm_backward(bench, columns, center)
    if "softmax" in chosen:
        for rows, columns in ((512, 1 << 17), (64, 1 << 20)) if CUDA else ((4, 4096),):
            bench_softmax(bench, rows, columns)
    if "rotary" in chosen:
        bench_rotary(bench, ROWS, 32, 8, 128)
    if "swiglu" in chosen:
        bench_swiglu(bench, 11008 if CUDA else 256)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
