"""Compile every shipped kernel config for several GPUs, without one, and fail on spills, shared memory or slow code.

    python tests/compile_kernels.py --triton 3.6.0 --arch 80 90 100

A kernel module takes part by `compile_cases(arch)` (see `ringattn.kernels.config.CompileCase`), so the gate compiles
the very launches that the library makes. Results are kept in `build/compile_gate.json` by source, signature, constants
and compiler, so a second run only compiles what changed.
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "build" / "compile_gate.json"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the compiler said of one case."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    wgmma: int
    mma_sync: int
    serialized: bool
    seconds: float
    error: str = ""


def kernel_cases(arch: int, only: str) -> Iterator[tuple[str, Any]]:
    """All cases for an architecture whose `module:name` holds `only`, from every module under kernels/."""
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        module = importlib.import_module(f"ringattn.{name}")
        for case in getattr(module, "compile_cases", lambda arch: ())(arch):
            label = f"{name.removeprefix('kernels.')}:{case.name}"
            if only in label:
                yield label, case


def source_of(case: Any, arch: int) -> tuple[Any, Any, dict[str, Any]]:
    """The (source, target, options) that Triton would compile for this launch on a GPU of that architecture."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    kernel = case.launch.kernel
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"debug": False, **case.launch.options}
    bound, specialization, options = binder(**case.launch.args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    source = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source
    return source(kernel, signature, constants, attributes), target, parsed.__dict__


def compile_case(case: Any, arch: int) -> Outcome:
    """Compile one case and read the assembler's log."""
    import triton
    from triton import knobs

    source, target, options = source_of(case, arch)
    start, log = time.perf_counter(), io.StringIO()
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True  # the log is printed only when the assembler runs
    try:
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(source, target=target, options=options)
    except Exception as error:
        return Outcome(
            0,
            0,
            0,
            0,
            0,
            0,
            False,
            time.perf_counter() - start,
            f"{type(error).__name__}: {error} {error.__cause__ or ''}"[-600:],
        )
    text, ptx = log.getvalue(), compiled.asm["ptx"]
    return Outcome(
        registers=_number(r"Used (\d+) registers", text),
        spill_bytes=_number(r"(\d+) bytes spill stores", text),
        stack_bytes=_number(r"(\d+) bytes stack frame", text),
        shared_bytes=compiled.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        mma_sync=len(re.findall(r"\bmma\.sync", ptx)),
        serialized="C75" in text or "serialized" in text.lower(),
        seconds=round(time.perf_counter() - start, 1),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def verdict(case: Any, outcome: Outcome, arch: int) -> str:
    """What is wrong with a compiled case, or an empty string."""
    from ringattn.kernels.config import SHARED_MEMORY

    if outcome.error:
        return outcome.error
    faults = []
    if outcome.spill_bytes > case.spill_bytes:
        faults.append(f"spills {outcome.spill_bytes} bytes, at most {case.spill_bytes} allowed")
    if outcome.shared_bytes > SHARED_MEMORY[arch] * 1024:
        faults.append(f"{outcome.shared_bytes} bytes of shared memory, sm_{arch} has {SHARED_MEMORY[arch]} KiB")
    if outcome.serialized:
        faults.append("wgmma serialised")
    if arch == 90 and case.wgmma and (not outcome.wgmma or outcome.mma_sync):
        faults.append(f"{outcome.wgmma} wgmma and {outcome.mma_sync} mma.sync instructions")
    return "; ".join(faults)


def fingerprint(case: Any, arch: int) -> str:
    """What a result depends on: source, signature, constants, options, architecture and compiler."""
    import triton

    source, _, options = source_of(case, arch)
    return hashlib.sha256(
        f"{source.hash()} {sorted(options.items(), key=str)} {arch} {triton.__version__}".encode()
    ).hexdigest()


_forked: list[Any] = []


def compile_many(cases: list[Any], arch: int, jobs: int) -> list[Outcome]:
    """Compile cases in processes, which inherit them by fork: kernels cannot be pickled."""
    _forked[:] = cases
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        return pool.map(_compile_forked, [(index, arch) for index in range(len(cases))], chunksize=1)


def _compile_forked(job: tuple[int, int]) -> Outcome:
    index, arch = job
    return compile_case(_forked[index], arch)


def compile_all(arch: int, only: str, jobs: int) -> int:
    """Compile what the record does not hold, print a line for each case, and return the number of failures."""
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    cases = list(kernel_cases(arch, only))
    keys = [fingerprint(case, arch) for _, case in cases]
    missing = [index for index, key in enumerate(keys) if key not in known]
    outcomes = compile_many([cases[index][1] for index in missing], arch, jobs) if missing else []
    fresh = dict(zip(missing, outcomes, strict=True))
    failures = 0
    for index, (label, case) in enumerate(cases):
        outcome = fresh[index] if index in fresh else Outcome(**known[keys[index]])
        fault = verdict(case, outcome, arch)
        failures += bool(fault)
        print(
            f"sm_{arch} {label:<64} {outcome.registers:>3} regs {outcome.spill_bytes:>4} B spilled "
            f"{outcome.shared_bytes / 1024:>6.1f} KiB {outcome.seconds:>5.1f} s  {'FAIL ' + fault if fault else 'ok'}",
            flush=True,
        )
        if not outcome.error:
            known[keys[index]] = asdict(outcome)
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
    return failures


def use_triton(version: str) -> None:
    """Restart under that version of Triton where another one is installed, fetching it into build/ once."""
    import triton

    if triton.__version__ == version:
        return
    folder = ROOT / "build" / f"triton-{version}"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, f"triton=={version}"], check=True)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONPATH": path})


def main() -> int:
    """Read the arguments, compile, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", help="version to compile with; the installed one by default")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100], help="compute capabilities")
    parser.add_argument("--only", default="", help="only cases whose module:name holds this")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    if options.triton:
        use_triton(options.triton)
    failures = sum(compile_all(arch, options.only, options.jobs) for arch in options.arch)
    print(f"{failures} failures" if failures else "all compile within their bounds")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
