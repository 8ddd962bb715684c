"""Which backend answers a call is decided here and nowhere else."""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

BACKENDS = {"cuda": ("triton", "reference"), "cpu": ("cpu", "reference")}
"""Backends by device type, the preferred one first; each is the module of that name in `ringattn.backends`."""


def load_backend(name: str) -> ModuleType:
    """The backend module of that name; imports it."""
    return import_module(f"ringattn.backends.{name}")


def choose_backend(name: str | None, q: Tensor, k: Tensor, v: Tensor, softcap: float = 0.0) -> str:
    """The backend that answers a call: the one asked for, or the first of the device's that takes these tensors.

    Args:
        name: a backend, or None (or "") to choose.
        q, k, v: (B, H, S, D), (B, G, S, D), (B, G, S, Dv).
        softcap: as in `ring_attention`, 0.0 for none.

    Raises:
        ValueError: an unknown name, or one that cannot take these tensors, with the reason. It never falls back.

    Example:
        >>> import torch
        >>> x = torch.zeros(1, 1, 4, 8, dtype=torch.float64)
        >>> choose_backend("reference", x, x, x)
        'reference'
    """
    if name is None or name == "":
        preferred = BACKENDS.get(q.device.type, ("reference",))
        return next(other for other in preferred if refusal(other, q, k, v, softcap) is None)
    names = sorted({other for others in BACKENDS.values() for other in others})
    check_choice("backend", name, names)
    reason = refusal(name, q, k, v, softcap)
    if reason:
        raise ValueError(f"backend {name!r} cannot take this: {reason}; choose one of {', '.join(names)}, or None")
    return name


def refusal(name: str, q: Tensor, k: Tensor, v: Tensor, softcap: float) -> str | None:
    """Why a backend cannot take these tensors, or None; a backend that cannot be imported refuses all."""
    try:
        return load_backend(name).refusal(q, k, v, softcap)
    except ImportError as error:
        return str(error)


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """The value, if it is one of the choices; raises ValueError that names both otherwise."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(map(str, choices))}")
    return value
