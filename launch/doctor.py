"""`ringattn doctor`: what is here, which backend and transport would answer, and what does not work.

Every line of the second part is a small call that was made now, not a guess: attention on each backend, a ring of two
ranks on each device.
"""

import importlib.util
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from ringattn import attention, ring_attention
from ringattn.comm import get_comm, group_name
from ringattn.dispatch import BACKENDS, choose_backend, refusal
from ringattn.launch.options import make_parser
from ringattn.launch.spawn import run
from ringattn.launch.table import plain_lines

PACKAGES = ("torch", "triton", "einops", "numpy", "transformers", "rich", "matplotlib")
PROBE_SECONDS = 60.0
"""A ring of two ranks that takes longer is reported as one that hangs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 where something that should work does not."""
    parser = make_parser("doctor", __doc__)
    parser.add_argument("--no-ranks", action="store_true", help="start no ranks; look at this process alone")
    options = parser.parse_args(argv)
    _show("versions", versions())
    _show("devices", devices())
    checks = backends()
    if not options.no_ranks:
        checks += rings()
    _show("answers", [row for row, _ in checks])
    return int(any(failed for _, failed in checks))


def _show(title: str, rows: Sequence[Sequence[str]]) -> None:
    print("\n".join([title, *(f"  {line}" for line in plain_lines(rows, numbers=False)), ""]))


def versions() -> list[tuple[str, str]]:
    """ringattn, Python and what they build on."""
    rows = [("ringattn", metadata.version("ringattn") if _installed("ringattn") else "from a checkout")]
    rows.append(("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"))
    rows += [(name, metadata.version(name) if _installed(name) else "not installed") for name in PACKAGES]
    if torch.version.cuda:
        rows.append(("cuda, of torch", torch.version.cuda))
    if dist.is_available() and dist.is_nccl_available():
        rows.append(("nccl", ".".join(map(str, torch.cuda.nccl.version()))))
    return rows


def devices() -> list[tuple[str, str]]:
    """Cores and cards, and how the cards reach each other."""
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"
    rows = [("cpu", threads)]
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{card.name}, sm_{card.major}{card.minor}, {card.total_memory / 2**30:.0f} GiB"))
    pairs = [(a, b) for a in range(torch.cuda.device_count()) for b in range(torch.cuda.device_count()) if a != b]
    if pairs:
        reached = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        rows.append(("links", f"{reached} of {len(pairs)} pairs of cards reach each other's memory"))
    if not torch.cuda.is_available():
        rows.append(("cuda", "no card that torch can see: backends cpu and reference answer"))
    return rows


Check = tuple[tuple[str, str, str], bool]
"""A row of the table, and whether it is a fault."""


def backends() -> list[Check]:
    """Which backend answers on each device, and whether each can."""
    checks: list[Check] = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        x = torch.randn(1, 2, 32, 64, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
        chosen = choose_backend(None, x, x, x)
        checks.append(_probe(f"attention on {device}", partial(_attend, x, None), f"by backend {chosen}"))
        for name in BACKENDS[device]:
            reason = refusal(name, x, x, x, 0.0)
            if reason:
                advice = (
                    "pip install 'ringattn[interpret]' (Linux)" if importlib.util.find_spec("triton") is None else ""
                )
                checks.append(
                    ((f"backend {name} on {device}", "refuses", "; ".join(filter(None, (reason, advice)))), False)
                )
            elif name != chosen:
                checks.append(_probe(f"backend {name} on {device}", partial(_attend, x, name), "by name"))
    return checks


def _attend(x: torch.Tensor, backend: str | None) -> None:
    leaf = x.clone().requires_grad_()
    out: Any = attention(leaf, leaf, leaf, mask="causal", backend=backend)
    out.sum().backward()
    assert leaf.grad is not None and bool(leaf.grad.isfinite().all()), "gradients are not finite"


def rings() -> list[Check]:
    """A ring of two ranks on each device, with the transport that would be chosen."""
    checks = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        checks.append(_probe(f"ring of 2 ranks on {device}", partial(_two_ranks, device), ""))
    return checks


def _two_ranks(device: str) -> str:
    return run(_ring, 2, device, device=device, timeout=PROBE_SECONDS)[0]


def _ring(device: str) -> str:
    """On each of two ranks: the ring gives what one device gives. Returns how its blocks travelled."""
    q = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    rows = slice(32 * dist.get_rank(), 32 * dist.get_rank() + 32)
    out: Any = ring_attention(*(x[:, :, rows] for x in (q, q, q)), mask="causal")
    whole: Any = attention(q, q, q, mask="causal")
    error = (out - whole[:, :, rows]).abs().max().item()
    if not error < 1e-2:
        raise ValueError(f"a ring of two ranks is off by {error:.1e}")
    comm = get_comm(group_name(None))
    return f"by transport {comm.default_transport(q.device)}, group backend {dist.get_backend()}"


def _probe(what: str, call: Callable[[], Any], how: str) -> Check:
    begin = time.perf_counter()
    try:
        said = call() or how
    except Exception as error:  # whatever it is, it is the answer to the question
        first = str(error).strip().splitlines() or [""]
        return (what, "FAILS", f"{type(error).__name__}: {first[-1]}; run it alone for the whole traceback"), True
    return (what, "works", f"{said}, {time.perf_counter() - begin:.1f} s"), False


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
