"""Runs the tests of the model kernels in a process with Triton's interpreter, which must be on before kernels load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("test_norm_kernels.py", "test_softmax_kernels.py", "test_rope_kernels.py", "test_swiglu_kernels.py")


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    folder = Path(__file__).parent
    program = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "-q", "-p", "no:cacheprovider", *(str(folder / name) for name in FILES)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder.parent,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
