"""The local parts of a draw on CUDA: `ringattn.draw.Local` with the same bits, from the kernels.

Requests with a header (top-p alone, log-probabilities) take their masses in plain torch; see docs/sampling.md for what
that costs.
"""

import torch
from torch import Tensor

from ringattn import vocab
from ringattn.kernels.candidates import CAPACITY, filtered_tokens, listing
from ringattn.kernels.decide import decide
from ringattn.kernels.gumbel import decode, tokens, winner
from ringattn.keys import ids_of, is_token
from ringattn.vocab import Request, Rows, Slice

__all__ = ["decide", "decode", "filtered_tokens", "tokens", "winner", "words"]


def words(part: Slice, rows: Rows, request: Request) -> Tensor:
    """All words of the rows, int64 (B, n), as `ringattn.vocab.words`."""
    assert request.candidates <= CAPACITY
    top = listing(part, rows, request.candidates)
    if not request.header:
        return top
    best = winner(part, rows)
    keys = vocab.logit_keys(part, rows)
    logit = torch.zeros_like(best)
    if keys.shape[1]:
        column = (ids_of(best) - part.start).clamp(0, keys.shape[1] - 1)
        logit = torch.where(is_token(best), keys.gather(1, column[:, None])[:, 0], 0)
    masses = vocab.masses_by_bin(torch.where(is_token(keys), keys, 0), rows.temperature)
    return torch.cat([best[:, None], logit[:, None], masses, top], dim=1)
