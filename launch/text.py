"""Real text that every Python has: the sources of its own standard library, as bytes."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def stdlib_text(size: int) -> Tensor:
    """The first `size` bytes of the standard library's top-level modules, in order of name, (size,) int64.

    A longer text than there is starts over. Two versions of Python give two texts.

    Raises:
        ValueError: this Python came without the sources.

    Example:
        >>> stdlib_text(4).shape
        torch.Size([4])
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        if len(text) >= size:
            break
        text += path.read_bytes()
    if not text:
        raise ValueError(f"no Python sources in {folder}, which should hold the standard library")
    text *= -(-size // len(text))
    return torch.frombuffer(text[:size], dtype=torch.uint8).long()
