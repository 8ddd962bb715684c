"""What one rank knows of a draw: its slice of the vocabulary, the parameters of the rows, and the words it must send.

Pure functions of tensors: no process group. `ringattn.vocab_triton` computes the same on CUDA, bit for bit.

Words of a row, int64. Plain rows send one, the winner's key. Otherwise `HEADER` words (unless the request says that
every row is decided by its candidates) and then the keys of the `candidates` largest logits of the slice, descending,
0 where there are fewer. Header: winner's score key, key of the winner's logit, top bin, masses of that bin and the next
`BINS - 1` below it.

Mass of a token: `2^(l log2(e) / T)` rounded to a 25-bit integer times a power of two. A bin holds the integers of 8
neighbouring powers; bins are absolute, so that their sums do not depend on which rank holds what.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ringattn import noise
from ringattn.keys import ID_BITS, NEGATIVE_INFINITY, POISON_NAN, POISON_PARAMETER, is_token, pack, values_of

BINS = 6
"""41 powers of two or more below the largest mass: what 2^17 tokens below that add up to is under 2^-24 of it."""
HEADER = 3 + BINS
NO_BIN = -(1 << 40)
"""Top bin of a slice without tokens."""
UNIT = 11
"""A mass in the top bin is shifted left by this: 2^20 tokens of the largest mass stay below 2^63."""
MAX_VOCAB = 1 << 20
"""Largest vocabulary whose masses fit int64."""
MAX_TEMPERATURE = 1e30


@dataclass(frozen=True)
class Rows:
    """Parameters of the rows, each of shape (B,): int64 for seed, position, sample, top_k; float32 for the rest."""

    seed: Tensor
    position: Tensor
    sample: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    def __getitem__(self, rows: Tensor) -> "Rows":
        return Rows(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def invalid(self) -> Tensor:
        """Rows with a value out of range, bool (B,)."""
        fine = (self.temperature >= 0) & (self.temperature <= MAX_TEMPERATURE) & (self.top_k >= 0)
        for share in (self.top_p, self.min_p):
            fine &= (share >= 0) & (share <= 1)
        for word in (self.position, self.sample):
            fine &= (word >= 0) & (word <= noise.MASK32)
        fine &= (self.repetition > 0) & self.repetition.isfinite()
        return ~(fine & self.presence.isfinite() & self.frequency.isfinite())


@dataclass(frozen=True)
class Slice:
    """Logits (B, V_local) of the tokens `start, start + 1, ...`, and what edits them, each on the same slice.

    Attributes:
        mask: bool (B or 1, V_local), or int32 (B or 1, ceil(V_local / 32)) with bit i % 32 of word i // 32 for token
            `start + i`; tokens whose bit is 0 are never drawn.
        bias: float32 (B or 1, V_local), added.
        counts: int32 (B, V_local), how often a token was generated.
        prompt: bool (B, V_local), whether it is in the prompt.
    """

    logits: Tensor
    start: int = 0
    mask: Tensor | None = None
    bias: Tensor | None = None
    counts: Tensor | None = None
    prompt: Tensor | None = None

    def __getitem__(self, rows: Tensor) -> "Slice":
        def pick(x: Tensor | None) -> Tensor | None:
            return x if x is None or len(x) == 1 != len(self.logits) else x[rows]

        return Slice(
            self.logits[rows], self.start, pick(self.mask), pick(self.bias), pick(self.counts), pick(self.prompt)
        )


@dataclass(frozen=True)
class Request:
    """What the host knows about a draw, the same on all ranks.

    Attributes:
        candidates: how many of its largest logits a rank sends; 0 for plain sampling.
        header: False when candidates, and masses relative to them, decide every row.
        certain: candidates decide every row, whatever the logits are.
        order: "chained" or "joint".
        logprobs: how many top log-probabilities are wanted; 0 for none at all.
    """

    candidates: int = 0
    header: bool = True
    certain: bool = False
    order: str = "chained"
    logprobs: int = 0


def edited(part: Slice, rows: Rows) -> Tensor:
    """Logits after penalties, bias and mask, float32 (B, V_local); masked tokens are -inf, NaN stays NaN.

    Repetition divides positive and multiplies negative logits of tokens seen in prompt or output (Keskar et al., CTRL,
    2019), then `frequency * count` and `presence` are subtracted for generated tokens, then the bias is added.
    """
    raw = logits = part.logits.to(torch.float32)
    if part.counts is not None or part.prompt is not None:
        generated = torch.zeros_like(raw, dtype=torch.bool) if part.counts is None else part.counts > 0
        seen = generated if part.prompt is None else generated | part.prompt
        repetition = rows.repetition[:, None]
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        if part.counts is not None:
            logits = logits - rows.frequency[:, None] * part.counts.to(torch.float32)
            logits = torch.where(generated, logits - rows.presence[:, None], logits)
    if part.bias is not None:
        logits = logits + part.bias
    if part.mask is not None:
        logits = torch.where(allowed(part.mask, raw.shape[1]), logits, -torch.inf)
    return torch.where(raw != raw, raw, logits)


def allowed(mask: Tensor, width: int) -> Tensor:
    """A token mask as bool (rows, width)."""
    if mask.dtype == torch.bool:
        return mask
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask[:, :, None] >> bits) & 1).flatten(1)[:, :width].to(torch.bool)


def scores(logits: Tensor, ids: Tensor, rows: Rows) -> Tensor:
    """`l + T g`: the largest is a draw from softmax(l / T), and at T = 0 the largest logit. float32, (B, n)."""
    seed, position, sample = (x[:, None] for x in (rows.seed, rows.position, rows.sample))
    return logits + rows.temperature[:, None] * noise.gumbel(seed, position, sample, ids)


def _ids(part: Slice) -> Tensor:
    return torch.arange(part.start, part.start + part.logits.shape[1], device=part.logits.device)[None]


def logit_keys(part: Slice, rows: Rows) -> Tensor:
    """Keys of the edited logits, int64 (B, V_local)."""
    return pack(edited(part, rows), _ids(part))


def winner(part: Slice, rows: Rows) -> Tensor:
    """The only word of a plain row: the key of its winner within the slice, int64 (B,)."""
    return _poison(_largest(pack(scores(edited(part, rows), _ids(part), rows), _ids(part))), rows)


def words(part: Slice, rows: Rows, request: Request) -> Tensor:
    """All words of the rows, int64 (B, n); see the module docstring."""
    logits = edited(part, rows)
    keys = pack(logits, _ids(part))
    poisoned = _largest(keys)[:, None] == POISON_NAN
    tokens = torch.where(is_token(keys), keys, 0)
    found = min(request.candidates, keys.shape[1])
    top = torch.nn.functional.pad(tokens.topk(found).values, (0, request.candidates - found))
    top = torch.where(poisoned, POISON_NAN, top)
    if not request.header:
        return top
    drawn = pack(scores(logits, _ids(part), rows), _ids(part))
    best = _poison(_largest(drawn), rows)
    logit = _largest(torch.where((drawn == best[:, None]) & is_token(drawn), keys, 0))
    return torch.cat([best[:, None], logit[:, None], masses_by_bin(tokens, rows.temperature), top], dim=1)


def _largest(keys: Tensor) -> Tensor:
    """The largest key that is a token or poison, 0 where there is none."""
    best = keys.amax(dim=1) if keys.shape[1] else keys.new_zeros(len(keys))
    return torch.where((best >> ID_BITS) > NEGATIVE_INFINITY, best, 0)


def _poison(keys: Tensor, rows: Rows) -> Tensor:
    return torch.where(rows.invalid(), POISON_PARAMETER, keys)


def mass_parts(keys: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mass of tokens as (bin, integer within the bin, logarithm to base 2), each (B, n); no mass where no token is.

    At temperature 0 masses are those of temperature 1. The logarithm is float64 and the integers come from it by IEEE
    operations alone.
    """
    token = is_token(keys)
    scale = noise.LOG2E / torch.where(temperature == 0, 1.0, temperature).to(torch.float64)
    power = torch.where(token, values_of(keys), 0.0).to(torch.float64) * scale[:, None]
    power = power.clamp(-(2.0**39), 2.0**39)
    mantissa, exponent = noise.exp2_parts(power)
    return (
        torch.where(token, exponent >> 3, NO_BIN),
        torch.where(token, mantissa << (exponent & 7), 0),
        torch.where(token, power, -torch.inf),
    )


def masses_by_bin(keys: Tensor, temperature: Tensor) -> Tensor:
    """Top bin and the sums of the `BINS` bins from it down, int64 (B, 1 + BINS)."""
    bins, mass, _ = mass_parts(keys, temperature)
    top = bins.amax(dim=1, keepdim=True) if keys.shape[1] else bins.new_full((len(keys), 1), NO_BIN)
    below = top - bins
    sums = mass.new_zeros(len(keys), BINS + 1).scatter_add_(1, below.clamp(max=BINS), mass)
    return torch.cat([top, sums[:, :BINS]], dim=1)
