"""How each kernel is cut into blocks: a pure function of shapes, dtype and architecture, the same on every rank.

Nothing is tuned at run time, so no rank can choose differently from another, nothing compiles or benchmarks inside a
collective, and kernels that accumulate in place run exactly once. `config_error` is the one rule of what can work;
the heuristics, the tests and an offline tuner all ask it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

Kind = Literal["fwd", "dkv", "dq"]

MAX_HEAD_DIM = 256
"""Of keys and of values; a size that is no power of two is padded to one inside the kernel."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""KiB of shared memory that one program can have, by compute capability (CUDA C++ Programming Guide, table 21)."""


@dataclass(frozen=True, slots=True)
class Config:
    """Blocks of one kernel.

    Attributes:
        block_q: rows of queries in a block.
        block_k: rows of keys in a block.
        num_warps, num_stages: as in Triton; stages are the buffers of the operand that streams through.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch as data, so that what runs and what the compile gate compiles are the same thing.

    Attributes:
        kernel: the `@triton.jit` or `@gluon.jit` function.
        grid: programs, up to three numbers.
        args: its arguments by name, constants included.
        options: num_warps, num_stages and other compiler options.
        compiled: what Triton compiled for launches like this one, filled in by the first.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    options: Mapping[str, Any]
    compiled: dict[Any, Any] | None = None

    def __call__(self) -> None:
        """Launch it on the current stream.

        With `compiled`, which a `Frame` keeps for launches that differ in their tensors alone, Triton's specialisation
        of the arguments is skipped, 15 us of host time a launch with three descriptors. Of what it looks at, only the
        alignment of pointers can differ between such launches.
        """
        if self.compiled is None:
            self.kernel[self.grid](**self.args, **self.options)
            return
        key = tuple(x.data_ptr() % 16 == 0 for x in self.args.values() if isinstance(x, torch.Tensor))
        compiled = self.compiled.get(key)
        if compiled is None:  # always in the interpreter, which compiles nothing
            self.compiled[key] = self.kernel[self.grid](**self.args, **self.options)
        else:
            compiled[(*self.grid, 1, 1)[:3]](*[self.args[name] for name in self.kernel.arg_names])


class Geometry(NamedTuple):
    """What of a tensor a launch depends on, apart from its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def geometry(*tensors: torch.Tensor) -> tuple[Geometry, ...]:
    """The geometries of tensors, hashable."""
    return tuple(Geometry(x.shape, x.stride(), x.dtype) for x in tensors)


@dataclass(frozen=True, slots=True)
class Frame:
    """A launch without its tensors: what is the same for all launches of one geometry, made once and kept.

    Attributes:
        kernel, grid, options: as in `Launch`.
        constants: its arguments that are no tensors.
        table: the table of tiles, if there is one.
        compiled: what Triton compiled for it.
    """

    kernel: Any
    grid: tuple[int, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    table: torch.Tensor | None
    compiled: dict[Any, Any] = field(default_factory=dict)

    def fill(self, tensors: Mapping[str, Any], anything: torch.Tensor) -> Launch:
        """The launch on these tensors; `anything` stands for the table where there is none."""
        table = anything if self.table is None else self.table
        return Launch(
            self.kernel, self.grid, {**self.constants, **tensors, "table": table}, self.options, self.compiled
        )


@dataclass(frozen=True, slots=True)
class CompileCase:
    """A launch that the compile gate (`tests/compile_kernels.py`) holds to bounds.

    A kernel module takes part by a function `compile_cases(arch) -> Iterator[CompileCase]`. Tensors of its launches
    may live on the meta device.

    Attributes:
        name: unique within the module.
        launch: what is compiled.
        spill_bytes: most bytes of spilled registers a thread may have.
        wgmma: whether the code on sm_90 must use wgmma and none of the older mma.sync.
    """

    name: str
    launch: Launch
    spill_bytes: int = 0
    wgmma: bool = False


def padded(dim: int) -> int:
    """The power of two, at least 16, that a kernel computes a head size in."""
    return max(16, 1 << (dim - 1).bit_length())


def choose(kind: Kind, head_dim: int, v_dim: int, dtype: torch.dtype, arch: int) -> Config:
    """The blocks for a kernel.

    Args:
        kind: "fwd", "dkv" (gradients of keys and values) or "dq".
        head_dim, v_dim: head sizes of keys and values.
        dtype: of q, k and v.
        arch: compute capability, 90 for an H100 or H200.

    Returns:
        A config for which `config_error` is None.

    Example:
        >>> choose("fwd", 128, 128, torch.bfloat16, 90).block_k
        128
    """
    wide = max(padded(head_dim), padded(v_dim))
    if dtype == torch.float32:
        config = _FLOAT32[kind][wide]
    elif arch >= 90 and arch < 120:
        config = _HOPPER[kind][wide]
    else:
        config = _AMPERE[kind][wide]
    while config_error(kind, config, head_dim, v_dim, dtype, arch) is not None:
        config = _smaller(config)
    return config


def config_error(kind: Kind, config: Config, head_dim: int, v_dim: int, dtype: torch.dtype, arch: int) -> str | None:
    """Why a config cannot work for these shapes on this architecture, or None.

    The shared memory counted is what Triton allocates: the block that stays, and `num_stages` buffers of the pair of
    blocks that streams through.
    """
    for name, size in (("block_q", config.block_q), ("block_k", config.block_k)):
        if size < 16 or size & (size - 1):
            return f"{name}={size} is no power of two of at least 16"
    if config.num_warps not in (1, 2, 4, 8):
        return f"num_warps={config.num_warps} is not 1, 2, 4 or 8"
    limit = SHARED_MEMORY.get(arch)
    if limit is None:
        return f"sm_{arch} is not one of {', '.join(f'sm_{known}' for known in SHARED_MEMORY)}"
    need = shared_memory(kind, config, head_dim, v_dim, dtype)
    if need > limit * 1024:
        return f"{need} bytes of shared memory exceed the {limit} KiB of sm_{arch}"
    return None


def shared_memory(kind: Kind, config: Config, head_dim: int, v_dim: int, dtype: torch.dtype) -> int:
    """Bytes of shared memory that a kernel needs, by the sizes of its buffers."""
    size = dtype.itemsize
    row, v_row = padded(head_dim) * size, padded(v_dim) * size
    stages = max(config.num_stages, 1)
    if kind == "fwd":
        return config.block_q * row + stages * config.block_k * (row + v_row)
    if kind == "dkv":
        return config.block_k * (row + v_row) + stages * config.block_q * (row + v_row)
    return (
        config.block_q * (row + v_row)
        + stages * config.block_k * (row + v_row)
        + config.block_q * config.block_k * size
    )


def example(dim: int, dtype: torch.dtype, heads: int, rows: int = 4096) -> torch.Tensor:
    """A (1, heads, rows, dim) tensor without memory, for compile cases."""
    return torch.empty(1, heads, rows, dim, dtype=dtype, device="meta")


def shipped_variants(arch: int) -> Iterator[tuple[int, int, torch.dtype, bool, bool, bool, float]]:
    """What the attention kernels are compiled for in the gate: (D, Dv, dtype, descriptors, table, merge, softcap).

    All head sizes on the main path of the architecture, and each other choice alone at D=128.
    """
    copy_engine = arch >= 90
    half = torch.bfloat16
    for dim in (16, 32, 64, 128, 256):
        yield dim, dim, half, copy_engine, False, True, 0.0
    for dim, v_dim in ((80, 80), (192, 128)):
        yield dim, v_dim, half, copy_engine, False, True, 0.0
    yield 128, 128, half, copy_engine, False, False, 0.0
    yield 128, 128, half, copy_engine, True, True, 0.0
    yield 128, 128, half, copy_engine, False, True, 30.0
    yield 128, 128, torch.float16, copy_engine, False, True, 0.0
    if copy_engine:
        yield 128, 128, half, False, False, True, 0.0
    for dim in (64, 128, 256):
        yield dim, dim, torch.float32, False, False, True, 0.0


def variant_name(
    dim: int, v_dim: int, dtype: torch.dtype, descriptors: bool, table: bool, merge: bool, softcap: float
) -> str:
    """A name for one of `shipped_variants`, such as "d128-bfloat16-tma-merge"."""
    parts = [f"d{dim}" if dim == v_dim else f"d{dim}v{v_dim}", str(dtype).removeprefix("torch.")]
    flags = {"tma": descriptors, "table": table, "merge": merge, "softcap": softcap}
    return "-".join(parts + [name for name, flag in flags.items() if flag])


def _smaller(config: Config) -> Config:
    """The next config to try where one does not fit: fewer stages first, then smaller blocks."""
    if config.num_stages > 1:
        return Config(config.block_q, config.block_k, config.num_warps, config.num_stages - 1)
    if config.block_k >= config.block_q and config.block_k > 16:
        return Config(config.block_q, config.block_k // 2, config.num_warps, 1)
    assert config.block_q > 16, "no config fits"
    return Config(config.block_q // 2, config.block_k, config.num_warps, 1)


def _table(**rows: tuple[int, int, int, int]) -> dict[int, Config]:
    return {int(name[1:]): Config(*row) for name, row in rows.items()}


_HOPPER: dict[Kind, dict[int, Config]] = {
    "fwd": _table(
        d16=(128, 64, 4, 3), d32=(128, 64, 4, 3), d64=(64, 64, 4, 2), d128=(64, 64, 4, 3), d256=(64, 64, 4, 3)
    ),
    "dkv": _table(
        d16=(128, 64, 4, 2), d32=(128, 64, 4, 2), d64=(128, 64, 4, 2), d128=(64, 64, 4, 2), d256=(64, 64, 8, 2)
    ),
    "dq": _table(
        d16=(64, 64, 4, 3), d32=(64, 64, 4, 3), d64=(64, 64, 4, 3), d128=(128, 64, 8, 3), d256=(128, 32, 8, 2)
    ),
}
_AMPERE: dict[Kind, dict[int, Config]] = {
    "fwd": _table(
        d16=(128, 64, 4, 3), d32=(128, 64, 4, 3), d64=(128, 64, 4, 3), d128=(128, 64, 8, 2), d256=(64, 32, 4, 2)
    ),
    "dkv": _table(d16=(64, 64, 4, 2), d32=(64, 64, 4, 2), d64=(64, 64, 4, 2), d128=(32, 64, 4, 2), d256=(32, 32, 4, 1)),
    "dq": _table(d16=(64, 64, 4, 2), d32=(64, 64, 4, 2), d64=(64, 64, 4, 2), d128=(64, 32, 4, 2), d256=(32, 32, 4, 1)),
}
_FLOAT32: dict[Kind, dict[int, Config]] = {
    "fwd": _table(d16=(64, 64, 4, 2), d32=(64, 64, 4, 2), d64=(64, 32, 8, 2), d128=(32, 32, 8, 1), d256=(16, 32, 8, 1)),
    "dkv": _table(d16=(32, 64, 4, 2), d32=(32, 64, 4, 2), d64=(32, 32, 8, 2), d128=(32, 32, 8, 1), d256=(16, 16, 4, 1)),
    "dq": _table(d16=(64, 32, 4, 2), d32=(64, 32, 4, 2), d64=(32, 32, 4, 2), d128=(32, 32, 4, 1), d256=(16, 16, 4, 1)),
}
