"""How the sm_90 kernels are cut: one frozen constant that the kernel takes whole, chosen by a pure function of shapes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Forward:
    """Constants of one build of the forward kernel."""

    consumers: int = 2
    block_k: int = 128
    k_stages: int = 2
    v_stages: int = 2
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
    ahead: bool = False
    packed: bool = False
    order: int = 1
    probe: int = 0
    unroll: bool = False

    @property
    def block_q(self) -> int:
        return 64 * self.consumers

    @property
    def q_stages(self) -> int:
        return 2 if self.ahead else 1

    @property
    def threads(self) -> int:
        return 128 * self.consumers + 128

    @property
    def k_free(self) -> int:
        return self.consumers + 2

    @property
    def v_free(self) -> int:
        return self.k_free + self.k_stages

    @property
    def q_free(self) -> int:
        return self.v_free + self.v_stages

    @property
    def turn(self) -> int:
        return self.q_free + self.q_stages * self.consumers


def choose(dim, v_dim):
    if dim > 128 and dim <= 192 and v_dim <= 128:
        return Forward(width=128, extra=64, v_width=128)
    widest = max(dim, v_dim)
    width = 64 if widest <= 64 else 128 if widest <= 128 else 256
    if width == 256:
        return Forward(width=256, v_width=256, block_k=64)
    if width == 64:
        return Forward(width=64, v_width=64, k_stages=3, v_stages=3)
    return Forward(k_stages=3)
