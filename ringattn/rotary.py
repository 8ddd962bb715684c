"""Rotary embeddings at global positions, whatever the layout: frequencies and their scalings, tables, and the rotation.

Angles are computed in float64: in float32 they are off by 2e-4 at position 8192, and by more beyond.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ringattn.kernel_choice import kernels_answer, wide_dtype

Frequencies = tuple[float, ...]


def rotary_frequencies(
    dim: int, base: float = 10_000.0, scaling: Mapping[str, Any] | None = None
) -> tuple[Frequencies, float]:
    """Angles a token adds to each pair, and the factor that a scaling asks for on cosines and sines.

    Args:
        dim: rotary dimensions, even; pair d turns by `base^(-2 d / dim)` a token (Su et al., RoFormer, 2021, arXiv
            2104.09864).
        base: of the exponents.
        scaling: for contexts longer than trained on, in transformers' form, `{"rope_type": name, ...}`:
            "linear" (factor; Chen et al., 2023, arXiv 2306.15595),
            "ntk" (factor; base times factor^(dim / (dim - 2)), NTK-aware interpolation),
            "yarn" (factor, original_max_position_embeddings, and optionally beta_fast, beta_slow, attention_factor,
            mscale, mscale_all_dim, truncate; Peng et al., YaRN, 2023, arXiv 2309.00071),
            "llama3" (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings; Llama 3.1).

    Returns:
        dim / 2 frequencies, and the factor, 1.0 except for "yarn".

    Raises:
        ValueError: an odd dim, an unknown scaling, or keys that it lacks or does not know.

    Example:
        >>> rotary_frequencies(4, base=100.0, scaling={"rope_type": "linear", "factor": 2.0})
        ((0.5, 0.05), 1.0)
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"dim must be even and at least 2, got {dim}")
    settings = {"rope_type": "default"} if scaling is None else dict(scaling)
    name = settings.pop("rope_type", settings.pop("type", None))
    if name not in SCALINGS:
        hint = "; it depends on the length of the whole sequence: use 'ntk'" if name == "dynamic" else ""
        raise ValueError(f"unknown rope_type {name!r}{hint}; choose one of {', '.join(SCALINGS)}")
    function, needed, optional = SCALINGS[name]
    if not needed <= settings.keys() <= needed | optional:
        raise ValueError(f"{name} takes {sorted(needed)} and optionally {sorted(optional)}, got {sorted(settings)}")
    return function(dim, base, **settings)


def _default(dim: int, base: float) -> tuple[Frequencies, float]:
    return tuple(base ** (-2 * pair / dim) for pair in range(dim // 2)), 1.0


def _linear(dim: int, base: float, factor: float) -> tuple[Frequencies, float]:
    return tuple(frequency / factor for frequency in _default(dim, base)[0]), 1.0


def _ntk(dim: int, base: float, factor: float) -> tuple[Frequencies, float]:
    return _default(dim, base * factor ** (dim / max(dim - 2, 1)))


def _yarn(
    dim: int,
    base: float,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> tuple[Frequencies, float]:
    def pair_that_turns(times: float) -> float:
        return dim * math.log(original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(base))

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    frequencies = []
    for pair, frequency in enumerate(_default(dim, base)[0]):
        share = min(max((pair - low) / (high - low), 0.0), 1.0)
        frequencies.append(frequency / factor * share + frequency * (1 - share))
    if attention_factor is None:
        attention_factor = temperature(1.0)
        if mscale and mscale_all_dim:
            attention_factor = temperature(mscale) / temperature(mscale_all_dim)
    return tuple(frequencies), attention_factor


def _llama3(
    dim: int,
    base: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> tuple[Frequencies, float]:
    frequencies = []
    for frequency in _default(dim, base)[0]:
        turns = original_max_position_embeddings * frequency / (2 * math.pi)
        share = min(max((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0), 1.0)
        frequencies.append(frequency / factor * (1 - share) + frequency * share)
    return tuple(frequencies), 1.0


_ORIGINAL = "original_max_position_embeddings"
SCALINGS: dict[str, tuple[Callable[..., tuple[Frequencies, float]], set[str], set[str]]] = {
    "default": (_default, set(), set()),
    "linear": (_linear, {"factor"}, set()),
    "ntk": (_ntk, {"factor"}, set()),
    "yarn": (
        _yarn,
        {"factor", _ORIGINAL},
        {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"},
    ),
    "llama3": (_llama3, {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}, set()),
}
"""Each scaling's function, the keys it needs, and those it may have."""


def rotary_tables(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions.

    Args:
        positions: (P,) integers.
        frequencies: (R,) float64, from `rotary_frequencies`.
        factor: of both tables, from there too.

    Returns:
        Two (P, R) float32 tensors.

    Example:
        >>> cos, sin = rotary_tables(torch.arange(3), torch.tensor([0.5], dtype=torch.float64))
        >>> cos.shape, sin[0].tolist()
        (torch.Size([3, 1]), [0.0])
    """
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def apply_rotary(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Turn pairs of numbers of queries and keys by the angles of their positions, in at least float32.

    Args:
        query: (B, H, S, D), any strides.
        key: (B, G, S, D), any strides.
        cos, sin: (P, R) tables with 2 R <= D; what is beyond 2 R passes through.
        positions: (S,), (1, S) or (B, S) integers, rows of the tables; None takes row s for token s. A position
            outside of the tables gives NaN.
        interleaved: pairs are (2 d, 2 d + 1), as in GPT-J, instead of (d, d + R), as in GPT-NeoX and Llama.

    Returns:
        Query and key, turned; the order of their dimensions in memory is kept. Differentiable in both.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Example:
        >>> cos, sin = torch.zeros(4, 2), torch.ones(4, 2)  # a quarter turn
        >>> x = torch.arange(4.0).expand(1, 1, 4, 4)
        >>> apply_rotary(x, x, cos, sin)[0][0, 0, 0].tolist()
        [-2.0, -3.0, 0.0, 1.0]
    """
    if query.dim() != 4 or key.dim() != 4 or (query.shape[0], *query.shape[2:]) != (key.shape[0], *key.shape[2:]):
        raise ValueError(
            f"need query (B, H, S, D) and key (B, G, S, D), got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if query.dtype != key.dtype or not query.is_floating_point():
        raise ValueError(f"query and key must have one floating-point dtype, got {query.dtype} and {key.dtype}")
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > query.shape[3]:
        raise ValueError(
            f"cos and sin must both be (P, R) with 2 R <= D = {query.shape[3]}, got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}"
        )
    batch, _, tokens, _ = query.shape
    if positions is not None:
        positions = positions.unsqueeze(0) if positions.dim() == 1 else positions
        if positions.shape not in ((1, tokens), (batch, tokens)) or positions.is_floating_point():
            raise ValueError(
                f"positions must be integers of shape ({tokens},), (1, {tokens}) or ({batch}, {tokens}), got "
                f"{positions.dtype} {tuple(positions.shape)}"
            )
    elif cos.shape[0] != tokens:
        raise ValueError(f"without positions, the tables need a row for each of {tokens} tokens, got {cos.shape[0]}")
    turned = run_rotary(query, key, cos, sin, positions, interleaved, False)
    return turned[0], turned[1]


@torch.library.custom_op("ringattn::rotary", mutates_args=())
def run_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, backward: bool
) -> tuple[Tensor, Tensor]:
    if kernels_answer(q) and cos.dtype == torch.float32:
        from ringattn.kernels.rope import rope

        return rope(q, k, cos, sin, positions, interleaved=interleaved, backward=backward)
    if positions is not None:
        known = ((positions >= 0) & (positions < cos.shape[0])).unsqueeze(-1)
        at = positions.clamp(0, max(cos.shape[0] - 1, 0))
        cos, sin = (torch.where(known, table[at], torch.nan).unsqueeze(1) for table in (cos, sin))
    sin = -sin if backward else sin
    return _turn(q, cos, sin, interleaved), _turn(k, cos, sin, interleaved)


@run_rotary.register_fake
def _(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, backward: bool
) -> tuple[Tensor, Tensor]:
    return _like(q), _like(k)


def _like(x: Tensor) -> Tensor:
    """An empty tensor whose dimensions lie in the order of x's, the last one contiguous."""
    return torch.empty_like(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous())


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (B, H, S, D) turned by angles (..., S, R), in torch."""
    pairs = cos.shape[-1]
    wide, out = x.to(torch.promote_types(cos.dtype, wide_dtype(x))), _like(x)
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    out[..., first] = (wide[..., first] * cos - wide[..., second] * sin).to(x.dtype)
    out[..., second] = (wide[..., second] * cos + wide[..., first] * sin).to(x.dtype)
    out[..., 2 * pairs :] = x[..., 2 * pairs :]
    return out


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, _, cos, sin, positions, ctx.interleaved, ctx.backward = inputs
    ctx.save_for_backward(cos, sin, positions)


def _differentiate(ctx, dq, dk):  # type: ignore[no-untyped-def]
    turned = run_rotary(dq, dk, *ctx.saved_tensors, ctx.interleaved, not ctx.backward)
    return (*turned, None, None, None, None, None)


run_rotary.register_autograd(_differentiate, setup_context=_save)
