"""The functions and layers of `ringattn.nn`: errors against float64, extremes, custom ops, and layers over shards.

Ratios are errors over those of torch's own computation in the same dtype, both against float64. On a machine with a
GPU the same tests run there, through the kernels.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn import norms, positions, rotary, swiglu
from ringattn import softmax as softmax_module
from ringattn.layout import make_shards, shard_positions
from ringattn.nn import (
    Attention,
    LayerNorm,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    apply_rotary,
    layer_norm,
    logsumexp,
    merge_softmax_states,
    online_softmax_state,
    rms_norm,
    rotary_frequencies,
    rotary_tables,
    softmax,
)
from ringattn.nn import swiglu as run_swiglu

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MOST = 1.3  # of torch's error: one rounding more or less in a short sum

Function = Callable[..., Any]


def draw(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def values(function: Function, inputs: list[Tensor], seed: int = 1) -> list[Tensor]:
    """The outputs of a function and its gradients in all inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    grads = [draw(*y.shape, device="cpu", seed=seed + i).to(y.device, y.dtype) for i, y in enumerate(outputs)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, inputs, grads)]


def error(x: Tensor, exact: Tensor) -> float:
    return torch.where(x.double() == exact, 0.0, x.double() - exact).norm().item()


def hold(ours: Function, peer: Function, inputs: list[Tensor], most: float = MOST) -> None:
    """Every output and gradient is as near to the peer's in float64 as the peer's in the inputs' dtype."""
    exact = values(peer, [x.double() for x in inputs])
    single = values(peer, inputs)
    for index, (x, x1, x64) in enumerate(zip(values(ours, inputs), single, exact, strict=True)):
        rounding = 4 * torch.finfo(x.dtype).eps * x64.nan_to_num(0.0, 0.0, 0.0).norm().item()
        assert error(x, x64) <= max(most * error(x1, x64), rounding if x.dtype == torch.float32 else 0.0), index


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 3, 128, 1000])
def test_norms_match_torch(device: str, dtype: torch.dtype, columns: int) -> None:
    x, weight, bias = draw(2, 5, columns, device=device, dtype=dtype), *draw(2, columns, device=device, dtype=dtype)
    shape = (columns,)
    most = MOST if columns > 1 else 3.0  # the gradient of a row of one number is nothing but cancellation
    hold(lambda x, w: rms_norm(x, w, eps=1e-6), lambda x, w: F.rms_norm(x, shape, w, 1e-6), [x, weight], most)
    hold(lambda x: rms_norm(x, eps=1e-6), lambda x: F.rms_norm(x, shape, None, 1e-6), [x], most)
    hold(layer_norm, lambda x, w, b: F.layer_norm(x, shape, w, b), [x, weight, bias], most)
    hold(layer_norm, lambda x: F.layer_norm(x, shape), [x], most)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("center", [False, True])
def test_residual_is_added_before_and_returned(device: str, center: bool) -> None:
    x, residual = draw(2, 4, 3, 64, device=device)
    weight, bias = draw(2, 64, device=device, seed=1)

    def peer(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        if center:
            return F.layer_norm(total, (64,), weight, bias, 1e-6), total
        return F.rms_norm(total, (64,), weight, 1e-6) + bias, total

    norm = layer_norm if center else rms_norm
    hold(lambda x, r, w, b: norm(x, w, bias=b, residual=r, eps=1e-6), peer, [x, residual, weight, bias])

    with torch.no_grad():
        stream = residual.clone().transpose(0, 1)
        y, summed = norm(x.transpose(0, 1), weight, residual=stream, inplace=True)
        expected, total = norm(x.transpose(0, 1), weight, residual=residual.transpose(0, 1))
    assert summed is stream and torch.equal(stream, total) and torch.equal(y, expected)


def test_residual_stream_in_float32_keeps_its_dtype() -> None:
    x, residual = draw(4, 32, device="cpu", dtype=torch.bfloat16).requires_grad_(), draw(4, 32, device="cpu")
    y, stream = rms_norm(x, torch.ones(32), residual=residual)
    assert (y.dtype, stream.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(stream, x.float() + residual)
    (y.float().sum() + stream.sum()).backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
def test_layer_norm_keeps_a_small_deviation_beside_a_large_mean(device: str) -> None:
    x = 1e4 + 1e-2 * draw(16, 4096, device=device)
    weight, bias = draw(2, 4096, device=device)
    exact = values(lambda x, w, b: F.layer_norm(x, (4096,), w, b), [t.double() for t in (x, weight, bias)])
    for index, (got, expected) in enumerate(zip(values(layer_norm, [x, weight, bias]), exact, strict=True)):
        assert error(got, expected) <= 1e-6 * expected.norm().item(), index


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_norms_of_extreme_rows(device: str, norm: Function) -> None:
    big = torch.tensor([1e15, -1e15] * 32, device=device)
    rows = torch.stack([big, torch.full_like(big, 7.0), torch.zeros_like(big), big * 1e-30])
    y = norm(rows, eps=1e-6)
    assert torch.allclose(y[0], torch.sign(big)) and not y[2].any() and y.isfinite().all()
    assert torch.allclose(y[1], torch.full_like(big, 0.0 if norm is layer_norm else 1.0), atol=1e-6)
    assert norm(torch.full((2, 1), 3.0, device=device)).isfinite().all()
    assert norm(torch.zeros(0, 8, device=device)).shape == (0, 8)
    assert norm(torch.full((2, 8), math.nan, device=device)).isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "temperature"), [(1, 1.0), (7, 0.5), (1000, 1.0), (1000, 3.0)])
def test_softmax_and_logsumexp_match_torch(device: str, dtype: torch.dtype, columns: int, temperature: float) -> None:
    x = 3 * draw(3, 4, columns, device=device, dtype=dtype).transpose(0, 1)
    mask = torch.rand(columns, generator=torch.Generator().manual_seed(0)).to(device) > 0.3
    mask[0] = True

    def hidden(x: Tensor) -> Tensor:
        return (x / temperature).masked_fill(~mask, -math.inf)

    def ours(x: Tensor) -> Tensor:
        return softmax(x, mask=mask, temperature=temperature)

    hold(lambda x: softmax(x, temperature=temperature), lambda x: (x / temperature).softmax(-1), [x])
    hold(ours, lambda x: hidden(x).softmax(-1), [x])
    if dtype == torch.float32:
        hold(lambda x: logsumexp(x, mask=mask, temperature=temperature), lambda x: hidden(x).logsumexp(-1), [x])


@pytest.mark.parametrize("device", DEVICES)
def test_softmax_of_extreme_rows(device: str) -> None:
    x = torch.zeros(6, 40, device=device)
    x[0] = torch.tensor([1e30, -1e30] * 20)
    x[1], x[2], x[3, 1:], x[4, 3] = 5.0, -math.inf, -math.inf, math.nan
    x[5] = torch.tensor([3e38, -3e38] * 20)
    x.requires_grad_()
    y = softmax(x)
    assert torch.equal(y[0], torch.tensor([0.05, 0.0] * 20, device=device)) and torch.equal(y[5], y[0])
    assert torch.allclose(y[1], torch.full((40,), 1 / 40, device=device))
    assert not y[2].any() and y[3, 0] == 1 and not y[3, 1:].any() and y[4].isnan().all()
    lse = logsumexp(x)
    assert lse[2] == -math.inf and lse[3] == 0 and lse[4].isnan()
    (grad,) = torch.autograd.grad([y[:4], lse[:4]], [x], [torch.ones_like(y[:4]), torch.ones_like(lse[:4])])
    assert grad[:4].isfinite().all() and not grad[2].any()
    assert softmax(torch.zeros(0, 3, device=device)).shape == (0, 3)
    assert logsumexp(torch.zeros(2, 0, device=device)).tolist() == [-math.inf, -math.inf]


@pytest.mark.parametrize("device", DEVICES)
def test_states_of_parts_merge_into_the_state_of_the_whole(device: str) -> None:
    x = 5 * draw(4, 96, device=device)
    x[0, :32], x[1] = -math.inf, -math.inf
    whole = online_softmax_state(x, temperature=0.7)
    parts = [online_softmax_state(part, temperature=0.7) for part in x.split([32, 1, 63], dim=1)]
    merged = merge_softmax_states(*(torch.stack(column) for column in zip(*parts, strict=True)))
    reversed_ = merge_softmax_states(*(torch.stack(column) for column in zip(*reversed(parts), strict=True)))
    for got in (merged, reversed_):
        assert torch.equal(got[0], whole[0]) and torch.allclose(got[1], whole[1], rtol=1e-6)
    assert (whole[0][1], whole[1][1]) == (-math.inf, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [20000, 131072, 131073, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_on_the_gpu(columns: int, dtype: torch.dtype) -> None:
    x = 4 * draw(5, columns, device="cuda", dtype=dtype)
    x[2] = -math.inf
    hold(softmax, lambda x: x.softmax(-1).nan_to_num(0.0), [x[:2]])
    assert not softmax(x)[2].any()
    first = values(softmax, [x])
    for _ in range(20):
        assert all(map(torch.equal, values(softmax, [x]), first))
    if dtype == torch.float32:
        hold(logsumexp, lambda x: x.logsumexp(-1), [x[3:]])


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [128, 4096, 8192, 20000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_gradients_do_not_vary(columns: int, dtype: torch.dtype) -> None:
    x, residual = draw(2, 700, columns, device="cuda", dtype=dtype)
    weight, bias = draw(2, columns, device="cuda")
    inputs = [x, residual, weight, bias]
    for norm in (rms_norm, layer_norm):

        def run(x: Tensor, r: Tensor, w: Tensor, b: Tensor, norm: Function = norm) -> Any:
            return norm(x, w, bias=b, residual=r, eps=1e-6)

        first = values(run, inputs)
        for _ in range(10):
            assert all(map(torch.equal, values(run, inputs), first))
    hold(layer_norm, lambda x, w, b: F.layer_norm(x, (columns,), w.to(x.dtype), b.to(x.dtype)), [x, weight, bias])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_matches_torch(device: str, dtype: torch.dtype) -> None:
    x = 3 * draw(3, 5, 2 * 70, device=device, dtype=dtype).transpose(0, 1)

    def peer(x: Tensor) -> Tensor:
        gate, up = (half.to(torch.promote_types(x.dtype, torch.float32)) for half in x.chunk(2, -1))
        return (F.silu(gate) * up).to(x.dtype)

    hold(run_swiglu, peer, [x])
    hold(lambda gate, up: run_swiglu(gate, up), lambda gate, up: peer(torch.cat([gate, up], -1)), list(x.chunk(2, -1)))
    gate = torch.tensor([1e4, -1e4, 0.0, 88.0, -88.0, 60000.0], device=device, dtype=torch.float16)
    assert torch.equal(run_swiglu(gate, torch.ones_like(gate)), F.silu(gate.float()).half())
    assert all(x.isfinite().all() for x in values(run_swiglu, [gate, torch.ones_like(gate)]))


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding as complex multiplication, in float64; cos and sin (B, 1, S, R)."""
    pairs, wide = cos.shape[-1], x.double()
    lane = torch.arange(pairs, device=x.device)
    first, second = (2 * lane, 2 * lane + 1) if interleaved else (lane, lane + pairs)
    spun = torch.complex(wide[..., first], wide[..., second]) * torch.complex(cos.double(), sin.double())
    out = wide.clone()
    out[..., first], out[..., second] = spun.real, spun.imag
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(16, 16), (20, 12), (10, 2)])
def test_rotary_turns_pairs_at_any_positions(
    device: str, dtype: torch.dtype, interleaved: bool, dim: int, rotary_dim: int
) -> None:
    fused = draw(2, 33, 7 * dim, device=device, dtype=dtype).unflatten(-1, (7, dim)).transpose(1, 2)
    query, key = fused[:, :5], fused[:, 5:]
    positions = torch.randint(0, 1 << 20, (2, 33), generator=torch.Generator().manual_seed(0)).to(device)
    module = RotaryEmbedding(dim, rotary_dim=rotary_dim, interleaved=interleaved)
    cos, sin = (table.view(2, 1, 33, -1) for table in module.tables(positions.flatten()))

    def ours(query: Tensor, key: Tensor) -> Any:
        return module(query, key, positions)

    def peer(query: Tensor, key: Tensor) -> Any:
        return tuple(turned(x, cos, sin, interleaved).to(x.dtype) for x in (query, key))

    got, exact = values(ours, [query, key]), values(peer, [query.double(), key.double()])
    for x, x64 in zip(got, exact, strict=True):
        assert error(x, x64) <= 0.6 * torch.finfo(dtype).eps * x64.norm().item()
    assert got[0].stride() == torch.empty_like(query).stride()


def test_rotary_tables_looked_up_and_computed_agree() -> None:
    query, key = draw(1, 2, 9, 8, device="cpu"), draw(1, 1, 9, 8, device="cpu")
    positions = torch.tensor([0, 99, 5, 5, 63, 100, 1, -1, 2])
    kept = RotaryEmbedding(8, max_positions=100)
    got = kept(query, key, positions)
    expected = RotaryEmbedding(8)(query, key, positions)
    known = (positions >= 0) & (positions < 100)
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x[:, :, known], y[:, :, known]) and x[:, :, ~known].isnan().all()
    assert not list(kept.state_dict()) and not list(kept.buffers())


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 16.0, "original_max_position_embeddings": 4096},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
FIRST_AND_LAST = {"linear": (0.25, 7.2e-06), "yarn": (1.0, 1.8e-06), "llama3": (1.0, 3.6e-06)}


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_change_the_slow_pairs(name: str) -> None:
    plain, _ = rotary_frequencies(64, 5e5)
    scaled, factor = rotary_frequencies(64, 5e5, {"rope_type": name, **SCALINGS[name]})
    slowest = plain[-1] / SCALINGS[name]["factor"]
    assert scaled[-1] == pytest.approx(slowest, rel=1e-12)
    assert scaled[0] == pytest.approx(plain[0] / (4.0 if name == "linear" else 1.0), rel=1e-12)
    assert all(s <= p for s, p in zip(scaled, plain, strict=True))
    assert factor == pytest.approx(0.1 * math.log(16) + 1 if name == "yarn" else 1.0)


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_match_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": name, "rope_theta": 5e5, **SCALINGS[name]}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_theta=5e5, rope_scaling=scaling, max_position_embeddings=131072
    )
    expected, factor = ROPE_INIT_FUNCTIONS[name](config, "cpu")
    scaled, ours = rotary_frequencies(64, 5e5, {"rope_type": name, **SCALINGS[name]})
    assert ours == pytest.approx(factor) and torch.allclose(torch.tensor(scaled), expected, rtol=1e-5)


def test_ntk_stretches_the_slowest_pair_by_the_factor() -> None:
    plain, _ = rotary_frequencies(64)
    scaled, _ = rotary_frequencies(64, scaling={"rope_type": "ntk", "factor": 4.0})
    assert scaled[0] == 1.0 and scaled[-1] == pytest.approx(plain[-1] / 4.0, rel=1e-12)


X = draw(4, 3, 10, device="cpu").transpose(0, 1)
HEADS = draw(2, 6, 4, 8, device="cpu").transpose(1, 2)
OPS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rms": (norms.norm, (X, None, torch.ones(10), None, 1e-6, False)),
    "layer": (norms.norm, (X, X.clone(), torch.ones(10), torch.zeros(10), 1e-6, True)),
    "inplace": (norms.norm_inplace, (X, X.clone(), torch.ones(10), None, 1e-6, True)),
    "softmax": (softmax_module.run_softmax, (X, X > 0, 2.0)),
    "logsumexp": (softmax_module.run_logsumexp, (X, X > 0, 2.0)),
    "swiglu": (swiglu.run_swiglu, (X, X.clone())),
    "swiglu halves": (swiglu.run_swiglu_halves, (X,)),
    "rotary": (
        rotary.run_rotary,
        (HEADS, HEADS[:, :2], torch.ones(9, 3), torch.ones(9, 3), torch.arange(6)[None], True, False),
    ),
}
DIFFERENTIABLE = [name for name in OPS if name != "inplace"]


@pytest.mark.parametrize("name", OPS)
def test_custom_ops_are_well_formed_for_permuted_inputs(name: str) -> None:
    op, args = OPS[name]
    if name in DIFFERENTIABLE:
        args = tuple(
            x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() and i < 2 else x
            for i, x in enumerate(args)
        )
    torch.library.opcheck(op, args)


def test_gradients_against_finite_differences() -> None:
    x, residual = (t.requires_grad_() for t in draw(2, 2, 3, 6, device="cpu", dtype=torch.float64))
    weight, bias = (t.requires_grad_() for t in draw(2, 6, device="cpu", dtype=torch.float64, seed=1))
    mask = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(3)) > 0.4
    check = torch.autograd.gradcheck
    assert check(lambda x, r, w, b: layer_norm(x, w, b, residual=r), (x, residual, weight, bias))
    assert check(lambda x, r, w: rms_norm(x, w, residual=r), (x, residual, weight))
    assert check(lambda x: softmax(x, mask=mask, temperature=0.7), (x,))
    assert check(lambda x: logsumexp(x, mask=mask, temperature=0.7), (x,))
    assert check(run_swiglu, (x,)) and check(run_swiglu, (x, residual))


class Layer(torch.nn.Module):
    """One of everything."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        rotary = RotaryEmbedding(8, rotary_dim=6, max_positions=64)
        self.attention = Attention(32, 4, 2, qk_norm=True, rotary=rotary, mask="causal", **options)
        self.norm, self.feed_norm = LayerNorm(32), RMSNorm(32)
        self.feed = SwiGLU(32, 48)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        y, stream = self.feed_norm(self.attention(self.norm(x), positions), residual=x)
        return stream + self.feed(y)


def make_layer(device: str = "cpu", **options: Any) -> Layer:
    torch.manual_seed(0)
    return Layer(**options).to(device)


def gradients(module: torch.nn.Module, function: Function, x: Tensor) -> list[Tensor]:
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), list(module.parameters()))]


@pytest.mark.parametrize("device", DEVICES)
def test_layers_compile_whole_and_recompute(device: str) -> None:
    layer, x = make_layer(device), draw(2, 12, 32, device=device)
    expected = gradients(layer, layer, x)
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = gradients(layer, torch.compile(layer, fullgraph=True, backend=backend), x)
    recomputed = gradients(
        layer, lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False), x.requires_grad_()
    )
    for ours, theirs, exact in zip(compiled, recomputed, expected, strict=True):
        assert torch.allclose(ours, exact, rtol=1e-4, atol=1e-5) and torch.equal(theirs, exact)


def test_attention_layer_is_attention() -> None:
    layer = make_layer().attention
    x, positions = draw(2, 10, 32, device="cpu"), torch.arange(10)
    heads = (x @ layer.qkv.weight.T).unflatten(-1, (8, 8)).transpose(1, 2)
    query, key, value = heads[:, :4], heads[:, 4:6], heads[:, 6:]
    assert layer.rotary is not None
    cos, sin = layer.rotary.tables(positions)
    query, key = (turned(F.rms_norm(h, (8,), eps=1e-6), cos, sin, False).float() for h in (query, key))
    seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    expected = seen.transpose(1, 2).flatten(2) @ layer.out.weight.T
    assert torch.allclose(layer(x), expected, atol=1e-6) and torch.equal(layer(x), layer(x, positions))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_local_layers_of_shards_are_shards_of_the_whole(layout: str) -> None:
    """What is not attention must not see the layout: rotated shards equal the rotated whole, bit for bit."""
    x, module = draw(1, 4, 13, 8, device="cpu"), RotaryEmbedding(8)
    whole, _ = module(x, x, torch.arange(13))
    for part in make_shards(layout, (13,), 3):
        index = torch.tensor(shard_positions(part))
        assert torch.equal(module(x[:, :, index], x[:, :, index], index)[0], whole[:, :, index])


def test_positions_default_to_those_dealt() -> None:
    layer = make_layer(layout="zigzag", seq_len=7)
    x = draw(1, 7, 32, device="cpu")
    assert torch.equal(layer(x), layer(x, positions(7, layout="zigzag")))


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "weight shape": (lambda: rms_norm(torch.ones(2, 4), torch.ones(3)), r"weight must have shape \(4,\), got \(3,\)"),
    "residual shape": (lambda: layer_norm(torch.ones(2, 4), residual=torch.ones(4)), "residual must have x's shape"),
    "in place without": (lambda: rms_norm(torch.ones(2), inplace=True), "needs a residual"),
    "in place with gradients": (
        lambda: rms_norm(torch.ones(2, requires_grad=True), residual=torch.ones(2), inplace=True),
        "no_grad",
    ),
    "integers": (lambda: softmax(torch.ones(2, dtype=torch.int64)), "floating-point"),
    "temperature": (lambda: softmax(torch.ones(2), temperature=0.0), "temperature must be .* got 0.0"),
    "mask dtype": (lambda: logsumexp(torch.ones(2), mask=torch.ones(2)), "mask must be bool"),
    "mask shape": (lambda: softmax(torch.ones(2), mask=torch.ones(3, dtype=torch.bool)), "does not broadcast"),
    "odd halves": (lambda: run_swiglu(torch.ones(3)), "2 N"),
    "gate and up": (lambda: run_swiglu(torch.ones(3), torch.ones(4)), "one shape and dtype"),
    "odd rotary": (lambda: rotary_frequencies(5), "even"),
    "dynamic": (lambda: rotary_frequencies(4, scaling={"rope_type": "dynamic", "factor": 2}), "use 'ntk'"),
    "unknown scaling": (lambda: rotary_frequencies(4, scaling={"rope_type": "cubic"}), "choose one of default, linear"),
    "scaling keys": (lambda: rotary_frequencies(4, scaling={"type": "linear", "scale": 2}), "linear takes"),
    "table rows": (
        lambda: apply_rotary(*(torch.ones(1, 1, 3, 4),) * 2, *rotary_tables(torch.arange(2), torch.ones(2))),
        "a row for each of 3 tokens, got 2",
    ),
    "float positions": (
        lambda: RotaryEmbedding(4, max_positions=8)(*(torch.ones(1, 1, 3, 4),) * 2, torch.ones(3)),
        "positions must be integers",
    ),
    "heads": (lambda: Attention(32, 4, 3), r"heads \(4\) must be a multiple of kv_heads \(3\)"),
    "dim": (lambda: Attention(30, 4), "must be a multiple of heads"),
    "ring keyword": (lambda: Attention(32, 4, causal=True), "unknown .*causal"),
    "rotary dim": (lambda: RotaryEmbedding(8, rotary_dim=10), "at most head_dim"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
