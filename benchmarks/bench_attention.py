"""Local attention, forward and backward, beside FA3, cuDNN, FA2 and compiled flex_attention, in one interleaved run.

    python benchmarks/bench_attention.py [--dims 64 128 256] [--rows 8192 32768] [--passes fwd bwd] [--flex]

A single call that writes the final dtype; backward includes delta, zeroing and casts. Every result is checked against
float64 before it is timed: at most twice the largest error of the same attention written in torch operations
(FlashAttention's rule). FA3 is the `fa3-fwd` wheel, where installed; cuDNN and FA2 are torch's SDPA backends. Saves the
table as JSON and, with matplotlib, a picture beside it.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from common import RESULTS, Benchmark, Check, Variant, Work, against
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ringattn.backends import Problem, reference, triton
from ringattn.mask import CAUSAL
from ringattn.plan import Tile

TOKENS, WIDTH = 16_384, 2048
"""Tokens of a batch and H x D, as in FlashAttention-3's figures."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
SETS = 3
"""Input sets that calls take in turn, so that none finds its own operands in the cache."""


def problem_of(q: Tensor) -> Problem:
    return Problem(q.shape[3] ** -0.5, first=True, first_kv=True)


def tiles_of(q: Tensor, k: Tensor, causal: bool) -> tuple[Tile, ...]:
    return (Tile(0, q.shape[2], 0, k.shape[2], CAUSAL if causal else None, 0, 0, 1),)


def our_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) of the triton backend, out in q's dtype."""
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    triton.forward(problem_of(q), tiles_of(q, k, causal), q, k, v, out, lse)
    return out, lse


def our_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> list[Tensor]:
    """[dq, dk, dv] in the inputs' dtype, delta included."""
    grads = [torch.empty_like(x) for x in (q, k, v)]
    delta = triton.row_delta(do, out, None)
    triton.backward(problem_of(q), tiles_of(q, k, causal), do, q, k, v, out, lse, delta, *grads)
    return grads


def sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
    """torch's attention on one of its backends."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return attend


def fa3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """FlashAttention-3's published forward wheel."""
    from fa3_fwd_interface import flash_attn_func

    out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def flex(rows: int, keys: int) -> Callable[..., Tensor]:
    """Compiled flex_attention with a causal block mask or none."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, rows, keys)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return compiled(q, k, v, block_mask=block_mask if causal else None, enable_gqa=q.shape[1] != k.shape[1])

    return attend


def torch_results(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> list[Tensor]:
    """[out, dq, dk, dv] by torch operations in the inputs' dtype, a head at a time."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    results = [torch.empty_like(do), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)]
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu_(1) if causal else None
    for batch in range(q.shape[0]):
        for head in range(heads):
            leaves = [
                x.detach().requires_grad_() for x in (q[batch, head], k[batch, head // group], v[batch, head // group])
            ]
            scores = (leaves[0] @ leaves[1].mT) * q.shape[3] ** -0.5
            if hidden is not None:
                scores = scores.masked_fill(hidden, -math.inf)
            out = torch.softmax(scores, -1) @ leaves[2]
            dq, dk, dv = torch.autograd.grad(out, leaves, do[batch, head])
            results[0][batch, head], results[1][batch, head] = out.detach(), dq
            results[2][batch, head // group] += dk
            results[3][batch, head // group] += dv
            del scores, out
    return results


def exact_results(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> list[Tensor]:
    """[out, dq, dk, dv] in float64."""
    tiles, problem = tiles_of(q, k, causal), problem_of(q)
    q, k, v, do = (x.double() for x in (q, k, v, do))
    out, lse = torch.empty_like(do), torch.empty(q.shape[:3], dtype=q.dtype, device=q.device)
    reference.forward(problem, tiles, q, k, v, out, lse)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    reference.backward(problem, tiles, do, q, k, v, out, lse, (do * out).sum(-1), *grads)
    return [out, *grads]


def forward_variants(sets: list[Inputs], causal: bool, peers: dict[str, Callable[..., Tensor]]) -> dict[str, Variant]:
    """Forward calls by name; each takes the input set of its turn."""

    def call(attend: Callable[..., Any]) -> Variant:
        return lambda turn: attend(*sets[turn % SETS][:3], causal)

    return {"triton": call(lambda *x: our_forward(*x)[0]), **{name: call(attend) for name, attend in peers.items()}}


def backward_variants(sets: list[Inputs], causal: bool, peers: dict[str, Callable[..., Tensor]]) -> dict[str, Variant]:
    """Backward calls by name, on outputs computed beforehand."""
    saved = [our_forward(q, k, v, causal) for q, k, v, _ in sets]

    def ours(turn: int) -> list[Tensor]:
        q, k, v, do = sets[turn % SETS]
        return our_backward(do, q, k, v, *saved[turn % SETS], causal)

    def call(attend: Callable[..., Tensor]) -> Variant:
        leaves = [[x.detach().requires_grad_() for x in inputs[:3]] for inputs in sets]
        outs: list[Tensor] = []

        def backward(turn: int) -> Any:
            if not outs:
                outs.extend(attend(*leaf, causal) for leaf in leaves)
            return torch.autograd.grad(outs[turn % SETS], leaves[turn % SETS], sets[turn % SETS][3], retain_graph=True)

        return backward

    return {"triton": ours, **{name: call(attend) for name, attend in peers.items()}}


def run_shape(bench: Benchmark, dim: int, rows: int, causal: bool, kv_heads: int, options: argparse.Namespace) -> None:
    """Check and time all variants on one shape."""
    heads, batch, dtype = WIDTH // dim, max(1, TOKENS // rows), getattr(torch, options.dtype)
    kv_heads = kv_heads or heads

    def draw(count: int) -> Tensor:
        return torch.randn(batch, count, rows, dim, device="cuda", dtype=dtype)

    sets = [(draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)) for _ in range(SETS)]
    expected, baseline = exact_results(*sets[0], causal), torch_results(*sets[0], causal)
    shape = f"{'causal' if causal else 'full'} B={batch} H={heads}/{kv_heads} S={rows} D={dim}"
    flops = 4 * batch * heads * dim * rows * rows * (0.5 if causal else 1.0)
    peers = {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "fa2": sdpa(SDPBackend.FLASH_ATTENTION)}
    if options.flex and rows == 8192 and dim < 256:
        peers["flex"] = flex(rows, rows)
    checks: dict[str, Check] = {"fwd": against(expected[:1], baseline[:1]), "bwd": against(expected[1:], baseline[1:])}
    if "fwd" in options.passes:
        variants = forward_variants(sets, causal, {"fa3": fa3, **peers})
        bench.compare(f"fwd {shape}", options.dtype, variants, checks["fwd"], work=Work(flops), peer="fa3")
    if "bwd" in options.passes:
        variants = backward_variants(sets, causal, peers)
        bench.compare(f"bwd {shape}", options.dtype, variants, checks["bwd"], work=Work(2.5 * flops), peer="fa2")


def plot(bench: Benchmark) -> None:
    """Bars of TFLOP/s by shape and variant, saved beside the table."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    rows = [row for row in bench.rows if row.seconds]
    shapes, names = list(dict.fromkeys(r.shape for r in rows)), list(dict.fromkeys(r.variant for r in rows))
    figure, axes = pyplot.subplots(figsize=(10, 0.35 * len(shapes) * len(names) / 2 + 2))
    for offset, name in enumerate(names):
        values = {row.shape: float(row.rate.split()[0]) for row in rows if row.variant == name}
        places = [index + offset / (len(names) + 1) for index, shape in enumerate(shapes) if shape in values]
        axes.barh(places, [values[shape] for shape in shapes if shape in values], 1 / (len(names) + 1), label=name)
    axes.set_yticks([index + 0.4 for index in range(len(shapes))], shapes, fontsize=7)
    axes.set_xlabel("TFLOP/s")
    axes.legend()
    axes.invert_yaxis()
    figure.tight_layout()
    bench.results.mkdir(parents=True, exist_ok=True)
    figure.savefig(bench.results / "attention.png", dpi=110)


def main() -> int:
    """Read the arguments, run every shape, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--masks", nargs="+", default=["full", "causal"], choices=["full", "causal"])
    parser.add_argument("--passes", nargs="+", default=["fwd", "bwd"], choices=["fwd", "bwd"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-heads", type=int, default=0, help="heads of k and v; as many as of q by default")
    parser.add_argument("--flex", action="store_true", help="compile flex_attention too (S=8192, D below 256)")
    parser.add_argument("--results", type=type(RESULTS), default=RESULTS, help="folder of the JSON and the picture")
    options = parser.parse_args()
    torch.manual_seed(0)
    bench = Benchmark("attention", "cuda", options.results)
    for dim in options.dims:
        for rows in options.rows:
            for mask in options.masks:
                run_shape(bench, dim, rows, mask == "causal", options.kv_heads, options)
    plot(bench)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
