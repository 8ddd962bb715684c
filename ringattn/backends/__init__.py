"""The contract of a backend: two functions that accumulate attention over the tiles of a plan, in place.

A backend is a module with

    forward(problem, tiles, q, k, v, out, lse)
    backward(problem, tiles, do, q, k, v, out, lse, delta, dq, dk, dv)
    refusal(q, k, v, softcap) -> str | None     # why it cannot take these tensors, or None

Shapes (any strides): q, do, dq (B, H, M, D), k, dk (B, G, N, D), v, dv (B, G, N, Dv), do and out (B, H, M, Dv),
lse and delta (B, H, M). G divides H: query head h reads K/V head `h // (H // G)`. M and N may be 0.

State. `out` and `lse` are the running state of each query row: the softmax-weighted mean of the values seen so far
and the natural logarithm of the sum of their exponentiated scores. A row that has seen no key is (0, -inf), the
identity of the merge. lse, delta, dq, dk and dv are float32 (float64 iff the inputs are). `out` is too, except that a
call with `problem.first` may be given an `out` in q's dtype: it then holds the only visit.

Backward. `lse` is the final log-sum-exp over all keys of the row and `delta` is `rowsum(do * out) - dlse`, so that a
tile's probabilities are `exp(score - lse)`. Rows whose lse is -inf have probability 0 and give zero gradients.

Backends do not know one another, the ring, or the layout: a tile says all (`ringattn.plan.Tile`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """What a call computes, apart from tensors and tiles.

    Attributes:
        scale: factor of q @ k.
        softcap: scores become `softcap * tanh(score / softcap)` after scaling; 0.0 leaves them alone.
        first: out and lse (in backward dq) hold nothing yet: every row is written, rows without tiles as
            (0, -inf) or 0. Otherwise they are merged into (dq: added to).
        first_kv: dk and dv hold nothing yet: every row is written, rows without tiles as 0. Otherwise they are
            added to.
    """

    scale: float
    softcap: float = 0.0
    first: bool = False
    first_kv: bool = False
