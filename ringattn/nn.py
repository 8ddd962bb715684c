"""Layers of a transformer over a sharded sequence: all are local to a token, but attention, which runs the ring.

The functions work on tensors of any strides, on the GPU by one kernel a direction, elsewhere by plain torch; they are
custom ops, so `torch.compile(fullgraph=True)` and activation checkpointing take them.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.attention import ring_attention
from ringattn.comm import group_name, ring_place
from ringattn.norms import layer_norm, rms_norm
from ringattn.rotary import apply_rotary, rotary_frequencies, rotary_tables
from ringattn.shard import positions as shard_positions
from ringattn.softmax import logsumexp, merge_softmax_states, online_softmax_state, softmax
from ringattn.swiglu import swiglu

__all__ = [
    "Attention",
    "LayerNorm",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
    "apply_rotary",
    "layer_norm",
    "logsumexp",
    "merge_softmax_states",
    "online_softmax_state",
    "rms_norm",
    "rotary_frequencies",
    "rotary_tables",
    "softmax",
    "swiglu",
]

_RING_OPTIONS = {
    name for name, parameter in inspect.signature(ring_attention).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
} - {"qkv_format", "return_lse"}  # fmt: skip


class RMSNorm(nn.Module):
    """`rms_norm` with a weight, and a bias if asked for.

    Args:
        dim: columns.
        eps: added to the mean square.
        bias: whether there is one.
        device, dtype: of the parameters.

    Example:
        >>> norm = RMSNorm(8)
        >>> y, stream = norm(torch.ones(2, 8), residual=torch.ones(2, 8))
        >>> stream[0, 0].item()
        2.0
    """

    def __init__(
        self, dim: int, eps: float = 1e-6, *, bias: bool = False, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The normalised rows; with a residual also its sum with x, which is what was normalised."""
        return rms_norm(x, self.weight, bias=self.bias, residual=residual, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


class LayerNorm(nn.Module):
    """`layer_norm` with a weight and, unless refused, a bias.

    Args:
        dim, eps, bias, device, dtype: as for `RMSNorm`.

    Example:
        >>> LayerNorm(4)(torch.tensor([1.0, 1.0, 3.0, 3.0])).round(decimals=3).tolist()
        [-1.0, -1.0, 1.0, 1.0]
    """

    def __init__(
        self, dim: int, eps: float = 1e-5, *, bias: bool = True, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """As `RMSNorm.forward`."""
        return layer_norm(x, self.weight, self.bias, residual=residual, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


class RotaryEmbedding(nn.Module):
    """Rotary embeddings at given positions; has no parameters and no buffers, so no cast or checkpoint touches it.

    Args:
        head_dim: D of queries and keys.
        rotary_dim: how many of a head's numbers, the first ones, are turned; all by default.
        base, scaling: as in `rotary_frequencies`.
        interleaved: as in `apply_rotary`.
        max_positions: positions to keep tables for, 8 bytes for each of their rotary_dim / 2 angles; built once a
            device and shared by all layers that share this module. None computes the angles in every call.

    Example:
        >>> rotary = RotaryEmbedding(8, max_positions=1024)
        >>> query = key = torch.ones(1, 2, 3, 8)
        >>> torch.equal(rotary(query, key, torch.tensor([0, 0, 0]))[0], query)
        True
    """

    def __init__(
        self,
        head_dim: int,
        *,
        rotary_dim: int | None = None,
        base: float = 10_000.0,
        scaling: Mapping[str, Any] | None = None,
        interleaved: bool = False,
        max_positions: int | None = None,
    ) -> None:
        super().__init__()
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if rotary_dim > head_dim:
            raise ValueError(f"rotary_dim ({rotary_dim}) must be at most head_dim ({head_dim})")
        self.frequencies, self.factor = rotary_frequencies(rotary_dim, base, scaling)
        self.interleaved, self.max_positions = interleaved, max_positions
        self._kept: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions (P,): two (P, rotary_dim / 2) float32 tensors."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=positions.device)
        return rotary_tables(positions, frequencies, self.factor)

    def forward(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Query (B, H, S, D) and key (B, G, S, D) turned by their positions, (S,), (1, S) or (B, S).

        A position beyond `max_positions` gives NaN.
        """
        if self.max_positions is not None:
            cos, sin = self._tables_kept(self.max_positions, query.device)
            return apply_rotary(query, key, cos, sin, positions, interleaved=self.interleaved)
        cos, sin = self.tables(positions.reshape(-1))
        rows = torch.arange(positions.numel(), device=positions.device).view(positions.shape)
        return apply_rotary(query, key, cos, sin, rows, interleaved=self.interleaved)

    def _tables_kept(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._kept:
            self._kept[device] = self.tables(torch.arange(count, device=device))
        return self._kept[device]

    def extra_repr(self) -> str:
        return f"{2 * len(self.frequencies)}, interleaved={self.interleaved}, max_positions={self.max_positions}"


class SwiGLU(nn.Module):
    """The gated feed-forward block `down(silu(gate(x)) * up(x))`, gate and up in one projection.

    Args:
        dim: columns in and out.
        hidden: columns between; by default 8/3 of dim, to a multiple of 64.
        bias: of the projections.
        device, dtype: of the parameters.

    Example:
        >>> SwiGLU(16, 32)(torch.ones(2, 3, 16)).shape
        torch.Size([2, 3, 16])
    """

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = -(-8 * dim // 3 // 64) * 64 if hidden is None else hidden
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=bias, device=device, dtype=dtype)
        self.down = nn.Linear(hidden, dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) to (..., dim)."""
        return self.down(swiglu(self.gate_up(x)))


class Attention(nn.Module):
    """Attention with grouped K/V heads over a sharded sequence: projections, rotary embedding, the ring, projection.

    Nothing in it depends on how many ranks there are: each passes its tokens and their global positions.

    Args:
        dim: columns in and out.
        heads: query heads, a multiple of `kv_heads`.
        kv_heads: heads of keys and values; as many as query heads by default.
        head_dim: dim / heads by default.
        bias: of the projections.
        qk_norm: RMSNorm of every query and key head before the rotation (Henry et al., 2020, arXiv 2010.04245).
        rotary: a `RotaryEmbedding`, which layers may share; None leaves positions to the mask.
        device, dtype: of the parameters.
        ring: keywords of `ring_attention`, such as group, layout, mask and seq_len.

    Raises:
        ValueError: heads that do not divide, keywords that `ring_attention` does not have.

    Example:
        >>> layer = Attention(32, 4, 2, rotary=RotaryEmbedding(8), layout="zigzag", mask="causal")
        >>> layer(torch.ones(1, 6, 32), positions=torch.arange(6)).shape
        torch.Size([1, 6, 32])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        qk_norm: bool = False,
        rotary: RotaryEmbedding | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **ring: Any,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
        if head_dim is None and dim % heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({heads}), or head_dim be given")
        unknown = ring.keys() - _RING_OPTIONS
        if unknown:
            raise ValueError(f"unknown {sorted(unknown)}; ring_attention takes {sorted(_RING_OPTIONS)}")
        head_dim = dim // heads if head_dim is None else head_dim
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.heads, self.kv_heads, self.head_dim, self.ring = heads, kv_heads, head_dim, ring
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * head_dim, bias=bias, **place)
        self.out = nn.Linear(heads * head_dim, dim, bias=bias, **place)
        self.q_norm = RMSNorm(head_dim, **place) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, **place) if qk_norm else None
        self.rotary = rotary

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Attend this rank's tokens to those of all ranks.

        Args:
            x: (B, S, dim), this rank's tokens.
            positions: (S,), (1, S) or (B, S), their global positions; None takes those that the layout deals.

        Returns:
            (B, S, dim).
        """
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rotary is not None:
            query, key = self.rotary(query, key, self._dealt(x) if positions is None else positions)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        seen = ring_attention(query, key, value, qkv_format="bshd", **self.ring)
        assert isinstance(seen, Tensor)
        return self.out(seen.flatten(2))

    def _dealt(self, x: Tensor) -> Tensor:
        """Global positions of this rank's tokens."""
        group, layout = self.ring.get("group"), self.ring.get("layout", "contiguous")
        seq_len = self.ring.get("seq_len")
        if seq_len is None:
            seq_len = x.shape[1] * ring_place(group_name(group))[1]
        return shard_positions(seq_len, group, layout, self.ring.get("documents"), x.device)
