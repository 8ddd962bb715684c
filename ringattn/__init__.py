"""Exact attention over one sequence that lives on many GPUs, and exact sampling over one vocabulary that does."""

from ringattn.attention import attention, ring_attention
from ringattn.header import RingError
from ringattn.loss import cross_entropy, linear_cross_entropy
from ringattn.mask import CAUSAL, FULL, Band, prefix_lm, window
from ringattn.merge import merge, merge_states
from ringattn.parallel import ContextParallel, sum_gradients
from ringattn.sampling import sample
from ringattn.shard import positions, shard, shard_batch, tie, unshard

__all__ = [
    "CAUSAL",
    "FULL",
    "Band",
    "RingError",
    "ContextParallel",
    "attention",
    "cross_entropy",
    "linear_cross_entropy",
    "merge",
    "merge_states",
    "positions",
    "prefix_lm",
    "ring_attention",
    "sample",
    "shard",
    "shard_batch",
    "sum_gradients",
    "tie",
    "unshard",
    "window",
]
