"""How the sm_90 kernels are cut: a frozen constant that the kernel takes whole, by a pure function of head sizes."""

from dataclasses import dataclass

REGISTERS = 240
"""Of a consumer's thread: what the 65,536 of a multiprocessor leave two consumers beside a producer of 24."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Constants of one build of the forward kernel.

    Attributes:
        block_k: keys in a block.
        k_stages, v_stages: blocks of keys and of values in shared memory.
        width, v_width: columns of shared memory, powers of two, for a row of q and k, and of v.
        extra: columns of a second buffer for q and k, which holds those beyond `width`; 0 is none.
        v_dim: head size of v.
        single: one tile, given by arguments, instead of a table.
        merge: merge into the running state instead of writing it.
        softcap: bend the scores.
    """

    block_k: int
    k_stages: int
    v_stages: int
    width: int
    v_width: int
    extra: int = 0
    v_dim: int = 0
    single: bool = True
    merge: bool = False
    softcap: bool = False

    consumers = 2
    """Partitions of four warps, with 64 rows of queries each."""

    @property
    def block_q(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Of the consumers and the producer, who meet at the barriers of a free buffer."""
        return 128 * (self.consumers + 1)

    @property
    def k_free(self) -> int:
        """First named barrier of the key buffers; Triton has those below."""
        return self.consumers + 2

    @property
    def v_free(self) -> int:
        return self.k_free + self.k_stages

    @property
    def q_free(self) -> int:
        return self.v_free + self.v_stages

    @property
    def turn(self) -> int:
        return self.q_free + self.consumers

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the buffers for 16-bit inputs, without barriers."""
        keys = self.width + self.extra
        per_key = self.k_stages * keys + self.v_stages * self.v_width
        return 2 * (self.block_q * keys + self.block_k * per_key)


def choose(head_dim: int, v_dim: int) -> Forward:
    """The build for head sizes of at most 256; the figures are in docs/findings/hopper.md.

    Example:
        >>> choose(192, 128).extra, choose(256, 256).block_k
        (64, 64)
    """
    wide = max(head_dim, v_dim)
    if wide <= 64:
        return Forward(block_k=128, k_stages=3, v_stages=3, width=64, v_width=64, v_dim=v_dim)
    if wide <= 128:
        return Forward(block_k=128, k_stages=3, v_stages=2, width=128, v_width=128, v_dim=v_dim)
    if head_dim <= 192 and v_dim <= 128:
        return Forward(block_k=128, k_stages=2, v_stages=2, width=128, v_width=128, extra=64, v_dim=v_dim)
    return Forward(block_k=64, k_stages=2, v_stages=2, width=256, v_width=256, v_dim=v_dim)
