"""How the sm_90 kernels are cut: one frozen constant that the kernel takes whole, chosen by a pure function of shapes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Forward:
    """Constants of one build of the forward kernel.

    Attributes:
        consumers: partitions of four warps, each with 64 rows of queries.
        block_k: keys in a block; stages: blocks of keys and of values in flight.
        registers: of a consumer's thread.
        width, extra, v_width: columns of shared memory for a row of q and k (extra: of a second buffer that holds the
            columns beyond a power of two), and of v.
        turns: whether the consumers take turns at issuing matrix products.
    """

    consumers: int = 2
    block_k: int = 128
    stages: int = 2
    registers: int = 240
    width: int = 128
    extra: int = 0
    v_width: int = 128
    v_dim: int = 128
    single: bool = True
    merge: bool = False
    softcap: bool = False
    turns: bool = True
    on_fma: int = 0
    of: int = 8
    carry: int = 0
    order: int = 3
    partial: bool = False
    q_registers: bool = False

    @property
    def block_q(self):
        return 64 * self.consumers
