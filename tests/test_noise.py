"""The noise: known answers, the transform fed with chosen words, the law of its tail, independence of its keys."""

import math

import pytest
import torch

from ringattn import noise
from ringattn.noise import MASK32, TAIL, TAIL_BELOW, exponential, gumbel, philox


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (MASK32, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ],
)
def test_philox_gives_random123s_known_answers(word: int, expected: str) -> None:
    seed = torch.tensor([-1 if word else 0])
    assert " ".join(f"{int(x):08x}" for x in philox(seed, (word,) * 4)) == expected


def philox_in_python(seed: int, counter: list[int]) -> list[int]:
    k0, k1 = seed & MASK32, (seed >> 32) & MASK32
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return [c0, c1, c2, c3]


def test_philox_equals_big_integers() -> None:
    generator = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 1 << 32, (200, 4), generator=generator)
    seeds = torch.randint(-(1 << 62), 1 << 62, (200,), generator=generator) * 2 + 1
    seeds[:4] = torch.tensor([0, 1, 1 << 32, -1])
    got = torch.stack(philox(seeds, tuple(counters.unbind(1))), dim=1).tolist()
    assert got == [philox_in_python(int(s), c) for s, c in zip(seeds, counters.tolist(), strict=True)]


def chosen_words() -> tuple[torch.Tensor, torch.Tensor]:
    """High and low words: all small ones with three low words, both ends, both sides of one half, and 10^6 random."""
    generator = torch.Generator().manual_seed(0)
    high = [torch.arange(TAIL_BELOW)] * 3 + [
        (1 << 32) - 1 - torch.arange(4096),
        (1 << 31) + torch.arange(-4096, 4096),
        torch.randint(0, 1 << 32, (1_000_000,), generator=generator),
    ]
    low = [torch.full((TAIL_BELOW,), x) for x in (0, TAIL, MASK32)]
    low += [torch.full((len(x),), TAIL) for x in high[3:]]
    return torch.cat(high), torch.cat(low)


def test_exponential_is_exact_for_chosen_words() -> None:
    high, low = chosen_words()
    e = exponential(high, low)
    u = high.double() * 2.0**-32 + low.double() * 2.0**-64 + 2.0**-65
    rest = (MASK32 - high).double() * 2.0**-32 + (MASK32 + 1 - low).double() * 2.0**-64 - 2.0**-65
    exact = torch.where(high < 1 << 31, -torch.log1p(-u), -torch.log(rest))
    assert ((e.double() - exact).abs() / exact).max() < 4e-7
    assert e.min() == 2.0**-65 and e.isfinite().all()
    order = torch.arange(0, 1 << 32, 1 << 12)
    assert (exponential(order, torch.full_like(order, TAIL)).diff() > 0).all()


def test_exponential_follows_its_law_down_to_2_to_the_minus_60() -> None:
    """P(E < t) = 1 - exp(-t): the words at which E crosses t, found by bisection over all 64 bits, have that share."""
    for exponent in range(-60, 5):
        t = 2.0**exponent
        below, above = 0, 1 << 64  # E(below) < t <= E(above)
        while above - below > 1:
            middle = (below + above) // 2
            high = middle >> 32
            low = middle & MASK32 if high < TAIL_BELOW else TAIL
            smaller = float(exponential(torch.tensor([high]), torch.tensor([low]))) < t
            below, above = (middle, above) if smaller else (below, middle)
        # Beyond 2^-16 a step of the high word, beyond 2^-48 one of the low word, bounds what can be resolved.
        assert above / 2.0**64 == pytest.approx(-math.expm1(-t), rel=2.0**-14 if exponent > -56 else 2.0**-3)


def test_gumbel_numbers_are_uniform_under_their_distribution() -> None:
    row = torch.arange(8)[:, None]
    g = gumbel(row * 7919, row, row * 0, torch.arange(1 << 17)[None]).double().flatten()
    counts = torch.histc(torch.exp(-torch.exp(-g)), 4096, 0, 1)
    expected = len(g) / 4096
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi2 - 4095) / math.sqrt(2 * 4095) < 4


@pytest.mark.parametrize("shifted", ["id", "position", "seed", "sample", "tag"])
def test_neighbouring_streams_are_independent(shifted: str) -> None:
    ids = torch.arange(1 << 19)[None]
    base = torch.tensor([[41]])
    first = gumbel(base, base, base, ids)
    second = gumbel(
        base + (shifted == "seed"),
        base + (shifted == "position"),
        base + (shifted == "sample"),
        ids + (shifted == "id"),
        tag=int(shifted == "tag"),
    )
    x, y = (torch.exp(-torch.exp(-g.double())).flatten() for g in (first, second))
    counts = torch.bincount((x * 64).long() * 64 + (y * 64).long(), minlength=4096).double()
    expected = len(x) / 4096
    assert abs(float(((counts - expected) ** 2 / expected).sum()) - 4095) / math.sqrt(2 * 4095) < 4


def test_noise_of_an_id_depends_on_nothing_else() -> None:
    row = torch.tensor([[123456789012345]])
    ids = torch.tensor([[0, 3, 5, 151935, (1 << 31) - 1]])
    alone = torch.cat([gumbel(row, row & 0xFF, row * 0, ids[:, i : i + 1]) for i in range(5)], dim=1)
    assert torch.equal(gumbel(row, row & 0xFF, row * 0, ids), alone)
    assert not torch.equal(alone, gumbel(row + (1 << 40), row & 0xFF, row * 0, ids))


def test_logarithms_and_powers() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.exp2(torch.rand(200_000, generator=generator) * 190 - 95)
    exact = torch.log(x.double())
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2.0**-24))) - 23)
    assert ((noise.log(x).double() - exact).abs() / ulp).max() < 1
    power = torch.randn(200_000, generator=generator, dtype=torch.float64) * 30
    mantissa, exponent = noise.exp2_parts(power)
    assert (mantissa * torch.exp2(exponent - 24.0 - power) - 1).abs().max() < 2e-7
    whole = torch.randint(1, (1 << 63) - 1, (100_000,), generator=generator) >> torch.randint(0, 60, (100_000,))
    whole = whole.clamp(min=1)
    assert (noise.log2_int(whole) - torch.log2(whole.double())).abs().max() < 2e-14
