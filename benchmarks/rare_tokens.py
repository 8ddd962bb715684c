"""How often a token of probability p is drawn, over p, for ways of making exponential noise: sums over all their words.

    python benchmarks/rare_tokens.py

A token wins the exponential race if E / p < E' / (1 - p), with E its noise and E' a unit exponential for the rest, so
its frequency is the mean of exp(-r E) with r = (1 - p) / p over the words that make E. The formulas of other samplers
are written down from their sources; nothing of them runs.
"""

import numpy as np
import torch

from ringattn.noise import TAIL, exponential

PROBABILITIES = (1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12, 1e-15)
f32 = np.float32


def grid_near_one() -> tuple[np.ndarray, np.ndarray]:
    """The float32 uniforms in [1/2, 1], and the share of a generator's integers that round to each."""
    steps = np.arange((1 << 23) + 1, dtype=np.float64)
    share = np.full(len(steps), 2.0**-24)
    share[0] = share[-1] = 2.0**-25  # half of the integers that would round there lie beyond
    return 0.5 + steps * 2.0**-24, share


def triton_rand() -> tuple[np.ndarray, np.ndarray]:
    """-log(tl.rand), as in FlashSampling: 31 bits, scaled to stay below 1."""
    u, share = grid_near_one()
    return -np.log((u.astype(f32) * f32(2.0**31) * f32(4.6566127342e-10)).astype(np.float64)), share


def flashinfer() -> tuple[np.ndarray, np.ndarray]:
    """-log(u (1 - 2^-23)) with cuRAND's (0, 1] uniform."""
    u, share = grid_near_one()
    return -np.log((u.astype(f32) * f32(1 - 2.0**-23)).astype(np.float64)), share


def torch_exponential() -> tuple[np.ndarray, np.ndarray]:
    """torch's exponential_ on CUDA: -log(u), at least 2^-24."""
    u, share = grid_near_one()
    return np.maximum(-np.log(u), 2.0**-24), share


def words_from_zero(bits: int, offset: float, least: float) -> tuple[np.ndarray, np.ndarray]:
    u = np.maximum((np.arange(1 << 24) + offset) * 2.0**-bits, least)
    return -np.log1p(-u), np.full(len(u), 2.0**-bits)


def vllm() -> tuple[np.ndarray, np.ndarray]:
    """-log1p(-tl.rand) with the uniform at least 2^-31, as in vLLM's second model runner."""
    return words_from_zero(31, 0.0, 2.0**-31)


def midpoints() -> tuple[np.ndarray, np.ndarray]:
    """-log1p(-u) with u in the middle of 32-bit cells."""
    return words_from_zero(32, 0.5, 0.0)


def ringattn_frequency(p: float) -> float:
    """Ours: words below 2^16 have 32 more bits, over which the sum is an integral to 2^-32; the others are summed."""
    r = (1 - p) / p
    high = torch.arange(1 << 16, min(1 << 32, max(1 << 17, int(60 / r * 2**32))))
    e = exponential(high, torch.full_like(high, TAIL)).double()
    return -np.expm1(-r * 2.0**-16) / r + float(torch.exp(-r * e).sum()) * 2.0**-32


def main() -> None:
    schemes = {
        "tl.rand, -log(-log u) (FlashSampling)": triton_rand,
        "u (1 - 2^-23) (FlashInfer)": flashinfer,
        "exponential_ on CUDA (torch)": torch_exponential,
        "tl.rand, log1p, at least 2^-31 (vLLM)": vllm,
        "32-bit midpoints, log1p": midpoints,
    }
    print("| scheme | " + " | ".join(f"{p:.0e}" for p in PROBABILITIES) + " |")
    print("|---|" + "---|" * len(PROBABILITIES))
    for name, scheme in schemes.items():
        e, share = scheme()
        cells = [float((share * np.exp(-(1 - p) / p * e)).sum()) / p for p in PROBABILITIES]
        print(
            f"| {name} | "
            + " | ".join("0" if cell < 1e-6 else f"{cell:.3g}" if cell < 0.1 else f"{cell:.3f}" for cell in cells)
            + " |"
        )
    print("| ringattn | " + " | ".join(f"{ringattn_frequency(p) / p:.5f}" for p in PROBABILITIES) + " |")


if __name__ == "__main__":
    main()
