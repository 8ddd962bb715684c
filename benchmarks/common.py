"""The timing protocol of every benchmark: check each result first, interleave what is compared, report medians.

    bench = Benchmark("merge")
    bench.compare(
        shape="16k x 4096",
        dtype="bfloat16",
        variants={"ours": lambda turn: ours(inputs[turn % 4]), "torch": lambda turn: peer(inputs[turn % 4])},
        check=against(expected=[exact], baseline=[peer(inputs[0])]),
        work=Work(bytes=n),
        peer="torch",
    )
    raise SystemExit(bench.finish())

A variant is called with a turn number, from which it picks its inputs (so that repeated calls do not measure the
cache), and returns what it computed. `check` sees the result of turn 0; a variant that fails it gets a row with its
errors and no time, and `finish` returns 1. Run from the root of the checkout: `python benchmarks/bench_x.py`.
"""

import datetime
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"

Variant = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of one result against float64: largest absolute, the same over the largest magnitude, and the verdict."""

    max_abs: float
    max_rel: float
    ok: bool


@dataclass(frozen=True, slots=True)
class Work:
    """What one call has to do: floating-point operations, or bytes that must move; the rate is printed from it."""

    flops: float = 0.0
    bytes: float = 0.0

    def rate(self, seconds: float) -> str:
        """The rate in TFLOP/s where operations are given, otherwise in GB/s (of 1e9 bytes)."""
        if self.flops:
            return f"{self.flops / seconds / 1e12:.1f} TFLOP/s"
        return f"{self.bytes / seconds / 1e9:.1f} GB/s" if self.bytes else ""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `seconds` is None for a result that failed its check or a variant that cannot run."""

    shape: str
    dtype: str
    variant: str
    max_abs: float | None
    max_rel: float | None
    seconds: float | None
    spread: float | None
    rate: str
    peer: str
    ratio: float | None
    note: str


Check = Callable[[Any], Errors]


def against(
    expected: Sequence[Tensor], baseline: Sequence[Tensor] | None = None, factor: float = 2.0, slack: float = 0.0
) -> Check:
    """A check by FlashAttention's rule: the error stays below `factor` times that of a same-dtype computation.

    Args:
        expected: the exact results, float64.
        baseline: results of a trusted computation in the variants' own dtype; None bounds by `slack` alone.
        factor: how much worse than the baseline a variant may be, by largest absolute error.
        slack: added to the bound, as a share of the largest expected magnitude.

    Returns:
        A check for results that are one tensor or a sequence of as many tensors.
    """

    def check(result: Any) -> Errors:
        tensors = [result] if isinstance(result, Tensor) else list(result)
        assert len(tensors) == len(expected), f"{len(tensors)} results for {len(expected)} expected"
        worst, relative, ok = 0.0, 0.0, True
        for index, (got, exact) in enumerate(zip(tensors, expected, strict=True)):
            error, share = max_errors(got, exact)
            bound = slack * _largest(exact)
            if baseline is not None:
                bound += factor * max_errors(baseline[index], exact)[0]
            worst, relative, ok = max(worst, error), max(relative, share), ok and error <= bound
        return Errors(worst, relative, ok)

    return check


def max_errors(got: Tensor, exact: Tensor) -> tuple[float, float]:
    """Largest absolute error, and that over the largest magnitude of `exact`; NaN anywhere gives inf.

    Equal infinities have error 0 (the log-sum-exp of a row without keys).
    """
    if got.shape != exact.shape:
        return math.inf, math.inf
    wide = got.to(device=exact.device, dtype=exact.dtype)
    error = torch.where(wide == exact, 0.0, (wide - exact).abs()).nan_to_num(nan=math.inf)
    worst = error.max().item() if error.numel() else 0.0
    return worst, worst / _largest(exact) if worst else 0.0


def _largest(exact: Tensor) -> float:
    finite = exact.abs().nan_to_num(nan=0.0, posinf=0.0)
    return (finite.max().item() if finite.numel() else 0.0) or 1.0


def measure(
    variants: Mapping[str, Variant],
    device: torch.device | str,
    *,
    rounds: int = 7,
    round_seconds: float = 0.01,
    graph: int = 0,
) -> dict[str, list[float]]:
    """Time variants in turn, round after round, so that a drift of the machine meets all of them alike.

    Args:
        variants: what to call, by name.
        device: CUDA devices are timed with events, others with the host's clock.
        rounds: times each variant is measured.
        round_seconds: a round repeats the call until it is about this long.
        graph: on CUDA, capture that many calls (turns 0 to graph - 1) in a CUDA graph and time its replays; 0 calls.

    Returns:
        Seconds a call, one entry a round, by name.
    """
    device = torch.device(device)
    runs = {name: _captured(run, graph) if graph else run for name, run in variants.items()}
    repeats = {}
    for name, run in runs.items():
        once = min(_seconds(run, 1, turn, device) for turn in range(3))  # warms up as well
        repeats[name] = max(1, min(10_000, round(round_seconds / max(once, 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in variants}
    turn = 0
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_seconds(run, repeats[name], turn, device) / repeats[name] / (graph or 1))
        turn += max(repeats.values())
    return times


def _captured(run: Variant, calls: int) -> Variant:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for turn in range(calls):
            run(turn)
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for turn in range(calls):
            run(turn)
    return lambda turn: captured.replay()


def _seconds(run: Variant, repeats: int, turn: int, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        for index in range(repeats):
            run(turn + index)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    for index in range(repeats):
        run(turn + index)
    return time.perf_counter() - begin


class Benchmark:
    """Collects the rows of one benchmark, prints them, and saves them with the card, the date and the command.

    Args:
        name: of the file, `results/<name>_<card>_<date>.json`.
        device: "cuda" or "cpu"; by default the first if there is one.
        results: folder to save in.
    """

    def __init__(self, name: str, device: str | None = None, results: Path = RESULTS) -> None:
        self.name = name
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.results = results
        self.rows: list[Row] = []
        self.failed = False

    def compare(
        self,
        shape: str,
        dtype: str,
        variants: Mapping[str, Variant],
        check: Check | Mapping[str, Check],
        *,
        work: Work = Work(),
        peer: str = "",
        **timing: Any,
    ) -> dict[str, float]:
        """Check the variants, time those that are right, and add a row for each.

        Args:
            shape, dtype: as printed.
            variants: what to compare, by name; one that raises gets a row with the error and no time.
            check: what a result must satisfy, one for all or one for each name (see `against`).
            work: of one call, for the rate column.
            peer: the variant that the others are compared with; the ratio is its time over theirs.
            timing: `rounds`, `round_seconds` and `graph` of `measure`.

        Returns:
            Median seconds by name, of the variants that passed.
        """
        sound: dict[str, Errors] = {}
        for name, run in variants.items():
            errors = self._checked(shape, dtype, name, run, check if callable(check) else check[name])
            if errors is not None:
                sound[name] = errors
        times = measure({name: variants[name] for name in sound}, self.device, **timing)
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        for name, median in medians.items():
            spread = (max(times[name]) - min(times[name])) / median
            versus, ratio = (peer, medians[peer] / median) if peer in medians and name != peer else ("", None)
            max_abs, max_rel = sound[name].max_abs, sound[name].max_rel
            self._add(
                Row(shape, dtype, name, max_abs, max_rel, median, spread, work.rate(median), versus, ratio, note="")
            )
        return medians

    def _checked(self, shape: str, dtype: str, name: str, run: Variant, check: Check) -> Errors | None:
        """The errors of a variant that is right; otherwise its row without a time, and None."""
        try:
            errors = check(run(0))
        except Exception as error:  # a peer that cannot take a shape must not end the run
            self._refuse(shape, dtype, name, None, f"{type(error).__name__}: {error}"[:160])
            return None
        if errors.ok:
            return errors
        self._refuse(shape, dtype, name, errors, "failed its check, not timed")
        return None

    def _refuse(self, shape: str, dtype: str, name: str, errors: Errors | None, note: str) -> None:
        self.failed = self.failed or errors is not None
        absolute, relative = (errors.max_abs, errors.max_rel) if errors else (None, None)
        self._add(Row(shape, dtype, name, absolute, relative, None, None, "", "", None, note))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print(format_row(row), flush=True)

    def finish(self, **extra: Any) -> int:
        """Print the table, save it with `extra` as JSON, and return the exit status: 1 if a result was wrong."""
        print("\n" + "\n".join([HEADER, *map(format_row, self.rows)]))
        facts = describe(self.device)
        record = {
            "name": self.name,
            **facts,
            **extra,
            "ok": not self.failed,
            "rows": [asdict(row) for row in self.rows],
        }
        self.results.mkdir(parents=True, exist_ok=True)
        path = self.results / f"{self.name}_{facts['card'].replace(' ', '-')}_{facts['date'][:10]}.json"
        path.write_text(json.dumps(_finite(record), indent=1, allow_nan=False) + "\n")
        print(f"saved {path.name}")
        return int(self.failed)


HEADER = (
    f"{'Shape':<44} | {'variant':<16} | {'dtype':<8} | {'max abs':>9} | {'max rel':>9} | {'latency':>10} | "
    f"{'rate':>15} | against"
)


def format_row(row: Row) -> str:
    """One line of the table under `HEADER`."""
    against_peer = f"{row.peer} {row.ratio:.3f}x" if row.ratio else row.note
    return (
        f"{row.shape:<44} | {row.variant:<16} | {row.dtype:<8} | {_scientific(row.max_abs):>9} | "
        f"{_scientific(row.max_rel):>9} | {_latency(row.seconds):>10} | {row.rate:>15} | {against_peer}"
    )


def describe(device: torch.device) -> dict[str, Any]:
    """The facts that a figure needs beside it: card, date, command, versions, threads."""
    cuda = device.type == "cuda"
    program = os.path.relpath(sys.argv[0], Path(__file__).parent.parent)
    return {
        "card": torch.cuda.get_device_name(device).removeprefix("NVIDIA ") if cuda else _processor(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": shlex.join(["python", program, *sys.argv[1:]]),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    return f"{platform.machine()}-{os.cpu_count()}-cores"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as None, which JSON can hold."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scientific(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return "refused"
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"
