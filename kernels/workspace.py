"""Zeros that a kernel finds at its start and leaves at its end, so that no launch is spent on setting them.

A program that ends a row puts the row's words back to 0. Eager calls share one buffer a stream: stream order keeps them
apart. A captured call gets words of its own for good, because its graph may be replayed beside anything else; they come
from a pool made before, since memory taken during a capture belongs to the graph. With the pool used up, or none made
because nothing ran before the capture, the graph sets its own zeros in every replay.
"""

import torch
from torch import Tensor

POOL = 1 << 17
"""Words (1 MiB) a device keeps for captured calls."""

_eager: dict[tuple[torch.device, int], Tensor] = {}
_pool: dict[torch.device, Tensor] = {}


def zeros(words: int, device: torch.device) -> Tensor:
    """int64 zeros that the caller's kernel must leave at zero."""
    if device.type != "cuda":
        return torch.zeros(words, dtype=torch.int64)
    if torch.cuda.is_current_stream_capturing():
        rest = _pool.get(device)
        if rest is None or len(rest) < words:
            return torch.zeros(words, dtype=torch.int64, device=device)
        _pool[device] = rest[words:]
        return rest[:words]
    if device not in _pool:
        _pool[device] = torch.zeros(POOL, dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)  # a graph on another stream may read it
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _eager or len(_eager[key]) < words:
        _eager[key] = torch.zeros(max(words, 1024), dtype=torch.int64, device=device)
    return _eager[key][:words]
