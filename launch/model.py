"""A small causal language model over bytes: what `ringattn verify` runs, with the attention passed in as a function.

Pre-norm transformer with grouped K/V heads, rotary embeddings at global positions and gated feed-forward blocks, as in
Llama (Touvron et al., 2023, arXiv 2302.13971). Nothing in it knows how many ranks there are: tokens and their positions
go in, and `attention(query, key, value)` is the only place where they meet.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(B, H, S, D), (B, G, S, D), (B, G, S, D) to (B, H, S, D)."""


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the model; raises ValueError for sizes that do not fit."""

    dim: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    @property
    def hidden(self) -> int:
        """Width of the feed-forward block: 8/3 of dim, to a multiple of 64."""
        return -(-8 * self.dim // 3 // 64) * 64


class Norm(nn.Module):
    """Root-mean-square normalisation in at least float32 (Zhang and Sennrich, 2019, arXiv 1910.07467)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (F.rms_norm(wide, (x.shape[-1],), eps=1e-6) * self.weight).to(x.dtype)


class Block(nn.Module):
    """Attention and a SwiGLU feed-forward block (Shazeer, 2020, arXiv 2002.05202), each normalised before and added."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.attention_norm = Norm(config.dim)
        self.qkv = nn.Linear(config.dim, (config.heads + 2 * config.kv_heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)
        self.feed_norm = Norm(config.dim)
        self.up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        heads = rearrange(self.qkv(self.attention_norm(x)), "b s (h d) -> b h s d", h=self.heads + 2 * self.kv_heads)
        query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        seen = attention(rotate(query, rotation), rotate(key, rotation), value)
        x = x + self.out(rearrange(seen, "b h s d -> b s (h d)"))
        gate, up = self.up(self.feed_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    """The whole model; equal seeds give equal weights on every device and rank.

    Args:
        config: sizes.
        seed: of the weights, which are normal with deviation 0.02, and 0.02 / sqrt(2 * layers) where a block adds to
            the residual stream (Radford et al., Language Models are Unsupervised Multitask Learners, 2019).

    Example:
        >>> from ringattn import attention
        >>> model = Transformer(Config(dim=32, layers=1))
        >>> causal = lambda query, key, value: attention(query, key, value, mask="causal")
        >>> model(torch.tensor([[82, 105, 110, 103]]), torch.arange(4), causal).shape
        torch.Size([1, 4, 256])
    """

    def __init__(self, config: Config, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        self._initialize(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = 2 * self.config.layers if name.endswith(("out.weight", "down.weight")) else 1
                weight.normal_(0.0, 0.02 / scale**0.5, generator=generator)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Logits of the next byte.

        Args:
            tokens: (B, S), int64 below 256.
            positions: (S,) or (1, S), the tokens' global positions.
            attention: what mixes the tokens, called once a layer.

        Returns:
            (B, S, 256).
        """
        x = self.embedding(tokens)
        rotation = rotations(positions.flatten(), self.config, x.dtype)
        for block in self.blocks:
            x = block(x, rotation, attention)
        return self.head(self.norm(x))


def rotations(positions: Tensor, config: Config, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary embeddings, each (S, head_dim / 2), for positions (S,).

    The angles are float64: in float32 they are off by 1e-4 at position 8191, an error that would hide others. Half
    rotation, as in GPT-NeoX (Su et al., RoFormer, 2021, arXiv 2104.09864).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=positions.device) / config.head_dim
    angles = positions.double().unsqueeze(-1) * config.rope_base**-exponents
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn pairs (d, d + D / 2) of x (B, H, S, D) by their angles, in at least float32."""
    cos, sin = rotation
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
